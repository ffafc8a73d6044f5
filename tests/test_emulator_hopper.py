"""The emulator's Hopper vocabulary: mbarriers, TMA, bulk copies, wgmma, and what they forbid."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emulator import build, harness
from emulator.harness import EmulatorError
from emulator.tensor_map import TensorMap
from support import tf32

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

HEADERS = build.device_text()


def run(
    body: str,
    args: list[object],
    parameters: str,
    block: int = 128,
    cluster: int = 1,
    **options: object,
) -> None:
    """Run a kernel body with tid, 96 KiB of shared memory at `bytes` (address `base`)."""
    of_cluster = "__cluster_dims__(CONVT3D_CLUSTER, 1, 1) " if cluster > 1 else ""
    text = f"""{HEADERS}
namespace convt3d {{
extern "C" __global__ void {of_cluster}kernel({parameters}) {{
  extern __shared__ __align__(1024) unsigned char bytes[];
  float* floats = reinterpret_cast<float*>(bytes);
  const uint32_t base = shared_address(bytes), barriers = base + 90 * 1024;
  const int tid = threadIdx.x, lane = tid % 32;
#line 1 "body.cu"
{body}
}}
}}
"""
    macros = {"CONVT3D_CLUSTER": cluster} if cluster > 1 else {}
    harness.launch("kernel", text, macros, cluster, block, 96 * 1024, args, **options)


def poisoned(*shape: int) -> torch.Tensor:
    tensor = torch.empty(shape)
    harness.poison(tensor)
    return tensor


START = """
if (tid == 0) {
  for (int i = 0; i < 4; ++i) mbarrier_init(barriers + 8 * i, i < 2 ? 1 : 96);
  mbarrier_init_fence();
}
__syncthreads();
"""

# Warp 3 fills a ring of two buffers; warps 0 to 2 read it. Barriers 0, 1: full; 2, 3: empty.
RING = (
    START
    + """
const int warp = tid / 32;
for (int round = 0; round < 6; ++round) {
  const int slot = round % 2;
  const uint32_t full = barriers + 8 * slot, empty = full + 16, buffer = base + 512 * slot;
  if (warp == 3) {
    if (lane == 0) {
      if (round >= 2) mbarrier_wait(empty, (round / 2 - 1) & 1);
      mbarrier_expect(full, 384);
      bulk_copy(buffer, x + 96 * round, 384, full);
    }
  } else {
    mbarrier_wait(full, round / 2 & 1);
    y[96 * round + tid] = float_of(load_shared(buffer + 4 * ((tid + 40) % 96)));
    mbarrier_arrive(empty);
  }
}
"""
)
RING_ARGUMENTS = "const float* x, float* y"


@pytest.mark.parametrize("order", [0, 1, 5, 6])
def test_ring_of_bulk_copies(order: int) -> None:
    x, y = torch.randn(6, 96), poisoned(6, 96)
    run(RING, [x, y], RING_ARGUMENTS, order=order)
    torch.testing.assert_close(y, x.roll(-40, 1), rtol=0, atol=0)


RING_BUGS = {
    "no wait for full": (
        "mbarrier_wait(full, round / 2 & 1);",
        "",
        "missing (mbarrier_wait: .* asynchronous copy|__syncthreads: .* writes shared byte)",
    ),
    "wrong parity of full": ("mbarrier_wait(full, round / 2 & 1)", "mbarrier_wait(full, 1)", ""),
    "no wait for empty": ("if (round >= 2) mbarrier_wait", "if (round >= 9) mbarrier_wait", ""),
    "one lane of a warp arrives": (
        "mbarrier_arrive(empty)",
        "__syncwarp(); for (int i = 0; i < 32 && lane == 0; ++i) mbarrier_arrive(empty)",
        "missing arrival of every lane: thread 96 writes",
    ),
    "an arrival too few": (
        "mbarrier_arrive(empty)",
        "if (tid != 32) mbarrier_arrive(empty)",
        "deadlock: (.|\\n)*mbarrier at shared address .*body.cu:3.*1 of 96 arrivals",
    ),
    "an arrival too many": (
        "mbarrier_arrive(empty)",
        "mbarrier_arrive(empty); if (tid == 1) mbarrier_arrive(empty)",
        "one arrival too many|deadlock|missing",
    ),
    "bytes expected and not sent": (
        "mbarrier_expect(full, 384)",
        "mbarrier_expect(full, 400)",
        "deadlock: (.|\\n)*16 bytes to come",
    ),
    "bytes sent and not expected": (
        "mbarrier_expect(full, 384)",
        "mbarrier_expect(full, 368)",
        "16 bytes more have landed than were expected",
    ),
    "no fence after initialisation": ("mbarrier_init_fence();", "", "missing mbarrier_init_fence"),
    "no barrier after initialisation": (
        "__syncthreads();",
        "",
        "no (barrier|initialised)",
    ),
    "misaligned size": ("x + 96 * round, 384", "x + 96 * round, 380", "multiple of 16"),
    "misaligned source": ("x + 96 * round, 384", "x + 96 * round + 1, 384", "aligned to 16"),
    "misaligned destination": ("bulk_copy(buffer,", "bulk_copy(buffer + 8,", "aligned to 16"),
    "source out of bounds": ("x + 96 * round, 384", "x + 96 * round + 4, 384", "out of bounds"),
    "barrier overwritten": (
        "const int warp = tid / 32;",
        "const int warp = tid / 32; if (tid == 0) store_shared(barriers, 0u); __syncthreads();",
        "overwritten: mbarrier",
    ),
    "nobody waits for the last copy": (
        "mbarrier_wait(full, round / 2 & 1);",
        "if (round == 5) break; mbarrier_wait(full, round / 2 & 1);",
        "ends with copies in flight",
    ),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", RING_BUGS)
def test_bugs_in_a_ring(name: str) -> None:
    old, new, message = RING_BUGS[name]
    assert old in RING
    x, y = torch.randn(6, 96), poisoned(6, 96)
    with pytest.raises(EmulatorError, match=message or "missing|deadlock|too many"):
        run(RING.replace(old, new), [x, y], RING_ARGUMENTS)


# One warp's lanes store, the other one's read what other lanes stored.
HAND_OVER = """
if (tid == 0) {
  mbarrier_init(barriers, 32);
  mbarrier_init_fence();
}
__syncthreads();
if (tid >= 32) {
  store_shared(base + 4 * lane, __float_as_uint(x[lane]));
  __syncwarp();
  mbarrier_arrive(barriers);
} else {
  mbarrier_wait(barriers, 0);
  y[lane] = float_of(load_shared(base + 4 * (31 - lane)));
}
"""


def test_lanes_hand_over_what_they_stored() -> None:
    x, y = torch.randn(32), poisoned(32)
    run(HAND_OVER, [x, y], RING_ARGUMENTS, block=64)
    torch.testing.assert_close(y, x.flip(0), rtol=0, atol=0)
    one = HAND_OVER.replace("(barriers, 32)", "(barriers, 1)")
    one = one.replace("mbarrier_arrive", "if (lane == 0) mbarrier_arrive")
    with pytest.raises(EmulatorError, match=r"missing arrival of every lane: thread 0 reads .* 63"):
        run(one, [x, y], RING_ARGUMENTS, block=64)


def test_polling_without_end_is_a_deadlock() -> None:
    with pytest.raises(EmulatorError, match="deadlock: threads only poll: mbarrier"):
        run(START + "while (!mbarrier_try_wait(barriers + 16, 0)) {}", [poisoned(1)], "float* y")


# ---------------------------------------------------------------- TMA


@pytest.mark.parametrize("element", ["float32", "tfloat32"])
def test_boxes_are_zero_filled_and_rounded(element: str) -> None:
    """A box that hangs over every border but one of a 5-D tensor."""
    x, y = torch.randn(2, 3, 5, 6, 8), poisoned(384)
    box = TensorMap(x, element, (8, 6, 5, 3, 2), (32, 192, 960, 2880), (8, 4, 3, 2, 2))
    body = (
        START
        + """
    if (tid == 0) {
      mbarrier_expect(barriers, 1536);
      tma_load_5d(base, map, -4, 4, -1, 2, 0, barriers);
    }
    mbarrier_wait(barriers, 0);
    for (int i = tid; i < 384; i += 128) y[i] = floats[i];
    """
    )
    run(body, [box, y], "const __grid_constant__ TensorMap map, float* y")
    padded = torch.zeros(2, 5, 12, 20, 20)
    padded[:, 1:4, 5:10, 6:12, 6:14] = tf32.rounded(x) if element == "tfloat32" else x
    wanted = padded[0:2, 3:5, 4:7, 10:14, 2:10]
    torch.testing.assert_close(y.reshape(wanted.shape), wanted, rtol=0, atol=0)


def test_box_of_every_second_row() -> None:
    """Element strides: rows 1, 3, 5, 7 of eight, of which the last lies outside."""
    x, y = torch.randn(7, 4), poisoned(4, 4)
    box = TensorMap(x, "float32", (4, 7), (16,), (4, 8), element_strides=(1, 2))
    body = (
        START
        + """
    if (tid == 0) {
      mbarrier_expect(barriers, 64);
      tma_load_2d(base, map, 0, 1, barriers);
    }
    mbarrier_wait(barriers, 0);
    if (tid < 16) y[tid] = floats[tid];
    """
    )
    run(body, [box, y], "const __grid_constant__ TensorMap map, float* y")
    torch.testing.assert_close(y[:3], x[1::2], rtol=0, atol=0)
    assert (y[3] == 0).all()


def test_swizzled_box() -> None:
    """Rows of 128 bytes: 16-byte piece j of row r lies at piece j ^ (r % 8)."""
    x, y = torch.randn(16, 32), poisoned(16, 8, 4)
    box = TensorMap(x, "float32", (32, 16), (128,), (32, 16), swizzle=128)
    body = (
        START
        + """
    if (tid == 0) {
      mbarrier_expect(barriers, 2048);
      tma_load_2d(base, map, 0, 0, barriers);
    }
    mbarrier_wait(barriers, 0);
    for (int i = tid; i < 512; i += 128) y[i] = floats[i];
    """
    )
    run(body, [box, y], "const __grid_constant__ TensorMap map, float* y")
    pieces = x.reshape(16, 8, 4)
    for row in range(16):
        for piece in range(8):
            torch.testing.assert_close(y[row, piece ^ (row % 8)], pieces[row, piece])


STORE = """
for (int i = tid; i < 64; i += 128) floats[i] = x[i];
fence_async_proxy();
__syncthreads();
if (tid == 0) {
  tma_store_5d_streaming(map, 4, 0, 0, 1, 0, base);
  bulk_commit();
  bulk_wait<0>();
}
"""


STORE_PARAMETERS = "const float* x, const __grid_constant__ TensorMap map"


def test_stored_box_leaves_the_outside_alone() -> None:
    x, y = torch.randn(2, 2, 2, 8), poisoned(2, 3, 2, 8)
    box = TensorMap(y, "float32", (8, 2, 1, 3, 2), (32, 64, 64, 192), (8, 2, 1, 2, 2))
    run(STORE, [x, box], STORE_PARAMETERS)
    torch.testing.assert_close(y[:, 1:, :, 4:], x[:, :, :, :4], rtol=0, atol=0)
    assert torch.isnan(y[:, :1]).all() and torch.isnan(y[..., :4]).all()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("fence_async_proxy();", "", "missing fence_async_proxy"),
        ("bulk_wait<0>();", "", "missing bulk_wait"),
        ("__syncthreads();", "", "missing __sync"),
        ("map, 4, 0", "map, 3, 0", "innermost coordinate 3 is not at a multiple of 16 bytes"),
        ("0, base);", "0, base + 64);", "not aligned to 128"),
    ],
)
def test_bugs_in_a_store(old: str, new: str, message: str) -> None:
    x, y = torch.randn(2, 2, 2, 8), poisoned(2, 3, 2, 8)
    box = TensorMap(y, "float32", (8, 2, 1, 3, 2), (32, 64, 64, 192), (8, 2, 1, 2, 2))
    assert old in STORE
    with pytest.raises(EmulatorError, match=message):
        run(STORE.replace(old, new), [x, box], STORE_PARAMETERS)


def test_tensor_maps_obey_the_rules_of_the_driver() -> None:
    x = torch.zeros(4, 6, 10)
    for extents, strides, box in [
        ((10, 6, 4), (40, 240), (4, 2, 2)),  # rows of 40 bytes
        ((8, 6, 4), (48, 240), (3, 2, 2)),  # boxes with rows of 12 bytes
        ((8, 6, 4), (48, 240), (4, 300, 2)),
        ((8, 6, 4), (48,), (4, 2, 2)),
        ((8, 6, 4, 1, 1, 1), (48,) * 5, (4,) * 6),
    ]:
        with pytest.raises(ValueError):
            TensorMap(x, "float32", extents, strides, box)
    for steps in ((2, 1), (1, 9), (1,)):
        with pytest.raises(ValueError):
            TensorMap(x, "float32", (8, 6), (48,), (4, 4), element_strides=steps)
    with pytest.raises(ValueError):
        TensorMap(x, "float32", (64, 2), (256,), (64, 2), swizzle=128)
    with pytest.raises(ValueError):
        TensorMap(x.view(-1)[1:], "float32", (8,), (), (4,))


# ---------------------------------------------------------------- wgmma

DTYPES = {"tf32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

FILL = """
const int words = depth * int(sizeof(*a)) / 4, row_words = words;
const uint32_t* a_words = reinterpret_cast<const uint32_t*>(a);
const uint32_t* b_words = reinterpret_cast<const uint32_t*>(b);
// [16-byte piece along K][row]: core matrices of eight rows follow each other.
for (int i = tid; i < 64 * words; i += 128) {
  const int row = i / words, word = i % words;
  store_shared(base + (word / 4 * 64 + row) * 16 + word % 4 * 4, a_words[i]);
}
const uint32_t b_base = base + 64 * 64;
for (int i = tid; i < N * words; i += 128) {
  const int row = i / words, word = i % words;
  store_shared(b_base + (word / 4 * N + row) * 16 + word % 4 * 4, b_words[i]);
}
fence_async_proxy();
__syncthreads();
float d[N / 2];
for (int i = 0; i < N / 2; ++i) d[i] = float(i);
"""
FINISH = """
const int row = tid / 32 * 16 + lane / 4;
for (int i = 0; i < N / 2; ++i)
  y[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i] - float(i);
"""
SHARED_A = """
wgmma_fence();
for (int step = 0; step < depth * int(sizeof(*a)) / 32; ++step)
  wgmma_TYPE_ss<N>(d, matrix_descriptor(base + step * 2 * 64 * 16, 64 * 16, 128),
                   matrix_descriptor(b_base + step * 2 * N * 16, N * 16, 128));
wgmma_commit();
wgmma_wait<0>();
"""
REGISTER_A = """
uint32_t fragment[2][4];
for (int step = 0; step < 2; ++step) {
  const int row = tid / 32 * 16 + lane / 4;
  for (int i = 0; i < 4; ++i)
    fragment[step][i] = a_words[(row + i % 2 * 8) * words + step * 8 + i / 2 * 4 + lane % 4];
}
wgmma_fence();
for (int step = 0; step < 2; ++step) {
  wgmma_TYPE_rs<N>(d, fragment[step],
                   matrix_descriptor(b_base + step * 2 * N * 16, N * 16, 128));
  wgmma_commit();
}
wgmma_wait<0>();
"""


def wgmma(body: str, kind: str, columns: int, **options: object) -> tuple[torch.Tensor, ...]:
    """Run a body on A (64, depth) and B (columns, depth) with two steps; returns y and A B^T."""
    generator = torch.Generator().manual_seed(3)
    depth = 16 if kind == "tf32" else 32
    a = torch.randn(64, depth, generator=generator).to(DTYPES[kind])
    b = torch.randn(columns, depth, generator=generator).to(DTYPES[kind])
    y = poisoned(64, columns)
    scalar = "float" if kind == "tf32" else "uint16_t"
    text = f"constexpr int N = {columns}, depth = {depth};\n{body}".replace("TYPE", kind)
    parameters = f"const {scalar}* a, const {scalar}* b, float* y"
    run(text, [_raw(a), _raw(b), y], parameters, **options)

    def operand(t: torch.Tensor) -> torch.Tensor:
        if kind != "tf32":
            return t.double()
        return torch.from_numpy((t.numpy().view(np.uint32) & 0xFFFFE000).view(np.float32)).double()

    return y, operand(a) @ operand(b).T


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("columns", [8, 24, 96])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("source", ["shared", "registers"])
def test_products(source: str, kind: str, columns: int) -> None:
    body = FILL + (SHARED_A if source == "shared" else REGISTER_A) + FINISH
    y, wanted = wgmma(body, kind, columns)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=2e-5)


def test_product_of_a_swizzled_box() -> None:
    """B by TMA under the 128-byte swizzle, several K steps within a row, from row 8 on."""
    a, b, y = torch.randn(64, 32), torch.randn(24, 32), poisoned(64, 16)
    box = TensorMap(b, "tfloat32", (32, 24), (128,), (32, 24), swizzle=128)
    body = (
        START
        + """
    constexpr int N = 16;
    if (tid == 0) {
      mbarrier_expect(barriers, 24 * 128);
      tma_load_2d(base, map, 0, 0, barriers);
    }
    mbarrier_wait(barriers, 0);
    float d[N / 2];
    for (int i = 0; i < N / 2; ++i) d[i] = float(i);
    uint32_t fragment[4][4];
    for (int step = 0; step < 4; ++step)
      for (int i = 0; i < 4; ++i)
        fragment[step][i] = round_tf32(
            a[(tid / 32 * 16 + lane / 4 + i % 2 * 8) * 32 + step * 8 + i / 2 * 4 + lane % 4]);
    wgmma_fence();
    for (int step = 0; step < 4; ++step)
      wgmma_tf32_rs<N>(d, fragment[step], matrix_descriptor_128b(base + 1024 + 32 * step));
    wgmma_commit();
    wgmma_wait<0>();
    """
        + FINISH
    )
    run(body, [box, a, y], "const __grid_constant__ TensorMap map, const float* a, float* y")
    wanted = tf32.rounded(a).double() @ tf32.rounded(b).double()[8:].T
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=2e-5)


WGMMA_BUGS = {
    "accumulator read before the wait": (
        "wgmma_wait<0>();",
        "d[0] += d[1]; wgmma_wait<0>();",
        "missing wgmma_wait: an accumulator register of a pending product is read",
    ),
    "accumulator written before the wait": (
        "wgmma_wait<0>();",
        "d[3] = 0; wgmma_wait<0>();",
        "missing wgmma_wait: an accumulator register of a pending product is written",
    ),
    "wait for one group too few": ("wgmma_wait<0>();", "wgmma_wait<1>();", "missing wgmma_wait"),
    "no wait": ("wgmma_wait<0>();", "", "missing wgmma_wait"),
    "operand register written before the wait": (
        "wgmma_wait<0>();",
        "fragment[0][2] = 7; wgmma_wait<0>();",
        "missing wgmma_wait: an A register of a pending product is written",
    ),
    "no fence": ("wgmma_fence();", "", "missing wgmma_fence"),
    "no proxy fence": ("fence_async_proxy();", "", "missing fence_async_proxy"),
    "no barrier after the fill": ("__syncthreads();", "", "missing __sync"),
    "operand overwritten before the wait": (
        "wgmma_wait<0>();",
        "if (tid < 32) store_shared(b_base + 4 * tid, 0u); wgmma_wait<0>();",
        "missing __syncthreads|missing fence_async_proxy",
    ),
    "operand overwritten without a barrier after the wait": (
        "wgmma_wait<0>();",
        "wgmma_wait<0>(); if (tid < 32) store_shared(b_base + 4 * tid, 0u);",
        "missing __syncthreads: .*wgmma of warp",
    ),
    "only one warp": (
        "wgmma_fence();",
        "if (tid >= 32) return; wgmma_fence();",
        "deadlock: (.|\\n)*wgmma_tf32|finished",
    ),
    "descriptors differ": (
        "N * 16, 128));",
        "N * 16 + (tid == 5 ? 16 : 0), 128));",
        "descriptors differ between threads",
    ),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", WGMMA_BUGS)
def test_bugs_in_a_product(name: str) -> None:
    old, new, message = WGMMA_BUGS[name]
    body = FILL + REGISTER_A + FINISH
    assert old in body
    with pytest.raises(EmulatorError, match=message):
        wgmma(body.replace(old, new), "tf32", 24)


# ---------------------------------------------------------------- registers and named barriers


def test_registers_move_between_warpgroups() -> None:
    body = "if (tid < 128) register_decrease<DOWN>();\nelse register_increase<UP>();\ny[tid] = 1;"

    def go(down: int, up: int) -> None:
        text = body.replace("DOWN", str(down)).replace("UP", str(up))
        run(text, [poisoned(384)], "float* y", block=384)

    go(24, 240)
    for down, up, message in [
        (24, 248, "deadlock: (.|\n)*setmaxnreg"),
        (20, 240, "no multiple of 8 from 24 to 256"),
        (176, 240, "register_decrease: from 168 registers to 176"),
        (24, 160, "register_increase: from 168 registers to 160"),
    ]:
        with pytest.raises(EmulatorError, match=message):
            go(down, up)


def test_named_barriers_order_only_their_threads() -> None:
    body = """
    floats[tid] = float(tid);
    if (tid < 64) named_barrier_sync(1, 64);
    else named_barrier_sync(2, 64);
    y[tid] = floats[NEIGHBOUR];
    """
    y = poisoned(128)
    run(body.replace("NEIGHBOUR", "tid ^ 32"), [y], "float* y")
    torch.testing.assert_close(y, (torch.arange(128) ^ 32).float(), rtol=0, atol=0)
    with pytest.raises(EmulatorError, match="missing __syncthreads"):
        run(body.replace("NEIGHBOUR", "tid ^ 64"), [y], "float* y")


# Each block of a cluster adds up what all of them have in shared memory.
CLUSTER = """
store_shared(base + 4 * tid, blockIdx.x + tid);
cluster_sync();
uint32_t sum = 0;
for (int rank = 0; rank < 3; ++rank) sum += load_shared_of(base + 4 * (tid ^ 1), rank);
y[blockIdx.x * 64 + tid] = float(sum);
cluster_sync();
"""


def test_blocks_of_a_cluster_read_each_other() -> None:
    y = poisoned(3, 64)
    run(CLUSTER, [y], "float* y", block=64, cluster=3)
    want = 3.0 * (torch.arange(64) ^ 1) + 3.0
    torch.testing.assert_close(y, want.expand(3, 64), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cluster_sync();\nuint32_t", "__syncthreads();\nuint32_t", "missing|races|without"),
        ("rank < 3", "rank < 4", "no block 3"),
        ("sum);\ncluster_sync();", "sum);", "missing cluster_sync: block . of the cluster ends"),
        (
            "uint32_t sum",
            "if (blockIdx.x == 0) return; __syncthreads(); uint32_t sum",
            "block 0 of its cluster, which has ended",
        ),
    ],
)
def test_bugs_in_a_cluster(old: str, new: str, message: str) -> None:
    assert old in CLUSTER
    with pytest.raises(EmulatorError, match=message):
        run(CLUSTER.replace(old, new), [poisoned(3, 64)], "float* y", block=64, cluster=3)

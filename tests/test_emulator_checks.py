"""The emulator's own checks: each forbidden thing, in a small kernel, is reported by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emulator import build, harness
from emulator.build import DEVICE, BuildError
from emulator.harness import EmulatorError, Flavour
from test_emulator_kernels import sampled

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

INTRINSICS = (DEVICE / "ptx.cuh").read_text()


def run(
    body: str,
    *,
    n: int = 64,
    block: int = 64,
    grid: int = 1,
    shared: int = 1024,
    file_scope: str = "",
    earlier: tuple[int, int] | None = None,
    **options: object,
) -> torch.Tensor:
    """Run a kernel body with x[n], y[n], n, tid, lane, and 1 KiB of shared bytes and floats.

    ``earlier``: what launches that may still run do to x and to y.
    """
    text = f"""{INTRINSICS}
namespace convt3d {{
{file_scope}
extern "C" __global__ void kernel(const float* __restrict__ x, float* __restrict__ y, int n) {{
  extern __shared__ __align__(128) unsigned char bytes[];
  float* floats = reinterpret_cast<float*>(bytes);
  const uint32_t base = shared_address(bytes);
  const int tid = threadIdx.x, lane = tid % 32, global = blockIdx.x * blockDim.x + tid;
#line 1 "body.cu"
{body}
}}
}}
"""
    x, y = torch.arange(n, dtype=torch.float32), torch.empty(n)
    harness.poison(y)
    before = None
    if earlier is not None:
        before = dict(zip((x.data_ptr(), y.data_ptr()), earlier, strict=True))
    arguments = [x, y, np.int32(n)]
    harness.launch("kernel", text, {}, grid, block, shared, arguments, earlier=before, **options)
    return y


COPY_AROUND = """
async_copy<4>(base + 4 * tid, x + tid, tid != 5);
async_commit();
{wait}
{barrier}
y[tid] = floats[(tid + 33) % 64];
"""


def test_copy_around_the_block() -> None:
    y = run(COPY_AROUND.format(wait="async_wait<0>();", barrier="__syncthreads();"))
    wanted = (torch.arange(64.0) + 33) % 64
    wanted[wanted == 5] = 0  # not valid: zero
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)


def test_shared_and_local_memory_start_poisoned() -> None:
    y = run("float local[4]; y[tid] = tid < 32 ? floats[tid] : local[tid % 4];")
    assert torch.isnan(y[:32]).all()
    assert (y[32:].abs() > 1e30).all() or torch.isnan(y[32:]).all()


FORBIDDEN = {
    "dropped async_wait": (
        COPY_AROUND.format(wait="", barrier="__syncthreads();"),
        "missing async_wait: .* shared byte",
    ),
    "wait for a later group only": (
        COPY_AROUND.format(wait="async_commit(); async_wait<2>();", barrier="__syncthreads();"),
        "missing async_wait",
    ),
    "dropped __syncthreads": (
        COPY_AROUND.format(wait="async_wait<0>();", barrier=""),
        "missing __sync",
    ),
    "__syncwarp where __syncthreads is needed": (
        COPY_AROUND.format(wait="async_wait<0>();", barrier="__syncwarp();"),
        "missing __syncthreads: .* reads shared byte .* wrote .*body.cu",
    ),
    "a buffer refilled while others read it": (
        """store_shared(base + 4 * tid, uint32_t(tid));
        __syncthreads();
        if (tid < 32) y[tid] = floats[tid];
        else floats[tid - 32] = 1;""",
        r"missing __syncthreads: thread \d+ (reads|writes) shared byte \d+, which thread",
    ),
    "two threads write one word": ("floats[tid / 2] = 1;", "missing __sync.* wrote"),
    "halves of a word are told apart, words are not": (
        "reinterpret_cast<uint16_t*>(bytes)[tid] = 1; floats[tid % 32] = 1;",
        "missing __sync",
    ),
    "two threads write one output": ("y[tid / 2] = 1;", "global byte .* wrote without"),
    "two blocks write one output": ("y[tid % 4 + 4 * (tid / 8) + tid % 8 / 4 * 32] = 1;", ""),
    "out of bounds read by one element": ("y[tid] = x[tid + 1];", "load out of bounds: byte 256"),
    "read before the tensor": ("y[tid] = x[tid - 1];", "load out of bounds: byte -4"),
    "out of bounds write": ("y[tid + (tid == 63)] = 1;", "store out of bounds: byte 256"),
    "out of bounds asynchronous copy": (
        "async_copy<16>(base + 16 * tid, x + 4 * (tid / 2), true);",
        "async_copy out of bounds: byte 256",
    ),
    "dynamic shared memory exceeded": ("floats[tid + 193] = 0;", "byte 1024 .*has 1024 bytes"),
    "shared window exceeded": ("store_shared(base + 4 * tid + 1020, 0u);", "out of bounds"),
    "not a shared address": ("store_shared(4 * tid, 0u);", "out of bounds"),
    "shared_address of a global pointer": ("store_shared(shared_address(x), 0u);", "not in shared"),
    "misaligned shared vector": ("store_shared(base + 4 * tid, 1, 2);", "aligned to 8 bytes"),
    "misaligned shared quad": (
        "uint32_t a, b, c, d; load_shared(base + 8 * tid, a, b, c, d); y[tid] = float_of(a);",
        "aligned to 16 bytes",
    ),
    "misaligned global vector": (
        "const float2 v = *reinterpret_cast<const float2*>(x + tid % 32); y[tid] = v.x + v.y;",
        "aligned to 8 bytes",
    ),
    "misaligned copy destination": (
        "async_copy<16>(base + 8 * tid, x, true);",
        "shared address .* aligned to 16 bytes",
    ),
    "misaligned copy source": (
        "async_copy<8>(base + 8 * tid, x + 1, true);",
        "global address .* aligned to 8 bytes",
    ),
    "misaligned source of a copy that reads nothing": (
        "async_copy<8>(base + 8 * tid, x + 1, false);",
        "global address .* aligned to 8 bytes",
    ),
    "misaligned ldmatrix row": (
        "uint32_t r[2]; load_matrix_x2_transposed(base + 8 * lane, r); y[tid] = float_of(r[0]);",
        "ldmatrix: shared address .* aligned to 16",
    ),
    "mma without all lanes": (
        """float c[4] = {}; uint32_t a[4] = {}, b[2] = {};
        if (lane != 7) mma_tf32(c, a, b);
        y[tid] = c[0];""",
        "lane 7 finished .* wait for it in mma_tf32 .body.cu:2",
    ),
    "mma in two branches": (
        """float c[4] = {}; uint32_t a[4] = {}, b[2] = {};
        if (lane < 16)
          mma_tf32(c, a, b);
        else
          mma_tf32(c, a, b);
        y[tid] = c[0];""",
        "divergent call: .* mma_tf32 .body.cu:5.* mma_tf32 .body.cu:3",
    ),
    "different collectives": (
        """float c[4] = {}; uint32_t a[4] = {}, b[2] = {}, r[2] = {};
        if (lane < 16) mma_tf32(c, a, b);
        else load_matrix_x2_transposed(base, r);
        y[tid] = c[0] + float_of(r[0]);""",
        "divergent call: .* ldmatrix .* mma_tf32",
    ),
    "ldmatrix without all lanes": (
        """uint32_t r[2] = {};
        if (tid != 40) load_matrix_x2_transposed(base, r);
        y[tid] = float_of(r[0]);""",
        "warp 1: lane 8 finished .* ldmatrix",
    ),
    "shuffle from a lane outside the mask": (
        "if (lane < 16) y[tid] = __shfl_sync(0xffffu, x[tid], lane + 8);",
        "__shfl_sync: lane 8 reads lane 16, which is not in the mask",
    ),
    "shuffle by a lane outside the mask": (
        "y[tid] = __shfl_sync(0xffffu, x[tid], 0);",
        "lane 16 calls it but is not in its mask",
    ),
    "shuffle with a finished lane": (
        "if (lane == 3) return; y[tid] = __shfl_xor_sync(0xffffffffu, x[tid], 1);",
        "for lane 3, which has finished|lane 3 finished the kernel",
    ),
    "barrier in a divergent warp": (
        "if (lane < 16) __syncthreads();\nelse __syncthreads();",
        "divergent __syncthreads",
    ),
    "warps at different meeting points": (
        """if (tid == 0) __syncwarp();
        else __syncthreads();""",
        "deadlock: no thread can go on(.|\\n)*__syncthreads .body.cu:2(.|\\n)*|finished",
    ),
    "named barrier that lacks a warp": (
        'if (tid < 32) emulator::barrier(3, 64, true, "barrier 3", emulator::Site::here());',
        "deadlock: no thread can go on(.|\\n)*wait in barrier 3",
    ),
    "assertion": ("assert(n == 63);", "assertion failed at line 1: n == 63"),
    "trap": ("if (tid == 9) __trap();", "__trap was reached"),
}
del FORBIDDEN["two blocks write one output"]  # needs a grid: below


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden(name: str) -> None:
    body, message = FORBIDDEN[name]
    with pytest.raises(EmulatorError, match=message) as error:
        run(body)
    assert "in block (0, 0, 0), thread (" in str(error.value)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_races_are_found_in_every_order(order: int) -> None:
    for name in ("dropped __syncthreads", "a buffer refilled while others read it"):
        with pytest.raises(EmulatorError, match="missing __sync"):
            run(FORBIDDEN[name][0], order=order)


def test_blocks_do_not_share_outputs() -> None:
    with pytest.raises(
        EmulatorError, match="race between blocks: byte 0 of argument 1 was written"
    ):
        run("y[tid % 64] = 1;", grid=2)
    with pytest.raises(EmulatorError, match=r"race between blocks: byte .* written by block 0"):
        run("if (blockIdx.x == 0) y[tid] = 1; else y[tid + 64] = y[tid];", grid=2, n=128)


def test_legal_things_are_not_reported() -> None:
    """What hardware allows: early exits, disjoint halves of a word, warps that synchronise alone,
    groups left pending, a full barrier reached from different warps' branches."""
    body = """
    if (tid >= 96) return;
    uint16_t* halves = reinterpret_cast<uint16_t*>(bytes);
    halves[tid] = uint16_t(tid);
    __syncwarp();
    const int neighbour = halves[tid ^ 1];
    if (tid < 32) { __syncthreads(); } else { __syncthreads(); }
    float* out = floats + 128;
    out[tid] = float(neighbour + halves[95 - tid]);
    for (int round = 0; round < 3; ++round) {
      __syncthreads();
      const float value = out[(tid + 32) % 96];
      __syncthreads();
      out[tid] = value;
    }
    async_copy<4>(base + 4 * (64 + tid % 64), x, tid < 64 && tid < 0);
    async_commit();
    __syncwarp();
    y[tid] = out[tid];
    """
    body = body.replace("async_copy<4>(base + 4 * (64 + tid % 64), x, tid < 64 && tid < 0);", "")
    y = run(body, n=128, block=128)
    expected = [float((t ^ 1) + 95 - t) for t in range(96)]
    torch.testing.assert_close(y[:96], torch.tensor(expected), rtol=0, atol=0)
    assert torch.isnan(y[96:]).all()


def test_arguments_must_fit_the_parameters() -> None:
    text = (
        INTRINSICS + 'extern "C" __global__ void kernel(float* y, int n, long long m, float f) {}'
    )
    y = torch.empty(4)

    def go(*args: object) -> None:
        harness.launch("kernel", text, {}, 1, 32, 0, args)

    go(y, np.int32(1), np.int64(2), np.float32(3))
    go(0, np.int32(1), np.int64(2), np.float32(3))  # a null pointer
    for args, message in [
        ((y, np.int32(1), np.int64(2)), "4 parameters, the launch 3 arguments"),
        ((y, np.int64(1), np.int64(2), np.float32(3)), "argument 1 has 8 bytes, the parameter 4"),
        ((y, np.int32(1), np.int32(2), np.float32(3)), "argument 2 has 4 bytes, the parameter 8"),
        ((y, np.int32(1), np.int64(2), 3.0), "argument 3 has 8 bytes, the parameter 4"),
        ((np.int64(7), np.int32(1), np.int64(2), np.float32(3)), "argument 0 is 8 plain bytes"),
        ((y, y, np.int64(2), np.float32(3)), "argument 1 is a tensor"),
    ]:
        with pytest.raises(EmulatorError, match=message):
            go(*args)
    with pytest.raises(TypeError):
        go(y, None, np.int64(2), np.float32(3))


def test_views_are_guarded_at_their_own_ends() -> None:
    text = (
        INTRINSICS
        + """
    extern "C" __global__ void kernel(const float* x, float* y, int shift) {
      y[threadIdx.x] = x[int(threadIdx.x) + shift];
    }"""
    )
    whole = torch.arange(96.0)
    part, y = whole[32:64], torch.zeros(32)
    harness.launch("kernel", text, {}, 1, 32, 0, [part, y, np.int32(0)])
    torch.testing.assert_close(y, part, rtol=0, atol=0)
    for shift in (-1, 1):
        with pytest.raises(EmulatorError, match="load out of bounds"):
            harness.launch("kernel", text, {}, 1, 32, 0, [part, y, np.int32(shift)])


def test_text_that_does_not_compile_is_named() -> None:
    with pytest.raises(BuildError, match=r"body\.cu:2.*error"):
        run("int a = 1;\nundeclared(a);")


SANITIZED = {
    "out of bounds read by one element": ("y[tid] = x[tid + 1];", "heap-buffer-overflow"),
    "read before the tensor": ("y[tid] = x[tid - 1];", "heap-buffer-overflow"),
    "out of bounds write": ("y[tid + (tid == 63)] = 1;", "heap-buffer-overflow"),
    "dynamic shared memory exceeded": ("floats[tid + 193] = 0;", "use-after-poison"),
    "local array exceeded": (
        "float a[4] = {1, 2, 3, 4}; y[tid] = a[n - 60 + tid / 64];",
        "out of bounds|stack-buffer-overflow",
    ),
    "integer overflow": ("y[tid] = float(n * 33554432 + tid);", "signed integer overflow"),
    "shift too far": ("y[tid] = float(1 << (n - 32));", "shift exponent 32 is too large"),
    "misaligned pointer": (
        "y[tid] = reinterpret_cast<const float2*>(x + tid % 32)->x;",
        "misaligned address|not aligned",
    ),
    "the emulator's own checks": ("if (lane != 3) __syncwarp();", "lane 3 finished"),
}


@pytest.mark.parametrize("name", sampled(list(SANITIZED), 3))
def test_sanitizers(name: str) -> None:
    body, message = SANITIZED[name]
    with pytest.raises(EmulatorError, match=message):
        run(body, flavour=Flavour.SANITIZED)


def test_sanitized_results_come_back() -> None:
    body = COPY_AROUND.format(wait="async_wait<0>();", barrier="__syncthreads();")
    torch.testing.assert_close(run(body, flavour=Flavour.SANITIZED), run(body), rtol=0, atol=0)


# ---------------------------------------------------------------- launches that overlap

READ, WRITTEN = 1, 2
WAIT, COPY = "grid_dependency_wait();", "y[tid] = x[tid];"


@pytest.mark.parametrize(
    ("body", "x", "y"),
    [
        (WAIT + COPY, WRITTEN, READ | WRITTEN),
        ("if (tid == 9) grid_dependency_wait(); __syncthreads();" + COPY, WRITTEN, WRITTEN),
        ("if (lane == 9) grid_dependency_wait(); __syncwarp();" + COPY, WRITTEN, 0),
        (COPY + WAIT, READ, 0),
    ],
)
def test_a_dependent_launch_waits(body: str, x: int, y: int) -> None:
    assert run(body, earlier=(x, y)).tolist() == list(range(64))


@pytest.mark.parametrize(
    ("body", "x", "y", "message"),
    [
        (COPY + WAIT, WRITTEN, 0, "reads byte . of argument 0, which a launch before.* writes"),
        (COPY + WAIT, 0, READ, "writes byte . of argument 1, which a launch before.* reads"),
        (COPY + WAIT, 0, WRITTEN, "writes byte . of argument 1, which a launch before.* writes"),
        ("if (tid == 9) grid_dependency_wait();" + COPY, WRITTEN, 0, "thread 0 reads"),
        (
            "if (lane == 9 && tid < 32) grid_dependency_wait(); __syncwarp();" + COPY,
            WRITTEN,
            0,
            r"thread (3[2-9]|[45]\d|6[0-3]) reads",
        ),
        (COPY, READ, 0, "no block waits"),
    ],
)
def test_a_dependent_launch_that_does_not_wait(body: str, x: int, y: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=f"missing grid_dependency_wait: .*{message}"):
        run(body, earlier=(x, y))


def test_a_launch_tells_what_it_has_touched() -> None:
    x, y, unused = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    text = f"""{INTRINSICS}
extern "C" __global__ void kernel(const float* x, float* y, float* unused) {{
  y[threadIdx.x] = x[threadIdx.x];
}}
"""
    touched = harness.launch("kernel", text, {}, 1, 4, 0, [x, y, unused])
    assert touched == {x.data_ptr(): READ, y.data_ptr(): WRITTEN, unused.data_ptr(): 0}

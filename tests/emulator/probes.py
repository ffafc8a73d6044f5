"""Inputs and independent models of the kernels in probes.cu.

A model is written from the PTX ISA manual's description in numpy, and shares no code with the
emulator's C++.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from .build import REPLACED, flatten

SOURCE = Path(__file__).parent / "probes.cu"
Words = np.ndarray  # of uint32


Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Probe:
    """One kernel of probes.cu or probes_hopper.cu."""

    name: str  # the entry point is probe_<name>
    inputs: Callable[[np.random.Generator], Words]
    input_words: int  # of one block
    output_words: int  # of one block
    model: Callable[[Words], Words]  # all blocks' input words to all output words
    #: For products: A (case, M, K), B (case, K, N) and C (case, M, N) of input words.
    matrices: Callable[[Words], Matrices] | None = None
    source: Path = SOURCE
    threads: int = 32

    @property
    def headers(self) -> tuple[str, ...]:
        return REPLACED[:1] if self.source == SOURCE else REPLACED


def emulated_text(probe: Probe) -> str:
    return flatten(probe.source, probe.headers)


def device_text(probe: Probe) -> str:
    return flatten(probe.source, ())


def blocks(probe: Probe, words: Words) -> int:
    return words.size // probe.input_words


# ---------------------------------------------------------------- interesting numbers


def float_bits(rng: np.random.Generator, count: int) -> Words:
    """float32 patterns: specials, ties and near-ties of every format, and random ones."""
    special = [0, 1, 0x1000, 0x7FFFFF, 0x800000, 0x38800000, 0x387FE000, 0x33800000, 0x33000000]
    special += [0x33000001, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x47800000, 0x7F7FFFFF]
    special += [0x7F7FEFFF, 0x7F7FF000, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC00000]
    special += [0x7FFFFFFF, 0x7FBFFFFF, 0x3F800000, 0x00001000, 0x00000FFF, 0x00003000]
    ties = rng.integers(0, 2**32, 150, dtype=np.uint32)
    ties = [ties & 0xFFFFE000 | tail for tail in (0x1000, 0x0FFF, 0x1001)]  # tf32 and f16
    halves = rng.integers(0, 2**32, 80, dtype=np.uint32)
    halves = [halves & 0xFFFF0000 | tail for tail in (0x8000, 0x7FFF, 0x8001)]  # bf16
    small = rng.integers(0x32000000, 0x39000000, 150, dtype=np.uint32)  # f16's subnormals
    base = np.concatenate([np.array(special, np.uint32), *ties, *halves, small])
    base = np.concatenate([base, base | np.uint32(0x80000000)])
    rest = rng.integers(0, 2**32, max(0, count - base.size), dtype=np.uint32)
    return np.concatenate([base, rest])[: count // 32 * 32]


def _floats(words: Words) -> np.ndarray:
    return words.astype(np.uint32).view(np.float32)


# ---------------------------------------------------------------- conversions


def _round_tf32(words: Words) -> Words:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        value = _floats(words).astype(np.float64)
    _, exponent = np.frexp(np.where(np.isfinite(value), value, 1.0))
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 10)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.where(np.isfinite(value), np.rint(value / quantum) * quantum, value)
        rounded = rounded.astype(np.float32)
    return np.where(np.isnan(value), np.uint32(0x7FFFE000), rounded.view(np.uint32))


def _f16_from_float(words: Words) -> Words:
    with np.errstate(over="ignore", invalid="ignore"):
        return _floats(words).astype(np.float16).view(np.uint16).astype(np.uint32)


def _bf16_from_float(words: Words) -> Words:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        value = _floats(words).astype(np.float64)
    _, exponent = np.frexp(np.where(np.isfinite(value), value, 1.0))
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.copysign(np.rint(np.abs(value) / quantum) * quantum, value)
        rounded = np.where(np.isfinite(value), rounded, value).astype(np.float32)
    return rounded.view(np.uint32) >> 16


def _float_from_f16(words: Words) -> Words:
    return words.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


def _float_from_bf16(words: Words) -> Words:
    return (words & 0xFFFF) << 16


def _packed(convert: Callable[[Words], Words]) -> Callable[[Words], Words]:
    return lambda words: convert(words[::2]) | convert(words[1::2]) << 16


def _permute_bytes(words: Words) -> Words:
    result = []
    for low, high, selector in words.reshape(-1, 3).tolist():
        pool = low.to_bytes(4, "little") + high.to_bytes(4, "little")
        word = 0
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = pool[nibble & 7]
            if nibble & 8:
                byte = 0xFF if byte & 0x80 else 0
            word |= byte << 8 * i
        result.append(word)
    return np.array(result, np.uint32)


# ---------------------------------------------------------------- shared memory


def _shared(words: Words) -> Words:
    tiles = words.reshape(-1, 3, 32, 4)
    other = np.arange(32) ^ 5
    return tiles[:, :, other].transpose(0, 2, 1, 3).ravel()


def _matrix_inputs(rng: np.random.Generator) -> Words:
    cases = []
    for _ in range(4):
        elements = rng.permutation(512).astype(np.uint16).view(np.uint32)
        cases.append(np.concatenate([elements, rng.permutation(32).astype(np.uint32)]))
    return np.concatenate(cases)


def _load_matrix(count: int, transposed: bool) -> Callable[[Words], Words]:
    def model(words: Words) -> Words:
        result = []
        for case in words.reshape(-1, 288):
            memory = case[:256].copy().view(np.uint16).reshape(-1, 8)  # rows of 16 bytes
            for lane in range(32):
                for matrix in range(count):
                    rows = memory[case[256 + 8 * matrix : 264 + 8 * matrix]]
                    elements = rows.T if transposed else rows
                    low, high = elements[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
                    result.append(int(low) | int(high) << 16)
        return np.array(result, np.uint32)

    return model


def _copy_inputs(rng: np.random.Generator) -> Words:
    cases = rng.integers(1, 2**32, (3, 544), dtype=np.uint32)
    cases[:, 512:] = rng.integers(0, 4, (3, 32))
    cases[0, 512:] = 3
    return cases.ravel()


def _copies(bytes_: int) -> Callable[[Words], Words]:
    words_of = bytes_ // 4

    def model(words: Words) -> Words:
        result = []
        for case in words.reshape(-1, 544):
            valid = case[512:]
            for lane in range(32):
                writer = lane ^ 1
                for group in range(2):
                    start = group * 256 + (31 - writer) * words_of
                    live = valid[writer] >> group & 1
                    result.append(case[start : start + words_of] * live)
        return np.concatenate(result).astype(np.uint32)

    return model


# ---------------------------------------------------------------- matrix products


def _split(words: Words) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lanes = words.reshape(-1, 32, 10)
    return lanes[..., :4], lanes[..., 4:6], _floats(lanes[..., 6:])


def _tf32(words: Words) -> np.ndarray:
    return _floats(words & np.uint32(0xFFFFE000))


def _half_pairs(kind: str) -> Callable[[Words], np.ndarray]:
    def decode(words: Words) -> np.ndarray:
        halves = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16)
        if kind == "f16":
            return halves.view(np.float16).astype(np.float32)
        return (halves.astype(np.uint32) << 16).view(np.float32)

    return decode


def matrices(kind: str, words: Words) -> Matrices:
    """A (case, 16, K), B (case, K, 8) and C (case, 16, 8) of fragments, as the manual lays out."""
    a_words, b_words, c_values = _split(words)
    cases = a_words.shape[0]
    depth = 8 if kind == "tf32" else 16
    a, b, c = np.zeros((cases, 16, depth)), np.zeros((cases, depth, 8)), np.zeros((cases, 16, 8))
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(4):
            row = group if i in (0, 2) else group + 8
            if kind == "tf32":
                a[:, row, thread if i < 2 else thread + 4] = _tf32(a_words[:, lane, i])
            else:
                column = thread * 2 + (0 if i < 2 else 8)
                a[:, row, column : column + 2] = _half_pairs(kind)(a_words[:, lane, i])
            c[:, group if i < 2 else group + 8, thread * 2 + (i & 1)] = c_values[:, lane, i]
        for i in range(2):
            if kind == "tf32":
                b[:, thread + 4 * i, group] = _tf32(b_words[:, lane, i])
            else:
                row = thread * 2 + 8 * i
                b[:, row : row + 2, group] = _half_pairs(kind)(b_words[:, lane, i])
    return a, b, c


def _first_half(words: Words) -> Words:
    """Inputs of a product of half the depth, as those of a whole one."""
    lanes = words.reshape(-1, 10).copy()
    lanes[:, [2, 3, 5]] = 0
    return lanes.ravel()


def _mma_k8(kind: str) -> Callable[[Words], Words]:
    return lambda words: _mma(kind)(_first_half(words))


def _matrices_k8(kind: str) -> Callable[[Words], Matrices]:
    return lambda words: matrices(kind, _first_half(words))


def _mma(kind: str) -> Callable[[Words], Words]:
    def model(words: Words) -> Words:
        a, b, c = matrices(kind, words)
        with np.errstate(invalid="ignore"):
            d = (a @ b + c).astype(np.float32)
        result = np.empty((a.shape[0], 32, 4), np.float32)
        for lane in range(32):
            group, thread = divmod(lane, 4)
            for i in range(4):
                result[:, lane, i] = d[:, group if i < 2 else group + 8, thread * 2 + (i & 1)]
        return result.ravel().view(np.uint32)

    return model


def _encode(kind: str, values: np.ndarray) -> Words:
    """Values (..., 2 for pairs) as operand words."""
    bits = values.astype(np.float32).view(np.uint32)
    if kind == "tf32":
        return bits
    halves = values.astype(np.float16).view(np.uint16) if kind == "f16" else bits >> 16
    halves = halves.astype(np.uint32)
    return halves[..., 0] | halves[..., 1] << 16


def _mma_inputs(kind: str) -> Callable[[np.random.Generator], Words]:
    pair = () if kind == "tf32" else (2,)

    def case(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Words:
        operands = [_encode(kind, a), _encode(kind, b), c.astype(np.float32).view(np.uint32)]
        return np.concatenate(operands, axis=1).ravel()

    def inputs(rng: np.random.Generator) -> Words:
        cases = []
        for _ in range(4):  # small integers: exact, and every element matters
            a, b = rng.integers(-8, 9, (32, 4, *pair)), rng.integers(-8, 9, (32, 2, *pair))
            cases.append(case(a, b, rng.integers(-64, 65, (32, 4))))
        for i in range(2):  # one element of A
            a, b = np.zeros((32, 4, *pair)), np.zeros((32, 2, *pair))
            a[rng.integers(32), i] = 3
            b[:] = rng.integers(1, 9, b.shape)
            cases.append(case(a, b, np.zeros((32, 4))))
        for scale in (1.0, 1e3, 1e-3):
            a, b = rng.standard_normal((32, 4, *pair)), rng.standard_normal((32, 2, *pair))
            cases.append(case(a, b, scale * rng.standard_normal((32, 4))))
        return np.concatenate(cases)

    return inputs


# ---------------------------------------------------------------- shuffles


def _shuffle_inputs(rng: np.random.Generator) -> Words:
    words = rng.integers(0, 2**32, (4, 32, 2), dtype=np.uint32)
    words[..., 1] &= 31
    words[1, :, 0] |= 1
    return words.ravel()


def _shuffle(words: Words) -> Words:
    result = []
    for case in words.reshape(-1, 32, 2).tolist():
        value, source = [v for v, _ in case], [s for _, s in case]
        ballot = sum((v & 1) << lane for lane, v in enumerate(value))
        for lane in range(32):
            segment8, segment16 = lane & ~7, lane & ~15
            result += [
                value[source[lane] % 32],
                value[segment8 + source[lane] % 8],
                value[lane - 3] if lane >= 3 else value[lane],
                value[lane - 3] if lane - 3 >= segment16 else value[lane],
                value[lane + 5] if lane + 5 < 32 else value[lane],
                value[lane ^ 21],
                ballot,
                1 | (2 if all(value) else 0),
            ]
    return np.array(result, np.uint32)


def _bits(count: int) -> Callable[[np.random.Generator], Words]:
    return lambda rng: float_bits(rng, count)


def _every_half(rng: np.random.Generator) -> Words:
    return np.concatenate([np.arange(0, 65536, 37), np.arange(0x7BF0, 0x7C40)]).astype(np.uint32)[
        : 32 * 55
    ]


def _words(count: int) -> Callable[[np.random.Generator], Words]:
    return lambda rng: rng.integers(0, 2**32, count, dtype=np.uint32)


PROBES = [
    Probe("round_tf32", _bits(2048), 32, 32, _round_tf32),
    Probe("f16_from_float", _bits(2048), 32, 32, _f16_from_float),
    Probe("bf16_from_float", _bits(2048), 32, 32, _bf16_from_float),
    Probe("float_from_f16", _every_half, 32, 32, _float_from_f16),
    Probe("float_from_bf16", _every_half, 32, 32, _float_from_bf16),
    Probe("pack_f16", _bits(1024), 64, 32, _packed(_f16_from_float)),
    Probe("pack_bf16", _bits(1024), 64, 32, _packed(_bf16_from_float)),
    Probe("permute_bytes", _words(96 * 16), 96, 32, _permute_bytes),
    Probe("shared", _words(384 * 2), 384, 384, _shared),
    Probe("load_matrix_x4_transposed", _matrix_inputs, 288, 128, _load_matrix(4, True)),
    Probe("load_matrix_x2_transposed", _matrix_inputs, 288, 64, _load_matrix(2, True)),
    Probe("load_matrix_x4", _matrix_inputs, 288, 128, _load_matrix(4, False)),
    Probe("async_copy_4", _copy_inputs, 544, 64, _copies(4)),
    Probe("async_copy_8", _copy_inputs, 544, 128, _copies(8)),
    Probe("async_copy_16", _copy_inputs, 544, 256, _copies(16)),
    Probe("mma_tf32", _mma_inputs("tf32"), 320, 128, _mma("tf32"), partial(matrices, "tf32")),
    Probe("mma_f16", _mma_inputs("f16"), 320, 128, _mma("f16"), partial(matrices, "f16")),
    Probe("mma_bf16", _mma_inputs("bf16"), 320, 128, _mma("bf16"), partial(matrices, "bf16")),
    Probe("mma_f16_k8", _mma_inputs("f16"), 320, 128, _mma_k8("f16"), _matrices_k8("f16")),
    Probe("mma_bf16_k8", _mma_inputs("bf16"), 320, 128, _mma_k8("bf16"), _matrices_k8("bf16")),
    Probe("shuffle", _shuffle_inputs, 64, 256, _shuffle),
]


def inputs_of(probe: Probe) -> Words:
    """The probe's inputs: the same on every machine."""
    seed = np.frombuffer(probe.name.encode(), np.uint8).tolist()
    words = probe.inputs(np.random.default_rng(seed))
    return np.ascontiguousarray(words, np.uint32)


def differences(probe: Probe, words: Words, got: Words, wanted: Words) -> np.ndarray:
    """Positions where two results differ; NaNs are one value, sums may differ in rounding."""
    if probe.name.startswith("pack"):
        got, wanted = (r.view(np.uint16).astype(np.uint32) for r in (got, wanted))
    nan = 0x7F80 if "bf16" in probe.name else 0x7C00
    if "from_float" in probe.name or probe.name.startswith("pack"):
        both_nan = ((got & 0x7FFF) > nan) & ((wanted & 0x7FFF) > nan)
    elif probe.matrices or probe.name in ("float_from_f16", "float_from_bf16"):
        both_nan = np.isnan(_floats(got)) & np.isnan(_floats(wanted))
    else:
        both_nan = np.zeros(got.shape, bool)
    same = (got == wanted) | both_nan
    if probe.matrices:
        a, b, c = probe.matrices(words)
        # The adder of the tensor core cuts a sum off a few bits below float32's last.
        scale = (np.abs(a) @ np.abs(b) + np.abs(c)).max(axis=(1, 2))
        whole = np.all([np.all(m == np.rint(m), axis=(1, 2)) for m in (a, b, c)], axis=0)
        tolerance = np.repeat(np.where(whole, 0, 2.0**-20 * scale), probe.output_words)
        same |= np.abs(_floats(got).astype(np.float64) - _floats(wanted)) <= tolerance
    return np.flatnonzero(~same)

"""Inputs and independent models of the kernels in probes_hopper.cu; and the list of all probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from . import probes
from .probes import Matrices, Probe, Words

SOURCE = Path(__file__).parent / "probes_hopper.cu"
_COLUMNS = 24


# ---------------------------------------------------------------- wgmma


def _elements(kind: str, words: Words) -> np.ndarray:
    """Rows of operand words (..., words) as rows of numbers."""
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    halves = np.ascontiguousarray(words).view(np.uint16)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _d_index() -> tuple[np.ndarray, np.ndarray]:
    """Row and column of d[i] of thread t of a warpgroup, both (128, 12)."""
    thread, i = np.arange(128)[:, None], np.arange(_COLUMNS // 2)[None]
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    return row, i // 4 * 8 + thread % 4 * 2 + i % 2


def _matrices(kind: str, row_words: int, words: Words) -> Matrices:
    cases = words.reshape(-1, 88 * row_words + 128 * 12)
    rows = cases[:, : 88 * row_words].reshape(-1, 88, row_words)
    operands = _elements(kind, np.ascontiguousarray(rows))
    d = np.ascontiguousarray(cases[:, 88 * row_words :]).view(np.float32).reshape(-1, 128, 12)
    c = np.zeros((len(cases), 64, _COLUMNS))
    c[(slice(None), *_d_index())] = d
    return operands[:, :64], operands[:, 64:].transpose(0, 2, 1), c


def _product(kind: str, row_words: int, words: Words) -> Words:
    a, b, c = _matrices(kind, row_words, words)
    d = (a @ b + c).astype(np.float32)
    return np.ascontiguousarray(d[(slice(None), *_d_index())]).view(np.uint32).ravel()


def _first_matrices(words: Words) -> Matrices:
    a, b, c = _matrices("tf32", 8, words)
    return a, b, np.zeros_like(c)


def _first_product(words: Words) -> Words:
    a, b, _ = _first_matrices(words)
    d = (a @ b).astype(np.float32)
    return np.ascontiguousarray(d[(slice(None), *_d_index())]).view(np.uint32).ravel()


def _product_inputs(kind: str, row_words: int, rng: np.random.Generator) -> Words:
    per_word = 1 if kind == "tf32" else 2
    cases = []
    for whole in (True, False):
        shape = (88, row_words, per_word)
        values = rng.integers(-8, 9, shape) if whole else rng.standard_normal(shape)
        if kind == "tf32":
            operands = values[..., 0].astype(np.float32).view(np.uint32)
        else:
            bits = values.astype(np.float32).view(np.uint32) >> 16
            if kind == "f16":
                bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
            operands = bits[..., 0] | bits[..., 1] << 16
        d = rng.integers(-64, 65, (128, 12)).astype(np.float32).view(np.uint32)
        cases += [operands.ravel(), d.ravel()]
    return np.concatenate(cases)


def _wgmma(name: str, kind: str, row_words: int) -> Probe:
    return Probe(
        name,
        partial(_product_inputs, kind, row_words),
        88 * row_words + 128 * 12,
        128 * 12,
        partial(_product, kind, row_words),
        partial(_matrices, kind, row_words),
        SOURCE,
        128,
    )


# ---------------------------------------------------------------- copies and stmatrix


def _copied(words: Words) -> Words:
    blocks = words.reshape(-1, 512)
    return np.concatenate([blocks[:, 64:256], blocks[:, :64], blocks[:, 256:]], axis=1).ravel()


def _store_inputs(rng: np.random.Generator) -> Words:
    words = rng.integers(0, 2**32, (8, 32, 5), dtype=np.uint32)
    for warp in words:
        warp[:, 4] = rng.permutation(32)
    return words.ravel()


def _stored(transposed: bool, words: Words) -> Words:
    result = np.zeros((words.size // 160, 32, 8), np.uint16)
    for warp, memory in zip(words.reshape(-1, 32, 5), result, strict=True):
        for matrix in range(4):
            elements = np.zeros((8, 8), np.uint16)
            for lane in range(32):
                word = int(warp[lane, matrix])
                elements[lane // 4, 2 * (lane % 4)] = word & 0xFFFF
                elements[lane // 4, 2 * (lane % 4) + 1] = word >> 16
            rows = warp[8 * matrix : 8 * matrix + 8, 4]
            memory[rows] = elements.T if transposed else elements
    return result.view(np.uint32).ravel()


def _plain(
    name: str, inputs: Callable[[np.random.Generator], Words], words: int, model: Callable
) -> Probe:
    return Probe(name, inputs, words, 512, model, None, SOURCE, 128)


PROBES = [
    *probes.PROBES,
    *(
        _wgmma(f"wgmma_{kind}_{source}", kind, 8)
        for kind in ("tf32", "f16", "bf16")
        for source in ("ss", "rs")
    ),
    _wgmma("wgmma_swizzled", "tf32", 32),
    _wgmma("wgmma_bf16_rs_n_major", "bf16", 8),
    _wgmma("wgmma_bf16_ss_mn_major", "bf16", 8),
    _wgmma("wgmma_bf16_ss_mn_major_64b", "bf16", 8),
    *(
        replace(
            _wgmma(f"wgmma_tf32_{source}_first", "tf32", 8),
            model=_first_product,
            matrices=_first_matrices,
        )
        for source in ("ss", "rs")
    ),
    _plain("bulk_copy", lambda rng: rng.integers(0, 2**32, 1024, np.uint32), 512, _copied),
    _plain("store_matrix_x4", _store_inputs, 640, partial(_stored, False)),
    _plain("store_matrix_x4_transposed", _store_inputs, 640, partial(_stored, True)),
]

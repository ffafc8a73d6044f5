"""Whether a fused model gives what it gave before, up to the rounding of folded weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # TF32 rounds folded weights, too
_LOW_TOLERANCE = 5e-2


def outputs(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """All tensors that a model gives for its arguments, copied."""
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(model(*inputs))
    return [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def result_types(layers: Sequence[nn.Module]) -> Iterator[set[torch.dtype]]:
    """The types of the results of layers that run meanwhile; autocast may choose them."""
    types: set[torch.dtype] = set()

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        types.add(output.dtype)

    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield types
    finally:
        for hook in hooks:
            hook.remove()


def compare(before: list[Tensor], after: list[Tensor], types: set[torch.dtype]) -> None:
    """RuntimeError where outputs differ by more than the rounding of folded weights.

    Outputs of a finer type than those of the layers, ``types``, have the rounding of these.
    """
    coarsest = max((_TOLERANCE.get(dtype, _LOW_TOLERANCE) for dtype in types), default=0.0)
    for old, new in zip(before, after, strict=True):
        if old.is_complex():
            old, new = torch.view_as_real(old), torch.view_as_real(new)
        if not old.is_floating_point() or old.numel() == 0:
            continue
        share = max(coarsest, _TOLERANCE.get(old.dtype, _LOW_TOLERANCE))
        allowed = share * old.abs().max().item()
        error = (old.double() - new.double()).abs().max().item()
        if not error <= allowed:
            raise RuntimeError(
                f"the fused model's output differs by {error:.3g}, more than {allowed:.3g}: some "
                "module is used in a way that the trace does not show. Nothing was folded"
            )

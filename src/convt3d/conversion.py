"""The conversion of models in place, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, get_args

import torch

from convt3d.inference.fuse import unfold
from convt3d.modules import Conv3d, ConvTranspose3d, LazyConv3d, LazyConvTranspose3d

_TO_OURS: dict[type, type] = {
    torch.nn.Conv3d: Conv3d,
    torch.nn.LazyConv3d: LazyConv3d,
    torch.nn.ConvTranspose3d: ConvTranspose3d,
    torch.nn.LazyConvTranspose3d: LazyConvTranspose3d,
}
_TO_PYTORCH = {ours: theirs for theirs, ours in _TO_OURS.items()}

_Model = TypeVar("_Model", bound=torch.nn.Module)
Filter = Callable[[torch.nn.Module, str], bool]
Kinds = type | tuple[type, ...]

_BOTH = (torch.nn.Conv3d, torch.nn.ConvTranspose3d)


def convert(model: _Model, filter_fn: Filter | None = None, *, kinds: Kinds = _BOTH) -> _Model:
    """Turn every ``nn.Conv3d`` and ``nn.ConvTranspose3d`` inside ``model`` into ours, in place.

    Only the class of a module changes: parameters, buffers, hooks, the training flag, dtype and
    device stay the very same objects, and optimisers keep working. Lazy modules, modules with
    parametrizations (weight_norm, spectral_norm, ...) and modules that FSDP2 has sharded are
    converted too. Subclasses written by others are left alone, for their ``forward`` is theirs.

    Args:
        model: any module; may itself be one of the layers.
        filter_fn: called with each candidate and its qualified name; False leaves it as it is.
        kinds: the class of layers to convert, or several: ``kinds=torch.nn.Conv3d`` leaves
            transposed ones alone.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a Module, ``kinds`` are no such layers, or ``filter_fn`` cannot
            be called.
    """
    _check(model, filter_fn, kinds)
    return _swap(model, _TO_OURS, filter_fn, kinds)


def revert(model: _Model, filter_fn: Filter | None = None, *, kinds: Kinds = _BOTH) -> _Model:
    """Undo :func:`fuse` and :func:`convert`, in place: every module of ours becomes PyTorch's.

    Args:
        model: as that of :func:`convert`, and the whole of what was fused.
        filter_fn: called with each module of ours and its name; False leaves it as it is.
        kinds: as that of :func:`convert`.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: as that of :func:`convert`.
        RuntimeError: a module that was folded into a layer is not in ``model``, or the layer was
            parametrized since; nothing is undone.
    """
    _check(model, filter_fn, kinds)

    def wanted(layer: torch.nn.Module, name: str) -> bool:
        return isinstance(layer, kinds) and (filter_fn is None or filter_fn(layer, name))

    unfold(model, wanted)
    return _swap(model, _TO_PYTORCH, filter_fn, kinds)


def _swap(
    model: _Model, classes: dict[type, type], filter_fn: Filter | None, kinds: Kinds
) -> _Model:
    for name, module in model.named_modules():
        new = _replacement(type(module), classes) if isinstance(module, kinds) else None
        if new is not None and (filter_fn is None or filter_fn(module, name)):
            module.__class__ = new
    return model


def _check(model: object, filter_fn: Filter | None, kinds: Kinds) -> None:
    """TypeError where an argument of :func:`convert` or :func:`revert` is of another kind."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(model).__name__}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn must be callable, but got {type(filter_fn).__name__}")
    for kind in kinds if isinstance(kinds, tuple) else get_args(kinds) or (kinds,):
        layers = isinstance(kind, type) and (
            issubclass(kind, _BOTH) or any(issubclass(layer, kind) for layer in _BOTH)
        )
        if not layers:
            raise TypeError(f"kinds must be classes of Conv3d or ConvTranspose3d, but got {kind!r}")


def _replacement(kind: type, classes: dict[type, type]) -> type | None:
    """The class to take instead of ``kind``, or None where there is nothing to swap."""
    if kind in classes:
        return classes[kind]
    if not _made_by_pytorch(kind):
        return None
    *mixins, original = kind.__bases__
    new = _replacement(original, classes)
    if new is None:
        return None
    # Other modules share that class, so a new one is made instead of changing its base.
    body = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (*mixins, new), body)


def _made_by_pytorch(kind: type) -> bool:
    """Whether PyTorch derived this class from a module's own to add to it, forward left alone.

    torch.nn.utils.parametrize makes ``Parametrized<name>``; FSDP2's fully_shard makes
    ``FSDP<name>`` with the mixin FSDPModule, from ``<name>`` or from ``Parametrized<name>``.
    """
    if "forward" in vars(kind):
        return False
    *mixins, original = kind.__bases__
    if not mixins:
        by_parametrize = kind.__module__ == "torch.nn.utils.parametrize"
        return by_parametrize and kind.__name__ == f"Parametrized{original.__name__}"
    return kind.__name__ == f"FSDP{original.__name__}" and mixins[0].__name__ == "FSDPModule"

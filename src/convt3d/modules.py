"""Modules, and the conversion of models in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from convt3d.functional import conv_transpose3d


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """Drop-in for :class:`torch.nn.ConvTranspose3d`.

    Constructor, parameters, initialisation and state_dict are PyTorch's own; only ``forward``
    differs. The repr ends with ``backend=convt3d``.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Apply the layer.

        Args:
            input: (N, C_in, D, H, W) or (C_in, D, H, W).
            output_size: wanted (D_out, H_out, W_out), which overrides ``output_padding``; leading
                batch and channel entries are allowed and ignored.

        Raises:
            ValueError: an ``output_size`` of the wrong length or outside of the reachable range.
            RuntimeError: see :func:`convt3d.conv_transpose3d`.
        """
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose3d")
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.kernel_size,  # type: ignore[arg-type]
            3,
            self.dilation,  # type: ignore[arg-type]
        )
        if torch.jit.is_scripting():
            return torch.conv_transpose3d(
                input,
                self.weight,
                self.bias,
                self.stride,
                self.padding,  # type: ignore[arg-type]
                output_padding,
                self.groups,
                self.dilation,
            )
        else:  # TorchScript compiles a branch only where its condition is true
            return conv_transpose3d(
                input,
                self.weight,
                self.bias,
                self.stride,
                self.padding,  # type: ignore[arg-type]
                output_padding,
                self.groups,
                self.dilation,
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend=convt3d"


class LazyConvTranspose3d(torch.nn.LazyConvTranspose3d, ConvTranspose3d):  # type: ignore[misc]
    """Drop-in for :class:`torch.nn.LazyConvTranspose3d`; becomes :class:`ConvTranspose3d`."""

    cls_to_become = ConvTranspose3d


_TO_OURS: dict[type, type] = {
    torch.nn.ConvTranspose3d: ConvTranspose3d,
    torch.nn.LazyConvTranspose3d: LazyConvTranspose3d,
}
_TO_PYTORCH = {ours: theirs for theirs, ours in _TO_OURS.items()}

_Model = TypeVar("_Model", bound=torch.nn.Module)
Filter = Callable[[torch.nn.Module, str], bool]


def convert(model: _Model, filter_fn: Filter | None = None) -> _Model:
    """Turn every ``nn.ConvTranspose3d`` inside ``model`` into ours, in place.

    Only the class of a module changes: parameters, buffers, hooks, the training flag, dtype and
    device stay the very same objects, and optimisers keep working. Lazy modules, modules with
    parametrizations (weight_norm, spectral_norm, ...) and modules that FSDP2 has sharded are
    converted too. Subclasses written by others are left alone, for their ``forward`` is theirs.

    Args:
        model: any module; may itself be a ConvTranspose3d.
        filter_fn: called with each candidate and its qualified name; False leaves it as it is.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a Module.
    """
    return _swap(model, _TO_OURS, filter_fn)


def revert(model: _Model, filter_fn: Filter | None = None) -> _Model:
    """Undo :func:`convert`, in place: every module of ours becomes PyTorch's; returns ``model``."""
    return _swap(model, _TO_PYTORCH, filter_fn)


def _swap(model: _Model, classes: dict[type, type], filter_fn: Filter | None) -> _Model:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(model).__name__}")
    for name, module in model.named_modules():
        new = _replacement(type(module), classes)
        if new is not None and (filter_fn is None or filter_fn(module, name)):
            module.__class__ = new
    return model


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
        return kind.__name__ == f"Parametrized{original.__name__}"
    return kind.__name__ == f"FSDP{original.__name__}" and mixins[0].__name__ == "FSDPModule"

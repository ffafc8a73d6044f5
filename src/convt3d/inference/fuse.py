"""``convt3d.fuse``: batch norms and activations of a model in evaluation mode, folded into layers.

Which modules follow each other torch.fx tells: it traces the model, with the layers, norms and
activations as they are called. A folded module is replaced by one that passes its input on and
keeps the original, as a layer keeps its own parameters, so that :func:`unfold` restores both.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy, Tracer

from convt3d.fusion import MAX_STEPS, Fusion, Step
from convt3d.inference.comparison import compare, outputs, result_types
from convt3d.inference.functional import conv3d_with_tail, conv_transpose3d_with_tail
from convt3d.log import log_once
from convt3d.modules import Conv3d, ConvTranspose3d

_Model = TypeVar("_Model", bound=nn.Module)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REPLACED = {"forward", "_conv_forward"}  # by wrappers of a module, in its attributes


class Folded(nn.Identity):
    """Stands for a module that was folded into a layer."""

    def __init__(self, original: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.training = False
        self.original = [original]  # in lists, so that neither is a submodule
        self.layer = [layer]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Folded:
        super()._apply(fn, recurse)
        self.original[0]._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Folded:
        """The original, too, has the mode that it will be in when it is back."""
        super().train(mode)
        self.original[0].train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # what a model reads of the module itself, such as its statistics
            if "original" not in self.__dict__:
                raise
            return getattr(self.original[0], name)

    def extra_repr(self) -> str:
        return f"{type(self.original[0]).__name__}, in the layer before"


class _Parameters(nn.Module):
    """Parameters that a layer had."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._parameters.update(layer._parameters)


class _FusedLayer(nn.Module):
    """What both fused layers have: the original parameters and the activations."""

    kept: list[_Parameters]
    fusion: Fusion | None
    folded: int

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for parameters in self.kept:
            parameters._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        steps = "" if self.fusion is None else f", then {', '.join(self.fusion.kinds)}"
        return f"{super().extra_repr()}{steps}"

    def _require_evaluation(self) -> None:
        if self.training:
            raise RuntimeError(
                "this layer has a batch norm or an activation of evaluation mode folded into it; "
                "call convt3d.revert, which undoes convt3d.fuse, before training"
            )


class FusedConv3d(_FusedLayer, Conv3d):
    """A Conv3d with what followed it."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._require_evaluation()
        if self.fusion is None:
            return super()._conv_forward(input, weight, bias)
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            around = self._reversed_padding_repeated_twice
            input = nn.functional.pad(input, around, mode=self.padding_mode)
            padding = (0, 0, 0)
        return conv3d_with_tail(
            self.fusion, input, weight, bias, self.stride, padding, self.dilation, self.groups
        )


class FusedConvTranspose3d(_FusedLayer, ConvTranspose3d):
    """A ConvTranspose3d with what followed it."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """As :meth:`convt3d.ConvTranspose3d.forward`."""
        self._require_evaluation()
        if self.fusion is None:
            return super().forward(input, output_size)
        output_padding = self._checked_output_padding(input, output_size)
        return conv_transpose3d_with_tail(
            self.fusion,
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,  # type: ignore[arg-type]
            output_padding,
            self.groups,
            self.dilation,
        )


_FUSED: dict[type, type] = {Conv3d: FusedConv3d, ConvTranspose3d: FusedConvTranspose3d}
_PLAIN = {fused: plain for plain, fused in _FUSED.items()}

_ACTIVATIONS: dict[type, Callable[[Any], Step]] = {
    nn.ReLU: lambda m: Step("relu"),
    nn.ReLU6: lambda m: Step("clamp", (0.0, 6.0)),
    nn.Hardtanh: lambda m: Step("clamp", (float(m.min_val), float(m.max_val))),
    nn.LeakyReLU: lambda m: Step("leaky_relu", (float(m.negative_slope),)),
    nn.SiLU: lambda m: Step("silu"),
    nn.GELU: lambda m: Step("gelu_tanh" if m.approximate == "tanh" else "gelu"),
    nn.Hardswish: lambda m: Step("hardswish"),
    nn.Sigmoid: lambda m: Step("sigmoid"),
    nn.Tanh: lambda m: Step("tanh"),
}


# --- Folding -------------------------------------------------------------------------------------


def fuse(model: _Model, *inputs: Any) -> _Model:
    """Fold batch norms and activations into the layers before them, in place, for inference.

    A ``BatchNorm3d`` with running statistics becomes part of weight and bias of the
    :class:`convt3d.Conv3d` or :class:`convt3d.ConvTranspose3d` before it; up to four activation
    modules that follow (ReLU, LeakyReLU, SiLU, GELU, Hardswish, Sigmoid, Tanh, ReLU6, Hardtanh) run
    in the epilogue of its kernel. :func:`convt3d.revert` undoes this: the parameters are the
    same objects as before.

    Folded is what torch.fx proves to be adjacent when it traces the model, optional arguments at
    their defaults: the layer's output goes to the next module and nowhere else, each module is
    called once, is in the model once, and has no hooks, no module with hooks begins or ends between
    them, and the layer's parameters are real and read by nothing else. The rest is left alone, such
    as activations that are called as functions, which ``torch.compile`` with ``backend="convt3d"``
    finds.

    Args:
        model: in evaluation mode, its layers ours (:func:`convt3d.convert`).
        inputs: an example of its arguments. With it, models that torch.fx cannot trace as a whole
            are traced in parts, as far as it can; and the outputs before and after are compared.

    Returns:
        ``model`` itself. Its ``state_dict`` has the folded parameters, so load checkpoints before.

    Raises:
        RuntimeError: the model is in training mode; or the outputs differ by more than rounding,
            in which case nothing is folded. What the folded model itself raises for ``inputs``
            passes through likewise.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(model).__name__}")
    if model.training:
        raise RuntimeError("fuse is for inference: call model.eval() first")
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    before = outputs(model, inputs) if inputs else []
    new = []
    for root, graph, stored in _graphs(model, parts=bool(inputs)):
        for layer, followers in _adjacent(root, graph, stored, names):
            _fold(model, layer, followers)
            new.append(layer)
    if inputs:
        try:
            with result_types(new) as types:
                after = outputs(model, inputs)
            compare(before, after, types)
        except Exception:
            unfold(model, lambda layer, name: layer in new)
            raise
    return model


def _graphs(model: nn.Module, parts: bool) -> Iterator[tuple[nn.Module, Graph, set[Node]]]:
    """The model's graph, or, where it cannot be traced, those of its parts.

    With each come the nodes whose values the model stores in its attributes.
    """
    try:
        if "forward" in vars(model):
            raise TypeError("its forward was replaced, and torch.fx traces that of its class")
        with _without_hooks(model), _untouched(model) as stored:
            graph = _Leaves().trace(model, _defaults(model))
        yield model, graph, stored
    except Exception as error:
        reason = str(error).partition("\n")[0]
        log_once(f"fuse cannot trace {type(model).__name__} as a whole: {reason}")
        if parts:
            for child in model.children():
                yield from _graphs(child, parts)


class _Leaves(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = isinstance(m, (Conv3d, ConvTranspose3d))
        return ours or super().is_leaf_module(m, module_qualified_name)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Hooks are the user's: they are not called with what stands for tensors in a trace."""
    kept = [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in _HOOKS
        if vars(module).get(name)
    ]
    try:
        for module, name, hooks in kept:
            setattr(module, name, type(hooks)())
        yield
    finally:
        for module, name, hooks in kept:
            setattr(module, name, hooks)


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[set[Node]]:
    """A trace leaves attributes, the lists, dicts and sets in them, and buffers as they were.

    Afterwards the set has the nodes whose values the trace had stored there.
    """
    kept = [(module, dict(vars(module))) for module in model.modules()]
    containers = [(each, _copy(each)) for _, values in kept for each in _containers(values)]
    buffers = [(buffer, buffer.clone(), _version(buffer)) for buffer in model.buffers()]
    found: set[Node] = set()
    try:
        yield found
    finally:
        for module, attributes in kept:
            for container in (vars(module), *_containers(vars(module))):
                found |= {each.node for each in _elements(container) if isinstance(each, Proxy)}
            vars(module).clear()
            vars(module).update(attributes)
        for container, copy in containers:
            if not _same(container, copy):
                with contextlib.suppress(Exception):  # one that refuses to be changed
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(copy)
        with torch.no_grad():
            for buffer, value, version in buffers:
                if version is None or _version(buffer) != version:
                    buffer.copy_(value)


def _version(tensor: Tensor) -> int | None:
    """How often it was changed in place; None where PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version


def _elements(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _containers(attributes: dict[str, Any]) -> list[Any]:
    """Lists, dicts, sets and tuples among these values, and in one another."""
    found: dict[int, Any] = {}
    left = _elements(attributes)
    while left:
        value = left.pop()
        if isinstance(value, (list, dict, set, tuple)) and id(value) not in found:
            found[id(value)] = value
            left += _elements(value)
    return list(found.values())


def _copy(container: Any) -> Any:
    """The elements of a container, of whichever class it is."""
    kind = next(kind for kind in (list, dict, set, tuple) if isinstance(container, kind))
    return kind(container)


def _same(container: Any, copy: Any) -> bool:
    """Whether a container has the very elements of a copy."""
    if isinstance(container, dict) and list(container) != list(copy):
        return False
    ordered = sorted if isinstance(container, set) else list
    mine, theirs = (ordered(map(id, _elements(each))) for each in (container, copy))
    return mine == theirs


def _defaults(model: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _adjacent(
    root: nn.Module, graph: Graph, stored: set[Node], names: Counter[nn.Module]
) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Layers with the modules to fold into them; what is ``stored`` is read elsewhere."""
    modules = dict(root.named_modules())
    hooked = [name + "." for name, module in modules.items() if name and _hooked(module)]
    named = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    parameters = root.named_parameters(remove_duplicate=False)
    read = {id(parameter) for name, parameter in parameters if name in named}
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")

    def module_of(node: Node) -> nn.Module | None:
        """The module that a node calls, if it may be folded: once in graph and model, as its class
        has it.
        """
        if node.op != "call_module" or calls[node.target] != 1:
            return None
        module = modules.get(str(node.target))
        if module is None or names[module] != 1 or module.training:
            return None
        return None if _hooked(module) or _REPLACED & vars(module).keys() else module

    for node in graph.nodes:
        layer = module_of(node)
        if type(layer) not in _FUSED:
            continue
        assert isinstance(layer, (Conv3d, ConvTranspose3d))
        path = str(node.target)
        if layer.weight.is_complex() or any(id(p) in read for p in layer.parameters()):
            continue
        found: list[nn.Module] = []
        while len(node.users) == 1 and node not in stored:
            (user,) = node.users
            module = module_of(user)
            plain = user.args == (node,) and not user.kwargs
            parted = any(path.startswith(h) != str(user.target).startswith(h) for h in hooked)
            if module is None or not plain or parted or not _follows(module, layer, found):
                break
            found.append(module)
            node = user
        if found:
            yield layer, found


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _follows(module: nn.Module, layer: nn.Module, found: list[nn.Module]) -> bool:
    """Whether a module may be folded into a layer behind those that were found."""
    if type(module) is nn.BatchNorm3d:
        return (
            not found
            and {"weight", "bias"} <= layer._parameters.keys()  # what unfold restores
            and module.running_mean is not None
            and module.running_var is not None
            and module.num_features == layer.out_channels
        )
    steps = sum(type(each) in _ACTIVATIONS for each in found)
    return type(module) in _ACTIVATIONS and steps < MAX_STEPS


def _fold(model: nn.Module, layer: Any, followers: list[nn.Module]) -> None:
    layer.kept = []
    for norm in followers:
        if isinstance(norm, nn.BatchNorm3d):
            layer.kept = [_Parameters(layer)]
            with torch.inference_mode(False), torch.no_grad():
                weight, bias = folded_parameters(layer, norm)
                layer.weight = nn.Parameter(weight, requires_grad=False)
                layer.bias = nn.Parameter(bias, requires_grad=False)
    steps = [_ACTIVATIONS[type(m)](m) for m in followers if type(m) in _ACTIVATIONS]
    layer.fusion = Fusion(tuple(steps)) if steps else None
    layer.folded = len(followers)
    layer.__class__ = _FUSED[type(layer)]
    for parent, name, child in _children(model):
        if any(child is follower for follower in followers):
            parent._modules[name] = Folded(child, layer)
    what = ", ".join(type(follower).__name__ for follower in followers)
    log_once(f"fuse folded {what} into {layer}")


def folded_parameters(layer: nn.Module, norm: nn.BatchNorm3d) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer with a batch norm in evaluation mode behind it.

    Computed in float64, rounded to the dtype of the weight.
    """
    assert isinstance(layer, (Conv3d, ConvTranspose3d))
    assert norm.running_mean is not None and norm.running_var is not None
    weight = layer.weight.detach()
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    bias = -norm.running_mean.double() * scale
    if layer.bias is not None:
        bias = bias + layer.bias.detach().double() * scale
    if norm.bias is not None:
        bias = bias + norm.bias.detach().double()
    if isinstance(layer, ConvTranspose3d):  # (C_in, C_out / groups, ...)
        first, second = weight.shape[:2]
        by_group = scale.view(layer.groups, 1, second).expand(-1, first // layer.groups, -1)
        factor = by_group.reshape(first, second, 1, 1, 1)
    else:
        factor = scale.view(-1, 1, 1, 1, 1)
    return (weight.double() * factor).to(weight.dtype), bias.to(weight.dtype)


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None
    ]


# --- Undoing -------------------------------------------------------------------------------------


def unfold(model: nn.Module, wanted: Callable[[nn.Module, str], bool]) -> None:
    """Undo :func:`fuse` for the layers for which ``wanted(layer, name)``; their class is ours.

    Raises:
        RuntimeError: a module that was folded into such a layer is not in ``model``, or the layer
            was parametrized since; nothing is undone.
    """
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, _FusedLayer) and wanted(module, name)
    ]
    places = [
        (parent, name, child)
        for parent, name, child in _children(model)
        if isinstance(child, Folded) and any(child.layer[0] is layer for layer in layers)
    ]
    for layer in layers:
        if type(layer) not in _PLAIN:
            raise RuntimeError(
                f"{type(layer).__name__} was made of a fused layer, such as by a parametrization; "
                "undo that before convt3d.revert"
            )
        missing = layer.folded - sum(child.layer[0] is layer for *_, child in places)
        if missing:
            raise RuntimeError(
                f"{missing} of the modules that fuse folded into a layer are not in this module; "
                "revert the model that was fused"
            )
    for parent, name, child in places:
        parent._modules[name] = child.original[0]
    for layer in layers:
        for parameters in layer.kept:
            layer._parameters.update(parameters._parameters)
        del layer.kept, layer.fusion, layer.folded
        layer.__class__ = _PLAIN[type(layer)]

"""What is exported where a Model is more than a convolution: its tensors, and what it computes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tag, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from convt3d.export.layer import (
    Argument,
    ExportError,
    Layer,
    constructor_arguments,
    from_problem,
    names_of,
    one_line,
)
from convt3d.export.operations import adds_bias


@dataclass(frozen=True)
class Named:
    """A parameter or buffer of a Model: the path, and the Python expression that makes it."""

    path: str
    shape: tuple[int, ...]
    buffer: bool
    counter: bool
    made: str

    @property
    def name(self) -> str:
        return self.path.replace(".", "_")


@dataclass(frozen=True)
class Network:
    """A Model with one convolution among other operators.

    Attributes:
        drawn: expressions of the constructor's random draws, in order; ``made`` names ``drawn[i]``.
        graph: of a call in training mode, by ATen's operators with fake tensors: placeholders are
            ``tensors``, then ``inputs``.
    """

    name: str
    origin: str
    arguments: tuple[Argument, ...]
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    tensors: tuple[Named, ...]
    drawn: tuple[str, ...]
    graph: Graph


def layer_or_network(path: Path) -> Layer | Network:
    """What a KernelBench problem file has for a Model: one convolution, or more.

    A convolution whose kernels add no bias, and that has one, is a network: forward alone, with
    the bias behind it.

    Raises:
        ExportError: neither.
        OSError: there is no such file.
    """
    try:
        layer = from_problem(path)
    except ExportError:
        return network_of(path)
    return layer if adds_bias(layer) or not layer.bias else network_of(path)


def network_of(path: Path) -> Network:
    """The network of a KernelBench problem file. The file is run; its inputs take no memory.

    Raises:
        ExportError: the file does not run, or its Model cannot be traced or constructed anew.
        OSError: there is no such file.
    """
    names = names_of(path)
    model_class = names["Model"]
    try:
        given = list(names["get_init_inputs"]())
        with _Draws() as draws:
            model = model_class(*given)
        arguments = constructor_arguments(model_class, given)
        parameters = list(inspect.signature(model_class.forward).parameters)[1:]
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake, inputs = model_class(*given), list(names["get_inputs"]())
            graph = _traced(fake, inputs)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(f"{path.name} does not run: {one_line(error)}") from error
    if len(inputs) != len(parameters) or not all(isinstance(x, Tensor) for x in inputs):
        raise ExportError("get_inputs must give a tensor for each argument of forward")
    buffers = dict(model.named_buffers())
    return Network(
        path.stem,
        path.name,
        arguments,
        tuple((name, tuple(x.shape)) for name, x in zip(parameters, inputs, strict=True)),
        tuple(
            draws.named(name, tensor, name in buffers)
            for name, tensor in {**dict(model.named_parameters()), **buffers}.items()
        ),
        draws.expressions,
        graph,
    )


def _traced(model: nn.Module, inputs: Sequence[Tensor]) -> Graph:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def call(state: dict[str, Tensor], *inputs: Tensor) -> Any:
        result = functional_call(model, state, inputs)
        if not isinstance(result, Tensor):
            raise ExportError("the Model must return one tensor")
        return result

    with torch.no_grad():
        return make_fx(call)(state, *inputs).graph


class _Draws(TorchDispatchMode):
    """Remembers the random numbers that are drawn while it is entered, and by what."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Tensor, Tensor, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if Tag.nondeterministic_seeded in func.tags:
            shape = tuple(result.shape)
            name = func._schema.name.removeprefix("aten::")
            made = {
                "uniform_": lambda: f"torch.empty({shape}).uniform_({args[1]!r}, {args[2]!r})",
                "randn": lambda: f"torch.randn({shape})",
                "rand": lambda: f"torch.rand({shape})",
            }.get(name)
            if made is None:
                raise ExportError(f"the constructor draws by {name}")
            self._made.append((result, result.clone(), made()))
        return result

    def named(self, path: str, tensor: Tensor, buffer: bool) -> Named:
        """How a tensor of the model came to its values."""
        shape, address = tuple(tensor.shape), tensor.untyped_storage().data_ptr()
        counter = tensor.dtype == torch.int64
        if not counter and tensor.dtype != torch.float32:
            raise ExportError(f"{path} is {tensor.dtype}; the kernels take float32")
        first = tensor.flatten()[0].item()
        drawn_to = [d for d, _, _ in self._made if d.untyped_storage().data_ptr() == address]
        if not drawn_to and bool((tensor == first).all()):
            kind = ", dtype=torch.int64" if counter else ""
            return Named(path, shape, buffer, counter, f"torch.full({shape}, {first!r}{kind})")
        for number, (drawn, values, _) in enumerate(self._made):
            if drawn.untyped_storage().data_ptr() == address and torch.equal(values, tensor):
                return Named(path, shape, buffer, counter, f"drawn[{number}]")
        raise ExportError(f"{path} has initial values that no function known here draws")

    @property
    def expressions(self) -> tuple[str, ...]:
        return tuple(made for _, _, made in self._made)

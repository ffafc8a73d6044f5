"""What is exported: one convolution, transposed or not, and the constructor of its module.

A KernelBench problem file defines ``Model``, ``get_inputs`` and ``get_init_inputs``. The geometry
is read from the layer that the constructor really makes, never guessed from argument names: in
level 1 problem 73 the sixth argument is called output_padding, receives groups, and is ignored.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convt3d.bench.shapes import Shape
from convt3d.geometry import Geometry, Triple

Convolution = nn.Conv3d | nn.ConvTranspose3d


class ExportError(ValueError):
    """A problem that cannot become a ModelNew file; the message says what it has and what not."""


@dataclass(frozen=True)
class Argument:
    """One argument of the constructor.

    ``value`` is what the problem gives it, or its default. An argument that does not reach the
    layer (``used`` is False) may be anything; ``bias`` marks the one that decides on a bias.
    """

    name: str
    value: Any
    has_default: bool
    default: Any = None
    used: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    """A layer, the extents to tile for, and the names that its module must have.

    ``path`` is the layer's name inside the Model, so that parameters keep their names.
    """

    name: str
    origin: str
    geometry: Geometry
    bias: bool
    batch: int
    input_size: Triple
    path: str
    arguments: tuple[Argument, ...]
    input_name: str = "x"

    @property
    def kind(self) -> str:
        """The name of PyTorch's module."""
        return "ConvTranspose3d" if self.geometry.transposed else "Conv3d"

    @property
    def function(self) -> str:
        """The name of PyTorch's function."""
        return "conv_transpose3d" if self.geometry.transposed else "conv3d"

    @property
    def shape(self) -> Shape:
        """The layer with the size of its input."""
        return Shape(self.name, self.batch, self.input_size, self.bias, self.geometry, self.origin)


def from_problem(path: Path) -> Layer:
    """The layer of a KernelBench problem file. The file is run; its inputs are made without memory.

    Raises:
        ExportError: the file does not run, or its Model is not one convolution alone.
        OSError: there is no such file.
    """
    names = names_of(path)
    model_class = names["Model"]
    try:
        given = list(names["get_init_inputs"]())
        model = model_class(*given)
        with torch.device("meta"):
            inputs = list(names["get_inputs"]())
    except Exception as error:
        raise ExportError(f"{path.name} does not run: {one_line(error)}") from error
    layer_path, layer = _only_layer(model)
    geometry = geometry_of(layer)
    _check_forward(model, layer, geometry)
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].dim() != 5:
        raise ExportError("get_inputs must give one tensor (N, C, D, H, W)")
    batch, channels, d, h, w = inputs[0].shape
    if channels != geometry.in_channels:
        raise ExportError(f"the input has {channels} channels, the layer {geometry.in_channels}")
    return Layer(
        name=path.stem,
        origin=path.name,
        geometry=geometry,
        bias=layer.bias is not None,
        batch=batch,
        input_size=(d, h, w),
        path=layer_path,
        arguments=_arguments(model_class, given, geometry, layer.bias is not None),
        input_name=_input_name(model_class),
    )


def names_of(path: Path) -> dict[str, Any]:
    """The names that a problem file defines.

    Raises:
        ExportError: it does not run, or lacks one of a problem's names.
        OSError: there is no such file.
    """
    names = _run(path)
    for name in ("Model", "get_inputs", "get_init_inputs"):
        if name not in names:
            raise ExportError(f"{path.name} defines no {name}; is it a KernelBench problem?")
    return names


def _run(path: Path) -> dict[str, Any]:
    """The names that a file defines."""
    try:
        return runpy.run_path(str(path))
    except OSError as error:
        if error.filename == str(path):
            raise
        raise ExportError(f"{path.name} does not run: {one_line(error)}") from error
    except Exception as error:
        raise ExportError(f"{path.name} does not run: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def from_shape(shape: Shape) -> Layer:
    """The layer of a geometry, with the arguments of PyTorch's module as defaults."""
    g = shape.geometry
    values: dict[str, Any] = {
        "in_channels": g.in_channels,
        "out_channels": g.out_channels,
        "kernel_size": g.kernel_size,
        "stride": g.stride,
        "padding": g.padding,
    }
    rest: dict[str, Any] = {"groups": g.groups, "bias": shape.bias}
    if g.transposed:
        values |= {"output_padding": g.output_padding, **rest, "dilation": g.dilation}
    else:
        values |= {"dilation": g.dilation, **rest}
    arguments = tuple(
        Argument(name, value, True, value, bias=name == "bias") for name, value in values.items()
    )
    return Layer(
        name=g.label if "=" in shape.name else shape.name,
        origin=shape.origin,
        geometry=g,
        bias=shape.bias,
        batch=shape.batch,
        input_size=shape.input_size,
        path="conv_transpose3d" if g.transposed else "conv3d",
        arguments=arguments,
    )


def geometry_of(layer: Convolution) -> Geometry:
    """The geometry of a constructed layer.

    Raises:
        ExportError: a padding that is no number of zeros.
    """
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        asked = f"padding {layer.padding!r} of mode {layer.padding_mode!r}"
        raise ExportError(f"kernels pad by a number of zeros; {asked} cannot be exported")

    def three(values: Sequence[Any]) -> Triple:
        a, b, c = (int(v) for v in values)
        return (a, b, c)

    return Geometry(
        layer.in_channels,
        layer.out_channels,
        three(layer.kernel_size),
        three(layer.stride),
        three(layer.padding),
        three(layer.output_padding),
        three(layer.dilation),
        layer.groups,
        isinstance(layer, nn.ConvTranspose3d),
    )


def _only_layer(model: nn.Module) -> tuple[str, Convolution]:
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, Convolution)]
    if len(found) != 1:
        raise ExportError(f"the Model holds {len(found)} 3-D convolutions, not one")
    path, layer = found[0]
    if path == "":
        raise ExportError("the Model must hold its convolution as an attribute, not be one")
    own = {f"{path}.{name}" for name, _ in layer.named_parameters()}
    names = [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]
    if set(names) != own:
        extra = ", ".join(sorted(set(names) - own))
        raise ExportError(f"the Model has other parameters than its convolution's: {extra}")
    return path, layer


def _check_forward(model: nn.Module, layer: Convolution, geometry: Geometry) -> None:
    """Compare the Model with its layer alone on a small input: nothing may come before or after."""
    size = [2, 2, 2]
    for axis in range(3):
        while geometry.output_size(size)[axis] < 2:
            size[axis] += 1
    x = torch.randn(2, geometry.in_channels, *size)
    model.eval()
    more = "the Model's forward does more than apply its convolution"
    with torch.no_grad():
        try:
            got, want = model(x), layer(x)
        except Exception as error:
            raise ExportError(f"{more}: {one_line(error)}") from error
    if not isinstance(got, Tensor) or not torch.equal(got, want):
        raise ExportError(more)


def _input_name(model_class: type[nn.Module]) -> str:
    parameters = list(inspect.signature(model_class.forward).parameters)
    if len(parameters) != 2:
        raise ExportError("the Model's forward must take one tensor")
    return parameters[1]


def _arguments(
    model_class: Callable[..., nn.Module], given: Sequence[Any], geometry: Geometry, bias: bool
) -> tuple[Argument, ...]:
    """The constructor's arguments, and by trial which of them reach the layer."""
    arguments = constructor_arguments(model_class, given)
    return tuple(
        _tried(model_class, arguments, position, geometry, bias)
        for position in range(len(arguments))
    )


def constructor_arguments(
    model_class: Callable[..., nn.Module], given: Sequence[Any]
) -> tuple[Argument, ...]:
    """The constructor's arguments, with the values that are given.

    Raises:
        ExportError: one that has no value, or none that can be written down.
    """
    parameters = list(inspect.signature(model_class).parameters.values())
    arguments = []
    for position, parameter in enumerate(parameters):
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise ExportError(f"constructor argument {parameter} is neither positional nor keyword")
        has_default = parameter.default is not inspect.Parameter.empty
        if position >= len(given) and not has_default:
            raise ExportError(f"get_init_inputs gives no value for {parameter.name}")
        value = given[position] if position < len(given) else parameter.default
        for literal in (value, *([parameter.default] if has_default else [])):
            if not _is_literal(literal):
                raise ExportError(f"{parameter.name} = {literal!r} cannot be written as a literal")
        arguments.append(
            Argument(
                parameter.name,
                value,
                has_default,
                parameter.default if has_default else None,
            )
        )
    return tuple(arguments)


def _tried(
    model_class: Callable[..., nn.Module],
    arguments: Sequence[Argument],
    position: int,
    geometry: Geometry,
    bias: bool,
) -> Argument:
    """The argument with ``used`` and ``bias`` set, from layers made with other values of it."""
    argument = arguments[position]
    used = decides_bias = False
    for other in _other_values(argument.value):
        values = [a.value for a in arguments]
        values[position] = other
        try:
            _, layer = _only_layer(model_class(*values))
        except (ValueError, TypeError, RuntimeError):  # refused, so it is read
            used = True
            continue
        if geometry_of(layer) != geometry:
            used = True
        elif (layer.bias is not None) != bias:
            decides_bias = bool(other) != bias
    return Argument(
        argument.name,
        argument.value,
        argument.has_default,
        argument.default,
        used=used or decides_bias,
        bias=decides_bias and not used,
    )


def _other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 2]
    if isinstance(value, (tuple, list)) and all(isinstance(v, int) for v in value):
        return [tuple(v + 1 for v in value), tuple(2 * v + 2 for v in value)]
    return []


def _is_literal(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_literal(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))

"""Writes the ModelNew file of a network: its convolution, and kernels for all that is around it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Any

import torch
from torch.fx import Node

from convt3d.compile.operands import Steps
from convt3d.cuda.compiler import flatten
from convt3d.cuda.epilogue import OPERANDS, Epilogue, settle
from convt3d.cuda.plan import gains_by_tensors, plan_for, refusal
from convt3d.cuda.schedule import Gpu, Plan, flipped
from convt3d.export.header import header
from convt3d.export.host import fused_call, sized_call
from convt3d.export.kernels import arrange
from convt3d.export.kernels import tidy as tidied
from convt3d.export.layer import ExportError, Layer
from convt3d.export.network.loops import THREADS, Program
from convt3d.export.network.problem import Network
from convt3d.export.network.reading import CONVOLVED, Reading, read
from convt3d.export.pieces import (
    digest_of,
    extension_name,
    host_function,
    kernel_entry,
    launch_text,
    launcher,
    parameter,
    sections,
    template,
    wrapped,
)
from convt3d.export.variants import Variant, arithmetics
from convt3d.export.writer import Exported
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic

RESULT = "result"


@dataclass(frozen=True)
class Convolution:
    """The convolution of a network as a forward pass of a transposed layer, planned.

    Attributes:
        weight_strides, weight_offset: of the weight as that layer sees it, in elements.
    """

    layer: Layer
    plan: Plan
    weight: str
    bias: str
    weight_strides: tuple[int, ...]
    weight_offset: int


class NetworkText:
    """The file of a network, piece by piece.

    Raises:
        ExportError: an operator, or a convolution, that no kernel here runs.
    """

    def __init__(self, network: Network, gpu: Gpu, tidy: bool) -> None:
        self.network, self.gpu = network, gpu
        self.paths = {tensor.name: tensor for tensor in network.tensors}
        inputs = [name for name, _ in network.inputs]
        self.names = [*inputs, *self.paths]
        if len({*self.names, CONVOLVED, RESULT}) < len(self.names) + 2:
            raise ExportError(f"names of tensors are not distinct: {', '.join(self.names)}")
        placeholders = list(network.graph.find_nodes(op="placeholder"))
        ordered = [*self.paths, *inputs]
        named = dict(zip(placeholders, ordered, strict=True))
        self.named = named
        found: list[Convolution] = []

        def joins(node: Node, steps: Steps) -> bool:
            found.append(self._convolution(node))
            return bool(steps) and self._joins(found[0], node, steps)

        self.reading: Reading = read(network.graph, named, placeholders[len(self.paths) :], joins)
        self.convolution = found[0] if found else self._convolution(self.reading.convolution)
        layer = self.convolution.layer
        epilogue = self._epilogue(self.reading.steps)
        call = sized_call(self.convolution.plan, layer.batch, layer.input_size)
        if not epilogue.empty:
            call = fused_call(call, layer.batch, layer.input_size, epilogue)
        self.variant = Variant("forward", call.plan.problem.arithmetic, call, "only")
        self.text = tidied([self.variant], False) if tidy else arrange([self.variant])
        self.program = Program(running=self.reading.running)
        self.before = self.program.store(self.reading.source).name
        self.kernels_before = len(self.program.kernels)
        self.after = self.program.store(self.reading.result, RESULT).name

    # --- The convolution -------------------------------------------------------------------------

    def _convolution(self, node: Node) -> Convolution:
        arguments: list[Any] = list(node.args)
        source, weight, bias, stride, padding, dilation, transposed, more, groups = arguments
        if weight not in self.named or (bias is not None and bias not in self.named):
            raise ExportError("the convolution's weight and bias must be parameters of the Model")
        size = tuple(weight.meta["val"].shape)
        batch, _, d, h, w = source.meta["val"].shape
        strides, offset = tuple(math.prod(size[axis + 1 :]) for axis in range(5)), 0
        if not transposed:
            # A convolution is a transposed one with its channels exchanged and its taps flipped.
            if any(s != 1 for s in stride) or groups != 1:
                raise ExportError("a strided or grouped Conv3d cannot be exported")
            padding = [e * (k - 1) - p for k, p, e in zip(size[2:], padding, dilation, strict=True)]
            if min(padding) < 0:
                raise ExportError(
                    "a Conv3d that pads more than its kernel reaches cannot be exported"
                )
            strides, offset = flipped(size, strides)
            size = (size[1], size[0], *size[2:])
        geometry = Geometry(
            size[0],
            size[1] * groups,
            _triple(size[2:]),
            _triple(stride),
            _triple(padding),
            _triple(more),
            _triple(dilation),
            groups,
        )
        layer = Layer(
            self.network.name,
            self.network.origin,
            geometry,
            bias is not None,
            batch,
            (d, h, w),
            "",
            self.network.arguments,
        )
        reason = refusal("forward", geometry, torch.float32, self.gpu.capability)
        if reason is not None:
            raise ExportError(reason)
        plan = plan_for(
            "forward",
            geometry,
            layer.input_size,
            batch,
            torch.float32,
            bias=layer.bias,
            arithmetic=arithmetics(layer, "problem")[0],
            gpu=self.gpu,
            canonical=False,
        )
        name = "" if bias is None else self.named[bias]
        return Convolution(layer, plan, self.named[weight], name, strides, offset)

    def _joins(self, convolution: Convolution, node: Node, steps: Steps) -> bool:
        """Whether the kernel runs steps, and saves time by it; their operands must be at hand."""
        epilogue = self._epilogue(steps)
        layer, plan = convolution.layer, convolution.plan
        if epilogue.reads_tensors and not gains_by_tensors(plan):
            return False
        for step, operand in steps:
            if step.operand and operand not in self.named:
                return False
            channels = layer.geometry.out_channels
            if step.operand == "channel" and _numel(operand) != channels:
                return False
        schedule = plan.schedule(layer.batch, layer.input_size)
        return settle(schedule, plan.problem, epilogue)[0] == epilogue

    def _epilogue(self, steps: Steps) -> Epilogue:
        operands = sum(step.operand != "" for step, _ in steps)
        return Epilogue(
            tuple(step.kind for step, _ in steps),
            tuple(value for step, _ in steps for value in step.scalars),
            (False,) * operands,
        )

    # --- C++ -------------------------------------------------------------------------------------

    def kernels(self) -> str:
        """The text of the kernels around the convolution; none where all joined it."""
        if not self.program.kernels:
            return ""
        folder = resources.files("convt3d.export") / "network"
        return (
            "#ifndef CONVT3D_DEVICE\n#define CONVT3D_DEVICE __device__ __forceinline__\n#endif\n"
            + flatten("epilogue/functions.cuh")
            + (folder / "loops.cuh").read_text().replace("#pragma once\n", "")
            + "\nnamespace convt3d {\n\n"
            + "\n".join(kernel.text for kernel in self.program.kernels)
            + "\n}  // namespace convt3d\n"
        )

    def launches(self) -> str:
        """The launcher's functions."""
        own, layer = host_function(self.variant, "convolution"), self.convolution.layer
        lines = [
            f"{'long long' if self._is_counter(name) else 'float'}* const {name} = "
            f"static_cast<{'long long' if self._is_counter(name) else 'float'}*>(tensors[{i}]);"
            for i, name in enumerate([*self.names, RESULT])
            if name in self._used()
        ]
        sizes = dict(self.program.tensors)
        if self.after != CONVOLVED:
            n = layer.batch * layer.geometry.out_channels
            sizes[CONVOLVED] = n * math.prod(layer.geometry.output_size(layer.input_size))
        lines += [
            f"float* const {name} = static_cast<float*>(allocate({4 * count}LL));"
            for name, count in sizes.items()
            if name != RESULT
        ]
        lines.append("cudaError_t status = cudaSuccess;")
        before = self.kernels_before
        calls = [self._launch(kernel) for kernel in self.program.kernels]
        lines += [line for call in calls[:before] for line in call]
        found = self.convolution
        operands = self._operands()
        tensors = ", ".join(
            (
                self.before,
                found.weight + (f" + {found.weight_offset}" if found.weight_offset else ""),
                found.bias or "nullptr",
                RESULT if self.after == CONVOLVED else CONVOLVED,
                *map(str, found.weight_strides),
                *(operands + ["nullptr"] * (len(OPERANDS) - len(operands))),
            )
        )
        out = layer.geometry.output_size(layer.input_size)
        extents = ", ".join(map(str, (layer.batch, *layer.input_size, *out)))
        lines += wrapped(f"const Tensors convolved_of = {{{tensors}}};")
        lines += wrapped(
            "if (status == cudaSuccess) "
            f"status = convolution(convolved_of, {{{extents}}}, allocate, stream);"
        )
        lines += [line for call in calls[before:] for line in call]
        body = "".join(f"  {line}\n" for line in lines)
        return launcher(
            f"{_SCALARS if self.reading.steps else ''}{own}\n"
            "cudaError_t network(void* const* tensors, const Allocate& allocate, "
            f"cudaStream_t stream) {{\n{body}  return status;\n}}\n"
        )

    def _launch(self, kernel: Any) -> list[str]:
        arguments = [f"around::around_{kernel.name}", str(kernel.grid), str(THREADS), "0", "stream"]
        call = ", ".join([*arguments, *kernel.tensors])
        return wrapped(f"if (status == cudaSuccess) status = launch({call});")

    def _is_counter(self, name: str) -> bool:
        return name in self.paths and self.paths[name].counter

    def _operands(self) -> list[str]:
        """What the steps in the epilogue read, by name."""
        return [self.named[o] for _, o in self.reading.steps if isinstance(o, Node)]

    def _used(self) -> set[str]:
        """Tensors that a launch reads or writes, by name."""
        found = self.convolution
        read_or_written = {tensor for k in self.program.kernels for tensor in k.tensors}
        return (
            read_or_written | {*self._operands()} | {found.weight, found.bias, self.before, RESULT}
        )

    # --- The file --------------------------------------------------------------------------------

    def file(self, figures: Mapping[str, Any] | None) -> Exported:
        """The whole text."""
        around = self.kernels()
        entries = ", ".join(f'"{kernel.name}"' for kernel in self.program.kernels)
        parts = {
            "common": self.text.common,
            "sections": sections(self.text) + (f"\nAROUND = r'''\n{around}'''\n" if around else ""),
            "kernels": kernel_entry(self.variant, self.text)
            + (f'    "around": (AROUND, [{entries}], {{}}),\n' if around else ""),
            "declarations": template("network_declarations.h"),
            "launch": launch_text([self.variant], True),
            "host": self.launches(),
            "binding": Template(template("network_binding.cpp")).substitute(
                expected="".join(self._expected()), result=", ".join(map(str, self.reading.shape))
            ),
        }
        digest = digest_of(parts)
        network, layer = self.network, self.convolution.layer
        inputs = [name for name, _ in network.inputs]
        text = Template(template("network.py.txt")).substitute(
            parts,
            header=header(
                layer,
                "problem",
                [self.variant],
                digest,
                figures,
                [kernel.name for kernel in self.program.kernels],
            ),
            extension=extension_name(network.name, digest),
            precision="",
            signature=", ".join(map(parameter, network.arguments)),
            checks="".join(
                f'            ("{a.name}", {a.name}, {a.value!r}),\n' for a in network.arguments
            ),
            drawn=_list("drawn", network.drawn),
            placed="".join(f"            {_placed(tensor)},\n" for tensor in network.tensors),
            inputs=", ".join(inputs),
            first=inputs[0],
            refusals=self._refusals(),
            tensors=repr(tuple(tensor.path for tensor in network.tensors)),
        )
        return Exported(text, digest)

    def _expected(self) -> list[str]:
        rows = [(name, "input", shape) for name, shape in self.network.inputs]
        for tensor in self.network.tensors:
            kind = "counter" if tensor.counter else "buffer" if tensor.buffer else "parameter"
            rows.append((tensor.path, kind, tensor.shape))
        return [
            f'    {{"{name}", {kind}, {{{", ".join(map(str, shape))}}}}},\n'
            for name, kind, shape in rows
        ]

    def _refusals(self) -> str:
        """Statements that refuse calls which the kernels would answer otherwise than the Model."""
        text = ""
        if self.convolution.plan.problem.arithmetic is Arithmetic.TF32:
            text += _NO_TF32
        if self.reading.running:
            text += _NO_EVALUATION
        return text


_SCALARS = """
/// Scalars of steps; a kernel has a type of its own for them.
struct Scalars {
  float value[8];
  template <typename Kernels>
  operator Kernels() const {
    static_assert(sizeof(Kernels) == sizeof(Scalars), "");
    Kernels copy;
    __builtin_memcpy(&copy, value, sizeof(copy));
    return copy;
  }
};
"""
_NO_TF32 = """\
        if not torch.backends.cudnn.allow_tf32:
            raise RuntimeError("these kernels multiply in TF32, which PyTorch's switch forbids")
"""
_NO_EVALUATION = """\
        if not self.training:
            raise RuntimeError("these kernels were generated for training mode")
"""


def _list(name: str, items: Sequence[str]) -> str:
    rows = "".join(f"            {item},\n" for item in items)
    return f"        {name} = [\n{rows}        ]" if items else f"        {name} = []"


def _placed(tensor: Any) -> str:
    made = tensor.made if tensor.buffer else f"nn.Parameter({tensor.made})"
    return f'("{tensor.path}", {made})'


def _numel(operand: Any) -> int:
    return int(operand.meta["val"].numel())


def _triple(numbers: Any) -> tuple[int, int, int]:
    d, h, w = (int(n) for n in numbers)
    return (d, h, w)


def export_network(
    network: Network,
    *,
    tidy: bool = False,
    figures: Mapping[str, Any] | None = None,
    gpu: Gpu | None = None,
) -> Exported:
    """The ModelNew file of a network: its forward pass in training mode, for Hopper.

    Args:
        network: from :func:`convt3d.export.network.problem.network_of`.
        tidy, figures, gpu: as of :func:`convt3d.export.export`.

    Raises:
        ImportError: ``tidy`` without its packages.
        ExportError: an operator, or a convolution, that no kernel here runs.
    """
    return NetworkText(network, gpu or Gpu(), tidy).file(figures)

"""What will run for a layer, and why: phases and taps, kernel and tile, work and limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from convt3d import backends, drawing, portable
from convt3d.arguments import check
from convt3d.bench.limits import Limit
from convt3d.bench.shapes import Shape
from convt3d.geometry import Geometry, Triple
from convt3d.layout import beyond_32_bits
from convt3d.operations import OPERATIONS
from convt3d.polyphase import tapped_phases
from convt3d.precision import Arithmetic, conv_tf32_allowed

if TYPE_CHECKING:
    from convt3d.cuda.plan.sketch import Sketch
    from convt3d.cuda.schedule import Gpu, Plan, Problem

_AXES = ("D", "H", "W")
_MOST_PHASES = 8  # of an axis that are listed


@dataclass(frozen=True)
class Choice:
    """What runs one operation: a short name, and facts about it."""

    operation: str
    runs_as: str
    reason: str = ""  # why nothing faster runs, where that is so
    facts: dict[str, str] = field(default_factory=dict)
    decided: str = ""  # what chose the kernel of ours, in a sentence
    runner_up: str = ""  # name of the kernel of another kind that comes next
    sketch: Sketch | None = None  # tile, K loop and work tiles of the kernel of ours

    def drawn(self) -> list[str]:
        """The tile with what is to be known of it, or the name alone."""
        name = f"{self.operation}: {self.runs_as}"
        if self.sketch is None:
            return [name]
        facts = self.facts
        arithmetic = [facts[fact] for fact in ("arithmetic", "because of") if fact in facts]
        texts = [f"{name} ({', because of '.join(arithmetic)})" if arithmetic else name]
        if "kernels of" in facts:
            texts.append(f"as {facts['kernels of']}")
        if self.sketch.k:
            texts.append(f"K loop: {self.sketch.k}")
        elif "unit" in facts:
            texts.append(facts["unit"])
        texts.append(self.sketch.work)
        return drawing.tile(self.sketch, texts)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "runs_as": self.runs_as,
            "reason": self.reason,
            **self.facts,
            "decided": self.decided,
            "runner_up": self.runner_up,
            "product": None if self.sketch is None else asdict(self.sketch),
        }


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`; ``str`` of it is readable, ``to_dict`` fits JSON."""

    shape: Shape
    dtype: torch.dtype
    device: str
    channels_last: bool
    phases: tuple[tuple[tuple[int, ...], ...], ...]  # axis, one of the first phases, kernel indices
    choices: tuple[Choice, ...]
    limit: Limit | None
    assumed: str = ""  # says which GPU the plans are for, where there is no such device

    @property
    def element_size(self) -> int:
        return torch.empty(0, dtype=self.dtype).element_size()

    @property
    def empty_phases(self) -> tuple[int, ...]:
        """How many phases of each axis no tap reaches."""
        strides = self.shape.geometry.stride
        axes = _axes(self.shape.geometry)
        return tuple(s - len(tapped_phases(*axis)) for s, axis in zip(strides, axes, strict=True))

    @property
    def _tensors(self) -> str:
        layout = "channels_last_3d" if self.channels_last else "contiguous"
        return f"{_name(self.dtype)}, {layout}, {self.device}"

    def lines(self) -> list[tuple[str, str]]:
        """Label and text of every fact."""
        shape = self.shape
        result = [
            ("layer", shape.geometry.label),
            ("input", _size(shape.x_size)),
            ("output", _size(shape.y_size)),
            ("tensors", self._tensors),
        ]
        if self.assumed:
            result.append(("GPU", self.assumed))
        # The phases are those of what a stride spreads: of a Conv3d, the gradient by input.
        of, none = ("", "bias only") if shape.geometry.transposed else ("grad_input, ", "none")
        for axis, phases, count, empty in zip(
            _AXES, self.phases, shape.geometry.stride, self.empty_phases, strict=True
        ):
            taps = [
                f"{r}: " + (", ".join(map(str, indices)) or none)
                for r, indices in enumerate(phases)
            ]
            if len(phases) < count:
                taps.append(f"and so on, {count} phases, {empty} of them {none}")
            result.append((f"{of}taps by phase, {axis}", "; ".join(taps)))
        result.append(("operations", f"{shape.operations / 1e9:.4g} GFLOP a pass"))
        result.append(("bytes", f"{shape.traffic(self.element_size) / 1e6:.4g} MB a pass"))
        if self.limit is not None:
            result.append(("limit", f"{self.limit.ms:.4g} ms, {_bound(self.limit)}"))
        for choice in self.choices:
            result.append((choice.operation, choice.runs_as))
            if choice.reason:
                result.append(("  why", choice.reason))
            result.extend((f"  {name}", text) for name, text in choice.facts.items())
        return result

    def __str__(self) -> str:
        """Sizes, phases, tiles and reasons, in at most about 30 lines."""
        shape = self.shape
        parts = [
            f"{shape.geometry.label}: {_size(shape.x_size)} -> {_size(shape.y_size)}",
            f"{self._tensors}; {shape.operations / 1e9:.4g} GFLOP and "
            f"{shape.traffic(self.element_size) / 1e6:.4g} MB a pass",
        ]
        if self.assumed:
            parts.append(f"GPU: {self.assumed}.")
        parts += ["", *self._drawn_phases(), ""]
        parts += [line for choice in self.choices for line in choice.drawn()]
        return "\n".join([*parts, "", *self._sentences()])

    def _drawn_phases(self) -> list[str]:
        """The phases along each axis with their taps, under a sentence that says what they are."""
        g = self.shape.geometry
        if max(g.stride) == 1:
            return [f"Stride 1: one phase, and all {prod(g.kernel_size)} taps for every output."]
        what = "An output" if g.transposed else "A position of grad_input"
        none = "is the bias, or zero" if g.transposed else "is zero"
        text = f"{what} at o has phase o mod stride along each axis, and the taps of its phase:"
        lines = [text, *drawing.phases(self.phases, g.kernel_size, g.stride)]
        total = prod(g.stride)
        live = prod(s - empty for s, empty in zip(g.stride, self.empty_phases, strict=True))
        if live < total:
            lines.append(f"{total - live} of {total} phases have no tap: what lies there {none}.")
        return lines

    def _sentences(self) -> list[str]:
        """What decided, for each operation, and the limit of the hardware."""
        found: dict[str, list[str]] = {}
        for choice in self.choices:
            text = choice.reason or choice.decided
            if choice.runner_up:
                text += f"; runner-up of another kind: {choice.runner_up}"
            if text:
                found.setdefault(text, []).append(choice.operation)
        lines = [f"{', '.join(operations)}: {text}." for text, operations in found.items()]
        if self.limit is not None:
            lines.append(f"Limit: {self.limit.ms:.4g} ms a pass, {_bound(self.limit)}.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            **self.shape.to_dict(),
            "output_size": list(self.shape.y_size),
            "dtype": _name(self.dtype),
            "device": self.device,
            "channels_last": self.channels_last,
            "assumed": self.assumed,
            "phases": [[list(taps) for taps in axis] for axis in self.phases],
            "phase_counts": list(self.shape.geometry.stride),
            "empty_phases": list(self.empty_phases),
            "operations": self.shape.operations,
            "bytes": self.shape.traffic(self.element_size),
            "limit": None if self.limit is None else self.limit.to_dict(),
            "choices": {choice.operation: choice.to_dict() for choice in self.choices},
        }


def explain(
    layer: torch.nn.Conv3d | torch.nn.ConvTranspose3d | Geometry,
    input_shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | str | None = None,
    channels_last: bool = False,
    limit: Limit | None = None,
) -> Explanation:
    """What convt3d runs for a layer.

    Args:
        layer: a module, or a Geometry, of a Conv3d or a ConvTranspose3d. Of a module that pads in
            another way than by zeros, the layer that runs behind its padding.
        input_shape: (N, C_in, D, H, W) or (C_in, D, H, W).
        dtype: of the tensors; the module's, or float32, if absent.
        device: where they lie; the module's, or "cuda" if PyTorch sees a GPU, if absent. A CUDA
            device that this machine lacks gives the plan for an H200, and the answer says so.
        channels_last: whether they are channels_last_3d.
        limit: a hardware limit to show, as ``convt3d.bench.limits`` measures it.

    Raises:
        TypeError: another kind of layer, or no shape.
        RuntimeError: the input does not fit the layer.
    """
    if isinstance(input_shape, (int, torch.Tensor)):
        given = type(input_shape).__name__
        raise TypeError(f"input_shape has the sizes of the input, such as x.shape, not a {given}")
    if isinstance(layer, Geometry):
        geometry, bias = layer, False
    elif not isinstance(layer, (torch.nn.Conv3d, torch.nn.ConvTranspose3d)):
        raise TypeError(
            f"a Conv3d, a ConvTranspose3d or a Geometry is explained, not a {type(layer).__name__}"
        )
    else:
        geometry, bias = geometry_of(layer), layer.bias is not None
        dtype = dtype or layer.weight.dtype
        device = device or layer.weight.device
    dtype = dtype or torch.float32
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if min(input_shape, default=0) < 0:
        raise RuntimeError(f"sizes must not be negative, but got {tuple(input_shape)}")
    check(
        list(input_shape),
        geometry.weight_size,
        None,
        geometry.stride,
        geometry.padding,
        geometry.output_padding,
        geometry.groups,
        geometry.dilation,
        geometry.transposed,
    )
    depth, height, width = (int(n) for n in input_shape[-3:])
    if getattr(layer, "padding_mode", "zeros") != "zeros":  # the module pads, then the layer runs
        w0, w1, h0, h1, d0, d1 = layer._reversed_padding_repeated_twice  # type: ignore[union-attr]
        depth, height, width = depth + d0 + d1, height + h0 + h1, width + w0 + w1
        geometry = replace(geometry, padding=(0, 0, 0))
    batch = int(input_shape[0]) if len(input_shape) == 5 else 1
    shape = Shape(geometry.label, batch, (depth, height, width), bias, geometry)
    phases = tuple(
        tuple(
            tuple(tap.kernel_index for tap in tapped_phases(*axis).get(phase, ()))
            for phase in range(min(stride, _MOST_PHASES))
        )
        for stride, axis in zip(geometry.stride, _axes(geometry), strict=True)
    )
    choices = tuple(
        _choice(op, shape, dtype, device, channels_last, sketched=True) for op in OPERATIONS
    )
    assumed = (
        ""
        if device.type != "cuda" or has_gpu(device)
        else (f"this machine has no {device}; the plans are for an H200, which is assumed")
    )
    return Explanation(shape, dtype, str(device), channels_last, phases, choices, limit, assumed)


def has_gpu(device: torch.device) -> bool:
    """Whether this machine has a CUDA device."""
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


def geometry_of(module: torch.nn.Conv3d | torch.nn.ConvTranspose3d) -> Geometry:
    """The Geometry of a module; RuntimeError where padding="same" pads one side more with zeros."""
    return Geometry(
        module.in_channels,
        module.out_channels,
        _triple(module.kernel_size),
        _triple(module.stride),
        _padding(module),
        _triple(module.output_padding),
        _triple(module.dilation),
        module.groups,
        isinstance(module, torch.nn.ConvTranspose3d),
    )


def _padding(module: torch.nn.Conv3d | torch.nn.ConvTranspose3d) -> Triple:
    if module.padding == "valid":
        return (0, 0, 0)
    if module.padding != "same":
        return _triple(module.padding)
    total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if any(n % 2 for n in total) and module.padding_mode == "zeros":
        raise RuntimeError(
            'padding="same" of an even kernel pads a copy of the input: no one layer'
        )
    return _triple([n // 2 for n in total])


def chosen(
    operation: str,
    geometry: Geometry,
    batch: int,
    input_size: Triple,
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool,
    bias: bool = False,
) -> str:
    """Short name of what runs an operation."""
    shape = Shape(geometry.label, batch, input_size, bias, geometry)
    return _choice(operation, shape, dtype, device, channels_last).runs_as


def _choice(
    operation: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool,
    *,
    sketched: bool = False,
) -> Choice:
    """What runs an operation; ``sketched`` adds what decided, the runner-up and the sketch."""
    pytorch = portable.PYTORCH
    if backends.DISABLED:
        return Choice(operation, pytorch, "CONVT3D_DISABLE is set")
    if not shape.geometry.transposed:
        return _conv3d_choice(operation, shape, dtype, device, channels_last, sketched)
    if device.type != "cuda":
        form = portable.choose(
            operation,
            shape.geometry,
            shape.batch,
            shape.input_size,
            dtype,
            device.type,
            channels_last,
        )
        if form == portable.GEMM and not portable.products_are_exact():
            reason = "PyTorch's switches allow inexact matrix products, the faster form"
            return Choice(operation, pytorch, reason)
        if form != pytorch:
            return Choice(operation, form, decided="it measured faster for layers like this one")
        return Choice(operation, form, portable.why_pytorch(dtype, device.type))
    return _cuda_choice(operation, shape, dtype, device, channels_last, sketched)


def _conv3d_choice(
    operation: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool,
    sketched: bool,
) -> Choice:
    """The same of a Conv3d: on CUDA, by the kernels of the transposed layer with its weight."""
    if device.type != "cuda":
        return Choice(operation, portable.PYTORCH, "off CUDA, PyTorch's own operator runs a Conv3d")
    layer, inner = shape.as_transposed(operation)
    choice = _cuda_choice(inner, layer, dtype, device, channels_last, sketched)
    if choice.reason:  # no kernel of ours
        return replace(choice, operation=operation)
    kernels = f"{inner} of the transposed layer {layer.geometry.label}"
    return replace(choice, operation=operation, facts={"kernels of": kernels, **choice.facts})


def _cuda_choice(
    operation: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool,
    sketched: bool,
) -> Choice:
    from convt3d.cuda import cudnn, plan
    from convt3d.cuda.schedule import Gpu

    if has_gpu(device):
        from convt3d.cuda import backend

        index = torch.cuda.current_device() if device.index is None else device.index
        gpu = Gpu.of(index)
        reason = backend.refusal(operation, shape.geometry, dtype, torch.device("cuda", index))
    else:
        gpu = Gpu()
        reason = plan.refusal(operation, shape.geometry, dtype, gpu.capability)
    if reason is not None:
        return Choice(operation, portable.PYTORCH, reason)
    if 0 in shape.x_size or 0 in shape.y_size:
        return Choice(operation, "no kernel", "a tensor is empty, and the result is filled in")
    if beyond_32_bits(shape.x_size[2:], shape.y_size[2:]):
        return Choice(operation, portable.PYTORCH, "a channel has 2^31 elements or more")
    problem = plan.problem_for(operation, shape.geometry, dtype, channels_last, bias=shape.bias)
    benchmark = torch.backends.cudnn.benchmark
    reason = cudnn.left_to_pytorch(problem, shape.batch, shape.input_size, gpu, benchmark)
    if reason is not None:
        return Choice(operation, portable.PYTORCH, reason)
    chosen_plan = plan.plan_problem(problem, shape.batch, shape.input_size, gpu)
    facts = dict(chosen_plan.describe())
    facts["arithmetic"] = problem.arithmetic.value
    if problem.arithmetic is Arithmetic.IEEE and conv_tf32_allowed():
        facts["because of"] = "groups" if shape.geometry.groups > 1 else "few channels"
    choice = Choice(operation, facts.pop("kernel", type(chosen_plan).__name__), "", facts)
    return _sketched(choice, problem, chosen_plan, shape, gpu) if sketched else choice


def _sketched(choice: Choice, problem: Problem, chosen: Plan, shape: Shape, gpu: Gpu) -> Choice:
    """A choice with what decided it, the runner-up and its sketch."""
    from convt3d.cuda.plan import MODELS, decide, ranked_plans
    from convt3d.cuda.plan.sketch import sketch

    canonical, size = problem.canonical(shape.input_size)
    ranked = ranked_plans(canonical, shape.batch, size, gpu)
    names = (plan.describe().get("kernel", "") for plan in ranked)
    runner_up = next((name for name in names if name not in ("", choice.runs_as)), "")
    _, by = decide(canonical, shape.batch, size, gpu)
    decided = f"it was {by}"
    if by == MODELS:
        first = f"the rules and cost models put it first of {len(ranked):,} plans"
        decided = first if len(ranked) > 1 else "it is the only plan"
    found = sketch(chosen, shape.batch, size)
    return replace(choice, decided=decided, runner_up=runner_up, sketch=found)


def _axes(g: Geometry) -> Iterator[tuple[int, int, int, int]]:
    """Kernel, stride, padding and dilation of each axis."""
    return zip(g.kernel_size, g.stride, g.padding, g.dilation, strict=True)


def _triple(value: Any) -> Triple:
    a, b, c = value
    return (int(a), int(b), int(c))


def _size(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def _bound(limit: Limit) -> str:
    """What bounds a pass, and the rates behind it."""
    return (
        f"bound by {limit.bound} ({limit.matrix_tflops:.4g} TFLOP/s, "
        f"{limit.copy_tbytes:.3g} TB/s measured now)"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

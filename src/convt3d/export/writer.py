"""Writes the self-contained ModelNew file of a layer: kernels, launcher, binding, module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Template
from typing import Any

import torch

from convt3d.cuda.plan import refusal
from convt3d.cuda.schedule import OPERATIONS, Gpu, Plan
from convt3d.export.binding import binding, declarations
from convt3d.export.header import header
from convt3d.export.host import has_formulas, host_call, plain, portable, sized_call
from convt3d.export.kernels import arrange
from convt3d.export.kernels import tidy as tidied
from convt3d.export.layer import ExportError, Layer
from convt3d.export.operations import Operation, adds_bias, operation_of
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
)
from convt3d.export.variants import (
    ARCHITECTURES,
    ARITHMETIC_NAMES,
    PRECISIONS,
    Variant,
    arithmetics,
)
from convt3d.precision import Arithmetic


@dataclass(frozen=True)
class Exported:
    """A generated file.

    Attributes:
        text: the whole file, Python.
        digest: names its kernels, launcher and binding: 12 hexadecimal digits.
    """

    text: str
    digest: str


def export(
    layer: Layer,
    precision: str = "problem",
    *,
    architectures: Sequence[str] = ("sm_90a",),
    tidy: bool = False,
    figures: Mapping[str, Any] | None = None,
    gpu: Gpu | None = None,
) -> Exported:
    """The ModelNew file of a layer.

    Args:
        layer: from :func:`convt3d.export.layer.from_problem` or ``from_shape``.
        precision: ``"problem"`` keeps the kernels of PyTorch's default, TF32, and leaves calls to
            PyTorch's operator while its switch forbids TF32; ``"follow"`` keeps both kinds of
            kernel and asks the switch at every call; ``"tf32"`` and ``"ieee"`` run one kind
            whatever the switch says. Grouped layers are IEEE-grade in each case, a Conv3d of few
            input channels (``variants.of_few_channels``) in the first two, as PyTorch's own are.
        architectures: ``"sm_90a"``: kernels for Hopper, which run the problem's own extents;
            ``"sm_80"``: kernels for compute capability 8.0 and up, which run all extents.
            PyTorch's operator runs what the file has no kernel for.
        tidy: reduce the kernels' text to what the file needs (:mod:`convt3d.export.tidy`); takes
            a few minutes.
        figures: record of ``tools/kernelbench_check.py``; quoted if it measured these kernels.
        gpu: whose properties the tiles are chosen for; an H200 if absent.

    Raises:
        ValueError: an unknown precision or architecture.
        ImportError: ``tidy`` without its packages.
        ExportError: a layer that no exportable kernel runs.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    if not architectures or not set(architectures) <= set(ARCHITECTURES):
        raise ValueError(
            f"architectures must be among {', '.join(ARCHITECTURES)}, "
            f"not {', '.join(architectures) or 'none'}"
        )
    gpu = gpu or Gpu()
    reason = refusal("forward", layer.geometry, torch.float32, gpu.capability)
    if reason is not None:
        raise ExportError(reason)
    if layer.bias and not adds_bias(layer):
        raise ExportError(
            f"a Conv3d whose output runs as a gradient by input ({layer.geometry.label}: strided, "
            "grouped, of one tap, or padded by more than its kernel reaches) cannot be exported "
            "with a bias"
        )
    variants = _variants(layer, precision, architectures, gpu)
    has_bias = any(argument.bias for argument in layer.arguments) and adds_bias(layer)
    text = tidied(variants, has_bias) if tidy else arrange(variants)
    hopper = None if len(architectures) > 1 else architectures[0] == "sm_90a"
    only = all(v.call.only for v in variants)
    watched = precision == "problem" and arithmetics(layer, precision) == (Arithmetic.TF32,)
    served = _served(layer, only, watched)
    parts = {
        "common": text.common,
        "sections": sections(text),
        "kernels": "".join(kernel_entry(v, text) for v in variants),
        "declarations": declarations(layer),
        "launch": launch_text(variants, hopper),
        "host": _host(variants),
        "binding": binding(layer, only, bool(served)),
    }
    digest = digest_of(parts)
    file = Template(template("module.py.txt")).substitute(
        parts,
        header=header(layer, precision, variants, digest, figures),
        extension=extension_name(layer.name, digest),
        selection=_selection(hopper),
        served=served,
        kind=layer.kind,
        function=layer.function,
        other_function=f'\n                "{layer.function}_elsewhere",' if served else "",
        other_call=_OTHER_CALL.format(function=layer.function) if served else "",
        precision=_precision(layer, precision),
        weight_size=", ".join(map(str, layer.geometry.weight_size)),
        out_channels=layer.geometry.out_channels,
        fan_in=" * ".join(map(str, layer.geometry.weight_size[1:])),
        signature=", ".join(map(parameter, layer.arguments)),
        checks=_checks(layer),
        make_layer=_make_layer(layer),
        call_layer=_call_layer(layer),
        input=layer.input_name,
        bias=layer.bias,
    )
    return Exported(file, digest)


# ---------------------------------------------------------------- variants


def _variants(
    layer: Layer, precision: str, architectures: Sequence[str], gpu: Gpu
) -> list[Variant]:
    variants = []
    for operation in OPERATIONS:
        for arithmetic in arithmetics(layer, precision):
            asked = operation_of(layer, operation, arithmetic)
            plans = [asked.plan(which) for which in (portable(gpu), gpu)]
            if "sm_80" not in architectures:
                found = [(plans[1], "only")]
            else:
                found = [(plans[0], "")]
                kind = _kind(asked, *plans)
                if kind and "sm_90a" in architectures:
                    found.append((plans[1], kind))
            for plan, kind in found:
                make = sized_call if kind in ("sized", "only") else host_call
                try:
                    call = make(plan, asked.batch, asked.input_size)
                except NotImplementedError as error:
                    raise ExportError(str(error)) from error
                variant = Variant(operation, arithmetic, call, kind)
                if operation == "forward" and asked.problem.forward:
                    _check_bias_is_one_macro(asked, variant)
                variants.append(variant)
    return variants


def _kind(asked: Operation, anywhere: Plan, own: Plan) -> str:
    """How a plan for the GPU at hand stands beside the portable one: see Variant; "" if not."""
    if not has_formulas(own):
        return "sized"
    schedules = [plain(plan.schedule(asked.batch, asked.input_size)) for plan in (anywhere, own)]
    return "hopper" if schedules[0] != schedules[1] else ""


def _check_bias_is_one_macro(asked: Operation, variant: Variant) -> None:
    """A bias must change one number of the forward kernel, which the file sets itself."""
    plan: Any = variant.plan
    other = replace(plan, problem=replace(plan.problem, bias=True))
    make = sized_call if variant.call.only else host_call
    call = make(other, asked.batch, asked.input_size)
    with_bias = replace(variant, call=call)
    launches = tuple(
        replace(one, kernel=own.kernel)
        for one, own in zip(call.launches, variant.call.launches, strict=True)
    )
    if (
        with_bias.macros != variant.macros | {"CONVT3D_BIAS": "1"}
        or launches != variant.call.launches
    ):
        raise ExportError(f"a bias changes more than CONVT3D_BIAS in a plan of {asked.problem}")


# ---------------------------------------------------------------- C++ text


def _host(variants: Sequence[Variant]) -> str:
    """The launcher: a function for each variant, and one for each operation that chooses."""
    functions = ""
    for function in dict.fromkeys(v.function for v in variants):
        beside = {v.kind: v for v in variants if v.function == function}
        if "only" in beside:
            functions += host_function(beside["only"], function)
            continue
        plain = host_function(beside[""], function)
        hopper = beside.get("hopper", beside[""])
        if "sized" in beside:
            others = f"{function}_others"
            own = host_function(hopper, others) + host_function(beside["sized"], function, others)
        else:
            own = host_function(hopper, function)
        functions += (
            plain if len(beside) == 1 else f"\n#if CONVT3D_HOPPER\n{own}\n#else\n{plain}\n#endif\n"
        )
    choices = ""
    for operation in OPERATIONS:
        names = list(dict.fromkeys(v.function for v in variants if v.operation == operation))
        chosen = names[0] if len(names) == 1 else f"(tf32 ? {names[0]} : {names[1]})"
        flag = "bool" if len(names) == 1 else "bool tf32"
        choices += f"""
cudaError_t {operation}({flag}, const Tensors& t, const Extents& e, const Allocate& allocate,
{" " * (len(operation) + 13)}cudaStream_t stream) {{
  return {chosen}(t, e, allocate, stream);
}}
"""
    return launcher(functions + choices)


def _selection(hopper: bool | None) -> str:
    """The functions that choose kernels and compile for the right architecture."""
    if hopper is None:
        return template("targets.py.txt").rstrip()
    target = "90a" if hopper else "80"
    return Template(template("one_target.py.txt")).substitute(target=target).rstrip()


_OTHER_CALL = """\
        if not served(input):
            return extension(self.bias is not None).{function}_elsewhere(
                input, self.weight, self.bias
            )
"""


_COMPILED_FOR = '''
_devices = {}


def compiled_for(device):
    """Whether a device is one that these kernels are compiled for; PyTorch is asked once."""
    if device not in _devices:
        _devices[device] = torch.cuda.get_device_capability(device) == (9, 0)
    return _devices[device]

'''


def _served(layer: Layer, only: bool, watched: bool) -> str:
    """The function that tells what the file's own kernels run, if that is not everything."""
    conditions = []
    if only:
        size = (layer.batch, layer.geometry.in_channels, *layer.input_size)
        conditions.append(f"input.shape == {size}")
        conditions.append("compiled_for(input.device)")
    elif not layer.geometry.transposed and max(layer.geometry.stride) > 1:
        # Others are the output of a transposed layer with another output padding.
        conditions.append(
            "all((n - m) % s == 0 for n, m, s in "
            f"zip(input.shape[2:], {layer.input_size}, {layer.geometry.stride}))"
        )
    if watched:
        conditions.append("use_tf32()")
    if not conditions:
        return ""
    joined = "\n        and ".join(conditions)
    return f'''{_COMPILED_FOR if only else ""}
def served(input):
    """Whether these kernels run a call; PyTorch's operator runs all others."""
    return (
        {joined}
    )

'''


# ---------------------------------------------------------------- Python text


def _checks(layer: Layer) -> str:
    used = [a for a in layer.arguments if a.used and not (a.bias and adds_bias(layer))]
    rows = "".join(f'            ("{a.name}", {a.name}, {a.value!r}),\n' for a in used)
    ignored = [a.name for a in layer.arguments if not a.used]
    note = f"        # {', '.join(ignored)}: ignored, as the Model does.\n" if ignored else ""
    return f"""{note}        for name, given, built_for in (
{rows}        ):
            if as_triple(given) != as_triple(built_for):
                raise ValueError(
                    "these kernels were generated for %s=%r, not %r" % (name, built_for, given)
                )"""


def _make_layer(layer: Layer) -> str:
    named = [a.name for a in layer.arguments if a.bias]
    made = f"Layer(bool({named[0]}))" if named else f"Layer({layer.bias})"
    *parents, last = layer.path.split(".")
    if not parents:
        return f"        self.{last} = {made}"
    lines = ["parent = self"]
    for name in parents:
        lines.append(f'parent.add_module("{name}", nn.Module())')
        lines.append(f'parent = parent._modules["{name}"]')
    lines.append(f'parent.add_module("{last}", {made})')
    return "\n".join(f"        {line}" for line in lines)


def _call_layer(layer: Layer) -> str:
    if "." not in layer.path:
        return f"self.{layer.path}"
    return f'self.get_submodule("{layer.path}")'


def _precision(layer: Layer, precision: str) -> str:
    kinds = arithmetics(layer, precision)
    if len(kinds) == 2 or (precision == "problem" and kinds[0] is Arithmetic.TF32):
        return '''def use_tf32():
    """What PyTorch's switch allows for convolutions at this moment; torch 2.9 renamed it."""
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is not None:
        return conv.fp32_precision == "tf32"
    return torch.backends.cudnn.allow_tf32

'''
    return f'''def use_tf32():
    """This file holds {ARITHMETIC_NAMES[kinds[0]]} kernels alone."""
    return {kinds[0] is Arithmetic.TF32}

'''

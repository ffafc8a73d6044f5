"""Texts of an exported file: templates, kernels with their numbers, and the launcher in C++."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources

from convt3d.cuda.epilogue import OPERANDS
from convt3d.cuda.schedule import TensorMap
from convt3d.export.formulas import EXTENTS, TENSORS
from convt3d.export.kernels import KernelText
from convt3d.export.layer import Argument, ExportError
from convt3d.export.variants import Variant, title


def template(name: str) -> str:
    return (resources.files("convt3d.export") / "templates" / name).read_text()


def sections(text: KernelText) -> str:
    if any("'''" in part for part in (text.common, *(s.text for s in text.sections))):
        raise AssertionError("kernel text would end the string that holds it")
    return "".join(f"\n{s.name} = r'''\n{s.text}'''\n" for s in text.sections)


def kernel_entry(variant: Variant, text: KernelText) -> str:
    section, macros = text.of[variant.name], text.numbers[variant.name]
    entries = ", ".join(repr(_short(entry)) for entry in variant.entries).replace("'", '"')
    numbers = ", ".join(f"{_short(k)}={_value(v)}" for k, v in macros.items())
    if not numbers:
        return f'    "{variant.name}": ({section}, [{entries}], {{}}),\n'
    body = textwrap.fill(numbers, 92, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f'    "{variant.name}": ({section}, [{entries}], dict(\n{body},\n    )),\n'


def _short(name: str) -> str:
    for prefix in ("convt3d_", "CONVT3D_"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    raise ExportError(f"{name} does not begin with convt3d_")


def _value(text: str) -> str:
    return text if re.fullmatch(r"-?\d+", text) else f'"{text}"'


_HELPERS = {
    "div_up": "constexpr long long div_up(long long a, long long b) { return (a + b - 1) / b; }\n",
    "min": "constexpr long long min(long long a, long long b) { return a < b ? a : b; }\n",
    "max": "constexpr long long max(long long a, long long b) { return a < b ? b : a; }\n",
    "aligned": """inline bool aligned(const void* address) {
  return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}
""",
}


def launcher(functions: str) -> str:
    """The launcher of these functions."""
    helpers = "".join(text for name, text in _HELPERS.items() if f"{name}(" in functions)
    return f"""namespace convt3d::host {{

{helpers}{functions}
}}  // namespace convt3d::host
"""


def host_function(variant: Variant, name: str, others: str = "") -> str:
    """The launches of a variant as a function; ``others`` is one for what it does not serve."""
    call = variant.call
    comment = f"// {title(variant)}."  # the file's header describes the plan
    members = {*TENSORS, *OPERANDS, *(f"weight_stride_{a}" for a in ("in", "out", "d", "h", "w"))}
    lines = [] if call.only else [f"const auto [{', '.join(EXTENTS)}] = e;"]
    if call.only:
        served = [f"e.{n} == {v}" for n, v in zip(EXTENTS, call.only, strict=False)]
        served += [f"aligned(t.{tensor})" for tensor in call.aligned]
        other = f"{others}(t, e, allocate, stream)" if others else "cudaErrorInvalidValue"
        lines += wrapped(f"if (!({' && '.join(served)})) return {other};")
    lines += [f"const long long {name} = {formula};" for name, formula in call.numbers]
    lines += [f"void* const {name} = allocate({size});" for name, size in call.workspaces]
    lines.append("cudaError_t status = cudaSuccess;")
    maps = 0
    for launch in call.launches:
        entry = f"{variant.name}_{_short(launch.kernel.entry)}"
        arguments = []
        for argument in launch.arguments:
            if isinstance(argument, TensorMap):
                tensor = f"t.{argument.tensor}" if argument.tensor in members else argument.tensor
                lines += _map(argument, f"map_{maps}", tensor)
                argument = f"map_{maps}"
                maps += 1
            arguments.append(f"t.{argument}" if argument in members else argument)
        head = [entry, launch.grid, str(launch.block), launch.shared_bytes, "stream"]
        queue = "launch_overlapping" if launch.dependent else "launch"
        lines += wrapped(
            f"if (status == cudaSuccess) status = {queue}({', '.join([*head, *arguments])});"
        )
    body = "".join(f"  {line}\n" for line in lines)
    return f"""
{comment}
static cudaError_t {name}(const Tensors& t, const Extents& e, const Allocate& allocate,
{" " * (len(name) + 20)}cudaStream_t stream) {{
{body}  return status;
}}
"""


def _has_maps(variants: Sequence[Variant]) -> bool:
    launches = (launch for v in variants for launch in v.call.launches)
    return any(isinstance(a, TensorMap) for launch in launches for a in launch.arguments)


def _map(described: TensorMap, name: str, address: str) -> list[str]:
    """Statements that encode a tensor map."""
    lists = (described.extents, described.strides, described.box, described.steps)
    numbers = ", ".join("{" + ", ".join(map(str, values)) + "}" for values in lists)
    call = f'describe({name}, "{described.element}", {address}, {numbers}, {described.swizzle})'
    return [f"TensorMap {name};", *wrapped(f"if (status == cudaSuccess) status = {call};")]


def wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 96, subsequent_indent="    ")


def launch_text(variants: Sequence[Variant], hopper: bool | None) -> str:
    """What launchers call; ``hopper`` says for which architecture, None for several."""
    describe = template("describe.cuh") if _has_maps(variants) else ""
    return _decided(describe + template("launch.cuh"), hopper)


def _decided(text: str, hopper: bool | None) -> str:
    """The text without conditions on the architecture, unless the file has several."""
    if hopper is None:
        return text
    pattern = r"^#if CONVT3D_HOPPER\n(.*?)^#endif\n"
    flags = re.DOTALL | re.MULTILINE
    # Conditions on CUDA's version lie inside of these.
    inner = re.sub(r"(^#if CUDART.*?)^#endif\n", r"\1#ENDIF\n", text, flags=flags)
    made = re.sub(pattern, r"\1" if hopper else "", inner, flags=flags)
    return made.replace("#ENDIF", "#endif")


def digest_of(parts: Mapping[str, str]) -> str:
    """12 hexadecimal digits that name a file's kernels, launcher and binding."""
    return hashlib.sha256("\0".join(parts.values()).encode()).hexdigest()[:12]


def extension_name(name: str, digest: str) -> str:
    """What the compiled extension of a file is called."""
    return f"convt3d_{re.sub(r'[^0-9a-zA-Z]+', '_', name)}_{digest}"


def parameter(argument: Argument) -> str:
    return f"{argument.name}={argument.default!r}" if argument.has_default else argument.name

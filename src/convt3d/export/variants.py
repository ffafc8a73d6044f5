"""The kernels that a file holds: one operation in one arithmetic each."""

from __future__ import annotations

from dataclasses import dataclass

from convt3d.cuda.schedule import Plan
from convt3d.export.formulas import HostCall
from convt3d.export.layer import ExportError, Layer
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic

PRECISIONS = ("problem", "follow", "tf32", "ieee")
ARCHITECTURES = ("sm_90a", "sm_80")
FEW_CHANNELS = 4
"""Of fewer input channels cuDNN computes KernelBench's Conv3d layers in float32, whatever PyTorch's
switch says, and strided layers of one channel; it used TF32 for a strided one of three. Of other
layers no rule is known (docs/numerics.md)."""


@dataclass(frozen=True)
class Variant:
    """One operation in one arithmetic: a plan, its formulas and its place in the file.

    ``kind`` is empty for one that runs on all GPUs and serves all extents; "hopper" is for sm_90a
    and takes the place of that one there; "sized" is for sm_90a, too, and hands other extents than
    the problem's to one of those; "only" is for sm_90a and the problem's extents, with none beside.
    """

    operation: str
    arithmetic: Arithmetic
    call: HostCall
    kind: str = ""

    @property
    def plan(self) -> Plan:
        return self.call.plan

    @property
    def function(self) -> str:
        """The launcher's function, which is one for variants beside each other."""
        return f"{self.operation}_{self.arithmetic.value}"

    @property
    def name(self) -> str:
        return f"{self.function}_{self.kind}" if self.kind not in ("", "only") else self.function

    @property
    def target(self) -> str:
        """The architecture that it is compiled for, at least."""
        return "sm_90a" if self.kind else "sm_80"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(launch.kernel.file for launch in self.call.launches))

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(launch.kernel.entry for launch in self.call.launches))

    @property
    def macros(self) -> dict[str, str]:
        """Of all launches, some of which may have fewer than others."""
        every = {macro for launch in self.call.launches for macro in launch.kernel.macros}
        most = max((launch.kernel.macros for launch in self.call.launches), key=len)
        if every != set(most):
            raise ExportError(f"the launches of {self.name} do not share their macros")
        return dict(most)


def of_few_channels(g: Geometry) -> bool:
    """Whether PyTorch computes a layer without TF32 for its number of input channels."""
    return not g.transposed and g.in_channels < (FEW_CHANNELS if max(g.stride) == 1 else 2)


def arithmetics(layer: Layer, precision: str) -> tuple[Arithmetic, ...]:
    """The arithmetics that a file holds."""
    if precision == "ieee" or layer.geometry.groups > 1:
        return (Arithmetic.IEEE,)
    if precision != "tf32" and of_few_channels(layer.geometry):
        return (Arithmetic.IEEE,)
    if precision in ("problem", "tf32"):
        return (Arithmetic.TF32,)
    return (Arithmetic.TF32, Arithmetic.IEEE)


ARITHMETIC_NAMES = {Arithmetic.TF32: "TF32", Arithmetic.IEEE: "IEEE-grade float32"}


def title(variant: Variant) -> str:
    """A variant in words, as ``Forward, TF32``."""
    operation = {
        "forward": "Forward",
        "grad_input": "Gradient by input",
        "grad_weight": "Gradient by weight",
    }[variant.operation]
    where = {"hopper": " (Hopper)", "sized": " (Hopper, these extents)"}.get(variant.kind, "")
    return f"{operation}, {ARITHMETIC_NAMES[variant.arithmetic]}{where}"


def described(plan: Plan) -> str:
    """What a plan says of itself, in one line."""
    facts = dict(plan.describe())
    return "; ".join([facts.pop("kernel"), *(f"{k} {v}" for k, v in facts.items())])

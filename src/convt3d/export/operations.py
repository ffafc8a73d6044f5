"""What kernels run for each operation of a file's layer: an operation of a transposed layer.

Those of a ConvTranspose3d are its own. A Conv3d is the adjoint of a transposed layer with the same
weight (:meth:`~convt3d.bench.shapes.Shape.as_transposed`); its output, a gradient by input, runs in
its canonical form (:meth:`~convt3d.cuda.schedule.Problem.canonical`), which at stride 1 is a
forward pass on the flipped weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convt3d.cuda.plan import plan_as_given, problem_for
from convt3d.cuda.schedule import Gpu, Plan, Problem
from convt3d.export.layer import Layer
from convt3d.geometry import Triple
from convt3d.precision import Arithmetic


@dataclass(frozen=True)
class Operation:
    """An operation of a layer, as kernels know it.

    Attributes:
        problem: the operation of a transposed layer, without a bias.
        batch, input_size: of that layer's input.
        flipped: whether kernels read the weight with its channels exchanged and its taps in
            reverse (:func:`~convt3d.cuda.schedule.flipped`).
        exchanged: whether that layer's input has the extents of this layer's output.
    """

    problem: Problem
    batch: int
    input_size: Triple
    flipped: bool
    exchanged: bool

    def plan(self, gpu: Gpu) -> Plan:
        return plan_as_given(self.problem, self.batch, self.input_size, gpu)


def operation_of(layer: Layer, operation: str, arithmetic: Arithmetic) -> Operation:
    """What runs for an operation of a layer."""
    shape, name = layer.shape.as_transposed(operation)
    problem = problem_for(name, shape.geometry, torch.float32, arithmetic=arithmetic)
    if layer.geometry.transposed:
        # As it is: at stride 1 its gradient by input then shares a text with its forward pass.
        return Operation(problem, layer.batch, layer.input_size, False, False)
    canonical, size = problem.canonical(shape.input_size)
    flipped = canonical.operation != problem.operation
    return Operation(canonical, layer.batch, size, flipped, not flipped)


def adds_bias(layer: Layer) -> bool:
    """Whether the kernels of the output add a bias to their sums.

    Those of a gradient by input do not.
    """
    return operation_of(layer, "forward", Arithmetic.TF32).problem.forward

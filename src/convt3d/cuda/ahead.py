"""Kernels planned and compiled before a launch asks for them; no tensors, no driver.

A layer's first call names the operations of its gradients (:func:`expect_gradients`), a graph pass
of torch.compile those of the graph (:func:`expect`), and :func:`convt3d.warm` those of a whole
model (:func:`compile_operations`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from convt3d.cuda import compiler
from convt3d.cuda.compiler import Cubin
from convt3d.cuda.operation import Operation
from convt3d.cuda.schedule import Gpu, Launch
from convt3d.cuda.workers import Workers
from convt3d.layer import Layer
from convt3d.layout import reads_channels_last, strides
from convt3d.log import logger
from convt3d.precision import arithmetic_for


def gradients(
    operation: Operation, by_source: bool, by_weight: bool, by_bias: bool
) -> list[Operation]:
    """The operations of the gradients of a ``"forward"`` or ``"grad_input"`` that a layer ran.

    The gradient of the result is taken to have the result's memory format.

    Args:
        operation: the call.
        by_source: whether the gradient by its input is wanted.
        by_weight: whether the gradient by its weight is wanted.
        by_bias: whether the gradient by its bias is wanted.
    """
    source_last, last = operation.layouts
    forward = operation.name == "forward"
    on_meta = torch.empty_strided(operation.result_size, operation.result_strides, device="meta")
    gradient_last = reads_channels_last(on_meta)

    def gradient(
        name: str, layouts: tuple[bool, bool], weight_strides: tuple[int, ...], bias: bool
    ) -> Operation:
        return operation._replace(
            name=name,
            arithmetic=arithmetic_for(operation.dtype, operation.geometry, name, layouts[1]),
            layouts=layouts,
            weight_strides=weight_strides,
            bias=bias,
        )

    found = []
    if by_source:
        name = "grad_input" if forward else "forward"
        found.append(gradient(name, (gradient_last, last), operation.weight_strides, False))
    if by_weight:
        # x and the gradient of y: in a layer that runs grad_input, what it gives is x.
        layouts = (source_last, gradient_last) if forward else (gradient_last, source_last)
        stride = strides(operation.geometry.weight_size, last)
        found.append(gradient("grad_weight", layouts, stride, by_bias and forward))
    return found


# --- In the background ---------------------------------------------------------------------------

# One thread: planning is Python, and more of them would only take turns with each other and with
# the thread that runs the forward pass.
_planner = Workers(1, "convt3d-plan")
_expected: set[tuple[object, ...]] = set()
_MAX_EXPECTED = 4096


def expect_gradients(
    layer: Layer,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gpu: Callable[[int], Gpu],
) -> None:
    """Plan and compile the gradients of a call in the background, once for each kind of call.

    Args:
        layer: what is called.
        input, weight, bias: its operands, on a CUDA device; gradients are expected by those that
            require them.
        gpu: properties of a device by its index.
    """
    wanted = (
        input.requires_grad,
        weight.requires_grad,
        bias is not None and bias.requires_grad,
    )
    # Calls that have no recipe come here every time: the key is short.
    kind = (layer.geometry, layer.transposed, input.shape, input.stride(), input.dtype, wanted)
    if kind in _expected:
        return
    if len(_expected) >= _MAX_EXPECTED:
        _expected.clear()
    _expected.add(kind)
    if torch.backends.cudnn.benchmark or input.numel() == 0:
        return  # candidates will be timed; nothing to compute
    name = "forward" if layer.transposed else "grad_input"
    call = Operation.output(
        name, input, weight, False, layer.geometry, layer.size, layer.channels_last
    )
    expect(gradients(call, *wanted), gpu(input.device.index))


def expect(operations: Iterable[Operation], gpu: Gpu) -> None:
    """Plan and compile operations on GPUs of this kind in the background, each once."""
    for operation in dict.fromkeys(operations):
        _planner.submit(functools.partial(_compile, operation, gpu))


def _compile(operation: Operation, gpu: Gpu) -> None:
    """Ask for the kernels of an operation; a launch that needs them will report errors."""
    try:
        if operation.refusal(gpu) is None:
            _request(operation, gpu)
            logger.debug("planned ahead: %s", operation.label)
    except Exception as error:
        logger.debug("not planned ahead: %s: %s", operation.label, error)


def _request(operation: Operation, gpu: Gpu) -> tuple[tuple[Launch, ...], list[Future[Cubin]]]:
    launches = operation.launches(gpu)
    target = compiler.architecture(gpu.capability)
    # The last one has most to compile: it begins first.
    return launches, [compiler.request(launch.kernel, target) for launch in reversed(launches)]


# --- Whole models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """What :func:`compile_operations` did.

    ``compiled`` programs came from the compiler, ``cached`` ones from the cache on disk; ``notes``
    are sentences about operations that have no kernels, and about failures.
    """

    compiled: int
    cached: int
    notes: tuple[str, ...]


def compile_operations(
    operations: Iterable[Operation],
    gpu: Gpu,
    *,
    device: int | None = None,
    step: Callable[[str], None] = lambda label: None,
) -> Compiled:
    """Plan operations, and compile their kernels on all cores.

    Args:
        operations: duplicates cost nothing.
        gpu: the GPU to plan and compile for.
        device: its index, to load the kernels there, too; None: leave that to the first launch.
        step: called in this thread with the label of each operation that is done with.

    Nothing is raised for an operation that fails: the launch that needs it reports the error.
    """
    notes: list[str] = []
    programs: dict[Future[Cubin], str] = {}
    requested: list[tuple[Operation, tuple[Launch, ...], list[Future[Cubin]]]] = []
    finished = 0
    for operation in dict.fromkeys(operations):
        reason = operation.refusal(gpu)
        try:
            if reason is None:
                launches, futures = _request(operation, gpu)
                programs |= dict.fromkeys(futures, operation.label)
                requested.append((operation, launches, futures))
        except Exception as error:
            reason = f"planning failed: {_first_line(error)}"
        if reason is not None:
            notes.append(f"{operation.name} of {operation.geometry.label}: {reason}")
            step(operation.label)
        while finished < len(requested) and all(f.done() for f in requested[finished][2]):
            step(requested[finished][0].label)
            finished += 1
    for operation, _, futures in requested[finished:]:
        wait(futures)
        step(operation.label)
    errors = {label: future.exception() for future, label in programs.items()}
    cubins = [future.result() for future in programs if future.exception() is None]
    compiled = sum(cubin.compiled for cubin in cubins)
    notes += [f"{label}: {_first_line(error)}" for label, error in errors.items() if error]
    if device is not None:
        notes += _load([launches for _, launches, _ in requested], device)
    return Compiled(compiled, len(cubins) - compiled, tuple(dict.fromkeys(notes)))


def _load(calls: Iterable[tuple[Launch, ...]], device: int) -> list[str]:
    """Load the kernels of calls on a device; what failed."""
    from convt3d.cuda import driver

    failures = []
    for launches in calls:
        try:
            driver.bind_context(device)
            driver.load(launches, device)
        except Exception as error:
            failures.append(f"{launches[-1].kernel.file} was not loaded: {_first_line(error)}")
    return failures


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

"""``convt3d.warm``: all kernels of a model, planned and compiled before its first step.

The model runs on fake tensors, which have sizes and strides but no memory; what reaches the
registered operators is what real calls will compute, gradients included.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from convt3d import backends
from convt3d.cuda.ahead import compile_operations
from convt3d.cuda.operation import Operation
from convt3d.cuda.schedule import Gpu
from convt3d.layer import Layer
from convt3d.operands import geometry_of, weight_size
from convt3d.progress import steps


@dataclass(frozen=True)
class Warmed:
    """What :func:`warm` did.

    Args:
        operations: different operations (forward, gradient by input, gradient by weight) of layers
            of ours on CUDA devices.
        compiled: programs that the compiler made now; one has one kernel or several.
        cached: programs that were on disk before.
        seconds: time that all of it took.
        notes: sentences: what PyTorch's operator will run and why, and what failed.
    """

    operations: int
    compiled: int
    cached: int
    seconds: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = (
            f"{self.operations} operations: {self.compiled} programs compiled, {self.cached} from "
            f"the cache, {self.seconds:.1f} s"
        )
        return "\n".join((head, *(f"  {note}" for note in self.notes)))

    __repr__ = __str__


def warm(
    model: torch.nn.Module,
    *example_inputs: Any,
    training: bool | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Warmed:
    """Compile every kernel that a model needs for inputs of these sizes, on all cores.

    The first step then finds plans and kernels made. Nothing is computed: the model runs on fake
    tensors, and its parameters, buffers, gradients and training flags, and the states of random
    number generators, stay as they are. Its forward hooks run, on fake tensors. The autocast
    context and the precision switches of the moment hold, so call it where the step will run.

    Args:
        model: any module on CUDA. A wrapper of torch.compile, DDP or DataParallel is looked into.
        example_inputs: what the model takes. Tensors tell sizes, strides, dtypes and
            ``requires_grad``; those on the meta device stand for some on the model's device.
        training: whether gradients, by parameters and by inputs that require them, will be wanted;
            what ``model.training`` says, if absent. Another value than that is tried in the mode
            (``model.train(training)``) that it names.
        progress: draw a bar on stderr, if ``rich`` is installed (``pip install 'convt3d[cli]'``).
        kwargs: keyword arguments of the model.

    Returns:
        What was done; a model on CPU has nothing to compile. An operation whose kernels cannot be
        compiled is a note here, and an error where it is launched.

    Raises:
        TypeError: ``model`` is not a Module.
        RuntimeError: the model does not run on fake tensors, such as where its control flow depends
            on the values of tensors. Run one step instead.

    The gradient of the loss by each floating-point output of the model is taken to be laid out as
    the output. With ``torch.backends.cudnn.benchmark = True``, first calls still time candidates.
    """
    begin = time.perf_counter()
    device = _device(_wrapped(model)[-1], example_inputs, kwargs)
    notes: tuple[str, ...] = ()
    if device is None:
        notes = ("Neither the model nor its inputs are on a CUDA device: nothing to compile.",)
    elif backends.DISABLED:
        notes = ("CONVT3D_DISABLE is set: PyTorch's operators run, and nothing is compiled.",)
    else:
        from convt3d.cuda.compiler import missing_library

        missing = missing_library()
        notes = () if missing is None else (missing,)
    if notes:
        return Warmed(0, 0, 0, time.perf_counter() - begin, notes)
    found = operations(model, *example_inputs, training=training, **kwargs)
    by_device: dict[int, list[Operation]] = defaultdict(list)
    for operation in found:
        if operation.device is not None:
            by_device[operation.device].append(operation)
    count = sum(map(len, by_device.values()))
    compiled = cached = 0
    with steps(count, progress) as step:
        for index, of_device in by_device.items():
            done = compile_operations(of_device, Gpu.of(index), device=index, step=step)
            compiled, cached = compiled + done.compiled, cached + done.cached
            notes += done.notes
    return Warmed(count, compiled, cached, time.perf_counter() - begin, notes)


def operations(
    model: torch.nn.Module, *example_inputs: Any, training: bool | None = None, **kwargs: Any
) -> list[Operation]:
    """The different operations of our layers that a step of a model runs, on any device.

    Args and errors: see :func:`warm`.
    """
    wrapped = _wrapped(model)
    model = wrapped[-1]
    device = _device(model, example_inputs, kwargs) or torch.device("cpu")
    training = model.training if training is None else training
    recorder = Recorder(compiled=any(map(_compiles, wrapped)))
    with _kept(model), torch.inference_mode(False), torch.set_grad_enabled(training):
        try:
            _run(model, example_inputs, kwargs, training, device, recorder)
        except Exception as error:
            raise RuntimeError(
                f"{type(model).__name__} does not run on tensors without values "
                f"({type(error).__name__}: {error}). Run one step with real ones instead: it "
                "compiles the same kernels"
            ) from error
    return list(recorder.found)


def _run(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    training: bool,
    device: torch.device,
    recorder: Recorder,
) -> None:
    """A forward pass, and in training a backward pass, on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in faked:  # shared ones stay shared
            faked[id(value)] = _fake(value, mode, device)
        return faked[id(value)]

    state = {
        name: fake(t)
        for tensors in (model.named_parameters, model.named_buffers)
        for name, t in tensors(remove_duplicate=False)
    }
    if model.training is not training:
        model.train(training)
    arguments = tree_map(fake, (tuple(inputs), dict(kwargs)))
    with mode, recorder:
        outputs = torch.func.functional_call(model, state, *arguments)
        wanted = [
            t
            for t in tree_leaves(outputs)
            if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()
        ]
        if training and wanted:
            torch.autograd.backward(wanted, [torch.empty_like(t) for t in wanted])


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A fake tensor like one, which may be fake itself, or of the meta device."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError("a parameter of a lazy module has no size yet")
    if tensor.device.type != "meta" and not hasattr(tensor, "fake_mode"):
        return mode.from_tensor(tensor)
    place = getattr(tensor, "fake_device", tensor.device)
    with mode:
        return torch.empty_strided(
            tensor.size(),
            tensor.stride(),
            dtype=tensor.dtype,
            device=device if place.type == "meta" else place,
            requires_grad=tensor.requires_grad,
        )


class Recorder(TorchDispatchMode):
    """Notes the operations that reach the registered operators; ``found`` has them in order.

    Args:
        compiled: whether the step will run as compiled code.
    """

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.compiled = compiled
        self.found: dict[Operation, None] = {}
        # Whether layers want gradients by their bias: no operator computes these.
        self._biases: dict[tuple[Any, ...], set[bool]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note = _NOTES.get(func)
        if note is not None:
            for operation in note(self, *args):
                if operation.batch > 0:
                    self.found[operation] = None
        return func(*args, **(kwargs or {}))

    def _transposed(
        self, x: Tensor, w: Tensor, bias: Tensor | None, last: bool, *parameters: Any
    ) -> Iterator[Operation]:
        geometry = geometry_of(w.shape, parameters)
        kind = (geometry, x.shape, x.dtype)
        self._biases[kind].add(bias is not None and bias.requires_grad)
        yield Operation.forward(x, w, bias is not None, geometry, last)

    def _convolution(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        size: Sequence[int],
        last: bool,
        *parameters: Any,
    ) -> Iterator[Operation]:
        geometry = geometry_of(w.shape, parameters)
        apart = self.compiled and Layer(geometry, size, last, transposed=False).bias_is_a_step
        yield Operation.output(
            "grad_input", x, w, bias is not None and not apart, geometry, size, last
        )

    def _grad_weight(
        self, x: Tensor, gy: Tensor, kernel_size: Sequence[int], last: bool, *parameters: Any
    ) -> Iterator[Operation]:
        size = weight_size(x.shape, gy.shape, kernel_size, parameters)
        geometry = geometry_of(size, parameters)
        for bias in sorted(self._biases.get((geometry, x.shape, x.dtype), {False})):
            yield Operation.grad_weight(x, gy, geometry, last, bias)


_NOTES: dict[Any, Callable[..., Iterator[Operation]]] = {
    torch.ops.convt3d.conv_transpose3d.default: Recorder._transposed,
    torch.ops.convt3d.conv3d.default: Recorder._convolution,
    torch.ops.convt3d.grad_weight.default: Recorder._grad_weight,
}


def _wrapped(model: Any) -> list[torch.nn.Module]:
    """PyTorch's wrappers around a module, outermost first, and last the module inside of them.

    The forward of a wrapper needs more than tensors.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, but got {type(model).__name__}")
    found = [model]
    while True:
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, _PARALLEL):
            inside = model.module
        if not isinstance(inside, torch.nn.Module):
            return found
        model = inside
        found.append(model)


def _compiles(module: torch.nn.Module) -> bool:
    """Whether torch.compile runs a module: as a wrapper around another one, or in its place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def _device(
    model: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.device | None:
    """The first CUDA device of a model and its inputs, or None."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((tuple(inputs), dict(kwargs)))]
    devices = (t.device for t in tensors if isinstance(t, Tensor))
    return next((device for device in devices if device.type == "cuda"), None)


@contextlib.contextmanager
def _kept(model: torch.nn.Module) -> Iterator[None]:
    """Puts back what running a model on fake tensors changes.

    These are the attributes of modules, the contents of lists, sets and dictionaries among them,
    and the states of the generators that draw numbers on the CPU. Autocast keeps no fake casts.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    containers = [
        (value, value.copy())
        for _, before in attributes
        for value in before.values()
        if isinstance(value, (list, dict, set, deque))
    ]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caching)
        for now, before in attributes:
            now.clear()
            now.update(before)
        for container, content in containers:
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else (
                container.update(content)
            )
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])

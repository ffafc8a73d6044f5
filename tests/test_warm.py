"""``convt3d.warm``, and gradients compiled beside a first call: what they compile is what runs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import convt3d
from convt3d import backends, ops, warming
from convt3d.compile import kernels
from convt3d.compile.passes import FuseTails
from convt3d.cuda import ahead, backend, compiler
from convt3d.cuda.operation import Operation
from convt3d.cuda.plan import choose as planning
from convt3d.cuda.prepared import prepared_by
from convt3d.cuda.schedule import Gpu
from convt3d.geometry import Geometry
from convt3d.layer import Layer
from convt3d.operations import OPERATIONS
from convt3d.precision import Arithmetic
from convt3d.progress import steps
from support.networks import NETWORKS

GPU = Gpu()
OURS = [name for name, network in NETWORKS.items() if network.library is None]


def last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last_3d)


def step(model: nn.Module, *inputs: Tensor) -> set[Operation]:
    """What a real step on CPU computes."""
    with warming.Recorder() as recorder:
        y = model(*inputs)
        torch.autograd.backward(y, torch.ones_like(y))
    return set(recorder.found)


# --- Recording -----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_a_model_is_recorded_as_it_runs(
    name: str, channels_last: bool, conv3d_on_cpu: None
) -> None:
    network = NETWORKS[name]
    model, x = convt3d.convert(network.build(True)), network.input(True)
    if channels_last:
        model = model.to(memory_format=torch.channels_last_3d)
        x = last(x) if x.dim() == 5 else x
    x.requires_grad_()
    found = warming.operations(model, x)
    assert len(found) == len(set(found)) > 0
    assert set(found) == step(model, x)
    assert {operation.name for operation in found} == set(OPERATIONS)
    assert any(any(operation.layouts) for operation in found) or not channels_last


def test_training_or_not() -> None:
    layer = convt3d.ConvTranspose3d(4, 3, 2, 2)
    x = torch.empty(2, 4, 3, 3, 3, device="meta")

    def names(**options: bool) -> list[tuple[str, bool]]:
        return [(o.name, o.bias) for o in warming.operations(layer, x, **options)]

    assert names() == [("forward", True), ("grad_weight", True)]
    assert names(training=False) == [("forward", True)]
    layer.eval()
    assert names() == [("forward", True)]
    assert names(training=True) == [("forward", True), ("grad_weight", True)]
    x.requires_grad_()
    assert ("grad_input", False) in names(training=True)
    assert layer.bias is not None
    layer.bias.requires_grad_(False)
    assert ("grad_weight", False) in names(training=True)


def test_the_mode_is_that_of_the_step() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = convt3d.ConvTranspose3d(2, 2, 2, 2)
            self.more = convt3d.ConvTranspose3d(2, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return self.more(y) if self.training else y

    model, x = Net().eval(), torch.empty(1, 2, 4, 4, 4)
    assert len(warming.operations(model, x)) == 1
    assert len(warming.operations(model, x, training=True)) == 5
    assert not model.training and not model.up.training


@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_code_adds_the_bias_of_a_strided_layer_apart(
    wrapped: bool, conv3d_on_cpu: None
) -> None:
    model, x = convt3d.Conv3d(4, 6, 3, stride=2, padding=1), torch.randn(1, 4, 8, 8, 8)
    compiled = torch.compile(nn.DataParallel(model) if wrapped else model, backend="eager")
    if not wrapped:
        model.compile(backend="eager")
    for of, biased in ((convt3d.Conv3d(4, 6, 3, stride=2, padding=1), True), (compiled, False)):
        (forward,) = [o for o in warming.operations(of, x) if o.name == "grad_input"]
        assert forward.bias is biased
    if not wrapped:
        (forward,) = [o for o in warming.operations(model, x) if o.name == "grad_input"]
        assert forward.bias is False


def test_autocast_and_switches_hold() -> None:
    layer, x = convt3d.ConvTranspose3d(4, 4, 3), torch.empty(1, 4, 4, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = warming.operations(layer, x)
        assert set(found) == step(layer, x)
    assert {o.arithmetic for o in found} == {Arithmetic.BF16}
    for allowed, arithmetic in ((True, Arithmetic.TF32), (False, Arithmetic.IEEE)):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            found = warming.operations(layer, x)
            assert {o.arithmetic for o in found} == {arithmetic}


class Stateful(nn.Module):
    """Changes whatever a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(convt3d.ConvTranspose3d(2, 3, 2, 2))
        self.norm, self.drop = nn.BatchNorm3d(3), nn.Dropout(0.5)
        self.spectral = nn.utils.spectral_norm(convt3d.ConvTranspose3d(3, 2, 3))
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.latest: Tensor | None = None

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        noise = torch.randn_like(x) * random.random() * np.random.rand()
        y = self.drop(self.norm(self.up(x + noise)))
        self.seen.append(y)
        self.by_name["y"] = self.latest = y
        y = torch.utils.checkpoint.checkpoint(self.spectral, y, use_reentrant=False)
        return {"y": y * scale, "shape": y.shape, "index": y.argmax(1)}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.nn.utils.weight_norm
def test_the_state_is_untouched() -> None:
    model, x = Stateful(), torch.randn(2, 2, 4, 4, 4)
    model.norm.eval()
    hooked: list[Any] = []
    model.register_forward_hook(lambda *_: hooked.append("forward"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hooked.append)
    tensors = {**dict(model.named_parameters()), **model.state_dict()}
    values = copy.deepcopy(tensors)
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    found = warming.operations(model, x, scale=torch.ones(1))
    assert len(found) == 5 and hooked == ["forward"]
    assert states() == before
    assert model.training and not model.norm.training
    assert model.seen == [] and model.by_name == {} and model.latest is None
    assert attributes == {name: dict(vars(module)) for name, module in model.named_modules()}
    now = {**dict(model.named_parameters()), **model.state_dict()}
    for name, tensor in tensors.items():
        assert now[name] is tensor or name in model.state_dict()
        torch.testing.assert_close(now[name], values[name], rtol=0, atol=0)
        assert type(now[name]) in (Tensor, nn.Parameter) and now[name].grad is None
    model(x, scale=torch.ones(1))["y"].sum().backward()  # and it still runs
    assert model.up.weight_g.grad is not None


def test_wrappers_are_looked_into() -> None:
    layer, x = convt3d.ConvTranspose3d(4, 4, 3), torch.empty(1, 4, 4, 4, 4)
    want = warming.operations(layer, x)
    wrapped = nn.DataParallel(torch.compile(layer, backend="eager"))
    assert warming.operations(wrapped, x) == want


def test_models_that_cannot_be_recorded() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match=r"Branches does not run .*Run one step"):
        warming.operations(Branches(), torch.ones(1))
    lazy = convt3d.LazyConvTranspose3d(2, 3)
    with pytest.raises(RuntimeError, match="lazy module"):
        warming.operations(lazy, torch.ones(1, 2, 3, 3, 3))
    assert isinstance(lazy, convt3d.LazyConvTranspose3d)
    with pytest.raises(TypeError, match="Module"):
        convt3d.warm(torch.ones(1))  # type: ignore[arg-type]


# --- Operations are those that launches prepare --------------------------------------------------

LAYERS = [
    Geometry(4, 6, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    Geometry(4, 1, (1, 2, 3), groups=1),
    Geometry(1, 4, (2, 2, 2), (2, 2, 2)),
    Geometry(4, 4, (3, 3, 3), groups=2),
]
FORMATS = [torch.contiguous_format, torch.channels_last_3d]


@pytest.fixture(name="prepared")
def _prepared(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """What launches are prepared for; CPU tensors are taken, and nothing is launched."""
    asked: list[Operation] = []

    def prepare(operation: Operation) -> Any:
        asked.append(operation)
        return mock.MagicMock()

    monkeypatch.setattr(backend, "_prepare", prepare)
    monkeypatch.setattr(backend, "_on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(backend, "_at_once", lambda *_: True)
    return asked


@pytest.mark.parametrize("geometry", LAYERS, ids=lambda g: g.label)
def test_operations_are_what_launches_prepare(
    geometry: Geometry, prepared: list[Operation]
) -> None:
    size = (3, 4, 5)
    for of_x, of_w, of_gy, flag in itertools.product(FORMATS, FORMATS, FORMATS, (False, True)):
        x = torch.randn(2, geometry.in_channels, *size).contiguous(memory_format=of_x)
        w = torch.randn(geometry.weight_size).contiguous(memory_format=of_w)
        gy = torch.randn(2, geometry.out_channels, *geometry.output_size(size))
        gy = gy.contiguous(memory_format=of_gy)
        backend.forward(x, w, None, geometry, flag)
        backend.forward(x, w, torch.zeros(geometry.out_channels), geometry, flag)
        backend.grad_input(gy, w, geometry, size, flag)
        backend.grad_input(gy, w, geometry, size, flag, torch.zeros(geometry.in_channels))
        backend.grad_weight(x, gy, geometry, flag)
        backend.grad_weight_bias(x, gy, geometry, flag)
        wanted = [
            Operation.forward(x, w, False, geometry, flag),
            Operation.forward(x, w, True, geometry, flag),
            Operation.output("grad_input", gy, w, False, geometry, size, flag),
            Operation.output("grad_input", gy, w, True, geometry, size, flag),
            Operation.grad_weight(x, gy, geometry, flag, False),
            Operation.grad_weight(x, gy, geometry, flag, True),
        ]
        assert prepared == wanted
        prepared.clear()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("geometry", LAYERS, ids=lambda g: g.label)
def test_gradients_are_foreseen(geometry: Geometry, transposed: bool, channels_last: bool) -> None:
    """Those that autograd asks for, of a transposed layer and of the Conv3d of the same weight."""
    size = (3, 4, 5)
    layer = Layer(geometry, size, channels_last, transposed)
    channels, extents = geometry.in_channels, size
    if not transposed:
        channels, extents = geometry.out_channels, geometry.output_size(size)
    for of_x, of_w in itertools.product(FORMATS, FORMATS):
        x = torch.randn(2, channels, *extents).contiguous(memory_format=of_x).requires_grad_()
        w = torch.randn(geometry.weight_size).contiguous(memory_format=of_w).requires_grad_()
        with warming.Recorder() as recorder:
            y = layer.output(ops.OPERATORS, x, w, None)
            torch.autograd.backward(y, torch.ones_like(y))
        call, *gradients = recorder.found
        assert call.name == ("forward" if transposed else "grad_input")
        assert set(ahead.gradients(call, True, True, False)) == set(gradients)
        (by_weight,) = ahead.gradients(call, False, True, True)
        assert (by_weight.name, by_weight.bias) == ("grad_weight", transposed)


@pytest.mark.parametrize("stride", [1, 2])
def test_launches_of_a_convolution(stride: int) -> None:
    """Those that ``prepared.py`` binds: of stride 1, a forward pass on the flipped weight."""
    geometry = Geometry(16, 24, (3, 3, 3), (stride,) * 3, (1, 1, 1), (stride - 1,) * 3)
    size = (6, 6, 6)
    x = torch.empty(1, 24, *geometry.output_size(size))
    w = torch.empty(geometry.weight_size)
    operation = Operation.output("grad_input", x, w, True, geometry, size, False)
    plan = planning.plan_problem(operation.problem, 1, size, GPU)
    with (
        mock.patch("convt3d.cuda.driver.bind_context"),
        mock.patch("convt3d.cuda.driver.load", side_effect=lambda bound, _: bound) as load,
        mock.patch("convt3d.cuda.launch.gpu_of", return_value=GPU),
    ):
        prepared = prepared_by(plan, operation._replace(device=0))
    ((bound, _),) = (call.args for call in load.call_args_list)
    launches = operation.launches(GPU)
    assert len(launches) == len(bound) and prepared.adds_bias
    for ahead_of, launched in zip(launches, bound, strict=True):
        assert (ahead_of.kernel, ahead_of.grid) == (launched.kernel, launched.grid)
    # The packing launch reads the weight as the plan's problem sees it.
    (packing,) = (one for one in bound if "pack" in one.kernel.file)
    assert packing.arguments[-1] == (-1 if stride == 1 else 1)
    assert (plan.problem.operation == "forward") is (stride == 1)


# --- Gradients beside a first call ---------------------------------------------------------------


@pytest.fixture(name="background")
def _background(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """Operations that the background plans and compiles, at once."""
    asked: list[Operation] = []
    monkeypatch.setattr(ahead, "_expected", set())
    monkeypatch.setattr(ahead, "_compile", lambda operation, gpu: asked.append(operation))
    monkeypatch.setattr(ahead, "_planner", mock.Mock(submit=lambda work: work()))
    return asked


def expect(x: Tensor, layer: convt3d.ConvTranspose3d, channels_last: bool = False) -> None:
    kind = Layer(Geometry(4, 6, (2, 2, 2), (2, 2, 2)), tuple(x.shape[2:]), channels_last)
    ahead.expect_gradients(kind, x, layer.weight, layer.bias, lambda _: GPU)


def test_a_first_call_asks_for_its_gradients(background: list[Operation]) -> None:
    layer = convt3d.ConvTranspose3d(4, 6, 2, 2)
    x = torch.randn(2, 4, 3, 3, 3, requires_grad=True)
    for _ in range(2):
        expect(x, layer)
    wanted = warming.operations(layer, x)
    assert background == wanted[1:] and len(background) == 2
    background.clear()
    expect(x.detach(), layer)
    assert [(o.name, o.bias) for o in background] == [("grad_weight", True)]
    background.clear()
    expect(last(x), layer, True)
    assert [o.layouts for o in background] == [(True, True), (True, True)]
    background.clear()
    with torch.backends.cudnn.flags(benchmark=True):
        expect(torch.randn(3, 4, 3, 3, 3), layer)
    assert not background


def test_the_graph_pass_asks_for_the_kernels_of_a_graph(
    background: list[Operation], epilogues: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose number fake tensors of the CPU do not have."""

    def body(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, other: torch.Tensor) -> Any:
        y = convt3d.conv_transpose3d(x, w, b, 2).relu()
        z = convt3d.conv3d(y, w)
        return torch.cat([y, other], 1), z, convt3d.conv3d(y, w)

    x, w, b = torch.randn(2, 4, 3, 3, 3), torch.randn(4, 8, 2, 2, 2), torch.randn(8)
    arguments = (x, w, b, torch.randn(2, 4, 6, 6, 6))
    graph = make_fx(body, tracing_mode="fake")(*arguments).graph
    FuseTails()(graph)
    assert not background
    real = kernels.operation_of

    def of_a_gpu(node: torch.fx.Node) -> Operation | None:
        found = real(node)
        return found and found._replace(device=0)

    monkeypatch.setattr(kernels, "operation_of", of_a_gpu)
    monkeypatch.setattr(kernels, "gpu_of", lambda _: GPU)
    with torch.backends.cudnn.flags(benchmark=True):
        kernels.request(graph)
    assert not background
    kernels.request(graph)
    assert [(o.name, o.bias, o.epilogue.kinds, o.epilogue.channels) for o in background] == [
        ("forward", True, ("relu",), 0),
        ("grad_input", False, (), 0),
    ]


@pytest.mark.parametrize("kind", [convt3d.Conv3d, convt3d.ConvTranspose3d])
def test_calls_say_once_that_gradients_will_come(
    kind: Any, opaque: None, conv3d_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(backends, "expect_gradients", lambda *arguments: told.append(arguments))
    module, x = kind(4, 6, 2, 2), torch.randn(2, 4, 4, 4, 4)
    with torch.no_grad():
        module(x)
    assert not told
    for _ in range(3):
        module(torch.randn(2, 4, 4, 4, 6))
    assert len(told) == 1
    ((layer, input, weight, bias),) = told
    geometry = Geometry(4, 6, (2, 2, 2), (2, 2, 2), transposed=kind is convt3d.ConvTranspose3d)
    assert layer == Layer.of(geometry, (4, 4, 6), False)
    assert weight is module.weight and bias is module.bias
    assert input.shape == (2, 4, 4, 4, 6)


def test_what_fails_in_the_background_stays_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no plan, for a test")

    layer = Geometry(4, 4, (2, 2, 2), (2, 2, 2))
    x, w = torch.randn(1, 4, 3, 3, 3), torch.randn(layer.weight_size)
    operation = Operation.forward(x, w, False, layer, False)
    with monkeypatch.context() as patch:
        patch.setattr("convt3d.cuda.operation.plan_problem", fail)
        ahead._compile(operation, GPU)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", fail)
        ahead._compile(operation, GPU)
        for future in ahead._request(operation, GPU)[1]:
            assert "for a test" in str(future.exception(timeout=60))
    for future in ahead._request(operation, GPU)[1]:
        assert future.result(timeout=120).compiled


def test_a_plan_that_is_under_way_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Operation.forward(
        torch.empty(1, 5, 3, 3, 3),
        torch.empty(5, 5, 3, 3, 3),
        False,
        Geometry(5, 5, (3, 3, 3)),
        False,
    )
    ranked, calls = planning.ranked_plans, []

    def slow(*arguments: Any, **options: Any) -> Any:
        calls.append(threading.get_ident())
        time.sleep(0.2)
        return ranked(*arguments, **options)

    monkeypatch.setattr(planning, "ranked_plans", slow)
    planning._plan.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: operation.launches(GPU), range(4)))
    assert len(calls) == 1 and all(launches == found[0] for launches in found)


# --- Compiling -----------------------------------------------------------------------------------


@pytest.fixture(name="cache")
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    reason = compiler.missing_library()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("CONVT3D_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_requests", {})
    yield tmp_path


@pytest.fixture(name="compiled")
def _compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The file of every program that NVRTC would compile; it takes no time."""
    files: list[str] = []

    def compile_program(spec: compiler.KernelSpec, *_: Any) -> bytes:
        if spec.file == "fails.cu":
            raise RuntimeError("compiling fails.cu failed\nin line 7")
        files.append(spec.file)
        return spec.file.encode()

    monkeypatch.setattr(compiler, "_compile", compile_program)
    return files


def small_step() -> tuple[nn.Module, Tensor]:
    layers = (convt3d.ConvTranspose3d(8, 8, 2, 2), convt3d.ConvTranspose3d(8, 8, 3))
    return nn.Sequential(*layers), torch.empty(1, 8, 4, 4, 4)


def test_operations_are_compiled_once(cache: Path, compiled: list[str]) -> None:
    found = warming.operations(*small_step())
    labels: list[str] = []
    done = ahead.compile_operations([*found, *found], GPU, step=labels.append)
    assert sorted(labels) == sorted(operation.label for operation in found)
    assert not done.notes and done.cached == 0
    programs = {
        (launched.kernel.file, launched.kernel.macros)
        for operation in found
        for launched in operation.launches(GPU)
    }
    assert done.compiled == len(compiled) == len(programs) > 4
    compiler._requests.clear()  # as in a new process
    done = ahead.compile_operations(found, GPU)
    assert (done.compiled, done.cached, len(compiled)) == (0, len(programs), len(programs))


def test_refusals_and_failures_are_sentences(
    cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = Geometry(4, 4, (2, 2, 2), (2, 2, 2))
    w = torch.empty(geometry.weight_size)

    def forward(*size: int, dtype: torch.dtype = torch.float32) -> Operation:
        x = torch.empty(1, 4, *size, dtype=dtype, device="meta")
        return Operation.forward(x, w.to(dtype), False, geometry, False)

    good, double, long = (
        forward(3, 3, 3),
        forward(3, 3, 3, dtype=torch.float64),
        forward(2**31, 1, 1),
    )
    launches, unplanned = Operation.launches, forward(3, 3, 30)

    def some_fail(self: Operation, gpu: Gpu) -> Any:
        if self is unplanned:
            raise ValueError("no plan")
        first, *rest = launches(self, gpu)
        return (replace(first, kernel=replace(first.kernel, file="fails.cu")), *rest)

    flatten = compiler.flatten
    monkeypatch.setattr(Operation, "launches", some_fail)
    monkeypatch.setattr(compiler, "flatten", lambda f: "" if f == "fails.cu" else flatten(f))
    labels: list[str] = []
    done = ahead.compile_operations([double, long, unplanned, good], GPU, step=labels.append)
    assert len(labels) == 4
    text = "\n".join(done.notes)
    assert "torch.float64 is left to PyTorch" in text and "2^31" in text
    assert "planning failed: no plan" in text
    assert f"{good.label}: compiling fails.cu failed" in text and "line 7" not in text
    assert len(done.notes) == 4


def test_warm_of_a_model_on_cuda(
    cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the device: CPU builds of PyTorch have no CUDA tensors, fake or not."""
    model, x = small_step()
    found = [operation._replace(device=0) for operation in warming.operations(model, x)]
    loaded: list[Sequence[Any]] = []
    monkeypatch.setattr(warming, "_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(warming, "operations", lambda *_, **__: found)
    monkeypatch.setattr(warming.Gpu, "of", lambda index: replace(GPU, name="a GPU for tests"))
    monkeypatch.setattr(ahead, "_load", lambda calls, device: loaded.extend(calls) or [])
    done = convt3d.warm(model, x, progress=False)
    assert done.operations == len(found) == len(loaded) and not done.notes
    assert done.compiled == len(compiled) > 0 and done.cached == 0
    assert repr(done).startswith(f"{len(found)} operations: {len(compiled)} programs compiled, 0")
    assert len(list((cache / "chosen").iterdir())) > 0  # plans, for the next process
    compiler._requests.clear()
    again = convt3d.warm(model, x, progress=False)
    assert (again.compiled, again.cached) == (0, done.compiled)


def test_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small_step()
    model.forward = pytest.fail  # type: ignore[method-assign, assignment]
    done = convt3d.warm(model, x)
    assert (done.operations, done.compiled, done.cached) == (0, 0, 0)
    assert "nothing to compile" in repr(done)
    monkeypatch.setattr(warming, "_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(backends, "DISABLED", True)
    assert "CONVT3D_DISABLE" in repr(convt3d.warm(model, x))
    monkeypatch.setattr(backends, "DISABLED", False)
    monkeypatch.setattr(compiler, "missing_library", lambda: "NVRTC is missing, for a test")
    assert "NVRTC is missing" in repr(convt3d.warm(model, x))


def test_a_bar_needs_rich(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def advance() -> None:
        with steps(2) as one:
            one("a layer")
            one("another")

    shown: Callable[[], str] = lambda: capfd.readouterr().err  # noqa: E731
    advance()
    shown()
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    advance()
    assert shown() == ""

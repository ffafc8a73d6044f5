"""What people do with models, after ``convert``: beside the same model with PyTorch's layers."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import prune

import convt3d
from support.packages import check_package


class Net(nn.Module):
    """One level down and two ways up: kernel == stride, and an overlapping kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.InstanceNorm3d(4, affine=True)
        self.up = nn.ConvTranspose3d(4, 3, 2, 2)
        self.out = nn.ConvTranspose3d(5, 2, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.down(x)))
        return self.out(torch.cat([self.up(y), x], 1))


def pair(dtype: torch.dtype = torch.float32) -> tuple[Net, Net]:
    """The same net converted and as it was."""
    torch.manual_seed(5)
    theirs = Net().to(dtype)
    return convt3d.convert(copy.deepcopy(theirs)), theirs


def volume(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size or (2, 2, 4, 6, 4), dtype=dtype)


def layers(model: nn.Module) -> list[nn.ConvTranspose3d]:
    return [m for m in model.modules() if isinstance(m, nn.ConvTranspose3d)]


def train(model: nn.Module, steps: int = 3, autocast: torch.dtype | None = None) -> list[float]:
    """Losses of a few steps on the same random volumes."""
    torch.manual_seed(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16)
    losses = []
    for _ in range(steps):
        x = volume()
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            y = model(x)
            assert y.dtype == (autocast or torch.float32)
            loss = (y.float() - x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


# --- Training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision_trains(dtype: torch.dtype) -> None:
    ours, theirs = (train(model, autocast=dtype) for model in pair())
    assert ours == pytest.approx(theirs, rel=2e-2)
    assert ours[-1] != ours[0]


def test_channels_last_model() -> None:
    outputs, gradients = [], []
    x = volume().to(memory_format=torch.channels_last_3d)
    for model in pair():
        model = model.to(memory_format=torch.channels_last_3d)
        y = model(x)
        assert y.is_contiguous(memory_format=torch.channels_last_3d)
        outputs.append(y)
        gradients.append(torch.autograd.grad(y.square().sum(), model.parameters()))
    torch.testing.assert_close(*outputs)
    for a, b in zip(*gradients, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_pruning_masks(when: str) -> None:
    """The mask and the original weight stay; gradients are masked; removal makes it lasting."""
    ours, theirs = pair()
    if when == "before":
        ours = convt3d.revert(ours)
    for model in (ours, theirs):
        for layer in layers(model):
            prune.l1_unstructured(layer, "weight", amount=0.5)
    convt3d.convert(ours)
    assert all(type(layer) is convt3d.ConvTranspose3d for layer in layers(ours))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert train(ours) == pytest.approx(train(theirs), rel=1e-5)
    for layer in layers(ours):
        assert (layer.weight_orig.grad == 0).sum() >= layer.weight_mask.numel() // 2
        prune.remove(layer, "weight")
        assert (layer.weight == 0).float().mean() >= 0.49
    x = volume()
    torch.testing.assert_close(ours(x), theirs(x))


def test_averaged_copies() -> None:
    averages = []
    for model in pair():
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for _ in range(2):
            train(model, 1)
            average.update_parameters(model)
        assert type(average.module.up) is type(model.up)
        averages.append(average)
    x = volume()
    torch.testing.assert_close(averages[0](x), averages[1](x))


# --- Copies and files ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_a_converted_model_is_copied_converted(way: str) -> None:
    model, _ = pair()
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert all(type(layer) is convt3d.ConvTranspose3d for layer in layers(other))
    x = volume()
    want = model(x)
    assert torch.equal(other(x), want)
    with torch.no_grad():
        other.up.weight.zero_()
    assert torch.equal(model(x), want)


def test_checkpoints_fit_both_ways(tmp_path: Path) -> None:
    ours, theirs = pair()
    train(ours)
    torch.save(ours.state_dict(), tmp_path / "ours.pt")
    theirs.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    x = volume()
    torch.testing.assert_close(ours(x), theirs(x))
    train(theirs)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    ours.load_state_dict(torch.load(tmp_path / "theirs.pt", weights_only=True), assign=True)
    torch.testing.assert_close(ours(x), theirs(x))


def test_built_on_the_meta_device() -> None:
    _, theirs = pair()
    with torch.device("meta"):
        model = convt3d.convert(Net())
        shape = model(torch.empty(2, 2, 4, 6, 4)).shape
    assert all(p.is_meta for p in model.parameters())
    x = volume()
    model.to_empty(device="cpu")
    model.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(model(x), theirs(x))
    assert shape == theirs(x).shape
    with torch.device("meta"):
        skeleton = convt3d.convert(Net())
    skeleton.load_state_dict(theirs.state_dict(), assign=True)
    torch.testing.assert_close(skeleton(x), theirs(x))


def test_default_device() -> None:
    ours, theirs = pair()
    x = volume()
    try:
        torch.set_default_device("cpu")
        torch.testing.assert_close(ours(x), theirs(x))
        assert train(ours) == pytest.approx(train(theirs), rel=1e-5)
        torch.set_default_device("meta")
        assert convt3d.ConvTranspose3d(2, 3, 2).weight.is_meta
        torch.testing.assert_close(ours(x), theirs(x))
    finally:
        torch.set_default_device(None)


# --- torch.func ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("opaque")
def test_per_sample_gradients() -> None:
    results = []
    x = volume(3, 2, 4, 2, 4, dtype=torch.float64)
    for model in pair(torch.float64):
        values = dict(model.named_parameters())

        def loss(values: dict[str, Tensor], x: Tensor, model: nn.Module = model) -> Tensor:
            return functional_call(model, values, (x.unsqueeze(0),)).square().sum()

        results.append(vmap(grad(loss), (None, 0))(values, x))
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("opaque")
def test_jvp_of_a_model() -> None:
    results = []
    x, t = (volume(dtype=torch.float64) for _ in range(2))
    for model in pair(torch.float64):
        results.append(jvp(model, (x,), (t,)))
    torch.testing.assert_close(*results)


# --- torch.compile, export -----------------------------------------------------------------------


def test_new_sizes_do_not_recompile() -> None:
    """A static graph, then one for any batch and one for any volume; no graph break."""
    torch._dynamo.reset()
    model = convt3d.convert(nn.Sequential(nn.ConvTranspose3d(2, 3, 2, 2), nn.ReLU()))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for size in ((2, 4, 6, 8), (3, 4, 6, 8), (5, 6, 8, 10), (4, 8, 4, 12), (7, 10, 14, 6)):
        x = volume(size[0], 2, *size[1:])
        y = compiled(x)
        torch.testing.assert_close(y, model(x))
        y.sum().backward()
    torch._dynamo.reset()
    assert counter.frame_count <= 3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_trace_has_pytorchs_operator(tmp_path: Path) -> None:
    model, theirs = pair()
    x, y = volume(), volume(3, 2, 6, 4, 8)
    traced = torch.jit.trace(model.eval(), (x,))
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("aten::_convolution") + kinds.count("aten::conv_transpose3d") >= 2
    assert not any(kind.startswith("convt3d") for kind in kinds)
    torch.jit.save(traced, tmp_path / "net.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "net.pt")(y), theirs.eval()(y))


@pytest.mark.parametrize(
    "dynamo",
    [
        pytest.param(False, id="TorchScript"),
        pytest.param(True, id="dynamo", marks=pytest.mark.more),
    ],
)
@pytest.mark.filterwarnings("ignore")  # deprecations in the exporters themselves
def test_onnx_has_the_standard_node(dynamo: bool) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    if dynamo:
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
        if torch.__version__ < "2.6":
            pytest.skip("exports by torch.export since torch 2.6")
    elif torch.__version__ >= "2.14":
        pytest.skip("the exporter by TorchScript may be gone")
    nodes = []
    x = volume()
    models: list[Any] = [model.eval() for model in pair()]
    if dynamo:  # a program exported before holds our operator
        program = torch.export.export(models[0], (x,))
        models.append(program.run_decompositions(convt3d.decompositions()))
    for model in models:
        if dynamo:
            proto = torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto
        else:
            buffer = io.BytesIO()
            torch.onnx.export(model, (x,), buffer, **_by_torchscript())
            proto = onnx.load_from_string(buffer.getvalue())
        onnx.checker.check_model(proto, full_check=True)
        nodes.append([(n.op_type, _attributes(onnx, n)) for n in proto.graph.node])
        assert not proto.functions
    assert all(found == nodes[0] for found in nodes)
    assert [kind for kind, _ in nodes[0]].count("ConvTranspose") == 2


def _by_torchscript() -> dict[str, Any]:
    return {"dynamo": False} if torch.__version__ >= "2.5" else {}


def _attributes(onnx: Any, node: Any) -> dict[str, Any]:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: v for k, v in values.items() if isinstance(v, (int, float, str, list))}


@pytest.mark.full
def test_aot_inductor_package_in_a_fresh_process(tmp_path: Path) -> None:
    model = convt3d.convert(nn.Sequential(nn.ConvTranspose3d(2, 3, 2, 2), nn.ReLU()))
    check_package(model, [volume(), volume(3, 2, 6, 4, 8)], tmp_path, 1e-5)

"""ConvTranspose3d, LazyConvTranspose3d, convert and revert."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import convt3d

_SETTINGS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"bias": False, "stride": (1, 2, 2)},
    {"groups": 2, "dilation": (1, 2, 3)},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16, "stride": 2},
]


def pair(**settings: Any) -> tuple[convt3d.ConvTranspose3d, nn.ConvTranspose3d]:
    """Ours and PyTorch's module, made under one seed."""
    modules = []
    for kind in (convt3d.ConvTranspose3d, nn.ConvTranspose3d):
        torch.manual_seed(7)
        modules.append(kind(4, 6, 3, **settings))
    return modules[0], modules[1]


def sample(module: nn.Module, batched: bool = True) -> Tensor:
    dtype = next(module.parameters()).dtype
    return torch.randn(2, 4, 3, 4, 5).to(dtype)[slice(None) if batched else 0]


class UNet(nn.Module):
    """Layers at several depths, one of them shared, one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, 4, 2, 2)
        self.up = nn.Sequential(nn.ConvTranspose3d(4, 4, 2, 2), nn.ReLU())
        self.heads = nn.ModuleList([nn.ConvTranspose3d(4, 2, 3, padding=1), nn.Conv3d(4, 2, 1)])
        self.again = self.up[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        y = self.up(x)
        return self.heads[0](y) + self.heads[1](y) + self.again(x)[:, :2]


# --- The module ----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
@pytest.mark.parametrize("batched", [True, False])
def test_same_as_pytorchs(settings: dict[str, Any], batched: bool) -> None:
    ours, theirs = pair(**settings)
    x = sample(ours, batched)
    tolerated = 2e-2 if x.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours(x), theirs(x), rtol=tolerated, atol=tolerated)
    for a, e in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, e)  # the same random numbers in the same order
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert ours.__constants__ == theirs.__constants__
    assert repr(ours) == repr(theirs)[:-1] + ", backend=convt3d)"


@pytest.mark.parametrize("form", [list, tuple, torch.Size, torch.tensor])
@pytest.mark.parametrize("leading", [(), (2, 6), (99, -1)])
def test_output_size(form: Any, leading: tuple[int, ...]) -> None:
    ours, theirs = pair(stride=2, output_padding=1)
    x = sample(ours)
    if form is torch.Size and -1 in leading:
        pytest.skip("a Size has no negative entries")
    for size in ((7, 9, 11), (8, 10, 12), (7, 10, 11)):
        output_size = form([*leading, *size])
        got = ours(x, output_size)
        assert got.shape[2:] == size
        torch.testing.assert_close(got, theirs(x, output_size))
        torch.testing.assert_close(ours(x, output_size=output_size), got)


def test_state_dicts_are_exchangeable() -> None:
    ours, theirs = pair(stride=2)
    nn.init.normal_(theirs.weight)
    assert not ours.load_state_dict(theirs.state_dict(), strict=True).missing_keys
    x = sample(ours)
    torch.testing.assert_close(ours(x), theirs(x))
    theirs.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies(way: str) -> None:
    module = convt3d.ConvTranspose3d(4, 6, 3, stride=2)
    if way == "deepcopy":
        other = copy.deepcopy(module)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert type(other) is convt3d.ConvTranspose3d
    assert other.weight is not module.weight
    x = sample(module)
    assert torch.equal(other(x), module(x))


def test_lazy() -> None:
    module = convt3d.LazyConvTranspose3d(6, 3, stride=2)
    assert isinstance(module, nn.LazyConvTranspose3d)
    assert isinstance(module.weight, nn.UninitializedParameter)
    x = torch.randn(2, 4, 3, 4, 5)
    y = module(x)
    assert type(module) is convt3d.ConvTranspose3d
    assert module.in_channels == 4
    torch.testing.assert_close(y, nn.ConvTranspose3d.forward(module, x))


def test_the_first_call_of_a_lazy_module_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        convt3d.modules,
        "conv_transpose3d",
        lambda *args: calls.append(args) or torch.zeros(1),
    )
    convt3d.LazyConvTranspose3d(6, 3)(torch.randn(2, 4, 3, 4, 5))
    assert len(calls) == 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_training_step(memory_format: torch.memory_format) -> None:
    losses = []
    for module in pair(stride=2, padding=1):
        module = module.to(memory_format=memory_format)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(1)
        x = torch.randn(2, 4, 3, 4, 5).to(memory_format=memory_format)
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])


# --- convert and revert --------------------------------------------------------------------------


def test_convert_round_trip() -> None:
    model = UNet().eval()
    x = torch.randn(2, 1, 8, 8, 8)
    want = model(x)
    names = {name: type(m) for name, m in model.named_modules()}
    parameters = dict(model.named_parameters())
    assert convt3d.convert(model) is model
    for module in (model.up[0], model.heads[0], model.again):
        assert type(module) is convt3d.ConvTranspose3d
    assert type(model.heads[1]) is convt3d.Conv3d
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert not any(m.training for m in model.modules())
    torch.testing.assert_close(model(x), want)
    assert convt3d.convert(model) is model  # again: nothing to do
    assert convt3d.revert(model) is model
    assert {name: type(m) for name, m in model.named_modules()} == names
    torch.testing.assert_close(model(x), want)


def test_convert_reaches_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    function = convt3d.modules.conv_transpose3d
    monkeypatch.setattr(
        convt3d.modules, "conv_transpose3d", lambda *args: calls.append(args) or function(*args)
    )
    model, x = UNet(), torch.randn(1, 1, 4, 4, 4)
    model(x)
    assert not calls
    convt3d.convert(model)(x)
    assert len(calls) == 3
    convt3d.revert(model)(x)
    assert len(calls) == 3


def test_convert_the_root() -> None:
    module = nn.ConvTranspose3d(4, 6, 3)
    assert convt3d.convert(module) is module
    assert type(module) is convt3d.ConvTranspose3d
    assert type(convt3d.revert(module)) is nn.ConvTranspose3d


def test_filter() -> None:
    seen = []

    def only_heads(module: nn.Module, name: str) -> bool:
        seen.append(name)
        return name.startswith("heads")

    model = convt3d.convert(UNet(), only_heads, kinds=nn.ConvTranspose3d)
    assert seen == ["up.0", "heads.0"]
    assert type(model.up[0]) is nn.ConvTranspose3d
    assert type(model.heads[0]) is convt3d.ConvTranspose3d
    convt3d.convert(model)
    convt3d.revert(model, only_heads)
    assert type(model.up[0]) is convt3d.ConvTranspose3d
    assert type(model.heads[0]) is nn.ConvTranspose3d


def test_hooks_flags_and_dtype_stay() -> None:
    module = nn.ConvTranspose3d(4, 6, 3).double().requires_grad_(False)
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *a: calls.append("before"))
    module.register_forward_hook(lambda *a: calls.append("after"))
    module.register_buffer("extra", torch.ones(1))
    module.custom = "kept"  # type: ignore[assignment]
    convt3d.convert(module)
    y = module(torch.randn(1, 4, 2, 2, 2, dtype=torch.float64))
    assert calls == ["before", "after"]
    assert y.dtype == torch.float64
    assert not y.requires_grad
    assert module.custom == "kept"
    assert "extra" in module.state_dict()


def test_subclasses_of_others_are_left_alone() -> None:
    class Mine(nn.ConvTranspose3d):
        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
            return super().forward(input, output_size) * 2

    model = convt3d.convert(nn.Sequential(Mine(4, 6, 3), nn.ConvTranspose2d(4, 6, 3)))
    assert type(model[0]) is Mine
    assert type(model[1]) is nn.ConvTranspose2d


def test_convert_lazy() -> None:
    model = nn.Sequential(nn.LazyConvTranspose3d(6, 3))
    convt3d.convert(model)
    assert type(model[0]) is convt3d.LazyConvTranspose3d
    assert type(convt3d.revert(model)[0]) is nn.LazyConvTranspose3d
    convt3d.convert(model)(torch.randn(1, 4, 3, 3, 3))
    assert type(model[0]) is convt3d.ConvTranspose3d


def test_convert_wants_a_module() -> None:
    with pytest.raises(TypeError, match="Module"):
        convt3d.convert(torch.zeros(1))  # type: ignore[type-var]


def test_optimisers_keep_working() -> None:
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    convt3d.convert(model)
    before = model.up[0].weight.detach().clone()
    model(torch.randn(1, 1, 4, 4, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.up[0].weight, before)


# --- Reparametrised modules ----------------------------------------------------------------------


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrizations_applied_before(norm: Any) -> None:
    torch.manual_seed(3)
    module = norm(nn.ConvTranspose3d(4, 6, 3, stride=2)).eval()
    twin = copy.deepcopy(module)  # shares the class that parametrize made
    x = sample(module)
    want = module(x)
    convt3d.convert(module)
    assert isinstance(module, convt3d.ConvTranspose3d)
    assert parametrize.is_parametrized(module)
    assert type(module).__name__ == "ParametrizedConvTranspose3d"
    assert not isinstance(twin, convt3d.ConvTranspose3d)
    torch.testing.assert_close(module(x), want)
    assert "backend=convt3d" in repr(module)
    assert isinstance(copy.deepcopy(module), convt3d.ConvTranspose3d)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(module)
    convt3d.revert(module)
    assert not isinstance(module, convt3d.ConvTranspose3d)
    torch.testing.assert_close(module(x), want)
    parametrize.remove_parametrizations(convt3d.convert(module), "weight")
    assert type(module) is convt3d.ConvTranspose3d
    torch.testing.assert_close(module(x), want)


def test_a_selection_that_is_none_is_refused() -> None:
    model = nn.Sequential(nn.Conv3d(2, 3, 3))
    for change in (convt3d.convert, convt3d.revert):
        with pytest.raises(
            TypeError, match=r"classes of Conv3d or ConvTranspose3d, but got .*Linear"
        ):
            change(model, kinds=nn.Linear)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="but got 'Conv3d'"):
            change(model, kinds="Conv3d")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="filter_fn must be callable, but got int"):
            change(model, 3)  # type: ignore[arg-type]
    assert type(model[0]) is nn.Conv3d
    both = nn.Conv3d | nn.ConvTranspose3d
    assert type(convt3d.convert(model, kinds=both)[0]) is convt3d.Conv3d  # type: ignore[arg-type]
    convt3d.revert(model)
    assert type(convt3d.convert(model, kinds=nn.Module)[0]) is convt3d.Conv3d  # type: ignore[arg-type]


def test_a_class_of_somebody_with_such_a_name_is_left_alone() -> None:
    class ParametrizedConv3d(nn.Conv3d):
        def _conv_forward(self, input: Any, weight: Any, bias: Any) -> Any:
            return super()._conv_forward(input, weight, bias) * 2

    module = ParametrizedConv3d(2, 3, 3)
    x = torch.randn(1, 2, 5, 5, 5)
    want = module(x)
    assert type(convt3d.convert(module)) is ParametrizedConv3d
    assert torch.equal(module(x), want)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrizations_applied_after(norm: Any) -> None:
    outputs, gradients = [], []
    for module in pair(stride=2):
        torch.manual_seed(3)
        module = norm(module)
        x = torch.ones(1, 4, 2, 3, 2)
        y = module(x)
        y.sum().backward()
        outputs.append(y)
        gradients.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_old_norms(norm: Any) -> None:
    outputs = []
    for module in pair(stride=2):
        torch.manual_seed(3)
        module = norm(module).eval()
        outputs.append(module(torch.ones(1, 4, 2, 3, 2)))
    torch.testing.assert_close(outputs[0], outputs[1])
    module = norm(nn.ConvTranspose3d(4, 6, 3)).eval()
    x = sample(module)
    want = module(x)
    convt3d.convert(module)
    assert type(module) is convt3d.ConvTranspose3d
    torch.testing.assert_close(module(x), want)

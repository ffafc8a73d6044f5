"""``convt3d.fuse`` and its undoing: what is folded, what is left alone, and the numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convt3d
from convt3d.compile.passes import FuseTails
from convt3d.inference.fuse import Folded, FusedConv3d, FusedConvTranspose3d
from support.tails import Case, traced


def normed(layer: nn.Module, *activations: nn.Module) -> nn.Sequential:
    """A layer, a batch norm that has seen something, and activations."""
    norm = nn.BatchNorm3d(layer.out_channels)  # type: ignore[arg-type]
    for tensor in (norm.running_mean, norm.weight, norm.bias):
        assert tensor is not None
        nn.init.normal_(tensor)
    assert norm.running_var is not None
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return nn.Sequential(layer, norm, *activations).double().eval()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Conv3d": lambda: convt3d.Conv3d(4, 6, 3, 2, 1),
    "Conv3d, grouped, no bias": lambda: convt3d.Conv3d(4, 6, 3, groups=2, bias=False),
    "Conv3d, circular": lambda: convt3d.Conv3d(4, 6, 3, padding=1, padding_mode="circular"),
    "Conv3d, same": lambda: convt3d.Conv3d(4, 6, 3, padding="same"),
    "ConvTranspose3d": lambda: convt3d.ConvTranspose3d(4, 6, 3, 2, 1, 1),
    "ConvTranspose3d, grouped": lambda: convt3d.ConvTranspose3d(4, 6, 3, groups=2),
    "ConvTranspose3d, no bias": lambda: convt3d.ConvTranspose3d(4, 6, 2, 2, bias=False),
}
ACTIVATIONS: dict[str, nn.Module] = {
    "relu": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.5, 0.25),
    "leaky_relu": nn.LeakyReLU(0.2),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "hardswish": nn.Hardswish(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
}


def example(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 4, 5, 6, 7, dtype=dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_a_norm_becomes_weight_and_bias(name: str) -> None:
    model = normed(LAYERS[name]())
    x = example()
    expected = model(x)
    assert convt3d.fuse(model) is model
    assert isinstance(model[0], (FusedConv3d, FusedConvTranspose3d))
    assert isinstance(model[1], Folded)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x[0]), expected[0])


@pytest.mark.parametrize("layer", ["Conv3d", "Conv3d, circular", "ConvTranspose3d"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_run_in_the_epilogue(name: str, layer: str, epilogues: list[Any]) -> None:
    model = normed(LAYERS[layer](), ACTIVATIONS[name], nn.ReLU())
    x = example()
    expected = model(x)
    convt3d.fuse(convt3d.fuse(model))  # again changes nothing
    with torch.no_grad():
        got = model(x)
    torch.testing.assert_close(got, expected)
    kind = {"relu6": "clamp", "hardtanh": "clamp"}.get(name, name)
    operation = "forward" if "Transpose" in layer else "grad_input"
    assert epilogues == [(operation, (kind, "relu"), False)]
    x.requires_grad_()
    got = model(x)  # gradients by the input go through PyTorch's operators
    (by_input,) = torch.autograd.grad(got.sum(), x)
    convt3d.revert(model)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(by_input, wanted)
    assert len(epilogues) == 1


def test_autocast_casts_as_before(epilogues: list[Any]) -> None:
    model = normed(LAYERS["ConvTranspose3d"](), nn.ReLU()).float()
    x = example(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        got = convt3d.fuse(model)(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
    assert [steps for _, steps, _ in epilogues] == [("relu",)]


def test_revert_restores_the_very_objects() -> None:
    model = normed(LAYERS["Conv3d, grouped, no bias"](), nn.LeakyReLU())
    model.extend(normed(LAYERS["ConvTranspose3d"](), nn.Tanh()))
    before, modules = list(model.parameters()), list(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    convt3d.fuse(model)
    assert set(model.state_dict()) != set(state)
    assert "in the layer before" in repr(model) and "then leaky_relu" in repr(model)
    assert convt3d.revert(model) is model
    assert all(a is b for a, b in zip(model, modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert type(model[0]) is nn.Conv3d
    assert vars(model[0]).keys() == vars(nn.Conv3d(4, 6, 3, groups=2, bias=False)).keys()


def test_originals_move_and_are_copied_with_the_model() -> None:
    model = convt3d.fuse(normed(LAYERS["Conv3d"](), nn.ReLU()))
    x = example()
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(other(x), model(x))
    other.float()
    assert other(x.float()).dtype == torch.float32
    convt3d.revert(other)
    assert {tensor.dtype for tensor in other.state_dict().values()} == {torch.float32, torch.int64}
    torch.testing.assert_close(other(x.float()), model(x).float(), rtol=1e-4, atol=1e-4)
    assert isinstance(model[0], FusedConv3d)


def test_training_is_refused() -> None:
    model = normed(LAYERS["Conv3d"]())
    with pytest.raises(RuntimeError, match=r"model.eval\(\)"):
        convt3d.fuse(model.train())
    convt3d.fuse(model.eval()).train()
    with pytest.raises(RuntimeError, match=r"call convt3d.revert"):
        model(example())
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module"):
        convt3d.fuse(torch.relu)  # type: ignore[type-var]


def test_modes_reach_what_was_folded() -> None:
    model = convt3d.fuse(normed(LAYERS["Conv3d"](), nn.ReLU()))
    convt3d.revert(model.train())
    assert all(module.training for module in model.modules())
    convt3d.revert(convt3d.fuse(model.eval()).eval())
    assert not any(module.training for module in model.modules())


class Reads(nn.Module):
    """A layer and a norm, and something else that reads what they have."""

    def __init__(self, what: Callable[[nn.Sequential], Any]) -> None:
        super().__init__()
        self.parts = normed(LAYERS["Conv3d"](), nn.LeakyReLU(0.25))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x) + self.what(self.parts)


def test_a_layer_whose_parameters_are_read_is_left_alone() -> None:
    model = Reads(lambda parts: parts[0].bias.view(-1, 1, 1, 1)).double().eval()
    want = model(example())
    convt3d.fuse(model)
    assert type(model.parts[0]) is convt3d.Conv3d
    torch.testing.assert_close(model(example() * 0), model(example() * 0))
    assert want.shape == model(example()).shape


def test_what_was_folded_can_still_be_read() -> None:
    model = (
        Reads(lambda parts: parts[1].running_mean.sum() + parts[2].negative_slope).double().eval()
    )
    x = example()
    want = model(x)
    convt3d.fuse(model, x)
    assert isinstance(model.parts[0], FusedConv3d)
    torch.testing.assert_close(model(x), want)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = model.parts[1].nothing


def test_any_error_of_the_folded_model_undoes_the_folding() -> None:
    def only_once(parts: nn.Sequential) -> Tensor:
        if not isinstance(parts[1], nn.BatchNorm3d):
            raise ValueError("no norm")
        return torch.zeros((), dtype=torch.float64)

    model = Reads(only_once).double().eval()
    with pytest.raises(ValueError, match="no norm"):
        convt3d.fuse(model, example())
    assert type(model.parts[0]) is convt3d.Conv3d and type(model.parts[1]) is nn.BatchNorm3d


def test_hooks_see_what_they_saw() -> None:
    inner = nn.Sequential(LAYERS["Conv3d"]())
    model = nn.Sequential(inner, nn.ReLU(), normed(LAYERS["ConvTranspose3d"]())).double().eval()
    model[2][0] = convt3d.ConvTranspose3d(6, 6, 3).double().eval()
    seen: list[Tensor] = []
    inner.register_forward_hook(lambda module, args, output: seen.append(output))
    whole: list[Tensor] = []
    model[2].register_forward_hook(lambda module, args, output: whole.append(output))
    x = example()
    want = model(x)
    convt3d.fuse(model)
    assert type(inner[0]) is convt3d.Conv3d  # the hook's module ends between layer and activation
    assert type(model[2][0]) is not convt3d.ConvTranspose3d  # that one has both
    assert len(seen) == len(whole) == 1
    torch.testing.assert_close(model(x), want)
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(whole[1], whole[0])


def test_complex_layers_are_left_alone() -> None:
    model = nn.Sequential(convt3d.ConvTranspose3d(4, 6, 2, dtype=torch.complex64), nn.Tanh()).eval()
    x = example(torch.complex64)
    want = model(x)
    torch.testing.assert_close(convt3d.fuse(model, x)(x), want)
    assert type(model[0]) is convt3d.ConvTranspose3d


def test_other_padding_modes_are_refused_as_before() -> None:
    layer = convt3d.ConvTranspose3d(4, 6, 3)
    layer.padding_mode = "circular"
    model = convt3d.fuse(normed(layer, nn.ReLU()))
    with pytest.raises(ValueError, match="`zeros` padding mode"):
        model(example())


def test_part_of_a_fused_model_is_not_reverted() -> None:
    model = convt3d.fuse(normed(LAYERS["Conv3d"](), nn.ReLU()))
    with pytest.raises(RuntimeError, match="2 of the modules"):
        convt3d.revert(model[0])
    convt3d.revert(model, lambda layer, name: False)
    assert isinstance(model[0], FusedConv3d)


# --- What is left alone --------------------------------------------------------------------------


class Net(nn.Module):
    """A layer, a norm and an activation, called as ``how`` calls them."""

    def __init__(self, how: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        layer, norm = normed(LAYERS["Conv3d, circular"]())
        self.layer, self.norm, self.act = layer, norm, nn.ReLU()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def looks(net: Net, x: Tensor) -> Tensor:
    """Looks at a value, which no trace can follow."""
    y = net.act(net.norm(net.layer(x)))
    return y if y.sum() > 1e9 else 2 * y


HOW: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "the layer's output is read twice": lambda n, x: n.norm(y := n.layer(x)) + y,
    "the layer is called twice": lambda n, x: n.norm(n.layer(x)) + n.layer(x),
    "the norm is called twice": lambda n, x: n.norm(n.norm(n.layer(x))),
    "something is between": lambda n, x: n.norm(n.layer(x) * 2),
    "the value decides": looks,
}


@pytest.mark.parametrize("name", HOW)
def test_what_is_not_adjacent_is_left_alone(name: str) -> None:
    model, x = Net(HOW[name]).double().eval(), example()
    expected = model(x)
    convt3d.fuse(model)
    assert isinstance(model.norm, nn.BatchNorm3d)
    assert type(model.layer) is convt3d.Conv3d
    assert torch.equal(model(x), expected)


def test_modules_that_are_not_plain_are_left_alone() -> None:
    def hooked(model: nn.Sequential) -> None:
        model[1].register_forward_hook(lambda *_: None)

    def shared(model: nn.Sequential) -> None:
        model.append(nn.ModuleList([model[1]]).eval())
        model[2].forward = lambda x: x  # type: ignore[method-assign]

    def training(model: nn.Sequential) -> None:
        model[1].train()

    def without_statistics(model: nn.Sequential) -> None:
        model[1] = nn.BatchNorm3d(6, track_running_stats=False).double().eval()

    def of_pytorch(model: nn.Sequential) -> None:
        convt3d.revert(model)

    for change in (hooked, shared, training, without_statistics, of_pytorch):
        model = normed(LAYERS["Conv3d"]())
        change(model)
        convt3d.fuse(model)
        assert not any(isinstance(module, Folded) for module in model.modules()), change.__name__


def test_inputs_let_parts_be_traced_and_results_be_compared() -> None:
    x = example()

    class Parts(nn.Module):
        def __init__(self, how: Callable[[Net, Tensor], Tensor]) -> None:
            super().__init__()
            self.body = normed(LAYERS["Conv3d"](), nn.ReLU())
            self.how = how

        def forward(self, x: Tensor) -> Tensor:
            y = self.how(self, x)
            return y if y.sum() > -1e9 else -y

    good = Parts(lambda net, x: net.body(x)).eval()
    assert not isinstance(convt3d.fuse(good).body[1], Folded)  # nothing is proved
    expected = good(x)
    assert isinstance(convt3d.fuse(good, x).body[1], Folded)
    torch.testing.assert_close(good(x), expected)
    # One that goes around its own Sequential is found out by the comparison.
    bad = Parts(lambda net, x: net.body[0](x)).eval()
    expected = bad(x)
    with pytest.raises(RuntimeError, match="Nothing was folded"):
        convt3d.fuse(bad, x)
    assert torch.equal(bad(x), expected)
    assert isinstance(bad.body[1], nn.BatchNorm3d)
    assert type(bad.body[0]) is convt3d.Conv3d


@pytest.mark.parametrize("which", [0, 1, 2, "root"])
def test_a_module_with_a_forward_of_its_own_is_left_alone(which: int | str) -> None:
    """Wrappers replace ``forward`` in a module's attributes; torch.fx traces the class's."""
    model = normed(convt3d.Conv3d(4, 6, 3), nn.ReLU())
    wrapped = model if which == "root" else model[which]  # type: ignore[index]
    plain = wrapped.forward
    wrapped.forward = lambda *given: -plain(*given)  # type: ignore[method-assign]
    x = example()
    before = model(x)
    convt3d.fuse(model)
    assert torch.allclose(model(x), before, rtol=1e-12)
    assert type(model[0]) is (FusedConv3d if which == 2 else convt3d.Conv3d)
    layer = normed(convt3d.Conv3d(4, 6, 3))
    own = layer[0]._conv_forward
    layer[0]._conv_forward = lambda *given: own(*given) * 2  # type: ignore[assignment, operator]
    before = layer(x)
    assert torch.equal(convt3d.fuse(layer)(x), before)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_norm_is_not_folded_into_what_is_no_parameter(name: str) -> None:
    model = normed(convt3d.Conv3d(4, 6, 3))
    kept = getattr(model[0], name).detach()
    delattr(model[0], name)
    model[0].register_buffer(name, kept)
    x = example()
    before = model(x)
    convt3d.fuse(model)
    assert torch.equal(model(x), before)
    assert torch.equal(convt3d.revert(model)(x), before)
    assert getattr(model[0], name) is kept


class Storing(nn.Module):
    """Counts its calls and keeps what its layer gave."""

    def __init__(self) -> None:
        super().__init__()
        self.body = normed(convt3d.Conv3d(4, 6, 3))
        self.calls, self.given, self.named = 0, [], {"last": None}  # type: ignore[var-annotated]
        self.nested: dict[str, tuple[list[Tensor]]] = {"deep": ([],)}
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        y = self.body[0](x)
        self.given.append(y)
        self.nested["deep"][0].append(y)
        self.named["last"] = y
        self.last = y
        return self.body[1](y)


class Frozen(dict[str, Any]):
    """As configurations of other libraries: nothing may be changed."""

    def update(self, *given: Any, **named: Any) -> None:
        raise RuntimeError("frozen")

    copy = clear = update  # type: ignore[assignment]


def test_containers_that_no_trace_has_changed_are_not_touched() -> None:
    model = normed(convt3d.Conv3d(4, 6, 3))
    model.settings = Frozen(width=4, more=Frozen())  # type: ignore[assignment]
    convt3d.fuse(model)
    assert model.settings == {"width": 4, "more": {}}
    assert type(model[0]) is FusedConv3d


def test_a_trace_leaves_no_mark() -> None:
    model = Storing().eval()
    convt3d.fuse(model)
    assert (model.calls, model.given, model.named) == (0, [], {"last": None})
    assert model.nested == {"deep": ([],)}
    assert model.seen == 0 and not hasattr(model, "last")
    x = example()
    want = model.body[0](x)
    model(x)
    assert torch.equal(model.last, want)  # of the layer: what is kept is read elsewhere
    assert type(model.body[0]) is convt3d.Conv3d
    pickle.dumps(model)


def test_a_parametrized_fused_layer_is_not_reverted_by_halves() -> None:
    model = convt3d.fuse(normed(convt3d.Conv3d(4, 6, 3), nn.ReLU()))
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(RuntimeError, match=r"undo that before convt3d\.revert"):
        convt3d.revert(model)
    assert isinstance(model[1], Folded) and isinstance(model[2], Folded)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(convt3d.revert(model)[1]) is nn.BatchNorm3d


def test_folding_in_inference_mode_leaves_plain_tensors() -> None:
    model = normed(convt3d.ConvTranspose3d(4, 6, 2, 2))
    with torch.inference_mode():
        convt3d.fuse(model)
    x = example().requires_grad_()
    (by_input,) = torch.autograd.grad(model(x).sum(), x)
    convt3d.revert(model)
    (want,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.allclose(by_input, want)


@pytest.mark.usefixtures("epilogues")
def test_a_fused_model_compiles_to_the_same_tail() -> None:
    model = normed(LAYERS["ConvTranspose3d"](), nn.SiLU())
    x = example()
    expected = model(x)
    convt3d.fuse(model)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
    names, values = zip(*model.named_parameters(), strict=True)

    def call(x: Tensor, *parameters: Tensor) -> list[Tensor]:
        return [torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), x)]

    graph = traced(Case("", call, [x, *values], 1, x.dtype))
    FuseTails()(graph.graph)
    graph.recompile()
    targets = {node.target for node in graph.graph.nodes}
    assert torch.ops.convt3d.conv_transpose3d_fused.default in targets
    torch.testing.assert_close(graph(x, *values)[0], expected)


class _InFloat32(nn.Module):
    """The result of a network in float32, whatever it computes in."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network(x)
        return y.float()


def test_outputs_of_a_finer_type_may_differ_by_the_rounding_of_layers() -> None:
    network = nn.Sequential(
        nn.Conv3d(2, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 3, 1)
    )
    for _ in range(5):
        network(torch.randn(4, 2, 8, 8, 8))
    model = convt3d.convert(_InFloat32(network).eval())
    x = torch.randn(2, 2, 8, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x)
        convt3d.fuse(model, x)
        got = model(x)
    assert not any(module._forward_hooks for module in model.modules())
    assert isinstance(network[1], Folded)
    difference = (got - want).abs().max() / want.abs().max()
    assert 1e-3 < difference < 5e-2  # more than float32's own allowance

"""The graph pass on random tails, and on tails whose fusion is known, traced to ATen on CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

import convt3d
from convt3d import log
from convt3d.compile import Site, report
from convt3d.compile.base import FUSED
from convt3d.compile.passes import FuseTails
from support import epilogues as backend
from support.tails import ACTIVATIONS, Case, Maker, traced

EPSILON = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def fused(case: Case, symbolic: bool = False) -> tuple[torch.fx.GraphModule, list[Site]]:
    """The graph of a case after the pass, and what the pass did."""
    graph = traced(case, symbolic)
    before = convolutions(graph)
    report(clear=True)
    FuseTails()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    # One that runs twice, with and without its tail, gives the right results, too.
    assert convolutions(graph) == before, case.label
    return graph, report()


def convolutions(graph: torch.fx.GraphModule) -> int:
    """How many nodes of a graph are convolutions, fused ones included."""
    return sum(node.target in (*FUSED, *FUSED.values()) for node in graph.graph.nodes)


class Interpreter(torch.fx.Interpreter):
    """Runs a graph; the fused operators must give the strides that their fake kernels gave."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.target in FUSED.values():
            strides = n.meta["val"].stride()
            assert result.stride() == strides or not all(type(s) is int for s in strides)
        return result


def values_of(graph: torch.fx.GraphModule) -> list[Tensor]:
    """The fake tensors that a graph returns."""
    return [node.meta["val"] for node in graph.graph.output_node().args[0]]  # type: ignore[union-attr]


def check(case: Case, graph: torch.fx.GraphModule, plain: torch.fx.GraphModule) -> None:
    """The graph's results against float64: as near as eager PyTorch's, at worst one rounding."""
    got = Interpreter(graph).run(*case.inputs)
    unfused, eager = plain(*case.inputs), case.function(*case.inputs)
    for result, before, theirs, expected in zip(
        got, unfused, eager, case.function(*case.wide()), strict=True
    ):
        assert result.dtype == before.dtype, case.label
        # Real tensors of one channel take either format where fake ones take the other.
        assert order(result) == order(before) or case.channels == 1, case.label
        low = torch.bfloat16 in (case.dtype, result.dtype)
        epsilon = EPSILON[torch.bfloat16 if low else case.dtype]
        error, *others = (
            (tensor.double() - expected).abs().max().item() for tensor in (result, before, theirs)
        )
        allowed = 2 * max(others) + epsilon * (1 + expected.abs().max().item())
        assert error <= allowed, f"{case.label}: {error} is more than {allowed}"


def order(tensor: Tensor) -> list[int]:
    """Strides, those of axes of one aside."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def check_seed(seed: int, calls: list[Any]) -> list[Site]:
    case = Maker(seed).case()
    symbolic = seed % 3 == 0
    graph, sites = fused(case, symbolic)
    plain = traced(case)
    if not symbolic:
        for ours, theirs in zip(values_of(graph), values_of(plain), strict=True):
            assert ours.stride() == theirs.stride(), case.label
    calls.clear()
    check(case, graph, plain)
    assert len(calls) == sum(bool(site.fused) for site in sites), case.label
    if symbolic:
        larger = Maker(seed).case(larger=3)
        check(larger, graph, traced(larger))
    return sites


def check_seeds(seeds: range, calls: list[Any]) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        sites = check_seed(seed, calls)
        counts["sites"] += len(sites)
        counts.update({name for site in sites for name in site.fused})
        counts["fused"] += sum(bool(site.fused) for site in sites)
    # A pass that fuses nothing is right, too, so it has to be seen to fuse.
    assert counts["fused"] > 0.5 * counts["sites"] > 0.45 * len(seeds), counts
    assert min(counts[name] for name in ("scale", "shift", "clamp", "cat", "add")) > 0, counts


@pytest.mark.sample
@pytest.mark.usefixtures("saved_passes")
@pytest.mark.parametrize(
    ("start", "count"), [(25, 25), *((start, 50) for start in range(0, 300, 50))]
)
def test_random_tails(start: int, count: int, epilogues: list[Any]) -> None:
    check_seeds(range(start, start + count), epilogues)


@pytest.mark.full
@pytest.mark.usefixtures("saved_passes")
@pytest.mark.parametrize("start", range(300, 2300, 100))
def test_two_thousand_random_tails(start: int, epilogues: list[Any]) -> None:
    check_seeds(range(start, start + 100), epilogues)


# --- Tails whose fusion is known -----------------------------------------------------------------

C = 4


def tail_case(
    tail: Callable[..., Any], *operands: Tensor, dtype: torch.dtype = torch.float32, **keywords: Any
) -> Case:
    """A transposed layer of 3 to 4 channels, (2, 4, 13, 7, 10) out, and a tail."""
    x, w = torch.randn(2, 3, 7, 7, 10).to(dtype), torch.randn(3, C, 3, 3, 3).to(dtype) / 4
    b = torch.randn(C).to(dtype) if keywords.get("bias", True) else None

    def function(x: Tensor, w: Tensor, *rest: Tensor) -> list[Tensor]:
        b, rest = (rest[0], rest[1:]) if keywords.get("bias", True) else (None, rest)
        y = convt3d.conv_transpose3d(x, w, b, stride=(2, 1, 1), padding=1)
        result = tail(y, *rest)
        return list(result) if isinstance(result, tuple) else [result]

    inputs = [x, w, *([] if b is None else [b]), *operands]
    return Case("", function, inputs, 1, dtype)


def same(dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of the output's shape."""
    return torch.randn(2, C, 13, 7, 10).to(dtype)


def norm(y: Tensor, *p: Tensor) -> Tensor:
    return F.batch_norm(y, p[0], p[1].abs() + 1, p[2], p[3], False)


def kept(y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.relu()
    return y, y.tanh()


KNOWN: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "x - t": (lambda y, t: y - t, (same,), ("mul_scalar", "add", "mul_scalar")),
    "by channel": (
        lambda y, s, t: (y * s + t).relu(),
        ((C, 1, 1, 1), (1, C, 1, 1, 1)),
        ("scale", "shift", "relu"),
    ),
    "one value": (lambda y, t: y * t, ((1,),), ("scale",)),
    "batch norm": (lambda y, *p: norm(y, *p).relu(), ((C,),) * 4, ("scale", "shift", "relu")),
    "residual": (lambda y, t: F.leaky_relu(y + t, 0.1), (same,), ("add", "leaky_relu")),
    "KernelBench 20": (
        lambda y, t: ((y + t) + y) * y + y,
        ((C, 1, 1, 1),),
        ("shift", "add_held", "mul_held", "add_held"),
    ),
    "KernelBench 26": (
        lambda y, t: (lambda x: x * F.hardswish(x))(y + t),
        (same,),
        ("add", "hold", "hardswish", "mul_held"),
    ),
    "KernelBench 47": (lambda y: F.mish(y).tanh(), (), ("mish", "tanh")),
    "as much as fits": (
        lambda y, t: ((y.relu() + t) * 2).sigmoid().tanh(),
        (same,),
        ("relu", "add", "mul_scalar", "sigmoid"),
    ),
    "nothing that a pass computes which reads it anyway": (
        lambda y: ((y.relu() + 1) * 2).sigmoid().tanh(),
        (),
        (),
    ),
    "nothing before a reduction": (lambda y: y.relu().mean((2, 3, 4)), (), ()),
    "nothing before a norm": (lambda y: F.group_norm(F.silu(y), 2), (), ()),
    "up to a reduction": (lambda y, t: (y + t).relu().mean((2, 3, 4)), (same,), ("add", "relu")),
    "up to a scan": (lambda y: y.relu().cumsum(1), (), ("relu",)),
    "up to a value that is kept": (kept, (), ("relu",)),
    "nothing of a value that is kept": (lambda y: (y, y.relu()), (), ()),
    "nothing of a value that is kept beside": (lambda y, t: (y + t, (y + t) * y), (same,), ()),
    "the value squared": (lambda y: y * y, (), ("mul_held",)),
    "a sum with what it was": (lambda y, t: y + t * y, ((C, 1, 1, 1),), ("scale", "add_held")),
    "nothing of a broadcast sum": (lambda y, t: y + t, ((13, 7, 10),), ()),
    "nothing of a larger shape": (lambda y, t: y[:1] + t, (same,), ()),
    "cat": (lambda y, t: torch.cat([y.relu(), t], 1), (same,), ("relu", "cat")),
    "cat alone": (lambda y, t: torch.cat([t, y], 1), (same,), ("cat",)),
    "cat of more that is computed": (
        lambda y, t: torch.cat([y, t.relu(), t.tanh()], 1),
        (same,),
        (),
    ),
    "cat along the depth": (lambda y, t: torch.cat([y.relu(), t], 2), (same,), ("relu",)),
    "cat with itself": (lambda y: torch.cat([y, y], 1), (), ()),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.usefixtures("epilogues")
def test_known_tails(name: str) -> None:
    tail, operands, steps = KNOWN[name]
    made = [size() if callable(size) else torch.randn(size) for size in operands]
    case = tail_case(tail, *made)
    graph, (site,) = fused(case)
    assert site.fused == steps, site
    check(case, graph, traced(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.usefixtures("epilogues")
def test_each_activation_is_a_few_steps_or_none(name: str, dtype: torch.dtype) -> None:
    case = tail_case(ACTIVATIONS[name], dtype=dtype)
    _, (site,) = fused(case)
    clamps = {"relu6", "hardtanh", "clamp below", "clamp above"}
    kind = {"spelled silu": "silu", "spelled gelu": "gelu_tanh", **dict.fromkeys(clamps, "clamp")}
    several = {
        "square": ("mul_held",),
        "hardswish of product": ("hardswish", "mul_held"),
        "almost silu": ("mul_scalar", "sigmoid", "mul_held"),
        **dict.fromkeys(("elu", "softplus", "almost leaky", "almost leaky, mirrored"), ()),
    }
    assert site.fused == several.get(name, (kind.get(name, name),)), site


@pytest.mark.usefixtures("epilogues")
def test_a_first_shift_is_the_bias_of_a_layer_without() -> None:
    def tail(y: Tensor, t: Tensor) -> Tensor:
        return (y + t.view(-1, 1, 1, 1)).relu()

    case = tail_case(tail, torch.randn(C), bias=False)
    graph, (site,) = fused(case)
    assert site.fused == ("bias", "relu")
    check(case, graph, traced(case))
    alone = tail_case(lambda y, t: y + t.view(-1, 1, 1, 1), torch.randn(C), bias=False)
    assert fused(alone)[1][0].fused == ("shift",)


@pytest.mark.usefixtures("epilogues")
def test_dtypes_of_operands_and_results() -> None:
    low = torch.bfloat16

    def steps(tail: Callable[..., Any], *operands: Tensor, dtype: torch.dtype = low) -> Any:
        case = tail_case(tail, *operands, dtype=dtype)
        graph, (site,) = fused(case)
        check(case, graph, traced(case))
        return site.fused

    # The tensor must have the dtype of the output; it may be converted on its way.
    assert steps(lambda y, t: y + t, same(low)) == ("add",)
    assert steps(lambda y, t: (y + t).to(y.dtype), same()) == ()
    assert steps(lambda y, t: (y.float() + t.float()).to(y.dtype), same(low)) == ("add",)
    assert steps(lambda y, t: (y * t).to(y.dtype), torch.randn(C, 1, 1, 1)) == ("scale",)
    assert steps(lambda y, t: y + t, torch.randn(C, 1, 1, 1).double(), dtype=torch.float32) == ()
    # A result of another type is left to what reads it.
    assert steps(lambda y: y.relu().float().tanh()) == ()
    assert steps(lambda y: y.relu().to(low), dtype=torch.float32) == ()


@pytest.mark.usefixtures("epilogues")
def test_nothing_moves_past_a_write() -> None:
    """Such as the one that frees a sharded weight after its layer."""
    case = tail_case(lambda y: y.relu())
    graph = traced(case)
    convolution, activation = (
        next(node for node in graph.graph.nodes if name in node.name)
        for name in ("conv_transpose3d", "relu")
    )
    with graph.graph.inserting_before(activation):
        graph.graph.call_function(torch.ops.aten.zero_.default, (convolution.args[1],))
    report(clear=True)
    FuseTails()(graph.graph)
    (site,) = report()
    assert site.fused == () and site.stopped == "zero__default writes a tensor before its end"


def test_nothing_is_fused_where_no_kernel_has_an_epilogue() -> None:
    _, (site,) = fused(tail_case(F.relu))
    assert site.fused == ()
    assert site.stopped == "no kernel has an epilogue on cpu"


@pytest.mark.usefixtures("epilogues")
def test_what_happened_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log._said.clear()
    with caplog.at_level("INFO", logger="convt3d"):
        fused(tail_case(lambda y: y.relu().cumsum(1)))
        fused(tail_case(lambda y: y.relu().cumsum(1)))
    (message,) = caplog.messages
    assert message == (
        "the epilogue of conv_transpose3d (conv_transpose3d 3->4 k3 s2x1x1 p1 d1 g1) runs relu: "
        "no step computes cumsum"
    )


def test_tensors_are_read_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, epilogues: list[Any]
) -> None:
    def slower(operation: str, geometry: Any, dtype: Any, batch: int, size: Any, *_: Any) -> bool:
        assert (operation, batch, list(size)) == ("forward", 2, [7, 7, 10])
        return False

    monkeypatch.setattr(backend, "fuses_tensors", slower, raising=False)
    _, (site,) = fused(tail_case(lambda y, t: (y.relu() + t).tanh(), same()))
    assert site.fused == ()
    _, (site,) = fused(tail_case(lambda y, t: (y.relu() * t).tanh(), torch.randn(C, 1, 1, 1)))
    assert site.fused == ("relu", "scale", "tanh")


def test_a_layer_that_pytorch_runs_at_this_size_keeps_its_tail(
    monkeypatch: pytest.MonkeyPatch, epilogues: list[Any]
) -> None:
    def leave(operation: str, geometry: Any, dtype: Any, batch: int, size: Any, *_: Any) -> str:
        assert (operation, batch, list(size)) == ("forward", 2, [7, 7, 10])
        return "cuDNN is faster"

    monkeypatch.setattr(backend, "left_to_pytorch", leave, raising=False)
    _, (site,) = fused(tail_case(lambda y: y.relu()))
    assert (site.fused, site.stopped) == ((), "cuDNN is faster")
    assert not epilogues

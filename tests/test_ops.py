"""The registered operators: opcheck, torch.compile, export, tracing, torch.func, profiling."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import convt3d
from support.checks import check_opcheck, op_samples
from support.geometries import CASES, Case, operands

_ARGUMENTS = (2, (1, 2, 0), 1, 2, 2)  # stride, padding, output_padding, groups, dilation


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def ours(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return convt3d.conv_transpose3d(x, w, b, *_ARGUMENTS)


def pytorchs(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.conv_transpose3d(x, w, b, *_ARGUMENTS)


def tensors(
    *size: int, requires_grad: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Input of this size (default 2x4x3x4x5), weight and bias for ``ours`` and ``pytorchs``."""
    x, w, b = (
        torch.randn(shape, dtype=dtype, requires_grad=requires_grad)
        for shape in (size or (2, 4, 3, 4, 5), (4, 3, 3, 2, 3), (6,))
    )
    return x, w, b


OPERATORS = ("conv_transpose3d", "conv3d", "grad_weight")


# --- opcheck -------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("operation", OPERATORS)
@pytest.mark.parametrize(
    "name, layout",
    [
        ("stride 2, output padding", "contiguous"),
        ("depthwise", "channels_last"),
        *(
            pytest.param(name, layout, marks=pytest.mark.more)
            for name, layout in (
                ("stride 2, output padding", "channels_last"),
                ("phases without a tap", "contiguous"),
                ("phases without a tap", "channels_last"),
                ("depthwise", "contiguous"),
                ("axes of one", "contiguous"),
                ("axes of one", "channels_last"),
            )
        ),
    ],
)
def test_opcheck(name: str, layout: str, operation: str) -> None:
    check_opcheck(CASES[name], operation, layout=layout)


@pytest.mark.sample
@pytest.mark.parametrize("operation", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck_dtypes(dtype: torch.dtype, operation: str) -> None:
    check_opcheck(CASES["kernel equals stride"], operation, dtype)


@pytest.mark.parametrize("operation", OPERATORS)
@pytest.mark.parametrize("name", CASES)
def test_fake_is_like_real(name: str, operation: str) -> None:
    case = CASES[name]
    operator = getattr(torch.ops.convt3d, operation)
    for layout in ("contiguous", "channels_last", "sliced"):
        for dtype in (torch.float32, torch.float64):
            arguments = op_samples(case, dtype, layout=layout)[operation]
            real = operator(*arguments)
            meta = operator(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
            if layout != "sliced":  # .to("meta") keeps no gaps
                assert meta.stride() == real.stride()
            assert (meta.shape, meta.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("operation", OPERATORS)
@pytest.mark.parametrize("name", ["stride 2, output padding", "depthwise", "dilation 3"])
@pytest.mark.usefixtures("opaque")
def test_derivatives_of_the_registered_operators(name: str, operation: str) -> None:
    case = CASES[name]
    arguments = op_samples(Case(case.geometry, (2, 3, 2), 2, case.bias), requires_grad=True)[
        operation
    ]
    operator = getattr(torch.ops.convt3d, operation)
    positions = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]

    def function(*inputs: Tensor) -> Tensor:
        full = list(arguments)
        for position, value in zip(positions, inputs, strict=True):
            full[position] = value
        return operator(*full)

    inputs = [arguments[i] for i in positions]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)
    # Each alone keeps other tensors than all together.
    output = function(*inputs)
    cotangent = torch.randn_like(output)
    together = torch.autograd.grad(output, inputs, cotangent)
    for i, expected in enumerate(together):
        alone = [t.detach() for t in inputs]
        alone[i].requires_grad_()
        (got,) = torch.autograd.grad(function(*alone), alone[i], cotangent)
        assert torch.equal(got, expected)


def test_forward_mode_is_refused_not_dropped() -> None:
    x, w, b = tensors()
    rest = ([1] * 3, [0] * 3, [0] * 3, [1] * 3, 2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"forward.mode"):  # older PyTorchs refuse too
            torch.ops.convt3d.conv_transpose3d(dual, w, b, False, *rest)
        torch.ops.convt3d.conv_transpose3d(x, w, b, False, *rest)  # no tangent: fine
    with pytest.raises(RuntimeError):
        grad(lambda t: torch.ops.convt3d.conv_transpose3d(t, w, b, False, *rest).sum())(x)


# --- torch.compile -------------------------------------------------------------------------------


def _same_with_gradients(compiled: Callable[..., Tensor], *inputs: Tensor, loose: bool) -> None:
    got, want = compiled(*inputs), pytorchs(*inputs)
    assert got.stride() == want.stride()
    tolerated = {"rtol": 1e-4, "atol": 1e-4} if loose else {}
    torch.testing.assert_close(got, want, **tolerated)
    wanted = [t for t in inputs if t.requires_grad]
    gy = torch.randn_like(want)
    for a, e in zip(
        torch.autograd.grad(got, wanted, gy), torch.autograd.grad(want, wanted, gy), strict=True
    ):
        torch.testing.assert_close(a, e, **tolerated)


@pytest.mark.sample
@pytest.mark.parametrize("dynamic", [False, True, None])
def test_compile_fullgraph(dynamic: bool | None) -> None:
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in ((2, 4, 3, 4, 5), (3, 4, 4, 5, 6), (4, 5, 4, 3)):
        x, w, b = tensors(*size, requires_grad=True)
        _same_with_gradients(compiled, x, w, b, loose=False)


@pytest.mark.more
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_a_module_with_inductor(dynamic: bool) -> None:
    model = torch.nn.Sequential(convt3d.ConvTranspose3d(4, 6, 3, 2, 1, 1), torch.nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for size in ((2, 4, 3, 4, 5), (3, 4, 4, 5, 6)):
        x = torch.randn(size, requires_grad=True)
        got, want = compiled(x), model(x)
        torch.testing.assert_close(got, want)
        inputs = (x, *model.parameters())
        for a, e in zip(
            torch.autograd.grad(got.sum(), inputs),
            torch.autograd.grad(want.sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_one_dynamic_graph_serves_all_sizes() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    for n in (7, 12, 17):  # no two equal extents: PyTorch would take them for one symbol
        compiled(*tensors(n, 4, n + 1, n + 2, n + 3))
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["channels_last", "sliced"])
def test_compile_keeps_layouts(layout: str) -> None:
    case = CASES["stride 2"]
    x, w, b = operands(case, torch.float32, layout=layout, requires_grad=True)
    compiled = torch.compile(convt3d.conv_transpose3d, fullgraph=True)
    got, want = (f(x, w, b, *case.arguments) for f in (compiled, F.conv_transpose3d))
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)


def test_compile_under_autocast() -> None:
    x, w, b = tensors(dtype=torch.float32, requires_grad=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(x, w, b), pytorchs(x, w, b)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("opaque")
def test_compiled_transforms() -> None:
    x, w, b = tensors()
    t = torch.randn_like(x)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    xs = torch.randn(3, *x.shape, dtype=x.dtype)
    got = compiled(lambda xs: vmap(ours, (0, None, None))(xs, w, b))(xs)
    torch.testing.assert_close(got, vmap(pytorchs, (0, None, None))(xs, w, b))
    got = compiled(lambda x: grad(lambda x: ours(x, w, b).sin().sum())(x))(x)
    torch.testing.assert_close(got, grad(lambda x: pytorchs(x, w, b).sin().sum())(x))
    got = compiled(lambda x: jvp(lambda x: ours(x, w, b).sin(), (x,), (t,))[1])(x)
    torch.testing.assert_close(got, jvp(lambda x: pytorchs(x, w, b).sin(), (x,), (t,))[1])


# --- Export and tracing --------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(strict: bool, dynamic: bool) -> None:
    model = convt3d.ConvTranspose3d(4, 6, 3, 2, 1, 1)
    x = torch.randn(2, 4, 3, 4, 5)
    shapes = None
    if dynamic:
        shapes = ({i: torch.export.Dim(n) for i, n in ((0, "n"), (2, "d"), (3, "h"), (4, "w"))},)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.convt3d.conv_transpose3d.default in targets
    for size in ((2, 4, 3, 4, 5), (3, 4, 6, 5, 7))[: 1 + dynamic]:
        y = torch.randn(size)
        torch.testing.assert_close(program.module()(y), model(y))


def test_decompositions_of_an_exported_graph() -> None:
    """A graph in PyTorch's operators, which gives the same results."""
    table = convt3d.decompositions()
    model = convt3d.ConvTranspose3d(4, 6, 3, 2, 1, 1, groups=2)
    x = torch.randn(2, 4, 3, 4, 5)
    program = torch.export.export(model, (x,)).run_decompositions(table)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.convolution.default]
    torch.testing.assert_close(program.module()(x), model(x))
    for name in ("stride 2, output padding", "depthwise", "dilation 3"):
        for operation, arguments in op_samples(CASES[name]).items():
            operator = getattr(torch.ops.convt3d, operation).default
            torch.testing.assert_close(table[operator](*arguments), operator(*arguments))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_one_operator(mode: str) -> None:
    graph = make_fx(ours, tracing_mode=mode)(*tensors())
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.convt3d.conv_transpose3d.default]


def test_symbolic_trace_sees_pytorchs_operator() -> None:
    model = torch.nn.Sequential(convt3d.ConvTranspose3d(4, 6, 3, 2))
    traced = torch.fx.symbolic_trace(model)
    x = torch.randn(2, 4, 3, 4, 5)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript() -> None:
    model = convt3d.ConvTranspose3d(4, 6, 3, 2)
    x, y = torch.randn(2, 4, 3, 4, 5), torch.randn(1, 4, 6, 6, 6)
    for converted in (torch.jit.trace(model, (x,)), torch.jit.script(model)):
        torch.testing.assert_close(converted(y), model(y))
    scripted = torch.jit.script(model)
    assert scripted(x, [8, 9, 12]).shape == (2, 6, 8, 9, 12)


def test_modes_see_the_operator() -> None:
    x, w, b = tensors(requires_grad=True)
    seen: list[str] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    y = ours(x, w, b)
    with Recorder():
        ours(x, w, b)
        y.sum().backward()
    for operation in OPERATORS:
        assert f"convt3d.{operation}.default" in seen


def test_fake_tensors() -> None:
    x, w, b = tensors()
    with torch._subclasses.FakeTensorMode() as mode:
        y = ours(*(mode.from_tensor(t) for t in (x, w, b)))
    assert y.shape == ours(x, w, b).shape
    assert type(y) is torch._subclasses.FakeTensor


@pytest.mark.skipif(
    torch.__version__ < "2.5", reason="older counters do not find formulas of others' operators"
)
def test_flops_are_counted_as_pytorch_counts() -> None:
    counts = []
    for function in (ours, pytorchs):
        x, w, b = tensors(requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            function(x, w, b).sum().backward()
        counts.append(counter.get_total_flops())
    # PyTorch does not divide by the groups in its gradients; one forward pass is exact.
    with FlopCounterMode(display=False) as counter:
        ours(*tensors())
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5 * 4 * 3 * 3 * 2 * 3
    assert counts[0] == 3 * counter.get_total_flops()
    assert counts[0] <= counts[1]


# --- torch.func ----------------------------------------------------------------------------------

_TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "vmap over input": lambda f: (
        lambda x, w, b: vmap(f, (0, None, None))(torch.stack([x, 2 * x]), w, b)
    ),
    "vmap over weight": lambda f: (
        lambda x, w, b: vmap(f, (None, 0, None))(x, torch.stack([w, 2 * w]), b)
    ),
    "vmap over all": lambda f: (
        lambda x, w, b: vmap(f)(torch.stack([x, 2 * x]), torch.stack([w, w]), torch.stack([b, -b]))
    ),
    "vmap, unbatched": lambda f: lambda x, w, b: vmap(f, (0, None, None))(x, w, b),
    "nested vmap": lambda f: (
        lambda x, w, b: vmap(vmap(f, (0, None, None)), (None, 0, None))(
            x, torch.stack([w, 2 * w]), b
        )
    ),
    "jvp": lambda f: lambda x, w, b: jvp(f, (x, w, b), (x.sin(), w.cos(), b)),
    "vjp": lambda f: lambda x, w, b: vjp(f, x, w, b)[1](torch.ones_like(f(x, w, b))),
    "grad": lambda f: grad(lambda x, w, b: f(x, w, b).sin().sum(), (0, 1, 2)),
    "grad of grad": lambda f: grad(
        lambda x, w, b: grad(lambda w: f(x, w, b).pow(3).sum())(w).sin().sum(), (0, 1)
    ),
    "per-sample gradients": lambda f: vmap(
        grad(lambda w, b, x: f(x, w, b).sin().sum(), (0, 1)), (None, None, 0)
    ),
}


@pytest.mark.parametrize("name", _TRANSFORMS)
@pytest.mark.usefixtures("opaque")
def test_transforms(name: str) -> None:
    x, w, b = tensors()
    inputs = (w, b, x) if name.startswith("per-sample") else (x, w, b)
    got, want = (_TRANSFORMS[name](f)(*inputs) for f in (ours, pytorchs))
    assert torch.utils._pytree.tree_map(lambda t: t.shape, got) == torch.utils._pytree.tree_map(
        lambda t: t.shape, want
    )
    torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("opaque")
def test_jacobians() -> None:
    x, w, b = tensors(1, 4, 1, 3, 2)
    w = w[..., :1, :1]
    for transform in (jacrev, jacfwd, hessian):
        got, want = (
            transform(lambda w, f=f: f(x, w, b).pow(3).sum((0, 2, 3, 4)))(w)
            for f in (ours, pytorchs)
        )
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("opaque")
def test_functional_call() -> None:
    model = convt3d.ConvTranspose3d(4, 6, 3, groups=2, dtype=torch.float64)
    x = torch.randn(2, 4, 3, 4, 5, dtype=torch.float64)
    weights = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, weights, (x,))
    torch.testing.assert_close(got, F.conv_transpose3d(x, **weights, groups=2))


@pytest.mark.usefixtures("opaque")
def test_dual_numbers() -> None:
    x, w, b = tensors()
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.randn_like(t)) for t in (x, w, b)]
        got, want = (forward_ad.unpack_dual(f(*duals)) for f in (ours, pytorchs))
        torch.testing.assert_close(got.primal, want.primal)
        torch.testing.assert_close(got.tangent, want.tangent)


class NoGradient(torch.autograd.Function):
    """Gives its input on, and an undefined gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("kind", [convt3d.Conv3d, convt3d.ConvTranspose3d])
def test_an_undefined_gradient_stays_undefined(kind: Any, dispatched: bool) -> None:
    """Zeros in its place would let an optimiser with weight decay move the parameters."""
    layer = kind(2, 3, 3)
    x = torch.randn(1, 2, 4, 4, 4, requires_grad=True)
    with FlopCounterMode(display=False) if dispatched else contextlib.nullcontext():
        NoGradient.apply(layer(x)).sum().backward()
    assert layer.weight.grad is layer.bias.grad is x.grad is None

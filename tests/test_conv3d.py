"""conv3d and Conv3d: as PyTorch's, on CPU by PyTorch itself or by the path of CUDA tensors."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_nn import get_new_module_tests
from torch.utils.flop_counter import FlopCounterMode

import convt3d
from convt3d import backends
from convt3d.cuda.schedule import Problem
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic
from support.checks import SAMPLE_TOLERANCE, check_forward, check_gradients, check_like_pytorch
from support.geometries import LAYOUTS, Case, arranged, case, operands

OPINFO = next(o for o in op_db if o.name == "nn.functional.conv3d")


def conv(
    channels: tuple[int, int],
    kernel: Any,
    size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    **others: Any,
) -> Case:
    return case(
        channels, kernel, size, stride, padding, 0, dilation, groups, transposed=False, **others
    )


CASES: dict[str, Case] = {
    "stride 1": conv((8, 16), 3, (4, 5, 6), padding=1),
    "stride 1, no padding": conv((4, 8), (3, 5, 3), (5, 6, 7)),
    "stride 1, more padding than reach": conv((4, 6), 2, (3, 4, 5), padding=3),
    "stride 2": conv((8, 4), 3, (6, 7, 8), 2, 1),
    "stride 2 of an odd size": conv((4, 8), 3, (5, 7, 9), 2, 1, bias=False),
    "stride 3, kernel 2": conv((4, 6), 2, (7, 8, 9), 3),
    "patches": conv((1, 12), 4, 8, 4),
    "kernel 1": conv((8, 3), 1, (3, 4, 5)),
    "dilation": conv((4, 4), 3, (7, 8, 9), 1, 2, 2),
    "all parameters differ by axis": conv(
        (6, 4), (2, 3, 4), (9, 10, 11), (3, 2, 1), (1, 2, 3), (2, 1, 3), groups=2
    ),
    "groups": conv((8, 16), 3, (4, 5, 6), 1, 1, groups=4),
    "depthwise": conv((6, 6), 5, (6, 7, 8), 1, 2, groups=6),
    "depthwise with multiplier": conv((3, 9), 3, (5, 6, 7), 2, 1, groups=3),
    "1 to 1": conv((1, 1), 3, (3, 4, 5), padding=1),
    "batch of one": conv((8, 8), 3, (5, 6, 7), 1, 1, batch=1),
    "one output": conv((4, 8), 3, 3),
}


@st.composite
def convolutions(draw: st.DrawFn, max_channels: int = 5) -> Case:
    """Any valid Conv3d on an input small enough for the float64 reference."""
    groups = draw(st.integers(1, 3))
    per_group = st.integers(1, max_channels)
    axes = []
    for _ in range(3):
        kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        dilation, padding = draw(st.integers(1, 3)), draw(st.integers(0, 6))
        least = max(1, dilation * (kernel - 1) + 1 - 2 * padding)
        axes.append((kernel, stride, padding, dilation, least + draw(st.integers(0, 6))))
    kernel, stride, padding, dilation, size = zip(*axes, strict=True)
    return conv(
        (groups * draw(per_group), groups * draw(per_group)),
        kernel,
        size,
        stride,
        padding,
        dilation,
        groups,
        batch=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
    )


# --- Against the float64 reference ---------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_named_layers(name: str, dtype: torch.dtype, layout: str) -> None:
    check_forward(CASES[name], dtype, layout=layout)
    check_gradients(CASES[name], dtype, layout=layout)


@given(convolutions(), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
@settings(max_examples=150)
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_any_layer(case: Case, layout: str, grad_layout: str) -> None:
    check_forward(case, torch.float64, layout=layout)
    check_gradients(case, torch.float64, layout=layout, grad_layout=grad_layout)


@given(convolutions())
@settings(max_examples=50)
def test_adjoint(case: Case) -> None:
    """It has the same weight, and takes outputs back to inputs."""
    g, size = case.geometry, case.input_size
    adjoint = g.adjoint(size)
    assert adjoint.transposed and adjoint.weight_size == g.weight_size
    assert adjoint.output_size(g.output_size(size)) == size
    assert Geometry.from_dict(g.to_dict()) == g


@given(convolutions())
@settings(max_examples=100)
def test_canonical_form_of_stride_1(case: Case) -> None:
    """A forward pass on the flipped weight has the values of the gradient by input."""
    from convt3d import reference
    from convt3d.cuda.schedule import flipped

    g = case.geometry
    adjoint, size = g.adjoint(case.input_size), g.output_size(case.input_size)
    problem = Problem("grad_input", adjoint, Arithmetic.TF32, bias=True)
    canonical, its_size = problem.canonical(size)
    if canonical.operation == "grad_input":
        reach = [d * (k - 1) for d, k in zip(g.dilation, g.kernel_size, strict=True)]
        assert (
            g.stride != (1, 1, 1)
            or g.kernel_size == (1, 1, 1)
            or g.groups > 1
            or any(p > n for p, n in zip(g.padding, reach, strict=True))
        )
        assert its_size == size and not canonical.bias
        return
    assert canonical.bias
    x, w, _ = operands(case)
    strides, offset = flipped(w.shape, w.stride())
    index = torch.tensor(offset)
    for n, stride in zip(canonical.geometry.weight_size, strides, strict=True):
        index = index.unsqueeze(-1) + torch.arange(n) * stride
    view = w.flatten()[index]
    y = reference.forward(x, view, None, canonical.geometry)
    torch.testing.assert_close(y, torch.conv3d(x, w, None, *case.arguments))
    assert its_size == case.input_size


# --- PyTorch's own samples -----------------------------------------------------------------------


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("dtype", sorted(OPINFO.supported_dtypes("cpu"), key=str), ids=str)
def test_samples(dtype: torch.dtype, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if ours:
        monkeypatch.setattr(backends, "runs_conv3d", lambda tensor: True)
    differentiable = dtype.is_floating_point or dtype.is_complex
    tolerated = SAMPLE_TOLERANCE.get(dtype, 1e-7)
    made = OPINFO.sample_inputs("cpu", dtype, requires_grad=differentiable)
    tested = list(itertools.chain.from_iterable((s, s.noncontiguous()) for s in made))
    assert len(tested) >= 20
    for sample in tested:
        check_like_pytorch(
            (sample.input, *sample.args),
            sample.kwargs,
            convt3d.conv3d,
            atol=tolerated,
            rtol=tolerated,
            theirs=torch.nn.functional.conv3d,
        )


@pytest.mark.usefixtures("conv3d_on_cpu")
def test_error_samples() -> None:
    tested = 0
    for sample in OPINFO.error_inputs("cpu"):
        given = sample.sample_input
        with pytest.raises(sample.error_type, match=sample.error_regex):
            convt3d.conv3d(given.input, *given.args, **given.kwargs)
        tested += 1
    assert tested >= 5


@pytest.mark.usefixtures("opaque", "conv3d_on_cpu")
def test_samples_gradcheck() -> None:
    for sample in OPINFO.sample_inputs("cpu", torch.float64, requires_grad=True):
        tensors = [t for t in (sample.input, *sample.args) if isinstance(t, Tensor)]

        def function(*inputs: Tensor, _sample: Any = sample) -> Tensor:
            return convt3d.conv3d(*inputs, **_sample.kwargs)

        assert torch.autograd.gradcheck(
            function, tensors, check_forward_ad=True, check_batched_grad=True, fast_mode=True
        )
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("kind", [nn.Conv3d, nn.LazyConv3d], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_module_inputs(kind: type[nn.Module], training: bool) -> None:
    info = next(i for i in module_db if i.module_cls is kind)
    ours = {nn.Conv3d: convt3d.Conv3d, nn.LazyConv3d: convt3d.LazyConv3d}[kind]
    tested = 0
    for given_ in info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    ):
        outputs = []
        for cls in (ours, kind):
            torch.manual_seed(0)
            made = given_.constructor_input
            module = cls(*made.args, **made.kwargs).double().train(training)
            called = given_.forward_input
            y = module(*called.args, **called.kwargs)
            gradients = torch.autograd.grad(y.sum(), list(module.parameters()))
            outputs.append((y, *gradients))
        torch.testing.assert_close(outputs[0], outputs[1])
        tested += 1
    assert tested >= 2


def own_module_cases() -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """Constructor arguments and input size of PyTorch's own cases of the module."""
    return [
        (case["constructor_args"], case["input_size"])
        for case in get_new_module_tests()
        if case.get("module_name") == "Conv3d"
    ]


@pytest.mark.parametrize("arguments, size", own_module_cases(), ids=str)
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_pytorchs_module_cases(arguments: tuple[Any, ...], size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    theirs = nn.Conv3d(*arguments).double()
    ours = convt3d.Conv3d(*arguments).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    results = []
    for module in (ours, theirs):
        y = module(x)
        gradients = torch.autograd.grad(y.square().sum(), (x, *module.parameters()))
        results.append((y, *gradients))
    torch.testing.assert_close(results[0], results[1])


# --- Arguments -----------------------------------------------------------------------------------

_BAD: list[dict[str, Any]] = [
    {"stride": 0},
    {"stride": (1, 2)},
    {"stride": 2.0},
    {"stride": True},
    {"padding": -1},
    {"padding": "SAME"},
    {"padding": "same", "stride": 2},
    {"padding": None},
    {"dilation": 0},
    {"dilation": -1},
    {"dilation": 9},
    {"groups": 0},
    {"groups": 3},
    {"groups": 2},
    {"bias": torch.zeros(5)},
    {"bias": torch.zeros(6, 1)},
    {"bias": torch.zeros(6, dtype=torch.float64)},
    {"weight": torch.zeros(6, 4, 3, 3)},
    {"weight": torch.zeros(6, 4, 3, 3, 3, dtype=torch.float64)},
    {"weight": torch.zeros(6, 3, 3, 3, 3)},
    {"weight": torch.zeros(0, 4, 3, 3, 3)},
    {"weight": torch.zeros(6, 4, 9, 3, 3)},
    {"weight": None},
    {"input": torch.zeros(4, 5, 6)},
    {"input": torch.zeros(1, 1, 4, 5, 6, 7)},
    {"input": torch.zeros(0, 4, 2, 6, 7)},
    {"input": torch.zeros(2, 4, 0, 6, 7)},
]


@pytest.mark.parametrize("change", _BAD, ids=str)
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_errors_are_pytorchs(change: dict[str, Any]) -> None:
    arguments = {"input": torch.zeros(2, 4, 5, 6, 7), "weight": torch.zeros(6, 4, 3, 3, 3)}
    raised = []
    for function in (convt3d.conv3d, F.conv3d):
        with pytest.raises(Exception) as caught:
            function(**(arguments | change))
        raised.append(caught.value)
    assert type(raised[0]) is type(raised[1])
    if type(raised[0]) is not TypeError:  # which lists the arguments as they were passed
        assert str(raised[0]).splitlines()[0] == str(raised[1]).splitlines()[0]


@pytest.mark.parametrize(
    "keywords",
    [
        {"padding": "same"},
        {"padding": "valid", "stride": 2},
        {"padding": "same", "dilation": (1, 2, 3)},
        {"stride": [2], "padding": (1, 0, 2)},
        {"padding": torch.Size([1, 1, 1]), "groups": 2},
        {"bias": torch.ones(6), "stride": (1, 2, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", [(3, 3, 3), (2, 3, 4)])
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_keywords(keywords: dict[str, Any], kernel: tuple[int, int, int]) -> None:
    groups = keywords.get("groups", 1)
    x = torch.randn(2, 4, 9, 10, 11, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 4 // groups, *kernel, dtype=torch.float64, requires_grad=True)
    keywords = {k: v.double() if isinstance(v, Tensor) else v for k, v in keywords.items()}
    for _ in range(2):  # the second time by a recipe
        check_like_pytorch((x, w), keywords, convt3d.conv3d, theirs=F.conv3d)
        unbatched = (x.detach()[0], w.detach())
        check_like_pytorch(unbatched, keywords, convt3d.conv3d, theirs=F.conv3d, strides=False)


@pytest.mark.usefixtures("conv3d_on_cpu")
def test_the_warning_of_even_kernels_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convt3d.functional._warned", [])
    x, w = torch.randn(1, 2, 5, 5, 5), torch.randn(2, 2, 2, 2, 2)
    with pytest.warns(UserWarning, match="zero-padded copy"):
        convt3d.conv3d(x, w, padding="same")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convt3d.conv3d(x, w, padding="same")


@pytest.mark.parametrize("shape", [(0, 4, 5, 6, 7), (2, 0, 5, 6, 7)])
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_tensors_without_elements(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    w = torch.zeros(6, shape[1], 3, 3, 3, requires_grad=True)
    check_like_pytorch((x, w), {}, convt3d.conv3d, theirs=F.conv3d)


@pytest.mark.usefixtures("conv3d_on_cpu")
def test_autocast() -> None:
    x = torch.randn(2, 4, 5, 6, 7, requires_grad=True)
    w = torch.randn(6, 4, 3, 3, 3, requires_grad=True)
    b = torch.randn(6, requires_grad=True)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            got, want = convt3d.conv3d(x, w, b, padding=1), F.conv3d(x, w, b, padding=1)
        assert got.dtype == want.dtype == dtype
        torch.testing.assert_close(got, want, atol=5e-2, rtol=5e-2)
        for a, e in zip(
            torch.autograd.grad(got.sum(), (x, w, b)),
            torch.autograd.grad(want.sum(), (x, w, b)),
            strict=True,
        ):
            assert a.dtype == e.dtype == torch.float32
            torch.testing.assert_close(a, e, atol=0.5, rtol=5e-2)


# --- With the rest of PyTorch --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stride 1", "stride 2 of an odd size", "groups"])
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_compile(name: str) -> None:
    case = CASES[name]
    inputs = operands(case, torch.float32, requires_grad=True)

    def f(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torch.relu(convt3d.conv3d(x, w, b, *case.arguments))

    def gradients(function: Any) -> list[Tensor]:
        y = function(*inputs)
        return [y, *torch.autograd.grad(y.square().sum(), [t for t in inputs if t is not None])]

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled), gradients(f), strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


@pytest.mark.more
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_compile_with_dynamic_sizes() -> None:
    torch._dynamo.reset()
    w = torch.randn(6, 4, 3, 3, 3, requires_grad=True)
    compiled = torch.compile(
        lambda x: convt3d.conv3d(x, w, None, 2, 1), dynamic=True, backend="aot_eager"
    )
    for size in ((5, 6, 7), (8, 9, 10), (11, 12, 13)):
        x = torch.randn(2, 4, *size, requires_grad=True)
        got, want = compiled(x), F.conv3d(x, w, None, 2, 1)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        for a, e in zip(
            torch.autograd.grad(got.sum(), (x, w)),
            torch.autograd.grad(want.sum(), (x, w)),
            strict=True,
        ):
            torch.testing.assert_close(a, e, atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("conv3d_on_cpu")
def test_export_and_decompositions() -> None:
    model = convt3d.convert(nn.Sequential(nn.Conv3d(2, 4, 3, padding="same"), nn.ReLU()))
    x = torch.randn(1, 2, 5, 6, 7)
    program = torch.export.export(model, (x,))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.convt3d.conv3d.default in targets
    torch.testing.assert_close(program.module()(x), model(x))
    plain = program.run_decompositions(convt3d.decompositions())
    assert not any("convt3d" in str(node.target) for node in plain.graph.nodes)
    torch.testing.assert_close(plain.module()(x), model(x))


@pytest.mark.usefixtures("conv3d_on_cpu")
def test_flops_are_pytorchs() -> None:
    x = torch.randn(2, 4, 6, 7, 8, requires_grad=True)
    w = torch.randn(6, 4, 3, 3, 3, requires_grad=True)
    counts = []
    for function in (convt3d.conv3d, F.conv3d):
        with FlopCounterMode(display=False) as counter:
            function(x, w, None, 2, 1).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_script_trace_and_symbolic_trace(transposed: bool) -> None:
    theirs, ours = (nn.ConvTranspose3d, convt3d.conv_transpose3d)
    if not transposed:
        theirs, ours = nn.Conv3d, convt3d.conv3d
    model = nn.Sequential(theirs(2, 4, 3, padding=1), nn.ReLU())
    x = torch.randn(1, 2, 5, 6, 7)
    want = model(x)
    convt3d.convert(model)
    torch.testing.assert_close(torch.jit.script(model)(x), want)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), want)
    traced = torch.fx.symbolic_trace(model)
    assert ours in [node.target for node in traced.graph.nodes]
    torch.testing.assert_close(traced(x), want)

    w = torch.randn(2, 2, 3, 3, 3)
    scripted = torch.jit.script(_SCRIPTED[transposed])
    torch.testing.assert_close(scripted(x, w), ours(x, w, None, [2, 2, 2]))


def _scripted_conv3d(x: Tensor, w: Tensor) -> Tensor:
    return convt3d.conv3d(x, w, None, [2, 2, 2])


def _scripted_conv_transpose3d(x: Tensor, w: Tensor) -> Tensor:
    return convt3d.conv_transpose3d(x, w, None, [2, 2, 2])


_SCRIPTED = {True: _scripted_conv_transpose3d, False: _scripted_conv3d}


@pytest.mark.parametrize("ours", [convt3d.conv3d, convt3d.conv_transpose3d])
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_torch_function_sees_the_call(ours: Any) -> None:
    seen: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Wrapped(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, w = torch.randn(1, 2, 5, 6, 7), torch.randn(2, 2, 3, 3, 3)
    want = ours(x, w)
    with Mode():
        torch.testing.assert_close(ours(x, w), want)
    assert ours in seen
    seen.clear()
    result = ours(x.as_subclass(Wrapped), w)
    assert ours in seen and type(result) is Wrapped
    torch.testing.assert_close(result.as_subclass(Tensor), want)


@pytest.mark.usefixtures("conv3d_on_cpu")
def test_convert_both_kinds_or_one() -> None:
    model = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose3d(4, 4, 2, 2),
        nn.utils.parametrizations.weight_norm(nn.Conv3d(4, 2, 1)),
    )
    x = torch.randn(1, 1, 5, 6, 7)
    want, original = model(x), copy.deepcopy(model)
    convt3d.convert(model, kinds=nn.Conv3d)
    assert isinstance(model[0], convt3d.Conv3d) and isinstance(model[2], convt3d.Conv3d)
    assert type(model[1]) is nn.ConvTranspose3d
    convt3d.convert(model)
    assert type(model[1]) is convt3d.ConvTranspose3d
    torch.testing.assert_close(model(x), want)
    assert "backend=convt3d" in repr(model[0])
    convt3d.revert(model, kinds=nn.ConvTranspose3d)
    assert type(model[0]) is convt3d.Conv3d and type(model[1]) is nn.ConvTranspose3d
    convt3d.revert(model)
    assert [type(m).__name__ for m in model] == [type(m).__name__ for m in original]
    assert model.state_dict().keys() == original.state_dict().keys()


@pytest.mark.parametrize("input", [None, 3, [1.0]], ids=str)
def test_what_is_no_tensor(input: Any) -> None:
    for function in (convt3d.conv3d, F.conv3d):
        with pytest.raises(TypeError):
            function(input, torch.zeros(2, 2, 3, 3, 3))


def test_cpu_tensors_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    function = torch.conv3d
    monkeypatch.setattr(torch, "conv3d", lambda *a: calls.append(a) or function(*a))
    convt3d.conv3d(torch.randn(1, 2, 4, 4, 4), torch.randn(2, 2, 3, 3, 3))
    assert len(calls) == 1


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_layouts_of_a_thousand_calls(dtype: torch.dtype) -> None:
    """Strides of output and gradients are PyTorch's, which depend on what it runs."""
    generator = torch.Generator().manual_seed(1)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    for _ in range(150):
        kernel, batch, channels = 1 + below(5), 1 + below(2), 1 + below(4)
        size = [5 + below(20) for _ in range(3)]
        x = torch.randn(batch, channels, *size, dtype=dtype)
        w = torch.randn(channels, channels, *[kernel] * 3, dtype=dtype)
        x = arranged(x, LAYOUTS[below(2)]).requires_grad_()
        w = arranged(w, LAYOUTS[below(2)]).requires_grad_()
        for ours, theirs in (
            (convt3d.conv3d, F.conv3d),
            (convt3d.conv_transpose3d, F.conv_transpose3d),
        ):
            stride = 1 + below(2)
            got, want = ours(x, w, None, stride), theirs(x, w, None, stride)
            assert got.stride() == want.stride()
            pairs = zip(
                torch.autograd.grad(got.sum(), (x, w)),
                torch.autograd.grad(want.sum(), (x, w)),
                strict=True,
            )
            assert all(a.stride() == b.stride() for a, b in pairs)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.usefixtures("conv3d_on_cpu")
def test_a_gradient_with_gaps_is_copied_once(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cat hands its inputs slices of its gradient; both gradients see one dense tensor."""
    case = CASES["stride 2"]
    x, w, b = operands(case, torch.float32, layout=layout, requires_grad=True)
    seen: list[Tensor] = []
    for operation, position in (("forward", 0), ("grad_weight", 0)):
        function = getattr(backends.OPERATORS, operation)

        def spy(*args: Any, _f: Any = function, _p: int = position) -> Tensor:
            seen.append(args[_p])
            return _f(*args)

        monkeypatch.setattr(backends, "OPERATORS", backends.OPERATORS._replace(**{operation: spy}))
    monkeypatch.setattr("convt3d.functional.record", lambda *_: None)
    y = convt3d.conv3d(x, w, b, *case.arguments)
    torch.cat([y, y.detach()], 1).square().sum().backward()
    gradients = seen[-2:]
    assert gradients[0] is gradients[1]
    last = torch.channels_last_3d if layout == "channels_last" else torch.contiguous_format
    assert gradients[0].is_contiguous(memory_format=last)

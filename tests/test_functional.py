"""conv_transpose3d in eager mode: values, gradients, dtypes, layouts, autocast, switches."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import convt3d
from convt3d import backends, dispatch, native, portable
from convt3d.geometry import Geometry
from support.checks import (
    assert_near,
    check_forward,
    check_gradients,
    check_like_pytorch,
    poisoned,
)
from support.geometries import CASES, DTYPES, LAYOUTS, Case, arranged, cases, gradient, operands
from support.process import run_python

conv = convt3d.conv_transpose3d


# --- Against the float64 reference ---------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_named_layers(name: str, dtype: torch.dtype, layout: str) -> None:
    check_forward(CASES[name], dtype, layout=layout)
    check_gradients(CASES[name], dtype, layout=layout)


@given(cases(), st.sampled_from(LAYOUTS))
def test_any_layer_float64(case: Case, layout: str) -> None:
    check_forward(case, torch.float64, layout=layout)
    check_gradients(case, torch.float64, layout=layout)


@given(cases(), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))
def test_any_layer_float32(case: Case, layout: str, grad_layout: str) -> None:
    check_forward(case, torch.float32, layout=layout)
    check_gradients(case, torch.float32, layout=layout, grad_layout=grad_layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_pytorchs_operator_as_a_backend(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "choose", lambda *_: native)
    check_forward(CASES[name], torch.float32, layout=layout)
    check_gradients(CASES[name], torch.float32, layout=layout)


def test_gradients_of_one_channel_come_in_any_format() -> None:
    # channels_last_3d by its strides alone: oneDNN's bfloat16 convolution is wrong on it
    geometry = Geometry(4, 1, (3, 3, 3), (1, 1, 1), (1, 1, 1))
    w, gy = torch.randn(4, 1, 3, 3, 3).bfloat16(), torch.randn(2, 1, 1, 8, 8).bfloat16()
    want = F.conv3d(gy.double(), w.double(), padding=1)
    given = gy.as_strided(gy.shape, (64, 1, 64, 8, 1))
    got = native.grad_input(given, w, geometry, (1, 8, 8), False)
    torch.testing.assert_close(got.double(), want, atol=0.1, rtol=0.02)


def test_the_checks_can_fail() -> None:
    def wrong(*arguments: Any) -> torch.Tensor:
        return F.conv_transpose3d(*arguments) * 1.0001

    def unwritten(*arguments: Any) -> torch.Tensor:
        return torch.empty_like(F.conv_transpose3d(*arguments))

    case = CASES["stride 2"]
    for operator in (wrong, unwritten):
        with pytest.raises(AssertionError):
            check_forward(case, operator=operator)
    with pytest.raises(AssertionError):
        check_gradients(case, operator=wrong)
    with poisoned():
        assert torch.empty(3).isnan().all()
    zeros, ones = torch.zeros(9, dtype=torch.float64), torch.ones(9, dtype=torch.float64)
    for one_wrong in (1e-5, torch.nan, torch.inf):
        actual = ones.float()
        assert_near(actual, ones, ones, 1e-6, "ones")
        actual[4] += one_wrong
        with pytest.raises(AssertionError, match=r"1 of 9 elements wrong; at \[4\]"):
            assert_near(actual, ones, ones, 1e-6, "ones")
    with pytest.raises(AssertionError):
        assert_near(zeros + 1e-30, zeros, zeros, 1e-6, "zeros")


# --- Forms of the arguments ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stride 2", "depthwise", "kernel equals stride"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_unbatched(name: str, requires_grad: bool) -> None:
    case = CASES[name]
    x, w, b = operands(case, torch.float64)
    x, b = x[0].requires_grad_(requires_grad), b.requires_grad_(requires_grad)
    check_like_pytorch((x, w, b, *case.arguments), strides=False)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_empty_batch(dtype: torch.dtype, layout: str) -> None:
    x = torch.empty(0, 4, 3, 4, 5, dtype=dtype, requires_grad=True)
    w = arranged(torch.randn(4, 6, 3, 3, 3, dtype=dtype), layout).requires_grad_()
    b = torch.randn(6, dtype=dtype, requires_grad=True)
    y = conv(x, w, b, 2, 1, 1)
    assert y.shape == (0, 6, 6, 8, 10)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for parameter in (w, b):
        assert parameter.grad is not None
        assert not parameter.grad.any()
        assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"stride": 2},
        {"stride": [2]},
        {"stride": [2, 1, 3]},
        {"stride": torch.Size([2, 2, 2])},
        {"stride": np.int64(2), "padding": (np.int32(1),) * 3},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"groups": 2, "dilation": (1, 2, 3)},
        {"bias": torch.ones(6), "stride": 3},
    ],
    ids=str,
)
def test_keywords(keywords: dict[str, Any]) -> None:
    groups = keywords.get("groups", 1)
    x, w = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 6 // groups, 3, 3, 3)
    check_like_pytorch((x, w), keywords, atol=1e-5, rtol=1e-5)


def test_positional_order_is_pytorchs() -> None:
    x, w, b = torch.randn(1, 4, 3, 3, 3), torch.randn(4, 3, 2, 2, 2), torch.randn(6)
    check_like_pytorch((x, w, b, 3, 1, 2, 2, 2), atol=1e-5, rtol=1e-5)  # groups before dilation


# --- Gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["stride 2, output padding", "groups of 8", "phases without a tap"]
)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_only_the_gradients_asked_for(
    name: str, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    tensors = operands(case)
    for i in wanted:
        tensors[i].requires_grad_()
    ran: list[str] = []
    for operation in ("grad_input", "grad_weight"):
        function = getattr(portable, operation)

        def spy(*args: Any, _f: Any = function, _o: str = operation) -> torch.Tensor:
            ran.append(_o)
            return _f(*args)

        monkeypatch.setattr(portable, operation, spy)
    check_like_pytorch((*tensors, *case.arguments))
    assert ran == [("grad_input", "grad_weight")[i] for i in wanted if i < 2]


def test_keeps_no_tensor_without_need() -> None:
    case = CASES["stride 2"]
    x, w, b = operands(case)
    b.requires_grad_()
    y = conv(x, w, b, *case.arguments)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    y.sum().backward()


def test_gradient_of_a_sum_is_expanded() -> None:
    case = CASES["stride 2"]
    x, w, b = operands(case, requires_grad=True)
    conv(x, w, b, *case.arguments).sum().backward()
    got = [t.grad for t in (x, w, b)]
    want = torch.autograd.grad(F.conv_transpose3d(x, w, b, *case.arguments).sum(), (x, w, b))
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(
    "name",
    [
        "stride 2, output padding",
        "phases without a tap",
        "axes of one",
        "depthwise",
        "output padding at the stride",
    ],
)
@pytest.mark.usefixtures("opaque")
def test_gradcheck(name: str) -> None:
    case = _tiny(CASES[name])
    inputs = tuple(t for t in operands(case, requires_grad=True) if t is not None)

    def function(x: torch.Tensor, w: torch.Tensor, *b: torch.Tensor) -> torch.Tensor:
        return conv(x, w, b[0] if b else None, *case.arguments)

    assert torch.autograd.gradcheck(
        function,
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        fast_mode=True,
    )
    assert torch.autograd.gradgradcheck(
        function,
        inputs,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        check_batched_grad=True,
        fast_mode=True,
    )


def _tiny(case: Case) -> Case:
    size = tuple(min(n, 3) for n in case.input_size)
    return Case(case.geometry, (size[0], size[1], size[2]), 2, case.bias)


@pytest.mark.usefixtures("opaque")
def test_third_derivative() -> None:
    case = CASES["stride 2"]

    def third(operator: Any) -> list[torch.Tensor]:
        x, w, b = operands(case, requires_grad=True)
        value = operator(x, w, b, *case.arguments).pow(4).sum()
        for _ in range(2):
            gx, gw = torch.autograd.grad(value, (x, w), create_graph=True)
            value = (gx * gx.detach()).sum() + (gw * gw.detach()).sum()
        return list(torch.autograd.grad(value, (x, w, b)))

    for a, e in zip(third(conv), third(F.conv_transpose3d), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


def test_backward_twice_needs_retain_graph() -> None:
    case = CASES["stride 2"]
    x, w, b = operands(case, requires_grad=True)
    y = conv(x, w, b, *case.arguments).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_in_place_change_of_a_saved_tensor_is_noticed() -> None:
    case = CASES["stride 2"]
    x, w, b = operands(case)
    w.requires_grad_()
    y = conv(x, w, b, *case.arguments).sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.usefixtures("opaque")
def test_gradients_outside_of_the_forward_level() -> None:
    """Batched and dual gradients of a forward pass that was an eager one."""
    case = CASES["stride 2"]
    x, w, b = operands(case, requires_grad=True)
    gys = torch.stack([gradient(case, x, seed=s) for s in (1, 2, 3)])
    y = conv(x, w, b, *case.arguments)
    batched = torch.autograd.grad(y, (x, w, b), gys, is_grads_batched=True, retain_graph=True)
    for i, gy in enumerate(gys):
        one = torch.autograd.grad(y, (x, w, b), gy, retain_graph=True)
        for a, e in zip(batched, one, strict=True):
            torch.testing.assert_close(a[i], e)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(gys[0], gys[1])
        gx = torch.autograd.grad(y, x, dual)[0]
        tangent = torch.autograd.forward_ad.unpack_dual(gx).tangent
    y = conv(x, w, b, *case.arguments)
    torch.testing.assert_close(tangent, torch.autograd.grad(y, x, gys[1])[0])


# --- Kinds of tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.complex32, torch.complex64, torch.complex128, torch.int64], ids=str
)
def test_other_dtypes_go_to_pytorch(dtype: torch.dtype) -> None:
    x = torch.randint(-4, 5, (2, 4, 3, 4, 5)).to(dtype)
    w = torch.randint(-4, 5, (4, 3, 3, 3, 3)).to(dtype)
    check_like_pytorch((x, w, None, 2), atol=0, rtol=0)


def test_lazily_negated_views() -> None:
    w = torch.randn(4, 6, 3, 3, 3)
    x = torch.randn(2, 4, 3, 4, 5, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    check_like_pytorch((x, w, None, 2), atol=1e-5, rtol=1e-5)
    gy = torch.randn(2, 6, 5, 6, 7, dtype=torch.complex64).conj().imag
    x = torch.randn(2, 4, 3, 4, 5, requires_grad=True)
    (got,) = torch.autograd.grad(conv(x, w), x, gy)
    (want,) = torch.autograd.grad(F.conv_transpose3d(x, w), x, gy)
    torch.testing.assert_close(got, want)


def test_only_plain_tensors_skip_the_dispatcher() -> None:
    x = torch.randn(1, 4, 2, 2, 2)

    class Subclass(torch.Tensor):
        pass

    assert dispatch.plain(x, torch.nn.Parameter(x), x)
    with torch.inference_mode():
        assert dispatch.plain(torch.ones(1), torch.ones(1))
    others = [
        x.as_subclass(Subclass),
        x.to("meta"),
        x.to_sparse(),
        x.to_mkldnn(),
        torch._efficientzerotensor(3),
        torch.randn(2, dtype=torch.complex64).conj().imag,
        "tensor",
    ]
    for other in others:
        assert not dispatch.plain(other, x)
        assert not dispatch.plain(x, other)
        assert not dispatch.plain(x, x, other)
    for dtype in (torch.int64, torch.complex64):
        assert not dispatch.plain(x.to(dtype), x.to(dtype))
    torch.vmap(lambda t: None if dispatch.plain(t, t) else t)(x)


def test_subclasses_come_back_as_they_went_in() -> None:
    class Tagged(torch.Tensor):
        pass

    x, w = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 6, 3, 3, 3)
    y = conv(x.as_subclass(Tagged), w, None, 2)
    assert type(y) is Tagged
    torch.testing.assert_close(y.as_subclass(torch.Tensor), conv(x, w, None, 2))


def test_an_input_on_meta_takes_any_weight() -> None:
    x = torch.empty(2, 4, 5, 5, 5, device="meta")
    for weight in (torch.randn(4, 6, 3, 3, 3), torch.randn(4, 6, 3, 3, 3, requires_grad=True)):
        y = conv(x, weight, None, 2)
        wanted = F.conv_transpose3d(x, weight, None, 2)
        assert (y.device.type, y.shape) == ("meta", wanted.shape)
        assert convt3d.conv3d(x, weight.detach().transpose(0, 1)).device.type == "meta"


def test_meta_tensors() -> None:
    w = torch.empty(4, 6, 3, 3, 3, device="meta")
    y = conv(torch.empty(2, 4, 3, 4, 5, device="meta"), w, None, 2)
    assert y.device.type == "meta"
    assert y.shape == (2, 6, 7, 9, 11)


def test_no_grad_and_inference_mode() -> None:
    x, w = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 6, 3, 3, 3, requires_grad=True)
    with torch.no_grad():
        assert not conv(x, w).requires_grad
    with torch.inference_mode():
        assert conv(x, w).is_inference()
        frozen = torch.randn(2, 4, 3, 4, 5)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        conv(frozen, w)


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode_wins_over_enable_grad(repeat: bool, inside: bool) -> None:
    w = torch.randn(4, 6, 3, 3, 3, requires_grad=True)
    outside = torch.randn(2, 4, 3, 4, 5)
    with torch.inference_mode():
        x = torch.randn(2, 4, 3, 4, 5) if inside else outside
        if repeat:
            conv(x, w)
        with torch.enable_grad():
            got, want = conv(x, w), torch.conv_transpose3d(x, w)
    assert got.is_inference() and want.is_inference()
    assert not got.requires_grad and got.grad_fn is None and not want.requires_grad
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_function_modes_see_the_call_and_nothing_else() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor)}
            seen.append((func.__name__, tuple(sorted(map(str, dtypes)))))
            return func(*args, **(kwargs or {}))

    x, w = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 6, 3, 3, 3)
    for function in (torch.conv_transpose3d, conv):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16), Mode():
                function(x, w, None, 2)
    assert seen == 4 * [("conv_transpose3d", ("torch.float32",))]


def test_checkpoint_and_saved_tensor_hooks() -> None:
    case = CASES["stride 2"]
    x, w, b = operands(case, requires_grad=True)
    want = torch.autograd.grad(conv(x, w, b, *case.arguments).sum(), (x, w, b))
    y = torch.utils.checkpoint.checkpoint(conv, x, w, b, *case.arguments, use_reentrant=False)
    for a, e in zip(torch.autograd.grad(y.sum(), (x, w, b)), want, strict=True):
        torch.testing.assert_close(a, e)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy):
        y = conv(x, w, b, *case.arguments)
    for a, e in zip(torch.autograd.grad(y.sum(), (x, w, b)), want, strict=True):
        torch.testing.assert_close(a, e)


# --- Autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtypes", ["fff", "bff", "fbf", "hhh", "ddd"])
def test_autocast(dtypes: str, cast: torch.dtype) -> None:
    of = {
        "f": torch.float32,
        "b": torch.bfloat16,
        "h": torch.float16,
        "d": torch.float64,
    }
    case = CASES["stride 2, output padding"]
    x, w, b = (t.to(of[d]).requires_grad_() for t, d in zip(operands(case), dtypes, strict=True))
    with torch.autocast("cpu", cast):
        got = conv(x, w, b, *case.arguments)
        want = F.conv_transpose3d(x, w, b, *case.arguments)
    assert got.dtype == want.dtype
    tolerated = {torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 6e-2}[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerated, atol=tolerated)
    gy = torch.randn_like(want)
    for a, e in zip(
        torch.autograd.grad(got, (x, w, b), gy),
        torch.autograd.grad(want, (x, w, b), gy),
        strict=True,
    ):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=tolerated, atol=4 * tolerated)


def test_autocast_of_another_device_changes_nothing() -> None:
    x, w = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 6, 3, 3, 3)
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert conv(x, w).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert conv(x, w).dtype == torch.float32


# --- Switches and imports ------------------------------------------------------------------------


def test_disabled_means_pytorch() -> None:
    code = (
        "import torch, convt3d; from convt3d import portable\n"
        "portable.forward = None\n"
        "x, w = torch.randn(1, 2, 3, 3, 3), torch.randn(2, 2, 2, 2, 2, requires_grad=True)\n"
        "print(type(convt3d.conv_transpose3d(x, w).grad_fn).__name__)\n"
        "parameters = ([1] * 3, [0] * 3, [0] * 3, [1] * 3, 0)\n"
        "y = torch.ops.convt3d.conv_transpose3d(x, w.detach(), None, False, *parameters)\n"
        "print(torch.equal(y, torch.conv_transpose3d(x, w)))\n"
        "model = convt3d.convert(torch.nn.Sequential(torch.nn.ConvTranspose3d(2, 3, 2)))\n"
        "print(type(model(x).grad_fn).__name__)\n"
    )
    printed = run_python(code, CONVT3D_DISABLE="1").split()
    assert printed == ["ConvolutionBackward0", "True", "ConvolutionBackward0"]


def test_import_is_lean() -> None:
    code = (
        # PyTorch's counter of operations imports triton where there is one.
        "import torch.utils.flop_counter, sys; before = set(sys.modules); import torch, convt3d\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(new & {'cuda', 'typer', 'rich', 'matplotlib', 'triton', 'hypothesis'})\n"
        "print('convt3d.cuda' in sys.modules, torch.cuda.is_initialized())\n"
        "print(convt3d.__version__, *sorted(convt3d.__all__))\n"
    )
    modules, flags, names = run_python(code).splitlines()
    assert modules == "set()"
    assert flags == "False False"
    assert names.split()[1:] == [
        "Conv3d",
        "ConvTranspose3d",
        "LazyConv3d",
        "LazyConvTranspose3d",
        "__version__",
        "compile_options",
        "conv3d",
        "conv_transpose3d",
        "convert",
        "decompositions",
        "explain",
        "fuse",
        "revert",
        "warm",
    ]


def test_the_log_speaks_when_asked() -> None:
    code = (
        "import sys; sys.stderr = sys.stdout\n"
        "from convt3d.log import log_once, logger\n"
        "for message in ('first', 'second', 'first'): log_once(message)\n"
        "logger.debug('detail')"
    )
    printed = run_python(code, CONVT3D_LOG="info").splitlines()
    assert printed == ["convt3d: first", "convt3d: second"]


@settings(max_examples=25)
@given(cases(), st.data())
def test_same_bits_every_run(case: Case, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    x, w, b = operands(case, dtype, requires_grad=True)
    gy = gradient(case, x)
    wanted = [t for t in (x, w, b) if t is not None]
    runs = []
    for _ in range(2):
        y = conv(x, w, b, *case.arguments)
        runs.append((y, *torch.autograd.grad(y, wanted, gy)))
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one, two)

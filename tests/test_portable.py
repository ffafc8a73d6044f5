"""The portable backend: every form right on every layer it claims, and the rule that picks one."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import convt3d
from convt3d import forms, native, portable, reference
from convt3d.bench import shapes
from convt3d.geometry import Geometry
from convt3d.layout import laid_out
from support import records
from support.checks import assert_near, poisoned
from support.geometries import CASES, Case, case, cases, gradient, operands

TOLERANCE = 1e-12
OPERATIONS = tuple(portable.FORMS)


def expected(operation: str, case: Case, x, w, b, gy) -> torch.Tensor:
    if operation == "forward":
        return reference.forward(x, w, b, case.geometry)
    if operation == "grad_input":
        return reference.grad_input(gy, w, case.geometry, case.input_size)
    return reference.grad_weight(x, gy, case.geometry)


def check_forms(case: Case, layout: str, dtype=torch.float64, tolerance=TOLERANCE) -> None:
    """All applicable forms of all operations against the definition."""
    x, w, b = operands(case, dtype, layout=layout)
    gy = gradient(case, x, layout)
    last = layout == "channels_last"
    arguments = {
        "forward": (x, w, b, case.geometry, last),
        "grad_input": (gy, w, case.geometry, case.input_size, last, None),
        "grad_weight": (x, gy, case.geometry, last),
    }
    for operation, values in arguments.items():
        wanted = expected(operation, case, x, w, b, gy)
        scale = expected(operation, case, *(None if t is None else t.abs() for t in (x, w, b, gy)))
        for name in portable.applicable(operation, case.geometry):
            with poisoned():
                result = portable.FORMS[operation][name](*values)
            assert_near(result, wanted, scale, tolerance, f"{operation} as {name}")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("name", CASES)
def test_every_form_of_named_layers(name: str, layout: str) -> None:
    check_forms(CASES[name], layout)


@given(cases())
def test_every_form_of_any_layer(case: Case) -> None:
    check_forms(case, "contiguous")


@given(cases())
def test_every_form_in_float32(case: Case) -> None:
    # float32 on CPU is where the forms differ from PyTorch in what they call (oneDNN).
    check_forms(case, "channels_last", torch.float32, 3e-6)


def test_forms_of_a_stride_beyond_the_kernel() -> None:
    check_forms(case((4, 3), (2, 1, 3), (2, 1, 2), (1, 1, 1000), (0, 0, 1)), "contiguous")


def test_a_large_stride_costs_no_more_than_its_taps() -> None:
    g = Geometry(4, 3, (3, 3, 3), (1, 1, 10**7))
    problem = (g, 1, (2, 2, 2), torch.float32, "cpu", False)
    start = time.process_time()
    assert portable.choose("forward", *problem) == portable.POLYPHASE
    phases = forms._phases(g, (2, 2, 2))
    assert time.process_time() - start < 1  # ten seconds where every phase is listed
    assert len(phases.full) == 3
    assert phases.bias_only


def test_gemm_forms_apply_where_kernel_is_stride() -> None:
    plain = Geometry(4, 2, (2, 4, 1), (2, 4, 1))
    assert forms.is_gemm(plain)
    assert portable.GEMM in portable.applicable("forward", plain)
    assert portable.GEMM in portable.applicable("grad_weight", plain)
    for other in (
        Geometry(4, 2, (2, 2, 2), (2, 2, 2), padding=(0, 1, 0)),
        Geometry(4, 2, (2, 2, 2), (2, 2, 2), output_padding=(1, 0, 0)),
        Geometry(4, 2, (2, 2, 2), (2, 2, 2), dilation=(1, 1, 2)),
        Geometry(4, 2, (2, 2, 2), (2, 2, 2), groups=2),
        Geometry(4, 2, (2, 2, 2), (2, 2, 3)),
    ):
        assert not forms.is_gemm(other)
        assert portable.GEMM not in portable.applicable("forward", other)


def test_gemm_forms_against_the_definition() -> None:
    for kernel in ((2, 2, 2), (1, 2, 3), (1, 1, 1), (4, 1, 2)):
        sample = case((5, 3), kernel, (2, 3, 4), kernel)
        for layout in ("contiguous", "channels_last", "sliced"):
            check_forms(sample, layout)


@pytest.mark.sample
@pytest.mark.parametrize(
    "layout", ["contiguous", pytest.param("channels_last", marks=pytest.mark.more)]
)
@pytest.mark.parametrize(
    "text",
    [
        "n=1,in=16,out=32,size=16,k=3,p=1",  # PyTorch would not take oneDNN
        "n=1,in=32,out=32,size=16x20x24,k=3,s=2,p=1",  # the same, strided
        "n=2,in=32,out=64,size=10,k=3,s=2,p=1,d=2",  # phases without a tap
        "n=2,in=32,out=32,size=14x20x20,k=3x5x7,s=2,p=1x2x3,op=1,g=4",  # few channels a group
        "n=2,in=64,out=64,size=32x16x16,k=3,p=1,g=64,bias=1",  # depthwise
        "n=1,in=16,out=24,size=36,k=3,s=2,p=1,op=1,bias=1",  # a large output
        "n=1,in=128,out=64,size=20,k=2,s=2,bias=1",  # matrix products
    ],
)
def test_the_chosen_form_in_float32(text: str, layout: str) -> None:
    """Layers large enough for each branch of the rule, against PyTorch's operator in float64."""
    shape = shapes.parse(text)
    g = shape.geometry
    x, w, b = operands(
        Case(g, shape.input_size, shape.batch, shape.bias), torch.float32, layout=layout
    )
    gy = gradient(Case(g, shape.input_size, shape.batch), x, layout)
    last = layout == "channels_last"
    with poisoned():
        results = (
            portable.forward(x, w, b, g, last),
            portable.grad_input(gy, w, g, shape.input_size, last),
            portable.grad_weight(x, gy, g, last),
        )
    x, w, gy = x.double(), w.double(), gy.double()
    b = None if b is None else b.double()
    wanted, scales = (
        (
            native.forward(f(x), f(w), None if b is None else f(b), g, False),
            native.grad_input(f(gy), f(w), g, shape.input_size, False),
            native.grad_weight(f(x), f(gy), g, False),
        )
        for f in (torch.clone, torch.abs)
    )
    memory_format = torch.channels_last_3d if last else torch.contiguous_format
    for operation, result, value, scale in zip(OPERATIONS, results, wanted, scales, strict=True):
        assert_near(result, value, scale, 3e-6, operation)
        assert result.is_contiguous(memory_format=memory_format), operation
        assert result.dtype == torch.float32


FORM_SHAPES = {
    portable.POLYPHASE: "in=16,out=16,size=24,k=3,p=1",
    portable.GEMM: "in=128,out=64,size=16,k=2,s=2",
    portable.PYTORCH: "in=4,out=6,size=5,k=3,s=2,p=1",
}


@pytest.mark.parametrize("form", FORM_SHAPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_result_may_be_changed_in_place(form: str, requires_grad: bool) -> None:
    """An activation in place follows; PyTorch refuses that of a view made in a function."""
    text = FORM_SHAPES[form]
    assert choose("forward", text) == form
    s = shapes.parse(text)
    layer = convt3d.ConvTranspose3d(
        s.geometry.in_channels, s.geometry.out_channels, s.geometry.kernel_size,  # type: ignore[arg-type]
        s.geometry.stride, s.geometry.padding,  # type: ignore[arg-type]
    ).requires_grad_(requires_grad)  # fmt: skip
    x = torch.randn(s.batch, s.geometry.in_channels, *s.input_size)
    for source in (x, x[0]):
        y = layer(source)
        assert not y._is_view() or source is not x
        want = torch.relu(y.detach().clone())
        y.relu_()
        assert torch.equal(y, want)
        if requires_grad:
            y.sum().backward()


def test_a_crop_and_strides_of_one_channel_are_no_views() -> None:
    cropped = convt3d.ConvTranspose3d(1, 1, (3, 1, 1))
    one = convt3d.ConvTranspose3d(4, 1, 3).to(memory_format=torch.channels_last_3d)
    for layer, x in (
        (cropped, torch.randn(1, 1, 90, 80, 80)),
        (one, torch.randn(1, 4, 3, 1, 4).to(memory_format=torch.channels_last_3d)),
    ):
        y = layer(x)
        assert not y._is_view()
        y.relu_().sum().backward()


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.fixture
def inexact_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def test_the_switch_of_matrix_products_is_not_ours(inexact_products: None) -> None:
    assert choose("forward", FORM_SHAPES[portable.GEMM]) == portable.GEMM
    layer = convt3d.ConvTranspose3d(128, 64, 2, 2)
    x = torch.randn(2, 128, 16, 16, 16)
    exact = copy.deepcopy(layer).double()
    y, want = layer(x), exact(x.double())
    assert relative(y, want) < 1e-5
    y.backward(torch.ones_like(y) * 0.3)
    want.backward(torch.ones_like(want) * 0.3)
    assert relative(layer.weight.grad, exact.weight.grad) < 1e-4  # type: ignore[arg-type]


def test_matrix_products_are_left_where_they_would_not_be_exact(
    inexact_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the processor has fast inexact products or not."""
    monkeypatch.setattr(portable.forms, "gemm_forward", None)
    monkeypatch.setattr(portable.forms, "gemm_grad_weight", None)
    x, w = torch.randn(2, 8, 3, 4, 5), torch.randn(8, 6, 2, 2, 2)
    geometry = case((8, 6), 2, (3, 4, 5), 2).geometry
    y = portable.FORWARD[portable.GEMM](x, w, None, geometry, False)
    by_weight = portable.GRAD_WEIGHT[portable.GEMM](x, y, geometry, False)
    assert y.shape[2:] == (6, 8, 10) and by_weight.shape == w.shape


@pytest.mark.parametrize("form", FORM_SHAPES)
def test_a_backward_pass_under_autocast_keeps_its_types(form: str) -> None:
    s = shapes.parse(FORM_SHAPES[form])
    g = s.geometry
    layer = convt3d.ConvTranspose3d(
        g.in_channels, g.out_channels, g.kernel_size, g.stride, g.padding  # type: ignore[arg-type]
    )  # fmt: skip
    exact = copy.deepcopy(layer).double()
    x = torch.randn(s.batch, g.in_channels, *s.input_size, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    want = exact(wide)
    want.square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            y = layer(x)
        y.square().sum().backward()
    assert relative(x.grad, wide.grad) < 1e-5  # type: ignore[arg-type]
    assert relative(layer.weight.grad, exact.weight.grad) < 1e-4  # type: ignore[arg-type]


def test_turning_onednn_off_is_seen_after_a_first_call() -> None:
    x = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    theirs = nn.ConvTranspose3d(3, 4, 3)
    ours = convt3d.convert(copy.deepcopy(theirs))
    for enabled in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=enabled), torch.no_grad():
            assert ours(x).stride() == theirs(x).stride()


def choose(operation: str, text: str, dtype=torch.float32, device="cpu", last=False) -> str:
    s = shapes.parse(text)
    return portable.choose(operation, s.geometry, s.batch, s.input_size, dtype, device, last)


def test_rule_takes_the_measured_winners() -> None:
    assert choose("forward", "in=16,out=16,size=32,k=3") == portable.POLYPHASE
    assert choose("grad_input", "in=16,out=16,size=32,k=3") == portable.CONVOLUTION
    assert choose("forward", "n=2,in=32,out=64,size=16,k=3,s=2,p=1,d=2") == portable.POLYPHASE
    assert choose("forward", "in=64,out=32,size=32,k=1,s=2") == portable.POLYPHASE
    assert choose("forward", "in=128,out=64,size=16,k=2,s=2") == portable.GEMM
    assert choose("grad_weight", "in=384,out=5,size=4x32x48,k=2x4x4,s=2x4x4") == portable.GEMM


def test_rule_leaves_the_rest_to_pytorch() -> None:
    big = "n=2,in=32,out=64,size=16,k=3,s=2,p=1,d=2"
    assert choose("forward", big, dtype=torch.float64) == portable.PYTORCH
    assert choose("forward", big, dtype=torch.bfloat16) == portable.PYTORCH
    assert choose("forward", big, device="mps") == portable.PYTORCH
    assert choose("forward", "in=4,out=8,size=4,k=3") == portable.PYTORCH
    assert choose("forward", "n=2,in=128,out=64,size=16,k=4,s=2,p=1") == portable.PYTORCH
    assert choose("forward", "n=2,in=64,out=32,size=16,k=2,s=2", last=True) == portable.PYTORCH
    assert choose("grad_weight", "n=2,in=32,out=32,size=16,k=3,s=2,p=1") == portable.PYTORCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "n=2,in=4,out=8,size=1x7x1,k=3x1x3,s=2x1x2,p=0x0x1",
        "n=2,in=4,out=8,size=3x9x9,k=5x3x3,s=2x1x1,p=3x1x1",
        "n=2,in=4,out=8,size=3x9x9,k=5x3x3,s=3x1x1,p=4x1x1,op=2x0x0",
        "n=2,in=4,out=8,size=9x1x9,k=3,s=1x3x1,p=1",
    ],
)
def test_gradient_by_weight_where_an_axis_is_mostly_padding(text: str, dtype) -> None:
    """PyTorch's operator is wrong there, or ends the process, on CPUs with AVX-512 BF16."""
    assert choose("grad_weight", text, dtype=dtype) == portable.PADDED
    assert choose("grad_weight", text, dtype=dtype, device="mps") == portable.PYTORCH
    s = shapes.parse(text)
    x, gy = (torch.randn(size, dtype=dtype) for size in (s.x_size, s.y_size))
    wanted = reference.grad_weight(x.double(), gy.double(), s.geometry)
    scale = reference.grad_weight(x.double().abs(), gy.double().abs(), s.geometry)
    for last in (False, True):
        with poisoned():
            result = portable.grad_weight(laid_out(x, last), laid_out(gy, last), s.geometry, last)
        assert_near(result, wanted, scale, 3e-6 if dtype == torch.float32 else 2e-2, text)
        assert result.dtype == dtype


def test_other_gradients_by_weight_are_pytorchs() -> None:
    for text in ("in=8,out=8,size=9,k=3,s=2,p=1", "in=8,out=8,size=1,k=3,s=2"):
        assert choose("grad_weight", text, dtype=torch.bfloat16) == portable.PYTORCH
    thin = "in=8,out=8,size=1x9x9,k=3,p=1"
    assert choose("grad_weight", thin) == portable.PYTORCH
    assert choose("grad_weight", thin, dtype=torch.float64) == portable.PYTORCH


@given(cases())
def test_rule_picks_an_applicable_form(case: Case) -> None:
    for operation in OPERATIONS:
        for size in (case.input_size, (64, 64, 64)):
            for last in (False, True):
                for batch in (1, 8):
                    form = portable.choose(
                        operation, case.geometry, batch, size, torch.float32, "cpu", last
                    )
                    assert form in portable.applicable(operation, case.geometry)


def test_without_onednn_pytorch_convolutions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = case((16, 16), 3, 12, batch=1)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    check_forms(sample, "contiguous", torch.float32, 3e-6)
    form = portable.choose(
        "grad_input", sample.geometry, 1, (32, 32, 32), torch.float32, "cpu", False
    )
    assert form == portable.PYTORCH


def test_ambiguous_strides_are_settled() -> None:
    """One-wide axes leave strides open: the result must still have those of a fresh tensor."""
    sample = case((3, 1), (1, 3, 3), (1, 4, 5), (1, 2, 2), (0, 1, 1), batch=1, bias=False)
    x, w, _ = operands(sample, torch.float32)
    packed = forms.polyphase_pack(w, sample.geometry, sample.input_size)
    for last in (False, True):
        y = laid_out(forms.polyphase(x, packed, None, sample.geometry, last), last)
        memory_format = torch.channels_last_3d if last else torch.contiguous_format
        fresh = torch.empty(y.shape, memory_format=memory_format)
        assert y.stride() == fresh.stride()


RECORD = records.RESULTS / "cpu-forms.json"


@records.needed
def test_rule_never_loses_on_the_committed_measurements() -> None:
    """The rule as it is now, judged by every measured row: never below 0.95 of PyTorch."""
    rows = json.loads(RECORD.read_text())["rows"]
    changed = 0
    for row in rows:
        shape = shapes.parse(row["shape"])
        form = portable.choose(
            row["operation"],
            shape.geometry,
            shape.batch,
            shape.input_size,
            getattr(torch, row["dtype"]),
            "cpu",
            row["channels_last"],
        )
        assert row["ms"][form] <= row["ms"][portable.PYTORCH] / 0.95, row
        changed += form != portable.PYTORCH
    assert changed >= 50  # and it does choose

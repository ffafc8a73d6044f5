"""Recipes: a repeated call takes the short way only while nothing about it has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import convt3d
from convt3d import backends, decisions, ops, recipes
from support import opaque
from support.modes import Dispatches

if decisions.guard(torch.ones(1)) is None:
    pytest.skip("this PyTorch has no guards to use", allow_module_level=True)

Arguments = tuple[Any, ...]


@pytest.fixture(name="forwards")
def _forwards(opaque: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the calls inside made of themselves: "prepare" or "run", once each."""
    seen: list[str] = []
    prepare = backends.portable.prepare_forward  # type: ignore[attr-defined]

    def recording(*arguments: Any) -> Callable[..., Tensor]:
        seen.append("prepare")
        made = prepare(*arguments)

        def run(*operands: Tensor) -> Tensor:
            seen.append("run")
            return made(*operands)

        return run

    monkeypatch.setattr(backends.portable, "prepare_forward", recording)
    yield seen


def layer(*size: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(2, 4, *(size or (3, 4, 5)))
    return x, torch.randn(4, 6, 2, 2, 2), torch.randn(6)


def check(*arguments: Any) -> None:
    got, want = convt3d.conv_transpose3d(*arguments), torch.conv_transpose3d(*arguments)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert got.stride() == want.stride()


def test_a_repeated_call_is_prepared_once(forwards: list[str]) -> None:
    x, w, b = layer()
    for arguments in ((x, w, b, 2), (x, w, None, 2), (x.clone(), w.clone(), b.clone(), 2)):
        check(*arguments)
    assert forwards == ["prepare", "run", "prepare", "run", "run"]


def test_layers_of_one_shape_share_a_recipe(forwards: list[str]) -> None:
    """Each layer has tuples of its own for equal parameters."""
    layers = [convt3d.ConvTranspose3d(4, 6, 2, stride=2) for _ in range(3)]
    assert layers[0].stride is not layers[1].stride
    x = layer()[0]
    with torch.no_grad():
        for _ in range(3):
            for each in layers:
                want = torch.conv_transpose3d(x, each.weight, each.bias, 2)
                torch.testing.assert_close(each(x), want, atol=1e-4, rtol=1e-4)
    assert forwards.count("prepare") == 1


def test_a_layer_that_takes_turns_between_shapes_is_prepared_once_for_each(
    forwards: list[str],
) -> None:
    layers = [convt3d.ConvTranspose3d(4, 6, 2, stride=2) for _ in range(2)]
    with torch.no_grad():
        for _ in range(3):
            for size in ((3, 4, 5), (2, 2, 2), (4, 4, 4)):
                for each in layers:
                    each(layer(*size)[0])
    assert forwards.count("prepare") == 3


def test_equal_parameters_of_other_forms_keep_their_recipes(forwards: list[str]) -> None:
    x, w, b = layer()
    for _ in range(3):
        for stride in (2, (2, 2, 2), tuple(map(int, "222"))):
            check(x, w, b, stride)
    assert forwards.count("prepare") == 2


def _double(a: Arguments) -> Arguments:
    return (*(t.double() for t in a[:3]), *a[3:])


def _channels_last(a: Arguments) -> Arguments:
    return (a[0].contiguous(memory_format=torch.channels_last_3d), *a[1:])


def _sliced(a: Arguments) -> Arguments:
    return (torch.randn(2, 4, 3, 4, 10)[..., ::2], *a[1:])


def _strided_weight(a: Arguments) -> Arguments:
    return (a[0], torch.randn(6, 4, 2, 2, 2).transpose(0, 1), *a[2:])


def _negated(a: Arguments) -> Arguments:
    return (torch.randn(2, 4, 3, 4, 5, dtype=torch.complex64).conj().imag, *a[1:])


CHANGES = {
    "stride": lambda a: (*a[:3], 1),
    "padding": lambda a: (*a[:4], 1),
    "dilation": lambda a: (*a[:4], 0, 0, 1, 2),
    "no bias": lambda a: (a[0], a[1], None, *a[3:]),
    "dtype": _double,
    "channels_last": _channels_last,
    "sliced": _sliced,
    "strides of the weight": _strided_weight,
    "negated": _negated,
    "new size": lambda a: (torch.randn(2, 4, 5, 4, 3), *a[1:]),
    "unbatched": lambda a: (a[0][0], *a[1:]),
}


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_noticed(change: Callable[[Arguments], Arguments]) -> None:
    arguments: Arguments = (*layer(), 2)
    check(*arguments)
    changed = change(arguments)
    assert recalled(_defaults(*changed)) is None
    check(*changed)
    check(*arguments)


def _defaults(*given: Any) -> Arguments:
    defaults = (None, None, None, 1, 0, 0, 1, 1)
    return (*given, *defaults[len(given) :])


def recalled(arguments: Arguments) -> recipes.Recipe | None:
    return recipes.recall(*arguments, arguments[1])


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize(
    "mode",
    [
        _Functions,
        Dispatches,
        torch.inference_mode,
        torch.autograd.forward_ad.dual_level,
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.device("cpu"),
        lambda: torch.backends.cudnn.flags(benchmark=True),
        lambda: torch.backends.cudnn.flags(allow_tf32=not torch.backends.cudnn.allow_tf32),
    ],
)
def test_modes_and_switches_are_noticed(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    arguments = _defaults(*layer(), 2)
    convt3d.conv_transpose3d(*arguments)
    assert recalled(arguments) is not None
    with mode():
        assert recalled(arguments) is None
        convt3d.conv_transpose3d(*arguments)
    assert recalled(arguments) is not None


@pytest.mark.usefixtures("opaque")
def test_transforms_and_tracing_are_noticed() -> None:
    x, w, b = layer()
    arguments = _defaults(x, w, b, 2)
    convt3d.conv_transpose3d(*arguments)
    found = []

    def probe(z: Tensor) -> Tensor:
        found.append(recalled(arguments))
        return z.sum()

    torch.func.grad(probe)(x)
    torch.vmap(probe)(x)
    torch.func.functionalize(probe)(x)
    assert found == [None] * 3
    torch.jit.trace(probe, (x,), check_trace=False)
    assert found == [None] * 4


@pytest.mark.usefixtures("opaque")
def test_another_number_of_threads_is_noticed() -> None:
    """PyTorch takes oneDNN for such a layer where there are several: the strides differ."""
    threads = torch.get_num_threads()
    w = torch.randn(4, 5, 1, 1, 1)
    x = torch.randn(2, 4, 3, 3, 3).to(memory_format=torch.channels_last_3d)
    try:
        for number in (2, 1, 2):
            torch.set_num_threads(number)
            check(x, w, None)
    finally:
        torch.set_num_threads(threads)


def test_under_autocast_a_layer_is_found_by_its_own_weight(
    forwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What autocast makes of the weight is another tensor in each call."""
    module = convt3d.ConvTranspose3d(4, 6, 2, stride=2)
    x = layer()[0]

    def call(dtype: torch.dtype) -> None:
        with torch.autocast("cpu", dtype):
            got = module(x)
            want = torch.conv_transpose3d(x, module.weight, module.bias, 2)
        assert got.dtype == want.dtype == dtype
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
        got.float().sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.dtype == torch.float32

    call(torch.bfloat16)
    call(torch.float16)
    monkeypatch.setattr(recipes, "_recipes", {})
    for dtype in 2 * (torch.bfloat16, torch.float16):
        call(dtype)
    with torch.no_grad():
        torch.testing.assert_close(module(x), torch.conv_transpose3d(x, *module.parameters(), 2))
    assert forwards == ["prepare", "run"] * 2 + ["run"] * 4 + ["prepare", "run"]
    assert len(recipes._hints) == 1


def test_parameters_are_not_confused_with_their_equals() -> None:
    x, w, b = layer()
    convt3d.conv_transpose3d(x, w, b, 1)
    with pytest.raises(TypeError):
        convt3d.conv_transpose3d(x, w, b, True)
    convt3d.conv_transpose3d(x, w, b, (1, 1, 1))
    with pytest.raises(TypeError):
        convt3d.conv_transpose3d(x, w, b, (1, 1, 1.0))
    stride = [1, 1, 1]
    check(x, w, b, stride)
    stride[0] = 2
    check(x, w, b, stride)


@pytest.mark.usefixtures("opaque")
def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = layer()
    for i in range(20):
        check(x, w, b, 2, tuple(int(n) for n in f"00{i % 3}"))  # another tuple each time
    kinds = recipes._recipes[(x.shape, w.shape)]
    assert len(kinds) == 3
    monkeypatch.setattr(recipes, "_MAX_SHAPES", 5)
    weights = []
    for n in range(1, 9):
        x, w, b = layer(n, n, n)
        weights.append(w)
        check(x, w, b, 2)
        check(x, w, b, 2)
    assert len(recipes._recipes) <= 5
    assert len(recipes._hints) <= 5


@pytest.mark.usefixtures("opaque")
def test_gradients_of_every_kind_and_repeatedly() -> None:
    x, w, b = (t.requires_grad_() for t in layer())
    size = torch.conv_transpose3d(x, w, b, 2).shape
    cotangents = [
        torch.randn(size),
        torch.randn(size).contiguous(memory_format=torch.channels_last_3d),
        torch.randn(1).expand(size),
        torch.randn(size, dtype=torch.complex64).conj().imag,
    ]
    for gy in 2 * cotangents:
        for wanted in ((x, w, b), (x,), (w,), (b,)):
            got = torch.autograd.grad(convt3d.conv_transpose3d(x, w, b, 2), wanted, gy)
            want = torch.autograd.grad(torch.conv_transpose3d(x, w, b, 2), wanted, gy)
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
                assert ours.stride() == theirs.stride()
    y = convt3d.conv_transpose3d(x, w, b, 2)
    (gx,) = torch.autograd.grad(y, x, cotangents[0].clone().requires_grad_(), create_graph=True)
    assert gx.requires_grad


@pytest.mark.usefixtures("opaque")
def test_a_weight_in_the_place_of_another() -> None:
    """Ids are used again: what is remembered by one must hold for the tensor that has it now."""
    for n in (2, 3, 2, 1, 3):
        x, w = torch.randn(2, 4, 3, 4, 5), torch.randn(4, 6, n, n, n)
        for stride in (1, 2, 1):
            check(x, w, None, stride)
        recipes._hints[id(w)] = next(iter(recipes._hints.values()))
        check(x, w, None, 2)


def test_opaque_is_a_backend_that_prepares() -> None:
    assert hasattr(opaque, "prepare_forward")


# --- Registered operators ------------------------------------------------------------------------


def registered(x: Tensor, w: Tensor, b: Tensor | None, stride: int = 2) -> Tensor:
    parameters = ([stride] * 3, [0] * 3, [0] * 3, [1] * 3, 0)
    with torch.no_grad():
        y: Tensor = torch.ops.convt3d.conv_transpose3d.default(x, w, b, False, *parameters)
    torch.testing.assert_close(y, torch.conv_transpose3d(x, w, b, stride), atol=1e-4, rtol=1e-4)
    return y


def test_a_repeated_call_of_an_operator_is_prepared_once(forwards: list[str]) -> None:
    x, w, b = layer()
    registered(x, w, b)
    registered(x.clone(), w.clone(), b.clone())
    assert forwards == ["prepare", "run", "run"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, b: (x, w, None),
        lambda x, w, b: (x, w, b, 1),
        lambda x, w, b: (x.double(), w.double(), b.double()),
        lambda x, w, b: (x.contiguous(memory_format=torch.channels_last_3d), w, b),
        lambda x, w, b: (x, torch.randn(6, 4, 2, 2, 2).transpose(0, 1), b),
        lambda x, w, b: (torch.randn(2, 4, 5, 4, 3), w, b),
    ],
)
def test_what_changes_in_a_call_of_an_operator_is_noticed(
    change: Callable[..., Arguments], forwards: list[str]
) -> None:
    first = layer()
    registered(*first)
    changed = change(*first)
    registered(*changed)
    registered(*first)
    registered(*changed)
    assert forwards == ["prepare", "run", "prepare", "run", "run", "run"]


def test_switches_are_noticed_by_operators(forwards: list[str]) -> None:
    arguments = layer()
    registered(*arguments)
    with torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark):
        registered(*arguments)
    assert forwards == ["prepare", "run", "prepare", "run"]


def test_one_tensor_given_twice_is_not_remembered(opaque: None) -> None:
    x, parameters = torch.randn(2, 4, 3, 3, 3), ([1] * 3, [1] * 3, [0] * 3, [1] * 3, 0)
    arguments = (x, x, [3, 3, 3], False, *parameters)
    want = torch.ops.convt3d.grad_weight.default(x, x.clone(), *arguments[2:])
    for _ in range(10):
        got = torch.ops.convt3d.grad_weight.default(*arguments)
        torch.testing.assert_close(got, want)
    assert sum(len(known._known) for known in ops.decided._known.values()) == 1


def test_few_calls_of_operators_are_remembered(
    opaque: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MAX_CALLS", 5)
    for size in range(3, 12):
        registered(*layer(size, 4, 5))
        assert len(ops.decided._known) <= 5


class _Left:
    """An operation that a backend leaves to PyTorch; ``calls`` counts them."""

    PYTORCH = True

    def __init__(self, run: Callable[..., Tensor], calls: list[str], name: str) -> None:
        self.run, self.calls, self.name = run, calls, name

    def output(self, *operands: Tensor) -> Tensor:
        self.calls.append(self.name)
        return self.run(*operands)


@pytest.mark.parametrize(
    "kept", [(), ("grad_input",), ("forward",), ("grad_weight",)], ids=["none", "fwd", "gx", "gw"]
)
@pytest.mark.parametrize("input_gradient", [True, False])
def test_a_convolution_that_is_left_as_a_whole_is_pytorchs_own_call(
    opaque: None,
    conv3d_on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    kept: tuple[str, ...],
    input_gradient: bool,
) -> None:
    """``kept``: the one of the transposed layer's operations that kernels run, if any."""
    calls: list[str] = []
    for name in ("forward", "grad_input", "grad_weight"):
        prepare = getattr(backends.portable, f"prepare_{name}")

        def leaving(*given: Any, prepare: Any = prepare, name: str = name) -> Any:
            run = prepare(*given)
            return run if name in kept else _Left(run, calls, name).output

        monkeypatch.setattr(backends.portable, f"prepare_{name}", leaving)
    x, w, b = torch.randn(2, 4, 5, 6, 7), torch.randn(3, 4, 3, 3, 3), torch.randn(3)
    ours = [t.clone().requires_grad_(i > 0 or input_gradient) for i, t in enumerate((x, w, b))]
    theirs = [t.clone().requires_grad_(i > 0 or input_gradient) for i, t in enumerate((x, w, b))]
    # The gradient by input runs as the transposed layer's forward pass.
    left = not kept or (kept == ("forward",) and not input_gradient)
    for step in range(3):
        y, want = convt3d.conv3d(*ours, padding=1), torch.conv3d(*theirs, padding=1)
        assert y.grad_fn is not None
        assert ("ConvolutionBackward" in y.grad_fn.name()) is (left and step > 0)
        torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-4)
        y.square().sum().backward()
        want.square().sum().backward()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, atol=2e-3, rtol=1e-3)
    times = 1 if left else 3
    assert calls.count("grad_weight") == (0 if "grad_weight" in kept else times)
    assert calls.count("grad_input") == (0 if "grad_input" in kept else times)
    wanted = input_gradient and "forward" not in kept
    assert calls.count("forward") == (times if wanted else 0)
    with torch.no_grad():
        before = len(calls)
        convt3d.conv3d(*ours, padding=1)
        assert len(calls) == before + ("grad_input" not in kept)

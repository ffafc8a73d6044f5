"""PyTorch's own samples for the operator (OpInfo) and the modules (ModuleInfo)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import convt3d
from support.checks import SAMPLE_TOLERANCE, check_like_pytorch

OPINFO = next(o for o in op_db if o.name == "nn.functional.conv_transpose3d")


def samples(device: str, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
    """Each of PyTorch's samples, as it is and in PyTorch's own non-contiguous form."""
    made = OPINFO.sample_inputs(device, dtype, requires_grad=requires_grad)
    return list(itertools.chain.from_iterable((s, s.noncontiguous()) for s in made))


@pytest.mark.parametrize("dtype", sorted(OPINFO.supported_dtypes("cpu"), key=str), ids=str)
def test_samples(dtype: torch.dtype) -> None:
    differentiable = dtype.is_floating_point or dtype.is_complex
    tolerated = SAMPLE_TOLERANCE.get(dtype, 1e-7)
    tested = samples("cpu", dtype, differentiable)
    assert len(tested) >= 20
    for sample in tested:
        check_like_pytorch(
            (sample.input, *sample.args), sample.kwargs, atol=tolerated, rtol=tolerated
        )


def test_a_wrong_operator_fails() -> None:
    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        return torch.nn.functional.conv_transpose3d(*args, **kwargs) * 1.01

    for sample in samples("cpu", torch.float64, False):
        with pytest.raises(AssertionError):
            check_like_pytorch((sample.input, *sample.args), sample.kwargs, operator=wrong)


@pytest.mark.usefixtures("opaque")
def test_samples_gradcheck() -> None:
    for sample in OPINFO.sample_inputs("cpu", torch.float64, requires_grad=True):
        arguments = (sample.input, *sample.args)
        tensors = [t for t in arguments if t is not None]
        assert len(tensors) == len(arguments) or arguments[-1] is None

        def function(*inputs: Tensor, _sample: Any = sample) -> Tensor:
            return convt3d.conv_transpose3d(*inputs, **_sample.kwargs)

        assert torch.autograd.gradcheck(
            function, tensors, check_forward_ad=True, check_batched_grad=True, fast_mode=True
        )
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


_MODULES = {
    nn.ConvTranspose3d: convt3d.ConvTranspose3d,
    nn.LazyConvTranspose3d: convt3d.LazyConvTranspose3d,
}


@pytest.mark.parametrize("kind", _MODULES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_module_inputs(kind: type[nn.Module], dtype: torch.dtype, training: bool) -> None:
    info = next(i for i in module_db if i.module_cls is kind)
    tested = 0
    for given in info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    ):
        outputs = []
        for cls in (_MODULES[kind], kind):
            torch.manual_seed(0)
            made = given.constructor_input
            module = cls(*made.args, **made.kwargs).to(dtype).train(training)
            called = given.forward_input
            y = module(*called.args, **called.kwargs)
            gradients = torch.autograd.grad(y.sum(), list(module.parameters()))
            outputs.append((y, *gradients))
        torch.testing.assert_close(outputs[0], outputs[1])
        tested += 1
    assert tested >= 2

"""PyTorch's precision switches, read the right way in every state they can be in."""

from __future__ import annotations

import json
import os

import pytest
import torch

from convt3d.cuda.schedule import OPERATIONS
from convt3d.geometry import Geometry
from convt3d.precision import Arithmetic, arithmetic_for, conv_tf32_allowed
from support.process import run_python

_NEW_SWITCHES = hasattr(torch.backends.cudnn, "conv")


# What the switch for convolutions says itself, by its public name: torch 2.11 sets it apart from
# that for everything, torch 2.13 lets it follow.
_AS_PYTORCH_SAYS = None

_SETTINGS: dict[str, bool | None] = {
    "torch.backends.cudnn.allow_tf32 = False": False,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.backends.cuda.matmul.allow_tf32 = False": True,
}
if _NEW_SWITCHES:  # torch 2.9
    _SETTINGS |= {
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'": False,
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'": True,
        "torch.backends.fp32_precision = 'ieee'": _AS_PYTORCH_SAYS,
        # Reading allow_tf32 raises after a mixture of the old and the new.
        "torch.backends.cudnn.allow_tf32 = False; "
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'": True,
        "torch.backends.cudnn.fp32_precision = 'ieee'; "
        "torch.backends.cudnn.conv.fp32_precision = 'none'": False,
    }

_SCRIPT = """
import json, os, warnings, torch
from convt3d.precision import conv_tf32_allowed
for setting in json.loads(os.environ["SETTINGS"]):
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        exec(setting)
        said = getattr(torch.backends.cudnn, "conv", None)
        said = said.fp32_precision if said else "no such switch"
        warnings.simplefilter("error")
        os._exit(int(conv_tf32_allowed()) + 2 * (said == "tf32"))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="isolates the settings by fork")
def test_every_setting_is_read_without_a_warning() -> None:
    printed = run_python(_SCRIPT, SETTINGS=json.dumps(list(_SETTINGS)))
    for (setting, allowed), status in zip(_SETTINGS.items(), printed.split(), strict=True):
        found, said = int(status) % 2, int(status) // 2
        assert found == (said if allowed is _AS_PYTORCH_SAYS else allowed), setting


def test_the_default_allows_tf32() -> None:
    assert conv_tf32_allowed() is True


def layer(channels: tuple[int, int], kernel: int, stride: int, groups: int = 1) -> Geometry:
    k, s = (kernel,) * 3, (stride,) * 3
    zeros, ones = (0, 0, 0), (1, 1, 1)
    return Geometry(*channels, k, s, zeros, zeros, ones, groups)


DENSE, GROUPED = layer((8, 8), 3, 2), layer((8, 8), 3, 2, groups=2)


def test_the_flags_context_is_followed() -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert conv_tf32_allowed() is False
        assert arithmetic_for(torch.float32, DENSE, "forward") is Arithmetic.IEEE
    assert conv_tf32_allowed() is True


@pytest.mark.parametrize("operation", OPERATIONS)
def test_arithmetic(operation: str) -> None:
    assert arithmetic_for(torch.float32, DENSE, operation) is Arithmetic.TF32
    # PyTorch's grouped convolutions are float32-grade whatever the switch says.
    assert arithmetic_for(torch.float32, GROUPED, operation) is Arithmetic.IEEE
    assert arithmetic_for(torch.float16, DENSE, operation) is Arithmetic.F16
    assert arithmetic_for(torch.bfloat16, GROUPED, operation) is Arithmetic.BF16
    assert arithmetic_for(torch.float64, DENSE, operation) is Arithmetic.F64
    with pytest.raises(KeyError):
        arithmetic_for(torch.complex64, DENSE, operation)


#: Layers by channels, kernel and stride, and what is float32-grade: output and gradient by input of
#: contiguous tensors, then of channels_last ones.
FEW = {
    ((2, 32), 1, 1): (True, True, True, True),
    ((32, 3), 1, 1): (True, True, True, True),
    ((4, 32), 1, 1): (False, False, False, False),
    ((48, 1), 2, 2): (True, True, True, True),
    ((16, 1), 2, 2): (True, True, True, True),
    ((32, 2), 2, 2): (False, False, False, False),  # products count
    ((96, 3), 4, 4): (False, False, False, False),
    ((1, 32), 3, 1): (True, False, False, False),
    ((32, 1), 3, 1): (False, True, False, False),
    ((32, 1), 3, 2): (False, True, False, False),
    ((1, 32), 3, 2): (False, False, False, False),  # phases apart
    ((32, 2), 3, 1): (False, False, False, False),
    ((64, 1), 4, 2): (False, False, False, False),  # 64 taps
    ((4, 1), 3, 1): (False, False, False, False),
    ((64, 3), 7, 2): (True, False, True, False),
    ((64, 3), 7, 1): (False, False, False, False),
    ((64, 3), 5, 2): (False, False, False, False),
}


@pytest.mark.parametrize("case", FEW)
def test_layers_of_few_channels_that_are_float32(
    case: tuple[tuple[int, int], int, int],
) -> None:
    for last in (False, True):
        for operation, exact in zip(("forward", "grad_input"), FEW[case][2 * last :], strict=False):
            wanted = Arithmetic.IEEE if exact else Arithmetic.TF32
            assert arithmetic_for(torch.float32, layer(*case), operation, last) is wanted
        by_weight = arithmetic_for(torch.float32, layer(*case), "grad_weight", last)
        assert by_weight is Arithmetic.TF32

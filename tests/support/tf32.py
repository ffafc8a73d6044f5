"""Values of TF32, and those in the middle between two."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from emulator import probes


def exact(values: Tensor) -> Tensor:
    """Float32 values cut to TF32 ones."""
    return values.view(torch.int32).bitwise_and(-0x2000).view(torch.float32)


def ties(values: Tensor) -> Tensor:
    """Values in the middle between two TF32 ones: the cut ones and half of their last bit."""
    return exact(values).view(torch.int32).add(0x1000).view(torch.float32)


def rounded(values: Tensor) -> Tensor:
    """The nearest TF32 values, ties to even, by the model of the instruction."""
    words = values.contiguous().numpy().view(np.uint32).ravel()
    return torch.from_numpy(probes._round_tf32(words).view(np.float32)).reshape(values.shape)

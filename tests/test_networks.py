"""Real networks: converted, they compute what they computed, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import convt3d
from support.networks import NETWORKS, parameters_gradients

CASES = [
    pytest.param(name, last, marks=[] if network.library is None else [pytest.mark.full])
    for name, network in NETWORKS.items()
    for last in (False, True)
    if not (last and network.heavy)
]


@pytest.mark.parametrize(("name", "channels_last"), CASES)
def test_same_as_before(name: str, channels_last: bool) -> None:
    network = NETWORKS[name]
    if network.missing:
        pytest.skip(network.missing)
    torch.manual_seed(2)
    theirs = network.build(True).double()
    ours = convt3d.convert(copy.deepcopy(theirs))
    before = [m for m in theirs.modules() if isinstance(m, (nn.Conv3d, nn.ConvTranspose3d))]
    kinds = (convt3d.Conv3d, convt3d.ConvTranspose3d)
    after = [m for m in ours.modules() if type(m) in kinds]
    assert len(after) == len(before) > 0
    x = network.input(True).double()
    if channels_last and x.dim() == 5:
        x = x.contiguous(memory_format=torch.channels_last_3d)
        for model in (ours, theirs):
            model.to(memory_format=torch.channels_last_3d)
    (y, gradients), (want, wanted) = (parameters_gradients(m, x) for m in (ours, theirs))
    torch.testing.assert_close(y, want)
    assert gradients.keys() == wanted.keys()
    for key, expected in wanted.items():
        torch.testing.assert_close(gradients[key], expected, msg=lambda m, k=key: f"{k}: {m}")

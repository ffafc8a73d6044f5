"""Geometry, normalisation of arguments, memory format."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convt3d import arguments
from convt3d.arguments import check, normalise, triple
from convt3d.geometry import Geometry
from convt3d.layout import empty, laid_out, suggests_channels_last_3d
from support.checks import suggested
from support.geometries import CASES, Case, cases


@given(cases())
def test_output_size_is_pytorchs(case: Case) -> None:
    x = torch.empty(case.input_shape, device="meta")
    w = torch.empty(case.geometry.weight_size, device="meta")
    y = F.conv_transpose3d(x, w, None, *case.arguments)
    assert tuple(y.shape) == case.output_shape


def test_channels() -> None:
    geometry = CASES["groups of 8"].geometry
    assert (geometry.in_channels_per_group, geometry.out_channels_per_group) == (8, 8)
    assert geometry.weight_size == (32, 8, 3, 3, 3)


def test_labels() -> None:
    assert Geometry(48, 24, (3, 3, 3)).label == "48->24 k3 s1 p0 d1 g1"
    mixed = CASES["mixed kernel, stride 2, groups"].geometry
    assert mixed.label == "8->8 k3x5x7 s2 p1x2x3 op1 d1 g2"
    labels = [case.geometry.label for case in CASES.values()]
    assert len(set(labels)) == len({case.geometry for case in CASES.values()})


@given(cases())
def test_json_and_pickle_round_trip(case: Case) -> None:
    geometry = case.geometry
    hash(geometry)
    for copy in (
        Geometry.from_dict(json.loads(json.dumps(geometry.to_dict()))),
        pickle.loads(pickle.dumps(geometry)),
    ):
        assert copy == geometry
        assert hash(copy) == hash(geometry)
        assert {copy: 1}[geometry] == 1


def test_different_geometries_differ() -> None:
    one = Geometry(4, 4, (3, 3, 3))
    for other in (
        Geometry(4, 4, (3, 3, 3), groups=2),
        Geometry(4, 4, (3, 3, 3), stride=(1, 1, 2)),
        Geometry(4, 4, (3, 3, 3), output_padding=(1, 0, 0)),
    ):
        assert one != other


@pytest.mark.parametrize(
    "value", [2, (2,), [2], (2, 2, 2), [2, 2, 2], torch.Size([2, 2, 2]), np.int64(2)]
)
def test_triple_reads_what_pytorch_reads(value: object) -> None:
    assert triple("stride", value) == (2, 2, 2)
    assert all(type(v) is int for v in triple("stride", value))
    x, w = torch.empty(1, 1, 2, 2, 2), torch.empty(1, 1, 1, 1, 1)
    assert F.conv_transpose3d(x, w, stride=value).shape[2:] == (3, 3, 3)  # type: ignore[arg-type]


def test_normalise_remembers() -> None:
    x, w = torch.Size([2, 4, 3, 4, 5]), torch.Size([4, 6, 3, 3, 3])
    one, batched = normalise(x, w, None, 2, 1, 0, 1, 1)
    assert batched
    assert normalise(x, w, None, (2, 2, 2), [1, 1, 1], 0, 1, 1)[0] is one
    other, batched = normalise(torch.Size([4, 9, 9, 9]), w, None, 2, 1, 0, 1, 1)
    assert other is one
    assert not batched


def test_a_remembered_call_does_not_excuse_a_float() -> None:
    x, w = torch.Size([2, 4, 3, 4, 5]), torch.Size([4, 6, 3, 3, 3])
    normalise(x, w, None, (2, 2, 2), 0, 0, 1, 1)
    with pytest.raises(TypeError):
        normalise(x, w, None, (2.0, 2.0, 2.0), 0, 0, 1, 1)
    with pytest.raises(TypeError):
        normalise(x, w, None, 2, 0, 0, True, 1)


def test_the_memory_of_sizes_is_bounded() -> None:
    w = torch.Size([1, 1, 1, 1, 1])
    for n in range(1, arguments._MAX_CHECKED + 10):
        normalise(torch.Size([n, 1, 1, 1, 1]), w, None, 1, 0, 0, 1, 1)
    assert len(arguments._checked) <= arguments._MAX_CHECKED


@given(cases())
def test_check_gives_the_geometry_back(case: Case) -> None:
    g = case.geometry
    found = check(
        case.input_shape,
        g.weight_size,
        (g.out_channels,),
        g.stride,
        g.padding,
        g.output_padding,
        g.groups,
        g.dilation,
    )
    assert found == (g, True)


@given(
    st.tuples(*[st.integers(1, 3)] * 5),
    st.permutations(range(5)),
    st.tuples(*[st.integers(1, 2)] * 5),
)
def test_suggested_memory_format_is_pytorchs(
    size: tuple[int, ...], order: list[int], steps: tuple[int, ...]
) -> None:
    # Any order of the axes, with gaps: strides as slices and permutations give them.
    stride, reach = [0] * 5, 1
    for axis in order:
        stride[axis] = reach * steps[axis]
        reach *= steps[axis] * size[axis]
    tensor = torch.empty_strided(size, stride).zero_()
    assert suggests_channels_last_3d(tensor) == (suggested(tensor) == torch.channels_last_3d)


@pytest.mark.parametrize(
    "size", [(2, 3, 4, 5, 6), (1, 1, 4, 4, 4), (2, 8, 1, 1, 1), (0, 3, 2, 2, 2)]
)
@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3, 4])
def test_suggested_memory_format_of_expanded_tensors(
    size: tuple[int, ...], axis: int | None
) -> None:
    tensor = torch.zeros(size)
    if axis is not None and size[axis]:
        tensor = tensor.narrow(axis, 0, 1).expand(size)
    for candidate in (tensor, tensor.to(memory_format=torch.channels_last_3d)):
        if candidate.numel():
            wanted = suggested(candidate) == torch.channels_last_3d
            assert suggests_channels_last_3d(candidate) == wanted
        else:
            assert not suggests_channels_last_3d(candidate)


def test_empty_and_laid_out() -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)
    last = empty((2, 3, 4, 5, 6), like, channels_last=True)
    assert last.dtype == torch.bfloat16
    assert last.is_contiguous(memory_format=torch.channels_last_3d)
    assert laid_out(last, channels_last=True) is last
    assert laid_out(last, channels_last=False).is_contiguous()

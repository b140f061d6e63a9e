"""Coordinates and groups of a mesh: every rank in one group of each kind, whatever the sizes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.types.mesh import ATTENTION_AXES, EXPERT_AXES, MeshShape, stage_layers

AXES = ("pp", *ATTENTION_AXES)


@st.composite
def shapes(draw):
    sizes = {axis: draw(st.integers(1, 2)) for axis in AXES}
    stage = math.prod(sizes[axis] for axis in ATTENTION_AXES)
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    return MeshShape(**sizes, ep=ep)


@settings(max_examples=40, deadline=None)
@given(shapes(), st.data())
def test_groups_divide_the_ranks_and_differ_on_their_axes_alone(shape, data):
    view = data.draw(st.sampled_from([ATTENTION_AXES, EXPERT_AXES]))
    axes = tuple(data.draw(st.lists(st.sampled_from(view), min_size=1, unique=True)))
    groups = shape.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.size))
    for group in groups:
        assert len(group) == math.prod(getattr(shape, axis) for axis in axes)
        for axis in ("pp", *view):
            seen = {shape.coordinate(axis, rank) for rank in group}
            assert seen == (set(range(getattr(shape, axis))) if axis in axes else {*list(seen)[:1]})
        assert all(shape.group(axes, rank) == group for rank in group)


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_coordinates_name_a_rank_in_both_views(shape):
    for view in (AXES, ("pp", *EXPERT_AXES)):
        named = {tuple(shape.coordinate(a, r) for a in view) for r in range(shape.size)}
        assert len(named) == shape.size


def test_left_over_layers_go_where_neither_embedding_nor_head_is():
    sizes = {n: [len(layers) for layers in stage_layers(n, 4)] for n in (4, 5, 6, 7, 8)}
    assert sizes == {
        4: [1, 1, 1, 1],
        5: [1, 2, 1, 1],
        6: [1, 2, 2, 1],
        7: [2, 2, 2, 1],
        8: [2, 2, 2, 2],
    }
    assert stage_layers(5, 2) == [range(3), range(3, 5)] and stage_layers(3, 1) == [range(3)]


def test_neighbors_differ_on_the_last_axis():
    shape = MeshShape(pp=2, dp=2, tp=2, ep=2)
    assert shape.group(("tp",), 5) == (4, 5)
    assert shape.group(("dp",), 5) == (5, 7)
    assert shape.group(("pp",), 5) == (1, 5)
    assert shape.group(("ep",), 5) == (4, 5) and shape.group(("etp",), 5) == (5, 7)
    assert (shape.stage_size, shape.size, shape.etp) == (4, 8, 2)
    assert str(shape) == "pp 2 x dp 2 x tp 2 = 8 ranks, experts etp 2 x ep 2"
    assert (str(MeshShape()), str(MeshShape(dp=4))) == ("1 rank", "dp 4 = 4 ranks")


def test_sets_of_experts_that_do_not_fit_are_refused_with_the_arithmetic():
    message = r"3 sets of experts do not fit 8 ranks \(dp 4 x cp 1 x tp 2\); use a divisor of 8"
    with pytest.raises(ConfigError, match=message):
        MeshShape(dp=4, tp=2, ep=3)

"""Spaces of gymnasium are equal after they were a spec, and so are their members."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from interop.data.bridge import FROM_NUMPY
from interop.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
    from_gymnasium,
    to_gymnasium,
)
from interop.specs.boxes import limits

FLOATS, INTS = ["float16", "float32", "float64"], ["uint8", "int8", "int16", "int32", "int64"]
SHAPES = st.just(()) | array_shapes(max_dims=3, max_side=3)


@st.composite
def boxes(draw: Any) -> spaces.Box:
    dtype, shape = np.dtype(draw(st.sampled_from([*FLOATS, *INTS, "bool"]))), draw(SHAPES)
    least, most = (-(2**50), 2**50) if dtype == np.int64 or dtype.kind not in "iu" else limits(FROM_NUMPY[dtype])
    ends = [0, 1, -1, 2.5, -np.inf] if dtype.kind == "f" else [0, 1] if dtype.kind == "b" else [0, 1, least, most]
    low = draw(arrays(dtype, shape, elements=st.sampled_from([dtype.type(end) for end in ends])))
    high = draw(arrays(dtype, shape, elements=st.sampled_from([dtype.type(end) for end in ends])))
    low, high = np.asarray(np.minimum(low, high)), np.asarray(np.maximum(low, high))
    high[high == -np.inf] = 3  # gymnasium draws no member of these, but others
    if dtype.kind == "f" and draw(st.booleans()):
        high[draw(arrays(bool, shape))] = np.inf
    return spaces.Box(low, high, shape, dtype.type)


@st.composite
def counts(draw: Any) -> Any:
    dtype, shape = draw(st.sampled_from(INTS)), draw(SHAPES)
    sizes, start = draw(arrays(dtype, shape, elements=st.integers(1, 9))), draw(st.integers(0, 9))
    start = np.full(shape, -start if dtype == "int64" else start, dtype)
    if not shape and draw(st.booleans()):
        return spaces.Discrete(int(sizes), start=int(start), dtype=dtype)
    return spaces.MultiDiscrete(sizes, dtype, start=start if draw(st.booleans()) else None)


NAMES = st.sampled_from(["a", "b", "0", "1", "next"])
LEAVES = boxes() | counts() | st.builds(spaces.MultiBinary, st.integers(1, 4) | array_shapes(max_dims=3, max_side=3))
SPACES = st.recursive(
    LEAVES,
    lambda each: st.one_of(
        st.dictionaries(NAMES, each, max_size=3).map(spaces.Dict),
        st.lists(each, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)


def as_encoded(value: Any) -> Any:
    """A member with dicts in the place of tuples."""
    if isinstance(value, tuple):
        value = {str(place): each for place, each in enumerate(value)}
    return {key: as_encoded(each) for key, each in value.items()} if isinstance(value, dict) else value


def as_member(value: Any, space: Any) -> Any:
    """The same back."""
    if isinstance(space, spaces.Tuple):
        return tuple(as_member(value[str(place)], each) for place, each in enumerate(space.spaces))
    if isinstance(space, spaces.Dict):
        return {key: as_member(value[key], each) for key, each in space.spaces.items()}
    return value


@example(spaces.MultiDiscrete([5]), 0)
@example(spaces.MultiDiscrete(np.array(5)), 0)
@given(SPACES, st.integers(0, 2**31 - 1))
def test_spaces_and_members_go_there_and_back(space, seed) -> None:
    vector = batch_space(space, 3)
    for each in (space, vector):
        spec = from_gymnasium(each)
        assert to_gymnasium(spec) == each
        assert to_gymnasium(spec.clone()) == each  # copies stand for the same space
        each.seed(seed)
        member = each.sample()
        value = spec.encode(as_encoded(member))
        assert spec.is_in(value)
        back = as_member(spec.to_numpy(value), each)
        assert back in each
        np.testing.assert_equal(back, member)
        assert as_member(spec.to_numpy(spec.rand()), each) in each


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
def test_bounds_at_the_limits_of_the_dtype(dtype) -> None:
    space = spaces.Box(*limits(FROM_NUMPY[np.dtype(dtype)]), (2,), np.dtype(dtype).type)
    assert to_gymnasium(from_gymnasium(space)) == space


def test_which_spec_a_space_becomes() -> None:
    low, high = np.float32([-np.inf, 0]), np.float32([1, np.inf])
    found = [
        (spaces.Box(low, high), Bounded(torch.tensor(low), torch.tensor(high))),
        (spaces.Box(-np.inf, np.inf, (2,)), Unbounded((2,))),
        (spaces.Box(0, 255, (2, 1), np.uint8), Bounded(0, 255, (2, 1), dtype=torch.uint8)),
        (spaces.Discrete(3), Categorical(3)),
        (spaces.Discrete(3, start=-1), Bounded(-1, 1, (), dtype=torch.int64)),
        (spaces.MultiDiscrete([[2, 3]]), MultiCategorical([[2, 3]])),
        (spaces.MultiDiscrete([2, 3], start=[1, 0]), Bounded(torch.tensor([1, 0]), torch.tensor([2, 2]), dtype=torch.int64)),
        (spaces.MultiBinary([2, 2]), Binary(shape=(2, 2))),
        (spaces.Dict(a=spaces.Tuple([spaces.Discrete(2)])), Composite(a=Composite({"0": Categorical(2)}))),
    ]  # fmt: skip
    for space, spec in found:
        made = from_gymnasium(space)
        assert type(made) is type(spec) and made == spec


@pytest.mark.parametrize(
    ("spec", "space"),
    [
        (Unbounded((2,), dtype=torch.uint8), spaces.Box(0, 255, (2,), np.uint8)),
        (Categorical(3, (2, 1)), spaces.MultiDiscrete([[3], [3]])),
        (Categorical(2, (1,), dtype=torch.bool), spaces.Box(0, 1, (1,), np.bool_)),
        (MultiCategorical([256, 9], dtype=torch.uint8), spaces.Box(np.uint8([0, 0]), np.uint8([255, 8]), (2,), np.uint8)),
        (Binary(3, dtype=torch.float32), spaces.MultiBinary(3)),
        (OneHot(4), spaces.Discrete(4)),
        (OneHot(4, (2, 4)), spaces.MultiDiscrete([4, 4])),
        (MultiOneHot([2, 3], (2, 5)), spaces.MultiDiscrete([[2, 3], [2, 3]])),
        (from_gymnasium(spaces.Discrete(3, start=2)).expand(2), spaces.MultiDiscrete([3, 3], start=[2, 2])),
        (from_gymnasium(spaces.Tuple([spaces.Discrete(2)])).set("b", Unbounded()),
         spaces.Dict({"0": spaces.Discrete(2), "b": spaces.Box(-np.inf, np.inf)})),
    ],
)  # fmt: skip
def test_which_space_a_spec_becomes(spec, space) -> None:
    made = to_gymnasium(spec)
    assert made == space
    assert spec.is_in(spec.encode(made.sample()))
    assert spec.to_numpy(spec.rand()) in made or isinstance(spec, Composite)


def test_gymnasium_is_needed_only_where_it_is_used(in_a_fork: Callable[[str], str]) -> None:
    in_a_fork("""
        import sys
        assert "gymnasium" not in sys.modules
        sys.modules["gymnasium"] = None
        from interop.specs import Unbounded, to_gymnasium
        try:
            to_gymnasium(Unbounded())
        except ImportError as error:
            assert "pip install" in str(error)
        else:
            raise AssertionError
    """)

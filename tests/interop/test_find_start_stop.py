"""find_start_stop_traj, against a walk over the rows; and how far stored rows follow each other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from interop import (
    DEFAULT_DONE_KEYS,
    LazyTensorStorage,
    ReplayBuffer,
    find_start_stop_traj,
)
from tests.interop.rows import check_same


def walk(ends, at_capacity):
    """Trajectories of one column: a list of (start, stop, length)."""
    rows, found = len(ends), []
    if not any(ends):
        return [(0, rows - 1, rows)]
    for stop in np.flatnonzero(ends):
        length = 1
        while length < rows and not ends[stop - length] and (at_capacity or stop - length >= 0):
            length += 1
        found.append(((stop - length + 1) % rows, stop, length))
    return found


def expected(ends, at_capacity, cursor):
    ends = ends.copy()
    if not at_capacity:
        ends[-1] = True
    elif cursor is not None:
        ends[cursor] = True
    starts, stops, lengths = [], [], []
    for column in np.ndindex(*ends.shape[1:]):
        for start, stop, length in walk(ends[(slice(None), *column)], at_capacity):
            starts.append((start, *column))
            stops.append((stop, *column))
            lengths.append(length)
    return starts, stops, lengths


def as_lists(found):
    start, stop, lengths = found
    assert start.dtype == stop.dtype == lengths.dtype == torch.int64
    return [tuple(each) for each in start.tolist()], [tuple(each) for each in stop.tolist()], lengths.tolist()


SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=7)


@given(st.data())
def test_ends_are_followed_around_the_ring(data):
    ends = data.draw(arrays.arrays(bool, SHAPES))
    full = data.draw(st.booleans())
    cursor = data.draw(st.none() | st.integers(-len(ends), len(ends) - 1))
    found = find_start_stop_traj(end=torch.from_numpy(ends), at_capacity=full, cursor=cursor)
    assert as_lists(found) == expected(ends, full, cursor)


@given(st.data())
def test_ids_end_where_another_one_begins(data):
    ids = data.draw(arrays.arrays(np.int64, SHAPES, elements=st.integers(0, 2)))
    full = data.draw(st.booleans())
    cursor = data.draw(st.none() | st.integers(0, len(ids) - 1))
    found = find_start_stop_traj(trajectory=torch.from_numpy(ids), at_capacity=full, cursor=cursor)
    assert as_lists(found) == expected(ids != np.roll(ids, -1, 0), full, cursor)


def test_a_full_ring_whose_newest_row_is_in_the_middle():
    end = torch.zeros(10, dtype=torch.bool)
    end[2] = end[7] = True
    wanted = (torch.tensor([[8], [3], [5]]), torch.tensor([[2], [4], [7]]), torch.tensor([5, 2, 3]))
    for cursor in (4, torch.tensor(4), torch.tensor([2, 3, 4]), range(2, 5), -6):
        for one, other in zip(find_start_stop_traj(end=end, at_capacity=True, cursor=cursor), wanted, strict=True):
            check_same(one, other)
    trajectory = torch.tensor([5, 5, 5, 0, 0, 1, 1, 1, 5, 5])
    for one, other in zip(find_start_stop_traj(trajectory=trajectory, at_capacity=True), wanted, strict=True):
        check_same(one, other)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, TypeError),
        ({"end": torch.ones(2)}, TypeError),
        ({"end": torch.tensor(True)}, RuntimeError),
        ({"trajectory": torch.zeros(3, 0)}, RuntimeError),
        ({"trajectory": torch.zeros(3), "cursor": 3}, IndexError),
    ],
)
def test_what_has_no_trajectories_is_refused(given, error):
    with pytest.raises(error):
        find_start_stop_traj(at_capacity=True, **given)
    assert DEFAULT_DONE_KEYS == ("done", "truncated", "terminated")


# ------------------------------------------------------------------ what is stored around a row


@given(
    capacity=st.integers(1, 9),
    lanes=st.sampled_from([None, 2]),
    writes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    anew=st.none() | st.integers(0, 5),
)
def test_rows_around_a_row_are_those_written_around_it(capacity, lanes, writes, anew):
    storage = LazyTensorStorage(capacity * (lanes or 1), ndim=1 if lanes is None else 2)
    buffer = ReplayBuffer(storage=storage)
    held, cursor, time = {}, 0, 0
    for place, count in enumerate(writes):
        if place == anew:  # begins at the first row again
            buffer.writer.cursor = 0
            cursor, time = 0, time + 1000
        data = torch.zeros(count) if lanes is None else torch.zeros(lanes, count)
        buffer.extend(data)
        for _ in range(count):
            held[cursor], cursor, time = time, (cursor + 1) % capacity, time + 1
    rows = np.array(sorted(held))
    before, after = around(storage, rows)
    for row, low, high in zip(rows, before, after, strict=True):
        ways = []
        for step in (-1, 1):
            far = 0
            while held.get((row + step * (far + 1)) % capacity) == held[row] + step * (far + 1):
                far += 1
            ways.append(far)
        assert [low, high] == ways


def around(storage, rows):
    return storage.ring.around(rows, storage.contents.filled_rows, storage.row_capacity(None))

"""Interleaved trajectories in the index, against lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from interop.host.trajectories import RecentIds, Trajectories, continued


@given(st.lists(st.integers(-2, 4), max_size=40))
def test_an_item_continues_the_last_of_its_id_unless_another_id_came_twice_since(ids):
    wanted = []
    for place, id_ in enumerate(ids):
        last = max((k for k in range(place) if ids[k] == id_), default=-1)
        between = ids[last + 1 : place]
        wanted.append(last if len(set(between)) == len(between) else -1)
    assert continued(np.array(ids, np.int64)).tolist() == wanted


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=8), st.booleans())
def test_recent_ids_tell_as_much_as_all_of_them(parts, rising):
    every, recent = np.zeros(0, np.int64), RecentIds()
    for ids in parts:
        ids = np.array(sorted(ids) if rising else ids) + (10 * len(every) if rising else 0)
        runs = 1 + int((np.diff(ids) != 0).sum()) - int(bool(every.size) and every[-1] == ids[0])
        every = np.concatenate([every, ids])
        last = continued(every)
        interleaved = bool(((last >= 0) & (last < np.arange(len(every)) - 1)).any())
        assert recent.interleave(ids, runs) == interleaved
        if interleaved:
            return


def test_interleaved_rows_lie_side_by_side():
    ids, rows = np.array([7, 8, 7, 8, 9, 8, 9]), np.array([5, 6, 0, 1, 2, 3, 4])
    index = Trajectories.interleaved(ids, rows, np.array([2]))
    assert [index.rows_at(np.arange(first, last + 1)).tolist() for _, first, last in index.stored()] == [
        [5],
        [6],
        [0],
        [1, 3],
        [2, 4],
    ]

"""The index of trajectories against lists: rows with lanes, around a ring, and ids that are interleaved."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interop.host.trajectories import RecentIds, Trajectories, continued


@pytest.mark.parametrize("lanes", [1, 3, 70])
@pytest.mark.parametrize("seed", range(4))
def test_stored_trajectories_are_those_of_a_walk(lanes, seed):
    random = np.random.default_rng(seed)
    capacity, chance = int(random.integers(1, 30)), random.choice([0.0, 0.1, 0.6])
    first = int(random.integers(0, 50))
    index, written = Trajectories(capacity, lanes, first), np.zeros((0, lanes), bool)
    for _ in range(12):
        starts = random.random((int(random.choice([1, 3, 40])), lanes)) < chance
        index.written(starts)
        written = np.concatenate([written, starts])
        if random.random() < 0.3:
            continue
        begun = np.maximum.accumulate(np.where(written, np.arange(len(written))[:, None], 0), 0)
        wanted = {}
        for time, lane in np.argwhere(np.arange(len(written))[:, None] >= len(written) - capacity + 0 * begun).tolist():
            wanted.setdefault((lane, int(begun[time, lane])), []).append(first + time)
        for least in (1, int(random.integers(2, 6))):
            found = [(lane, max(begin, index.oldest), last) for lane, begin, last in index.stored(least).tolist()]
            assert sorted(found) == sorted((lane, t[0], t[-1]) for (lane, _), t in wanted.items() if len(t) >= least)
        times = np.arange(index.oldest, index.now)
        assert (index.times_of(index.rows_at(times)) == times).all()
        if lanes == 1:
            before, after = index.around(times % capacity)
            of = {time: t for t in wanted.values() for time in t}
            assert [(t - of[t][0], of[t][-1] - t) for t in times.tolist()] == list(zip(before, after, strict=True))


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

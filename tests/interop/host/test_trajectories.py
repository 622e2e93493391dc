"""The rule of continuation, and interleaved trajectories in the index, against lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from interop.host import markers
from interop.host.markers import END, FIRST, PADDING, Markers, RecentItems
from interop.host.trajectories import Trajectories

ITEMS = st.tuples(st.integers(-2, 3), st.sampled_from([0, 0, 0, 0, END, FIRST, PADDING, END | FIRST]))


def marked(items):
    ids, flags = zip(*items, strict=True) if items else ((), ())
    return Markers(np.array(ids, np.int64).reshape(-1, 1, 1), np.array(flags, np.uint8).reshape(-1, 1))


def continues(items):
    """The earlier item that each item continues, by the words of the rule."""
    wanted = []
    for place, (id_, flags) in enumerate(items):
        last = max((k for k in range(place) if items[k][0] == id_), default=-1)
        between = [other for other, _ in items[last + 1 : place]]
        alone = len(set(between)) == len(between)
        before = items[last][1] if last >= 0 else 0
        same = not (before & END or flags & FIRST or (before ^ flags) & PADDING)
        wanted.append(last if alone and same else -1)
    return wanted


@given(st.lists(ITEMS, max_size=40))
def test_an_item_continues_the_last_of_its_id_unless_a_marker_or_another_trajectory_is_in_between(items):
    assert markers.previous(marked(items)).tolist() == continues(items)


@given(st.lists(ITEMS, max_size=40), st.integers(0, 2))
def test_several_ids_are_one_where_all_agree(items, column):
    one = marked(items)
    two = Markers(
        np.concatenate([one.ids // 2, one.ids % 2, one.ids * 0], -1)[..., [column, *{0, 1, 2} - {column}]], one.flags
    )
    assert np.array_equal(markers.previous(two), markers.previous(one))
    assert np.array_equal(markers.starts(two), markers.starts(one))


@given(st.lists(ITEMS, max_size=40))
def test_starts_are_where_the_item_before_is_not_continued(items):
    found = markers.starts(marked(items))[:, 0]
    pairs = [continues(items[place - 1 : place + 1])[1] if place else -1 for place in range(len(items))]
    assert found.tolist() == [each < 0 for each in pairs]


@given(st.lists(st.lists(ITEMS, min_size=1, max_size=6), max_size=8), st.booleans())
def test_recent_items_tell_as_much_as_all_of_them(parts, rising):
    every, recent = [], RecentItems()
    for part in parts:
        if rising:
            part = [(id_ + 10 * len(every), flags) for id_, flags in sorted(part, key=lambda item: item[0])]
        runs = int(markers.starts(marked(every + part))[len(every) :].sum())
        every = every + part
        last = np.array(continues(every))
        interleaved = bool(((last >= 0) & (last < np.arange(len(every)) - 1)).any())
        assert recent.interleave(marked(part), runs) == interleaved
        if interleaved:
            return


@given(st.lists(ITEMS, min_size=1, max_size=40), st.data())
def test_interleaved_rows_lie_side_by_side(items, data):
    rows = np.array(data.draw(st.permutations(range(len(items)))))
    wanted = {}
    for place, last in enumerate(continues(items)):
        run = wanted.pop(last, []) if last >= 0 else []
        wanted[place] = [*run, int(rows[place])]  # by the end: a later end comes later
    index = Trajectories.interleaved(rows, marked(items), markers.previous(marked(items)))
    found = [index.rows_at(np.arange(first, last + 1)).tolist() for _, first, last in index.stored()]
    assert sorted(found) == sorted(wanted.values())
    times, first, last = index.located(rows, np.zeros(len(rows), np.int64))
    for place, row in enumerate(rows.tolist()):
        around = index.rows_at(np.arange(first[place], last[place] + 1)).tolist()
        assert around in found and around[times[place] - first[place]] == row

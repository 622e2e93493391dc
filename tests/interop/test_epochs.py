"""Draws without replacement: each position once an epoch, every order as likely, and what is released."""

import copy
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from interop.host.epochs import Epoch


def key(number):
    return np.array([number, 7], np.uint32)


def flat(batches):
    return [each for batch in batches for each in batch]


class Model:
    """An epoch as a set of what is left."""

    def __init__(self, drop_last):
        self.drop_last = drop_last
        self.left, self.length, self.over, self.ran_out, self.epoch, self.clock = set(), 0, False, False, 0, 0
        self.reserved = {}

    def begin(self):
        self.left, self.over, self.epoch, self.clock = set(range(self.length)), False, self.epoch + 1, self.clock + 1

    def took(self, count, length, named):
        if length != self.length:
            self.length = length
            self.begin()
        before = (self.left, self.over, self.epoch, self.clock), self.ran_out
        if self.over or (self.drop_last and len(self.left) < count):
            self.begin()
        assert len(named) == len(set(named)) == min(count, len(self.left))
        assert set(named) <= self.left
        self.left, self.clock = self.left - set(named), self.clock + 1
        self.over = len(self.left) < (max(count, 1) if self.drop_last else 1)
        self.ran_out = self.over and not self.reserved
        return *before, self.clock, self.epoch, set(named)

    def release(self, taken):
        before, _, clock, epoch, named = self.reserved.pop(taken)
        if epoch == self.epoch and clock == self.clock:
            self.left, self.over, self.epoch, self.clock = before
        elif epoch == self.epoch:
            self.left, self.over, self.clock = self.left | named, False, self.clock + 1


COUNTS = st.integers(0, 5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["take", "reserve", "reserve", "commit", "release", "release"]), COUNTS),
        st.tuples(st.sampled_from(["copy", "state", "restart", "length"]), st.integers(1, 12)),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=100)
@given(STEPS, st.booleans(), st.booleans())
def test_an_epoch_returns_each_position_once(steps, shuffle, drop_last):
    epoch, model, keys, length = Epoch(shuffle, drop_last), Model(drop_last), itertools.count(), 9
    names = []  # the keys of the requests
    for step, number in steps:
        chosen = list(model.reserved)[number % len(model.reserved)] if model.reserved else None
        if step == "length":
            length = number
        elif step in ("take", "reserve"):
            if drop_last and number > length:
                with pytest.raises(ValueError, match="drop_last"):
                    epoch.take(number, length, key(0))
                continue
            taken = model.took(number, length, epoch.take(number, length, key(next(keys))).tolist())
            if step == "reserve":
                names.append(key(len(names)))
                epoch.reserve(names[-1])
                model.reserved[len(names) - 1] = taken
                model.ran_out = taken[1]
        elif step == "commit" and chosen is not None:
            epoch.commit(names[chosen])
            del model.reserved[chosen]
            model.ran_out = model.over and not model.reserved
        elif step == "release" and chosen is not None:
            epoch.release(names[chosen])
            model.release(chosen)
        elif step == "restart":
            epoch.restart()
            model.begin()
            model.reserved, model.ran_out = {}, False
        elif step in ("copy", "state"):  # what is reserved is not reserved there
            held, before = list(model.reserved), epoch
            if step == "copy":
                epoch = copy.deepcopy(epoch)
            else:
                epoch = Epoch(shuffle, drop_last)
                epoch.with_state(before.state())
            for each in held[::-1]:
                assert before.is_reserved(names[each]) and not epoch.is_reserved(names[each])
                model.release(each)
            np.testing.assert_array_equal(epoch.state().left(), before.state().left())
        assert (epoch.over, epoch.ran_out, epoch.length) == (model.over, model.ran_out, model.length)
        assert epoch.left == (0 if model.over else len(model.left))
        if not model.reserved:
            left = epoch.state().left().tolist()
            assert set(left) == (set() if model.over else model.left) and (shuffle or left == sorted(left))


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_is_released_in_reverse_is_as_if_it_had_not_been_taken(shuffle):
    epochs = [Epoch(shuffle), Epoch(shuffle)]
    for epoch in epochs:
        epoch.take(13, 50, key(1))
    reserved = []
    for turn in range(6):  # over the end of the epoch
        epochs[0].take(9, 50, key(turn))
        reserved.append(key(turn))
        epochs[0].reserve(reserved[-1])
    for taken in reserved[::-1]:
        epochs[0].release(taken)
    for turn in range(20):
        np.testing.assert_array_equal(*(epoch.take(7, 50, key(100 + turn)) for epoch in epochs))
        assert epochs[0].ran_out == epochs[1].ran_out


# ------------------------------------------------------------------ the law


def check_uniform(outcomes, possible):
    counts = np.array([outcomes.count(each) for each in possible])
    assert counts.sum() == len(outcomes)
    assert stats.chisquare(counts).pvalue > 1e-4


def keys_of(seed):
    draw = np.random.default_rng(seed)
    return lambda: draw.integers(2**32, size=2, dtype=np.uint32)


@pytest.mark.parametrize("sizes", [(4,), (1, 3)])
def test_every_order_of_an_epoch_is_as_likely(sizes):
    fresh, epoch = keys_of(0), Epoch()
    outcomes = [tuple(flat(epoch.take(count, 4, fresh()).tolist() for count in sizes)) for _ in range(2000)]
    check_uniform(outcomes, list(itertools.permutations(range(4))))


def test_one_epoch_tells_nothing_of_the_next():
    fresh, epoch = keys_of(1), Epoch()
    orders = ["".join(map(str, epoch.take(3, 3, fresh()))) for _ in range(4000)]
    possible = ["".join(each) for each in itertools.permutations("012")]
    check_uniform([a + b for a, b in itertools.pairwise(orders)], [a + b for a in possible for b in possible])


def test_takes_that_are_released_over_the_end_of_an_epoch_leave_its_order():
    """The order in which positions are left after a release, which is not theirs, comes back."""
    epoch = Epoch(shuffle=False, drop_last=True)
    epoch.take(1, 9)
    first = key(0)
    epoch.reserve(first)
    epoch.take(1, 9)
    epoch.release(first)  # 1 is taken, 0 is not
    reserved = []
    for count in (5, 0):  # the second begins an epoch
        epoch.take(count, 9)
        reserved.append(key(count))
        epoch.reserve(reserved[-1])
    for taken in reserved[::-1]:
        epoch.release(taken)
    assert sorted(epoch.state().left()) == [0, *range(2, 9)]

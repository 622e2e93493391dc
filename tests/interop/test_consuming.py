"""ConsumingSampler, and buffers that consume their items."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from interop import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    Sequence,
)
from tests.faults.children import forked
from tests.interop.rows import ALL_STORAGES, check_same, plain_tensor, refused


def drawn(buffer, count):
    return buffer.sample(count, return_info=True)[1]["index"].tolist()


@pytest.mark.parametrize("storage", ALL_STORAGES)
def test_items_leave_once_they_were_drawn_often_enough(storage):
    buffer = ReplayBuffer(storage=ALL_STORAGES[storage](10), consume_after_n_samples=2)
    buffer.extend(plain_tensor(range(4)))
    seen, lengths = [], []
    while len(buffer):
        batch, info = buffer.sample(3, return_info=True)
        check_same(batch, plain_tensor(info["index"]))
        assert len(set(info["index"].tolist())) == len(info["index"])
        seen += info["index"].tolist()
        lengths.append(len(buffer))
    assert lengths[0] == 4 and lengths == sorted(lengths, reverse=True)
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(buffer) == 0 and len(buffer.storage) == 4
    with refused(buffer, RuntimeError, "empty storage"):
        buffer.sample(3)


def test_iterating_takes_all_that_is_left():
    buffer = ReplayBuffer(storage=ListStorage(10), sampler=ConsumingSampler(), batch_size=3)
    buffer.extend(plain_tensor(range(8)))
    assert len(buffer.sample()) == 3
    assert [len(batch) for batch in buffer] == [3, 2]
    assert buffer.sampler.ran_out
    buffer.extend(plain_tensor(range(2)))
    assert not buffer.sampler.ran_out and [len(batch) for batch in buffer] == [2]
    with pytest.raises(RuntimeError, match="empty storage"):
        list(buffer)


def test_draws_are_uniform_over_what_is_left():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=ConsumingSampler(10**9))
    buffer.extend(plain_tensor(range(5)))
    pairs = np.zeros((5, 5))
    for _ in range(4000):
        first, second = drawn(buffer, 2)
        pairs[first, second] += 1
    assert not pairs.diagonal().any()
    assert stats.chisquare(pairs[~np.eye(5, dtype=bool)]).pvalue > 1e-4


class Model:
    """Slots with what is left of each, by brute force."""

    def __init__(self, capacity, most):
        self.capacity, self.most = capacity, most
        self.empty()

    def empty(self):
        self.left, self.cursor, self.content = {}, 0, {}

    def write(self, slots, ids):
        for slot, held in zip(slots, ids, strict=True):
            self.left[slot], self.content[slot] = self.most, held

    def check_slots(self, slots):
        """Vacant slots first, each once; then on from the cursor."""
        vacant = {slot for slot, left in self.left.items() if not left}
        reused = slots[: len(vacant)]
        assert len(set(reused)) == len(reused) and set(reused) <= vacant
        for slot in slots[len(vacant) :]:
            assert slot == self.cursor
            self.cursor = (self.cursor + 1) % self.capacity

    def draw(self, slots, asked):
        live = [slot for slot, left in self.left.items() if left]
        assert len(set(slots)) == len(slots) == min(asked, len(live)) and set(slots) <= set(live)
        for slot in slots:
            self.left[slot] -= 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["extend", "add", "sample", "sample", "mark", "empty", "copy"]), st.integers(1, 9)),
    max_size=30,
)


@given(capacity=st.integers(1, 8), most=st.integers(1, 3), steps=STEPS, listed=st.booleans())
@settings(max_examples=60)
def test_it_does_what_a_plain_model_does(capacity, most, steps, listed):
    storage = ListStorage(capacity) if listed else LazyTensorStorage(capacity)
    buffer = ReplayBuffer(storage=storage, sampler=ConsumingSampler(most))
    model, ids = Model(capacity, most), iter(range(10**6))
    for call, count in steps:
        if call in ("extend", "add"):
            held = [next(ids) for _ in range(count if call == "extend" else 1)]
            if call == "extend":
                slots = buffer.extend(torch.tensor(held)).tolist()
            else:
                slots = [buffer.add(torch.tensor(held[0]))]
            model.check_slots(slots)
            model.write(slots, held)
        elif call == "sample" and any(model.left.values()):
            batch, info = buffer.sample(count, return_info=True)
            model.draw(info["index"].tolist(), count)
            assert batch.tolist() == [model.content[slot] for slot in info["index"].tolist()]
        elif call == "mark" and model.left:
            slots = sorted(model.left)[:count]
            buffer.mark_update(torch.tensor(slots))
            model.left.update(dict.fromkeys(slots, most))
        elif call == "empty":
            buffer.empty()
            model.empty()
        elif call == "copy":
            buffer = pickle.loads(pickle.dumps(buffer))
        assert len(buffer) == sum(left > 0 for left in model.left.values())
        assert len(buffer.storage) == len(model.left)


def test_a_write_through_another_buffer_brings_items_back():
    storage = LazyTensorStorage(4)
    buffer = ReplayBuffer(storage=storage, sampler=ConsumingSampler())
    other = ReplayBuffer(storage=storage)
    buffer.extend(plain_tensor(range(4)))
    drawn(buffer, 4)
    assert (len(buffer), len(other)) == (0, 4)
    other.extend(plain_tensor([10, 11]))
    assert len(buffer) == 2
    assert sorted(drawn(buffer, 4)) == [0, 1]


def test_a_list_that_was_made_shorter_is_followed():
    buffer = ReplayBuffer(storage=ListStorage(9), sampler=ConsumingSampler())
    buffer.extend(list(range(6)))
    buffer.storage.set(slice(2, 5), [7], set_cursor=True)
    assert len(buffer) == 4
    buffer._collate_fn = list
    assert sorted(buffer.sample(9)) == [0, 1, 5, 7]


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"prefetch": 2, "batch_size": 2}, ValueError),
        ({"storage": LazyTensorStorage(4, ndim=2)}, ValueError),
        ({"sample_unit": Sequence(2)}, ValueError),
        ({"writer": ImmutableDatasetWriter()}, TypeError),
    ],
)
def test_what_cannot_be_joined_with_consuming_is_refused_at_once(choices, error):
    for way in ({"sampler": ConsumingSampler(2)}, {"consume_after_n_samples": 2}):
        with pytest.raises(error):
            ReplayBuffer(**{"storage": LazyTensorStorage(4), **way, **choices})
    buffer = ReplayBuffer(**{"storage": LazyTensorStorage(4), **choices})
    before = buffer.sampler
    with pytest.raises(error):
        buffer.set_sampler(ConsumingSampler())
    assert buffer.sampler is before


def test_other_processes_are_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=ConsumingSampler())
    buffer.extend(plain_tensor(range(2)))
    worker = multiprocessing.get_context("spawn").Process(target=len, args=(buffer,))
    with pytest.raises(RuntimeError, match="consum"):
        worker.start()
    for call in (lambda: buffer.sample(1), lambda: buffer.extend(plain_tensor([1]))):
        ended, said = forked(call)
        assert ended == "failed" and b"consumes its items cannot be used in another process" in said

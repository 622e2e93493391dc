"""`StreamingSliceSampler`: each new window once, then slices as `SliceSampler`; and slices of `fragmented=True`."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tensordict import TensorDict

import interop
from interop import SliceSampler, StreamingSliceSampler

pytestmark = pytest.mark.filterwarnings("ignore:sample.. was given batch_size")


def rows(lengths, number=0):
    """Episodes of these lengths; "obs" counts rows from `number` on."""
    count = sum(lengths)
    last = torch.zeros(count, 1, dtype=torch.bool)
    last[np.cumsum(lengths) - 1] = True
    steps = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + 1000 * number
    return TensorDict(
        {"obs": torch.arange(number, number + count), "next": {"done": last}, "step_count": steps, "traj_ids": ids},
        [count],
    )


def buffer(sampler, capacity=40, batch_size=6, **kwargs):
    storage = interop.LazyTensorStorage(capacity, **kwargs)
    return interop.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)


def slices(batch, length=3):
    return [tuple(each) for each in batch["obs"].reshape(-1, length).tolist()]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3)), max_size=8),
    st.sampled_from([14, 200]),
)
def test_each_window_comes_once_in_the_order_of_writing(history, capacity):
    """Beside a model of windows by row numbers."""
    rb = buffer(StreamingSliceSampler(slice_len=3), capacity=capacity)
    queue, episode, written, seen = [], [], 0, 0
    for lengths, draws in history:
        data = rows(lengths, written)
        rb.extend(data)
        for row, done in zip(data["obs"].tolist(), data["next", "done"].flatten().tolist(), strict=True):
            episode.append(row)
            if len(episode) % 3 == 0:
                queue.append(tuple(episode[-3:]))
            episode = [] if done else episode
        written += len(data)
        oldest = max(written - capacity, 0)
        if oldest > seen:  # rows were lost before a draw has seen them: windows begin elsewhere
            return
        queue = [window for window in queue if window[0] >= oldest]
        for _ in range(draws):
            expected, queue, seen = queue[:2], queue[2:], written
            if not expected and not any(length >= 3 for length in rb.episodes.lengths):
                with pytest.raises(RuntimeError, match="long enough"):
                    rb.sample()
                continue
            found = slices(rb.sample())
            assert found[: len(expected)] == expected
            assert all(b == a + 1 for window in found for a, b in itertools.pairwise(window))


def test_the_slices_that_fill_a_batch_have_the_law_of_a_slice_sampler():
    rb = buffer(StreamingSliceSampler(slice_len=3), batch_size=3)
    rb.extend(rows([4, 6]))
    assert sorted(slices(rb.sample(9))) == [(0, 1, 2), (4, 5, 6), (7, 8, 9)]
    found = Counter(slices(rb.sample(18_000)))
    expected = {(0, 1, 2): 0.25, (1, 2, 3): 0.25, **{(n, n + 1, n + 2): 0.125 for n in range(4, 8)}}
    assert set(found) == set(expected)
    assert stats.chisquare([found[w] for w in expected], [6000 * p for p in expected.values()]).pvalue > 1e-4


def test_windows_of_lanes():
    rb = buffer(StreamingSliceSampler(slice_len=2), ndim=2, batch_size=2)
    rb.extend(torch.stack([rows([3, 2]), rows([5], 100)]))
    assert [slices(rb.sample(), 2)[0] for _ in range(4)] == [(0, 1), (100, 101), (102, 103), (3, 4)]


def test_a_checkpoint_goes_on_with_the_windows(tmp_path):
    rb = buffer(StreamingSliceSampler(slice_len=3), batch_size=3)
    rb.extend(rows([9]))
    assert slices(rb.sample()) == [(0, 1, 2)]
    rb.dumps(tmp_path / "saved")
    for again in (buffer(StreamingSliceSampler(slice_len=3), batch_size=3), interop.open(tmp_path / "saved")):
        if len(again) == 0:
            again.loads(tmp_path / "saved")
        assert [slices(again.sample(3))[0] for _ in range(2)] == [(3, 4, 5), (6, 7, 8)]


def test_an_error_takes_no_window():
    rb = buffer(StreamingSliceSampler(slice_len=3), batch_size=6)
    rb.extend(rows([3, 4]))
    with pytest.raises(RuntimeError, match="multiple"):
        rb.sample(4)
    assert slices(rb.sample()) == [(0, 1, 2), (3, 4, 5)]


def test_windows_that_an_edit_divides_are_not_drawn():
    rb = buffer(StreamingSliceSampler(slice_len=3), batch_size=3)
    rb.extend(rows([6]))
    assert slices(rb.sample()) == [(0, 1, 2)]
    done = rb["next", "done"].clone()
    done[4] = True
    rb.set_(("next", "done"), done)
    assert all(window in [(0, 1, 2), (1, 2, 3), (2, 3, 4)] for window in slices(rb.sample(30)))


def test_streaming_refusals():
    with pytest.raises(ValueError, match="prefetch"):
        interop.TensorDictReplayBuffer(
            storage=interop.LazyTensorStorage(9), sampler=StreamingSliceSampler(slice_len=3), batch_size=3, prefetch=2
        )
    with pytest.raises(ValueError, match="slice_len"):
        StreamingSliceSampler(slice_len=0)
    with pytest.raises(TypeError):
        StreamingSliceSampler(slice_len=3, replacement=False)
    rb = buffer(StreamingSliceSampler(slice_len=3), batch_size=3)
    data = rows([6])
    data["traj_ids"] = torch.arange(6) % 2
    rb.extend(data)
    with pytest.raises(RuntimeError, match="side by side"):
        rb.sample()


# ------------------------------------------------------------------ fragmented


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 5))
def test_fragments_are_put_together(lengths, random, missing):
    data = rows(lengths)
    order = list(range(len(data)))
    random.shuffle(order)
    order = order[missing:] or order
    rb = buffer(SliceSampler(slice_len=3, fragmented=True, traj_key="traj_ids"), capacity=60, batch_size=3)
    rb.extend(data[torch.tensor(order)])
    ids = data["traj_ids"].tolist()
    there = set(order)
    possible = {(n, n + 1, n + 2) for n in range(len(data) - 2) if {n, n + 1, n + 2} <= there and ids[n] == ids[n + 2]}
    if not possible:
        with pytest.raises(RuntimeError, match="long enough"):
            rb.sample()
    else:
        assert set(slices(rb.sample(600))) <= possible


def test_the_law_of_fragments():
    """Each run of steps equally often, and each start in it."""
    rb = buffer(SliceSampler(slice_len=3, fragmented=True), capacity=60)
    rb.extend(rows([8])[torch.tensor([7, 0, 6, 2, 5, 1, 4])])
    found = Counter(slices(rb.sample(18_000)))
    expected = {(0, 1, 2): 0.5, (4, 5, 6): 0.25, (5, 6, 7): 0.25}
    assert set(found) == set(expected)
    assert stats.chisquare([found[w] for w in expected], [6000 * p for p in expected.values()]).pvalue > 1e-4


def test_writes_and_edits_change_fragments():
    rb = buffer(SliceSampler(slice_len=3, fragmented=True), capacity=60, batch_size=30)
    rb.extend(rows([4])[torch.tensor([3, 0, 1])])
    with pytest.raises(RuntimeError, match="long enough"):
        rb.sample()
    rb.extend(rows([4])[2:3])
    assert set(slices(rb.sample())) == {(0, 1, 2), (1, 2, 3)}
    rb.set_at_("step_count", torch.tensor(9), 0)
    assert set(slices(rb.sample())) == {(0, 1, 2)}


def test_a_writer_that_keeps_no_order(tmp_path):
    rb = interop.TensorDictReplayBuffer(
        storage=interop.LazyTensorStorage(20),
        writer=interop.TensorDictMaxValueWriter(rank_key="obs"),
        sampler=SliceSampler(slice_len=3, fragmented=True),
        batch_size=30,
    )
    rb.extend(rows([5])[torch.tensor([4, 2, 0, 1, 3])])
    assert set(slices(rb.sample())) == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}


def test_open_builds_the_samplers_again(tmp_path):
    rb = buffer(SliceSampler(slice_len=3, fragmented=True, init_key=None))
    rb.extend(rows([8])[torch.tensor([7, 0, 6, 2, 5, 1, 4])])
    rb.dumps(tmp_path / "saved")
    sampler = interop.open(tmp_path / "saved").sampler
    assert (sampler.fragmented, sampler.step_key, sampler.init_key) == (True, "step_count", None)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda data: torch.cat([data, data[:1]]), RuntimeError, "stored twice"),
        (lambda data: data.set("step_count", data["step_count"].float()), TypeError, "one integer"),
        (lambda data: data.set("step_count", data["step_count"] - 1), ValueError, "at least 0"),
        (lambda data: data.exclude("traj_ids"), RuntimeError, "needs an id"),
        (lambda data: data.exclude("step_count"), KeyError, "step_count"),
    ],
)
def test_fragments_that_cannot_be_put_together(change, error, text):
    rb = buffer(SliceSampler(slice_len=3, fragmented=True))
    rb.extend(change(rows([4, 5])))
    with pytest.raises(error, match=text):
        rb.sample()


def test_fragmented_arguments():
    for arguments in ({"step_key": None}, {"ends": torch.ones(3, dtype=torch.bool), "cache_values": True}):
        with pytest.raises(ValueError, match="step_key"):
            SliceSampler(slice_len=3, fragmented=True, **arguments)


# ------------------------------------------------------------------ replacement=, init_key=


def test_replacement_false_makes_the_other_class():
    assert type(interop.RandomSampler()) is type(interop.RandomSampler(replacement=True)) is interop.RandomSampler
    sampler = interop.RandomSampler(replacement=False, drop_last=True, shuffle=False)
    assert type(sampler) is interop.SamplerWithoutReplacement
    assert (sampler.drop_last, sampler.shuffle) == (True, False)
    sliced = SliceSampler(replacement=False, slice_len=3, shuffle=False)
    assert type(sliced) is interop.SliceSamplerWithoutReplacement
    assert (sliced.slice_len, sliced.shuffle) == (3, False)
    assert type(SliceSampler(replacement=True, slice_len=3)) is SliceSampler
    rb = interop.ReplayBuffer(
        storage=interop.LazyTensorStorage(5), sampler=interop.RandomSampler(replacement=False), batch_size=5
    )
    rb.extend(torch.arange(5))
    assert sorted(rb.sample().tolist()) == list(range(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: interop.RandomSampler(drop_last=True),
        lambda: interop.RandomSampler(replacement=0),
        lambda: interop.SamplerWithoutReplacement(replacement=True),
        lambda: interop.SliceSamplerWithoutReplacement(slice_len=3, replacement=True),
        lambda: interop.PrioritizedSampler(5, 0.6, 0.4, replacement=False),
    ],
)
def test_replacement_that_cannot_be(make):
    with pytest.raises((TypeError, ValueError)):
        make()


@pytest.mark.parametrize("key", ["is_init", None])
def test_first_steps_of_slices(key):
    rb = buffer(SliceSampler(slice_len=3, init_key=key), batch_size=12)
    data = rows([9])
    data["is_init"] = torch.zeros(9, 1, dtype=torch.bool)
    rb.extend(data)
    first = rb.sample()["is_init"].reshape(4, 3)
    assert bool(first[:, 0].all()) == (key is not None)
    assert not first[:, 1:].any()

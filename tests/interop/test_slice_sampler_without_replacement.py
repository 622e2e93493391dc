"""Slices of which each trajectory gives one an epoch."""

import copy
import itertools
import pickle
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SliceSamplerWithoutReplacement
from tests.interop.rows import refused
from tests.interop.slice_model import SliceModel, check_law, drawn, shares


def episodes(*lengths, first=0):
    """Rows of episodes of some lengths, and the items of each."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + first
    data = TensorDict({"x": torch.arange(len(ids)) + 100 * first, "episode": ids}, [len(ids)])
    return data, [tuple(each.tolist()) for each in data["x"].split(list(lengths))]


def buffer_of(data, capacity=1000, storage=LazyTensorStorage, batch_size=None, **choices):
    sampler = SliceSamplerWithoutReplacement(**choices)
    buffer = ReplayBuffer(storage=storage(capacity), sampler=sampler, batch_size=batch_size)
    buffer.extend(data)
    return buffer


def where(slices, whole):
    """From which trajectories slices are."""
    return [next(place for place, each in enumerate(whole) if item in each) for item, *_ in slices]


def test_every_order_and_every_start_comes_equally_often():
    torch.manual_seed(0)
    data, whole = episodes(4, 3, 5)
    buffer = buffer_of(data, slice_len=3)
    orders, slices = Counter(), []
    for _ in range(1000):
        epoch = drawn(buffer, 6) + drawn(buffer, 6)
        orders[tuple(where(epoch, whole))] += 1
        slices += epoch
    check_law(orders.elements(), dict.fromkeys(itertools.permutations(range(3)), 1.0))
    for each in whole:
        check_law([one for one in slices if one[0] in each], shares([each], 3))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_an_epoch_over_random_histories(seed, strict):
    model = SliceModel(15, () if seed else (2,))
    model.random = np.random.default_rng(seed)
    sampler = SliceSamplerWithoutReplacement(slice_len=2, strict_length=strict)
    buffer = ReplayBuffer(storage=LazyTensorStorage(15 * model.lanes, ndim=1 + len(model.shape)), sampler=sampler)
    for _ in range(40):
        buffer.extend(model.write_some(int(model.random.integers(1, 20)), 0.4))
        whole = [each for each in model.trajectories() if len(each) > strict]
        if not whole:
            with pytest.raises(RuntimeError, match="long enough"):
                buffer.sample(6)
        for _ in range(2):
            epoch = []
            while len(epoch) < len(whole):
                taken = drawn(buffer, 6)
                assert len(taken) == min(3, len(whole) - len(epoch))
                epoch += taken
            assert sorted(where(epoch, whole)) == list(range(len(whole)))
            assert set(epoch) <= set(shares(whole, 2, strict=strict))


def test_a_write_begins_an_epoch_and_nothing_else_does():
    data, whole = episodes(*[2] * 8)
    buffer = buffer_of(data, slice_len=2)
    taken = drawn(buffer, 6)
    buffer[3] = buffer[3].clone()
    buffer.set_("x", buffer[:]["x"].clone())
    taken += drawn(buffer, 10)
    assert sorted(where(taken, whole)) == list(range(8))
    assert buffer.sampler.ran_out
    first = drawn(buffer, 6)
    more, others = episodes(2, 2, first=8)
    buffer.extend(more)
    whole += others
    taken = drawn(buffer, 100)
    assert sorted(where(taken, whole)) == list(range(10))
    assert len(first) == 3
    drawn(buffer, 6)
    buffer.empty()
    buffer.extend(more)
    assert sorted(drawn(buffer, 100)) == sorted(others)


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (True, True), (False, False)])
def test_shorter_trajectories_are_not_in_the_epoch(shuffle, drop_last, prefetch):
    data, whole = episodes(4, 1, 4, 1, 5, 1, 2, 1, 3)
    sampler = SliceSamplerWithoutReplacement(slice_len=2, shuffle=shuffle, drop_last=drop_last)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4, prefetch=prefetch)
    buffer.extend(data)
    for _ in range(20):
        batches = [batch["x"].reshape(-1, 2).tolist() for batch in buffer]
        assert [len(batch) for batch in batches] == ([2, 2] if drop_last else [2, 2, 1])
        places = where([pair for batch in batches for pair in batch], whole)
        assert len(set(places)) == len(places) and set(places) <= {0, 2, 4, 6, 8}
        assert shuffle or places == [0, 2, 4, 6, 8]


def test_more_slices_than_trajectories_cannot_be_drawn_without_a_rest():
    buffer = buffer_of(episodes(3, 3)[0], slice_len=2, drop_last=True, batch_size=6)
    with refused(buffer, ValueError, "drop_last"):
        buffer.sample()
    with pytest.raises(ValueError, match="drop_last"):
        ReplayBuffer(storage=LazyTensorStorage(3), sampler=SliceSamplerWithoutReplacement(slice_len=2, drop_last=True))


def test_how_it_shows():
    sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")
    assert repr(sampler).startswith("SliceSamplerWithoutReplacement(num_slices=None, slice_len=2, end_key=None, ")
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
    buffer.extend(episodes(2, 2, 2, 2)[0])
    buffer.sample(2)
    assert repr(sampler).endswith("75.0000% left)")


# ------------------------------------------------------------------ beside writes


def items(ids, first):
    return TensorDict({"x": torch.arange(first, first + len(ids)), "id": torch.tensor(ids)}, [len(ids)])


def three_of_four(length, **choices):
    sampler = SliceSamplerWithoutReplacement(slice_len=length, strict_length=False, traj_key="id")
    buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler, **choices)
    buffer.extend(items([1] * 4 + [2] * 4 + [3] * 4, 0))
    return buffer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_batches_that_were_drawn_before_a_write_are_drawn_anew_of_a_copy(copied):
    buffer = three_of_four(4, batch_size=4, prefetch=2)
    buffer.sample()
    buffer.extend(items([4] * 2, 100))
    other = copied(buffer)
    stored = [(2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (100, 101)]
    assert sorted(tuple(other.sample()["x"].tolist()) for _ in stored) == stored  # the write began an epoch


def test_ensembles_of_the_same_slices_in_any_order_while_others_write():
    """No deadlock, and no slice of two trajectories or of another member."""
    members = [three_of_four(2) for _ in range(3)]
    ensembles = [
        ReplayBufferEnsemble(*each, sample_from_all=True, batch_size=12, prefetch=2)
        for each in (members, members[::-1], members[1:])
    ]
    ends, wrong = time.monotonic() + 1.0, []

    def write(member):
        first = 12
        while time.monotonic() < ends:
            member.extend(items([first] * 4, first))
            first += 4

    def read(ensemble):
        while time.monotonic() < ends:
            for part in ensemble.sample().unbind(0):
                pairs = part["x"].reshape(-1, 2)
                wrong.extend(pair for pair in pairs.tolist() if pair[1] != pair[0] + 1 or pair[0] // 4 != pair[1] // 4)

    threads = [threading.Thread(target=write, args=(each,), daemon=True) for each in members]
    threads += [threading.Thread(target=read, args=(each,), daemon=True) for each in ensembles]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert not any(each.is_alive() for each in threads)
    assert wrong == []

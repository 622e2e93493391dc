"""The view of episodes: against streams whose episodes are known, and the buffers of some of them."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    CompressedListStorage,
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests.interop.streams import MOST_STEPS
from tests.interop.test_trajectory_oracle import KINDS, Stored

FLAGS = ("terminated", "truncated", "done")


def obs_of(rows):
    return rows["obs"].reshape(-1).long().tolist()


def rows_of(stream):
    """By obs: the reward and the flags of each row."""
    rewards = stream.data["next", "reward"].reshape(-1).tolist()
    flags = {name: stream.data.get(("next", name), None) for name in FLAGS}
    kinds = ["" for _ in rewards]
    for name in reversed(FLAGS):
        if flags[name] is not None:
            for place in flags[name].reshape(-1).nonzero().reshape(-1).tolist():
                kinds[place] = name
    padding = stream.padding.reshape(-1).tolist()
    kinds = ["padding" if pads else kind for kind, pads in zip(kinds, padding, strict=True)]
    values = (stream.episode * MOST_STEPS + stream.step).reshape(-1).tolist()
    return dict(zip(values, zip(rewards, kinds, strict=True), strict=True))


@pytest.mark.parametrize(("kind", "layout", "marks"), KINDS)
def test_they_are_the_episodes_of_the_stream(kind, layout, marks):
    stored = Stored(layout, marks, kind, seed=4)
    buffer = stored.buffer()
    rows = rows_of(stored.stream)
    before = {}  # how the episodes ended at the last look
    for _ in stored.pieces([buffer]):
        episodes, truth = buffer.episodes, stored.episodes()
        assert episodes is buffer.episodes
        found = [obs_of(each) for each in episodes]
        assert sorted(found) == sorted(truth.values())
        assert episodes.lengths.tolist() == [len(each) for each in found]
        assert episodes.returns.tolist() == [sum(rows[obs][0] for obs in each) for each in found]
        number = {obs: i for i, each in enumerate(found) for obs in each}
        assert episodes.numbers.tolist() == [number[obs] for obs in obs_of(buffer.storage[:])]
        for each, end in zip(found, episodes.ends, strict=True):
            assert end == (rows[each[-1]][1] or end)
            assert end in (*FLAGS, "padding", "cut", "open")
            was_last, was_end = before.get(each[0] // MOST_STEPS, (each[-1], end))
            assert was_end in ("open", "padding") or was_last == each[-1]  # others do not go on
        before = {each[0] // MOST_STEPS: (each[-1], end) for each, end in zip(found, episodes.ends, strict=True)}
        in_order = obs_of(buffer.in_order())
        lanes = stored.lanes
        kept = min(stored.written, stored.stream.episode.shape[-1], 50)
        part = stored.stream.rows(stored.written - kept, stored.written)
        assert in_order == (part.episode * MOST_STEPS + part.step).reshape(-1).tolist()
        assert len(in_order) == kept * lanes


SAMPLERS = {
    "uniform": RandomSampler,
    "by priority": lambda: PrioritizedSampler(150, 1.0, 1.0),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices by priority": lambda: PrioritizedSliceSampler(150, 1.0, 1.0, slice_len=2),
    "epochs": SamplerWithoutReplacement,
    "epochs of slices": lambda: SliceSamplerWithoutReplacement(slice_len=64, strict_length=False),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("kind", "layout", "marks"),
    [
        ("memory", "episodes", "done"),
        ("memory", "steps", "lanes and done"),
        ("files", "lanes", "ids"),
        ("lists", "steps", "ids"),
    ],
)
def test_draws_of_each_half_stay_in_its_episodes(kind, layout, marks, sampler):
    stored = Stored(layout, marks, kind, seed=5)
    buffer = stored.buffer(batch_size=128)
    for _ in stored.pieces([buffer]):
        pass
    episodes = buffer.episodes
    truth = {tuple(obs_of(each)) for each in episodes}
    halves = episodes.split(0.6, seed=0, sampler=SAMPLERS[sampler])
    parts = [{tuple(obs_of(each)) for each in half.episodes} for half in halves]
    assert parts[0] | parts[1] == truth and not parts[0] & parts[1]
    assert len(parts[0]) == round(0.6 * len(truth))
    for half, part in zip(halves, parts, strict=True):
        rows = {obs for each in part for obs in each}
        assert len(half) == len(rows)
        drawn = [obs for _ in range(6) for obs in obs_of(half.sample())]
        assert set(drawn) <= rows
        assert len(set(drawn)) > len(rows) / 2
        if "slices" in sampler and "epochs" not in sampler:
            follow = {pair for each in part for pair in itertools.pairwise(each)}
            assert set(zip(drawn[::2], drawn[1::2], strict=True)) <= follow
        if "priority" in sampler:
            low = [i for i, obs in enumerate(obs_of(half.storage[:])) if obs in min(part, key=len)]
            half.update_priority(torch.arange(len(half)), torch.ones(len(half)))
            half.update_priority(torch.tensor(low), torch.zeros(len(low)))
            if len(part) > 2:
                assert not set(min(part, key=len)) & set(obs_of(half.sample())[::2])
    assert [episodes.split(0.6, seed=0)[0].episodes.lengths.tolist() for _ in range(2)] == [
        halves[0].episodes.lengths.tolist()
    ] * 2


def filled(storage=None, rows=27, kind=TensorDictReplayBuffer, **choices):
    buffer = kind(storage=storage or LazyTensorStorage(20), batch_size=8, **choices)
    ends = torch.arange(rows) % 6 == 5
    data = TensorDict({"obs": torch.arange(rows), "next": {"reward": torch.ones(rows), "done": ends[:, None]}}, [rows])
    buffer.extend(data)
    return buffer


def test_a_half_reads_the_same_memory_and_cannot_be_written():
    buffer = filled()
    half = buffer.episodes.select([1, 2])
    buffer.set_("obs", buffer.storage[:]["obs"] + 100)  # an edit in place
    assert half[:]["obs"].tolist() == list(range(112, 124))
    assert half[3]["obs"] == 115 and half[torch.tensor([0, -1])]["obs"].tolist() == [112, 123]
    assert buffer.storage[torch.from_numpy(half.storage.slots)]["obs"].tolist() == list(range(112, 124))
    for write in (
        lambda: half.extend(buffer[:2]),
        lambda: half.add(buffer[0]),
        lambda: half.set_("obs", half[:]["obs"]),
        lambda: half.__setitem__(0, buffer[0]),
        lambda: half.update_({"obs": half[:]["obs"]}),
        half.empty,
        half.storage.empty,
    ):
        with pytest.raises(RuntimeError, match=r"can only be read|doesn't allow writing"):
            write()
    assert half[:]["obs"].tolist() == list(range(112, 124))


def test_rows_written_since_are_refused_and_known_numbers_stay():
    buffer = filled()
    episodes = buffer.episodes
    half = episodes.select([1])
    lengths = episodes.lengths.tolist()
    buffer.extend(buffer[:3])
    for read in (lambda: episodes[0], lambda: episodes.split(0.5), lambda: episodes.returns, lambda: episodes.slots(0)):
        with pytest.raises(RuntimeError, match=r"take rb\.episodes again"):
            read()
    for read in (half.sample, lambda: half[0], lambda: half[:]):
        with pytest.raises(RuntimeError, match="choose again"):
            read()
    assert episodes.lengths.tolist() == lengths == [5, 6, 6, 3]
    assert buffer.episodes.lengths.tolist() == [2, 6, 6, 6]
    buffer.storage.set(3, buffer[:][3])  # elsewhere than at the cursor
    assert buffer.episodes is not episodes
    buffer.empty()
    none = buffer.episodes
    assert len(none) == 0
    for numbers in (none.lengths, none.ends, none.returns, none.order, none.numbers, none.where(lambda _: True)):
        assert numbers.tolist() == []
    assert list(none) == [] == none.query()


def test_a_later_edit_of_a_marker_counts():
    buffer = filled()
    assert buffer.episodes.lengths.tolist() == [5, 6, 6, 3]
    buffer.set_at_(("next", "done"), torch.ones(1, 1, dtype=torch.bool), torch.tensor([8]))
    assert buffer.episodes.lengths.tolist() == [2, 3, 6, 6, 3]
    assert buffer.episodes.ends.tolist() == ["done", "done", "done", "done", "open"]


def test_keys_are_those_that_the_buffer_names():
    rows = TensorDict({"mine": torch.arange(9) // 3, "next": {"r": torch.arange(9.0).reshape(9, 1) ** 2}}, [9])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=2, traj_key="mine"))
    buffer.extend(rows)
    assert buffer.episodes.lengths.tolist() == [3, 3, 3]
    assert buffer.episodes.sums(("next", "r")).tolist() == [5.0, 50.0, 149.0]
    with pytest.raises(KeyError, match="name its key"):
        buffer.episodes.returns
    buffer.set_sampler(RandomSampler())
    with pytest.raises(RuntimeError, match="where trajectories end"):
        buffer.episodes


def test_rewards_of_several_agents_keep_their_shape():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6))
    buffer.extend({"episode": torch.tensor([0, 0, 0, 1, 1, 1]), "reward": torch.ones(6, 2, 3)})
    assert buffer.episodes.returns.tolist() == [[[3.0] * 3] * 2] * 2
    assert buffer.episodes[1]["reward"].shape == (3, 2, 3)


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, CompressedListStorage])
def test_lists_of_tensordicts_have_episodes(storage):
    buffer = filled(storage(20))
    assert [each["obs"].tolist() for each in buffer.episodes][1] == list(range(12, 18))
    first, second = buffer.episodes.split(0.5, seed=0)
    assert sorted([*first[:]["obs"].tolist(), *second[:]["obs"].tolist()]) == list(range(7, 27))


def test_what_has_no_episodes_is_refused():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(["a", "b"])
    with pytest.raises(RuntimeError, match="where trajectories end"):
        buffer.episodes
    ranked = TensorDictReplayBuffer(storage=LazyTensorStorage(5), writer=TensorDictMaxValueWriter(rank_key="obs"))
    for read in (lambda: ranked.episodes, ranked.in_order):
        with pytest.raises(TypeError, match="order"):
            read()


@pytest.mark.parametrize(
    ("chosen", "error", "text"),
    [
        (np.zeros(4, bool), ValueError, "one episode or more"),
        ([0, 0], ValueError, "each once"),
        ([4], IndexError, "episode 4 is out of range"),
        (np.ones(3, bool), ValueError, "mask is of 3 episodes, there are 4"),
        ([0.5], ValueError, "got float64"),
        ([], ValueError, "one episode or more, got none"),
    ],
)
def test_choices_are_checked(chosen, error, text):
    with pytest.raises(error, match=text):
        filled().episodes.select(chosen)


def test_arguments_are_checked():
    episodes = filled().episodes
    for fraction in (0.0, 1.0, 2):
        with pytest.raises(ValueError, match="more than 0 and less than 1"):
            episodes.split(fraction)
    for fraction in ("0.5", None, True):
        with pytest.raises(TypeError, match="fraction must be a number"):
            episodes.split(fraction)
    with pytest.raises(TypeError, match="seed"):
        episodes.split(0.5, seed=1.5)
    assert episodes.split(torch.tensor(0.5))[0].episodes.lengths.size == 2
    with pytest.raises(ValueError, match="there are 1"):
        filled(rows=4).episodes.split()
    with pytest.raises(IndexError, match="episode -5"):
        episodes[-5]
    for index in (slice(1, None), True, 1.0, [0, 1]):
        with pytest.raises(TypeError, match="select"):
            episodes[index]
    assert episodes[-1]["obs"].tolist() == [24, 25, 26]
    assert repr(episodes) == "Episodes(4 episodes of 20 rows)"


def test_halves_have_the_transforms_units_and_hindsight_of_the_buffer():
    doubled = filled(transform=lambda td: td.set("twice", td["obs"] * 2))
    half = doubled.episodes.select([1])
    batch = half.sample()
    assert (batch["twice"] == batch["obs"] * 2).all()
    assert (half[:]["twice"] == half[:]["obs"] * 2).all()
    assert (doubled.episodes[1]["twice"] == doubled.episodes[1]["obs"] * 2).all()
    windows = filled(sample_unit=Sequence(3)).episodes.select([2, 1])
    batch = windows.sample()
    obs, valid = (batch[key].reshape(8, 3) for key in ("obs", "validity_mask"))
    assert ((obs[:, 1:] - obs[:, :-1] == 1) | ~valid[:, 1:]).all() and set(obs.flatten().tolist()) <= set(range(12, 24))
    stored = Stored("episodes", "done", seed=6)
    buffer = stored.buffer(
        HERReplayBuffer, reward_fn=lambda td: torch.zeros(td.batch_size), her_ratio=1.0, batch_size=64
    )
    for _ in stored.pieces([buffer]):
        pass
    half = buffer.episodes.split(0.5, seed=1)[1]
    batch = half.sample()
    assert isinstance(half, HERReplayBuffer)
    assert (batch["desired_goal"].long() // MOST_STEPS == batch["obs"].long() // MOST_STEPS).all()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_of_a_half_are_whole(way):
    half = filled().episodes.select([2])
    twin = way(half)
    assert twin[:]["obs"].tolist() == half[:]["obs"].tolist() == list(range(18, 24))
    assert way(filled()).episodes.lengths.tolist() == [5, 6, 6, 3]


def test_prefetching_halves_and_buffers_in_files_agree(tmp_path):
    buffer = filled(LazyMemmapStorage(20, scratch_dir=tmp_path))
    half = buffer.episodes.select(np.array([True, False, True, False]), lambda: SliceSampler(slice_len=2))
    assert set(half.sample()["obs"].tolist()) <= {*range(7, 12), *range(18, 24)}
    assert half.episodes.ends.tolist() == ["done", "done"]
    assert buffer.episodes.select([3]).episodes.ends.tolist() == ["cut"]  # nothing can be written behind it


def test_in_order_goes_around_the_ring_and_keeps_the_dims():
    buffer = filled()
    assert buffer.in_order()["obs"].tolist() == list(range(7, 27))
    other = filled(rows=1)
    other.extend(buffer.in_order())
    assert other[:]["obs"][other.storage.ring.cursor :].tolist()[:3] == [7, 8, 9]
    assert filled(rows=12).in_order()["obs"].tolist() == list(range(12))
    for dim in (0, 1):
        lanes = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=dim)
        for start in (0, 3):
            data = torch.arange(start, start + 3).expand(3, 3) + 10 * torch.arange(3)[:, None]
            lanes.extend({"x": data if dim else data.T})
        assert lanes.in_order()["x"].select(1 - dim, 1).tolist() == [12, 13, 14, 15][-4:]

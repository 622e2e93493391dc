"""Everything that joins stored rows, on streams of vectorized environments whose episodes are known."""

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from interop.data.trajectory_keys import TrajectoryKeys
from interop.datasets.stored_episodes import StoredEpisodes
from tests.interop.streams import COMBINATIONS, MARKS, MOST_STEPS, make, true_episode, true_step

STORAGES = {"memory": LazyTensorStorage, "files": LazyMemmapStorage, "lists": LazyStackStorage}
ROWS = 50  # in time; fewer than a stream has, so that the ring goes around

cases = pytest.mark.parametrize(("layout", "marks"), COMBINATIONS, ids=lambda value: str(value))
ONE_DIM = [case for case in COMBINATIONS if case[0] != "lanes"]
NOT_BY_TURNS = [case for case in COMBINATIONS if case[0] != "steps"]
KINDS = [("memory", *case) for case in COMBINATIONS] + [("files", *case) for case in COMBINATIONS[::4]]
KINDS += [("lists", *case) for case in ONE_DIM[::3]]


class Stored:
    """Storages that hold the newest rows of a stream, and the episodes of these."""

    def __init__(self, layout, marks, kind="memory", seed=0):
        self.lanes = 3 if layout == "lanes" else 1
        self.stream = make(layout, MARKS[marks], seed=seed)
        self.storage = STORAGES[kind](
            ROWS * self.lanes, **({} if kind == "lists" else {"ndim": 2 if self.lanes > 1 else 1})
        )
        self.written = 0
        self._random = np.random.default_rng(seed)
        self._pieces = self.stream.pieces(seed, largest=12)

    def buffer(self, kind=TensorDictReplayBuffer, **choices):
        generator = torch.Generator().manual_seed(0)
        return kind(storage=self.storage, generator=generator, **choices)

    def pieces(self, buffers):
        """Write piece after piece, by one of the buffers in turn; yield now and then, and at the end."""
        writer = buffers[0]
        for piece in self._pieces:
            data = piece.data.clone()
            data["desired_goal"] = torch.full_like(data["obs"], -1.0)
            data["achieved_goal"] = data["obs"].clone()
            data["next", "achieved_goal"] = data["obs"].clone()
            writer.extend(data)
            self.written += piece.episode.shape[-1]
            if self._random.random() < 0.25:
                yield
        yield

    def episodes(self):
        """The obs of the stored rows of each episode, in the order of steps."""
        count, kept = self.stream.episode.shape[-1], min(self.written, ROWS)
        assert self.written <= count
        rows = slice(self.written - kept, self.written)
        part = self.stream.rows(rows.start, rows.stop)
        found = {}
        values = part.episode * MOST_STEPS + part.step
        for episode, value in zip(part.episode.reshape(-1).tolist(), values.reshape(-1).tolist(), strict=True):
            found.setdefault(episode, []).append(value)
        return {episode: sorted(values) for episode, values in found.items()}


def windows(obs, length):
    return [tuple(row) for row in obs.reshape(-1, length).long().tolist()]


def legal(episodes, length):
    """All windows of consecutive steps of one episode."""
    return {tuple(v[at : at + length]) for v in episodes.values() for at in range(len(v) - length + 1)}


def check_trajectories(kind, layout, marks, seed):
    """What a sampler without replacement draws, and what an exporter reads, are the episodes."""
    stored = Stored(layout, marks, kind, seed)
    sampler = SliceSamplerWithoutReplacement(slice_len=128, strict_length=False)
    buffer = stored.buffer(sampler=sampler, batch_size=128 * 500)
    for _ in stored.pieces([buffer]):
        batch = buffer.sample()
        ends = batch["next", "truncated"].reshape(-1).nonzero().reshape(-1).tolist()
        obs = batch["obs"].reshape(-1).long().tolist()
        found, start = [], 0
        for end in ends:
            found.append(obs[start : end + 1])
            start = end + 1
        assert sorted(found) == sorted(stored.episodes().values())
        exported = StoredEpisodes(stored.storage, TrajectoryKeys.chosen())
        assert sorted(each["obs"].reshape(-1).long().tolist() for each in exported) == sorted(found)


def check_windows(layout, marks, seed):
    """Slices, prioritized ones too, and windows around items stay in an episode."""
    stored = Stored(layout, marks, seed=seed)
    slices = stored.buffer(sampler=SliceSampler(slice_len=3), batch_size=3 * 200)
    starts = PrioritizedSliceSampler(ROWS * stored.lanes, 1.0, 1.0, slice_len=3)
    prioritized = stored.buffer(sampler=starts, batch_size=3 * 200)
    units = [Sequence(3, burn_in=1), Sequence(3, "stop"), Sequence(2, bootstrap=1, dilation=2)]
    windowed = [stored.buffer(sample_unit=unit, batch_size=200) for unit in units]
    for _ in stored.pieces([slices]):
        episodes = stored.episodes()
        wanted = legal(episodes, 3)
        if wanted:
            assert set(windows(slices.sample()["obs"], 3)) <= wanted
            assert set(windows(prioritized.sample()["obs"], 3)) <= wanted
        for unit, buffer in zip(units, windowed, strict=True):
            batch = buffer.sample()
            obs = batch["obs"].reshape(200, -1).long().numpy()
            valid = batch["validity_mask"].reshape(200, -1).numpy()
            offsets = np.arange(-unit.burn_in, unit.length + unit.bootstrap) * unit.dilation
            anchors = stored.storage[:]["obs"].reshape(-1)
            index = batch["anchor_index"].reshape(200, obs.shape[1], -1)[:, 0]
            flat = index[:, 0] if stored.lanes == 1 else index[:, 0] * stored.lanes + index[:, 1]
            at = anchors[flat].long().numpy()
            for row, mask, anchor in zip(obs, valid, at, strict=True):
                known = episodes[anchor // MOST_STEPS]
                asked = anchor + offsets
                if unit.episode_boundary == "stop":
                    asked = asked - min(max(asked[-1] - known[-1], 0), anchor - known[0])
                assert row.tolist() == np.clip(asked, known[0], known[-1]).tolist()
                assert mask.tolist() == ((asked >= known[0]) & (asked <= known[-1])).tolist()


def reward_fn(td):
    return torch.zeros(td.batch_size)


def check_goals(layout, marks, seed):
    """Goals in hindsight are reached in the same episode, and are the same for all steps of a slice."""
    strategy = ("future", "final", "episode")[(COMBINATIONS.index((layout, marks)) + seed) % 3]
    stored = Stored(layout, marks, seed=seed)
    choices = {"reward_fn": reward_fn, "her_ratio": 1.0, "strategy": strategy}
    single = stored.buffer(HERReplayBuffer, batch_size=200, **choices)
    together = stored.buffer(HERReplayBuffer, batch_size=200, sampler=SliceSampler(slice_len=2), **choices)
    for _ in stored.pieces([single]):
        episodes = stored.episodes()
        for buffer, length in ((single, 1), (together, 2)):
            if not legal(episodes, length):
                continue
            batch = buffer.sample()
            goals = batch["desired_goal"].reshape(-1, length).long()
            assert (goals == goals[:, :1]).all()  # one goal a slice
            for goal, at in zip(
                goals[:, 0].tolist(), batch["obs"].reshape(-1, length)[:, -1].long().tolist(), strict=True
            ):
                known = episodes[at // MOST_STEPS]
                allowed = {"future": [v for v in known if v >= at], "final": known[-1:], "episode": known}[strategy]
                assert goal in allowed


def check_functional(layout, marks, seed):
    """Slices of the functional buffer stay in an episode."""
    stored = Stored(layout, marks, seed=seed)
    buffer = stored.buffer(sampler=SliceSampler(slice_len=3))
    for _ in stored.pieces([buffer]):
        pass
    functional, state = buffer.to_fbuf(batch_size=3 * 256, narrow=True)
    _, items, draw = jax.jit(functional.sample, static_argnums=2)(state, jax.random.key(0), 3 * 256)
    assert draw.valid.all()
    found = set(windows(torch.from_numpy(np.asarray(items["obs"])), 3))
    assert found <= legal(stored.episodes(), 3)
    assert len(found) > 10


@pytest.mark.parametrize(("kind", "layout", "marks"), KINDS)
def test_trajectories_are_the_episodes(kind, layout, marks):
    check_trajectories(kind, layout, marks, 0)


@cases
def test_slices_and_windows_stay_in_an_episode(layout, marks):
    check_windows(layout, marks, 1)


@cases
def test_goals_are_of_the_same_episode(layout, marks):
    check_goals(layout, marks, 2)


@pytest.mark.parametrize(("layout", "marks"), NOT_BY_TURNS[::4])
def test_functional_slices_stay_in_an_episode(layout, marks):
    check_functional(layout, marks, 3)


def test_two_collectors_one_after_the_other_restart_their_ids():
    """Ids that stay equal while an episode ends: every marker counts, named or not."""
    rows = TensorDict({"obs": torch.arange(24), ("collector", "traj_ids"): torch.zeros(24, dtype=torch.int64)}, [24])
    rows["next", "done"] = (torch.arange(24) % 6 == 5)[:, None]
    for keys in ({}, {"traj_key": ("collector", "traj_ids")}, {"end_key": ("next", "done")}):
        for make_sampler in (SliceSampler, SliceSamplerWithoutReplacement):
            sampler = make_sampler(slice_len=4, **keys)
            buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(24), sampler=sampler, batch_size=4 * 64)
            buffer.extend(rows)
            found = buffer.sample()["obs"].reshape(-1, 4)
            assert (found[:, 0] // 6 == found[:, 3] // 6).all()
    assert sampler.traj_key == ("collector", "traj_ids") and sampler.end_key == ("next", "done")


def test_the_truth_is_not_trivial():
    stream = make("steps", MARKS["everything"])
    obs = stream.data["obs"].reshape(-1)
    assert (true_episode(obs) == stream.episode).all() and (true_step(obs) == stream.step).all()
    assert (np.diff(stream.episode) != 0).mean() > 0.5

"""A toy environment, and its episodes in the format of each upstream, by models of upstream's own writers.

The law of the environment: s' = s + a, and r = s'. States are whole numbers from 1, and no state belongs to two episodes, so
that each row tells whether it is a transition that was recorded.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np
from gymnasium.spaces import Box, Discrete
from minari.data_collector import EpisodeBuffer

from interop import datasets
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from tests.interop.datasets import sources_atari_dqn, sources_gen_dgrl, sources_minari, sources_openx

End = Literal["terminated", "truncated", ""]


class Episode(NamedTuple):
    """T + 1 states, T actions, and what flags the last step."""

    states: np.ndarray
    actions: np.ndarray
    end: End


class Step(NamedTuple):
    """A row: next state 0 is unknown. `end` flags the last step of an episode."""

    state: int
    action: int
    reward: int
    next_state: int
    end: End


@dataclass(frozen=True)
class Format:
    """How an upstream writes episodes.

    Args:
        write: writes episodes to a folder as upstream's writer does. Returns the steps that upstream's reader gives, with
            their episodes.
        construct: the loader, for `root` and `from_local`.
        ends: the ends of episodes that the format can tell.
        decode: the state in an observation [n, ...].
        observation: the key of observations.
        splits: whether there is `split_trajs`.
        ids: whether "episode" is another number in the next episode.
    """

    name: str
    write: Callable[[Path, Sequence[Episode]], list[list[Step]]]
    construct: Callable[..., BaseDatasetExperienceReplay]
    ends: tuple[End, ...]
    decode: Callable[[np.ndarray], np.ndarray]
    observation: str | tuple[str, ...] = "observation"
    splits: bool = True
    ids: bool = True


def play(rng: np.random.Generator, lengths: Sequence[int], ends: Sequence[End]) -> list[Episode]:
    """Episodes of these lengths with random ends."""
    episodes, first = [], 1
    for steps in lengths:
        actions = rng.integers(0, 3, steps)
        states = first + np.concatenate([[0], np.cumsum(actions)])
        episodes.append(Episode(states, actions, ends[rng.integers(len(ends))]))
        first = int(states[-1]) + 2
    return episodes


def steps_of(episode: Episode, knows_last: bool = True, end: End | None = None) -> list[Step]:
    """The steps of an episode; its last next state is unknown unless `knows_last`. An end without a flag is truncated."""
    states, actions, flag = episode
    flag = end or flag or "truncated"
    last = len(actions) - 1
    return [
        Step(int(states[t]), int(action), int(states[t + 1]), int(states[t + 1]) if knows_last or t < last else 0, "")
        if t < last
        else Step(int(states[t]), int(action), int(states[t + 1]), int(states[t + 1]) if knows_last else 0, flag)
        for t, action in enumerate(actions.tolist())
    ]


def _image(states: np.ndarray, *shape: int) -> np.ndarray:
    """Images with a state in each pixel: its low byte, and its high byte in the first one."""
    out = np.empty((len(states), *shape), np.uint8)
    out[:] = (states % 251 + 1).reshape(-1, *[1] * len(shape))
    out.reshape(len(states), -1)[:, 0] = states // 251
    return out


def _of_image(images: np.ndarray) -> np.ndarray:
    flat = images.reshape(len(images), -1).astype(np.int64)
    return np.where(flat.any(1), flat[:, 0] * 251 + flat[:, 1] - 1, 0)


def _of_vector(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1)[:, 0].astype(np.int64)


# ---------------------------------------------------------------- V-D4RL


def _driver(episode: Episode) -> dict[str, np.ndarray]:
    """Dreamer's driver: a row for the reset with an action of zeros, then one for each step with its action."""
    count = len(episode.states)
    last = np.arange(count) == count - 1
    return {
        "image": _image(episode.states, 8, 8, 3),
        "action": np.concatenate([[0], episode.actions]).astype(np.float32)[:, None],
        "reward": np.concatenate([[0], episode.states[1:]]).astype(np.float32),
        "discount": np.where(last & (episode.end == "terminated"), 0, 1).astype(np.float64),
        "is_first": np.arange(count) == 0,
        "is_last": last & bool(episode.end),
        "is_terminal": last & (episode.end == "terminated"),
        "height": episode.states.astype(np.float32),
    }


def vd4rl_episodes(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """One `.npz` file an episode. Files of episodes without an end were cut from a shard, without their flags."""
    for place, episode in enumerate(episodes):
        held = _driver(episode)
        if not episode.end:
            for name in ("is_first", "is_last", "is_terminal"):
                held[name] = np.append(held[name], name == "is_last")
        np.savez_compressed(folder / f"20220601T{place:06d}-uuid-{len(episode.actions)}.npz", **held)
    return [steps_of(episode) for episode in episodes]


def vd4rl_old_episodes(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """Files without flags, as Dreamer's first version wrote them: what is terminal is in the discount."""
    for place, episode in enumerate(episodes):
        held = {name: each for name, each in _driver(episode).items() if not name.startswith("is_")}
        np.savez_compressed(folder / f"20220601T{place:06d}-uuid-{len(episode.actions)}.npz", **held)
    return [steps_of(episode) for episode in episodes]


def vd4rl_shards(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """All episodes in one array with `step_type`, divided into files by `numpy.array_split`, wherever that is."""
    rows = [_driver(episode) for episode in episodes]
    held = {name: np.concatenate([each[name] for each in rows]) for name in ("action", "reward", "discount")}
    held["observation"] = _image(np.concatenate([each.states for each in episodes]), 3, 8, 8)
    held["step_type"] = np.concatenate(
        [np.where(each["is_first"], 0, np.where(each["is_last"], 2, 1.0)) for each in rows]
    )
    count = len(held["reward"])
    bounds = np.linspace(0, count, 4).astype(int)
    for place, (start, stop) in enumerate(itertools.pairwise(bounds)):
        with h5py.File(folder / f"{place}.hdf5", "w") as file:
            for name, values in held.items():
                file.create_dataset(name, data=values[start:stop], compression="gzip")
    expected, offset = [], 0
    for episode in episodes:
        found = steps_of(episode)
        # The step of row t needs the row before it in the same file. What is left of an episode is a trajectory.
        piece: list[Step] = []
        for t, step in enumerate(found):
            row = offset + t + 1
            if row in bounds[1:-1]:
                if piece:
                    expected.append([*piece[:-1], piece[-1]._replace(end="truncated")])
                piece = []
            else:
                piece.append(step)
        if piece:
            expected.append(piece)
        offset += len(episode.states)
    return expected


# ---------------------------------------------------------------- D4RL


def _flat(episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    """As D4RL's generation scripts append: observation, action, reward, terminal and time-out of each step."""
    states = np.concatenate([each.states[:-1] for each in episodes])
    ends = [[*[""] * (len(each.actions) - 1), each.end] for each in episodes]
    flags = np.array([end for each in ends for end in each])
    return {
        "observations": states.astype(np.float32)[:, None],
        "actions": np.concatenate([each.actions for each in episodes]).astype(np.float32)[:, None],
        "rewards": np.concatenate([each.states[1:] for each in episodes]).astype(np.float32),
        "terminals": flags == "terminated",
        "timeouts": flags == "truncated",
        "infos/qpos": states[:, None].astype(np.float64),
    }


def _h5(path: Path, held: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        for name, values in held.items():
            file[name] = values


def d4rl(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """The last episode goes on: the state behind its last step is in no file, so that step is lost."""
    episodes = [*episodes[:-1], episodes[-1]._replace(end="")]
    _h5(folder / "some.hdf5", _flat(episodes))
    expected = [steps_of(episode, knows_last=False) for episode in episodes]
    last = [step._replace(end="") for step in steps_of(episodes[-1])[:-1]]
    return [*expected[:-1], *([last] if last else [])]


def d4rl_ended(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """The last row of the file ends an episode, and needs no successor."""
    _h5(folder / "some.hdf5", _flat(episodes))
    return [steps_of(episode, knows_last=False) for episode in episodes]


def d4rl_of_terminals(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """No time-outs, no infos, flags as numbers."""
    held = _flat(episodes)
    del held["timeouts"], held["infos/qpos"]
    _h5(folder / "some.hdf5", {**held, "terminals": held["terminals"].astype(np.uint8)})
    return [steps_of(episode, knows_last=False) for episode in episodes]


def d4rl_with_next(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """The last episode goes on, and its last next state is stored."""
    episodes = [*episodes[:-1], episodes[-1]._replace(end="")]
    nexts = np.concatenate([each.states[1:] for each in episodes]).astype(np.float32)[:, None]
    _h5(folder / "some.hdf5", {**_flat(episodes), "next_observations": nexts})
    expected = [steps_of(episode, knows_last=False) for episode in episodes[:-1]]
    return [*expected, [step._replace(end="") for step in steps_of(episodes[-1])]]


def qlearning_dataset(held: dict[str, np.ndarray], terminate_on_end: bool = False) -> dict[str, np.ndarray]:
    """What `d4rl.qlearning_dataset` makes of a dataset with time-outs."""
    kept = [i for i in range(len(held["rewards"]) - 1) if terminate_on_end or not held["timeouts"][i]]
    after = [i + 1 for i in kept]
    names = ("observations", "actions", "rewards", "terminals")
    return {**{name: held[name][kept] for name in names}, "next_observations": held["observations"][after]}


# ---------------------------------------------------------------- RoboSet


def roboset(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """RoboHive's trace: time, state, reward and flag of this state, and the action taken in it; NaN in the last state."""
    half = -(-len(episodes) // 2)
    expected: dict[int, list[list[Step]]] = {}
    for seed, some in enumerate((episodes[:half], episodes[half:])):
        with h5py.File(folder / f"rollouts{seed}.h5", "w") as file:
            for number, episode in enumerate(some):
                count = len(episode.states)
                last = np.arange(count) == count - 1
                trial = file.create_group(f"Trial{number}")
                trial["time"] = np.arange(count) * 0.02
                trial["observations"] = episode.states[:, None].astype(np.float64)
                trial["actions"] = np.append(episode.actions, np.nan)[:, None]
                trial["rewards"] = episode.states.astype(np.float64)
                trial["done"] = last & (episode.end == "terminated")
                trial["env_infos/obs_dict/qpos"] = episode.states[:, None].astype(np.float64)
                expected.setdefault(number, []).append(steps_of(episode))
    return [each for number in sorted(expected) for each in expected[number]]


def roboset_without_last_state(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """As many states as actions, with the reward and the flag that each action led to."""
    with h5py.File(folder / "rollouts.h5", "w") as file:
        for number, episode in enumerate(episodes):
            steps = len(episode.actions)
            trial = file.create_group(f"Trial{number}")
            trial["observations"] = episode.states[:-1, None].astype(np.float64)
            trial["actions"] = episode.actions[:, None].astype(np.float64)
            trial["rewards"] = episode.states[1:].astype(np.float64)
            trial["done"] = (np.arange(steps) == steps - 1) & (episode.end == "terminated")
    return [steps_of(episode, knows_last=False) for episode in episodes]


# ---------------------------------------------------------------- Gen-DGRL


def gen_dgrl(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """The environments reset themselves: the last observation is the first one of the next episode."""
    held = []
    for place, episode in enumerate(episodes):
        seen = [*episode.states[:-1], episodes[(place + 1) % len(episodes)].states[0]]
        done = np.arange(len(episode.actions)) == len(episode.actions) - 1
        held.append(
            {
                "observations": _image(np.array(seen), 3, 64, 64).astype(np.float32),
                "actions": episode.actions[:, None],
                "rewards": episode.states[1:, None].astype(np.float32),
                "dones": done,
            }
        )
    sources_gen_dgrl.pack(folder, held)
    following = [int(episodes[(place + 1) % len(episodes)].states[0]) for place in range(len(episodes))]
    found = [steps_of(episode) for episode in episodes]
    return [[*steps[:-1], steps[-1]._replace(next_state=state)] for steps, state in zip(found, following, strict=True)]


# ---------------------------------------------------------------- DQN Replay


class _Ring:
    """Dopamine's `OutOfGraphReplayBuffer`, with a stack of four frames."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.add_count = capacity, 0
        self.steps: list[Step | None] = [None] * capacity  # None: padding, or never written
        self.store = {
            "observation": np.zeros((capacity, 84, 84), np.uint8),
            "action": np.zeros(capacity, np.int32),
            "reward": np.zeros(capacity, np.float32),
            "terminal": np.zeros(capacity, np.uint8),
        }

    def add(self, step: Step) -> None:
        if self.add_count == 0 or self.store["terminal"][self.add_count % self.capacity - 1]:
            for _ in range(3):
                self._add(None, np.zeros((84, 84), np.uint8), 0, 0, 0)
        self._add(step, _image(np.array([step.state]), 84, 84)[0], step.action, step.reward, step.end == "terminated")

    def _add(self, step: Step | None, *values: Any) -> None:
        at = self.add_count % self.capacity
        self.steps[at] = step
        for name, value in zip(self.store, values, strict=True):
            self.store[name][at] = value
        self.add_count += 1

    def save(self, folder: Path, number: int) -> list[list[Step]]:
        """Write a checkpoint. Returns the steps in its arrays, with an end where the next one of the file is another."""
        held = {**self.store, "add_count": np.array(self.add_count), "invalid_range": np.arange(5)}
        for name, array in held.items():
            sources_atari_dqn.write(folder, name, number, array)
        trajectories: list[list[Step]] = [[]]
        for at, step in enumerate(self.steps):
            if step is not None:
                trajectories[-1].append(step)
                last = at + 1 in (self.add_count % self.capacity, self.capacity)
                if last and not step.end:
                    trajectories[-1][-1] = step._replace(next_state=0, end="truncated")
                if step.end or last:
                    trajectories.append([])
        return [each for each in trajectories if each]


def atari_dqn(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """A log at each time that the ring is full, as the published data; the last one with the cursor in the middle."""
    ring, expected, logs = _Ring(16), [], 0
    for episode in episodes:
        for step in steps_of(episode, knows_last=False, end="terminated"):
            before = ring.add_count // ring.capacity
            ring.add(step)
            if ring.add_count // ring.capacity > before and ring.add_count % ring.capacity == 0:
                expected += ring.save(folder, logs)
                logs += 1
    return [*expected, *ring.save(folder, logs)]


def atari_dqn_not_full(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """A ring that was never full: most of it was not written."""
    ring = _Ring(256)
    for episode in episodes:
        for step in steps_of(episode, knows_last=False, end="terminated"):
            ring.add(step)
    return ring.save(folder, 0)


# ---------------------------------------------------------------- Open X


def openx(folder: Path, episodes: Sequence[Episode]) -> list[list[Step]]:
    """Steps of RLDS: observation, the action taken, its reward. The state behind the last one is not stored."""
    members = []
    for place, episode in enumerate(episodes):
        last = len(episode.actions) - 1
        steps = [
            {
                "observation": {"state": np.float32([state])},
                "action": np.float32([action]),
                "reward": float(reward),
                "is_first": t == 0,
                "is_last": t == last and bool(episode.end),
                "is_terminal": t == last and episode.end == "terminated",
            }
            for t, (state, action, reward) in enumerate(
                zip(episode.states[:-1].tolist(), episode.actions.tolist(), episode.states[1:].tolist(), strict=True)
            )
        ]
        members.append((f"{sources_openx.DATASET}_{place:03d}", steps))
        members.append((f"{sources_openx.DATASET}_{place:03d}_empty", []))
    half = len(members) // 2
    for number, some in enumerate((members[:half], members[half:])):
        sources_openx.archive(folder / f"{sources_openx.DATASET}_{number:05d}.tar", some)
    return [steps_of(episode, knows_last=False) for episode in episodes]


# ---------------------------------------------------------------- Minari


def minari(folder: Path, episodes: Sequence[Episode], data_format: str) -> list[list[Step]]:
    buffers = []
    for place, episode in enumerate(episodes):
        steps = len(episode.actions)
        last = np.arange(steps) == steps - 1
        buffers.append(
            EpisodeBuffer(
                place,
                seed=place,
                observations=episode.states[:, None].astype(np.float64),
                actions=episode.actions,
                rewards=episode.states[1:].astype(np.float64),
                terminations=last & (episode.end == "terminated"),
                truncations=last & (episode.end == "truncated"),
                infos={"state": episode.states},
            )
        )
    box = Box(-np.inf, np.inf, (1,), np.float64)
    sources_minari.write(folder, "toy/law-v0", buffers, box, Discrete(3), data_format=data_format)
    return [steps_of(episode) for episode in episodes]


_VD4RL = partial(datasets.VD4RLExperienceReplay, "main/walker_walk/random/64px", totensor=False)
_D4RL = partial(datasets.D4RLExperienceReplay, "hopper-medium-v2")
_ROBOSET = partial(datasets.RobosetExperienceReplay, "DAPG(expert)/door_v2d-v1")
_ATARI = partial(datasets.AtariDQNExperienceReplay, "Pong/5")
_OPENX = partial(datasets.OpenXExperienceReplay, sources_openx.DATASET, streaming=False, download=True)
_MINARI = partial(datasets.MinariExperienceReplay, "toy/law-v0")
_BOTH: tuple[End, ...] = ("terminated", "truncated")
_ANY: tuple[End, ...] = (*_BOTH, "")

FORMATS = [
    Format("vd4rl", vd4rl_episodes, _VD4RL, _ANY, _of_image, "pixels"),
    Format("vd4rl_old", vd4rl_old_episodes, _VD4RL, _BOTH, _of_image, "pixels"),
    Format("vd4rl_shards", vd4rl_shards, _VD4RL, _BOTH, _of_image, "pixels"),
    Format("d4rl", d4rl, _D4RL, _BOTH, _of_vector),
    Format("d4rl_ended", d4rl_ended, _D4RL, _BOTH, _of_vector),
    Format("d4rl_of_terminals", d4rl_of_terminals, _D4RL, ("terminated",), _of_vector),
    Format("d4rl_with_next", d4rl_with_next, _D4RL, _BOTH, _of_vector),
    Format("roboset", roboset, _ROBOSET, ("terminated", ""), _of_vector),
    Format("roboset_without_last_state", roboset_without_last_state, _ROBOSET, ("terminated", ""), _of_vector),
    Format(
        "gen_dgrl",
        gen_dgrl,
        partial(datasets.GenDGRLExperienceReplay, "bigfish-level_1_E"),
        ("terminated",),
        _of_image,
    ),
    Format("atari_dqn", atari_dqn, _ATARI, ("terminated",), _of_image),
    Format("atari_dqn_not_full", atari_dqn_not_full, _ATARI, ("terminated",), _of_image),
    Format("openx", openx, _OPENX, _ANY, _of_vector, ("observation", "state"), splits=False),
    *(
        Format(f"minari_{name}", partial(minari, data_format=name), _MINARI, _ANY, _of_vector)
        for name in ("hdf5", "arrow", "parquet")
    ),
]

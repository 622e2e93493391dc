"""Hindsight experience replay (arXiv:1707.01495): replaces goals of transitions by goals that were reached."""

import enum
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.buffers.rate_limiter import RateLimiter
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.request import Request
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data import randomness
from interop.data.keys import as_path, checked_key
from interop.data.trajectory_keys import TrajectoryKeys
from interop.host.trajectories import lanes_of
from interop.sample_units import SampleUnit, expanding
from interop.samplers import ConsumingSampler, Sampler
from interop.samplers.boundary_keys import BoundaryKeys, NoMarkersError
from interop.samplers.stored_trajectories import StoredTrajectories
from interop.storages import Storage, columns
from interop.transforms import Transform
from interop.writers import Writer

_TAG = 0x4845  # separates the draws of goals from the draws of items with the same key


class HindsightStrategy(enum.StrEnum):
    """Which reached goal a transition gets. Each is equal to its value, a text."""

    FUTURE = "future"
    """One that this transition or a later one of the episode reaches, each equally likely."""
    FINAL = "final"
    """The one that the last stored transition of the episode reaches."""
    EPISODE = "episode"
    """Any that a stored transition of the episode reaches."""
    RANDOM = "random"
    """Any that a stored transition reaches."""


class HERReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that relabels a part of each batch with goals that were reached, and their rewards.

    The first `int(batch_size * her_ratio)` transitions of a batch get the goal that the strategy chooses, under `goal_key`
    and, if it is stored, ("next", *goal_key); and the reward that `reward_fn` returns. A transition reaches the goal under
    ("next", *achieved_goal_key), or under `achieved_goal_key` if the former is not stored.

    Episodes are those of `SliceSampler`: all stored markers count, the rows of interleaved episodes are separate, and each
    lane of a storage with several item dims has its own. They end at the newest transition, too, and begin where the ring
    has overwritten what was before. A draw costs O(batch * log episodes), and looks once at the rows written since the last
    one; after a write O(stored rows) where flat rows are interleaved, which `ndim=2` avoids. Edits of stored ends count if
    they are made by `set_`, `update_` or `rb[...] =`, not through a view. Transforms see relabelled batches.

    With a sampler of slices the first `int(slices * her_ratio)` slices are relabelled, and all steps of one get the same
    goal: "future" chooses among what the last step of the slice or a later one reaches.

    Args:
        reward_fn: takes a tensordict [n] of relabelled transitions, returns rewards, [n] or [n, 1]. It may also return a
            pair: rewards, and whether each transition is terminal for the new goal. Then "terminated" and "done" beside
            `end_key` are set; a truncated transition stays done. Otherwise they stay as stored.
        her_ratio: the part that is relabelled, from 0 to 1.
        strategy: a `HindsightStrategy` or its value: "future", "final", "episode" or "random".
        goal_key, achieved_goal_key, reward_key: entries of the items; KeyError at the draw if one is missing.
        end_key: an entry that is true at ends; "terminated" and "truncated" beside it count, too. KeyError at the draw if
            no marker at all is stored.
        traj_key: an entry of episode ids, besides the default ones of `SliceSampler`.
        only_named_keys: only `end_key`, those beside it, and `traj_key` count.
        sampler: draws the transitions.
        sample_unit: only None or a `Transition`.

    The other arguments are those of `TensorDictReplayBuffer`.
    """

    def __init__(
        self,
        reward_fn: Callable[[TensorDictBase], Any],
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | str = "future",
        goal_key: NestedKey | None = "desired_goal",
        achieved_goal_key: NestedKey | None = "achieved_goal",
        reward_key: NestedKey | None = ("next", "reward"),
        end_key: NestedKey | None = ("next", "done"),
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        storage: Storage | Callable[[], Storage] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Transform | Callable[[Any], Any]] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: StorageCheckpointerBase | type[StorageCheckpointerBase] | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        limiter: RateLimiter | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        transport: Literal["auto", "direct", "ray"] = "auto",
        transport_options: Mapping[str, Any] | None = None,
        priority_key: NestedKey | None = "td_error",
    ) -> None:
        if not callable(reward_fn):
            raise TypeError(f"reward_fn must be callable, got {type(reward_fn).__name__}")
        if not 0 <= her_ratio <= 1:
            raise ValueError(f"her_ratio must be in [0, 1], got {her_ratio}")
        if expanding(sample_unit) is not None:
            raise ValueError("sample_unit and hindsight exclude each other: a window would have several goals")
        self.reward_fn = reward_fn
        self.her_ratio = float(her_ratio)
        self.strategy = HindsightStrategy(strategy)
        self.goal_key = _path("goal_key", goal_key)
        self.achieved_goal_key = _path("achieved_goal_key", achieved_goal_key)
        self.reward_key = _path("reward_key", reward_key)
        self.end_key = _path("end_key", end_key)
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)
        self._cached_entries: tuple[Any, _Entries] | None = None  # a layout and its entries
        super().__init__(
            sampler=sampler,
            storage=storage,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            transform_factory=transform_factory,
            batch_size=batch_size,
            dim_extend=dim_extend,
            checkpointer=checkpointer,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            consume_after_n_samples=consume_after_n_samples,
            limiter=limiter,
            service_backend=service_backend,
            service_backend_options=service_backend_options,
            transport=transport,
            transport_options=transport_options,
            priority_key=priority_key,
        )

    def _check_fit(self, storage: Storage, sampler: Sampler, writer: Writer) -> None:
        super()._check_fit(storage, sampler, writer)
        if not writer.keeps_order and self.strategy is not HindsightStrategy.RANDOM:
            raise TypeError(
                f"episodes follow the order of writing, which a {type(writer).__name__} does not keep: use a "
                'RoundRobinWriter, or strategy="random"'
            )
        if isinstance(sampler, ConsumingSampler):
            raise ValueError("hindsight and consuming exclude each other: episodes would not stay together in the ring")

    def _trajectory_keys(self) -> TrajectoryKeys:
        ends = list(dict.fromkeys((self.end_key, *self._flags()[1:])))
        return TrajectoryKeys.chosen(self.traj_key, ends, self.only_named_keys)

    def _over(self, storage: Storage, sampler: Callable[[], Sampler] | None) -> ReplayBuffer:
        goals = {
            "her_ratio": self.her_ratio,
            "strategy": self.strategy,
            "goal_key": self.goal_key,
            "achieved_goal_key": self.achieved_goal_key,
            "reward_key": self.reward_key,
            "end_key": self.end_key,
            "traj_key": self.traj_key,
            "only_named_keys": self.only_named_keys,
        }
        return HERReplayBuffer(self.reward_fn, storage=storage, sampler=sampler, **goals, **self._to_read())

    def _plan(self, batch_size: int, key: np.ndarray) -> list[Request]:
        if len(self._storage):
            self._entries()  # refuses before anything is drawn
        return super()._plan(batch_size, key)

    _revises = True

    def _revision(self, info: dict[Any, Any], key: np.ndarray) -> Callable[[Any], Any] | None:
        first = super()._revision(info, key)
        drawn = info["index"] if isinstance(info["index"], tuple) else (info["index"],)
        coordinates = [
            (column.cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)).astype(np.int64, copy=False)
            for column in drawn
        ]
        lengths = self._sampler.draws.slice_lengths()  # steps that are drawn together have one goal
        units = len(coordinates[0]) if lengths is None else len(lengths)
        count = math.floor(units * self.her_ratio + 1e-9)  # 0.29 of 100 are 29
        if count == 0:
            return first
        ends = slice(count) if lengths is None else lengths[:count].cumsum() - 1
        entries = self._entries()
        shares = randomness.generator_of(key ^ np.uint32(_TAG)).random(count)
        slots = self._goal_slots([column[ends] for column in coordinates], entries.episodes, shares)
        goals = columns.read(
            self._storage, entries.reached, slots if lengths is None else slots.repeat(lengths[:count])
        )
        return lambda data: self._relabelled(data if first is None else first(data), goals, entries)

    def _goal_slots(self, drawn: list[np.ndarray], episodes: StoredTrajectories, shares: np.ndarray) -> np.ndarray:
        """The flat slots of the transitions that reach the goals of drawn ones; `shares`, of [0, 1), choose them.

        `drawn` has the coordinates of the drawn transitions, of slices those of the last ones.
        """
        if self.strategy is HindsightStrategy.RANDOM:
            return (shares * len(self._storage)).astype(np.int64)
        index = episodes.of(self._storage)
        lane = lanes_of(drawn, self._storage.shape or ())
        times, first, last = index.located(drawn[0], lane)
        if self.strategy is HindsightStrategy.FINAL:
            return index.slots_at(last, lane)
        if self.strategy is HindsightStrategy.EPISODE:
            times = first
        return index.slots_at(times + (shares * (last - times + 1)).astype(np.int64), lane)

    def _relabelled(self, data: Any, goals: Tensor, entries: "_Entries") -> Any:
        """The batch with goals for its first transitions, and the rewards and ends that follow from them."""
        if not isinstance(data, TensorDictBase):
            raise RuntimeError(f"goals can be set in tensordicts, collate_fn made a {type(data).__name__}")
        count = goals.shape[0]
        for key in entries.goals:
            _put(data, key, goals)
        returned = self.reward_fn(data[:count])
        rewards, terminal = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        rewards = _fitting("rewards", rewards, data.get(self.reward_key)[:count])
        if terminal is not None:
            self._set_ends(data, terminal, count, entries)
        _put(data, self.reward_key, rewards)
        return data

    def _set_ends(self, data: TensorDictBase, terminal: Any, count: int, entries: "_Entries") -> None:
        """Set the flags of relabelled transitions; truncated ones stay done."""
        keys = self._flags()
        done, terminated, truncated = (data.get(key)[:count] if key in entries.flags else None for key in keys)
        flags = done if terminated is None else terminated
        if flags is None:
            raise KeyError(f"reward_fn says what is terminal, but neither {keys[0]} nor {keys[1]} is stored")
        now = _fitting("terminated", terminal, flags)
        if done is not None:
            if truncated is None:
                truncated = torch.zeros_like(done) if terminated is None else done & ~terminated
            _put(data, keys[0], now.reshape(done.shape) | truncated.reshape(done.shape))
        if terminated is not None:
            _put(data, keys[1], now)

    def _flags(self) -> list[tuple[str, ...]]:
        return [(*self.end_key[:-1], name) for name in ("done", "terminated", "truncated")]

    def _entries(self) -> "_Entries":
        """The entries that hindsight uses; cached for a layout. KeyError for missing ones."""
        layout = self._storage.contents.layout
        if self._cached_entries is None or layout is None or self._cached_entries[0] is not layout:
            self._cached_entries = layout, self._find_entries()
        return self._cached_entries[1]

    def _find_entries(self) -> "_Entries":
        stored = partial(columns.has, self._storage)
        reached = _next(self.achieved_goal_key)
        needed = {"goal_key": self.goal_key, "reward_key": self.reward_key}
        if not stored(reached):
            reached = needed["achieved_goal_key"] = self.achieved_goal_key
        missing = [f"{name}={key!r}" for name, key in needed.items() if not stored(key)]
        flags = [key for key in self._flags() if stored(key)]
        episodes = StoredTrajectories(BoundaryKeys(self._trajectory_keys()))
        if self._cached_entries is not None and self._cached_entries[1].episodes.keys.keys == episodes.keys.keys:
            episodes = self._cached_entries[1].episodes  # it knows the rows
        try:
            BoundaryKeys(episodes.keys.keys).find(self._storage)
        except NoMarkersError:
            if self.strategy is not HindsightStrategy.RANDOM:
                missing.append(f"end_key={self.end_key!r}, 'terminated' beside it, or traj_key")
        if missing:
            raise KeyError(f"stored items lack {', '.join(missing)}: hindsight needs these")
        goals = [key for key in dict.fromkeys((self.goal_key, _next(self.goal_key))) if stored(key)]
        like = columns.read(self._storage, reached, np.zeros(1, np.int64))
        for key in goals:
            goal = columns.read(self._storage, key, np.zeros(1, np.int64))
            if (goal.shape, goal.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"{key} holds {list(goal.shape[1:])} of {goal.dtype}, {reached} {list(like.shape[1:])} of "
                    f"{like.dtype}: a goal must look like what can be reached"
                )
        return _Entries(goals, reached, flags, episodes)

    def _copied_attributes(self) -> dict[str, Any]:
        return {**super()._copied_attributes(), "_cached_entries": None}


class _Entries(NamedTuple):
    """Entries of items, and the episodes that they delimit."""

    goals: list[tuple[str, ...]]
    reached: tuple[str, ...]
    flags: list[tuple[str, ...]]
    episodes: StoredTrajectories


def _next(key: tuple[str, ...]) -> tuple[str, ...]:
    """The path of an entry of the next state."""
    return key if key[0] == "next" else ("next", *key)


def _path(name: str, key: object) -> tuple[str, ...]:
    path = as_path(key)
    if not (path and all(isinstance(step, str) for step in path)):
        raise TypeError(f"{name} must be a name or a tuple of names, got {key!r}")
    return path


def _put(data: TensorDictBase, key: tuple[str, ...], values: Tensor) -> None:
    """Set an entry of the first rows."""
    entry = data.get(key)
    entry[: values.shape[0]] = values.to(entry.device)
    if data.get(key) is not entry:  # a copy, as of a lazy stack
        data.set(key, entry)


def _fitting(name: str, value: Any, stored: Tensor) -> Tensor:
    """A result of `reward_fn` in the shape and dtype of the stored entry. TypeError or ValueError if it does not fit."""
    if not isinstance(value, Tensor):
        raise TypeError(f"reward_fn must return {name} as a tensor, got {type(value).__name__}")
    count = stored.shape[0]
    if value.shape not in (stored.shape, (count,), (count, 1)) or value.numel() != stored.numel():
        raise ValueError(
            f"reward_fn returned {name} of shape {list(value.shape)} for {count} items of {list(stored.shape)}"
        )
    if not torch.can_cast(value.dtype, stored.dtype):
        raise TypeError(f"reward_fn returned {name} of {value.dtype}, stored are {stored.dtype}")
    return value.detach().to(stored.device, stored.dtype).reshape(stored.shape)

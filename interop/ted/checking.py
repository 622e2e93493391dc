"""Checks that a tensordict has the TorchRL episode data format (TED), and lists every violated rule."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path
from interop.ted.flattening import REWARD_KEYS, KeyPath, Names, is_below, shown
from interop.ted.row_values import first_apart, first_set, flags
from interop.trajectories import DEFAULT_DONE_KEYS

_OBSERVATIONS = ("observation", "obs", "pixels", "state")


@dataclasses.dataclass(frozen=True)
class Violation:
    """A rule of the format that data violates."""

    key: KeyPath
    """The entry."""
    row: tuple[int, ...] | None
    """The first row that violates it, along the batch dims; None for the entry as a whole."""
    what: str
    """What is wrong."""
    remedy: str
    """What to do about it."""

    def __str__(self) -> str:
        where = "" if self.row is None else f", first in row {self.row[0] if len(self.row) == 1 else self.row}"
        return f"{shown(self.key)} {self.what}{where}: {self.remedy}"


class TEDError(ValueError):
    """Data is not TED data. The text has a line for each violated rule."""

    violations: tuple[Violation, ...]
    """The same, one by one."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("this is not TED data:\n" + "\n".join(f"- {violation}" for violation in self.violations))


def check_ted(
    data: TensorDictBase,
    *,
    done_key: NestedKey | None = ("next", "done"),
    done_keys: Iterable[Any] = DEFAULT_DONE_KEYS,
    reward_keys: Iterable[Any] = REWARD_KEYS,
    observation_keys: Iterable[Any] | None = None,
    time_dim: int = -1,
    auto_reset: bool = True,
    strict: bool = False,
) -> None:
    """Raise a `TEDError` that lists every rule of the TorchRL episode data format that data violates.

    The root has the entries from before a step, "next" those from after it: the same observations, rewards, and done flags
    with done = terminated | truncated. Within a trajectory the observations of "next" equal those of the next row of the
    root, bit for bit. In TED data only `done_key` ends trajectories; ids and other entries are data. So steps of interleaved
    trajectories are no TED data: `split_trajectories` puts those of each together. One pass over the data, a piece at a
    time.

    Args:
        data: [*batch, time]. The last time of each batch row ends a trajectory: rows of a ring must be in order.
        done_key: the flag that ends trajectories, one value a row.
        done_keys: done flags, of the root and below "next".
        reward_keys: rewards below "next".
        observation_keys: entries that the root and "next" both must have. If None, these are entries of "next" that are no
            done flags or rewards, and entries of the root with a usual name.
        time_dim: the dim of time among the batch dims.
        auto_reset: whether a reset comes right after each end, so that no step begins in a state that is done.
        strict: done flags and rewards that do not have the shape [*batch, ..., 1] are violations too.
    """
    if not is_tensor_collection(data) or not isinstance(data, TensorDictBase):
        raise TypeError(f"check_ted takes a tensordict, got {type(data).__name__}")
    if not -data.ndim <= time_dim < data.ndim:
        raise ValueError(f"time_dim must be a batch dim of {list(data.shape)}, got {time_dim}")
    observations = None if observation_keys is None else Names.of((), observation_keys).reward
    rules = _Rules(data, Names.of(done_keys, reward_keys), as_path(done_key), time_dim % data.ndim, observations)
    violations = [*rules.structure(), *rules.done_flags(auto_reset), *rules.observations()]
    violations += rules.last_dims() if strict else ()
    if violations:
        raise TEDError(violations)


class _Rules:
    """The rules by subject; each method yields the violations of some."""

    def __init__(
        self,
        data: TensorDictBase,
        names: Names,
        done_key: KeyPath,
        time_dim: int,
        observations: tuple[KeyPath, ...] | None,
    ) -> None:
        self._below = data.get("next", None)
        self._shape = data.shape
        self._time = time_dim
        self._names = names
        self._done_key = done_key
        self._observations = observations
        leaves = ((as_path(key), value) for key, value in data.items(True, True) if isinstance(value, Tensor))
        self._leaves = {path: value.detach().as_subclass(Tensor) for path, value in leaves}
        self._next = {path[1:]: leaf for path, leaf in self._leaves.items() if is_below(path)}
        self._root = {path: leaf for path, leaf in self._leaves.items() if path[0] != "next"}

    def structure(self) -> Iterator[Violation]:
        """Entries that are missing or misplaced."""
        for path in self._names.reward:
            if path in self._root:
                move = f"a reward is the outcome of a step, move it to {shown(('next', *path))}"
                yield Violation(path, None, "is in the root", move)
        if not isinstance(self._below, TensorDictBase):
            fault = "is missing" if self._below is None else "is no tensordict"
            yield Violation(("next",), None, fault, "put the observations, rewards and done flags after a step there")
            return
        if self._below.batch_size != self._shape:
            fault = f"has the batch size {list(self._below.batch_size)}, the root {list(self._shape)}"
            yield Violation(("next",), None, fault, "set its batch_size to that of the root")
        done = self._leaves.get(self._done_key)
        if done is None:
            ends = "say where trajectories end: terminated | truncated, [*batch, 1]"
            yield Violation(self._done_key, None, "is missing", ends)
        elif done.numel() != self._shape.numel():
            fault = f"has the shape {list(done.shape)} for rows of {list(self._shape)}"
            yield Violation(self._done_key, None, fault, "pass a done_key with one value a row, for all agents")
        for path in self._next:
            if path not in self._root and path not in self._names and path not in (self._observations or ()):
                save = "save the observation before the step too, or name it in done_keys or reward_keys"
                yield Violation(("next", *path), None, f"is there, and the root has no {shown(path)}", save)
        usual = [path for path in self._root if path[-1] in _OBSERVATIONS]
        for path in usual if self._observations is None else self._observations:
            for key in (path, ("next", *path)):
                if key not in self._leaves:
                    yield Violation(key, None, "is missing", "the root and 'next' both have each observation")

    def done_flags(self, auto_reset: bool) -> Iterator[Violation]:
        """Done flags that contradict one another, and those of the root that are set."""
        for path in (*self._names.done, *(("next", *name) for name in self._names.done)):
            if path[-1] == "done" and path in self._leaves:
                parts = [(*path[:-1], name) for name in ("terminated", "truncated")]
                yield from self._contradicted(path, [part for part in parts if part in self._leaves])
        for path in self._names.done if auto_reset else ():
            leaf = self._root.get(path)
            if leaf is not None and self._covers(leaf) and (row := first_set(self._rows(leaf))) is not None:
                clear = "with automatic resets no step begins in a done state: clear the flag, or pass auto_reset=False"
                yield self._at(path, row, "is set in the root", clear)

    def _contradicted(self, key: KeyPath, parts: list[KeyPath]) -> Iterator[Violation]:
        """Rows where done is not terminated | truncated or, if only one of them is there, not set with it."""
        done = self._leaves[key]
        for part in parts:
            shape = self._leaves[part].shape
            if shape != done.shape:
                fault = f"has the shape {list(shape)}, {shown(key)} {list(done.shape)}"
                yield Violation(part, None, fault, "give done flags one shape")
                return
        if not parts or not done.numel() or not self._covers(done):
            return
        either = np.logical_or.reduce([flags(self._leaves[part]).numpy() for part in parts])
        ends = flags(done).numpy()
        rows = (ends != either if len(parts) == 2 else either & ~ends).reshape(self._shape.numel(), -1).any(1)
        if rows.any():
            names = " | ".join(part[-1] for part in parts)
            fault = f"is not {names}" if len(parts) == 2 else f"is not set with {names}"
            yield self._at(key, int(rows.argmax()), fault, f"done is terminated | truncated: set it to {names}")

    def observations(self) -> Iterator[Violation]:
        """Observations of "next" that differ from those of the next row."""
        done = self._leaves.get(self._done_key)
        every = self._shape.numel()
        stops = None
        if done is not None and done.numel() == every > 0:
            ends = flags(done).numpy().reshape(self._shape).copy()
            ends[(slice(None),) * self._time + (-1,)] = True
            stops = np.flatnonzero(ends)
        observations: Iterable[KeyPath]
        if self._observations is None:
            observations = (path for path in self._next if path not in self._names)
        else:
            observations = self._observations
        for path in observations:
            if path not in self._root or path not in self._next:
                continue
            key = ("next", *path)
            before = self._root[path]
            after = self._next[path]
            if (before.dtype, before.shape) != (after.dtype, after.shape):
                fault = f"is {after.dtype} {list(after.shape)}, {shown(path)} {before.dtype} {list(before.shape)}"
                yield Violation(key, None, fault, "give both one dtype and shape")
            elif stops is not None and self._covers(before):
                behind = self._shape[self._time + 1 :].numel()
                row = first_apart(self._rows(after)[: every - behind], self._rows(before)[behind:], stops)
                if row is not None:
                    fault = f"is not the {shown(path)} of the row that follows, and no trajectory ends there"
                    keep = f"set {shown(self._done_key)} where trajectories end, or keep rows in the order of time"
                    yield self._at(key, row, fault, keep)

    def last_dims(self) -> Iterator[Violation]:
        """Done flags and rewards without a last dim of one."""
        for path, leaf in self._leaves.items():
            name = path[1:] if is_below(path) else path
            if name in self._names and not (leaf.ndim > len(self._shape) and leaf.shape[-1] == 1):
                fault = f"has the shape {list(leaf.shape)} for rows of {list(self._shape)}"
                yield Violation(path, None, fault, "done flags and rewards have a last dim of one: unsqueeze(-1)")

    def _covers(self, leaf: Tensor) -> bool:
        """Whether an entry has the rows of the data."""
        return leaf.shape[: len(self._shape)] == self._shape

    def _rows(self, leaf: Tensor) -> Tensor:
        return leaf.flatten(0, len(self._shape) - 1)

    def _at(self, key: KeyPath, row: int, fault: str, remedy: str) -> Violation:
        return Violation(key, tuple(map(int, np.unravel_index(row, self._shape))), fault, remedy)

"""Whether a tensordict is TED data, and everything that is wrong with it if not."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.data.keys import as_path
from interop.ted.comparing import first_apart, first_set
from interop.ted.entries import REWARD_KEYS, Leaves, Names, Path, shown
from interop.ted.row_values import flags
from interop.trajectories import DEFAULT_DONE_KEYS

_OBSERVATIONS = ("observation", "obs", "pixels", "state")


@dataclasses.dataclass(frozen=True)
class Violation:
    """One rule of the format that data does not keep."""

    key: Path
    """The entry."""
    row: tuple[int, ...] | None
    """The first row where it does not, along the batch dims; None for the entry as a whole."""
    what: str
    """What is wrong."""
    remedy: str
    """What to do about it."""

    def __str__(self) -> str:
        where = "" if self.row is None else f", first in row {self.row[0] if len(self.row) == 1 else self.row}"
        return f"{shown(self.key)} {self.what}{where}: {self.remedy}"


class TEDError(ValueError):
    """Data is not TED data. The text has a line for each rule that it does not keep."""

    violations: tuple[Violation, ...]
    """The same, one by one."""

    def __init__(self, violations: Iterable[Violation], notes: Iterable[Violation] = ()) -> None:
        self.violations = tuple(violations)
        lines = [f"- {each}" for each in self.violations] + [f"- a note: {each}" for each in notes]
        super().__init__("this is not TED data:\n" + "\n".join(lines))


def check_ted(
    data: TensorDictBase,
    *,
    done_key: Any = ("next", "done"),
    done_keys: Iterable[Any] = DEFAULT_DONE_KEYS,
    reward_keys: Iterable[Any] = REWARD_KEYS,
    observation_keys: Iterable[Any] | None = None,
    time_dim: int = -1,
    auto_reset: bool = True,
    strict: bool = False,
) -> None:
    """`TEDError` with all that is wrong with data that should be in the TorchRL episode data format.

    The root has what was known before a step, "next" what came of it: the same observations, rewards, and done flags with
    done = terminated | truncated. Within a trajectory the observations of "next" are, bit for bit, those of the root a time
    later. One pass over the data, a piece at a time.

    Args:
        data: [*batch, time]. The last time of each batch row ends a trajectory: rows of a ring must be in order.
        done_key: what says where trajectories end, one value a row.
        done_keys: done flags, of the root and below "next".
        reward_keys: rewards below "next".
        observation_keys: what the root and "next" both must have. If None, these are entries of "next" that are no done
            flags or rewards, and entries of the root with a usual name.
        time_dim: the dim of time among the batch dims.
        auto_reset: whether a reset comes right after each end, so that no step begins in a state that is done.
        strict: also done flags and rewards that do not have the shape [*batch, ..., 1] are wrong; otherwise they are but
            mentioned.
    """
    if not is_tensor_collection(data) or not isinstance(data, TensorDictBase):
        raise TypeError(f"check_ted takes a tensordict, got {type(data).__name__}")
    if not -data.ndim <= time_dim < data.ndim:
        raise ValueError(f"time_dim must be a batch dim of {list(data.shape)}, got {time_dim}")
    wanted = None if observation_keys is None else Names.of((), observation_keys).reward
    rules = _Rules(data, Names.of(done_keys, reward_keys), as_path(done_key), time_dim % data.ndim)
    found = [*rules.of_structure(wanted), *rules.of_flags(auto_reset), *rules.of_observations(wanted)]
    notes = list(rules.of_shapes())
    if strict:
        found, notes = found + notes, []
    if found:
        raise TEDError(found, notes)


class _Rules:
    """The rules, by what they are about; each gives what does not keep it."""

    def __init__(self, data: TensorDictBase, names: Names, done_key: Path, time_dim: int) -> None:
        self._data, self._names, self._done_key = data, names, done_key
        self._shape, self._time = data.shape, time_dim
        self._leaves: Leaves = {
            as_path(key): value.detach().as_subclass(Tensor)
            for key, value in data.items(True, True)
            if isinstance(value, Tensor)
        }
        self._next = {path[1:]: leaf for path, leaf in self._leaves.items() if path[0] == "next" and len(path) > 1}
        self._root = {path: leaf for path, leaf in self._leaves.items() if path[0] != "next"}

    def of_structure(self, wanted: tuple[Path, ...] | None) -> Iterator[Violation]:
        """What is missing or in a wrong place."""
        below = self._data.get("next", None)
        for path in self._names.reward:
            if path in self._root:
                yield Violation(path, None, "is in the root", f"a reward comes of a step, move it to {_below(path)}")
        if not isinstance(below, TensorDictBase):
            yield Violation(
                ("next",),
                None,
                "is missing" if below is None else "is no tensordict",
                "put there what each step led to: observations, rewards and done flags",
            )
            return
        if below.batch_size != self._shape:
            yield Violation(
                ("next",),
                None,
                f"has the batch size {list(below.batch_size)}, the root {list(self._shape)}",
                "set its batch_size to that of the root, each row of which has one of 'next'",
            )
        if self._done_key not in self._leaves:
            yield Violation(
                self._done_key, None, "is missing", "say where trajectories end: terminated | truncated, [*batch, 1]"
            )
        elif self._done() is None:
            yield Violation(
                self._done_key,
                None,
                f"has the shape {list(self._leaves[self._done_key].shape)} for rows of {list(self._shape)}",
                "a trajectory ends with a row for all agents: pass a done_key with one value a row",
            )
        for path in self._next:
            if path not in self._root and path not in self._names and (wanted is None or path not in wanted):
                yield Violation(
                    ("next", *path),
                    None,
                    f"is there, and the root has no {shown(path)}",
                    "save what was seen before the step too, or name it in done_keys or reward_keys",
                )
        for path in wanted if wanted is not None else self._usual():
            for here, held in ((path, self._root), (("next", *path), self._next)):
                if path not in held:
                    yield Violation(here, None, "is missing", "the root and 'next' both have each observation")

    def _usual(self) -> list[Path]:
        """Entries of the root that "next" does not have, and that are observations by their name."""
        return [path for path in self._root if path[-1] in _OBSERVATIONS and path not in self._next]

    def of_flags(self, auto_reset: bool) -> Iterator[Violation]:
        """What done flags contradict."""
        for level, held in (((), self._root), (("next",), self._next)):
            for path in self._names.done:
                if path[-1] != "done" or path not in held:
                    continue
                parts = [(*path[:-1], name) for name in ("terminated", "truncated") if (*path[:-1], name) in held]
                yield from self._contradicted((*level, *path), held[path], [(*level, *part) for part in parts])
        for path in self._names.done:
            row = first_set(self._rows(self._root[path])) if auto_reset and self._covers(self._root.get(path)) else None
            if row is not None:
                yield self._at(
                    path,
                    row,
                    "is set in the root",
                    "a step begins in a state that is not done, where resets are automatic: clear the flag, or pass "
                    "auto_reset=False",
                )

    def _contradicted(self, key: Path, done: Tensor, parts: list[Path]) -> Iterator[Violation]:
        """Where done is not terminated | truncated, or, if but one of them is there, not set with it."""
        either = None
        for part in parts:
            if self._leaves[part].shape != done.shape:
                yield Violation(
                    part,
                    None,
                    f"has the shape {list(self._leaves[part].shape)}, {shown(key)} {list(done.shape)}",
                    "give done flags one shape",
                )
                return
            flag = flags(self._leaves[part]).numpy()
            either = flag if either is None else either | flag
        if either is None or not done.numel() or not self._covers(done):
            return
        set_ = flags(done).numpy()
        wrong = set_ != either if len(parts) == 2 else either & ~set_
        rows = wrong.reshape(self._shape.numel(), -1).any(1)
        if rows.any():
            names = " | ".join(part[-1] for part in parts)
            what = f"is not {names}" if len(parts) == 2 else f"is not set with {names}"
            yield self._at(key, int(rows.argmax()), what, f"done is terminated | truncated: set it to {names}")

    def of_observations(self, wanted: tuple[Path, ...] | None) -> Iterator[Violation]:
        """Where an observation of "next" is not that of the root a time later."""
        done = self._done()
        if wanted is None:
            wanted = tuple(path for path in self._next if path not in self._names)
        for path in wanted:
            if path not in self._root or path not in self._next:
                continue
            key, before, after = ("next", *path), self._root[path], self._next[path]
            if before.dtype != after.dtype or before.shape != after.shape:
                yield Violation(
                    key,
                    None,
                    f"is {after.dtype} {list(after.shape)}, {shown(path)} {before.dtype} {list(before.shape)}",
                    "give both one dtype and shape",
                )
            elif done is not None and self._covers(before) and self._shape.numel():
                behind = self._shape[self._time + 1 :].numel()
                last = self._shape.numel() - behind
                row = first_apart(self._rows(after)[:last], self._rows(before)[behind:], done)
                if row is not None:
                    yield self._at(
                        key,
                        row,
                        f"is not the {shown(path)} of the row that follows, and no trajectory ends there",
                        f"set {shown(self._done_key)} where trajectories end, or keep rows in the order of time",
                    )

    def of_shapes(self) -> Iterator[Violation]:
        """Done flags and rewards without a last dim of one."""
        for path, leaf in self._leaves.items():
            name = path[1:] if path[0] == "next" and len(path) > 1 else path
            if name in self._names and not (leaf.ndim > len(self._shape) and leaf.shape[-1] == 1):
                yield Violation(
                    path,
                    None,
                    f"has the shape {list(leaf.shape)} for rows of {list(self._shape)}",
                    "done flags and rewards have a last dim of one: unsqueeze(-1)",
                )

    def _done(self) -> np.ndarray | None:
        """The rows with which trajectories end, and those of the last time; None where that is not told."""
        leaf = self._leaves.get(self._done_key)
        if leaf is None or leaf.numel() != self._shape.numel():
            return None
        ends = flags(leaf).numpy().reshape(self._shape).copy()
        if ends.size:
            ends[(slice(None),) * self._time + (-1,)] = True
        return np.flatnonzero(ends)

    def _covers(self, leaf: Tensor | None) -> bool:
        """Whether an entry is there and has the rows of the data."""
        return leaf is not None and leaf.shape[: len(self._shape)] == self._shape

    def _rows(self, leaf: Tensor) -> Tensor:
        return leaf.flatten(0, len(self._shape) - 1)

    def _at(self, key: Path, row: int, what: str, remedy: str) -> Violation:
        places = torch.unravel_index(torch.tensor(row, device="cpu"), self._shape)
        return Violation(key, tuple(int(each) for each in places), what, remedy)


def _below(path: Path) -> str:
    return shown(("next", *path))

"""A case: how an object is made, filled, saved and loaded, and what is seen of it then."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import torch

from interop import ListStorage, ReplayBuffer, ReplayBufferEnsemble
from interop.storages import Storage
from tests.interop.saved_before.plain import Seen, flat

T = TypeVar("T")
Rows: TypeAlias = Callable[[int, int], object]  # the first number, and how many: data as `extend` takes it


@dataclasses.dataclass(frozen=True)
class Case(Generic[T]):
    """What is saved, and seen again.

    Args:
        make: an empty object, as a program makes it that goes on with what was saved; of another seed.
        fill: brings a new object into the state that is saved.
        save: saves it at a path, as a file or a folder.
        load: loads what is at a path: into the empty object, or into a new one. Returns it.
        go_on: uses the object as a program would, and returns all that is seen; it may write into the folder.
        rounded: parts of the names of numbers that are not the same on every processor.
    """

    make: Callable[[], T]
    fill: Callable[[T], None]
    save: Callable[[T, Path], None]
    load: Callable[[T, Path], T]
    go_on: Callable[[T, Path], Seen]
    rounded: tuple[str, ...] = ()


# ------------------------------------------------------------------ ways to save


def through_folder(held: T, path: Path) -> None:
    held.dumps(path)  # type: ignore[attr-defined]


def from_folder(held: T, path: Path) -> T:
    held.loads(path)  # type: ignore[attr-defined]
    return held


def through_state(held: T, path: Path) -> None:
    torch.save(held.state_dict(), path)  # type: ignore[attr-defined]


def from_state(held: T, path: Path) -> T:
    held.load_state_dict(torch.load(path, weights_only=True))  # type: ignore[attr-defined]
    return held


# ------------------------------------------------------------------ what is seen of a buffer

SETTLED = ("priority_weight", "_weight")  # importance weights are powers


@dataclasses.dataclass(frozen=True)
class Use:
    """How a buffer goes on.

    Args:
        make: an empty buffer, to load what is saved once more.
        rows: the data that is written, and
        first: the number of the first new row.
        writes: whether the buffer takes rows.
        changes: whether a load changes parameters, of which it warns.
    """

    make: Callable[[], ReplayBuffer]
    rows: Rows
    first: int
    writes: bool = True
    changes: bool = False

    def __call__(self, buffer: ReplayBuffer, scratch: Path) -> Seen:
        seen = standing(buffer, "loaded")
        for turn in range(2):  # before a write: the same draws as without a save
            seen |= drawn(buffer, f"draw {turn}", turn)
        if self.writes:
            for turn, (first, count) in enumerate([(0, 1), (1, 4), (5, 6)]):
                write(buffer, self.rows(self.first + first, count))
                seen |= standing(buffer, f"write {turn}") | drawn(buffer, f"draw {turn + 2}", turn)
        return seen | saved_again(buffer, self.make(), scratch, self.changes)


def members_of(buffer: ReplayBuffer) -> list[ReplayBuffer]:
    return list(buffer.members) if isinstance(buffer, ReplayBufferEnsemble) else [buffer]


def write(buffer: ReplayBuffer, data: object) -> None:
    """Write data into the buffer, or into each member of an ensemble."""
    for member in members_of(buffer):
        member.extend(data)


def standing(buffer: ReplayBuffer, name: str) -> Seen:
    """Rows, lengths, cursor, count and priorities."""
    seen: Seen = {}
    for number, member in enumerate(members_of(buffer)):
        storage, sampler = member.storage, member.sampler
        writer = member.writer
        seen |= flat(
            {
                "length": len(member),
                "rows": _rows(storage),
                "stored": len(storage),
                "max size": storage.max_size,
                "cursor": getattr(writer, "cursor", None),
                "written": getattr(writer, "write_count", None),
                "generations": writer.generations_of(torch.arange(len(storage)))
                if getattr(writer, "tracks_generations", False)
                else None,
                "priorities": sampler.priorities if hasattr(sampler, "priorities") else None,
                "default priority": sampler.default_priority if hasattr(sampler, "priorities") else None,
                "ran out": sampler.ran_out,
                "transforms": dict(member.transform.state_dict()),
            },
            f"{name}/{number}",
        )
    return seen


def _rows(storage: Storage) -> object:
    if not len(storage):
        return None
    return list(storage) if isinstance(storage, ListStorage) else storage[:]


def drawn(buffer: ReplayBuffer, name: str, turn: int) -> Seen:
    """The next batch, with its info. Priorities of its items are updated, where they have some."""
    try:
        batch, info = buffer.sample(return_info=True)
    except (RuntimeError, KeyError) as error:  # nothing is left to be drawn
        return {f"{name}/error": [type(error).__name__, ""]}
    seen = flat({"batch": batch, "info": dict(info)}, name)
    if any(member.sampler.hooks.takes_priorities for member in members_of(buffer)):
        index = info["index"]
        count = len(index[0]) if isinstance(index, tuple) else index.numel() if torch.is_tensor(index) else 0
        if isinstance(buffer, ReplayBufferEnsemble):
            buffer.update_priority(index, 2.5 + turn)
        else:
            count = len(index) if torch.is_tensor(index) else count
            buffer.update_priority(index, (torch.arange(count) * 3 % 5 + 1 + turn).float() / 2)
    return seen


def saved_again(buffer: ReplayBuffer, other: ReplayBuffer, scratch: Path, changes: bool = False) -> Seen:
    """What a new buffer holds, and draws next, after the buffer was saved and loaded once more."""
    buffer.dumps(scratch / "again")
    with changing_parameters(changes):
        other.loads(scratch / "again")
    seen = standing(other, "again") | drawn(other, "again, draw", 5)
    assert seen == standing(buffer, "again") | drawn(buffer, "again, draw", 5)
    return seen


@contextlib.contextmanager
def changing_parameters(changes: bool) -> Iterator[None]:
    """A block in which loads change parameters, if they do; each warns then."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(each.message) for each in caught if "the checkpoint counts" not in str(each.message)] == []
    assert bool(caught) == changes

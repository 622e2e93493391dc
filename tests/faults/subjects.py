"""What is saved while something goes wrong: states of `fbuf`, and buffers of every storage, sampler and checkpointer."""

import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from tensordict import TensorDict

from fbuf import load_state, save_state
from fbuf.checkpoint import load
from interop import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
)
from tests.faults.children import MEMORY
from tests.faults.signatures import signature
from tests.fbuf import every_pair as core
from tests.fbuf.checkpoint.trees import held
from tests.interop.checkpoint.resuming import cells, go_on, joined, name_of
from tests.interop.checkpoint.ted_buffers import buffer_of, steps
from tests.interop.pair_history import WRITERS, Cell

Dump = Callable[[Path], None]


class Subject:
    """Something in memory that is saved over what it was once, and what tells whether either came back.

    Args:
        name: of it.
        save: saves what it is now.
        make: makes something alike, to be loaded into.
        load: loads a checkpoint into that.
        holds: all that such a thing holds.
        state: all that it holds now, for whether saving changes it.
        old: the folder of what it was once, and of what it is now in `new`; made here.
        hidden: whether code in C writes files too, whose operations cannot be seen.
    """

    def __init__(
        self,
        name: str,
        save: Dump,
        make: Callable[[], Any],
        load: Callable[[Any, Path], Any],
        holds: Callable[[Any], Any],
        state: Callable[[], Any],
        hidden: bool = False,
    ) -> None:
        self.name, self.save, self.hidden = name, save, hidden
        self.make, self.load, self.holds = make, load, holds
        self._state = state
        folder = Path(tempfile.mkdtemp(prefix="subject-", dir=MEMORY))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.old, self.new = folder / "old", folder / "new"
        save(self.old)

    def changed(self) -> "Subject":
        """To be called when it is no longer what it was."""
        self.save(self.new)
        self.old_signature, self.new_signature = self.signature(self.old), self.signature(self.new)
        assert self.old_signature != self.new_signature, self.name
        return self

    def signature(self, path: Path) -> str:
        """What a checkpoint holds: its tree, each array of it, and what is loaded from it."""
        tree = signature(load(path, lambda source: held(source.tree)))
        target = self.make()
        self.load(target, path)
        found = signature(self.holds(target))
        return found if self.hidden else f"{tree} {found}"

    def state(self) -> str:
        """What it holds now."""
        return signature(self._state())


def states_of(buffer: Any) -> Any:
    """All that a buffer holds."""
    if getattr(buffer.storage.checkpointer, "allow_pickle", False):  # its objects are in no state_dict
        return list(buffer.storage), buffer.sampler.state_dict(), buffer.writer.state_dict()
    if isinstance(buffer, ReplayBufferEnsemble):
        return [states_of(member) for member in buffer._members], buffer._rng.get_state()
    storage = buffer.storage
    rows: Any = None
    if isinstance(storage, ListStorage):
        rows = list(storage)
    elif len(buffer):
        rows = buffer[:]
    state = buffer.state_dict()
    ranks = state["_writer"].get("_current_top_values")
    if ranks is not None:  # a heap, in which many orders are one
        state["_writer"]["_current_top_values"] = sorted(ranks)
    return state, len(buffer), rows


def _forgetful(buffer: Any) -> Dump:
    """Saves it with nothing but what is in the folder to link to."""

    def save(path: Path) -> None:
        buffer._latest_checkpoint = None
        buffer.dumps(path)

    return save


class Target:
    """What something is loaded into: it holds what a subject was once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.renew()

    def renew(self) -> None:
        """Have it hold that again."""
        self._held = self.subject.make()
        self.load(self.subject.old)

    def load(self, path: Path) -> None:
        """Load a checkpoint."""
        self.subject.load(self._held, path)

    def used(self) -> str:
        """What goes wrong when it is used; nothing may, but that there can be nothing to draw."""
        if not isinstance(self._held, dict) and len(self._held):
            try:
                if not isinstance(self._held, ReplayBufferEnsemble):
                    self._held.storage[:]
                self._held.sample(**({} if self._held.batch_size else {"batch_size": 2}))
            except (RuntimeError, KeyError):  # or keys that are named otherwise
                pass
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return ""

    def state(self) -> str:
        """What it holds."""
        return signature(self.subject.holds(self._held))


def targets(makers: list[Callable[[], Subject]]) -> Iterator[Target]:
    """A target of each subject."""
    return (Target(make()) for make in makers)


def _of_buffer(name: str, make: Callable[[], Any], change: Callable[[Any, int], Any], hidden: bool = False) -> Subject:
    buffer = make()
    change(buffer, 0)
    subject = Subject(
        name,
        _forgetful(buffer),
        make,
        lambda target, path: target.loads(path),
        states_of,
        lambda: states_of(buffer),
        hidden,
    )
    change(buffer, 1)
    return subject.changed()


def pairs(writers: tuple[str, ...] = tuple(WRITERS)) -> Iterator[Callable[[], Subject]]:
    """Every storage, sampler and writer that can be joined in a buffer."""
    for cell in cells(writers):
        if joined(cell, 0) is not None:
            yield lambda cell=cell: _of_cell(cell)  # type: ignore[misc]


def _of_cell(cell: Cell) -> Subject:
    return _of_buffer(
        name_of(cell), lambda: joined(cell, 0), lambda buffer, turn: go_on(buffer, cell, 5 * turn, 4 + 4 * turn)
    )


def _ted(kind: Any, sampler: Any) -> Subject:
    def make() -> Any:
        buffer = buffer_of(kind(), (2,))
        buffer.set_sampler(sampler())
        return buffer

    stream = steps(7, (2,)).data.transpose(0, 1)

    def change(buffer: Any, turn: int) -> None:
        buffer.extend(stream[:, 3:] if turn else stream[:, :3])
        buffer.sample(2)

    name = f"{kind.__name__}-{make().sampler.__class__.__name__}"
    return _of_buffer(name, make, change, kind is H5StorageCheckpointer)


def checkpointers() -> Iterator[Callable[[], Subject]]:
    """Every other way to save a storage."""
    for kind in (FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer):
        for sampler in (RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(10, 0.7, 0.5)):
            yield lambda kind=kind, sampler=sampler: _ted(kind, sampler)  # type: ignore[misc]


def others() -> Iterator[Callable[[], Subject]]:
    """Other buffers."""

    def values(turn: int, count: int = 5) -> TensorDict:
        ids = torch.arange(count) + 10 * turn
        return TensorDict({"id": ids, "x": torch.ones(count, 100) * ids[:, None]}, [count])

    def objects(turn: int) -> list[Any]:
        return [{"text": f"{turn}", "n": [turn, 0.5, None, b"bytes"], "t": torch.full((turn + 1,), turn)}, turn, "item"]

    def ensemble() -> ReplayBufferEnsemble:
        members = [
            ReplayBuffer(storage=LazyTensorStorage(12), sampler=PrioritizedSampler(12, 0.7, 0.5), batch_size=4),
            ReplayBuffer(storage=ListStorage(12), batch_size=4),
        ]
        return ReplayBufferEnsemble(*members, batch_size=4, generator=torch.Generator("cpu").manual_seed(0))

    def change_members(buffer: Any, turn: int) -> None:
        buffer[0].extend(values(turn))
        buffer[1].extend(values(turn))
        buffer[0].update_priority(torch.arange(5), torch.rand(5))
        buffer[0].sample()

    def change_objects(buffer: Any, turn: int) -> None:
        buffer.extend(objects(turn))

    def change_priorities(buffer: Any, turn: int) -> None:
        buffer.extend(values(turn, 9))
        buffer.update_priority(torch.arange(5), torch.rand(5))

    yield lambda: _of_buffer("ReplayBufferEnsemble", ensemble, change_members)
    yield lambda: _of_buffer(
        "ListStorage of objects", lambda: ReplayBuffer(storage=ListStorage(5), collate_fn=list), change_objects
    )
    yield lambda: _of_buffer(
        "ListStorage with pickle",
        lambda: ReplayBuffer(
            storage=ListStorage(5), collate_fn=list, checkpointer=ListStorageCheckpointer(allow_pickle=True)
        ),
        lambda buffer, turn: buffer.extend([turn, {turn}, frozenset("a")]),
    )
    yield lambda: _of_buffer(
        "PrioritizedReplayBuffer",
        lambda: PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(12), batch_size=4),
        change_priorities,
    )


def _state(sampler: str) -> Subject:
    known = "trajectories" if "Slices" in sampler else ""
    buffer = core.build(core.Cell(sampler, "RoundRobin", (core.LANES,), known))
    state = jax.device_get(core._init(buffer))

    def numbered(shift: int) -> Any:
        """A state of this structure; what its values mean is none of the checkpoint's business."""
        rng = np.random.default_rng(shift)
        return jax.tree.map(lambda leaf: rng.integers(0, 2, leaf.shape).astype(leaf.dtype), state)

    held = {"now": {"state": numbered(0), "large": np.arange(200_000)}}

    subject = Subject(
        f"fbuf {sampler}",
        lambda path: save_state(path, held["now"]),
        lambda: {"now": {"state": state, "large": np.zeros(200_000, np.int64)}},
        lambda target, path: target.update(now=load_state(path, target["now"])),
        lambda target: target["now"],
        lambda: held["now"],
    )
    held["now"] = {"state": numbered(1), "large": np.arange(200_000)[::-1]}
    return subject.changed()


def states() -> Iterator[Callable[[], Subject]]:
    """States of `fbuf`."""
    for sampler in core.SAMPLERS:
        yield lambda sampler=sampler: _state(sampler)  # type: ignore[misc]


@functools.cache
def few() -> list[Callable[[], Subject]]:
    """Some that are different, and made quickly and once."""
    chosen = (
        "LazyTensorStorage-1-SamplerWithoutReplacement-TensorDictRoundRobinWriter",
        "LazyStackStorage-1-RandomSampler-TensorDictMaxValueWriter",
    )
    makers = [
        lambda: _state("Uniform"),
        *(lambda cell=cell: _of_cell(cell) for cell in cells(tuple(WRITERS)) if name_of(cell).startswith(chosen)),
    ]  # type: ignore[misc]
    makers += [
        lambda: _ted(H5StorageCheckpointer, RandomSampler),
        lambda: _ted(NestedStorageCheckpointer, RandomSampler),
        *list(others())[:3],
    ]
    return [functools.cache(each) for each in makers]


def every(seed: int) -> list[Callable[[], Subject]]:
    """All of them, in an order of their own; each is made when it is called for."""
    found = [*states(), *checkpointers(), *others()]
    rest = list(pairs())
    rng = np.random.default_rng(seed)
    rng.shuffle(rest)  # type: ignore[arg-type]
    rng.shuffle(found)  # type: ignore[arg-type]
    # Those of a kind of their own are few: they come between the others.
    step = max(1, len(rest) // len(found))
    for place, each in enumerate(found):
        rest.insert(place * (step + 1), each)
    return rest

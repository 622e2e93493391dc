"""The subjects of the fault tests: states of `fbuf`, and buffers of every storage, sampler and checkpointer."""

import functools
import random
import shutil
import tempfile
import weakref
from collections.abc import Callable
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
from tests.faults.counts import Counts
from tests.faults.signatures import signature
from tests.fbuf import every_pair as core
from tests.fbuf.checkpoint.trees import held
from tests.interop.checkpoint.resuming import cells, go_on, joined, name_of
from tests.interop.checkpoint.ted_buffers import buffer_of, steps
from tests.interop.pair_history import WRITERS, Cell

NONE = "no checkpoint"


class Subject:
    """A buffer or state that is saved in an old and in a new state, and recognizes both in a checkpoint.

    Args:
        make: makes an empty one.
        change: brings it into its old state (0), and from there into its new one (1).
        save: saves it to a path.
        load: loads a checkpoint into it.
        state: all that it holds.
        hidden: code in C writes files too: its operations cannot be seen, and its bytes differ between two saves.

    `old` and `new` are the folders of the two checkpoints; the subject itself is in the new state.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        change: Callable[[Any, int], Any],
        save: Callable[[Any, Path], Any] = lambda held, path: held.dumps(path),
        load: Callable[[Any, Path], Any] = lambda held, path: held.loads(path),
        state: Callable[[Any], Any] | None = None,
        hidden: bool = False,
    ) -> None:
        self.name, self.make, self.load, self.hidden = name, make, load, hidden
        self.holds = state or states_of
        self._save, self._held = save, make()
        folder = Path(tempfile.mkdtemp(prefix="subject-", dir=MEMORY))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.old, self.new = folder / "old", folder / "new"
        for turn, path in enumerate((self.old, self.new)):
            change(self._held, turn)
            self.save(folder / "saved")
            (folder / "saved").rename(path)  # no later save finds it, to link to its files
        self._known = {self.signature(self.old): "old", self.signature(self.new): "new"}
        assert len(self._known) == 2, name

    def save(self, path: Path) -> None:
        """Save the new state."""
        self._save(self._held, path)

    def signature(self, path: Path) -> str:
        """A digest of a checkpoint: its tree, each array of it, and what is loaded from it."""
        tree = "" if self.hidden else signature(load(path, lambda source: held(source.tree)))
        target = self.make()
        self.load(target, path)
        return f"{tree} {signature(self.holds(target))}"

    def found(self, path: Path) -> str:
        """The checkpoint at a path: "old", "new", `NONE` or what is wrong with it."""
        try:
            return self._known.get(self.signature(path), "a mixture")
        except FileNotFoundError:
            return NONE
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def state(self) -> str:
        """A digest of the state, to see whether saving changes it."""
        return signature(self.holds(self._held))


class Target:
    """A target that checkpoints are loaded into; it holds the old state of a subject."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.renew()

    def renew(self) -> None:
        """Restore the old state."""
        self._held = self.subject.make()
        self.load(self.subject.old)

    def load(self, path: Path) -> None:
        """Load a checkpoint."""
        self.subject.load(self._held, path)

    def used(self) -> str:
        """Read and draw. Returns an error other than those of items that could be stored, but not drawn."""
        try:
            if not isinstance(self._held, dict) and len(self._held):
                if not isinstance(self._held, ReplayBufferEnsemble):
                    self._held.storage[:]
                self._held.sample(**({} if self._held.batch_size else {"batch_size": 2}))
        except (RuntimeError, KeyError):  # nothing to draw, or keys that are named otherwise
            pass
        except Exception as error:
            stacked = "read as a stack of tensordicts" in str(error)  # a lazy stack may hold anything
            return "" if stacked else f"{type(error).__name__}: {error}"
        return ""

    def state(self) -> str:
        """A digest of what it holds."""
        return signature(self.subject.holds(self._held))


def states_of(buffer: Any) -> Any:
    """All that a buffer holds."""
    if getattr(buffer.storage.checkpointer, "allow_pickle", False):  # its objects are in no state_dict
        return list(buffer.storage), buffer.sampler.state_dict(), buffer.writer.state_dict()
    state = buffer.state_dict()
    rows = list(buffer.storage) if isinstance(buffer.storage, ListStorage) else buffer[:] if len(buffer) else None
    ranks = state["_writer"].get("_current_top_values")
    if ranks is not None:  # a heap, in which many orders are one
        state["_writer"]["_current_top_values"] = sorted(ranks.tolist())
    return state, len(buffer), rows


# ------------------------------------------------------------------ the subjects

Maker = Callable[[], Subject]


def _of_cell(cell: Cell) -> Subject:
    return Subject(
        name_of(cell), lambda: joined(cell, 0), lambda buffer, turn: go_on(buffer, cell, 5 * turn, 4 + 4 * turn)
    )


def _pairs() -> list[Maker]:
    """Every storage, sampler and writer that can be joined in a buffer."""
    return [functools.partial(_of_cell, cell) for cell in cells(tuple(WRITERS)) if joined(cell, 0) is not None]


def _ted(kind: Any, sampler: Callable[[], Any]) -> Subject:
    stream = steps(7, (2,)).data.transpose(0, 1)

    def make() -> Any:
        buffer = buffer_of(kind(), (2,))
        buffer.set_sampler(sampler())
        return buffer

    def change(buffer: Any, turn: int) -> None:
        buffer.extend(stream[:, 3:] if turn else stream[:, :3])
        buffer.sample(2)

    return Subject(f"{kind.__name__}-{type(sampler()).__name__}", make, change, hidden=kind is H5StorageCheckpointer)


def _checkpointers() -> list[Maker]:
    """Every other way to save a storage."""
    kinds = (FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer)
    samplers = (RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(10, 0.7, 0.5))
    return [functools.partial(_ted, kind, sampler) for kind in kinds for sampler in samplers]


def _values(turn: int, count: int = 5) -> TensorDict:
    ids = torch.arange(count) + 10 * turn
    return TensorDict({"id": ids, "x": torch.ones(count, 100) * ids[:, None]}, [count])


def _ensemble() -> Subject:
    def make() -> ReplayBufferEnsemble:
        members = [
            ReplayBuffer(storage=LazyTensorStorage(12), sampler=PrioritizedSampler(12, 0.7, 0.5), batch_size=4),
            ReplayBuffer(storage=ListStorage(12), batch_size=4),
        ]
        return ReplayBufferEnsemble(*members, batch_size=4, generator=torch.Generator("cpu").manual_seed(0))

    def change(buffer: Any, turn: int) -> None:
        buffer[0].extend(_values(turn))
        buffer[1].extend(_values(turn))
        buffer[0].update_priority(torch.arange(5), torch.rand(5))
        buffer[0].sample()

    def state(buffer: Any) -> Any:
        return states_of(buffer[0]), states_of(buffer[1]), buffer.generator.get_state()

    return Subject("ReplayBufferEnsemble", make, change, state=state)


def _objects() -> Subject:
    def change(buffer: Any, turn: int) -> None:
        structured = {"text": f"{turn}", "n": [turn, 0.5, None, b"bytes"], "t": torch.full((turn + 1,), turn)}
        buffer.extend([structured, turn, "item"])

    return Subject("ListStorage of objects", lambda: ReplayBuffer(storage=ListStorage(5), collate_fn=list), change)


def _pickled() -> Subject:
    checkpointer = functools.partial(ListStorageCheckpointer, allow_pickle=True)
    return Subject(
        "ListStorage with pickle",
        lambda: ReplayBuffer(storage=ListStorage(5), collate_fn=list, checkpointer=checkpointer()),
        lambda buffer, turn: buffer.extend([turn, {turn}, frozenset("a")]),
    )


def _prioritized() -> Subject:
    def change(buffer: Any, turn: int) -> None:
        buffer.extend(_values(turn, 9))
        buffer.update_priority(torch.arange(5), torch.rand(5))

    return Subject(
        "PrioritizedReplayBuffer",
        lambda: PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(12), batch_size=4),
        change,
    )


def _state(sampler: str) -> Subject:
    """A state of `fbuf`; its values are random, since what they mean is none of the checkpoint's business."""
    known = "trajectories" if "Slices" in sampler else ""
    buffer = core.build(core.Cell(sampler, "RoundRobin", (core.LANES,), known))
    state = jax.device_get(core._init(buffer))

    def change(held: dict[str, Any], turn: int) -> None:
        rng = np.random.default_rng(turn)
        made = jax.tree.map(lambda leaf: rng.integers(0, 2, leaf.shape).astype(leaf.dtype), state)
        held["now"] = {"state": made, "large": np.arange(200_000)[:: -1 if turn else 1]}

    return Subject(
        f"fbuf {sampler}",
        lambda: {"now": {"state": state, "large": np.zeros(200_000, np.int64)}},
        change,
        lambda held, path: save_state(path, held["now"]),
        lambda held, path: held.update(now=load_state(path, held["now"])),
        lambda held: held["now"],
    )


@functools.cache
def few() -> list[Maker]:
    """Some that are different; each is made once."""
    chosen = (
        "LazyTensorStorage-1-SamplerWithoutReplacement-TensorDictRoundRobinWriter",
        "LazyStackStorage-1-RandomSampler-TensorDictMaxValueWriter",
    )
    makers: list[Maker] = [functools.partial(_state, "Uniform")]
    makers += [functools.partial(_of_cell, cell) for cell in cells(tuple(WRITERS)) if name_of(cell).startswith(chosen)]
    makers += [
        functools.partial(_ted, kind, RandomSampler) for kind in (H5StorageCheckpointer, NestedStorageCheckpointer)
    ]
    return [functools.cache(each) for each in (*makers, _ensemble, _objects, _pickled)]


def every(seed: int) -> list[Maker]:
    """All of them in a random order, with those of a kind of their own between the others."""
    found = [*(functools.partial(_state, sampler) for sampler in core.SAMPLERS), *_checkpointers()]
    found += [_ensemble, _objects, _pickled, _prioritized]
    rest, rng = _pairs(), random.Random(seed)
    rng.shuffle(rest)
    rng.shuffle(found)
    step = max(1, len(rest) // len(found))
    for place, each in enumerate(found):
        rest.insert(place * (step + 1), each)
    return rest


Do = Callable[[Subject, Counts, int, random.Random], None]


def with_subjects(do: Do, size: int, seed: int, makers: list[Maker] | None, least: int) -> Counts:
    """Counts of `size` cases: `do(subject, counts, most, rng)` for one subject after another."""
    rng, counts = random.Random(seed), Counts()
    makers = every(seed) if makers is None else makers
    for make in makers:
        if counts.cases >= size:
            break
        do(make(), counts, min(max(least, size // len(makers)), size - counts.cases), rng)
        counts.outcomes["subjects"] += 1
    return counts

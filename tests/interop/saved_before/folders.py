"""Folders of memory maps, opened in place: left by `close()`, or by a process that was killed in a write."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from interop import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    Writer,
)
from tests.interop.saved_before import data
from tests.interop.saved_before.case import SETTLED, Case, Rows, Use, drawn, standing
from tests.interop.saved_before.plain import Seen, differences, flat

CAPACITY, BATCH = 8, 4


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder, and the buffers over it.

    Args:
        rows: its data.
        steps: how many rows each write before has; a batch is drawn after each.
        sampler, writer: of the buffers.
        ndim: dims of items.
        then: what is done last, before it is closed.
        killed: how a process is killed in it then, see `killed.py`.
        options: of the storage.
        later: the data that is written when it was opened, if that is other data.
    """

    rows: Rows = data.plain
    steps: tuple[int, ...] = (5, 1, 5)
    sampler: Callable[[], Sampler] = RandomSampler
    writer: Callable[[], Writer] = TensorDictRoundRobinWriter
    ndim: int = 1
    then: Callable[[ReplayBuffer], None] = lambda buffer: None
    killed: str | None = None
    options: dict[str, object] = dataclasses.field(default_factory=dict)
    later: Rows | None = None

    @property
    def count(self) -> int:
        return sum(self.steps)

    def _over(self, storage: LazyTensorStorage) -> ReplayBuffer:
        kind = ReplayBuffer if self.rows in (data.tensors, data.trees) else TensorDictReplayBuffer
        return kind(
            storage=storage,
            sampler=self.sampler(),
            writer=self.writer(),
            batch_size=BATCH,
            generator=torch.Generator("cpu").manual_seed(3),
        )

    def new(self, path: Path) -> ReplayBuffer:
        """A buffer over a folder that is not there yet."""
        return self._over(
            LazyMemmapStorage(CAPACITY * self.ndim, scratch_dir=path, ndim=self.ndim, **self.options)  # type: ignore[arg-type]
        )

    def opened(self, path: Path) -> ReplayBuffer:
        """A buffer over a folder that is there."""
        return self._over(LazyMemmapStorage.open(path))

    def elsewhere(self) -> ReplayBuffer:
        """An empty one in memory."""
        return self._over(LazyTensorStorage(CAPACITY * self.ndim, ndim=self.ndim))

    # ------------------------------------------------------------------ the case

    def make(self) -> Path:
        """A folder that is not there yet."""
        return Path(tempfile.mkdtemp()) / "rows"

    def fill(self, path: Path) -> None:
        buffer, first = self.new(path), 0
        for turn, count in enumerate(self.steps):
            buffer.extend(self.rows(first, count))
            first += count
            drawn(buffer, "", turn)
        if self.count:
            self.then(buffer)
            before = self._kept(buffer)
            close(buffer)
            assert differences(before, self._kept(self.opened(self.copy(path)))) == []

    @staticmethod
    def copy(path: Path) -> Path:
        """A copy of the folder, which is opened without a change of it."""
        return Path(shutil.copytree(path, Path(tempfile.mkdtemp()) / "rows"))

    def save(self, path: Path, target: Path) -> None:
        """Leave the folder there; that of the program goes on as a copy."""
        if self.killed is not None:
            before = self.copy(path) if path.exists() else None
            kill(self, path)
            shutil.copytree(path, target)
            if before is not None:
                shutil.rmtree(path)
                before.rename(path)
        else:
            shutil.copytree(path, target)

    def load(self, made: Path, path: Path) -> Path:
        shutil.rmtree(made.parent)
        return path

    def go_on(self, path: Path, scratch: Path) -> Seen:
        if not self.count:
            return self._begins(path, scratch)
        seen: Seen = {}
        if self.killed is None:  # a write that is not rolled back is not for readers
            reader = self._over(LazyMemmapStorage.open(path, "r"))
            seen = standing(reader, "reader") | drawn(reader, "reader, draw", 9)
            del reader
        buffer = self.opened(path)
        seen |= Use(self.elsewhere, self.later or self.rows, self.count)(buffer, scratch)
        last = self._kept(buffer)
        close(buffer)
        assert differences(last, self._kept(self.opened(path))) == []
        return seen

    def _kept(self, buffer: ReplayBuffer) -> Seen:
        """What a folder keeps of a buffer."""
        lost = ("ran out", "written") if self.writer is highest else ("ran out",)
        return {name: each for name, each in standing(buffer, "kept").items() if not name.endswith(lost)}

    def _begins(self, path: Path, scratch: Path) -> Seen:
        """There is no storage in the folder yet, only files that a killed process has left."""
        seen = flat(path.exists() and len(list(path.iterdir())), "files")
        try:
            LazyMemmapStorage.open(path)
        except FileNotFoundError:
            seen |= flat("no storage", "opened")
        return seen | Use(self.elsewhere, self.rows, 0)(self.new(path), scratch)

    def case(self) -> Case[Path]:
        return Case(self.make, self.fill, self.save, self.load, self.go_on, SETTLED)


def close(buffer: ReplayBuffer) -> None:
    assert isinstance(buffer.storage, LazyMemmapStorage)
    buffer.storage.close()


def kill(case: Folder, path: Path) -> None:
    """Have a process killed in the folder."""
    from tests.interop.saved_before.killed import kill as kill_process  # which imports this file

    (name,) = (name for name, each in FOLDERS.items() if each is case)
    kill_process(name, path)


def prioritized() -> Sampler:
    return PrioritizedSampler(CAPACITY, 0.7, 0.5)


def groups() -> Sampler:
    return PromptGroupSampler(2, max_uses=2)


def highest() -> Writer:
    return TensorDictMaxValueWriter("rank")


def new_key(buffer: ReplayBuffer) -> None:
    buffer["later"] = torch.arange(len(buffer))[:, None] / 4


def empty(buffer: ReplayBuffer) -> None:
    buffer.empty()


def edited(buffer: ReplayBuffer) -> None:
    buffer.set_at_("obs", torch.full((2, 2), 0.5), torch.tensor([1, 4]))


RAGGED: dict[str, object] = {"ragged": ["tokens"]}
FOLDERS: dict[str, Folder] = {
    "closed": Folder(),
    "closed, in part": Folder(steps=(3, 2)),
    "closed, emptied": Folder(then=empty),
    "closed, edited": Folder(then=edited),
    "closed, of two dims": Folder(data.lanes, ndim=2),
    "closed, nested": Folder(data.nested),
    "closed, tensors": Folder(data.tensors, writer=RoundRobinWriter),
    "closed, tree": Folder(data.trees, writer=RoundRobinWriter),
    "closed, slices": Folder(data.episodes, sampler=lambda: SliceSampler(slice_len=2, strict_length=False)),
    "closed, text": Folder(data.texts),
    "closed, values": Folder(data.values),
    "closed, ragged": Folder(data.ragged, options=RAGGED),
    "closed, a new key": Folder(then=new_key, later=data.newer(data.plain, "later")),
    "closed, priorities": Folder(sampler=prioritized),
    "closed, priorities of two dims": Folder(
        data.lanes, sampler=lambda: PrioritizedSampler(2 * CAPACITY, 0.7, 0.5), ndim=2
    ),
    "closed, uses": Folder(sampler=lambda: ConsumingSampler(2)),
    "closed, uses of groups": Folder(data.prompts, sampler=groups),
    "closed, highest": Folder(data.ranked, writer=highest),
    "killed in the rows": Folder(killed="in the rows"),
    "killed in the rows, in part": Folder(steps=(3, 2), killed="in the rows"),
    "killed in the rows of two dims": Folder(data.lanes, ndim=2, killed="in the rows"),
    "killed in the rows, text": Folder(data.texts, killed="in the rows"),
    "killed in the rows, ragged": Folder(data.ragged, options=RAGGED, killed="in the rows"),
    "killed in the rows, priorities": Folder(sampler=prioritized, killed="in the rows"),
    "killed before the commit, priorities": Folder(sampler=prioritized, killed="before the commit"),
    "killed before the commit, uses": Folder(sampler=lambda: ConsumingSampler(2), killed="before the commit"),
    "killed in an update of priorities": Folder(sampler=prioritized, killed="in an update"),
    "killed in a draw": Folder(sampler=lambda: ConsumingSampler(2), killed="in a draw"),
    "killed in a load": Folder(killed="in a load"),
    "killed in the first write": Folder(steps=(), killed="in the first write"),
}
CASES: dict[str, Case[Path]] = {f"folder: {name}": each.case() for name, each in FOLDERS.items()}

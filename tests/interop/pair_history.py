"""A buffer of any storage, sampler and writer, a history of calls, and a model of what each call must do."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from interop import (
    CompressedListStorage,
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from tests.interop.group_model import GroupModel
from tests.interop.rows import check_same, refused

ROWS, LANES, BATCH, LENGTH, STACK, GROUP = 12, 2, 4, 2, 2, 2
PRIORITIZED = ("PrioritizedSampler", "PrioritizedSliceSampler")
SLICES = ("SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler")


class Cell(NamedTuple):
    """The parts of a buffer."""

    storage: str
    ndim: int
    sampler: str
    writer: str
    buffer: str


# ------------------------------------------------------------------ items with an id


def _episodes(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number, step and length of the episode of each item: 4 steps in lane 0, 6 in lane 1."""
    time, lane = ids % 1000, ids // 1000
    length = np.where(lane == 0, 4, 6)
    return 100 * lane + time // length, time % length, length


def items(ids: Any, of_frames: bool) -> TensorDict:
    """The items with these ids, 1000 * lane + time; tensordicts of their shape."""
    ids = np.asarray(ids, np.int64)
    episode, step, length = _episodes(ids)
    below = TensorDict(
        {
            "reward": torch.from_numpy(_ranks(ids))[..., None].float(),
            "done": torch.from_numpy(step == length - 1)[..., None],
        },
        ids.shape,
    )
    made = TensorDict(
        {
            "x": torch.from_numpy(ids),
            "obs": torch.from_numpy(ids)[..., None].float().expand(*ids.shape, 3).clone(),
            "episode": torch.from_numpy(episode),
            "policy_version": torch.from_numpy(_versions(ids)),
            "next": below,
        },
        ids.shape,
    )
    if of_frames:
        frames = 10 * episode[..., None] + np.maximum(step[..., None] + np.arange(-STACK + 1, 2), 0)
        made["pixels"], below["pixels"] = torch.from_numpy(frames[..., :-1]), torch.from_numpy(frames[..., 1:])
        made["pixels"], below["pixels"] = made["pixels"].clone(), below["pixels"].clone()
    return made


def _ranks(ids: np.ndarray) -> np.ndarray:
    """No two are equal."""
    return 7 * ids % 13 + ids / 1024


def _versions(ids: np.ndarray) -> np.ndarray:
    return ids % 1000 % 48 // 4


def ids_of(time: int, count: int, lanes: int) -> np.ndarray:
    """[count, lanes]: rows as they are stored."""
    return np.arange(time, time + count)[:, None] + 1000 * np.arange(lanes)


# ------------------------------------------------------------------ the parts


def _tensor_storage(rows: int, ndim: int) -> TensorStorage:
    ids = ids_of(120, rows, LANES if ndim == 2 else 1)
    return TensorStorage(items(ids if ndim == 2 else ids[:, 0], False), ndim=ndim)


STORAGES: dict[str, Callable[[int, int], Any]] = {
    "ListStorage": lambda size, _: ListStorage(size),
    "LazyStackStorage": lambda size, _: LazyStackStorage(size),
    "CompressedListStorage": lambda size, _: CompressedListStorage(size),
    "TensorStorage": lambda size, ndim: _tensor_storage(ROWS, ndim),
    "LazyTensorStorage": lambda size, ndim: LazyTensorStorage(size, ndim=ndim),
    "LazyMemmapStorage": lambda size, ndim: LazyMemmapStorage(size, ndim=ndim),
    "LazyFrameStorage": lambda size, ndim: LazyFrameStorage(size, stack=STACK, stack_dim=-1, ndim=ndim),
}
LISTS = ("ListStorage", "LazyStackStorage", "CompressedListStorage")
# Of a storage that rounds, by name: written items -> items as they are read.
ROUNDED: dict[str, Callable[[TensorDict], TensorDict]] = {}

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "RandomSampler": lambda size: RandomSampler(),
    "SamplerWithoutReplacement": lambda size: SamplerWithoutReplacement(),
    "PrioritizedSampler": lambda size: PrioritizedSampler(size, 1.0, 1.0),
    "SliceSampler": lambda size: SliceSampler(slice_len=LENGTH),
    "SliceSamplerWithoutReplacement": lambda size: SliceSamplerWithoutReplacement(slice_len=LENGTH),
    "PrioritizedSliceSampler": lambda size: PrioritizedSliceSampler(size, 1.0, 1.0, slice_len=LENGTH),
    "ConsumingSampler": lambda size: ConsumingSampler(),
    "StalenessAwareSampler": lambda size: StalenessAwareSampler(max_staleness=1),
    "PromptGroupSampler": lambda size: PromptGroupSampler(GROUP, group_key="episode"),
}
WRITERS: dict[str, Callable[[], Any]] = {
    "RoundRobinWriter": RoundRobinWriter,
    "TensorDictRoundRobinWriter": TensorDictRoundRobinWriter,
    "TensorDictMaxValueWriter": TensorDictMaxValueWriter,
    "ImmutableDatasetWriter": ImmutableDatasetWriter,
}
BUFFERS: dict[str, Callable[..., Any]] = {
    "ReplayBuffer": ReplayBuffer,
    "TensorDictReplayBuffer": TensorDictReplayBuffer,
}
LAYOUTS = [(name, ndim) for name in STORAGES for ndim in ((1,) if name in LISTS else (1, 2))]
CELLS = [Cell(*layout, *rest) for rest in itertools.product(SAMPLERS, WRITERS, BUFFERS) for layout in LAYOUTS]


def parts(cell: Cell) -> tuple[Any, Any, Any]:
    """A storage, a sampler and a writer, with 12 rows in the storage for a writer that writes none."""
    size = ROWS * (LANES if cell.ndim == 2 else 1)
    storage = STORAGES[cell.storage](size, cell.ndim)
    if cell.writer == "ImmutableDatasetWriter" and not len(storage):
        ReplayBuffer(storage=storage).extend(as_given(ids_of(120, ROWS, size // ROWS), cell))
    return storage, SAMPLERS[cell.sampler](size), WRITERS[cell.writer]()


def as_given(ids: np.ndarray, cell: Cell) -> TensorDict:
    """The rows with these ids, as a user passes them to `extend`."""
    return items(ids.T if cell.ndim == 2 else ids[:, 0], cell.storage == "LazyFrameStorage")


# ------------------------------------------------------------------ the history and its model


class History:
    """A buffer, and a model of its content."""

    def __init__(self, cell: Cell) -> None:
        storage, sampler, writer = parts(cell)
        self.cell = cell
        self.lanes = LANES if cell.ndim == 2 else 1
        generator = torch.Generator("cpu").manual_seed(0)
        self.buffer = BUFFERS[cell.buffer](
            storage=storage, sampler=sampler, writer=writer, batch_size=BATCH, generator=generator
        )
        self.held: np.ndarray = np.full((ROWS, self.lanes), -1)  # ids by row
        self.cursor = self.time = 0
        self.consumed: set[int] = set()  # rows
        self.groups = GroupModel(GROUP)
        if len(storage):
            self.held = ids_of(120, ROWS, self.lanes)
            self._group(range(ROWS))
        self.check_all()

    @property
    def filled(self) -> int:
        return int((self.held[:, 0] >= 0).sum())

    def write(self, count: int) -> None:
        """Write `count` rows by `extend`; a single row by `add`."""
        ids = ids_of(self.time, count, self.lanes)
        data = as_given(ids, self.cell)
        wanted = self._written(ids)
        if count == 1:
            index = self.buffer.add(data[:, 0] if self.cell.ndim == 2 else data[0])
            if self.cell.ndim == 1:
                assert index == (None if wanted[0] < 0 else wanted[0])
                index = torch.tensor(wanted[:1])
        else:
            index = self.buffer.extend(data)
        check_same(index, self._named(wanted))
        self._group(wanted)
        self.time += count
        self.check_all()

    def _written(self, ids: np.ndarray) -> list[int]:
        """Write to the model. Returns the row of each item, -1 for one that is not kept."""
        rows = []
        if self.cell.writer == "TensorDictMaxValueWriter":
            for each in ids:
                row = self.filled if self.filled < ROWS else int(_ranks(self.held[:, 0]).argmin())
                if self.filled < ROWS or _ranks(each)[0] > _ranks(self.held[row])[0]:
                    self.held[row] = each
            return [int(found[0]) if (found := np.flatnonzero(self.held[:, 0] == each[0])).size else -1 for each in ids]
        vacant = [int(row) for row in self.buffer.sampler.vacant(len(ids))] if self.consumed else []
        assert set(vacant) <= self.consumed and len(vacant) == min(len(self.consumed), len(ids))
        for row, each in itertools.zip_longest(vacant, ids):
            place = self.cursor if row is None else row
            self.cursor = (self.cursor + 1) % ROWS if row is None else self.cursor
            self.held[place] = each
            rows.append(place)
        self.consumed -= set(rows)
        return rows

    def _group(self, rows: Iterable[int]) -> None:
        """Report written rows to the model of prompt groups; -1 is no row."""
        for row, lane in itertools.product((row for row in rows if row >= 0), range(self.lanes)):
            self.groups.write(row * self.lanes + lane, int(_episodes(self.held[row, lane])[0]))

    def _named(self, rows: Any) -> torch.Tensor:
        """Rows as `extend` returns them."""
        rows = torch.as_tensor(rows)
        if self.cell.ndim == 1:
            return rows
        return torch.cartesian_prod(rows, torch.arange(self.lanes))

    def check_all(self) -> None:
        """Compare all stored items, and the number of items that can be drawn, with the model."""
        filled = self.filled
        of_groups = self.cell.sampler == "PromptGroupSampler"
        ready = GROUP * len(self.groups.ready()) if of_groups else (filled - len(self.consumed)) * self.lanes
        assert len(self.buffer) == ready
        assert len(self.buffer.storage) == filled * self.lanes
        if filled:
            held = self.held[:filled]
            self.check_items(self.buffer[:], held.T if self.cell.ndim == 2 else held[:, 0])

    def check_items(self, got: Any, ids: np.ndarray, skip: tuple[Any, ...] = ()) -> None:
        """Compare items bit for bit with those of these ids, without the entries in `skip`."""
        assert isinstance(got, TensorDictBase) and got.batch_size == ids.shape
        wanted = items(ids, self.cell.storage == "LazyFrameStorage")
        wanted = ROUNDED.get(self.cell.storage, TensorDict.clone)(wanted)
        for key in wanted.keys(True, True):
            if key not in skip:
                check_same(got[key], wanted[key])

    # ------------------------------------------------------------------ draws

    def draw(self) -> np.ndarray:
        """Draw a batch and check it. Returns its coordinates [n, ndim]."""
        batch, info = self.buffer.sample(return_info=True)
        assert isinstance(info["index"], tuple) == (self.cell.ndim == 2 or self.cell.sampler in SLICES)
        index = info["index"] if isinstance(info["index"], tuple) else (info["index"],)
        at = torch.stack(index, -1).numpy()
        row, lane = at[:, 0], at[:, 1] if self.cell.ndim == 2 else np.zeros(len(at), np.int64)
        assert row.min() >= 0 and row.max() < self.filled
        ids = self.held[row, lane]
        marked = self.cell.buffer == "TensorDictReplayBuffer"
        if marked:
            flat = len(index) == 1 and self.cell.sampler not in SLICES
            check_same(batch["index"], torch.from_numpy(row if flat else at))
            for key, value in info.items():
                if key != "index":
                    check_same(batch[key], value)
        elif "index" in batch.keys():  # noqa: SIM118  # stored by the writer
            check_same(batch["index"], torch.from_numpy(row))
        done = ("next", "done")
        self.check_items(batch, ids, (done,) if marked and done in info else ())
        self._check_draw(ids, row, info)
        return at

    def _check_draw(self, ids: np.ndarray, rows: np.ndarray, info: dict[Any, Any]) -> None:
        """Check what the sampler promises of a batch."""
        sampler = self.cell.sampler
        if sampler in SLICES:
            self._check_slices(ids, rows, info)
        elif sampler == "ConsumingSampler":
            assert len(set(rows)) == len(rows) and not self.consumed & set(rows)
            assert len(rows) == min(BATCH, self.filled - len(self.consumed))
            self.consumed |= {int(row) for row in rows}
        elif sampler == "SamplerWithoutReplacement":
            assert len(set(ids)) == len(ids) <= BATCH
        else:
            assert len(ids) == BATCH
        if sampler == "PromptGroupSampler":
            self.groups.check((rows * self.lanes + ids // 1000).tolist(), info)
        if sampler in PRIORITIZED:
            weight = info["priority_weight"]
            assert weight.shape == (len(ids),) and weight.min() > 0 and weight.max() <= 1
        if sampler == "StalenessAwareSampler":
            staleness = self.buffer.sampler.consumer_version - _versions(ids)
            check_same(info["staleness"], torch.from_numpy(staleness).float())
            assert staleness.max() <= 1

    def _check_slices(self, ids: np.ndarray, rows: np.ndarray, info: dict[Any, Any]) -> None:
        """Check that slices are consecutive items of one episode, and their flags."""
        assert len(ids) == BATCH or self.cell.sampler == "SliceSamplerWithoutReplacement"
        slices, at = ids.reshape(-1, LENGTH), rows.reshape(-1, LENGTH)
        assert (np.diff(slices) == 1).all() and (np.diff(_episodes(slices)[0]) == 0).all()
        assert (np.diff(at) % ROWS == 1).all()
        last = torch.arange(len(ids))[:, None] % LENGTH == LENGTH - 1
        check_same(info["next", "truncated"], last)
        check_same(info["next", "done"], last | items(ids, False)["next", "done"])
        check_same(info["next", "terminated"], torch.zeros_like(last))
        if self.cell.sampler == "SliceSamplerWithoutReplacement":
            episodes = _episodes(slices[:, 0])[0]
            assert len(set(episodes)) == len(episodes)

    def draws(self) -> None:
        """Check several batches, an epoch of samplers that have one, and the effect of priorities."""
        if self.cell.sampler == "StalenessAwareSampler":
            self.buffer.sampler.consumer_version = int(_versions(self.held[: self.filled]).max())
        for _ in range(2):
            self.draw()
        if len(self.consumed) == self.filled:
            with refused(self.buffer, RuntimeError, "Cannot sample from an empty storage"):
                self.buffer.sample()
        if self.cell.sampler.endswith("WithoutReplacement"):
            self._epoch()
        self.prioritize()

    def _epoch(self) -> None:
        list(self.buffer)  # ends the current epoch
        drawn = torch.cat([batch["x"] for batch in self.buffer]).numpy()
        held = self.held[: self.filled].reshape(-1)
        if self.cell.sampler in SLICES:
            drawn, held = _episodes(drawn[::LENGTH])[0], np.unique(_episodes(held)[0])
        assert sorted(drawn) == sorted(held)

    def prioritize(self) -> None:
        """Give one item all priority, by each call that can, and check that only it is drawn."""
        buffer, filled = self.buffer, self.filled
        places = self._named(torch.arange(filled))
        if self.cell.sampler not in PRIORITIZED:
            with pytest.warns(UserWarning, match="not a prioritized sampler"):
                buffer.update_priority(places, 1.0)
            if self.cell.buffer == "TensorDictReplayBuffer":
                buffer.update_tensordict_priority(buffer[:])  # without an entry of priorities
            return
        for lane, choose in ((self.lanes - 1, min), (0, max)):
            held = set(self.held[:filled, lane].tolist())
            if self.cell.sampler in SLICES:
                held = {each for each in held if each + 1 in held and _episodes(np.array(each + 1))[1]}
            target = choose(held)
            row = int(np.flatnonzero(self.held[:filled, lane] == target)[0])
            place = torch.tensor([[row, lane]] if self.cell.ndim == 2 else [row])
            if choose is max and self.cell.buffer == "TensorDictReplayBuffer":
                index = places[:, None] if self.cell.ndim == 1 and self.cell.sampler in SLICES else places
                error = (places == place).reshape(len(places), -1).all(-1).float()
                buffer.update_tensordict_priority(TensorDict({"index": index, "td_error": error}, [len(places)]))
            else:
                buffer.update_priority(places, torch.zeros(len(places)))
                buffer.update_priority(place, torch.ones(1))
            drawn = self.draw()[:: LENGTH if self.cell.sampler in SLICES else 1]
            assert (drawn == place.numpy().reshape(1, -1)).all()
        buffer.mark_update(places)

    def run(self) -> str:
        """Run the history. Returns "reads" for a writer that writes nothing, else "works"."""
        if self.cell.writer == "ImmutableDatasetWriter":
            self.draws()
            data = as_given(ids_of(0, 3, self.lanes), self.cell)
            one = data[:, 0] if self.cell.ndim == 2 else data[0]
            for call in (lambda: self.buffer.extend(data), lambda: self.buffer.add(one), self.buffer.empty):
                with refused(self.buffer, RuntimeError, "doesn't allow writing"):
                    call()
            self.draws()
            return "reads"
        for count in (5, 1):
            self.write(count)
        self.draws()
        for count in (12, 3, 1):
            self.write(count)
            if count != 3:
                self.draws()
        self.buffer.empty()
        self.held[:], self.consumed, self.cursor, self.time, self.groups = -1, set(), 0, 24, GroupModel(GROUP)
        assert self.buffer.write_count == 0
        with refused(self.buffer, RuntimeError, "Cannot sample from an empty storage"):
            self.buffer.sample()
        self.write(6)
        self.draws()
        return "works"

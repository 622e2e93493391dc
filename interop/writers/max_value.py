"""The items of the highest ranks."""

from collections.abc import Callable
from heapq import heapify, heappush, heapreplace
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.checkpoint.state import Entries, LoadOptions, a_key, key_of
from interop.data.reductions import REDUCTIONS
from interop.data.tensordicts import shallow
from interop.shared.processes import OneProcess
from interop.storages import LazyFrameStorage, Storage, TensorStorage
from interop.writers.round_robin import expanded
from interop.writers.writer import Writer

_ONE_PROCESS = (
    "a TensorDictMaxValueWriter cannot be shared between processes, each would rank only what it wrote: give the workers "
    "another writer, and rank in the process that made it"
)


class TensorDictMaxValueWriter(Writer):
    """Keeps the tensordicts of the highest ranks: once the storage is full, one that outranks the lowest takes its slot.

    A rank is an entry of the item as it is written, in double precision; later edits of stored items do not change it.
    What is stored already is ranked at the first write. An item of the rank of the lowest is not kept. O(log capacity)
    for an item that is kept, and a comparison for one that is not. An item can be a trajectory of one batch dim.

    "index" is an entry of the writer's: where stored items have one, the first item deciding, it is the slot; otherwise
    it is not stored.

    Args:
        rank_key: the entry to rank by; ("next", "reward") by default.
        reduction: how one rank is made of an entry of several values: "sum", "max", "min", "mean" or "median".
        compilable: accepted for compatibility; ranks are never shared.
    """

    keeps_order = False

    def __init__(self, rank_key: Any = None, reduction: str = "sum", compilable: bool = False) -> None:
        super().__init__(compilable)
        if reduction not in REDUCTIONS:
            raise NotImplementedError(f"unknown reduction {reduction!r}: use one of {', '.join(REDUCTIONS)}")
        self.rank_key = ("next", "reward") if rank_key is None else rank_key
        self.reduction = reduction
        self._heap: list[
            tuple[float, int]
        ] = []  # rank and slot of each stored item, lowest first; slots are [0, length)
        self._keeps_index: bool | None = None  # whether stored items have an "index", once that is known
        self._write_count = 0
        self._process = OneProcess(_ONE_PROCESS)

    def check_storage(self, storage: Storage) -> None:
        if storage.ndim > 1:
            raise ValueError(
                f"{type(self).__name__} ranks whole rows, and the storage has ndim={storage.ndim}: use ndim=1, of which an "
                "item can be a trajectory"
            )
        if isinstance(storage, LazyFrameStorage):
            raise ValueError(
                f"{type(self).__name__} writes to rows in any order, and a {type(storage).__name__} takes frames in theirs: "
                "use a LazyTensorStorage"
            )

    def register_storage(self, storage: Storage) -> None:
        """Write to this storage from now on. ValueError for one of several item dims."""
        self.check_storage(storage)
        if getattr(self, "_storage", storage) is not storage:
            self._heap, self._keeps_index = [], None
        super().register_storage(storage)

    @property
    def write_count(self) -> int:
        """Items ever kept, those among them that were replaced since."""
        return self._write_count

    @property
    def _cursor(self) -> int:
        """The slot that comes next while the storage is not full."""
        return len(self._storage) % self._storage.max_size if hasattr(self, "_storage") else 0

    def add(self, data: Any) -> int | None:
        """Write one item if it ranks high enough; its slot, or None.

        RuntimeError for what is no tensordict or has several batch dims, KeyError without `rank_key`, TypeError and
        ValueError for a rank that is no number.
        """
        self._expect(data, dims=1)
        ranks = self._reduced(self._entry(data).reshape(1, -1))
        slot = int(self._placed(ranks, lambda slots, _: self._write_one(data, int(slots[0])))[0])
        return None if slot < 0 else slot

    def extend(self, data: Any) -> Tensor:
        """Write those of a batch, or of a list of items, that rank high enough, one after the other.

        int64 [batch]: the slots of items, -1 for one that is not kept, or is replaced by a later one of the batch. The
        errors of `add`; nothing is written then.
        """
        device = getattr(data, "device", None)
        if isinstance(data, LazyStackedTensorDict) and data.ndim:
            data = data.unbind(0)  # items may be unlike
        if isinstance(data, list | tuple):
            for item in data:
                self._expect(item, dims=1)
        else:
            self._expect(data, dims=2)
            if data.ndim == 0:
                raise RuntimeError("extend() needs data with a leading dim, got one without dims: use add()")
        index = torch.from_numpy(self._placed(self._ranks(data), lambda slots, rows: self._write(data, slots, rows)))
        return index.to(device) if device is not None and device.type != "cpu" else index

    # ------------------------------------------------------------------ ranks

    def _expect(self, data: Any, dims: int) -> None:
        if not is_tensor_collection(data):
            raise RuntimeError(
                f"{type(self).__name__} expects tensordicts or tensorclasses, got {type(data).__name__}; nothing was written"
            )
        if data.ndim > dims:
            raise RuntimeError(
                f"an item can have one batch dim, of a trajectory; got data of batch size {list(data.batch_size)}; nothing "
                "was written"
            )

    def _ranks(self, data: Any) -> np.ndarray:
        """The rank of each item."""
        if not len(data):
            return np.zeros(0)
        if is_tensor_collection(data):
            return self._reduced(self._entry(data).reshape(data.shape[0], -1))
        entries = [self._entry(item).reshape(-1) for item in data]
        if all(entry.shape == entries[0].shape and entry.dtype == entries[0].dtype for entry in entries):
            return self._reduced(torch.stack(entries))
        return np.concatenate([self._reduced(entry[None]) for entry in entries])

    def _entry(self, data: Any) -> Tensor:
        entry = data.get(self.rank_key, None)
        if entry is None:
            raise KeyError(f"the items have no entry {self.rank_key!r} to rank them by; nothing was written")
        if not isinstance(entry, Tensor) or entry.is_complex():
            found = entry.dtype if isinstance(entry, Tensor) else type(entry).__name__
            raise TypeError(f"{self.rank_key!r}: ranks must be real numbers, got {found}; nothing was written")
        return entry.detach()

    def _reduced(self, values: Tensor) -> np.ndarray:
        """One rank for each line of values."""
        if values.shape[1] == 0:
            raise ValueError(f"{self.rank_key!r}: an item without values has no rank; nothing was written")
        values = values.to(torch.float64)
        ranks = (values[:, 0] if values.shape[1] == 1 else REDUCTIONS[self.reduction](values)).cpu().numpy()
        if np.isnan(ranks).any():
            raise ValueError(
                f"{self.rank_key!r}: the rank of item {int(np.isnan(ranks).argmax())} is NaN; nothing was written"
            )
        return ranks

    # ------------------------------------------------------------------ slots

    def _placed(self, ranks: np.ndarray, write: Callable[[np.ndarray, np.ndarray], None]) -> np.ndarray:
        """The slot of each rank, -1 for none, after `write(slots, rows)` of what is kept, in the order of slots.

        Where that raises all is as before.
        """
        self._storage.refuse_forked_child()
        self._process.check()
        self._settle()
        known, before = len(self._heap), dict[int, float]()
        index = np.full(ranks.size, -1, np.int64)
        try:
            rows_of, kept = self._take(ranks, before)
            if rows_of:
                slots, rows = (np.fromiter(each, np.int64, len(rows_of)) for each in (rows_of, rows_of.values()))
                order = slots.argsort()
                write(slots[order], rows[order])
                index[rows] = slots
        except BaseException:
            self._heap = [(before.get(slot, rank), slot) for rank, slot in self._heap if slot < known]
            heapify(self._heap)
            raise
        self._write_count += kept
        return index

    def _take(self, ranks: np.ndarray, before: dict[int, float]) -> tuple[dict[int, int], int]:
        """Put ranks into the heap: which row each slot gets, and how many rows were kept for a time.

        `before` receives the ranks of the slots that were known.
        """
        heap, known, most = self._heap, len(self._heap), self._storage.max_size
        rows_of, kept = dict[int, int](), 0
        rows = np.flatnonzero(ranks > heap[0][0]) if known == most else np.arange(ranks.size)
        for row, rank in zip(rows.tolist(), ranks[rows].tolist(), strict=True):
            if len(heap) < most:
                slot = len(heap)
                heappush(heap, (rank, slot))
            elif rank > heap[0][0]:
                lowest, slot = heap[0]
                heapreplace(heap, (rank, slot))
                if slot < known:
                    before.setdefault(slot, lowest)
            else:
                continue
            rows_of[slot] = row
            kept += 1
        return rows_of, kept

    def _settle(self) -> None:
        """Rank what came into the storage, or went, by another way than through this writer."""
        known, length = len(self._heap), len(self._storage)
        if known > length:
            self._heap = [(rank, slot) for rank, slot in self._heap if slot < length]
            heapify(self._heap)
        elif known < length:
            tensors = isinstance(self._storage, TensorStorage)
            stored = self._storage[known:length] if tensors else [self._storage[slot] for slot in range(known, length)]
            for item in [stored] if tensors else stored:
                self._expect(item, dims=1 + tensors)
            try:
                ranks = self._ranks(stored)
            except (KeyError, TypeError, ValueError) as error:
                raise type(error)(
                    f"slots {known} to {length - 1}, filled by another writer: {error.args[0]}"
                ) from error
            self._heap += zip(ranks.tolist(), range(known, length), strict=True)
            heapify(self._heap)

    # ------------------------------------------------------------------ writing

    def _write_one(self, data: Any, slot: int) -> None:
        self._storage.set(slot, self.stamped(data, slot))

    def _write(self, data: Any, slots: np.ndarray, rows: np.ndarray) -> None:
        """Store rows of data at ascending slots."""
        if not is_tensor_collection(data):
            data = [data[row] for row in rows.tolist()]
        elif not np.array_equal(rows, np.arange(data.shape[0])):
            data = data[torch.from_numpy(rows)]
        index, storage = torch.from_numpy(slots), self._storage
        data = self.stamped(data, index)
        gapless = slots[-1] - slots[0] + 1 == slots.size
        if gapless and isinstance(storage, TensorStorage) and type(storage).set is TensorStorage.set:
            storage.set_run(int(slots[0]), index, data)
        else:
            storage.set(index, data)

    def stamped(self, data: Any, rows: Any) -> Any:
        if not isinstance(data, list):
            return self._with_index(data, rows, self._index_is_kept(data))
        keeps = bool(data) and self._index_is_kept(data[0])
        return [self._with_index(item, int(row), keeps) for item, row in zip(data, rows, strict=True)]

    def _with_index(self, data: Any, rows: Any, keeps: bool) -> Any:
        if not isinstance(data, TensorDictBase):
            return data
        has = "index" in data.keys()  # noqa: SIM118
        if isinstance(self._storage, TensorStorage) and not (keeps or has):
            return data
        stamped = shallow(data)  # of a list the stored item is not the one that the caller holds
        if keeps:
            stamped.set("index", expanded(rows, data.batch_size).clone())
        elif has:
            del stamped["index"]
        return stamped

    def _index_is_kept(self, given: Any) -> bool:
        """Whether stored items have an "index"; where there are none, whether the given one has."""
        layout = getattr(self._storage, "fixed_layout", None)
        if layout is not None:
            return ("index",) in layout.places
        if self._keeps_index is None or not len(self._storage):
            first = self._storage[0] if len(self._storage) else given
            self._keeps_index = isinstance(first, TensorDictBase) and "index" in first.keys()  # noqa: SIM118
        return self._keeps_index

    def note(self, data: Any, rows: Any) -> None:
        if isinstance(rows, int) and isinstance(data, TensorDictBase) and not data.is_locked:
            data.set("index", expanded(rows, data.batch_size).clone())

    def _empty(self, empty_write_count: bool = True) -> None:
        self._heap, self._keeps_index = [], None
        if empty_write_count:
            self._write_count = 0

    # ------------------------------------------------------------------ checkpoints

    def saved_state(self) -> dict[str, Any]:
        return {
            "_rank_key": key_of(self.rank_key),
            "_reduction": self.reduction,
            "_write_count": self._write_count,
            "_keeps_index": self._keeps_index,
            "_current_top_values": np.array(self._heap, np.float64).reshape(-1, 2),
        }

    def with_state(self, entries: Entries, options: LoadOptions) -> Callable[[], None]:
        count, key, reduction, keeps = entries.whole("_write_count"), self.rank_key, self.reduction, None
        if "_rank_key" in entries:
            key = entries.parameter("rank_key", a_key(entries, "_rank_key"), self.rank_key)
        if "_reduction" in entries:
            reduction = entries.parameter("reduction", entries.text("_reduction"), self.reduction)
        if "_keeps_index" in entries and entries.any("_keeps_index") is not None:
            keeps = entries.flag("_keeps_index")
        if reduction not in REDUCTIONS or key is None:
            raise entries.wrong("_reduction", "one that there is", reduction)
        table = np.array(entries.array("_current_top_values", np.float64, (None, 2)))
        slots = table[:, 1].astype(np.int64)
        if np.isnan(table).any() or (slots != table[:, 1]).any() or sorted(slots.tolist()) != [*range(slots.size)]:
            raise entries.wrong("_current_top_values", "ranks, and each slot once", table)
        if hasattr(self, "_storage") and slots.size > self._storage.max_size:
            entries.refuse(f"it ranks {slots.size} items, here there is room for {self._storage.max_size}")
        heap = list(zip(table[:, 0].tolist(), slots.tolist(), strict=True))
        heapify(heap)

        def put() -> None:
            self.rank_key, self.reduction, self._write_count = key, reduction, count
            self._heap, self._keeps_index = heap, keeps

        return put

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_heap": list(self._heap)}

    def __repr__(self) -> str:
        full = self._storage.is_full if hasattr(self, "_storage") else False
        return (
            f"{type(self).__name__}(cursor={self._cursor}, full_storage={full}, rank_key={self.rank_key}, "
            f"reduction={self.reduction})"
        )

"""A writer that keeps the items of the highest ranks."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappush, heapreplace
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, a_key, key_of
from interop.data.reductions import REDUCTIONS
from interop.data.tensordicts import shallow
from interop.engine.table import Claim
from interop.shared.processes import OneProcess
from interop.storages import LazyFrameStorage, Storage, TensorStorage
from interop.writers.round_robin import expanded
from interop.writers.writer import Writer

_ONE_PROCESS = (
    "a TensorDictMaxValueWriter cannot be shared between processes, each would rank only what it wrote: give the workers "
    "another writer, and rank in the process that made it"
)


class TensorDictMaxValueWriter(Writer):
    """Keeps the tensordicts of the highest ranks: in a full storage, an item replaces the lowest one if it ranks higher.

    The rank of an item is one of its entries when it is written, in double precision; later edits do not change it. Items
    that are stored already are ranked at the first write. O(log capacity) for an item that is kept, one comparison for
    others. An item can be a trajectory, of one batch dim.

    Items lose their own "index". If the stored items have one (from an earlier writer), the new items get their slot.

    Args:
        rank_key: the entry to rank by; ("next", "reward") by default.
        reduction: reduces an entry of several values to one rank: "sum", "max", "min", "mean" or "median".
        compilable: accepted for compatibility; ranks are never shared.
    """

    keeps_order = False
    rank_key: Any
    reduction: str
    _heap: list[tuple[float, int]]  # rank and slot of each stored item, the lowest first
    _write_count: int
    # Since `before_write`: how many items were ranked, and the ranks that were replaced.
    _replaced: tuple[int, dict[int, float]] | None
    _process: OneProcess

    def __init__(self, rank_key: Any = None, reduction: str = "sum", compilable: bool = False) -> None:
        super().__init__(compilable)
        if reduction not in REDUCTIONS:
            raise NotImplementedError(f"unknown reduction {reduction!r}: use one of {', '.join(REDUCTIONS)}")
        self.rank_key = ("next", "reward") if rank_key is None else rank_key
        self.reduction = reduction
        self._heap = []
        self._write_count = 0
        self._replaced = None
        self._process = OneProcess(_ONE_PROCESS)

    def before_write(self) -> dict[str, Any]:
        self._replaced = None
        return self.__dict__.copy()

    def put_back(self, before: dict[str, Any]) -> None:
        replaced = self._replaced
        super().put_back(before)
        if replaced is not None:  # the heap has changed in place
            count, ranks = replaced
            self._heap = [(ranks.get(slot, rank), slot) for rank, slot in self._heap if slot < count]
            heapify(self._heap)

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
        """Write to this storage from now on. ValueError for several item dims."""
        self.check_storage(storage)
        if getattr(self, "_storage", storage) is not storage:
            self._heap = []
        super().register_storage(storage)

    @property
    def write_count(self) -> int:
        """Items ever kept, including those that were replaced later."""
        return self._write_count

    @property
    def _cursor(self) -> int:  # its name in torchrl
        """The next slot, while the storage is not full."""
        return len(self._storage) % self._storage.max_size if hasattr(self, "_storage") else 0

    def add(self, data: Any) -> int | None:
        """Write one item if it ranks high enough. Returns its slot, or None.

        RuntimeError for other data than a tensordict, and for several batch dims; KeyError without `rank_key`; TypeError
        and ValueError for a rank that is no number. Nothing is written then.
        """
        self._expect(data, dims=1)
        ranks = self._reduced(self._entry(data).reshape(1, -1))
        placed = self._placed(ranks, lambda slots, _: self._storage.set(slots[0], self.stamped(data, slots[0])))
        return None if placed[0] < 0 else int(placed[0])

    def extend(self, data: Any) -> Tensor:
        """Write the items of a batch, or of a list, that rank high enough, one after the other.

        Returns slots, int64 [batch]: -1 for items that are not kept, or replaced by a later one of the batch. The errors of
        `add`.
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
        placed = self._placed(self._ranks(data), lambda slots, rows: self._write(data, slots, rows))
        return torch.from_numpy(placed).to(device or "cpu")

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
        return np.concatenate([self._reduced(self._entry(item).reshape(1, -1)) for item in data])

    def _entry(self, data: Any) -> Tensor:
        entry = data.get(self.rank_key, None)
        if entry is None:
            raise KeyError(f"the items have no entry {self.rank_key!r} to rank them by; nothing was written")
        if not isinstance(entry, Tensor) or entry.is_complex():
            came = entry.dtype if isinstance(entry, Tensor) else type(entry).__name__
            raise TypeError(f"{self.rank_key!r}: ranks must be real numbers, got {came}; nothing was written")
        return entry.detach()

    def _reduced(self, values: Tensor) -> np.ndarray:
        """The rank of each line of values."""
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

    def _placed(self, ranks: np.ndarray, write: Callable[[list[int], list[int]], None]) -> np.ndarray:
        """The slot of each rank, -1 for none. Calls `write(slots, rows)` for the items that are kept, in order of slots.

        If that raises, the ranks are as before.
        """
        self._storage.guard.refuse_forked_child()
        self._process.check()
        self._rank_stored()
        heap = self._heap
        ranked = len(self._heap)
        most = self._storage.max_size
        row_of = dict[int, int]()  # by slot: the row that it gets
        written = 0  # rows that were kept at least for a time
        before = dict[int, float]()  # the ranks that were replaced
        self._replaced = ranked, before
        rows = np.flatnonzero(ranks > heap[0][0]) if ranked == most else np.arange(ranks.size)
        try:
            for row, rank in zip(rows.tolist(), ranks[rows].tolist(), strict=True):
                if len(heap) < most:
                    slot = len(heap)
                    heappush(heap, (rank, slot))
                elif rank > heap[0][0]:
                    lowest, slot = heap[0]
                    before.setdefault(slot, lowest)  # first: an interrupt must not lose it
                    heapreplace(heap, (rank, slot))
                else:
                    continue
                row_of[slot] = row
                written += 1
            if row_of:
                slots = sorted(row_of)
                write(slots, [row_of[slot] for slot in slots])
        except BaseException:
            self._heap = [(before.get(slot, rank), slot) for rank, slot in heap if slot < ranked]
            heapify(self._heap)
            raise
        self._write_count += written
        index = np.full(ranks.size, -1)
        index[list(row_of.values())] = list(row_of)
        return index

    def _rank_stored(self) -> None:
        """Rank items that another writer wrote; forget those that are gone."""
        ranked = len(self._heap)
        length = len(self._storage)
        if ranked > length:
            self._heap = [(rank, slot) for rank, slot in self._heap if slot < length]
        elif ranked < length:
            tensors = isinstance(self._storage, TensorStorage)
            stored = (
                self._storage[ranked:length] if tensors else [self._storage[slot] for slot in range(ranked, length)]
            )
            for item in [stored] if tensors else stored:
                self._expect(item, dims=1 + tensors)
            self._heap = [*self._heap, *zip(self._ranks(stored).tolist(), range(ranked, length), strict=True)]
        if ranked != length:
            heapify(self._heap)

    # ------------------------------------------------------------------ writing

    def _write(self, data: Any, slots: list[int], rows: list[int]) -> None:
        """Store rows of data at ascending slots."""
        if not is_tensor_collection(data):
            data = [data[row] for row in rows]
        elif rows != list(range(data.shape[0])):
            data = data[torch.from_numpy(np.array(rows))]  # `torch.tensor` takes five times as long
        index = torch.from_numpy(np.array(slots))
        storage = self._storage
        data = self.stamped(data, index)
        gapless = slots[-1] - slots[0] + 1 == len(slots)
        if gapless and isinstance(storage, TensorStorage) and type(storage).set is TensorStorage.set:
            storage.table.write_run(Claim(slots[0], index, is_counted=False), data)
        else:
            storage.set(index, data)

    def stamped(self, data: Any, rows: Any) -> Any:
        if isinstance(data, list):
            return [self.stamped(item, int(row)) for item, row in zip(data, rows, strict=True)]
        if not isinstance(data, TensorDictBase):
            return data
        layout = self._storage.contents.fixed_layout
        stamped = shallow(data)  # a list must not store the object that the caller holds
        if layout is not None and ("index",) in layout.places:
            stamped.set("index", expanded(rows, data.batch_size).clone())
        elif "index" in data.keys():  # noqa: SIM118
            del stamped["index"]
        return stamped

    def note(self, data: Any, rows: Any) -> None:
        if isinstance(rows, int) and isinstance(data, TensorDictBase) and not data.is_locked:
            data.set("index", expanded(rows, data.batch_size).clone())

    def _empty(self, empty_write_count: bool = True) -> None:
        self._heap = []
        if empty_write_count:
            self._write_count = 0

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "_rank_key": key_of(self.rank_key),
            "_reduction": self.reduction,
            "_write_count": self._write_count,
            "_current_top_values": np.array(self._heap, np.float64).reshape(-1, 2),
        }

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            count = entries.whole("_write_count")
            key = self.rank_key
            reduction = self.reduction
            if "_rank_key" in entries:
                key = entries.parameter("rank_key", a_key(entries, "_rank_key"), self.rank_key)
            if "_reduction" in entries:
                reduction = entries.parameter("reduction", entries.text("_reduction"), self.reduction)
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
                self.rank_key = key
                self.reduction = reduction
                self._write_count = count
                self._heap = heap

            return put

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "cursor", self._cursor
        yield "full_storage", self._storage.is_full if hasattr(self, "_storage") else False
        yield from (("rank_key", self.rank_key), ("reduction", self.reduction))

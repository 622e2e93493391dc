"""Names the slots of new rows: the oldest slot first."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, integers
from interop.data.by_item import set_expanded
from interop.data.index import as_int, as_tensor
from interop.data.layout import Layout, stack_items
from interop.data.pytrees import each_leaf, lead_of
from interop.data.tensordicts import entries_of, of_entries, shallow
from interop.engine.table import Claim
from interop.host.ring import Ring
from interop.storages import Storage, TensorStorage
from interop.storages.all_or_nothing import all_or_nothing
from interop.storages.lists import unbind
from interop.writers.generations import Generations
from interop.writers.writer import Writer

_NONE = np.zeros(0, np.int64)


class RoundRobinWriter(Writer):
    """Fills the storage in order, then overwrites the oldest rows.

    Cursor and count belong to the storage: all round-robin writers on it continue where the last write ended, also in
    worker processes that share it. A write that raises moves neither.

    Args:
        compilable: has no effect; the storage decides whether its counters are local to a process.
        track_generations: count the writes of each row; a sample has the counts as "index_generation". See
            `generations_of`, and `update_if_present` of a buffer.
    """

    # Returns at most so many rows that are free again; these are written before the row at the cursor.
    vacant: Callable[[int], np.ndarray] | None = None
    _unregistered: Ring  # of a writer without a storage

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        super().__init__(compilable)
        self._unregistered = Ring()
        self.tracks_generations = bool(track_generations)

    def register_storage(self, storage: Storage) -> None:
        """Write to this storage from now on, at its cursor; at a loaded cursor if nothing was written yet."""
        if self.tracks_generations and storage.reopened and storage.generations is None and len(storage):
            raise RuntimeError(
                "how often rows were written is not kept in files: use a writer without track_generations on a storage that "
                "was opened"
            )
        registered = hasattr(self, "_storage")
        loaded = self._unregistered
        super().register_storage(storage)
        if self.tracks_generations and storage.generations is None:
            storage.generations = Generations(storage)
        if not registered and loaded.count and not storage.ring.count:
            storage.ring.cursor = loaded.cursor
            storage.ring.count = loaded.count

    @property
    def _ring(self) -> Ring:
        return self._storage.ring if hasattr(self, "_storage") else self._unregistered

    @property
    def cursor(self) -> int:
        """The row that is written next."""
        return self._ring.cursor

    @cursor.setter
    def cursor(self, row: int) -> None:
        self._ring.go_on_at(row, self._storage.row_capacity(None))

    _cursor = cursor  # its name in torchrl

    @property
    def write_count(self) -> int:
        """Rows ever written to the storage by round-robin writers; never capped by the capacity."""
        return self._ring.count

    def add(self, data: Any) -> Any:
        """Write one item; an int, or coordinates [n, ndim] where a row holds several items."""
        self._storage.guard.refuse_forked_child()
        storage = self._storage
        row = self.cursor
        vacant = self._vacant(1)
        after = row + 1
        if vacant.size:
            after = row
            row = int(vacant[0])
        with storage.guard.transaction():
            storage.set(row, self.stamped(data, row))
            self._advance(row, 1, after)
        return self._storage.contents.coordinates(row)

    def extend(self, data: Any) -> Tensor:
        """Write a batch, whose dim 0 are the rows. Of more rows than the capacity the last stay."""
        index = self.extend_on_host(data)
        device = getattr(data, "device", None)  # an array of NumPy has a text, one of JAX another object
        return index.to(device) if isinstance(device, torch.device) and device.type != "cpu" else index

    @property
    def leaves_slots_on_host(self) -> bool:
        return type(self).extend is RoundRobinWriter.extend

    def extend_on_host(self, data: object) -> Tensor:
        storage = self._storage
        if not isinstance(storage, TensorStorage):
            data = unbind(data)
        dims = _item_dims(data, storage.ndim)
        if 0 in dims:
            return self._nothing()
        storage.guard.refuse_forked_child()
        cursor = storage.ring.cursor
        table = storage.table if isinstance(storage, TensorStorage) and storage.contents.tracks_writes else None
        capacity = (storage if table is None else table).row_capacity(data)
        vacant = self._vacant(dims[0])
        after = cursor + dims[0] - vacant.size
        rows = np.arange(cursor, after)
        if after > capacity:
            rows %= capacity
        index = torch.from_numpy(np.concatenate((vacant, rows)) if vacant.size else rows)
        stamped = self.stamped(data, index)
        with storage.guard.transaction():
            if table is not None and not vacant.size:
                table.write_run(Claim(cursor, index, written=self._counts_of_rows()), stamped)
            elif dims[0] <= capacity or vacant.size:
                storage.set(index, stamped)
                self._advance(index, dims[0], after)
            else:
                self._set_last(index, stamped, capacity)
                self._advance(index, dims[0], after)
        coordinates: Tensor = index if storage.ndim == 1 else storage.contents.coordinates(index)
        return coordinates

    def write_at(self, index: Any, data: Any) -> Any:
        """Write one item at an int, or a batch at a list, array or tensor of rows. Returns slots as `add` and `extend` do.

        The cursor stays, the count grows. Of equal rows the last wins. The samplers of all buffers on the storage are
        told. IndexError or TypeError for rows that cannot be, and the errors of `Storage.set`. Nothing is written then.
        """
        storage = self._storage
        with storage.lock.held():
            storage.guard.refuse_forked_child()
            for buffer in storage.followers.buffers():
                buffer.sampler.item_values.refuse_forked_child()
            rows: Any = as_int(index)
            if rows is None:
                rows = as_tensor(index).cpu()
                data = data if isinstance(storage, TensorStorage) else unbind(data)
                if rows.ndim != 1 or rows.dtype == torch.bool:
                    raise TypeError(f"write_at() takes a row, or a list of rows, got {index!r}")
            named = np.atleast_1d(rows.numpy() if isinstance(rows, Tensor) else rows)
            if named.min(initial=0) < 0:
                raise IndexError(f"rows to write at are counted from 0, got {index!r}")
            grows = bool(named.max(initial=-1) >= storage.contents.filled_rows)
            stamped = self.stamped(data, rows)
            cursor = self.cursor

            def write() -> Any:
                with storage.guard.transaction():
                    storage.set(rows, stamped, set_cursor=grows)
                    self._advance(rows, named.size, cursor)
                    if storage.contents.kept is not None:
                        storage.contents.kept.forget(rows)
                slots = self._storage.contents.coordinates(rows)
                for buffer in storage.followers.all():
                    buffer.mark_update(slots)
                return slots

            samplers = (buffer.sampler for buffer in storage.followers.buffers())
            values = [sampler.item_values for sampler in samplers if sampler.hooks.sees_writes]
            return all_or_nothing(storage, [storage, self, *values, *storage.followers.observers()], write)

    def generations_of(self, index: Any) -> Tensor:
        if not self.tracks_generations:
            return super().generations_of(index)
        assert self._storage.generations is not None
        return self._storage.generations.of(self._rows_of(index))

    @property
    def is_undoable(self) -> bool:
        return self.tracks_generations or type(self).before_write is not RoundRobinWriter.before_write

    def before_write(self) -> dict[str, Any]:
        counted = self._storage.generations if self.tracks_generations else None
        return {} if counted is None else {"counted": counted, "before": counted.before_write()}

    def put_back(self, before: dict[str, Any]) -> None:
        if before:
            before["counted"].put_back(before["before"])

    def _vacant(self, count: int) -> np.ndarray:
        return _NONE if self.vacant is None else self.vacant(count)

    def _nothing(self) -> Tensor:
        raise RuntimeError("Expected at least one element in extend.")

    def _set_last(self, index: Tensor, data: Any, capacity: int) -> None:
        """Write the last rows of a batch larger than the capacity, in the order of slots, so that lists can grow."""
        order = index[-capacity:].argsort() + len(index) - capacity
        last_rows = [data[k] for k in order] if isinstance(data, list) else each_leaf(data, lambda leaf: leaf[order])
        self._storage.set(index[order], last_rows)
        self._ring.renewed((int(index[-1]) + 1) % capacity)

    def _counts_of_rows(self) -> Callable[[Tensor], None] | None:
        """What counts the writes of each row, if something does."""
        storage = self._storage
        return None if storage.generations is None else partial(storage.generations.written, storage)

    def _advance(self, rows: Any, count: int, cursor: int) -> None:
        """Count `count` written rows, and move the cursor, around the ring."""
        storage = self._storage
        ring = self._ring
        if storage.generations is not None:
            storage.generations.written(storage, rows)
        capacity = storage.row_capacity(None)
        if storage.contents.tracks_writes:
            ring.go_on_at(cursor % capacity, capacity)
        else:
            ring.edited(None)
            ring.cursor = cursor % capacity
        ring.count += count

    def _empty(self, empty_write_count: bool = True) -> None:
        self._ring.cursor = 0
        if empty_write_count:
            self._ring.count = 0
        if self.tracks_generations and self._storage.generations is not None:
            self._storage.generations.emptied()

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        storage: Storage | None = getattr(self, "_storage", None)
        ring = None if storage is None else _ring(storage)
        state = {"_cursor": self.cursor, "_write_count": self.write_count, "_ring": ring}
        if self.tracks_generations:
            counted = None if storage is None else storage.generations
            state["_generation"] = None if counted is None else counted.state()
        return state

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            count = entries.whole("_write_count")
            cursor = self._fitting(entries, entries.whole("_cursor"))
            tracked = "_generation" in entries
            storage = getattr(self, "_storage", None)
            writes = None
            if tracked and entries.any("_generation") is not None and storage is not None:
                writes = integers(entries, "_generation", None, 0, 2**62)
            if tracked != self.tracks_generations and options.strict:
                entries.refuse(f"track_generations is {tracked} there and {self.tracks_generations} here")
            counted = None if storage is None else storage.generations
            put_generations: Any = None
            if counted is not None or (writes is not None and self.tracks_generations):
                assert storage is not None
                counted = Generations(storage) if counted is None else counted
                put_generations = counted.with_state(writes, storage)

            def put() -> None:
                self._ring.cursor = cursor
                self._ring.count = count
                if put_generations is not None:
                    self._storage.generations = counted
                    put_generations()

            return put

    def _fitting(self, entries: Entries, cursor: int) -> int:
        """The saved cursor for the storage here, which may have another capacity if no row was overwritten yet."""
        if "_ring" not in entries or entries.any("_ring") is None:
            return cursor
        ring = entries.fields("_ring")
        capacity = ring.whole("capacity", 1)
        filled = ring.whole("filled")
        if filled > capacity or cursor >= capacity:
            raise entries.wrong("_cursor", f"a row of {capacity}", cursor)
        own_ring = _ring(self._storage) if hasattr(self, "_storage") else None
        here = capacity if own_ring is None else own_ring["capacity"]
        if here == capacity:
            return cursor
        if cursor != filled % capacity or filled > here:
            entries.refuse(f"it writes around {capacity} rows, here there are {here}")
        return filled % here

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "vacant": None}

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "cursor", self.cursor
        yield "full_storage", self._storage.is_full if hasattr(self, "_storage") else False


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """Also stores the row number of each item of a tensordict under "index", expanded to its batch dims.

    Not in a storage that already has items without "index".
    """

    def stamped(self, data: Any, rows: Any) -> Any:
        if isinstance(data, list) and isinstance(self._storage, TensorStorage):
            data = stack_items(data) if all(isinstance(item, TensorDictBase) for item in data) else data
        elif isinstance(data, list) and not isinstance(rows, int):
            return [self.stamped(item, int(row)) for item, row in zip(data, rows, strict=True)]
        if type(data) is not TensorDict and not isinstance(data, TensorDictBase):
            return data
        storage = self._storage
        layout = storage.table.fixed_layout if isinstance(storage, TensorStorage) else None
        if layout is not None and ("index",) not in layout.places:
            return data.exclude("index") if "index" in data.keys() else data  # noqa: SIM118
        if -1 in data.batch_size:  # a lazy stack of items of unlike lengths
            stamped = shallow(data)
            set_expanded(stamped, "index", torch.as_tensor(rows))
            return stamped
        rows = expanded(rows, data.batch_size)
        entries = None if layout is None else entries_of(data)
        if entries is not None:
            return of_entries({**entries, "index": rows}, data.batch_size, None)
        stamped = shallow(data)
        # A list stores this tensor itself; other storages copy it.
        stamped.set("index", rows if isinstance(storage, TensorStorage) else rows.clone())
        return stamped

    def note(self, data: Any, rows: Any) -> None:
        if isinstance(data, TensorDictBase) and not data.is_locked:
            set_expanded(data, "index", torch.as_tensor(rows))

    def _nothing(self) -> Tensor:
        return torch.zeros(
            (0,) if self._storage.ndim == 1 else (0, self._storage.ndim), dtype=torch.int64, device="cpu"
        )


def _ring(storage: Storage) -> dict[str, Any] | None:
    """Capacity and size in rows; None as long as the number of items in a row is unknown."""
    if isinstance(storage, TensorStorage) and storage.ndim > 1 and storage.table.rows is None:
        return None
    return {"capacity": storage.row_capacity(None), "filled": storage.contents.filled_rows}


def expanded(index: Any, shape: torch.Size) -> Tensor:
    """Row numbers as int64 of the batch dims of a tensordict, without a copy."""
    rows = index if isinstance(index, Tensor) else torch.from_numpy(np.array(index, np.int64))
    return rows if rows.shape == shape else rows.reshape(*rows.shape, *(1 for _ in shape[rows.ndim :])).expand(shape)


def _item_dims(data: Any, ndim: int) -> tuple[int, ...]:
    """The item dims of a batch, rows first. The storage refuses batches with too few."""
    if isinstance(data, list):
        return (len(data),)
    if type(data) is TensorDict and data.batch_size:
        return tuple(data.batch_size[:ndim])
    if not isinstance(data, Tensor) and not is_tensor_collection(data):
        Layout.of(data, 1)  # raises for data that cannot be stored
    shape = lead_of(data)
    if not shape:
        raise RuntimeError("extend() needs data with a leading dim, got one without dims: use add() for a single item")
    return tuple(shape[:ndim])

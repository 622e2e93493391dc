"""Maps from tensordict keys to values in a storage."""

import abc
import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from fbuf.checkpoint import Fields, Reading, Verify, Writing, load
from interop.checkpoint.state import EXACT, Apply, Component, LoadOptions, described, state_for
from interop.checkpoint.values import NO_PICKLE, decode, encode, is_encoded
from interop.host.threads import Lock
from interop.maps.hashes import DEFAULT_COMPONENTS, RandomProjectionHash, SipHash
from interop.maps.query import QueryModule
from interop.storages.lazy import LazyTensorStorage
from interop.storages.storage import Storage


class TensorMap(abc.ABC):
    """Base class of maps from keys to values."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Remove all keys."""

    @abc.abstractmethod
    def __getitem__(self, key: Any) -> Any:
        """The values of keys. KeyError for unknown keys."""

    @abc.abstractmethod
    def __setitem__(self, key: Any, value: Any) -> None:
        """Store values under keys."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of keys that have a value."""

    @abc.abstractmethod
    def contains(self, key: Any) -> Tensor:
        """Whether keys have a value: bool, of their batch size."""

    def __contains__(self, key: object) -> bool:
        return bool(self.contains(key))


class TensorDictMap(TensorMap, Component):
    """Maps tensordict keys of any batch size, such as [] or [B, T], to values in a storage. O(batch), thread-safe.

    A write stores `_index` (the row of the storage) and `_hash` in the tensordict of keys (`query_module.out_keys`). Of
    equal keys in a batch the last one wins. After an error, also of the storage, map and keys are unchanged.

    Args:
        query_module: numbers the keys. Rows numbered by other users of the module are lost to this map.
        storage: the storage of the values, used by this map only. Its `max_size` is the maximum number of keys.
        collate_fn: makes a batch from the rows read from the storage. Default: lists are stacked.
        out_keys: the entries of the values to store. Default: all.
        write_fn: called as `write_fn(new)` for new keys and as `write_fn(new, old)` for known keys, with their stored
            values. Its result is stored, and written into the values. Equal keys of a batch are merged one after another.
    """

    def __init__(
        self,
        *,
        query_module: QueryModule,
        storage: Storage,
        collate_fn: Callable[[Any], Any] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        write_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.query_module = query_module
        self.storage = storage
        self.collate_fn = _stacked if collate_fn is None else collate_fn
        self.write_fn = write_fn
        self._out_keys = None if out_keys is None else list(out_keys)
        self._count = 0
        # By row of the storage: the position of its last write in that batch, -1 for a row without a value.
        self._written = np.empty(0, np.int64)
        self._lock = Lock()

    @classmethod
    def from_tensordict_pair(
        cls,
        source: TensorDictBase,
        dest: TensorDictBase,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey] | None = None,
        max_size: int = 1000,
        storage_constructor: Callable[..., Storage] | None = None,
        hash_module: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        write_fn: Callable[..., Any] | None = None,
        consolidated: bool | None = None,
    ) -> Self:
        """An empty map for keys like `source` and values like `dest`; fill it by `map[source] = dest`.

        Args:
            source: has the `in_keys`. By default `RandomProjectionHash` hashes keys with more than 16 features, `SipHash`
                the others.
            dest: the values; not read.
            in_keys, hash_module: see `QueryModule`.
            out_keys, collate_fn, write_fn: see `TensorDictMap`.
            max_size: the size of the default storage, a `LazyTensorStorage`.
            storage_constructor: called without arguments, or with `consolidated` if that is not None.
            consolidated: passed to the constructor of the storage.
        """
        if hash_module is None:
            hash_module = [
                RandomProjectionHash()
                if value.ndim > source.ndim and value.shape[-1] > DEFAULT_COMPONENTS
                else SipHash()
                for value in map(source.get, in_keys)
            ]
        if storage_constructor is None:
            storage: Storage = LazyTensorStorage(max_size, consolidated=bool(consolidated))
        else:
            storage = storage_constructor(**({} if consolidated is None else {"consolidated": consolidated}))
        query = QueryModule(in_keys, hash_module=hash_module)
        return cls(query_module=query, storage=storage, collate_fn=collate_fn, out_keys=out_keys, write_fn=write_fn)

    @property
    def in_keys(self) -> list[NestedKey]:
        """The keys of the query module."""
        keys: list[NestedKey] = self.query_module.in_keys
        return keys

    @property
    def out_keys(self) -> list[NestedKey]:
        """The given entries of the values, or those of the first stored value. AttributeError before the first write."""
        if self._out_keys is None:
            if not len(self):
                raise AttributeError("out_keys are known once a value is stored, or given to the constructor")
            return list(self.storage.get(int(np.flatnonzero(self._written >= 0)[0])).keys(True, True))
        return self._out_keys

    @property
    def index_key(self) -> NestedKey:
        """The entry of the keys into which a write stores the rows of the storage."""
        return self.query_module.index_key

    @property
    def max_size(self) -> int:
        """The maximum number of keys."""
        return self.storage.max_size

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return True  # an empty map is truthy

    def clear(self) -> None:
        """Remove all keys and values. A tensor storage keeps its memory."""
        with self._lock:
            self.storage.empty()
            self.query_module.truncate(0)
            self._written, self._count = self._written[:0], 0

    def contains(self, key: TensorDictBase | Tensor | int) -> Tensor:
        """Whether keys, or rows of the storage, have a value: bool, of their batch size."""
        with self._lock:
            rows, batch = self._find(key)
            return torch.from_numpy(self._has(rows)).reshape(batch)

    def __getitem__(self, key: TensorDictBase | Tensor | int) -> Any:
        """The values of keys, in their batch size. Keys are not modified. KeyError for unknown keys.

        An integer key is a row of the storage, such as the `_index` stored by a write.
        """
        with self._lock:
            rows, batch = self._find(key)
            unknown = np.flatnonzero(~self._has(rows))
            if unknown.size:
                raise KeyError(
                    self._no_value(key, [np.unravel_index(place, batch) for place in unknown[:3]], unknown.size)
                )
            if not self._count:
                raise KeyError("the map has no values that tell the shapes of an empty batch")
            read = rows if rows.size else np.flatnonzero(self._written >= 0)[:1]
            found = self.collate_fn(self.storage.get(torch.from_numpy(read)))
        if not rows.size:
            found = torch.stack([found[0]])[:0]  # an empty list cannot be stacked
        return found if len(batch) == 1 else found.reshape(batch) if batch else found[0]

    def __setitem__(self, key: TensorDictBase, value: TensorDictBase) -> None:
        """Store values under keys of the same batch size.

        IndexError if the new keys do not fit, ValueError for another batch size, RuntimeError for a locked tensordict of
        keys, and the errors of `QueryModule.indices` and of the storage. After an error nothing is stored.
        """
        batch, query = key.batch_size, self.query_module
        if value.batch_size[: len(batch)] != batch:
            raise ValueError(f"keys have the batch size {list(batch)}, values {list(value.batch_size)}")
        if key.is_locked:
            raise RuntimeError("the tensordict of keys is locked, and a write stores the index in it: unlock it")
        given = value if self._out_keys is None else value.select(*self._out_keys, strict=False)
        new = given if len(batch) == 1 else given.reshape(batch.numel(), *value.batch_size[len(batch) :])
        with self._lock:
            hashes, before = query.hashes(key), query.size
            index = query.indices(key, extend=True, limit=self.max_size)
            try:
                stored = self._write(index.reshape(-1).cpu().numpy(), new)
            except BaseException:
                query.truncate(before)
                raise
        if stored is not new:
            value.update(stored if len(batch) == 1 else stored[0] if not batch else stored.reshape(value.batch_size))
        key.set(query.index_key, index)
        key.set(query.hash_key, hashes)

    def _find(self, key: TensorDictBase | Tensor | int) -> tuple[np.ndarray, torch.Size]:
        """The rows of keys, 1-d, and their batch size."""
        if isinstance(key, Tensor | int):
            index = torch.as_tensor(key)
            if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
                raise TypeError(f"rows are named by integers, got {index.dtype}")
        else:
            index = self.query_module.indices(key)
        return index.reshape(-1).cpu().numpy().astype(np.int64, copy=False), index.shape

    def _has(self, rows: np.ndarray) -> np.ndarray:
        """Whether rows have a value."""
        if not len(self._written):
            return np.zeros(len(rows), np.bool_)
        in_range = (rows >= 0) & (rows < len(self._written))
        return in_range & (self._written.take(rows, mode="clip") >= 0)

    def _no_value(self, key: TensorDictBase | Tensor | int, places: Sequence[Any], count: int) -> str:
        """The error text for `count` keys without a value; `places` are the positions of the first ones."""
        found = [tuple(map(int, place)) for place in places]
        if isinstance(key, Tensor | int):
            first: Any = int(torch.as_tensor(key)[found[0]])
        else:
            first = {name: key.get(name)[found[0]].flatten()[:6].tolist() for name in self.in_keys}
        return (
            f"{count} keys have no value, at {found} in the batch; the first begins with {first}. Ask contains() before"
        )

    def _write(self, rows: np.ndarray, new: TensorDictBase) -> TensorDictBase:
        """Store values at rows. Returns the stored values."""
        if not rows.size:
            return new
        if rows.min() < 0 or rows.max() >= self.max_size:
            raise IndexError(f"the storage has {self.max_size} rows, the query module gave the index {rows.max()}")
        stored = new if self.write_fn is None else self._merged(rows, new)
        if (length := int(rows.max()) + 1) > len(self._written):
            longer = np.full(max(length, min(2 * length, self.max_size)), -1, np.int64)
            longer[: len(self._written)] = self._written
            self._written = longer
        before, order = self._written.take(rows), np.arange(len(rows))
        self._written[rows] = order  # of equal rows the last one wins
        last = self._written.take(rows) == order
        kept = order if last.all() else np.flatnonzero(last)
        fresh = before[kept] < 0
        try:
            self._store(rows, stored, kept[fresh], new=True)
            self._store(rows, stored, kept[~fresh], new=False)
        except BaseException:
            self._written[rows] = before
            raise
        self._count += int(np.count_nonzero(fresh))
        return stored

    def _store(self, rows: np.ndarray, values: TensorDictBase, places: np.ndarray, *, new: bool) -> None:
        """Write the values at `places` to the storage. Their rows are distinct, and all new or all known.

        Consecutive new rows are written as one slice, known rows as edits, which is cheaper for the storage.
        """
        if not places.size:
            return
        if len(places) < len(rows):
            places = places[np.argsort(rows[places])]  # a list storage appends in row order
            rows, values = rows[places], _at(values, places)
        start, stop = int(rows[0]), int(rows[-1]) + 1
        run = stop - start == len(rows) and bool((np.diff(rows) == 1).all())  # True for new rows
        self.storage.set(slice(start, stop) if run else torch.from_numpy(rows), values, set_cursor=new)

    def _merged(self, rows: np.ndarray, new: TensorDictBase) -> TensorDictBase:
        """The values after `write_fn`; values of equal rows are merged one after another."""
        order = np.argsort(rows, kind="stable")
        starts = np.flatnonzero(np.diff(rows[order], prepend=-1))  # starts of runs of equal rows
        counts = np.diff(starts, append=len(rows))
        step_of, previous, slot = np.empty((3, len(rows)), np.int64)
        step_of[order] = np.arange(len(rows)) - np.repeat(starts, counts)  # number of previous occurrences of the row
        previous[order[1:]] = order[:-1]  # position of its previous occurrence
        known = self._has(rows)
        places: list[np.ndarray] = []
        results: list[TensorDictBase] = []
        for step in range(int(counts.max())):
            now = np.flatnonzero(step_of == step)
            if step:
                merged = [self._call(_at(new, now), _at(results[-1], slot[previous[now]]))]
            else:
                fresh, stored = now[~known[now]], now[known[now]]
                merged = [self._call(_at(new, fresh))] if fresh.size else []
                if stored.size:
                    old = self.collate_fn(self.storage.get(torch.from_numpy(rows[stored])))
                    merged.append(self._call(_at(new, stored), old))
                now = np.concatenate([fresh, stored])
            slot[now] = np.arange(len(now))
            results.append(merged[0] if len(merged) == 1 else torch.cat(merged))
            places.append(now)
        return _at(results[0] if len(results) == 1 else torch.cat(results), np.argsort(np.concatenate(places)))

    def _call(self, new: TensorDictBase, *old: TensorDictBase) -> TensorDictBase:
        assert self.write_fn is not None
        merged: TensorDictBase = self.write_fn(new, *old)
        if merged.batch_size[:1] != new.batch_size[:1]:
            raise ValueError(f"write_fn must return {len(new)} rows, got the batch size {list(merged.batch_size)}")
        return merged

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        with self._unchanging():
            return {**self._keys(), "storage": self.storage.state()}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        fields = Fields(tree, "the state of a map")
        with self._unchanging():
            put_keys = self._with_keys(fields)
            return self._with_values(
                partial(self.storage.guard.replace, self.storage.with_state(fields.any("storage"), options)), put_keys
            )

    def state_dict(self) -> dict[str, Any]:
        """A copy of keys and values as tensors and plain values, for `torch.load(weights_only=True)`."""
        with self._unchanging():
            query, written = copy.deepcopy(self.query_module.state_dict()), torch.from_numpy(self._written >= 0)
            return {"query": query, "written": written, "storage": self.storage.state_dict()}

    @contextlib.contextmanager
    def _unchanging(self) -> Iterator[None]:
        with self._lock, self.storage.lock.held():
            yield

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save keys and values to a folder, atomically and flushed to disk. `write_fn` and `collate_fn` are not saved."""
        with Writing(path) as out, self._lock:
            if self._count:  # an uninitialized storage cannot be saved
                self.storage.dumps(out.folder("storage"))
            out.write(described(self, self._keys()))

    def _keys(self) -> dict[str, Any]:
        """The part of the state that is not in the storage."""
        query = encode(dict(self.query_module.state_dict()), "the query module", remedy=NO_PICKLE)
        return {"query": query, "written": self._written >= 0}

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load a checkpoint of `dumps` into a map with the same configuration. After an error nothing has changed.

        FileNotFoundError if there is none, `CheckpointCorrupt` for damage, `CheckpointMismatch` for one of another object.
        The options are those of `ReplayBuffer.loads`.
        """
        how = {"strict": strict, "cast": cast, "allow_pickle": allow_pickle}

        def use(source: Reading) -> Apply:
            fields = Fields(state_for(self, source.tree, str(source.path)), str(source.path))
            put_values: Apply = self.storage.empty
            if np.asarray(fields.array("written", np.bool_, (None,))).any():
                put_values = partial(self.storage.loads, source.folder("storage"), verify=verify, **how)
            return self._with_values(put_values, self._with_keys(fields))

        with self._unchanging():
            load(path, use, verify)()

    def _with_keys(self, fields: Fields) -> Apply:
        """Check the keys of a state; the returned function puts them in."""
        query, written = fields.any("query"), fields.any("written")
        if is_encoded(query):
            query = decode(query, where=f"{fields.where}, query module")
        flags = written if isinstance(written, Tensor) else fields.array("written", np.bool_, (None,))
        rows = np.array(np.asarray(flags), np.int64) - 1
        copy.deepcopy(self.query_module).load_state_dict(query)

        def put() -> None:
            self.query_module.load_state_dict(query)
            self._written, self._count = rows, int((rows == 0).sum())

        return put

    def _with_values(self, put_values: Apply, put_keys: Apply) -> Apply:
        """A function that puts in the values, and then the keys."""

        def put() -> None:
            with self._unchanging():
                put_values()
                put_keys()

        return put


def _stacked(found: Any) -> Any:
    return torch.stack(found) if isinstance(found, list) else found


def _at(data: TensorDictBase, places: np.ndarray) -> TensorDictBase:
    return data[torch.from_numpy(places)]

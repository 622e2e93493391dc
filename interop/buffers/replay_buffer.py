"""The replay buffer: a storage, a sampler and a writer joined."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from interop import randomness
from interop.buffers.joined import Joined
from interop.index import as_int
from interop.numbers import whole
from interop.pytrees import assigned, each_leaf, length_of, swapped


class ReplayBuffer(Joined):
    """Items written by a writer, kept in a storage, drawn by a sampler, through a chain of transforms.

    Every call is safe from several threads. A call that raises has changed nothing.

    Args:
        storage: where items live, or a callable that makes it; `ListStorage(1000)` by default.
        sampler: which items are drawn, or a callable; `RandomSampler()` by default.
        writer: which slots new items take, or a callable; `RoundRobinWriter()` by default.
        collate_fn: makes a batch of what the storage returns.
        pin_memory: pin batches on the CPU.
        prefetch: how many batches threads draw ahead; needs `batch_size`.
        transform: a transform, a chain of them, or any callable.
        transform_factory: makes the transform, instead of it.
        batch_size: of `sample()` and of iteration.
        dim_extend: the dim of data along which `extend` runs; by default the last item dim of the storage.
        checkpointer: what saves and loads the storage.
        generator: governs every draw; torch's global one by default.
        shared: have worker processes take turns.
        compilable: given to the default storage.
        delayed_init: make the components at the first use; by default with a `transform_factory`.
    """

    # ------------------------------------------------------------------ writing

    def add(self, data: Any) -> Any:
        """Write one item. Returns its slot: an int, or coordinates [n, ndim] for a storage of several item dims."""
        if is_tensor_collection(data) and data.ndim >= self._storage.ndim and _warns_of_batches():
            warnings.warn(
                f"add() got data of batch size {list(data.shape)} as one item: use extend()", UserWarning, stacklevel=2
            )
        with self._locked():
            return self._add(data)

    def _add(self, data: Any) -> Any:
        data = self._to_store(data, lift=True)
        if data is None and len(self._transform):
            return torch.zeros(0, self._storage.ndim, dtype=torch.int64)
        index = self._writer.add(data)
        self._tell(index)
        self._sampler.add(index)
        return index

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Tensor:
        """Write a batch. Returns its slots, [n], or coordinates [n, ndim] for a storage of several item dims.

        A list at the root is a stack of single items; a tuple or dict is a pytree whose leaves share the leading dim.
        """
        if update_priority is not None:
            raise NotImplementedError("update_priority is for buffers of tensordicts: use TensorDictReplayBuffer")
        with self._locked():
            return self._extend(data)

    def _extend(self, data: Any) -> Tensor:
        data = self._to_store(data)
        if data is None and len(self._transform):
            return torch.zeros(0, self._storage.ndim, dtype=torch.int64)
        return self._write(data)

    def _write(self, data: Any) -> Tensor:
        index = self._writer.extend(swapped(data, self.dim_extend))
        self._tell(index)
        self._sampler.extend(index)
        return index

    def _to_store(self, data: Any, lift: bool = False) -> Any:
        """The data after the inverse transforms; None to store nothing."""
        if not len(self._transform):
            return data
        lift = lift and isinstance(data, TensorDictBase)
        if is_tensor_collection(data):
            data = data.copy()  # transforms may add and remove keys of this one
        data = self._transform.inv(data.unsqueeze(-1) if lift else data)
        return data.squeeze(-1) if lift and data is not None else data

    def _tell(self, index: Any) -> None:
        """Have every buffer on the storage know which slots are new."""
        for buffer in self._storage._attached:
            buffer.mark_update(index)

    def mark_update(self, index: Any) -> None:
        """Give the items at index the default priority of the sampler."""
        self._sampler.mark_update(index, storage=self._storage)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give the items at index new priorities; a warning where the sampler has none."""
        with self._locked():
            if isinstance(index, tuple):
                index = torch.stack([torch.as_tensor(each) for each in index], -1)
            if self.dim_extend > 0 and isinstance(priority, Tensor) and priority.ndim > 1:
                priority = priority.transpose(0, self.dim_extend).flatten()
            self._sampler.update_priority(index, priority, storage=self._storage)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all items; the memory is kept."""
        with self._locked():
            self._writer._empty(empty_write_count)
            self._storage._empty()
            others = [buffer for buffer in self._storage._attached if buffer is not self]
            for buffer in (self, *others):
                forget = getattr(buffer, "_forget", None)
                if forget is not None:
                    forget()

    def _forget(self) -> None:
        """The storage was emptied."""
        self._drop_ahead()
        self._sampler._empty()

    # ------------------------------------------------------------------ reading

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch; with `return_info` also a dict of what the sampler says, "index" among it.

        RuntimeError without any batch size or for an empty buffer.
        """
        data, info = self._next_batch(self._size_of_batch(batch_size))
        if not return_info:
            return data
        device = getattr(self._storage, "device", None)
        if isinstance(device, torch.device):
            info = {key: _moved(value, device) for key, value in info.items()}
        return data, info

    def _size_of_batch(self, batch_size: int | None) -> int:
        if batch_size is None:
            if self._batch_size is None:
                raise RuntimeError(
                    "batch_size not specified: give one to sample(), or to the constructor of the buffer"
                )
            return self._batch_size
        batch_size = whole("batch_size", batch_size)
        if self._batch_size is not None and batch_size != self._batch_size:
            warnings.warn(
                f"sample() was given batch_size={batch_size}, the buffer was built with {self._batch_size}: "
                "the argument counts",
                UserWarning,
                stacklevel=3,
            )
        return batch_size

    def _next_batch(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        if self._prefetch is None:
            return self._sample(batch_size)
        with self._queue_lock:
            return self._prefetch.take(
                partial(self._sample, batch_size),
                lambda: partial(self._sample, batch_size, randomness.key(self._rng) if self._keyed else None),
                lambda waiting: waiting < self._sampler._remaining_batches and not self._sampler.ran_out,
            )

    def _sample(self, batch_size: int, key: Any = None) -> tuple[Any, dict[Any, Any]]:
        with self._locked():
            if self._fused is not None:
                data, info = self._fused.sample(batch_size, key)
            else:
                index, info = self._sampler._sample(self._storage, batch_size, key)
                info["index"] = index
                data = self._storage.get(index)
            return self._from_store(data, index=info["index"]), info

    def _from_store(self, data: Any, index: Any) -> Any:
        """The data after collating, transforms and pinning."""
        if as_int(index) is None:
            data = self._collate_fn(data)
        if len(self._transform):
            data = self._transform(data.copy() if is_tensor_collection(data) else data)
        if (
            self._pin_memory
            and hasattr(data, "pin_memory")
            and getattr(data, "device", None) in (None, torch.device("cpu"))
        ):
            data = data.pin_memory()
        return data

    def __getitem__(self, index: Any) -> Any:
        with self._locked():
            keys = _keys(index)
            if keys is not None:
                return self[:][keys if len(keys) > 1 else keys[0]]
            if isinstance(index, tuple) and len(index) == 1:
                index = index[0]
            if self.dim_extend > 0:
                data = swapped(self._storage[:], self.dim_extend)
                whole = isinstance(index, slice) and index == slice(None)
                data = data if whole else each_leaf(data, lambda leaf: leaf[index])
            else:
                data = self._storage[index]
            if len(self._transform):  # a view must not see what a transform does in place
                data = each_leaf(data, lambda leaf: leaf.clone() if isinstance(leaf, Tensor | TensorDictBase) else leaf)
            return self._from_store(data, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        with self._locked():
            keys = _keys(index)
            if keys is not None:
                self.set_(keys if len(keys) > 1 else keys[0], value)
                return
            value = self._to_store(value)
            if self.dim_extend > 0:
                target = swapped(self._storage[:], self.dim_extend)
                self._storage[:] = swapped(assigned(target, index, value), self.dim_extend)
            else:
                self._storage[index] = self._with_index(index, value)

    def _with_index(self, index: Any, value: Any) -> Any:
        """The value with the slot numbers that the writer keeps beside a tensordict, where it lacks them."""
        if not isinstance(value, TensorDictBase) or "index" in value or not len(self._storage):
            return value
        held = self._storage[index]
        if "index" not in held:
            return value
        return value.copy().set("index", held["index"])

    def __len__(self) -> int:
        return len(self._storage)

    def __iter__(self) -> Iterator[Any]:
        if self._batch_size is None:
            raise RuntimeError("batch_size not specified: iterating needs one in the constructor of the buffer")
        if self._sampler.ran_out:
            self._sampler.ran_out = False
        while not self._sampler.ran_out or (self._prefetch is not None and len(self._prefetch)):
            yield self.sample()

    def next(self) -> Any:
        """The next batch of a running iteration; None once at its end, after which it starts anew."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            data = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return None
        return data.copy().clear_device_() if isinstance(data, TensorDictBase) else data

    # ------------------------------------------------------------------ all rows in slot order

    def read_all_in_order(self, end: int | None = None) -> Any:
        """`rb[:]`, or `rb[:end]`: rows in the order of their slots."""
        return self[:] if end is None else self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """`rb[:end] = data`, `end` being the length of data by default. Length and cursor stay."""
        if end is None:
            end = length_of(data)
            if self._storage._is_full:
                self[:] = data
                return
        self[:end] = data

    def set_(self, key: Any, value: Tensor) -> Self:
        """Write one key of all stored rows in place. KeyError for an unknown key, RuntimeError for a wrong size."""
        return self.update_({key: value})

    def set_at_(self, key: Any, value: Tensor, index: Any) -> Self:
        """Write one key of the rows at storage indices in place."""
        with self._locked(), self._edited() as rows:
            held = rows.get(_known_key(rows, key))
            _check_edit(key, held[index], value)
            held[index] = value
        return self

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None
    ) -> Self:
        """Write several keys of all stored rows in place; only `keys_to_update` where given."""
        if is_tensor_collection(input_dict_or_td):
            given = list(input_dict_or_td.items(include_nested=True, leaves_only=True))
        else:
            given = list(input_dict_or_td.items())
        if keys_to_update is not None:
            wanted = {key if isinstance(key, tuple) else (key,) for key in keys_to_update}
            given = [(key, value) for key, value in given if (key if isinstance(key, tuple) else (key,)) in wanted]
            missing = wanted - {key if isinstance(key, tuple) else (key,) for key, _ in given}
            if missing:
                raise KeyError(f"keys_to_update names {sorted(missing)}, which the given data does not have")
        with self._locked(), self._edited() as rows:
            for key, value in given:  # all are looked at before any is written
                _check_edit(key, rows.get(_known_key(rows, key)), value)
            for key, value in given:
                rows.get(key).copy_(value) if isinstance(rows.get(key), Tensor) else rows.get(key).update_(value)
        return self

    @contextlib.contextmanager
    def _edited(self) -> Iterator[Any]:
        """A tensordict of views of all stored rows; edits of it are in the storage afterwards."""
        rows = self._storage[:]
        if not is_tensor_collection(rows):
            raise AttributeError(f"in-place edits by key need stored tensordicts, got {type(rows).__name__}")
        yield rows.unlock_() if rows.is_locked else rows
        settle = getattr(getattr(self._storage, "_rows", None), "_settle", None)
        if settle is not None:
            settle()


def _warns_of_batches() -> bool:
    return os.environ.get("RL_WARNINGS", "1").lower() not in ("0", "false")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor | TensorDict) else value


def _keys(index: Any) -> tuple[str, ...] | None:
    """The nested key that an index names; "_data" in front says nothing."""
    if isinstance(index, str):
        index = (index,)
    if not (isinstance(index, tuple) and index and all(isinstance(each, str) for each in index)):
        return None
    return index[1:] if index[0] == "_data" and len(index) > 1 else index


def _check_edit(key: Any, held: Any, value: Any) -> None:
    """RuntimeError where a value has not the shape and dtype of what it is written over."""
    if isinstance(held, Tensor) and isinstance(value, Tensor):
        if value.shape != held.shape or value.dtype != held.dtype:
            raise RuntimeError(
                f"{key!r}: stored are {list(held.shape)} of {held.dtype}, got {list(value.shape)} of {value.dtype}; "
                "nothing was written"
            )
    elif is_tensor_collection(held) and held.batch_size != getattr(value, "batch_size", held.batch_size):
        raise RuntimeError(
            f"{key!r}: stored rows have batch size {list(held.batch_size)}, got {list(value.batch_size)}"
        )


def _known_key(rows: Any, key: Any) -> Any:
    if key not in rows.keys(include_nested=True):
        raise KeyError(f"{key!r} is not stored; stored are {sorted(map(str, rows.keys(include_nested=True)))}")
    return key

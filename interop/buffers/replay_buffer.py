"""The replay buffer: a storage, a sampler and a writer joined."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

import fbuf
from interop.buffers import collate
from interop.buffers.assignment import assign
from interop.buffers.pending import Part, PendingBatch
from interop.buffers.places import as_key, is_all, owned, unwrapped
from interop.buffers.turn import turn
from interop.buffers.writable import Writable
from interop.data import randomness
from interop.data.index import as_int
from interop.data.numbers import whole
from interop.data.pytrees import each_leaf, swapped
from interop.doors.to_fbuf import to_fbuf
from interop.host.rows import TorchRows
from interop.sample_units import expanded
from interop.samplers.drawing import DrawingSampler, names_slots
from interop.storages import StorageEnsemble, TensorStorage
from interop.transforms.order import Order, in_order


class ReplayBuffer(Writable):
    """Items written by a writer, kept in a storage, drawn by a sampler, through a chain of transforms.

    Every call is safe from several threads, and of several buffers on one storage. A call that raises has changed
    nothing; where it is a transform or `collate_fn` that raises, the batch has been drawn. Those run outside of the lock,
    in as many threads as use the buffer.

    Args:
        storage: where items live, or a callable that makes it; by default a `ListStorage` for as many items as a prioritized
            sampler has room for, otherwise for 1000.
        sampler: which items are drawn, or a callable; `RandomSampler()` by default.
        writer: which slots new items take, or a callable; `RoundRobinWriter()` by default.
        collate_fn: makes a batch of what the storage returns; of a list that is the items themselves, not copies.
        pin_memory: pin batches on the CPU.
        prefetch: how many batches threads draw ahead; needs `batch_size`.
        transform: a transform, a chain of them, or any callable.
        transform_factory: makes the transform, instead of it.
        batch_size: of `sample()` and of iteration.
        dim_extend: the dim of data along which `extend` runs; by default the last item dim of the storage.
        checkpointer: what saves and loads the storage.
        generator: governs every draw; torch's global one by default.
        shared: have processes take turns, see `share`.
        compilable: given to the default storage.
        delayed_init: make the components at the first use; by default with a `transform_factory`.
        sample_unit: what a drawn item becomes in a batch, `Sequence` for windows; the item itself by default.
        consume_after_n_samples: use a `ConsumingSampler` that draws each item so often.
    """

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """This class as a Ray actor class with `is_remote = True`: `.remote(...)` constructs a buffer in another process.

        Give the constructor callables in the place of components. Methods of the actor return references, for `ray.get`.

        Args:
            remote_config: options of `ray.remote`; by default 1 CPU, 0.2 GPU where torch sees CUDA, and 2 GiB of memory.

        ImportError where Ray is not installed, TypeError or ValueError for options that Ray does not have.
        """
        from interop.remote.as_remote import as_remote  # its package imports this module

        return as_remote(cls, remote_config)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch; with `return_info` also a dict of what the sampler says, "index" among it.

        RuntimeError without any batch size or for an empty buffer.
        """
        data, info = self._next_batch(self._size_of_batch(batch_size))
        return (data, self._told(info)) if return_info else data

    def draw_by_key(self, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """A batch and its info, which follow from the key and what is stored: nothing is drawn ahead, no generator used.

        For batches over several buffers, of which each draws its part. The data do not include the info. The errors are
        those of `sample`; TypeError with a sample unit and for ensembles.

        Args:
            batch_size: how many items.
            key: random bits, [2] uint32.
        """
        if self._unit is not None or isinstance(self._storage, StorageEnsemble):
            found = "an ensemble" if self._unit is None else f"sample_unit={self._unit!r}"
            raise TypeError(f"parts of a batch cannot be drawn with {found}: use sample()")
        data, info = self._sample(batch_size, key)
        return data, self._told(info)

    def _told(self, info: dict[Any, Any]) -> dict[Any, Any]:
        """The info on the device of the storage."""
        device = getattr(self._storage, "device", None)
        return {key: _moved(each, device) for key, each in info.items()} if isinstance(device, torch.device) else info

    # ------------------------------------------------------------------ a batch, step by step

    def _next_batch(self, batch_size: int) -> tuple[Any, Any]:
        """A batch and its info: the oldest prefetched one, or one that is drawn now."""
        draw = partial(self._sample, batch_size)
        if self._prefetch is None:
            return draw()
        request = partial(self._request, batch_size)
        return self._prefetch.take(draw, request, lambda: self._sampler.has_more, self._make, self._lock_to_reserve())

    def _sample(self, batch_size: int, key: np.ndarray | None = None) -> tuple[Any, Any]:
        """Draws a batch now, with a key of the generator unless one is given."""
        with self._lock_to_draw():
            pending = PendingBatch(batch_size, self._generators() if key is None else ())
            try:
                self._plan(pending, key)
                read = self._read(pending, reserves=True)
            except BaseException:
                pending.abandon()
                raise
            pending.commit()
        return self._finish(*read)

    def _request(self, batch_size: int) -> PendingBatch | None:
        """The next batch for a thread to make; None where it cannot be drawn: the call that asks for it raises the error.

        The error of a user's sampler, which may have changed, is raised here.
        """
        pending = PendingBatch(batch_size, self._generators())
        try:
            self._plan(pending)
            for part in pending.parts:
                part.reserve()
        except Exception:
            pending.abandon()
            if self._draws_itself:
                return None
            raise
        pending.close()
        return pending

    def _make(self, pending: PendingBatch) -> tuple[Any, Any] | None:
        """Makes a batch that was requested, in a thread; None where it is stale."""
        with self._lock_to_draw():
            read = self._read(pending)
        return None if read is None else self._finish(*read)

    def _plan(self, pending: PendingBatch, key: np.ndarray | None = None) -> None:
        """Settle what decides the draw of a batch."""
        key = randomness.key(self._rng) if key is None else key
        pending.parts = [Part(0, self._sampler, self._storage, pending.batch_size, key)]

    def _read(self, pending: PendingBatch, reserves: bool = False) -> Any:
        """Draw and read a batch: what `_finish` takes, or None where it is stale. The lock of the storage is held."""
        [part] = pending.parts
        if reserves:
            part.reserve()
        elif not pending.can_be_read(part):
            return None
        data, info = self._gather(part)
        revise, order = self._revision(info, part.key), None
        if len(self._transform):
            order = Order.of(self, info["index"], info)
        return data, info, self._collate_fn, revise, order

    def _gather(self, part: Part) -> tuple[Any, dict[Any, Any]]:
        """The items that are drawn, which no write changes any more, and the info."""
        storage, sampler = part.storage, part.sampler
        if self._reads_slots:
            assert isinstance(storage, TensorStorage) and isinstance(sampler, DrawingSampler)
            marks = self._marks_samples and not len(self._transform)  # transforms see what is stored
            if part.reservation is None and (batch := sampler._batch(storage, part.size, part.key, marks)) is not None:
                return batch
            slots, info, leaves = part.draw_slots()
            rows = storage.rows
            assert rows is not None  # an empty storage was refused by the sampler
            if isinstance(rows, TorchRows) and rows.on_host and slots.is_cpu:
                return self._assemblies.read(storage, slots, (None, 1), info, marks)
            return storage.build(leaves or rows.read(slots), slots.shape), info
        index, info = part.draw()
        index, info = expanded(self._unit, index, info, storage)
        data = storage.get(index)
        apart = isinstance(storage, TensorStorage)  # a list gives the items themselves
        edited = apart or self._marks_samples or len(self._transform) > 0
        return owned(data) if edited and self._is_live(index) else data, info

    def _finish(self, data: Any, info: Any, *after: Any) -> tuple[Any, Any]:
        """A batch after collating and transforms, and its info. No lock is held."""
        return self._from_store(data, info["index"], *after), info

    @property
    def _draws_itself(self) -> bool:
        """Whether draws are the library's own."""
        return names_slots(self._sampler)

    def _generators(self) -> Collection[torch.Generator | None]:
        """Those that the keys of a batch come from."""
        return (self._rng,)

    def _lock_to_draw(self) -> AbstractContextManager[Any]:
        """Held while a batch is drawn and read."""
        return turn(self)

    def _lock_to_reserve(self) -> AbstractContextManager[Any] | None:
        """Held while a batch is requested."""
        return turn(self) if self._sampler.reads_to_reserve else None

    def _size_of_batch(self, batch_size: int | None) -> int:
        if batch_size is None:
            if self._batch_size is None:
                raise RuntimeError(
                    "batch_size not specified: give one to sample(), or to the constructor of the buffer"
                )
            return self._batch_size
        batch_size = whole("batch_size", batch_size)
        if batch_size >= 2**31:
            raise ValueError(f"batch_size must be less than 2**31, got {batch_size}")
        if self._batch_size is not None and batch_size != self._batch_size:
            warnings.warn(
                f"sample() was given batch_size={batch_size}, the buffer was built with {self._batch_size}: "
                "the argument counts",
                UserWarning,
                stacklevel=3,
            )
        return batch_size

    def to_fbuf(
        self, batch_size: int | None = None, *, narrow: bool = False, transforms: Literal["refuse", "drop"] = "refuse"
    ) -> tuple[fbuf.Buffer, fbuf.BufferState]:
        """A functional buffer, and a state with a copy of what this buffer holds, to go on inside `jax.jit`.

        Slots, cursor, priorities, trajectories and the position in an epoch are the same: the next writes take the same
        slots, and draws follow the same law with a key of their own. `beta` is an argument of `fbuf.importance_weights`.
        Both buffers go on apart. Items are dicts of arrays, nested as tensordicts are, without the "index" that a
        `TensorDictRoundRobinWriter` stores: `draw.slots` are these. The first item dim is rows, others are lanes. Slices
        come as [slices, time], shorter ones padded (`draw.mask`). In the state of an epoch the items of batches that
        `prefetch` requested are still to be drawn. O(capacity): one copy of the rows, on their device.

        Args:
            batch_size: from which `num_slices` gets the length of slices; that of the buffer by default.
            narrow: where JAX's 64-bit types are off, store int64 as int32, if all values fit, and round float64 to float32.
            transforms: "drop" to leave out the transforms and the `collate_fn`, which no state can hold.

        Raises:
            TypeError: a component that has no functional twin, or 64-bit columns; they are named.
            ValueError: rows or trajectories in an order that no functional ring has, or values that do not fit.
            RuntimeError: nothing was written yet, or JAX does not see the device.
            NotEnoughMemoryError: there is no memory for the state.
        """
        if transforms not in ("refuse", "drop"):
            raise ValueError(f"transforms must be 'refuse' or 'drop', got {transforms!r}")
        with turn(self):
            lost = [repr(each) for each in self._transform]
            lost += [] if self._collate_fn in (collate.identity, collate.stack, collate.lazily) else ["collate_fn"]
            if lost and transforms == "refuse":
                raise TypeError(
                    f"a state cannot hold {', '.join(lost)}: apply them in the program, with transforms='drop'"
                )
            if self._unit is not None or self._revises:
                raise TypeError(
                    "a sample_unit or hindsight makes other items of those drawn: a functional buffer does not"
                )
            size = self._batch_size if batch_size is None else whole("batch_size", batch_size)
            return to_fbuf(self._storage, self._sampler, self._writer, size, narrow)

    _revises = False  # whether batches are changed after collating where there are no transforms

    def _revision(self, info: dict[Any, Any], key: np.ndarray) -> Callable[[Any], Any] | None:
        """What is to be changed in a batch of this key after collating; the lock is held. Adds to the info."""
        if self._writer.tracks_generations:
            info["index_generation"] = self._writer.generations_of(info["index"])
        return None

    _marks_samples = False  # whether the info is written into them

    def _is_live(self, index: Any) -> bool:
        """Whether what comes of the storage at index, and of collating that, is what is stored and not a copy."""
        stacked = self._collate_fn is collate.stack and as_int(index) is None
        return self._storage.is_live(index) and not stacked

    def _from_store(
        self,
        data: Any,
        index: Any,
        collate_fn: Any,
        revise: Callable[[Any], Any] | None = None,
        order: Order | None = None,
    ) -> Any:
        """The data after collating, a revision, transforms and pinning."""
        if collate_fn is not collate.identity and as_int(index) is None:
            data = collate_fn(data)
        data = data if revise is None else revise(data)
        if len(self._transform):
            with in_order(order):
                data = self._transform(data.copy() if is_tensor_collection(data) else data)
        if (
            self._pin_memory
            and hasattr(data, "pin_memory")
            and getattr(data, "device", None) in (None, torch.device("cpu"))
        ):
            data = data.pin_memory()
        return data

    def __getitem__(self, index: Any) -> Any:
        key = as_key(index)
        if key is not None:
            return self[:][key]
        index = unwrapped(index)
        with turn(self):
            if self.dim_extend > 0:
                data = swapped(self._storage[:], self.dim_extend)
                data = data if is_all(index) else each_leaf(data, lambda leaf: leaf[index])
            else:
                data = self._storage[index]
            if len(self._transform) and self._is_live(index):
                data = owned(data)
            collate_fn, order = self._collate_fn, Order.of(self, index)
        return self._from_store(data, index, collate_fn, order=order)

    def __setitem__(self, index: Any, value: Any) -> None:
        key = as_key(index)
        if key is not None:
            self._edit({key: value}, dim=self.dim_extend, adds=True)
            return
        if self._transform.keeps:
            raise TypeError(
                "rb[...] = rows would hand them to a transform that takes what comes for the next steps of a stream: "
                "write to rb.storage[...], or use extend()"
            )
        value = self._to_store(value)
        if self._is_nothing(value):
            return
        with turn(self):
            self._storage.refuse_a_stranger()
            self._storage.recover()
            assign(self._storage, self._writer, self.dim_extend, unwrapped(index), value)

    def __len__(self) -> int:
        with self._in_turn():
            return self._sampler.sampleable(self._storage)

    def __iter__(self) -> Iterator[Any]:
        if self._batch_size is None:
            raise RuntimeError("batch_size not specified: iterating needs one in the constructor of the buffer")
        if not self._has_more():
            self._sampler.ran_out = False
        while self._has_more():
            yield self.sample()

    def _has_more(self) -> bool:
        return not self._sampler.ran_out or (self._prefetch is not None and len(self._prefetch) > 0)

    def next(self) -> Any:
        """The next batch of a running iteration; None once at its end, after which it starts anew."""
        if self._batch_size is None:
            raise RuntimeError("batch_size not specified: next() needs one in the constructor of the buffer")
        with self._stepping:
            if not self._iterating and not self._has_more():
                self._sampler.ran_out = False
            self._iterating = self._has_more()
            if not self._iterating:
                return None
            data = self.sample()
        return data.copy().clear_device_() if isinstance(data, TensorDictBase) else data


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor | TensorDict) else value

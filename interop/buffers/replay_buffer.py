"""The replay buffer: a storage, a sampler and a writer joined."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.buffers import collate
from interop.buffers.ahead import Ahead
from interop.buffers.assignment import assign
from interop.buffers.editable import Editable
from interop.buffers.fused import caught_up, reserved, seeded, takes_keys
from interop.buffers.places import as_key, is_all, owned, unwrapped
from interop.buffers.prefetch import goes_on
from interop.buffers.turn import Turn
from interop.buffers.writing import KeepingWriting, Writing
from interop.index import as_int
from interop.interrupts import uninterrupted
from interop.numbers import whole
from interop.pytrees import each_leaf, swapped
from interop.sample_units import expanded
from interop.samplers import DrawingSampler, Sampler
from interop.samplers.epoch import Drawn
from interop.storages import TensorStorage, following
from interop.transforms.order import Order, in_order


class ReplayBuffer(Editable):
    """Items written by a writer, kept in a storage, drawn by a sampler, through a chain of transforms.

    Every call is safe from several threads, and of several buffers on one storage. A call that raises has changed
    nothing; where it is a transform or `collate_fn` that raises, the batch has been drawn. Those run outside of the lock,
    in as many threads as use the buffer.

    Args:
        storage: where items live, or a callable that makes it; `ListStorage(1000)` by default.
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

    # ------------------------------------------------------------------ writing

    def add(self, data: Any) -> Any:
        """Write one item. Returns its slot: an int, or coordinates [n, ndim] for a storage of several item dims.

        None where the writer does not keep it; slots [n] where a transform that kept items before gives several now.
        """
        self._expect("add", data)
        self._writer.refuse("add")
        if is_tensor_collection(data) and data.ndim >= self._storage.ndim and _warns_of_batches():
            warnings.warn(
                f"add() got data of batch size {list(data.shape)} as one item: use extend()", UserWarning, stacklevel=2
            )
        with self._stored(data, lift=True) as stored:
            if self._is_nothing(stored):
                return self._no_slots()
            if self._transform.keeps and is_tensor_collection(stored) and stored.ndim > data.ndim:
                return self._write(stored, many=True)
            return self._add(stored)

    def _add(self, stored: Any) -> Any:
        index = self._write(stored, many=False)
        self._note(stored, index)
        return index

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Tensor:
        """Write a batch. Returns its slots, [n], or coordinates [n, ndim] for a storage of several item dims.

        -1 stands for what the writer did not keep.
        A list at the root is a stack of single items; a tuple or dict is a pytree whose leaves share the leading dim.
        """
        if update_priority is not None:
            raise NotImplementedError("update_priority is for buffers of tensordicts: use TensorDictReplayBuffer")
        self._writer.refuse("extend")
        with self._stored(data) as stored:
            if self._is_nothing(stored):
                return self._no_slots()
            index = self._write(stored, many=True)
            self._note(stored, index)
            return index

    def _expect(self, call: str, data: Any) -> None:
        """ValueError for data that this kind of buffer does not take."""

    def _stored(self, data: Any, lift: bool = False) -> Writing | KeepingWriting:
        """A turn to write, and what is to be written: the data after the inverse transforms."""
        if self._transform.keeps:
            return KeepingWriting(self, lambda: self._to_store(data, lift))
        return Writing(self, self._to_store(data, lift))

    def _to_store(self, data: Any, lift: bool = False) -> Any:
        """The data after the inverse transforms; with `lift` they see a tensordict as a batch of one."""
        if not len(self._transform):
            return data
        if is_tensor_collection(data):
            data = data.copy()  # transforms may add and remove keys of this one
        if not lift or not isinstance(data, TensorDictBase):
            return self._transform.inv(data)
        dim = data.ndim

        def lower(leaf: Any) -> Any:
            fits = isinstance(leaf, Tensor) or is_tensor_collection(leaf)
            return leaf.squeeze(dim) if fits and leaf.ndim > dim else leaf

        return each_leaf(self._transform.inv(data.unsqueeze(-1)), lower)

    def _is_nothing(self, stored: Any) -> bool:
        """Whether a transform wants nothing stored."""
        return stored is None and len(self._transform) > 0

    def _no_slots(self) -> Tensor:
        return torch.zeros(0, self._storage.ndim, dtype=torch.int64, device="cpu")

    def _write(self, stored: Any, many: bool) -> Any:
        self._storage._recover()  # what an interrupt has left, of which the writer must not know
        listeners, before = self._storage.attached(), None
        for buffer in listeners:  # who could not be told of the write refuses it
            sampler = getattr(buffer, "_sampler", None)
            if sampler is not None:
                sampler.refuse_a_stranger()
                if sampler.takes_priorities and before is None:
                    before = following.standing(self._storage)
        try:
            index = self._writer.extend(swapped(stored, self.dim_extend)) if many else self._writer.add(stored)
            if index is None:
                return None
            for buffer in listeners:
                buffer.mark_update(index)
        except BaseException:  # such as a signal's, when rows were written that have the priorities of those before
            if before is not None:
                with uninterrupted():
                    self._storage._recover()
                    following.follow(self._storage, before)
            raise
        (self._sampler.extend if many else self._sampler.add)(index)
        return index

    def _note(self, given: Any, index: Any) -> None:
        """Tell what the caller gave, if it is that and not what a transform made of it, where it was stored."""
        if self._storage.ndim == 1 and self.dim_extend == 0 and not len(self._transform):
            self._writer._note(given, index)

    def mark_update(self, index: Any) -> None:
        """Give the items at index the default priority of the sampler."""
        if getattr(self._sampler.mark_update, "__func__", None) is Sampler.mark_update:
            return  # it does nothing
        with Turn(self):
            self._sampler.mark_update(index, storage=self._storage)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give the items at index new priorities; a warning where the sampler has none."""
        with Turn(self):
            if isinstance(index, tuple):
                index = torch.stack([torch.as_tensor(each) for each in index], -1)
            if isinstance(priority, Tensor) and 0 < self.dim_extend < priority.ndim:
                priority = priority.transpose(0, self.dim_extend).flatten()
            self._sampler.update_priority(index, priority, storage=self._storage)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all items; the memory is kept. Every buffer on the storage starts over."""
        with Turn(self):
            self._storage._recover()
            self._storage.refuse_a_stranger()
            for buffer in self._storage.attached():
                writer = getattr(buffer, "_writer", None)
                if writer is not None:
                    writer.refuse("empty")
            with self._storage._step():
                self._storage._empty()
                for buffer in self._storage.attached():
                    forget = getattr(buffer, "_forget", None)
                    if forget is not None:
                        forget(empty_write_count)

    def _forget(self, empty_write_count: bool) -> None:
        """The storage was emptied."""
        self._writer._empty(empty_write_count)
        self._sampler._empty()
        self._transform._emptied()
        self._drop_ahead()

    # ------------------------------------------------------------------ reading

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch; with `return_info` also a dict of what the sampler says, "index" among it.

        RuntimeError without any batch size or for an empty buffer.
        """
        data, info = self._next_batch(self._size_of_batch(batch_size))
        return (data, self._told(info)) if return_info else data

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

    def _told(self, info: dict[Any, Any]) -> dict[Any, Any]:
        """The info on the device of the storage."""
        device = getattr(self._storage, "device", None)
        return {key: _moved(each, device) for key, each in info.items()} if isinstance(device, torch.device) else info

    def _next_batch(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        if self._prefetch is None:
            return self._sample(batch_size)
        draw, schedule = partial(self._sample, batch_size), partial(self._ahead, batch_size)
        turn = Turn(self) if self._sampler._reads_to_draw else nullcontext()
        return self._prefetch.take(draw, schedule, partial(goes_on, self._sampler), self._make, turn)

    def _ahead(self, batch_size: int, epoch: int) -> Ahead | None:
        """The next batch to be made by a thread; None where it cannot be drawn."""
        return Ahead.of(self._sampler, self._storage, batch_size, epoch, self._rng)

    def _make(self, ahead: Ahead) -> Any:
        """What a thread runs."""
        return self._sample(ahead.batch_size, ahead)

    def _sample(self, batch_size: int, ahead: Ahead | None = None) -> Any:
        """A batch and what to tell about it; None for one ahead of time whose epoch is over."""
        with Turn(self):
            if ahead is not None:
                if self._prefetch is None or ahead.epoch != self._prefetch.epoch:
                    return None
                caught_up(self._sampler, self._storage)
                data, info = self._draw(batch_size, ahead.key, ahead.drawn)
                ahead.was_read = True
            elif self._fused is not None and self._fused.holds and not self._sampler.refuses_late:
                data, info = self._draw(batch_size, None)
            else:
                generator = torch.default_generator if self._rng is None else self._rng
                before = generator.get_state()
                try:
                    data, info = self._draw(batch_size, None)
                except BaseException:
                    generator.set_state(before)
                    raise
            collate_fn, revise = self._collate_fn, self._revision(info, ahead)
            order = Order.of(self, info["index"], info)
        return self._from_store(data, info["index"], collate_fn, revise, order), info

    _revises = False  # whether batches are changed after collating where there are no transforms

    def _revision(self, info: dict[Any, Any], ahead: Ahead | None) -> Callable[[Any], Any] | None:
        """What is to be changed in a batch after collating; the lock is held. Adds to what is told about it."""
        if self._writer.tracks_generations:
            info["index_generation"] = self._writer.generations_of(info["index"])
        return None

    def _draw(self, batch_size: int, key: Any, drawn: Drawn | None = None) -> tuple[Any, dict[Any, Any]]:
        """What is stored at drawn places, which no write changes any more, and the info."""
        ahead = drawn is not None
        drawn = drawn or reserved(self._sampler, self._storage, batch_size, key)
        if drawn is None:
            return self._read(batch_size, key, None)
        try:
            found = self._read(batch_size, key, drawn)
        except BaseException:
            if not ahead:
                drawn.take_back()
            raise
        if not ahead:  # else it is by who takes it
            drawn.given()
        return found

    def _read(self, batch_size: int, key: Any, drawn: Drawn | None) -> tuple[Any, dict[Any, Any]]:
        if self._fused is not None and self._fused.holds:
            return self._fused.sample(batch_size, key, self._marks_samples, drawn)
        if drawn is not None:
            index, info = self._sampler._index_of(drawn.slots, self._storage), drawn.info  # type: ignore[attr-defined]
        elif key is not None and isinstance(self._sampler, DrawingSampler) and takes_keys(self._sampler):
            index, info = self._sampler._named(self._storage, batch_size, key)
        elif key is not None:
            with seeded(self._sampler, key):
                index, info = self._sampler.sample(self._storage, batch_size)
        else:
            index, info = self._sampler.sample(self._storage, batch_size)
        index, info = expanded(self._unit, index, info, self._storage)
        data = self._storage.get(index)
        apart = isinstance(self._storage, TensorStorage)  # a list gives the items themselves
        edited = apart or self._marks_samples or len(self._transform) > 0
        return owned(data) if edited and self._is_live(index) else data, info

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
        with Turn(self):
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
            self._edit({key: value}, dim=self.dim_extend)
            return
        if self._transform.keeps:
            raise TypeError(
                "rb[...] = rows would hand them to a transform that takes what comes for the next steps of a stream: "
                "write to rb.storage[...], or use extend()"
            )
        value = self._to_store(value)
        if self._is_nothing(value):
            return
        with Turn(self):
            self._storage.refuse_a_stranger()
            self._storage._recover()
            assign(self._storage, self._writer, self.dim_extend, unwrapped(index), value)

    def __len__(self) -> int:
        with self._in_turn():
            return self._sampler.sampleable(self._storage)

    def __iter__(self) -> Iterator[Any]:
        if self._batch_size is None:
            raise RuntimeError("batch_size not specified: iterating needs one in the constructor of the buffer")
        if self._sampler.ran_out:
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
            if not self._iterating and self._sampler.ran_out:
                self._sampler.ran_out = False
            self._iterating = self._has_more()
            if not self._iterating:
                return None
            data = self.sample()
        return data.copy().clear_device_() if isinstance(data, TensorDictBase) else data


def _warns_of_batches() -> bool:
    return os.environ.get("RL_WARNINGS", "1").lower() not in ("0", "false")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor | TensorDict) else value

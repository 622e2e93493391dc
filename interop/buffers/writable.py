"""The half of a replay buffer that writes."""

import contextlib
import os
import warnings
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.buffers.editable import Editable
from interop.buffers.turn import turn
from interop.buffers.writing import keeping_writing, writing
from interop.data.pytrees import each_leaf, swapped
from interop.shared.interrupts import uninterrupted
from interop.storages import following


class Writable(Editable):
    """What writes new items, and tells who has to know of them. See `ReplayBuffer`."""

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

    def _stored(self, data: Any, lift: bool = False) -> contextlib.AbstractContextManager[Any]:
        """A turn to write, and what is to be written: the data after the inverse transforms."""
        if self._transform.keeps:
            return keeping_writing(self, lambda: self._to_store(data, lift))
        return writing(self, self._to_store(data, lift) if len(self._transform) else data)

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
        storage = self._storage
        storage.recover()  # what an interrupt has left, of which the writer must not know
        listeners, before = storage.attached(), None
        for buffer in listeners:  # who could not be told of the write refuses it
            sampler = getattr(buffer, "_sampler", None)
            if sampler is not None:
                sampler.refuse_a_stranger()
                if before is None and sampler.follows_writes:
                    before = following.standing(storage)
        try:
            if not many:
                index = self._writer.add(stored)
            else:
                dim = self.dim_extend
                index = self._writer.extend(swapped(stored, dim) if dim else stored)
            if index is None:
                return None
            for buffer in listeners:
                if getattr(buffer.mark_update, "__func__", None) is _MARK and buffer._storage is storage:
                    buffer._mark(index)  # it has the turn
                else:
                    buffer.mark_update(index)
        except BaseException:  # such as a signal's, when rows were written that have the priorities of those before
            if before is not None:
                with uninterrupted():
                    storage.recover()
                    following.follow(storage, before)
            raise
        (self._sampler.extend if many else self._sampler.add)(index)
        return index

    def _note(self, given: Any, index: Any) -> None:
        """Tell what the caller gave, if it is that and not what a transform made of it, where it was stored."""
        if index is not None and self._storage.ndim == 1 and self.dim_extend == 0 and not len(self._transform):
            self._writer.note(given, index)

    def mark_update(self, index: Any) -> None:
        """Give the items at index the default priority of the sampler."""
        with turn(self):
            self._mark(index)

    def _mark(self, index: Any) -> None:
        """`mark_update`, of which the turn is there."""
        if self._sampler.follows_writes:
            self._sampler.mark_update(index, storage=self._storage)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give the items at index new priorities; a warning where the sampler has none."""
        with turn(self):
            if isinstance(index, tuple):
                index = torch.stack([torch.as_tensor(each) for each in index], -1)
            if isinstance(priority, Tensor) and 0 < self.dim_extend < priority.ndim:
                priority = priority.transpose(0, self.dim_extend).flatten()
            self._sampler.update_priority(index, priority, storage=self._storage)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all items; the memory is kept. Every buffer on the storage starts over."""
        with turn(self):
            self._storage.recover()
            self._storage.refuse_a_stranger()
            for buffer in self._storage.attached():
                writer = getattr(buffer, "_writer", None)
                if writer is not None:
                    writer.refuse("empty")
            with self._storage.transaction():
                self._storage.clear()
                for buffer in self._storage.attached():
                    forget = getattr(buffer, "_forget", None)
                    if forget is not None:
                        forget(empty_write_count)

    def _forget(self, empty_write_count: bool) -> None:
        """The storage was emptied."""
        self._writer.clear(empty_write_count)
        self._sampler.clear()
        self._transform.forget()
        self._drop_ahead()


_MARK = Writable.mark_update


def _warns_of_batches() -> bool:
    return os.environ.get("RL_WARNINGS", "1").lower() not in ("0", "false")

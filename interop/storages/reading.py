"""Reads of tensors, tensordicts and pytrees in preallocated memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from interop.data.index import as_int, as_tensor, in_range, indexed, is_basic, spelled_out
from interop.host.rows import Rows
from interop.storages.copyable import Copyable


class Readable(Copyable):
    """Rows that are read at any index. See `TensorStorage`."""

    device: torch.device | str

    def get(self, index: Any) -> Any:
        """What is stored at index, over the filled part: a view for ints and slices, a copy for arrays and masks.

        RuntimeError before the first write, IndexError out of range.
        """
        rows, filled = self.own_rows(), (self.filled_rows, *self.lanes)
        if isinstance(index, tuple):
            index = tuple(each if is_basic(each) else as_tensor(each) for each in spelled_out(index, self.ndim))
            if self.ndim > 1 and len(index) == self.ndim and all(map(_is_long, index)):
                flat = torch.zeros((), dtype=torch.int64, device="cpu")
                for axis, each in enumerate(index):
                    flat = flat * filled[axis] + in_range(each, filled[axis])
                return self._read(flat)
            index = index[0] if len(index) == 1 else index
        single = as_int(index)
        if single is not None and not -filled[0] <= single < filled[0]:
            raise IndexError(f"index {single} is out of range: {filled[0]} rows are stored")
        if single is not None or is_basic(index):
            place = index if single is None else single
            return self._build(rows.at(filled[0], place), indexed(filled, place), locked=self._MAPPED)
        if isinstance(index, tuple):
            return self._build(rows.at(filled[0], index), indexed(filled, index))
        place = as_tensor(index)
        if place.dtype == torch.bool:
            if tuple(place.shape) != filled[: place.ndim]:
                raise IndexError(f"the mask has shape {list(place.shape)}, the filled part {list(filled)}")
            place = place.to(rows.device)
            return self._build(rows.at(filled[0], place), indexed(filled, place.cpu()))
        place = in_range(place, filled[0])
        if self.ndim == 1:
            return self._read(place)
        return self._build(rows.at(filled[0], place.to(rows.device)), (*place.shape, *filled[1:]))

    def is_live(self, index: Any) -> bool:
        return is_basic(index)

    def _read(self, slots: Tensor) -> Any:
        """Copies of the items at flat slots, in their shape."""
        rows, shape = self.own_rows(), tuple(slots.shape)
        if len(shape) == 1:
            return self._build(rows.read(slots), shape)
        return self._build([leaf.reshape((*shape, *leaf.shape[1:])) for leaf in rows.read(slots.reshape(-1))], shape)

    def build(self, leaves: Sequence[Tensor], batch_size: Sequence[int]) -> Any:
        """Items around tensors that were read."""
        return self._build(leaves, batch_size)

    def _build(self, leaves: Sequence[Tensor], batch_size: Sequence[int], locked: bool = False) -> Any:
        assert self.layout is not None
        device = self.device if isinstance(self.device, torch.device) else None
        built = self.layout.build(leaves, batch_size, device)
        if locked and is_tensor_collection(built):
            built.lock_()
        return built

    def own_rows(self) -> Rows:
        if self.rows is None:
            raise RuntimeError("Cannot get elements out of a non-initialized storage: call extend() or add() first")
        return self.rows

    def contains(self, index: Any) -> Any:
        if self.ndim == 1:
            return super().contains(index)
        rows = self.filled_rows
        if isinstance(index, Tensor):
            return (index >= -rows) & (index < rows)
        return -rows <= index < rows if isinstance(index, int) else super().contains(index)

    def __iter__(self) -> Iterator[Any]:
        for row in range(self.filled_rows):
            yield self[row]


def _is_long(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.int64

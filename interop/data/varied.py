"""Entries whose values differ in size from item to item: text and other Python values, and tensors of ragged rows.

A storage keeps their spans in `PackedValues` like any tensor, int64 [..., 2].
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor

from interop.data import bridge
from interop.data.packed import PackedValues, encoded, joined, longer
from interop.data.shared_prefixes import PREFIXES, lengths_of, pieces_of
from interop.data.tensordicts import non_tensors, unread_stack, values_of

_AT_ONCE = 4096  # values that are encoded together: their bytes stay in the caches


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor."""


@dataclasses.dataclass(frozen=True)
class Varied(Leaf):
    """One entry of varied size.

    Attributes:
        dtype: of ragged rows; None for Python values.
        shape: of what follows their first dim, in which they differ.
        shares: whether ragged rows that begin alike are stored once as far as they agree: see `shared_prefixes`.
    """

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    shares: bool = dataclasses.field(default=False, compare=False)

    def take(self, data: object, name: str) -> "Values":
        """The values of data, not packed yet. TypeError for data of another kind than the entry."""
        if self.dtype is None:
            if not _is_python(data):
                raise TypeError(f"{name}: items hold text or other values here, got {type(data).__name__}")
            return Values(*_python_values(data))
        if not isinstance(data, Tensor):
            raise TypeError(f"{name}: items hold ragged rows here, got {type(data).__name__}")
        if data.dtype != self.dtype:
            raise RuntimeError(f"{name}: items are {self.dtype}, got {data.dtype}: cast it first; nothing was written")
        lead = data.ndim - 1 - len(self.shape)
        if lead < 0 or tuple(data.shape[lead + 1 :]) != self.shape:
            raise RuntimeError(
                f"{name}: items are [any length, {', '.join(map(str, self.shape))}], got a tensor of shape "
                f"{list(data.shape)}; nothing was written"
            )
        return Values(_rows(data, lead), tuple(data.shape[:lead]), self.dtype, self.shares)

    def extended(self, spans: Tensor, data: object, values: PackedValues, name: str) -> Tensor:
        """The spans of stored values, [n, 2], each with that of data behind it. Stored values do not change.

        Args:
            spans: of the stored values, on the CPU.
            data: of ragged rows a tensor [n, any length, ...], dense or jagged, or a sequence of n tensors; of others n
                values.
            values: where they are packed.
            name: of the entry, for messages.

        Raises, before anything is packed: TypeError for data of another kind, RuntimeError for another dtype, shape or
        number of values.
        """
        count = spans.shape[0]
        flat = spans.numpy()
        rows: Sequence[Any]
        if self.dtype is None:
            if not isinstance(data, Sequence) and not _is_python(data):
                raise TypeError(f"{name}: items hold text or other values here, got {type(data).__name__}")
            rows = list(data) if isinstance(data, list | tuple) else _python_values(data)[0]
        elif isinstance(data, list | tuple):
            rows = [self._one_row(row, name) for row in data]
        else:
            taken = self.take(data, name)
            if taken.ndim != 2:
                raise RuntimeError(
                    f"{name}: rows for {count} items are needed, got a tensor for one; nothing was written"
                )
            rows = taken.rows
        if len(rows) != count:
            raise RuntimeError(f"{name}: got {len(rows)} values for {count} items; nothing was written")
        if self.dtype is None:
            return torch.from_numpy(longer(flat, values, rows, name))
        return torch.from_numpy(
            PREFIXES.of(values).extended(values, flat, rows) if self.shares else values.extended(flat, rows)
        )

    def _one_row(self, row: object, name: str) -> memoryview:
        taken = self.take(row, name)
        if taken.ndim != 1:
            raise RuntimeError(f"{name}: a row is a tensor [any length, ...], got one dim more; nothing was written")
        [of_row] = taken.rows
        return of_row

    def build(self, spans: Tensor, values: PackedValues, device: torch.device | None, plain: bool) -> Any:
        """The entry for spans [*batch, 2]: Python values as they are if `plain`, else as tensordicts hold them."""
        shape = tuple(spans.shape[:-1])
        flat = spans.detach().cpu().numpy().reshape(-1, 2)
        if self.dtype is not None:
            if not self.shares:
                return self._ragged(values.read(flat), shape, device)
            pieces, counts = pieces_of(values, flat)
            return self._ragged(values.read(pieces), shape, device, lengths_of(pieces, counts))
        if not plain and len(shape) == 1 and shape[0]:
            return unread_stack(values.reader(flat.copy()), shape[0])
        return _nested(values.reader(flat)(), shape, plain)

    def _ragged(
        self,
        pieces: Sequence[memoryview],
        shape: tuple[int, ...],
        device: torch.device | None,
        bytes_of_rows: np.ndarray | None = None,
    ) -> Tensor:
        """The rows of these pieces: one each, or of so many bytes."""
        assert self.dtype is not None
        if len(shape) > 1:
            raise RuntimeError(f"ragged rows are read with one batch dim, got an index of shape {list(shape)}")
        size = math.prod(self.shape) * self.dtype.itemsize
        data = torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8) if any(pieces) else torch.empty(0).byte()
        rows = data.view(self.dtype).reshape(-1, *self.shape).to(device)
        if not shape:
            return rows
        of_rows = map(len, pieces) if bytes_of_rows is None else bytes_of_rows.tolist()
        lengths = torch.tensor([0, *(length // size for length in of_rows)], device=device)
        return torch.nested.nested_tensor_from_jagged(rows, lengths.cumsum(0))


class Values:
    """Values of an entry before they are packed, with the shape and dtype of their later spans."""

    dtype = torch.int64

    def __init__(
        self, values: Sequence[Any], shape: tuple[int, ...], rows_of: torch.dtype | None = None, shares: bool = False
    ) -> None:
        self.shape = (*shape, 2)
        self.ndim = len(self.shape)
        self._values = values
        self._rows_of = rows_of
        self._shares = shares

    @property
    def rows(self) -> Sequence[Any]:
        """The bytes of ragged rows, or the Python values."""
        return self._values

    def packed(self, into: PackedValues) -> Tensor:
        """Append the values to packed memory; returns their spans. TypeError for a value of another kind."""
        values = self._values
        if self._shares:
            return torch.from_numpy(PREFIXES.of(into).append(into, values)).reshape(self.shape)
        same = len(values) > 1 and all(value is values[0] for value in values)
        chosen = values[:1] if same else values
        spans = []
        for start in range(0, len(chosen), _AT_ONCE):
            part = chosen[start : start + _AT_ONCE]
            data, lengths, kinds = encoded(part) if self._rows_of is None else joined(part)
            spans.append(into.append(data, lengths, kinds, -(-len(data) * (len(chosen) - start) // len(part))))
        return (
            torch.from_numpy(np.concatenate(spans) if spans else np.empty((0, 2), np.int64))
            .expand(len(values), 2)
            .reshape(self.shape)
            .contiguous()
        )


def described(data: object, dims: int, is_ragged: bool, name: str) -> tuple[Varied, tuple[int, ...]] | None:
    """The varied entry for data with `dims` leading dims, and the shape of an item's spans; None for other data."""
    if _is_python(data) and (dims or not isinstance(data, list)):
        if len(_shape_of(data)) < dims:
            raise TypeError(
                f"{name}: extend() takes a batch, got one {type(data).__name__}: use add(), or a list of them"
            )
        return Varied(), (*_shape_of(data)[dims:], 2)
    if isinstance(data, Tensor) and (is_ragged or data.is_nested):
        if data.is_nested and (data.layout != torch.jagged or data.ndim < 2 or dims != 1 or _odd_dim(data)):
            raise TypeError(
                f"{name}: nested tensors are stored by extend() where they are jagged, [items, any length, ...], in a "
                "storage with ndim=1"
            )
        if data.dtype not in bridge.DTYPES or data.ndim <= dims:
            raise TypeError(f"{name}: ragged rows need a dim after the {dims} of the batch and a common dtype")
        if 0 in data.shape[dims + 1 :]:
            shape = ", ".join(map(str, ("any length", *data.shape[dims + 1 :])))
            raise TypeError(
                f"{name}: ragged rows of shape [{shape}] have no values, and their lengths would be lost: leave the entry "
                "out, or store the lengths as an entry, or use a ListStorage; nothing was written"
            )
        return Varied(data.dtype, tuple(data.shape[dims + 1 :])), (2,)
    return None


def _odd_dim(data: Tensor) -> bool:
    return any(not isinstance(size, int) for size in data.shape[2:])


def _is_python(data: object) -> bool:
    if isinstance(data, list):
        return bool(data) and isinstance(data[0], str | bytes)
    return isinstance(data, NonTensorData | NonTensorStack | str | bytes)


def _shape_of(data: Any) -> tuple[int, ...]:
    return (len(data),) if isinstance(data, list) else () if isinstance(data, str | bytes) else tuple(data.batch_size)


def _python_values(data: Any) -> tuple[list[Any], tuple[int, ...]]:
    shape = _shape_of(data)
    if isinstance(data, list):
        return data, shape
    if isinstance(data, str | bytes):
        return [data], shape
    return values_of(data), shape


def _nested(values: list[Any], shape: tuple[int, ...], plain: bool) -> Any:
    """Values as nested lists, or nested stacks, of a shape."""
    if not shape:
        return values[0] if plain else NonTensorData(values[0])
    if len(shape) > 1:
        size = math.prod(shape[1:])
        parts = [_nested(values[at * size : (at + 1) * size], shape[1:], plain) for at in range(shape[0])]
    else:
        parts = values if plain else non_tensors(values)
    if plain:
        return parts
    return NonTensorStack(*parts) if parts else NonTensorData([], batch_size=shape)


def _rows(data: Any, lead: int) -> list[memoryview]:
    """The bytes of each row of a dense or jagged tensor."""
    data = data.detach().cpu()
    if not data.is_nested:
        return [_bytes(row) for row in data.reshape(math.prod(data.shape[:lead]), *data.shape[lead:])]
    if data.lengths() is None:
        memory = _bytes(data.values())
        size = math.prod(data.shape[2:]) * data.dtype.itemsize
        ends = data.offsets().tolist()
        return [memory[start * size : stop * size] for start, stop in itertools.pairwise(ends)]
    return [_bytes(row) for row in data.unbind()]


def _bytes(rows: Tensor) -> memoryview:
    flat = rows.resolve_conj().contiguous().reshape(-1)
    if not flat.numel():  # it may have the stride 0, of which torch makes no view
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data

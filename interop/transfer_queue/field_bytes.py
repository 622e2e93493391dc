"""One field of a put as bytes: all its rows, in one piece, that a memory map reads without a copy."""

import io
import json
import math
import mmap
import pickle
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from interop.checkpoint.state_bytes import pack, unpack

Layout = dict[str, Any]
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class Column:
    """The rows of one field, as they lie in `memory` from `start` on. Reading a row, or a run of rows, copies nothing.

    Args:
        layout: what `column_bytes` said about the field.
        memory: the file. Tensors that are read are views of it.
        start: the first byte of the field.
        where: file and field, for messages.
        allow_pickle: unpickle values that were pickled, which may run code.
    """

    def __init__(
        self, layout: Layout, memory: mmap.mmap | bytearray, start: int, where: str, allow_pickle: bool
    ) -> None:
        self._layout, self._memory, self._start, self._where = layout, memory, start, where
        self._allow_pickle = allow_pickle
        sizes = layout.get("sizes")
        self._ends = None if sizes is None else [0, *accumulate(sizes)]

    def run(self, first: int, stop: int) -> Tensor | None:
        """Rows `first` to `stop` as one nested tensor with the layout jagged, dense if they are scalars: a view of the file.

        None where they are no tensors, or have no value, or differ in more than their length.
        """
        kind, count = self._layout["kind"], stop - first
        if kind not in ("dense", "ragged"):
            return None
        shapes = [self._layout["shape"]] * count if kind == "dense" else self._layout["shapes"][first:stop]
        place, size = self._place(first), self._place(stop) - self._place(first)
        if kind == "dense" and not shapes[0]:
            return self._tensor(place, size)
        if not size or any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
            return None
        offsets = torch.tensor([0, *accumulate(shape[0] for shape in shapes)])
        return torch.nested.nested_tensor_from_jagged(self._tensor(place, size).view(-1, *shapes[0][1:]), offsets)

    def row(self, position: int) -> Any:
        """The value of one row. A tensor is a view of the file."""
        kind, first, stop = self._layout["kind"], self._place(position), self._place(position + 1)
        if kind == "dense":
            return self._tensor(first, stop - first).view(self._layout["shape"])
        if kind == "ragged":
            return self._tensor(first, stop - first).view(self._layout["shapes"][position])
        raw = bytes(self._memory[self._start + first : self._start + stop])
        if kind == "text":
            return raw.decode()
        if raw[:1] == b"p" and not self._allow_pickle:
            raise TypeError(f"{self._where} was pickled: set allow_pickle: true in the configuration of the backend")
        return _unpacked(raw, self._where)

    def _place(self, position: int) -> int:
        """Where a row begins: in elements of a tensor, in bytes of other values."""
        return position * math.prod(self._layout["shape"]) if self._ends is None else self._ends[position]

    def _tensor(self, first: int, count: int) -> Tensor:
        dtype = _DTYPES[self._layout["dtype"]]
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._start + first * dtype.itemsize)


def column_bytes(
    values: Tensor | Sequence[Any], where: str, allow_pickle: bool
) -> tuple[Layout, list[np.ndarray | bytes]]:
    """The layout of a field, for JSON, and the pieces of its bytes. Views where the tensor is dense on the CPU.

    Args:
        values: a dense or nested tensor, or a sequence of tensors or of any values, one a row.
        where: the field, for messages.
        allow_pickle: pickle what is neither tensor, array nor plain value.

    Raises:
        TypeError: a value of another kind, without `allow_pickle`.
    """
    if isinstance(values, Tensor) and not values.is_nested:
        flat = values.detach().cpu().contiguous()
        return {"kind": "dense", "dtype": _name(flat.dtype), "shape": list(flat.shape[1:])}, [_raw(flat)]
    rows: list[Any] = list(values.unbind()) if isinstance(values, Tensor) else list(values)
    if rows and all(type(row) is Tensor and not row.is_nested and row.dtype == rows[0].dtype for row in rows):
        return _of_tensors([row.detach().cpu().contiguous() for row in rows])
    if all(type(row) is str for row in rows):
        return _of_bytes("text", [row.encode() for row in rows])
    return _of_bytes(
        "objects", [_packed(row, f"row {number} of {where}", allow_pickle) for number, row in enumerate(rows)]
    )


def row_count(layout: Layout, size: int) -> int | None:
    """How many rows a field of `size` bytes has. None where rows have no bytes. ValueError where they are not all whole."""
    if layout["kind"] == "dense":
        row = math.prod(layout["shape"]) * _DTYPES[layout["dtype"]].itemsize
        if size % row if row else size:
            raise ValueError(f"{size} bytes for rows of {row}")
        return size // row if row else None
    sizes, element = layout["sizes"], _DTYPES[layout["dtype"]].itemsize if "dtype" in layout else 1
    if sum(sizes) * element != size:
        raise ValueError(f"{size} bytes for {sum(sizes)} elements")
    return len(sizes)


def batched(rows: list[Any]) -> tuple[Literal["tensor", "values"], Any]:
    """Rows as one value of a tensordict: nested with the layout jagged, or strided, or dense for scalars; else a list."""
    if not all(isinstance(row, Tensor) and row.dtype == rows[0].dtype for row in rows):
        return "values", rows
    if all(row.dim() == 0 for row in rows):
        return "tensor", torch.stack(rows)
    for layout in (torch.jagged, torch.strided):
        try:
            return "tensor", torch.nested.as_nested_tensor(rows, layout=layout)
        except (RuntimeError, TypeError):
            continue
    return "values", rows


def _of_tensors(rows: list[Tensor]) -> tuple[Layout, list[np.ndarray | bytes]]:
    sizes = [row.numel() for row in rows]
    layout = {
        "kind": "ragged",
        "dtype": _name(rows[0].dtype),
        "shapes": [list(row.shape) for row in rows],
        "sizes": sizes,
    }
    if _one_after_the_other(rows):
        return layout, [_raw(torch.as_strided(rows[0], (sum(sizes),), (1,)))]
    return layout, [_raw(row) for row in rows]


def _of_bytes(kind: str, rows: list[bytes]) -> tuple[Layout, list[np.ndarray | bytes]]:
    return {"kind": kind, "sizes": [len(row) for row in rows]}, [b"".join(rows)]


def _packed(value: object, where: str, allow_pickle: bool) -> bytes:
    """The bytes of one value. The first one says how it was written."""
    if _is_json(value):
        return b"j" + json.dumps(value).encode()
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufcSUMm":
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return (b"n" if isinstance(value, np.ndarray) else b"g") + file.getvalue()
    try:
        text, pieces = pack(value)
    except TypeError as error:
        if not allow_pickle:
            reason = str(error).removeprefix("a state_dict: ")
            raise TypeError(
                f"{where}: {reason}, or set allow_pickle: true in the configuration of the backend"
            ) from error
        return b"p" + pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    head = json.dumps([len(text), *(len(piece) for piece in pieces)]).encode()
    return b"".join([b"v", len(head).to_bytes(4, "little"), head, text, *(piece.tobytes() for piece in pieces)])


def _unpacked(raw: bytes, where: str) -> object:
    if raw[:1] == b"j":
        return json.loads(raw[1:])
    if raw[:1] == b"n":
        return np.load(io.BytesIO(raw[1:]), allow_pickle=False)
    if raw[:1] == b"g":
        return np.load(io.BytesIO(raw[1:]), allow_pickle=False)[()]
    if raw[:1] == b"p":
        return pickle.loads(raw[1:])
    start = 5 + int.from_bytes(raw[1:5], "little")
    ends = [*accumulate(json.loads(raw[5:start]), initial=start)]
    text, *pieces = [bytearray(raw[first:stop]) for first, stop in pairwise(ends)]
    return unpack(bytes(text), pieces, where)


def _is_json(value: object) -> bool:
    """Whether JSON gives back the same value, of the same types."""
    if type(value) is dict:
        return all(type(key) is str and _is_json(each) for key, each in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)


def _one_after_the_other(rows: list[Tensor]) -> bool:
    """Whether the rows lie one behind the other in one memory, as those of a nested tensor do."""
    place, storage = rows[0].storage_offset(), rows[0].untyped_storage().data_ptr()
    for row in rows:
        if row.untyped_storage().data_ptr() != storage or (row.numel() and row.storage_offset() != place):
            return False
        place += row.numel()
    return True


def _raw(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

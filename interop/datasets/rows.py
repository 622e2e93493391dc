"""Conversion of arrays and text to tensordict rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from interop.datasets.errors import CorruptDatasetError


def nested(arrays: Mapping[Any, Any], count: int, where: str) -> TensorDict:
    """Convert arrays [count, ...], lists of text and mappings of these to a tensordict [count].

    `CorruptDatasetError`, prefixed by `where`, names an entry of another length and both lengths.
    """
    out = TensorDict({}, [count])
    for key, value in arrays.items():
        if isinstance(value, Mapping):
            out[key] = nested(value, count, f"{where}, {key}")
            continue
        rows = 0 if np.isscalar(value) or getattr(value, "ndim", 1) == 0 else len(value)
        if rows != count:
            raise CorruptDatasetError(f"{where}: {key} has {rows} rows, there are {count} steps")
        out[key] = leaf(value)
    return out


def entries(rows: TensorDictBase) -> Iterator[tuple[Any, Any]]:
    """Yield keys and leaves of rows: tensors, and text as stored."""
    return iter(rows.items(True, True, is_leaf=_is_leaf))


def has_ragged(rows: TensorDictBase) -> bool:
    """Whether rows have an entry of ragged rows."""
    return any(isinstance(value, Tensor) and value.is_nested for _, value in entries(rows))


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, NonTensorStack) or not issubclass(kind, TensorDictBase)


def leaf(values: np.ndarray | Sequence[Any]) -> Any:
    """Convert an array to a tensor, or a list of text or other values to its stored form.

    uint32 and uint64 become int64, as storages lack them. CorruptDatasetError for numbers beyond int64.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        if values.dtype.kind == "u" and values.itemsize > 2:
            if values.size and values.max() > np.iinfo(np.int64).max:
                raise CorruptDatasetError(f"{values.max()} is no int64, the largest integer type that can be stored")
            values = values.astype(np.int64)
        values = values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
        return torch.from_numpy(np.ascontiguousarray(values) if values.flags.writeable else values.copy())
    return NonTensorStack(*(NonTensorData(_text(value)) for value in values))


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def column(values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    """Convert [T] to a tensor [T, 1]."""
    return leaf(values).to(dtype).reshape(-1, 1)


def channels_first(images: np.ndarray) -> np.ndarray:
    """Convert images [n, H, W, C], or gray ones [n, H, W], to [n, C, H, W]."""
    return images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)


def following(rows: Any) -> Any:
    """Shift rows (tensors, tensordicts or text) by one; the last row is zeros or empty text."""
    if isinstance(rows, Tensor):
        out = torch.zeros_like(rows)
        out[:-1] = rows[1:]
        return out
    if isinstance(rows, NonTensorStack):
        return leaf([*rows.tolist()[1:], ""])
    return TensorDict({key: following(rows.get(key)) for key in rows.keys()}, rows.batch_size)  # noqa: SIM118


def zeroed(rows: Any, where: Tensor) -> Any:
    """A copy of a tensor or tensordict with zeros in the rows selected by `where`."""
    if isinstance(rows, Tensor):
        return rows.masked_fill(where.reshape(-1, *[1] * (rows.ndim - 1)), 0)
    return rows.apply(lambda column: zeroed(column, where))

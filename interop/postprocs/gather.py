"""Gathers rows of tensors and tensordicts."""

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor
from torch import Tensor

from interop.ted.row_values import fresh

# dtypes that torch cannot index, and one with the same bits
_SAME_BITS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def picked(rows: Any, places: Tensor) -> Any:
    """The rows [n, ...] at places, int64 [m]: [m, ...]. Gradients flow."""
    if not isinstance(rows, Tensor):
        return rows[places.cpu()]
    places = places.to(rows.device)
    if rows.requires_grad or not rows.is_cpu:
        return rows[places]
    out = fresh((places.shape[0], *rows.shape[1:]), rows.dtype)
    torch.index_select(_indexable(rows), 0, places, out=_indexable(out))
    return out


def put_rows(rows: Tensor, places: Tensor, values: Tensor) -> None:
    """Write values [m, ...] to different places of the rows [n, ...]."""
    _indexable(rows).index_copy_(0, places, _indexable(values))


def picked_items(data: Any, places: Tensor) -> Any:
    """The items of a tensordict of batch size [..., n] at flat places [..., m], as a new one of that batch size."""
    return _picked(data, places.reshape(-1), places.shape, data.batch_dims)


def _picked(data: Any, flat: Tensor, shape: torch.Size, dims: int) -> Any:
    if isinstance(data, LazyStackedTensorDict) and not is_non_tensor(data):
        data = data.contiguous()
    inner = data.batch_size[dims:]
    if not isinstance(data, TensorDict):  # a tensorclass, or no tensors
        return data.reshape(-1, *inner)[flat.cpu()].reshape(*shape, *inner)
    names = data.names if any(name is not None for name in data.names) else None
    gathered = TensorDict({}, [*shape, *inner], device=data.device, names=names)
    for key, value in data.items():
        if isinstance(value, Tensor):
            item = value.shape[dims:]
            gathered.set(key, picked(value.reshape(data.batch_size[:dims].numel(), *item), flat).view(*shape, *item))
        else:
            gathered.set(key, _picked(value, flat, shape, dims))
    return gathered


def _indexable(tensor: Tensor) -> Tensor:
    bits = _SAME_BITS.get(tensor.dtype)
    return tensor if bits is None else tensor.view(bits)

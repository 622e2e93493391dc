"""Copies of items at flat places, in as few passes over memory as there can be."""

import math
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

_LARGE = 1 << 20  # bytes from which on memory of NumPy, which asks for huge pages, is touched faster than torch's


def picked(rows: Tensor, places: Tensor) -> Tensor:
    """The rows [n, ...] at places, int64 [m]: [m, ...]. Gradients flow."""
    places = places.to(rows.device)
    if rows.requires_grad or not rows.is_cpu:
        return rows.index_select(0, places)
    shape = (places.shape[0], *rows.shape[1:])
    size = math.prod(shape) * rows.element_size()
    if size < _LARGE:
        return _selectable(rows).index_select(0, places).view(rows.dtype)
    out = torch.from_numpy(np.empty(size, np.uint8)).view(rows.dtype).view(shape)
    torch.index_select(_selectable(rows), 0, places, out=_selectable(out))
    return out


def put_rows(rows: Tensor, places: Tensor, values: Tensor) -> None:
    """Write values [m, ...] to different places of the rows [n, ...]."""
    _selectable(rows).index_copy_(0, places, _selectable(values))


def _selectable(tensor: Tensor) -> Tensor:
    """The same bits as something that rows are copied of."""
    bits = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(tensor.dtype)
    if bits is None and tensor.is_floating_point() and tensor.element_size() == 1:
        bits = torch.uint8
    return tensor if bits is None else tensor.view(bits)


def picked_items(data: TensorDictBase, places: Tensor) -> TensorDictBase:
    """The items of a tensordict of batch size [..., n] at flat places [..., m], as a new one of that batch size."""
    return _picked_from(data, places, places.reshape(-1), data.batch_dims)


def _picked_from(data: Any, places: Tensor, flat: Tensor, dims: int) -> TensorDictBase:
    shape = places.shape
    made = TensorDict({}, [*shape, *data.batch_size[dims:]], device=data.device)
    for key, value in data.items():
        if isinstance(value, Tensor):
            found: Any = picked(value.reshape(data.batch_size[:dims].numel(), *value.shape[dims:]), flat).view(
                *shape, *value.shape[dims:]
            )
        elif isinstance(value, TensorDict | LazyStackedTensorDict):
            found = _picked_from(value, places, flat, dims)
        else:  # no tensors, or a class around them
            found = value.reshape(-1, *value.batch_size[dims:])[flat].reshape(*shape, *value.batch_size[dims:])
        made.set(key, found)
    if any(name is not None for name in data.names):
        made.names = data.names
    return made

"""Rows of tensors and tensordicts gathered at places, in as few passes over memory as possible."""

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor
from torch import Tensor

from interop.ted.row_values import fresh


def picked(rows: Tensor, places: Tensor) -> Tensor:
    """The rows [n, ...] at places, int64 [m]: [m, ...]. Gradients flow."""
    places = places.to(rows.device)
    if rows.requires_grad or not rows.is_cpu:
        return rows.index_select(0, places)
    out = fresh((places.shape[0], *rows.shape[1:]), rows.dtype)
    torch.index_select(_selectable(rows), 0, places, out=_selectable(out))
    return out


def put_rows(rows: Tensor, places: Tensor, values: Tensor) -> None:
    """Write values [m, ...] to different places of the rows [n, ...]."""
    _selectable(rows).index_copy_(0, places, _selectable(values))


def picked_items(data: Any, places: Tensor) -> Any:
    """The items of a tensordict of batch size [..., n] at flat places [..., m], as a new one of that batch size.

    ValueError for stacked tensordicts of different entries, or entries of different shapes.
    """
    return _picked(data, places.reshape(-1), places.shape, data.batch_dims)


def _picked(data: Any, flat: Tensor, shape: torch.Size, dims: int) -> Any:
    if isinstance(data, LazyStackedTensorDict) and not is_non_tensor(data):
        data = _dense(data)
    inner = data.batch_size[dims:]
    if not isinstance(data, TensorDict):  # a tensorclass, or no tensors
        return data.reshape(-1, *inner)[flat.cpu()].reshape(*shape, *inner)
    names = data.names if any(name is not None for name in data.names) else None
    made = TensorDict({}, [*shape, *inner], device=data.device, names=names)
    for key, value in data.items():
        if isinstance(value, Tensor):
            item = value.shape[dims:]
            made.set(key, picked(value.reshape(data.batch_size[:dims].numel(), *item), flat).view(*shape, *item))
        else:
            made.set(key, _picked(value, flat, shape, dims))
    return made


def _dense(data: LazyStackedTensorDict) -> TensorDict:
    """A stack in new memory."""
    keys = [set(each.keys(True, True)) for each in data.tensordicts]
    if others := set.union(*keys) - set.intersection(*keys):
        raise ValueError(
            f"only some of the stacked tensordicts have {sorted(map(str, others))}: give all the same entries"
        )
    try:
        return data.contiguous()
    except RuntimeError as error:
        raise ValueError(f"the stacked tensordicts are not of one shape: {error}") from error


def _selectable(tensor: Tensor) -> Tensor:
    """The same bits as a dtype that torch can index."""
    bits = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(tensor.dtype)
    if bits is None and tensor.is_floating_point() and tensor.element_size() == 1:
        bits = torch.uint8
    return tensor if bits is None else tensor.view(bits)

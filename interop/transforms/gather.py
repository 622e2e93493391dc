"""Rows of tensors and tensordicts gathered at places, in as few passes over memory as possible."""

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor, is_tensorclass
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


def _selectable(tensor: Tensor) -> Tensor:
    """The same bits as a dtype that torch can index."""
    bits = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(tensor.dtype)
    if bits is None and tensor.is_floating_point() and tensor.element_size() == 1:
        bits = torch.uint8
    return tensor if bits is None else tensor.view(bits)


def picked_items(data: Any, places: Tensor) -> Any:
    """The items of a tensordict of batch size [..., n] at flat places [..., m], as a new one of that batch size.

    ValueError for stacked tensordicts of different entries, or entries of different shapes.
    """
    return _picked_from(data, places, places.reshape(-1), data.batch_dims)


def device_of(data: Any) -> torch.device:
    """The device of the tensors of a tensordict; the CPU without any. ValueError as for `picked_items`."""
    if data.device is not None:
        return data.device
    for key in _keys_of_all(data):
        value = _entry(data, key)
        if isinstance(value, Tensor):
            return value.device
        if not is_non_tensor(value) and (found := device_of(value)) != torch.device("cpu"):
            return found
    return torch.device("cpu")


def _picked_from(data: Any, places: Tensor, flat: Tensor, dims: int) -> Any:
    if is_tensorclass(data) and not is_non_tensor(data):
        return type(data)._from_tensordict(_picked_from(data._tensordict, places, flat, dims), data._non_tensordict)
    shape = places.shape
    made = TensorDict({}, [*shape, *data.batch_size[dims:]], device=data.device)
    for key in _keys_of_all(data):
        value = _entry(data, key)
        if isinstance(value, Tensor):
            found: Any = picked(value.reshape(data.batch_size[:dims].numel(), *value.shape[dims:]), flat).view(
                *shape, *value.shape[dims:]
            )
        elif is_non_tensor(value):
            rows = value.reshape(-1, *value.batch_size[dims:])[flat.to("cpu")]
            found = rows.reshape(*shape, *value.batch_size[dims:])
        else:
            found = _picked_from(value, places, flat, dims)
        made.set(key, found)
    if any(name is not None for name in data.names):
        made.names = data.names
    return made


def _keys_of_all(data: TensorDictBase) -> list[str]:
    """The keys of a tensordict; ValueError for a stack of several where only some have one."""
    keys = list(data.keys())
    if isinstance(data, LazyStackedTensorDict):
        for each in data.tensordicts:
            if others := set(_keys_of_all(each)) - set(keys):
                raise ValueError(
                    f"only some of the stacked tensordicts have {sorted(others)}: give all the same entries"
                )
    return keys


def _entry(data: TensorDictBase, key: str) -> Any:
    try:
        return data._get_str(key, None)  # a stack of non-tensors as a stack, not as a list
    except RuntimeError as error:
        raise ValueError(f"{key!r} is not of one shape in all stacked tensordicts: pad it, or leave it out") from error

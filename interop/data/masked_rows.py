"""Masks of rows: the part of a batch that is written."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import PyTree
from tensordict import LazyStackedTensorDict, is_tensor_collection
from torch import Tensor

from interop.data.pytrees import each_leaf, row_of

Mask = Tensor | np.ndarray | Sequence[bool]


def rows_of_mask(data: PyTree, mask: object, dim: int, ndim: int) -> PyTree:
    """The rows of a batch where the mask is True; None if there are none. O(rows that stay).

    Args:
        data: what `extend` takes. An iterator is used up.
        mask: bool [n]; or with all item dims: for one item dim leaves [n, m, ...] become [items, ...], for several a row is
            all True or all False.
        dim: the dim of data along which rows follow each other.
        ndim: item dims of the storage.

    TypeError for a mask that is not bool. ValueError for one of another shape, or with rows of both values.
    """
    chosen = _as_bool(mask)
    if hasattr(data, "__next__"):
        data = list(data)
    if ndim > 1 and chosen.ndim == ndim:
        _check(data, chosen.shape)
        chosen = _whole_rows(np.moveaxis(chosen, dim, 0), ndim)
    elif chosen.ndim == 1 or (ndim > 1 or isinstance(data, list)):
        if chosen.ndim != 1:
            raise ValueError(f"mask needs one value for each row, shape [n], got {list(chosen.shape)}")
        _check(data, chosen.shape, dim)
    else:
        _check(data, chosen.shape)
        index = torch.from_numpy(np.flatnonzero(chosen))
        if any((isinstance(leaf, Tensor) and leaf.is_nested) or _nested_leaves(leaf) for leaf in _leaves(data)):
            raise ValueError(
                f"rows of any length take a mask with one value for each row, got shape {list(chosen.shape)}"
            )
        flat = each_leaf(data, lambda leaf: leaf.reshape(-1, *leaf.shape[chosen.ndim :]))
        return _taken(flat, index, 0) if index.numel() else None
    index = torch.from_numpy(np.flatnonzero(chosen))
    if not index.numel():
        return None
    if isinstance(data, list):  # of single items
        return [data[place] for place in index.tolist()]
    return _taken(data, index, dim)


def _as_bool(mask: object) -> np.ndarray:
    values = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if values.dtype != np.bool_:
        raise TypeError(f"mask must be bool, True for the rows to write, got {values.dtype}: for example weights > 0")
    if not values.ndim:
        raise ValueError("mask needs shape [n], one value for each row of the batch, got a single value")
    return values


def _whole_rows(mask: np.ndarray, ndim: int) -> np.ndarray:
    """bool [n]. ValueError for a row whose items have both values."""
    rows = mask.reshape(mask.shape[0], -1)
    some = np.asarray(rows.any(1))
    mixed = np.flatnonzero(some & ~rows.all(1))
    if mixed.size:
        raise ValueError(
            f"a storage with ndim={ndim} holds whole rows, and {mixed.size} rows have items of both values in the mask, the "
            f"first of them row {mixed[0]}. For environments that end at different times use a storage with ndim=1, whose "
            "items have trajectory ids: the same mask then writes single items"
        )
    return some


def _check(data: PyTree, shape: tuple[int, ...], dim: int = 0) -> None:
    """ValueError, naming its shape, for a leaf that does not have these dims, from `dim` on."""
    if isinstance(data, list):
        if (len(data),) != shape:
            raise ValueError(f"mask needs one value for each of {len(data)} items, got shape {list(shape)}")
        return
    for leaf in _leaves(data):
        lead = tuple(leaf.shape) if hasattr(leaf, "shape") else (len(leaf),)
        if lead[dim : dim + len(shape)] != shape:
            raise ValueError(
                f"mask has shape {list(shape)}, and needs that of the rows: dims {dim} to {dim + len(shape) - 1} of data "
                f"with shape {list(lead)}"
            )


def _leaves(data: PyTree) -> list[PyTree]:
    if isinstance(data, dict | tuple) and not is_tensor_collection(data):
        return [leaf for each in (data.values() if isinstance(data, dict) else data) for leaf in _leaves(each)]
    if isinstance(data, list) and not any(isinstance(each, str | bytes) for each in data):
        return [leaf for each in data for leaf in _leaves(each)]
    return [data]


def _taken(data: PyTree, index: Tensor, dim: int) -> PyTree:
    """The rows at an index of each leaf."""
    if isinstance(data, Tensor) and data.is_nested:
        return _nested_rows(data, index, dim)
    if is_tensor_collection(data) and (nested := _nested_leaves(data)):
        rows = _taken(data.exclude(*nested), index, dim)
        for key, leaf in nested.items():
            rows.set(key, _nested_rows(leaf, index, dim))
        return rows
    if isinstance(data, Tensor) or is_tensor_collection(data):
        return data[(*(slice(None) for _ in range(dim)), index)]
    if isinstance(data, dict):
        return {key: _taken(value, index, dim) for key, value in data.items()}
    if isinstance(data, list) and any(isinstance(each, str | bytes) for each in data):
        return [data[place] for place in index.tolist()]
    if isinstance(data, tuple | list):
        return row_of(type(data), [_taken(value, index, dim) for value in data])
    return data[(*(slice(None) for _ in range(dim)), index.numpy())]


def _nested_leaves(data: PyTree) -> dict[tuple[str, ...], Tensor]:
    """The nested tensors of a tensordict, by key."""
    found: dict[tuple[str, ...], Tensor] = {}
    if isinstance(data, LazyStackedTensorDict) or not hasattr(data, "items"):  # which torch indexes row by row
        return found
    for key, value in data.items():
        if isinstance(value, Tensor):
            if value.is_nested:
                found[(key,)] = value
        elif is_tensor_collection(value):
            found |= {(key, *below): leaf for below, leaf in _nested_leaves(value).items()}
    return found


def _nested_rows(data: Tensor, index: Tensor, dim: int) -> Tensor:
    """Components of a nested tensor, which has no indexing by tensors. ValueError for another dim than the first."""
    if dim:
        raise ValueError(f"rows of any length follow each other along dim 0, and the mask is along dim {dim} of data")
    components = data.unbind()
    rows: Tensor = torch.nested.as_nested_tensor([components[place] for place in index.tolist()], layout=data.layout)
    return rows

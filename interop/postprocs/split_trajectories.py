"""Splits rollouts into trajectories: one padded row for each."""

import dataclasses
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_leaf_nontensor, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path
from interop.data.tensordicts import non_tensors, values_of
from interop.data.trajectory_keys import MASKS
from interop.postprocs.batch_trajectories import StepMarks, keys_of, rows_by_trajectory
from interop.postprocs.gather import picked
from interop.ted.flattening import KeyPath, shown
from interop.ted.row_values import dense, fresh_zeros, nested, rows_as_values, sizes


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: Any = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool = False,
    only_named_keys: bool = False,
) -> TensorDict:
    """Splits data of [*batch, time] into trajectories, [trajectories, longest], padded with zeros. Names of dims are lost.

    A trajectory ends with its batch row, and where any entry says so: where an id changes, where ("next", "done"),
    ("next", "terminated") or ("next", "truncated") is true, and before a true "is_init". Rows with equal ids are one
    trajectory with rows of others in between if it is one of each, 0, 1, 0, 1; the ids 0, 0, 1, 1, 0, 0 are three. So rows
    of one id may be several trajectories. Their order is that of their first rows. Entries that are no tensors are padded
    with None; one value for all stays one.

    Args:
        rollout_tensordict: the rows; not changed.
        prefix: where "traj_ids" are; "collector" if there is such an entry, otherwise the root.
        trajectory_key: key of the ids instead, one value a row. Missing ids are made: 0, 1, ...
        done_key: an entry under "next" that ends trajectories; "done" by default.
        as_nested: return nested tensors, [trajectories, -1], without the mask.
        only_named_keys: only the ids and `done_key` count, and the mask.

    Returns all entries, the ids, and beside these "mask": which rows are of the trajectory. Rows that a mask of the data,
    there or under ("collector", "mask"), says are padding are left out. KeyError where no entry marks trajectories, and for
    a missing `done_key` that was given; ValueError for an id or `done_key` with several values a row, and data without time.
    """
    data = rollout_tensordict
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"split_trajectories takes a tensordict, got {type(data).__name__}")
    if not data.ndim:
        raise ValueError("split_trajectories needs batch dims of which the last is time, got batch size []")
    above = as_path(prefix) if prefix is not None else ("collector",) if "collector" in data.keys() else ()  # noqa: SIM118
    id_path = (*above, "traj_ids") if trajectory_key is None else as_path(trajectory_key)
    ids = data.get(id_path, None)
    order, lengths = rows_by_trajectory(_marks(data, id_path, done_key, only_named_keys))
    longest = int(lengths.max(initial=0))
    mask = np.arange(longest) < lengths[:, None]
    ragged = as_nested and (lengths != longest).any()  # tensordict knows the size of dims that are not
    shape = [len(lengths), -1 if ragged else longest]
    split = TensorDict({}, batch_size=shape, device=data.device)
    for key in data.keys(True, True, is_leaf=is_leaf_nontensor):
        value = data.get(key)
        if isinstance(value, Tensor):
            value = value.flatten(0, data.ndim - 1) if order is None else _steps_at(value, data.ndim, order)
            split.set(key, _nested(value, lengths) if as_nested else _padded(value, mask))
        elif is_non_tensor(value) and not isinstance(value, NonTensorStack):
            split.set(key, NonTensorData(value.data, batch_size=[len(lengths), -1] if as_nested else mask.shape))
        elif as_nested:
            raise TypeError(f"{shown(as_path(key))}: {type(value).__name__} cannot be nested")
        else:
            split.set(key, _padded_objects(value, mask, order))
    tensors = (tensor for tensor in data.values(True, True) if isinstance(tensor, Tensor))
    device = data.device or next((tensor.device for tensor in tensors), torch.device("cpu"))
    if ids is None:
        numbers = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
        split.set(id_path, _nested(numbers, lengths) if as_nested else _padded(numbers, mask))
    if not as_nested:
        split.set((*id_path[:-1], "mask"), torch.from_numpy(mask).to(device))
    return split


def _marks(data: TensorDictBase, id_path: KeyPath, done_key: NestedKey | None, only_named: bool) -> StepMarks:
    """The entries that mark trajectories. Errors as for `split_trajectories`."""
    time = data.ndim - 1
    done_path = ("next", *as_path("done" if done_key is None else done_key))
    beside: Any = data.get((*id_path[:-1], "mask"), None)
    is_mask = isinstance(beside, Tensor) and beside.dtype == torch.bool  # as this function makes them
    masks = [*([(*id_path[:-1], "mask")] if is_mask else []), *MASKS]
    keys = keys_of(id_path, [done_path], only_named, masks)
    there = frozenset(path for path in (id_path, done_path) if data.get(path, None) is not None)
    named = there if done_key is not None else there & {id_path}
    marks = StepMarks.of(data, time, dataclasses.replace(keys, named=named))
    if any(marks.keys.groups()[:3]) and (there or done_key is None):
        return marks
    if there:  # an error says why these flags do not mark trajectories
        return StepMarks.of(data, time, dataclasses.replace(keys, named=there))
    entries = ", ".join(shown(as_path(key)) for key in data.keys(True, True)) or "no entries"
    raise KeyError(
        f"{shown(done_path)} and {shown(id_path)} are missing: one must end trajectories; there are {entries}"
    )


def _steps_at(value: Tensor, dims: int, places: np.ndarray) -> Tensor:
    """Rows at places, of data with `dims` batch dims."""
    steps: Tensor = picked(value.flatten(0, dims - 1), torch.from_numpy(places))
    return steps


def _nested(rows: Tensor, lengths: np.ndarray) -> Tensor:
    """Rows as a nested tensor of trajectories."""
    memory = rows.clone(memory_format=torch.contiguous_format)
    return nested(memory, sizes(torch.from_numpy(lengths), tuple(rows.shape[1:])))


def _padded(rows: Tensor, mask: np.ndarray) -> Tensor:
    """Rows where the mask is true, and zeros."""
    shape = (*mask.shape, *rows.shape[1:])
    if rows.device.type == "cpu" and not rows.requires_grad and rows.numel():
        padded = fresh_zeros(shape, rows.dtype)
        rows_as_values(padded, 2)[mask.reshape(-1)] = rows_as_values(dense(rows.as_subclass(Tensor)), 1)
        return padded
    zeros = torch.zeros((mask.size, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    places = torch.from_numpy(np.flatnonzero(mask)).to(rows.device)
    return zeros.index_copy(0, places, rows).reshape(shape)


def _padded_objects(value: Any, mask: np.ndarray, order: np.ndarray | None) -> Any:
    """Objects where the mask is true, and None."""
    flat = np.empty(mask.shape, object)
    values = values_of(value)
    objects = np.fromiter(values, object, len(values))
    flat[mask] = objects if order is None else objects[order]
    return NonTensorStack(*(NonTensorStack(*non_tensors(row)) for row in flat.tolist()))

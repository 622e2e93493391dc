"""Splits rollouts into trajectories: one padded row for each."""

from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_leaf_nontensor, is_non_tensor
from torch import Tensor

from interop.data.keys import as_path
from interop.data.tensordicts import non_tensors, values_of
from interop.ted.flattening import Path, shown
from interop.ted.row_values import dense, fresh_zeros, nested, sizes, whole


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: Any = None,
    trajectory_key: Any = None,
    done_key: Any = None,
    as_nested: bool = False,
) -> TensorDict:
    """Splits data of [*batch, time] into trajectories, [trajectories, longest], padded with zeros. Names of dims are lost.

    A trajectory ends where the id changes or, without ids, where it is done; and with its batch row. Equal ids that do not
    follow each other are different trajectories. The order is that of their first rows. Entries that are no tensors are
    padded with None; one value for all stays one.

    Args:
        rollout_tensordict: the rows; not changed.
        prefix: where "traj_ids" are; "collector" if there is such an entry, otherwise the root.
        trajectory_key: key of the ids instead, one value a row. Missing ids are made: 0, 1, ...
        done_key: the entry under "next" that ends trajectories if there are no ids; "done" by default.
        as_nested: return nested tensors, [trajectories, -1], without the mask.

    Returns all entries, the ids, and beside these "mask": which rows are of the trajectory. KeyError for a missing done
    entry, ValueError for entries with several values a row and data without time.
    """
    data = rollout_tensordict
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"split_trajectories takes a tensordict, got {type(data).__name__}")
    if not data.ndim:
        raise ValueError("split_trajectories needs batch dims of which the last is time, got batch size []")
    above = as_path(prefix) if prefix is not None else ("collector",) if "collector" in data.keys() else ()  # noqa: SIM118
    id_path = (*above, "traj_ids") if trajectory_key is None else as_path(trajectory_key)
    ids = data.get(id_path, None)
    stops = _stops(data, ids, id_path, ("next", *as_path("done" if done_key is None else done_key)))
    lengths = np.diff(stops, prepend=-1)
    longest = int(lengths.max(initial=0))
    mask = np.arange(longest) < lengths[:, None]
    ragged = as_nested and (lengths != longest).any()  # tensordict knows the size of dims that are not
    shape = [len(lengths), -1 if ragged else longest]
    made = TensorDict({}, batch_size=shape, device=data.device)
    for key in data.keys(True, True, is_leaf=is_leaf_nontensor):
        value = data.get(key)
        if isinstance(value, Tensor):
            made.set(key, _nested(value, data.ndim, lengths) if as_nested else _padded(value, data.ndim, mask))
        elif is_non_tensor(value) and not isinstance(value, NonTensorStack):
            made.set(key, NonTensorData(value.data, batch_size=[len(lengths), -1] if as_nested else mask.shape))
        elif as_nested:
            raise TypeError(f"{shown(as_path(key))}: {type(value).__name__} cannot be nested")
        else:
            made.set(key, _padded_objects(value, mask))
    tensors = (each for each in data.values(True, True) if isinstance(each, Tensor))
    device = data.device or next((each.device for each in tensors), torch.device("cpu"))
    if ids is None:
        numbers = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
        made.set(id_path, _nested(numbers, 1, lengths) if as_nested else _padded(numbers, 1, mask))
    if not as_nested:
        made.set((*id_path[:-1], "mask"), torch.from_numpy(mask).to(device))
    return made


def _nested(value: Tensor, dims: int, lengths: np.ndarray) -> Tensor:
    """Rows as a nested tensor of trajectories."""
    rows = value.flatten(0, dims - 1).clone(memory_format=torch.contiguous_format)
    return nested(rows, sizes(torch.from_numpy(lengths), tuple(value.shape[dims:])))


def _padded(value: Tensor, dims: int, mask: np.ndarray) -> Tensor:
    """Rows where the mask is true, and zeros."""
    shape = (*mask.shape, *value.shape[dims:])
    if value.device.type == "cpu" and not value.requires_grad and value.numel():
        made = fresh_zeros(shape, value.dtype)
        whole(made, 2)[mask.reshape(-1)] = whole(dense(value.as_subclass(Tensor)), dims)
        return made
    zeros = torch.zeros((mask.size, *value.shape[dims:]), dtype=value.dtype, device=value.device)
    places = torch.from_numpy(np.flatnonzero(mask)).to(value.device)
    return zeros.index_copy(0, places, value.flatten(0, dims - 1)).reshape(shape)


def _padded_objects(value: Any, mask: np.ndarray) -> Any:
    """Objects where the mask is true, and None."""
    flat = np.empty(mask.shape, object)
    flat[mask] = np.fromiter(values_of(value), object, int(mask.sum()))
    return NonTensorStack(*(NonTensorStack(*non_tensors(row)) for row in flat.tolist()))


def _stops(data: TensorDictBase, ids: Any, id_path: Path, done_path: Path) -> np.ndarray:
    """The last row of each trajectory, counting all rows."""
    if ids is not None:
        held = _one_each(ids, id_path, data)
        ends = np.ones(held.shape, np.bool_)
        ends[:, :-1] = held[:, 1:] != held[:, :-1]
    else:
        done = data.get(done_path, None)
        if done is None:
            known = ", ".join(shown(as_path(key)) for key in data.keys(True, True)) or "no entries"
            raise KeyError(
                f"{shown(done_path)} and {shown(id_path)} are missing: one must end trajectories; there are {known}"
            )
        ends = _one_each(done, done_path, data) != 0
        ends[:, -1:] = True
    return np.flatnonzero(ends)


def _one_each(value: Any, path: Path, data: TensorDictBase) -> np.ndarray:
    """An entry with one value a row as [batch, time]."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{shown(path)} must be a tensor, got {type(value).__name__}")
    if value.numel() != data.batch_size.numel():
        raise ValueError(
            f"{shown(path)} has the shape {list(value.shape)}, the rows have {list(data.shape)}: give the key of an entry "
            "with one value a row"
        )
    held = dense(value.detach().as_subclass(Tensor))
    held = held.view(torch.int16) if held.dtype in (torch.uint16, torch.bfloat16) else held
    return held.numpy().reshape(data.shape[:-1].numel(), data.shape[-1])

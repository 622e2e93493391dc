"""The hooks that make a part for each trajectory, as the groups of an H5 file are, and one tensordict again."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor

from interop.ted.entries import Path, leaves_of, shown
from interop.ted.flat import TED2Flat, parted
from interop.ted.gathered import nested, sizes

_NAME = re.compile(r"traj_(\d+)")


class H5Split(TED2Flat):
    """A save hook behind `TED2Nested`: entries `traj_0`, `traj_1`, ... with the tensors of a trajectory each.

    The numbers have as many digits as the last one. Tensors share the memory of what is given; other entries stay.
    """

    def __call__(self, data: TensorDictBase, path: Any = None) -> TensorDictBase:
        tensors, told = parted(data)
        split = {key: tensor.unbind(0) for key, tensor in tensors.items()}
        made = TensorDict({}, device="cpu")
        for key, value in told.items():
            made.set(key, NonTensorData(value, device="cpu"))
        for place, name in enumerate(trajectory_names(data.batch_size[0])):
            made.set(name, tree({key: rows[place] for key, rows in split.items()}))
        return made


class H5Combine:
    """A load hook before `Nested2TED`: nested tensors from the parts that `H5Split` made. `out` is not used.

    ValueError for parts that are not those of all trajectories, or differ in their entries. Each value is copied once.
    """

    def __call__(self, data: TensorDictBase, out: Any = None) -> TensorDictBase:
        if not is_tensor_collection(data):
            raise TypeError(f"H5Combine takes a tensordict, got {type(data).__name__}")
        parts, told = {}, {}
        for key in data.keys():  # noqa: SIM118  # a tensordict iterates over its rows
            value = data.get(key)
            if _NAME.fullmatch(key) and is_tensor_collection(value):
                parts[key] = leaves_of(value)
            else:
                told[key] = (
                    value.tolist() if isinstance(value, Tensor) else value.data if is_non_tensor(value) else value
                )
        columns = combined(
            parts, lambda tensor: (tuple(tensor.shape), tensor.dtype), lambda tensor, rows: rows.copy_(tensor)
        )
        made = TensorDict({}, batch_size=[len(parts)], device="cpu")
        for key, value in told.items():
            made.set(key, NonTensorData(value, batch_size=[len(parts)], device="cpu"))
        for path, column in columns.items():
            made.set(path, column)
        return made


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _read(tensor: Tensor, memory: Tensor) -> None:
    memory.copy_(tensor)


def combined(
    parts: Mapping[str, Mapping[Path, Any]],
    kind: Callable[[Any], tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[Any, Tensor], object],
) -> dict[Path, Tensor]:
    """A nested tensor for each entry of trajectories by name. ValueError for names or entries that do not fit together.

    Args:
        parts: the entries of each trajectory.
        kind: the shape and dtype of one.
        read: copies one into memory of its shape.
    """
    names = trajectory_names(len(parts))
    if not parts or set(names) != set(parts):
        raise ValueError(
            f"{len(parts)} trajectories should be called {names[:1]} to {names[-1:]}, found {sorted(parts)[:5]}"
        )
    first = parts[names[0]]
    for name in names:
        if parts[name].keys() != first.keys():
            raise ValueError(
                f"{name} has other entries than {names[0]}: {', '.join(map(shown, parts[name])) or 'none'}"
            )
    found = {}
    for path, model in first.items():
        (_, *item), dtype = kind(model)
        kinds = [kind(parts[name][path]) for name in names]
        if any(not shape or [*shape[1:]] != item or each != dtype for shape, each in kinds):
            raise ValueError(f"{shown(path)} has different shapes or dtypes in the trajectories")
        lengths = torch.tensor([shape[0] for shape, _ in kinds], dtype=torch.int64, device="cpu")
        memory = torch.empty((int(lengths.sum()), *item), dtype=dtype, device="cpu")
        for name, rows in zip(names, memory.split(lengths.tolist()), strict=True):
            read(parts[name][path], rows)
        found[path] = nested(memory, sizes(lengths, tuple(item)))
    return found


def trajectory_names(count: int) -> list[str]:
    """The names of trajectories: numbers of as many digits as the last one."""
    digits = len(str(max(count - 1, 0)))
    return [f"traj_{place:0{digits}d}" for place in range(count)]


def tree(entries: Mapping[Path, Tensor]) -> TensorDict:
    """A tensordict without batch dims of entries by path."""
    made = TensorDict({}, device="cpu")
    for path, value in entries.items():
        made.set(path, value)
    return made

"""Hooks of checkpointers that save each observation of TED data once, and restore TED data."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_leaf_nontensor, is_non_tensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path
from interop.ted.flattening import REWARD_KEYS, Flattened, KeyPath, Names, Rebuilt, TedRing, missing_done, shown
from interop.ted.row_values import components, fresh, nested, side_by_side, sizes, words
from interop.trajectories import DEFAULT_DONE_KEYS

_SHAPE = ("_storage_shape",)
_PATHS = ("_paths",)
_TRAJECTORY = re.compile(r"traj_\d+")


class TED2Flat:
    """A save hook: TED data with each observation once, about half of the bytes.

    Called as `hook(data, path=None)` with a tensordict of [rows, *lanes]; set `shift` and `is_full` before. Done flags and
    rewards of "next", and entries of the root alone, become [items, ...]: lane after lane, the oldest row first. An
    observation becomes [items + ends, ...]: the root's values of an episode, then the last value of "next". An episode ends
    where it is done, and with the newest row. `shift`, `is_full` and `_storage_shape` are non-tensor entries; so is
    `_paths`, the entries of the data, if flags or rewards are in the root alone or in "next" alone. With a path the tensors
    are memory maps in that folder, which `TensorDict.load_memmap` reads.

    As in TED data, only `done_key` ends episodes: other entries, such as ids, are saved and not looked at.

    ValueError, naming a key and its first row, for data that `Flat2TED` would not restore bit for bit. Each value is copied
    once, to the CPU.

    Args:
        done_key: the flag that ends episodes.
        shift_key: the entry for `shift`.
        is_full_key: the entry for `is_full`.
        done_keys: done flags below "next", and of the root, where they must all be False and are not saved.
        reward_keys: rewards below "next".
        verify: refuse data that would not come back; otherwise the difference is lost.
    """

    shift: int | None = None
    """The row behind the newest one."""
    is_full: bool | None = None
    """Whether every row was written."""

    def __init__(
        self,
        done_key: NestedKey | None = ("next", "done"),
        shift_key: Any = "shift",
        is_full_key: Any = "is_full",
        done_keys: Iterable[Any] = DEFAULT_DONE_KEYS,
        reward_keys: Iterable[Any] = REWARD_KEYS,
        *,
        verify: bool = True,
    ) -> None:
        self.done_key = as_path(done_key)
        self.names = Names.of(done_keys, reward_keys)
        self.shift_key = as_path(shift_key)
        self.is_full_key = as_path(is_full_key)
        self._verify = verify

    def __call__(self, data: TensorDictBase, path: str | os.PathLike[str] | None = None) -> TensorDictBase:
        return _gathered(*self.flattened(data), path, by_trajectory=False)

    def flattened(self, data: TensorDictBase) -> tuple[Flattened, dict[KeyPath, Any]]:
        """The flat arrays, and the non-tensor entries."""
        if self.shift is None or self.is_full is None:
            raise TypeError(
                f"set shift and is_full of the {type(self).__name__} before it is called, as checkpointers do"
            )
        leaves = _leaves(data)
        ring = TedRing(tuple(data.batch_size), int(self.shift), bool(self.is_full))
        flat = Flattened(leaves, ring, self.names, self.done_key, self._verify)
        info: dict[KeyPath, Any] = {self.is_full_key: ring.is_full, self.shift_key: ring.shift, _SHAPE: ring.shape}
        if flat.unusual():
            info[_PATHS] = list(map(list, leaves))
        names = [name for name in info if any(path[: len(name)] == name for path in flat.specs)]
        if names:
            raise ValueError(
                f"{shown(names[0])} is a key of the data: rename it, or pass another shift_key or is_full_key"
            )
        return flat, info


class Flat2TED:
    """A load hook: the TED data that `TED2Flat` flattened, bit for bit.

    Called as `hook(data, out=None)`; `out` is a tensordict of the rows with the same entries, which gets the values.
    ValueError for entries that are not of such data, or not those of `out`; nothing is written then. Each value is copied
    once.

    Args:
        done_key: the flag that ends episodes.
        shift_key: the entry of `shift`.
        is_full_key: the entry of `is_full`.
        done_keys: done flags; those of the root come back False.
        reward_keys: rewards.
    """

    def __init__(
        self,
        done_key: NestedKey | None = "done",
        shift_key: Any = "shift",
        is_full_key: Any = "is_full",
        done_keys: Iterable[Any] = DEFAULT_DONE_KEYS,
        reward_keys: Iterable[Any] = REWARD_KEYS,
    ) -> None:
        self._done_key = as_path(done_key)
        self._names = Names.of(done_keys, reward_keys)
        self._shift_key = as_path(shift_key)
        self._is_full_key = as_path(is_full_key)

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        return self._restored(*_parted(data), out)

    def _restored(
        self, leaves: Mapping[KeyPath, Tensor], info: Mapping[KeyPath, Any], out: TensorDictBase | None
    ) -> TensorDictBase:
        shape, shift, is_full = (info.get(key) for key in (_SHAPE, self._shift_key, self._is_full_key))
        for key, value in ((_SHAPE, shape), (self._shift_key, [shift])):
            if not isinstance(value, Sequence) or not all(type(number) is int for number in value):
                raise ValueError(f"{shown(key)} should be integers, found {info.get(key)!r}")
        if not isinstance(is_full, bool):
            raise ValueError(f"{shown(self._is_full_key)} should be True or False, found {is_full!r}")
        if self._done_key not in leaves:
            raise missing_done(self._done_key, leaves)
        paths = [tuple(map(str, path)) for path in info[_PATHS]] if _PATHS in info else None
        ring = TedRing(tuple(shape or ()), shift or 0, is_full)
        rebuilt = Rebuilt(_specs(leaves), leaves[self._done_key], ring, self._names, paths)
        if out is None:
            out = TensorDict({}, batch_size=ring.shape, device="cpu")
            memory = {key: fresh(*spec) for key, spec in rebuilt.specs.items()}
            for key, place in memory.items():
                out.set(key, place)
        else:
            memory = _leaves(out)
            specs = rebuilt.specs
            out_specs = _specs(memory)
            wrong = [key for key in {**specs, **out_specs} if specs.get(key) != out_specs.get(key)]
            if wrong:
                key = wrong[0]
                raise ValueError(
                    f"out does not fit, nothing was written: {shown(key)} is {_described(specs.get(key))}, out has "
                    f"{_described(out_specs.get(key))}"
                )
        works = [work for key, leaf in leaves.items() for work in rebuilt.fillings(key, leaf, memory)]
        side_by_side(works, sum(leaf.nbytes for leaf in leaves.values()))
        return out


class TED2Nested(TED2Flat):
    """A save hook: `TED2Flat` in nested tensors, [trajectories, rows of each, ...].

    Observations have one row more than done flags and rewards, except for the rows of a lane that were not written: they are
    one more trajectory. Arguments and errors are those of `TED2Flat`.
    """

    def __call__(self, data: TensorDictBase, path: str | os.PathLike[str] | None = None) -> TensorDictBase:
        return _gathered(*self.flattened(data), path, by_trajectory=True)


class Nested2TED(Flat2TED):
    """A load hook: the TED data of `TED2Nested`. Arguments and errors are those of `Flat2TED`."""

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        tensors, info = _parted(data)
        for path, tensor in tensors.items():
            if not tensor.is_nested or tensor.dim() < 2:
                raise ValueError(f"{shown(path)}: expected a nested tensor with a component for each trajectory")
        parts = {path: components(tensor) for path, tensor in tensors.items()}
        _, rows = parts.get(self._done_key, (None, None))
        for path, (_, counts) in parts.items():
            if rows is not None and (counts.shape != rows.shape or ((counts - rows) & ~1).any()):
                raise ValueError(
                    f"{shown(path)} and {shown(self._done_key)} have other numbers of rows in a trajectory"
                )
        return self._restored({path: memory for path, (memory, _) in parts.items()}, info, out)


class H5Split(TED2Flat):
    """A save hook behind `TED2Nested`: entries `traj_0`, `traj_1`, ... with the tensors of one trajectory each.

    The tensors share the memory of the data; other entries stay. ValueError for data without trajectories.
    """

    def __call__(self, data: TensorDictBase, path: Any = None) -> TensorDictBase:
        tensors, info = _parted(data)
        for key, tensor in tensors.items():
            if not tensor.is_nested:
                raise ValueError(
                    f"{shown(key)} is no nested tensor with a component for each trajectory: register TED2Nested() before "
                    "H5Split(), and to load H5Combine() before Nested2TED()"
                )
        split = {key: tensor.unbind(0) for key, tensor in tensors.items()}
        trajectories = TensorDict({}, device="cpu")
        for key, value in info.items():
            trajectories.set(key, NonTensorData(value, device="cpu"))
        for place, name in enumerate(trajectory_names(data.batch_size[0])):
            trajectories.set(name, TensorDict({}, device="cpu"))
            for key, rows in split.items():
                trajectories.set((name, *key), rows[place])
        return trajectories


class H5Combine:
    """A load hook before `Nested2TED`: nested tensors of the entries that `H5Split` made. `out` is not used.

    ValueError for entries that are not those of all trajectories, or unlike. Each value is copied once.
    """

    def __call__(self, data: TensorDictBase, out: Any = None) -> TensorDictBase:
        tensors, info = _parted(data)
        parts: dict[str, dict[KeyPath, Tensor]] = {}
        for (first, *rest), value in tensors.items():
            if rest and _TRAJECTORY.fullmatch(first):
                parts.setdefault(first, {})[tuple(rest)] = value
            else:
                info[first, *rest] = value.tolist()
        names = trajectory_names(len(parts))
        if not parts or set(names) != set(parts):
            raise ValueError(
                f"{len(parts)} trajectories should be called {names[:1]} to {names[-1:]}, found {sorted(parts)[:5]}"
            )
        joined = TensorDict({}, batch_size=[len(parts)], device="cpu")
        for key, value in info.items():
            joined.set(key, NonTensorData(value, batch_size=[len(parts)], device="cpu"))
        for name in names:
            if parts[name].keys() != parts[names[0]].keys():
                entries = ", ".join(map(shown, parts[name])) or "none"
                raise ValueError(f"{name} has other entries than {names[0]}: {entries}")
        for path, model in parts[names[0]].items():
            parts_of_path = [parts[name][path] for name in names]
            if any(
                not one.ndim or (one.shape[1:], one.dtype) != (model.shape[1:], model.dtype) for one in parts_of_path
            ):
                raise ValueError(f"{shown(path)} has different shapes or dtypes in the trajectories")
            lengths = torch.tensor([len(one) for one in parts_of_path], dtype=torch.int64, device="cpu")
            joined.set(path, nested(torch.cat(parts_of_path).cpu(), sizes(lengths, tuple(model.shape[1:]))))
        return joined


def trajectory_names(count: int) -> list[str]:
    """The names of so many trajectories: numbers of as many digits as the last one."""
    digits = len(str(max(count - 1, 0)))
    return [f"traj_{place:0{digits}d}" for place in range(count)]


def _gathered(
    flat: Flattened, info: Mapping[KeyPath, Any], path: str | os.PathLike[str] | None, by_trajectory: bool
) -> TensorDictBase:
    """The arrays, by trajectory as nested tensors, and the entries `info`, in memory or in the files of a folder."""
    lengths, ended = flat.order.trajectories()
    batch = [len(lengths)] if by_trajectory else []
    gathered = TensorDict({}, batch_size=batch, device="cpu")
    memories = {key: fresh(*spec) for key, spec in flat.specs.items()}
    size = sum(memory.nbytes for memory in memories.values())
    side_by_side([partial(flat.fill, *arguments) for arguments in memories.items()], size)
    if path is not None:
        gathered.memmap_(path)
    for key, memory in memories.items():
        rows = lengths + ended if key in flat.followed else lengths
        shape: Any = sizes(rows, tuple(memory.shape[1:])) if by_trajectory else memory.shape
        if path is None:
            gathered.set(key, nested(memory, shape) if by_trajectory else memory)
        else:
            _write_entry(gathered, key, shape, memory)
    gathered.unlock_()
    for key, value in info.items():  # last: a hook refuses a folder without them, whose files may be half written
        gathered.set(key, NonTensorData(value, batch_size=batch, device="cpu"))
    return gathered if path is None else gathered.memmap_(path)


def _write_entry(target: TensorDictBase, key: KeyPath, shape: Tensor | torch.Size, memory: Tensor) -> None:
    """Add an entry to a memory-mapped tensordict. OSError if the disk is full.

    The file is written, not the map: stores take twice as long, and on a full disk they end the process.
    """
    try:
        file_map: Any = target.make_memmap(key, shape, dtype=memory.dtype)
    except RuntimeError as error:  # by which torch says that it cannot make the file
        raise OSError(str(error)) from error
    file_map.index = None  # pickle asks for these two
    file_map.parent_shape = shape
    if memory.numel():
        with open(file_map.filename, "r+b") as file:
            file.write(words(memory, 1).data)


def _parted(data: TensorDictBase) -> tuple[dict[KeyPath, Tensor], dict[KeyPath, Any]]:
    """The tensors of a tensordict by path, and the values of its other entries."""
    if not is_tensor_collection(data):
        raise TypeError(
            f"expected a tensordict, got {type(data).__name__}: hooks of TED data go with the rows of a LazyTensorStorage "
            "or LazyMemmapStorage; storages of lists give their hooks a list of items"
        )
    tensors = {}
    non_tensors = {}
    for key in data.keys(True, True, is_leaf=is_leaf_nontensor):
        value = data.get(key)
        if isinstance(value, Tensor):
            tensor = value.detach()
            tensors[as_path(key)] = tensor if tensor.layout == torch.jagged else tensor.as_subclass(Tensor)
        else:
            non_tensors[as_path(key)] = value.data if is_non_tensor(value) else value
    return tensors, non_tensors


def _leaves(data: TensorDictBase) -> dict[KeyPath, Tensor]:
    """The tensors of a tensordict by path. TypeError for other entries."""
    tensors, non_tensors = _parted(data)
    if _SHAPE in non_tensors:
        raise ValueError("the data is flat already: register one of TED2Flat() and TED2Nested(), and it once")
    for path, value in non_tensors.items():
        raise TypeError(f"{shown(path)}: only tensors can be flattened, got {type(value).__name__}")
    for path, tensor in tensors.items():
        if tensor.is_nested:
            raise TypeError(f"{shown(path)}: only dense tensors can be flattened, got ragged rows")
    return tensors


def _specs(leaves: Mapping[KeyPath, Tensor]) -> dict[KeyPath, tuple[tuple[int, ...], torch.dtype]]:
    return {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves.items()}


def _described(spec: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "missing" if spec is None else f"{spec[1]} {list(spec[0])}"

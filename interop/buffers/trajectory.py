"""One trajectory as rows in the order of time, and the trajectories of a batch of transitions."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast, overload

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.arguments import class_of
from interop.data.keys import as_key, as_path, known_keys
from interop.data.trajectory_keys import TrajectoryKeys
from interop.samplers.boundary_keys import BoundaryKeys, NoMarkersError
from interop.samplers.stored_trajectories import StoredTrajectories
from interop.storages import TensorStorage
from interop.trajectories import DEFAULT_DONE_KEYS

_REWARD = "reward"
_MISSING: Any = object()


class Trajectory:
    """The rows of one trajectory in the order of time.

    Entries are attributes and items: `trajectory.reward` is the entry "reward", or ("next", "reward") where there is no
    "reward"; `trajectory["next", "reward"]` is exactly this one. Other indices choose rows: `trajectory[2:5]`. An entry
    with the name of a method here is read by `get` or `trajectory[name]`.

    Args:
        data: a tensordict, [steps].
    """

    def __init__(self, data: TensorDictBase) -> None:
        if not is_tensor_collection(data):
            raise TypeError(f"a trajectory has its rows in a tensordict, got {class_of(data)}")
        self.data = data

    @property
    def batch_size(self) -> torch.Size:
        """[steps]."""
        return self.data.batch_size

    @property
    def device(self) -> torch.device | None:
        """The device of the rows; None where the tensordict has none."""
        return self.data.device

    @property
    def length(self) -> int:
        """How many steps it has."""
        return len(self)

    @property
    def total_reward(self) -> Tensor:
        """The sum of "reward", or of ("next", "reward"). KeyError where neither is there."""
        return self.entry(_REWARD).sum()

    def get(self, key: NestedKey, default: object = None) -> object:
        """The entry under a key, or under ("next", key); `default` where there is neither."""
        found = self.data.get(key, _MISSING)
        if found is _MISSING:
            found = self.data.get(("next", *as_path(key)), _MISSING)
        return default if found is _MISSING else found

    def entry(self, key: NestedKey) -> Tensor:
        """`get`, but a KeyError where there is no such entry."""
        found = self.get(key, _MISSING)
        if found is _MISSING:
            next_key = as_key(("next", *as_path(key)))
            raise KeyError(f"a trajectory has no entry {key!r} or {next_key!r}: {known_keys(self.data)}")
        return cast(Tensor, found)

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> Iterable[NestedKey]:
        """The keys of its entries, as `TensorDict.keys` gives them."""
        return self.data.keys(include_nested, leaves_only)

    def to_tensordict(self) -> TensorDictBase:
        """A copy of the rows as a tensordict."""
        return self.data.to_tensordict()

    def clone(self) -> "Trajectory":
        """A copy of the rows."""
        return Trajectory(self.data.clone())

    def to(self, device: torch.device | str) -> "Trajectory":
        """The rows on a device."""
        return Trajectory(self.data.to(device))

    def __getattr__(self, name: str) -> Tensor:
        if name == "data" or name.startswith("__"):  # of an object that is not built yet
            raise AttributeError(name)
        try:
            return self.entry(name)
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    @overload
    def __getitem__(self, index: str) -> Tensor: ...
    @overload
    def __getitem__(self, index: tuple[str, ...]) -> Tensor: ...
    @overload
    def __getitem__(self, index: int | slice | Tensor | np.ndarray | list[int]) -> "Trajectory": ...
    def __getitem__(self, index: object) -> object:
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            return self.data[index]
        rows: Any = index
        return Trajectory(self.data[rows])

    def __len__(self) -> int:
        return self.data.batch_size[0] if self.data.batch_size else 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={len(self)}, keys={sorted(map(str, self.keys()))})"


def iter_trajectories(data: TensorDictBase, trajectory_key: NestedKey | None = None) -> Iterator[Trajectory]:
    """Yield the trajectories of a batch of transitions in the order of their first rows. O(rows).

    Rows of interleaved trajectories are separated. The rows are views of `data` where they lie side by side.

    Args:
        data: [rows], in the order of time.
        trajectory_key: an entry with the id of the trajectory of each row, which alone decides. By default all markers
            count that count for `SliceSampler`; where there is none, "done", "truncated" and "terminated" of the rows
            mark last rows.

    Raises, at the first step: TypeError for other data; ValueError for several batch dims; KeyError where `trajectory_key`
    is missing, or no entry says where trajectories end.
    """
    for slots in _split(data, trajectory_key):
        first = int(slots[0])
        adjacent = bool((np.diff(slots) == 1).all())
        yield Trajectory(data[first : first + len(slots)] if adjacent else data[torch.from_numpy(slots)])


def filter_trajectories(
    data: TensorDictBase,
    predicate: Callable[[Trajectory], object] | None = None,
    *,
    trajectory_key: NestedKey | None = None,
) -> list[Trajectory]:
    """The trajectories of `iter_trajectories` for which the predicate is true; None for all of them.

    ```python
    good = filter_trajectories(data, (traj.reward.sum() > 100) & (traj.length >= 50))
    ```
    """
    found = iter_trajectories(data, trajectory_key)
    return [trajectory for trajectory in found if predicate is None or predicate(trajectory)]


def named_alone(trajectory_key: NestedKey) -> TrajectoryKeys:
    """An entry of ids that must be stored and alone divides trajectories."""
    return TrajectoryKeys.chosen(trajectory_key, only_named_keys=True).requiring(as_path(trajectory_key))


def _split(data: TensorDictBase, trajectory_key: NestedKey | None) -> list[np.ndarray]:
    """The rows of each trajectory, in the order of their first rows."""
    if not is_tensor_collection(data):
        raise TypeError(f"trajectories are found in a tensordict of transitions, got {class_of(data)}")
    if len(data.batch_size) != 1:
        raise ValueError(f"give transitions with one batch dim, [rows], got batch_size={list(data.batch_size)}")
    if not len(data):
        return []
    at_root = TrajectoryKeys.chosen(end_keys=DEFAULT_DONE_KEYS, only_named_keys=True)
    choices = [TrajectoryKeys.chosen(), at_root] if trajectory_key is None else [named_alone(trajectory_key)]
    reason: Exception | None = None
    for keys in choices:
        marked = data.select(*map(as_key, keys.paths()), strict=False)
        try:
            if not len(list(marked.keys(True, True))):
                raise NoMarkersError(f"no entry says where trajectories end: {known_keys(data)}")
            storage = TensorStorage(marked)
            index = StoredTrajectories(BoundaryKeys(keys)).of(storage)
        except NoMarkersError as error:
            reason = reason or error
            continue
        lane, first, last = index.stored().T
        parts = [index.slots_at(np.arange(a, b + 1), lane[:1]) for a, b in zip(first, last, strict=True)]
        return sorted(parts, key=lambda rows: int(rows[0]))
    raise KeyError(f"{reason}; pass trajectory_key, the entry with the id of the trajectory of each row") from reason

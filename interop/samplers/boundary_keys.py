"""The entries of stored items that mark trajectories: ids, ends, first items and masks."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from interop.data.keys import as_key
from interop.data.trajectory_keys import KeyPath, TrajectoryKeys
from interop.host.markers import Markers
from interop.storages import Storage, columns


class NoMarkersError(RuntimeError):
    """No stored entry says where trajectories end."""


class BoundaryKeys:
    """Finds the entries of `keys` in a storage and reads them.

    Args:
        keys: where to look. Those that are stored with one value an item count together; ids and flags may have any real
            dtype. Default keys that are stored otherwise, such as flags of several agents, mark nothing.

    Attributes:
        stored_keys: the entries that the last `find` found.
    """

    def __init__(self, keys: TrajectoryKeys) -> None:
        self.keys = keys
        self.stored_keys = TrajectoryKeys((), (), (), ())

    def find(self, storage: Storage) -> None:
        """Look for the entries.

        NoMarkersError, a RuntimeError, where none marks trajectories. RuntimeError or TypeError for a named one that cannot,
        KeyError for a required one that is not stored.
        """
        slots = _probed(storage)
        reasons = {path: self._unfit(storage, path, slots) for path in self.keys.paths()}
        for path in sorted(self.keys.required):
            if reasons[path] == "":
                raise KeyError(f"{as_key(path)!r} is not stored, which says where trajectories end")
        stored = self.keys.only([path for path, reason in reasons.items() if reason is None])
        if not (stored.ids or stored.ends or stored.firsts):
            looked_for = [as_key(path) for path in (*self.keys.ids, *self.keys.ends, *self.keys.firsts)]
            unfit = "".join(f"; {as_key(path)!r} {reason}" for path, reason in reasons.items() if reason)
            raise NoMarkersError(
                f"Could not get a tensordict out of the storage that says where trajectories end: none of {looked_for} is "
                f"stored in this {type(storage).__name__} with one value an item{unfit}. Give traj_key, an id for each "
                "item, or end_key, a bool for each"
            )
        self.stored_keys = stored

    def _unfit(self, storage: Storage, path: KeyPath, slots: Sequence[int]) -> str | None:
        """Why an entry marks nothing, "" where it is not stored; None if it does.

        RuntimeError or TypeError for a named entry that is stored and cannot mark trajectories.
        """
        key = as_key(path)
        is_named = path in self.keys.named
        is_id = path in self.keys.ids
        slot = next((slot for slot in slots if columns.has(storage, key, slot)), None)
        if slot is None:
            return ""
        try:
            value = columns.read(storage, key, np.array([slot]))
        except TypeError:
            if is_named:
                raise
            return "holds text or ragged rows"
        if value.is_complex():
            if is_named:
                raise TypeError(f"{key!r} must be {'integers' if is_id else 'bool'}, got {value.dtype}")
            return f"is {value.dtype}"
        if value.numel() == 1 and not (is_named and is_id and value.ndim > 1):
            return None
        if is_named:
            one = "integer, without further dims" if is_id else "bool, with further dims of size 1 at most"
            raise RuntimeError(
                f"{key!r} must have one {one}, for each item of this {storage.ndim}-dimensional storage; items have shape "
                f"{list(value.shape[1:])}"
            )
        return f"has items of shape {list(value.shape[1:])}"

    def read(self, storage: Storage, rows: np.ndarray | slice, lanes: int) -> Markers:
        """The markers of stored rows: [n, lanes]. O(rows)."""
        columns = iter(_columns(storage, self.stored_keys.paths(), rows, lanes))
        groups = [[next(columns) for _ in group] for group in self.stored_keys.groups()]
        count = len(range(*rows.indices(storage.contents.filled_rows))) if isinstance(rows, slice) else len(rows)
        return Markers.of((count, lanes), *groups)


def _probed(storage: Storage) -> Sequence[int]:
    """The slots of items in which entries are looked for: of a list, whose items may differ, the first and the newest."""
    if storage.contents.layout is not None or storage.ndim > 1:
        return (0,)
    filled = storage.contents.filled_rows
    return tuple(dict.fromkeys((0, (storage.ring.cursor - 1) % filled)))


def _columns(storage: Storage, paths: tuple[KeyPath, ...], rows: np.ndarray | slice, lanes: int) -> list[np.ndarray]:
    """Entries of rows, [n, lanes] each: copies, or views of what is stored."""
    arrays = storage.contents.host_columns(paths)
    if arrays is not None and all(array is not None and array.dtype.kind in "biuf" for array in arrays):
        return [array.reshape(-1, lanes)[rows] for array in arrays if array is not None]
    at = np.arange(storage.contents.filled_rows)[rows] if isinstance(rows, slice) else rows
    slots = (at[:, None] * lanes + np.arange(lanes)).reshape(-1)
    return [_numbers(value).reshape(-1, lanes) for value in _read(storage, paths, slots)]


def _read(storage: Storage, paths: tuple[KeyPath, ...], slots: np.ndarray) -> list[Tensor]:
    keys = [as_key(path) for path in paths]
    try:
        values = columns.read_several(storage, keys, slots)
    except (KeyError, RuntimeError) as error:
        raise RuntimeError(
            f"every item must have one value under each of {keys}, which say where trajectories end: {error.args[0]}"
        ) from error
    for key, value in zip(keys, values, strict=True):
        if value.numel() != slots.size:
            raise RuntimeError(f"every item must have one value under {key!r}, which says where trajectories end")
    return values


def _numbers(value: Tensor) -> np.ndarray:
    """A tensor as an array of bools, integers or floats that NumPy knows."""
    numbers: np.ndarray = (value.to(torch.float64) if value.is_floating_point() else value).cpu().numpy()
    return numbers

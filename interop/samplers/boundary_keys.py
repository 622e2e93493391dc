"""The entries of stored items that mark trajectories: ids, or flags of the ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from interop.data.keys import as_path
from interop.storages import Storage, columns

_DONE = ("next", "done")
_DEFAULTS = (((("collector", "traj_ids"),), True), (("episode",), True), ((_DONE,), False))


class BoundaryKeys:
    """Finds these entries in a storage and reads them.

    Args:
        traj_key: an entry [rows, *lanes] of integers, or floats compared exactly; another value than in the row before
            begins a trajectory.
        end_keys: bool entries [rows, *lanes] or [rows, *lanes, 1], True in the last row of a trajectory; the stored ones
            are combined by or. They count where there is no `traj_key`, or the storage lacks it.
        any_dtype: whether ends may be floats, which are True unless zero.

    By default ("collector", "traj_ids"), "episode" and ("next", "done") are tried in this order.
    """

    def __init__(self, traj_key: Any, end_keys: Sequence[Any] | None, any_dtype: bool = False) -> None:
        self._any_dtype = any_dtype
        self._choices: Sequence[tuple[Sequence[Any], bool]] = _DEFAULTS  # keys, and whether they are of ids
        if traj_key is not None or end_keys is not None:
            self._choices = [((traj_key,), True)] if traj_key is not None else []
            self._choices.append((list(end_keys or [_DONE]), False))
        self.found: tuple[Any, ...] = ()  # by the last `find`
        self.are_ids = False  # whether the entry that was found has ids

    def find(self, storage: Storage) -> None:
        """Look for the entries. RuntimeError or TypeError where none can be used."""
        for keys, are_ids in self._choices:
            if found := tuple(key for key in keys if columns.has(storage, key)):
                self.found, self.are_ids = found, are_ids
                break
        else:
            raise RuntimeError(
                "Could not get a tensordict out of the storage that says where trajectories end: none of "
                f"{[key for keys, _ in self._choices for key in keys]} is stored in this {type(storage).__name__}. Give "
                "traj_key, an integer for each item, or end_key, a bool for each"
            )
        for key in self.found:
            value = columns.read(storage, key, np.zeros(1, np.int64))
            if value.is_complex() or (value.is_floating_point() and not (self.are_ids or self._any_dtype)):
                raise TypeError(f"{key!r} must be {'integers' if self.are_ids else 'bool'}, got {value.dtype}")
            if value.numel() != 1 or (self.are_ids and value.ndim > 1):
                one = "integer, without further dims" if self.are_ids else "bool, with further dims of size 1 at most"
                raise RuntimeError(
                    f"{key!r} must have one {one}, for each item of this {storage.ndim}-dimensional storage; items have "
                    f"shape {list(value.shape[1:])}"
                )

    def read(self, storage: Storage, rows: np.ndarray | slice, lanes: int) -> np.ndarray:
        """Ids, int64, or flags, bool, of stored rows: [n, lanes]. Ids that are floats become numbers as different."""
        if self.are_ids:
            return _numbers(_column(storage, self.found[0], rows, lanes))
        found: np.ndarray = _column(storage, self.found[0], rows, lanes).astype(np.bool_, copy=False)
        for key in self.found[1:]:
            found = found | _column(storage, key, rows, lanes).astype(np.bool_, copy=False)
        return found


def _numbers(ids: np.ndarray) -> np.ndarray:
    """int64 numbers that are equal where the ids are: integers themselves, the bits of floats."""
    if ids.dtype.kind != "f":
        return ids.astype(np.int64, copy=False)
    return (ids.astype(np.float64) + 0.0).view(np.int64)  # the sum makes one zero of both


def _column(storage: Storage, key: Any, rows: np.ndarray | slice, lanes: int) -> np.ndarray:
    """An entry of rows, [n, lanes]: a copy, or a view of what is stored."""
    arrays = storage.host_columns([as_path(key)])
    if arrays is not None and arrays[0] is not None:
        return arrays[0].reshape(-1, lanes)[rows]
    at = np.arange(storage.filled_rows)[rows] if isinstance(rows, slice) else rows
    try:
        found = columns.read(storage, key, (at[:, None] * lanes + np.arange(lanes)).reshape(-1))
        return (found.double() if found.is_floating_point() else found).reshape(-1, lanes).cpu().numpy()
    except (KeyError, RuntimeError) as error:
        raise RuntimeError(
            f"every item must have one value under {key!r}, which says where trajectories end: {error.args[0]}"
        ) from error

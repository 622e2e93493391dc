"""The entries of stored items that mark trajectories: an id, or flags of the ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tensordict import is_tensor_collection

from interop.data.keys import as_path
from interop.storages import Storage, columns

DONE = ("next", "done")
_DEFAULTS: tuple[tuple[Any, bool], ...] = ((("collector", "traj_ids"), True), ("episode", True), (DONE, False))


class BoundaryKeys:
    """Finds these entries in a storage and reads them.

    Args:
        traj_key: an integer entry [rows, *lanes]; another value than in the row before begins a trajectory.
        end_keys: bool entries [rows, *lanes] or [rows, *lanes, 1], True in the last row of a trajectory; those that are
            stored are taken together. They count where there is no `traj_key`, or the storage has none.
        any_dtype: whether ends may be floats, which are True unless zero.

    Without either `("collector", "traj_ids")`, `"episode"` and `("next", "done")` are looked for, in this order.
    """

    def __init__(self, traj_key: Any, end_keys: Sequence[Any] | None, any_dtype: bool = False) -> None:
        self._traj_key, self._any_dtype = traj_key, any_dtype
        self._end_keys = None if end_keys is None else list(end_keys)
        self.found: tuple[Any, ...] = ()  # the entries that `find` found last
        self.are_ids = False  # whether it is one of ids

    def find(self, storage: Storage) -> None:
        """Look for the entries. RuntimeError or TypeError where there is none that can be used."""
        self.found, self.are_ids = self._look(storage)
        for key in self.found:
            self._check(storage, key)

    def _look(self, storage: Storage) -> tuple[tuple[Any, ...], bool]:
        def has(key: Any) -> bool:
            return columns.has(storage, key)

        ends = self._end_keys or [DONE]
        if self._traj_key is None and self._end_keys is None:
            default = next((each for each in _DEFAULTS if has(each[0])), None)
            if default is not None:
                return (default[0],), default[1]
        elif self._traj_key is not None and has(self._traj_key):
            return (self._traj_key,), True
        elif found := tuple(filter(has, ends)):
            return found, False
        wanted = [*([] if self._traj_key is None else [self._traj_key]), *ends]
        kept = f"none of {wanted} is stored" if _has_keys(storage) else f"a {type(storage).__name__} of other items"
        raise RuntimeError(
            f"Could not get a tensordict out of the storage that says where trajectories end: {kept}. Give traj_key, an "
            "integer for each item, or end_key, a bool for each"
        )

    def _check(self, storage: Storage, key: Any) -> None:
        value = columns.read(storage, key, np.zeros(1, np.int64))
        floats = value.is_floating_point() or value.is_complex()
        if floats and (self.are_ids or not self._any_dtype):
            raise TypeError(f"{key!r} must be {'integers' if self.are_ids else 'bool'}, got {value.dtype}")
        shape, dims = list(value.shape[1:]), storage.ndim
        if self.are_ids and shape:
            raise RuntimeError(
                f"{key!r} must be one integer an item, a {dims}-dimensional signal; items have shape {shape}"
            )
        if value.numel() != 1:
            raise RuntimeError(
                f"{key!r} must be one bool an item, with as many dims as the storage has ({dims}) and at most others of "
                f"size 1; items have shape {shape}"
            )

    def read(self, storage: Storage, rows: np.ndarray | slice, lanes: int) -> np.ndarray:
        """Ids, int64, or flags, bool, of stored rows: [n, lanes]."""
        found = _column(storage, self.found[0], rows, lanes).astype(np.int64 if self.are_ids else np.bool_, copy=False)
        for key in self.found[1:]:
            found = found | _column(storage, key, rows, lanes).astype(np.bool_, copy=False)
        return found


def _has_keys(storage: Storage) -> bool:
    return is_tensor_collection(storage.get(0))


def _column(storage: Storage, key: Any, rows: np.ndarray | slice, lanes: int) -> np.ndarray:
    """An entry of rows, [n, lanes]: a copy, or a view of what is stored."""
    arrays = storage.host_columns([as_path(key)])
    if arrays is not None and arrays[0] is not None:
        return arrays[0].reshape(-1, lanes)[rows]
    at = np.arange(storage.filled_rows)[rows] if isinstance(rows, slice) else rows
    try:
        found = columns.read(storage, key, (at[:, None] * lanes + np.arange(lanes)).reshape(-1))
        return (found != 0 if found.is_floating_point() else found).reshape(-1, lanes).cpu().numpy()
    except (KeyError, RuntimeError) as error:
        raise RuntimeError(
            f"every item must have one value under {key!r}, which says where trajectories end: {error.args[0]}"
        ) from error

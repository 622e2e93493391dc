"""Stored rows, read and written all at once, in the order of their slots, and by key."""

from collections.abc import Sequence
from typing import Any, Self

from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from fbuf.memory_plan import Plan, Share
from interop.buffers import edits, planning
from interop.buffers.conditional import update_if_present
from interop.buffers.joined import Joined
from interop.buffers.turn import turn
from interop.checkpoint.stateful import defined_outside
from interop.data.pytrees import length_of, swapped
from interop.storages import planning as of_storages


class Editable(Joined):
    """What writes to stored rows where they are. See `ReplayBuffer`."""

    def plan(self, data: Any = None) -> Plan:
        """What memory the buffer takes or, before the first write, will take once `data` is written as by `extend`.

        `print` it for a table of storage, sampler and writer, key by key; `plan(data).check()` refuses what does not fit.
        In place of data: a `TensorSpec` of an item or, with `ndim` > 1, of a row. Nothing is allocated, and nothing changes.
        RuntimeError without data where that is needed to tell, and the errors of the write.
        """
        with turn(self):
            return of_storages.plan(self.memory_shares(data))

    def memory_shares(self, data: Any) -> list[Share]:
        return planning.shares(self, data)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """`rb[:]`, or `rb[:end]`: rows in the order of their slots."""
        return self[:] if end is None else self[:end]  # type: ignore[index]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """`rb[:end] = data`, `end` being the length of data by default. Length and cursor stay. Of all rows: adds keys."""
        if end is None:
            end = length_of(data)
            if self._storage.is_full:
                self[:] = data
                return
        self[:end] = data

    def set_(self, key: Any, value: Tensor) -> Self:
        """Write one key of all stored rows in place. KeyError for an unknown key, RuntimeError for a wrong size."""
        return self._edit({key: value})

    def set_at_(self, key: Any, value: Tensor, index: Any) -> Self:
        """Write one key of the rows at storage indices in place."""
        return self._edit({key: value}, index=index)

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None
    ) -> Self:
        """Write several keys of all stored rows in place, and add new ones; only `keys_to_update` where given.

        `clone` makes no difference: values are copied either way.
        """
        given = input_dict_or_td if keys_to_update is None else edits.chosen(input_dict_or_td, keys_to_update)
        return self._edit(given, adds=True)

    def _edit(self, given: Any, index: Any = ..., dim: int = 0, adds: bool = False) -> Self:
        """Write entries of the rows at index in place, dims 0 and `dim` being exchanged; with `adds` new ones too."""
        with turn(self):
            self._storage.refuse_a_stranger()
            rows = self._storage.editable(given)
            if not is_tensor_collection(rows):
                raise AttributeError(f"in-place edits by key need stored tensordicts, got {type(rows).__name__}")
            rows = swapped(rows, dim)
            unknown: dict[Any, Any] | None = {} if adds and isinstance(rows, TensorDictBase) else None
            plan = list(edits.planned(rows, given, index, unknown=unknown))
            if unknown:
                rows = rows.copy().update(unknown)
                self._storage.add_columns(swapped(rows, dim))
            for held, place, value in plan:
                held[place] = value
            if defined_outside(self._storage, "get"):  # what it returned may be copies
                self._storage[:] = swapped(rows, dim)
            self._storage.ring.edited(slice(None))
            settle = getattr(getattr(self._storage, "rows", None), "_settle", None)
            if settle is not None:
                settle()
        return self

    update_if_present = update_if_present

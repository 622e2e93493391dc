"""The storages of several buffers, read together."""

import contextlib
import copy
import sys
from collections.abc import Sequence
from textwrap import indent
from typing import Any, NoReturn

from tensordict import TensorDictBase
from torch import Tensor

from fbuf.memory_plan import Share
from interop.checkpoint.checkpointers import StorageEnsembleCheckpointer
from interop.data.members import is_all, named, of_kind, unwrapped
from interop.storages import planning
from interop.storages.storage import Storage
from interop.transforms.chain import Compose, as_chain


class StorageEnsemble(Storage):
    """Several storages under one name, to read from: `ensemble[i]` is one of them, `ensemble[i][j]` an item.

    Its length is the number of storages. It cannot be written to, only its members can.

    Args:
        storages: the members.
        transforms: what the rows of each member go through, None for nothing; as many as storages.
    """

    default_checkpointer = StorageEnsembleCheckpointer

    def __init__(self, *storages: Storage, transforms: Sequence[Any] | None = None) -> None:
        self._storages: tuple[Storage, ...] = of_kind("storage", storages, Storage, StorageEnsemble)
        if transforms is not None and len(transforms) != len(storages):
            raise TypeError(f"transforms must be as many as storages: got {len(transforms)} for {len(storages)}")
        chains = [None if each is None else as_chain(each) for each in transforms or ()]
        self._transforms: list[Compose | None] | None = None if transforms is None else chains
        super().__init__(self.max_size)

    def locked(self) -> Any:
        turns = contextlib.ExitStack()
        for each in sorted(self._storages, key=id):  # in one order, whoever takes them
            turns.enter_context(each.locked())
        return turns

    @property
    def transforms(self) -> list[Compose | None] | None:
        """What the rows of each member go through."""
        return self._transforms

    @property
    def max_size(self) -> int:
        """Items that the members can hold together."""
        return min(sum(storage.max_size for storage in self._storages), sys.maxsize)

    def get(self, index: Any) -> Any:
        """What an index names.

        - A tensordict of "buffer_ids" [n] and "index" [n, k], as a `SamplerEnsemble` draws it: a list of n pairs of the
          member and what it has at these k slots, gone through its transform.
        - An int: that storage; `:` this ensemble; a slice, list, array, mask or tensor an ensemble of these.
        - A pair of such an index and one of items: `ensemble[i][j]`, or a list of what is at j in each storage.

        IndexError out of range, TypeError for floats, RuntimeError for a tensor of several dims.
        """
        if isinstance(index, TensorDictBase):
            return self._drawn(index)
        if isinstance(index, tuple) and len(index) > 1:
            first, item = index[0], index[1] if len(index) == 2 else index[1:]
            places = named(first, len(self))
            if isinstance(places, int):
                return self._storages[places][item]
            return [self._storages[place][item] for place in places]
        index = unwrapped(index, "storage")
        if is_all(index):
            return self
        places = named(index, len(self))
        return self._storages[places] if isinstance(places, int) else self._over(places)

    def _over(self, places: Sequence[int]) -> "StorageEnsemble":
        part = copy.copy(self)
        part._storages = tuple(self._storages[place] for place in places)
        part._transforms = None if self._transforms is None else [self._transforms[place] for place in places]
        return part

    def _drawn(self, index: TensorDictBase) -> list[tuple[int, Any]]:
        rows = [(int(row["buffer_ids"]), _as_index(row["index"])) for row in index.unbind(0)]
        for place, _ in rows:
            named(place, len(self))  # refuses one that there is not
        return [(place, self._read(place, slots)) for place, slots in rows]

    def _read(self, place: int, slots: Any) -> Any:
        storage = self._storages[place]
        with storage.lock.turn():
            data = storage.get(slots)
        chain = self._transforms[place] if self._transforms is not None else None
        return data if chain is None or not len(chain) else chain(data)

    def memory_shares(self, data: Any) -> list[Share]:
        """Those of the members; data is for each of them, or a list or tuple of data for one each."""
        return planning.of_members([storage.memory_shares for storage in self._storages], data)

    def __len__(self) -> int:
        return len(self._storages)

    def add(self, data: Any) -> NoReturn:
        """RuntimeError: members are written to."""
        self.set(None, data)

    def extend(self, data: Any) -> NoReturn:
        """RuntimeError: members are written to."""
        self.set(None, data)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """RuntimeError: members are written to."""
        raise RuntimeError("an ensemble of storages cannot be written to: index the member first, ensemble[i]")

    def _empty(self) -> None:
        raise NotImplementedError("an ensemble of storages is not emptied as a whole: empty its members")

    def state_dict(self) -> dict[str, Any]:
        """NotImplementedError: members have a state."""
        raise NotImplementedError("an ensemble of storages has no state of its own: take that of its members")

    def load_state_dict(self, state_dict: Any) -> None:
        """NotImplementedError: members have a state."""
        raise NotImplementedError("an ensemble of storages has no state of its own: load that of its members")

    def __repr__(self) -> str:
        storages = ", ".join(map(repr, self._storages))
        body = f"storages=({storages}),\ntransforms={self._transforms}"
        return f"{type(self).__name__}(\n{indent(body, '    ')})"


def _as_index(row: Tensor) -> Any:
    """The index into one storage that a row of slots is: coordinates come in columns."""
    return tuple(row.unbind(-1)) if row.ndim > 1 else row

"""The storages of several buffers, read together."""

import sys
from collections.abc import Callable, Iterator, Sequence
from textwrap import indent
from typing import Any, NoReturn, Protocol

from tensordict import TensorDictBase
from torch import Tensor

from interop.checkpoint.state import EXACT, Apply, LoadOptions
from interop.data.members import named, of_kind, picked
from interop.storages.checkpointers import StorageEnsembleCheckpointer
from interop.storages.storage import Storage


class Chain(Protocol):
    """Transforms of the rows of a member, one after the other."""

    def __len__(self) -> int: ...

    def __call__(self, data: Any) -> Any: ...

    def state(self) -> dict[str, Any]: ...

    def with_state(self, tree: object, options: LoadOptions) -> Apply: ...


_makers: list[Callable[[object], Chain]] = []


def chains_are_made_by(maker: Callable[[object], Chain]) -> None:
    """Make chains of users' transforms by this function, which is in a layer above."""
    _makers[:] = [maker]


class StorageEnsemble(Storage):
    """Several storages, for reading: `ensemble[i]` is a member, `ensemble[i][j]` an item. Its length is their number.

    Args:
        storages: the members.
        transforms: for each member a transform of its rows, or None.
    """

    default_checkpointer = StorageEnsembleCheckpointer

    def __init__(self, *storages: Storage, transforms: Sequence[Any] | None = None) -> None:
        self.members: tuple[Storage, ...] = of_kind("storage", storages, Storage, StorageEnsemble)
        if transforms is not None and len(transforms) != len(storages):
            raise TypeError(f"transforms must be as many as storages: got {len(transforms)} for {len(storages)}")
        self.transforms: list[Chain | None] | None = None
        if transforms is not None:
            self.transforms = [None if each is None else _makers[0](each) for each in transforms]
        super().__init__(self.max_size)

    @property
    def max_size(self) -> int:
        """The capacity of all members together."""
        return min(sum(storage.max_size for storage in self.members), sys.maxsize)

    def get(self, index: Any) -> Any:
        """The items or members at an index.

        - A tensordict of "buffer_ids" [n] and "index" [n, k], as from `SamplerEnsemble.draw`: a list of n pairs, each of the
          number of a member and its items at these k slots, after its transform.
        - An int: that storage; `:` this ensemble; a slice, list, array, mask or tensor an ensemble of these.
        - A pair of such an index and one of items: `ensemble[i][j]`, or a list of the items j of each storage.

        IndexError out of range, TypeError for floats, RuntimeError for a tensor of several dims.
        """
        if isinstance(index, TensorDictBase):
            rows = [(int(row["buffer_ids"]), row["index"]) for row in index.unbind(0)]
            named([place for place, _ in rows], len(self))  # raises for unknown members
            return [(place, self._read(place, slots)) for place, slots in rows]
        if isinstance(index, tuple) and len(index) > 1:
            places = named(index[0], len(self))
            item = index[1] if len(index) == 2 else index[1:]
            if isinstance(places, int):
                return self.members[places][item]
            return [self.members[place][item] for place in places]
        return picked(index, self.members, self, self._of_some)

    def _of_some(self, places: Sequence[int]) -> "StorageEnsemble":
        transforms = None if self.transforms is None else [self.transforms[place] for place in places]
        return StorageEnsemble(*(self.members[place] for place in places), transforms=transforms)

    def _read(self, place: int, slots: Tensor) -> Any:
        storage = self.members[place]
        with storage.lock.held():
            data = storage.get(tuple(slots.unbind(-1)) if slots.ndim > 1 else slots)
        chain = None if self.transforms is None else self.transforms[place]
        return data if chain is None or not len(chain) else chain(data)

    def __len__(self) -> int:
        return len(self.members)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """RuntimeError: only members can be written to."""
        raise RuntimeError("an ensemble of storages cannot be written to: index the member first, ensemble[i]")

    def add(self, data: Any) -> NoReturn:
        """RuntimeError: only members can be written to."""
        self.set(None, data)

    extend = add

    def _empty(self) -> NoReturn:
        raise NotImplementedError("an ensemble of storages is not emptied as a whole: empty its members")

    def state(self) -> NoReturn:
        """NotImplementedError: only members have a state."""
        raise NotImplementedError("an ensemble of storages has no state of its own: use those of its members")

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> NoReturn:
        """NotImplementedError: only members have a state."""
        self.state()

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield from ((str(place), storage) for place, storage in enumerate(self.members))

    def __repr__(self) -> str:
        storages = ", ".join(map(repr, self.members))
        body = f"storages=({storages}),\ntransforms={self.transforms}"
        return f"{type(self).__name__}(\n{indent(body, '    ')})"

"""The writers of several buffers, listed together."""

import copy
from collections.abc import Callable
from textwrap import indent
from typing import Any, NoReturn

from interop.checkpoint.members import loading_dicts, loading_members, saved_members
from interop.checkpoint.state import Entries, LoadOptions
from interop.data.members import is_all, named, of_kind, unwrapped
from interop.storages import Storage
from interop.writers.writer import Writer


class WriterEnsemble(Writer):
    """Several writers under one name: `ensemble[i]` is one of them. It cannot write, only its members can.

    Args:
        writers: the members.
    """

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        self._writers: tuple[Writer, ...] = of_kind("writer", writers, Writer, WriterEnsemble)

    def register_storage(self, storage: Storage) -> None:
        """Nothing: each member writes to its own storage."""

    def add(self, data: Any = None) -> NoReturn:
        """NotImplementedError: members write."""
        raise NotImplementedError("an ensemble of writers cannot write: index the member first, ensemble[i]")

    def extend(self, data: Any = None) -> NoReturn:
        """NotImplementedError: members write."""
        raise NotImplementedError("an ensemble of writers cannot write: index the member first, ensemble[i]")

    def _empty(self, empty_write_count: bool = True) -> NoReturn:
        raise NotImplementedError("an ensemble of writers is not reset as a whole: empty the members")

    @property
    def write_count(self) -> int:
        """AttributeError: members count."""
        raise AttributeError("an ensemble counts no writes: ask its members, ensemble[i].write_count")

    def saved_state(self) -> dict[str, Any]:
        return {"members": saved_members(self._writers)}

    def with_state(self, entries: Entries, options: LoadOptions) -> Callable[[], None]:
        return loading_members(entries, self._writers, options)

    def state_dict(self) -> dict[str, Any]:
        """The state of each member under "0", "1" and so on."""
        return {str(place): writer.state_dict() for place, writer in enumerate(self._writers)}

    def with_state_dict(self, given: Any, options: LoadOptions) -> Callable[[], None]:
        rest, members = loading_dicts(self, given, self._writers)
        Entries(rest, self).settle()
        return members

    def __getitem__(self, index: Any) -> Any:
        """A member for an int, this ensemble for `:`, an ensemble of some for any other index."""
        index = unwrapped(index, "writer")
        if is_all(index):
            return self
        places = named(index, len(self))
        if isinstance(places, int):
            return self._writers[places]
        part = copy.copy(self)
        part._writers = tuple(self._writers[place] for place in places)
        return part

    def __len__(self) -> int:
        return len(self._writers)

    def __repr__(self) -> str:
        body = f"writers=({', '.join(map(repr, self._writers))})"
        return f"{type(self).__name__}(\n{indent(body, '    ')})"

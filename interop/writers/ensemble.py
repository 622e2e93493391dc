"""The writers of several buffers, listed together."""

from collections.abc import Iterator, Sequence
from textwrap import indent
from typing import Any, NoReturn

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, states_of, with_states
from interop.data.members import of_kind, picked
from interop.storages import Storage
from interop.writers.writer import Writer


class WriterEnsemble(Writer):
    """Several writers: `ensemble[i]` is a member. It cannot write, only its members can.

    Args:
        writers: the members.
    """

    members: tuple[Writer, ...]

    def __init__(self, *writers: Writer) -> None:
        super().__init__()
        self.members = of_kind("writer", writers, Writer, WriterEnsemble)

    def register_storage(self, storage: Storage) -> None:
        """Does nothing: each member writes to its own storage."""

    def add(self, data: Any = None) -> NoReturn:
        """NotImplementedError: only members write."""
        raise NotImplementedError("an ensemble of writers cannot write: index the member first, ensemble[i]")

    extend = add

    def _empty(self, empty_write_count: bool = True) -> NoReturn:
        raise NotImplementedError("an ensemble of writers is not reset as a whole: empty the members")

    @property
    def write_count(self) -> int:
        """AttributeError: only members count."""
        raise AttributeError("an ensemble counts no writes: ask its members, ensemble[i].write_count")

    def state(self) -> dict[str, Any]:
        return {"members": states_of(self.members)}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            return with_states(entries, self.members, options)

    def state_dict(self) -> NoReturn:
        """NotImplementedError: only members have a state."""
        raise NotImplementedError("an ensemble of writers has no state of its own: use those of its members")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """NotImplementedError: only members have a state."""
        self.state_dict()

    def __getitem__(self, index: Any) -> Any:
        """A member for an int, this ensemble for `:`, an ensemble of some for any other index."""
        return picked(index, self.members, self, self._of_some)

    def _of_some(self, places: Sequence[int]) -> "WriterEnsemble":
        return WriterEnsemble(*(self.members[place] for place in places))

    def __len__(self) -> int:
        return len(self.members)

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield from ((str(place), writer) for place, writer in enumerate(self.members))

    def __repr__(self) -> str:
        body = f"writers=({', '.join(map(repr, self.members))})"
        return f"{type(self).__name__}(\n{indent(body, '    ')})"

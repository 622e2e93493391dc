"""A writer that refuses all new items."""

from typing import Any, NoReturn

from interop.writers.writer import Writer


class ImmutableDatasetWriter(Writer):
    """Refuses `add` and `extend`; and `empty`, in all buffers on the storage. Items can be edited in place."""

    def __init__(self) -> None:
        super().__init__()

    def add(self, data: Any) -> NoReturn:
        """RuntimeError."""
        _refuse("add")

    def extend(self, data: Any) -> NoReturn:
        """RuntimeError."""
        _refuse("extend")

    def refuse_write(self, call: str) -> NoReturn:
        _refuse(call)

    def refuse_empty(self) -> NoReturn:
        _refuse("empty")

    def _empty(self, empty_write_count: bool = True) -> NoReturn:
        _refuse("empty")


def _refuse(call: str) -> NoReturn:
    raise RuntimeError(f"This dataset doesn't allow writing. {call}() needs another writer; nothing was changed")

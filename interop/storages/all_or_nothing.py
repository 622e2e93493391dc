"""Writes of storage, writer and samplers that an interrupt leaves done or not done, never in part."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from interop.host.threads import uninterrupted
from interop.storages.storage import Storage

_T = TypeVar("_T")


class Undoable(Protocol):
    """A storage, writer or sampler."""

    def before_write(self) -> Any:
        """What `put_back` needs after a write of any size. O(1)."""

    def put_back(self, before: Any) -> None:
        """Be as before the write, but for rows and other large memory that it has overwritten."""


def all_or_nothing(
    storage: Storage,
    components: Sequence[Undoable],
    write: Callable[[], _T],
    *,
    forward: bool = False,
    reported: bool = False,
) -> _T:
    """Run a write under the lock of the storage. If it raises, as a signal handler may make it, it is done or not done.

    Rows that are overwritten are saved nowhere, but for those that a journal guards. So an interrupted write is not undone
    once it may have changed rows, which the counters of the storage tell: the components are put back to where they were,
    and the write is made again, to its end, while signals wait. Then the exception is raised. An error of the write itself
    comes again, and is raised.

    Args:
        components: all that the write changes, the storage first.
        write: it may run twice.
        forward: make the write again in any case.
        reported: where the write raises again, report what it wrote to the samplers.
    """
    counters, counts = storage.ring.counters(), storage.counts if reported else None
    kept = [(each, each.before_write()) for each in components]
    try:
        return write()
    except BaseException:
        with uninterrupted():
            storage.recover()
            begun = storage.ring.counters() != counters
            try:
                with storage.transaction():
                    for each, before in reversed(kept):
                        each.put_back(before)
                    if begun or forward:
                        write()
            except BaseException:
                if counts is not None:  # rows may be written, with the priorities of the rows before
                    storage.recover()
                    storage.report_writes(counts)
                raise
        raise

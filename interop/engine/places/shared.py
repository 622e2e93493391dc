"""Rows in memory that any of several processes allocates: the first one that writes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.layout import Layout, LeafSpec
from interop.engine import plans
from interop.engine.guard import Guard
from interop.engine.kept_values import KeptValues
from interop.engine.places.place import Found, Place
from interop.host.ring import Ring
from interop.host.rows import TorchRows
from interop.host.stored_rows import Rows
from interop.shared.first_write import FirstWrite


class Shared(Place):
    """Another place, whose memory all processes of a table find.

    The first process that writes allocates, and publishes what it has; the others map it at their next use. A process that
    gives up the memory of an empty table, for items of another layout, begins another epoch.

    Args:
        inner: the place that is shared. A place with files of its own allocates as before; rows of another place are in
            files of the temporary folder of `first`.
        first: where processes find each other.
        cleanup: whether the folder of a copy is removed with it, too.
        asked: whether the user asked for it, so that memory is in the folder from the beginning, also that of copies
            without rows.
    """

    meets_others = True

    def __init__(self, inner: Place, first: FirstWrite, cleanup: bool, asked: bool = False) -> None:
        super().__init__(inner.device)
        self.inner = inner
        self._first = first
        self._cleanup = cleanup
        self.asked = asked
        self.mapped = inner.mapped
        self.has_names = inner.has_names
        self.replaces = inner.replaces

    @property
    def epoch(self) -> int:  # type: ignore[override]  # read anew each time
        return self._first.epoch

    @property
    def kept(self) -> KeptValues | None:  # type: ignore[override]
        return self.inner.kept

    def keep(self, kind: type[KeptValues], has_rows: bool) -> KeptValues | None:
        return self.inner.keep(kind, has_rows)

    def allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        published = self._first.found()
        if published is None:
            rows = self._allocated(layout, lead)
            self._first.publish(layout, lead, rows.tensors)
            return rows
        if published[:2] != (layout, lead):
            raise RuntimeError("another process has meanwhile written items of another kind; nothing was written")
        return TorchRows(published[2], lead[1:])

    def _allocated(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        if self.inner.has_names:
            return self.inner.allocate(layout, lead)
        shapes = [(*lead, *spec.shape) for spec in layout.leaves]
        return TorchRows(self._first.allocate(shapes, [spec.dtype for spec in layout.leaves]), lead[1:])

    def found(self) -> Found | None:
        published = self._first.found()
        if published is None:
            return None
        layout, lead, tensors = published
        return layout, lead, TorchRows(tensors, lead[1:])

    def zeros(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        return self.inner.zeros(leaves, lead)

    def widen(
        self, layout: Layout, added: Sequence[LeafSpec], lead: tuple[int, ...], fill: Callable[[Rows], None]
    ) -> Rows:
        return self.inner.widen(layout, added, lead, fill)

    def discard(self, lead: tuple[int, ...]) -> None:
        if self.inner.has_names:
            self._first.withdraw()
            self.inner.discard(lead)

    def vacate(self, lead: tuple[int, ...]) -> None:
        self._first.renew()  # first: after a kill no process keeps the old files beside new ones
        self.inner.vacate(lead)

    def can_renew(self, is_shared: bool) -> bool:
        return True

    def plan(
        self, layout: Layout, lead: tuple[int, ...], device: torch.device, is_allocated: bool = False
    ) -> list[Share]:
        if self.inner.has_names or (is_allocated and not self.asked):
            return self.inner.plan(layout, lead, device, is_allocated)
        return plans.arrays("items", layout.leaves, lead, str(self._first.folder))

    def values_folder(self) -> Path | None:
        return self.inner.values_folder() or self._first.values

    def holding(self, layout: Layout, tensors: Sequence[Tensor], lead: tuple[int, ...]) -> Rows:
        return self.inner.holding(layout, tensors, lead)

    def copied(self, has_rows: bool) -> Place:
        inner = self.inner.copied(has_rows)
        return ToBeShared(inner, self._cleanup) if self.asked and not has_rows else inner

    def is_found(self) -> bool:
        return self.inner.allows_sharing()

    def allows_sharing(self) -> bool:
        return self.inner.allows_sharing()

    def prepare_sharing(self) -> None:
        self.inner.prepare_sharing()

    def attached(self, guard: Guard, ring: Ring, owner: object) -> Place:
        self.inner = self.inner.attached(guard, ring, owner)
        return self

    def adopted(self, lead: tuple[int, ...]) -> None:
        self.inner.adopted(lead)

    def dropped(self) -> None:
        self.inner.dropped()


class ToBeShared(Place):
    """The place of a copy of a table in a `Shared` place, until the copy has an owner for the folder."""

    def __init__(self, inner: Place, cleanup: bool) -> None:
        super().__init__(inner.device)
        self._inner = inner
        self._cleanup = cleanup

    def attached(self, guard: Guard, ring: Ring, owner: object) -> Place:
        return shared_by_processes(self._inner.attached(guard, ring, owner), owner, self._cleanup, asked=True)


def shared_by_processes(inner: Place, owner: object, cleanup: bool = True, asked: bool = False) -> Shared:
    """The place, with memory that processes find. The folder in which they meet ends with `owner` if `cleanup` is true."""
    return Shared(inner, FirstWrite(owner, cleanup), cleanup, asked)

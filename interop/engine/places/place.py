"""The base class of places: what a table asks of the memory of its rows."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.arguments import there
from interop.data.layout import Layout, LeafSpec
from interop.engine import plans
from interop.engine.guard import Guard
from interop.engine.kept_values import KeptValues
from interop.host.ring import Ring
from interop.host.stored_rows import Rows

# What another process has allocated: the layout of its items, [rows, *lanes], and the rows.
Found = tuple[Layout, tuple[int, ...], Rows]


class Place:
    """Where the bytes of rows are. A subclass defines `zeros`; `plan` too, if that is not memory of the device.

    The table calls it with the lock of the storage held. `lead` is [rows, *lanes], the shape in front of that of an item.

    Args:
        device: of the tensors that reads return; "auto" until the first data tells.
    """

    mapped = False  # whether rows are memory maps: tensordicts that are views of them are locked
    in_order = False  # whether rows can only be written one after the other, around the ring
    replaces = False  # whether its memory replaces files that are there
    meets_others = False  # whether another process may allocate the memory, or give it up
    has_names = False  # whether its memory is in files that other processes open by name
    epoch = 0  # how often processes gave up memory that they shared; see `Shared`
    kept: KeptValues | None = None  # priorities or uses of the items, if they are kept in a file beside the rows

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device if device == "auto" else there(torch.device(device))

    # ------------------------------------------------------------------ memory

    def zeros(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        """Rows of zeros for these leaves of an item."""
        raise NotImplementedError(f"{type(self).__name__} does not define zeros()")

    def allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        """Memory for all rows of items of a layout. An error leaves nothing behind."""
        plans.refuse(self.plan(layout, lead, self.known_device()))
        return self.zeros(layout.leaves, lead)

    def widen(
        self, layout: Layout, added: Sequence[LeafSpec], lead: tuple[int, ...], fill: Callable[[Rows], None]
    ) -> Rows:
        """Memory for further leaves of stored rows, with the values that `fill` writes; `layout` has all leaves."""
        plans.refuse(self.plan(Layout(layout.root, tuple(added)), lead, self.known_device()))
        rows = self.zeros(added, lead)
        fill(rows)
        return rows

    def discard(self, lead: tuple[int, ...]) -> None:
        """Give back what `allocate` returned, and no table has taken."""

    def vacate(self, lead: tuple[int, ...]) -> None:
        """The table is about to drop its rows, none of which is stored."""

    def can_renew(self, is_shared: bool) -> bool:
        """Whether an empty table may get memory for items of another layout. `is_shared`: processes use its counters."""
        return not is_shared

    def plan(
        self, layout: Layout, lead: tuple[int, ...], device: torch.device, is_allocated: bool = False
    ) -> list[Share]:
        """The memory that `allocate` takes, or has taken."""
        return plans.arrays("items", layout.leaves, lead, plans.place_of(device))

    def known_device(self) -> torch.device:
        """The device of the tensors; the CPU before the first data, if that decides."""
        return self.device if isinstance(self.device, torch.device) else torch.device("cpu")

    def keep(self, kind: type[KeptValues], has_rows: bool) -> KeptValues | None:
        """The file of this kind beside the rows, made if needed, in the place of one of another kind; None without files."""
        return None

    def values_folder(self) -> Path | None:
        """The folder of text and ragged rows; None if they are in memory."""
        return None

    # ------------------------------------------------------------------ copies and other processes

    def holding(self, layout: Layout, tensors: Sequence[Tensor], lead: tuple[int, ...]) -> Rows:
        """Rows with the content of these tensors, [rows, *lanes, ...], of a table that was copied or sent to a process."""
        rows = self.zeros(layout.leaves, lead)
        rows.write_run(0, tensors)
        return rows

    def shared(self, owner: object) -> "Place":
        """The place to use once processes share the table; `owner` is alive as long as they may. Itself by default."""
        return self

    def prepare_sharing(self) -> None:
        """Processes are about to share a table without rows."""

    def copied(self, has_rows: bool) -> "Place":
        """The place of a copy of the table, to be pickled."""
        return copy.copy(self)

    def found(self) -> Found | None:
        """The rows that another process has allocated in this epoch."""
        return None

    def is_found(self) -> bool:
        """Whether processes that share a table without rows find those of the first write."""
        return False

    def allows_sharing(self) -> bool:
        """Whether a table without rows here can be shared, if processes can find memory that one of them allocates."""
        return True

    def attached(self, guard: Guard, ring: Ring, owner: object) -> "Place":
        """The place to use in a table that was copied or sent to a process, with this guard, these counters and owner."""
        return self

    def adopted(self, lead: tuple[int, ...]) -> None:
        """The table has taken rows of this shape from here."""

    def dropped(self) -> None:
        """The table has dropped its rows."""

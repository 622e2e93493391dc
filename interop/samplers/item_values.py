"""What a sampler keeps of stored items, such as their priorities."""

from typing import Any

import numpy as np

from fbuf.memory_plan import Share
from interop.storages import Storage


class ItemValues:
    """The values of stored items that one sampler keeps. The base class keeps none.

    Attributes:
        are_priorities: whether a storage in files keeps them as priorities.
        are_uses: whether it keeps them as uses.
        defer_errors: whether `raise_deferred` may raise something.
        marks_new_items: whether `take_over` gives items without a value that of new ones.
    """

    are_priorities = False
    are_uses = False
    defer_errors = False
    marks_new_items = False

    def take_over(self, storage: Storage) -> None:
        """Keep values of a storage that may have items already. Its lock is held."""

    def reloaded(self, storage: Storage) -> None:
        """The rows of the storage were loaded."""

    def clear(self) -> None:
        """Start over: the buffer was emptied."""

    def checked(self, priority: object) -> object:
        """The priorities as `update_priority` uses them; TypeError or ValueError if it would refuse them."""
        return priority

    def checks_later(self, priority: object) -> bool:
        """Whether `update_priority` checks such priorities, one for each slot, on their device, and nobody waits for it."""
        return False

    def raise_deferred(self) -> None:
        """Raise the error of an earlier update that was checked later. Buffers call it before a draw and before a change."""

    @property
    def highest(self) -> float | None:
        """The highest priority ever given, 1 at first; None where new items do not get it."""
        return None

    def raise_default(self, priority: float) -> None:
        """Give new items at least this priority. No effect on values that are no priorities."""

    def given_priorities(self, storage: Storage) -> np.ndarray | None:
        """A copy of the priorities of all stored items, as the user passed them, by flat slot; None by default, for none."""
        return None

    def refuse_forked_child(self) -> None:
        """RuntimeError in a forked child if the values are of one process only."""

    def before_write(self) -> dict[str, Any]:
        """What `put_back` needs to undo what a write does to the values. O(1)."""
        return {}

    def put_back(self, before: dict[str, Any]) -> None:
        """Be again as at `before_write`."""

    def let_go(self) -> None:
        """Release the locks that this thread holds: after an interrupt."""

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        """The memory of the values of a storage of `capacity` items, for a plan."""
        return []

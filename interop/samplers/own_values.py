"""The values of items in a sampler of a user's class: its attributes, and what its `mark_update` makes of items."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from fbuf.memory_plan import Share
from interop.checkpoint.state import defined_outside
from interop.samplers.item_values import ItemValues
from interop.storages import Storage


class MarkedSampler(Protocol):
    """A sampler that follows writes."""

    def mark_update(self, index: object, *, storage: Storage | None = None) -> None: ...


class OwnValues(ItemValues):
    """What a user's class keeps in its attributes, beside the values of the class of the library of which it inherits.

    An interrupted write puts the attributes back, not what has changed in them. A class that changes objects in place
    defines `before_write()` and `put_back(before)` itself, and may define `before_draw()` for the same `put_back`.

    Args:
        sampler: of the user's class.
        inherited: the values of the class of the library.
        undone_by: the methods that return what `put_back` needs, of which the first that the class defines is called.
    """

    def __init__(
        self, sampler: MarkedSampler, inherited: ItemValues, undone_by: Sequence[str] = ("before_write",)
    ) -> None:
        self._undone_by = undone_by
        self._sampler = sampler
        self._inherited = inherited
        self.are_priorities = inherited.are_priorities
        self.are_uses = inherited.are_uses
        self.defer_errors = inherited.defer_errors

    def take_over(self, storage: Storage) -> None:
        if len(storage) and not self._inherited.marks_new_items and defined_outside(self._sampler, "mark_update"):
            slots = torch.arange(len(storage), device="cpu")
            index = slots if storage.ndim == 1 else torch.stack(torch.unravel_index(slots, storage.shape or ()), -1)
            self._sampler.mark_update(index, storage=storage)
        self._inherited.take_over(storage)

    def reloaded(self, storage: Storage) -> None:
        self._inherited.reloaded(storage)

    def checked(self, priority: object) -> object:
        return self._inherited.checked(priority)

    def checks_later(self, priority: object) -> bool:
        return self._inherited.checks_later(priority)

    def raise_deferred(self) -> None:
        self._inherited.raise_deferred()

    @property
    def highest(self) -> float | None:
        return self._inherited.highest

    def raise_default(self, priority: float) -> None:
        self._inherited.raise_default(priority)

    def given_priorities(self, storage: Storage) -> np.ndarray | None:
        return self._inherited.given_priorities(storage)

    def refuse_forked_child(self) -> None:
        self._inherited.refuse_forked_child()

    def before_write(self) -> dict[str, Any]:
        inherited = self._inherited.before_write()
        for name in self._undone_by:
            if hasattr(self._sampler, name):
                return {"inherited": inherited, "own": getattr(self._sampler, name)()}
        return {"inherited": inherited, "attributes": vars(self._sampler).copy()}

    def put_back(self, before: dict[str, Any]) -> None:
        if "own" in before:
            if before["own"] is not None:  # of a class that has nothing to undo
                self._sampler.put_back(before["own"])  # type: ignore[attr-defined]  # of a class that defines the pair
        else:
            vars(self._sampler).update(before["attributes"])
        self._inherited.put_back(before["inherited"])

    def let_go(self) -> None:
        self._inherited.let_go()

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return self._inherited.memory_shares(storage, capacity)

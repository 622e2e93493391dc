"""Writes on a device: what one call changes is recorded, and one program makes it at the end of the call."""

import _thread
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import jax
import numpy as np
from torch import Tensor

from interop.data import bridge
from interop.host import compiled
from interop.host.threads import Lock, uninterrupted

_T = TypeVar("_T")
REPLACING = Lock()  # held while a program replaces arrays that several threads may read


class Owner(Protocol):
    """The rows of a storage, or the priorities of a sampler: arrays on a device."""

    @property
    def crossing(self) -> bridge.Crossing:
        """The way between torch and JAX, which tells the device."""


class Change(Protocol):
    """A change of arrays that nothing else holds: the program takes them over and returns the new ones."""

    @property
    def owner(self) -> Owner:
        """Has the arrays."""

    @property
    def form(self) -> compiled.Form:
        """What the program does."""

    @property
    def words(self) -> list[np.ndarray]:
        """Integers for the program, in the order of the form."""

    @property
    def tensors(self) -> list[Tensor]:
        """What the program reads, on the device, in the order of the form. The user may change it after the call."""

    def arrays(self) -> list[jax.Array]:
        """The arrays as they are now. `REPLACING` is held."""

    def take(self, arrays: list[jax.Array], flag: jax.Array) -> None:
        """Use the arrays that the program returned."""


class DeviceWrites:
    """The writes of a storage on a device. Those of a call belong together: see `together`.

    Only the thread of that call, which holds the lock of the storage, sees what is recorded: before it reads, `settle` has
    it done. Others see the state before the call.

    Attributes:
        thread: that of the call; None where there is none.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self._recorded: list[Change] = []

    def together(self, write: Callable[[], _T]) -> _T:
        """Run a write, and make its changes by one program at its end, also after an error.

        An interrupt may leave changes recorded: `drop` them, and write again.
        """
        self._recorded = []  # of a call before
        self.thread = _thread.get_ident()
        try:
            return write()
        finally:
            changes, self.thread, self._recorded = self._recorded, None, []
            if changes:
                make(changes)

    def drop(self) -> None:
        """Forget what an interrupted call has recorded."""
        REPLACING.let_go()
        self.thread, self._recorded = None, []

    def records(self, crossing: bridge.Crossing) -> bool:
        """Whether a change on the device of this crossing is made at the end of the call."""
        return self.thread == _thread.get_ident() and (
            not self._recorded or self._recorded[0].owner.crossing is crossing
        )

    def recorded(self, owner: Owner) -> Change | None:
        """The change of this owner that is not made yet."""
        for each in self._recorded:
            if each.owner is owner:
                return each
        return None

    def add(self, change: Change) -> None:
        """Make a change, at the end of the call if it is part of one. A second one of an owner comes after all others."""
        if not self.records(change.owner.crossing):
            make([change])
            return
        if self.recorded(change.owner) is not None:
            self.settle()
        self._recorded.append(change)

    def settle(self) -> None:
        """Make what this thread has recorded."""
        if self._recorded and self.thread == _thread.get_ident():
            changes, self._recorded = self._recorded, []
            make(changes)


def make(changes: Sequence[Change]) -> None:
    """Make changes of different owners on one device, by one program. Does not wait for it."""
    crossing = changes[0].owner.crossing
    words: list[np.ndarray] = []
    tensors: list[Tensor] = []
    for change in changes:
        words += change.words
        tensors += change.tensors
    lent = crossing.lend(tensors)
    with REPLACING:
        held = [change.arrays() for change in changes]
        forms = tuple([change.form for change in changes])
        with uninterrupted(), bridge.exact():  # the program takes the memory over: without its results it is lost
            results, flags = compiled.change(forms, held, np.concatenate(words) if words else None, lent)
            for change, arrays, flag in zip(changes, results, flags, strict=True):
                change.take(arrays, flag)
            if tensors:
                crossing.follow(flags[0])  # the user may write to the tensors again

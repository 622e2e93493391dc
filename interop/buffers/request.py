"""A request: a draw whose batch is not returned yet."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from interop.samplers.draws import Draws
from interop.samplers.slot_draws import SlotDraws
from interop.storages import Storage, TensorStorage
from interop.storages.all_or_nothing import Undoable


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A draw of one sampler whose batch is not returned yet: its size, its key, and its position in the epoch.

    The key names it in the epoch. Its draw is made at once if it changes the sampler, else when the items are read.
    """

    place: int  # of the member of an ensemble
    draws: Draws
    storage: Storage
    size: int
    key: np.ndarray
    drawn: tuple[Any, Any] | None = None  # what `Draws.reserve` has returned
    before: tuple[Undoable, dict[str, Any]] | None = None  # what the draw changes, and how that was
    counted: Callable[[], object] | None = None  # counts the draw for the limiter of the buffer, with its lock held
    observed: Sequence[Callable[[], object]] = ()  # tell the observers of the buffer that the batch is returned

    def reserve(self) -> None:
        """Draw now if key and stored items do not determine the draw: from an epoch, or by a user's sampler."""
        undoable = self.draws.undoable
        self.before = None if undoable is None else (undoable, undoable.before_write())
        self.drawn = self.draws.reserve(self.storage, self.size, self.key)

    @property
    def is_in_epoch(self) -> bool:
        """Whether positions of an epoch are reserved for it."""
        return self.drawn is not None and self.draws.of_requests is not None

    @property
    def is_current(self) -> bool:
        """Whether it can still be returned: not after its epoch was begun anew, or loaded."""
        epoch = self.draws.of_requests
        return self.drawn is None or epoch is None or epoch.is_reserved(self.key)

    def commit(self) -> None:
        """Count it as drawn. It may be called again after an interrupt."""
        if self.drawn is not None and (epoch := self.draws.of_requests) is not None:
            epoch.commit(self.key)
        if self.counted is not None:
            self.counted()

    def release(self) -> None:
        """Undo `reserve`, also one that was interrupted: its items remain to be drawn."""
        if (epoch := self.draws.of_requests) is not None:
            epoch.release(self.key)

    def abandon(self, interrupted: bool) -> None:
        """Undo `reserve`; nothing was drawn since. After an error of its own a user's sampler is left as it is."""
        self.release()
        if self.before is not None and (interrupted or not self.draws.errors_count):
            undoable, before = self.before
            undoable.put_back(before)

    def draw(self) -> tuple[Any, dict[Any, Any]]:
        """The index of the items and the info, which the caller may change."""
        if self.drawn is None:
            return self.draws.draw(self.storage, self.size, self.key)
        index, info = self.drawn
        if isinstance(self.draws, SlotDraws):
            index = self.draws.index_of(index, self.storage)
        return index, info.copy()

    def draw_slots(self) -> tuple[Tensor, dict[Any, Any], list[Tensor]]:
        """Flat slots, the info with the index, and the rows if the program that draws has read them.

        Storage and draws satisfy `reads_slots`.
        """
        draws = cast(SlotDraws, self.draws)
        storage = cast(TensorStorage, self.storage)
        if self.drawn is None:
            slots, info, leaves = draws.read(storage, self.size, self.key)
        else:
            slots = self.drawn[0]
            info = self.drawn[1].copy()
            leaves = []
        info["index"] = draws.index_of(slots, storage)
        return slots, info, leaves


def reads_slots(storage: Storage, draws: Draws) -> bool:
    """Whether the library draws and reads flat slots, which need no validation."""
    return (
        isinstance(storage, TensorStorage) and type(storage).get is TensorStorage.get and isinstance(draws, SlotDraws)
    )

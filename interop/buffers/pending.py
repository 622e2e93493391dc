"""A batch that was requested and is not returned yet: its random keys, and what was drawn for it already."""

import dataclasses
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.samplers import Sampler
from interop.samplers.reservation import Reservation
from interop.storages import Storage


@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """What one buffer gives to a batch: its random key, and what was drawn with it when the batch was requested."""

    place: int  # of the member of an ensemble
    key: np.ndarray
    reservation: Reservation | None = None


class PendingBatch:
    """A request for a batch. What was drawn for it, of epochs and of generators, can be undone."""

    __slots__ = ("_after", "_before", "batch_size", "dropped", "future", "parts")

    def __init__(self, batch_size: int, generators: Iterable[torch.Generator | None]) -> None:
        """Begin a request whose keys come from these generators; None for torch's global one."""
        self.batch_size = batch_size
        self.parts: list[Part] = []
        self.dropped = False
        self.future: Future[Any] | None = None
        used = [torch.default_generator if each is None else each for each in generators]
        self._before = [(each, each.get_state()) for each in used]
        self._after: list[Tensor] = []

    def close(self) -> None:
        """All keys were made."""
        self._after = [each.get_state() for each, _ in self._before]

    def _reservations(self) -> list[Reservation]:
        return [part.reservation for part in self.parts if part.reservation is not None]

    @property
    def is_current(self) -> bool:
        """Whether what was drawn for it can be returned."""
        return not self.dropped and all(each.is_current for each in self._reservations())

    def can_be_read(self, part: Part, sampler: Sampler, storage: Storage) -> bool:
        """Whether it was not dropped and no write made it stale. The lock of the storage is held."""
        if not self.dropped and part.reservation is not None and not part.reservation.is_own:
            sampler.catch_up(storage)
        return self.is_current

    def commit(self) -> bool:
        """Have it count as returned; False, and it is dropped, where it is stale."""
        if not self.is_current:
            self.drop()
            return False
        for each in self._reservations():
            each.commit()
        return True

    def abandon(self) -> None:
        """Undo a request that failed: generators are as before it."""
        for each in reversed(self._reservations()):
            each.release()
        for generator, before in self._before:
            generator.set_state(before)

    def drop(self) -> None:
        """Undo a closed request: its items remain to be drawn.

        Its keys are undone where nothing was drawn from the generator since; never those of the global generator.
        """
        self.dropped = True
        if self.future is not None:
            self.future.cancel()
        for each in reversed(self._reservations()):
            each.release()
        for (generator, before), after in zip(self._before, self._after, strict=False):
            if generator is not torch.default_generator and torch.equal(generator.get_state(), after):
                generator.set_state(before)

"""A request for a batch: what decides its draw, and what was drawn for it already."""

import dataclasses
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from interop.data import bridge
from interop.samplers import Sampler
from interop.samplers.drawing import DrawingSampler, names_slots
from interop.samplers.reservation import Reservation
from interop.storages import Storage, TensorStorage


@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """What one buffer gives to a batch."""

    place: int  # of the member of an ensemble
    sampler: Sampler
    storage: Storage
    size: int
    key: np.ndarray
    reservation: Reservation | None = None

    def reserve(self) -> None:
        """Draw now what the key and what is stored do not determine: from an epoch, or by a user's sampler."""
        self.reservation = self.sampler.reserve(self.storage, self.size, self.key)

    def draw(self) -> tuple[Any, dict[Any, Any]]:
        """The index of the items, and the info."""
        drawn = self.reservation
        if drawn is None:
            return self.sampler.draw(self.storage, self.size, self.key)
        if isinstance(self.sampler, DrawingSampler) and not drawn.is_own:
            return self.sampler.index_of(drawn.slots, self.storage), drawn.info
        return drawn.slots, drawn.info

    def draw_slots(self) -> tuple[Tensor, dict[Any, Any], list[Tensor]]:
        """Flat slots, the info with the index, and the rows where the program that draws has read them.

        For a storage and a sampler that `reads_slots` names.
        """
        sampler, storage = cast(DrawingSampler, self.sampler), cast(TensorStorage, self.storage)
        if self.reservation is None:
            slots, info, leaves = sampler.draw_slots(storage, self.size, self.key)
        else:
            slots, info, leaves = self.reservation.slots, self.reservation.info, []
        info["index"] = sampler.index_of(slots, storage)
        return slots, info, [bridge.hand_over(leaf) for leaf in leaves]


def reads_slots(storage: Storage, sampler: Sampler) -> bool:
    """Whether the library both draws and reads flat slots, which need none of the checks of an index from outside."""
    return isinstance(storage, TensorStorage) and type(storage).get is TensorStorage.get and names_slots(sampler)


class Request:
    """A batch that is not returned yet. What was drawn for it, of epochs and of generators, can be undone."""

    __slots__ = ("_after", "_before", "dropped", "future", "parts")

    def __init__(self, generators: Iterable[torch.Generator | None]) -> None:
        """Begin a request whose keys come from these generators; None for torch's global one."""
        self.parts: list[Part] = []
        self.dropped = False
        self.future: Future[Any] | None = None
        used = [torch.default_generator if each is None else each for each in generators]
        self._before = [(each, each.get_state()) for each in used]
        self._after: list[Tensor] = []

    def close(self) -> None:
        """All keys were made."""
        self._after = [each.get_state() for each, _ in self._before]

    @property
    def is_current(self) -> bool:
        """Whether what was drawn for it can be returned."""
        return not self.dropped and all(part.reservation is None or part.reservation.is_current for part in self.parts)

    def can_be_read(self, part: Part) -> bool:
        """Whether it was not dropped and no write made it stale. The lock of the storage is held."""
        if not self.dropped and part.reservation is not None and not part.reservation.is_own:
            part.sampler.catch_up(part.storage)
        return self.is_current

    def commit(self) -> None:
        """Have it count as returned."""
        for part in self.parts:
            if part.reservation is not None:
                part.reservation.commit()

    def abandon(self) -> None:
        """Undo a request that failed: generators are as before it."""
        self._release()
        for generator, before in self._before:
            generator.set_state(before)

    def drop(self) -> None:
        """Undo a closed request: its items remain to be drawn.

        Its keys are undone where nothing was drawn from the generator since; never those of the global generator.
        """
        self.dropped = True
        if self.future is not None:
            self.future.cancel()
        self._release()
        for (generator, before), after in zip(self._before, self._after, strict=False):
            if generator is not torch.default_generator and torch.equal(generator.get_state(), after):
                generator.set_state(before)

    def _release(self) -> None:
        for part in reversed(self.parts):
            if part.reservation is not None:
                part.reservation.release()

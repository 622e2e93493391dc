"""A request for a batch: its samplers, sizes and keys, and the reservations made for it."""

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fbuf.tasks import Task
from interop.host.threads import came_from_a_signal
from interop.samplers import Sampler
from interop.samplers.drawing import DrawingSampler, names_slots
from interop.samplers.reservation import Reservation
from interop.storages import Storage, TensorStorage


@dataclasses.dataclass(slots=True, eq=False)
class RequestPart:
    """The part of a batch that one buffer gives."""

    place: int  # of the member of an ensemble
    sampler: Sampler
    storage: Storage
    size: int
    key: np.ndarray
    reservation: Reservation | None = None
    before: dict[str, Any] | None = None  # the sampler as it was before the draw, where the draw changes it

    def reserve(self) -> None:
        """Draw now if key and stored items do not determine the draw: from an epoch, or by a user's sampler."""
        self.before = self.sampler.before_draw()
        self.reservation = self.sampler.reserve(self.storage, self.size, self.key)

    def release(self) -> None:
        """Undo `reserve`, also one that was interrupted: its items remain to be drawn."""
        if self.reservation is not None:
            self.reservation.release()
        else:
            self.sampler.undo_draw(self.key)

    def abandon(self, interrupted: bool) -> None:
        """Undo `reserve`; nothing was drawn since. After an error of its own a user's sampler is left as it is."""
        self.release()
        if self.before is not None and (interrupted or not self.sampler.draws_on):
            self.sampler.put_back(self.before)

    def draw(self) -> tuple[Any, dict[Any, Any]]:
        """The index of the items and the info."""
        drawn = self.reservation
        if drawn is None:
            return self.sampler.draw(self.storage, self.size, self.key)
        if isinstance(self.sampler, DrawingSampler) and not drawn.is_own:
            return self.sampler.index_of(drawn.slots, self.storage), drawn.info
        return drawn.slots, drawn.info

    def draw_slots(self) -> tuple[Tensor, dict[Any, Any], list[Tensor]]:
        """Flat slots, the info with the index, and the rows if the program that draws has read them.

        Storage and sampler satisfy `reads_slots`.
        """
        sampler = cast(DrawingSampler, self.sampler)
        storage = cast(TensorStorage, self.storage)
        if self.reservation is None:
            slots, info, leaves = sampler.draw_slots(storage, self.size, self.key)
        else:
            slots = self.reservation.slots
            info = self.reservation.info
            leaves = []
        info["index"] = sampler.index_of(slots, storage)
        return slots, info, leaves


def reads_slots(storage: Storage, sampler: Sampler) -> bool:
    """Whether the library draws and reads flat slots, which need no validation."""
    return isinstance(storage, TensorStorage) and type(storage).get is TensorStorage.get and names_slots(sampler)


class Request:
    """A batch that is not returned yet. Its draws from epochs and generators can be undone.

    Attributes:
        parts: what is drawn.
        closed: whether all was drawn that is drawn ahead.
        awaited: the call that waits for the batch, if one does.
        dropped: whether it was undone.
        returned: whether it counts as drawn.
        task: the making of the batch.
        make: makes the batch.
    """

    __slots__ = ("_after", "_before", "_settings", "awaited", "closed", "dropped", "make", "parts", "returned", "task")

    awaited: object
    task: Task
    make: Callable[[], Any]

    def __init__(self, generators: Iterable[torch.Generator | None]) -> None:
        """Begin a request with keys from these generators; None for torch's global one."""
        self.parts: list[RequestPart] = []
        self.closed = self.dropped = self.returned = False
        self.awaited = None
        used = [torch.default_generator if generator is None else generator for generator in generators]
        self._before = [(generator, generator.get_state()) for generator in used]

    def close(self, make: Callable[[], Any], settings: tuple[Any, ...]) -> None:
        """All keys were made; `make` makes the batch, and the samplers have these settings."""
        self._after = [generator.get_state() for generator, _ in self._before]
        self.task = Task()
        self.make = make
        self._settings = settings
        self.closed = True

    def has(self, settings: tuple[Any, ...]) -> bool:
        """Whether the samplers had these settings."""
        own = self._settings
        return len(own) == len(settings) and all(map(operator.is_, own, settings))

    @property
    def is_current(self) -> bool:
        """Whether its batch can be returned."""
        return not self.dropped and all(part.reservation is None or part.reservation.is_current for part in self.parts)

    def can_be_read(self, part: RequestPart) -> bool:
        """Whether it was neither dropped nor made stale by a write. The lock of the storage is held."""
        if not self.dropped and part.reservation is not None and not part.reservation.is_own:
            part.sampler.catch_up(part.storage)
        return self.is_current

    def commit(self) -> None:
        """Count it as returned. It may be called again after an interrupt."""
        self.returned = True
        for part in self.parts:
            if part.reservation is not None:
                part.reservation.commit()

    def settle(self, error: BaseException) -> None:
        """After an error or an interrupt: count it as returned if that was begun, else undo it."""
        if self.returned:
            self.commit()
        else:
            self.abandon(came_from_a_signal(error))

    def abandon(self, interrupted: bool) -> None:
        """Undo a request that is not closed, and restore the generators."""
        for part in reversed(self.parts):
            part.abandon(interrupted)
        for generator, before in self._before:
            generator.set_state(before)

    def drop(self) -> None:
        """Undo a request: its items remain in the epoch. It may be called again after an interrupt.

        Restores each generator that was not used since, but never torch's global one.
        """
        self.dropped = True
        if not self.closed:
            self.abandon(interrupted=True)
            return
        for part in reversed(self.parts):
            part.release()
        self.restore_generators()

    def restore_generators(self) -> None:
        """Restore each generator that was not used since, but never torch's global one."""
        if not self.closed:
            for generator, before in self._before:
                generator.set_state(before)
            return
        for (generator, before), after in zip(self._before, self._after, strict=True):
            if generator is not torch.default_generator and torch.equal(generator.get_state(), after):
                generator.set_state(before)

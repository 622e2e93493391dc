"""A batch that is not returned yet: its requests, and the generators of their keys."""

import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict

from fbuf.tasks import Task
from interop.buffers.request import Request
from interop.host.threads import came_from_a_signal
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.storages import Storage


class RequestedBatch:
    """A batch that is not returned yet. Its draws from epochs and generators can be undone.

    Attributes:
        requests: one for each part of the batch.
        closed: whether all was drawn that is drawn ahead.
        awaited: the call that waits for the batch, if one does.
        dropped: whether it was undone.
        returned: whether it counts as drawn.
        task: the making of the batch.
        make: makes the batch.
    """

    __slots__ = (
        "_after",
        "_before",
        "_settings",
        "awaited",
        "closed",
        "dropped",
        "make",
        "requests",
        "returned",
        "task",
    )

    awaited: object
    task: Task
    make: Callable[[], Any]

    def __init__(self, generators: Iterable[torch.Generator | None]) -> None:
        """Begin with keys from these generators; None for torch's global one."""
        self.requests: list[Request] = []
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
        return not self.dropped and all(request.drawn is None or request.is_current for request in self.requests)

    def can_be_read(self, request: Request) -> bool:
        """Whether it was neither dropped nor made stale by a write. The lock of the storage of the request is held."""
        if not self.dropped and request.is_in_epoch:
            request.draws.catch_up(request.storage)
        return self.is_current

    def commit(self) -> None:
        """Count it as drawn. It may be called again after an interrupt."""
        self.returned = True
        for request in self.requests:
            if request.drawn is not None or request.counted is not None:
                request.commit()

    def tell_observers(self) -> None:
        """The batch is complete: what collates and transforms it has not raised. The last step before it is returned."""
        for request in self.requests:
            for tell in request.observed:
                tell()

    def settle(self, error: BaseException) -> None:
        """After an error or an interrupt: count it as returned if that was begun, else undo it."""
        if self.returned:
            self.commit()
        else:
            self.abandon(came_from_a_signal(error))

    def abandon(self, interrupted: bool) -> None:
        """Undo a batch that is not closed, and restore the generators."""
        for request in reversed(self.requests):
            request.abandon(interrupted)
        for generator, before in self._before:
            generator.set_state(before)

    def drop(self) -> None:
        """Undo its draws: their items remain in the epoch. It may be called again after an interrupt.

        Restores each generator that was not used since, but never torch's global one.
        """
        self.dropped = True
        if not self.closed:
            self.abandon(interrupted=True)
            return
        for request in reversed(self.requests):
            request.release()
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


class KeyedBuffer(Protocol):
    """A buffer with one storage."""

    @property
    def storage(self) -> Storage: ...
    @property
    def sampler(self) -> Sampler: ...
    @property
    def sample_unit(self) -> SampleUnit | None: ...
    def read(self, request: Request) -> Callable[[], tuple[Any, dict[Any, Any]]]: ...


def drawn_by_key(buffer: KeyedBuffer, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
    """A batch and its info, determined by the key and the stored items. Uses no prefetched batch and no generator.

    For batches over several buffers. The lock is held. The errors of `sample`; TypeError with a sample unit.

    Args:
        buffer: draws.
        batch_size: how many items.
        key: random bits, [2] uint32.
    """
    if buffer.sample_unit is not None:
        raise TypeError(f"parts of a batch cannot be drawn with sample_unit={buffer.sample_unit!r}: use sample()")
    request = Request(0, buffer.sampler.draws, buffer.storage, batch_size, key)
    batch = RequestedBatch(())
    try:
        batch.requests = [request]
        if request.draws.has_state:
            request.reserve()
        complete = buffer.read(request)
        batch.commit()
    except BaseException as error:
        batch.settle(error)
        raise
    data, info = complete()
    info = beside(buffer.storage, info)
    batch.tell_observers()
    return data, info


def beside(storage: Storage, info: dict[Any, Any]) -> dict[Any, Any]:
    """The info of a batch on the device of the storage."""
    device = getattr(storage, "device", None)
    return {key: _moved(value, device) for key, value in info.items()} if isinstance(device, torch.device) else info


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(entry, device) for entry in value)
    return value.to(device) if isinstance(value, torch.Tensor | TensorDict) else value

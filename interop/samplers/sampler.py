"""What every sampler does."""

import warnings
from abc import ABC
from typing import Any, Self

import numpy as np
import torch

from fbuf import free_memory
from fbuf.memory_plan import Share as MemoryShare
from interop.checkpoint.state import Stateful, defined_outside
from interop.data import randomness
from interop.data.class_names import class_of
from interop.data.index import as_tensor
from interop.samplers.reservation import Reservation
from interop.samplers.shares import Share
from interop.storages import Storage
from interop.writers import Writer


class Sampler(Stateful, randomness.Seeded, ABC):
    """Chooses the items of a batch. A subclass defines `draw`, or `sample` as in torchrl; the rest may stay as it is.

    A buffer makes one key for each batch from its generator, and calls `draw` with it. A sampler that takes all its random
    numbers from this key draws the same batches with `prefetch` and without, and after a checkpoint. A sampler that
    defines `sample` takes them from `self._rng` instead: during the call this is a generator that is seeded with the key.

    A subclass with attributes defines `state_dict`, which returns tensors and plain values, in dicts with text keys and
    lists, and `load_state_dict`, which takes them back. Checkpoints save this state. See docs/extending.md.
    """

    KEPT = False  # whether a storage in files keeps priorities of its items for it
    follows_writes = False  # whether the class defines `mark_update`
    takes_priorities = False  # whether it defines `update_priority`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.follows_writes = cls.mark_update is not Sampler.mark_update
        cls.takes_priorities = cls.update_priority is not Sampler.update_priority

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.sample is Sampler.sample and cls.draw is Sampler.draw:
            raise TypeError(f"{cls.__name__} chooses no items: define draw(storage, batch_size, key) in it")
        if (args or kwargs) and cls.__init__ is object.__init__:  # to which they would be lost
            raise TypeError(f"{cls.__name__}() takes no arguments, got {args or kwargs}")
        return super().__new__(cls)

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """An index into the storage and the info of a batch, both determined by the key and the state of the sampler.

        Args:
            storage: where the items are; its lock is held.
            batch_size: how many items are wanted.
            key: random bits, [2] uint32: a key of JAX, or a seed for `numpy.random.default_rng`.
        """
        every: list[Sampler | Storage] = [self, storage]  # the storage for its `random_index`
        before = [each.buffer_generator for each in every]
        seed, made = int(key.view(np.int64)[0]), dict[torch.device, torch.Generator]()
        try:
            for each, held in zip(every, before, strict=True):
                device = torch.device("cpu") if held is None else held.device
                if device not in made:
                    made[device] = torch.Generator(device).manual_seed(seed)
                each.buffer_generator = made[device]
            return self.sample(storage, batch_size)
        finally:
            for each, generator in zip(every, before, strict=True):
                each.buffer_generator = generator

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """`draw` with a key of the sampler's generator."""
        with randomness.Restored(self._rng):
            return self.draw(storage, batch_size, randomness.key(self._rng))

    def reserve(self, storage: Storage, batch_size: int, key: np.ndarray) -> Reservation | None:
        """Draw for a batch that is returned later: from an epoch, or by a user's sampler, which may have epochs.

        None for the library's other samplers, whose draws follow from the key and what is stored.
        """
        return Reservation.own(*draw_by(self, storage, batch_size, key))

    @property
    def reads_to_reserve(self) -> bool:
        """Whether `reserve` reads what is stored: the lock of the storage must be held."""
        return True

    @property
    def has_more(self) -> bool:
        """Whether another batch may be reserved: not past the end of an epoch, whose last batch is not returned yet."""
        return not self.ran_out

    def catch_up(self, storage: Storage) -> None:
        """Begin an epoch where writes ended the last one; its reservations are stale. The lock of the storage is held."""

    def sampleable(self, storage: Storage) -> int:
        """How many items there are to draw from: the length of a buffer."""
        return len(storage)

    def share(self, storage: Storage, batch_size: int) -> Share:
        """What a storage holds of everything, for batches of this size over several buffers; its lock is held.

        TypeError for a sampler of which such batches cannot be drawn.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot draw batches over several shards: use one shard, or a RandomSampler, "
            "PrioritizedSampler, SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement or "
            "PrioritizedSliceSampler"
        )

    def memory_shares(self, storage: Storage, capacity: int) -> list[MemoryShare]:
        """The memory that it takes beside a storage of so many items, for a plan. Here nothing is known."""
        return [host_share(f"of a {type(self).__name__}", None)]

    def add(self, index: Any) -> None:
        """An item was added at index."""

    def extend(self, index: Any) -> None:
        """Items were added at index."""

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """The items at index are new, through whichever buffer they were written."""

    def take_over(self, storage: Storage) -> None:
        """Draw from a storage that may have items already: `mark_update` of a user's class is called with all of them."""
        if len(storage) and defined_outside(self, "mark_update"):
            slots = torch.arange(len(storage), device="cpu")
            index = slots if storage.ndim == 1 else torch.stack(torch.unravel_index(slots, storage.shape or ()), -1)
            self.mark_update(index, storage=storage)

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Give items priorities; here a warning, this sampler has none."""
        warnings.warn(
            f"update_priority() has no effect: {type(self).__name__} is not a prioritized sampler",
            UserWarning,
            stacklevel=3,
        )

    def checked(self, priority: Any) -> Any:
        """The priorities as `update_priority` takes them; TypeError or ValueError for what it would refuse."""
        return priority

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        """TypeError, ValueError or RuntimeError for parts of a buffer that nothing could be drawn from in this way."""

    def check_batch_size(self, batch_size: int | None) -> None:
        """ValueError for batches of this size that cannot be drawn; None where each call has a size of its own."""
        if batch_size is None and getattr(self, "drop_last", False):
            raise ValueError("a sampler with drop_last=True needs a batch_size in the constructor of the buffer")

    def refuse_forked_child(self) -> None:
        """RuntimeError in a forked child, whose draws and writes the sampler would not follow."""

    @property
    def default_priority(self) -> float:
        """The priority of a new item."""
        return 1.0

    @property
    def ran_out(self) -> bool:
        """Whether an epoch has just ended; never for samplers without one."""
        return False

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        pass

    def reloaded(self, storage: Storage) -> None:
        """The rows of the storage were loaded. What is kept beside them is to be kept beside these."""

    def clear(self) -> None:
        """Start over: the buffer was emptied. Calls `_empty`, which a subclass may define."""
        self._empty()

    def _empty(self) -> None:
        """Start over, the buffer was emptied."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rng": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def draw_by(sampler: Sampler, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, Any]:
    """What a sampler draws with a key: by its `sample` where a subclass defines that, by its `draw` otherwise."""
    by_key = samples_by_key(sampler)
    found = sampler.draw(storage, batch_size, key) if by_key else Sampler.draw(sampler, storage, batch_size, key)
    if not (isinstance(found, tuple) and len(found) == 2 and hasattr(found[1], "items")):
        name = f"{class_of(sampler)}.{'draw' if by_key else 'sample'}()"
        raise TypeError(f"{name} must return (index, info), of which info is a dict, got {found!r:.200}")
    index, info = found
    return as_tensor(index) if isinstance(index, list | range) else index, info


def samples_by_key(sampler: Sampler) -> bool:
    """Whether `sample` is the base's, which calls `draw`."""
    return type(sampler).sample is Sampler.sample


def host_share(key: str, size: int | None) -> MemoryShare:
    """So many bytes of host memory at most, or an unknown number, in a plan."""
    return MemoryShare("sampler", key, free_memory.HOST, size, counts="always" if size is None else "at most")

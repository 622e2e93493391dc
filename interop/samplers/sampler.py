"""The base class of samplers."""

import warnings
from abc import ABC
from typing import Any, Self

import numpy as np
import torch

from fbuf import free_memory
from fbuf.memory_plan import Share
from interop.checkpoint.state import Stateful, defined_outside
from interop.data import randomness
from interop.data.arguments import class_of, whole
from interop.data.index import as_tensor
from interop.samplers.reservation import Reservation
from interop.samplers.shares import ShardContents
from interop.storages import Storage
from interop.writers import Writer


class Sampler(Stateful, randomness.Seeded, ABC):
    """Chooses the items of a batch. A subclass defines `draw`, or `sample` as in torchrl.

    A buffer makes one key for each batch from its generator, and passes it to `draw`. A sampler that takes all its random
    numbers from this key draws the same batches with and without `prefetch`, and after a checkpoint. A sampler that
    defines `sample` takes them from `self._rng` instead: during the call this is a generator seeded with the key.

    A subclass with attributes defines `state_dict`, which returns tensors and plain values in dicts with text keys and
    lists, and `load_state_dict`. Checkpoints save this state. See docs/extending.md.
    """

    _changes = 0  # calls of `parameters_changed`
    KEPT = False  # whether a storage in files keeps the priorities
    keeps_uses = False  # whether it keeps what was consumed
    follows_writes = False  # whether the class defines `mark_update`
    takes_priorities = False  # whether it defines `update_priority`
    sees_writes = False  # whether it defines one of these, `add` or `extend`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.follows_writes = cls.mark_update is not Sampler.mark_update
        cls.takes_priorities = cls.update_priority is not Sampler.update_priority
        own = (cls.add is not Sampler.add, cls.extend is not Sampler.extend)
        cls.sees_writes = cls.follows_writes or cls.takes_priorities or any(own)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.sample is Sampler.sample and cls.draw is Sampler.draw:
            raise TypeError(f"{cls.__name__} chooses no items: define draw(storage, batch_size, key) in it")
        if (args or kwargs) and cls.__init__ is object.__init__:  # to which they would be lost
            raise TypeError(f"{cls.__name__}() takes no arguments, got {args or kwargs}")
        return super().__new__(cls, *args, **kwargs)

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """An index into the storage and the info of a batch, both determined by the key and the state of the sampler.

        Args:
            storage: where the items are; its lock is held.
            batch_size: how many items are wanted.
            key: random bits, [2] uint32: a key of JAX, or a seed for `numpy.random.default_rng`.
        """
        every: list[Sampler | Storage] = [self, storage]  # `random_index` of the storage draws, too
        before = [component.buffer_generator for component in every]
        seed = int(key.view(np.int64)[0])
        generators = dict[torch.device, torch.Generator]()
        try:
            for component, own in zip(every, before, strict=True):
                device = torch.device("cpu") if own is None else own.device
                if device not in generators:
                    generators[device] = torch.Generator(device).manual_seed(seed)
                component.buffer_generator = generators[device]
            return self.sample(storage, batch_size)
        finally:
            for component, generator in zip(every, before, strict=True):
                component.buffer_generator = generator

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """`draw` with a key of the sampler's generator."""
        batch_size = whole("batch_size", batch_size, least=0)
        self.raise_deferred()
        with randomness.Restored(self._rng):
            return self.draw(storage, batch_size, randomness.key(self._rng))

    def reserve(self, storage: Storage, batch_size: int, key: np.ndarray) -> Reservation | None:
        """Draw for a batch that is returned later, if the draw changes the sampler: for epochs and samplers of users.

        None for samplers whose draws depend on the key and the stored items only.
        """
        return Reservation.own(*draw_by(self, storage, batch_size, key))

    @property
    def draws_on(self) -> bool:
        """Whether a draw that raises an error counts, as far as it came: in classes of users."""
        return defined_outside(self, "draw") or defined_outside(self, "sample")

    def before_draw(self) -> dict[str, Any] | None:
        """What `put_back` needs to undo the next draw, for what `undo_draw` does not undo; None for nothing."""
        return self.before_write()

    def put_back(self, before: dict[str, Any]) -> None:
        """Be again as at `before_draw`, or `before_write`. Of a user's class the attributes, not what changes in them."""
        self.__dict__.update(before)

    def undo_draw(self, key: np.ndarray) -> None:
        """Undo the `reserve` with this key, if it was interrupted before its result was known."""

    def let_go(self) -> None:
        """Release the locks of the sampler that this thread holds: after an interrupt."""

    def before_write(self) -> dict[str, Any]:
        """What `put_back` needs to undo what a write does to the sampler."""
        return self.__dict__.copy()

    @property
    def draw_settings(self) -> tuple[Any, ...]:
        """The parameters that a user may set and on which draws depend. Batches drawn ahead with others are drawn again."""
        return (self._changes,)

    def parameters_changed(self) -> None:
        """Draw batches again that were drawn ahead. Call it where `draw_settings` has not what was set."""
        self._changes += 1

    @property
    def reads_to_reserve(self) -> bool:
        """Whether `reserve` reads stored items, so that the lock of the storage must be held."""
        return True

    def slice_lengths(self) -> np.ndarray | None:
        """How many items each slice of the last draw has in the batch, padding included, int64 [slices].

        None for a sampler that draws single items.
        """
        return None

    @property
    def has_more(self) -> bool:
        """Whether another batch may be reserved. Reservations do not go past the end of an epoch."""
        return not self.ran_out

    def catch_up(self, storage: Storage) -> None:
        """Begin an epoch if a write ended the last one, whose reservations are stale. The lock of the storage is held."""

    def sampleable(self, storage: Storage) -> int:
        """How many items can be drawn: the length of a buffer."""
        return len(storage)

    def share(self, storage: Storage, batch_size: int) -> ShardContents:
        """The share of a storage in batches of this size over several buffers. Its lock is held.

        TypeError for a sampler that cannot draw such batches.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot draw batches over several shards: use one shard, or a RandomSampler, "
            "PrioritizedSampler, SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement or "
            "PrioritizedSliceSampler"
        )

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        """The memory of the sampler for a storage of `capacity` items, for a plan. Unknown in the base class."""
        return [host_share(f"of a {type(self).__name__}", None)]

    def add(self, index: Any) -> None:
        """An item was added at index."""

    def extend(self, index: Any) -> None:
        """Items were added at index."""

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """New items are at index, written through any buffer on the storage."""

    def take_over(self, storage: Storage) -> None:
        """Draw from a storage that may have items already. Calls `mark_update` of a user's class with all of them."""
        if len(storage) and defined_outside(self, "mark_update"):
            slots = torch.arange(len(storage), device="cpu")
            index = slots if storage.ndim == 1 else torch.stack(torch.unravel_index(slots, storage.shape or ()), -1)
            self.mark_update(index, storage=storage)

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set priorities of items. Warns in samplers without priorities."""
        warnings.warn(
            f"update_priority() has no effect: {type(self).__name__} is not a prioritized sampler",
            UserWarning,
            stacklevel=3,
        )

    def checked(self, priority: Any) -> Any:
        """The priorities as `update_priority` uses them; TypeError or ValueError if it would refuse them."""
        return priority

    def checks_later(self, priority: object) -> bool:
        """Whether `update_priority` checks such priorities, one for each slot, on their device, and nobody waits for it."""
        return False

    def raise_deferred(self) -> None:
        """Raise the error of an earlier update that was checked later. Buffers call it before a draw and before a change."""

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        """TypeError, ValueError or RuntimeError for other parts of a buffer with which this sampler cannot work."""

    def check_batch_size(self, batch_size: int | None) -> None:
        """ValueError for a batch size that cannot be drawn; None means that each call has its own size."""
        if batch_size is None and getattr(self, "drop_last", False):
            raise ValueError("a sampler with drop_last=True needs a batch_size in the constructor of the buffer")

    def refuse_forked_child(self) -> None:
        """RuntimeError in a forked child if the sampler works in one process only."""

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

    @property
    def has_epochs(self) -> bool:
        """Whether iteration ends where `ran_out` says so: for each class that defines `ran_out`."""
        return type(self).ran_out is not Sampler.ran_out

    def reloaded(self, storage: Storage) -> None:
        """The rows of the storage were loaded."""

    def clear(self) -> None:
        """Start over: the buffer was emptied."""
        self._empty()

    def _empty(self) -> None:
        """Called by `clear`; a subclass may define it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rng": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def draw_by(sampler: Sampler, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, Any]:
    """Draw with a key: by `sample` if a subclass defines it, else by `draw`."""
    by_key = samples_by_key(sampler)
    drawn = sampler.draw(storage, batch_size, key) if by_key else Sampler.draw(sampler, storage, batch_size, key)
    if not (isinstance(drawn, tuple) and len(drawn) == 2 and hasattr(drawn[1], "items")):
        name = f"{class_of(sampler)}.{'draw' if by_key else 'sample'}()"
        raise TypeError(f"{name} must return (index, info), of which info is a dict, got {drawn!r:.200}")
    index, info = drawn
    return as_tensor(index) if isinstance(index, list | range) else index, info


def samples_by_key(sampler: Sampler) -> bool:
    """Whether the class defines `draw`, not `sample`."""
    return type(sampler).sample is Sampler.sample


def host_share(key: str, size: int | None) -> Share:
    """At most `size` bytes of host memory in a plan; None if unknown."""
    return Share("sampler", key, free_memory.HOST, size, counts="always" if size is None else "at most")

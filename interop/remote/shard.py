"""One of the buffers that a sharded buffer is made of."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.data.arguments import class_of
from interop.remote.epochs import Planned
from interop.remote.joining import Drawn
from interop.remote.places import to_global
from interop.samplers import PrioritizedSampler, SamplerWithoutReplacement, SliceSampler
from interop.samplers.drawing import names_slots
from interop.samplers.shares import Share
from interop.shared.storage_lock import locked

READS = frozenset(
    (
        "__getitem__",
        "__len__",
        "dump",
        "dumps",
        "save",
        "state_dict",
        "stats",
        "batch_size",
        "dim_extend",
        "write_count",
    )
)
_ROWS = ("add", "extend", "update_priority", "update_tensordict_priority", "update_if_present", "mark_update", "empty")
_STATE = ("__setitem__", "load", "loads", "load_state_dict", "append_transform", "insert_transform", "share")
_PARTS = ("register_save_hook", "register_load_hook", "set_sampler", "set_storage", "set_writer")
WRITES = frozenset((*_ROWS, *_STATE, *_PARTS))
_LARGEST = 2**62  # the highest index over all shards


class Shard:
    """One buffer of several that are drawn from as one, behind one lock. Safe from several threads.

    What it returns has indices over all shards (see `to_global`); what it takes has its own.

    Args:
        number: which shard it is, from 0.
        count: how many there are.
        make: makes the buffer.

    TypeError for what is no `ReplayBuffer`; ValueError for a storage without a bound, as indices count on from it.
    """

    def __init__(self, number: int, count: int, make: Callable[[], ReplayBuffer]) -> None:
        buffer = make()
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"a shard needs a ReplayBuffer, got {class_of(buffer)}")
        self.number, self.buffer = number, buffer
        self.capacity = buffer.storage.max_size
        if self.capacity > _LARGEST // count:
            raise ValueError(f"{count} shards need bounded storages, got max_size={self.capacity}: give a max_size")
        self._lock = threading.Lock()  # of every write and draw; also of `hold`, which another thread releases
        self._held = False

    def share(self, batch_size: int) -> Share:
        """The share of this shard in batches of this size. TypeError for samplers of users."""
        with self._lock, locked(self.buffer):
            return self._share(batch_size)

    def _share(self, batch_size: int) -> Share:
        sampler = self.buffer.sampler
        share = sampler.share(self.buffer.storage, batch_size)
        if not names_slots(sampler):
            raise TypeError(f"{class_of(sampler)} draws by its own method: use a sampler of the library, or one shard")
        return share

    def draw(self, units: int, batch_size: int, key: np.ndarray, planned: Planned | None = None) -> Drawn:
        """The part of a batch that falls to this shard. It follows from the key and what is stored.

        Args:
            units: how many to draw: items, or slices of the length that those of the whole batch have.
            batch_size: of the whole batch.
            key: random bits, [2] uint32.
            planned: which units, for samplers without replacement.

        RuntimeError where nothing is stored, or less than was planned.
        """
        with self._lock, locked(self.buffer), contextlib.ExitStack() as after:
            sampler, share = self.buffer.sampler, self._share(batch_size)
            if isinstance(sampler, SliceSampler) and sampler.num_slices is not None:
                after.callback(setattr, sampler, "num_slices", sampler.num_slices)  # of the whole batch
                sampler.num_slices = units
            if planned is not None and isinstance(sampler, SamplerWithoutReplacement):
                after.callback(setattr, sampler, "planned", None)
                sampler.planned = _positions(share, units, key, planned)
            data, info = self.buffer.draw_by_key(units * share.unit, key)
            lengths = sampler.lengths_drawn if isinstance(sampler, SliceSampler) else None
        rows = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
        if lengths is None:
            lengths = np.full(len(rows) // share.unit, share.unit)
        includes = isinstance(self.buffer, TensorDictReplayBuffer)
        if includes and isinstance(data, TensorDictBase):
            data = data.exclude(*info)  # which some shards may have included already
        return Drawn(data, {**info, "index": self._global(info["index"])}, share, lengths, includes)

    @property
    def highest(self) -> float | None:
        """`Share.highest` of this moment, without waiting for a write or draw."""
        sampler = self.buffer.sampler
        return sampler.highest if isinstance(sampler, PrioritizedSampler) else None

    def raise_default_priority(self, priority: float | None) -> None:
        """Give items that are new from now on at least this priority; nothing for None.

        One buffer gives new items the highest priority of all. Shards do for a client that passes the highest `highest` of
        all replies it got along with each call. Updates that it has not seen yet count in their own shard alone.
        """
        if priority is not None:
            with self._lock:
                if isinstance(sampler := self.buffer.sampler, PrioritizedSampler):
                    sampler.raise_default_priority(priority)

    def call(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a method, or read a property, of the buffer: one of `READS` or `WRITES`; AttributeError for another.

        A method that returns the buffer itself returns None here. ValueError for a storage of another capacity.
        """
        if name not in READS and name not in WRITES:
            raise AttributeError(f"a shard has no {name}()")
        if name == "set_storage" and args[0].max_size != self.capacity:
            wrong = f"got max_size={args[0].max_size}"
            raise ValueError(f"all storages of a shard have one capacity, {self.capacity}, for global indices; {wrong}")
        with contextlib.nullcontext() if name in READS else self._lock:
            found = getattr(self.buffer, name)
            result = found(*args, **(kwargs or {})) if callable(found) else found
        if name in ("add", "extend"):
            return self._global(result)
        return None if result is self.buffer else result

    def _global(self, index: Any) -> Any:
        return to_global(index, self.number, self.capacity)

    def hold(self, timeout: float = -1) -> None:
        """Block writes and draws until `release`; reads continue. RuntimeError after `timeout` seconds."""
        if not self._lock.acquire(timeout=timeout):
            raise RuntimeError(f"shard {self.number} was not free within {timeout} s: it is held, or a call runs")
        self._held = True

    def release(self) -> None:
        """Let writes and draws go on. RuntimeError where nothing was held."""
        if not self._held:
            raise RuntimeError(f"shard {self.number} is not held")
        self._held = False
        self._lock.release()


def _positions(share: Share, units: int, key: np.ndarray, planned: Planned) -> np.ndarray:
    """The planned positions; of a shard that was written to since, as many of its units as they are now."""
    size = int(share.mass)
    if share.version == planned.version and planned.positions.max() < size:
        return planned.positions
    if size < units:
        raise RuntimeError(f"{units} units were planned, the shard has {size}: it was emptied since. Sample again")
    return np.random.default_rng(key).choice(size, units, replace=False)

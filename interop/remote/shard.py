"""One shard: a buffer that holds a part of the rows of a sharded buffer."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.requested_batch import drawn_by_key
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.data.arguments import class_of
from interop.remote.epochs import Planned
from interop.remote.joining import Drawn
from interop.remote.places import to_global
from interop.samplers import SliceSampler
from interop.samplers.epoch_draws import EpochDraws
from interop.samplers.shares import ShardContents
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
        "describe",
        "batch_size",
        "dim_extend",
        "write_count",
    )
)
_ROWS = ("add", "extend", "update_priority", "update_tensordict_priority", "update_if_present", "mark_update", "empty")
_STATE = ("__setitem__", "load", "loads", "load_state_dict", "append_transform", "insert_transform", "share")
_PARTS = ("register_save_hook", "register_load_hook", "set_sampler", "set_storage", "set_writer")
WRITES = frozenset((*_ROWS, *_STATE, *_PARTS))
_LARGEST = 2**62  # the maximum global index


class Shard:
    """One of several buffers that are sampled as one, behind one lock. Thread-safe.

    Results have global indices (see `to_global`); arguments have local indices.

    Args:
        number: the number of the shard, from 0.
        count: the number of shards.
        make: builds the buffer.

    TypeError if `make` returns no `ReplayBuffer`. ValueError for an unbounded storage, which has no global indices.
    """

    def __init__(self, number: int, count: int, make: Callable[[], ReplayBuffer]) -> None:
        buffer = make()
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"a shard needs a ReplayBuffer, got {class_of(buffer)}")
        self.number, self.buffer = number, buffer
        self.capacity = buffer.storage.max_size
        if self.capacity > _LARGEST // count:
            raise ValueError(f"{count} shards need bounded storages, got max_size={self.capacity}: give a max_size")
        self._lock = threading.Lock()  # held by writes, draws and `hold`, which another thread releases
        self._held = False

    def share(self, batch_size: int) -> ShardContents:
        """The share of this shard in batches of this size. TypeError for a custom sampler."""
        with self._lock, locked(self.buffer):
            return self._share(batch_size)

    def _share(self, batch_size: int) -> ShardContents:
        sampler = self.buffer.sampler
        if sampler.hooks.draws:
            raise TypeError(f"{class_of(sampler)} draws by its own method: use a sampler of the library, or one shard")
        share = sampler.draws.share(self.buffer.storage, batch_size)
        if share is None:
            raise TypeError(
                f"a {type(sampler).__name__} cannot draw batches over several shards: use one shard, or a RandomSampler, "
                "PrioritizedSampler, SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement or "
                "PrioritizedSliceSampler"
            )
        return share

    def draw(self, units: int, batch_size: int, key: np.ndarray, planned: Planned | None = None) -> Drawn:
        """Draw this shard's part of a batch. Deterministic, given the key and the stored rows.

        Args:
            units: the number of items or slices. Slices have the same length as in the whole batch.
            batch_size: the size of the whole batch.
            key: random bits, [2] uint32.
            planned: the units to draw, for samplers without replacement.

        RuntimeError for an empty shard, or fewer stored units than planned.
        """
        with self._lock, locked(self.buffer), contextlib.ExitStack() as after:
            sampler, share = self.buffer.sampler, self._share(batch_size)
            draws = sampler.draws
            if isinstance(sampler, SliceSampler) and sampler.num_slices is not None:
                after.callback(setattr, sampler, "num_slices", sampler.num_slices)  # of the whole batch
                sampler.num_slices = units
            if planned is not None and isinstance(draws, EpochDraws):
                after.callback(setattr, draws, "planned", None)
                draws.planned = _positions(share, units, key, planned)
            data, info = drawn_by_key(self.buffer, units * share.unit, key)
            lengths = draws.slice_lengths()
        rows = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
        if lengths is None:
            lengths = np.full(len(rows) // share.unit, share.unit)
        includes = isinstance(self.buffer, TensorDictReplayBuffer)
        if includes and isinstance(data, TensorDictBase):
            data = data.exclude(*info)  # some shards may have included it already
        return Drawn(data, {**info, "index": self._global(info["index"])}, share, lengths, includes)

    @property
    def highest(self) -> float | None:
        """The current `ShardContents.highest`. Does not wait for writes or draws."""
        return self.buffer.sampler.item_values.highest

    def raise_default_priority(self, priority: float | None) -> None:
        """Raise the priority of future items to at least this value; None does nothing.

        A single buffer gives new items the highest priority of all items. Shards approximate this: each call of a client
        passes the highest `ShardContents.highest` of its earlier replies. Updates that the client has not seen only count
        in their own shard.
        """
        if priority is not None:
            with self._lock:
                self.buffer.sampler.item_values.raise_default(priority)

    def call(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a method or read a property of the buffer, one of `READS` or `WRITES`; AttributeError for others.

        A method that returns the buffer returns None here. ValueError for a new storage of another capacity.
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
        """Unblock writes and draws. RuntimeError if they were not held."""
        if not self._held:
            raise RuntimeError(f"shard {self.number} is not held")
        self._held = False
        self._lock.release()


def _positions(share: ShardContents, units: int, key: np.ndarray, planned: Planned) -> np.ndarray:
    """The planned positions. If the shard was written to since, as many random units of its current ones."""
    size = int(share.mass)
    if share.version == planned.version and planned.positions.max() < size:
        return planned.positions
    if size < units:
        raise RuntimeError(f"{units} units were planned, the shard has {size}: it was emptied since. Sample again")
    return np.random.default_rng(key).choice(size, units, replace=False)

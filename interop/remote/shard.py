"""One of the buffers that a sharded buffer is made of."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.buffers.turn import Turn
from interop.class_names import class_of
from interop.remote.epochs import Planned
from interop.remote.joining import Drawn
from interop.remote.places import to_global
from interop.samplers import SamplerWithoutReplacement, SliceSampler
from interop.samplers.drawing import names_slots
from interop.samplers.shares import Share

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
WRITES = frozenset(
    (
        *(
            "add",
            "extend",
            "update_priority",
            "update_tensordict_priority",
            "update_if_present",
            "mark_update",
            "empty",
        ),
        *("__setitem__", "load", "loads", "load_state_dict", "append_transform", "insert_transform"),
        *("register_save_hook", "register_load_hook", "set_sampler", "set_storage", "set_writer", "share"),
    )
)
_LARGEST = 2**62


class Shard:
    """One buffer of several that are drawn from as one, behind one lock. Safe from several threads.

    What it returns has indices over all shards (see `to_global`); what it takes has its own.

    Args:
        number: which shard it is, from 0.
        count: how many there are.
        make: makes the buffer.

    TypeError for what is no `ReplayBuffer`, ValueError for a storage without a bound, of which no shard comes behind.
    """

    def __init__(self, number: int, count: int, make: Callable[[], ReplayBuffer]) -> None:
        buffer = make()
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"a shard needs a ReplayBuffer, got {class_of(buffer)}")
        self.number, self.count, self.buffer = number, count, buffer
        self.capacity = buffer.storage.max_size
        if self.capacity > _LARGEST // count:
            raise ValueError(
                f"{count} shards need storages with a bound, got max_size={self.capacity}: give a max_size"
            )
        self._lock = threading.Lock()  # of every write and draw; also of `hold`, which another thread releases
        self._held = False

    def share(self, batch_size: int) -> Share:
        """What the shard holds of everything, for batches of this size. TypeError for other samplers than the library's."""
        with self._lock, Turn(self.buffer):
            return self._share(batch_size)

    def _share(self, batch_size: int) -> Share:
        sampler = self.buffer.sampler
        share = sampler.share(self.buffer.storage, batch_size)
        if not names_slots(sampler):
            raise TypeError(
                f"{class_of(sampler)} draws by a method of its own: use one of the library's samplers, or one shard"
            )
        return share

    def draw(self, units: int, batch_size: int, key: np.ndarray, planned: Planned | None = None) -> Drawn:
        """The part of a batch that falls to this shard. It follows from the key and what is stored.

        Args:
            units: how many to draw: items, or slices of the length that those of the whole batch have.
            batch_size: of the whole batch.
            key: random bits, [2] uint32.
            planned: for samplers without replacement, which units. Without it the epoch of the sampler goes on.

        RuntimeError where nothing is stored, or less than was planned.
        """
        with self._lock, Turn(self.buffer):
            share = self._share(batch_size)
            sampler, rest = self.buffer.sampler, contextlib.ExitStack()
            with rest:
                if isinstance(sampler, SliceSampler) and sampler.num_slices is not None:
                    rest.callback(setattr, sampler, "num_slices", sampler.num_slices)  # of the whole batch
                    sampler.num_slices = units
                if planned is not None and isinstance(sampler, SamplerWithoutReplacement):
                    rest.enter_context(sampler.drawing(_positions(share, units, key, planned)))
                data, info = self.buffer.draw_by_key(units * share.unit, key)
            lengths = sampler.lengths_drawn if isinstance(sampler, SliceSampler) else None
        rows = len(info["index"][0] if isinstance(info["index"], tuple) else info["index"])
        if lengths is None:
            lengths = np.full(rows // share.unit, share.unit)
        marked = isinstance(self.buffer, TensorDictReplayBuffer) and isinstance(data, TensorDictBase)
        if marked:
            index = data.get("index").clone()
            index[(..., 0) if isinstance(info["index"], tuple) else ...] += self.number * self.capacity
            data.set("index", index)
        info = {**info, "index": self._global(info["index"])}
        return Drawn(data, info, share, lengths, marked)

    def call(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """What a method or property of the buffer returns, one of `READS` or `WRITES`; AttributeError for another.

        A method that returns the buffer itself returns None here.
        """
        if name not in READS and name not in WRITES:
            raise AttributeError(f"a shard has no {name}()")
        if name == "set_storage" and args[0].max_size != self.capacity:
            raise ValueError(
                f"the storage of a shard keeps its capacity, {self.capacity}, which the indices of all shards follow from; "
                f"got one of max_size={args[0].max_size}"
            )
        with contextlib.nullcontext() if name in READS else self._lock:
            found = getattr(self.buffer, name)
            result = found(*args, **(kwargs or {})) if callable(found) else found
        if name in ("add", "extend"):
            return self._global(result)
        return None if result is self.buffer else result

    def _global(self, index: Any) -> Any:
        return to_global(index, self.number, self.capacity)

    def hold(self, timeout: float = -1) -> None:
        """Have writes and draws wait until `release`; what only reads goes on. RuntimeError after `timeout` seconds."""
        if not self._lock.acquire(timeout=timeout):
            raise RuntimeError(
                f"shard {self.number} was not free within {timeout} s: it is held, or a call takes longer"
            )
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
    if share.version == planned.version and size >= planned.size:
        return planned.positions
    if size < units:
        raise RuntimeError(f"{units} units were planned, the shard has {size}: it was emptied since. Sample again")
    return np.random.default_rng(key).choice(size, units, replace=False)

"""The process of one shard: what Ray runs around a `Shard`."""

import inspect
import os
import pickle
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

from fbuf.checkpoint import CheckpointError, load
from interop.buffers import ReplayBuffer
from interop.codec import Layout
from interop.remote.errors import RemoteError
from interop.remote.shard import Shard
from interop.remote.wire import Wire
from interop.remote.write_log import WriteLog
from interop.samplers import PrioritizedSampler, Sampler, SliceSampler
from interop.storages import Storage, TensorStorage
from interop.writers import RoundRobinWriter, Writer

_NOTHING = "nothing: it is empty"
_OWN = (  # calls that are more than one of the buffer
    *("write", "sample", "next", "set_rng", "set_storage", "set_sampler", "set_writer"),
    *("hold", "release", "save", "load", "look", "verify", "commit", "rows", "fill"),
)
_KINDS: dict[str, type] = {"storage": Storage, "sampler": Sampler, "writer": Writer}


class Facts(NamedTuple):
    """What a client needs to know of a shard: its process, and how it was built."""

    life: str  # another one after each restart
    origin: str  # what its rows come from
    is_empty: bool  # restarted, and none of its rows came back
    pid: int
    rows: int  # its capacity
    slices: bool
    batch_size: int | None
    dim_extend: int


class RestartedError(RemoteError):
    """The process is another one than the caller knows. The call was not carried out."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.origin)
        self.facts = facts

    def __reduce__(self) -> tuple[type["RestartedError"], tuple[Facts]]:
        return type(self), (self.facts,)


class ShardActor:
    """One shard in a process of its own.

    Ray runs writes in one thread, in the order of each client; draws in a second; what controls the shard in others. A
    process that restarts loads the latest checkpoint and then the durable writes after it. An error of that is raised by
    every call.
    """

    def __init__(self, number: int, count: int, recipe: bytes, coordinator: Any, recovery_dir: str | None) -> None:
        self._number, self._coordinator = number, coordinator
        self._life, self._origin = secrets.token_hex(8), _NOTHING
        self._agreed, self._releasing = False, threading.RLock()
        self._timer: threading.Timer | None = None  # of the end of a hold
        self._applied = 0  # the last durable write that the buffer has
        self._failed: Exception | None = None
        self._own: dict[str, Callable[..., Any]] = {name: getattr(self, f"_{name}") for name in _OWN}
        try:
            self._make = partial(built, number, recipe)
            self._shard = Shard(number, count, self._make)
            self._own |= {"facts": self.facts, "share": self._shard.share, "draw": self._shard.draw}
            self._log = None if recovery_dir is None else WriteLog(Path(recovery_dir) / f"shard-{number}")
            self._recover()
            coordinator.restart.remote()
        except Exception as error:
            self._failed = error

    def facts(self) -> Facts:
        """Of this process. The error of its construction where that failed."""
        if self._failed is not None:
            raise self._failed
        buffer = self._shard.buffer
        return Facts(
            self._life,
            self._origin,
            self._origin.startswith(_NOTHING),
            os.getpid(),
            buffer.storage.max_size,
            isinstance(buffer.sampler, SliceSampler),
            buffer.batch_size,
            buffer.dim_extend,
        )

    def run(self, life: str, name: str, asked: Wire) -> Wire:
        """Call a method of the shard or, by name, of its buffer. RestartedError for a client that knows another process."""
        if life != self._life or self._failed is not None:
            raise RestartedError(self.facts())
        buffer = self._shard.buffer
        # A tensor storage copies what it is given; lists keep it, and transforms may change it.
        args, kwargs = asked.value(copy=not isinstance(buffer.storage, TensorStorage) or len(buffer.transform) > 0)
        return Wire.of(self._call(name, args, kwargs))

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        own = self._own.get(name)
        return self._shard.call(name, args, kwargs) if own is None else own(*args, **kwargs)

    # ------------------------------------------------------------------ writes

    def _write(self, name: str, args: Any, kwargs: Any, durable: bool) -> Any:
        """`add` or `extend`; a durable one is on disk when this returns."""
        if not self._agreed:
            self._agree(args[0], name == "extend")
        if not durable:
            return self._shard.call(name, args, kwargs)
        if self._log is None:
            raise ValueError('ack="durable" needs recovery_dir, a folder on a disk that outlives the process')
        self._log.append((name, args, kwargs))
        try:
            index = self._shard.call(name, args, kwargs)  # waits where a checkpoint is made, which lacks this write
        except BaseException:
            self._log.drop_last()
            raise
        self._applied = self._log.last
        return index

    def _agree(self, data: Any, many: bool) -> None:
        """ValueError where other shards hold items of another layout. Lists of items take any."""
        storage = self._shard.buffer.storage
        if not isinstance(storage, TensorStorage) or len(self._shard.buffer.transform):
            return
        if many and isinstance(data, list):
            data, many = data[0], False
        try:
            layout = Layout.of(data, storage.ndim - (not many))
        except (TypeError, ValueError, RuntimeError):
            return  # the storage says what is wrong with it
        found = sorted((spec.path, str(spec.dtype), tuple(spec.shape)) for spec in layout.leaves)
        ray.get(self._coordinator.agree.remote(self._number, found), timeout=60)
        self._agreed = True

    # ------------------------------------------------------------------ checkpoints

    def _hold(self, seconds: float) -> None:
        """No write and no draw from now on, for so long at most until it is saved."""
        self._shard.hold(seconds)
        self._timer = threading.Timer(seconds, self._release)
        self._timer.daemon = True
        self._timer.start()

    def _release(self) -> None:
        with self._releasing:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._shard.release()

    def _save(self, path: str) -> int:
        """Save the held shard, and let it go. Returns the number of the last durable write that is in the checkpoint."""
        with self._releasing:
            if self._timer is None:
                raise RemoteError(f"shard {self._number} was held for too long before it could be saved")
            self._timer.cancel()
        try:
            self._shard.buffer.dumps(path)
            return self._applied
        finally:
            self._release()

    def _look(self, probe: str) -> None:
        """FileNotFoundError where this machine does not see a file."""
        if not Path(probe).exists():
            node = ray.util.get_node_ip_address()
            raise FileNotFoundError(f"{probe} is not visible to shard {self._number} on {node}: name a shared folder")

    def _verify(self, path: str) -> None:
        """CheckpointCorrupt for a damaged checkpoint."""
        load(path, lambda source: None)

    def _load(self, path: str) -> None:
        self._shard.buffer.loads(path)

    def _commit(self, path: str | None, cut: int | None = None) -> None:
        """A restart goes on from this checkpoint, None for nothing, and the durable writes after `cut`, or after now."""
        if self._log is not None:
            self._log.committed(path, self._applied if cut is None else cut)

    def _rows(self, path: str) -> tuple[Any, Any] | None:
        """The rows of a saved buffer in the order of writing, and their priorities, None without; None for no rows."""
        buffer = self._make()
        buffer.loads(path)
        storage, writer = buffer.storage, buffer.writer
        if not len(storage):
            return None
        if storage.ndim > 1 or not isinstance(writer, RoundRobinWriter):
            raise TypeError("only rows of one item dim and a round-robin writer go into another number of shards")
        first = writer.state_dict()["_cursor"] if len(storage) == storage.max_size else 0
        order = torch.arange(len(storage)).roll(-int(first))
        priorities = buffer.sampler.priorities[order] if isinstance(buffer.sampler, PrioritizedSampler) else None
        return storage.get(order), priorities

    def _fill(self, rows: Any, priorities: Any) -> None:
        """Write rows as they were stored, past the transforms."""
        buffer = self._shard.buffer
        plain = ReplayBuffer(storage=buffer.storage, writer=buffer.writer)
        index = plain.extend(rows)
        buffer.storage.detach(plain)
        if priorities is not None:
            buffer.update_priority(index, priorities)

    def _sample(self, *args: Any) -> Any:
        return self._shard.buffer.sample(*args)

    def _next(self) -> Any:
        return self._shard.buffer.next()

    def _set_rng(self, generator: torch.Generator | None) -> None:
        self._shard.buffer.set_rng(generator)

    def _set_storage(self, storage: Any, collate_fn: Any = None) -> None:
        self._shard.call("set_storage", (self._component("storage", storage), collate_fn))
        self._agreed = False

    def _set_sampler(self, sampler: Any) -> None:
        self._shard.call("set_sampler", (self._component("sampler", sampler),))

    def _set_writer(self, writer: Any) -> None:
        self._shard.call("set_writer", (self._component("writer", writer),))

    def _component(self, name: str, given: Any) -> Any:
        """A component, or what its constructor makes."""
        return given if isinstance(given, _KINDS[name]) else for_shard(given, self._number)()

    def _recover(self) -> None:
        """Go on from the latest checkpoint and the durable writes after it."""
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        if restarted:
            for each in ray.get(self._coordinator.changes.remote(), timeout=60):
                self._call(*each.value(copy=True))
        path = None if self._log is None else self._log.checkpoint
        if self._log is None and restarted:
            latest = ray.get(self._coordinator.latest.remote(), timeout=60)
            path = None if latest is None else latest[self._number]
        if path is not None:
            try:
                self._shard.buffer.loads(path)
                self._origin = f"the checkpoint {path}"
            except (OSError, CheckpointError) as error:
                if self._log is not None:
                    raise
                self._origin = f"{_NOTHING}, for its checkpoint cannot be read ({error})"
        if self._log is not None:
            self._log.replay(lambda name, *given: self._shard.call(name, *given))
            self._applied = self._log.last
            self._origin = f"its durable writes{'' if path is None else f' and the checkpoint {path}'}"


def built(number: int, recipe: bytes) -> ReplayBuffer:
    """The buffer of a shard. Constructors with a parameter `shard` are given its number."""
    kind, args, kwargs = pickle.loads(recipe)
    for name in (*_KINDS, "transform_factory"):
        if callable(kwargs.get(name)):
            kwargs[name] = for_shard(kwargs[name], number)
    if callable(kwargs.get("storage")):
        kwargs["storage"] = kwargs["storage"]()  # prioritized buffers need to know its size
    made: ReplayBuffer = kind(*args, **kwargs)
    return made


def for_shard(constructor: Callable[..., Any], number: int) -> Callable[..., Any]:
    """A constructor that gets the number of its shard if it has a parameter `shard`."""
    try:
        takes = "shard" in inspect.signature(constructor).parameters
    except ValueError:  # of C code
        takes = False
    return partial(constructor, shard=number) if takes else constructor

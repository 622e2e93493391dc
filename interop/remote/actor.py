"""The process of one shard: what Ray runs around a `Shard`."""

import inspect
import pickle
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import torch

from fbuf.checkpoint import CheckpointError, load
from interop.buffers import ReplayBuffer
from interop.data.layout import Layout
from interop.remote.errors import RemoteTimeoutError
from interop.remote.shard import Shard
from interop.remote.shards import NOTHING, Facts, RestartedError, coordinated
from interop.remote.wire import Wire
from interop.remote.write_log import WriteLog
from interop.samplers import PrioritizedSampler, Sampler, SliceSampler
from interop.storages import Storage, TensorStorage
from interop.writers import RoundRobinWriter, Writer

_RAISES = ("write", "share", "draw", "update_priority", "update_tensordict_priority", "mark_update")
_COMPONENTS = ("storage", "sampler", "writer")


class ShardActor:
    """One shard in a process of its own.

    Ray runs writes in one thread, in the order of each client; draws in a second; what controls the shard in others. A
    process that restarts loads the latest checkpoint and then the durable writes after it. An error of that is raised by
    every call.
    """

    def __init__(self, number: int, count: int, recipe: bytes, coordinator: str, recovery_dir: str | None) -> None:
        self._number, self._life, self._origin = number, secrets.token_hex(8), NOTHING
        self._agreed = False  # whether the layout of items is that of the other shards
        self._applied = 0  # the last durable write that the buffer has
        self._failed: Exception | None = None
        try:
            self._coordinate = partial(coordinated, ray.get_actor(coordinator), 60.0)
            self._make = partial(built, number, recipe)
            self._shard = shard = Shard(number, count, self._make)
            own = (self.facts, self.write, self.save, self.look, self.verify, self.commit, self.rows, self.fill)
            self._methods: dict[str, Callable[..., Any]] = {
                each.__name__: each for each in (*own, shard.share, shard.draw)
            }
            self._methods |= {f"set_{name}": partial(self._exchange, name) for name in _COMPONENTS}
            self._methods |= {
                each.__name__: each for each in (shard.buffer.sample, shard.buffer.next, shard.buffer.set_rng)
            }
            self._log = None if recovery_dir is None else WriteLog.of_shard(Path(recovery_dir), number, count)
            self._recover()
            self._coordinate("restart")
        except Exception as error:
            self._failed = error

    def facts(self) -> Facts:
        """The process id. Raises the error of the construction, if that failed."""
        if self._failed is not None:
            raise self._failed
        buffer = self._shard.buffer
        storage, slices = buffer.storage, isinstance(buffer.sampler, SliceSampler)
        built = (storage.max_size, storage.ndim, slices, self._log is not None, buffer.batch_size, buffer.dim_extend)
        return Facts(self._life, self._origin, *built)

    def run(self, life: str, name: str, highest: float | None, given: Wire) -> tuple[Wire, float | None]:
        """Call a method of the shard or, by name, of its buffer. RestartedError for a client that knows another process.

        `highest` is the highest priority that the client has seen; that of this shard is returned along with the result.
        """
        if life != self._life or self._failed is not None:
            raise RestartedError(self.facts())
        buffer = self._shard.buffer
        # A tensor storage copies what it is given; lists keep it, and transforms may change it.
        args, kwargs = given.value(copy=not isinstance(buffer.storage, TensorStorage) or len(buffer.transform) > 0)
        if name in _RAISES:
            self._shard.raise_default_priority(highest)
        return Wire.of(self._call(name, args, kwargs)), self._shard.highest

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        method = self._methods.get(name)
        return self._shard.call(name, args, kwargs) if method is None else method(*args, **kwargs)

    def write(self, name: str, args: Any, kwargs: Any, durable: bool) -> Any:
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
        try:
            if many and isinstance(data, list):
                data, many = data[0], False
            layout = Layout.of(data, storage.ndim - (not many))
        except (TypeError, ValueError, RuntimeError, IndexError):
            return  # the storage says what is wrong with it
        found = sorted((spec.path, str(spec.dtype), tuple(spec.shape)) for spec in layout.leaves)
        self._coordinate("agree", self._number, found)
        self._agreed = True

    def save(self, path: str, token: str, seconds: float) -> int:
        """Save the shard as it is at a moment at which all shards are held. Returns the last durable write that it has.

        RemoteTimeoutError if this takes more than `seconds`. The shard is blocked until this ends.
        """
        until = time.monotonic() + seconds
        self._shard.hold(seconds)
        try:
            while not self._coordinate("hold", token, self._number):
                if time.monotonic() > until:
                    raise RemoteTimeoutError(f"not all shards were free for a checkpoint within {seconds} s")
                time.sleep(0.01)
            self._shard.buffer.dumps(path)
            return self._applied
        finally:
            self._shard.release()

    def look(self, probe: str) -> None:
        """FileNotFoundError where this machine does not see a file."""
        if not Path(probe).exists():
            node = ray.util.get_node_ip_address()
            raise FileNotFoundError(f"{probe} is not visible to shard {self._number} on {node}: name a shared folder")

    def verify(self, path: str) -> None:
        """CheckpointCorrupt for a damaged checkpoint."""
        load(path, lambda source: None)

    def commit(self, path: str | None, cut: int | None = None) -> None:
        """A restart goes on from this checkpoint, None for nothing, and the durable writes after `cut`, or after now."""
        if self._log is not None:
            self._log.committed(path, self._applied if cut is None else cut)

    def rows(self, path: str) -> tuple[Any, Any] | None:
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

    def fill(self, rows: Any, priorities: Any) -> None:
        """Write rows as they were stored, past the transforms."""
        buffer = self._shard.buffer
        plain = ReplayBuffer(storage=buffer.storage, writer=buffer.writer)
        index = plain.extend(rows)
        buffer.storage.detach(plain)
        if priorities is not None:
            buffer.update_priority(index, priorities)

    def _exchange(self, kind: str, *args: Any, **kwargs: Any) -> None:
        """`set_storage`, `set_sampler` or `set_writer`, with a component or its constructor."""
        name = f"set_{kind}"
        given = inspect.signature(getattr(self._shard.buffer, name)).bind(*args, **kwargs).arguments
        if not isinstance(given[kind], Storage | Sampler | Writer):
            given[kind] = for_shard(given[kind], self._number)()
        self._shard.call(name, tuple(given.values()))
        self._agreed = self._agreed and kind != "storage"

    def _recover(self) -> None:
        """Go on from the latest checkpoint and the durable writes after it."""
        restarted, path = ray.get_runtime_context().was_current_actor_reconstructed, None
        if restarted:
            for name, given in self._coordinate("changes"):
                self._call(name, *given.value(copy=True))
        if self._log is not None:
            path = self._log.checkpoint
            self._origin = f"its durable writes{'' if path is None else f' and the checkpoint {path}'}"
        elif restarted and (path := self._coordinate("latest", self._number)) is not None:
            self._origin = f"the checkpoint {path}"
        if path is not None:
            try:
                self._shard.buffer.loads(path)
            except (OSError, CheckpointError) as error:
                if self._log is not None:
                    raise
                self._origin = f"{NOTHING}, for its checkpoint cannot be read ({error})"
        if self._log is not None:
            self._log.replay(self._shard.call)
            self._applied = self._log.last


def built(number: int, recipe: bytes) -> ReplayBuffer:
    """The buffer of a shard. Constructors with a parameter `shard` are given its number."""
    kind, args, kwargs = pickle.loads(recipe)
    for name in (*_COMPONENTS, "transform_factory"):
        if callable(kwargs.get(name)):
            kwargs[name] = for_shard(kwargs[name], number)
    if callable(kwargs.get("storage")):
        kwargs["storage"] = kwargs["storage"]()  # prioritized buffers need to know its size
    return cast(ReplayBuffer, kind(*args, **kwargs))


def for_shard(constructor: Callable[..., Any], number: int) -> Callable[..., Any]:
    """A constructor that gets the number of its shard if it has a parameter `shard`."""
    try:
        takes = "shard" in inspect.signature(constructor).parameters
    except ValueError:  # of C code
        takes = False
    return partial(constructor, shard=number) if takes else constructor

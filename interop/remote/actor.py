"""The Ray actor that runs one `Shard`."""

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
    """One shard in its own process.

    Ray runs writes in one thread, in the order of each client; draws in a second; control calls in others. After a
    restart, the process loads the latest checkpoint and then replays later durable writes. If that fails, every call
    raises the error.
    """

    def __init__(self, number: int, count: int, recipe: bytes, coordinator: str, recovery_dir: str | None) -> None:
        self._number, self._life, self._origin = number, secrets.token_hex(8), NOTHING
        self._agreed = False  # whether the item layout was agreed with the other shards
        self._applied = 0  # number of the last durable write applied to the buffer
        self._failed: Exception | None = None
        try:
            self._coordinate = partial(coordinated, ray.get_actor(coordinator), 60.0)
            self._make = partial(built, number, recipe)
            self._shard = shard = Shard(number, count, self._make)
            own = (
                self.facts,
                self.write,
                self.save,
                self.look,
                self.verify,
                self.commit,
                self.rows,
                self.fill,
                self.written,
            )
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
        """The facts of this process. Raises the error of the construction, if that failed."""
        if self._failed is not None:
            raise self._failed
        buffer = self._shard.buffer
        storage, slices = buffer.storage, isinstance(buffer.sampler, SliceSampler)
        built = (storage.max_size, storage.ndim, slices, self._log is not None, buffer.batch_size, buffer.dim_extend)
        return Facts(self._life, self._origin, *built)

    def run(self, life: str, name: str, highest: float | None, given: Wire) -> tuple[Wire, float | None]:
        """Call a method of the shard, or of its buffer. RestartedError if the client knows another process.

        `highest` is the highest priority known to the client. Returns the result and the highest priority of this shard.
        """
        if life != self._life or self._failed is not None:
            raise RestartedError(self.facts())
        buffer = self._shard.buffer
        # Tensor storages copy their input. List storages keep it, and transforms may modify it.
        args, kwargs = given.value(copy=not isinstance(buffer.storage, TensorStorage) or len(buffer.transform) > 0)
        if name in _RAISES:
            self._shard.raise_default_priority(highest)
        return Wire.of(self._call(name, args, kwargs)), self._shard.highest

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        method = self._methods.get(name)
        return self._shard.call(name, args, kwargs) if method is None else method(*args, **kwargs)

    def write(self, name: str, args: Any, kwargs: Any, durable: bool) -> Any:
        """Run `add` or `extend`. A durable write is on disk when this returns."""
        if not self._agreed:
            self._agree(args[0], name == "extend")
        if not durable:
            return self._shard.call(name, args, kwargs)
        if self._log is None:
            raise ValueError('ack="durable" needs recovery_dir, a folder on a disk that outlives the process')
        self._log.append((name, args, kwargs))
        try:
            index = self._shard.call(name, args, kwargs)  # waits during a checkpoint, which excludes this write
        except BaseException:
            self._log.drop_last()
            raise
        self._applied = self._log.last
        return index

    def _agree(self, data: Any, many: bool) -> None:
        """ValueError if other shards hold items of another layout. List storages accept any layout."""
        storage = self._shard.buffer.storage
        if not isinstance(storage, TensorStorage) or len(self._shard.buffer.transform):
            return
        try:
            if many and isinstance(data, list):
                data, many = data[0], False
            layout = Layout.of(data, storage.ndim - (not many))
        except (TypeError, ValueError, RuntimeError, IndexError):
            return  # the storage raises a better error
        found = sorted((spec.path, str(spec.dtype), tuple(spec.shape)) for spec in layout.leaves)
        self._coordinate("agree", self._number, found)
        self._agreed = True

    def save(self, path: str, token: str, seconds: float) -> int:
        """Save the shard at the moment at which all shards are held. Returns the number of its last durable write.

        RemoteTimeoutError after `seconds`. Blocks the shard until it returns.
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
        """FileNotFoundError if this machine does not see a file."""
        if not Path(probe).exists():
            node = ray.util.get_node_ip_address()
            raise FileNotFoundError(f"{probe} is not visible to shard {self._number} on {node}: name a shared folder")

    def verify(self, path: str) -> None:
        """CheckpointCorrupt for a damaged checkpoint."""
        load(path, lambda source: None)

    def commit(self, path: str | None, cut: int | None = None) -> None:
        """Set the restart point: a checkpoint (None: empty) and the durable writes after `cut`, by default after now."""
        if self._log is not None:
            self._log.committed(path, self._applied if cut is None else cut)

    def rows(self, path: str) -> tuple[Any, Any] | None:
        """The rows of a saved buffer in write order, and their priorities (None without); None for an empty buffer."""
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

    def written(self) -> int:
        """How many items were ever written."""
        buffer = self._shard.buffer
        return buffer.write_count * buffer.storage.contents.items_per_row

    def fill(self, rows: Any, priorities: Any) -> None:
        """Write stored rows, without transforms."""
        buffer = self._shard.buffer
        plain = ReplayBuffer(storage=buffer.storage, writer=buffer.writer)
        index = plain.extend(rows)
        buffer.storage.detach(plain)
        if priorities is not None:
            buffer.update_priority(index, priorities)

    def _exchange(self, kind: str, *args: Any, **kwargs: Any) -> None:
        """Run `set_storage`, `set_sampler` or `set_writer` with a component or its constructor."""
        name = f"set_{kind}"
        given = inspect.signature(getattr(self._shard.buffer, name)).bind(*args, **kwargs).arguments
        if not isinstance(given[kind], Storage | Sampler | Writer):
            given[kind] = for_shard(given[kind], self._number)()
        self._shard.call(name, tuple(given.values()))
        self._agreed = self._agreed and kind != "storage"

    def _recover(self) -> None:
        """Load the latest checkpoint and replay the durable writes after it."""
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
    """Build the buffer of a shard. Constructors with a parameter `shard` receive its number."""
    kind, args, kwargs = pickle.loads(recipe)
    for name in (*_COMPONENTS, "transform_factory"):
        if callable(kwargs.get(name)):
            kwargs[name] = for_shard(kwargs[name], number)
    if callable(kwargs.get("storage")):
        kwargs["storage"] = kwargs["storage"]()  # prioritized buffers need its size
    return cast(ReplayBuffer, kind(*args, **kwargs))


def for_shard(constructor: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Bind the shard number to a constructor that has a parameter `shard`."""
    try:
        takes = "shard" in inspect.signature(constructor).parameters
    except ValueError:  # a C function has no signature
        takes = False
    return partial(constructor, shard=number) if takes else constructor

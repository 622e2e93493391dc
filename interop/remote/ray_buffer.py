"""A replay buffer in Ray actors."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.looking import Description
from interop.buffers import ConditionalUpdateResult, ReplayBuffer
from interop.buffers.editing import as_key
from interop.buffers.rate_counts import refuse_endless
from interop.buffers.rate_limiter import RateLimiter
from interop.buffers.ray_actors import actor_options
from interop.buffers.tensordict_buffer import include
from interop.data import randomness
from interop.data.arguments import class_of, whole
from interop.data.by_item import column_of, rows_of
from interop.data.index import as_int, is_all
from interop.data.keys import no_priorities
from interop.data.pytrees import length_of
from interop.remote import cluster
from interop.remote.checkpoints import restore, save
from interop.remote.errors import RemoteError
from interop.remote.gathering import rows_at, together
from interop.remote.joining import joined, placed
from interop.remote.places import to_local
from interop.remote.rates import RemoteLimiter
from interop.remote.shards import Call, Shards, ray_library
from interop.remote.shares import allot, subkeys


@dataclass(frozen=True)
class Options:
    """The call options of a client. See `RayReplayBuffer`; `copy` is that of its `transport_options`.

    ValueError for an unknown value, TypeError if `prefetch` is no int.
    """

    totals: str
    ack: str
    timeout: float
    prefetch: int
    copy: bool

    def __post_init__(self) -> None:
        _one_of("totals", self.totals, ("exact", "latest"))
        _one_of("ack", self.ack, ("received", "durable"))
        object.__setattr__(self, "prefetch", whole("prefetch", self.prefetch, least=0))
        if not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got {self.timeout}")


def _changes_all_shards(name: str, returns_self: bool = False) -> Callable[..., Any]:
    """Make a method that changes the configuration of all shards."""

    def everywhere(self: "RayReplayBuffer", *args: Any, **kwargs: Any) -> Any:
        self._drop_prefetched()
        self._shards.change(name, args, kwargs)
        self._begin_epoch(rows=name == "set_storage", priorities=name == "set_sampler")
        if name == "set_storage" and self._limiter is not None:
            self._shards.begin_rates(None)
        return self if returns_self else None

    everywhere.__name__ = name
    everywhere.__doc__ = f"`ReplayBuffer.{name}` in each shard. Returns {'this buffer' if returns_self else 'nothing'}."
    return everywhere


def _unless_single(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method for several shards: a single shard is called directly."""

    @wraps(method)
    def call(self: "RayReplayBuffer", *args: Any, **kwargs: Any) -> Any:
        if self._count > 1:
            return method(self, *args, **kwargs)
        return self._shards.one(0, method.__name__, *args, **kwargs)

    return call


class RayReplayBuffer:
    """A replay buffer with its rows in one or several Ray actors, the *shards*. Has the methods of `ReplayBuffer`.

    A write goes to one shard and does not wait for the others. Draws and updates follow the distribution of a single
    buffer with all rows. The index of a row is its slot plus its shard number times the capacity of a shard. A batch from
    one shard is read from Ray's object store without a copy: do not write to its tensors.

    A call that exceeds `timeout` seconds raises `RemoteTimeoutError`. A dead shard restarts from the latest checkpoint.
    Until then its calls raise `ShardLostError`, and so does the first later call of each client if rows were lost. Warnings
    of a shard go to the log of its process. `set_storage`, `set_sampler` and `set_writer` return None: the replaced
    component is dropped.

    Args:
        *args: arguments of `replay_buffer_cls`.
        replay_buffer_cls: the class of each shard.
        ray_init_config: arguments of `ray.init`, called if Ray is not running.
        remote_config: options of the actors; by default one CPU, 2 GiB and, with CUDA, a fifth of a GPU. Without a
            reserved GPU, tensors are moved to the CPU before they are sent.
        transport: "auto" or "ray": Ray's object store.
        transport_options: {"copy": True} copies batches, so that they are writable.
        delayed_init: start the shards at the first use.
        num_shards: the number of actors. Each has the full capacity of `storage`.
        totals: "exact" queries the shards' totals before each draw; "latest" uses those of their last replies, for one
            round trip per draw. Importance weights use the actual draw probabilities in both cases.
        ack: "received": a write returns when the shard has the rows; "durable": when they are also on disk.
        recovery_dir: a folder, on a disk that outlives the actors, for durable writes and the path of the latest
            checkpoint. A new buffer on the folder of an earlier one restores its rows.
        timeout: the time limit of calls in seconds, except those that read or write checkpoints.
        limiter: keeps the writes and the draws of all clients in step: see `RateLimiter`. Excludes `prefetch`. The attribute
            `limiter` has its numbers.
        prefetch: the number of batches that a thread draws ahead. They show the buffer at the time of their draw. `empty`,
            `loads` and `set_*` drop them, writes do not.
        **kwargs: arguments of `replay_buffer_cls`. Pass storage, sampler and writer as constructors, and transforms by
            `transform_factory`. A constructor with a parameter `shard` receives the number of the shard.

    Raises:
        RuntimeError: ray is not installed.
        TypeError, ValueError: see `interop.remote.cluster.recipe_of` and `Options`.
        RemoteTimeoutError: the cluster has no room for the actors.
    """

    service_backend = "ray"
    transport_kind = "ray"

    def __init__(
        self,
        *args: Any,
        replay_buffer_cls: type[ReplayBuffer] = ReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        transport: str = "auto",
        transport_options: Mapping[str, Any] | None = None,
        delayed_init: bool = False,
        num_shards: int = 1,
        totals: Literal["exact", "latest"] = "exact",
        ack: Literal["received", "durable"] = "received",
        recovery_dir: str | Path | None = None,
        timeout: float = 60.0,
        prefetch: int | None = None,
        limiter: RateLimiter | None = None,
        **kwargs: Any,
    ) -> None:
        ray_library()
        _refuse_other_services(kwargs.pop("service_backend", None), kwargs, transport)
        for name in transport_options or {}:
            _one_of("transport_options", name, ("copy",))
        if ack == "durable" and recovery_dir is None:
            raise ValueError('ack="durable" needs recovery_dir, a folder on a disk that outlives the processes')
        if limiter is not None and not isinstance(limiter, RateLimiter):
            raise TypeError(f"limiter must be a RateLimiter, got {class_of(limiter)}")
        count = whole("num_shards", num_shards)
        options = Options(totals, ack, timeout, prefetch or 0, bool((transport_options or {}).get("copy")))
        recipe = cluster.recipe_of(replay_buffer_cls, args, kwargs, count)
        folder = None if recovery_dir is None else str(Path(recovery_dir).absolute())
        self._start: Callable[[], Shards] | None = partial(
            cluster.started,
            recipe,
            count,
            actor_options(remote_config),
            folder,
            timeout,
            ray_init_config,
            None if limiter is None else limiter.rule,
        )
        self._made: Shards | None = None
        self._owns = True
        self._begin(count, options, kwargs.get("priority_key", "td_error"), home=0, limiter=limiter)
        if not delayed_init:
            self.start()

    def _begin(
        self, count: int, options: Options, priority_key: NestedKey | None, home: int, limiter: RateLimiter | None
    ) -> None:
        if limiter is not None and options.prefetch:
            raise ValueError("prefetch and limiter exclude each other: batches are drawn ahead of what is asked for")
        self._limiter = limiter
        self._limited: RemoteLimiter | None = None
        self._count, self._options, self._priority_key = count, options, priority_key
        self._home = home  # the shard for all slice data of this client, and for its first other rows
        self._writes, self._clients = itertools.count(home), itertools.count()
        self._lock = threading.RLock()
        self._rng: torch.Generator | None = None
        self._shares: dict[int, list[Any]] = {}  # batch size -> last shares
        self._ran_out = False
        self._ahead: deque[Future[Any]] = deque()
        self._ahead_of: Any = None
        self._pool = ThreadPoolExecutor(1, "prefetch")  # one thread keeps the order of an epoch

    @property
    def _shards(self) -> Shards:
        with self._lock:
            if self._made is None:
                if self._start is None:
                    raise RuntimeError("the buffer was shut down: build another one")
                made = self._start()
                try:
                    self._refuse_endless(made)
                except BaseException:
                    made.kill()
                    raise
                self._made = made.client(self._options.timeout, self._options.copy)
            return self._made

    def _refuse_endless(self, made: Shards) -> None:
        """ValueError for a limiter under which calls could wait without end."""
        if self._limiter is None:
            return
        rule = self._limiter.rule
        room = sum(each.rows for each in made.facts)
        if rule.min_size > room:
            raise ValueError(f"min_size={rule.min_size} items are never stored: the shards have room for {room}")
        refuse_endless(rule, 1, made.facts[0].batch_size or 1)

    @property
    def limiter(self) -> RemoteLimiter | None:
        """The limiter of all clients; None without one."""
        if self._limiter is not None and self._limited is None:
            self._limited = RemoteLimiter(self._limiter, self._shards)
        return self._limited

    def start(self) -> Self:
        """Start the shards if they are not running. RuntimeError after `shutdown`."""
        self._shards  # noqa: B018
        return self

    @property
    def is_alive(self) -> bool:
        """Whether all shards answer."""
        return self._made is not None and self._made.are_alive()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the shards; rows outside of checkpoints are lost. Idempotent. RuntimeError on a client."""
        if not self._owns:
            raise RuntimeError("a client cannot shut the buffer down: call shutdown() of the buffer itself")
        self._drop_prefetched()
        with self._lock:
            made, self._made, self._start = self._made, None, None
        if made is not None:
            made.kill()

    close = shutdown

    def client(self, **options: Any) -> "RayReplayBuffer":
        """A picklable handle for another thread, task or actor. It cannot shut the buffer down.

        Args:
            **options: overrides of this buffer's `totals`, `ack`, `timeout`, `prefetch` or `copy`.
        """
        home = next(self._clients) % self._count
        made = type(self).__new__(type(self))
        made.__setstate__(
            (self._shards, self._count, replace(self._options, **options), self._priority_key, home, self._limiter)
        )
        return made

    def clients(self, n: int, **options: Any) -> list["RayReplayBuffer"]:
        """`n` handles as by `client`. Their first writes go to different shards."""
        return [self.client(**options) for _ in range(whole("n", n, least=0))]

    def __getstate__(self) -> tuple[Any, ...]:
        return self._shards, self._count, self._options, self._priority_key, self._home, self._limiter

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        shards, count, options, priority_key, home, limiter = state
        self._start, self._owns = None, False
        self._made = shards.client(options.timeout, options.copy)
        self._begin(count, options, priority_key, home, limiter)

    def add(self, data: Any, *, ack: str | None = None, shard: int | None = None) -> Any:
        """Write one item to one shard. Returns its index. See `extend`."""
        return self._write("add", data, {}, ack, shard)

    def extend(
        self, data: Any, *, update_priority: bool | None = None, ack: str | None = None, shard: int | None = None
    ) -> Tensor:
        """Write a batch to one shard, by default in rotation; slice data always to the same shard. Returns the indices.

        With `ack="durable"` the batch is on disk when this returns. After `ShardLostError` or `RemoteTimeoutError` the
        batch may have been written.
        """
        kwargs = {} if update_priority is None else {"update_priority": update_priority}
        return cast(Tensor, self._write("extend", data, kwargs, ack, shard))

    def _write(self, name: str, data: Any, kwargs: dict[str, Any], ack: str | None, shard: int | None) -> Any:
        ack = self._options.ack if ack is None else ack
        _one_of("ack", ack, ("received", "durable"))
        shards = self._shards
        if shard is None:
            shard = self._home if shards.facts[0].slices else next(self._writes) % self._count
        shard = whole("shard", shard, least=0)
        if shard >= self._count:
            raise ValueError(f"shard must be below {self._count}, got {shard}")
        if self.limiter is None:
            return shards.one(shard, "write", name, (data,), kwargs, ack == "durable")
        ndim = shards.facts[0].ndim
        with self.limiter.admitted("extend", _items_in(data, name == "extend", ndim), shard) as admitted:
            index = shards.one(shard, "write", name, (data,), kwargs, ack == "durable")
            admitted.items = _items_at(index)
            return index

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of items. `index` is the index in the info of a sample."""
        self._call_by_shard("update_priority", index, priority=priority)

    def mark_update(self, index: Any) -> None:
        """Set the priorities of items to the sampler's default."""
        self._call_by_shard("mark_update", index)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's items to its entry `priority_key`. KeyError if it has none."""
        sent = data.select("index", "anchor_index", "validity_mask", self._priority_key, strict=False)
        index, is_empty = column_of(sent, "index"), 0 in sent.batch_size
        if column_of(sent, self._priority_key) is None and index is not None and not is_empty:
            try:
                self._shards.one(0, "update_tensordict_priority", sent)  # without priorities there is no effect
            except KeyError:
                raise no_priorities(self._priority_key, data) from None
            return
        if self._count == 1 or index is None or is_empty:  # the buffer raises the error for a missing index
            self._shards.one(0, "update_tensordict_priority", sent)
            return
        rows = rows_of(index, ndim := self._shards.facts[0].ndim)
        if not sent.ndim:
            sent, rows = sent.unsqueeze(0), rows.unsqueeze(0)
        if ndim == 1:
            rows = rows.reshape(len(sent), -1)[:, 0]
        self._call_by_shard("update_tensordict_priority", rows, data=sent)

    @_unless_single
    def update_if_present(
        self, *, index: Any, generation: Any, patch: Any, version: Any = None, **options: Any
    ) -> ConditionalUpdateResult:
        """Run `ReplayBuffer.update_if_present` in the shard of each item."""
        given = {"generation": generation, "patch": patch} | ({} if version is None else {"version": version})
        updated, rejected = torch.zeros(2, len(torch.as_tensor(generation).reshape(-1)), dtype=torch.bool)
        for at, found in self._call_by_shard("update_if_present", index, **given, **options):
            updated[at] = found.updated
            if found.version_rejected is not None:
                rejected[at] = found.version_rejected
        return ConditionalUpdateResult(updated, None if version is None else rejected)

    def _call_by_shard(self, name: str, index: Any, **given: Any) -> list[tuple[Any, Any]]:
        """Call a method in each shard with items of the index, with their rows of `given`.

        Returns, by shard, the positions in the index and the result. An empty index is sent to the first shard.
        """
        shards = self._shards
        if self._count == 1:  # the buffer raises the errors for an invalid index
            return [(slice(None), shards.one(0, name, index=index, **given))]
        parts = to_local(index, self._count, shards.facts[0].rows)
        count = length_of(index if isinstance(index, tuple) else torch.atleast_1d(torch.as_tensor(index)))
        homes = [shard for shard, (at, _) in enumerate(parts) if at.numel()] or [0]
        calls: dict[int, Call] = {}
        for shard in homes:
            at, mine = parts[shard]
            kwargs = {"index": mine, **{key: rows_at(each, at, count) for key, each in given.items()}}
            if name == "update_tensordict_priority":  # it reads the index from the data
                include(kwargs["data"], {"index": kwargs.pop("index")}, apart=False)
            calls[shard] = (name, (), kwargs)
        return [(parts[shard][0], each) for shard, each in shards.some(calls).items()]

    append_transform = _changes_all_shards("append_transform", returns_self=True)
    insert_transform = _changes_all_shards("insert_transform", returns_self=True)
    register_save_hook = _changes_all_shards("register_save_hook")
    register_load_hook = _changes_all_shards("register_load_hook")
    set_storage = _changes_all_shards("set_storage")
    set_sampler = _changes_all_shards("set_sampler")
    set_writer = _changes_all_shards("set_writer")
    share = _changes_all_shards("share", returns_self=True)

    def empty(self) -> None:
        """Remove all rows. Restarting shards begin empty."""
        self._drop_prefetched()
        self._shards.all("empty")
        self._begin_epoch(rows=True)
        if self._limiter is not None:
            self._shards.begin_rates(0)

    def _begin_epoch(self, rows: bool, priorities: bool = True) -> None:
        """Begin a new epoch. With `rows`, drop the shards' checkpoints and durable writes as restart points."""
        self._shards.coordinate("restart")
        if rows or priorities:
            self._shards.highest = None
        if rows:
            self._shards.restart_from(None)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of this client's draws: one shard copies its state, several draw seeds from it."""
        self._drop_prefetched()
        self._shards.all("set_rng", generator)
        self._rng = generator

    def __len__(self) -> int:
        return sum(self._shards.all("__len__"))

    @_unless_single
    def __getitem__(self, index: Any) -> Any:
        """Rows by index of `sample`, or by slices and masks over the stored rows, in order of shards and slots."""
        if (key := as_key(index)) is not None:
            return self[:][key]
        if index is Ellipsis or is_all(index):
            filled = [n for n, size in enumerate(self._shards.all("__len__")) if size] or [0]
            found = self._shards.some(dict.fromkeys(filled, ("__getitem__", (slice(None),), {})))
            return together(list(found.values()))
        places = self._global_index(index)
        if isinstance(places, int):
            shard, slot = divmod(places, self._shards.facts[0].rows)
            return self._shards.one(shard, "__getitem__", slot)
        parts = self._call_by_shard("__getitem__", places)
        return placed([each for _, each in parts], [at.numpy() for at, _ in parts])

    @_unless_single
    def __setitem__(self, index: Any, value: Any) -> None:
        if as_key(index) is not None:
            sizes = self._shards.all("__len__")
            pieces = [rows_at(value, at, sum(sizes)) for at in torch.arange(sum(sizes)).split(sizes)]
            self._shards.some({n: ("__setitem__", (index, each), {}) for n, each in enumerate(pieces) if sizes[n]})
            return
        places = self._global_index(index)
        if isinstance(places, int):
            shard, slot = divmod(places, self._shards.facts[0].rows)
            self._shards.one(shard, "__setitem__", slot, value)
        else:
            self._call_by_shard("__setitem__", places, value=value)

    def _global_index(self, index: Any) -> Any:
        """Convert slices, masks and negative numbers over the stored rows to a global index."""
        number, rows = as_int(index), self._shards.facts[0].rows
        if number is not None and number >= rows * self._count:
            raise IndexError(f"index {number} is out of range: {self._count} shards have {rows * self._count} slots")
        is_mask = getattr(index, "dtype", None) in (torch.bool, np.dtype(bool))
        if not (is_mask or index is Ellipsis or isinstance(index, slice) or (number is not None and number < 0)):
            return number if number is not None else index if isinstance(index, tuple) else torch.as_tensor(index)
        filled = [torch.arange(size) + n * rows for n, size in enumerate(self._shards.all("__len__"))]
        chosen = torch.cat(filled)[index]
        return chosen if number is None else int(chosen)

    def stats(self) -> dict[str, int | float | bool]:
        """`ReplayBuffer.stats` over all shards, and their number "shards"."""
        each = self._shards.all("stats")
        found = {
            name: sum(one[name] for one in each) for name in ("size", "write_count", "capacity") if name in each[0]
        }
        found |= {"prefetch_queue_size": len(self._ahead), "initialized": all(one["initialized"] for one in each)}
        if self.limiter is not None:
            found |= self.limiter.stats()
        return found | {"utilization": found["size"] / found["capacity"], "shards": self._count}

    def describe(self, rows: int | None = None, *, reward: NestedKey | None = None) -> Description:
        """What the shards hold, and what each can draw: see `ReplayBuffer.describe`. `rows` are those of each shard."""
        shards = tuple(self._shards.all("describe", rows, reward=reward))
        return Description(type(self).__name__, {"shards": len(shards), "items stored": len(self)}, members=shards)

    @property
    def write_count(self) -> int:
        """The total number of rows written."""
        return sum(each["write_count"] for each in self._shards.all("stats"))

    @property
    def batch_size(self) -> int | None:
        """The batch size of `sample()` and of iteration."""
        return self._shards.facts[0].batch_size

    @property
    def dim_extend(self) -> int:
        """The dim of the data along which `extend` writes rows."""
        return self._shards.facts[0].dim_extend

    def state_dict(self) -> dict[str, Any]:
        """The state of a single shard, or of several under "shards"."""
        found = self._shards.all("state_dict")
        return found[0] if self._count == 1 else {"shards": found}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. ValueError for another number of shards."""
        states = [state_dict] if self._count == 1 else state_dict["shards"]
        if len(states) != self._count:
            raise ValueError(f"the state is of {len(states)} shards, the buffer has {self._count}")
        self._drop_prefetched()
        self._shards.some({shard: ("load_state_dict", (state,), {}) for shard, state in enumerate(states)})
        self._begin_epoch(rows=True)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch, and with `return_info` its info, from all shards as from a single buffer.

        RuntimeError without a batch size, or for an empty buffer.
        """
        found, self._ran_out = self._drawn("sample", batch_size, return_info)
        return found

    def next(self) -> Any:
        """The next batch of the current iteration. Returns None once at its end, then restarts."""
        if self._count == 1:
            return self._drawn("next")[0]
        if self.batch_size is None:
            raise RuntimeError("batch_size not specified: next() needs one in the constructor of the buffer")
        if self._ran_out:
            self._ran_out = False
            return None
        return self.sample()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches until the sampler runs out. RuntimeError without a batch size of the constructor."""
        self._ran_out = False
        while (batch := self.next()) is not None:
            yield batch

    def _drawn(self, *asked: Any) -> tuple[Any, bool]:
        """The next batch. With `prefetch`, pops one from the queue and requests another."""
        if self.limiter is not None:
            return self._limited_draw(self.limiter, asked)
        if not self._options.prefetch:
            return self._draw(*asked)()
        with self._lock:
            if self._ahead_of != asked:
                self._drop_prefetched()
                self._ahead_of = asked
            while len(self._ahead) <= self._options.prefetch:
                self._ahead.append(self._pool.submit(self._draw(*asked)))
            first = self._ahead.popleft()
        try:
            return first.result()
        except BaseException:
            self._drop_prefetched()
            raise

    def _limited_draw(self, limiter: RemoteLimiter, asked: tuple[Any, ...]) -> tuple[Any, bool]:
        size = asked[1] if len(asked) > 1 and asked[1] is not None else self.batch_size
        if size is None:
            return self._draw(*asked)()  # raises
        with limiter.admitted("sample", whole("batch_size", size)) as admitted:
            found = self._draw(*asked)()
            if found[0] is None:  # the end of an iteration
                admitted.items = 0
            return found

    def _draw(self, name: str, *asked: Any) -> Callable[[], tuple[Any, bool]]:
        """A callable for a draw, for any thread. Its random key is drawn now."""
        if self._count == 1:
            return lambda: (self._shards.one(0, name, *asked), False)
        batch_size, return_info = asked
        size = self.batch_size if batch_size is None else whole("batch_size", batch_size)
        if size is None:
            raise RuntimeError("batch_size not specified: give one to sample(), or to the constructor of the buffer")
        return partial(self._sampled, randomness.key(self._rng), size, return_info)

    def _drop_prefetched(self) -> None:
        with self._lock:
            self._shares.clear()
            while self._ahead:
                self._ahead.popleft().cancel()

    def _sampled(self, key: np.ndarray, size: int, return_info: bool) -> tuple[Any, bool]:
        """Draw a batch. Returns it, and whether it ends an epoch."""
        shards, exact = self._shards, self._options.totals == "exact"
        remembered = None if exact else self._shares.get(size)
        shares = remembered or shards.all("share", size)
        *keys, of_counts, of_order = subkeys(key, self._count + 2)
        units, parts, ran_out = size // shares[0].unit, [None] * self._count, False
        if shares[0].in_epochs:
            plan = shards.coordinate("plan", shares, units, of_counts)
            counts, parts, ran_out = plan.counts, plan.parts, plan.ran_out
        else:
            counts = allot(shares, units, of_counts)
        calls: dict[int, Call] = {
            n: ("draw", (int(counts[n]), size, keys[n], parts[n]), {}) for n in counts.nonzero()[0].tolist()
        }
        if not exact:  # shards that draw nothing report totals too, or these would never be updated
            calls |= {n: ("share", (size,), {}) for n in range(self._count) if n not in calls}
        try:
            found = shards.some(calls)
        except RuntimeError as error:
            if remembered is None or isinstance(error, RemoteError):
                raise
            self._shares.pop(size, None)  # a shard was emptied meanwhile
            return self._sampled(key, size, return_info)
        drawn = [found[n] if counts[n] else None for n in range(self._count)]
        if not (exact or shares[0].in_epochs):
            self._shares[size] = [found[n] if part is None else part.share for n, part in enumerate(drawn)]
        data, info = joined(shares, drawn, of_order)
        return ((data, info) if return_info else data), ran_out

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save all shards at one point in time, to a folder that is visible to every shard's machine.

        Blocks writes and draws until each shard is saved. The checkpoint is the new restart point of the shards. If the
        process is killed, the folder holds the previous checkpoint or the new one, complete. FileNotFoundError names a
        machine that does not see the folder.
        """
        save(self._shards, path)

    def loads(self, path: str | PathLike[str]) -> None:
        """Load a checkpoint of `dumps`: exactly, into an equal number of shards; row by row into another number.

        In the latter case, rows are redistributed in write order, with their priorities. Slice data is split into one
        consecutive piece per shard, which cuts trajectories at its ends. Other state of samplers and generators is reset. A
        checkpoint of a single buffer counts as one shard. All rows pass through the caller's memory, and restarting shards
        lack them until the next `dumps`.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointCorrupt: the checkpoint is damaged.
            CheckpointMismatch: the checkpoint is of another object, or has more rows than the shards can hold.
        """
        self._drop_prefetched()
        restore(self._shards, path)
        self._shards.highest = None

    dump = save = dumps
    load = loads


def _items_in(data: object, many: bool, ndim: int) -> int:
    """How many items data has, as far as the client sees it."""
    if not many:
        return 1
    if ndim > 1 and isinstance(data, TensorDictBase):
        return data.batch_size[:ndim].numel()
    return length_of(data)


def _items_at(index: object) -> int:
    """How many items were kept at the index that a write has returned."""
    if index is None:
        return 0
    if isinstance(index, Tensor) and index.ndim:
        return len(index) if index.ndim > 1 else int((index >= 0).sum())
    return 1


def _refuse_other_services(backend: object, kwargs: Mapping[str, object], transport: str) -> None:
    """ValueError for a backend or transport that is not that of Ray, TypeError for options in a dict."""
    if backend not in (None, "ray"):
        raise ValueError(
            f"a RayReplayBuffer is service_backend='ray', got {backend!r}: construct the class of its shards"
        )
    if "service_backend_options" in kwargs:
        raise TypeError("RayReplayBuffer takes ray_init_config, remote_config and its other options as arguments")
    if transport == "distributed":
        raise ValueError(
            "transport='distributed' (Gloo, NCCL) is not implemented: batches go through Ray's object store, with "
            "transport='auto' or 'ray'"
        )
    _one_of("transport", transport, ("auto", "ray"))


def _one_of(name: str, given: Any, known: Sequence[Any]) -> None:
    if given not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}")

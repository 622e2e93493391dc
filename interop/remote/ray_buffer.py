"""A replay buffer in processes of their own, on Ray."""

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from interop import randomness
from interop.buffers import ConditionalUpdateResult, ReplayBuffer
from interop.numbers import whole
from interop.pytrees import each_leaf
from interop.remote import cluster
from interop.remote.checkpoints import restore, save
from interop.remote.errors import RemoteError
from interop.remote.gathering import gathered
from interop.remote.joining import joined
from interop.remote.places import to_local
from interop.remote.shards import Call, Shards
from interop.remote.shares import allot, subkeys
from interop.remote.wire import Wire

_TRANSPORTS = ("auto", "ray")


def _everywhere(name: str, gives_self: bool = False) -> Callable[..., Any]:
    """A method that calls the same one of each shard."""

    def everywhere(self: "RayReplayBuffer", *args: Any, **kwargs: Any) -> Any:
        self._drop_ahead()
        call = (name, self._moved(args), self._moved(kwargs))
        self._shards.all(name, *call[1], **call[2])
        if name not in ("empty", "share"):
            self._shards.coordinate("change", Wire.of(call))
        self._shards.changed(name)
        return self if gives_self else None

    everywhere.__name__ = name
    everywhere.__doc__ = f"`ReplayBuffer.{name}` in each shard. Returns {'this buffer' if gives_self else 'nothing'}."
    return everywhere


class RayReplayBuffer:
    """A replay buffer whose rows lie in one or several Ray actors, its *shards*, with the methods of `ReplayBuffer`.

    Writes go to one shard, without waiting for the others. Draws and updates follow the law of one buffer that holds all
    rows. The index of a row is its slot plus the number of its shard times the capacity of a shard. Batches come through
    Ray's object store without a copy where one shard has the whole batch: their tensors must not be written to.

    Every call ends within `timeout` seconds, with `RemoteTimeoutError` at the latest. A shard whose process dies restarts
    from the latest checkpoint; calls of it meanwhile raise `ShardLostError`, and so does the first call of each client
    that finds rows lost. Warnings of a shard go to the log of its process. `set_storage`, `set_sampler` and `set_writer`
    return nothing: what they replace is dropped.

    Args:
        *args: of `replay_buffer_cls`.
        replay_buffer_cls: what each shard is.
        ray_init_config: arguments of `ray.init`, which is called where Ray does not run yet.
        remote_config: options of the actors; by default one CPU, 2 GiB and, where there is CUDA, a fifth of a GPU. Where
            no GPU is reserved, tensors go to the CPU before they are sent.
        transport: "auto" or "ray", Ray's object store.
        transport_options: {"copy": True} has batches copied, so that they can be written to.
        delayed_init: start the shards at the first use.
        num_shards: how many actors. Each has the whole capacity of `storage`.
        totals: "exact" asks the shards for their totals before each draw, "latest" uses those of their last answers. With
            "latest" a draw is one round trip; the importance weights are those of the probabilities that were used.
        ack: "received": a write has returned when the shard has the rows; "durable": when they are on disk as well.
        recovery_dir: a folder, on a disk that outlives the actors, for durable writes and the place of the latest
            checkpoint. A buffer that is built on the folder of an earlier one goes on with its rows.
        timeout: seconds, of every call.
        prefetch: how many batches are asked for ahead. Dropped by `empty`, `loads` and `set_*`, not by writes: they show
            the buffer as it was when they were asked for.
        **kwargs: of `replay_buffer_cls`. Storage, sampler and writer as constructors, transforms by `transform_factory`;
            where these have a parameter `shard` it gets the number of the shard.

    Raises:
        RuntimeError: ray is not installed.
        TypeError, ValueError: see `interop.remote.cluster.recipe_of`; a transport, `totals` or `ack` that is not known.
        RemoteTimeoutError: the cluster has no room for the actors.
    """

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
        **kwargs: Any,
    ) -> None:
        cluster.ray_library()
        _one_of("transport", transport, _TRANSPORTS)
        _one_of("totals", totals, ("exact", "latest"))
        _one_of("ack", ack, ("received", "durable"))
        if unknown := set(transport_options or ()) - {"copy"}:
            raise ValueError(f"transport_options {sorted(unknown)} are not known, only 'copy'")
        if num_shards < 1 or timeout <= 0 or (prefetch or 0) < 0:
            raise ValueError(
                "num_shards must be at least 1, timeout more than 0 and prefetch at least 0, "
                f"got {num_shards}, {timeout} and {prefetch}"
            )
        if ack == "durable" and recovery_dir is None:
            raise ValueError('ack="durable" needs recovery_dir, a folder on a disk that outlives the processes')
        options = cluster.options_of(remote_config)
        recipe = cluster.recipe_of(replay_buffer_cls, args, kwargs, num_shards)
        folder = None if recovery_dir is None else str(Path(recovery_dir).absolute())
        start = partial(cluster.started, recipe, num_shards, options, folder, timeout, ray_init_config)
        self._start: Callable[[], Shards] | None = lambda: Shards(
            start(), timeout, copy=bool((transport_options or {}).get("copy"))
        )
        self._made: Shards | None = None
        self._owns, self._on_cpu = True, not options.get("num_gpus")
        self._exact, self._durable, self._prefetch = totals == "exact", ack == "durable", prefetch or 0
        self._count = num_shards
        self._priority_key = kwargs.get("priority_key", "td_error")
        self._begin(home=0)
        if not delayed_init:
            self.start()

    def _begin(self, home: int) -> None:
        """What each client has of its own."""
        self._lock = threading.RLock()
        self._home, self._turns = home, itertools.count(home)  # the shard of streams, and that of the next write
        self._homes = itertools.count()  # of its clients
        self._rng: torch.Generator | None = None
        self._shares: dict[int, list[Any]] = {}  # the last ones, by size of the batch
        self._ran_out = False
        self._ahead: deque[Future[Any]] = deque()
        self._ahead_of: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._name = secrets.token_hex(8)

    # ------------------------------------------------------------------ the service

    service_backend = "ray"
    transport_kind = "ray"

    def start(self) -> Self:
        """Start the shards where they do not run yet. RuntimeError after `shutdown`."""
        self._shards  # noqa: B018
        return self

    @property
    def _shards(self) -> Shards:
        if self._made is None:
            with self._lock:
                if self._start is None:
                    raise RuntimeError("the buffer was shut down: build another one")
                self._made = self._made or self._start()
        return self._made

    @property
    def is_alive(self) -> bool:
        """Whether all shards answer."""
        return self._made is not None and self._made.are_alive()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the shards. What is not in a checkpoint is lost. RuntimeError on a client. The second time does nothing."""
        if not self._owns:
            raise RuntimeError("a client cannot shut the buffer down: call shutdown() of the buffer itself")
        self._drop_ahead()
        made, self._made, self._start = self._made, None, None
        if made is not None:
            made.kill()

    close = shutdown

    def client(
        self,
        *,
        totals: Literal["exact", "latest"] | None = None,
        timeout: float | None = None,
        prefetch: int | None = None,
        copy: bool | None = None,
    ) -> "RayReplayBuffer":
        """A handle for another thread, task or actor, that can be pickled and cannot shut the buffer down.

        Args:
            totals, timeout, prefetch: as for the buffer, whose own are the defaults.
            copy: whether its batches are copied, so that they can be written to.
        """
        _one_of("totals", totals, (None, "exact", "latest"))
        state = self.__getstate__() | {"_made": self._shards.client(timeout, copy)}
        state["_home"] = next(self._homes) % self._count
        state["_exact"] = self._exact if totals is None else totals == "exact"
        state["_prefetch"] = self._prefetch if prefetch is None else whole("prefetch", prefetch, least=0)
        made = type(self).__new__(type(self))
        made.__setstate__(state)
        return made

    def clients(self, n: int, **options: Any) -> list["RayReplayBuffer"]:
        """`n` such handles, which begin to write at different shards."""
        return [self.client(**options) for _ in range(n)]

    @property
    def process_ids(self) -> list[int]:
        """Of the process of each shard, on its machine."""
        return [each.pid for each in self._shards.facts]

    def __getstate__(self) -> dict[str, Any]:
        local = (
            "_lock",
            "_turns",
            "_homes",
            "_rng",
            "_shares",
            "_ahead",
            "_ahead_of",
            "_pool",
            "_name",
            "_start",
            "_ran_out",
        )
        return {name: value for name, value in self.start().__dict__.items() if name not in local} | {"_owns": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _start=None)
        self._begin(self._home)

    # ------------------------------------------------------------------ writes

    def add(self, data: Any, *, ack: str | None = None, shard: int | None = None) -> Any:
        """Write one item to one shard. Returns its index. See `extend`."""
        return self._written("add", data, {}, ack, shard)

    def extend(
        self, data: Any, *, update_priority: bool | None = None, ack: str | None = None, shard: int | None = None
    ) -> Tensor:
        """Write a batch to one shard, by default to each in order, of slices always to the same. Returns the indices.

        With `ack="durable"` the batch is on disk when this returns. Where it raises `ShardLostError` or
        `RemoteTimeoutError` the batch may have been written.
        """
        found: Tensor = self._written("extend", data, {"update_priority": update_priority}, ack, shard)
        return found

    def _written(self, name: str, data: Any, kwargs: dict[str, Any], ack: str | None, shard: int | None) -> Any:
        _one_of("ack", ack, (None, "received", "durable"))
        shards = self._shards
        if shard is None:
            shard = self._home if shards.facts[0].slices else next(self._turns) % self._count
        elif not 0 <= shard < self._count:
            raise ValueError(f"shard must be at least 0 and below {self._count}, got {shard}")
        durable = self._durable if ack is None else ack == "durable"
        kwargs = {key: each for key, each in kwargs.items() if each is not None}
        return shards.one(shard, "write", name, (self._moved(data),), kwargs, durable)

    def _moved(self, data: Any) -> Any:
        """The data as it is sent: on the CPU where the shards have no GPU."""
        if not self._on_cpu:
            return data
        if isinstance(data, dict):
            return {key: self._moved(each) for key, each in data.items()}
        if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
            return type(data)(map(self._moved, data))
        return data.cpu() if isinstance(data, Tensor) or is_tensor_collection(data) else data

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give items new priorities, each in its shard. `index` as the info of a sample has it."""
        self._at_home("update_priority", index, lambda at, mine: (mine, _rows(priority, at)))

    def mark_update(self, index: Any) -> None:
        """Give items the default priority of the samplers."""
        self._at_home("mark_update", index, lambda at, mine: (mine,))

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the items of a sample the priorities under `priority_key`, each in its shard."""
        keys = ["index", "anchor_index", "validity_mask", self._priority_key]
        data = data.select(*keys, strict=False)
        if self._count == 1:
            self._shards.one(0, "update_tensordict_priority", self._moved(data))
            return
        if data.get("index", None) is None:
            raise KeyError('the sample has no "index": pass one that came from sample(), with its index')
        index = data["index"]
        index = index if self._shards.facts[0].dim_extend else index.reshape(data.shape[0], -1)[:, 0]

        def part(at: Any, mine: Any) -> tuple[Any, ...]:
            rows = data[at]
            return (rows.set("index", mine.reshape(rows["index"].shape) if mine.ndim == 1 else mine),)

        self._at_home("update_tensordict_priority", index, part)

    def update_if_present(self, *, index: Any, generation: Any, patch: Any, **kwargs: Any) -> ConditionalUpdateResult:
        """`ReplayBuffer.update_if_present`, in the shard of each item."""
        version = kwargs.pop("version", None)

        def part(at: Any, mine: Any) -> dict[str, Any]:
            each = {
                "index": mine,
                "generation": _rows(generation, at),
                "patch": each_leaf(patch, lambda leaf: leaf[at]),
            }
            return each | kwargs | ({} if version is None else {"version": _rows(version, at)})

        count = len(torch.as_tensor(index).reshape(-1))
        updated, rejected = torch.zeros(2, count, dtype=torch.bool)
        for at, found in self._at_home("update_if_present", index, part):
            updated[at] = found.updated
            if found.version_rejected is not None:
                rejected[at] = found.version_rejected
        return ConditionalUpdateResult(updated, None if version is None else rejected)

    def _at_home(self, name: str, index: Any, part: Callable[[Any, Any], Any]) -> list[tuple[Any, Any]]:
        """Call a method in each shard that has items at index, with what `part` makes of their positions and index there.

        The positions, and what was returned.
        """
        shards = self._shards
        index = self._moved(index)
        # One shard says itself what is wrong with an index.
        split = partial(to_local, index, self._count, shards.facts[0].rows)
        parts: list[tuple[Any, Any]] = split() if self._count > 1 else [(slice(None), index)]
        calls: dict[int, Call] = {}
        for shard, (at, mine) in enumerate(parts):
            if self._count == 1 or at.numel():
                given = self._moved(part(at, mine))
                calls[shard] = (name, (), given) if isinstance(given, dict) else (name, given, {})
        return [(parts[shard][0], each) for shard, each in shards.some(calls).items()]

    append_transform = _everywhere("append_transform", gives_self=True)
    insert_transform = _everywhere("insert_transform", gives_self=True)
    register_save_hook = _everywhere("register_save_hook")
    register_load_hook = _everywhere("register_load_hook")
    set_storage = _everywhere("set_storage")
    set_sampler = _everywhere("set_sampler")
    set_writer = _everywhere("set_writer")
    share = _everywhere("share", gives_self=True)
    empty = _everywhere("empty")

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Have the draws of this client follow a generator: of one shard by its state now, of several by its numbers."""
        self._drop_ahead()
        self._rng = generator
        if self._count == 1:
            self._shards.one(0, "set_rng", generator)

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        return sum(self._shards.all("__len__"))

    def __getitem__(self, index: Any) -> Any:
        """Rows by index as `sample` gives it; by slices and masks among the stored rows, in order of shards and slots."""
        if self._count == 1:
            return self._shards.one(0, "__getitem__", self._moved(index))
        if isinstance(index, str) or (isinstance(index, tuple) and index and isinstance(index[0], str)):
            return self[:][index]
        if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
            sizes = self._shards.all("__len__")
            found = self._shards.some({n: ("__getitem__", (slice(None),), {}) for n, size in enumerate(sizes) if size})
            return gathered(list(found.values()), None)
        places = self._places(index)
        if isinstance(places, int):
            shard, slot = divmod(places, self._shards.facts[0].rows)
            return self._shards.one(shard, "__getitem__", slot)
        parts = self._at_home("__getitem__", places, lambda at, mine: (mine,))
        return gathered([each for _, each in parts], torch.cat([at for at, _ in parts]))

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._count == 1:
            self._shards.one(0, "__setitem__", self._moved(index), self._moved(value))
            return
        if isinstance(index, str | tuple) and isinstance(index[0], str):
            sizes = self._shards.all("__len__")
            pieces = torch.as_tensor(value).split(sizes)
            self._shards.some(
                {n: ("__setitem__", (index, self._moved(each)), {}) for n, each in enumerate(pieces) if len(each)}
            )
            return
        places = self._places(index)
        if isinstance(places, int):
            shard, slot = divmod(places, self._shards.facts[0].rows)
            self._shards.one(shard, "__setitem__", slot, self._moved(value))
            return
        self._at_home("__setitem__", places, lambda at, mine: (mine, each_leaf(value, lambda leaf: _rows(leaf, at))))

    def _places(self, index: Any) -> Any:
        """The index over all shards of what slices and masks choose among the stored rows; other indices as they are."""
        is_mask = getattr(index, "dtype", None) in (torch.bool, np.dtype(bool))
        if not (is_mask or isinstance(index, slice) or index is Ellipsis):
            return index if isinstance(index, int | tuple) else torch.as_tensor(index)
        rows = self._shards.facts[0].rows
        filled = [torch.arange(size) + n * rows for n, size in enumerate(self._shards.all("__len__"))]
        chosen: Tensor = torch.cat(filled)[index]
        return chosen

    def stats(self) -> dict[str, int | float | bool]:
        """The numbers of `ReplayBuffer.stats` over all shards, and "shards"."""
        each = self._shards.all("stats")
        found = {
            name: sum(one[name] for one in each) for name in ("size", "write_count", "capacity") if name in each[0]
        }
        found |= {"prefetch_queue_size": len(self._ahead), "initialized": all(one["initialized"] for one in each)}
        return found | {"utilization": found["size"] / found["capacity"], "shards": self._count}

    @property
    def batch_size(self) -> int | None:
        """Of `sample()` and of iteration."""
        found: int | None = self._shards.facts[0].batch_size
        return found

    @property
    def write_count(self) -> int:
        """Rows ever written."""
        return sum(each["write_count"] for each in self._shards.all("stats"))

    @property
    def dim_extend(self) -> int:
        """The dim of data along which `extend` runs."""
        found: int = self._shards.facts[0].dim_extend
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of the one shard, or of several, under "shards"."""
        found = self._shards.all("state_dict")
        return found[0] if self._count == 1 else {"shards": found}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave. ValueError for another number of shards."""
        states = [state_dict] if self._count == 1 else state_dict["shards"]
        if len(states) != self._count:
            raise ValueError(f"the state is of {len(states)} shards, the buffer has {self._count}")
        self._drop_ahead()
        self._shards.some({shard: ("load_state_dict", (state,), {}) for shard, state in enumerate(states)})
        self._shards.changed("load_state_dict")

    # ------------------------------------------------------------------ draws

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch from all shards by the law of one buffer; with `return_info` also its info.

        RuntimeError without any batch size, or where nothing is stored.
        """
        found, self._ran_out = self._next(self._sampled, batch_size, return_info)
        return found

    def next(self) -> Any:
        """The next batch of a running iteration; None once at its end, after which it begins again."""
        if self._count == 1:
            return self._shards.one(0, "next")
        if self.batch_size is None:
            raise RuntimeError("batch_size not specified: next() needs one in the constructor of the buffer")
        if self._ran_out:
            self._ran_out = False
            return None
        return self.sample()

    def __iter__(self) -> Iterator[Any]:
        """Batches until the sampler runs out. RuntimeError without a batch size of the constructor."""
        self._ran_out = False
        while (batch := self.next()) is not None:
            yield batch

    def _next(self, draw: Callable[..., Any], *args: Any) -> Any:
        """A draw by a key of its own; with `prefetch` one that was begun before, and as many begun again."""
        if not self._prefetch:
            return draw(randomness.key(self._rng), *args)
        with self._lock:
            if self._ahead_of != args:
                self._drop_ahead()
                self._ahead_of = args
            self._pool = self._pool or ThreadPoolExecutor(self._prefetch, "prefetch")
            while len(self._ahead) <= self._prefetch:
                self._ahead.append(self._pool.submit(draw, randomness.key(self._rng), *args))
            first = self._ahead.popleft()
        try:
            return first.result()
        except BaseException:
            self._drop_ahead()
            raise

    def _drop_ahead(self) -> None:
        with self._lock:
            self._shares.clear()
            while self._ahead:
                self._ahead.popleft().cancel()

    def _sampled(self, key: np.ndarray, batch_size: int | None, return_info: bool) -> tuple[Any, bool]:
        """A batch, and whether it ends an epoch."""
        shards = self._shards
        if self._count == 1:
            return shards.one(0, "sample", batch_size, return_info), False
        size = self.batch_size if batch_size is None else whole("batch_size", batch_size)
        if size is None:
            raise RuntimeError("batch_size not specified: give one to sample(), or to the constructor of the buffer")
        remembered = None if self._exact else self._shares.get(size)
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
        if not self._exact:  # shards that draw nothing tell their totals, which would be old for ever otherwise
            calls |= {n: ("share", (size,), {}) for n in range(self._count) if n not in calls}
        try:
            found = shards.some(calls)
        except RuntimeError as error:
            if remembered is None or isinstance(error, RemoteError):
                raise
            self._shares.pop(size, None)  # a shard was emptied since
            return self._sampled(key, batch_size, return_info)
        drawn = [found[n] if counts[n] else None for n in range(self._count)]
        if not self._exact and not shares[0].in_epochs:
            self._shares[size] = [found[n] if part is None else part.share for n, part in enumerate(drawn)]
        data, info = joined(shares, drawn, of_order)
        return ((data, info) if return_info else data), ran_out

    # ------------------------------------------------------------------ checkpoints

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save all shards at one point in time, in a folder that every shard's machine sees.

        Writes and draws wait until each shard is saved. The checkpoint counts when this returns; killed at any point it
        leaves the previous one or the new one, whole. FileNotFoundError names a machine that does not see the folder. It
        is where shards restart from.
        """
        save(self._shards, path, self._name)

    def loads(self, path: str | PathLike[str]) -> None:
        """Load what `dumps` saved: into as many shards as it was, exactly; into another number row by row.

        Then rows are dealt out in the order in which they were written, with their priorities; those of slices in pieces,
        one for each shard, of which trajectories are cut at the ends. What else samplers and generators hold begins anew.
        A folder written by `dumps` of one buffer counts as one shard. All rows go through the memory of the caller then.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointCorrupt: it is damaged.
            CheckpointMismatch: it is one of something else, or has more rows than the shards have room for.
        """
        self._drop_ahead()
        restore(self._shards, path)

    dump = save = dumps
    load = loads


def _rows(values: Any, at: Any) -> Any:
    """The values at positions, of a tensor with one a row; anything else is the same for all."""
    if isinstance(values, list | np.ndarray):
        values = torch.as_tensor(values)
    return values[at] if (isinstance(values, Tensor) or is_tensor_collection(values)) and values.ndim else values


def _one_of(name: str, given: Any, known: Sequence[Any]) -> None:
    if given not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}")

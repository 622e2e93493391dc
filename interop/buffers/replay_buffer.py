"""The replay buffer: rows pass transforms, the writer names their slots, samplers are told; a sampler draws them again."""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from textwrap import indent
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from jaxtyping import PyTree
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

import fbuf
from fbuf.checkpoint import Writing
from fbuf.looking import Description
from fbuf.memory_plan import Plan
from interop.buffers import checkpoints, collate, editing, resizing
from interop.buffers.appending import append_to
from interop.buffers.components import (
    all_made,
    check_batch_size,
    check_fit,
    example_of,
    first_row,
    keeps_rows_in_order,
    made_component,
    shares_of,
)
from interop.buffers.conditional import ConditionalUpdateResult, update_rows
from interop.buffers.describing import described
from interop.buffers.episodes import Episodes, keys_of
from interop.buffers.rate_counts import RateCounts
from interop.buffers.rate_limiter import RateLimiter
from interop.buffers.ray_actors import actor_class
from interop.buffers.request import Request, reads_slots
from interop.buffers.requested_batch import RequestedBatch, beside
from interop.buffers.sampled import Complete, Sampled, as_collate_fn
from interop.buffers.services import refuse_remote
from interop.buffers.slot_account import account_of
from interop.buffers.to_fbuf import to_fbuf
from interop.buffers.trajectory import Trajectory, named_alone
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.checkpoint.state import EXACT, Apply, LoadOptions, is_ours
from interop.data import staging
from interop.data.arguments import class_of, whole
from interop.data.index import as_int, is_all
from interop.data.masked_rows import Mask, rows_of_mask
from interop.data.pytrees import each_leaf, length_of, swapped
from interop.data.trajectory_keys import TrajectoryKeys
from interop.engine import plans
from interop.engine.followers import counts_of
from interop.engine.observers import Observer, Observers
from interop.host.rows import TorchRows
from interop.host.threads import Lock, finished, renew_in_children, uninterrupted
from interop.sample_units import SampleUnit, expanded, expanding
from interop.samplers import ConsumingSampler, Sampler
from interop.samplers.consuming import consuming
from interop.samplers.drawn_elsewhere import DrawnElsewhere
from interop.samplers.draws import Draws
from interop.samplers.slot_draws import SlotDraws
from interop.shared.processes import starting_a_worker
from interop.shared.storage_lock import Held, locked
from interop.storages import LazyMemmapStorage, Storage, TensorStorage
from interop.storages.all_or_nothing import Attributes, KeptFor, OwnAttributes, Undoable, finish_or_undo, redone
from interop.storages.batches import batch_of, read_batch
from interop.storages.storage import Follower, is_undoable
from interop.transforms import Compose, Transform
from interop.transforms.order import Order
from interop.writers import ImmutableDatasetWriter, RoundRobinWriter, Writer


class ReplayBuffer(Sampled):
    """A writer puts items into a storage, a sampler draws from it; both through a chain of transforms.

    All methods are thread-safe, also with several buffers on one storage. A call that raises has changed nothing, except
    that a batch counts as drawn if a transform or `collate_fn` raises. These run outside of the lock.

    Args:
        storage: where items live, or a callable that makes it; by default a `ListStorage` for 1000 items, or for as many
            as a prioritized sampler has room for.
        sampler: draws items; or a callable that makes it; `RandomSampler()` by default.
        writer: names the slots of new items; or a callable that makes it; `RoundRobinWriter()` by default.
        collate_fn: makes a batch of the items read from the storage. A list storage passes the items themselves.
        pin_memory: pin batches on the CPU.
        prefetch: how many batches threads draw ahead; needs `batch_size`.
        transform: a transform, a chain of them, or any callable.
        transform_factory: a callable that makes the transform.
        batch_size: of `sample()` and of iteration.
        dim_extend: the dim of data along which `extend` runs; by default the last item dim of the storage.
        checkpointer: saves and loads the storage.
        generator: the source of all random numbers; torch's global one by default.
        shared: share the buffer with other processes, see `share`.
        compilable: passed to the default storage.
        delayed_init: make the components at the first use; by default with a `transform_factory`.
        sample_unit: what a drawn item becomes in a batch, such as `Sequence` for windows; the item itself by default.
        consume_after_n_samples: use a `ConsumingSampler` that draws each item so often.
        limiter: keeps draws and writes in step; calls that run ahead wait. Excludes `prefetch`.
        service_backend: "direct", the default, is a buffer in this process. "ray" returns a `RayReplayBuffer`, whose actor
            holds a buffer of this class, with these arguments.
        service_backend_options: of "ray": `ray_init_config`, `remote_config`, and further arguments of `RayReplayBuffer`.
        transport: "auto", and "direct" or "ray", the only one of its backend.
        transport_options: of "ray", as for `RayReplayBuffer`.

    Attributes:
        limiter: of the buffer, or None.
    """

    priority_key: NestedKey | None = "td_error"  # the entry with priorities in samples of tensordicts
    _marks_samples = False  # whether samples contain the info
    _revises = False  # whether batches are changed after collating, also without transforms
    _episodes: "Episodes[ReplayBuffer] | None" = None  # of the last use
    limiter: RateLimiter | None = None
    _workers_only_write = False  # whether other processes get the buffer without its sampler (sync=False)

    _storage: Storage
    _sampler: Sampler
    _writer: Writer
    _draws: Draws  # of the sampler
    _reads_slots: bool
    _extend: Callable[[Any], Tensor]  # of the writer
    _moves_slots: bool  # whether its slots are to be moved to the device of the data
    _undoable: tuple[Undoable, ...]  # storage and writer, where a write changes more than the counters of the storage

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Transform | Callable[[Any], Any]] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: StorageCheckpointerBase | type[StorageCheckpointerBase] | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        limiter: RateLimiter | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        transport: Literal["auto", "direct", "ray"] = "auto",
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory exclude each other")
        refuse_remote(type(self), service_backend, service_backend_options, transport, transport_options)
        super().__init__(batch_size=batch_size, prefetch=prefetch, pin_memory=pin_memory, generator=generator)
        if consume_after_n_samples is not None:
            sampler = consuming(sampler, consume_after_n_samples)
        if limiter is not None and not isinstance(limiter, RateLimiter):
            raise TypeError(f"limiter must be a RateLimiter, got {class_of(limiter)}")
        self.limiter = limiter
        self._unit = expanding(sample_unit)
        self._dim_extend = None if dim_extend is None else whole("dim_extend", dim_extend, least=0)
        self._ask_to_share(shared)
        collate_fn = as_collate_fn(collate_fn)

        def make() -> None:
            chain = transform if transform_factory is None else transform_factory()
            components = all_made(storage, sampler, writer, collate_fn, chain, bool(compilable), self._default_writer)
            check_batch_size(components[1], self._batch_size)
            if limiter is not None:
                limiter.refuse_other(components[0])
            kept_for = KeptFor(components[0])
            before = kept_for.before_write()
            try:
                with components[0].lock.held():
                    self._join(*components)
                    if checkpointer is not None:
                        components[0].checkpointer = checkpointer
            except BaseException:  # another buffer, or the next use of this one, reads the values
                with uninterrupted():
                    kept_for.put_back(before)
                raise

        self._known_storage = storage if isinstance(storage, Storage) else None
        self._make_components: Callable[[], None] | None = make
        delayed = transform_factory is not None if delayed_init is None else delayed_init
        if delayed and self._workers_only_write:
            raise ValueError("sync=False and delayed_init=True exclude each other: workers need the components")
        if not delayed:
            self._init()

    def _begin(self) -> None:
        super()._begin()
        self._making = Lock()
        self.observers = Observers()

    def _init(self) -> None:
        """Make the components. After an error the next use tries again."""
        with self._making:
            if self._make_components is not None:
                self._make_components()
                self._make_components = self._known_storage = None

    @staticmethod
    def _default_writer(compilable: bool) -> Writer:
        return RoundRobinWriter()

    def _check_fit(self, storage: Storage, sampler: Sampler, writer: Writer) -> None:
        """ValueError, TypeError or RuntimeError for components that do not work together."""
        check_fit(storage, sampler, writer, self._unit, self.prefetch_queue is not None)
        if self.limiter is not None:
            self.limiter.check_fit(storage, self._batch_size, self.prefetch_queue is not None)
        if self._workers_only_write and storage.ndim != 1:
            raise ValueError(f"sync=False needs a storage with ndim=1, got one with ndim={storage.ndim}")

    def _join(
        self,
        storage: Storage,
        sampler: Sampler,
        writer: Writer,
        chain: Compose | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        """Connect the components with each other and with this buffer. The lock of the storage is held.

        None keeps the chain of transforms and the collate function.
        """
        self._check_fit(storage, sampler, writer)
        if self._workers_only_write:
            renew_in_children(self._stop_drawing)
        before = self.__dict__
        if before.get("_storage") is not storage or before.get("_sampler") is not sampler:
            if "_storage" in before:
                sampler.clear()  # it may know items of another storage
            sampler.item_values.take_over(storage)
        writer.register_storage(storage)
        if isinstance(before.get("_writer"), RoundRobinWriter):
            before["_writer"].vacant = None
        if isinstance(writer, RoundRobinWriter):
            writer.vacant = sampler.vacant if isinstance(sampler, ConsumingSampler) else None
        if chain is not None and collate_fn is not None:
            chain.set_container(self)
            self._transform = chain
            self._collate_fn = collate_fn
        if self._shared:
            storage.share()
        self._storage = storage
        self._sampler = sampler
        self._writer = writer
        self._draws = sampler.draws
        self._deferring = sampler.item_values if sampler.item_values.defer_errors else None
        self._reads_slots = self._unit is None and reads_slots(storage, self._draws)
        self._moves_slots = writer.leaves_slots_on_host
        self._extend = writer.extend_on_host if self._moves_slots else writer.extend
        own = ((storage, is_undoable(storage)), (writer, writer.is_undoable))
        added = (OwnAttributes(component) for component in (storage, writer) if not is_ours(type(component)))
        self._undoable = (*(component for component, changes in own if changes), *added)
        storage.attach(self)
        in_order = keeps_rows_in_order(sampler, writer) and storage.contents.tracks_writes
        self.observers.join(storage, in_order, sampler.hooks.is_users)
        self._pass_generator()
        if self.limiter is not None:
            self.limiter.join(storage)

    def _pass_generator(self) -> None:
        for component in (self._storage, self._sampler, self._writer):
            component.buffer_generator = self._rng

    def _stop_drawing(self) -> None:
        """In a forked child, which only writes: draws and updates raise an error, since the sampler is elsewhere."""
        self._sampler = DrawnElsewhere()
        self._draws = self._sampler.draws
        self._deferring = None
        self._reads_slots = False

    def __getattr__(self, name: str) -> Any:
        if name in _MADE_LATE and self.__dict__.get("_make_components") is not None:
            try:
                self._init()
            except AttributeError as error:  # Python would report it as a missing attribute of this buffer
                raise RuntimeError(f"a component could not be made: AttributeError: {error}") from error
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    # ------------------------------------------------------------------ components and settings

    @property
    def initialized(self) -> bool:
        """Whether the components were made."""
        return self._make_components is None

    @property
    def storage(self) -> Storage:
        """Where items live."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """Which items are drawn."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """Which slots new items take."""
        return self._writer

    @property
    def write_count(self) -> int:
        """Rows ever written."""
        with locked(self):
            return self._writer.write_count

    @property
    def sample_unit(self) -> SampleUnit | None:
        """What a drawn item becomes in a batch; None for the item itself."""
        return self._unit

    @property
    def dim_extend(self) -> int:
        """The dim of data along which `extend` runs."""
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    @dim_extend.setter
    def dim_extend(self, value: int) -> None:
        if value != self.dim_extend:
            raise RuntimeError(f"dim_extend is {self.dim_extend} and cannot be changed to {value}")

    def stats(self, detail: bool = False) -> dict[str, int | float | bool]:
        """Plain numbers for logs. Does not make components of a delayed buffer.

        "size", "write_count", "prefetch_queue_size", "initialized", and if the storage is known "capacity" and
        "utilization" (size / capacity). With `detail` also those of `describe` by flat names, such as "keys/obs/mean",
        "episodes/lengths/50" or "draws/effective": of keys over at most 1,000 evenly spaced rows.
        """
        storage = self._storage if self.initialized else self._known_storage
        numbers: dict[str, int | float | bool] = {
            "size": len(self) if self.initialized else 0,
            "write_count": self.write_count if self.initialized else 0,
            "prefetch_queue_size": 0 if self.prefetch_queue is None else len(self.prefetch_queue),
            "initialized": self.initialized,
        }
        if self.limiter is not None:
            numbers |= self.limiter.stats()
        if storage is not None:
            numbers |= {"capacity": storage.max_size, "utilization": numbers["size"] / storage.max_size}
        return {**self.describe(rows=1000).numbers(), **numbers} if detail else numbers

    def describe(self, rows: int | None = None, *, reward: NestedKey | None = None) -> Description:
        """What the buffer holds and what can be drawn from it, in numbers. `print` it for tables; a notebook shows them.

        By key dtype, shape, bytes, smallest, mean and largest value, and how many are not finite; episodes, ages and
        priorities by quantiles; how many items the sampler can draw, how evenly, and why not the rest. Nothing is drawn, and
        nothing changes. Transforms are not applied.

        O(bytes of the rows that are looked at), with 16 MiB of them in memory, and O(items) for the rest, under the lock of
        the buffer: give `rows` where the storage is large.

        Args:
            rows: how many rows to look at for the values of keys, evenly spaced; all by default.
            reward: key of the reward, whose sums are the returns of episodes; ("next", "reward") or "reward" by default.

        Raises: KeyError, TypeError or ValueError for a reward that is not one real number an item.
        """
        looked_at = None if rows is None else whole("rows", rows)
        if not self.initialized:
            return Description(type(self).__name__, {"initialized": "no: components are made at the first use"})
        with locked(self):
            settings = {"batch size": "of each call" if self._batch_size is None else str(self._batch_size)}
            if len(self._transform):
                settings["transform"] = repr(self._transform)
            if self.limiter is not None:
                settings["limiter"] = repr(self.limiter)
            parts = (self._storage, self._sampler, self._writer, self._batch_size)
            return described(type(self).__name__, settings, *parts, self._found_episodes, looked_at, reward)

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Replace the storage. Returns the previous one."""
        new = made_component("storage", storage, Storage)
        chosen = as_collate_fn(collate_fn) or collate.default_for(new)
        try:
            while True:
                before = self._storage
                first, second = sorted((before.lock, new.lock), key=id)  # all threads take locks in one order
                with first.held(), second.held():
                    if self._storage is not before:  # another thread has replaced it
                        continue
                    if new is not before:
                        self._sampler.item_values.refuse_forked_child()
                    change = partial(self._exchange_storage, before, new, chosen)
                    self._exchange(new, self._sampler, self._writer, change)
                    return before
        except BaseException:
            self.let_go()
            raise

    def _exchange_storage(self, before: Storage, new: Storage, collate_fn: Callable[[Any], Any]) -> None:
        if new is not before:
            self._join(new, self._sampler, self._writer)
            before.detach(self)
        self._collate_fn = collate_fn
        self.drop_prefetched()

    def resize(self, capacity: int, *, scratch_dir: str | os.PathLike[str] | None = None) -> None:
        """Change the capacity to so many items. Of more items than that the newest stay; a max-value writer keeps the best.

        The buffer is then one of that capacity that got the same newest items: the oldest is at slot 0. Priorities and the
        default priority, uses, groups, and the rest of an epoch follow the items; an epoch of slices begins anew. Slots of
        samples that were drawn before, and their generations, name no item any more. `write_count` goes on. A prioritized
        sampler takes as many items as before, or more: its `max_capacity` never falls.

        The rows are copied, and are in memory twice meanwhile. `storage` and `writer` are other objects afterwards. Rows in
        files go to another folder; the old one stays as it is, and is closed. After an error nothing has changed.

        Args:
            capacity: in items; with several item dims it is rounded up to whole rows.
            scratch_dir: for a `LazyMemmapStorage`, the folder of the new rows; None for anonymous maps.

        Raises:
            TypeError: a storage, sampler or writer of your own, or one that takes no rows: build a new buffer.
            RuntimeError: processes share the buffer, or other buffers use its storage.
            OSError: there is not enough memory or disk space.
        """
        capacity = whole("capacity", capacity)
        with locked(self):
            before = self._storage
            before.guard.refuse_forked_child()
            if any(other is not self for other in before.followers.buffers()):
                raise RuntimeError(
                    "other buffers use the storage, and would keep the old rows: resize() is for one buffer"
                )
            self._sampler.item_values.raise_deferred()
            self.drop_prefetched()
            made = resizing.resized(before, self._sampler, self._writer, capacity, scratch_dir)
            try:
                with made.storage.lock.held():
                    if self.limiter is not None:
                        self.limiter.check_fit(made.storage, self._batch_size, prefetches=False)
                    put = None if made.sampler is None else self._sampler.with_state(made.sampler)
                    finished(
                        partial(self._exchange_all, made, put, None if self.limiter is None else self.limiter.counts())
                    )
            except BaseException:
                if self._storage is not made.storage:
                    resizing.discard(made.storage)
                raise
        if isinstance(before, LazyMemmapStorage):
            before.close()

    def _exchange_all(self, made: resizing.Resized, put: Apply | None, rates: RateCounts | None) -> None:
        before = self._storage
        if before is not made.storage:
            made.storage.checkpointer = before.checkpointer
            resizing.make_room(self._sampler, made.storage)
            self._join(made.storage, self._sampler, made.writer)
            before.detach(self)
        if put is not None:
            put()
        self._sampler.item_values.reloaded(made.storage)
        if self.limiter is not None and rates is not None:
            self.limiter.carry(rates)
        self.drop_prefetched()

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler; the new one draws from the stored rows. Returns the previous one."""
        new = made_component("sampler", sampler, Sampler)
        check_batch_size(new, self._batch_size)
        with locked(self):
            before = self._sampler
            self._exchange(self._storage, new, self._writer, partial(self._exchange_sampler, new))
            return before

    def _exchange_sampler(self, new: Sampler) -> None:
        self._join(self._storage, new, self._writer)
        self.drop_prefetched()

    def set_writer(self, writer: Writer) -> Writer:
        """Replace the writer. Returns the previous one."""
        new = made_component("writer", writer, Writer)
        with locked(self):
            before = self._writer
            change = partial(self._join, self._storage, self._sampler, new)
            self._exchange(self._storage, self._sampler, new, change)
            return before

    def _exchange(self, storage: Storage, sampler: Sampler, writer: Writer, change: Callable[[], None]) -> None:
        """Make an exchange of components to its end. These are the components that it connects."""
        undoable: list[Undoable] = [Attributes(self, _COMPONENTS), KeptFor(storage)]
        if sampler.hooks.is_users:
            undoable.append(sampler.item_values)
        if not is_ours(type(writer)):
            undoable.append(writer)
        redone(undoable, change)

    def share(self, shared: bool = True) -> Self:
        """Share the storage with processes that are forked or started later, under a lock. ValueError with prefetch.

        A process that is started with the buffer shares it without this call, as does a forked child with a memory map.
        Forked children of other buffers can only read the rows of the fork. False stops sharing, if no process has the
        buffer yet.
        """
        self._ask_to_share(shared)
        if self.initialized:
            self._storage.share() if shared else self._storage.lock.unshare()
        return self

    def _ask_to_share(self, shared: bool) -> None:
        if shared and self.prefetch_queue is not None:
            raise ValueError("prefetch and shared exclude each other: batches drawn ahead miss other processes' writes")
        self._shared = bool(shared)

    # ------------------------------------------------------------------ writing

    def add(self, data: Any) -> Any:
        """Write one item. Returns its slot: an int, or coordinates [n, ndim] for a storage of several item dims.

        None if the writer does not keep it. Slots [n] if a transform returns several items that it kept before.
        """
        self._check_data("add", data)
        if is_tensor_collection(data) and data.ndim >= self._storage.ndim and _warns_of_batches():
            warnings.warn(
                f"add() got data of batch size {list(data.shape)} as one item: use extend()", UserWarning, stacklevel=2
            )
        return self._store(data, many=False)

    def extend(self, data: PyTree, *, update_priority: bool | None = None, mask: Mask | None = None) -> Tensor:
        """Write a batch. Returns its slots, [n], or coordinates [n, ndim] for a storage of several item dims.

        -1 stands for items that the writer did not keep. A list at the root is a stack of single items; a tuple or dict
        is a pytree whose leaves share the leading dim.

        With `mask`, bool [n], the call is that of a batch with only the rows where it is True: transforms, samplers and
        the result know of no others. With ndim=1 the mask may have several dims, which data shares: then single items of
        [n, m] are written, in this order. TypeError or ValueError for other masks, before anything changes.
        """
        if update_priority is not None:
            raise NotImplementedError("update_priority is for buffers of tensordicts: use TensorDictReplayBuffer")
        return self._extend_masked(data, mask, True)

    def _extend_masked(self, data: PyTree, mask: Mask | None, with_priorities: bool) -> Tensor:
        if mask is not None:
            ndim = self._storage.ndim
            data = rows_of_mask(data, mask, self.dim_extend, ndim)
            if data is None:
                self._writer.refuse_write("extend")
                return torch.zeros((0, ndim) if ndim > 1 else 0, dtype=torch.int64, device="cpu")
        slots: Tensor = self._store(data, many=True, with_priorities=with_priorities)
        return slots

    def _check_data(self, call: str, data: Any) -> None:
        """ValueError for data that this kind of buffer does not take."""

    def _store(self, data: Any, many: bool, with_priorities: bool = True) -> Any:
        """Write what the inverse transforms make of data.

        Transforms that keep state between writes run under the lock, in the order of the writes. After a write that fails
        their state is as before.
        """
        chain = self._transform
        stored = data
        if chain.count:
            if chain.keeping:
                if self.limiter is None:
                    return self._store_keeping(data, many, with_priorities)
                return self.limiter.when_allowed(partial(self._store_keeping, data, many, with_priorities))
            stored = self._to_store(data, lift=not many and not self._marks_samples)
        if self.limiter is None:
            with locked(self):
                return self._write(stored, many, with_priorities)
        if many and hasattr(stored, "__next__"):
            stored = list(stored)  # the call may be made again
        return self.limiter.when_allowed(partial(self._write_locked, stored, many, with_priorities))

    def _write_locked(self, stored: object, many: bool, with_priorities: bool) -> object:
        with locked(self):
            return self._write(stored, many, with_priorities)

    def _store_keeping(self, data: Any, many: bool, with_priorities: bool) -> object:
        """`_store` with transforms that keep state between writes."""
        chain = self._transform
        with locked(self):
            snapshot = chain.snapshot()
            counts = (self._storage.ring.counts, self._writer.write_count)
            try:
                stored = self._to_store(data, lift=not many)
                grew = is_tensor_collection(stored) and stored.ndim > data.ndim
                return self._write(stored, many or grew, with_priorities)
            except BaseException:
                if (self._storage.ring.counts, self._writer.write_count) == counts:
                    with uninterrupted():
                        chain.restore(snapshot)
                raise

    def _to_store(self, data: Any, lift: bool = False) -> Any:
        """The data after the inverse transforms; with `lift` they see a tensordict as a batch of one."""
        if not self._transform.count:
            return data
        if is_tensor_collection(data):
            data = data.copy()  # transforms may add and remove keys of this one
        if not lift or not isinstance(data, TensorDictBase):
            return self._transform.inv(data)
        dim = data.ndim

        def lower(leaf: Any) -> Any:
            fits = isinstance(leaf, Tensor) or is_tensor_collection(leaf)
            return leaf.squeeze(dim) if fits and leaf.ndim > dim else leaf

        return each_leaf(self._transform.inv(data.unsqueeze(-1)), lower)

    def _write(self, stored: Any, many: bool, with_priorities: bool) -> Any:
        """Write items, and give the samplers of all buffers on the storage their slots. The lock is held."""
        self._writer.refuse_write("extend" if many else "add")
        storage = self._storage
        transforms = self._transform.count
        if stored is None and transforms:
            return torch.zeros(0, storage.ndim, dtype=torch.int64, device="cpu")  # a transform wants nothing stored
        buffers = storage.followers.all()
        followed = False
        undoable = self._undoable
        for buffer in buffers:
            if (other := getattr(buffer, "sampler", None)) is None:
                if isinstance(buffer, Observer):
                    followed = True
                    undoable = (*undoable, buffer)
                continue
            values = other.item_values
            values.refuse_forked_child()  # a sampler that cannot follow the write
            hooks = other.hooks
            followed = followed or hooks.follows_writes
            if hooks.sees_writes:
                undoable = (*undoable, values)
        if self._deferring is not None:
            self._deferring.raise_deferred()
        priority = self._priority_in(stored, many) if with_priorities else None
        if many and not self._reads_slots and hasattr(stored, "__next__"):
            stored = list(stored)  # it may be written twice
        if self.limiter is not None:
            rows = length_of(swapped(stored, self.dim_extend) if self.dim_extend else stored) if many else 1
            largest = partial(self._draws.most_items, storage, self._batch_size or 1)
            self.limiter.refuse_insert(rows * storage.contents.items_per_row, largest)
        counts = counts_of(storage) if followed else None
        counters = storage.ring.cells.tobytes()
        undo_states = [(component, component.before_write()) for component in undoable] if undoable else ()
        write = partial(self._write_all, stored, many, priority, buffers)
        if storage.guard.device_writes is not None:
            write = partial(storage.guard.device_writes.together, write)
        try:
            return write()
        except BaseException:
            of_samplers = undo_states[len(self._undoable) :]
            finish_or_undo(storage, counters, undo_states, write, counts=counts, of_samplers=of_samplers)
            raise

    def _write_all(self, stored: Any, many: bool, priority: Any, buffers: Sequence[Follower]) -> Any:
        storage = self._storage
        writer = self._writer
        sampler = self._sampler
        dim = self.dim_extend
        count = 0 if self.limiter is None else storage.ring.count
        index: Any = self._extend(swapped(stored, dim) if dim else stored) if many else writer.add(stored)
        if index is None:
            return None
        if self.limiter is not None:
            self.limiter.wrote(index, count)
        followers = storage.followers
        followers.in_write = True
        try:
            for buffer in buffers:
                buffer.mark_update(index)
        finally:
            followers.in_write = False
        (sampler.extend if many else sampler.add)(index)
        if priority is not None:
            sampler.update_priority(index, priority, storage=storage)
        if not self._marks_samples and not self._transform.count and dim == 0 and storage.ndim == 1:
            writer.note(stored, index)
        if many and self._moves_slots:  # last: it would wait for the device, had the samplers to read them
            device = getattr(stored, "device", None)
            return (
                staging.to_device(index, device) if isinstance(device, torch.device) and device.type != "cpu" else index
            )
        return index

    def _priority_in(self, stored: Any, many: bool) -> Any:
        """The checked priorities in data that will be stored; None if there are none."""
        return None

    def mark_update(self, index: Any) -> None:
        """Give the items at index the default priority of the sampler."""
        if self._sampler.hooks.follows_writes:
            with locked(self):
                sampler = self._sampler
                if self._storage.followers.in_write:  # which is undone or made again as a whole
                    sampler.mark_update(index, storage=self._storage)
                else:
                    redone([sampler.item_values], partial(sampler.mark_update, index, storage=self._storage))

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of the items at index. Warns if the sampler has none."""
        with locked(self):
            if self._deferring is not None:
                self._deferring.raise_deferred()
            if isinstance(index, tuple):
                index = torch.stack([torch.as_tensor(coordinates) for coordinates in index], -1)
            if isinstance(priority, Tensor) and 0 < self.dim_extend < priority.ndim:
                priority = priority.transpose(0, self.dim_extend).flatten()
            self._updates()(index, priority, storage=self._storage)

    def _updates(self) -> Callable[..., None]:
        """`update_priority` of the sampler. That of a user's class is done or not done if a signal interrupts it."""
        sampler = self._sampler
        if not sampler.hooks.updates_by_users:
            return sampler.update_priority
        return lambda *given, **named: redone([sampler.item_values], partial(sampler.update_priority, *given, **named))

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all items; the memory is kept. Every buffer on the storage starts over."""
        with locked(self):
            storage = self._storage
            storage.guard.recover()
            storage.guard.refuse_forked_child()
            for buffer in storage.followers.buffers():
                buffer.writer.refuse_empty()
            buffers = storage.followers.buffers()

            def write() -> None:
                with storage.guard.transaction():
                    storage.empty()
                    for buffer in buffers:
                        buffer.writer.clear(empty_write_count)
                        buffer.sampler.clear()
                        buffer.transform.forget()
                        buffer.drop_prefetched()
                        if buffer.limiter is not None and empty_write_count:
                            buffer.limiter.emptied()
                    storage.followers.tell_of_new_rows()

            counters = storage.ring.cells.tobytes()
            undoable = [storage, *(buffer.writer for buffer in buffers)]
            undoable += [OwnAttributes(each) for each in undoable if not is_ours(type(each))]
            samplers = (buffer.sampler for buffer in buffers)
            undoable += [sampler.item_values for sampler in samplers if sampler.hooks.is_users]
            undo_states = [(component, component.before_write()) for component in undoable]
            try:
                write()
            except BaseException:
                finish_or_undo(storage, counters, undo_states, write, finish=True)
                raise

    # ------------------------------------------------------------------ sampling

    def _info(self, info: dict[Any, Any]) -> dict[Any, Any]:
        """The info on the device of the storage."""
        return beside(self._storage, info)

    def _draw(self, batch_size: int) -> tuple[Any, Any]:
        if self.limiter is None:
            return super()._draw(batch_size)
        return self.limiter.when_allowed(partial(super()._draw, batch_size))

    def _plan(self, batch_size: int, key: np.ndarray) -> list[Request]:
        return [Request(0, self._draws, self._storage, batch_size, key)]

    def _read(self, batch: RequestedBatch, reserves: bool) -> Complete | None:
        [request] = batch.requests
        if self.limiter is not None:
            self.limiter.refuse_draw(request.draws.most_items(request.storage, request.size))
        if reserves:
            if request.draws.has_state:
                request.reserve()
        elif not batch.can_be_read(request):
            return None
        return self.read(request)

    def read(self, request: Request, collate_fn: Callable[[Any], Any] | None = None) -> Complete:
        """Draw and read the items of a request. The returned function completes the batch outside of the lock.

        `collate_fn` replaces that of the buffer.
        """
        collate_fn = self._collate_fn if collate_fn is None else collate_fn
        data, info = self._gather(request, collate_fn)
        if self.observers.references:
            request.observed = self.observers.read(info)
        if self.limiter is not None:
            index = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
            items = request.size if self._unit is not None else len(index)
            request.counted = self.limiter.drawn(items)
        revise = self._revision(info, request.key)
        order = Order.of(self, info["index"], info) if self._transform.count else None
        return partial(self._pair, data, info, collate_fn, revise, order)

    def _gather(self, request: Request, collate_fn: Callable[[Any], Any]) -> tuple[Any, dict[Any, Any]]:
        """Copies of the drawn items, and the info. The lock is held."""
        if self._reads_slots:
            storage = cast(TensorStorage, request.storage)
            draws = cast(SlotDraws, request.draws)
            marks = self._marks_samples and not self._transform.count  # transforms see what is stored
            if request.drawn is None:
                batch = draws.batch(storage, request.size, request.key, marks)
                if batch is not None:
                    return batch
            slots, info, leaves = request.draw_slots()
            rows = storage.table.rows
            assert rows is not None  # the sampler has raised for an empty storage
            if isinstance(rows, TorchRows) and rows.on_host:
                return read_batch(storage, slots, (None, 1), info, marks)
            return batch_of(storage, leaves or rows.read(slots), slots.shape, info, marks)
        index, info = request.draw()
        index, info = expanded(self._unit, index, info, request.storage)
        data = request.storage.get(index)
        # A list storage returns the items themselves if nothing will edit them.
        edited = isinstance(request.storage, TensorStorage) or self._marks_samples or len(self._transform) > 0
        return editing.owned(data) if edited and self._is_live(index, collate_fn) else data, info

    def _revision(self, info: dict[Any, Any], key: np.ndarray) -> Callable[[Any], Any] | None:
        """The function that changes a collated batch, or None. Adds entries to the info. The lock is held."""
        if self._writer.tracks_generations:
            info["index_generation"] = self._writer.generations_of(info["index"])
        return None

    def _is_live(self, index: Any, collate_fn: Callable[[Any], Any]) -> bool:
        """Whether reading and collating returns the stored data itself, not a copy."""
        return self._storage.is_live(index) and collate_fn is not collate.stack

    def _locked(self) -> AbstractContextManager[Any]:
        return locked(self)

    def _locked_to_reserve(self) -> AbstractContextManager[Any]:
        return locked(self) if self._sampler.draws.reads_to_reserve else nullcontext()

    # ------------------------------------------------------------------ stored items

    def __len__(self) -> int:
        with locked(self):
            return self._sampler.sampleable(self._storage)

    def __getitem__(self, index: Any) -> Any:
        key = editing.as_key(index)
        if key is not None:
            return self[:][key]
        index = editing.unwrapped(index)
        with locked(self):
            if self.dim_extend > 0:
                data = swapped(self._storage[:], self.dim_extend)
                data = data if is_all(index) else each_leaf(data, lambda leaf: leaf[index])
                collate_fn = self._collate_fn if as_int(index) is None else collate.identity
            else:
                data, collate_fn = collate.read(self._storage, index, self._collate_fn)
            if len(self._transform) and self._is_live(index, collate_fn):
                data = editing.owned(data)
            order = Order.of(self, index)
        return self._completed(data, collate_fn, order=order)

    def __setitem__(self, index: Any, value: Any) -> None:
        key = editing.as_key(index)
        if key is not None:
            self._edit({key: value}, dim=self.dim_extend, adds=True)
            return
        if self._transform.keeps:
            raise TypeError(
                "rb[...] = rows would hand them to a transform that takes what comes for the next steps of a stream: "
                "write to rb.storage[...], or use extend()"
            )
        value = self._to_store(value)
        if value is None and len(self._transform):
            return  # a transform wants nothing stored
        with locked(self):
            self._storage.guard.refuse_forked_child()
            self._storage.guard.recover()
            editing.assign(self._storage, self._writer, self.dim_extend, editing.unwrapped(index), value)

    @property
    def episodes(self) -> "Episodes[ReplayBuffer]":
        """The stored episodes: their lengths, returns and ends, their rows, and buffers of some of them.

        The same object until the next write. What divides them is what divides them for `SliceSampler`, with the keys that
        the sampler of the buffer names, if it has slices. O(rows written since the last use).

        TypeError for a writer that keeps no order; RuntimeError or TypeError where the items do not say where trajectories
        end.
        """
        return self._found_episodes()

    def _found_episodes(self) -> "Episodes[ReplayBuffer]":
        with locked(self):
            keys = self._trajectory_keys()
            if self._episodes is None or not self._episodes.are_current(self, keys):
                self._episodes = Episodes(self, self._over, self._completed, keys, self._episodes)
            return self._episodes

    def query(
        self, predicate: Callable[[Trajectory], object] | None = None, *, trajectory_key: NestedKey | None = None
    ) -> list[Trajectory]:
        """The stored trajectories for which a predicate is true, the oldest first: see `Episodes.query`.

        ```python
        good = rb.query((traj.reward.sum() > 100) & (traj.length >= 50))
        ```

        `rb.episodes.where(predicate)` chooses them for a buffer that draws from them alone: `rb.episodes.select(...)`.

        Args:
            predicate: made of `traj`, or a function of a `Trajectory`; None for all trajectories.
            trajectory_key: an entry with the id of the trajectory of each item, which then alone divides them. By default
                they are `rb.episodes`.

        Raises: as `episodes`; KeyError where `trajectory_key` is not stored.
        """
        with locked(self):
            if not len(self._storage):
                return []
            if trajectory_key is None:
                return self._found_episodes().query(predicate)
            return Episodes(self, self._over, self._completed, named_alone(trajectory_key)).query(predicate)

    def _trajectory_keys(self) -> TrajectoryKeys:
        """The entries that divide the episodes."""
        return keys_of(self._sampler)

    def _over(self, storage: Storage, sampler: Callable[[], Sampler] | None) -> "ReplayBuffer":
        """A buffer like this one to read other items."""
        return ReplayBuffer(storage=storage, sampler=sampler, **self._to_read())

    def _to_read(self) -> dict[str, Any]:
        """The arguments of a buffer that reads other items as this one does."""
        return {
            "writer": ImmutableDatasetWriter(),
            "collate_fn": self._collate_fn,
            "transform": self._transform.clone() if len(self._transform) else None,
            "batch_size": self._batch_size,
            "pin_memory": self._pin_memory,
            "generator": self._rng,
            "sample_unit": self._unit,
        }

    def why(self, index: object, *, batch_size: int | None = None) -> fbuf.Why:
        """What is known about a slot: when it was written, its trajectory, how often it is drawn, or why it is not.

        `print` it for sentences. `probability` is exact: that one draw of the sampler as it stands has the item, a draw of
        one item, slice or group, without regard to batches that were drawn ahead; with a `sample_unit` that it is the drawn
        item. Nothing is drawn. O(items), of slices by priority times their length.

        Args:
            index: of the item, as in the "index" of a sample: an int, or for a storage of several item dims a tuple of ints.
            batch_size: of the batch that `probability` is of, where that matters: for slices without `slice_len`, and for
                `drop_last`. That of the buffer by default.

        Raises: TypeError for another index, IndexError where the buffer has no such slot; the errors of `sample` where items
        lack an entry that the sampler needs.
        """
        size = self._batch_size if batch_size is None else whole("batch_size", batch_size)
        with locked(self):
            self._sampler.item_values.raise_deferred()
            episodes = None
            if len(self._storage):
                with suppress(
                    RuntimeError, TypeError
                ):  # a writer without order, items that say nothing of trajectories
                    episodes = self._found_episodes()
            return account_of(self._storage, self._sampler, self._writer, episodes, index, size)

    def in_order(self) -> Any:
        """All rows from the oldest to the newest: `rb[:]` with the rows of a ring in the order of writing.

        `rb[:]` has rows in the order of their slots, so that in a full ring the newest row is followed by the oldest one:
        write `other.extend(rb.in_order())`, not `other.extend(rb[:])`. A copy if the ring has gone around. O(rows).

        TypeError for a writer or sampler under which rows are not in the order of writing.
        """
        with locked(self):
            if not keeps_rows_in_order(self._sampler, self._writer):
                part = self._sampler if self._writer.keeps_order else self._writer
                raise TypeError(
                    f"with a {type(part).__name__} the rows are not stored in the order of writing: read rb[:]"
                )
            contents = self._storage.contents
            if not contents.oldest_row:
                return self[:]
            rows = torch.from_numpy(contents.rows_in_order())
            return self[(*(slice(None) for _ in range(self.dim_extend)), rows)] if self.dim_extend else self[rows]

    def read_all_in_order(self, end: int | None = None) -> Any:
        """`rb[:]`, or `rb[:end]`: rows in the order of their slots."""
        return self[:] if end is None else self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """`rb[:end] = data`; `end` is by default the length of data. Length and cursor stay. All rows may add keys."""
        if end is None:
            end = None if self._storage.is_full else length_of(data)
        self[:end] = data

    def set_(self, key: NestedKey, value: Tensor) -> Self:
        """Write one key of all stored rows in place. KeyError for an unknown key, RuntimeError for a wrong size."""
        return self._edit({key: value})

    def set_at_(self, key: NestedKey, value: Tensor, index: Any) -> Self:
        """Write one key of the rows at storage indices in place."""
        return self._edit({key: value}, index=index)

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None
    ) -> Self:
        """Write several keys of all stored rows in place, and add new keys; only `keys_to_update` if given.

        `clone` has no effect: values are always copied.
        """
        values = input_dict_or_td if keys_to_update is None else editing.chosen(input_dict_or_td, keys_to_update)
        return self._edit(values, adds=True)

    def _edit(self, values: Any, index: Any = ..., dim: int = 0, adds: bool = False) -> Self:
        with locked(self):
            editing.edit(self._storage, values, index, dim, adds)
        return self

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Write entries of items that were not overwritten since they had these generations. O(items).

        Of several patches of one item the last wins, or with versions the one of the highest version. Transforms are not
        run. Needs a writer with `track_generations=True`.

        Args:
            index: of the items, as from `extend` or in a sample under "index": [n], or coordinates [n, ndim] or a tuple.
            generation: of their rows, [n], as in a sample under "index_generation".
            patch: a dict or tensordict of tensors [n, ...] by key.
            version_key: an integer or real entry of one value an item, which is not in the patch; items are then written
                only where `version` is not lower than what they have under it, and get it.
            version: one for all or one for each, [n].
            require_newer: write only where `version` is higher.

        Raises, before anything is written: RuntimeError for a storage of other things than tensors by key, or a writer that
        tracks no generations; KeyError for a key that is not stored; ValueError for another shape or dtype, and for one of
        `version_key` and `version` without the other; TypeError for what is no tensor.
        """
        with locked(self):
            return update_rows(
                self._storage, self._writer, index, generation, patch, version_key, version, require_newer
            )

    def append_to(self, index: object, more: object, *, replace: object = None) -> None:
        """Put more values behind entries of stored items, such as the next tokens of a rollout. All of it, or none.

        Entries that grow are text and ragged rows of tensor storages, and in lists tensors along their first dim, text,
        bytes and lists. Every item gets all of its new values in one transaction: a reader or a kill finds it as before or
        as after. O(values added), amortized; of lists O(item). Transforms are not run.

        This is an edit: the item keeps its slot, generation, priority, uses and its place in the epoch. If the sampler has
        versions (`StalenessAwareSampler`, or a `PromptGroupSampler` with `staleness`), the item counts as written at its
        `consumer_version`, unless `replace` has the entry or the item is newer.

        Args:
            index: an int, or slots [n] as from `extend`, or a slice, mask or list; with several item dims coordinates
                [n, ndim], or a tuple. No item twice.
            more: a dict or tensordict: by key what is put behind the value of each item. For ragged rows a tensor [n, any
                length, ...], dense or jagged, or n tensors; for text n texts. For an int, of one item.
            replace: by key new values of entries of one shape, [n, ...], that are written together with it; a number is for
                all.

        Raises, before anything is written: KeyError for a key that is not stored; TypeError for an entry that does not grow,
        and a storage whose items do not; RuntimeError for another dtype, shape or number of values, a writer or storage
        that is only read; IndexError out of range; ValueError for an item or key that is given twice.
        """
        with locked(self):
            append_to(self._storage, self._sampler, self._writer, index, more, replace)

    # ------------------------------------------------------------------ memory

    def plan(self, data: Any = None) -> Plan:
        """The memory that the buffer takes, or will take after the first write of `data`, a batch as for `extend`.

        `print` shows a table of storage, sampler and writer, key by key; `plan(data).check()` raises if it does not fit. A
        `TensorSpec` of an item, or with `ndim` > 1 of a row, serves as data too. Nothing is allocated or changed.
        RuntimeError where data is needed and missing; else the errors of the write.
        """
        with locked(self):
            stored = None if data is None else self._first_row_of(data)
            return plans.plan(shares_of(self._storage, self._sampler, self._writer, stored))

    def _first_row_of(self, data: Any) -> Any:
        """The first row of data as it would be stored."""
        chain = self._transform
        data = example_of(data, self._storage.ndim, self.dim_extend)
        snapshot = chain.snapshot() if chain.keeps else None
        try:
            stored = self._to_store(data)
        finally:
            if snapshot is not None:
                chain.restore(snapshot)
        if stored is None:
            raise RuntimeError("a transform wants nothing of this data stored: give plan() more rows")
        return first_row(swapped(stored, self.dim_extend))

    def to_fbuf(
        self, batch_size: int | None = None, *, narrow: bool = False, transforms: Literal["refuse", "drop"] = "refuse"
    ) -> tuple[fbuf.Buffer, fbuf.BufferState]:
        """A functional buffer and a state with a copy of the content, for use inside `jax.jit`. O(capacity).

        Slots, cursor, priorities, trajectories and the position in an epoch are the same; prefetched items remain to be
        drawn. Draws follow the same law with their own key. `beta` is an argument of `fbuf.importance_weights`. Items are
        nested dicts of arrays, without the "index" that the writer stores: that is `draw.slots`. The first item dim
        becomes rows, the others lanes. Slices are [slices, time]; shorter ones are padded (`draw.mask`).

        Args:
            batch_size: with `num_slices`, determines the length of slices; that of the buffer by default.
            narrow: if JAX's 64-bit types are off, store int64 as int32 if all values fit, and float64 rounded to float32.
            transforms: "drop" leaves out the transforms and the `collate_fn`, which a state cannot contain.

        Raises:
            TypeError: a component without a functional twin, or 64-bit columns; they are named.
            ValueError: rows or trajectories in an order that a functional ring cannot have, or values that do not fit.
            RuntimeError: nothing was written yet, or JAX does not see the device.
            NotEnoughMemoryError: there is not enough memory for the state.
        """
        if transforms not in ("refuse", "drop"):
            raise ValueError(f"transforms must be 'refuse' or 'drop', got {transforms!r}")
        with locked(self):
            lost = [repr(transform) for transform in self._transform]
            lost += [] if self._collate_fn in (collate.identity, collate.stack, collate.lazily) else ["collate_fn"]
            if lost and transforms == "refuse":
                raise TypeError(
                    f"a state cannot hold {', '.join(lost)}: apply them in the program, with transforms='drop'"
                )
            if self._unit is not None or self._revises:
                raise TypeError(
                    "a sample_unit or hindsight makes other items of those drawn: a functional buffer does not"
                )
            size = self._batch_size if batch_size is None else whole("batch_size", batch_size)
            return to_fbuf(self._storage, self._sampler, self._writer, size, narrow)

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """This class as a Ray actor class with `is_remote = True`: `.remote(...)` constructs a buffer in another process.

        Give the constructor callables in the place of components. Methods of the actor return references, for `ray.get`.

        Args:
            remote_config: options of `ray.remote`; by default 1 CPU, 0.2 GPU where torch sees CUDA, and 2 GiB of memory.

        ImportError where Ray is not installed, TypeError or ValueError for options that Ray does not have.
        """
        return actor_class(cls, remote_config)

    # ------------------------------------------------------------------ checkpoints and copies

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state that `dumps` saves, as plain values and tensors: `torch.load(weights_only=True)` reads it.

        Keys: "_storage", "_sampler", "_writer", "_transforms", "_batch_size", "_consume_after_n_samples", "_rng" and
        "_prefetch_state", which is None: prefetched batches are drawn again; "_limiter" if there is one. Takes the memory of
        the rows a second time; `dumps` does not.
        """
        with self._unchanging():
            self.drop_prefetched()
            return checkpoints.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a result of `state_dict` into a buffer built alike. After an error nothing has changed."""
        super().load_state_dict(state_dict)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Change saved rows by `hook(data, path=None)`; see `StorageCheckpointerBase`."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Change loaded rows by `hook(data, out=None)`."""
        self._storage.register_load_hook(hook)

    def state(self, out: Writing | None = None) -> dict[str, Any]:
        return checkpoints.state(self, out)

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        return checkpoints.with_state(self, tree, options)

    def _unchanging(self) -> Held:
        return Held(self._held())

    def _held(self) -> Iterator[None]:  # an `ExitStack` may leave locks held after a signal
        with locked(self), nullcontext() if self.prefetch_queue is None else self.prefetch_queue.mutex:
            yield

    def _replaced_storages(self) -> list[Storage]:
        return [self._storage] if self._storage.checkpointer.changes_rows else []

    def _copied_attributes(self) -> dict[str, Any]:
        """The attributes of copies and pickles. The lock is held."""
        self.drop_prefetched()
        return {key: value for key, value in self.__dict__.items() if key not in _NOT_KEPT}

    def __getstate__(self) -> dict[str, Any]:
        with self._unchanging():
            state = self._copied_attributes()
            if not starting_a_worker():
                parts = copy.deepcopy([state[name] for name in _COMPONENTS])
                state.update(zip(_COMPONENTS, parts, strict=True))
            elif self._workers_only_write:
                state["_sampler"] = DrawnElsewhere()
            return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with self._unchanging():
            state = copy.deepcopy(self._copied_attributes(), memo)
        twin.__setstate__(state)
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update(state, _make_components=None, _known_storage=None)
        with self._storage.lock.held():
            self._join(self._storage, self._sampler, self._writer)

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        if not self.initialized:
            yield "initialized", False
            return
        yield from (("storage", self._storage), ("sampler", self._sampler), ("writer", self._writer))
        if len(self._transform):
            yield "transform", self._transform
        yield from (("batch_size", self._batch_size), ("collate_fn", self._collate_fn))

    def __repr__(self) -> str:
        self._init()
        body = ",\n".join(f"{name}={value}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}(\n{indent(body, '    ')})"


_COMPONENTS = ("_storage", "_sampler", "_writer")
_MADE_LATE = (
    *_COMPONENTS,
    "_transform",
    "_collate_fn",
    "_draws",
    "_reads_slots",
    "_undoable",
    "_extend",
    "_moves_slots",
)
_NOT_KEPT = (
    *("_making", "_stepping", "_iterating", "readers", "_episodes", "observers"),
    *(
        "_make_components",
        "_known_storage",
        "_draws",
        "_deferring",
        "_reads_slots",
        "_undoable",
        "_extend",
        "_moves_slots",
    ),
)


def _warns_of_batches() -> bool:
    return os.environ.get("RL_WARNINGS", "1").lower() not in ("0", "false")

"""A batch is asked for, perhaps drawn ahead, and completed: the base class of buffers and ensembles."""

import math
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from fbuf.checkpoint import Reading, Verify, Writing, load
from interop.buffers.collate import identity
from interop.buffers.components import check_batch_size
from interop.buffers.prefetch import Prefetch
from interop.buffers.request import Request
from interop.buffers.requested_batch import RequestedBatch
from interop.buffers.services import in_ray
from interop.checkpoint.other_folders import refuse_other_folder
from interop.checkpoint.state import EXACT, Apply, Component, LoadOptions
from interop.data import randomness
from interop.data.arguments import whole
from interop.engine.guard import replaced
from interop.host.threads import Lock, came_from_a_signal, finished
from interop.samplers import Sampler
from interop.samplers.item_values import ItemValues
from interop.samplers.slot_draws import SlotDraws
from interop.storages.storage import Storage
from interop.transforms.chain import Compose
from interop.transforms.order import Order, in_order

Complete = Callable[[], tuple[Any, Any]]


class Sampled(Component):
    """A source of batches, with a collate function, transforms and prefetch.

    A subclass sets `_transform` and `_collate_fn`, and defines the methods that raise NotImplementedError here.

    Args:
        batch_size: of `sample()` and of iteration.
        prefetch: how many batches threads draw ahead; needs `batch_size`.
        pin_memory: pin batches on the CPU.
        generator: the source of all random numbers; None for torch's global one.

    Attributes:
        prefetch_queue: of prefetched batches; None without prefetch.
        is_alive: False after `shutdown`.
        service_backend: where the buffer is: "direct", in this process.
        runs_in_ray: whether constructors take `service_backend="ray"`.
        readers: ensembles whose prefetched batches are dropped whenever those here are. They are not kept alive.
    """

    prefetch_queue: Prefetch | None
    is_alive: bool = True
    service_backend = "direct"
    runs_in_ray = True
    _transform: Compose
    _collate_fn: Callable[[Any], Any]
    _deferring: ItemValues | None = None  # of the sampler, if errors of its updates may come later
    _latest_checkpoint: Path | None = None  # the next one may share its files

    def __new__(
        cls,
        *args: object,
        service_backend: object = None,
        service_backend_options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        transport_options: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> Self:
        if service_backend == "ray":
            if not cls.runs_in_ray:
                raise TypeError(f"a {cls.__name__} has no service_backend='ray': its members are in this process")
            return cast(Self, in_ray(cls, args, kwargs, service_backend_options, transport, transport_options))
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self, *, batch_size: int | None, prefetch: int | None, pin_memory: bool, generator: torch.Generator | None
    ) -> None:
        if batch_size is not None:
            batch_size = whole("batch_size", batch_size)
        if prefetch is not None:
            prefetch = whole("prefetch", prefetch, least=0)
        if prefetch and batch_size is None:
            raise ValueError("prefetch needs a batch_size: dynamic batch sizes cannot be drawn ahead")
        if pin_memory and not torch.accelerator.is_available():
            raise RuntimeError(
                "pin_memory=True pins batches for an accelerator, and torch sees none here: leave it out, or use "
                "pin_memory=torch.accelerator.is_available()"
            )
        self._batch_size = batch_size
        self._pin_memory = pin_memory
        self.prefetch_queue = Prefetch(prefetch) if prefetch else None
        self._rng = as_generator(generator)
        self._begin()

    def _begin(self) -> None:
        """Set the attributes that copies, pickles and workers do not inherit."""
        self._stepping = Lock()  # from one batch to the `next()`
        self._iterating: float | None = None  # batches that `next()` may still return; None between its iterations
        self.readers: weakref.WeakSet[Sampled] = weakref.WeakSet()

    # ------------------------------------------------------------------ to be defined

    @property
    def sampler(self) -> Sampler:
        """Draws the items."""
        raise NotImplementedError

    def _plan(self, batch_size: int, key: np.ndarray) -> list[Request]:
        """The requests of a batch, one for each part. Their keys follow from `key`."""
        raise NotImplementedError

    def _read(self, batch: RequestedBatch, reserves: bool) -> Complete | None:
        """Draw and read a batch. The returned function completes it outside of the lock. None for a stale batch.

        With `reserves` the requests are reserved first, under the same lock.
        """
        raise NotImplementedError

    def _locked(self) -> AbstractContextManager[Any]:
        """The lock for drawing and reading a batch, and for changing settings."""
        return nullcontext()

    def _locked_to_reserve(self) -> AbstractContextManager[Any]:
        """The lock for requesting batches."""
        return nullcontext()

    def _unchanging(self) -> AbstractContextManager[Any]:
        """The lock for saving and loading: excludes writes, draws and requests."""
        raise NotImplementedError

    def _replaced_storages(self) -> list[Storage]:
        """The storages whose rows a load replaces in a transaction."""
        raise NotImplementedError

    def state(self, out: Writing | None = None) -> dict[str, Any]:
        """A tree of arrays, which may be views, and plain values. The locks are held.

        With `out`, a checkpoint that is being written, the content of storages is that of their checkpointers.
        """
        raise NotImplementedError

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        """Check a result of `state`, or of `state_dict`. The returned function puts it in; until then nothing changes.

        The locks are held.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ settings

    @property
    def transform(self) -> Compose:
        """The chain of transforms."""
        return self._transform

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """Makes a batch of the items read from the storage."""
        return self._collate_fn

    @property
    def batch_size(self) -> int | None:
        """Of `sample()` and of iteration."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        size = None if value is None else whole("batch_size", value)
        if size is None and self.prefetch_queue is not None:
            raise ValueError("prefetch needs a batch_size: dynamic batch sizes cannot be drawn ahead")
        check_batch_size(self.sampler, size)
        if size != self._batch_size:  # without the lock: a load sets it inside a transaction
            self.drop_prefetched()
            self._batch_size = size

    @property
    def generator(self) -> torch.Generator | None:
        """The source of all random numbers; None for torch's global generator."""
        return self._rng

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Use this generator from now on."""
        generator = as_generator(generator)
        with self._locked():
            finished(partial(self._use_generator, generator))

    def _use_generator(self, generator: torch.Generator | None) -> None:
        self.drop_prefetched()  # first: it restores the one before
        self._rng = generator
        self._pass_generator()

    def _pass_generator(self) -> None:
        """Give the generator to the components."""

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform at the end. With `invert` it runs forward when writing and backward when reading."""
        return self.insert_transform(len(self._transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform before the one at index."""
        with self._locked():
            self._transform.insert(index, transform, invert=invert)
            self.drop_prefetched()
        return self

    # ------------------------------------------------------------------ the buffer as a service

    def client(self) -> Self:
        """This buffer: workers of this process need no other handle. `RayReplayBuffer.client` makes one."""
        return self

    def shutdown(self, timeout: float | None = None) -> None:
        """End drawing: prefetched batches are dropped, and draws raise RuntimeErrors. Rows stay, to be read and saved.

        Idempotent.

        Args:
            timeout: has no effect: nothing is waited for.
        """
        self.is_alive = False  # first: no batch is requested after the queue was dropped
        self.drop_prefetched()

    # ------------------------------------------------------------------ batches

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch; with `return_info` also the info: a dict with "index" and values of the sampler.

        RuntimeError without a batch size, or for an empty buffer.
        """
        data, info = self._next_batch(self._size_of_batch(batch_size))
        return (data, self._info(info)) if return_info else data

    def _info(self, info: Any) -> Any:
        """The info in the form in which it is returned."""
        return info

    def _size_of_batch(self, batch_size: int | None) -> int:
        if batch_size is None:
            if self._batch_size is None:
                raise RuntimeError(
                    "batch_size not specified: give one to sample(), or to the constructor of the buffer"
                )
            return self._batch_size
        batch_size = whole("batch_size", batch_size)
        if batch_size >= 2**31:
            raise ValueError(f"batch_size must be less than 2**31, got {batch_size}")
        if self._batch_size is not None and batch_size != self._batch_size:
            warnings.warn(
                f"sample() was given batch_size={batch_size}, the buffer was built with {self._batch_size}: "
                "the argument counts",
                UserWarning,
                stacklevel=3,
            )
        return batch_size

    def _next_batch(self, batch_size: int) -> tuple[Any, Any]:
        """A batch and its info: the oldest prefetched batch, or a new draw."""
        if self._deferring is not None:
            self._deferring.raise_deferred()  # here: an error of a draw in another thread may be dropped with the draw
        if not self.is_alive:
            raise RuntimeError("the buffer was shut down, and draws no more batches: build another one, or read rb[:]")
        if self.prefetch_queue is None:
            return self._draw(batch_size)
        try:
            return self._take(self.prefetch_queue, batch_size)
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Release the locks of sampler and prefetch queue that this thread holds: after an interrupt."""
        self.sampler.draws.let_go()
        self.sampler.item_values.let_go()
        if self.prefetch_queue is not None:
            self.prefetch_queue.mutex.let_go()

    def _take(self, prefetch: Prefetch, batch_size: int) -> tuple[Any, Any]:
        batch: tuple[Any, Any] = prefetch.take(
            draw=partial(self._draw, batch_size),
            begin=lambda: RequestedBatch(self._generators()),
            fill=partial(self._fill, batch_size),
            more=lambda: self.is_alive and self._may_request(),
            make=self._make,
            lock=self._locked_to_reserve(),
            settings=self._settings(),
        )
        return batch

    def _draw(self, batch_size: int) -> tuple[Any, Any]:
        """Draw a batch now."""
        with self._locked():
            batch = RequestedBatch(self._generators())
            try:
                batch.requests = self._plan(batch_size, randomness.key(self._rng))
                complete = self._read(batch, reserves=True)
                batch.commit()
            except BaseException as error:
                batch.settle(error)
                raise
        assert complete is not None  # the lock was held since it was reserved
        complete_batch = complete()
        batch.tell_observers()
        return complete_batch

    def _fill(self, batch_size: int, batch: RequestedBatch) -> bool:
        """Draw what the next batch needs, which a thread makes; False if it cannot be drawn now.

        The call that needs the batch then raises the error. Errors of users' samplers, whose state may have changed, are
        raised here.
        """
        try:
            batch.requests = self._plan(batch_size, randomness.key(self._rng))
            for request in batch.requests:
                request.reserve()
        except BaseException as error:
            batch.abandon(came_from_a_signal(error))
            own = all(isinstance(request.draws, SlotDraws) for request in batch.requests)
            if isinstance(error, Exception) and own and not came_from_a_signal(error):
                return False
            raise
        return True

    def _may_request(self) -> bool:
        """Whether the epoch has another batch, for which nothing was drawn yet."""
        has_more = self.sampler.draws.has_more
        return not self.sampler.ran_out if has_more is None else has_more

    def _settings(self) -> tuple[Any, ...]:
        """The settings of the samplers on which batches depend."""
        return self.sampler.draws.all_settings

    def _make(self, batch: RequestedBatch) -> tuple[Any, Any] | None:
        """Make a requested batch, in a thread; None if it is stale."""
        with self._locked():
            complete = self._read(batch, reserves=False)
        return None if complete is None else complete()

    def _generators(self) -> Collection[torch.Generator | None]:
        """The generators of the keys of a batch."""
        return (self._rng,)

    def _pair(
        self,
        data: Any,
        info: dict[Any, Any],
        collate_fn: Callable[[Any], Any],
        revise: Callable[[Any], Any] | None,
        order: Order | None,
    ) -> tuple[Any, dict[Any, Any]]:
        """The data as `_completed` makes them, and the info."""
        return self._completed(data, collate_fn, revise, order), info

    def _completed(
        self,
        data: Any,
        collate_fn: Callable[[Any], Any] | None = None,
        revise: Callable[[Any], Any] | None = None,
        order: Order | None = None,
    ) -> Any:
        """The data after collating, revision, transforms and pinning. No lock is held.

        Args:
            data: the items that were read.
            collate_fn: replaces that of the buffer.
            revise: changes the batch after collating.
            order: where the items are stored, for transforms.
        """
        collate_fn = self._collate_fn if collate_fn is None else collate_fn
        if collate_fn is not identity:
            data = collate_fn(data)
        if revise is not None:
            data = revise(data)
        if self._transform.count:
            with in_order(order):
                data = self._transform(data.copy() if is_tensor_collection(data) else data)
        if self._pin_memory and hasattr(data, "pin_memory"):
            on_host = getattr(data, "device", None) in (None, torch.device("cpu"))
            data = data.pin_memory() if on_host else data
        return data

    def drop_prefetched(self) -> None:
        """Drop all prefetched batches, here and in ensembles with this member."""
        if self.prefetch_queue is not None:
            self.prefetch_queue.drop()
        for reader in list(self.readers):
            reader.drop_prefetched()

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the sampler ends its epoch. Samplers without epochs go on, but for datasets and ensembles:
        there as many items are drawn as are stored.
        """
        if self._batch_size is None:
            raise RuntimeError("batch_size not specified: iterating needs one in the constructor of the buffer")
        if not self._has_more():
            self.sampler.ran_out = False
        left = self._batches_of_epoch(self._batch_size)
        while left and self._has_more():
            left -= 1
            yield self.sample()

    def _epoch_items(self) -> float:
        """How many items an iteration draws if the sampler has no epochs; infinity if it does not end."""
        return math.inf

    def _batches_of_epoch(self, batch_size: int) -> float:
        items = math.inf if self.sampler.hooks.ends_epochs else self._epoch_items()
        return items if items == math.inf else max(math.ceil(items / batch_size), 1)

    def _has_more(self) -> bool:
        return not self.sampler.ran_out or (self.prefetch_queue is not None and len(self.prefetch_queue) > 0)

    def next(self) -> Any:
        """The next batch of an iteration; None once at its end, before it starts again."""
        if self._batch_size is None:
            raise RuntimeError("batch_size not specified: next() needs one in the constructor of the buffer")
        with self._stepping:
            if self._iterating is None:
                if not self._has_more():
                    self.sampler.ran_out = False
                self._iterating = self._batches_of_epoch(self._batch_size)
            if not self._iterating or not self._has_more():
                self._iterating = None
                return None
            self._iterating -= 1
            data = self.sample()
        return data.copy().clear_device_() if isinstance(data, TensorDictBase) else data

    # ------------------------------------------------------------------ checkpoints

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the buffer in a folder: filled rows, sampler, writer, transforms, and its generator if it has one.

        The checkpoint has the state of one moment, and is flushed to the disk when this returns. If the process is killed,
        the folder holds the previous checkpoint or the new one, complete. Files that have not changed since the previous
        checkpoint are hard links; each checkpoint can be deleted. Other threads and processes wait until everything was
        read. Prefetched batches are drawn again. `prefetch`, `collate_fn`, hooks and functions are not saved.

        Args:
            path: a folder; made if it is missing. Other files in it stay.

        Raises:
            FileNotFoundError: the folder above is missing.
            RuntimeError: a tensor storage was not written to yet.
            TypeError: something cannot be saved; the message names it.
            OSError: the disk is full, or fails.
        """
        previous = [] if self._latest_checkpoint is None else [self._latest_checkpoint]
        with Writing(path, previous) as out, self._unchanging():
            self.drop_prefetched()
            out.write(self.state(out))
        self._latest_checkpoint = out.path

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
        resize: bool = False,
    ) -> None:
        """Load a checkpoint into a buffer built alike, which then continues as the saved one would.

        Everything is read and checked before anything changes; after an error the buffer is as before, bit for bit. The
        rows are in memory twice meanwhile, unless the storage has no memory yet. Parameters such as alpha, beta and
        batch_size become those of the checkpoint; another batch_size warns. Folders that `dumps` of torchrl wrote are
        converted first, by `interop.formats.convert_torchrl`.

        Args:
            path: the folder. Nothing in it is changed or executed.
            verify: "full" compares the checksum of every byte, "size" that of the manifest and the sizes of files.
            strict: keys that only the checkpoint or only the storage has are an error; else they are left out, or zero.
            cast: cast items of other dtypes, instead of raising.
            allow_pickle: read objects saved by `ListStorageCheckpointer(allow_pickle=True)`. This runs any code that the
                file names: only for files that you trust.
            resize: load a checkpoint of another capacity, as if the saved buffer had been resized before; see
                `ReplayBuffer.resize`. The rows are in memory three times meanwhile.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointCorrupt: it is damaged; the message names the file.
            CheckpointMismatch: it is one of something else: all differences are listed.
        """
        refuse_other_folder(path)

        def check(source: Reading) -> Apply:
            options = LoadOptions(strict, cast, allow_pickle, source, str(source.path), resize=bool(resize))
            return self.with_state(source.tree, options)

        with self._unchanging():
            self._put_in(load(path, check, verify))
        self._latest_checkpoint = Path(path).absolute()

    def _put_in(self, apply: Apply) -> None:
        """Put a checked state in, in one transaction."""
        replaced([storage.guard for storage in self._replaced_storages()], apply)


def as_generator(generator: Any) -> torch.Generator | None:
    """A generator or None; TypeError for anything else."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    return generator


def as_collate_fn(function: Any) -> Callable[[Any], Any] | None:
    """A function or None; TypeError for anything else."""
    if function is not None and not callable(function):
        raise TypeError(f"collate_fn must be callable, got {type(function).__name__}")
    return function

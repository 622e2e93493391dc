"""The components of a replay buffer: made, joined, exchanged, locked, pickled."""

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

from interop.buffers import collate
from interop.buffers.fused import Fused
from interop.buffers.prefetch import Prefetch
from interop.numbers import whole
from interop.samplers import PrioritizedSampler, RandomSampler, Sampler
from interop.storages import ListStorage, Storage
from interop.transforms.chain import Compose, as_chain
from interop.writers import RoundRobinWriter, Writer


class Joined:
    """A storage, a sampler, a writer and a chain of transforms that know of each other. See `ReplayBuffer`."""

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
    ) -> None:
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory exclude each other")
        if batch_size is not None:
            batch_size = whole("batch_size", batch_size)
        if prefetch is not None:
            prefetch = whole("prefetch", prefetch, least=0)
        if prefetch and batch_size is None:
            raise ValueError("prefetch needs a batch_size: dynamic batch sizes cannot be drawn ahead")
        if prefetch and shared:
            raise ValueError("prefetch and shared exclude each other: batches drawn ahead miss other processes' writes")
        if dim_extend is not None and dim_extend < 0:
            raise ValueError(f"dim_extend must be at least 0, got {dim_extend}")
        self._batch_size = batch_size
        self._pin_memory = pin_memory
        self._prefetch = Prefetch(prefetch) if prefetch else None
        self._rng = generator
        self._dim_extend = dim_extend
        self._checkpointer = checkpointer
        self._iterator: Iterator[Any] | None = None
        self._make_locks()
        self.share(shared)
        self._parts = (storage, sampler, writer, collate_fn, transform, transform_factory, bool(compilable))
        self._initialized = False
        if not (transform_factory is not None if delayed_init is None else delayed_init):
            self._init()

    def _init(self) -> None:
        storage, sampler, writer, collate_fn, transform, transform_factory, compilable = self._parts
        self._initialized = True
        self._storage: Storage = _made("storage", storage, Storage, lambda: ListStorage(1000, compilable=compilable))
        self._sampler: Sampler = _made("sampler", sampler, Sampler, RandomSampler)
        self._writer: Writer = _made("writer", writer, Writer, self._default_writer)
        if getattr(self._sampler, "drop_last", False) and self._batch_size is None:
            raise ValueError("a sampler with drop_last=True needs a batch_size in the constructor of the buffer")
        self._transform = as_chain(transform_factory() if transform_factory is not None else transform)
        self._collate_fn = collate_fn or collate.default_for(self._storage)
        self._storage.checkpointer = self._checkpointer
        self._join()
        self.set_rng(self._rng)

    @staticmethod
    def _default_writer() -> Writer:
        return RoundRobinWriter()

    @staticmethod
    def _check_fit(storage: Storage, sampler: Sampler) -> None:
        wanted = storage._max_size  # as asked for; several item dims round it up to whole rows
        if isinstance(sampler, PrioritizedSampler) and sampler.max_size < wanted:
            raise ValueError(
                f"the sampler holds {sampler.max_size} items, the storage {wanted}: build it with max_capacity={wanted}"
            )

    def _join(self) -> None:
        """Have the components know of each other."""
        self._check_fit(self._storage, self._sampler)
        self._storage.attach(self)
        self._writer.register_storage(self._storage)
        if isinstance(self._sampler, PrioritizedSampler):
            self._sampler.take_over(self._storage)
        self._fused = Fused.of(self._storage, self._sampler)
        self._keyed = isinstance(self._sampler, RandomSampler | PrioritizedSampler)

    def __getattr__(self, name: str) -> Any:
        if name in _MADE_LATE and not self.__dict__.get("_initialized", True):
            self._init()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    @property
    def initialized(self) -> bool:
        """Whether the components were made."""
        return self._initialized

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
    def transform(self) -> Compose:
        """The chain of transforms."""
        return self._transform

    @property
    def batch_size(self) -> int | None:
        """Of `sample()` and of iteration."""
        return self._batch_size

    @property
    def write_count(self) -> int:
        """Rows ever written."""
        return self._writer.write_count

    @property
    def dim_extend(self) -> int:
        """The dim of data along which `extend` runs."""
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    @dim_extend.setter
    def dim_extend(self, value: int) -> None:
        if value != self.dim_extend:
            raise RuntimeError(f"dim_extend is {self.dim_extend} and cannot be changed to {value}")

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Put in another storage; returns the one before."""
        with self._locked():
            made = _made("storage", storage, Storage)
            self._check_fit(made, self._sampler)
            chosen = collate_fn or collate.default_for(made)
            if made is self._storage:
                self._collate_fn = chosen
                return made
            before, self._storage = self._storage, made
            before._attached = [each for each in before._attached if each is not self]
            self._sampler._empty()
            self._collate_fn = chosen
            self._drop_ahead()
            self._join()
            return before

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Put in another sampler, which takes over the stored rows; returns the one before."""
        with self._locked():
            made = _made("sampler", sampler, Sampler)
            self._check_fit(self._storage, made)
            before, self._sampler = self._sampler, made
            self._drop_ahead()
            self._join()
            self.set_rng(self._rng)
            return before

    def set_writer(self, writer: Writer) -> Writer:
        """Put in another writer; returns the one before."""
        with self._locked():
            before, self._writer = self._writer, _made("writer", writer, Writer)
            self._join()
            self.set_rng(self._rng)
            return before

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Have this generator govern every draw from now on."""
        with self._locked():
            self._drop_ahead()
            self._rng = generator
            self._hand_rng()

    def _hand_rng(self) -> None:
        for part in (self._storage, self._sampler, self._writer):
            part._rng = self._rng

    def share(self, shared: bool = True) -> Self:
        """Have worker processes take turns at every call, or not."""
        self._process_lock: Any = multiprocessing.get_context("spawn").RLock() if shared else contextlib.nullcontext()
        return self

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform at the end. With `invert` it runs forward when writing and backward when reading."""
        with self._locked():
            self._transform.append(transform, invert=invert)
            self._drop_ahead()
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform before the one at index."""
        with self._locked():
            self._transform.insert(index, transform, invert=invert)
            self._drop_ahead()
        return self

    def _make_locks(self) -> None:
        self._lock = threading.RLock()
        self._queue_lock = threading.RLock()

    def _locked(self) -> "_Both":
        return _Both(self._lock, self._process_lock)

    def _drop_ahead(self) -> None:
        if self._prefetch is not None:
            self._prefetch.drop()

    def __getstate__(self) -> dict[str, Any]:
        self._storage  # noqa: B018  # a pickle holds components, not what makes them
        state = {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("_lock", "_queue_lock", "_iterator", "_fused")
        }
        state["_parts"] = None
        if self._rng is not None:
            state["_rng"] = (self._rng.get_state(), str(self._rng.device))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rng = state.pop("_rng")
        self.__dict__.update(state, _iterator=None)
        self._make_locks()
        if rng is not None:
            generator = torch.Generator(rng[1])
            generator.set_state(rng[0])
            rng = generator
        self._rng = rng
        self._join()
        self._hand_rng()

    def __repr__(self) -> str:
        parts = [f"storage={self._storage!r}", f"sampler={self._sampler!r}", f"writer={self._writer!r}"]
        if len(self._transform):
            parts.append(f"transform={self._transform!r}")
        parts += [f"batch_size={self._batch_size}", f"collate_fn={self._collate_fn}"]
        body = ",\n".join(parts)
        return f"{type(self).__name__}(\n" + "\n".join("    " + line for line in body.splitlines()) + ")"


class _Both:
    """Two locks held together."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second

    def __enter__(self) -> None:
        self._first.__enter__()
        try:
            self._second.__enter__()
        except BaseException:
            self._first.__exit__(None, None, None)
            raise

    def __exit__(self, *raised: Any) -> None:
        try:
            self._second.__exit__(*raised)
        finally:
            self._first.__exit__(*raised)


_MADE_LATE = ("_storage", "_sampler", "_writer", "_transform", "_collate_fn", "_fused", "_keyed")


def _made(name: str, given: Any, kind: type, default: Callable[[], Any] | None = None) -> Any:
    """The component, made where a callable was given; TypeError for one of the wrong kind."""
    made = default() if given is None and default is not None else given
    if not isinstance(made, kind) and callable(made):
        made = made()
    if not isinstance(made, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or a callable that returns one, got {type(made).__name__}")
    return made

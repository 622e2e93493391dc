"""The components of a replay buffer: made, joined, exchanged, pickled."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from interop.buffers import collate
from interop.buffers.checkpoints import Saveable
from interop.buffers.pending import reads_slots
from interop.buffers.prefetch import Prefetch
from interop.buffers.turn import turn
from interop.data.class_names import class_of
from interop.data.numbers import whole
from interop.sample_units import SampleUnit, expanding
from interop.samplers import ConsumingSampler, PrioritizedSampler, RandomSampler, Sampler
from interop.samplers.assembly import Assemblies
from interop.samplers.consuming import consuming
from interop.samplers.drawn_elsewhere import DrawnElsewhere
from interop.shared.processes import starting_a_worker
from interop.shared.thread_lock import Lock, renew_in_children
from interop.storages import ListStorage, Storage, StorageEnsemble
from interop.transforms.chain import Compose, as_chain
from interop.writers import RoundRobinWriter, Writer


class Joined(Saveable):
    """A storage, a sampler, a writer and a chain of transforms that know of each other. See `ReplayBuffer`."""

    _workers_only_write = False  # whether processes that are given the buffer, or forked, get it without the sampler

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
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
    ) -> None:
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory exclude each other")
        if batch_size is not None:
            batch_size = whole("batch_size", batch_size)
        if prefetch is not None:
            prefetch = whole("prefetch", prefetch, least=0)
        if prefetch and batch_size is None:
            raise ValueError("prefetch needs a batch_size: dynamic batch sizes cannot be drawn ahead")
        if dim_extend is not None:
            dim_extend = whole("dim_extend", dim_extend, least=0)
        if consume_after_n_samples is not None:
            sampler = consuming(sampler, consume_after_n_samples)
        self._unit = expanding(sample_unit)
        self._batch_size = batch_size
        self._pin_memory = pin_memory
        self._prefetch = Prefetch(prefetch) if prefetch else None
        self._rng = _a_generator(generator)
        self._dim_extend = dim_extend
        self._checkpointer = checkpointer
        self._begin()
        self._asks_to_share(shared)
        collate_fn = _a_function(collate_fn)
        self._parts: Any = (storage, sampler, writer, collate_fn, transform, transform_factory, bool(compilable))
        if not (transform_factory is not None if delayed_init is None else delayed_init):
            self._init()

    def _begin(self) -> None:
        """What no copy, pickle or worker takes over."""
        self._making = Lock()  # of the components
        self._stepping = Lock()  # from one batch to the `next()`
        self._iterating = False
        self._assemblies = Assemblies()
        self._readers: tuple[Callable[[], Any], ...] = ()  # references to ensembles that draw from here ahead of time

    def _init(self) -> None:
        """Make the components. Where that fails nothing is kept, and the next use tries again."""
        with self._making:
            if self._parts is None:
                return  # another thread has made them
            given_storage, given_sampler, given_writer, collate_fn, transform, transform_factory, compilable = (
                self._parts
            )
            sampler = made("sampler", given_sampler, Sampler, RandomSampler)
            room = sampler.max_size if isinstance(sampler, PrioritizedSampler) else 1000
            storage = made("storage", given_storage, Storage, lambda: ListStorage(room, compilable=compilable))
            writer = made("writer", given_writer, Writer, lambda: self._default_writer(compilable))
            sampler.check_batch_size(self._batch_size)
            chain = as_chain(transform_factory() if transform_factory is not None else transform)
            collate_fn = collate_fn or collate.default_for(storage)
            with storage.lock.turn():
                self._join(storage, sampler, writer, _transform=chain, _collate_fn=collate_fn)
                if self._checkpointer is not None:
                    storage.checkpointer = self._checkpointer
                self._parts = None

    @staticmethod
    def _default_writer(compilable: bool) -> Writer:
        return RoundRobinWriter()

    @staticmethod
    def _check_fit(storage: Storage, sampler: Sampler) -> None:
        wanted = getattr(storage, "_max_size", storage.max_size)  # as asked for, before it is rounded up to whole rows
        if isinstance(sampler, PrioritizedSampler) and sampler.max_size < wanted:
            cure = f"build it with max_capacity={wanted}" if wanted < 2**31 else "give the storage a max_size"
            raise ValueError(f"the sampler holds {sampler.max_size} items, the storage {wanted}: {cure}")

    def _join(self, storage: Storage, sampler: Sampler, writer: Writer, **others: Any) -> None:
        """Have the components know of each other and of this buffer. The lock of the storage is held."""
        self._check_fit(storage, sampler)
        writer.check_storage(storage)
        if self._unit is not None and isinstance(storage, StorageEnsemble):
            raise TypeError("a sample unit expands the items of one storage: give it to the members of an ensemble")
        if self._workers_only_write:
            if storage.ndim != 1:
                raise ValueError(f"sync=False needs a storage with ndim=1, got one with ndim={storage.ndim}")
            renew_in_children(self)
        consumed = sampler if isinstance(sampler, ConsumingSampler) else None
        sampler.check_fit(storage, writer, self._prefetch is not None, self._unit is not None)
        held = self.__dict__
        if held.get("_storage") is not storage or held.get("_sampler") is not sampler:
            if "_storage" in held:
                sampler.clear()  # it may have served another storage, or this one some time ago
            sampler.take_over(storage)
        writer.register_storage(storage)
        for each, vacant in ((held.get("_writer"), None), (writer, None if consumed is None else consumed.vacant)):
            if isinstance(each, RoundRobinWriter):
                each.vacant = vacant
        if "_transform" in others:
            others["_transform"].set_container(self)
        if self._shared:
            storage.share()
        self._storage, self._sampler, self._writer = storage, sampler, writer
        self._reads_slots = self._unit is None and reads_slots(storage, sampler)
        self.__dict__.update(others)
        storage.attach(self)
        self._hand_rng()

    def renew(self) -> None:  # in a forked child
        self._sampler, self._reads_slots = DrawnElsewhere(), False

    def __getattr__(self, name: str) -> Any:
        if name in _MADE_LATE and "_making" in self.__dict__:
            try:
                self._init()
            except AttributeError as error:  # would be taken for one of this buffer
                raise RuntimeError(f"a component could not be made: AttributeError: {error}") from error
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    @property
    def initialized(self) -> bool:
        """Whether the components were made."""
        return self._parts is None

    def stats(self) -> dict[str, int | float | bool]:
        """Numbers to watch, JSON as they are; makes no components that were not made yet.

        "size", "write_count", "prefetch_queue_size", "initialized" and, where the storage is known, "capacity" and
        "utilization", which is size / capacity.
        """
        storage = self._storage if self.initialized else self._parts[0]
        told: dict[str, int | float | bool] = {
            "size": len(self) if self.initialized else 0,
            "write_count": self.write_count if self.initialized else 0,
            "prefetch_queue_size": 0 if self._prefetch is None else len(self._prefetch),
            "initialized": self.initialized,
        }
        if isinstance(storage, Storage):
            told |= {"capacity": storage.max_size, "utilization": told["size"] / storage.max_size}
        return told

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
        with self._in_turn():
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
        new = made("storage", storage, Storage)
        chosen = _a_function(collate_fn) or collate.default_for(new)
        while True:
            before = self._storage
            first, second = sorted((before.lock, new.lock), key=id)  # in one order, whoever exchanges with whom
            with first.turn(), second.turn(), turn(self):
                if self._storage is before:
                    self._exchange_storage(new, chosen)
                    return before

    def _exchange_storage(self, new: Storage, collate_fn: Callable[[Any], Any]) -> None:
        if new is not self._storage:
            self._sampler.refuse_a_stranger()
            before = self._storage
            self._join(new, self._sampler, self._writer)
            before.detach(self)
        self._collate_fn = collate_fn
        self._drop_ahead()

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Put in another sampler, which takes over the stored rows; returns the one before."""
        new = made("sampler", sampler, Sampler)
        new.check_batch_size(self._batch_size)
        with turn(self):
            before = self._sampler
            self._join(self._storage, new, self._writer)
            self._drop_ahead()
            return before

    def set_writer(self, writer: Writer) -> Writer:
        """Put in another writer; returns the one before."""
        new = made("writer", writer, Writer)
        with turn(self):
            before = self._writer
            self._join(self._storage, self._sampler, new)
            return before

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Have this generator govern every draw from now on."""
        generator = _a_generator(generator)
        with turn(self):
            self._rng = generator
            self._hand_rng()
            self._drop_ahead()

    def _hand_rng(self) -> None:
        for part in (self._storage, self._sampler, self._writer):
            part._rng = self._rng

    def share(self, shared: bool = True) -> Self:
        """Have processes take turns at every call, those of all buffers on the storage. ValueError with prefetch.

        They do by themselves from the moment a process is started with the buffer, and memory maps from a fork on. Forked
        children of other buffers can only read what there was at the fork. False takes back only what was asked for before
        any process has the buffer.
        """
        self._asks_to_share(shared)
        if self.initialized:
            self._storage.share() if shared else self._storage.lock.unshare()
        return self

    def _asks_to_share(self, shared: bool) -> None:
        if shared and self._prefetch is not None:
            raise ValueError("prefetch and shared exclude each other: batches drawn ahead miss other processes' writes")
        self._shared = bool(shared)

    @property
    def _process_lock(self) -> Any:
        """The lock among processes, of the storage; None where they take no turns."""
        return self._storage.lock.processes

    def _in_turn(self) -> contextlib.AbstractContextManager[None]:
        """A turn for what one step reads: only where a process that ended may have left it half done, or a fork."""
        return turn(self) if self._storage.lock.hooked else contextlib.nullcontext()

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform at the end. With `invert` it runs forward when writing and backward when reading."""
        return self.insert_transform(len(self._transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform before the one at index."""
        with turn(self):
            self._transform.insert(index, transform, invert=invert)
            self._drop_ahead()
        return self

    def _rejoin(self, beside: Sequence[Any] = ()) -> None:
        """The storage holds other rows than before: have what keeps something beside them, and other buffers, know, but
        for those `beside`, which do."""
        if isinstance(self._sampler, PrioritizedSampler):
            self._sampler._keep(self._storage)
        for buffer in self._storage.attached():
            if isinstance(buffer, Joined) and all(buffer is not each for each in (self, *beside)):
                buffer._sampler.clear()
                buffer._sampler.take_over(self._storage)
                buffer._drop_ahead()

    def _drop_ahead(self) -> None:
        """Undo all requests for batches that were not returned, here and in ensembles that draw from here."""
        if self._prefetch is not None:
            self._prefetch.drop()
        for each in self._readers:
            if (reader := each()) is not None:
                reader._drop_ahead()

    def _snapshot(self, memo: dict[int, Any]) -> dict[str, Any]:
        """What a pickle or copy has, as of one moment: with components of its own. A worker gets those there are."""
        self._storage  # noqa: B018  # components, not what makes them
        with turn(self), self._queue_still():
            self._drop_ahead()
            state = {key: value for key, value in self.__dict__.items() if key not in _NOT_KEPT}
            if not starting_a_worker():
                parts = copy.deepcopy([state[name] for name in _COMPONENTS], memo)
                state.update(zip(_COMPONENTS, parts, strict=True))
            elif self._workers_only_write:
                state["_sampler"] = DrawnElsewhere()
            if self._rng is not None:
                state["_rng"] = (self._rng.get_state(), str(self._rng.device))
            return state

    def __getstate__(self) -> dict[str, Any]:
        return self._snapshot({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = self._snapshot(memo)
        rest = {key: value for key, value in state.items() if key not in _COMPONENTS}
        twin.__setstate__({**state, **copy.deepcopy(rest, memo)})
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        rng = state["_rng"]
        if rng is not None:
            state["_rng"] = torch.Generator(rng[1])
            state["_rng"].set_state(rng[0])
        self.__dict__.update(state, _parts=None)
        with self._storage.lock.turn():
            self._join(self._storage, self._sampler, self._writer)

    def __repr__(self) -> str:
        parts = [f"storage={self._storage!r}", f"sampler={self._sampler!r}", f"writer={self._writer!r}"]
        if len(self._transform):
            parts.append(f"transform={self._transform!r}")
        parts += [f"batch_size={self._batch_size}", f"collate_fn={self._collate_fn}"]
        body = ",\n".join(parts)
        return f"{type(self).__name__}(\n" + "\n".join("    " + line for line in body.splitlines()) + ")"


_COMPONENTS = ("_storage", "_sampler", "_writer")
_MADE_LATE = (*_COMPONENTS, "_transform", "_collate_fn", "_reads_slots")
_NOT_KEPT = ("_making", "_stepping", "_iterating", "_readers", "_parts", "_reads_slots", "_assemblies")


def made(name: str, given: Any, kind: type, default: Callable[[], Any] | None = None) -> Any:
    """The component, made where a callable was given; TypeError for one of the wrong kind."""
    made = default() if given is None and default is not None else given
    if not isinstance(made, kind) and callable(made):
        made = made()
    if not isinstance(made, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or a callable that returns one, got {class_of(made)}")
    return made


def _a_generator(given: Any) -> torch.Generator | None:
    if given is not None and not isinstance(given, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(given).__name__}")
    return given


def _a_function(given: Any) -> Callable[[Any], Any] | None:
    if given is not None and not callable(given):
        raise TypeError(f"collate_fn must be callable, got {type(given).__name__}")
    return given

"""The components of a buffer: made from what its constructor was given, and checked against each other."""

from collections.abc import Callable
from typing import Any

from interop.buffers import collate
from interop.data.class_names import class_of
from interop.sample_units import SampleUnit
from interop.samplers import PrioritizedSampler, RandomSampler, Sampler
from interop.storages import ListStorage, Storage, StorageEnsemble
from interop.transforms.chain import Compose, as_chain
from interop.writers import Writer

Components = tuple[Storage, Sampler, Writer, Compose, Callable[[Any], Any]]


def made(name: str, given: Any, kind: type, default: Callable[[], Any] | None = None) -> Any:
    """The component, made where a callable was given; TypeError for one of the wrong kind."""
    made = default() if given is None and default is not None else given
    if not isinstance(made, kind) and callable(made):
        made = made()
    if not isinstance(made, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or a callable that returns one, got {class_of(made)}")
    return made


def all_made(
    storage: Any,
    sampler: Any,
    writer: Any,
    collate_fn: Callable[[Any], Any] | None,
    transform: Any,
    compilable: bool,
    default_writer: Callable[[bool], Writer],
) -> Components:
    """All components of a buffer; None stands for the default, a callable for what it returns."""
    sampler = made("sampler", sampler, Sampler, RandomSampler)
    room = sampler.max_size if isinstance(sampler, PrioritizedSampler) else 1000
    storage = made("storage", storage, Storage, lambda: ListStorage(room, compilable=compilable))
    writer = made("writer", writer, Writer, lambda: default_writer(compilable))
    return storage, sampler, writer, as_chain(transform), collate_fn or collate.default_for(storage)


def check_fit(storage: Storage, sampler: Sampler, writer: Writer, unit: SampleUnit | None, prefetches: bool) -> None:
    """ValueError, TypeError or RuntimeError for components of which no buffer can be made."""
    wanted = storage.asked_size  # before it is rounded up to whole rows
    if isinstance(sampler, PrioritizedSampler) and sampler.max_size < wanted:
        cure = f"build it with max_capacity={wanted}" if wanted < 2**31 else "give the storage a max_size"
        raise ValueError(f"the sampler holds {sampler.max_size} items, the storage {wanted}: {cure}")
    writer.check_storage(storage)
    if isinstance(storage, StorageEnsemble):
        raise TypeError("a buffer has one storage: a StorageEnsemble is for a ReplayBufferEnsemble")
    sampler.check_fit(storage, writer, prefetches, unit is not None)

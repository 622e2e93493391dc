"""The components of a buffer: created from the arguments of its constructor, and checked against each other."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from fbuf.memory_plan import Share
from interop.buffers import collate
from interop.data.arguments import class_of
from interop.data.item_specs import is_spec
from interop.data.pytrees import each_leaf, length_of, swapped
from interop.sample_units import SampleUnit
from interop.samplers import ConsumingSampler, PrioritizedSampler, RandomSampler, Sampler
from interop.storages import ListStorage, Storage, StorageEnsemble, TensorStorage
from interop.storages import planning as of_storages
from interop.transforms.chain import Compose, as_chain
from interop.writers import Writer

Components = tuple[Storage, Sampler, Writer, Compose, Callable[[Any], Any]]


def made_component(name: str, component: Any, kind: type, default: Callable[[], Any] | None = None) -> Any:
    """The component, or the result of a callable. TypeError for another kind."""
    component = default() if component is None and default is not None else component
    if not isinstance(component, kind) and callable(component):
        component = component()
    if not isinstance(component, kind):
        raise TypeError(f"{name} must be a {kind.__name__} or a callable that returns one, got {class_of(component)}")
    return component


def all_made(
    storage: Storage | Callable[[], Storage] | None,
    sampler: Sampler | Callable[[], Sampler] | None,
    writer: Writer | Callable[[], Writer] | None,
    collate_fn: Callable[[Any], Any] | None,
    transform: Any,
    compilable: bool,
    default_writer: Callable[[bool], Writer],
) -> Components:
    """All components of a buffer. None stands for the default, a callable for its result."""
    draws: Sampler = made_component("sampler", sampler, Sampler, RandomSampler)
    room = draws.max_size if isinstance(draws, PrioritizedSampler) else 1000
    holds: Storage = made_component("storage", storage, Storage, lambda: ListStorage(room, compilable=compilable))
    writes: Writer = made_component("writer", writer, Writer, lambda: default_writer(compilable))
    return holds, draws, writes, as_chain(transform), collate_fn or collate.default_for(holds)


def check_fit(storage: Storage, sampler: Sampler, writer: Writer, unit: SampleUnit | None, prefetches: bool) -> None:
    """ValueError, TypeError or RuntimeError for components that do not fit together."""
    # As the user asked for, before it is rounded up to whole rows.
    needed = storage.table.max_items if isinstance(storage, TensorStorage) else storage.max_size
    if isinstance(sampler, PrioritizedSampler) and sampler.max_size < needed:
        cure = f"build it with max_capacity={needed}" if needed < 2**31 else "give the storage a max_size"
        raise ValueError(f"the sampler holds {sampler.max_size} items, the storage {needed}: {cure}")
    writer.check_storage(storage)
    if isinstance(storage, StorageEnsemble):
        raise TypeError("a buffer has one storage: a StorageEnsemble is for a ReplayBufferEnsemble")
    sampler.check_fit(storage, writer, prefetches, unit is not None)
    if unit is not None:
        unit.check_fit(writer)


def keeps_rows_in_order(sampler: Sampler, writer: Writer) -> bool:
    """Whether the stored rows are in the order of writing around the ring.

    Not under a writer that puts items in the places of others by their values, nor where new items take the slots of
    consumed ones.
    """
    return writer.keeps_order and not isinstance(sampler, ConsumingSampler)


def check_batch_size(sampler: Sampler, batch_size: int | None) -> None:
    """ValueError for a batch size that the sampler cannot draw; None means that each call has its own size."""
    if batch_size is not None:
        sampler.draws.check_batch_size(batch_size)
    elif getattr(sampler, "drop_last", False):  # of a user's class, too
        raise ValueError("a sampler with drop_last=True needs a batch_size in the constructor of the buffer")


# ------------------------------------------------------------------ memory


def shares_of(storage: Storage, sampler: Sampler, writer: Writer, stored: Any) -> list[Share]:
    """The shares of a storage, a sampler and a writer. `stored` is a first row as `first_row` returns it, or None."""
    if stored is not None and length_of(stored):
        stored = writer.stamped(stored, torch.arange(1, device="cpu"))
    shares = list(storage.memory_shares(stored))
    capacity = storage.max_size
    if stored is not None and isinstance(storage, TensorStorage) and storage.ndim > 1 and not storage.initialized:
        capacity = storage.table.item_capacity(stored)
    shares += sampler.item_values.memory_shares(storage, capacity)
    shares += sampler.draws.memory_shares(storage, capacity)
    if writer.tracks_generations and storage.max_size < 2**31:
        shares.append(Share("writer", "generations", "cpu", 8 * storage.row_capacity(stored)))
    return shares


def example_of(data: Any, ndim: int, dim_extend: int) -> Any:
    """The data for `extend`; an example row for a spec, of `interop.specs` or torchrl."""
    return swapped(of_storages.row_of(data, ndim), dim_extend) if is_spec(data) else data


def first_row(stored: Any) -> Any:
    """The first row of data, rows first."""
    return stored[:1] if isinstance(stored, list) else each_leaf(stored, _first)


def _first(leaf: Any) -> Any:
    return leaf[:1] if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf

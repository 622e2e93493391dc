"""Uniform draws of items, each of which is drawn a limited number of times."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fbuf.samplers import Chances
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions
from interop.data.arguments import class_of, whole
from interop.samplers.draws import Draws
from interop.samplers.item_uses import ItemUses
from interop.samplers.sampler import Sampler
from interop.storages import LazyFrameStorage, ListStorage, Storage, TensorStorage
from interop.storages.all_or_nothing import Undoable
from interop.writers import RoundRobinWriter, Writer


class ConsumingDraws(Draws):
    """Draws items that were not consumed, uniformly and without repetition within a batch."""

    def __init__(self, uses: ItemUses) -> None:
        self._uses = uses

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        return torch.from_numpy(self._uses.draw(storage, batch_size, key)), {}

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        return Chances.in_epoch(len(storage), self._uses.drawable(storage), shuffle=True)

    @property
    def undoable(self) -> Undoable | None:
        return self._uses


class ConsumingSampler(Sampler):
    """Uniform draws without repetition within a batch; an item is consumed after `max_sample_count` draws.

    A batch is shorter where fewer items are left; RuntimeError where none is. The length of the buffer is the number of
    items that are left, and iterating over it ends with the last one. New items take the slots of consumed items first, then
    those from the cursor on. Needs a storage with one item dim and a `RoundRobinWriter`, and no prefetching. A buffer with
    this sampler can be used in one process only. What was consumed of a memory map in a folder is consumed when it is opened
    again. O(batch).

    Args:
        max_sample_count: how often an item is drawn.
    """

    _library_draws: ConsumingDraws
    _library_values: ItemUses

    def __init__(self, max_sample_count: int = 1) -> None:
        self._library_values = ItemUses(whole("max_sample_count", max_sample_count))
        self._library_draws = ConsumingDraws(self._library_values)

    @property
    def max_sample_count(self) -> int:
        """How often an item is drawn."""
        return self._library_values.most

    @property
    def ran_out(self) -> bool:
        """Whether the last draw took the last item."""
        return self._library_values.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._library_values.ran_out = value

    def sampleable(self, storage: Storage) -> int:
        return self._library_values.left(storage)

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """int64 [at most batch_size], each slot once, and an empty info. RuntimeError where nothing is left."""
        return self._library_draws.draw(storage, batch_size, key)

    def vacant(self, count: int) -> np.ndarray:
        """At most `count` slots of consumed items."""
        return self._library_values.vacant(count)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """The items at index are new."""
        self._library_values.written(index, storage=storage)

    def state(self) -> dict[str, Any]:
        return self._library_values.state()

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            return self._library_values.with_state(entries)

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        """TypeError or ValueError for a buffer whose items cannot be consumed."""
        if not isinstance(storage, ListStorage | TensorStorage) or isinstance(storage, LazyFrameStorage):
            raise TypeError(
                f"items cannot be consumed from a {type(storage).__name__}: use a ListStorage or a LazyTensorStorage, whose "
                "slots can be written in any order"
            )
        if storage.ndim != 1:
            raise ValueError(f"items can be consumed from a storage with one item dim, got ndim={storage.ndim}")
        if not isinstance(writer, RoundRobinWriter):
            raise TypeError(f"items can be consumed beside a RoundRobinWriter, got {class_of(writer)}")
        if prefetches:
            raise ValueError("prefetch and consuming exclude each other: dropped batches would consume their items")
        if expands:
            raise ValueError("sample_unit and consuming exclude each other: rows of an episode do not stay together")

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "max_sample_count", self.max_sample_count
        yield "sampleable", self._library_values.live


def consuming(sampler: Any, count: Any) -> Any:
    """The sampler, or its factory, of a buffer with `consume_after_n_samples=count`; `given` may be one or None.

    TypeError for another sampler, ValueError for one with another count.
    """
    count = whole("consume_after_n_samples", count)
    if sampler is None:
        return ConsumingSampler(count)
    if not isinstance(sampler, Sampler) and callable(sampler):
        make: Callable[[], Any] = sampler
        return lambda: consuming(make(), count)
    if not isinstance(sampler, ConsumingSampler):
        raise TypeError(f"consume_after_n_samples needs a ConsumingSampler or none, got {class_of(sampler)}")
    if sampler.max_sample_count != count:
        raise ValueError(f"consume_after_n_samples={count}, but the sampler has {sampler.max_sample_count}")
    return sampler

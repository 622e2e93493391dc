"""Items get a priority when they are written, and are drawn in proportion to it (arXiv:1511.05952)."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

import fbuf
from fbuf import priority_tree
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, as_arrays, as_tensors, defined_outside
from interop.data import bridge
from interop.data.arguments import not_negative, whole
from interop.samplers import priority_states
from interop.samplers.drawing import DrawingSampler
from interop.samplers.item_priorities import ItemPriorities
from interop.samplers.parameter import Parameter
from interop.samplers.priority_draws import PriorityDraws
from interop.samplers.slot_draws import SlotDraws
from interop.storages import Storage

_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


class PrioritizedSampler(DrawingSampler):
    """Draws item i with probability v_i / sum(v), v = (priority + eps) ** alpha; all in O(batch * log capacity).

    A batch comes with "priority_weight", (v_i / min(v)) ** -beta over all stored items. A new item gets the highest
    priority ever given, 1 at first.

    Args:
        max_capacity: items at most; at least the capacity of the storage.
        alpha: how much priorities count, 0 for not at all. Setting it re-weighs all stored items.
        beta: how much weights correct for it.
        eps: added to every priority.
        dtype: of priorities and sums, torch.float32 or torch.float64.
        reduction: how a buffer makes one priority of several: "max", "min", "mean", "median" or "sum".
        max_priority_within_buffer: new items get the highest priority of the stored items.
        device: of the priorities; None follows the storage.
    """

    _EXCLUDES: ClassVar[bool] = False  # whether items may be excluded from draws
    alpha = Parameter[float]("_library_values", "How much priorities count.")
    beta = Parameter[float]("_library_values", "How much weights correct for it.")
    reduction = Parameter[str]("_library_values", "How a buffer makes one priority of several.")
    device = Parameter[torch.device]("_library_values", "The device of the priorities.")
    functional_state = Parameter[fbuf.PrioritizedState | None](
        "_library_values",
        "The functional state of all items; None before the first item. O(capacity).\n\n"
        "The next write or draw takes its memory over: copy what is to be kept.",
    )
    dtype: torch.dtype
    _library_draws: SlotDraws
    _library_values: ItemPriorities

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        max_capacity = whole("max_capacity", max_capacity)
        if max_capacity > priority_tree.LARGEST:
            raise ValueError(f"max_capacity must be at most {priority_tree.LARGEST}, got {max_capacity}")
        if dtype not in _DTYPES:
            raise NotImplementedError(f"priorities can be torch.float32 or torch.float64, got {dtype}")
        rule = fbuf.Prioritized(
            eps=not_negative("eps", eps),
            new_items="highest_stored" if max_priority_within_buffer else "highest_ever",
            dtype=_DTYPES[dtype],  # type: ignore[arg-type]  # one of the two literals
        )
        place = None if device is None else torch.device(device)
        if place is not None and bridge.jax_device(place) is None:
            raise RuntimeError(f"JAX does not see the device {place}: install a JAX that does, or use the CPU")
        self.dtype = dtype
        self._library_values = ItemPriorities(rule, max_capacity, alpha, beta, reduction, place, self._EXCLUDES)
        if defined_outside(self, "mark_update"):
            self._library_values.on_new = self.mark_update
        self._library_draws = PriorityDraws(self._library_values)

    # ------------------------------------------------------------------ parameters and priorities

    @property
    def max_size(self) -> int:
        """Items at most. It can be raised."""
        return self._library_values.capacity

    @max_size.setter
    def max_size(self, value: int) -> None:
        items = whole("max_size", value, least=self.max_size)
        if items > priority_tree.LARGEST:
            raise ValueError(f"max_size must be at most {priority_tree.LARGEST}, got {value}")
        self._library_values.capacity = items  # the memory follows at the next write

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return self._library_values.rule.eps

    @property
    def default_priority(self) -> float:
        """The priority of the next new item."""
        return self._library_values.default

    @property
    def priorities(self) -> Tensor:
        """A copy of the priorities of all stored items, before eps and alpha."""
        return self._library_values.given

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give the items at index the default priority; entries of -1 are ignored.

        IndexError for an item that is not stored. New items need `storage`.
        """
        self._library_values.written(index, storage=storage)

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Give stored items new priorities. Of equal indices the last wins; entries of -1 are ignored.

        Args:
            index: an int, 1-d integers, or coordinates [n, ndim] for a storage of several item dims.
            priority: one value for all, or one for each index; finite and not negative.
            storage: needed for coordinates.

        Raises, before anything changes: IndexError for an index that is not stored, TypeError for one that is not an
        integer, ValueError for a priority that is negative or not finite, RuntimeError for another number of them.

        If priorities and sampler are on one accelerator, and there is one for each index, the update is asynchronous: an
        IndexError or ValueError is raised by a later call of the buffer, as a ValueError, and nothing of that update was
        applied.
        """
        self._library_values.update(index, priority, storage=storage)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return self._library_values.state()

    def state_dict(self) -> dict[str, Any]:
        """The state, and the weights that follow from the priorities as "_sum_tree" and "_min_tree"."""
        state = super().state_dict()
        return {**state, **as_tensors(priority_states.trees(as_arrays(state, self)))}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            return self._library_values.with_state(entries, options)

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield from ((name, getattr(self, name)) for name in ("alpha", "beta", "eps", "reduction"))

"""Items in proportion to their priority (arXiv:1511.05952)."""

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fbuf
from fbuf import free_memory, priority_tree
from fbuf.memory_plan import Share, shares_of
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, as_arrays, as_tensors
from interop.data import bridge
from interop.data.arguments import not_negative, whole
from interop.engine import plans
from interop.engine.kept_priorities import KeptPriorities
from interop.host.device_priorities import DevicePriorities
from interop.host.device_rows import JaxRows
from interop.host.priorities import HostPriorities, Priorities, PriorityValues
from interop.host.threads import Lock, finished, uninterrupted
from interop.samplers import priority_states
from interop.samplers.drawing import DrawingSampler, rows_on_device, stored
from interop.samplers.shares import ShardContents
from interop.samplers.validation import flat_slots, good_priorities, one_for_each, refuse_below
from interop.shared.processes import OneProcess
from interop.storages import Storage, TensorStorage

_ONE_PROCESS = (
    "a prioritized sampler cannot be shared between processes, nor used in one that was forked from the one that made it or "
    "after JAX had started: sample in the process that made it, and build a PrioritizedReplayBuffer or "
    "TensorDictPrioritizedReplayBuffer with sync=False for workers that write"
)
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


def is_accelerator(device: torch.device) -> bool:
    """Whether a device works asynchronously."""
    return device.type != "cpu"


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

    KEPT = True
    _EXCLUDES = False  # whether items may be excluded from draws
    rule: fbuf.Prioritized  # alpha is not in it: it may change without a new trace
    reduction: str
    dtype: torch.dtype
    _max_capacity: int
    _alpha: float
    _beta: float
    _device: torch.device | None  # None is the device of the storage, once that is known
    _lock: Lock
    _process: OneProcess
    _has_storage: bool
    _file: KeptPriorities | None
    _priorities: Priorities

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
        self._max_capacity = whole("max_capacity", max_capacity)
        if self._max_capacity > priority_tree.LARGEST:
            raise ValueError(f"max_capacity must be at most {priority_tree.LARGEST}, got {max_capacity}")
        if dtype not in _DTYPES:
            raise NotImplementedError(f"priorities can be torch.float32 or torch.float64, got {dtype}")
        self.rule = fbuf.Prioritized(
            eps=not_negative("eps", eps),
            new_items="highest_stored" if max_priority_within_buffer else "highest_ever",
            dtype=_DTYPES[dtype],  # type: ignore[arg-type]  # one of the two literals
        )
        self._alpha = _alpha(alpha)
        self.beta = beta
        self.reduction = reduction
        self.dtype = dtype
        self._device = None if device is None else torch.device(device)
        if self._device is not None and bridge.jax_device(self._device) is None:
            raise RuntimeError(f"JAX does not see the device {self._device}: install a JAX that does, or use the CPU")
        self._lock = Lock()
        self._process = OneProcess(_ONE_PROCESS, uses_jax=True)
        self._has_storage = False
        self._file = None
        self._priorities = self._new_priorities(self.rule, self._max_capacity, self._alpha)

    def _new_priorities(self, rule: fbuf.Prioritized, capacity: int, alpha: float) -> Priorities:
        """Priorities of no items, on the device of the sampler."""
        if is_accelerator(self.device):
            return DevicePriorities(rule, capacity, alpha, self._EXCLUDES, self.device)
        return HostPriorities(rule, capacity, alpha, self._EXCLUDES)

    def _replace(self, priorities: Priorities) -> None:
        """Use other priorities. No item is excluded from draws then."""
        self._priorities = priorities

    # ------------------------------------------------------------------ parameters and priorities

    @property
    def max_size(self) -> int:
        """Items at most. It can be raised."""
        return self._max_capacity

    @max_size.setter
    def max_size(self, value: int) -> None:
        items = whole("max_size", value, least=self._max_capacity)
        if items > priority_tree.LARGEST:
            raise ValueError(f"max_size must be at most {priority_tree.LARGEST}, got {value}")
        self._max_capacity = items  # the memory follows at the next write

    @property
    def device(self) -> torch.device:
        """The device of the priorities."""
        return self._device or torch.device("cpu")

    @property
    def alpha(self) -> float:
        """How much priorities count."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        value = _alpha(value)
        with self._lock:
            finished(partial(self._reweigh, value))

    def _reweigh(self, alpha: float) -> None:
        if alpha != self._alpha:
            self._priorities.reweight(alpha)
        self._alpha = alpha

    @property
    def beta(self) -> float:
        """How much weights correct."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = not_negative("beta", value)

    @property
    def draw_settings(self) -> tuple[Any, ...]:
        return *super().draw_settings, self._alpha, self._beta

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return self.rule.eps

    @property
    def functional_state(self) -> fbuf.PrioritizedState | None:
        """The functional state of all items; None before the first item. O(capacity).

        The next write or draw takes its memory over: copy what is to be kept.
        """
        with self._lock:
            if not self._priorities.size:
                return None
            self.refuse_forked_child()
            return self._priorities.functional()

    @property
    def default_priority(self) -> float:
        """The priority of the next new item."""
        with self._lock:
            return self._priorities.highest()[0]

    @property
    def highest(self) -> float | None:
        """The highest priority ever given, 1 at first; None with `max_priority_within_buffer`."""
        return self.default_priority if self.rule.new_items == "highest_ever" else None

    def raise_default_priority(self, priority: float) -> None:
        """Give new items at least this priority. Never lowers the priority of new items.

        No effect with `max_priority_within_buffer`: new items then get the highest priority of the stored ones. ValueError
        for a priority that `update_priority` refuses.
        """
        top = self.checked(priority).max()
        with self._lock:
            if self.highest is not None and top > self.highest:
                self._set(np.zeros(0, np.int32), np.zeros(0, self.rule.dtype), top)

    @property
    def priorities(self) -> Tensor:
        """A copy of the priorities of all stored items, before eps and alpha."""
        with self._lock:
            return torch.from_numpy(self._priorities.values.given).to(self.device)

    def placed_on(self, storage: Storage) -> torch.device | None:
        """The device for the priorities of this storage; None if JAX does not see it."""
        device = self._device or getattr(storage, "device", None)
        return device if isinstance(device, torch.device) and bridge.jax_device(device) is not None else None

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        """The memory of the priorities and their tree, which are made at the first write."""
        device = self.placed_on(storage)
        place = free_memory.HOST if device is None else plans.place_of(device)
        with self._lock:
            arrays = self._new_priorities(self.rule, max(self._priorities.capacity, capacity), self._alpha).memory()
        return [
            Share("sampler", f".{share.part}{share.key}", place, share.bytes, share.shape, share.dtype)
            for share in shares_of(arrays, place)
        ]

    # ------------------------------------------------------------------ draws

    def _draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Tensor, dict[Any, Any]]:
        slots, weights, _ = self.draw_by_priority(storage, batch_size, key)
        return slots, {"priority_weight": weights}

    def draw_slots(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray
    ) -> tuple[Tensor, dict[Any, Any], list[Tensor]]:
        slots, weights, leaves = self.draw_by_priority(storage, batch_size, key, rows_on_device(storage))
        return slots, {"priority_weight": weights}, leaves

    def draw_by_priority(
        self, storage: Storage, count: int, key: np.ndarray, rows: JaxRows | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Slots, importance weights, and copies of the items there if the same program can read these rows."""
        size = stored(storage)
        with self._lock:
            if size > self._priorities.size:
                self.take_over(storage)  # rows that were not written through a buffer
            elif size < self._priorities.size:
                raise RuntimeError(
                    f"there are priorities of {self._priorities.size} items, and {size} items are stored: load a checkpoint "
                    "of the whole buffer, or empty() it"
                )
            self._prepare(storage)
            return self._priorities.sample(key, count, size, self._beta, rows)

    def share(self, storage: Storage, batch_size: int) -> ShardContents:
        """The sum and the smallest of (priority + eps) ** alpha. Waits for the device of the priorities."""
        if not (size := len(storage)):
            return ShardContents(0, 0.0, beta=self.beta, highest=self.highest)
        with self._lock:
            self.take_over(storage)
            self._prepare(storage)
            return ShardContents(size, *self._priorities.masses(), self.beta, highest=self.highest)

    def exclude(self, slots: np.ndarray, allowed: np.ndarray, storage: Storage) -> None:
        """Allow stored items to be drawn, or not. For subclasses with `_EXCLUDES`."""
        with self._lock:
            self._prepare(storage)
            self._priorities.exclude(slots, allowed)

    def refuse_forked_child(self) -> None:
        if not self._process.is_here:
            raise RuntimeError(_ONE_PROCESS)

    def _prepare(self, storage: Storage | None) -> None:
        """Make room for every item of the storage, on its device unless the constructor got one."""
        self.refuse_forked_child()
        if storage is None:
            return
        self._has_storage = True
        if self._device is None and (device := self.placed_on(storage)) is not None:
            self._device = device
            if is_accelerator(device):
                larger = self._new_priorities(self.rule, self._priorities.capacity, self._alpha)
                larger.load(self._priorities.values)
                self._replace(larger)
        if storage.max_size > self._priorities.capacity:
            self._priorities.reserve(storage.max_size)
            self._replace(self._priorities)

    # ------------------------------------------------------------------ priorities

    def let_go(self) -> None:
        super().let_go()
        self._lock.let_go()
        self._priorities.let_go()

    def before_write(self) -> dict[str, Any]:
        return {"attributes": self.__dict__.copy(), "priorities": self._priorities.before_write()}

    def put_back(self, before: dict[str, Any]) -> None:
        with self._lock:
            self.__dict__.update(before["attributes"])
            self._priorities.put_back(before["priorities"])

    def reloaded(self, storage: Storage) -> None:
        self._keep(storage)

    def _keep(self, storage: Storage) -> None:
        """Keep the priorities in the file of the storage; start from those of an earlier process."""
        if self._file is not None and storage.priorities is self._file:
            return
        file = storage.kept_priorities()
        if file is None or file is self._file:
            return
        self._file = file
        if file.bind(self) and not self._priorities.size and len(storage):
            saved = file.read(len(storage))
            values = good_priorities(saved.given, self.rule.dtype)[0]
            self._prepare(storage)
            self._priorities.load(PriorityValues(values, saved.highest, saved.highest_slot))
        else:
            self._keep_all()

    def _keep_all(self) -> None:
        if self._file is not None:
            self._file.give_all(self, self._priorities.values)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give the items at index the default priority; entries of -1 are ignored.

        IndexError for an item that is not stored. New items need `storage`.
        """
        slots, low, high = flat_slots(index, storage)
        refuse_below(low)
        if high < 0:
            return
        if low < 0:
            slots = slots[slots >= 0]
        with self._lock:
            had_storage = self._has_storage
            self._prepare(storage)
            if storage is not None:
                self._keep(storage)
                limit = min(self._priorities.capacity, len(storage))
            else:
                limit = self._priorities.size if had_storage else self._priorities.capacity
            if high >= limit:
                raise IndexError(f"index {high} is out of range: {limit} items can have a priority")
            if self._file is None:
                self._priorities.written(slots, None if storage is None else storage.guard.device_writes)
                return
            before = self._priorities.highest()
            self._priorities.written(slots)
            after = self._priorities.highest()
            if after == before:
                self._file.begin(self, slots, before[0])
            else:
                self._file.give(self, slots, before[0], *after)

    def take_over(self, storage: Storage) -> None:
        """Give stored items without a priority the default one."""
        with self._lock:
            self._keep(storage)
        if len(storage) > self._priorities.size:
            self.mark_update(np.arange(self._priorities.size, len(storage)), storage=storage)

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
        with self._lock:
            self._prepare(storage)
            writes = None if storage is None else storage.guard.device_writes
            if self._file is None and self._priorities.update_async(index, priority, writes):
                return
        slots, low, high = flat_slots(index, storage)
        values, top = good_priorities(priority, self.rule.dtype)
        values = one_for_each(slots, values)
        refuse_below(low)
        if high < 0:
            return
        if high >= self._priorities.size:
            raise IndexError(f"index {high} is out of range: {self._priorities.size} items are stored")
        if low < 0:
            is_slot = slots >= 0
            slots = slots[is_slot]
            values = values[is_slot]
            top = values.max()
        with self._lock:
            self._set(slots, values, top)

    def _set(self, slots: np.ndarray, values: np.ndarray, top: Any) -> None:
        """Set priorities, also in the file. `top` is the highest of them."""
        try:
            self._change(slots, values, top)
        except BaseException:  # of a signal: memory and file are to agree
            with uninterrupted():
                self._change(slots, values, top)
            raise

    def _change(self, slots: np.ndarray, values: np.ndarray, top: Any) -> None:
        self._priorities.update(slots, values, top)
        if self._file is not None:
            self._file.give(self, slots, values, *self._priorities.highest())

    def checked(self, priority: Any) -> np.ndarray:
        """The priorities in the dtype of the sampler. Raises the errors of `update_priority`."""
        return good_priorities(priority, self.rule.dtype)[0]

    def checks_later(self, priority: object) -> bool:
        return self._file is None and self._priorities.checks(priority)

    def raise_deferred(self) -> None:
        with self._lock:
            self._priorities.raise_deferred()

    def _empty(self) -> None:
        with self._lock:
            self._replace(self._new_priorities(self.rule, self._max_capacity, self._alpha))
            self._file = None

    # ------------------------------------------------------------------ checkpoints

    def _parameters(self) -> dict[str, Any]:
        rule = self.rule
        own = {"alpha": self._alpha, "beta": self._beta, "eps": rule.eps, "reduction": self.reduction}
        return {**own, "max_capacity": self._max_capacity, "new_items": rule.new_items}

    def state(self) -> dict[str, Any]:
        with self._lock:
            return priority_states.tree_of(self._parameters(), self._priorities)

    def state_dict(self) -> dict[str, Any]:
        """The state, and the weights that follow from the priorities as "_sum_tree" and "_min_tree"."""
        state = super().state_dict()
        return {**state, **as_tensors(priority_states.trees(as_arrays(state, self)))}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            loaded = priority_states.checked(entries, options, self._parameters(), self._priorities)
            entries.settle()  # raises before memory is allocated
            if loaded.values.given.size:
                self.refuse_forked_child()
            priorities = self._new_priorities(loaded.rule, loaded.capacity, loaded.alpha)
            priorities.load(loaded.values)

            def put() -> None:
                with self._lock:
                    self.rule = priorities.rule
                    self._alpha = priorities.alpha
                    self.beta = loaded.beta
                    self.reduction = loaded.reduction
                    self._replace(priorities)
                    self._keep_all()

            return put

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {**super().__getstate__(), "_priorities": copy.copy(self._priorities), "_file": None}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, reduction={self.reduction})"
        )


def _alpha(value: Any) -> float:
    return fbuf.Prioritized(alpha=not_negative("alpha", value)).alpha  # refuses what single precision cannot hold

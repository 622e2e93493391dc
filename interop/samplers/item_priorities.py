"""New items get a priority, which updates change: in memory and in a file of the storage."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fbuf
from fbuf import free_memory
from fbuf.memory_plan import Share, shares_of
from fbuf.samplers import Chances, Reason
from interop.checkpoint.state import Apply, Entries, LoadOptions
from interop.data import bridge, staging
from interop.data.arguments import not_negative
from interop.engine import plans
from interop.engine.kept_priorities import KeptPriorities
from interop.host.device_priorities import DevicePriorities
from interop.host.device_rows import JaxRows
from interop.host.priorities import HostPriorities, Priorities, PriorityValues
from interop.host.threads import Lock, finished, uninterrupted
from interop.samplers import priority_states
from interop.samplers.item_values import ItemValues
from interop.samplers.shares import ShardContents
from interop.samplers.slot_draws import stored
from interop.samplers.validation import flat_slots, good_priorities, one_for_each, refuse_below
from interop.shared.processes import OneProcess
from interop.storages import Storage

_ONE_PROCESS = (
    "a prioritized sampler cannot be shared between processes, nor used in one that was forked from the one that made it or "
    "after JAX had started: sample in the process that made it, and build a PrioritizedReplayBuffer or "
    "TensorDictPrioritizedReplayBuffer with sync=False for workers that write"
)


def is_accelerator(device: torch.device) -> bool:
    """Whether a device works asynchronously."""
    return device.type != "cpu"


class ItemPriorities(ItemValues):
    """The priorities of the items of one storage, and the rule that makes weights of them. Thread-safe.

    Args:
        rule: everything but alpha, which may change without a new trace.
        capacity: items at most; at least the capacity of the storage.
        alpha, beta, reduction: as for `PrioritizedSampler`.
        device: of the priorities; None follows the storage.
        excludes: whether items may be excluded from draws.

    Attributes:
        lock: excludes other threads. Reentrant.
        replaced: how often other priorities were put in. No item is excluded from draws then.
        on_new: gives items at an index the default priority, when they are taken over; None for `written`.
    """

    are_priorities = True
    marks_new_items = True
    defer_errors = True

    def __init__(
        self,
        rule: fbuf.Prioritized,
        capacity: int,
        alpha: float,
        beta: float,
        reduction: str,
        device: torch.device | None,
        excludes: bool,
    ) -> None:
        self.rule = rule
        self.capacity = capacity
        self._alpha = checked_alpha(alpha)
        self.beta = beta
        self.reduction = reduction
        self._device = device
        self._excludes = excludes
        self.lock = Lock()
        self._process = OneProcess(_ONE_PROCESS, uses_jax=True)
        self._has_storage = False
        self._file: KeptPriorities | None = None
        self.replaced = 0
        self.on_new: Callable[..., None] | None = None
        self._priorities = self._new_priorities(rule, capacity, self._alpha)

    def _new_priorities(self, rule: fbuf.Prioritized, capacity: int, alpha: float) -> Priorities:
        """Priorities of no items, on their device."""
        if is_accelerator(self.device):
            return DevicePriorities(rule, capacity, alpha, self._excludes, self.device)
        return HostPriorities(rule, capacity, alpha, self._excludes)

    def _replace(self, priorities: Priorities) -> None:
        self._priorities = priorities
        self.replaced += 1

    # ------------------------------------------------------------------ parameters

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._device or torch.device("cpu")

    @property
    def alpha(self) -> float:
        """How much priorities count."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        value = checked_alpha(value)
        with self.lock:
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
    def functional_state(self) -> fbuf.PrioritizedState | None:
        """The functional state of all items; None before the first item. O(capacity).

        The next write or draw takes its memory over: copy what is to be kept.
        """
        with self.lock:
            if not self._priorities.size:
                return None
            self.refuse_forked_child()
            return self._priorities.functional()

    @property
    def default(self) -> float:
        """The priority of the next new item."""
        with self.lock:
            return self._priorities.highest()[0]

    @property
    def highest(self) -> float | None:
        """The highest priority ever given, 1 at first; None with `max_priority_within_buffer`."""
        return self.default if self.rule.new_items == "highest_ever" else None

    def raise_default(self, priority: float) -> None:
        """Give new items at least this priority. Never lowers the priority of new items.

        No effect with `max_priority_within_buffer`: new items then get the highest priority of the stored ones. ValueError
        for a priority that `update_priority` refuses.
        """
        top = self.checked(priority).max()
        with self.lock:
            if self.highest is not None and top > self.highest:
                self._set(np.zeros(0, np.int32), np.zeros(0, self.rule.dtype), top)

    @property
    def given(self) -> Tensor:
        """A copy of the priorities of all stored items, before eps and alpha."""
        with self.lock:
            return torch.from_numpy(self._priorities.values.given).to(self.device)

    def _placed_on(self, storage: Storage) -> torch.device | None:
        """The device for the priorities of this storage; None if JAX does not see it."""
        device = self._device or getattr(storage, "device", None)
        return device if isinstance(device, torch.device) and bridge.jax_device(device) is not None else None

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        """The memory of the priorities and their tree, which are made at the first write."""
        device = self._placed_on(storage)
        place = free_memory.HOST if device is None else plans.place_of(device)
        with self.lock:
            arrays = self._new_priorities(self.rule, max(self._priorities.capacity, capacity), self._alpha).memory()
        return [
            Share("sampler", f".{share.part}{share.key}", place, share.bytes, share.shape, share.dtype)
            for share in shares_of(arrays, place)
        ]

    # ------------------------------------------------------------------ draws

    def draw(
        self, storage: Storage, count: int, key: np.ndarray, rows: JaxRows | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Slots, importance weights, and copies of the items there if the same program can read these rows."""
        size = stored(storage)
        with self.lock:
            if size > self._priorities.size:
                self.take_over(storage)  # rows that were not written through a buffer
            elif size < self._priorities.size:
                raise RuntimeError(
                    f"there are priorities of {self._priorities.size} items, and {size} items are stored: load a checkpoint "
                    "of the whole buffer, or empty() it"
                )
            self._prepare(storage)
            return self._priorities.sample(key, count, size, self._beta, rows)

    def share(self, storage: Storage) -> ShardContents:
        """The sum and the smallest of (priority + eps) ** alpha. Waits for the device of the priorities."""
        if not (size := len(storage)):
            return ShardContents(0, 0.0, beta=self.beta, highest=self.highest)
        with self.lock:
            self.take_over(storage)
            self._prepare(storage)
            return ShardContents(size, *self._priorities.masses(), self.beta, highest=self.highest)

    def chances(self, storage: Storage) -> Chances:
        """The law of the next draw over the stored items. Waits for the device of the priorities. O(capacity)."""
        if not (size := len(storage)):
            return Chances.of(np.zeros(0), Reason.NONE)
        with self.lock:
            self.take_over(storage)
            self._prepare(storage)
            return self._priorities.chances(size)

    def given_priorities(self, storage: Storage) -> np.ndarray:
        with self.lock:
            self.take_over(storage)
            return self._priorities.values.given[: len(storage)]

    def exclude(self, slots: np.ndarray, allowed: np.ndarray, storage: Storage) -> None:
        """Allow stored items to be drawn, or not."""
        with self.lock:
            self._prepare(storage)
            self._priorities.exclude(slots, allowed)

    def refuse_forked_child(self) -> None:
        if not self._process.is_here:
            raise RuntimeError(_ONE_PROCESS)

    def prepare(self, storage: Storage) -> None:
        """Be ready for draws from a storage. RuntimeError in a forked child."""
        with self.lock:
            self._prepare(storage)

    def _prepare(self, storage: Storage | None) -> None:
        """Make room for every item of the storage, on its device unless the constructor got one."""
        self.refuse_forked_child()
        if storage is None:
            return
        self._has_storage = True
        if self._device is None and (device := self._placed_on(storage)) is not None:
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
        self.lock.let_go()
        self._priorities.let_go()

    def before_write(self) -> dict[str, Any]:
        return {"attributes": self.__dict__.copy(), "priorities": self._priorities.before_write()}

    def put_back(self, before: dict[str, Any]) -> None:
        with self.lock:
            self.__dict__.update(before["attributes"])
            self._priorities.put_back(before["priorities"])

    def reloaded(self, storage: Storage) -> None:
        self._keep(storage)

    def _keep(self, storage: Storage) -> None:
        """Keep the priorities in the file of the storage; start from those of an earlier process."""
        file = storage.contents.keep_other(KeptPriorities, self._file)
        if file is None:
            return
        if file.bind(self) and not self._priorities.size and len(storage):
            saved = file.read(len(storage))
            values = good_priorities(saved.given, self.rule.dtype)[0]
            self._prepare(storage)
            loaded = self._new_priorities(self.rule, self._priorities.capacity, self._alpha)
            loaded.load(PriorityValues(values, saved.highest, saved.highest_slot))
            self._replace(loaded)
        else:
            file.give_all(self, self._priorities.values)
        file.was_read()
        self._file = file  # the last: the next call does what an interrupted one has not done

    def _keep_all(self) -> None:
        if self._file is not None:
            self._file.give_all(self, self._priorities.values)

    def written(self, index: object, *, storage: Storage | None = None) -> None:
        """Give the items at index the default priority; entries of -1 are ignored.

        IndexError for an item that is not stored. New items need `storage`.
        """
        slots, low, high = flat_slots(index, storage)
        refuse_below(low)
        if high < 0:
            return
        if low < 0:
            slots = slots[slots >= 0]
        with self.lock:
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
        with self.lock:
            self._keep(storage)
        if len(storage) > self._priorities.size:
            mark = self.written if self.on_new is None else self.on_new
            mark(np.arange(self._priorities.size, len(storage)), storage=storage)

    def update(self, index: object, priority: object, *, storage: Storage | None = None) -> None:
        """Give stored items new priorities. For arguments and errors see `PrioritizedSampler.update_priority`."""
        with self.lock:
            self._prepare(storage)
            writes = None if storage is None else storage.guard.device_writes
            if self._file is None and self._priorities.update_async(index, priority, writes):
                return
        if isinstance(index, Tensor) and isinstance(priority, Tensor) and not (index.is_cpu or priority.is_cpu):
            index, priority = staging.to_host([index.detach(), priority.detach()])
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
        with self.lock:
            self._set(slots, values, top)

    def _set(self, slots: np.ndarray, values: np.ndarray, top: float) -> None:
        """Set priorities, also in the file. `top` is the highest of them."""
        try:
            self._change(slots, values, top)
        except BaseException:  # of a signal: memory and file are to agree
            with uninterrupted():
                self._change(slots, values, top)
            raise

    def _change(self, slots: np.ndarray, values: np.ndarray, top: float) -> None:
        self._priorities.update(slots, values, top)
        if self._file is not None:
            self._file.give(self, slots, values, *self._priorities.highest())

    def checked(self, priority: object) -> np.ndarray:
        """The priorities in the dtype of the sampler. Raises the errors of `update_priority`."""
        return good_priorities(priority, self.rule.dtype)[0]

    def checks_later(self, priority: object) -> bool:
        return self._file is None and self._priorities.checks(priority)

    def raise_deferred(self) -> None:
        with self.lock:
            self._priorities.raise_deferred()

    def clear(self) -> None:
        with self.lock:
            self._replace(self._new_priorities(self.rule, self.capacity, self._alpha))
            self._file = None

    # ------------------------------------------------------------------ checkpoints

    def _parameters(self) -> dict[str, Any]:
        rule = self.rule
        own = {"alpha": self._alpha, "beta": self._beta, "eps": rule.eps, "reduction": self.reduction}
        return {**own, "max_capacity": self.capacity, "new_items": rule.new_items}

    def state(self) -> dict[str, Any]:
        """The tree of a checkpoint."""
        with self.lock:
            return priority_states.tree_of(self._parameters(), self._priorities)

    def with_state(self, entries: Entries, options: LoadOptions) -> Apply:
        """Check a result of `state`. The returned function puts it in."""
        loaded = priority_states.checked(entries, options, self._parameters(), self._priorities)
        entries.settle()  # raises before memory is allocated
        if loaded.values.given.size:
            self.refuse_forked_child()
        priorities = self._new_priorities(loaded.rule, loaded.capacity, loaded.alpha)
        priorities.load(loaded.values)

        def put() -> None:
            with self.lock:
                self.rule = priorities.rule
                self._alpha = priorities.alpha
                self.beta = loaded.beta
                self.reduction = loaded.reduction
                self._replace(priorities)
                self._keep_all()

        return put

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            return {**self.__dict__, "_priorities": copy.copy(self._priorities), "_file": None}


def checked_alpha(value: object) -> float:
    """An alpha; TypeError or ValueError for anything else."""
    return fbuf.Prioritized(alpha=not_negative("alpha", value)).alpha  # refuses what single precision cannot hold

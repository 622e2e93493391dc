"""Items in proportion to their priority (arXiv:1511.05952)."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

import fbuf
from fbuf import priority_tree
from interop.checkpoint.rule import Rule
from interop.checkpoint.stateful import Entries
from interop.data import bridge
from interop.data.numbers import not_negative, whole
from interop.host import compiled
from interop.samplers import kept_priorities, late, priority_draws, priority_states
from interop.samplers.drawing import DrawingSampler
from interop.samplers.given import Waiting, flat_slots, good_priorities, one_for_each, padded_slots, refuse_below
from interop.samplers.lent import Lent
from interop.samplers.shares import Share
from interop.shared.interrupts import uninterrupted
from interop.shared.processes import may_use_jax, starting_a_worker
from interop.shared.thread_lock import Lock
from interop.storages import Storage
from interop.storages.priorities import KeptPriorities

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
        max_priority_within_buffer: forget the highest priority when its item is overwritten.
        device: where the priorities are; None follows the storage.
    """

    KEPT = True  # whether a storage in files keeps the priorities, too
    _kept: KeptPriorities | None = None

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
        self._alpha = _alpha(alpha)  # in the state, not in the rule: it may change without a new trace
        self.beta = beta
        self.reduction = reduction
        self.dtype = dtype
        self._wanted_device = torch.device(device) if device is not None else None
        if self._wanted_device is not None and bridge.jax_device(self._wanted_device) is None:
            raise RuntimeError(
                f"JAX does not see the device {self._wanted_device}: install a JAX that does, or use the CPU"
            )
        self._lock = Lock()
        self._pid = os.getpid()
        self._has_storage = False  # whether it was told how many items there are
        self._clear()

    def _clear(self) -> None:
        with self._lock:
            self._state = None
            self._filled = 0  # slots below this have a priority
            self._highest: Any = np.dtype(self.rule.dtype).type(1)
            self._waiting = Waiting(self.rule.dtype)
            self._refusals = late.Refusals()

    # ------------------------------------------------------------------ what it stands at

    @property
    def max_size(self) -> int:
        """Items at most."""
        return self._max_capacity

    @property
    def device(self) -> torch.device:
        """Where the priorities are."""
        return self._wanted_device or torch.device("cpu")

    @property
    def alpha(self) -> float:
        """How much priorities count."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        value = _alpha(value)
        with self._lock:
            if self._state is not None and value != self._alpha:
                with bridge.exact():
                    self._lend(compiled.reweight, np.asarray(value, self.rule.dtype))
            self._alpha = value

    @property
    def beta(self) -> float:
        """How much weights correct."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = not_negative("beta", value)

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return self.rule.eps

    @property
    def state(self) -> fbuf.PrioritizedState | None:
        """The functional state with everything given so far; None before the first item.

        The next write or draw takes its memory over: copy what is to be kept.
        """
        with self._lock:
            self._apply()
            return self._state

    @property
    def _state(self) -> fbuf.PrioritizedState | None:
        """The state without what waits."""
        state: fbuf.PrioritizedState | None = self._lent.state
        return state

    @_state.setter
    def _state(self, state: fbuf.PrioritizedState | None) -> None:
        self._room = 0  # slots that the state has; 0 as long as there may be none
        self._lent = Lent(state)
        if state is not None:
            self._room = state.tree.capacity

    def _lend(self, program: Any, *given: Any) -> tuple[Any, ...]:
        """Have a program of `compiled` take the state over; what it returns besides."""
        self.refuse_a_stranger()  # whom it would never end for
        return self._lent.to(program, self.rule, given)

    @property
    def _waits(self) -> bool:
        """Whether priorities may wait: not where each one can change what the next new item gets by more than itself.

        Nor on an accelerator, which works on what it is given while the host goes on.
        """
        return self.rule.new_items == "highest_ever" and not self._runs_ahead

    @property
    def _runs_ahead(self) -> bool:
        """Whether nobody waits for the device where the priorities are."""
        return self._wanted_device is not None and self._wanted_device.type != "cpu"

    @property
    def default_priority(self) -> float:
        """The priority of the next new item."""
        with self._lock:
            return self._top()[0]

    @property
    def highest(self) -> float | None:
        """The highest priority ever given, 1 at first; None with `max_priority_within_buffer`."""
        return self.default_priority if self.rule.new_items == "highest_ever" else None

    def raise_default_priority(self, priority: float) -> None:
        """Give new items at least this priority, as if it had been given to an item elsewhere. Never lowers theirs.

        No effect with `max_priority_within_buffer`: new items then get the highest priority of the stored ones. ValueError
        for a priority that `update_priority` refuses.
        """
        top = self.checked(priority).max()
        with self._lock, uninterrupted():
            if self.highest is not None and top > self.highest:
                none = np.full(1, -1)
                self._raise(none, top, top)
                if self._kept is not None and self._kept.are_of(self):
                    self._kept.give(none[:0], top, *self._top())

    @property
    def priorities(self) -> Tensor:
        """A copy of the priorities of all stored items, as they were given, before eps and alpha."""
        with self._lock:
            self._apply()
            if self._state is None:
                return torch.zeros(0, dtype=self.dtype, device="cpu")
            return bridge.to_torch(self._state.priorities, copy=False)[: self._filled].clone()

    # ------------------------------------------------------------------ draws

    def _draw(
        self, storage: Storage, batch_size: int, key: np.ndarray, items: Sequence[jax.Array] = ()
    ) -> tuple[Tensor, dict[Any, Any], list[jax.Array]]:
        return priority_draws.draw(self, storage, batch_size, key, items)

    def ready(self, storage: Storage | None) -> fbuf.PrioritizedState:
        """The state with everything given so far, over at least the slots of the storage; made at the first use."""
        with self._lock:
            self._make(storage)
            self._apply()
            assert self._state is not None
            return self._state

    def share(self, storage: Storage, batch_size: int) -> Share:
        """The sum and the smallest of (priority + eps) ** alpha. Waits for the device where the priorities are."""
        if not (size := len(storage)):
            return Share(0, 0.0, beta=self.beta, highest=self.highest)
        with self._lock:
            self.take_over(storage)
            with bridge.exact():
                total, smallest = np.asarray(compiled.masses(self.ready(storage).tree)).tolist()
            return Share(size, total, smallest, self.beta, highest=self.highest)

    def _apply(self) -> None:
        """Bring the waiting priorities into the tree."""
        if self._waiting.count and self._room:
            with bridge.exact():
                for part in self._waiting.parts():
                    self._lend(compiled.assign if self._waits else compiled.update, *part, self._highest)
            self._waiting.clear()

    def _give(self, slots: np.ndarray, values: Any) -> None:
        """Have priorities wait for the next draw, or for enough of them, where they may wait."""
        self._waiting.add(slots, values)
        if not self._waits or self._waiting.count >= Waiting.ENOUGH:
            self._apply()

    def refuse_a_stranger(self) -> None:
        if os.getpid() != self._pid or not may_use_jax():
            raise RuntimeError(
                "a prioritized sampler cannot be used in a process forked from the one that made it, or after JAX had "
                "started: sample in the parent, and build a PrioritizedReplayBuffer or TensorDictPrioritizedReplayBuffer "
                "with sync=False for workers that write"
            )

    def _make(self, storage: Storage | None) -> None:
        """Make the state, if there is none."""
        self.refuse_a_stranger()
        capacity = self._max_capacity
        if storage is not None:
            if not self._has_storage or self._wanted_device is None:
                self._has_storage = True
                priority_states.follow_device(self, storage)
            capacity = max(capacity, storage.max_size)
        if self._room >= capacity:
            return
        if self._state is not None:  # it was loaded from a smaller one
            self._refill(priority_states.saved(self, self._state), capacity)
            return
        self._state = priority_states.fresh(self, capacity)

    def _refill(self, saved: Mapping[str, Any], capacity: int) -> None:
        """Have the state of saved priorities, over so many slots."""
        self._state = priority_states.refilled(self, saved, capacity, self.rule, self._alpha)
        self._all_drawable()

    def _all_drawable(self) -> None:
        """The state was made anew, in which nothing is excluded from being drawn."""

    def _fresh(self, rule: fbuf.Prioritized, capacity: int) -> fbuf.PrioritizedState:
        """A state of no items."""
        return compiled.init(rule, capacity)

    # ------------------------------------------------------------------ priorities

    def _keep(self, storage: Storage | None) -> None:
        if storage is not None and (kept := storage._keeps_priorities()) is not None and kept is not self._kept:
            kept_priorities.keep(self, storage, kept)

    def _top(self) -> tuple[float, int]:
        """What new items get, and the slot of the item that it is of, or -1."""
        if self._waits or self._state is None:
            return float(self._highest), -1
        return float(np.asarray(self._state.highest)), int(np.asarray(self._state.highest_slot))

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give the items at index the default priority; entries of -1 are ignored.

        IndexError for an item that is not stored, which only `storage` tells of new ones.
        """
        slots, low, high = flat_slots(index, storage)
        refuse_below(low)
        if high < 0:
            return
        if low < 0:
            slots = slots[slots >= 0]
        with self._lock:
            self._make(storage)
            self._keep(storage)
            limit = self._room
            if storage is not None:
                limit = min(limit, len(storage))
            elif self._has_storage:
                limit = self._filled
            if high >= limit:
                raise IndexError(f"index {high} is out of range: {limit} items can have a priority")
            if self._waits:
                self._give(slots, self._highest)
                if self._kept is not None and self._kept.are_of(self):
                    self._kept.begin(slots, self._highest)
            else:
                value = self.default_priority if self._kept is not None else None
                with bridge.exact():
                    self._lend(compiled.written, padded_slots(slots))
                if self._kept is not None and self._kept.are_of(self):
                    self._kept.give(slots, value, *self._top())
            self._filled = max(self._filled, high + 1)

    def take_over(self, storage: Storage) -> None:
        """Give rows that are stored and have no priority yet the default one."""
        with self._lock:
            self._keep(storage)
        if len(storage) > self._filled:
            self.mark_update(np.arange(self._filled, len(storage)), storage=storage)

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Give stored items new priorities. Of equal indices the last wins; entries of -1 are ignored.

        Args:
            index: an int, 1-d integers, or coordinates [n, ndim] for a storage of several item dims.
            priority: one value for all, or one for each index; finite and not negative.
            storage: needed for coordinates.

        Raises, before anything changes: IndexError for an index that is not stored, TypeError for one that is not an
        integer, ValueError for a priority that is negative or not finite, RuntimeError for another number of them.

        Where priorities, index and sampler are on one accelerator it is not waited for: what would be an IndexError or a
        ValueError is a ValueError of a later call, and nothing of that update was taken.
        """
        if self._runs_ahead and late.took(self, index, priority, storage):
            return
        slots, low, high = flat_slots(index, storage)
        values, top = good_priorities(priority, self.rule.dtype)
        values = one_for_each(slots, values)
        refuse_below(low)
        if high < 0:
            return
        if high >= self._filled:
            raise IndexError(f"index {high} is out of range: {self._filled} items are stored")
        if low < 0:
            slots, values = slots[slots >= 0], values[slots >= 0]
            top = values.max()
        with self._lock:
            self._make(storage)
            if self._kept is None:
                self._raise(slots, values, top)
                return
            with uninterrupted():  # here as there, or not at all
                self._raise(slots, values, top)
                if self._kept.are_of(self):
                    self._kept.give(slots, values, *self._top())

    def _raise(self, slots: np.ndarray, values: np.ndarray, top: Any) -> None:
        """Give priorities, of which `top` is the highest."""
        if top > self._highest:
            self._highest = top
        self._give(slots, values)

    def checked(self, priority: Any) -> np.ndarray:
        """The priorities as they would be kept. The errors of `update_priority` for values that would be refused."""
        return good_priorities(priority, self.rule.dtype)[0]

    def _empty(self) -> None:
        self._clear()
        self._kept = None

    # ------------------------------------------------------------------ checkpoints

    def _entries(self) -> dict[str, Any]:
        with self._lock:
            self._apply()
            return priority_states.saved(self, self._state)

    def _loading(self, entries: Entries, rule: Rule) -> Callable[[], None]:
        return priority_states.loading(self, entries, rule)

    def _as_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return priority_states.told(state)

    def _of_dict(self, given: Mapping[str, Any]) -> Any:
        return priority_states.asked(self, given)

    def __getstate__(self) -> dict[str, Any]:
        if starting_a_worker():
            raise RuntimeError(
                "A prioritized sampler cannot be shared between processes: sample in this process, and build a "
                "PrioritizedReplayBuffer or TensorDictPrioritizedReplayBuffer with sync=False for workers that write"
            )
        with self._lock:
            self._apply()
            own = Lent(jax.tree.map(np.array, self._state)), copy.copy(self._waiting)
            return {**super().__getstate__(), "_lent": own[0], "_waiting": own[1], "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pid=os.getpid())
        if self._state is not None:
            with bridge.exact():
                self._state = jax.device_put(self._state, bridge.jax_device(self.device))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, reduction={self.reduction})"
        )


def _alpha(value: Any) -> float:
    return fbuf.Prioritized(alpha=not_negative("alpha", value)).alpha  # refuses what single precision cannot hold

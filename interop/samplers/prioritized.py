"""Items in proportion to their priority (arXiv:1511.05952)."""

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

import fbuf
from interop import bridge, compiled, randomness
from interop.numbers import whole
from interop.processes import may_use_jax, starting_a_worker
from interop.samplers.sampler import Sampler
from interop.samplers.uniform import stored, unravel
from interop.storages import Storage

_ENOUGH = 1 << 16  # priorities that wait at most
_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


class PrioritizedSampler(Sampler):
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
        if self._max_capacity >= 2**31:
            raise ValueError(f"max_capacity must be below 2**31, got {max_capacity}")
        if dtype not in _DTYPES:
            raise NotImplementedError(f"priorities can be torch.float32 or torch.float64, got {dtype}")
        self.rule = fbuf.Prioritized(
            eps=_number("eps", eps),
            new_items="highest_stored" if max_priority_within_buffer else "highest_ever",
            dtype=_DTYPES[dtype],  # type: ignore[arg-type]  # one of the two literals
        )
        self._alpha = _number("alpha", alpha)  # in the state, not in the rule: it may change without a new trace
        self._beta = _number("beta", beta)
        self.reduction = reduction
        self.dtype = dtype
        self._wanted_device = torch.device(device) if device is not None else None
        if self._wanted_device is not None and bridge.jax_device(self._wanted_device) is None:
            raise RuntimeError(
                f"JAX does not see the device {self._wanted_device}: install a JAX that does, or use the CPU"
            )
        self._clear()

    def _clear(self) -> None:
        self._state: fbuf.PrioritizedState | None = None
        self._filled = 0  # slots below this have a priority
        self._highest = np.asarray(1, self.rule.dtype)
        # Priorities given since the last draw, in order: one pass over the tree takes them all.
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting_count = 0
        self._lock = threading.RLock()

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
        value = _number("alpha", value)
        with self._lock:
            if self._state is not None and value != self._alpha:
                with bridge.exact():
                    self._state = compiled.reweight(self.rule, self._state, np.asarray(value, self.rule.dtype))
            self._alpha = value

    @property
    def beta(self) -> float:
        """How much weights correct."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _number("beta", value)

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
    def _waits(self) -> bool:
        """Whether priorities may wait: not where each one can change what the next new item gets by more than itself."""
        return self.rule.new_items == "highest_ever"

    @property
    def default_priority(self) -> float:
        """The priority of the next new item."""
        if self._waits or self._state is None:
            return float(self._highest)
        return float(np.asarray(self._state.highest))

    @property
    def priorities(self) -> Tensor:
        """A copy of the priorities of all stored items, as they were given, before eps and alpha."""
        state = self.state
        if state is None:
            return torch.zeros(0, dtype=self.dtype)
        return bridge.to_torch(state.priorities)[: self._filled].clone()

    # ------------------------------------------------------------------ draws

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """int64 [batch_size], or a tuple of such per item dim, and {"priority_weight": [batch_size]}.

        RuntimeError for an empty storage, and where every priority is zero.
        """
        return self._named(storage, batch_size, None)

    def _sample(self, storage: Storage, batch_size: int, key: Any) -> tuple[Any, dict[Any, Any]]:
        if type(self).sample is not PrioritizedSampler.sample:
            return self.sample(storage, batch_size)
        return self._named(storage, batch_size, key)

    def _named(self, storage: Storage, batch_size: int, key: Any) -> tuple[Any, dict[Any, Any]]:
        slots, info, _ = self._draw(storage, batch_size, key)
        return unravel(slots, storage), info

    def _draw(
        self, storage: Storage, batch_size: int, key: Any, items: Sequence[jax.Array] = ()
    ) -> tuple[Tensor, dict[Any, Any], list[jax.Array]]:
        """Flat slots, what to tell about them, and copies of items there where the same program could read them."""
        size = stored(storage)
        with self._lock:
            state = self.ready(storage)
            key = randomness.key(self._rng) if key is None else key
            items = [] if items and items[0].devices() != state.priorities.devices() else list(items)
            lanes = tuple(storage.shape[1:]) if items and storage.shape is not None else ()
            with bridge.exact():
                beta = np.asarray(self._beta, self.rule.dtype)
                slots, weighed, leaves = compiled.draw(
                    self.rule, state, key, batch_size, np.int64(size), beta, items, lanes
                )
        return bridge.hand_over(slots), {"priority_weight": self.weights_of(weighed)}, leaves

    def ready(self, storage: Storage | None) -> fbuf.PrioritizedState:
        """The state with everything given so far, over at least the slots of the storage; made at the first use."""
        with self._lock:
            self._make(storage)
            self._apply()
            assert self._state is not None
            return self._state

    def _apply(self) -> None:
        """Bring the waiting priorities into the tree."""
        if not self._waiting or self._state is None:
            return
        slots, values = (np.concatenate(column) for column in zip(*self._waiting, strict=True))
        with bridge.exact():
            self._state = compiled.assign(self.rule, self._state, compiled.padded(slots), compiled.padded(values))
        self._waiting, self._waiting_count = [], 0

    def _give(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Have priorities wait for the next draw, or for enough of them."""
        self._waiting.append((slots, values))
        self._waiting_count += slots.size
        if self._waiting_count >= _ENOUGH:
            self._apply()

    def _make(self, storage: Storage | None) -> None:
        """Make the state, if there is none."""
        if not may_use_jax():
            raise RuntimeError(
                "a prioritized sampler cannot be used in a process forked after JAX had started: use the spawn start "
                "method, or sample in the parent"
            )
        if self._state is None:
            capacity = self._max_capacity if storage is None else max(self._max_capacity, storage.max_size)
            if self._wanted_device is None and storage is not None:
                device = getattr(storage, "device", None)
                if isinstance(device, torch.device) and bridge.jax_device(device) is not None:
                    self._wanted_device = device
            with bridge.exact():
                empty = compiled.init(self.rule, capacity)
                empty = dataclasses.replace(empty, alpha=np.asarray(self._alpha, self.rule.dtype))
                self._state = jax.device_put(empty, bridge.jax_device(self.device))

    def weights_of(self, weighed: Any) -> Tensor:
        """The importance weights of a draw; RuntimeError where there was nothing to draw.

        On a GPU nothing is waited for where eps makes sure that every item can be drawn.
        """
        weights, valid = weighed
        if (self.rule.eps == 0 or self.device.type == "cpu") and not np.asarray(valid):
            raise RuntimeError(
                "non-positive p_sum: every stored priority is zero, nothing can be drawn. Call update_priority() with "
                "a positive priority, or use eps > 0"
            )
        return bridge.hand_over(weights)

    # ------------------------------------------------------------------ priorities

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give the items at index the default priority; entries of -1 are ignored."""
        slots = self._slots(index, storage)
        slots = slots[slots >= 0]
        if slots.size == 0:
            return
        with self._lock:
            self._make(storage)
            assert self._state is not None
            top, limit = int(slots.max()), self._state.tree.capacity
            if storage is not None:
                limit = min(limit, len(storage))
            if top >= limit:
                raise IndexError(f"index {top} is out of range: {limit} items can have a priority")
            if self._waits:
                self._give(slots, np.broadcast_to(self._highest, slots.shape))
            else:
                with bridge.exact():
                    self._state = compiled.written(self.rule, self._state, compiled.padded(slots))
            self._filled = max(self._filled, top + 1)

    def take_over(self, storage: Storage) -> None:
        """Give rows that are stored and have no priority yet the default one."""
        if len(storage) > self._filled:
            self.mark_update(np.arange(self._filled, len(storage)), storage=storage)

    @torch.no_grad()
    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Give stored items new priorities. Of equal indices the last wins; entries of -1 are ignored.

        Args:
            index: an int, 1-d integers, or coordinates [n, ndim] for a storage of several item dims.
            priority: one value for all, or one for each index; finite and not negative.
            storage: needed for coordinates.

        Raises, before anything changes: IndexError for an index that is not stored, TypeError for one that is not an
        integer, ValueError for a priority that is negative or not finite, RuntimeError for another number of them.
        """
        slots = self._slots(index, storage)
        values = _values(priority, self.rule.dtype)
        if values.size not in (1, slots.size) or (values.size == 1 and values.ndim > 1 and slots.size != 1):
            raise RuntimeError(
                "priority should be a number or an iterable of the same length as index: "
                f"got {values.size} priorities for {slots.size} indices"
            )
        values = np.broadcast_to(values.reshape(-1), slots.shape) if values.size != slots.size else values.reshape(-1)
        if slots.size and slots.min() < 0:
            if slots.min() < -1:
                raise IndexError(
                    f"index {int(slots.min())} is negative: only -1 is allowed, for an item that was not kept"
                )
            values, slots = values[slots >= 0], slots[slots >= 0]
        if slots.size == 0:
            return
        top = int(slots.max())
        if top >= self._filled:
            raise IndexError(f"index {top} is out of range: {self._filled} items are stored")
        wrong = ~(values >= 0) | ~np.isfinite(values)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"priorities must be finite and at least 0, got {values[at]} for index {slots[at]}: pass the absolute error"
            )
        with self._lock:
            self._make(storage)
            if self._waits:
                self._give(slots, values.copy())
                self._highest = np.maximum(self._highest, values.max())
            else:
                with bridge.exact():
                    self._state = compiled.update(
                        self.rule, self._state, compiled.padded(slots), compiled.padded(values)
                    )

    def _slots(self, index: Any, storage: Storage | None) -> np.ndarray:
        """Flat int32 slots. TypeError for what is not an integer, IndexError for what no storage could have."""
        if isinstance(index, tuple):
            index = torch.stack([torch.as_tensor(each) for each in index], -1)
        if isinstance(index, Tensor):
            array = index.detach().cpu().numpy()
        else:
            array = np.asarray(index)
        if array.size == 0:
            return np.zeros(0, np.int32)
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"index must be integers, got {array.dtype}")
        one_dim = storage is None or storage.ndim == 1
        if array.ndim == 2 and not (one_dim and array.shape[1] == 1):
            array = _ravel(array, storage)
        array = array.reshape(-1)
        if array.max() >= 2**31 or array.min() < -(2**31):
            raise IndexError(f"index {array.max()} is out of range")
        return array.astype(np.int32)

    def _empty(self) -> None:
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        if starting_a_worker():
            raise RuntimeError(
                "A prioritized sampler cannot be shared between processes: give the workers a buffer with a "
                "RandomSampler (sync=False) and keep the priorities in the process that samples"
            )
        with self._lock:
            self._apply()
            state = super().__getstate__()
        del state["_lock"]
        return {**state, "_state": jax.tree.map(np.asarray, state["_state"])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        if self._state is not None:
            with bridge.exact():
                self._state = jax.device_put(self._state, bridge.jax_device(self.device))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, reduction={self.reduction})"
        )


def _ravel(array: np.ndarray, storage: Storage | None) -> np.ndarray:
    if storage is None or storage.shape is None:
        raise RuntimeError("an index of several columns needs the storage, to know its shape")
    shape = tuple(storage.shape)
    if array.shape[1] != len(shape):
        raise RuntimeError(f"coordinates need {len(shape)} columns, one for each item dim, got {array.shape[1]}")
    flat = np.zeros(array.shape[0], np.int64)
    for axis, length in enumerate(shape):
        column = array[:, axis]
        if column.min() < 0 or column.max() >= length:
            raise IndexError(f"coordinate {column.max()} is out of range for dim {axis} of size {length}")
        flat = flat * length + column
    return flat


def _values(priority: Any, dtype: str) -> np.ndarray:
    if isinstance(priority, Tensor):
        priority = priority.detach()
        priority = (priority.float() if priority.dtype == torch.bfloat16 else priority).cpu().numpy()
    values = np.asarray(priority)
    if not (np.issubdtype(values.dtype, np.floating) or np.issubdtype(values.dtype, np.integer)):
        raise TypeError(f"priorities must be real numbers, got {values.dtype}")
    with np.errstate(over="ignore"):  # what is too large for the dtype becomes infinite, and is refused
        return values.astype(dtype)


def _number(name: str, value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return number

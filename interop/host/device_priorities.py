"""Priorities on an accelerator: a functional state, whose updates are asynchronous."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

import fbuf
from fbuf.samplers import Chances
from interop.data import bridge, staging
from interop.host import compiled
from interop.host.device_rows import JaxRows
from interop.host.device_writes import REPLACING, DeviceWrites, make
from interop.host.priorities import Priorities, PriorityValues, nothing_to_draw, state_of
from interop.host.threads import uninterrupted

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class DevicePriorities(Priorities):
    """`Priorities` on a device. The state is allocated at the first use.

    An asynchronous update that the device refuses changes nothing; a later call raises the error (a deferred error).

    Attributes:
        crossing: the way between torch and JAX.
        structure: that of the state, whose leaves `arrays` has made.
    """

    def __init__(
        self, rule: fbuf.Prioritized, capacity: int, alpha: float, excluding: bool, device: torch.device
    ) -> None:
        self._size = 0  # before `size` is set
        self._writes: DeviceWrites | None = None  # where a change may be recorded
        super().__init__(rule, capacity, alpha, excluding)
        self.device = device
        self.crossing = bridge.crossing(device)
        self._leaves: list[jax.Array] = []  # of the state, and the number of items; empty before the first use
        self.structure = jax.tree.structure(())
        self._highest: tuple[float, int] | None = None  # of the state, where the host knows it
        self._accepted: list[Any] = []  # flags of pending updates, in order: JAX arrays, whose stubs lack `is_ready`

    def _settle(self) -> None:
        """Have done what this call has recorded."""
        if self._writes is not None:
            self._writes.settle()

    @property
    def size(self) -> int:
        self._settle()
        return self._size

    @size.setter
    def size(self, value: int) -> None:
        self._size = value

    def arrays(self) -> list[jax.Array]:
        """The leaves of the state, and the number of items."""
        self._settle()
        if not self._leaves:
            self._use(state_of(self, PriorityValues(np.zeros(0, self.rule.dtype), 1.0), self.device))
        return self._leaves

    @property
    def _state(self) -> fbuf.PrioritizedState:
        leaves = self.arrays()
        state: fbuf.PrioritizedState = jax.tree.unflatten(self.structure, leaves[:-1])
        return state

    def _use(self, state: fbuf.PrioritizedState) -> None:
        """Have this state, of `_size` items."""
        with bridge.exact():
            size = jax.device_put(np.int64(self._size), self.crossing.place)
        leaves, self.structure = jax.tree.flatten(state)
        self._leaves, self._highest = [*leaves, size], None

    def _run(self, program: Callable[..., fbuf.PrioritizedState], *given: Any) -> None:
        """Replace the state by the result of a program."""
        with REPLACING:
            state = self._state
            with uninterrupted(), bridge.exact():  # the state is donated: without the result all priorities are lost
                self._leaves = [*jax.tree.leaves(program(self.rule, state, *given)), self._leaves[-1]]

    @property
    def values(self) -> PriorityValues:
        with REPLACING:
            return PriorityValues(np.array(self._state.priorities)[: self.size], *self.highest())

    def load(self, values: PriorityValues) -> None:
        with REPLACING:
            self._settle()
            self._size = len(values.given)
            self._use(state_of(self, values, self.device))
            self._accepted.clear()

    def highest(self) -> tuple[float, int]:
        with REPLACING:
            state = self._state
            if self._highest is None:  # waits for the device
                self._highest = float(np.asarray(state.highest)), int(np.asarray(state.highest_slot))
            return self._highest

    @property
    def _only_rises(self) -> bool:
        """Whether the highest priority is the highest that was ever given. New items do not change it then."""
        return self.rule.new_items == "highest_ever"

    def written(self, slots: np.ndarray, writes: DeviceWrites | None = None) -> None:
        change = PrioritiesChange(self)
        change.write(slots)
        self._make(change, writes)

    def _make(self, change: "PrioritiesChange", writes: DeviceWrites | None) -> None:
        """Make a change, as a part of these writes or now."""
        if writes is None or writes.thread is None:
            make([change])
        else:
            writes.add(change)
            self._writes = writes

    def update(self, slots: np.ndarray, priorities: np.ndarray, top: Any) -> None:
        if not slots.size:  # raises the highest alone
            slots, priorities = np.full(1, -1), np.full(1, top)
        with REPLACING:
            self._settle()  # may change what is known
            before, self._highest = self._highest, None
            self._run(compiled.update, compiled.padded(slots.astype(np.int32)), compiled.padded(priorities), top)
            if before is not None and self._only_rises:
                self._highest = max(before[0], float(top)), before[1]

    def checks(self, priority: object) -> bool:
        return (
            isinstance(priority, Tensor)
            and priority.dtype.is_floating_point
            and priority.dtype in bridge.DTYPES
            and 0 not in priority.shape
            and (priority.device == self.device or bridge.jax_device(priority.device) == self.crossing.place)
        )

    def update_async(self, index: Any, priority: Any, writes: DeviceWrites | None = None) -> bool:
        if type(index) is int:  # of one item that was written
            index = torch.tensor([index])
        fits = (
            self.checks(priority)
            and isinstance(index, Tensor)
            and index.ndim == 1
            and index.dtype in _INTEGERS
            and index.shape[0] == priority.numel()
        )
        if not fits:
            return False
        priority = priority if priority.ndim == 1 else priority.reshape(-1)
        recorded = None if writes is None or writes.thread is None else writes.recorded(self)
        if isinstance(recorded, PrioritiesChange) and not recorded.updates:  # of items that this call has written
            recorded.update(index, priority)
        else:
            change = PrioritiesChange(self)
            change.update(index, priority)
            self._make(change, writes)
        return True

    def take(self, arrays: list[jax.Array], stop: int, accepted: Any) -> None:
        """Use the arrays that a program has made, of `stop` items at least. `accepted`: the flag of an update, or None."""
        self._leaves, self._size, self._writes = arrays, max(self._size, stop), None
        if accepted is not None or not self._only_rises:
            self._highest = None
        if accepted is not None:
            accepted.copy_to_host_async()
            self._accepted.append(accepted)

    def raise_deferred(self) -> None:
        while self._accepted and self._accepted[0].is_ready():
            if not self._accepted.pop(0):
                raise ValueError(
                    "an update_priority() before this call, or the priorities in data that was written, were refused as a "
                    "whole: priorities must be finite and at least 0, and indices of stored items, or -1. On an "
                    "accelerator nobody waits for the check, so this error is raised by a later call"
                )

    def exclude(self, slots: np.ndarray, allowed: np.ndarray) -> None:
        self._run(compiled.exclude, compiled.padded(slots.astype(np.int32)), compiled.padded(allowed))

    def reweight(self, alpha: float) -> None:
        self.alpha = alpha
        self._run(compiled.reweight, np.asarray(alpha, self.rule.dtype))

    def sample(
        self, key: np.ndarray, batch_size: int, size: int, beta: float, rows: JaxRows | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        crossing, here = self.crossing, rows is not None and rows.crossing is self.crossing
        items, lanes = (rows.arrays, rows.lanes) if rows is not None and here else ([], ())
        words = compiled.request_words(key, size, np.asarray(beta, self.rule.dtype))
        with REPLACING:
            leaves = self.arrays()[:-1]
            narrow = not here and self.rule.dtype == "float32"
            with bridge.on(self.device) if narrow else bridge.exact():
                drawn = compiled.draw(self.rule, self.structure, batch_size, leaves, words, lanes, items)
        at, weights, valid, read = drawn
        # Without eps the host waits to see whether there was anything to draw.
        if self.rule.eps == 0 and not valid:
            raise nothing_to_draw()
        [slots, weighed, *found] = crossing.take([at, weights, *read])
        return slots if slots.dtype == torch.int64 else slots.to(torch.int64), weighed, found

    def masses(self) -> tuple[float, float]:
        with REPLACING, bridge.exact():
            total, smallest = np.asarray(compiled.masses(self._state.tree)).tolist()
        return total, smallest

    def chances(self, size: int) -> Chances:
        with REPLACING:
            return self.rule.chances(self._state, size)

    def let_go(self) -> None:
        REPLACING.let_go()

    def functional(self) -> fbuf.PrioritizedState:
        with REPLACING:
            return self._state

    def memory(self) -> Any:
        make = self.rule.init_excluding if self.excluding else self.rule.init
        with bridge.exact():
            return jax.eval_shape(lambda: make(self.capacity))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "own": {**state["own"], "device": self.device}}


class PrioritiesChange:
    """What a call does to priorities: new items get the highest one, then items get given ones. See `Change`."""

    def __init__(self, owner: DevicePriorities) -> None:
        self.owner = owner
        self._new: tuple[np.ndarray, int] | None = None  # the words, and the end of the slots
        self._given: tuple[np.ndarray | None, list[Tensor]] | None = None  # slots on the host, and tensors

    def write(self, slots: np.ndarray) -> None:
        """New items came into these slots."""
        count, stop = slots.shape[0], int(np.maximum.reduce(slots)) + 1
        words = np.empty((1 << (count - 1).bit_length()) + 1, np.int32)  # padded as by `compiled.padded`
        words[:count], words[count:-1], words[-1] = slots, slots[-1], stop
        self._new = words, stop

    def update(self, index: Tensor, priority: Tensor) -> None:
        """Items at index get these priorities. On the host the index was made by the call that wrote the items."""
        device = self.owner.device
        if self._new is not None and index.is_cpu:
            self._given = index.numpy().astype(np.int32), [priority]
        else:
            self._given = (
                None,
                [index if index.device == device else staging.to_device(index.detach(), device), priority],
            )

    @property
    def updates(self) -> bool:
        """Whether items get given priorities."""
        return self._given is not None

    @property
    def words(self) -> list[np.ndarray]:
        words = [] if self._new is None else [self._new[0]]
        if self._given is not None and self._given[0] is not None:
            words.append(self._given[0])
        return words

    @property
    def tensors(self) -> list[Tensor]:
        return [] if self._given is None else self._given[1]

    @property
    def form(self) -> compiled.PrioritiesForm:
        new = 0 if self._new is None else self._new[0].shape[0] - 1
        named = 0 if self._given is None or self._given[0] is None else self._given[0].shape[0]
        return compiled.PrioritiesForm(self.owner.rule, self.owner.structure, new, self._given is not None, named)

    def arrays(self) -> list[jax.Array]:
        return self.owner.arrays()

    def take(self, arrays: list[jax.Array], flag: jax.Array) -> None:
        stop = 0 if self._new is None else self._new[1]
        self.owner.take(arrays, stop, None if self._given is None else flag)

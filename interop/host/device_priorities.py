"""Priorities on an accelerator: a functional state, whose updates are asynchronous."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

import fbuf
from interop.data import bridge
from interop.host import compiled
from interop.host.priorities import Priorities, PriorityValues, nothing_to_draw, state_of
from interop.host.threads import uninterrupted

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class DevicePriorities(Priorities):
    """`Priorities` on a device. The state is allocated at the first use.

    An asynchronous update that the device refuses changes nothing; a later call raises the error (a deferred error).
    """

    def __init__(
        self, rule: fbuf.Prioritized, capacity: int, alpha: float, excluding: bool, device: torch.device
    ) -> None:
        super().__init__(rule, capacity, alpha, excluding)
        self.device = device
        self._held: fbuf.PrioritizedState | None = None
        self._accepted: list[Any] = []  # flags of pending updates, in order: JAX arrays, whose stubs lack `is_ready`

    @property
    def _state(self) -> fbuf.PrioritizedState:
        if self._held is None:
            self._held = state_of(self, PriorityValues(np.zeros(0, self.rule.dtype), 1.0), self.device)
        return self._held

    def _run(self, program: Callable[..., Any], *given: Any) -> None:
        """Replace the state by the result of a program."""
        state = self._state
        with uninterrupted(), bridge.exact():  # the state is donated: without the result all priorities are lost
            self._held = program(self.rule, state, *given)

    @property
    def values(self) -> PriorityValues:
        return PriorityValues(np.array(self._state.priorities)[: self.size], *self.highest())

    def load(self, values: PriorityValues) -> None:
        self._held, self.size = state_of(self, values, self.device), len(values.given)
        self._accepted.clear()

    def highest(self) -> tuple[float, int]:
        return float(np.asarray(self._state.highest)), int(np.asarray(self._state.highest_slot))

    def written(self, slots: np.ndarray) -> None:
        self._run(compiled.written, compiled.padded(slots.astype(np.int32)))
        self.size = max(self.size, int(slots.max()) + 1)

    def update(self, slots: np.ndarray, priorities: np.ndarray, top: Any) -> None:
        if not slots.size:  # raises the highest alone
            slots, priorities = np.full(1, -1), np.full(1, top)
        self._run(compiled.update, compiled.padded(slots.astype(np.int32)), compiled.padded(priorities), top)

    def checks(self, priority: object) -> bool:
        return (
            isinstance(priority, Tensor)
            and priority.dtype.is_floating_point
            and priority.numel() > 0
            and bridge.jax_device(priority.device) == bridge.jax_device(self.device)
        )

    def update_async(self, index: Any, priority: Any) -> bool:
        if type(index) is int:  # of one item that was written
            index = torch.tensor([index])
        fits = (
            self.checks(priority)
            and isinstance(index, Tensor)
            and index.ndim == 1
            and index.dtype in _INTEGERS
            and index.numel() == priority.numel()
        )
        if fits:
            here = bridge.placed(index.detach(), self.device), priority.reshape(-1)
            given, state = bridge.lent(here), self._state
            with uninterrupted(), bridge.exact():
                self._held, accepted = compiled.update_async(self.rule, state, *given, np.int64(self.size))
                bridge.followed(accepted)  # the caller may write to its tensors again
            accepted.copy_to_host_async()
            self._accepted.append(accepted)
        return fits

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
        self,
        key: np.ndarray,
        batch_size: int,
        size: int,
        beta: float,
        items: Sequence[jax.Array],
        lanes: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, list[jax.Array]]:
        here = list(items) if items and items[0].devices() == self._state.priorities.devices() else []
        narrow = not here and self.rule.dtype == "float32"
        with bridge.on(self.device) if narrow else bridge.exact():
            given = key, batch_size, np.int32(size), np.asarray(beta, self.rule.dtype), here, lanes if here else ()
            slots, (weights, valid), leaves = compiled.draw(self.rule, self._state, *given)
        # Without eps the host waits to see whether there was anything to draw.
        if self.rule.eps == 0 and not valid:
            raise nothing_to_draw()
        return bridge.hand_over(slots, torch.int64), bridge.hand_over(weights), leaves

    def masses(self) -> tuple[float, float]:
        with bridge.exact():
            total, smallest = np.asarray(compiled.masses(self._state.tree)).tolist()
        return total, smallest

    def functional(self) -> fbuf.PrioritizedState:
        return self._state

    def memory(self) -> Any:
        make = self.rule.init_excluding if self.excluding else self.rule.init
        with bridge.exact():
            return jax.eval_shape(lambda: make(self.capacity))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "own": {**state["own"], "device": self.device}}

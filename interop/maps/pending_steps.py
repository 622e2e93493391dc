"""A queue of steps to write in one batch, as a batch costs little more than a single step."""

import math
from typing import Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.data.layout import Layout

_MOST_STEPS = 1024
_MOST_BYTES = 1 << 22


class PendingSteps:
    """A queue of copies of rollouts [T] on the CPU, all with the layout of the first one.

    Args:
        layout: the layout of a step.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in layout.leaves)
        self._most = min(_MOST_STEPS, _MOST_BYTES // max(size, 1))
        self._waiting: list[list[Tensor]] = []
        self._length = 0

    @classmethod
    def like(cls, rollout: TensorDictBase) -> Self | None:
        """An empty queue for rollouts like the given, written one; None if it has non-tensor entries."""
        try:
            return cls(Layout.of(rollout, 1))
        except TypeError:
            return None

    def __len__(self) -> int:
        return self._length

    def add(self, rollout: TensorDictBase, room: int) -> bool:
        """Queue a copy of a rollout. Returns False, and queues nothing, if the layout differs or it exceeds `room` steps."""
        if rollout.ndim != 1 or self._length + len(rollout) > min(room, self._most):
            return False
        try:
            leaves = self._layout.flatten(rollout, 1)
        except (KeyError, TypeError, RuntimeError):
            return False
        if not all(leaf.is_cpu for leaf in leaves):
            return False
        self._waiting.append([leaf.detach().clone() for leaf in leaves])
        self._length += len(rollout)
        return True

    def take(self) -> TensorDictBase | None:
        """Remove all steps and return them as one rollout, in order; None if the queue is empty."""
        if not self._waiting:
            return None
        leaves = [torch.cat(column) for column in zip(*self._waiting, strict=True)]
        steps: TensorDictBase = self._layout.build(leaves, (self._length,))
        self._waiting, self._length = [], 0
        return steps

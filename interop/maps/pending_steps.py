"""Steps that wait to be written in one batch, for a batch costs little more than a single step."""

import math
from typing import Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.data.layout import Layout

_MOST_STEPS = 1024
_MOST_BYTES = 1 << 22


class PendingSteps:
    """Copies of rollouts [T] that have the layout of the first one, on the CPU.

    Args:
        layout: of a step.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in layout.leaves)
        self._most = min(_MOST_STEPS, _MOST_BYTES // max(size, 1))
        self._waiting: list[list[Tensor]] = []
        self._length = 0

    @classmethod
    def like(cls, rollout: TensorDictBase) -> Self | None:
        """An empty queue for rollouts like one that was written. None if it has entries that are no tensors."""
        try:
            return cls(Layout.of(rollout, 1))
        except TypeError:
            return None

    def __len__(self) -> int:
        return self._length

    def add(self, rollout: TensorDictBase, room: int) -> bool:
        """Copy a rollout. False, without doing so, if it has another layout or exceeds the room for steps."""
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
        """All steps as one rollout, in order, and forget them; None if there are none."""
        if not self._waiting:
            return None
        leaves = [torch.cat(column) for column in zip(*self._waiting, strict=True)]
        steps: TensorDictBase = self._layout.build(leaves, (self._length,))
        self._waiting, self._length = [], 0
        return steps

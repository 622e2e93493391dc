"""A draw that was made for a batch which is not returned yet."""

import dataclasses
from typing import Any

import numpy as np
from tensordict import is_tensor_collection
from torch import Tensor

from interop.data.pytrees import each_leaf
from interop.host.epochs import Epoch, Taken


@dataclasses.dataclass(slots=True, eq=False)
class Reservation:
    """What was drawn when a batch was requested: positions of an epoch, or the index of a user's sampler."""

    slots: Any  # flat; the whole index where it is a user's
    described: Any  # the info
    epoch: Epoch | None = None  # None for a user's sampler, which cannot take its draw back
    taken: Taken | None = None

    @property
    def info(self) -> Any:
        """The info, in a dict or tensordict of the caller's own."""
        return self.described.copy()

    @property
    def is_own(self) -> bool:
        """Whether it is of a user's sampler."""
        return self.epoch is None

    @property
    def is_current(self) -> bool:
        """Whether it can still be committed: not after the epoch was begun anew, or loaded."""
        return self.epoch is None or self.taken is None or self.epoch.is_reserved(self.taken)

    def commit(self) -> None:
        """Have it count: the batch is returned."""
        if self.epoch is not None and self.taken is not None:
            self.epoch.commit(self.taken)

    def release(self) -> None:
        """Have its items remain to be drawn."""
        if self.epoch is not None and self.taken is not None:
            self.epoch.release(self.taken)

    @classmethod
    def own(cls, index: Any, info: Any) -> "Reservation":
        """That of a user's sampler, copied: the sampler may change what it returned for its next draw."""
        return cls(each_leaf(index, _copied), each_leaf(info, _copied))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) or is_tensor_collection(leaf):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

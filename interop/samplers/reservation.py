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
    """The draw of a requested batch: positions of an epoch, or the index of a user's sampler."""

    slots: Any  # flat; the whole index for a user's sampler
    described: Any  # the info
    take: tuple[Epoch, Taken] | None = None  # None for a user's sampler, which cannot take its draw back

    @property
    def info(self) -> Any:
        """The info, in a dict or tensordict that the caller may change."""
        return self.described.copy()

    @property
    def is_own(self) -> bool:
        """Whether it is of a user's sampler."""
        return self.take is None

    @property
    def is_current(self) -> bool:
        """Whether it can still be committed: not after the epoch was begun anew, or loaded."""
        return self.take is None or self.take[0].is_reserved(self.take[1])

    def commit(self) -> None:
        """Count it: the batch is returned."""
        if self.take is not None:
            self.take[0].commit(self.take[1])

    def release(self) -> None:
        """Undo it: its items remain to be drawn."""
        if self.take is not None:
            self.take[0].release(self.take[1])

    @classmethod
    def own(cls, index: Any, info: Any) -> "Reservation":
        """A copy of the draw of a user's sampler, which may change its results in the next draw."""
        return cls(each_leaf(index, _copied), each_leaf(info, _copied))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) or is_tensor_collection(leaf):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

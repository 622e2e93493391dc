"""What every sampler does."""

import sys
import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch

from interop.checkpoint.stateful import Stateful
from interop.storages import Storage


class Sampler(Stateful, ABC):
    """Names the items of a batch. A subclass gives `sample`; the rest may stay as it is.

    A subclass with a state of its own is saved with it, and goes on from it, where it defines `state_dict`, which returns
    tensors and plain values, in dicts with text keys and lists, and `load_state_dict`, which takes them back. It draws the
    same batches then if it takes its random numbers from `self._rng`, None standing for torch's global generator.
    """

    _remaining_batches = sys.maxsize  # how many batches prefetching may ask for
    _reads_to_draw = False  # whether draws ahead look at what is stored, and so must not be made while that is written
    _epoch: Any = None  # an `Epoch`, where it is what draws name that changes by a draw

    _rng: torch.Generator | None = None

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """An index into the storage, and what to tell about the batch."""

    def sampleable(self, storage: Storage) -> int:
        """How many items there are to draw from: the length of a buffer."""
        return len(storage)

    def add(self, index: Any) -> None:
        """An item was added at index."""

    def extend(self, index: Any) -> None:
        """Items were added at index."""

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """The items at index are new."""

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Give items priorities; here a warning, this sampler has none."""
        warnings.warn(
            f"update_priority() has no effect: {type(self).__name__} is not a prioritized sampler",
            UserWarning,
            stacklevel=3,
        )

    @property
    def takes_priorities(self) -> bool:
        """Whether `update_priority` has an effect: it has where a subclass defines it."""
        return type(self).update_priority is not Sampler.update_priority

    def checked(self, priority: Any) -> Any:
        """The priorities as `update_priority` takes them; TypeError or ValueError for what it would refuse."""
        return priority

    @property
    def refuses_late(self) -> bool:
        """Whether a draw can be refused after random numbers were taken for it."""
        return True

    def check_fit(self, storage: Storage, writer: Any, prefetches: bool, expands: bool) -> None:
        """TypeError, ValueError or RuntimeError for parts of a buffer that nothing could be drawn from in this way."""

    def refuse_a_stranger(self) -> None:
        """RuntimeError in a process where the sampler cannot be told of new items."""

    @property
    def default_priority(self) -> float:
        """The priority of a new item."""
        return 1.0

    @property
    def ran_out(self) -> bool:
        """Whether an epoch has just ended; never for samplers without one."""
        return False

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        pass

    def _empty(self) -> None:
        """Start over, the buffer was emptied."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rng": None}

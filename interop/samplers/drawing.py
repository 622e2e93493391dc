"""The base class of the samplers of the library, which draw flat slots."""

from abc import abstractmethod
from typing import Any

import numpy as np

from interop.samplers.sampler import Sampler
from interop.samplers.slot_draws import SlotDraws
from interop.storages import Storage


class DrawingSampler(Sampler):
    """A sampler of flat slots. A buffer reads them without checks, unless a user's subclass defines `draw` or `sample`.

    The constructor of a subclass sets `_library_draws`.
    """

    _library_draws: SlotDraws

    @abstractmethod
    def __init__(self) -> None:
        """Set `_library_draws`."""

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """int64 [batch_size], or a tuple of such per item dim, and the info of the batch.

        RuntimeError if there is nothing to draw.
        """
        return self._library_draws.draw(storage, batch_size, key)

"""The sampler of a buffer in processes that only write to it."""

from typing import Any, NoReturn

import numpy as np

from interop.checkpoint.state import EXACT, Apply, LoadOptions
from interop.samplers.sampler import Sampler
from interop.storages import Storage


class DrawnElsewhere(Sampler):
    """Stands for the sampler, which is in the process that made the buffer.

    RuntimeError for draws, priorities and checkpoints. Writes do not use it.
    """

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> NoReturn:
        _refuse("sample()")

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> NoReturn:
        _refuse("update_priority()")

    def state(self) -> NoReturn:
        _refuse("saving")

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        _refuse("loading")


def _refuse(call: str) -> NoReturn:
    raise RuntimeError(
        f"{call} of a buffer with sync=False in a worker, which only writes: draw, update priorities, save and load in the "
        "process that made the buffer"
    )

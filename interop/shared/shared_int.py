"""An integer that forked and spawned workers see too."""

import os
import re
from typing import Any

import torch
from torch import Tensor

from interop.shared.processes import starting_a_worker

_AT_ONCE = 512  # cells made together: 4 KiB, one descriptor
_unused: list[tuple[Tensor, int]] = []


def in_shared_memory(tensor: Tensor) -> Tensor:
    """The tensor, moved to where other processes see it. OSError, and not torch's RuntimeError, where there is no room."""
    try:
        return tensor.share_memory_()
    except RuntimeError as error:
        if (found := re.search(r"\((\d+)\)$", str(error))) is None:
            raise
        need = f"{tensor.nbytes} bytes are needed in /dev/shm, for what processes share"
        raise OSError(
            int(found[1]), f"{os.strerror(int(found[1]))}: {need}; make room there, or raise the limit"
        ) from error


def _cell() -> tuple[Tensor, int]:
    """Memory for one integer, shared from the start: whoever has it sees one value, started before or after.

    No cell is given out twice, because a worker may outlive what its cell was for here.
    """
    while True:
        try:
            return _unused.pop()  # in one step: threads need no lock
        except IndexError:
            memory = in_shared_memory(torch.zeros(_AT_ONCE, dtype=torch.int64, device="cpu"))
            _unused.extend((memory, place) for place in range(_AT_ONCE))


class SharedInt:
    """A 64-bit integer in shared memory. Pickles and copies take its value along; workers that are started share it."""

    def __init__(self, value: int = 0) -> None:
        self._hold(_cell())
        self.value = value

    def _hold(self, cell: tuple[Tensor, int]) -> None:
        self._cell = cell
        memory, place = cell
        self._view: Any = memory.numpy()[place : place + 1].data  # a memoryview: several times as fast as NumPy for one

    @property
    def value(self) -> int:
        found: int = self._view[0]
        return found

    @value.setter
    def value(self, value: int) -> None:
        self._view[0] = value

    def __getstate__(self) -> dict[str, Any]:
        # The memory is one object for all cells in it: a worker gets one descriptor for them.
        return {"cell": self._cell} if starting_a_worker() else {"value": self.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._hold(state["cell"] if "cell" in state else _cell())
        if "value" in state:
            self.value = state["value"]


os.register_at_fork(after_in_child=_unused.clear)  # the parent goes on to give them out

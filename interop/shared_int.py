"""An integer that forked and spawned workers see too."""

from typing import Any

import torch


class SharedInt:
    """A 64-bit integer in shared memory. Plain pickles and copies take its value along; workers share it."""

    def __init__(self, value: int = 0) -> None:
        self._hold(torch.tensor([value], dtype=torch.int64).share_memory_())

    def _hold(self, cell: torch.Tensor) -> None:
        self._cell = cell
        self._view = cell.numpy()

    @property
    def value(self) -> int:
        return int(self._view[0])

    @value.setter
    def value(self, value: int) -> None:
        self._view[0] = value

    def __getstate__(self) -> dict[str, Any]:
        return {"cell": self._cell}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cell = state["cell"]
        self._hold(cell if cell.is_shared() else cell.clone().share_memory_())

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedInt":
        return SharedInt(self.value)


class LocalInt:
    """The same for one process only."""

    def __init__(self, value: int = 0) -> None:
        self.value = value


def counter(compilable: bool) -> SharedInt | LocalInt:
    """A zero that workers share, or a plain one for `compilable` components."""
    return LocalInt() if compilable else SharedInt()

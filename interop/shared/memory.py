"""Bytes that outlive a process: of a file, or of memory that processes share."""

import mmap
import os
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor

from interop.host import maps

_STEP = 1 << 20  # bytes that memory without a file takes at a time


class Memory:
    """Bytes of a file or, without a path, of memory that forked and started workers share; zeros at first.

    Args:
        private: writes go into pages of this process; the file is only read, by `read_only`.
    """

    def __init__(self, size: int, path: str | os.PathLike[str] | None = None, *, private: bool = False) -> None:
        self.path = None if path is None else os.path.abspath(path)
        self.read_only: np.ndarray | None = None
        self._tensor: Any = None
        self.reserved = size  # bytes that have memory, at the beginning
        if self.path is None:
            self._hold(MemoryMappedTensor.empty(torch.Size([size]), dtype=torch.uint8, device="cpu"))
            self.reserved = 0
            self.reserve(_STEP)
            return
        handle = os.open(self.path, (os.O_RDONLY if private else os.O_RDWR) | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
            self.bytes = np.frombuffer(mmap.mmap(handle, size, access=access), np.uint8)
            if private:
                self.read_only = np.frombuffer(mmap.mmap(handle, size, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(handle)

    def _hold(self, tensor: Any) -> None:
        self._tensor = tensor
        self.bytes = tensor.detach().as_subclass(torch.Tensor).numpy()

    def reserve(self, size: int) -> None:
        """Reserve memory for the first bytes. OSError where there is none: a write to them would kill the process."""
        size = min(-(-size // _STEP) * _STEP, self.bytes.size)
        if size > self.reserved:
            handle = maps.descriptor(self._tensor)
            if handle >= 0 and hasattr(os, "posix_fallocate"):
                maps.reserve(handle, self.reserved, size - self.reserved)
            self.reserved = size

    def grow(self) -> bool:
        """Map all of a file that was made longer; earlier views stay valid. Returns whether it was longer."""
        size = 0 if self.path is None else os.path.getsize(self.path)
        longer = size > self.bytes.size
        if longer:
            self.__init__(size, self.path)  # type: ignore[misc]
        return longer

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.bytes.size, "tensor": self._tensor, "reserved": self.reserved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["path"] is not None:
            self.__init__(state["size"], state["path"])  # type: ignore[misc]
        else:
            self.path = self.read_only = None
            self.reserved = state["reserved"]
            self._hold(state["tensor"])

"""Memory of a storage that any of several processes allocates: the first one that writes."""

import os
import pickle
import secrets
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fbuf.checkpoint.files import remove_folder
from interop.data.layout import Layout
from interop.host.maps import bytes_of, from_file
from interop.shared.folder import refuse_full, zeros
from interop.shared.memory import Memory


class FirstWrite:
    """The temporary folder in which processes find the memory of a storage. The lock of the storage is held.

    The process that made it removes it when `owner` is deleted, unless it was asked to keep it.
    """

    def __init__(self, owner: object, cleanup: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="interop_storage_init_"))
        self.values = self.folder / "values"  # of text and ragged rows
        self._description = self.folder / "description"
        self._memory = Memory(8)
        self._words: Any = memoryview(self._memory.bytes.data).cast("q")  # read ten times as fast as by NumPy
        if cleanup:
            weakref.finalize(owner, _remove, self.folder, os.getpid())

    @property
    def epoch(self) -> int:
        """How often memory was given up for items of another layout. Memory of an earlier epoch is invalid."""
        found: int = self._words[0]
        return found

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Zeros in new files. OSError where the disk has no room; nothing is left then."""
        self._refuse_gone()
        stem = secrets.token_hex(8)
        paths = [self.folder / f"{stem}-{leaf}.memmap" for leaf in range(len(shapes))]
        sizes = list(map(bytes_of, shapes, dtypes))
        refuse_full(self.folder, {f"of leaf {leaf}": size for leaf, size in enumerate(sizes)})
        try:
            for path, size in zip(paths, sizes, strict=True):
                zeros(path, size)
            return list(map(from_file, paths, shapes, dtypes))
        except BaseException:
            for path in paths:
                path.unlink(missing_ok=True)
            raise

    def publish(self, layout: Layout, lead: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
        """Let other processes find mapped tensors of shape [*lead, ...]."""
        self._refuse_gone()
        places = [(getattr(each, "filename", None), tuple(each.shape), each.dtype) for each in tensors]
        scratch = self.folder / f"description.{os.getpid()}"
        scratch.write_bytes(pickle.dumps((self.epoch, layout.keeping(None), lead, places)))
        os.replace(scratch, self._description)

    def found(self) -> tuple[Layout, tuple[int, ...], list[Tensor]] | None:
        """What was published in this epoch; None where nothing was."""
        try:
            described = self._description.read_bytes()
        except FileNotFoundError:
            return None
        # Written by a process of this family, in a folder that only this user may read.
        epoch, layout, lead, places = pickle.loads(described)
        return (layout, lead, [from_file(*place) for place in places]) if epoch == self.epoch else None

    def renew(self) -> None:
        """Make every process give up the memory, and remove its files."""
        self._words[0] += 1
        self.withdraw()
        for path in self.folder.glob("*.memmap"):
            path.unlink(missing_ok=True)
        remove_folder(self.values)

    def withdraw(self) -> None:
        """Take back what was published and not used."""
        self._description.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_words": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _words=memoryview(state["_memory"].bytes.data).cast("q"))

    def _refuse_gone(self) -> None:
        if not self.folder.is_dir():
            raise RuntimeError(
                f"{self.folder} is gone, in which processes find the memory of this storage: its maker has ended"
            )


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:
        remove_folder(folder)

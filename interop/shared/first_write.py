"""Where processes that share a storage find its memory, which whichever of them writes first allocates."""

import os
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interop.data.layout import Layout
from interop.host.maps import from_file
from interop.shared.files import Files
from interop.shared.shared_int import SharedInt
from interop.storages import planning

_DESCRIPTION = "description"


class FirstWrite:
    """The folder in which processes find the memory of a storage. It goes with `owner`, in the process that made it.

    The lock of the storage is held for reading and writing; a description is there as a whole or not at all.

    Attributes:
        epoch: how often memory was given up for items of another layout. Memory of an earlier epoch holds nothing.
    """

    def __init__(self, owner: Any, cleanup: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="interop_storage_init_"))
        self.values = self.folder / "values"  # of text and ragged rows
        self.epoch = SharedInt()
        if cleanup:
            weakref.finalize(owner, _remove, self.folder, os.getpid())

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Zeros in files of the folder. OSError where the disk has no room; nothing is left then."""
        self.refuse_gone()
        sizes = [
            max(1, torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        planning.refuse_files(str(self.folder), {f"of leaf {place}": size for place, size in enumerate(sizes)})
        paths = [self.folder / f"{os.getpid()}-{place}.memmap" for place in range(len(shapes))]
        files = Files()
        try:
            for path, size in zip(paths, sizes, strict=True):
                files.claim(self.folder, path.name, existsok=True)
                files.reserve(path, size)
            files.put_in_place()
            return [from_file(*each) for each in zip(paths, shapes, dtypes, strict=True)]
        except BaseException:
            files.remove()
            raise

    def publish(self, layout: Layout, lead: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
        """Have others find mapped tensors of shape [*lead, ...]."""
        self.refuse_gone()
        places = [(getattr(each, "filename", None), tuple(each.shape), each.dtype) for each in tensors]
        beside = self.folder / f"{_DESCRIPTION}.{os.getpid()}"
        beside.write_bytes(pickle.dumps((layout.keeping(None), lead, places, self.epoch.value)))
        os.replace(beside, self.folder / _DESCRIPTION)

    def found(self) -> tuple[Layout, tuple[int, ...], list[Tensor]] | None:
        """What was published in this epoch; None where nothing was."""
        described = _read(self.folder)
        if described is None or described[-1] != self.epoch.value:
            return None
        layout, lead, places = described[:3]
        return layout, lead, [from_file(*place) for place in places]

    def renew(self) -> None:
        """Have every process give up the memory, and remove its files."""
        self.epoch.value += 1
        self.withdraw()
        for path in self.folder.glob("*.memmap"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.values, ignore_errors=True)

    def withdraw(self) -> None:
        """Have nothing be found of what was published and not used."""
        (self.folder / _DESCRIPTION).unlink(missing_ok=True)

    def refuse_gone(self) -> None:
        """RuntimeError where the folder went with the storage that was built first."""
        if not self.folder.is_dir():
            raise RuntimeError(
                f"{self.folder} is gone, in which processes were to find this storage: the one that made it has ended"
            )


def _read(folder: Path) -> Any:
    try:
        described = (folder / _DESCRIPTION).read_bytes()
    except FileNotFoundError:
        return None
    return pickle.loads(described)  # of a process of this family, in a folder of this user alone


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)

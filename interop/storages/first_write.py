"""Memory that the first process to write allocates, and that the others find: files in a folder they know of."""

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

from interop.codec import Layout
from interop.storages import planning
from interop.storages.files import Files
from interop.storages.maps import from_file

_DESCRIPTION = "description"


class FirstWrite:
    """The folder that processes agreed on before anything was written. It goes with `owner`, in the process that made it.

    Reading and writing take the turn of the storage; a description is there as a whole or not at all.
    """

    def __init__(self, owner: Any, cleanup: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="interop_storage_init_"))
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

    def publish(
        self, layout: Layout, lead: tuple[int, ...], tensors: Sequence[Tensor], files: Files | None = None
    ) -> None:
        """Have others find mapped tensors of shape [*lead, ...], and who made the storage the files they are in."""
        self.refuse_gone()
        places = [(getattr(each, "filename", None), tuple(each.shape), each.dtype) for each in tensors]
        beside = self.folder / f"{_DESCRIPTION}.{os.getpid()}"
        beside.write_bytes(pickle.dumps((layout, lead, places, files)))
        os.replace(beside, self.folder / _DESCRIPTION)

    def found(self) -> tuple[Layout, tuple[int, ...], list[Tensor]] | None:
        """What was published; None where nothing was."""
        described = _read(self.folder)
        if described is None:
            return None
        layout, lead, places, _ = described
        return layout, lead, [from_file(*place) for place in places]

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


def was_published(folder: Path) -> bool:
    """Whether a process has made the storage that others find by this folder."""
    return (folder / _DESCRIPTION).exists()


def remove_published(folder: Path) -> None:
    """Remove the files elsewhere that were published, for the process that made the folder."""
    if (described := _read(folder)) is not None and described[3] is not None:
        described[3].remove_for_maker()


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)

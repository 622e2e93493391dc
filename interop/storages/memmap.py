"""Tensors, tensordicts and pytrees in memory-mapped files, allocated at the first write."""

import json
import os
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, is_tensorclass
from torch import Tensor

from interop.codec import Layout, LeafSpec
from interop.processes import starting_a_worker
from interop.storages.lazy import LazyTensorStorage
from interop.storages.rows import Rows, TorchRows

_SINGLE = "_-single-tensor-_"


class LazyMemmapStorage(LazyTensorStorage):
    """Like `LazyTensorStorage`, in files: `<key>.memmap`, a folder a nested tensordict, `meta.json` in each.

    Disk space is reserved before the first row: a full disk is an OSError at the first write, and nothing stays behind.

    Args:
        max_size: capacity in items.
        scratch_dir: folder of the files; None for anonymous maps that vanish with the process.
        device: "cpu" or "auto"; anything else is a ValueError.
        ndim: how many leading dims of the stored layout count as items.
        existsok: write over files that are there; otherwise they are a RuntimeError.
        compilable: keep the length local to this process.
        auto_cleanup: remove the files when the storage goes; by default only without `scratch_dir`.
    """

    _MAPPED = True

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        auto_cleanup: bool | None = None,
    ) -> None:
        if device not in ("auto", None) and torch.device(device).type != "cpu":
            raise ValueError(f"memory maps are on the CPU, got device={device}: cast samples to it with a transform")
        super().__init__(max_size, device="cpu", ndim=ndim, compilable=compilable)
        self.scratch_dir = None if scratch_dir is None else str(scratch_dir).rstrip("/") + "/"
        self.existsok = existsok
        self.auto_cleanup = scratch_dir is None if auto_cleanup is None else auto_cleanup
        self._files: list[str] = []
        self._maker = os.getpid()

    def _allocate(self, layout: Layout, lanes: tuple[int, ...], first: Sequence[Tensor]) -> Rows:
        rows = -(-self._max_size // max(1, torch.Size(lanes).numel()))
        shapes = [(rows, *lanes, *spec.shape) for spec in layout.leaves]
        if self.scratch_dir is None:
            made_up = zip(shapes, layout.leaves, strict=True)
            return TorchRows([_anonymous(shape, spec.dtype) for shape, spec in made_up], lanes, mapped=True)
        root = Path(self.scratch_dir)
        paths = [root / _file_name(spec) for spec in layout.leaves]
        taken = [
            path for place, path in enumerate(paths) if path in paths[:place] or any(path in p.parents for p in paths)
        ]
        if taken:
            raise ValueError(
                f"two keys would share the file {taken[0].name}: rename one (a number and its text are alike)"
            )
        self._refuse_existing(paths)
        made = _Made(root)
        try:
            tensors: list[Tensor] = []
            for path, shape, spec in zip(paths, shapes, layout.leaves, strict=True):
                made.folder(path.parent)
                made.reserve(path, max(1, torch.Size(shape).numel() * spec.dtype.itemsize))
                tensors.append(_from_file(path, shape, spec.dtype))
            if layout.is_tensordict:
                self._describe(layout, tensors, (rows, *lanes), root)
        except BaseException:
            made.undo()
            raise
        self._files, self._maker = [str(path) for path in paths], os.getpid()
        if self.auto_cleanup:
            weakref.finalize(self, _remove, self._files, str(root), os.getpid())
        return TorchRows(tensors, lanes, mapped=True)

    def _refuse_existing(self, paths: Sequence[Path]) -> None:
        there = [str(path) for path in paths if path.exists()]
        if there and not self.existsok:
            raise RuntimeError(
                f"{there[0]} already exists: another buffer may use it. Pass another scratch_dir, or existsok=True to "
                "write over it"
            )

    def _describe(self, layout: Layout, tensors: Sequence[Tensor], shape: tuple[int, ...], root: Path) -> None:
        """Write the `meta.json` files, so that `TensorDict.load_memmap(scratch_dir)` opens the storage."""
        whole = layout.build(tensors, shape, torch.device("cpu"))
        whole = whole.to_tensordict(retain_none=False) if is_tensorclass(whole) else whole
        for folder, node in _folders(whole, root):
            meta: dict[str, Any] = {
                "shape": list(node.shape),
                "device": "cpu",
                "_type": str(TensorDict),
            }
            for key, value in node.items():
                if isinstance(value, Tensor):
                    meta[key] = {
                        "device": "cpu",
                        "shape": list(value.shape),
                        "dtype": str(value.dtype),
                        "is_nested": False,
                    }
                else:
                    meta[key] = {"type": "TensorDict"}
            scratch = folder / ".meta.json.tmp"
            scratch.write_text(json.dumps(meta))
            os.replace(scratch, folder / "meta.json")

    def _kept(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if any(isinstance(tensor, MemoryMappedTensor) for tensor in tensors):
            return tensors
        maps = [_anonymous(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        for kept, tensor in zip(maps, tensors, strict=True):
            kept.copy_(tensor)
        return maps

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if not starting_a_worker():  # the copy has memory of its own, not these files
            state.update(scratch_dir=None, _files=[])
        return {**state, "_maker": 0}

    def cleanup(self) -> bool:
        """Remove the files; False where there are none to remove. Only the process that made them may."""
        if not self._files or self.scratch_dir is None:
            return False
        files, self._files = self._files, []
        return _remove(files, self.scratch_dir, self._maker)


class _Made:
    """Files and folders made so far, to be taken back if the rest fails."""

    def __init__(self, root: Path) -> None:
        self._paths: list[Path] = []
        self._root = root

    def folder(self, path: Path) -> None:
        missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self._paths.extend(reversed(missing))

    def reserve(self, path: Path, size: int) -> None:
        new = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        if new:
            self._paths.append(path)
        try:
            if new:
                os.posix_fallocate(handle, 0, size)
            else:
                os.ftruncate(handle, 0)
                os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)

    def undo(self) -> None:
        for path in reversed(self._paths):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _anonymous(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if dtype.is_complex:  # as pairs of real numbers: memory maps know no complex ones
        return torch.view_as_complex(MemoryMappedTensor.empty(torch.Size((*shape, 2)), dtype=dtype.to_real()))
    return MemoryMappedTensor.empty(torch.Size(shape), dtype=dtype)


def _from_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if dtype.is_complex:
        pairs = MemoryMappedTensor.from_filename(path, dtype=dtype.to_real(), shape=torch.Size((*shape, 2)))
        return torch.view_as_complex(pairs)
    return MemoryMappedTensor.from_filename(path, dtype=dtype, shape=torch.Size(shape))


def _folders(node: Any, folder: Path) -> list[tuple[Path, Any]]:
    found = [(folder, node)]
    for key, value in node.items():
        if not isinstance(value, Tensor):
            found += _folders(value, folder / key)
    return found


def _file_name(spec: LeafSpec) -> str:
    if not spec.path:
        return os.environ.get("SINGLE_TENSOR_BUFFER_NAME", _SINGLE) + ".memmap"
    parts = [str(part) for part in spec.path]
    if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts):
        raise ValueError(f"the key {spec.path} cannot name a file: keys must not be empty or contain '/'")
    return "/".join(parts) + ".memmap"


def _remove(files: Sequence[str], root: str, owner: int) -> bool:
    """Remove the files and the folders they leave empty, in the process that made them."""
    if os.getpid() != owner:
        return False
    removed = False
    for name in files:
        path = Path(name)
        removed = removed or path.exists()
        path.unlink(missing_ok=True)
        folder = path.parent
        while folder.is_relative_to(root):
            (folder / "meta.json").unlink(missing_ok=True)
            try:
                folder.rmdir()
            except OSError:
                break
            folder = folder.parent
    return removed

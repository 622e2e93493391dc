"""Tensors, tensordicts and pytrees in memory-mapped files, allocated at the first write."""

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, is_tensorclass
from torch import Tensor

from interop.codec import Layout, LeafSpec
from interop.processes import starting_a_worker
from interop.storages.files import Files
from interop.storages.lazy import LazyTensorStorage
from interop.storages.rows import Rows, TorchRows

_SINGLE = "_-single-tensor-_"
_ALIGNED = 64  # bytes


class LazyMemmapStorage(LazyTensorStorage):
    """Like `LazyTensorStorage`, in files: `<key>.memmap`, a folder a nested tensordict, `meta.json` in each.

    Disk space in `scratch_dir` is reserved before the first row: a full disk is an OSError at the first write, and
    nothing stays behind. Anonymous maps take space as they are written. Workers, forked or spawned, see the same rows.

    Args:
        max_size: capacity in items.
        scratch_dir: folder of the files; None for anonymous maps that vanish with the last process that has them.
        device: "cpu" or "auto"; anything else is a ValueError.
        ndim: how many leading dims of the stored layout count as items.
        existsok: put new files in the place of those that are there; otherwise they are a RuntimeError. Who has the old
            ones open keeps them.
        compilable: keep the length local to this process.
        auto_cleanup: remove the files when the storage goes or the interpreter ends; by default only without
            `scratch_dir`. A process that a signal kills, SIGTERM among them, leaves its files.
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
        self._files: Files | None = None

    def _allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        shapes = [(*lead, *spec.shape) for spec in layout.leaves]
        dtypes = [spec.dtype for spec in layout.leaves]
        if self.scratch_dir is None:
            return TorchRows(_anonymous(shapes, dtypes), lead[1:])
        root = Path(self.scratch_dir)
        paths = [root / _file_name(spec) for spec in layout.leaves]
        taken = [
            path for place, path in enumerate(paths) if path in paths[:place] or any(path in p.parents for p in paths)
        ]
        if taken:
            raise ValueError(
                f"two keys would share the file {taken[0].name}: rename one (a number and its text are alike)"
            )
        texts = self._descriptions(layout, lead, root) if layout.is_tensordict else {}
        files = Files()
        try:
            for path in (*paths, *texts):
                files.claim(path, self.existsok)
            for path, shape, dtype in zip(paths, shapes, dtypes, strict=True):
                files.reserve(path, max(1, torch.Size(shape).numel() * dtype.itemsize))
            for path, text in texts.items():
                files.write(path, text)
            files.put_in_place()
            tensors = [_from_file(*each) for each in zip(paths, shapes, dtypes, strict=True)]
        except BaseException:
            files.remove()
            raise
        self._files = files
        if self.auto_cleanup:
            weakref.finalize(self, files.remove)
        return TorchRows(tensors, lead[1:])

    @staticmethod
    def _descriptions(layout: Layout, lead: tuple[int, ...], root: Path) -> dict[Path, str]:
        """The `meta.json` files with which `TensorDict.load_memmap(scratch_dir)` opens the storage."""
        stand_ins = [
            torch.zeros((), dtype=spec.dtype, device="cpu").expand(*lead, *spec.shape) for spec in layout.leaves
        ]
        whole = layout.build(stand_ins, lead, torch.device("cpu"))
        whole = whole.to_tensordict(retain_none=False) if is_tensorclass(whole) else whole
        texts = {}
        for folder, node in _folders(whole, root):
            meta: dict[str, Any] = {"shape": list(node.shape), "device": "cpu", "_type": str(TensorDict)}
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
            texts[folder / "meta.json"] = json.dumps(meta)
        return texts

    def _kept(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if any(isinstance(tensor, MemoryMappedTensor) for tensor in tensors):
            return tensors
        maps = _anonymous([tuple(tensor.shape) for tensor in tensors], [tensor.dtype for tensor in tensors])
        for kept, tensor in zip(maps, tensors, strict=True):
            kept.copy_(tensor)
        return maps

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_files": None}  # they stay with the process that made them
        return state if starting_a_worker() else {**state, "scratch_dir": None}  # a copy has memory of its own

    def cleanup(self) -> bool:
        """Remove the files; False where there are none to remove. Only the process that made them may."""
        return self._files is not None and self._files.remove()


class _Part:
    """Bytes of one anonymous map, for a leaf: a map of its own would take two descriptors for each."""

    def __init__(self, whole: Any, start: int, stop: int) -> None:
        self._whole, self._start, self._stop = whole, start, stop

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._whole.buffer)[self._start : self._stop]


def _anonymous(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Memory maps of zeros without a file, together in one."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
    whole = MemoryMappedTensor.empty(torch.Size([max(1, starts[-1])]), dtype=torch.uint8)._handler
    return [
        MemoryMappedTensor.from_handler(_Part(whole, start, start + size), dtype, shape)
        if size
        else torch.empty(shape, dtype=dtype, device="cpu")
        for shape, dtype, start, size in zip(shapes, dtypes, starts, sizes, strict=False)
    ]


def _from_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
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

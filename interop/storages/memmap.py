"""Tensors, tensordicts and pytrees in memory-mapped files, allocated at the first write."""

import json
import math
import os
import shutil
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

import torch
from tensordict import TensorDict, is_tensorclass
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from fbuf.memory_plan import Share
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.data.layout import Layout, LeafSpec
from interop.host.maps import anonymous, bytes_of, file_names, from_file
from interop.host.rows import Rows, TorchRows
from interop.shared.folder import (
    DESCRIPTION,
    OWN,
    PRIORITIES,
    STATE,
    USES,
    VALUES,
    Folder,
    check_file,
    check_folders,
    description,
    reserve_again,
)
from interop.shared.journal import Journal, ReadOnly
from interop.shared.memory import Memory
from interop.shared.processes import starting_a_worker
from interop.storages import planning
from interop.storages.kept_values import KeptValues
from interop.storages.lazy import LazyTensorStorage
from interop.storages.priorities import KeptPriorities
from interop.storages.uses import KeptUses

_KEPT: dict[str, type[KeptValues]] = {PRIORITIES: KeptPriorities, USES: KeptUses}
_OF_NOTHING = Layout.of(TensorDict({}, []), 0)


class LazyMemmapStorage(LazyTensorStorage):
    """Like `LazyTensorStorage`, in files: `<key>.memmap`, a folder for each nested tensordict, `meta.json` in each.

    Disk space in `scratch_dir` is reserved before the first row: a full disk is an OSError at the first write, and
    nothing is left behind. Anonymous maps take space as they are written, and may be larger than what is free. Forked
    and spawned workers see the same rows.

    The rows in `scratch_dir` survive the process, also a SIGKILL: `open` continues with the rows of the last call that
    returned, or of the call under way. A call that overwrites more than about 8 MiB may be kept in part, as if it had
    had fewer rows. Edits in place, by `set_` or through views, are not guarded. One storage at a time, with its
    workers, writes to a folder. A power failure may lose or tear rows that the system has not written yet: for that
    there are checkpoints.

    Args:
        max_size: capacity in items.
        scratch_dir: folder of the files; None for anonymous maps, which vanish with the last process that has them. Of a
            `TemporaryDirectory` its folder, which vanishes with that object: keep it.
        device: "cpu" or "auto"; anything else is a ValueError.
        ndim: how many leading dims of the stored layout count as items.
        existsok: replace files that are there, whose rows are lost. Otherwise they are a RuntimeError, see `open`; so
            is always a folder that another storage has open for writing.
        compilable: keep the length local to this process, where there is no `scratch_dir`.
        auto_cleanup: remove the files when the storage is deleted or the interpreter ends; by default only without
            `scratch_dir`. A process that is killed by a signal, also SIGTERM, leaves its files.
        shared_init: make a storage without items in `scratch_dir` at once, to be given to processes before the first
            write.
        fill, ragged: as for `LazyTensorStorage`.
    """

    mapped = True

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | TemporaryDirectory[str] | None = None,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        auto_cleanup: bool | None = None,
        shared_init: bool = False,
        fill: Mapping[Any, Any] | None = None,
        ragged: Collection[Any] = (),
    ) -> None:
        if device not in ("auto", None) and torch.device(device).type != "cpu":
            raise ValueError(f"memory maps are on the CPU, got device={device}: cast samples to it with a transform")
        super().__init__(
            max_size, device="cpu", ndim=ndim, compilable=compilable, shared_init=shared_init, fill=fill, ragged=ragged
        )
        scratch_dir = scratch_dir.name if isinstance(scratch_dir, TemporaryDirectory) else scratch_dir
        self.scratch_dir = None if scratch_dir is None else os.path.abspath(scratch_dir).rstrip("/") + "/"
        self.existsok = existsok
        self.auto_cleanup = scratch_dir is None if auto_cleanup is None else auto_cleanup
        self.folder: Folder | None = None  # while this storage owns it
        self._ending: Any = None
        if self.scratch_dir is not None:
            self.journal = self._new_journal()
            if shared_init:
                self._make_folder()

    def _make_folder(self) -> None:
        """Make a storage of no items in the folder, for processes that share it before the first write."""
        self._make_files(_OF_NOTHING, (self._max_size, *[1] * (self.ndim - 1)))
        self.journal.start(self.ring)
        self.lock.hooked = True

    # ------------------------------------------------------------------ open and close

    @classmethod
    def open(cls, scratch_dir: str | os.PathLike[str], mode: Literal["r", "r+"] = "r+") -> Self:
        """The storage in a folder: rows and length, the writer's cursor and count, and the priorities or uses of the rows.

        They are those of the last call that returned, or of the call in which a process was killed. A
        `RoundRobinWriter` that is registered on the storage continues at the cursor. A `PrioritizedSampler` gets the
        priorities; a `ConsumingSampler`, and a `PromptGroupSampler` with `max_uses`, get what was consumed.

        Args:
            scratch_dir: the folder.
            mode: "r+" to go on writing, by this process and its workers alone. "r" to read: writes are a RuntimeError,
                and edits of views stay in this process. Another process may write meanwhile. Length, cursor and count
                stay those of one moment at the opening. Rows and priorities are read from the files each time: a row
                that was overwritten since is the new row, or half of it while it is written. Reading never waits for
                the writer.

        FileNotFoundError where there is no storage, or an unfinished one. RuntimeError where another storage or process
        has it open for writing, or replaces it at this moment. `CheckpointCorrupt` for damaged files.
        """
        if mode not in ("r", "r+"):
            raise ValueError(f"mode must be 'r' or 'r+', got {mode!r}")
        root = Path(scratch_dir).absolute()
        description(root)  # without one the folder is not touched
        folder = Folder(root) if mode == "r+" else None
        try:
            with open(root / DESCRIPTION, "rb") as held:  # as long as it is open, no other file gets its inode
                described = description(root)
                storage = cls(described.whole("capacity", 1), scratch_dir=root, ndim=described.whole("ndim", 1, 64))
                storage._take_up(root, described, folder)
                if not os.path.samestat(os.fstat(held.fileno()), os.stat(root / DESCRIPTION)):
                    raise RuntimeError(f"the storage in {root} was replaced while it was opened: open it again")
        except BaseException:
            if folder is not None:
                folder.close()
            raise
        return storage

    def _take_up(self, root: Path, described: Fields, folder: Folder | None) -> None:
        """Continue with the rows, counters and priorities in a folder; without owning it, only to read them."""
        layout, lanes, shapes = _checked(root, described, self._max_size, self.ndim)
        private, kept = folder is None, [name for name in _KEPT if os.path.lexists(root / name)][:1]
        size = KeptValues.size(described.whole("rows") * math.prod(lanes))
        if kept:
            check_file(root / kept[0], size)
        for name in () if private else (*shapes, STATE, *kept):
            reserve_again(root / name)
        self.journal, self.reopened = Journal(), True
        if shapes:  # else a process was killed after it gave up the memory, for items of another layout
            mapped = zip(shapes.items(), layout.leaves, strict=True)
            tensors = [from_file(root / name, shape, spec.dtype, private=private) for (name, shape), spec in mapped]
            self.adopt(layout, TorchRows(tensors, lanes, mapped=True))
        if kept:
            memory = Memory(size, root / kept[0], private=private)
            self.priorities = _KEPT[kept[0]](memory, self.per_row, self.ring, folder, opened=True)
        if private and self.layout is not None and self.layout.values is not None:
            self.layout.values.map()
        journal, memory = self._new_journal(), Memory(os.path.getsize(root / STATE), root / STATE, private=private)
        journal.resume(self.ring, memory, self.row_capacity(None), self.guarded())
        if folder is None:
            self.journal = ReadOnly(str(root))
            return
        self.journal, self.folder = journal, folder
        self.lock.hooked = True  # an unfinished write is rolled back first
        folder.opened()
        self._ending = weakref.finalize(self, folder.end, self.auto_cleanup)

    def close(self) -> None:
        """Give up the folder, so that another storage can open it. From then on writes here are a RuntimeError.

        Without a folder nothing happens. Reads go on. Views such as `buffer[:]` remain maps of the files: edits of them
        are seen by the next owner, so drop those that you write to.
        """
        with self.lock.held():
            if self._ending is not None and self.journal.memory is not None and self.scratch_dir is not None:
                self.journal = ReadOnly(self.scratch_dir, closed=True)
                self._ending()

    def cleanup(self) -> bool:
        """Remove the files; False where there are none to remove. Only the process that made them, or opened them, may."""
        if self.folder is None or not self.folder.remove():
            return False
        self._leave()
        return True

    def _leave(self) -> None:
        """Give up the folder, for another storage to own."""
        if self.folder is not None:
            self.folder.close()
        self.folder = self.priorities = self._ending = None
        if self.scratch_dir is not None:
            self.journal = self._new_journal()

    def _new_journal(self) -> Journal:
        """A journal that is started with the first rows."""
        assert self.scratch_dir is not None
        journal, me = Journal(Path(self.scratch_dir) / STATE), weakref.ref(self)
        journal.find_extra = lambda: None if (storage := me()) is None else storage.find_priorities()
        return journal

    def refuse_edit(self, paths: Iterable[tuple[Any, ...]]) -> None:
        if isinstance(self.journal, ReadOnly):
            with self.journal:  # raises
                pass
        super().refuse_edit(paths)

    def editable(self, given: Any) -> Any:
        self.refuse_edit(())
        return super().editable(given)

    def _look(self) -> None:
        if not isinstance(self.journal, ReadOnly):
            super()._look()

    # ------------------------------------------------------------------ files

    def _memory(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        self.refuse_edit(())
        return super()._memory(layout, lead)

    def _allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        if self.scratch_dir is None:
            return self._fresh(layout.leaves, lead)
        self._make_files(layout, lead)
        try:
            return self._fresh(layout.leaves, lead)
        except BaseException:
            self.release_memory()
            raise

    def _fresh(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        shapes, dtypes = [(*lead, *spec.shape) for spec in leaves], [spec.dtype for spec in leaves]
        if self.folder is None:
            allocate = anonymous if self._first is None else self._first.allocate
            return TorchRows(allocate(shapes, dtypes), lead[1:])
        paths = [self.folder.path / name for name in file_names(leaves)]
        return TorchRows(list(map(from_file, paths, shapes, dtypes)), lead[1:])

    def _make_files(self, layout: Layout, lead: tuple[int, ...]) -> None:
        """Make the files for leaves of shape [*lead, ...], and own the folder from then on."""
        assert self.scratch_dir is not None
        sizes, texts = self._contents(layout, lead)
        state = self._state_size(sum(sizes.values()) // max(lead[0], 1), len(layout.leaves), lead)
        folder = self.folder or Folder(Path(self.scratch_dir))
        if self.folder is not None:
            reserve_again(folder.path / STATE, state)
            state = os.path.getsize(folder.path / STATE)
        sizes[STATE] = state
        try:
            folder.make(sizes, texts, self._described(layout, lead, sizes), self.existsok)
        except BaseException:
            if self.folder is None:
                folder.end()
            raise
        if self.folder is None or not layout.leaves:
            shutil.rmtree(folder.path / VALUES, ignore_errors=True)  # of the items that these replace
        self.folder = folder
        if not self.journal.is_wanted:
            self.journal = self._new_journal()
        if self._ending is None and folder.is_here:
            self._ending = weakref.finalize(self, folder.end, self.auto_cleanup)

    def further_rows(self, layout: Layout, new: Mapping[LeafSpec, Tensor]) -> Rows:
        if self.folder is None:
            return super().further_rows(layout, new)
        lead, rows, write = (self.row_count, *self.lanes), list[Rows](), super().further_rows
        sizes, texts = self._contents(layout, lead)
        assert self.journal.memory is not None
        described = self._described(layout, lead, {**sizes, STATE: self.journal.memory.bytes.size})
        added = {name: sizes[name] for name in file_names(tuple(new))}
        self.folder.make(added, texts, described, fill=lambda: rows.append(write(layout, new)))
        return rows[0]

    def _contents(self, layout: Layout, lead: tuple[int, ...]) -> tuple[dict[str, int], dict[str, str]]:
        """The sizes of the files of leaves, and the texts of `meta.json` files, by name."""
        names = file_names(layout.leaves)
        if reserved := [name for name in names if name.split("/")[0] in OWN]:
            raise ValueError(f"the key of {reserved[0]} has the name of a file of the storage: rename it")
        sizes = [bytes_of((*lead, *spec.shape), spec.dtype) for spec in layout.leaves]
        texts = {}
        if layout.is_tensordict:
            shapes = [(spec.dtype, (*lead, *spec.shape)) for spec in layout.leaves]
            stand_ins = [torch.zeros((), dtype=dtype, device="cpu").expand(shape) for dtype, shape in shapes]
            whole = layout.of_spans().build(stand_ins, lead, torch.device("cpu"))
            texts = _meta_files(whole.to_tensordict(retain_none=False) if is_tensorclass(whole) else whole)
        return dict(zip(names, sizes, strict=True)), texts

    def _described(self, layout: Layout, lead: tuple[int, ...], sizes: Mapping[str, int]) -> dict[str, Any]:
        """The description that `open` reads."""
        return {
            "files": dict(sizes),
            "capacity": self._max_size,
            "ndim": self.ndim,
            "rows": lead[0],
            "lanes": lead[1:],
            "layout": saved_layout(layout),
        }

    def _state_size(self, row: int, leaves: int, lead: tuple[int, ...]) -> int:
        return Journal.size(row, leaves, math.prod(lead[1:]), lead[0])

    def _planned(self, layout: Layout, lead: tuple[int, ...], found: torch.device | None = None) -> list[Share]:
        if self.scratch_dir is None:
            if self._first is not None and (self.rows is None or self.shared_init):
                return super()._planned(layout, lead, found)
            size = sum(share.bytes or 0 for share in planning.arrays("", layout.leaves, lead, ""))
            return planning.arrays("items", layout.leaves, lead, planning.shared_memory(size))
        place = self.scratch_dir.rstrip("/") or "/"
        shares = planning.arrays("items", layout.leaves, lead, place)
        row = sum(share.bytes or 0 for share in shares) // max(lead[0], 1)
        shares.append(Share("file", STATE, place, self._state_size(row, len(layout.leaves), lead)))
        if any(buffer.sampler.KEPT for buffer in self.buffers()):
            shares.append(Share("file", PRIORITIES, place, KeptValues.size(math.prod(lead))))
        if any(buffer.sampler.keeps_uses for buffer in self.buffers()):
            shares.append(Share("file", USES, place, KeptValues.size(math.prod(lead))))
        return shares

    def _values_folder(self) -> Path | None:
        if self.folder is not None and self.folder.is_open:
            return self.folder.path / VALUES
        return super()._values_folder() if self.scratch_dir is None else Path(self.scratch_dir) / VALUES

    def release_memory(self) -> None:
        if self.folder is None:
            return
        if self._first is not None:  # the folder stays, for the process that writes first
            self._first.withdraw()
        if self.journal.memory is not None:
            self._vacate()
        else:
            self.folder.remove()
            self._leave()

    def _vacate(self) -> None:
        """Remove the files of the rows, of which none is stored: a storage of items without leaves remains."""
        if self.folder is not None:
            self.journal.drop_extra()
            self._make_files(_OF_NOTHING, (self.row_count, *self.lanes))

    # ------------------------------------------------------------------ priorities or uses

    def kept_priorities(self) -> KeptPriorities | None:
        kept = self._kept_in(PRIORITIES)
        return kept if isinstance(kept, KeptPriorities) else None

    def kept_uses(self) -> KeptUses | None:
        kept = self._kept_in(USES)
        return kept if isinstance(kept, KeptUses) else None

    def _kept_in(self, name: str) -> KeptValues | None:
        """What the file keeps, or the other file where it cannot be made."""
        found: KeptValues | None = self.priorities
        if self.folder is None:
            return found  # of a storage that is only read, if any
        if not self.folder.is_here:
            return None  # they are those of a sampler of the owner
        if self.rows is None or isinstance(found, _KEPT[name]):
            return found
        if found is not None:
            self.journal.drop_extra()
            for other in _KEPT:
                self.folder.drop(other)
        self.folder.add(name, KeptValues.size(self.max_size))
        return self._map_kept(self.folder, name)

    def find_priorities(self) -> None:
        """Map the values that the owner keeps, so that this worker saves those that it overwrites."""
        if self.priorities is None and self.folder is not None and self.journal.has_extra:
            for name in _KEPT:
                if os.path.lexists(self.folder.path / name):
                    self._map_kept(self.folder, name)

    def _map_kept(self, folder: Folder, name: str) -> KeptValues:
        memory = Memory(KeptValues.size(self.max_size), folder.path / name)
        kept = self.priorities = _KEPT[name](memory, self.per_row, self.ring, folder)
        self.journal.keep_extra(8 * self.per_row, kept.by_row)
        return kept

    # ------------------------------------------------------------------ other processes

    def shares_in_forks(self) -> bool:
        return self.is_shared() or (self.rows is None and not isinstance(self.journal, ReadOnly))

    def start_sharing(self) -> None:
        if self.rows is None and self.folder is None and self.scratch_dir is not None:
            self._make_folder()
        super().start_sharing()

    def is_shared(self) -> bool:
        return super().is_shared() and (self.rows is not None or self.scratch_dir is None or self.folder is not None)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_ending": None}
        if not starting_a_worker():  # a copy has memory of its own
            return {**state, "scratch_dir": None, "folder": None, "reopened": False}
        return {**state, "priorities": self.priorities if self.folder is None else None}  # the worker maps them

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.folder is not None:
            weakref.finalize(self, self.folder.close)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if starting_a_worker() and isinstance(self.journal, ReadOnly):
            return type(self).open, (self.scratch_dir, "r")
        return super().__reduce_ex__(protocol)


def _checked(
    root: Path, described: Fields, capacity: int, ndim: int
) -> tuple[Layout, tuple[int, ...], dict[str, tuple[int, ...]]]:
    """The layout and lanes of a description, and the shapes of leaves by file. `CheckpointCorrupt` for damage."""
    layout, files = layout_of(described.any("layout"), described.where), described.fields("files")
    rows, lanes = described.whole("rows"), described.wholes("lanes")
    if len(lanes) != ndim - 1 or rows != -(-capacity // max(math.prod(lanes), 1)):
        raise CheckpointCorrupt(f"{described.where}: {rows} rows of {lanes} do not make up the capacity")
    try:
        names = file_names(layout.leaves)
    except ValueError as error:
        raise CheckpointCorrupt(f"{described.where}: {error}") from error
    shapes = [(rows, *lanes, *spec.shape) for spec in layout.leaves]
    for name, shape, spec in zip(names, shapes, layout.leaves, strict=True):
        size = bytes_of(shape, spec.dtype)
        if files.whole(name) != size:
            raise files.wrong(name, f"{size} bytes", files.any(name))
        if math.prod(max(dim, 1) for dim in shape) * spec.dtype.itemsize >= 2**63:  # a dim of 0 hides it
            raise CheckpointCorrupt(f"{described.where}: no memory has the shape {shape} of {name}")
        check_folders(root, name)
        check_file(root / name, size)
    state = files.whole(STATE, Journal.size(1, 1, 1, 1))
    check_file(root / STATE, state if layout.leaves else max(state, os.path.getsize(root / STATE)))
    return layout, lanes, dict(zip(names, shapes, strict=True))


def _meta_files(node: Any, folder: str = "") -> dict[str, str]:
    """The `meta.json` files with which `TensorDict.load_memmap` opens the folder, by name."""
    meta: dict[str, Any] = {"shape": list(node.shape), "device": "cpu", "_type": str(TensorDict)}
    below: dict[str, str] = {}
    for key, value in node.items():
        if isinstance(value, Tensor):
            shape, dtype = list(value.shape), str(value.dtype)
            meta[key] = {"device": "cpu", "shape": shape, "dtype": dtype, "is_nested": False}
        else:
            meta[key] = {"type": "TensorDict"}
            below |= _meta_files(value, f"{folder}{key}/")
    return {f"{folder}meta.json": json.dumps(meta), **below}

"""Tensors, tensordicts and pytrees in memory-mapped files, allocated at the first write."""

import json
import math
import os
import shutil
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from tensordict import TensorDict, is_tensorclass
from torch import Tensor

from fbuf.memory_plan import Share
from interop.checkpoint.layouts import saved_layout
from interop.data.layout import Layout, LeafSpec
from interop.host.maps import anonymous, bytes_of, file_names, from_file
from interop.host.rows import Rows, TorchRows
from interop.shared.files import Files
from interop.shared.folder import OWN, PRIORITIES, STATE, VALUES, Owner, files_below, is_there, make, reserve_again
from interop.shared.journal import PRIORITIES as PRIORITIES_OF_ROWS
from interop.shared.journal import Journal, ReadOnly
from interop.shared.memory import Memory
from interop.shared.processes import starting_a_worker
from interop.storages import planning
from interop.storages.lazy import LazyTensorStorage
from interop.storages.opening import opened, opened_again
from interop.storages.priorities import KeptPriorities

_OF_NOTHING = Layout.of(TensorDict({}, []), 0)


class LazyMemmapStorage(LazyTensorStorage):
    """Like `LazyTensorStorage`, in files: `<key>.memmap`, a folder a nested tensordict, `meta.json` in each.

    Disk space in `scratch_dir` is reserved before the first row: a full disk is an OSError at the first write, and
    nothing stays behind; `plan` tells before. Anonymous maps take space as they are written, and may be larger than what
    there is. Workers, forked or spawned, see the same rows.

    What is in `scratch_dir` survives the process, killed by SIGKILL even: `open` goes on with the rows of the last call
    that returned, or of the one under way; calls that write over more than about 8 MiB are kept in part, as if they had
    been of fewer rows. Edits in place, by `set_` or of views, have no such guard. One storage at a time, with the workers
    that it is given to, writes to a folder. What the system has not yet written when the power fails is lost, and rows may
    be torn then: for that there are checkpoints.

    Args:
        max_size: capacity in items.
        scratch_dir: folder of the files; None for anonymous maps that vanish with the last process that has them.
        device: "cpu" or "auto"; anything else is a ValueError.
        ndim: how many leading dims of the stored layout count as items.
        existsok: put new files in the place of those that are there, whose rows are gone; otherwise they are a
            RuntimeError, see `open`. A storage that another one has open for writing always is.
        compilable: keep the length local to this process, where there is no `scratch_dir`.
        auto_cleanup: remove the files when the storage goes or the interpreter ends; by default only without
            `scratch_dir`. A process that a signal kills, SIGTERM among them, leaves its files.
        shared_init: make a storage without items in `scratch_dir` at once, to be given to processes before the first write.
        fill, ragged: as for `LazyTensorStorage`.
    """

    mapped = True

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
        shared_init: bool = False,
        fill: Mapping[Any, Any] | None = None,
        ragged: Collection[Any] = (),
    ) -> None:
        if device not in ("auto", None) and torch.device(device).type != "cpu":
            raise ValueError(f"memory maps are on the CPU, got device={device}: cast samples to it with a transform")
        super().__init__(
            max_size,
            device="cpu",
            ndim=ndim,
            compilable=compilable,
            shared_init=shared_init,
            fill=fill,
            ragged=ragged,
        )
        self.scratch_dir = None if scratch_dir is None else os.path.abspath(scratch_dir).rstrip("/") + "/"
        self.existsok = existsok
        self.auto_cleanup = scratch_dir is None if auto_cleanup is None else auto_cleanup
        self.files: Files | None = None
        self.owner: Owner | None = None
        self._ending: Any = None
        if self.scratch_dir is not None:
            self.journal = self.new_journal()
            if shared_init:
                self._own(Path(self.scratch_dir), _OF_NOTHING, (self._max_size, *[1] * (self.ndim - 1)), {}, {})
                self.close_at_end()
                self.journal.start(self.ring)
                self.lock.hooked = True

    @classmethod
    def open(cls, scratch_dir: str | os.PathLike[str], mode: Literal["r", "r+"] = "r+") -> Self:
        """The storage that is in a folder: rows and length, the writer's cursor and count, and priorities.

        They are those of the last call that returned, or of the one that a killed process was in. A `RoundRobinWriter`
        registered on it goes on where the one before stood, and a `PrioritizedSampler` joined to it has the priorities.

        Args:
            scratch_dir: the folder.
            mode: "r+" to go on writing, by this process and its workers alone; "r" to read: what is written then is a
                RuntimeError, and edits of views stay in this process. Beside one that writes, length, cursor and count
                stay what they were between two of its steps while this was opened: open it again for those of later.
                Rows and priorities are those in the files when they are read: a row that was written over since is the
                new one, or half-done while it is written. It never waits for the one that writes to pause.

        FileNotFoundError where there is no storage, an unfinished one among them: make it anew. RuntimeError where
        another storage or process has it open for writing, `CheckpointCorrupt` for files that are damaged.
        """
        if mode not in ("r", "r+"):
            raise ValueError(f"mode must be 'r' or 'r+', got {mode!r}")
        return opened(cls, Path(scratch_dir).absolute(), mode == "r+")

    def close(self) -> None:
        """Give up the folder, for another to open: writing here is a RuntimeError from then on. Nothing without a folder.

        Reading goes on. Views that `buffer[:]` and the like gave, before or after, are maps of the files: edits of them
        are seen by whoever opens the folder, so have none of them left that is written to.
        """
        with self.lock.held():
            ends = self._ending is not None and self.journal.memory is not None
            if ends and self.scratch_dir is not None:
                self.journal = ReadOnly(self.scratch_dir, self.journal, closed=True)
                self._ending()

    def _look(self) -> None:
        if not isinstance(self.journal, ReadOnly):
            super()._look()

    def _memory(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        self.refuse_edit(())
        return super()._memory(layout, lead)

    def _planned(self, layout: Layout, lead: tuple[int, ...], found: torch.device | None = None) -> list[Share]:
        if self.scratch_dir is None:
            if self._first is not None and (self.rows is None or self.shared_init):
                return super()._planned(layout, lead, found)
            size = sum(share.bytes or 0 for share in planning.arrays("", layout.leaves, lead, ""))
            return planning.arrays("items", layout.leaves, lead, planning.shared_memory(size))
        place = self.scratch_dir.rstrip("/") or "/"
        shares = planning.arrays("items", layout.leaves, lead, place)
        row = sum(share.bytes or 0 for share in shares) // max(lead[0], 1)
        beside = self._beside(row, len(layout.leaves), lead)
        shares += [Share("file", name, place, size) for name, size in beside.items()]
        return shares

    def _allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        if self.scratch_dir is None:
            return self._fresh(layout.leaves, lead)
        root, (sizes, texts) = Path(self.scratch_dir), self._contents(layout, lead)
        if self.owner is not None:
            root = self.owner.folder()
        self._own(root, layout, lead, sizes, texts)
        try:
            rows = self._fresh(layout.leaves, lead)
        except BaseException:
            self.release_memory()
            raise
        if self._ending is None and self.owner is not None and self.owner.is_here:
            self.close_at_end()
        return rows

    def _fresh(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        shapes, dtypes = [(*lead, *spec.shape) for spec in leaves], [spec.dtype for spec in leaves]
        if self.owner is None:
            allocate = anonymous if self._first is None else self._first.allocate
            return TorchRows(allocate(shapes, dtypes), lead[1:])
        paths = [self.owner.folder() / name for name in file_names(leaves)]
        return TorchRows(list(map(from_file, paths, shapes, dtypes)), lead[1:])

    def _contents(self, layout: Layout, lead: tuple[int, ...]) -> tuple[dict[str, int], dict[str, str]]:
        """The bytes of the files of leaves, and the texts of others."""
        names = file_names(layout.leaves)
        if reserved := [name for name in names if name.split("/")[0] in OWN]:
            raise ValueError(f"the key of {reserved[0]} has the name of a file of the storage: rename it")
        sizes = [bytes_of((*lead, *spec.shape), spec.dtype) for spec in layout.leaves]
        return dict(zip(names, sizes, strict=True)), self._descriptions(layout, lead) if layout.is_tensordict else {}

    def further_rows(self, layout: Layout, new: Mapping[LeafSpec, Tensor]) -> Rows:
        if self.owner is None or self.files is None:
            return super().further_rows(layout, new)
        lead, rows = (self.row_count, *self.lanes), list[Rows]()
        sizes, texts = self._contents(layout, lead)
        assert self.journal.memory is not None
        described = {**self._described(layout, lead), "files": {**sizes, STATE: self.journal.memory.bytes.size}}
        sizes = {name: sizes[name] for name in file_names(tuple(new))}
        root, write = self.owner.folder(), super().further_rows
        made = make(root, sizes, texts, described, False, self.owner, lambda: rows.append(write(layout, new)))[1]
        self.files.include(made)
        return rows[0]

    def _described(self, layout: Layout, lead: tuple[int, ...]) -> dict[str, Any]:
        """What `open` has to know."""
        rows, *lanes = lead
        kept = saved_layout(layout)
        return {"capacity": self._max_size, "ndim": self.ndim, "rows": rows, "lanes": lanes, "layout": kept}

    def _own(
        self, root: Path, layout: Layout, lead: tuple[int, ...], sizes: dict[str, int], texts: dict[str, str]
    ) -> None:
        """Make the files, and be the one that writes to them; where it is, the state goes on."""
        sizes = {**sizes, **self._beside(sum(sizes.values()) // max(lead[0], 1), len(layout.leaves), lead)}
        if self.owner is not None:
            reserve_again(root / STATE, sizes[STATE])
            sizes[STATE] = os.path.getsize(root / STATE)
        is_new = self.owner is None
        self.owner, made = make(root, sizes, texts, self._described(layout, lead), self.existsok, self.owner)
        if is_new or not layout.leaves:
            shutil.rmtree(root / VALUES, ignore_errors=True)  # of the items that these replace
        self.files = self.files or made
        self.files.contents = root / VALUES
        if not self.journal.is_wanted:
            self.journal = self.new_journal()
        if PRIORITIES in sizes:
            memory = Memory(sizes[PRIORITIES], root / PRIORITIES)
            self.priorities = KeptPriorities(memory, math.prod(lead[1:]), self.ring, self.owner)

    def _values_folder(self) -> Path | None:
        if self.owner is not None and self.owner.is_open:
            return self.owner.folder() / VALUES
        return super()._values_folder() if self.scratch_dir is None else Path(self.scratch_dir) / VALUES

    def _vacate(self) -> None:
        """Remove the files of the rows, of which none is stored: what is left is a storage of items without leaves."""
        if self.owner is not None:
            self.journal.drop_priorities()
            self._own(self.owner.folder(), _OF_NOTHING, (self.row_count, *self.lanes), {}, {})
            self._know_files()

    def adopt(self, layout: Layout, rows: Rows) -> None:
        super().adopt(layout, rows)
        self._know_files()

    def _know_files(self) -> None:
        """Have the files that were made, by a worker perhaps, be those of this storage, where it has the folder."""
        if self.files is not None and self.owner is not None and self.owner.is_here:
            self.files.adopt(files_below(self.owner.path.parent, self.owner.noted()))

    def is_shared(self) -> bool:
        return super().is_shared() and (self.rows is not None or self.scratch_dir is None or self.owner is not None)

    def _beside(self, row: int, leaves: int, lead: tuple[int, ...]) -> dict[str, int]:
        """The bytes of the files beside those of the leaves, for rows of so many bytes."""
        sizes = {STATE: Journal.size(row, leaves, math.prod(lead[1:]), lead[0])}
        if any(buffer.sampler.KEPT for buffer in self.buffers()):
            sizes[PRIORITIES] = KeptPriorities.size(math.prod(lead))
        return sizes

    def close_at_end(self) -> None:
        """Give all up when the storage goes, or the interpreter ends."""
        self._ending = weakref.finalize(self, _end, self.files, self.owner, self.auto_cleanup)

    def release_memory(self) -> None:
        if self._first is not None and self.owner is not None:  # the folder is still for whoever writes first
            self._first.withdraw()
        if self.owner is not None and self.journal.memory is not None:
            self._vacate()
        else:
            if self.files is not None:
                self.files.remove()
            self._leave()

    def _leave(self) -> None:
        """Give up the folder, for another storage to have."""
        _end(None, self.owner)
        self.files = self.owner = self.priorities = self._ending = None
        if self.scratch_dir is not None:
            self.journal = self.new_journal()

    def new_journal(self) -> Journal:
        """One that is started with the first rows."""
        assert self.scratch_dir is not None
        journal, me = Journal(Path(self.scratch_dir) / STATE), weakref.ref(self)
        journal.find_extras = lambda: None if (storage := me()) is None else storage.find_priorities()
        return journal

    def kept_priorities(self) -> Any:
        if self.owner is None:
            return self.priorities  # of a storage that is only read, if any
        if not self.owner.is_here:
            return None  # they are those of a sampler of the owner
        if self.priorities is None and self.rows is not None:
            self.priorities = self._with_priorities(self.owner)
        return self.priorities

    def find_priorities(self) -> None:
        """Have the priorities that the owner keeps by now, for what this worker writes over."""
        if self.priorities is not None or self.owner is None or not self.journal.has_extras:
            return
        memory = Memory(KeptPriorities.size(self.max_size), self.owner.folder() / PRIORITIES)
        self.priorities = KeptPriorities(memory, self.per_row, self.ring, self.owner)
        self.journal.add(PRIORITIES_OF_ROWS, 8 * self.per_row, self.priorities.by_row)

    def _with_priorities(self, owner: Owner) -> KeptPriorities:
        assert self.files is not None
        path, size = owner.folder() / PRIORITIES, KeptPriorities.size(self.max_size)
        owner.list(sorted({*owner.listed, PRIORITIES}))
        self.files.claim(path.parent, PRIORITIES, existsok=True, aside=True)
        self.files.reserve(path, size)
        self.files.put_in_place()
        kept = KeptPriorities(Memory(size, path), self.per_row, self.ring, owner)
        self.journal.add(PRIORITIES_OF_ROWS, 8 * self.per_row, kept.by_row)
        return kept

    def editable(self, given: Any) -> Any:
        self.refuse_edit(())
        return super().editable(given)

    def refuse_edit(self, paths: Iterable[tuple[Any, ...]]) -> None:
        if isinstance(self.journal, ReadOnly):
            with self.journal:
                pass
        super().refuse_edit(paths)

    @staticmethod
    def _descriptions(layout: Layout, lead: tuple[int, ...]) -> dict[str, str]:
        """The `meta.json` files with which `TensorDict.load_memmap(scratch_dir)` opens the storage."""
        stand_ins = [
            torch.zeros((), dtype=spec.dtype, device="cpu").expand(*lead, *spec.shape) for spec in layout.leaves
        ]
        whole = layout.of_spans().build(stand_ins, lead, torch.device("cpu"))
        whole = whole.to_tensordict(retain_none=False) if is_tensorclass(whole) else whole
        texts = {}
        for folder, node in _folders(whole, ""):
            meta: dict[str, Any] = {"shape": list(node.shape), "device": "cpu", "_type": str(TensorDict)}
            for key, value in node.items():
                if isinstance(value, Tensor):
                    shape, dtype = list(value.shape), str(value.dtype)
                    meta[key] = {"device": "cpu", "shape": shape, "dtype": dtype, "is_nested": False}
                else:
                    meta[key] = {"type": "TensorDict"}
            texts[folder + "meta.json"] = json.dumps(meta)
        return texts

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "files": None, "_ending": None}  # with who made them
        if not starting_a_worker():
            return {**state, "scratch_dir": None, "owner": None, "reopened": False}  # a copy has memory of its own
        if self.owner is None:
            return state
        state["priorities"] = None  # it finds them
        return self._where_they_are(state, self.owner)

    def _where_they_are(self, state: dict[str, Any], owner: Owner) -> dict[str, Any]:
        """The state with files that a worker finds though their folder was renamed."""
        root = owner.folder()
        if root == owner.path.parent:
            return state
        assert self.journal.memory is not None
        self.journal.memory.path, self.journal.path = str(root / STATE), root / STATE
        if self.layout is None or state["_tensors"] is None:
            return {**state, "scratch_dir": f"{root}/"}
        named = zip(file_names(self.layout.leaves), state["_tensors"], strict=True)
        state["layout"] = self.layout.keeping(self.values_for(self.layout))
        state["_tensors"] = [from_file(root / name, tuple(held.shape), held.dtype) for name, held in named]
        return {**state, "scratch_dir": f"{root}/"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        owner = state["owner"]
        if owner is not None and owner.folder() != owner.path.parent:  # or what was opened is not what is locked
            raise RuntimeError(
                f"{owner.path.parent} was renamed to {owner.folder()} while a worker started: start it again"
            )
        super().__setstate__(state)
        if owner is not None:
            weakref.finalize(self, _end, None, owner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if starting_a_worker() and isinstance(self.journal, ReadOnly):
            return opened_again, (type(self), self.scratch_dir, self.journal.file)
        return super().__reduce_ex__(protocol)

    def cleanup(self) -> bool:
        """Remove the files; False where there are none to remove. Only the process that made them, or opened them, may."""
        if self.files is None or not self.files.remove():
            return False
        self._leave()
        return True


def _end(files: Files | None, owner: Owner | None, removes: bool = False) -> None:
    """The storage is gone, for this process. Files in which nothing was ever stored go with it."""
    if files is not None and owner is not None and (removes or not is_there(owner.path.parent)):
        files.remove()
    if owner is not None:
        owner.close()


def _folders(node: Any, folder: str) -> list[tuple[str, Any]]:
    found = [(folder, node)]
    for key, value in node.items():
        if not isinstance(value, Tensor):
            found += _folders(value, f"{folder}{key}/")
    return found

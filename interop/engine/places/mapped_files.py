"""Rows in memory-mapped files of a folder, which survive the process."""

import json
import math
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from fbuf.checkpoint.files import remove_folder
from fbuf.memory_plan import Share
from interop.checkpoint.layouts import layout_of, path_of, saved_layout
from interop.data.layout import KeyPath, Layout, LeafSpec
from interop.engine import plans
from interop.engine.guard import Guard
from interop.engine.kept_priorities import KeptPriorities
from interop.engine.kept_uses import KeptUses
from interop.engine.kept_values import KeptValues
from interop.engine.places.anonymous_maps import AnonymousMaps, in_maps
from interop.engine.places.place import Place
from interop.engine.places.shared import shared_by_processes
from interop.host.maps import bytes_of, file_names, from_file
from interop.host.ring import Ring
from interop.host.rows import TorchRows
from interop.host.stored_rows import Rows
from interop.shared import checksums
from interop.shared.folder import Folder, reserve_again
from interop.shared.folder_description import OWN, PRIORITIES, STATE, USES, VALUES, check_file, check_folders
from interop.shared.journal import Journal, ReadOnly, Recorded
from interop.shared.memory import Memory
from interop.shared.processes import starting_a_worker

_KEPT: dict[str, type[KeptValues]] = {PRIORITIES: KeptPriorities, USES: KeptUses}
_OF_NOTHING = Layout.of(TensorDict({}, []), 0)


class Files(Place):
    """Files `<key>.memmap` in a folder, with the record of the last write and a description that `opened` reads.

    The folder is made, and owned, with the first rows. See `Folder`.

    Args:
        root: the folder.
        capacity: items, as the user asked for them.
        ndim: how many leading dims count as items.
        guard: gets a record in the folder.
        ring: its counters are in that record.
        existsok: replace files that are there.
        auto_cleanup: remove the files with the last owner.
        checksums: write checksums of the files when the folder is closed.
        shares: whether processes that share the table may find memory that one of them allocates.
        ragged, shared_prefixes: of the table, for the description.
    """

    mapped = True
    has_names = True

    def __init__(
        self,
        root: Path,
        capacity: int,
        ndim: int,
        guard: Guard,
        ring: Ring,
        *,
        existsok: bool,
        auto_cleanup: bool,
        checksums: bool,
        shares: bool,
        ragged: Collection[KeyPath] = (),
        shared_prefixes: Collection[KeyPath] = (),
    ) -> None:
        super().__init__()
        self._checksums = checksums
        self._shares = shares
        self.root = root
        self._capacity = capacity
        self._ndim = ndim
        self._any_length = {"ragged": tuple(ragged), "shared_prefixes": tuple(shared_prefixes)}
        self._guard = guard
        self._ring = ring
        self.replaces = existsok
        self._auto_cleanup = auto_cleanup
        self.folder: Folder | None = None  # while this process owns it, or was given it
        self._lead: tuple[int, ...] = (0,)  # of the rows that are in use
        self._ending: weakref.finalize[[bool], Files] | None = None
        guard.journal = self._new_journal()

    def _new_journal(self) -> Journal:
        """A record in the folder that is started with the first rows."""
        journal = Journal(self.root / STATE)
        self._find_kept_for(journal)
        return journal

    def _find_kept_for(self, journal: Journal) -> None:
        """Let a record find the values that the owner keeps, once there are some."""
        me = weakref.ref(self)
        journal.find_extra = lambda: None if (place := me()) is None else place.find_kept()

    # ------------------------------------------------------------------ memory

    def zeros(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        assert self.folder is not None
        mapped = [from_file(self.folder.path / name, (*lead, *spec.shape), spec.dtype) for name, spec in _named(leaves)]
        return TorchRows(mapped, lead[1:])

    def allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        self._make(layout, lead)
        try:
            return self.zeros(layout.leaves, lead)
        except BaseException:
            self.discard(lead)
            raise

    def widen(
        self, layout: Layout, added: Sequence[LeafSpec], lead: tuple[int, ...], fill: Callable[[Rows], None]
    ) -> Rows:
        if self.folder is None:  # the folder was given up: further leaves are in memory
            return AnonymousMaps().widen(layout, added, lead, fill)
        made: list[Rows] = []
        sizes, texts = self._contents(layout, lead)
        assert self._guard.journal.memory is not None
        described = self._described(layout, lead, {**sizes, STATE: self._guard.journal.memory.bytes.size})
        write = super().widen
        self.folder.make(
            {name: sizes[name] for name in file_names(tuple(added))},
            texts,
            described,
            fill=lambda: made.append(write(layout, added, lead, fill)),
        )
        return made[0]

    def make_folder(self) -> None:
        """Make a storage of no items in the folder, for processes that share it before the first write."""
        self._make(_OF_NOTHING, (self._capacity, *[1] * (self._ndim - 1)))
        self._guard.journal.start(self._ring)
        self._guard.lock.hooked = True

    def _make(self, layout: Layout, lead: tuple[int, ...]) -> None:
        """Make the files for leaves of shape [*lead, ...], and own the folder from then on."""
        sizes, texts = self._contents(layout, lead)
        state = _state_size(sum(sizes.values()) // max(lead[0], 1), len(layout.leaves), lead)
        folder = self.folder or Folder(self.root)
        if self.folder is not None:
            reserve_again(folder.path / STATE, state)
            state = os.path.getsize(folder.path / STATE)
        sizes[STATE] = state
        try:
            folder.make(sizes, texts, self._described(layout, lead, sizes), self.replaces)
        except BaseException:
            if self.folder is None:
                folder.end()
            raise
        if self.folder is None or not layout.leaves:
            remove_folder(folder.path / VALUES)  # of the items that these replace
        self.folder = folder
        if not self._guard.journal.is_wanted:
            self._guard.journal = self._new_journal()
        if self._ending is None and folder.is_here:
            self._ending = weakref.finalize(self, folder.end, self._auto_cleanup)

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
            rows = layout.of_spans().build(stand_ins, lead, torch.device("cpu"))
            texts = _meta_files(rows.to_tensordict(retain_none=False) if is_tensorclass(rows) else rows)
        return dict(zip(names, sizes, strict=True)), texts

    def _described(self, layout: Layout, lead: tuple[int, ...], sizes: Mapping[str, int]) -> dict[str, object]:
        """The description of the folder."""
        return {
            "files": dict(sizes),
            "capacity": self._capacity,
            "ndim": self._ndim,
            "rows": lead[0],
            "lanes": lead[1:],
            "layout": saved_layout(layout),
            **{name: [list(path) for path in paths] for name, paths in self._any_length.items()},
        }

    def plan(
        self, layout: Layout, lead: tuple[int, ...], device: torch.device, is_allocated: bool = False
    ) -> list[Share]:
        shares = plans.arrays("items", layout.leaves, lead, str(self.root))
        row = sum(share.bytes or 0 for share in shares) // max(lead[0], 1)
        return [*shares, self.plan_of(STATE, _state_size(row, len(layout.leaves), lead))]

    def plan_of(self, name: str, size: int) -> Share:
        """A file beside the rows in a plan."""
        return Share("file", name, str(self.root), size)

    def values_folder(self) -> Path:
        if self.folder is not None and self.folder.is_open:
            return self.folder.path / VALUES
        return self.root / VALUES

    def discard(self, lead: tuple[int, ...]) -> None:
        if self.folder is None:
            return
        if self._guard.journal.memory is not None:
            self.vacate(lead)
        else:
            self.folder.remove()
            self._leave()

    def vacate(self, lead: tuple[int, ...]) -> None:
        """Remove the files of the rows: a storage of items without leaves remains."""
        if self.folder is not None:
            self._guard.journal.drop_extra()
            self._make(_OF_NOTHING, lead)

    def adopted(self, lead: tuple[int, ...]) -> None:
        self._lead = lead

    def dropped(self) -> None:
        self.kept = None

    # ------------------------------------------------------------------ open and close

    def opened(self, described: Fields, *, reads_only: bool) -> tuple[Layout, tuple[int, ...], Rows] | None:
        """The rows of the storage in the folder: layout, [rows, *lanes], and rows; None where it has no items yet.

        Then call `resume`. `reads_only`: map them privately, without owning the folder.
        """
        layout, lanes, shapes = _checked(self.root, described, self._capacity, self._ndim)
        lead = (described.whole("rows"), *lanes)
        kept = self._kept_names(self.root)[:1]
        if kept:
            check_file(self.root / kept[0], KeptValues.size(math.prod(lead)))
        for name in () if reads_only else (*shapes, STATE, *kept):
            reserve_again(self.root / name)
        self._lead = lead
        self._guard.journal = Journal()
        if not shapes:  # a process was killed after it gave up the memory, for items of another layout
            return None
        mapped = [
            from_file(self.root / name, shape, spec.dtype, private=reads_only)
            for (name, shape), spec in zip(shapes.items(), layout.leaves, strict=True)
        ]
        return layout, lead, TorchRows(mapped, lanes, mapped=True)

    def read_kept(self, folder: Folder | None) -> None:
        """Map the values of items that the folder has; without `folder` privately."""
        for name in self._kept_names(self.root)[:1]:
            memory = Memory(KeptValues.size(math.prod(self._lead)), self.root / name, private=folder is None)
            self.kept = _KEPT[name](memory, math.prod(self._lead[1:]), self._ring, folder, opened=True)

    def resume(self, guarded: Recorded, rows: int, folder: Folder | None) -> None:
        """Continue the record of the earlier process, and own the folder; without `folder` only read."""
        journal = self._new_journal()
        state = self.root / STATE
        memory = Memory(os.path.getsize(state), state, private=folder is None)
        journal.resume(self._ring, memory, rows, guarded)
        if folder is None:
            self._guard.journal = ReadOnly(str(self.root))
            return
        self._guard.journal, self.folder = journal, folder
        self._checksums = checksums.mark_outdated(self.root)  # sealed once, it is sealed again
        self._guard.lock.hooked = True  # an unfinished write is rolled back first
        folder.opened()
        self._ending = weakref.finalize(self, folder.end, self._auto_cleanup)

    def close(self) -> None:
        """Give up the folder, so that another storage can open it. From then on writes here are refused."""
        if self._ending is not None and self._guard.journal.memory is not None:
            self._guard.journal = ReadOnly(str(self.root) + "/", closed=True)
            try:
                if self._checksums and self.folder is not None and self.folder.is_here:
                    checksums.seal(self.folder.path)
            finally:
                self._ending()

    def remove(self) -> bool:
        """Remove the files; False where there are none to remove, or where this process is not the owner."""
        if self.folder is None or not self.folder.remove():
            return False
        self._leave()
        return True

    def _leave(self) -> None:
        """Give up the folder, for another storage to own."""
        if self.folder is not None:
            self.folder.close()
        self.folder = self.kept = self._ending = None
        self._guard.journal = self._new_journal()

    # ------------------------------------------------------------------ priorities or uses

    def keep(self, kind: type[KeptValues], has_rows: bool) -> KeptValues | None:
        if self.folder is None:
            return self.kept  # of a storage that is only read, if any
        if not self.folder.is_here:
            return None  # they are those of a sampler of the owner
        if not has_rows or isinstance(self.kept, kind):
            return self.kept
        if self.kept is not None:  # the other one is replaced
            self._guard.journal.drop_extra()
            for other in _KEPT:
                self.folder.drop(other)
        [name] = [name for name, each in _KEPT.items() if each is kind]
        self.folder.add(name, KeptValues.size(math.prod(self._lead)))
        return self._map_kept(self.folder, name)

    @staticmethod
    def _kept_names(folder: Path) -> list[str]:
        """The files with values of items that are in a folder."""
        return [name for name in _KEPT if os.path.lexists(folder / name)]

    def find_kept(self) -> None:
        """Map the values that the owner keeps, so that this worker saves those that it overwrites."""
        if self.kept is None and self.folder is not None and self._guard.journal.has_extra:
            for name in self._kept_names(self.folder.path):
                self._map_kept(self.folder, name)

    def _map_kept(self, folder: Folder, name: str) -> KeptValues:
        memory = Memory(KeptValues.size(math.prod(self._lead)), folder.path / name)
        per_row = math.prod(self._lead[1:])
        kept = self.kept = _KEPT[name](memory, per_row, self._ring, folder)
        self._guard.journal.keep_extra(8 * per_row, kept.by_row)
        return kept

    # ------------------------------------------------------------------ other processes

    def shared(self, owner: object) -> Place:
        return shared_by_processes(self, owner) if self._shares else self

    def prepare_sharing(self) -> None:
        if self.folder is None:
            self.make_folder()

    def allows_sharing(self) -> bool:
        return self.folder is not None

    def holding(self, layout: Layout, tensors: Sequence[Tensor], lead: tuple[int, ...]) -> Rows:
        return TorchRows(in_maps(tensors), lead[1:])

    def copied(self, has_rows: bool) -> Place:
        return AnonymousMaps(shares=self._shares)

    def attached(self, guard: Guard, ring: Ring, owner: object) -> Place:
        self._guard, self._ring = guard, ring
        self._find_kept_for(guard.journal)
        return self

    def __getstate__(self) -> dict[str, object]:
        assert starting_a_worker()  # a copy has another place
        kept = self.kept if self.folder is None else None  # the worker maps them
        state = {**self.__dict__, "_ending": None, "kept": kept}
        del state["_guard"], state["_ring"]  # `attached` gets those of the storage
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if self.folder is not None:
            weakref.finalize(self, self.folder.close)


def _named(leaves: Sequence[LeafSpec]) -> list[tuple[str, LeafSpec]]:
    return list(zip(file_names(leaves), leaves, strict=True))


def _state_size(row: int, leaves: int, lead: tuple[int, ...]) -> int:
    return Journal.size(row, leaves, math.prod(lead[1:]), lead[0])


def any_length(described: Fields) -> tuple[list[KeyPath], list[KeyPath]]:
    """`ragged` and `shared_prefixes` of the storage that made a folder. `CheckpointCorrupt` for damage.

    Descriptions of earlier versions do not have them: there they are the entries whose rows have any length now.
    """
    names = "ragged", "shared_prefixes"
    if all(name in described for name in names):
        ragged, shared = ([path_of(path, described.where) for path in described.items(name)] for name in names)
        return ragged, shared
    varied = layout_of(described.any("layout"), described.where).varied
    found = {path: entry.shares for path, entry in varied.items() if entry.dtype is not None}
    return [path for path in found if not found[path]], [path for path in found if found[path]]


def _checked(
    root: Path, described: Fields, capacity: int, ndim: int
) -> tuple[Layout, tuple[int, ...], dict[str, tuple[int, ...]]]:
    """The layout and lanes of a description, and the shapes of leaves by file. `CheckpointCorrupt` for damage."""
    layout = layout_of(described.any("layout"), described.where)
    files = described.fields("files")
    rows = described.whole("rows")
    lanes = described.wholes("lanes")
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


def _meta_files(node: TensorDictBase, folder: str = "") -> dict[str, str]:
    """The `meta.json` files with which `TensorDict.load_memmap` opens the folder, by name."""
    meta: dict[str, object] = {"shape": list(node.shape), "device": "cpu", "_type": str(TensorDict)}
    below: dict[str, str] = {}
    for key, value in node.items():
        if isinstance(value, Tensor):
            shape = list(value.shape)
            dtype = str(value.dtype)
            meta[key] = {"device": "cpu", "shape": shape, "dtype": dtype, "is_nested": False}
        else:
            meta[key] = {"type": "TensorDict"}
            below |= _meta_files(value, f"{folder}{key}/")
    return {f"{folder}meta.json": json.dumps(meta), **below}

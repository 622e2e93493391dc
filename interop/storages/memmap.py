"""Tensors, tensordicts and pytrees in memory-mapped files, allocated at the first write."""

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

import torch

from fbuf.checkpoint import Fields
from fbuf.memory_plan import Share
from interop.data.arguments import whole
from interop.data.keys import as_path
from interop.engine.kept_values import KeptValues
from interop.engine.places.anonymous_maps import AnonymousMaps
from interop.engine.places.mapped_files import Files, any_length
from interop.engine.places.place import Place
from interop.engine.places.shared import shared_by_processes
from interop.shared.folder import Folder
from interop.shared.folder_description import DESCRIPTION, PRIORITIES, USES, description
from interop.shared.processes import starting_a_worker
from interop.storages.lazy import LazyTensorStorage, by_path, refuse_shared_init


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
        fill, ragged, shared_prefixes: as for `LazyTensorStorage`.
        checksums: `close` flushes the files and writes checksums of them, by block of 4 MiB, so that `interop.verify` finds
            damage. Writes take no longer. A folder that was closed with checksums gets new ones at each `close`. One that
            was not closed, as after a kill, has none: `interop.verify` says so, and `interop.seal` writes them.
    """

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
        shared_prefixes: Collection[Any] = (),
        checksums: bool = False,
    ) -> None:
        if device not in ("auto", None) and torch.device(device).type != "cpu":
            raise ValueError(f"memory maps are on the CPU, got device={device}: cast samples to it with a transform")
        scratch_dir = scratch_dir.name if isinstance(scratch_dir, TemporaryDirectory) else scratch_dir
        self.scratch_dir = None if scratch_dir is None else os.path.abspath(scratch_dir).rstrip("/") + "/"
        self.existsok = existsok
        self.auto_cleanup = scratch_dir is None if auto_cleanup is None else auto_cleanup
        ndim = whole("ndim", ndim)
        max_size = whole("max_size", max_size)
        self._files: Files | None = None
        paths = [as_path(key) for key in ragged], [as_path(key) for key in shared_prefixes]
        place: Place = AnonymousMaps(shares=not compilable)
        if self.scratch_dir is not None:
            place = self._files = Files(
                Path(self.scratch_dir),
                max_size,
                ndim,
                self.guard,
                self.ring,
                existsok=existsok,
                auto_cleanup=self.auto_cleanup,
                checksums=bool(checksums),
                shares=not compilable,
                ragged=paths[0],
                shared_prefixes=paths[1],
            )
        if shared_init:
            refuse_shared_init(compilable, consolidated=False)
            place = shared_by_processes(place, self, asked=True)
        self._begin(place, max_size, ndim, compilable, by_path(fill), *paths)
        if shared_init and self._files is not None:
            self._files.make_folder()

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
            with open(root / DESCRIPTION, "rb") as file:  # as long as it is open, no other file gets its inode
                described = description(root)
                ragged, shared = any_length(described)
                storage = cls(
                    described.whole("capacity", 1),
                    scratch_dir=root,
                    ndim=described.whole("ndim", 1, 64),
                    ragged=ragged,
                    shared_prefixes=shared,
                )
                storage._take_up(described, folder)
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(root / DESCRIPTION)):
                    raise RuntimeError(f"the storage in {root} was replaced while it was opened: open it again")
        except BaseException:
            if folder is not None:
                folder.close()
            raise
        return storage

    def _take_up(self, described: Fields, folder: Folder | None) -> None:
        """Continue with the rows, counters and priorities in a folder; without owning it, only to read them."""
        files = self._files
        table = self.table
        assert files is not None
        self.reopened = True
        opened = files.opened(described, reads_only=folder is None)
        if opened is not None:
            layout, _lead, rows = opened
            table.adopt(layout, rows)
        files.read_kept(folder)
        if folder is None and table.layout is not None and table.layout.values is not None:
            table.layout.values.map()
        files.resume(table.recorded(), table.row_count, folder)

    def close(self) -> None:
        """Give up the folder, so that another storage can open it. From then on writes here are a RuntimeError.

        Without a folder nothing happens. Reads go on. Views such as `buffer[:]` remain maps of the files: edits of them
        are seen by the next owner, so drop those that you write to.
        """
        with self.lock.held():
            if self._files is not None:
                self._files.close()

    def cleanup(self) -> bool:
        """Remove the files; False where there are none to remove. Only the process that made them, or opened them, may."""
        return self._files is not None and self._files.remove()

    def memory_shares(self, data: Any) -> list[Share]:
        shares = super().memory_shares(data)
        if self._files is None or not shares or shares[0].shape is None:
            return shares
        size = KeptValues.size(math.prod(shares[0].shape[: self.ndim]))
        values = [buffer.sampler.item_values for buffer in self.followers.buffers()]
        if any(each.are_priorities for each in values):
            shares.append(self._files.plan_of(PRIORITIES, size))
        if any(each.are_uses for each in values):
            shares.append(self._files.plan_of(USES, size))
        return shares

    # ------------------------------------------------------------------ copies and other processes

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if starting_a_worker():
            return state
        # A copy has memory of its own.
        return {**state, "scratch_dir": None, "_files": None, "reopened": False}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if starting_a_worker() and self.guard.is_read_only:
            return type(self).open, (self.scratch_dir, "r")
        return super().__reduce_ex__(protocol)

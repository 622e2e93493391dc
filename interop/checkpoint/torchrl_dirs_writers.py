"""What torchrl's writers wrote."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.checkpoint.torchrl_dirs_files import Folder
from interop.checkpoint.torchrl_dirs_samplers import numbered

_METADATA = "metadata.json"


@dataclass(frozen=True)
class NoWriter:
    """No files: a writer that does not write."""


@dataclass(frozen=True)
class RoundRobin:
    """Where the next row goes, and how many were written; None where that was not yet counted."""

    cursor: int
    write_count: int | None
    generations: np.ndarray | None  # of each row, -1 where none was written


@dataclass(frozen=True)
class Highest:
    """The rank of each slot."""

    write_count: int | None
    rank_key: str | tuple[str, ...]
    ranks: np.ndarray


@dataclass(frozen=True)
class Writers:
    """The writers of an ensemble, by number; those that do not write are missing."""

    members: dict[int, "WriterState"]


WriterState = NoWriter | RoundRobin | Highest | Writers


def read_writer(parent: Folder, name: str = "writer", depth: int = 0) -> WriterState:
    """What a writer wrote in a folder; `NoWriter` where there is none."""
    if not parent.kind(name):
        return NoWriter()
    with parent.folder(name) as folder:
        names = folder.entries()
        if not names:
            return NoWriter()
        if (numbers := numbered(names)) is not None and depth < 8:
            return Writers({number: read_writer(folder, str(number), depth + 1) for number in numbers})
        fields = Fields(folder.json(_METADATA), folder.where(_METADATA))
        count = (
            fields.whole("write_count") if "write_count" in fields and fields.any("write_count") is not None else None
        )
        return _highest(folder, fields, count) if "rank_key" in fields else _round_robin(folder, fields, count)


def _round_robin(folder: Folder, fields: Fields, count: int | None) -> RoundRobin:
    generations = None
    if "generation_shape" in fields:
        file = folder.tensor("generation.memmap", fields.any("generation_dtype"), fields.any("generation_shape"))
        if file.dtype != np.int64 or len(file.shape) != 1:
            raise CheckpointCorrupt(f"{file.where}: generations are one integer a row")
        generations = file.read()
        if generations.size and generations.min() < -1:
            raise CheckpointCorrupt(f"{file.where}: damaged, a generation is negative")
    return RoundRobin(fields.whole("cursor"), count, generations)


def _highest(folder: Folder, fields: Fields, count: int | None) -> Highest:
    where = folder.where(_METADATA)
    file = folder.tensor("current_top_values.memmap", fields.any("dtype"), fields.any("shape"))
    if (len(file.shape) != 2 or file.shape[1] != 2) and file.shape != (0,):  # of no items
        raise CheckpointCorrupt(f"{file.where}: ranks and slots are two columns")
    if file.dtype.kind not in "iuf" and file.dtype.name != "bfloat16":
        raise CheckpointCorrupt(f"{file.where}: ranks are numbers, not {file.dtype}")
    table = file.read().reshape(-1, 2).astype(np.float64)
    slots = table[:, 1]
    if np.isnan(table[:, 0]).any():
        raise CheckpointCorrupt(f"{file.where}: damaged, a rank is NaN")
    if not np.array_equal(np.sort(slots), np.arange(len(slots))):
        raise CheckpointMismatch(
            f"{file.where}: it does not name each of {len(slots)} slots once: damaged, or there are more than {file.dtype} "
            "can count"
        )
    ranks = np.empty(len(slots))
    ranks[slots.astype(np.int64)] = table[:, 0]
    return Highest(count, _key(fields, where), ranks)


def _key(fields: Fields, where: str) -> str | tuple[str, ...]:
    key: Any = fields.any("rank_key")
    if isinstance(key, str):
        return key
    if not isinstance(key, list) or not key or not all(isinstance(step, str) for step in key):
        raise CheckpointCorrupt(f"{where}: 'rank_key' is no key")
    return tuple(key)

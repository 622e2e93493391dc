"""What torchrl's samplers wrote."""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.checkpoint.torchrl_dirs_files import Folder

_METADATA = "sampler_metadata.json"
_CONSUMED = "consuming_sampler.pt"
_NO_ITEM = float(np.finfo(np.float32).max)  # what a tree of minima holds where no item is, or more


@dataclass(frozen=True)
class Nothing:
    """No files: a sampler that has nothing to remember."""


@dataclass(frozen=True)
class Unread:
    """A state that is not read here: an epoch, counts of consumed items, a version of the policy."""


@dataclass(frozen=True)
class Priorities:
    """Priorities as they were given, -1 where no item is, and the highest of all where that is known."""

    capacity: int
    alpha: float
    beta: float
    eps: float
    given: np.ndarray
    highest: float | None
    highest_slot: int
    is_single: bool  # whether they were in single precision


@dataclass(frozen=True)
class Members:
    """The samplers of an ensemble, by number; those without a state are missing."""

    members: dict[int, "SamplerState"]


SamplerState = Nothing | Unread | Priorities | Members


def read_sampler(parent: Folder, name: str = "sampler", depth: int = 0) -> SamplerState:
    """What a sampler wrote in a folder; `Nothing` where there is none."""
    if not parent.kind(name):
        return Nothing()
    with parent.folder(name) as folder:
        names = folder.entries()
        if not names:
            return Nothing()
        if _METADATA in names:
            return _priorities(folder)
        if _CONSUMED in names or "meta.json" in names:
            return Unread()
        if (numbers := numbered(names)) is not None and depth < 8:
            return Members({number: read_sampler(folder, str(number), depth + 1) for number in numbers})
        raise CheckpointMismatch(f"{folder.where()}: no sampler that is known here wrote {names[:8]}")


def numbered(names: list[str]) -> list[int] | None:
    """The numbers that all of the names are; None where one is none."""
    plain = all(name.isascii() and name.isdecimal() and len(name) < 9 and str(int(name)) == name for name in names)
    return sorted(map(int, names)) if plain else None


# ---------------------------------------------------------------------- priorities


def _priorities(folder: Folder) -> Priorities:
    where = folder.where(_METADATA)
    fields = Fields(folder.json(_METADATA), where)
    capacity = _integer(fields, "_max_capacity", 1)
    alpha, beta, eps = (fields.number(f"_{name}", 0) for name in ("alpha", "beta", "eps"))
    sums = folder.tensor("sumtree.memmap", "torch.float64", [capacity])
    least = folder.tensor("mintree.memmap", "torch.float64", [capacity])
    highest, slot = fields.items("_max_priority", 2)
    if "_schema_version" not in fields:  # early versions wrote it as it is stored
        highest = slot = None
    if highest is not None or slot is not None:
        pair = Fields({"priority": highest, "slot": slot}, f"{where}, _max_priority")
        highest, slot = pair.number("priority", 0), _integer(pair, "slot", 0, capacity - 1)
    stored, lowest = sums.read(), least.read()
    if not np.isfinite(stored).all() or (stored < 0).any():
        raise CheckpointCorrupt(f"{sums.where}: damaged, it holds values that are negative or not finite")
    known = lowest < _NO_ITEM
    if not (lowest[known] == stored[known]).all() or stored[~known].any() or np.isnan(lowest).any():
        raise CheckpointCorrupt(f"{least.where}: damaged, it does not hold the values of sumtree.memmap")
    count = int(np.flatnonzero(known)[-1]) + 1 if known.any() else 0
    stored, known = stored[:count], known[:count]
    given = np.full(count, -1.0)
    if alpha:
        with np.errstate(over="ignore"):
            given[known] = np.maximum(stored[known] ** (1 / alpha) - eps, 0)
        if not np.isfinite(given).all():
            raise CheckpointCorrupt(f"{sums.where}: damaged, it holds values that no priority has")
    else:  # every value is one: what was given is not known, and does not matter
        given[known] = 1.0
    is_single = bool((stored == stored.astype(np.float32)).all())
    return Priorities(capacity, alpha, beta, eps, given, highest, -1 if slot is None else slot, is_single)


def _integer(fields: Fields, name: str, least: int, most: int = 2**31 - 1) -> int:
    """An integer that may be written as a float."""
    value = fields.number(name, least)
    if value > most or value != int(value):
        raise fields.wrong(name, f"an integer from {least} to {most}", value)
    return int(value)


def read_torch_file(folder: Folder, name: str) -> dict[str, Any]:
    """What `torch.save` wrote, of tensors and plain values alone: nothing in it is run."""
    where = folder.where(name)
    content = io.BytesIO(folder.blob(name))
    try:
        found = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, as damage has
        first = str(error).partition("\n")[0][:200]
        raise CheckpointCorrupt(
            f"{where}: damaged, or it holds more than tensors and plain values ({first})"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise CheckpointCorrupt(f"{where}: no state_dict")
    return dict(found)

"""All that is known about one slot of a buffer: its write, its trajectory, and how often it is drawn, or why it is not."""

import dataclasses
from typing import Any

import numpy as np
import torch

from fbuf.looking import StoredTrajectory, Why
from fbuf.samplers import Reason
from interop.buffers.components import keeps_rows_in_order
from interop.buffers.episodes import Episodes
from interop.data.arguments import class_of
from interop.data.index import as_int
from interop.data.keys import as_key
from interop.samplers import Sampler
from interop.samplers.slice_draws import SliceDraws
from interop.samplers.trajectory_source import TrajectorySource
from interop.storages import Storage, columns
from interop.writers import Writer


def account_of(
    storage: Storage,
    sampler: Sampler,
    writer: Writer,
    episodes: Episodes[Any] | None,
    index: object,
    batch_size: int | None,
) -> Why:
    """What is known about an item; the lock of the storage is held. See `ReplayBuffer.why`."""
    slot = flat_slot(storage, index)
    numbers = _coordinates(index)
    of_slot = Why(slot, Reason.NOT_WRITTEN, index=numbers if len(numbers) > 1 else None, probability=0.0)
    if slot >= len(storage):
        return of_slot
    draws = sampler.draws
    law = draws.chances(storage, batch_size)
    starts = draws.starts_that_reach(storage, slot, batch_size)
    code = Reason(int(law.reason[slot]))
    if starts is not None and law.starts is not None and code == Reason.NONE:
        starts = starts[law.starts[starts] > 0]
    priorities = sampler.item_values.given_priorities(storage)
    slice_len, needs = draws.slice_rows(batch_size) or (None, None)
    found = dataclasses.replace(
        of_slot,
        code=code,
        unit=law.unit,
        probability=None if law.probability is None else float(law.probability[slot]),
        weight=law.weight(slot),
        priority=None if priorities is None else float(priorities[slot]),
        starts=None if starts is None else tuple(starts.tolist()),
        slice_len=slice_len,
        needs=needs,
    )
    if keeps_rows_in_order(sampler, writer) and not any(storage.ring.discontinuities()):
        contents = storage.contents
        age = int(contents.row_ages()[slot // contents.items_per_row])
        written = max(storage.ring.written, contents.filled_rows) - 1 - age
        found = dataclasses.replace(found, written=written, age=age)
    if isinstance(draws, SliceDraws) and draws.boundary_keys is None:
        held = _stored(draws.source, storage, slot)
        found = dataclasses.replace(found, trajectory=held, begins="as was given", ends="as was given")
    elif episodes is not None:
        held = dataclasses.replace(_stored(episodes.source, storage, slot), number=int(episodes.numbers[slot]))
        markers = _MarkersInWords(episodes, storage)
        held, begins = markers.begin(held, slot)
        found = dataclasses.replace(found, trajectory=held, begins=begins, ends=markers.end(held))
    return found


def flat_slot(storage: Storage, index: object) -> int:
    """The flat slot of an item, stored or not. TypeError for another index, IndexError where there is no such slot."""
    shape = tuple(storage.shape or ())
    lanes, rows = shape[1:], storage.row_capacity(None) if len(storage) else storage.max_size
    if storage.ndim > 1 and not len(storage):
        rows, lanes = storage.max_size, (storage.max_size,) * (storage.ndim - 1)
    numbers = _coordinates(index)
    if len(numbers) != storage.ndim:
        form = "an int" if storage.ndim == 1 else f"a tuple of {storage.ndim} ints, as in the index of a sample"
        raise TypeError(f"the index of an item is {form}, got {index!r}")
    flat = 0
    for dim, (number, size) in enumerate(zip(numbers, (rows, *lanes), strict=True)):
        if not 0 <= number < size:
            there = ""
            if storage.ndim > 1:
                meaning = "the row in the ring" if dim == 0 else "the lane"
                there = f" in item dim {dim}, {meaning}: the order is that of the index of a sample"
            raise IndexError(f"index {index!r} does not exist: the storage has places 0 to {size - 1}{there}")
        flat = flat * size + number
    return flat


def _coordinates(index: object) -> tuple[int, ...]:
    """The integers of an index: of an int one, of a tuple, or a tensor or array of one dim, several. () for others."""
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(index, torch.Tensor | np.ndarray) and index.ndim == 1:
        parts = tuple(index.tolist())
    numbers = tuple(number for part in parts if (number := as_int(part)) is not None)
    return numbers if len(numbers) == len(parts) else ()


def _stored(source: TrajectorySource, storage: Storage, slot: int) -> StoredTrajectory:
    """The trajectory of an item as far as it is stored, without its id and number."""
    index = source.of(storage)
    row, lane = np.divmod(np.array([slot]), index.lanes)
    times, first, last = (int(each[0]) for each in index.located(row, lane))
    begin, end = index.slots_at(np.array([first, last]), np.repeat(lane, 2)).tolist()
    return StoredTrajectory(None, int(lane[0]), None, times - first, begin, end, last - first + 1)


class _MarkersInWords:
    """By which stored entries trajectories begin and end, in words."""

    def __init__(self, episodes: Episodes[Any], storage: Storage) -> None:
        self._ends = episodes.ends
        self._keys = episodes.source.keys.stored_keys
        self._storage = storage
        self._lanes = storage.contents.items_per_row
        self._interleaved = episodes.source.of(storage).is_interleaved

    def _values(self, paths: tuple[Any, ...], slot: int) -> list[tuple[str, int | float]]:
        """The markers of an item, by name."""
        read = (columns.read(self._storage, as_key(path), np.array([slot])) for path in paths)
        return [
            (".".join(map(str, path)), value.reshape(-1)[0].item()) for path, value in zip(paths, read, strict=True)
        ]

    def _next(self, slot: int, step: int) -> int | None:
        """The slot in the same lane that was written before or after; None for none."""
        contents = self._storage.contents
        filled, oldest = contents.filled_rows, contents.oldest_row
        row, lane = divmod(slot, self._lanes)
        time = (row - oldest) % filled + step
        return ((time + oldest) % filled) * self._lanes + lane if 0 <= time < filled else None

    def begin(self, held: StoredTrajectory, slot: int) -> tuple[StoredTrajectory, str]:
        """The trajectory with its id, and with its step if that is known; and by what it begins."""
        ids = tuple(value for _, value in self._values(self._keys.ids, slot))
        held = dataclasses.replace(held, id=None if not ids else ids[0] if len(ids) == 1 else ids)
        firsts = [name for name, value in self._values(self._keys.firsts, held.first) if value]
        before = self._next(held.first, -1)
        if firsts:
            return held, f"{firsts[0]} is true at slot {held.first}"
        if before is None:
            if self._storage.ring.written > self._storage.contents.filled_rows:  # rows before it may be overwritten
                held = dataclasses.replace(held, step=None)
            return held, f"slot {held.first} is the oldest one that is stored"
        if any(value for _, value in self._values(self._keys.ends, before)) and not self._interleaved:
            return held, f"the previous trajectory ended at slot {before}"
        return held, self._change(before, held.first)

    def end(self, held: StoredTrajectory) -> str:
        """By what it ends."""
        kind = str(self._ends[held.number])
        flags = [name for name, value in self._values(self._keys.ends, held.last) if value]
        if kind == "padding":
            masks = [name for name, value in self._values(self._keys.masks, held.last) if not value]
            return f"{masks[0]} is false at slot {held.last}: its rows are padding"
        if flags:
            named = [name for name in flags if name.rpartition(".")[2] == kind]
            return f"{(named or flags)[0]} is true at slot {held.last}, so it is {kind}"
        if kind == "open":
            return "not yet, the next row that is written may continue it"
        after = self._next(held.last, 1)
        if after is None:
            return f"slot {held.last} is the newest one, and no row will continue it"
        return self._change(held.last, after)

    def _change(self, before: int, after: int) -> str:
        """Why an item does not continue the one before it."""
        for name, value in self._values(self._keys.firsts, after):
            if value:
                return f"{name} is true at slot {after}"
        groups = (self._keys.ids, self._keys.masks)
        for paths in groups:
            for (name, old), (_, new) in zip(self._values(paths, before), self._values(paths, after), strict=True):
                if old != new and not self._interleaved:
                    return f"{name} changes from {old} to {new} at slot {after}"
        if self._interleaved:
            return "rows of other trajectories lie in between"
        return f"slot {after} was not written after slot {before}"


def in_member(found: Why, member: int, part: float, is_blocked: bool) -> Why:
    """What is known about a slot of a member of an ensemble, which has this part of all draws."""
    found = dataclasses.replace(found, member=member)
    if found.code == Reason.NOT_WRITTEN or (part > 0 and not is_blocked):
        return dataclasses.replace(found, probability=None if found.probability is None else found.probability * part)
    code = Reason.BLOCKED if is_blocked else Reason.EXCLUDED
    keeps = found.code not in (Reason.NONE, Reason.WAITING, Reason.UNKNOWN)
    return dataclasses.replace(found, code=found.code if keeps else code, probability=0.0, weight=None)


def pair_of(index: object, members: int) -> tuple[int, object]:
    """The member and the index in it. TypeError for what is no pair, IndexError for no member."""
    if not isinstance(index, tuple) or len(index) < 2 or (member := as_int(index[0])) is None:
        raise TypeError(
            f"the index of an item of an ensemble is a pair (member, index), got {class_of(index)} {index!r}"
        )
    if not 0 <= member < members:
        raise IndexError(f"member {member} does not exist: the ensemble has members 0 to {members - 1}")
    return member, index[1] if len(index) == 2 else index[1:]

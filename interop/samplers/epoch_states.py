"""How far an epoch has come, what its takes did, and both as saved trees."""

from typing import Any, NamedTuple

import numpy as np

from fbuf.checkpoint import Fields
from interop.checkpoint.stateful import Entries, integers

NONE = np.zeros(0, np.int64)


class Standing(NamedTuple):
    """How far an epoch has come."""

    epoch: int = 0  # its number
    changes: int = 0  # since the start, but for those that were undone
    position: int = 0  # entries of the order that were taken
    over: bool = False
    again: np.ndarray = NONE  # what was taken back after more was taken: it comes first


class Taken(NamedTuple):
    """What a take did, so that it can be undone."""

    before: Standing
    after: Standing
    ran_out: bool
    named: np.ndarray
    moved: tuple[Any, ...]  # entries of the order, and what they were; other entries, and what they were


# ------------------------------------------------------------------ saved trees


def standing_saved(standing: Standing) -> dict[str, Any]:
    """A saved tree of it."""
    return {**standing._asdict(), "again": standing.again.astype(np.int64)}


def standing_of(fields: Fields, length: int) -> Standing:
    """That of a saved tree, in an epoch of this length; CheckpointCorrupt where it has none."""
    return Standing(
        fields.whole("epoch"),
        fields.whole("changes"),
        fields.whole("position", most=length),
        fields.flag("over"),
        integers(fields, "again", None, 0, length),
    )


def taken_saved(number: int, taken: Taken, now: Standing) -> dict[str, Any]:
    """What a take did; only its number where it was of an epoch that is over, which nothing of it can be brought back to."""
    saved: dict[str, Any] = {"number": number, "ran_out": taken.ran_out, "undo": None}
    if taken.after.epoch != now.epoch:
        return saved
    moved = None
    if taken.moved:
        block, were, holes, left = taken.moved
        moved = {"start": block.start, "were": were.copy(), "holes": holes.astype(np.int64), "left": left.copy()}
    before, after = standing_saved(taken.before), standing_saved(taken.after)
    return {**saved, "undo": {"before": before, "after": after, "named": taken.named.copy(), "moved": moved}}


def taken_of(fields: Fields, length: int, now: Standing) -> tuple[int, Taken]:
    """What is held of a saved tree, in an epoch that stands so, and its number."""
    number, ran_out = fields.whole("number"), fields.flag("ran_out")
    if fields.any("undo") is None:
        past = Standing(-1)
        return number, Taken(past, past, ran_out, NONE, ())
    undo = fields.fields("undo")
    before, after = standing_of(undo.fields("before"), length), standing_of(undo.fields("after"), length)
    named = integers(undo, "named", None, 0, length)
    moved: tuple[Any, ...] = ()
    if after.epoch != now.epoch:
        raise fields.wrong("undo", "of this epoch", after.epoch)
    if undo.any("moved") is not None:
        parts = undo.fields("moved")
        start = parts.whole("start", most=length)
        were = integers(parts, "were", None, 0, length)
        holes = integers(parts, "holes", None, min(start + were.size, length), length)
        left = integers(parts, "left", holes.size, 0, length)
        if start + were.size > length or np.unique(holes).size < holes.size:
            raise undo.wrong("moved", "what can be moved back", start)
        moved = slice(start, start + were.size), were, holes, left
    return number, Taken(before, after, ran_out, named, moved)


def check_undone(entries: Entries, order: np.ndarray, held: dict[int, Taken], now: Standing) -> None:
    """CheckpointCorrupt where taking all back, the last one first, would not leave the order a permutation."""
    for taken in reversed(held.values()):
        if taken.after.changes != now.changes or taken.after.epoch != now.epoch:
            continue
        if taken.moved:
            block, were, holes, left = taken.moved
            there = np.concatenate((order[block], order[holes])) if order.size else NONE
            if not np.array_equal(np.sort(there), np.sort(np.concatenate((were, left)))):
                raise entries.wrong("held", "what the order can be brought back to", held)
            order[block], order[holes] = were, left
        now = taken.before

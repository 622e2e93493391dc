"""What a page shows of a buffer, as plain values and small arrays: every number of the page is one of these."""

import dataclasses
import datetime
import math
from collections.abc import Iterable, Sequence

import numpy as np

from interop.buffers import ReplayBuffer
from interop.buffers.episodes import Episodes
from interop.shared.storage_lock import locked
from interop.view.entries import CURVES, Entry, entries_of, read_numbers, read_texts
from interop.view.png import as_pixels, png
from interop.view.sampler_facts import Facts, sampler_facts
from interop.view.thinning import binned, evenly, extremes, summary

CELLS = 24_000  # of the picture of the ring
LANES = 64  # of this picture
LISTED = 20_000  # episodes of the list
ROWS_OF_SUMMARIES = 100_000  # numbers of an entry
ITEMS_OF_SUMMARIES = 500  # of a list, whose items are read whole
POINTS = 400_000  # of all curves
POINTS_OF_EPISODE = 400  # of one curve
IMAGE_BYTES = 2_500_000
FRAMES = 64  # of one episode
TEXTS, TEXT_BYTES, LONGEST_TEXT = 64, 500_000, 400  # texts of one episode; of all; of one


def facts_of(buffer: ReplayBuffer, include: Sequence[int] = ()) -> Facts:
    """The facts of a buffer at one moment: its lock is held meanwhile. About 5 MB at most, whatever is stored.

    Keys: "buffer", "ring", "episodes", "details", "keys" and "sampler"; see the functions of this file.

    Args:
        buffer: the buffer. Transforms are not applied.
        include: numbers of episodes whose rows are to be among "details". IndexError out of range.
    """
    with locked(buffer):
        episodes, reason = _episodes(buffer)
        sampler = sampler_facts(buffer, episodes)
        entries = entries_of(buffer.storage)
        ages = buffer.storage.contents.row_ages()
        details = [] if episodes is None else _details(buffer, episodes, entries, include)
        return {
            "buffer": _buffer(buffer),
            "ring": _ring(buffer, episodes, ages, sampler),
            "episodes": _listed(episodes, reason, ages, sampler, details),
            "details": details,
            "keys": _keys(buffer, entries),
            "sampler": {name: fact for name, fact in sampler.items() if not isinstance(fact, np.ndarray)}
            | _probabilities(sampler["probability"]),
        }


def _episodes(buffer: ReplayBuffer) -> tuple[Episodes[ReplayBuffer] | None, str]:
    """The episodes; or None, and why there are none."""
    try:
        found: object = buffer.episodes
    except (RuntimeError, TypeError) as error:
        return None, str(error)
    if not isinstance(found, Episodes):  # a dataset that has another attribute of this name
        return None, f"a {type(buffer).__name__} has no view of episodes"
    return (found, "") if len(found) else (None, "nothing is stored")


def _buffer(buffer: ReplayBuffer) -> Facts:
    storage = buffer.storage
    ring = storage.ring
    capacity = storage.row_capacity(None) if len(storage) else storage.max_size
    return {
        "kind": type(buffer).__name__,
        "storage": type(storage).__name__,
        "sampler": type(buffer.sampler).__name__,
        "writer": type(buffer.writer).__name__,
        "items": len(storage),
        "rows": storage.contents.filled_rows,
        "capacity": capacity if capacity < 2**53 else None,
        "lanes": storage.contents.items_per_row,
        "written": ring.written,
        "cursor": ring.cursor,
        "batch_size": buffer.batch_size,
        "made": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
    }


def _ring(buffer: ReplayBuffer, episodes: Episodes[ReplayBuffer] | None, ages: np.ndarray, sampler: Facts) -> Facts:
    """The picture of the ring: cells of consecutive rows, lane by lane, [lanes * cells_of_lane].

    "episode" has the number of the episode of the first row of each cell, -1 for none; "age", "priority" and "probability"
    the means of its rows. The rows behind the stored ones, up to "rows", are not written.
    """
    storage = buffer.storage
    filled, lanes = storage.contents.filled_rows, storage.contents.items_per_row
    shown_lanes = evenly(lanes, LANES)
    cells = min(filled, CELLS // len(shown_lanes))
    capacity = storage.row_capacity(None) if filled else 0
    facts: Facts = {"filled": filled, "rows": min(capacity, filled + max(filled // 6, 1)), "cells_of_lane": cells}
    facts["lanes"] = shown_lanes.astype(np.int32)
    if not filled:
        return facts
    bins = np.arange(filled) * cells // filled
    first = np.searchsorted(bins, np.arange(cells))
    by_cell = bins[None] + np.arange(len(shown_lanes))[:, None] * cells

    def means(values: np.ndarray | None) -> np.ndarray | None:
        if values is None:
            return None
        of_lanes = values.reshape(filled, lanes)[:, shown_lanes].T.astype(np.float64)
        return binned(of_lanes.reshape(-1), by_cell.reshape(-1), cells * len(shown_lanes))

    numbers = np.full(filled * lanes, -1) if episodes is None else episodes.numbers
    facts["episode"] = numbers.reshape(filled, lanes)[first][:, shown_lanes].T.reshape(-1).astype(np.int32)
    facts["age"] = means(np.repeat(ages, lanes))
    facts["priority"] = means(sampler["priorities"])
    facts["probability"] = means(sampler["probability"])
    return facts


def _listed(
    episodes: Episodes[ReplayBuffer] | None, reason: str, ages: np.ndarray, sampler: Facts, details: list[Facts]
) -> Facts:
    """The list: arrays over at most 20,000 episodes, evenly chosen, and those with details. "count" has all.

    "ends" are places in "kinds_of_ends"; "missing" is the reason if there are no episodes.
    """
    if episodes is None:
        return {"count": 0, "missing": reason}
    chosen = np.union1d(evenly(len(episodes), LISTED), np.array([each["number"] for each in details], np.int64))
    kinds, ends = np.unique(episodes.ends, return_inverse=True)
    stops = episodes.lengths.cumsum()
    starts = stops - episodes.lengths
    lanes = max(len(episodes.numbers) // max(len(ages), 1), 1)
    facts: Facts = {
        "count": len(episodes),
        "number": chosen.astype(np.int32),
        "length": episodes.lengths[chosen].astype(np.int32),
        "end": ends[chosen].astype(np.uint8),
        "kinds_of_ends": kinds.tolist(),
        "first": (episodes.order[starts[chosen]] // lanes).astype(np.int32),
        "lane": (episodes.order[starts[chosen]] % lanes).astype(np.int32),
        "age": ages[episodes.order[stops[chosen] - 1] // lanes].astype(np.int32),
        "return": None,
        "priority": _mean_of(sampler["priorities"], episodes, starts, chosen),
        "probability": None,
    }
    if sampler["probability"] is not None:
        sums = np.add.reduceat(sampler["probability"][episodes.order], starts)
        facts["probability"] = sums[chosen].astype(np.float32)
    try:
        returns = episodes.returns
    except (KeyError, TypeError):
        return facts
    facts["return"] = returns.reshape(len(returns), -1).sum(1)[chosen].astype(np.float32)
    facts["rewards"] = returns[0].size
    return facts


def _mean_of(
    values: np.ndarray | None, episodes: Episodes[ReplayBuffer], starts: np.ndarray, chosen: np.ndarray
) -> np.ndarray | None:
    """The means of values of items over chosen episodes."""
    if values is None:
        return None
    means = np.add.reduceat(values[episodes.order], starts) / episodes.lengths
    found: np.ndarray = means[chosen].astype(np.float32)
    return found


def _probabilities(probability: np.ndarray | None) -> Facts:
    """What probabilities of items say together: "effective", the number of items that would be drawn as unevenly as these
    if all were equally likely; "top_share", of the most likely 1 % in the total; "never", items that are not drawn."""
    if probability is None or not probability.size or not probability.sum():
        return {}
    shares = probability / probability.sum()
    top = np.sort(shares)[::-1][: max(len(shares) // 100, 1)]
    return {
        "effective": float(1 / np.square(shares).sum()),
        "top_share": float(top.sum()),
        "never": int((shares == 0).sum()),
        "relative": dataclasses.asdict(summary(shares * len(shares))),
    }


def _keys(buffer: ReplayBuffer, entries: Iterable[Entry]) -> list[Facts]:
    """The entries of items, with a summary of those that are numbers, over at most 100,000 of them, evenly chosen."""
    storage = buffer.storage
    found = []
    for entry in entries:
        facts: Facts = {"name": entry.name, "kind": entry.kind, "dtype": entry.dtype, "shape": list(entry.shape)}
        if entry.is_numeric:
            most = max(ROWS_OF_SUMMARIES // max(math.prod(entry.shape), 1), 256)
            most = most if storage.contents.layout is not None else min(most, ITEMS_OF_SUMMARIES)
            slots = evenly(len(storage), most)
            facts |= {"rows": len(slots), "summary": dataclasses.asdict(summary(read_numbers(storage, entry, slots)))}
        found.append(facts)
    return found


# ------------------------------------------------------------------ the rows of some episodes


def _details(
    buffer: ReplayBuffer, episodes: Episodes[ReplayBuffer], entries: Sequence[Entry], include: Sequence[int]
) -> list[Facts]:
    """The rows of as many episodes as there is room for: the asked ones, the newest, the best and the worst, others evenly.

    Each has "number", "steps" (of the points of curves), "curves" (float32 [curves, points] by name), "images" (PNG files
    by name) with "image_steps", and "texts" by name with "text_steps".
    """
    for number in include:
        if not 0 <= number < len(episodes):
            raise IndexError(f"episode {number} is out of range: {len(episodes)} are stored")
    images = [entry for entry in entries if entry.kind == "images"]
    texts = [entry for entry in entries if entry.kind == "text"]
    points, image_bytes, text_bytes = POINTS, IMAGE_BYTES, TEXT_BYTES
    found = []
    for number in _worth_showing(episodes, include):
        if points <= 0:
            break
        slots = episodes.slots(number)
        facts = {"number": number, **_curves(buffer, entries, slots)}
        points -= sum(each.size for each in facts["curves"].values()) + 100
        if images and image_bytes > 0:
            facts |= _images(buffer, images, slots, image_bytes)
            image_bytes -= sum(len(file) for files in facts["images"].values() for file in files)
        if texts and text_bytes > 0:
            facts |= _texts(buffer, texts, slots)
            text_bytes -= sum(len(text) for of_entry in facts["texts"].values() for text in of_entry)
        found.append(facts)
    return found


def _worth_showing(episodes: Episodes[ReplayBuffer], include: Sequence[int]) -> list[int]:
    """Numbers of episodes, those that a reader looks for first."""
    count = len(episodes)
    try:
        by_return = episodes.returns.reshape(count, -1).sum(1).argsort(kind="stable")
    except (KeyError, TypeError):
        by_return = episodes.lengths.argsort(kind="stable")
    first = [*include, count - 1, by_return[-1], by_return[0], 0, episodes.lengths.argmax()]
    spread = evenly(count, min(count, 400))
    order = spread[np.random.default_rng(0).permutation(len(spread))]
    return list(dict.fromkeys(map(int, [*first, *order])))


def _curves(buffer: ReplayBuffer, entries: Iterable[Entry], slots: np.ndarray) -> Facts:
    """The curves of an episode by name; of wide entries the first 8."""
    curves: dict[str, np.ndarray] = {}
    steps = np.arange(len(slots))
    for entry in entries:
        if entry.kind not in ("curves", "flag"):
            continue
        values = read_numbers(buffer.storage, entry, slots).reshape(len(slots), -1).T[:CURVES]
        steps, curves[entry.name] = extremes(values.astype(np.float32), POINTS_OF_EPISODE)
    return {"length": len(slots), "steps": steps.astype(np.int32), "curves": curves}


def _images(buffer: ReplayBuffer, entries: Iterable[Entry], slots: np.ndarray, room: int) -> Facts:
    steps = evenly(len(slots), FRAMES)
    files: dict[str, list[bytes]] = {}
    for entry in entries:
        pixels = as_pixels(read_numbers(buffer.storage, entry, slots[steps]))
        files[entry.name] = [png(each) for each in pixels]
        room -= sum(map(len, files[entry.name]))
        if room <= 0:
            break
    return {"image_steps": steps.astype(np.int32), "images": files}


def _texts(buffer: ReplayBuffer, entries: Iterable[Entry], slots: np.ndarray) -> Facts:
    steps = evenly(len(slots), TEXTS)
    texts = {
        entry.name: [_short(text) for text in read_texts(buffer.storage, entry, slots[steps])] for entry in entries
    }
    return {"text_steps": steps.astype(np.int32), "texts": texts}


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " …"

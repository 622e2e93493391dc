"""What a sampler draws, how often, and what it cannot draw: the facts of a page."""

from typing import Any

import numpy as np

from interop.buffers import ReplayBuffer
from interop.buffers.episodes import Episodes
from interop.samplers import PrioritizedSampler, PrioritizedSliceSampler, RandomSampler, Sampler, SliceSampler

Facts = dict[str, Any]
"""Facts of a page by name: plain values, and NumPy arrays."""


def sampler_facts(buffer: ReplayBuffer, episodes: Episodes[ReplayBuffer] | None) -> Facts:
    """The facts about the sampler of a buffer. Nothing is drawn. The lock is held.

    "name", "settings" (text); "law", a sentence, or None; "probability", float64 [stored items] by flat slot, of an item to
    be in a place of a batch, or None; "refused", a list of {"reason", "items", "episodes"}; "priorities", float64 [stored
    items], or None.
    """
    sampler = buffer.sampler
    facts: Facts = {
        "name": type(sampler).__name__,
        "settings": repr(sampler),
        "law": None,
        "probability": None,
        "refused": [],
        "priorities": _priorities(sampler, len(buffer.storage)),
    }
    size = len(buffer.storage)
    if not size:
        return facts
    if type(sampler) is RandomSampler:
        facts["law"] = "Every stored item is equally likely."
        facts["probability"] = np.full(size, 1 / size)
    elif type(sampler) is PrioritizedSampler and facts["priorities"] is not None:
        masses = (facts["priorities"] + sampler.eps) ** sampler.alpha
        facts["probability"] = masses / masses.sum()
        facts["law"] = (
            f"Item i is drawn with probability v / sum(v), v = (priority + {sampler.eps:g}) ^ {sampler.alpha:g}."
        )
        _refuse(facts, "the priority is zero", facts["probability"] == 0, None)
    elif isinstance(sampler, SliceSampler) and episodes is not None:
        _of_slices(facts, sampler, buffer, episodes)
    return facts


def _priorities(sampler: Sampler, size: int) -> np.ndarray | None:
    if not isinstance(sampler, PrioritizedSampler):
        return None
    priorities: np.ndarray = sampler.priorities.cpu().numpy().astype(np.float64)
    return priorities if len(priorities) == size else None


def _of_slices(facts: Facts, sampler: SliceSampler, buffer: ReplayBuffer, episodes: Episodes[ReplayBuffer]) -> None:
    """The facts of slices: an episode that is long enough is drawn equally often, and each start in it."""
    length = sampler.slice_len
    if length is None and buffer.batch_size is not None and sampler.num_slices:
        length = buffer.batch_size // sampler.num_slices
    if length is None:
        return
    lengths = episodes.lengths
    short = lengths < length
    if sampler.strict_length:
        of_items = short[episodes.numbers]
        _refuse(facts, f"the episode is shorter than a slice of {length}", of_items, int(short.sum()))
    if isinstance(sampler, PrioritizedSliceSampler) or sampler.span != (False, False):
        return
    facts["law"] = f"Each episode of at least {length} rows is equally likely, and each start of a slice in it."
    if not sampler.strict_length:
        facts["law"] = (
            f"Each episode is equally likely, and each start of a slice of {length} in it; shorter ones whole."
        )
    chosen = ~short if sampler.strict_length else np.ones(len(lengths), np.bool_)
    if not chosen.any():
        return
    # A row at step t of an episode of n rows is in min(t, n - L, L - 1, n - 1 - t) + 1 of its n - L + 1 slices.
    probability = np.zeros(len(episodes.numbers))
    steps = np.arange(int(lengths.sum())) - np.repeat(lengths.cumsum() - lengths, lengths)
    of = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.maximum(lengths - length + 1, 1)
    covers = np.minimum.reduce([steps, starts[of] - 1, np.full(len(of), length - 1), lengths[of] - 1 - steps]) + 1
    drawn_rows = (np.minimum(lengths, length)[chosen]).mean()
    weights = np.where(chosen[of], covers / starts[of], 0) / chosen.sum() / drawn_rows
    probability[episodes.order] = weights
    facts["probability"] = probability


def _refuse(facts: Facts, reason: str, items: np.ndarray, episodes: int | None) -> None:
    count = int(items.sum())
    if count:
        facts["refused"].append({"reason": reason, "items": count, "episodes": episodes})

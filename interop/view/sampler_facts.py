"""What a sampler draws, how often, and what it cannot draw: the facts of a page."""

from typing import Any

import numpy as np

from fbuf.samplers import Chances, Reason
from interop.buffers import ReplayBuffer
from interop.buffers.episodes import Episodes

Facts = dict[str, Any]
"""Facts of a page by name: plain values, and NumPy arrays."""


def sampler_facts(buffer: ReplayBuffer, episodes: Episodes[ReplayBuffer] | None) -> Facts:
    """The facts about the sampler of a buffer. Nothing is drawn. The lock is held.

    "name", "settings" (text); "law", a sentence, or None; "probability", float64 [stored items] by flat slot, of an item to
    be in a place of a batch, or None; "refused", a list of {"reason", "items", "episodes"}; "priorities", float64 [stored
    items], or None.
    """
    sampler, storage = buffer.sampler, buffer.storage
    facts: Facts = {
        "name": type(sampler).__name__,
        "settings": repr(sampler),
        "law": None,
        "probability": None,
        "refused": [],
        "priorities": None,
    }
    size = len(storage)
    if not size:
        return facts
    try:
        law = sampler.draws.chances(storage, buffer.batch_size)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # a draw would raise it, a page shows the rest
        facts["law"] = f"Nothing can be drawn: {error.args[0] if error.args else error}"
        return facts
    priorities = sampler.item_values.given_priorities(storage)
    facts["priorities"] = None if priorities is None else priorities.astype(np.float64)
    if law.probability is not None:
        facts["law"] = _sentence(law)
        facts["probability"] = law.probability / (law.probability.sum() or 1.0)
    facts["refused"] = _refused(law, episodes)
    return facts


def _sentence(law: Chances) -> str:
    """The law in words."""
    assert law.likely is not None
    likely = law.likely[law.likely > 0]
    if not likely.size:
        return "Nothing can be drawn now."
    what = {"item": "items", "slice": "starts of slices", "group": "rows of groups"}[law.unit]
    if np.allclose(likely, likely[0], rtol=1e-6):
        return f"{likely.size:,} {what} can be drawn, each with probability {likely[0]:.3g}."
    return (
        f"{likely.size:,} {what} can be drawn, the least likely with probability {likely.min():.3g}, the most likely with "
        f"{likely.max():.3g}."
    )


def _refused(law: Chances, episodes: Episodes[ReplayBuffer] | None) -> list[Facts]:
    """The reasons that items cannot be drawn, with the number of items, and of the episodes that have none but such."""
    found = []
    for code in np.unique(law.reason[law.refused]).tolist():
        of_items = law.reason == code
        whole = None
        if episodes is not None:
            left = np.bincount(episodes.numbers[~of_items], minlength=len(episodes))
            whole = int((left == 0).sum())
        found.append({"reason": Reason(code).words, "items": int(of_items.sum()), "episodes": whole})
    return found

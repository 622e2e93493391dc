"""Priorities that a storage in files keeps beside its items, and those that a process before this one left there."""

from typing import Any

import numpy as np

from interop.samplers.given import good_priorities
from interop.storages import Storage


def keep(sampler: Any, storage: Storage, kept: Any) -> None:
    """Have the priorities kept where the storage keeps them; begin with those that a process before this one left."""
    sampler._kept = kept
    if not kept.bind(sampler) or sampler._filled or not len(storage):
        keep_all(sampler)
    else:
        values, highest, slot = kept.read(len(storage))
        known = {"priorities": good_priorities(values, sampler.rule.dtype)[0], "highest": highest, "highest_slot": slot}
        sampler._make(storage)
        sampler._refill({**known, "refused": 0}, max(sampler._max_capacity, storage.max_size))
        sampler._filled, sampler._highest = len(storage), np.dtype(sampler.rule.dtype).type(highest)


def keep_all(sampler: Any) -> None:
    """Keep the priorities of all items, where any are kept."""
    kept = sampler._kept
    if kept is not None and kept.are_of(sampler):
        sampler._apply()
        given = np.zeros(0) if sampler._state is None else np.asarray(sampler._state.priorities)[: sampler._filled]
        slots = np.flatnonzero(given >= 0)
        kept.forget(slice(None))
        kept.give(slots, given[slots], *sampler._top())

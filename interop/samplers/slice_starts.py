"""Which items can begin a slice, where slices begin by the priority of an item."""

import numpy as np

from interop.host.trajectories import Trajectories


def items_from(index: Trajectories, need: int, length: int, strict: bool, since: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots for which this may have changed since time `since`: how many items a slice from there has, 0 for none.

    A slice begins where `need` stored items are left of a trajectory, which, if strict, has `length`; otherwise also with
    the first stored item of a trajectory. O((rows since + length) * lanes + trajectories).
    """
    found = index.stored()
    first, stop = np.maximum(found[:, 1], index.oldest), found[:, 2] + 1
    grown, cut = (stop > since).nonzero()[0], (first == index.oldest).nonzero()[0]
    which = np.concatenate([grown, cut])
    low = np.concatenate([np.maximum(first[grown], since - length), first[cut]])
    high = np.concatenate([stop[grown], np.minimum(first[cut] + length, stop[cut])])
    count = high - low
    of = np.repeat(which, count)
    times = np.arange(of.size) + np.repeat(low + count - count.cumsum(), count)
    first, left = first[of], stop[of] - times
    allowed = (left >= need) & (left + times - first >= length) if strict else (left >= need) | (times == first)
    return index.slots_at(times, found[of, 0]), np.where(allowed, np.minimum(left, length), 0)

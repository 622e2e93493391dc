"""The ids of the newest items, by which it is noticed that the items of several trajectories are interleaved."""

import numpy as np

from interop.samplers.interleaved import distinct_tail, takes_turns

_MOST = 4096  # trajectories that can be interleaved


class RecentIds:
    """The longest end of all ids so far that has none twice, up to 4,096 of them."""

    def __init__(self) -> None:
        self._tail: np.ndarray = np.zeros(0, np.int64)

    def take_turns(self, ids: np.ndarray, changes: np.ndarray) -> bool:
        """Whether trajectories take turns in ids that come next, as `takes_turns` has it; they are remembered unless so.

        `changes` are the places of those that another one comes behind. O(ids) in NumPy where ids only rise.
        """
        tail = self._tail if len(self._tail) else ids[:0]
        many = len(changes) + (len(tail) - int(tail[-1] == ids[0]) if len(tail) else 0)
        if many < 2 and len(ids) > 1 and ids[-1] == ids[-2]:
            self._tail = ids[-1:].copy()
            return False
        every = np.concatenate([tail, ids])
        rising = bool((every[1:] >= every[:-1]).all())  # then none comes again, which is seen sooner
        if not rising and takes_turns(tail, ids):
            return True
        if rising:
            again = (every[1:] == every[:-1]).nonzero()[0]
            self._tail = every[again[-1] + 1 if again.size else 0 :][-_MOST:].copy()
        else:
            self._tail = distinct_tail(every[-_MOST:]).copy()
        return False

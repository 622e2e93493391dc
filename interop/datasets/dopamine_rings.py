"""Which rows of a Dopamine replay buffer are steps of its agent."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

PADDING = 3  # rows of zeros before an episode: a state of Dopamine's DQN is a stack of four frames
_OLDEST = -1  # the number of a run whose terminal row was overwritten


class DopamineRing:
    """The rows of a saved ring that are steps, in the order of the file.

    A ring that was not full yet has rows that were never written. Before each episode, and so behind each terminal row,
    Dopamine writes `PADDING` rows of zeros, which its own sampler never draws. Behind the row that was written last, another
    episode follows.

    Args:
        terminal, action, reward: [rows], as saved.
        add_count: how many rows were ever written, if known.
    """

    def __init__(self, terminal: np.ndarray, action: np.ndarray, reward: np.ndarray, add_count: int | None) -> None:
        rows = len(terminal)
        written = rows if add_count is None else add_count
        self.filled = min(written, rows)
        """The number of rows that were written."""
        self.ends = np.zeros(rows, np.bool_)
        """Rows that end an episode without a terminal flag: the next row of the file does not continue them."""
        if self.filled:
            self.ends[[written % rows - 1, self.filled - 1]] = True
        self._run = np.zeros(rows, np.int64)  # the number of the run of padding of each row; 0 for rows that are none
        zero = (terminal == 0) & (action == 0) & (reward == 0)
        runs = [*self._behind_terminals(terminal, written)]
        if not runs or not all(zero[places].all() for places in runs):
            return  # this ring has no padding
        for run, places in enumerate(runs, 1):
            self._run[places] = run
        if written > rows:  # the oldest rows may be the rest of a run
            start = written % rows
            some = zero[start : start + PADDING] & (self._run[start : start + PADDING] == 0)
            self._run[start : start + int(np.logical_and.accumulate(some).sum())] = _OLDEST

    def _behind_terminals(self, terminal: np.ndarray, written: int) -> Iterator[np.ndarray]:
        """Yield the rows where there is padding, if there is any: those behind each terminal row, in time."""
        rows = len(terminal)
        oldest = max(written - len(terminal), 0)
        times = np.arange(oldest, written)  # the row of time t is t % rows
        ended = times[terminal[times % rows] != 0]
        for time in ended:
            if len(places := np.arange(time + 1, min(time + 1 + PADDING, written)) % rows):
                yield places
        if len(ended) and not oldest:  # the ring begins with an episode
            yield np.arange(min(PADDING, self.filled))

    def steps(self, blocks: Iterable[tuple[np.ndarray, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield the steps of consecutive blocks (frames, ...) of the arrays, each with their places in the file, [n].

        Rows of padding have frames of zeros. If one of a run has not, the run is none: these are steps in the dark.
        """
        waiting: tuple[np.ndarray, ...] = ()
        start = 0
        for block in blocks:
            arrays = tuple(map(np.concatenate, zip(waiting, block, strict=True))) if waiting else block
            stop = start + len(arrays[0])
            # A run at the end of the block may go on in the next one.
            first_known = stop if stop == len(self.ends) else max(stop - PADDING, start)
            while (
                start < first_known < stop
                and self._run[first_known]
                and self._run[first_known - 1] == self._run[first_known]
            ):
                first_known -= 1
            yield self._chosen(arrays, start, first_known)
            waiting = tuple(array[first_known - start :] for array in arrays)
            start = first_known

    def _chosen(self, arrays: tuple[np.ndarray, ...], start: int, stop: int) -> tuple[Any, ...]:
        at = np.arange(start, stop)
        run = self._run[at]
        if run.any():
            seen = np.array([run[place] != 0 and arrays[0][place].any() for place in range(len(at))])
            oldest = np.flatnonzero(run == _OLDEST)
            none = np.isin(run, run[seen & (run != _OLDEST)])
            none[oldest] = np.logical_or.accumulate(seen[oldest])
            run = np.where(none, 0, run)
        is_stored = (run == 0) & (at < self.filled)
        if is_stored.all():
            return at, *(array[: len(at)] for array in arrays)
        return at[is_stored], *(array[: len(at)][is_stored] for array in arrays)

"""Open X-Embodiment as a stream: sampled in the order of trajectories, never all in memory."""

import sys
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDict, pad

from interop.data import randomness
from interop.datasets.conversion import agreeing
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.openx_episodes import Episode, episodes, trajectory
from interop.samplers import Sampler
from interop.storages import Storage

SHUFFLED = 16  # size of the shuffle buffer, in encoded trajectories


class _NoLengthError(RuntimeError, TypeError):
    """Also a TypeError, after which `list` continues without a length."""


class TrajectoryStream(Storage):
    """Slices of streamed trajectories. After the last archive, and after an error, the stream restarts.

    It has no length and no index. The generator of the buffer seeds all random numbers.

    Args:
        shards: files, or paths on the hub.
        shuffle, num_slices, slice_len: as for `OpenXExperienceReplay`.
        padding: the value behind the end of short trajectories; None raises RuntimeError for these.
    """

    def __init__(
        self,
        shards: Sequence[Path | str],
        shuffle: bool,
        num_slices: int | None,
        slice_len: int | None,
        padding: float | None,
    ) -> None:
        super().__init__(sys.maxsize)
        self.shards = shards
        self.shuffle = shuffle
        self.padding = padding
        self.num_slices = num_slices
        self.slice_len = slice_len
        self._stream: Iterator[TensorDict] = iter(())
        self._count = 0  # trajectories so far
        self._layout: dict[Any, Any] = {}  # dtypes and shapes of all rows

    def slice_length(self, batch_size: int) -> int:
        """Steps per slice of a batch. ValueError if equal slices do not fill it."""
        length = self.slice_len or batch_size // (self.num_slices or 1)
        if length == 0 or batch_size % length or self.num_slices not in (None, batch_size // length):
            raise ValueError(
                f"The batch_size {batch_size} must be divisible by num_slices {self.num_slices} or slice_len "
                f"{self.slice_len} if provided."
            )
        return length

    def trajectories(self, first: int = 0) -> Iterator[TensorDict]:
        """Yield all trajectories once, numbered from `first`."""
        random = self._random()
        order = random.permutation(len(self.shards)) if self.shuffle else range(len(self.shards))
        all_episodes = chain.from_iterable(episodes(self.shards[place]) for place in order)
        encoded = (episode for episode in all_episodes if episode[1])
        yield from map(trajectory, _shuffled(encoded, random) if self.shuffle else encoded, count(first))

    def get(self, index: Any) -> TensorDict:
        """The next slices, with one row per element of the index, whose values are ignored."""
        length = self.slice_length(len(index))
        slices = [self.window(self._next(), length) for _ in range(len(index) // length)]
        return torch.cat([*agreeing(slices, "the stream", self._layout)])

    def window(self, rows: TensorDict, length: int) -> TensorDict:
        """A random window of a trajectory, truncated at its end and padded if the trajectory is shorter."""
        missing = length - len(rows)
        if missing > 0 and self.padding is None:
            raise RuntimeError(
                f"The trajectory length ({len(rows)}) is shorter than the slice length ({length}). Decrease the slice "
                "length or provide a padding value."
            )
        start = 0 if missing >= 0 else self._random().integers(1 - missing)
        out = rows[start : start + length]
        for flag in ("done", "truncated"):
            out["next", flag][-1] = True
        return pad(out, [0, missing], self.padding) if missing > 0 else out

    def _next(self) -> TensorDict:
        for _ in range(2):
            for rows in self._stream:
                self._count += 1
                return rows
            self._stream = self.trajectories(self._count)
        raise CorruptDatasetError(f"there are no trajectories in {', '.join(map(str, self.shards))}")

    def _random(self) -> np.random.Generator:
        return np.random.default_rng(randomness.key(self._rng))

    def __getitem__(self, index: Any) -> NoReturn:
        raise RuntimeError("a stream does not support indexing. Use a downloaded dataset")

    def __len__(self) -> NoReturn:
        raise _NoLengthError("a stream does not have a length. Use a downloaded dataset")


class StreamSampler(Sampler):
    """Reads the next slices of a `TrajectoryStream`."""

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        return torch.arange(batch_size, device="cpu"), {}


def _shuffled(items: Iterator[Episode], random: np.random.Generator) -> Iterator[Episode]:
    """Shuffle items through a buffer of `SHUFFLED` items."""
    waiting = [*islice(items, SHUFFLED)]
    for item in items:
        place = random.integers(SHUFFLED)
        yield waiting[place]
        waiting[place] = item
    for place in random.permutation(len(waiting)):
        yield waiting[place]

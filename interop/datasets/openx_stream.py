"""Open X-Embodiment as a stream: sampled in the order in which trajectories come, and never all in memory."""

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

SHUFFLED = 16  # trajectories that wait, still encoded, in a shuffled stream


class _NoLengthError(RuntimeError, TypeError):
    """`list` asks for a length, and does without one after a TypeError."""


class TrajectoryStream(Storage):
    """Slices of trajectories as they come from archives. After the last archive, and after an error, the first comes again.

    It has no length and no index. All random numbers are seeded by the generator of the buffer.

    Args:
        shards: files, or paths on the hub.
        shuffle, num_slices, slice_len: as for `OpenXExperienceReplay`.
        padding: fills slices behind the end of short trajectories. None: these are a RuntimeError.
    """

    def __init__(
        self, shards: Sequence[Path | str], shuffle: bool, num_slices: int | None, slice_len: int | None,
        padding: float | None,
    ) -> None:  # fmt: skip
        super().__init__(sys.maxsize)
        self.shards, self.shuffle, self.padding = shards, shuffle, padding
        self.num_slices, self.slice_len = num_slices, slice_len
        self._stream: Iterator[TensorDict] = iter(())
        self._count = 0  # of trajectories
        self._layout: dict[Any, Any] = {}  # of the rows of all

    def slice_length(self, batch_size: int) -> int:
        """Steps of each slice of a batch. ValueError where slices of one length do not fill it."""
        length = self.slice_len or batch_size // (self.num_slices or 1)
        if length == 0 or batch_size % length or self.num_slices not in (None, batch_size // length):
            raise ValueError(
                f"The batch_size {batch_size} must be divisible by num_slices {self.num_slices} or slice_len "
                f"{self.slice_len} if provided."
            )
        return length

    def trajectories(self, first: int = 0) -> Iterator[TensorDict]:
        """One pass over all trajectories, with numbers from `first` on."""
        random = self._random()
        order = random.permutation(len(self.shards)) if self.shuffle else range(len(self.shards))
        encoded = chain.from_iterable(episodes(self.shards[place]) for place in order)
        yield from map(trajectory, _mixed(encoded, random) if self.shuffle else encoded, count(first))

    def get(self, index: Any) -> TensorDict:
        """The next slices, as many rows as the index has. Its values make no difference."""
        length = self.slice_length(len(index))
        slices = [self.window(self._next(), length) for _ in range(len(index) // length)]
        return torch.cat([*agreeing(slices, "the stream", self._layout)])

    def window(self, rows: TensorDict, length: int) -> TensorDict:
        """A random window of a trajectory, truncated at its end. Padded behind that where the trajectory is shorter."""
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
    """Asks a `TrajectoryStream` for its next slices."""

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        return torch.arange(batch_size, device="cpu"), {}

    def take_over(self, storage: Storage) -> None:
        """Nothing is stored."""


def _mixed(items: Iterator[Episode], random: np.random.Generator) -> Iterator[Episode]:
    """The items, each after a random delay."""
    waiting = [*islice(items, SHUFFLED)]
    for item in items:
        place = random.integers(SHUFFLED)
        yield waiting[place]
        waiting[place] = item
    for place in random.permutation(len(waiting)):
        yield waiting[place]

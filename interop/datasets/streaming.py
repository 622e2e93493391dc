"""Trajectories that are read as a stream: sampled in the order in which they come, and never all in memory."""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from interop import randomness
from interop.checkpoint.checkpointers import StorageCheckpointerBase
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.rows import leaf
from interop.samplers import Sampler
from interop.storages import Storage

SHUFFLED = 16  # trajectories that wait, still encoded, in a shuffled stream


class _NoLengthError(RuntimeError, TypeError):
    """`list` asks for a length, and does without one after a TypeError."""


class _NotSaved(StorageCheckpointerBase):
    def dumps(self, storage: Any, path: Any) -> None:
        storage.state_dict()  # raises


class TrajectoryStream(Storage):
    """Slices of trajectories as they come from a sequence of archives, and from the first archive again after the last one.

    It has no length and no index. The position in the stream is not saved: a copy begins anew.

    Args:
        shards: names of the archives.
        read: yields the encoded trajectories of an archive.
        decode: the rows [T] of an encoded trajectory, and of the number that it gets.
        shuffle: read the archives in random order, and hold `SHUFFLED` trajectories back, of which a random one is next.
            The random numbers of a pass, those of windows too, are seeded by the generator of the buffer.
        num_slices: of a batch.
        slice_len: steps of a slice. With neither, a batch is one slice.
        pad: fills slices behind the end of short trajectories. None: these are a RuntimeError.
    """

    _default_checkpointer = _NotSaved

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterator[Any]],
        decode: Callable[[Any, int], TensorDict],
        *,
        shuffle: bool,
        num_slices: int | None,
        slice_len: int | None,
        pad: float | None,
    ) -> None:
        super().__init__(sys.maxsize)
        self.shards, self.read, self.decode = shards, read, decode
        self.shuffle, self.num_slices, self.slice_len, self.pad = shuffle, num_slices, slice_len, pad
        self._stream: Iterator[tuple[TensorDict, np.random.Generator]] | None = None

    def slice_length(self, batch_size: int) -> int:
        """Steps of each slice of a batch. ValueError where slices of one length do not fill it."""
        length = self.slice_len or batch_size // (self.num_slices or 1)
        if length == 0 or batch_size % length or self.num_slices not in (None, batch_size // length):
            raise ValueError(
                f"The batch_size {batch_size} must be divisible by num_slices {self.num_slices} or slice_len "
                f"{self.slice_len} if provided."
            )
        return length

    def trajectories(self) -> Iterator[TensorDict]:
        """One pass over all trajectories, each cropped to `slice_len`."""
        for rows, random in self._read_once(0):
            yield rows if self.slice_len is None else _window(rows, random, self.slice_len, self.pad)

    def get(self, index: Any) -> TensorDict:
        """The next slices: as many rows as the index of a `StreamSampler` has. Its values make no difference."""
        length = self.slice_length(len(index))
        slices = [_window(*self._next(), length, self.pad) for _ in range(len(index) // length)]
        try:
            return torch.cat(slices)
        except (KeyError, RuntimeError) as error:
            raise CorruptDatasetError(f"trajectories differ in their keys or shapes: {error}") from error

    def _next(self) -> tuple[TensorDict, np.random.Generator]:
        if self._stream is None:
            self._stream = self._read_forever()
        try:
            return next(self._stream)
        except BaseException:
            self._stream = None  # a generator that has raised is at its end
            raise

    def _read_forever(self) -> Iterator[tuple[TensorDict, np.random.Generator]]:
        count = 0
        while True:
            before = count
            for each in self._read_once(count):
                yield each
                count += 1
            if count == before:
                raise CorruptDatasetError(f"there are no trajectories in {', '.join(map(str, self.shards))}")

    def _read_once(self, first: int) -> Iterator[tuple[TensorDict, np.random.Generator]]:
        random = np.random.default_rng(randomness.key(self._rng))
        order = random.permutation(len(self.shards)) if self.shuffle else range(len(self.shards))
        encoded = chain.from_iterable(self.read(self.shards[place]) for place in order)
        for number, each in enumerate(_mixed(encoded, random) if self.shuffle else encoded, first):
            yield self.decode(each, number), random

    def is_live(self, index: Any) -> bool:
        """Rows belong to the batch alone."""
        return False

    def __getitem__(self, index: Any) -> NoReturn:
        raise RuntimeError("a stream does not support indexing. Use a downloaded dataset")

    def __len__(self) -> NoReturn:
        raise _NoLengthError("a stream does not have a length. Use a downloaded dataset")

    def state_dict(self) -> NoReturn:
        raise NotImplementedError("the position in a stream is not saved. Use a downloaded dataset")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stream": None}


class StreamSampler(Sampler):
    """Asks a `TrajectoryStream` for its next slices. In its index, one number is left out between two slices."""

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        if not isinstance(storage, TrajectoryStream):
            raise TypeError(f"StreamSampler needs a TrajectoryStream, got {type(storage).__name__}")
        rows = torch.arange(batch_size, device="cpu")
        return rows + rows // storage.slice_length(batch_size), {}

    def take_over(self, storage: Storage) -> None:
        """Nothing is stored."""


def _mixed(items: Iterator[Any], random: np.random.Generator) -> Iterator[Any]:
    """The items, each after a random delay."""
    waiting: list[Any] = []
    for item in items:
        if len(waiting) < SHUFFLED:
            waiting.append(item)
            continue
        place = random.integers(SHUFFLED)
        yield waiting[place]
        waiting[place] = item
    for place in random.permutation(len(waiting)):
        yield waiting[place]


def _window(rows: TensorDict, random: np.random.Generator, length: int, pad: float | None) -> TensorDict:
    """A random window of a trajectory, truncated at its end. Padded behind that where the trajectory is shorter."""
    count = len(rows)
    if count < length and pad is None:
        raise RuntimeError(
            f"The trajectory length ({count}) is shorter than the slice length ({length}). Decrease the slice length or "
            "provide a padding value."
        )
    start = int(random.integers(max(count - length, 0) + 1))
    out = rows[start : start + length]
    for flag in ("done", "truncated"):
        out["next", flag][-1] = True
    return out if pad is None or count >= length else _padded(out, length - count, pad)


def _padded(rows: Any, count: int, value: float) -> Any:
    """Tensors, tensordicts or text with rows of this value behind them; text with empty text."""
    if isinstance(rows, Tensor):
        return torch.cat([rows, rows.new_full((count, *rows.shape[1:]), value)])
    if isinstance(rows, NonTensorStack):
        return leaf([*rows.tolist(), *[""] * count])
    entries = {key: _padded(rows.get(key), count, value) for key in rows.keys()}  # noqa: SIM118
    return TensorDict(entries, [len(rows) + count])

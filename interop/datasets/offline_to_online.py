"""Training that begins with a dataset and goes on with new data: batches of both in a ratio, or one buffer with both."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.buffers import ReplayBuffer, TensorDictReplayBuffer
from interop.data.arguments import class_of, not_negative, whole
from interop.datasets.registry import load_dataset
from interop.storages import LazyTensorStorage, Storage


class OfflineToOnlineReplayBuffer:
    """Draws each batch from a dataset and from a buffer of new data, in a fixed ratio.

    `extend` writes to the buffer of new data, the dataset is never changed. A batch has exactly
    `round(offline_fraction * batch_size)` items of the dataset, which come first. While there is no new data, all items are
    of the dataset. Each part is drawn by the sampler of its buffer: "index" of an item is its slot there.

        >>> rb = OfflineToOnlineReplayBuffer(dataset, online_capacity=100_000, offline_fraction=0.25, batch_size=256)
        >>> rb.extend(new_steps)
        >>> batch = rb.sample()  # 64 items of the dataset, 192 new ones
        >>> rb.anneal(step, total_steps)  # fewer items of the dataset as training goes on

    To save the state, save `rb.online_buffer`; `anneal` sets the ratio from the step.

    Args:
        offline_dataset: a buffer, such as a dataset of `interop.datasets`; or a text for `load_dataset`, such as
            "minari:mujoco/hopper/expert-v0".
        online_storage: the storage of the new data.
        online_capacity: instead of it, the capacity of a `LazyTensorStorage`.
        offline_fraction: the part of the dataset in a batch, above 0 and below 1.
        batch_size: of `sample`. Needed for a text.
        transform: called with each batch; returns the batch to use.
        dataset_kwargs: for `load_dataset`.

    TypeError for a dataset of another kind, ValueError for a fraction out of range, and for both or none of
    `online_storage` and `online_capacity`.
    """

    def __init__(
        self,
        offline_dataset: str | ReplayBuffer,
        *,
        online_storage: Storage | None = None,
        online_capacity: int | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        **dataset_kwargs: object,
    ) -> None:
        if (online_storage is None) == (online_capacity is None):
            raise ValueError("give one of online_storage and online_capacity: where new data is stored")
        self._fraction = self._first_fraction = not_negative("offline_fraction", offline_fraction)
        if not 0 < self._fraction < 1:
            raise ValueError(f"offline_fraction must be above 0 and below 1, got {offline_fraction}")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be callable, got {class_of(transform)}")
        self._batch_size = None if batch_size is None else whole("batch_size", batch_size)
        self._transform = transform
        if isinstance(offline_dataset, str) and self._batch_size is None:
            raise ValueError("batch_size is needed for a dataset that is named by a text")
        if not isinstance(offline_dataset, str) and dataset_kwargs:
            raise ValueError(
                f"{', '.join(dataset_kwargs)}: arguments of a dataset are for one that is named by a text; pass them to the "
                "constructor of the dataset"
            )
        self._offline = _opened(offline_dataset, batch_size=self._batch_size, **dataset_kwargs)
        storage = (
            LazyTensorStorage(whole("online_capacity", online_capacity)) if online_storage is None else online_storage
        )
        marks_samples = isinstance(self._offline, TensorDictReplayBuffer)
        self._online = (TensorDictReplayBuffer if marks_samples else ReplayBuffer)(storage=storage)

    @property
    def offline_buffer(self) -> ReplayBuffer:
        """The dataset."""
        return self._offline

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The buffer of new data."""
        return self._online

    @property
    def offline_fraction(self) -> float:
        """The part of the dataset in the next batch."""
        return self._fraction

    def __len__(self) -> int:
        return len(self._offline) + len(self._online)

    def extend(self, data: object) -> Tensor:
        """Write new data. Returns its slots in the buffer of new data."""
        return self._online.extend(data)

    def sample(self, batch_size: int | None = None) -> TensorDictBase | Tensor:
        """A batch: first the items of the dataset, then new ones, `[batch_size]`.

        KeyError where the two have different entries; nothing else is checked.
        """
        size = self._batch_size if batch_size is None else whole("batch_size", batch_size)
        if size is None:
            raise ValueError("no batch size is known: give batch_size to the constructor or to sample()")
        of_dataset = round(self._fraction * size) if len(self._online) else size
        parts = [
            buffer.sample(count)
            for buffer, count in ((self._offline, of_dataset), (self._online, size - of_dataset))
            if count
        ]
        batch = parts[0] if len(parts) == 1 else _joined(*parts)
        return batch if self._transform is None else self._transform(batch)

    def anneal(self, step: int, total_steps: int) -> None:
        """Set the part of the dataset to what a straight line from the first fraction to 0 has at a step.

        Args:
            step: from 0; beyond `total_steps` the part is 0.
            total_steps: when it gets 0, at least 1.
        """
        step, total_steps = whole("step", step, least=0), whole("total_steps", total_steps)
        self._fraction = self._first_fraction * max(0.0, 1.0 - step / total_steps)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(offline={type(self._offline).__name__}, offline_fraction={self._fraction:.3f}, "
            f"online_size={len(self._online)}, batch_size={self._batch_size})"
        )


def prefill_replay_buffer(
    rb: ReplayBuffer, dataset: str | ReplayBuffer, n_samples: int | None = None, chunk_size: int = 1000
) -> ReplayBuffer:
    """Copy items of a dataset into a buffer, each once, in the order in which they are stored. Returns the buffer.

    Items of several lanes follow lane by lane, so that the steps of a trajectory stay together. Transforms of the dataset
    are applied, and the inverse ones of the buffer. "index" of the dataset is left out.

        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=256)
        >>> prefill_replay_buffer(rb, dataset, n_samples=50_000)

    Args:
        rb: the buffer.
        dataset: a buffer, or a text for `load_dataset`.
        n_samples: how many of the first items; all by default, and if there are fewer.
        chunk_size: items of one read and write.
    """
    if not isinstance(rb, ReplayBuffer):
        raise TypeError(f"rb must be a ReplayBuffer, got {class_of(rb)}")
    chunk_size = whole("chunk_size", chunk_size)
    count = None if n_samples is None else whole("n_samples", n_samples, least=0)
    source = _opened(dataset, batch_size=chunk_size)
    count = len(source) if count is None else min(count, len(source))
    shape = source.storage.shape if source.storage.ndim > 1 else None
    for start in range(0, count, chunk_size):
        slots = torch.arange(start, min(start + chunk_size, count))
        if shape is None:
            rows = source[slots]
        else:
            *lanes, time = torch.unravel_index(slots, (*shape[1:], shape[0]))
            index = [time, *lanes]  # as the storage has them; the buffer swaps two dims
            index[0], index[source.dim_extend] = index[source.dim_extend], index[0]
            rows = source[tuple(index)]
        if isinstance(rows, TensorDictBase) and isinstance(source, TensorDictReplayBuffer):
            rows = rows.exclude("index")
        rb.extend(rows)
    return rb


def _opened(dataset: object, **arguments: object) -> ReplayBuffer:
    """The buffer, or the dataset that a text names."""
    if isinstance(dataset, str):
        dataset = load_dataset(dataset, **arguments)
    if not isinstance(dataset, ReplayBuffer):
        raise TypeError(f"a dataset is a ReplayBuffer or a text such as 'minari:NAME', got {class_of(dataset)}")
    return dataset


def _joined(offline: object, online: object) -> TensorDictBase | Tensor:
    """One batch of two. KeyError where they have different entries, TypeError for other than tensors and tensordicts."""
    if isinstance(offline, TensorDictBase) and isinstance(online, TensorDictBase):
        keys = [set(batch.keys(True, True)) for batch in (offline, online)]
        if keys[0] != keys[1]:
            only = [", ".join(sorted(map(repr, one - other))) or "none" for one, other in (keys, keys[::-1])]
            raise KeyError(
                f"the dataset and the new data have different entries: only in the dataset {only[0]}; only in the new data "
                f"{only[1]}. Select or rename entries by a transform of one of the two buffers"
            )
        moved: TensorDictBase = online if offline.device == online.device else online.to(offline.device)
        return torch.cat([offline, moved])
    both = [each for each in (offline, online) if isinstance(each, Tensor)]
    if len(both) == 2:
        return torch.cat(both)
    raise TypeError(f"items must be tensordicts or tensors, got {class_of(offline)} and {class_of(online)}")

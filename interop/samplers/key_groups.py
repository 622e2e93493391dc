"""Balanced groups of stored items that share a key, such as the prompt: all items of a key are one group."""

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey

from interop.data import randomness
from interop.data.arguments import whole
from interop.data.keys import checked_key
from interop.samplers.drawing import DrawingSampler
from interop.samplers.item_groups import ids_of
from interop.samplers.prompt_groups import PromptGroupSampler
from interop.samplers.slot_draws import SlotDraws, stored
from interop.storages import Storage, columns
from interop.writers import Writer

STRATEGIES = ("random", "recency", "reward", "variance")


class KeyGroupSampler(DrawingSampler):
    """Draws as many items of each of several groups; the stored items with one value of a key are a group.

    `PromptGroupSampler(num_groups=...)` and `PromptGroupSampler(samples_per_group=...)` make one, as in torchrl. A batch is
    group after group. Items are never used up. Groups are drawn uniformly, without replacement. Where a group has fewer
    items than are asked for, or where there are fewer groups, all of them are drawn and the others with replacement; the
    first such draw warns. A draw costs O(batch), with "variance" O(items of the groups); the first one after a write or an
    edit O(stored items * log).

    Args:
        num_groups, samples_per_group: one of them; the other follows from the batch size, which must be a multiple.
        group_key: the entry with the key of an item, one whole number or text.
        strategy: which items of a group: "random" ones, the newest ("recency"), those with the highest "reward", or those
            whose rewards have the highest "variance", of several such those with the highest sum.
        reward_key: the rewards of "reward" and "variance": the mean over the dims of each item counts.
        cache_groups: accepted; groups are always up to date.
    """

    num_groups: int | None
    samples_per_group: int | None
    group_key: NestedKey
    strategy: str
    reward_key: NestedKey
    cache_groups: bool

    def __init__(
        self,
        *,
        num_groups: int | None = None,
        samples_per_group: int | None = None,
        group_key: NestedKey = "query",
        strategy: str = "random",
        reward_key: NestedKey = ("next", "reward"),
        cache_groups: bool = True,
    ) -> None:
        if (num_groups is None) == (samples_per_group is None):
            raise TypeError(f"give one of num_groups and samples_per_group, got {num_groups} and {samples_per_group}")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
        self.num_groups = None if num_groups is None else whole("num_groups", num_groups)
        self.samples_per_group = None if samples_per_group is None else whole("samples_per_group", samples_per_group)
        self.group_key = checked_key("group_key", group_key)
        self.strategy = strategy
        self.reward_key = checked_key("reward_key", reward_key)
        self.cache_groups = bool(cache_groups)
        self._library_draws = KeyGroupDraws(
            self.num_groups, self.samples_per_group, self.group_key, strategy, self.reward_key
        )

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        if expands:
            raise ValueError("a sampler of groups takes no sample_unit, which would expand items into windows")
        if self.strategy == "recency" and not writer.keeps_order:
            raise TypeError(
                f"strategy='recency' needs the order of writing, which a {type(writer).__name__} does not keep"
            )

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "num_groups", self.num_groups
        yield "samples_per_group", self.samples_per_group
        yield "group_key", repr(self.group_key)
        yield "strategy", repr(self.strategy)


class KeyGroupDraws(SlotDraws):
    """The draws of `KeyGroupSampler`, with its arguments. The groups are derived from the stored items."""

    def __init__(
        self, num_groups: int | None, samples: int | None, key: NestedKey, strategy: str, reward_key: NestedKey
    ) -> None:
        self._num_groups = num_groups
        self._samples = samples
        self._key = key
        self._strategy = strategy
        self._reward_key = reward_key
        self._warned = False
        self.clear()

    def clear(self) -> None:
        self._of: weakref.ref[Storage] | None = None
        self._counts: tuple[tuple[int, int, int], int] | None = None
        self._groups: list[np.ndarray] = []  # slots, from the oldest to the newest

    def check_batch_size(self, batch_size: int) -> None:
        name, size = ("num_groups", self._num_groups) if self._samples is None else ("samples_per_group", self._samples)
        if size is not None and batch_size % size:
            raise ValueError(f"batch_size must be a multiple of {name}={size}, got {batch_size}")

    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        self.check_batch_size(batch_size)
        groups = self._found(storage)
        count = batch_size // self._samples if self._samples else self._num_groups or 0
        rng = randomness.generator_of(key)
        chosen = [groups[place] for place in self._some(np.arange(len(groups)), count, rng)]
        parts = [self._within(storage, group, batch_size // max(count, 1), rng) for group in chosen]
        return torch.from_numpy(np.concatenate([*parts, np.zeros(0, np.int64)])), {}

    def _found(self, storage: Storage) -> list[np.ndarray]:
        """The groups, up to date. O(items * log) after a write or an edit."""
        size = stored(storage)
        counts = storage.ring.counts, size
        known = self._of is not None and self._of() is storage and counts == self._counts
        if known and storage.contents.tracks_writes:
            return self._groups
        if storage.ndim > 1:
            raise RuntimeError(
                f"groups of items that share a key need a storage of one item dim, got ndim={storage.ndim}"
            )
        slots = storage.contents.rows_in_order()
        ids = np.array(ids_of(storage, self._key, slots))
        order = ids.argsort(kind="stable")
        ids = ids[order]
        self._groups = np.split(slots[order], (ids[1:] != ids[:-1]).nonzero()[0] + 1)
        self._of, self._counts = weakref.ref(storage), counts
        return self._groups

    def _within(self, storage: Storage, group: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` slots of a group."""
        if self._strategy == "random" or count >= len(group):
            return self._some(group, count, rng)
        if self._strategy == "recency":
            return group[len(group) - count :]
        rewards = columns.read(storage, self._reward_key, group).reshape(len(group), -1).double().mean(1).cpu().numpy()
        order = rewards.argsort(kind="stable")[::-1]  # the highest first
        return group[order[:count] if self._strategy == "reward" else most_varied(rewards, order, count)]

    def _some(self, slots: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` of them, each at most once if there are as many."""
        if count <= len(slots):
            return rng.choice(slots, count, replace=False)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{count} of {len(slots)} were asked for: the others are drawn with replacement. Write more items, or use a "
                "lower num_groups or samples_per_group",
                UserWarning,
                stacklevel=2,
            )
        return np.concatenate((rng.permutation(slots), rng.choice(slots, count - len(slots))))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of": None, "_counts": None, "_groups": []}


def most_varied(rewards: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` rewards with the highest variance; of several such sets that with the highest sum.

    It has the highest ones and the lowest ones. `order` sorts the rewards, the highest first.
    """
    sets = [np.concatenate((order[:high], order[len(order) - (count - high) :])) for high in range(count + 1)]
    return max(sets, key=lambda places: (round(float(rewards[places].var()), 12), float(rewards[places].sum())))


PromptGroupSampler.made_instead = (
    (lambda arguments: not {"num_groups", "samples_per_group"}.isdisjoint(arguments), KeyGroupSampler),
)

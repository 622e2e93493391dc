"""Draws of whole groups of items."""

import heapq
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey

from fbuf.samplers import Chances, Reason
from interop.data import randomness
from interop.host.threads import uninterrupted
from interop.samplers.groups import Group
from interop.samplers.item_groups import ItemGroups
from interop.samplers.prompt_group import OVERWRITTEN, PromptGroup
from interop.samplers.reward_spread import Judged, RewardSpread
from interop.samplers.slot_draws import SlotDraws, stored
from interop.samplers.staleness import StalenessAwareSampler
from interop.samplers.staleness_draws import Weighed
from interop.storages import Storage
from interop.storages.all_or_nothing import Undoable

_ROOM = 1_000  # groups that are not ready any more, whose rewards are still known


class GroupDraws(SlotDraws):
    """Draws groups that are ready and without replacement: uniformly, or by the weights of their staleness and rewards.

    Args:
        groups: of the storage.
        staleness: defines the staleness of rows; None for any.
        spread: says which groups teach something; None for all.
    """

    has_state = True

    def __init__(
        self, groups: ItemGroups, staleness: StalenessAwareSampler | None, spread: RewardSpread | None = None
    ) -> None:
        self._groups = groups
        self._staleness = staleness
        self._spread = spread
        self._measured: dict[Group, tuple[float, float]] = {}  # of groups that were ready
        self._measured_at: tuple[Callable[[], Storage | None], int] | None = None  # a storage, and its version

    @property
    def settings(self) -> tuple[Any, ...]:
        return () if self._staleness is None else self._staleness.draws.all_settings

    @property
    def versions(self) -> dict[NestedKey, int]:
        return {} if self._staleness is None else self._staleness.draws.versions

    @property
    def undoable(self) -> Undoable | None:
        return self._groups

    def check_batch_size(self, batch_size: int) -> None:
        size = self._groups.size
        if size is not None and batch_size % size:
            raise ValueError(f"batch_size must be a multiple of group_size={size}, got {batch_size}")

    def most_items(self, storage: Storage, batch_size: int) -> int:
        """The completions of the `batch_size` largest groups that are complete. O(complete groups) where sizes differ."""
        if self._groups.size is not None:
            return batch_size
        self._groups.try_sync(storage)
        largest = heapq.nlargest(batch_size, (group.size for group in self._groups.ready))
        return max(batch_size, sum(largest))

    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        groups = self._groups
        self.check_batch_size(batch_size)
        groups.refuse_forked_child()
        size = stored(storage)
        groups.sync(storage)
        count = batch_size // (groups.size or 1)
        ready = groups.ready
        if count > len(ready):
            of = "" if groups.size is None else f" of {groups.size} completions"
            raise RuntimeError(
                f"Cannot sample {count} groups: {len(ready)} groups{of} are ready, of {size} "
                "stored items. Call extend() first, or use a smaller batch_size."
            )
        rng = randomness.generator_of(key)
        info = dict[Any, Any]()
        drawable = len(ready)
        if self._staleness is None and self._spread is None:
            chosen = [ready[place] for place in rng.choice(len(ready), count, replace=False)]
        else:
            chosen, drawable = self._weighed(storage, count, rng, info)
        info["group_number"] = _per_row(chosen, [group.number for group in chosen])
        if groups.most is not None:
            with uninterrupted():  # memory and file agree after a signal
                groups.use(chosen)
                if self._spread is not None:
                    drawable -= sum(group.place < 0 for group in chosen)
                    groups.ran_out = drawable < count
            info["group_uses"] = _per_row(chosen, [group.uses for group in chosen])
        return torch.from_numpy(_rows_of(chosen).slots), info

    def _weighed(
        self, storage: Storage, count: int, rng: np.random.Generator, info: dict[Any, Any]
    ) -> tuple[list[Group], int]:
        """Groups drawn by the weights of their stalest row and of their rewards, and how many have such a weight."""
        ready = self._groups.ready
        if not count:
            if self._staleness is not None:
                info["staleness"] = torch.zeros(0)
            return [], 0
        weights = np.ones(len(ready))
        judged = None
        of_rows, rows = None, GroupRows(np.zeros(0, np.int64), np.zeros(0, np.int64))
        if self._spread is not None:
            judged = self._judged(self._spread, storage, ready)
            weights = judged.weights
        if self._staleness is not None:
            rows = _rows_of(ready)
            of_rows = self._staleness.staleness_of(storage, rows.slots)
            weights = weights * self._staleness.weighed(np.maximum.reduceat(of_rows, rows.starts), "groups").weights
        heavy = np.flatnonzero(weights)
        if count > heavy.size:
            raise RuntimeError(self._too_few(count, len(ready), heavy.size, judged))
        places = Weighed(weights, weights.cumsum(), heavy).draw(count, rng)
        if of_rows is not None:
            parts = [of_rows[rows.starts[place] : rows.starts[place] + ready[place].size] for place in places]
            info["staleness"] = torch.from_numpy(np.concatenate(parts).astype(np.float32))
        return [ready[place] for place in places], heavy.size

    def _too_few(self, count: int, ready: int, heavy: int, judged: Judged | None) -> str:
        """The text of the error where fewer groups than are asked for have a weight above zero."""
        because = []
        if self._staleness is not None:
            version, most = self._staleness.consumer_version, self._staleness.max_staleness
            because.append(f"consumer_version={version} and max_staleness={most}")
        if judged is not None:
            found = Counter(filter(None, judged.reasons))
            because.append(", ".join(f"{found[reason]} {reason}" for reason in found) or "no group without spread")
        return f"Cannot sample {count} groups: {heavy} of {ready} have a weight above zero at {'; '.join(because)}"

    def _judged(self, spread: RewardSpread, storage: Storage, groups: Sequence[Group]) -> Judged:
        """What is known of the rewards of complete groups. O(groups), and O(completions) of those that are new.

        All are new after an edit.
        """
        version = storage.ring.version
        if self._measured_at is None or self._measured_at[0]() is not storage or self._measured_at[1] != version:
            self._measured = {}
        elif len(self._measured) > 2 * len(groups) + _ROOM:
            self._measured = {group: self._measured[group] for group in groups if group in self._measured}
        self._measured_at = weakref.ref(storage), version
        measured = self._measured
        new = [group for group in groups if group not in measured]
        if new:
            found = spread.measured(storage, *_rows_of(new))
            measured.update(zip(new, map(tuple, found.tolist()), strict=True))
        flat = itertools.chain.from_iterable(map(measured.__getitem__, groups))
        return spread.judged(np.fromiter(flat, np.float64, 2 * len(groups)).reshape(-1, 2))

    def drawable(self, storage: Storage) -> list[Group]:
        """The groups that are ready, and whose rewards have a weight; of any staleness. O(groups) with a `spread`."""
        ready = self._groups.ready
        if self._spread is None or not ready:
            return ready
        weights = self._judged(self._spread, storage, ready).weights
        return [group for group, weight in zip(ready, weights, strict=True) if weight > 0]

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        size = len(storage)
        probability, reason = np.zeros(size), np.full(size, Reason.INCOMPLETE, np.uint8)
        if not size:
            return Chances(probability, reason, of_groups=True)
        self._groups.sync(storage)
        reason[self._groups.groups.used_up()] = Reason.CONSUMED
        ready = self._groups.ready
        rows = _rows_of(ready)
        weights, why = np.ones(len(ready)), np.full(len(ready), Reason.ZERO_WEIGHT, np.uint8)
        if self._staleness is not None and ready:
            law = self._staleness.law_of(
                np.maximum.reduceat(self._staleness.staleness_of(storage, rows.slots), rows.starts)
            )
            assert law.probability is not None
            weights = law.probability
            why = np.where(weights > 0, why, law.reason)
        if self._spread is not None:
            weights = weights * self._judged(self._spread, storage, ready).weights
        law = Chances.of(weights, why)
        assert law.probability is not None
        counts = [group.size for group in ready]
        probability[rows.slots] = np.repeat(law.probability, counts)
        reason[rows.slots] = np.repeat(law.reason, counts)
        return Chances(probability, reason, of_groups=True)

    def records(self, storage: Storage) -> list[PromptGroup]:
        """All groups with a stored completion, in the order in which they were begun. O(rows). Errors as in a draw."""
        self._groups.sync(storage)
        groups = self._groups.groups
        every = groups.every()
        reasons = [self._reason(group) for group in every]
        ready = [at for at, reason in enumerate(reasons) if reason is None]
        staleness: list[float | None] = [None] * len(every)
        spreads: list[float | None] = [None] * len(every)
        rows = _rows_of(every)
        if self._spread is not None and ready:
            judged = self._judged(self._spread, storage, [every[at] for at in ready])
            for at, std, reason, weight in zip(ready, judged.std, judged.reasons, judged.weights, strict=True):
                spreads[at] = float(std)
                reasons[at] = Reason.ZERO_WEIGHT.label if reason is None and weight == 0 else reason
        if self._staleness is not None and every:
            of_groups = np.maximum.reduceat(self._staleness.staleness_of(storage, rows.slots), rows.starts)
            staleness = of_groups.tolist()
            codes = self._staleness.law_of(of_groups[ready]).reason.tolist()
            for at, code in zip(ready, codes, strict=True):
                if code != Reason.NONE:
                    reasons[at] = Reason(code).label
        return [
            PromptGroup(group.number, group.id, tuple(group.slots), group.uses, old, reason, std)
            for group, old, reason, std in zip(every, staleness, reasons, spreads, strict=True)
        ]

    def _reason(self, group: Group) -> str | None:
        """Why a group cannot be drawn, of any staleness."""
        if group.place >= 0:
            return None
        if group.is_whole:
            return Reason.CONSUMED.label
        return Reason.INCOMPLETE.label if self._groups.groups.is_open(group) else OVERWRITTEN

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_measured": {}, "_measured_at": None}


class GroupRows(NamedTuple):
    """The rows of some groups, one group after the other.

    Attributes:
        slots: int64 [rows].
        starts: where each group begins, int64 [groups].
    """

    slots: np.ndarray
    starts: np.ndarray


def _rows_of(groups: Sequence[Group]) -> GroupRows:
    flat = itertools.chain.from_iterable(group.slots for group in groups)  # a tenth of the time of nested lists
    counts = np.fromiter((len(group.slots) for group in groups), np.int64, len(groups))
    return GroupRows(np.fromiter(flat, np.int64), counts.cumsum() - counts)


def _per_row(groups: Sequence[Group], values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.array(values, np.int64), [group.size for group in groups]))

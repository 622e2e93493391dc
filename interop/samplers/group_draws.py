"""Draws of whole groups of items."""

import contextlib
import itertools
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey

from fbuf.samplers import Chances, Reason
from interop.data import randomness
from interop.host.threads import uninterrupted
from interop.samplers.groups import Group
from interop.samplers.item_groups import ItemGroups
from interop.samplers.prompt_group import OVERWRITTEN, PromptGroup
from interop.samplers.slot_draws import SlotDraws, stored
from interop.samplers.staleness import StalenessAwareSampler
from interop.storages import Storage
from interop.storages.all_or_nothing import Undoable


class GroupDraws(SlotDraws):
    """Draws groups that are ready, uniformly and without replacement, or by the weight of their stalest row.

    Args:
        groups: of the storage.
        staleness: defines the staleness of rows; None for uniform draws.
    """

    has_state = True

    def __init__(self, groups: ItemGroups, staleness: StalenessAwareSampler | None) -> None:
        self._groups = groups
        self._staleness = staleness

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
        if batch_size % size:
            raise ValueError(f"batch_size must be a multiple of group_size={size}, got {batch_size}")

    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        groups = self._groups
        self.check_batch_size(batch_size)
        groups.refuse_forked_child()
        size = stored(storage)
        groups.sync(storage)
        count = batch_size // groups.size
        ready = groups.ready
        if count > len(ready):
            raise RuntimeError(
                f"Cannot sample {count} groups: {len(ready)} groups of {groups.size} completions are ready, of {size} "
                "stored items. Call extend() first, or use a smaller batch_size."
            )
        rng = randomness.generator_of(key)
        info = dict[Any, Any]()
        if self._staleness is None:
            chosen = [ready[place] for place in rng.choice(len(ready), count, replace=False)]
        else:
            chosen, info["staleness"] = self._fresh(self._staleness, storage, count, rng)
        info["group_number"] = self._per_row([group.number for group in chosen])
        if groups.most is not None:
            with uninterrupted():  # memory and file agree after a signal
                groups.use(chosen)
            info["group_uses"] = self._per_row([group.uses for group in chosen])
        return torch.from_numpy(self._slots_of(chosen).reshape(-1)), info

    def _fresh(
        self, staleness: StalenessAwareSampler, storage: Storage, count: int, rng: np.random.Generator
    ) -> tuple[list[Group], torch.Tensor]:
        """Groups drawn by the weight of their stalest row, and the staleness of their rows."""
        ready = self._groups.ready
        if not count:
            return [], torch.zeros(0)
        of_rows = staleness.staleness_of(storage, self._slots_of(ready))
        weighed = staleness.weighed(of_rows.max(1), "groups")
        if count > weighed.heavy.size:
            raise RuntimeError(
                f"Cannot sample {count} groups: {weighed.heavy.size} of {len(ready)} have a weight above zero at "
                f"consumer_version={staleness.consumer_version} and max_staleness={staleness.max_staleness}"
            )
        places = weighed.draw(count, rng)
        return [ready[place] for place in places], torch.from_numpy(of_rows[places].reshape(-1).astype(np.float32))

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        size = len(storage)
        probability, reason = np.zeros(size), np.full(size, Reason.INCOMPLETE, np.uint8)
        if not size:
            return Chances(probability, reason, of_groups=True)
        self._groups.sync(storage)
        reason[self._groups.groups.used_up()] = Reason.CONSUMED
        slots = self._slots_of(self._groups.ready)
        if self._staleness is None or not len(slots):
            law = Chances.of(np.ones(len(slots)), Reason.NONE)
        else:
            law = self._staleness.law_of(self._staleness.staleness_of(storage, slots).max(1))
        assert law.probability is not None
        probability[slots], reason[slots] = law.probability[:, None], law.reason[:, None]
        return Chances(probability, reason, of_groups=True)

    def records(self, storage: Storage) -> list[PromptGroup]:
        """All groups with a stored completion, in the order in which they were begun. O(rows). Errors as in a draw."""
        self._groups.sync(storage)
        groups = self._groups.groups
        every = groups.every()
        reasons = [self._reason(group) for group in every]
        staleness: list[float | None] = [None] * len(every)
        if self._staleness is not None and every:
            slots = np.array([slot for group in every for slot in group.slots])
            of_rows = self._staleness.staleness_of(storage, slots)
            starts = np.cumsum([0] + [len(group.slots) for group in every[:-1]])
            of_groups = np.maximum.reduceat(of_rows, starts)
            staleness = of_groups.tolist()
            ready = [at for at, reason in enumerate(reasons) if reason is None]
            for at, weight in zip(ready, self._weights(self._staleness, of_groups[ready]), strict=True):
                if weight == 0:
                    most = self._staleness.max_staleness
                    reason = Reason.STALE if 0 <= most < of_groups[at] else Reason.ZERO_WEIGHT
                    reasons[at] = reason.label
        return [
            PromptGroup(group.number, group.id, tuple(group.slots), group.uses, old, reason)
            for group, old, reason in zip(every, staleness, reasons, strict=True)
        ]

    def _reason(self, group: Group) -> str | None:
        """Why a group cannot be drawn, of any staleness."""
        if group.place >= 0:
            return None
        if len(group.slots) == self._groups.size:
            return Reason.CONSUMED.label
        return Reason.INCOMPLETE.label if self._groups.groups.is_open(group) else OVERWRITTEN

    @staticmethod
    def _weights(staleness: StalenessAwareSampler, of_groups: np.ndarray) -> np.ndarray:
        """The weights of groups; 0 for all where none can be drawn."""
        if of_groups.size:
            with contextlib.suppress(RuntimeError):
                return staleness.weighed(of_groups, "groups").weights
        return np.zeros(of_groups.size)

    def _slots_of(self, groups: list[Group]) -> np.ndarray:
        """[groups, group_size]."""
        flat = itertools.chain.from_iterable(group.slots for group in groups)  # a tenth of the time of nested lists
        return np.fromiter(flat, np.int64).reshape(-1, self._groups.size)

    def _per_row(self, values: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.int64), self._groups.size))

"""The samplers of several buffers, drawn from together."""

from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from interop.checkpoint.members import loading_dicts, loading_members, saved_members
from interop.checkpoint.state import Entries, LoadOptions, Together, as_tensors
from interop.data.class_names import class_of
from interop.data.members import of_kind, picked, routed
from interop.samplers.member_choice import MemberChoice
from interop.samplers.sampler import Sampler, draw_by
from interop.storages import Storage, StorageEnsemble


class SamplerEnsemble(Sampler):
    """Chooses members, then has the sampler of each draw an equal part of the batch. `ensemble[i]` is one of them.

    Args:
        samplers: the members.
        p: how often each is chosen, in proportion; equally often by default.
        sample_from_all: every member gives a part of each batch, in order, instead.
        num_buffer_sampled: parts of a batch, each of a member chosen anew; as many as members by default. Has no effect
            with `sample_from_all`.
    """

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        self.members: tuple[Sampler, ...] = of_kind("sampler", samplers, Sampler, SamplerEnsemble)
        self.choice = MemberChoice.of(len(samplers), p, sample_from_all, num_buffer_sampled)
        self.takes_priorities = any(sampler.takes_priorities for sampler in self.members)

    @classmethod
    def over(cls, samplers: Sequence[Sampler], choice: MemberChoice) -> "SamplerEnsemble":
        """An ensemble of these samplers; settings of `choice` are its own."""
        made = cls(*samplers)
        made.choice = choice
        return made

    @property
    def sample_from_all(self) -> bool:
        """Whether every member gives a part of each batch."""
        return self.choice.from_all

    @property
    def num_buffer_sampled(self) -> int:
        """Parts of a batch. May be set; None sets it back to the number of members."""
        return self.choice.parts

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        self.choice.parts = value

    @property
    def p(self) -> Tensor | None:
        """How often each member is chosen, of sum 1; None for equally often. May be set."""
        return self.choice.p

    @p.setter
    def p(self, value: Sequence[float] | Tensor | None) -> None:
        self.choice.p = value

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[TensorDictBase, TensorDictBase]:
        """A tensordict of "index" [n, k] and "buffer_ids" [n], and one [n] of the infos of the samplers.

        n is `num_buffer_sampled`, k the items of each part. The index is [n, k, ndim] where slots are coordinates, nested
        where parts have different lengths.

        TypeError for a storage that is not an ensemble; ValueError for one of another length and for a batch that cannot be
        divided by n; RuntimeError where a member that may be chosen has nothing stored.
        """
        storages = self._storages_of(storage)
        each = self.choice.part_of(batch_size)
        self.choice.refuse_empty(map(len, storages))
        rows, infos = [], []
        for place, own_key in self.choice.choose(key):
            with storages[place].lock.held():
                slots, info = draw_by(self.members[place], storages[place], each, own_key)
            rows.append((place, torch.stack(slots, -1) if isinstance(slots, tuple) else torch.as_tensor(slots)))
            infos.append(TensorDict(info, []))
        said: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(infos, 0)
        return _joined(rows), said

    def _storages_of(self, storage: Storage | None) -> tuple[Storage, ...]:
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"a SamplerEnsemble needs storage=..., its StorageEnsemble, got {class_of(storage)}")
        if len(storage) != len(self):
            raise ValueError(f"there are {len(self)} samplers for {len(storage)} storages")
        return storage.members

    def __getitem__(self, index: Any) -> Any:
        """A member for an int, this ensemble for `:`, an ensemble of some with their p for any other index."""
        return picked(index, self.members, self, self._of_some)

    def _of_some(self, places: Sequence[int]) -> "SamplerEnsemble":
        return self.over([self.members[place] for place in places], self.choice.over(places))

    def __len__(self) -> int:
        return len(self.members)

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Give items of a sample new priorities; those of members without priorities have none.

        Args:
            index: the "index" of a sample, or what `sample` returned.
            priority: one value for all, or one for each slot of the index.
            storage: the ensemble that was drawn from.
        """
        storages = self._storages_of(storage)
        if not self.takes_priorities:
            super().update_priority(index, priority, storage=storage)
            return
        for place, slots, values in self.routed(index, priority, storages):
            with storages[place].lock.held():
                self.members[place].update_priority(slots, values, storage=storages[place])

    def routed(self, index: Any, priority: Any, storages: Sequence[Storage]) -> list[tuple[int, Tensor, Any]]:
        """The members with priorities that an index names, their slots, and the priorities given for these.

        RuntimeError for another number of priorities than of slots, IndexError for slots that are not stored, and what the
        samplers raise for priorities that they refuse.
        """
        given = priority
        if not isinstance(priority, int | float):
            given = priority.detach() if isinstance(priority, Tensor) else torch.from_numpy(np.asarray(priority))
        routes = list(routed(index, [each.ndim for each in storages]))
        count = sum(entries.numel() for _, entries, _ in routes)
        for_all = not isinstance(given, Tensor) or given.numel() == 1
        if not for_all and given.numel() != count:
            raise RuntimeError(
                "priority should be a number or an iterable of the same length as index: "
                f"got {given.numel()} priorities for {count} indices"
            )
        found = []
        for place, entries, slots in routes:
            if self.members[place].takes_priorities:
                values = given if for_all else given.reshape(-1)[entries.to(given.device)]
                self.members[place].checked(values)
                refuse_unstored(slots, storages[place], place)
                found.append((place, slots, values))
        return found

    # ------------------------------------------------------------------ checkpoints

    def saved_state(self) -> dict[str, Any]:
        return {"choice": self.choice.saved(), "members": saved_members(self.members)}

    def with_state(self, entries: Entries, options: LoadOptions) -> Callable[[], None]:
        chosen = self.choice.restoring(entries.fields("choice"), entries)
        return Together((loading_members(entries, self.members, options), chosen))

    def state_dict(self) -> dict[str, Any]:
        """The state of each member under "0", "1" and so on, and the settings."""
        members = {str(place): sampler.state_dict() for place, sampler in enumerate(self.members)}
        return {**members, "_choice": as_tensors(self.choice.saved())}

    def with_state_dict(self, given: Any, options: LoadOptions) -> Callable[[], None]:
        rest, members = loading_dicts(self, given, self.members)
        entries, puts = Entries(rest, self), [members]
        if "_choice" in entries:
            puts.append(self.choice.restoring(entries.fields("_choice"), entries))
        entries.settle()
        return Together(puts)

    def _empty(self) -> NoReturn:
        raise NotImplementedError("an ensemble of samplers is not reset as a whole: empty the members")

    def __repr__(self) -> str:
        body = f"samplers=({', '.join(map(repr, self.members))})"
        return f"{type(self).__name__}(\n{indent(body, '    ')})"


def _joined(rows: Sequence[tuple[int, Tensor]]) -> TensorDictBase:
    """The members and slots of all parts."""
    widest = max(slots.ndim for _, slots in rows)
    rows = [(place, slots.reshape(*slots.shape, *(1 for _ in range(widest - slots.ndim)))) for place, slots in rows]
    ids = torch.tensor([place for place, _ in rows], device="cpu")
    slots = [each for _, each in rows]
    if len({each.shape for each in slots}) == 1:
        return TensorDict({"index": torch.stack(slots), "buffer_ids": ids}, [len(rows)])
    if len({each.shape[1:] for each in slots}) == 1:
        nested = torch.nested.nested_tensor(slots, layout=torch.jagged)
        return TensorDict({"index": nested, "buffer_ids": ids}, [len(rows)])
    apart = [TensorDict({"index": each, "buffer_ids": id_}, []) for each, id_ in zip(slots, ids, strict=True)]
    stacked: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(apart, 0)
    return stacked


def refuse_unstored(slots: Tensor, storage: Storage, place: int) -> None:
    """IndexError for a slot past the items that member `place` stores."""
    ends = [len(storage)] if storage.ndim == 1 else list(storage.shape or [])
    columns = slots[:, None] if slots.ndim == 1 else slots
    for column, end in zip(columns.unbind(-1), ends, strict=True):
        if column.numel() and int(column.max()) >= end:
            raise IndexError(f"slot {int(column.max())} is out of range: member {place} has {end} of them stored")

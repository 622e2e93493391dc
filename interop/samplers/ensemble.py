"""The samplers of several buffers, drawn from together."""

import copy
from collections.abc import Iterable, Sequence
from textwrap import indent
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from interop.members import is_all, named, of_kind, refuse_unstored, routed, unwrapped
from interop.numbers import whole
from interop.samplers.sampler import Sampler
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
        self._samplers: tuple[Sampler, ...] = of_kind("sampler", samplers, Sampler, SamplerEnsemble)
        self._p_dtype = "float32"
        self._sample_from_all = bool(sample_from_all)
        self.num_buffer_sampled = num_buffer_sampled
        self.p = p

    @property
    def sample_from_all(self) -> bool:
        """Whether every member gives a part of each batch."""
        return self._sample_from_all

    @property
    def num_buffer_sampled(self) -> int:
        """Parts of a batch. None sets it back to the number of members."""
        if self._sample_from_all or self._num_buffer_sampled is None:
            return len(self._samplers)
        return self._num_buffer_sampled

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        self._num_buffer_sampled = None if value is None else whole("num_buffer_sampled", value)

    @property
    def p(self) -> Tensor | None:
        """How often each member is chosen, of sum 1; None for equally often. May be set.

        ValueError for negative or not finite numbers, another number of them, or zeros only.
        """
        return None if self._p is None else torch.from_numpy(self._p.astype(self._p_dtype))

    @p.setter
    def p(self, value: Sequence[float] | Tensor | None) -> None:
        if value is None:
            self._p, self._upper = None, _upper(np.ones(len(self._samplers)))
            return
        if self._sample_from_all:
            raise RuntimeError("p and sample_from_all exclude each other: all members are sampled from")
        p = _shares(value, len(self._samplers))
        self._p, self._upper = p, _upper(p)
        self._p_dtype = "float64" if isinstance(value, Tensor) and value.dtype == torch.float64 else "float32"

    # ------------------------------------------------------------------ draws

    def sample(self, storage: Storage, batch_size: int) -> tuple[TensorDictBase, TensorDictBase]:
        """A tensordict of "index" [n, k] and "buffer_ids" [n], and one [n] of what the samplers say.

        n is `num_buffer_sampled`, k what each part has of the batch. The index is [n, k, ndim] where slots are
        coordinates, nested where parts have different lengths.

        TypeError for a storage that is not an ensemble; ValueError for one of another length and for a batch that cannot be
        divided by n; RuntimeError where a member that may be chosen has nothing stored.
        """
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"a SamplerEnsemble draws from a StorageEnsemble, got {type(storage).__name__}")
        if len(storage) != len(self):
            raise ValueError(f"there are {len(self)} samplers for {len(storage)} storages")
        each = self.part_of(batch_size)
        self.refuse_empty(storage._storages)
        rows, infos = [], []
        for place in self.choose():
            member = storage._storages[place]
            with member._access:
                slots, info = self._samplers[place].sample(member, each)
            rows.append((place, torch.stack(slots, -1) if isinstance(slots, tuple) else torch.as_tensor(slots)))
            infos.append(TensorDict(info, []))
        told: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(infos, 0)
        return _joined(rows), told

    def part_of(self, batch_size: int) -> int:
        """What each part has of a batch; ValueError where it cannot be divided so."""
        each, rest = divmod(batch_size, self.num_buffer_sampled)
        if rest:
            raise ValueError(
                f"the batch size must be divisible by num_buffer_sampled={self.num_buffer_sampled}, got {batch_size}"
            )
        return each

    def refuse_empty(self, storages: Iterable[Any]) -> None:
        """RuntimeError where a member that may be chosen has nothing stored; no random number has been drawn then."""
        for place, storage in enumerate(storages):
            if len(storage) == 0 and (self._p is None or self._p[place] > 0):
                raise RuntimeError(
                    f"Cannot sample from an empty storage: member {place} of the ensemble has no items. Call its extend() "
                    "first, or give it a p of 0"
                )

    def choose(self) -> list[int]:
        """The member of each part of a batch."""
        if self._sample_from_all:
            return list(range(len(self._samplers)))
        device = "cpu" if self._rng is None else self._rng.device
        drawn = torch.rand(self.num_buffer_sampled, dtype=torch.float64, generator=self._rng, device=device)
        chosen: list[int] = self._upper.searchsorted(drawn.cpu().numpy(), side="right").tolist()
        return chosen

    # ------------------------------------------------------------------ members

    def __getitem__(self, index: Any) -> Any:
        """A member for an int, this ensemble for `:`, an ensemble of some with their p for any other index."""
        index = unwrapped(index, "sampler")
        if is_all(index):
            return self
        places = named(index, len(self))
        if isinstance(places, int):
            return self._samplers[places]
        part = copy.copy(self)
        part._rng = self._rng
        part._samplers = tuple(self._samplers[place] for place in places)
        p = None if self._p is None else self._p[places]
        if p is not None and not p.any():
            raise ValueError(f"members {places} have a p of 0: an ensemble of them would never sample")
        part._p = None if p is None else p / p.sum()
        part._upper = _upper(np.ones(len(places)) if p is None else p)
        return part

    def __len__(self) -> int:
        return len(self._samplers)

    @property
    def takes_priorities(self) -> bool:
        return any(sampler.takes_priorities for sampler in self._samplers)

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Give items of a sample new priorities; those of members without priorities have none.

        Args:
            index: the "index" of a sample, or what `sample` returned.
            priority: one value for all, or one for each slot of the index.
            storage: the ensemble that was drawn from.
        """
        if not isinstance(storage, StorageEnsemble):
            raise TypeError("update_priority() of an ensemble needs storage=..., the StorageEnsemble drawn from")
        if not self.takes_priorities:
            super().update_priority(index, priority, storage=storage)
            return
        for place, slots, values in self.parts(index, priority, storage._storages):
            member = storage._storages[place]
            with member._access:
                self._samplers[place].update_priority(slots, values, storage=member)

    def parts(self, index: Any, priority: Any, storages: Sequence[Any]) -> list[tuple[int, Tensor, Any]]:
        """The members with priorities that an index names, their slots, and the priorities given for these.

        RuntimeError for another number of priorities than of slots, IndexError for slots that are not stored, and what the
        samplers raise for priorities that they refuse: nothing has changed then.
        """
        given = priority
        if not isinstance(priority, int | float):
            given = priority.detach() if isinstance(priority, Tensor) else torch.from_numpy(np.asarray(priority))
        routes = list(routed(index, [storage.ndim if storage.ndim > 1 else 0 for storage in storages]))
        count = sum(entries.numel() for _, entries, _ in routes)
        for_all = not isinstance(given, Tensor) or given.numel() == 1
        if not for_all and given.numel() != count:
            raise RuntimeError(
                "priority should be a number or an iterable of the same length as index: "
                f"got {given.numel()} priorities for {count} indices"
            )
        found = []
        for place, entries, slots in routes:
            sampler = self._samplers[place]
            if sampler.takes_priorities:
                values = given if for_all else given.reshape(-1)[entries.to(given.device)]
                sampler.checked(values)
                refuse_unstored(slots, storages[place], place)
                found.append((place, slots, values))
        return found

    def _empty(self) -> NoReturn:
        raise NotImplementedError("an ensemble of samplers is not reset as a whole: empty the members")

    def __repr__(self) -> str:
        body = f"samplers=({', '.join(map(repr, self._samplers))})"
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


def _shares(p: Any, count: int) -> np.ndarray:
    """What each member has of a whole of 1."""
    try:
        given = p.detach().cpu().double().numpy() if isinstance(p, Tensor) else np.asarray(p)
    except (TypeError, ValueError) as error:
        raise TypeError(f"p must be a list of numbers, got {p!r}") from error
    if given.dtype.kind not in "fiu":
        raise TypeError(f"p must be a list of numbers, got {p!r}")
    given = given.astype(np.float64)
    if given.shape != (count,):
        raise ValueError(f"p must have one number for each of the {count} members, got shape {list(given.shape)}")
    if not (np.isfinite(given).all() and (given >= 0).all()):
        raise ValueError(f"p must be finite and at least 0, got {given.tolist()}")
    if not given.any():
        raise ValueError("p must not be 0 for every member")
    given = given / given.max()  # a sum of the numbers as they came might be infinite
    return given / given.sum()


def _upper(p: np.ndarray) -> np.ndarray:
    """The upper ends of the parts of [0, 1) that stand for the members; a part of none for a p of 0."""
    ends = np.cumsum(p)
    return ends / ends[-1]

"""The samplers of several buffers, drawn from together."""

import copy
from collections.abc import Callable, Iterable, Sequence
from textwrap import indent
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from fbuf.checkpoint import Fields
from interop.checkpoint.members import loading_dicts, loading_members, saved_members
from interop.checkpoint.state import Entries, LoadOptions, Together, as_tensors, is_users
from interop.data import randomness
from interop.data.class_names import class_of
from interop.data.members import is_all, named, of_kind, refuse_unstored, routed, unwrapped
from interop.data.numbers import whole
from interop.samplers.sampler import Sampler, draw_by
from interop.storages import Storage, StorageEnsemble

_FOR_MEMBERS = np.uint32(0x85EBCA6B)  # makes the key of a batch the one that the keys of its parts are drawn with


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

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[TensorDictBase, TensorDictBase]:
        """A tensordict of "index" [n, k] and "buffer_ids" [n], and one [n] of what the samplers say.

        n is `num_buffer_sampled`, k what each part has of the batch. The index is [n, k, ndim] where slots are
        coordinates, nested where parts have different lengths.

        TypeError for a storage that is not an ensemble; ValueError for one of another length and for a batch that cannot be
        divided by n; RuntimeError where a member that may be chosen has nothing stored.
        """
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"a SamplerEnsemble draws from a StorageEnsemble, got {class_of(storage)}")
        if len(storage) != len(self):
            raise ValueError(f"there are {len(self)} samplers for {len(storage)} storages")
        each = self.part_of(batch_size)
        self.refuse_empty(storage._storages)
        rows, infos, places = [], [], self.choose(key)
        keys = randomness.generator_of(key ^ _FOR_MEMBERS).integers(2**32, size=(len(places), 2), dtype=np.uint32)
        for place, own in zip(places, keys, strict=True):
            member = storage._storages[place]
            with member.lock.turn():
                slots, info = draw_by(self._samplers[place], member, each, own)
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

    def choose(self, key: np.ndarray) -> list[int]:
        """The member of each part of a batch."""
        if self._sample_from_all:
            return list(range(len(self._samplers)))
        shares = randomness.generator_of(key).random(self.num_buffer_sampled)
        chosen: list[int] = self._upper.searchsorted(shares, side="right").tolist()
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

    def without_members(self) -> "SamplerEnsemble":
        """The choice of members alone, for a pickle beside those."""
        bare = copy.copy(self)
        bare._samplers = ()
        return bare

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
            with member.lock.turn():
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

    # ------------------------------------------------------------------ checkpoints

    def saved_state(self) -> dict[str, Any]:
        return {"choice": self._choice(), "members": saved_members(self._samplers)}

    def with_state(self, entries: Entries, options: LoadOptions) -> Callable[[], None]:
        chosen = self._loading_choice(entries.fields("choice"), entries)
        return Together((loading_members(entries, self._samplers, options), chosen))

    def saved_choice(self) -> dict[str, Any]:
        """A saved tree of what members are chosen by, without them: for buffers, which save their samplers themselves.

        What a subclass of the user's says of itself is all there is of it.
        """
        return self.saved() if is_users(self) else {"choice": self._choice()}

    def restoring_choice(self, saved: Any) -> Callable[[], None]:
        """Check such a tree; what is returned puts it in."""
        if is_users(self):
            return self.restoring(saved)
        entries = Entries(saved, self)
        chosen = self._loading_choice(entries.fields("choice"), entries)
        entries.settle()
        return chosen

    def _choice(self) -> dict[str, Any]:
        return {
            "p": None if self._p is None else self._p.tolist(),
            "p_dtype": self._p_dtype,
            "sample_from_all": self._sample_from_all,
            "num_buffer_sampled": self._num_buffer_sampled,
        }

    def _loading_choice(self, fields: Fields, entries: Entries) -> Callable[[], None]:
        """Check such a tree; what is returned puts it in. Differences are noted in `entries`."""
        for_all, count = fields.flag("sample_from_all"), fields.any("num_buffer_sampled")
        count = None if count is None else fields.whole("num_buffer_sampled", 1)
        p, dtype = None, fields.text("p_dtype")
        if fields.any("p") is not None:
            p = np.array([Fields({"p": each}, "the chances").number("p", 0) for each in fields.items("p")])
            if for_all or not p.any():
                raise fields.wrong("p", "None where all are sampled from, and not all 0", p)
            if p.size != len(self._samplers):
                entries.refuse(f"p is of {p.size} members, there are {len(self._samplers)}")
        if dtype not in ("float32", "float64"):
            raise fields.wrong("p_dtype", "float32 or float64", dtype)
        entries.parameter("p", None if p is None else p.tolist(), None if self._p is None else self._p.tolist())
        entries.parameter("sample_from_all", for_all, self._sample_from_all)
        entries.parameter("num_buffer_sampled", count, self._num_buffer_sampled)
        upper = _upper(np.ones(len(self._samplers)) if p is None else p)

        def put() -> None:
            self._p, self._upper, self._p_dtype = p, upper, dtype
            self._sample_from_all, self._num_buffer_sampled = for_all, count

        return put

    def state_dict(self) -> dict[str, Any]:
        """The state of each member under "0", "1" and so on, and what they are chosen by."""
        members = {str(place): sampler.state_dict() for place, sampler in enumerate(self._samplers)}
        return {**members, "_choice": as_tensors(self._choice())}

    def with_state_dict(self, given: Any, options: LoadOptions) -> Callable[[], None]:
        rest, members = loading_dicts(self, given, self._samplers)
        entries, puts = Entries(rest, self), [members]
        if "_choice" in entries:
            puts.append(self._loading_choice(entries.fields("_choice"), entries))
        entries.settle()
        return Together(puts)

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

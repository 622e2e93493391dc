"""The samplers of several buffers, drawn from together."""

from collections.abc import Iterable, Sequence
from textwrap import indent
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, Together, as_tensors, states_of, with_states
from interop.data import randomness
from interop.data.arguments import class_of, whole
from interop.data.members import of_kind, picked
from interop.samplers.sampler import Sampler, draw_by
from interop.storages import Storage, StorageEnsemble


class SamplerEnsemble(Sampler):
    """Chooses members; the sampler of each draws an equal part of the batch. `ensemble[i]` is a member.

    Args:
        samplers: the members.
        p: relative frequencies of the members; equal by default.
        sample_from_all: every member gives one part of each batch, in order.
        num_buffer_sampled: parts of a batch, each of an independently chosen member; as many as members by default. Has no
            effect with `sample_from_all`.
    """

    members: tuple[Sampler, ...]
    sample_from_all: bool
    _parts: int | None
    _p: np.ndarray | None

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        self.members = of_kind("sampler", samplers, Sampler, SamplerEnsemble)
        self.sample_from_all = bool(sample_from_all)
        self.num_buffer_sampled = num_buffer_sampled
        self.p = p

    @property
    def num_buffer_sampled(self) -> int:
        """Parts of a batch. Set it to None for the number of members."""
        return len(self) if self.sample_from_all or self._parts is None else self._parts

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        self._parts = None if value is None else whole("num_buffer_sampled", value)

    @property
    def p(self) -> Tensor | None:
        """Relative frequencies of the members, of sum 1; None if they are equal. Can be set."""
        return None if self._p is None else torch.from_numpy(self._p.astype(np.float32))

    @p.setter
    def p(self, value: Sequence[float] | np.ndarray | Tensor | None) -> None:
        if value is not None and self.sample_from_all:
            raise RuntimeError("p and sample_from_all exclude each other: all members are sampled from")
        self._p = None if value is None else _normalised(value, len(self))

    @property
    def draw_settings(self) -> tuple[Any, ...]:
        of_members = (setting for member in self.members for setting in member.draw_settings)
        return *super().draw_settings, self._parts, self._p, self.sample_from_all, *of_members

    def let_go(self) -> None:
        for member in self.members:
            member.let_go()

    def raise_deferred(self) -> None:
        for member in self.members:
            member.raise_deferred()

    # ------------------------------------------------------------------ draws

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[TensorDictBase, TensorDictBase]:
        """A tensordict of "index" [n, k] and "buffer_ids" [n], and one [n] of the infos of the samplers.

        n is `num_buffer_sampled`, k the items of a part. The index is [n, k, ndim] where slots are coordinates, and a nested
        tensor where parts have different lengths.

        TypeError for a storage that is no ensemble; ValueError for one of another length, and for a batch that n does not
        divide; RuntimeError if a member that may be chosen is empty.
        """
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"a SamplerEnsemble needs a StorageEnsemble, got {class_of(storage)}")
        if len(storage) != len(self):
            raise ValueError(f"there are {len(self)} samplers for {len(storage)} storages")
        size = self.part_of(batch_size, map(len, storage.members))
        places = []
        slots = []
        infos = []
        for place, own_key in self.choose(key):
            member = storage.members[place]
            with member.lock.held():
                drawn, info = draw_by(self.members[place], member, size, own_key)
            places.append(place)
            slots.append(torch.stack(drawn, -1) if isinstance(drawn, tuple) else torch.as_tensor(drawn))
            infos.append(TensorDict(info, []))
        alike = len({member_slots.shape for member_slots in slots}) == 1
        joined = torch.stack(slots) if alike else torch.nested.nested_tensor(slots, layout=torch.jagged)
        index = TensorDict({"index": joined, "buffer_ids": torch.tensor(places, device="cpu")}, [len(places)])
        return index, LazyStackedTensorDict.maybe_dense_stack(infos, 0)

    def part_of(self, batch_size: int, sizes: Iterable[int]) -> int:
        """Items of each part of a batch, of members of these sizes. The errors of `draw`."""
        part_size, rest = divmod(batch_size, self.num_buffer_sampled)
        if rest:
            parts = self.num_buffer_sampled
            raise ValueError(f"the batch size must be divisible by num_buffer_sampled={parts}, got {batch_size}")
        for place, size in enumerate(sizes):
            if size == 0 and (self._p is None or self._p[place] > 0):
                raise RuntimeError(
                    f"Cannot sample from an empty storage: member {place} of the ensemble has no items. Call its extend() "
                    "first, or give it a p of 0"
                )
        return part_size

    def choose(self, key: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The member and the key of each part of a batch."""
        numbers = randomness.generator_of(key)
        places: Sequence[int] = range(len(self))
        if not self.sample_from_all:
            at = numbers.random(self.num_buffer_sampled)
            if self._p is None:
                places = (at * len(self)).astype(np.int64).tolist()
            else:
                ends = self._p.cumsum()
                places = (ends / ends[-1]).searchsorted(at, side="right").tolist()
        keys = numbers.bit_generator.random_raw(len(places)).view(np.uint32).reshape(-1, 2)
        return list(zip(places, keys, strict=True))

    # ------------------------------------------------------------------ members

    def __getitem__(self, index: Any) -> Any:
        """A member for an int, this ensemble for `:`, an ensemble of some with their p for any other index."""
        return picked(index, self.members, self, self._of_some)

    def _of_some(self, places: Sequence[int]) -> "SamplerEnsemble":
        some = SamplerEnsemble(*(self.members[place] for place in places), sample_from_all=self.sample_from_all)
        some.num_buffer_sampled = self._parts
        if self._p is not None:
            if not self._p[places].any():
                raise ValueError(f"members {places} have a p of 0: an ensemble of them would never sample")
            some.p = self._p[places]
        return some

    def of_members(self, samplers: Sequence[Sampler]) -> "SamplerEnsemble":
        """This ensemble, with other members in the same number."""
        self.members = tuple(samplers)
        return self

    def __len__(self) -> int:
        return len(self.members)

    # ------------------------------------------------------------------ checkpoints

    def settings(self) -> dict[str, Any]:
        """How members are chosen, as a part of a saved tree."""
        p = None if self._p is None else self._p.tolist()
        return {"p": p, "sample_from_all": self.sample_from_all, "num_buffer_sampled": self._parts}

    def with_settings(self, fields: Fields, entries: Entries) -> Apply:
        """Check a result of `settings`; the returned function sets them. Notes differences in `entries`."""
        p = fields.any("p")
        parts = fields.any("num_buffer_sampled")
        from_all = fields.flag("sample_from_all")
        try:
            loaded = SamplerEnsemble(*self.members, p=p, sample_from_all=from_all, num_buffer_sampled=parts)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointCorrupt(f"the choice of members: {error}") from error
        for name, value in loaded.settings().items():
            entries.parameter(name, value, self.settings()[name])

        return lambda: vars(self).update(vars(loaded) | {"members": self.members})

    def state(self) -> dict[str, Any]:
        return {"choice": self.settings(), "members": states_of(self.members)}

    def state_dict(self) -> dict[str, Any]:
        """The state of each member under "0", "1" and so on, and the settings."""
        members = {str(place): sampler.state_dict() for place, sampler in enumerate(self.members)}
        return {**members, "_choice": as_tensors(self.settings())}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        entries = Entries(tree, self)  # with the tensors of a `state_dict`, which may be that of a member of the user's
        if "members" in entries:
            parts: list[Apply] = [with_states(entries, self.members, options)]
            parts.append(self.with_settings(entries.fields("choice"), entries))
        else:
            parts = [member.with_state(entries.any(str(place)), options) for place, member in enumerate(self.members)]
            if "_choice" in entries:
                parts.append(self.with_settings(entries.fields("_choice"), entries))
        entries.settle()
        return Together(parts)

    def _empty(self) -> NoReturn:
        raise NotImplementedError("an ensemble of samplers is not reset as a whole: empty the members")

    def __repr__(self) -> str:
        body = f"samplers=({', '.join(map(repr, self.members))})"
        return f"{type(self).__name__}(\n{indent(body, '    ')})"


def _normalised(p: Any, count: int) -> np.ndarray:
    """`count` numbers in proportion to p, of sum 1."""
    try:
        shares = p.detach().cpu().double().numpy() if isinstance(p, Tensor) else np.asarray(p)
    except (TypeError, ValueError) as error:
        raise TypeError(f"p must be a list of numbers, got {p!r}") from error
    if shares.dtype.kind not in "fiu":
        raise TypeError(f"p must be a list of numbers, got {p!r}")
    shares = shares.astype(np.float64)
    if shares.shape != (count,):
        raise ValueError(f"p must have one number for each of the {count} members, got shape {list(shares.shape)}")
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
        raise ValueError(f"p must be finite, at least 0, and not 0 for every member, got {shares.tolist()}")
    if abs((shares / count).sum() - 1 / count) < 1e-12:  # a saved p stays the same to the last bit
        return shares
    shares = shares / shares.max()  # the sum of very large numbers would be infinite
    return shares / shares.sum()

"""The samplers of several buffers, drawn from together."""

from collections.abc import Iterator, Sequence
from textwrap import indent
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from fbuf.samplers import Chances, Reason
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, Together, as_tensors, states_of, with_states
from interop.data.arguments import class_of
from interop.data.members import of_kind, picked
from interop.samplers.draws import Draws
from interop.samplers.item_values import ItemValues
from interop.samplers.member_choice import MemberChoice
from interop.samplers.parameter import Parameter
from interop.samplers.sampler import Sampler
from interop.storages import Storage, StorageEnsemble


class EnsembleDraws(Draws):
    """Draws each part of a batch by the draws of a member."""

    def __init__(self, choice: MemberChoice, samplers: Sequence[Sampler]) -> None:
        self._choice = choice
        self._samplers = samplers

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, Any]:
        """See `SamplerEnsemble.draw`."""
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"a SamplerEnsemble needs a StorageEnsemble, got {class_of(storage)}")
        if len(storage) != len(self._samplers):
            raise ValueError(f"there are {len(self._samplers)} samplers for {len(storage)} storages")
        size = self._choice.part_of(batch_size, map(len, storage.members))
        places = []
        slots = []
        infos = []
        for place, own_key in self._choice.choose(key):
            member = storage.members[place]
            with member.lock.held():
                drawn, info = self._samplers[place].draws.draw(member, size, own_key)
            places.append(place)
            slots.append(torch.stack(drawn, -1) if isinstance(drawn, tuple) else torch.as_tensor(drawn))
            infos.append(TensorDict(info, []))
        alike = len({member_slots.shape for member_slots in slots}) == 1
        joined = torch.stack(slots) if alike else torch.nested.nested_tensor(slots, layout=torch.jagged)
        index = TensorDict({"index": joined, "buffer_ids": torch.tensor(places, device="cpu")}, [len(places)])
        return index, LazyStackedTensorDict.maybe_dense_stack(infos, 0)

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        """That a draw of a member, which is chosen as for a part of a batch, has the slot; over the slots of all members."""
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"a SamplerEnsemble needs a StorageEnsemble, got {class_of(storage)}")
        size = None if batch_size is None else batch_size // self._choice.num_buffer_sampled
        shares = self._choice.shares()
        is_blocked = any(share > 0 and not len(member) for share, member in zip(shares, storage.members, strict=True))
        laws = []
        for sampler, member, share in zip(self._samplers, storage.members, shares.tolist(), strict=True):
            law = sampler.chances(member, size)
            laws.append(law.scaled(0.0, Reason.BLOCKED) if is_blocked else law.scaled(share, Reason.EXCLUDED))
        return Chances.joined(laws)

    @property
    def settings(self) -> tuple[Any, ...]:
        of_members = (setting for sampler in self._samplers for setting in sampler.draws.all_settings)
        return *self._choice.settings, *of_members

    def let_go(self) -> None:
        for sampler in self._samplers:
            sampler.draws.let_go()


class EnsembleValues(ItemValues):
    """The values of the items of all members. They are written through the members."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._samplers = samplers

    def raise_deferred(self) -> None:
        for sampler in self._samplers:
            sampler.item_values.raise_deferred()

    def let_go(self) -> None:
        for sampler in self._samplers:
            sampler.item_values.let_go()


class SamplerEnsemble(Sampler):
    """Chooses members; the sampler of each draws an equal part of the batch. `ensemble[i]` is a member.

    Args:
        samplers: the members.
        p: relative frequencies of the members; equal by default.
        sample_from_all: every member gives one part of each batch, in order.
        num_buffer_sampled: parts of a batch, each of an independently chosen member; as many as members by default. Has no
            effect with `sample_from_all`.
    """

    p = Parameter[Any]("choice", "Relative frequencies of the members, of sum 1; None if they are equal.")
    num_buffer_sampled = Parameter[Any]("choice", "Parts of a batch. Set it to None for the number of members.")
    sample_from_all = Parameter[bool]("choice", "Whether every member gives one part of each batch.")
    members: tuple[Sampler, ...]
    choice: MemberChoice

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        self.members = of_kind("sampler", samplers, Sampler, SamplerEnsemble)
        self.choice = MemberChoice(len(samplers), p, sample_from_all, num_buffer_sampled)

    @property
    def draws(self) -> Draws:
        return EnsembleDraws(self.choice, self.members)

    @property
    def item_values(self) -> ItemValues:
        return EnsembleValues(self.members)

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[TensorDictBase, TensorDictBase]:
        """A tensordict of "index" [n, k] and "buffer_ids" [n], and one [n] of the infos of the samplers.

        n is `num_buffer_sampled`, k the items of a part. The index is [n, k, ndim] where slots are coordinates, and a nested
        tensor where parts have different lengths.

        TypeError for a storage that is no ensemble; ValueError for one of another length, and for a batch that n does not
        divide; RuntimeError if a member that may be chosen is empty.
        """
        index: TensorDictBase
        info: TensorDictBase
        index, info = EnsembleDraws(self.choice, self.members).draw(storage, batch_size, key)
        return index, info

    # ------------------------------------------------------------------ members

    def __getitem__(self, index: Any) -> Any:
        """A member for an int, this ensemble for `:`, an ensemble of some with their p for any other index."""
        return picked(index, self.members, self, self._of_some)

    def _of_some(self, places: Sequence[int]) -> "SamplerEnsemble":
        some = SamplerEnsemble(*(self.members[place] for place in places))
        some.choice = self.choice.of_some(places)
        return some

    def of_members(self, samplers: Sequence[Sampler]) -> "SamplerEnsemble":
        """This ensemble, with other members in the same number."""
        self.members = tuple(samplers)
        return self

    def __len__(self) -> int:
        return len(self.members)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return {"choice": self.choice.state(), "members": states_of(self.members)}

    def state_dict(self) -> dict[str, Any]:
        """The state of each member under "0", "1" and so on, and the settings."""
        members = {str(place): sampler.state_dict() for place, sampler in enumerate(self.members)}
        return {**members, "_choice": as_tensors(self.choice.state())}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        entries = Entries(tree, self)  # with the tensors of a `state_dict`, which may be that of a member of the user's
        if "members" in entries:
            parts: list[Apply] = [with_states(entries, self.members, options)]
            parts.append(self.choice.with_state(entries.fields("choice"), entries))
        else:
            parts = [member.with_state(entries.any(str(place)), options) for place, member in enumerate(self.members)]
            if "_choice" in entries:
                parts.append(self.choice.with_state(entries.fields("_choice"), entries))
        entries.settle()
        return Together(parts)

    def _empty(self) -> NoReturn:
        raise NotImplementedError("an ensemble of samplers is not reset as a whole: empty the members")

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "p", None if self.p is None else [round(each, 4) for each in self.p.tolist()]
        yield "num_buffer_sampled", self.num_buffer_sampled
        yield from ((str(place), sampler) for place, sampler in enumerate(self.members))

    def __repr__(self) -> str:
        body = f"samplers=({', '.join(map(repr, self.members))})"
        return f"{type(self).__name__}(\n{indent(body, '    ')})"

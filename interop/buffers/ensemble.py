"""Several replay buffers that are sampled from together."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Sequence
from textwrap import indent
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.buffers import collate
from interop.buffers.assembling import buffers_of, components_of, functions_of
from interop.buffers.checkpoints import SaveableEnsemble
from interop.buffers.gathering import Gathering, asked, described
from interop.buffers.joined import _COMPONENTS, _NOT_KEPT, _a_function, _a_generator
from interop.buffers.pending import Part, PendingBatch
from interop.buffers.places import owned
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.routing import changes, widths
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.buffers.turn import turn, turns
from interop.buffers.unwritable import Unwritable
from interop.data import randomness
from interop.data.index import as_int
from interop.data.members import is_all, named, of_kind, routed
from interop.samplers import ConsumingSampler, Sampler, SamplerEnsemble
from interop.samplers.sampler import samples_by_key
from interop.storages import StorageEnsemble
from interop.transforms.chain import as_chain
from interop.writers import WriterEnsemble

_DRAW, _GET = SamplerEnsemble.draw, StorageEnsemble.get


class ReplayBufferEnsemble(SaveableEnsemble, Unwritable):
    """Several replay buffers, sampled from together; its length is their number.

    A batch [n, k] is drawn in n parts of k items, each from one member. The rows of a member go through its own
    transforms, then all of them are stacked and go through those of the ensemble. Tensordicts come with a nested "index":
    "index", the slots, and "buffer_ids", the members; and with what else the samplers say. Where some members have
    priorities and others do not, items of the latter have a "priority_weight" of 1.

    It is written to through its members: `ensemble[i].extend(data)`. The lock of a member is held while its part is drawn
    and read, never together with that of another; but with `prefetch` those of all members that draw slices without
    replacement are held together while it is settled what is drawn ahead, which looks at what is stored.

    Args:
        rbs: the members; or give `storages`, `samplers` and `writers`, of which they are made.
        transform: of batches, after those of the members.
        batch_size: of `sample()` and of iteration.
        collate_fn: makes a batch of the list of parts; by default they are stacked, lazily where they are not alike.
        collate_fns: for each member what stands in for its own; None for its own.
        p, sample_from_all, num_buffer_sampled: as for `SamplerEnsemble`.
        generator: governs every draw, of the members too; by default they keep theirs.
        shared: have worker processes take turns at the members.
        kwargs: `pin_memory`, `prefetch`, `transform_factory`, as for `ReplayBuffer`.
    """

    _members: tuple[ReplayBuffer, ...] = ()
    _storage: StorageEnsemble
    _sampler: SamplerEnsemble
    _writer: WriterEnsemble

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        **kwargs: Any,
    ) -> None:
        components = (storages, samplers, writers)
        if rbs:
            if any(each is not None for each in components):
                raise RuntimeError("give the buffers, or storages, samplers and writers; not both")
            of_kind("buffer", rbs, ReplayBuffer, ReplayBufferEnsemble)
            samplers = SamplerEnsemble(
                *(each.sampler for each in rbs),
                p=p,
                sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
            )
            storages = StorageEnsemble(*(each.storage for each in rbs), transforms=[each.transform for each in rbs])
            writers = WriterEnsemble(*(each.writer for each in rbs))
        elif p is not None or sample_from_all or num_buffer_sampled is not None:
            raise RuntimeError(
                "p, sample_from_all and num_buffer_sampled go with buffers: give them to SamplerEnsemble"
            )
        storages, samplers, writers = components_of(storages, samplers, writers)
        own_collate_fns = functions_of(collate_fns, len(storages))
        super().__init__(
            storage=storages,
            sampler=samplers,
            writer=writers,
            collate_fn=_a_function(collate_fn) or collate.stack,
            transform=None if transform is None else as_chain(transform),
            batch_size=batch_size,
            generator=generator,
            shared=shared,
            delayed_init=True,
            **kwargs,
        )
        if shared:
            _refuse_prefetching(rbs)
        if self._prefetch is not None and any(isinstance(each, ConsumingSampler) for each in samplers._samplers):
            raise ValueError(
                "prefetch excludes members with a ConsumingSampler: batches that are dropped would be consumed"
            )
        self._members = rbs or buffers_of(storages, samplers, writers, own_collate_fns)
        self._collate_fns = own_collate_fns
        self._init()
        self._listen()
        if generator is not None:
            self.set_rng(generator)
        if shared:
            self.share()

    def _listen(self) -> None:
        """Be told of what makes batches stale that were drawn ahead."""
        if self._prefetch is not None:
            for member in self._members:
                member._readers = (*(each for each in member._readers if each() is not None), weakref.ref(self))

    # ------------------------------------------------------------------ components: those that the members have now

    @property
    def storage(self) -> StorageEnsemble:
        """Where items live: the storages of the members."""
        self._storage._storages = tuple(member.storage for member in self._members)
        return self._storage

    @property
    def sampler(self) -> SamplerEnsemble:
        """Which items are drawn: the samplers of the members, and what chooses among them."""
        self._sampler._samplers = tuple(member.sampler for member in self._members)
        return self._sampler

    @property
    def writer(self) -> WriterEnsemble:
        """The writers of the members."""
        self._writer._writers = tuple(member.writer for member in self._members)
        return self._writer

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Have this generator govern every draw from now on, of the members too."""
        super().set_rng(_a_generator(generator))
        for member in self._members:
            if member._rng is not generator:
                member.set_rng(generator)

    def share(self, shared: bool = True) -> Self:
        """Have worker processes take turns at the members, or not. ValueError with prefetch, of a member too."""
        if shared:
            _refuse_prefetching(self._members)
        super().share(shared)
        for member in self._members:
            member.share(shared)
        return self

    # ------------------------------------------------------------------ sampling

    def _lock_to_draw(self) -> contextlib.AbstractContextManager[Any]:
        """None: each member is locked while its part is drawn."""
        return contextlib.nullcontext()

    def _lock_to_reserve(self) -> contextlib.AbstractContextManager[None]:
        """The locks of members whose reservations look at what is stored."""
        own = not self._draws_itself
        return turns([member for member in self._members if own or member.sampler.reads_to_reserve])

    def _generators(self) -> Collection[torch.Generator | None]:
        return {self._rng, *(member._rng for member in self._members)}

    def _plan(self, pending: PendingBatch, key: Any = None) -> None:
        """Choose the members of a batch, each with a key of its own generator; one key where they draw together."""
        if not self._draws_itself:
            pending.parts = [Part(0, self.sampler, self.storage, pending.batch_size, randomness.key(self._rng))]
            return
        each = self._sampler.part_of(pending.batch_size)
        self._sampler.refuse_empty(self._members)
        for place in self._sampler.choose(randomness.key(self._rng)):
            member = self._members[place]
            pending.parts.append(Part(place, member.sampler, member.storage, each, randomness.key(member._rng)))

    def _read(self, pending: PendingBatch, reserves: bool = False) -> Any:
        """The parts of a batch, or a list of rows, and what the members say of them; None where it is stale."""
        if not self._draws_itself:
            [part] = pending.parts
            with contextlib.nullcontext() if self._prefetch is None else self._members_still():
                if pending.dropped:
                    return None
                if reserves:
                    part.reserve()
                assert part.reservation is not None  # an ensemble names no slots
                return asked(part.reservation, self.storage, self._members, self._collate_fns)
        weighs = any(member._sampler.takes_priorities for member in self._members)
        gathering = Gathering(len(pending.parts), pending.parts[0].size, weighs)
        for part in pending.parts:
            member = self._members[part.place]
            with turn(member):
                if reserves:
                    part.sampler, part.storage = member.sampler, member.storage  # others may have come since
                    part.reserve()
                elif not pending.can_be_read(part):
                    return None
                gathering.draw(part, member, self._collate_fns[part.place])
        return gathering, [(part.place, part.info) for part in gathering.parts]

    def _finish(self, parts: Any, told: Any, *after: Any) -> tuple[Any, Any]:
        """The parts as one batch, through collating and transforms, and what is told about it. No lock is held."""
        batch, collate_fn = None, self._collate_fn
        if isinstance(parts, Gathering):
            batch = parts.whole() if collate_fn is collate.stack else None
            parts = parts.rows() if batch is None else [batch]
        marked = all(isinstance(row, TensorDictBase) for row in parts)
        batch, collate_fn = (parts, collate_fn) if batch is None else (batch, collate.identity)
        return self._from_store(batch, None, collate_fn), (marked, told)

    @property
    def _draws_itself(self) -> bool:
        """False where a method of the user's would be passed by: of a subclass, or put in the place of ours."""
        return (
            samples_by_key(self._sampler)
            and getattr(self._sampler.draw, "__func__", None) is _DRAW
            and getattr(self._storage.get, "__func__", None) is _GET
        )

    def _told(self, info: Any) -> Any:
        marked, told = info
        return described(told, marked)

    def stats(self) -> dict[str, int | float | bool]:
        """Numbers to watch, JSON as they are: those of all members together, and the batches that wait here."""
        size, count = (sum(member.stats()[name] for member in self._members) for name in ("size", "write_count"))
        room = self.storage.max_size
        told = {"size": size, "write_count": count, "prefetch_queue_size": len(self._prefetch or ())}
        return told | {"initialized": True, "capacity": room, "utilization": size / room}

    # ------------------------------------------------------------------ members and their items

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        """What an index names.

        - An int: the member itself; `:` this ensemble; a slice, list, array, mask or tensor an ensemble of these members,
          with the same transform, collate functions, batch size and generator, and their part of p.
        - A pair of such an index and one of items: `ensemble[i][j]`, or for several members what is at j in the storage
          of each, collated; no transforms.

        IndexError out of range, TypeError for floats, RuntimeError for a tensor of several dims.
        """
        if isinstance(index, tuple) and len(index) > 1:
            return self._items(index[0], index[1] if len(index) == 2 else index[1:])
        index = index[0] if isinstance(index, tuple) and index else index
        if is_all(index):
            return self
        places = named(index, len(self))
        return self._members[places] if isinstance(places, int) else self._over(places)

    def _over(self, places: Sequence[int]) -> "ReplayBufferEnsemble":
        sampler = self.sampler[places]
        part = ReplayBufferEnsemble(
            *(self._members[place] for place in places),
            transform=self._transform,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            collate_fns=[self._collate_fns[place] for place in places],
            pin_memory=self._pin_memory,
        )
        part._sampler, part._rng = sampler, self._rng
        return part

    def _items(self, index: Any, item: Any) -> Any:
        places = named(index, len(self))
        if isinstance(places, int):
            return self._members[places][item]
        found = []
        for place in places:
            member = self._members[place]
            with turn(member):
                data = member.storage[item]
                data = owned(data) if member.storage.is_live(item) else data
                collate_fn = self._collate_fns[place] or member._collate_fn
            found.append(data if as_int(item) is not None else collate_fn(data))
        return self._collate_fn(found)

    # ------------------------------------------------------------------ priorities: to the members that have them

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give items of a sample new priorities; a warning where no member has any.

        Args:
            index: `info["index"]` of the sample.
            priority: one value for all, or one for each slot of the index, in that order.

        Raises before anything changes: TypeError for another index, RuntimeError for another number of priorities,
        IndexError for slots that are not stored, ValueError for priorities that are negative or not finite.
        """
        sampler = self.sampler
        if not sampler.takes_priorities:
            Sampler.update_priority(sampler, index, priority)
            return
        for place, slots, values in sampler.parts(index, priority, [member.storage for member in self._members]):
            self._members[place].update_priority(slots, values)

    def mark_update(self, index: Any) -> None:
        """Give items of a sample the default priority of their members; `index` as for `update_priority`."""
        for place, _, slots in routed(index, widths(self._members)):
            self._members[place].mark_update(slots)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the items of a sample the priorities in it: each member those under its `priority_key`, or "td_error".

        The sample is one as it came, [n, k, ...], or of one dim of items. Several values an item are reduced by members
        that are a `TensorDictReplayBuffer`; without the entry items get the default priority; members without priorities
        are passed over. KeyError without the index, and the errors of `update_priority`, before anything changes.
        """
        for member, change in changes(self._members, data):
            if isinstance(member, TensorDictReplayBuffer):
                member.update_tensordict_priority(change)
            else:
                member.update_priority(change["index"], change.get("td_error", member.sampler.default_priority))

    # ------------------------------------------------------------------ copies

    def _snapshot(self, memo: dict[int, Any]) -> dict[str, Any]:
        """What a pickle or copy has: each member as of one moment of its own, and the ensembles without members."""
        self._drop_requests()
        state = {key: value for key, value in self.__dict__.items() if key not in (*_NOT_KEPT, *_COMPONENTS)}
        bare = copy.copy(self._storage), copy.copy(self._sampler), copy.copy(self._writer)
        bare[0]._storages = bare[1]._samplers = bare[2]._writers = ()
        state["_bare"] = bare
        if self._rng is not None:
            state["_rng"] = (self._rng.get_state(), str(self._rng.device))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        bare, rng = state.pop("_bare"), state["_rng"]
        if rng is not None:  # one generator again, of all
            state["_rng"] = torch.Generator(rng[1])
            state["_rng"].set_state(rng[0])
        self.__dict__.update(state, _parts=None)
        self._storage, self._sampler, self._writer = bare
        self._join(self.storage, self.sampler, self.writer)
        if rng is not None:
            for member in self._members:
                member._rng = self._rng
                member._hand_rng()
        self._listen()

    def __repr__(self) -> str:
        parts = f"storages={self.storage},\nsamplers={self.sampler},\nwriters={self.writer},"
        return (
            f"{type(self).__name__}(\n{indent(parts, '    ')}\nbatch_size={self._batch_size},\n"
            f"transform={self._transform},\ncollate_fn={self._collate_fn})"
        )


def _refuse_prefetching(members: Sequence[ReplayBuffer]) -> None:
    if any(member._prefetch is not None for member in members):
        raise ValueError("prefetch and shared exclude each other: a member of the ensemble draws ahead")

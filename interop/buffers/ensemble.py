"""Several replay buffers that are sampled from together."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from textwrap import indent
from typing import Any, NoReturn, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch, Source, Writing
from fbuf.memory_plan import Plan
from interop.buffers import collate
from interop.buffers.assembling import buffers_of, components_of, functions_of
from interop.buffers.checkpoints import fields_of
from interop.buffers.editing import owned
from interop.buffers.gathering import described, mark, slots_of
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.request import Part, Request
from interop.buffers.routing import changes, widths
from interop.buffers.sampled import Complete, Sampled, as_collate_fn
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.buffers.turn import turn, turns
from interop.checkpoint.state import LoadOptions, Together, state_for, together
from interop.checkpoint.state import described as described_component
from interop.data import randomness
from interop.data.index import as_int
from interop.data.members import is_all, named, of_kind, routed
from interop.formats.torchrl_folder import TorchrlDump
from interop.samplers import ConsumingSampler, Sampler, SamplerEnsemble
from interop.storages import StorageEnsemble
from interop.storages import planning as of_storages
from interop.transforms.chain import as_chain
from interop.writers import WriterEnsemble


class ReplayBufferEnsemble(Sampled):
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
        prefetch: int | None = None,
        pin_memory: bool = False,
        transform_factory: Callable[[], Any] | None = None,
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
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory exclude each other")
        super().__init__(batch_size=batch_size, prefetch=prefetch, pin_memory=pin_memory, generator=generator)
        if shared and prefetch:
            raise ValueError("prefetch and shared exclude each other: batches drawn ahead miss other processes' writes")
        if shared:
            _refuse_prefetching(rbs)
        self._storage, self._sampler, self._writer = storages, samplers, writers
        self._collate_fn = as_collate_fn(collate_fn) or collate.stack
        self._transform = as_chain(transform if transform_factory is None else transform_factory())
        self._transform.set_container(self)
        samplers.check_batch_size(self._batch_size)
        samplers.buffer_generator = self._rng
        if self._prefetch is not None and any(isinstance(each, ConsumingSampler) for each in samplers._samplers):
            raise ValueError(
                "prefetch excludes members with a ConsumingSampler: batches that are dropped would be consumed"
            )
        self._members = rbs or buffers_of(storages, samplers, writers, own_collate_fns)
        self._collate_fns = own_collate_fns
        self._listen()
        if generator is not None:
            self.set_rng(generator)
        if shared:
            self.share()

    def _listen(self) -> None:
        """Be told of what makes batches stale that were drawn ahead."""
        if self._prefetch is not None:
            for member in self._members:
                member.add_reader(self)

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

    def _pass_generator(self) -> None:
        self._sampler.buffer_generator = self._rng
        for member in self._members:
            if member.generator is not self._rng:
                member.set_rng(self._rng)

    def share(self, shared: bool = True) -> Self:
        """Have worker processes take turns at the members, or not. ValueError with prefetch, of a member too."""
        if shared:
            _refuse_prefetching(self._members)
        for member in self._members:
            member.share(shared)
        return self

    # ------------------------------------------------------------------ sampling

    def _locked_to_reserve(self) -> contextlib.AbstractContextManager[None]:
        """The locks of members whose reservations look at what is stored."""
        return turns([member for member in self._members if member.sampler.reads_to_reserve])

    def _generators(self) -> Collection[torch.Generator | None]:
        return {self._rng, *(member.generator for member in self._members)}

    def _plan(self, batch_size: int, key: Any) -> list[Part]:
        each = self._sampler.part_of(batch_size)
        self._sampler.refuse_empty(self._members)
        parts = []
        for place in self._sampler.choose(randomness.key(self._rng) if key is None else key):
            member = self._members[place]
            parts.append(Part(place, member.sampler, member.storage, each, randomness.key(member.generator)))
        return parts

    def _read(self, request: Request, reserves: bool) -> Complete | None:
        reads = []
        for part in request.parts:
            member = self._members[part.place]
            with turn(member):
                if reserves:
                    part.sampler, part.storage = member.sampler, member.storage  # others may have come since
                    part.reserve()
                elif not request.can_be_read(part):
                    return None
                reads.append((part.place, member.read(part, self._collate_fns[part.place])))
        return partial(self._complete, reads)

    def _complete(self, reads: Sequence[tuple[int, Complete]]) -> tuple[Any, Any]:
        weighs = any(member.sampler.takes_priorities for member in self._members)
        rows, infos = [], []
        for place, read in reads:
            row, info = read()
            if weighs and not self._members[place].sampler.takes_priorities:
                slots = slots_of(info["index"])
                info.setdefault("priority_weight", torch.ones(slots.shape[0], device=slots.device))
            if isinstance(row, TensorDictBase):
                row = row.copy()
                mark(row, place, info)
            rows.append(row)
            infos.append((place, info))
        return self.completed(rows), (all(isinstance(row, TensorDictBase) for row in rows), infos)

    def _info(self, info: Any) -> Any:
        marked, parts = info
        return described(parts, marked)

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
                collate_fn = self._collate_fns[place] or member.collate_fn
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

    # ------------------------------------------------------------------ what only members can do

    def plan(self, data: Any = None) -> Plan:
        """The memory of all members; data is for each of them, or a list or tuple of data for one each."""
        with turns(self._members):
            return of_storages.plan(of_storages.of_members([member.memory_shares for member in self._members], data))

    def add(self, data: Any) -> NoReturn:
        """RuntimeError: members are written to."""
        raise RuntimeError("an ensemble cannot be written to: index the member first, ensemble[i].add(data)")

    def extend(self, data: Any) -> NoReturn:
        """RuntimeError: members are written to."""
        raise RuntimeError("an ensemble cannot be written to: index the member first, ensemble[i].extend(data)")

    def empty(self, empty_write_count: bool = True) -> NoReturn:
        """NotImplementedError: members are emptied."""
        raise NotImplementedError("an ensemble is not emptied as a whole: ensemble[i].empty()")

    def state_dict(self) -> NoReturn:
        """NotImplementedError: members have a state."""
        raise NotImplementedError("an ensemble has no state of its own: ensemble[i].state_dict()")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """NotImplementedError: members have a state."""
        raise NotImplementedError("an ensemble has no state of its own: ensemble[i].load_state_dict(...)")

    # ------------------------------------------------------------------ checkpoints

    def _unchanging(self) -> contextlib.AbstractContextManager[Any]:
        with contextlib.ExitStack() as held:
            held.enter_context(turns(self._members))
            for each in (*self._members, self):
                if each.prefetch_queue is not None:
                    held.enter_context(each.prefetch_queue.mutex)
            return held.pop_all()

    def _transaction(self) -> contextlib.AbstractContextManager[Any]:
        with contextlib.ExitStack() as steps:
            for storage in (member.storage for member in self._members):
                if storage.checkpointer.changes_rows:
                    steps.enter_context(storage.part())  # two of them may have one storage
            return steps.pop_all()

    def saved(self, out: Writing) -> dict[str, Any]:
        for member in self._members:
            member.drop_prefetched()
        members = [member.saved(out) for member in self._members]
        return {**self._saved_settings(), "members": members, "sampler": described_by(self.sampler)}

    def restoring(
        self, tree: Any, source: Source, options: LoadOptions, where: str, beside: Collection[Sampled] = ()
    ) -> Callable[[], None]:
        fields = fields_of(tree, where)
        members = fields.items("members")
        if len(members) != len(self._members):
            raise CheckpointMismatch(f"{where}: {len(members)} buffers were saved, {len(self._members)} are here")
        state = state_for(self.sampler, fields.any("sampler"), f"{where}, sampler")
        rest = [self.sampler.restoring_choice(state), *self._restoring_settings(fields, options, where)]
        checks = []
        for place, (member, saved) in enumerate(zip(self._members, members, strict=True)):
            before = [*beside, *self._members[:place]]
            checks.append(partial(member.restoring, saved, source, options, f"{where}, member {place}", before))
        return Together([self.drop_prefetched, together(checks), *rest])

    def restoring_dump(self, dump: TorchrlDump, options: LoadOptions) -> NoReturn:
        raise CheckpointMismatch(f"{dump.where}: folders of torchrl are read into single buffers, not into ensembles")

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        self.drop_prefetched()
        kept = {key: value for key, value in self.__dict__.items() if key not in _NOT_KEPT}
        return {**kept, "_sampler": self._sampler.without_members()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update(state)
        self._storage = StorageEnsemble(
            *(each.storage for each in self._members), transforms=[each.transform for each in self._members]
        )
        self._writer = WriterEnsemble(*(each.writer for each in self._members))
        self._sampler.buffer_generator = self._rng
        if self._rng is not None:  # one generator again, of all
            self._pass_generator()
        self._listen()

    def __repr__(self) -> str:
        parts = f"storages={self.storage},\nsamplers={self.sampler},\nwriters={self.writer},"
        return (
            f"{type(self).__name__}(\n{indent(parts, '    ')}\nbatch_size={self._batch_size},\n"
            f"transform={self._transform},\ncollate_fn={self._collate_fn})"
        )


_NOT_KEPT = ("_stepping", "_iterating", "_readers", "_storage", "_writer")


def described_by(sampler: SamplerEnsemble) -> dict[str, Any]:
    """The choice of a sampler ensemble, for a checkpoint."""
    return described_component(sampler, sampler.saved_choice())


def _refuse_prefetching(members: Sequence[ReplayBuffer]) -> None:
    if any(member.prefetches for member in members):
        raise ValueError("prefetch and shared exclude each other: a member of the ensemble draws ahead")

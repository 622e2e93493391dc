"""Several replay buffers that are sampled from together."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from textwrap import indent
from typing import Any, NoReturn, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch, Source, Writing
from fbuf.memory_plan import Plan
from interop.buffers import collate, editing
from interop.buffers.checkpoints import fields_of
from interop.buffers.ensemble_members import buffers_of, functions_of
from interop.buffers.ensemble_parts import MemberPart, assembled, first_slots, info_of, items_of
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.request import Part, Request
from interop.buffers.sampled import Complete, Sampled, as_collate_fn
from interop.checkpoint.state import Entries, LoadOptions, Together, described, state_for, together
from interop.data import randomness
from interop.data.index import as_int
from interop.data.members import named, of_kind, picked, routed
from interop.formats.torchrl_folder import TorchrlDump
from interop.samplers import SamplerEnsemble
from interop.samplers.ensemble import refuse_unstored
from interop.samplers.member_choice import MemberChoice
from interop.shared.storage_lock import all_locked, locked
from interop.storages import StorageEnsemble, planning
from interop.transforms.chain import as_chain
from interop.writers import WriterEnsemble

_OF_UNITS = ("anchor_index", "validity_mask")  # entries that a sample unit sets beside the rows of drawn items


class ReplayBufferEnsemble(Sampled):
    """Several replay buffers, sampled from together; its length is their number.

    A batch [n, k] is drawn in n parts of k items, each from one member. The rows of a member go through its own
    transforms, then all of them are stacked and go through those of the ensemble. Tensordicts come with a nested "index":
    "index", the slots, and "buffer_ids", the members; and with the infos of the samplers. Where some members have
    priorities and others do not, items of the latter have a "priority_weight" of 1.

    It is written to through its members: `ensemble[i].extend(data)`. The lock of a member is held while its part is drawn
    and read; those of several are held together only while batches are requested ahead, saved or loaded.

    Args:
        rbs: the members; or give `storages`, `samplers` and `writers`, of which they are made.
        transform: of batches, after those of the members.
        batch_size: of `sample()` and of iteration.
        collate_fn: makes a batch of the list of parts; by default they are stacked, lazily where they are not alike.
        collate_fns: for each member a collate function in the place of its own; None for its own.
        p, sample_from_all, num_buffer_sampled: as for `SamplerEnsemble`.
        generator: governs every draw, and becomes that of the members; by default torch's global one governs the draws of
            the ensemble, and members keep theirs.
        shared: have worker processes lock each other out of the members.
        prefetch, pin_memory: as for `ReplayBuffer`.
        transform_factory: makes the transform, instead of it.
    """

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
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory exclude each other")
        super().__init__(batch_size=batch_size, prefetch=prefetch, pin_memory=pin_memory, generator=generator)
        self._collate_fn = as_collate_fn(collate_fn) or collate.stack
        self._transform = as_chain(transform if transform_factory is None else transform_factory())
        if rbs:
            if any(each is not None for each in (storages, samplers, writers)):
                raise RuntimeError("give the buffers, or storages, samplers and writers; not both")
            self.members = of_kind("buffer", rbs, ReplayBuffer, ReplayBufferEnsemble)
            self._choice = MemberChoice.of(len(rbs), p, sample_from_all, num_buffer_sampled)
            self._collate_fns = functions_of(collate_fns, len(rbs))
        else:
            if p is not None or sample_from_all or num_buffer_sampled is not None:
                raise RuntimeError(
                    "p, sample_from_all and num_buffer_sampled go with buffers: give them to SamplerEnsemble"
                )
            self._collate_fns = functions_of(collate_fns, 0 if storages is None else len(storages))
            self.members = buffers_of(storages, samplers, writers, self._collate_fns)
            assert samplers is not None
            self._choice = samplers.choice
        if prefetch:
            for each in self.members:
                each.sampler.check_fit(each.storage, each.writer, prefetches=True, expands=False)
        if shared:
            self._refuse_to_share()
        self._transform.set_container(self)
        self._connect()
        if generator is not None:
            self.set_rng(generator)
        if shared:
            self.share()

    def _connect(self) -> None:
        """Drop prefetched batches whenever a member changes."""
        if self.prefetches:
            for member in self.members:
                member.add_reader(self)

    # ------------------------------------------------------------------ components of the members, as they are now

    @property
    def storage(self) -> StorageEnsemble:
        """The storages of the members, with their transforms."""
        transforms = [each.transform for each in self.members]
        return StorageEnsemble(*(each.storage for each in self.members), transforms=transforms)

    @property
    def sampler(self) -> SamplerEnsemble:
        """The samplers of the members. Its `p` and `num_buffer_sampled` can be set."""
        sampler = SamplerEnsemble.over([each.sampler for each in self.members], self._choice)
        sampler.buffer_generator = self.generator
        return sampler

    @property
    def writer(self) -> WriterEnsemble:
        """The writers of the members."""
        return WriterEnsemble(*(each.writer for each in self.members))

    def _pass_generator(self) -> None:
        for member in self.members:
            if member.generator is not self.generator:
                member.set_rng(self.generator)

    def share(self, shared: bool = True) -> Self:
        """Have worker processes lock each other out of the members, or not. ValueError with prefetch, of a member too."""
        if shared:
            self._refuse_to_share()
        for member in self.members:
            member.share(shared)
        return self

    def _refuse_to_share(self) -> None:
        if self.prefetches or any(member.prefetches for member in self.members):
            raise ValueError("prefetch and shared exclude each other: the ensemble or a member of it draws ahead")

    # ------------------------------------------------------------------ batches

    def _plan(self, batch_size: int, key: np.ndarray | None) -> list[Part]:
        each = self._choice.part_of(batch_size)
        self._choice.refuse_empty(member.sampler.sampleable(member.storage) for member in self.members)
        chosen = self._choice.choose(randomness.key(self.generator) if key is None else key)
        owners = [(place, self.members[place], own_key) for place, own_key in chosen]
        return [Part(place, member.sampler, member.storage, each, own_key) for place, member, own_key in owners]

    def _read(self, request: Request, reserves: bool) -> Complete | None:
        reads = []
        for part in request.parts:
            member = self.members[part.place]
            with locked(member):
                if reserves:
                    part.sampler, part.storage = member.sampler, member.storage  # they may have been exchanged
                    part.reserve()
                elif not request.can_be_read(part):
                    return None
                reads.append((part.place, member.read(part, self._collate_fns[part.place])))
        return lambda: self._complete(reads)

    def _complete(self, reads: Sequence[tuple[int, Complete]]) -> tuple[Any, Any]:
        parts = [MemberPart(place, *read()) for place, read in reads]
        if any(member.sampler.takes_priorities for member in self.members):
            for part in parts:
                part.info.setdefault("priority_weight", torch.ones(part.count, device=part.info["index"].device))
        return self.completed(assembled(parts, self._collate_fn), collate.identity), parts

    def _info(self, info: Any) -> TensorDictBase:
        return info_of(info)

    def _locked_to_reserve(self) -> contextlib.AbstractContextManager[Any]:
        return all_locked([member for member in self.members if member.sampler.reads_to_reserve])

    def stats(self) -> dict[str, int | float | bool]:
        """Numbers to watch, JSON as they are: those of all members together, and the batches that wait here."""
        size, count = (sum(member.stats()[name] for member in self.members) for name in ("size", "write_count"))
        room = self.storage.max_size
        waiting = 0 if self.prefetch_queue is None else len(self.prefetch_queue)
        watched = {"size": size, "write_count": count, "prefetch_queue_size": waiting, "initialized": True}
        return watched | {"capacity": room, "utilization": size / room}

    def plan(self, data: Any = None) -> Plan:
        """The memory of all members, as `ReplayBuffer.plan`; data is for each of them, or a list of data for one each."""
        with all_locked(self.members):
            return planning.plan(planning.of_members([member.memory_shares for member in self.members], data))

    # ------------------------------------------------------------------ members and their items

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        """What an index names.

        - An int: the member itself; `:` this ensemble; a slice, list, array, mask or tensor an ensemble of these members,
          with the same transform, collate functions, batch size and generator, and their part of p.
        - A pair of such an index and one of items: `ensemble[i][j]`, or for several members the items j of the storage of
          each, collated; no transforms.

        IndexError out of range, TypeError for floats, RuntimeError for a tensor of several dims.
        """
        if isinstance(index, tuple) and len(index) > 1:
            return self._items(index[0], index[1] if len(index) == 2 else index[1:])
        return picked(index, self.members, self, self._of_some)

    def _of_some(self, places: Sequence[int]) -> "ReplayBufferEnsemble":
        choice = self._choice.over(places)
        some = ReplayBufferEnsemble(
            *(self.members[place] for place in places),
            transform=self._transform,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            collate_fns=[self._collate_fns[place] for place in places],
            pin_memory=self._pin_memory,
            generator=self.generator,
        )
        some._choice = choice
        return some

    def _items(self, index: Any, item: Any) -> Any:
        places = named(index, len(self))
        if isinstance(places, int):
            return self.members[places][item]
        found = []
        for place in places:
            member = self.members[place]
            with locked(member):
                data = member.storage[item]
                data = editing.owned(data) if member.storage.is_live(item) else data
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
            sampler.update_priority(index, priority, storage=self.storage)  # warns
            return
        for place, slots, values in sampler.routed(index, priority, self.storage.members):
            self.members[place].update_priority(slots, values)

    def mark_update(self, index: Any) -> None:
        """Give items of a sample the default priority of their members; `index` as for `update_priority`."""
        for place, _, slots in list(routed(index, self._ndims)):
            self.members[place].mark_update(slots)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the items of a sample the priorities in it: each member those under its `priority_key`, or "td_error".

        The sample is one as it came, [n, k, ...], or of one dim of items. Several values an item are reduced by members
        that are a `TensorDictReplayBuffer`; without the entry items get the default priority; members without priorities
        are passed over. KeyError without the index, and the errors of `update_priority`, before anything changes.
        """
        keys = {member.priority_key for member in self.members}
        changes = [self._changes(items) for items in items_of(data, [*keys, *_OF_UNITS])]
        for member, change in chain.from_iterable(changes):
            member.update_priority_of(change)

    def _changes(self, items: TensorDictBase) -> list[tuple[ReplayBuffer, TensorDictBase]]:
        """The members with priorities, and their items with the slots as "index". The errors of `update_priority`."""
        count, changes = items.batch_size[0], []
        for place, entries, slots in routed(first_slots(items["index"], count), self._ndims):
            member = self.members[place]
            if not member.sampler.takes_priorities:
                continue
            refuse_unstored(slots, member.storage, place)
            change = TensorDict({"index": slots}, [len(slots)])
            for key in (member.priority_key, *_OF_UNITS):
                entry = items.get(key, None)
                if entry is not None:
                    change.set(key, entry.reshape(count, -1)[entries.to(entry.device)])
            member.refuse_priorities(change.get(member.priority_key, None), len(slots))
            changes.append((member, change))
        return changes

    @property
    def _ndims(self) -> list[int]:
        return [member.storage.ndim for member in self.members]

    # ------------------------------------------------------------------ checkpoints and copies

    def _unchanging(self) -> contextlib.AbstractContextManager[Any]:
        with contextlib.ExitStack() as held:
            held.enter_context(all_locked(self.members))
            for each in (*self.members, self):
                if each.prefetch_queue is not None:
                    held.enter_context(each.prefetch_queue.held())
            return held.pop_all()

    def _transaction(self) -> contextlib.AbstractContextManager[Any]:
        with contextlib.ExitStack() as steps:
            for member in self.members:
                if member.storage.checkpointer.changes_rows:
                    steps.enter_context(member.storage.part())  # two of them may have one storage
            return steps.pop_all()

    def saved(self, out: Writing) -> dict[str, Any]:
        for member in self.members:
            member.drop_prefetched()
        return {
            **self._saved_settings(),
            "members": [member.saved(out) for member in self.members],
            "sampler": described(self.sampler, {"choice": self._choice.saved()}),
        }

    def restoring(
        self, tree: Any, source: Source, options: LoadOptions, where: str, beside: Collection[Sampled] = ()
    ) -> Callable[[], None]:
        fields = fields_of(tree, where)
        members = fields.items("members")
        if len(members) != len(self):
            raise CheckpointMismatch(f"{where}: {len(members)} buffers were saved, {len(self)} are here")
        choice = Entries(state_for(self.sampler, fields.any("sampler"), f"{where}, sampler"), self.sampler)
        rest = [self._choice.restoring(choice.fields("choice"), choice)]
        choice.settle()
        rest += self._restoring_settings(fields, options, where)
        checks = []
        for place, (member, saved) in enumerate(zip(self.members, members, strict=True)):
            before = [*beside, *self.members[:place]]
            checks.append(partial(member.restoring, saved, source, options, f"{where}, member {place}", before))
        return Together([self.drop_prefetched, together(checks), *rest])

    def restoring_dump(self, dump: TorchrlDump, options: LoadOptions) -> NoReturn:
        raise CheckpointMismatch(
            f"{dump.where}: in torchrl, dump each buffer of an ensemble by itself, and load it into a member"
        )

    def __getstate__(self) -> dict[str, Any]:
        for each in (self, *self.members):
            each.drop_prefetched()
        return {
            key: value for key, value in self.__dict__.items() if key not in ("_stepping", "_iterating", "_readers")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
        self._connect()
        if self.generator is not None:  # one generator again, of all
            self._pass_generator()

    # ------------------------------------------------------------------ what only members can do

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

    def __repr__(self) -> str:
        parts = f"storages={self.storage},\nsamplers={self.sampler},\nwriters={self.writer},"
        return (
            f"{type(self).__name__}(\n{indent(parts, '    ')}\nbatch_size={self._batch_size},\n"
            f"transform={self._transform},\ncollate_fn={self._collate_fn})"
        )

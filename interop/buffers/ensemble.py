"""Several replay buffers that are sampled from together."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from textwrap import indent
from typing import Any, NoReturn, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch, Fields, Writing
from fbuf.looking import Description, Why
from interop.buffers import checkpoints, collate, editing
from interop.buffers.components import check_fit
from interop.buffers.ensemble_parts import MemberPart, assembled, info_of, items_of
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.request import Request
from interop.buffers.requested_batch import RequestedBatch
from interop.buffers.sampled import Complete, Sampled, as_collate_fn
from interop.buffers.slot_account import in_member, pair_of
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, Together, described, state_for, together
from interop.data.arguments import whole
from interop.data.keys import entry_at, no_priorities
from interop.data.members import named, of_kind, picked, routed
from interop.data.reductions import reduced
from interop.samplers import SamplerEnsemble
from interop.shared.storage_lock import Held, all_locked, each_held, locked
from interop.storages import Storage, StorageEnsemble
from interop.transforms import Transform
from interop.transforms.chain import as_chain
from interop.writers import WriterEnsemble

_OF_UNITS = ("anchor_index", "validity_mask")  # entries that a sample unit sets beside the rows of drawn items


class ReplayBufferEnsemble(Sampled):
    """Several replay buffers, sampled from together; its length is their number.

    A batch [n, k] has n parts of k items, each from one member. The transforms of a member run on its rows, those of the
    ensemble on the stack of all parts. Samples of tensordicts have a nested "index": the slots under "index", the numbers of
    the members under "buffer_ids"; and the infos of the samplers. If only some members have priorities, the others' items
    have a "priority_weight" of 1.

    An iteration draws as many items as the members hold together, with the shares of `p`.

    Write through the members: `ensemble[i].extend(data)`. The lock of a member is held while its part is drawn and read;
    all locks are held together only while prefetched batches are requested, and during saves and loads.

    Args:
        rbs: the members; or pass `storages`, `samplers` and `writers`, from which they are made.
        transform: runs on batches, after the transforms of the members.
        batch_size: of `sample()` and of iteration.
        collate_fn: joins the list of parts to a batch; by default they are stacked, lazily if they are not alike.
        collate_fns: for each member a replacement of its own collate function, or None.
        p, sample_from_all, num_buffer_sampled: as for `SamplerEnsemble`.
        generator: governs every draw, and replaces the generators of the members; by default torch's global one chooses
            members, and the members keep theirs.
        shared: worker processes and this one lock each other out of the members.
        prefetch, pin_memory: as for `ReplayBuffer`.
    """

    runs_in_ray = False

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
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
    ) -> None:
        super().__init__(batch_size=batch_size, prefetch=prefetch, pin_memory=pin_memory, generator=generator)
        self._collate_fn = as_collate_fn(collate_fn) or collate.stack
        self._transform = as_chain(transform)
        components = (storages, samplers, writers)
        if rbs and any(component is not None for component in components):
            raise RuntimeError("give the buffers, or storages, samplers and writers; not both")
        if not rbs and (p is not None or sample_from_all or num_buffer_sampled is not None):
            raise RuntimeError(
                "p, sample_from_all and num_buffer_sampled go with buffers: give them to SamplerEnsemble"
            )
        count = len(rbs) or (0 if storages is None else len(storages))
        if collate_fns is not None and len(collate_fns) != count:
            raise ValueError(f"collate_fns must be as many as members: got {len(collate_fns)} for {count}")
        self._collate_fns = list(map(as_collate_fn, [None] * count if collate_fns is None else collate_fns))
        if rbs:
            self.members: tuple[ReplayBuffer, ...] = of_kind("buffer", rbs, ReplayBuffer, ReplayBufferEnsemble)
            parts = [member.sampler for member in self.members]
            self._sampler = SamplerEnsemble(
                *parts, p=p, sample_from_all=sample_from_all, num_buffer_sampled=num_buffer_sampled
            )
        else:
            self.members, self._sampler = _made_of(*components, self._collate_fns)
        if any(member.limiter is not None for member in self.members):
            raise ValueError(
                "a member has a limiter, which does not count the draws of an ensemble: build the members without one"
            )
        if prefetch:
            for member in self.members:
                member.sampler.check_fit(member.storage, member.writer, prefetches=True, expands=False)
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
        if self.prefetch_queue is not None:
            for member in self.members:
                member.readers.add(self)

    def _epoch_items(self) -> float:
        """The number of items of all members; infinity if one is a stream, which has no length."""
        try:
            return sum(map(len, self.members))
        except TypeError:
            return math.inf

    # ------------------------------------------------------------------ the components that the members have now

    @property
    def storage(self) -> StorageEnsemble:
        """The storages of the members, with their transforms."""
        transforms = [member.transform for member in self.members]
        return StorageEnsemble(*(member.storage for member in self.members), transforms=transforms)

    @property
    def sampler(self) -> SamplerEnsemble:
        """The samplers of the members. Its `p` and `num_buffer_sampled` can be set."""
        self._sampler.buffer_generator = self.generator
        return self._sampler.of_members([member.sampler for member in self.members])

    @property
    def writer(self) -> WriterEnsemble:
        """The writers of the members."""
        return WriterEnsemble(*(member.writer for member in self.members))

    def _pass_generator(self) -> None:
        for member in self.members:
            if member.generator is not self.generator:
                member.set_rng(self.generator)

    def share(self, shared: bool = True) -> Self:
        """Turn the locks among processes of all members on or off. ValueError if the ensemble or a member prefetches."""
        if shared:
            self._refuse_to_share()
        for member in self.members:
            member.share(shared)
        return self

    def _refuse_to_share(self) -> None:
        if any(buffer.prefetch_queue is not None for buffer in (self, *self.members)):
            raise ValueError("prefetch and shared exclude each other: the ensemble or a member of it draws ahead")

    # ------------------------------------------------------------------ batches

    def _next_batch(self, batch_size: int) -> tuple[Any, Any]:
        self.sampler.item_values.raise_deferred()
        return super()._next_batch(batch_size)

    def _plan(self, batch_size: int, key: np.ndarray) -> list[Request]:
        sampler = self.sampler
        size = sampler.choice.part_of(
            batch_size, (member.sampler.sampleable(member.storage) for member in self.members)
        )
        chosen = sampler.choice.choose(key)
        owners = [(place, self.members[place], own_key) for place, own_key in chosen]
        return [
            Request(place, member.sampler.draws, member.storage, size, own_key) for place, member, own_key in owners
        ]

    def _read(self, batch: RequestedBatch, reserves: bool) -> Complete | None:
        reads = []
        for request in batch.requests:
            member = self.members[request.place]
            with locked(member):
                if reserves:
                    request.draws = member.sampler.draws  # it may have been exchanged, as the storage
                    request.storage = member.storage
                    request.reserve()
                elif not batch.can_be_read(request):
                    return None
                reads.append((request.place, member.read(request, self._collate_fns[request.place])))
        return lambda: self._complete(reads)

    def _complete(self, reads: Sequence[tuple[int, Complete]]) -> tuple[Any, Any]:
        parts = [MemberPart(place, *read()) for place, read in reads]
        if any(member.sampler.hooks.takes_priorities for member in self.members):
            for part in parts:
                part.info.setdefault("priority_weight", torch.ones(part.slots.shape[0], device=part.slots.device))
        return self._completed(assembled(parts, self._collate_fn), collate.identity), parts

    def _info(self, info: Any) -> TensorDictBase:
        return info_of(info)

    def _locked_to_reserve(self) -> Held:
        return all_locked([member for member in self.members if member.sampler.draws.reads_to_reserve])

    # ------------------------------------------------------------------ members and their items

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        """The member, members or items at an index.

        - An int: the member itself; `:` this ensemble; a slice, list, array, mask or tensor an ensemble of these members,
          with the same transform, collate functions, batch size and generator, and their part of p.
        - A pair of such an index and one of items: `ensemble[i][j]`, or for several members the items j of each storage,
          collated, without transforms.

        IndexError out of range, TypeError for floats, RuntimeError for a tensor of several dims.
        """
        if isinstance(index, tuple) and len(index) > 1:
            return self._items(index[0], index[1] if len(index) == 2 else index[1:])
        return picked(index, self.members, self, self._of_some)

    def _of_some(self, places: Sequence[int]) -> "ReplayBufferEnsemble":
        sampler = self.sampler[places]
        some = ReplayBufferEnsemble(
            *(self.members[place] for place in places),
            transform=self._transform,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            collate_fns=[self._collate_fns[place] for place in places],
            pin_memory=self._pin_memory,
            generator=self.generator,
        )
        some._sampler = sampler
        return some

    def _items(self, index: Any, item: Any) -> Any:
        places = named(index, len(self))
        if isinstance(places, int):
            return self.members[places][item]
        batches = []
        for place in places:
            member = self.members[place]
            with locked(member):
                data, collate_fn = collate.read(member.storage, item, self._collate_fns[place] or member.collate_fn)
                data = editing.owned(data) if member.storage.is_live(item) else data
            batches.append(collate_fn(data))
        return self._collate_fn(batches)

    def why(self, index: tuple[int, Any], *, batch_size: int | None = None) -> Why:
        """What is known about an item of a member: as `ReplayBuffer.why`.

        `probability` is that a draw of a member has the item, where the member is chosen as for a part of a batch. `weight`
        is that in the member, as in samples.

        Args:
            index: (member, index of the item in it); or (member, *coordinates) for several item dims.
            batch_size: of the ensemble; that of the ensemble by default.
        """
        place, item = pair_of(index, len(self))
        size = self._batch_size if batch_size is None else whole("batch_size", batch_size)
        choice = self.sampler.choice
        part_size = None if size is None else size // choice.num_buffer_sampled
        shares = choice.shares().tolist()
        pairs = zip(shares, self.members, strict=True)
        is_blocked = any(share > 0 and not member.sampler.sampleable(member.storage) for share, member in pairs)
        found = self.members[place].why(item, batch_size=part_size or None)
        return in_member(found, place, shares[place], is_blocked)

    # ------------------------------------------------------------------ priorities

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of sampled items in the members that have priorities; a warning if none has.

        Args:
            index: `info["index"]` of the sample.
            priority: one value for all, or one for each slot of the index, in that order.

        Raises before anything changes: TypeError for another index, RuntimeError for another number of priorities,
        IndexError for slots that are not stored, ValueError for priorities that are negative or not finite.
        """
        if not any(member.sampler.hooks.takes_priorities for member in self.members):
            self.sampler.update_priority(index, priority)  # warns
            return
        self.sampler.item_values.raise_deferred()
        values = priority.detach() if isinstance(priority, Tensor) else torch.from_numpy(np.asarray(priority))
        routes = list(routed(index, self._ndims))
        count = sum(entries.numel() for _, entries, _ in routes)
        if values.numel() not in (1, count):
            raise RuntimeError(
                "priority should be a number or an iterable of the same length as index: "
                f"got {values.numel()} priorities for {count} indices"
            )
        changes = []
        for place, entries, slots in routes:
            if (member := self.members[place]).sampler.hooks.takes_priorities:
                own = values.reshape(-1)
                own = own[0] if values.numel() == 1 else own[entries.to(own.device)]
                member.sampler.item_values.checked(own)
                _refuse_unstored(slots, member.storage, place)
                changes.append((member, slots, own))
        for member, slots, own in changes:
            member.update_priority(slots, own)

    def mark_update(self, index: Any) -> None:
        """Give items of a sample the default priority of their members; `index` as for `update_priority`."""
        for place, _, slots in list(routed(index, self._ndims)):
            self.members[place].mark_update(slots)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of the items of a sample from its entries: those under the `priority_key` of each member.

        The sample is one as it came, [n, k, ...], or of one dim of items. A `TensorDictReplayBuffer` reduces several values
        an item to one. Members without priorities are skipped. KeyError for a sample without its index, or without the
        entry of a member with priorities, and the errors of `update_priority`, before anything changes.
        """
        self.sampler.item_values.raise_deferred()
        routes = []
        updates = []
        for items, index in items_of(data):
            for place, entries, slots in routed(index, self._ndims):
                if self.members[place].sampler.hooks.takes_priorities:
                    _refuse_unstored(slots, self.members[place].storage, place)
                    routes.append((self.members[place], items, entries, slots))
        for member, items, entries, slots in routes:
            change = TensorDict({"index": slots}, [len(slots)])
            for key in (member.priority_key, *_OF_UNITS):
                entry = entry_at(items, key)
                if entry is not None:
                    change.set(key, entry.reshape(len(items), -1)[entries.to(entry.device)])
            if change.get(member.priority_key, None) is None:
                raise no_priorities(member.priority_key, data)
            updates.append(_checked_update(member, change))
        for update in updates:
            update()

    def describe(self, rows: int | None = None, *, reward: NestedKey | None = None) -> Description:
        """What the members hold, and what each can draw: see `ReplayBuffer.describe`. Members are described one by one."""
        p = self.sampler.p
        parts = [1 / len(self.members)] * len(self.members) if p is None else p.tolist()
        members = []
        for member, part in zip(self.members, parts, strict=True):
            found = member.describe(rows, reward=reward)
            members.append(dataclasses.replace(found, facts={"part of a large batch": part, **found.facts}))
        stored = sum(len(member.storage) for member in self.members)
        facts: dict[str, int | float | str] = {"members": len(members), "items stored": stored}
        facts["sampler"] = type(self._sampler).__name__
        return Description(type(self).__name__, facts, members=tuple(members))

    @property
    def _ndims(self) -> list[int]:
        return [member.storage.ndim for member in self.members]

    # ------------------------------------------------------------------ checkpoints and copies

    def _unchanging(self) -> Held:
        return Held(self._held())

    def _held(self) -> Iterator[None]:
        queues = [buffer.prefetch_queue for buffer in (*self.members, self) if buffer.prefetch_queue is not None]
        with all_locked(self.members), each_held(queues):
            yield

    def _replaced_storages(self) -> list[Storage]:
        return [member.storage for member in self.members if member.storage.checkpointer.changes_rows]

    def state(self, out: Writing | None = None) -> dict[str, Any]:
        for member in self.members:
            member.drop_prefetched()
        return {
            **checkpoints.settings(self),
            "members": [member.state(out) for member in self.members],
            "sampler": described(self.sampler, {"choice": self.sampler.choice.state()}),
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state that `dumps` saves: that of each member, as of `ReplayBuffer.state_dict`, and the settings."""
        with self._unchanging():
            self.drop_prefetched()
            for member in self.members:
                member.drop_prefetched()
            return {
                "_members": [checkpoints.state_dict(member) for member in self.members],
                "_sampler": self.sampler.choice.state(),
                **checkpoints.settings_dict(self),
            }

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        where = options.where
        if options.resize:
            raise NotImplementedError(
                "an ensemble does not load members of another capacity: open the checkpoint by interop.open(path, 'r+'), "
                "and resize() its members"
            )
        sampler = self.sampler
        if checkpoints.is_state_dict(tree, options):
            fields = Fields(tree, "the state_dict of an ensemble")
            members = fields.items("_members")
            choice: object = {"choice": fields.any("_sampler")}
            with_settings = checkpoints.with_settings_dict
        else:
            fields = checkpoints.fields_of(tree, where)
            members = fields.items("members")
            choice = state_for(sampler, fields.any("sampler"), f"{where}, sampler")
            with_settings = checkpoints.with_settings
        if len(members) != len(self):
            raise CheckpointMismatch(f"{where}: {len(members)} buffers were saved, {len(self)} are here")
        entries = Entries(choice, sampler)
        rest = [sampler.choice.with_state(entries.fields("choice"), entries)]
        entries.settle()
        rest += with_settings(self, fields, options)
        checks = []
        for place, (member, saved) in enumerate(zip(self.members, members, strict=True)):
            beside = (*options.beside, *self.members[:place])
            of_member = dataclasses.replace(options, where=f"{where}, member {place}", beside=beside)
            checks.append(partial(member.with_state, saved, of_member))
        return Together([self.drop_prefetched, together(checks), *rest])

    def __getstate__(self) -> dict[str, Any]:
        for buffer in (self, *self.members):
            buffer.drop_prefetched()
        state = {key: value for key, value in vars(self).items() if key not in ("_stepping", "_iterating", "readers")}
        return state | {"_sampler": copy.copy(self._sampler).of_members([])}  # the members have their samplers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()
        self._connect()
        if self.generator is not None:  # one generator again, of all
            self._pass_generator()

    # ------------------------------------------------------------------ what only members can do

    def add(self, data: Any) -> NoReturn:
        """RuntimeError: only members can be written to."""
        raise RuntimeError("an ensemble cannot be written to: index the member first, ensemble[i].extend(data)")

    extend = add

    def empty(self, empty_write_count: bool = True) -> NoReturn:
        """NotImplementedError: only members can be emptied."""
        raise NotImplementedError("an ensemble is not emptied as a whole: ensemble[i].empty()")

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield from ((str(place), member) for place, member in enumerate(self.members))
        yield from (("sampler", self.sampler), ("batch_size", self._batch_size))
        yield from (("transform", self._transform), ("collate_fn", self._collate_fn))

    def __repr__(self) -> str:
        parts = f"storages={self.storage},\nsamplers={self.sampler},\nwriters={self.writer},"
        return (
            f"{type(self).__name__}(\n{indent(parts, '    ')}\nbatch_size={self._batch_size},\n"
            f"transform={self._transform},\ncollate_fn={self._collate_fn})"
        )


def _made_of(
    storages: StorageEnsemble | None,
    samplers: SamplerEnsemble | None,
    writers: WriterEnsemble | None,
    collate_fns: Sequence[Any],
) -> tuple[tuple[ReplayBuffer, ...], SamplerEnsemble]:
    """A buffer for each member of three ensembles, with the generator of its sampler; and the sampler of the ensemble.

    TypeError or ValueError for other components, and the errors of `ReplayBuffer`; nothing has changed then.
    """
    kinds = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for component, (name, kind) in zip((storages, samplers, writers), kinds.items(), strict=True):
        if type(component) is not kind:
            came = "nothing" if component is None else type(component).__name__
            raise TypeError(
                f"an ensemble needs buffers, or {', '.join(kinds)}: {name} must be a {kind.__name__}, got {came}"
            )
    assert storages is not None and samplers is not None and writers is not None
    if not len(storages) == len(samplers) == len(writers):
        raise ValueError(f"there are {len(storages)} storages, {len(samplers)} samplers and {len(writers)} writers")
    transforms = storages.transforms or [None] * len(storages)
    parts = list(zip(storages.members, samplers.members, writers.members, transforms, collate_fns, strict=True))
    for storage, sampler, writer, _, _ in parts:
        check_fit(storage, sampler, writer, None, False)
    buffers = tuple(
        ReplayBuffer(
            storage=storage,
            sampler=sampler,
            writer=writer,
            transform=transform,
            collate_fn=collate_fn,
            generator=sampler.buffer_generator,
        )
        for storage, sampler, writer, transform, collate_fn in parts
    )
    return buffers, samplers


def _checked_update(member: ReplayBuffer, items: TensorDictBase) -> Callable[[], None]:
    """Check an update of the priorities of items, [n] with "index", by their `priority_key`. The function does it."""
    values = items[member.priority_key]
    checked = member.sampler.item_values.checked
    if update := getattr(member, "update_tensordict_priority", None):  # which reduces several values of an item to one
        checked(reduced(values, len(items), member.sampler))
        return partial(update, items)
    checked(values)
    if values.numel() != len(items):
        raise RuntimeError(f"there are {values.numel()} priorities for {len(items)} items of a {type(member).__name__}")
    return partial(member.update_priority, items["index"], values)


def _refuse_unstored(slots: Tensor, storage: Storage, place: int) -> None:
    """IndexError for a slot past the items that member `place` stores."""
    ends = [len(storage)] if storage.ndim == 1 else list(storage.shape or [])
    columns = slots[:, None] if slots.ndim == 1 else slots
    for column, end in zip(columns.unbind(-1), ends, strict=True):
        if column.numel() and int(column.max()) >= end:
            raise IndexError(f"slot {int(column.max())} is out of range: member {place} has {end} of them stored")

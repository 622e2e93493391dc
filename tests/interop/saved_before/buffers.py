"""Buffers and their parts, as checkpoints and as results of `state_dict`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from tensordict import TensorDict

from interop import (
    CompressedListStorage,
    ConsumingSampler,
    Flat2TED,
    FlatStorageCheckpointer,
    H5Combine,
    H5Split,
    H5StorageCheckpointer,
    HERReplayBuffer,
    ImmutableDatasetWriter,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    ListStorageCheckpointer,
    Nested2TED,
    NestedStorageCheckpointer,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SchedulerList,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StepScheduler,
    Storage,
    StorageCheckpointerBase,
    StorageEnsemble,
    TED2Flat,
    TED2Nested,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    TensorStorageCheckpointer,
    Writer,
    WriterEnsemble,
)
from interop.schedulers import ParameterScheduler
from interop.transforms import Compose, MultiStepTransform, ObservationNorm, RewardScaling, Transform, VecNormV2
from tests.interop.saved_before import data
from tests.interop.saved_before.case import (
    SETTLED,
    Case,
    Rows,
    Use,
    changing_parameters,
    drawn,
    from_folder,
    from_state,
    members_of,
    standing,
    through_folder,
    through_state,
    write,
)
from tests.interop.saved_before.plain import Seen, flat

CAPACITY, BATCH = 8, 4
GoOn: TypeAlias = Callable[[ReplayBuffer, Path], Seen]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


@dataclasses.dataclass(frozen=True)
class Built:
    """A buffer that is made, and its history before the save.

    Args:
        make: an empty buffer with this generator.
        rows: its data.
        steps: how many rows each write has; a batch is drawn after each.
        then: what is done last.
        before: the data of the history, where it is other data.
        changes: whether a load changes parameters, of which it warns.
        ways: how it is saved.
        rounded: parts of the names of numbers that are not the same on every processor.
    """

    make: Callable[[torch.Generator], ReplayBuffer]
    rows: Rows = data.plain
    steps: tuple[int, ...] = (5, 1, 5)
    then: Callable[[ReplayBuffer], None] = lambda buffer: None
    ways: tuple[str, ...] = ("dumps",)
    rounded: tuple[str, ...] = SETTLED
    writes: bool = True
    before: Rows | None = None
    changes: bool = False

    def empty(self) -> ReplayBuffer:
        """One of another seed, into which is loaded."""
        return self.make(seeded(99))

    def fill(self, buffer: ReplayBuffer) -> None:
        for member in [buffer, *members_of(buffer)]:
            if member.generator is not None:
                member.generator.manual_seed(1)
        torch.manual_seed(1)
        first = 0
        for turn, count in enumerate(self.steps):
            write(buffer, (self.before or self.rows)(first, count))
            first += count
            drawn(buffer, "", turn)
        self.then(buffer)

    def case(self, way: str) -> Case[ReplayBuffer]:
        save, load = WAYS[way]
        use = Use(self.empty, self.rows, sum(self.steps), self.writes, self.changes)

        def loaded(buffer: ReplayBuffer, path: Path) -> ReplayBuffer:
            with changing_parameters(self.changes):
                return load(buffer, path)

        return Case(self.empty, self.fill, save, loaded, use, self.rounded)


WAYS: dict[str, tuple[Callable[[ReplayBuffer, Path], None], Callable[[ReplayBuffer, Path], ReplayBuffer]]] = {
    "dumps": (through_folder, from_folder),
    "state_dict": (through_state, from_state),
}
EVERY_WAY = ("dumps", "state_dict")


def td(
    storage: Callable[[], Storage],
    sampler: Callable[[], Sampler] = RandomSampler,
    writer: Callable[[], Writer] = TensorDictRoundRobinWriter,
    transform: Callable[[], Transform] | None = None,
    checkpointer: Callable[[], StorageCheckpointerBase] | None = None,
    prefetch: int | None = None,
    batch_size: int = BATCH,
) -> Callable[[torch.Generator], ReplayBuffer]:
    """Makes a `TensorDictReplayBuffer`."""

    def made(generator: torch.Generator) -> ReplayBuffer:
        return TensorDictReplayBuffer(
            storage=storage(),
            sampler=sampler(),
            writer=writer(),
            transform=None if transform is None else transform(),
            checkpointer=None if checkpointer is None else checkpointer(),
            prefetch=prefetch,
            batch_size=batch_size,
            generator=generator,
        )

    return made


def rb(
    storage: Callable[[], Storage],
    sampler: Callable[[], Sampler] = RandomSampler,
    writer: Callable[[], Writer] = RoundRobinWriter,
    checkpointer: Callable[[], StorageCheckpointerBase] | None = None,
    of_lists: bool = False,
) -> Callable[[torch.Generator], ReplayBuffer]:
    """Makes a `ReplayBuffer`."""

    def made(generator: torch.Generator) -> ReplayBuffer:
        return ReplayBuffer(
            storage=storage(),
            sampler=sampler(),
            writer=writer(),
            checkpointer=None if checkpointer is None else checkpointer(),
            collate_fn=list if of_lists else None,
            batch_size=BATCH,
            generator=generator,
        )

    return made


def memory(ndim: int = 1, **options: object) -> Callable[[], LazyTensorStorage]:
    return lambda: LazyTensorStorage(CAPACITY * ndim, ndim=ndim, **options)  # type: ignore[arg-type]


def maps(ndim: int = 1, **options: object) -> Callable[[], LazyMemmapStorage]:
    return lambda: LazyMemmapStorage(CAPACITY * ndim, ndim=ndim, **options)  # type: ignore[arg-type]


def of_frames(ndim: int = 1, **options: object) -> Callable[[], LazyFrameStorage]:
    return lambda: LazyFrameStorage(CAPACITY * ndim, obs_key="pixels", stack=2, stack_dim=-1, ndim=ndim, **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------ storages

LISTS: dict[str, Callable[[], Storage]] = {
    "list": lambda: ListStorage(CAPACITY),
    "lazy stack": lambda: LazyStackStorage(CAPACITY),
    "compressed": lambda: CompressedListStorage(CAPACITY),
}
STORAGES: dict[str, Built] = {
    "memory": Built(td(memory()), ways=EVERY_WAY),
    "memory of two dims": Built(td(memory(2)), data.lanes, ways=EVERY_WAY),
    "maps": Built(td(maps()), ways=EVERY_WAY),
    "maps of two dims": Built(td(maps(2)), data.lanes),
    "frames": Built(td(of_frames()), data.frames, ways=EVERY_WAY),
    "frames of two dims": Built(td(of_frames(2)), data.frames_of_lanes),
    "frames after zeros": Built(td(of_frames(padding="zero", check=False)), data.frames),
    "given tensors": Built(td(lambda: TensorStorage(data.plain(50, CAPACITY)))),
    **{name: Built(td(storage), ways=EVERY_WAY) for name, storage in LISTS.items()},
    **{f"{name}, unlike items": Built(rb(LISTS[name], of_lists=True), data.unlike) for name in LISTS},
    "list, objects": Built(rb(LISTS["list"], of_lists=True), data.objects),
    "compressed, objects": Built(rb(LISTS["compressed"], of_lists=True), data.objects),
    "memory, nested": Built(td(memory()), data.nested, ways=EVERY_WAY),
    "maps, nested": Built(td(maps()), data.nested),
    "memory, several files": Built(td(memory()), data.wide),
    "list, several files": Built(td(LISTS["list"]), data.wide),
    "list, long texts": Built(rb(LISTS["list"], of_lists=True), data.long_texts, steps=(2, 1)),
    "memory, text": Built(td(memory()), data.texts, ways=EVERY_WAY),
    "maps, text": Built(td(maps()), data.texts),
    "memory, values": Built(td(memory()), data.values),
    "memory, ragged": Built(td(memory()), data.ragged, ways=EVERY_WAY),
    "maps, ragged": Built(td(maps(ragged=["tokens"])), data.ragged),
    "list, text": Built(td(LISTS["list"]), data.texts),
    "memory, tensor": Built(rb(memory()), data.tensors, ways=EVERY_WAY),
    "memory, tree": Built(rb(memory()), data.trees, ways=EVERY_WAY),
    "maps, tree": Built(rb(maps()), data.trees),
    "list, tree": Built(rb(LISTS["list"]), data.trees_by_item),
    "memory, tensorclass": Built(rb(memory()), data.classes),
    "list, tensorclass": Built(rb(LISTS["list"]), data.classes),
}
STORAGES |= {
    f"{name}, in part": dataclasses.replace(STORAGES[name], steps=(3, 2), ways=("dumps",))
    for name in ("memory", "memory of two dims", "maps", "frames", *LISTS, "memory, text", "memory, ragged")
}


def emptied(buffer: ReplayBuffer) -> None:
    buffer.empty()


STORAGES |= {
    f"{name}, emptied": dataclasses.replace(STORAGES[name], then=emptied, ways=("dumps",))
    for name in ("memory", "maps", "list", "memory, text")
}
STORAGES["frames, emptied"] = Built(td(of_frames()), data.frames, steps=(5, 1, 6), then=emptied)


# ------------------------------------------------------------------ keys that came later


def by_key(buffer: ReplayBuffer) -> None:
    """The stored rows get a key."""
    buffer["later"] = torch.arange(len(buffer))[:, None] / 4


def by_fill(buffer: ReplayBuffer) -> None:
    """A batch has a key that the rows before it do not have."""
    buffer.extend(data.newer(data.plain, "later")(11, 3))


def overwritten(buffer: ReplayBuffer) -> None:
    """Single rows are edited."""
    buffer[2] = data.plain(70, 1)[0]
    buffer.set_at_("obs", torch.full((2, 2), 0.5), torch.tensor([1, 4]))


FILL = {"later": 0.5}
WITH_LATER = data.newer(data.plain, "later")
KEYS: dict[str, Built] = {
    "memory": Built(td(memory()), WITH_LATER, then=by_key, ways=EVERY_WAY, before=data.plain),
    "maps": Built(td(maps()), WITH_LATER, then=by_key, before=data.plain),
    "fill": Built(td(memory(fill=FILL)), WITH_LATER, then=by_fill, ways=EVERY_WAY, before=data.plain),
    "fill in maps": Built(td(maps(fill=FILL)), WITH_LATER, then=by_fill, before=data.plain),
    "edits": Built(td(memory()), then=overwritten, ways=EVERY_WAY),
    "edits of a list": Built(td(LISTS["list"]), then=lambda buffer: buffer.__setitem__(2, data.plain(70, 1)[0])),
}


# ------------------------------------------------------------------ samplers


def consumer(buffer: ReplayBuffer) -> None:
    sampler = buffer.sampler
    assert isinstance(sampler, StalenessAwareSampler)
    sampler.consumer_version = 3


def prioritized(**options: object) -> Callable[[], Sampler]:
    return lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5, **options)  # type: ignore[arg-type]


def annealed(buffer: ReplayBuffer) -> None:
    """The exponents differ from those of the constructor, as those of a scheduler do."""
    assert isinstance(buffer.sampler, PrioritizedSampler)
    buffer.sampler.beta = 0.9


SLICES = {"slice_len": 2, "strict_length": False}
SAMPLERS: dict[str, Built] = {
    "random": Built(rb(memory(), RandomSampler), ways=EVERY_WAY),
    "without replacement": Built(td(memory(), SamplerWithoutReplacement), ways=EVERY_WAY),
    "without replacement, drop_last": Built(td(memory(), lambda: SamplerWithoutReplacement(drop_last=True))),
    "without replacement, in order": Built(td(memory(), lambda: SamplerWithoutReplacement(shuffle=False))),
    "without replacement, of a list": Built(td(LISTS["list"], SamplerWithoutReplacement)),
    "without replacement, prefetched": Built(td(memory(), SamplerWithoutReplacement, prefetch=2), writes=False),
    "prioritized": Built(td(memory(), prioritized()), ways=EVERY_WAY),
    "prioritized, of maps": Built(td(maps(), prioritized()), ways=EVERY_WAY),
    "prioritized, of a list": Built(td(LISTS["list"], prioritized())),
    "prioritized, of text": Built(td(memory(), prioritized()), data.texts),
    "prioritized, in part": Built(td(memory(), prioritized()), steps=(3, 2)),
    "prioritized, double": Built(td(memory(), prioritized(dtype=torch.float64)), ways=EVERY_WAY),
    "prioritized, within": Built(td(memory(), prioritized(max_priority_within_buffer=True)), ways=EVERY_WAY),
    "prioritized, annealed": Built(
        td(memory(), prioritized()), then=annealed, ways=("dumps", "state_dict"), changes=True
    ),
    "prioritized, of two dims": Built(td(memory(2), lambda: PrioritizedSampler(2 * CAPACITY, 0.7, 0.5)), data.lanes),
    "slices": Built(td(memory(), lambda: SliceSampler(**SLICES)), data.episodes, ways=EVERY_WAY),
    "slices, of ends": Built(td(memory(), lambda: SliceSampler(num_slices=2)), data.ended),
    "slices, of maps": Built(td(maps(), lambda: SliceSampler(**SLICES)), data.episodes),
    "slices, of frames": Built(td(of_frames(), lambda: SliceSampler(**SLICES)), data.frames),
    "slices, of two dims": Built(td(memory(2), lambda: SliceSampler(**SLICES)), data.lanes),
    "slices, of a lazy stack": Built(td(LISTS["lazy stack"], lambda: SliceSampler(**SLICES)), data.episodes),
    "slices without replacement": Built(
        td(memory(), lambda: SliceSamplerWithoutReplacement(**SLICES)), data.episodes, ways=EVERY_WAY
    ),
    "prioritized slices": Built(
        td(memory(), lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, **SLICES)), data.episodes, ways=EVERY_WAY
    ),
    "consuming": Built(td(memory(), ConsumingSampler), ways=EVERY_WAY),
    "consuming, twice": Built(td(memory(), lambda: ConsumingSampler(2)), ways=EVERY_WAY),
    "consuming, of a list": Built(td(LISTS["list"], ConsumingSampler)),
    "prompt groups": Built(td(memory(), lambda: PromptGroupSampler(2)), data.prompts, ways=EVERY_WAY),
    "prompt groups, used up": Built(
        td(memory(), lambda: PromptGroupSampler(2, max_uses=2), batch_size=2), data.prompts, ways=EVERY_WAY
    ),
    "prompt groups, stale": Built(
        td(
            memory(),
            lambda: PromptGroupSampler(2, staleness=StalenessAwareSampler(4, version_key="id")),
            batch_size=2,
        ),
        data.prompts,
    ),
    "staleness": Built(
        td(memory(), lambda: StalenessAwareSampler(max_staleness=2)), data.versions, then=consumer, ways=EVERY_WAY
    ),
}


# ------------------------------------------------------------------ writers


def filled_before(generator: torch.Generator) -> ReplayBuffer:
    """Of a dataset, which is there before the buffer is."""
    storage = LazyTensorStorage(CAPACITY)
    ReplayBuffer(storage=storage).extend(data.plain(0, 6))
    writer, sampler = ImmutableDatasetWriter(), SamplerWithoutReplacement()
    return TensorDictReplayBuffer(
        storage=storage, sampler=sampler, writer=writer, batch_size=BATCH, generator=generator
    )


def draws_twice(buffer: ReplayBuffer) -> None:
    drawn(buffer, "", 0)


WRITERS: dict[str, Built] = {
    "round robin": Built(rb(memory()), ways=EVERY_WAY),
    "round robin, generations": Built(
        td(memory(), writer=lambda: RoundRobinWriter(track_generations=True)), ways=EVERY_WAY
    ),
    "round robin of tensordicts, of a list": Built(td(LISTS["list"], writer=TensorDictRoundRobinWriter)),
    "highest": Built(td(memory(), writer=lambda: TensorDictMaxValueWriter("rank")), data.ranked, ways=EVERY_WAY),
    "highest, in part": Built(td(memory(), writer=lambda: TensorDictMaxValueWriter("rank")), data.ranked, (3, 2)),
    "highest, of a list": Built(td(LISTS["list"], writer=lambda: TensorDictMaxValueWriter("rank")), data.ranked),
    "highest, prioritized": Built(
        td(memory(), prioritized(), writer=lambda: TensorDictMaxValueWriter("rank")), data.ranked
    ),
    "immutable": Built(filled_before, steps=(), then=draws_twice, writes=False, ways=EVERY_WAY),
}


# ------------------------------------------------------------------ transforms


def norm() -> Transform:
    return ObservationNorm(loc=0.0, scale=1.0, in_keys=["obs"])


def fitted(buffer: ReplayBuffer) -> None:
    """Constants that the constructor did not have."""
    (transform,) = buffer.transform
    transform.loc.fill_(0.5)
    transform.scale.fill_(4.0)


def several_steps() -> Transform:
    return Compose(RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]), MultiStepTransform(2, 0.5))


TRANSFORMS: dict[str, Built] = {
    "constants": Built(td(memory(), transform=lambda: ObservationNorm(loc=0.5, scale=2.0, in_keys=["obs"]))),
    "steps that wait": Built(td(memory(), transform=several_steps), data.ted, ways=("dumps", "state_dict")),
    "running norm": Built(
        td(memory(), transform=lambda: VecNormV2(in_keys=["obs"], reduce_batch_dims=True)),
        ways=("dumps", "state_dict"),
        rounded=(*SETTLED, "obs", "transforms"),
    ),
    "constants that were found": Built(td(memory(), transform=norm), then=fitted),
}


# ------------------------------------------------------------------ buffers of other kinds


def arrived(batch: TensorDict) -> torch.Tensor:
    return (batch["next", "achieved_goal"] == batch["desired_goal"]).float()


def of_goals(generator: torch.Generator) -> ReplayBuffer:
    return HERReplayBuffer(arrived, storage=LazyTensorStorage(CAPACITY), batch_size=BATCH, generator=generator)


def prioritized_buffer(
    kind: type[PrioritizedReplayBuffer] | type[TensorDictPrioritizedReplayBuffer], storage: Callable[[], Storage]
) -> Callable[[torch.Generator], ReplayBuffer]:
    return lambda generator: kind(alpha=0.7, beta=0.5, storage=storage(), batch_size=BATCH, generator=generator)


def of_buffers(generator: torch.Generator) -> ReplayBuffer:
    members = [
        td(memory(), prioritized())(seeded(5)),
        td(LISTS["list"], SamplerWithoutReplacement)(seeded(6)),
        td(maps())(seeded(7)),
    ]
    return ReplayBufferEnsemble(*members, p=[0.5, 0.25, 0.25], batch_size=6, generator=generator)


def from_all(generator: torch.Generator) -> ReplayBuffer:
    members = [td(memory(), ConsumingSampler)(seeded(5)), td(memory())(seeded(6))]
    return ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=4, generator=generator)


def of_components(generator: torch.Generator) -> ReplayBuffer:
    """Ensembles of parts, whose members have transforms."""
    members = [td(memory(), prioritized())(seeded(5)), td(memory())(seeded(6))]
    norms = [ObservationNorm(loc=float(place), scale=2.0, in_keys=["obs"]) for place in range(2)]
    return ReplayBufferEnsemble(
        storages=StorageEnsemble(*(each.storage for each in members), transforms=norms),
        samplers=SamplerEnsemble(*(each.sampler for each in members), p=[0.25, 0.75]),
        writers=WriterEnsemble(*(each.writer for each in members)),
        batch_size=4,
        generator=generator,
    )


class InTurn(Sampler):
    """A sampler of the user's, which remembers where it is."""

    def __init__(self) -> None:
        self.place = torch.tensor(0)

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, object]]:
        self.place = self.place + 1
        return (torch.arange(batch_size) + self.place) % len(storage), {}

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.place = state_dict["place"].clone()


class Counted(torch.nn.Module):
    """A transform of the user's, which has a parameter and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.count = 0

    def forward(self, batch: TensorDict) -> TensorDict:
        self.count += 1
        return batch.set("obs", batch["obs"] * self.factor + self.count)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def scaled(buffer: ReplayBuffer) -> None:
    for each in buffer.transform.parameters():
        each.fill_(4.0)


OWN: dict[str, Built] = {
    "sampler": Built(td(memory(), InTurn), ways=EVERY_WAY),
    "transform": Built(td(memory(), transform=lambda: Compose(Counted())), then=scaled, ways=("dumps", "state_dict")),
}
KINDS: dict[str, Built] = {
    "PrioritizedReplayBuffer": Built(prioritized_buffer(PrioritizedReplayBuffer, memory()), ways=EVERY_WAY),
    "PrioritizedReplayBuffer, tensors": Built(
        prioritized_buffer(PrioritizedReplayBuffer, memory()), data.tensors, ways=EVERY_WAY
    ),
    "TensorDictPrioritizedReplayBuffer": Built(
        prioritized_buffer(TensorDictPrioritizedReplayBuffer, memory()), ways=EVERY_WAY
    ),
    "TensorDictPrioritizedReplayBuffer, of frames": Built(
        prioritized_buffer(TensorDictPrioritizedReplayBuffer, of_frames()), data.frames
    ),
    "HERReplayBuffer": Built(of_goals, data.walks, ways=("dumps", "state_dict")),
    "ensemble of buffers": Built(of_buffers, ways=("dumps",)),
    "ensemble, from all": Built(from_all),
    "ensemble of parts": Built(of_components),
}


# ------------------------------------------------------------------ checkpointers and formats


def hooked(save: list[type], load: list[type]) -> Callable[[], StorageCheckpointerBase]:
    def made() -> StorageCheckpointerBase:
        found = TensorStorageCheckpointer()
        for each in save:
            found.register_save_hook(each())
        for each in load:
            found.register_load_hook(each())
        return found

    return made


class OwnCheckpointer(StorageCheckpointerBase):
    """One of the user's, whose files are a part of the checkpoint."""

    def dumps(self, storage: Storage, path: object) -> None:
        folder = Path(str(path))
        folder.mkdir()
        torch.save([item.to_dict() for item in storage], folder / "items.pt")

    def loads(self, storage: Storage, path: object, **options: object) -> None:
        items = torch.load(Path(str(path)) / "items.pt", weights_only=True)
        for place, item in enumerate(items):
            storage.set(place, TensorDict(item), set_cursor=False)


def h5() -> StorageCheckpointerBase:
    return H5StorageCheckpointer(h5_kwargs={"compression": "gzip"})


FORMATS: dict[str, Built] = {
    "tensors": Built(td(memory(), checkpointer=TensorStorageCheckpointer)),
    "flat": Built(td(memory(), prioritized(), checkpointer=FlatStorageCheckpointer), data.ted),
    "flat, of two dims": Built(td(memory(2), checkpointer=FlatStorageCheckpointer), data.ted_of_lanes),
    "nested": Built(td(memory(), checkpointer=NestedStorageCheckpointer), data.ted),
    "nested, of maps": Built(td(maps(), checkpointer=NestedStorageCheckpointer), data.ted),
    "h5": Built(td(memory(), checkpointer=H5StorageCheckpointer), data.ted),
    "h5, compressed": Built(td(memory(2), checkpointer=h5), data.ted_of_lanes),
    "h5, in part": Built(td(memory(), checkpointer=H5StorageCheckpointer), data.ted, (3, 2)),
    "hooks, flat": Built(td(memory(), checkpointer=hooked([TED2Flat], [Flat2TED])), data.ted),
    "hooks, nested": Built(td(memory(), checkpointer=hooked([TED2Nested], [Nested2TED])), data.ted),
    "hooks, parts": Built(td(memory(), checkpointer=hooked([TED2Nested, H5Split], [H5Combine, Nested2TED])), data.ted),
    "list, pickled": Built(
        rb(LISTS["list"], checkpointer=lambda: ListStorageCheckpointer(allow_pickle=True), of_lists=True), data.pickled
    ),
    "own": Built(td(LISTS["list"], checkpointer=OwnCheckpointer)),
}

GROUPS = {
    "storage": STORAGES,
    "keys": KEYS,
    "sampler": SAMPLERS,
    "writer": WRITERS,
    "transform": TRANSFORMS,
    "buffer": KINDS,
    "format": FORMATS,
    "own": OWN,
}
BUFFERS: dict[str, Case[ReplayBuffer]] = {
    f"{group}: {name}: {way}": built.case(way)
    for group, every in GROUPS.items()
    for name, built in every.items()
    for way in built.ways
}


# ------------------------------------------------------------------ parts alone


def _part(built: Built, of: str, way: str, disturb: Callable[[ReplayBuffer], None], go_on: GoOn) -> Case[ReplayBuffer]:
    """A storage, sampler or writer by itself, loaded into that of a buffer that went on otherwise."""
    save, load = WAYS[way]

    def save_part(buffer: ReplayBuffer, path: Path) -> None:
        save(getattr(buffer, of), path)

    def load_part(buffer: ReplayBuffer, path: Path) -> ReplayBuffer:
        disturb(buffer)
        load(getattr(buffer, of), path)
        return buffer

    return Case(built.empty, built.fill, save_part, load_part, go_on, built.rounded)


def nothing(buffer: ReplayBuffer) -> None:
    """The part is loaded into a new buffer."""


def rows_and_draws(buffer: ReplayBuffer, scratch: Path) -> Seen:
    """Rows, and draws of them."""
    generator(buffer).manual_seed(3)
    seen = flat({"rows": list(buffer.storage) if isinstance(buffer.storage, ListStorage) else buffer.storage[:]})
    return seen | flat(buffer.storage.ring.cursor, "cursor") | drawn(buffer, "draw", 0)


def generator(buffer: ReplayBuffer) -> torch.Generator:
    assert buffer.generator is not None
    return buffer.generator


PARTS: dict[str, Case[ReplayBuffer]] = {
    f"storage alone: {name}: {way}": _part(STORAGES[name], "storage", way, nothing, rows_and_draws)
    for name in ("memory", "maps", "memory of two dims", "frames", "list", "compressed", "memory, text")
    for way in ("dumps", "state_dict")
}


def other_draws(built: Built) -> Callable[[ReplayBuffer], None]:
    """The same rows, of which others were drawn and updated."""

    def disturb(buffer: ReplayBuffer) -> None:
        built.fill(buffer)
        if isinstance(buffer.sampler, StalenessAwareSampler):
            buffer.sampler.consumer_version = 7
        drawn(buffer, "", 4)

    return disturb


def draws(buffer: ReplayBuffer, scratch: Path) -> Seen:
    generator(buffer).manual_seed(3)
    return standing(buffer, "loaded") | drawn(buffer, "draw", 0) | drawn(buffer, "draw 1", 1)


PARTS |= {
    f"sampler alone: {name}: {way}": _part(SAMPLERS[name], "sampler", way, other_draws(SAMPLERS[name]), draws)
    for name in ("without replacement", "prioritized", "slices without replacement", "consuming, twice", "staleness")
    for way in ("dumps", "state_dict")
}


def more_rows(built: Built) -> Callable[[ReplayBuffer], None]:
    """Other rows, and a few more of them."""

    def disturb(buffer: ReplayBuffer) -> None:
        built.fill(buffer)
        buffer.extend(built.rows(100, 3))

    return disturb


def slots(built: Built) -> GoOn:
    """Cursor and count, and the slots of further rows."""

    def go_on(buffer: ReplayBuffer, scratch: Path) -> Seen:
        writer = buffer.writer
        seen = flat({"cursor": getattr(writer, "cursor", None), "written": writer.write_count}, "loaded")
        if getattr(writer, "tracks_generations", False):
            seen |= flat(writer.generations_of(torch.arange(CAPACITY)), "generations")
        return seen | flat([buffer.extend(built.rows(first, 2)) for first in (11, 13, 15)], "slots")

    return go_on


PARTS |= {
    f"writer alone: {name}: {way}": _part(WRITERS[name], "writer", way, more_rows(WRITERS[name]), slots(WRITERS[name]))
    for name in ("round robin", "round robin, generations", "highest")
    for way in ("dumps", "state_dict")
}


def _h5_file() -> Case[ReplayBuffer]:
    """A file by itself, without a folder."""
    built = FORMATS["h5"]

    def save(buffer: ReplayBuffer, path: Path) -> None:
        path.mkdir()
        buffer.storage.dumps(path / "rows.h5")

    def load(buffer: ReplayBuffer, path: Path) -> ReplayBuffer:
        buffer.storage.loads(path / "rows.h5")
        return buffer

    def go_on(buffer: ReplayBuffer, scratch: Path) -> Seen:
        buffer.storage.dumps(scratch / "again.h5")
        other = built.empty()
        other.storage.loads(scratch / "again.h5")
        return flat(buffer.storage[:], "rows") | flat(other.storage[:], "again")

    return Case(built.empty, built.fill, save, load, go_on)


PARTS["storage alone: h5 file: dumps"] = _h5_file()


# ------------------------------------------------------------------ schedulers


def _scheduler(make: Callable[[Sampler], ParameterScheduler | SchedulerList], way: str) -> Case[object]:
    def made() -> object:
        return make(PrioritizedSampler(CAPACITY, 0.5, 0.5))

    def fill(held: object) -> None:
        for _ in range(3):
            held.step()  # type: ignore[attr-defined]

    def go_on(held: object, scratch: Path) -> Seen:
        sampler = (held.schedulers[0] if isinstance(held, SchedulerList) else held).sampler  # type: ignore[attr-defined]
        if way == "state_dict":  # the sampler is saved by itself
            sampler.alpha = sampler.beta = 0.75
        seen: Seen = {}
        for turn in range(4):
            held.step()  # type: ignore[attr-defined]
            seen |= flat([float(sampler.alpha), float(sampler.beta)], f"step {turn}")
        return seen

    save, load = WAYS[way]
    return Case(made, fill, save, load, go_on)  # type: ignore[arg-type]


def _several(sampler: Sampler) -> SchedulerList:
    return SchedulerList([LinearScheduler(sampler, "beta", 1.0, 6), StepScheduler(sampler, "alpha", 0.5, n_steps=2)])


PARTS_OF_TRAINING: dict[str, Case[object]] = {
    f"scheduler: {name}: {way}": _scheduler(make, way)
    for name, make in {"linear": lambda sampler: LinearScheduler(sampler, "beta", 1.0, 6), "several": _several}.items()
    for way in ("state_dict",)
}

"""What an ensemble of buffers is made of: three ensembles of components, and a buffer for each of their members."""

from collections.abc import Callable, Sequence
from typing import Any

from interop.buffers import collate
from interop.buffers.components import check_fit
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.sampled import as_collate_fn
from interop.samplers import SamplerEnsemble
from interop.storages import StorageEnsemble
from interop.writers import WriterEnsemble


def components_of(
    storages: Any, samplers: Any, writers: Any
) -> tuple[StorageEnsemble, SamplerEnsemble, WriterEnsemble]:
    """The three ensembles. TypeError where one is missing or of another kind, ValueError for unlike lengths."""
    kinds = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for given, (name, kind) in zip((storages, samplers, writers), kinds.items(), strict=True):
        if not isinstance(given, kind):
            found = "nothing" if given is None else type(given).__name__
            raise TypeError(
                f"an ensemble needs buffers, or {', '.join(kinds)}: {name} must be a {kind.__name__}, got {found}"
            )
    if not len(storages) == len(samplers) == len(writers):
        raise ValueError(f"there are {len(storages)} storages, {len(samplers)} samplers and {len(writers)} writers")
    return storages, samplers, writers


def functions_of(given: Any, count: int) -> list[Callable[[Any], Any] | None]:
    """What stands in for the collate function of each member."""
    if given is None:
        return [None] * count
    if len(given) != count:
        raise ValueError(f"collate_fns must be as many as members: got {len(given)} for {count}")
    return [as_collate_fn(each) for each in given]


def buffers_of(
    storages: StorageEnsemble, samplers: SamplerEnsemble, writers: WriterEnsemble, collate_fns: Sequence[Any]
) -> tuple[ReplayBuffer, ...]:
    """The members made of components; each component keeps what it has of a checkpointer and a generator."""
    chains = storages.transforms or [None] * len(storages)
    places = range(len(storages))
    parts = [(storages[at], samplers[at], writers[at], chains[at], collate_fns[at]) for at in places]
    for storage, sampler, writer, _, collate_fn in parts:
        check_fit(storage, sampler, writer, None, False)
        collate_fn or collate.default_for(storage)
    return tuple(
        ReplayBuffer(
            storage=storage,
            sampler=sampler,
            writer=writer,
            transform=chain,
            collate_fn=collate_fn,
            checkpointer=storage._checkpointer,
            generator=sampler._rng,
        )
        for storage, sampler, writer, chain, collate_fn in parts
    )

"""The member buffers of an ensemble that is made of components."""

from collections.abc import Callable, Sequence
from typing import Any

from interop.buffers.components import check_fit
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.sampled import as_collate_fn
from interop.samplers import SamplerEnsemble
from interop.storages import StorageEnsemble
from interop.writers import WriterEnsemble


def buffers_of(storages: Any, samplers: Any, writers: Any, collate_fns: Sequence[Any]) -> tuple[ReplayBuffer, ...]:
    """A buffer for each member of three ensembles, which keeps the generator of its sampler.

    TypeError where one is missing or of another kind, ValueError for unlike lengths, and the errors of `ReplayBuffer`;
    nothing has changed then.
    """
    kinds = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for given, (name, kind) in zip((storages, samplers, writers), kinds.items(), strict=True):
        if type(given) is not kind:
            found = "nothing" if given is None else type(given).__name__
            raise TypeError(
                f"an ensemble needs buffers, or {', '.join(kinds)}: {name} must be a {kind.__name__}, got {found}"
            )
    if not len(storages) == len(samplers) == len(writers):
        raise ValueError(f"there are {len(storages)} storages, {len(samplers)} samplers and {len(writers)} writers")
    transforms = storages.transforms or [None] * len(storages)
    members = list(zip(storages.members, samplers.members, writers.members, transforms, collate_fns, strict=True))
    for storage, sampler, writer, _, _ in members:
        check_fit(storage, sampler, writer, None, False)
    return tuple(
        ReplayBuffer(
            storage=storage,
            sampler=sampler,
            writer=writer,
            transform=transform,
            collate_fn=collate_fn,
            generator=sampler.buffer_generator,
        )
        for storage, sampler, writer, transform, collate_fn in members
    )


def functions_of(given: Any, count: int) -> list[Callable[[Any], Any] | None]:
    """A collate function for each member; None for its own."""
    if given is None:
        return [None] * count
    if len(given) != count:
        raise ValueError(f"collate_fns must be as many as members: got {len(given)} for {count}")
    return [as_collate_fn(each) for each in given]

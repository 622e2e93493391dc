"""States of torchrl's samplers and writers as those of ours: what their `state_dict`s would be, and saved trees of these."""

from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.component import described
from interop.checkpoint.torchrl_dirs_samplers import Members, Nothing, Priorities, SamplerState, Unread
from interop.checkpoint.torchrl_dirs_writers import Highest, NoWriter, RoundRobin, Writers, WriterState
from interop.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    PromptGroupSampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
)
from interop.writers import RoundRobinWriter, TensorDictMaxValueWriter, WriterEnsemble

_SAMPLERS: dict[type, tuple[type, str]] = {
    Priorities: (PrioritizedSampler, "a PrioritizedSampler"),
    Members: (SamplerEnsemble, "a SamplerEnsemble"),
}
_NOT_READ = (SamplerWithoutReplacement, ConsumingSampler, PromptGroupSampler, StalenessAwareSampler)
_WRITERS: dict[type, tuple[type, str]] = {
    RoundRobin: (RoundRobinWriter, "a RoundRobinWriter"),
    Highest: (TensorDictMaxValueWriter, "a TensorDictMaxValueWriter"),
    Writers: (WriterEnsemble, "a WriterEnsemble"),
}


def sampler_tree(found: SamplerState, sampler: Any, where: str) -> Any:
    """The saved tree of a sampler. What torchrl does not save is as it is in the sampler.

    CheckpointMismatch for a sampler whose state in torchrl's folders is not read: an epoch, counts, a version.
    """
    if isinstance(sampler, _NOT_READ):
        raise CheckpointMismatch(
            f"{where}: the state of a {type(sampler).__name__} is not read from folders of torchrl; load the folder into a "
            "buffer with a RandomSampler, then call its set_sampler()"
        )
    if isinstance(found, Unread):
        found = Nothing()
    if not _same_kind(found, sampler, _SAMPLERS, Nothing, "one without a state, as RandomSampler is", where):
        return described(sampler, sampler._saved())
    return _with(sampler, _state(found, sampler), where)


def writer_tree(found: WriterState, writer: Any, where: str) -> Any:
    """The saved tree of a writer."""
    if not _same_kind(found, writer, _WRITERS, NoWriter, "one that does not write", where):
        return described(writer, writer._saved())
    if isinstance(found, RoundRobin):
        generations = None if found.generations is None else found.generations + 1  # a number is of writes here
        tracks = generations is not None or writer.tracks_generations
        count = found.cursor if found.write_count is None else found.write_count
        state: dict[str, Any] = {"cursor": found.cursor, "write_count": count, "ring": None}
        return _with(writer, {**state, "generations": generations, "tracks_generations": tracks}, where)
    assert isinstance(found, Highest)
    count = len(found.ranks)
    state = {"rank_key": found.rank_key, "write_count": count if found.write_count is None else found.write_count}
    return _with(writer, {**state, "ranks": found.ranks, "slots": np.arange(count), "keeps_index": None}, where)


def _with(component: Any, state: dict[str, Any], where: str) -> Any:
    """The saved tree of a component, in which some entries are others."""
    saved = component._saved()
    if not state.keys() <= saved.keys():
        raise CheckpointMismatch(f"{where}: the state of a {type(component).__name__} is not one that torchrl knows")
    return described(component, {**saved, **state})


def _same_kind(
    found: Any, target: Any, kinds: dict[type, tuple[type, str]], nothing: type, without: str, where: str
) -> bool:
    """Whether there is a state, and it is one of the target's. CheckpointMismatch for that of another kind."""
    expected = next((name for kind, name in kinds.values() if isinstance(target, kind)), "")
    if isinstance(found, nothing):
        if expected:
            raise CheckpointMismatch(
                f"{where}: there is nothing that {expected} wrote, only what {without}, leaves; the buffer has a "
                f"{type(target).__name__}"
            )
        return False
    kind, name = kinds[type(found)]
    if not isinstance(target, kind):
        raise CheckpointMismatch(f"{where}: {name} wrote it, the buffer has a {type(target).__name__}")
    return True


def of_each(found: Any, count: int, where: str) -> list[Any]:
    """What the members of an ensemble wrote; nothing for those without a state."""
    nothing: Any = NoWriter() if isinstance(found, NoWriter | Writers) else Nothing()
    members: dict[int, Any] = found.members if isinstance(found, Members | Writers) else {}
    if not isinstance(found, Members | Writers | Nothing | NoWriter) or any(place >= count for place in members):
        raise CheckpointMismatch(f"{where}: an ensemble of {count} members did not write this")
    return [members.get(place, nothing) for place in range(count)]


def _state(found: SamplerState, sampler: Any) -> dict[str, Any]:
    """Entries of the saved tree of a sampler."""
    assert isinstance(found, Priorities)
    dtype = np.dtype(sampler.rule.dtype if found.is_single else np.float64)
    given = found.given.astype(dtype)
    highest, slot = found.highest, found.highest_slot
    if highest is None:
        highest, slot = (float(given.max()), int(given.argmax())) if given.size else (1.0, -1)
    if sampler.rule.new_items == "highest_ever":  # turned back, a priority may come out larger by a rounding
        given, slot = np.minimum(given, dtype.type(highest)), -1
    names = ("alpha", "beta", "eps")
    return {
        **{name: getattr(found, name) for name in names},
        "max_capacity": found.capacity,
        "capacity": found.capacity,
        "priorities": given,
        "highest": highest,
        "highest_slot": slot,
        "refused": 0,
    }

"""What samplers and writers save does not get into others; where parameters differ, that is told."""

import copy
import inspect
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fbuf.checkpoint import CheckpointError, CheckpointMismatch
from interop import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictMaxValueWriter,
    Writer,
    WriterEnsemble,
)
from interop.checkpoint.state import LoadOptions, undeclared
from interop.data import randomness
from interop.datasets.openx_stream import StreamSampler
from interop.samplers.drawn_elsewhere import DrawnElsewhere
from interop.samplers.stack_slices import StackSampler
from tests.interop.checkpoint.resuming import go_on, joined
from tests.interop.checkpoint.saved_trees import damaged, through_json
from tests.interop.pair_history import SAMPLERS, WRITERS, Cell


def made() -> dict[str, Any]:
    """One of each, with something to remember."""
    found: dict[str, Any] = {}
    for name in SAMPLERS:
        cell = Cell("LazyTensorStorage", 1, name, "RoundRobinWriter", "TensorDictReplayBuffer")
        buffer = joined(cell, 0)
        go_on(buffer, cell, 0, 6)
        if name.endswith("WithoutReplacement"):
            buffer.sampler.draws.reserve(buffer.storage, 4, randomness.key(None))
        found[name] = buffer.sampler
        found["RoundRobinWriter"] = buffer.writer
        found[f"buffer of {name}"] = buffer
    cell = Cell("LazyTensorStorage", 1, "RandomSampler", "TensorDictMaxValueWriter", "TensorDictReplayBuffer")
    buffer = joined(cell, 0)
    go_on(buffer, cell, 0, 6)
    found["TensorDictMaxValueWriter"] = buffer.writer
    counting = ReplayBuffer(storage=LazyTensorStorage(12), writer=RoundRobinWriter(track_generations=True))
    counting.extend(torch.arange(12))
    found["counting writer"] = counting.writer
    found["SamplerEnsemble"] = SamplerEnsemble(
        found["PrioritizedSampler"], found["SamplerWithoutReplacement"], p=[1, 3], num_buffer_sampled=5
    )
    found["buffers"] = [counting, *(found.pop(name) for name in list(found) if name.startswith("buffer of")), buffer]
    return found


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    return made()


def test_every_attribute_of_the_library_is_declared(kinds: dict[str, Any]) -> None:
    """An attribute that is not would be refused in a subclass of the user's, which has only attributes of the library."""
    used = [part for name, part in kinds.items() if name != "buffers"]
    for buffer in kinds["buffers"]:
        used += [buffer.sampler, buffer.writer]
    for writer in WRITERS:
        cell = Cell("LazyTensorStorage", 1, "RandomSampler", writer, "TensorDictReplayBuffer")
        used.append(joined(cell, 0).writer)
    used += [StackSampler(2), WriterEnsemble(RoundRobinWriter()), DrawnElsewhere(), StreamSampler()]
    used += [StreamingSliceSampler(slice_len=2), PromptGroupSampler(num_groups=2, group_key="id")]
    missing = every_kind(Sampler) | every_kind(Writer)
    for part in used:
        for each in (part, copy.deepcopy(part)):
            assert undeclared(each) == [], type(part).__name__
        missing.discard(type(part))
    assert not missing, "a class of the library that this test does not use"


def every_kind(base: type) -> set[type]:
    """The classes of the library that can be built, below a base class."""
    found = {kind for below in base.__subclasses__() for kind in (below, *every_kind(below))}
    return {kind for kind in found if kind.__module__.startswith("interop.") and not inspect.isabstract(kind)}


PARTS = [*SAMPLERS, "RoundRobinWriter", "TensorDictMaxValueWriter", "counting writer", "SamplerEnsemble"]


# States of which say the same; checkpoints name the class too.
ALIKE = [
    {"RandomSampler", "SliceSampler"},
    {"PrioritizedSampler", "PrioritizedSliceSampler"},
    {"SamplerWithoutReplacement", "SliceSamplerWithoutReplacement"},
]


@pytest.mark.parametrize("name", PARTS)
def test_a_state_goes_into_nothing_else(name: str, kinds: dict[str, Any]) -> None:
    saved, before = kinds[name].state(), {other: kinds[other].state_dict() for other in PARTS}
    for other in PARTS:
        if type(kinds[other]) is not type(kinds[name]):
            if {name, other} not in ALIKE:
                with pytest.raises(CheckpointError):
                    kinds[other].with_state(through_json(saved))
                with pytest.raises(CheckpointMismatch):
                    kinds[other].load_state_dict(before[name])
            assert repr(kinds[other].state_dict()) == repr(before[other])


@pytest.mark.parametrize("name", PARTS)
def test_damage_is_found_and_changes_nothing(name: str, kinds: dict[str, Any]) -> None:
    part = kinds[name]
    saved = through_json(part.state())
    before, accepted = repr(part.state()), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for where, changed in damaged(saved):
            try:
                put = part.with_state(changed)
            except CheckpointError:
                pass
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            else:
                accepted += 1  # it is another state
                assert callable(put)
    assert repr(part.state()) == before


def test_all_differences_are_listed() -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1, max_priority_within_buffer=True), LazyTensorStorage(12)
    storage.set(slice(0, 12), torch.arange(12))
    sampler.mark_update(np.arange(12), storage=storage)
    with pytest.raises(CheckpointMismatch, match=r"float32.*float64.*within_buffer is True.*max_capacity of 12"):
        PrioritizedSampler(4, 1, 1, dtype=torch.float64).with_state(through_json(sampler.state()))


def test_priorities_of_another_dtype_are_cast_where_that_is_asked_for() -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1, dtype=torch.float64), LazyTensorStorage(12)
    storage.set(slice(0, 2), torch.arange(2))
    sampler.mark_update([0, 1], storage=storage)
    sampler.update_priority([0], [0.1])
    twin = PrioritizedSampler(12, 1, 1)
    with pytest.raises(CheckpointMismatch, match="cast=True"):
        twin.with_state(sampler.state())
    twin.with_state(sampler.state(), LoadOptions(cast=True))()
    assert torch.equal(twin.priorities, torch.tensor([0.1, 1.0]))
    sampler.update_priority([0], [1e200])
    with pytest.raises(CheckpointMismatch, match="not finite in float32"):
        twin.with_state(sampler.state(), LoadOptions(cast=True))


PARAMETERS = [
    (PrioritizedSampler(12, 0.5, 0.4), PrioritizedSampler(12, 0.6, 0.4), "alpha=0.5 instead of 0.6"),
    (PrioritizedSampler(12, 0.5, 0.4, eps=1e-3), PrioritizedSampler(12, 0.5, 0.4), "eps="),
    (PrioritizedSampler(12, 1, 1, reduction="min"), PrioritizedSampler(12, 1, 1), "reduction='min'"),
    (SamplerWithoutReplacement(drop_last=True), SamplerWithoutReplacement(), "drop_last=True instead of False"),
    (SamplerWithoutReplacement(shuffle=False), SamplerWithoutReplacement(), "shuffle"),
    (ConsumingSampler(3), ConsumingSampler(1), "max_sample_count=3"),
    (StalenessAwareSampler(4, version_key="v"), StalenessAwareSampler(), "max_staleness=4.*version_key='v'"),
    (PromptGroupSampler(3, max_uses=2), PromptGroupSampler(2), "group_size=3 instead of 2, max_uses=2 instead of None"),
    (TensorDictMaxValueWriter("a", "max"), TensorDictMaxValueWriter(), "rank_key='a'.*reduction='max'"),
    (
        SamplerEnsemble(RandomSampler(), RandomSampler(), p=[1, 1]),
        SamplerEnsemble(RandomSampler(), RandomSampler(), num_buffer_sampled=7),
        r"p=\[0.5, 0.5\].*num_buffer_sampled=None instead of 7",
    ),
]


@pytest.mark.parametrize(("saved", "target", "words"), PARAMETERS)
def test_parameters_of_the_checkpoint_count_with_a_warning(saved: Any, target: Any, words: str) -> None:
    with pytest.warns(UserWarning, match=words) as told:
        put = target.with_state(through_json(saved.state()))
    assert len(told) == 1
    put()
    assert repr(target) == repr(saved) and target.state_dict().keys() == saved.state_dict().keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.with_state(through_json(saved.state()))

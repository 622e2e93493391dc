"""Ensembles of which several members have one storage, and storages that are loaded by themselves."""

import pytest
import torch

from interop import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, ReplayBufferEnsemble

CAPACITY = 8


def ensemble(storage):
    samplers = [PrioritizedSampler(CAPACITY, 1.0, 1.0), PrioritizedSampler(CAPACITY, 1.0, 1.0), None]
    members = [ReplayBuffer(storage=storage, sampler=sampler, batch_size=4) for sampler in samplers]
    return ReplayBufferEnsemble(*members, batch_size=6), members


@pytest.mark.parametrize("over", [False, True], ids=["unwritten", "over rows"])
@pytest.mark.parametrize("in_a_folder", [False, True], ids=["memory", "folder"])
def test_each_member_has_its_priorities_and_its_cursor_again(in_a_folder, over, tmp_path):
    def storage(name):
        return LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / name) if in_a_folder else LazyTensorStorage(CAPACITY)

    saved, members = ensemble(storage("a"))
    members[0].extend(torch.arange(6))
    members[1].extend(torch.arange(10, 12))
    for place in (0, 1):
        count = len(members[place])
        members[place].update_priority(torch.arange(count), torch.arange(count) + 2.0 + 10 * place)
    saved.dumps(tmp_path / "c")
    loaded, twins = ensemble(storage("b"))
    if over:
        twins[2].extend(torch.arange(100, 105))
    loaded.loads(tmp_path / "c")
    for member, twin in zip(members, twins, strict=True):
        assert twin[:].tolist() == member[:].tolist()
        assert (twin.writer.cursor, twin.write_count) == (member.writer.cursor, member.write_count)
    for place in (0, 1):
        assert twins[place].sampler.priorities.tolist() == members[place].sampler.priorities.tolist()
        assert twins[place].sampler.default_priority == members[place].sampler.default_priority

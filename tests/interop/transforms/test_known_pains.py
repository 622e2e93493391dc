"""What goes wrong with transforms elsewhere: ends of episodes, returns of n steps, stacks of frames, lost entries."""

import gc
import weakref

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.transforms import CatFrames, Compose, MultiStepTransform

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]
PRIORITIZED = {"alpha": 1.0, "beta": 1.0, "batch_size": 64}  # the same everywhere: one program
each_storage = pytest.mark.parametrize("storage", STORAGES)


def episodes(lengths, rewards=None, truncated=True):
    """One after the other: observation t is followed by t + 1, the one after a reset by 100 more."""
    rows = []
    for place, length in enumerate(lengths):
        now = 100.0 * place + torch.arange(length)
        end = torch.arange(length)[:, None] == length - 1
        flags = {"done": end, "truncated": end & truncated, "terminated": end & (not truncated)}
        reward = torch.full((length, 1), 1.0 if rewards is None else float(rewards[place]))
        following = TensorDict({"obs": now[:, None] + 1, "reward": reward, **flags}, [length])
        rows.append(TensorDict({"obs": now[:, None], "next": following}, [length]))
    return torch.cat(rows)


def stored(rb):
    return torch.stack(list(rb.storage)) if isinstance(rb.storage, ListStorage) else rb.storage[:]


def test_a_ring_that_goes_round_never_mixes_old_and_new_steps():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), transform=MultiStepTransform(3, 0.5), batch_size=16)
    count = 20
    now = torch.arange(float(count))[:, None]
    never = torch.zeros(count, 1, dtype=torch.bool)
    flags = {"done": never, "terminated": never, "truncated": never}
    data = TensorDict({"obs": now, "next": {"obs": now + 1, "reward": now, **flags}}, [count])
    for row in data:
        rb.add(row)
        if len(rb):
            sample = rb.sample()
            start = sample["obs"]
            assert torch.equal(sample["next", "reward"], start + 0.5 * (start + 1) + 0.25 * (start + 2))
            assert torch.equal(sample["next", "obs"], start + 3)
    assert rb.storage[:]["obs"].flatten().sort().values.tolist() == list(range(11, 17))


def test_priorities_belong_to_the_steps_that_were_stored():
    rb = TensorDictPrioritizedReplayBuffer(
        storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.5), **PRIORITIZED
    )
    index = rb.extend(episodes([8]))
    assert index.tolist() == [0, 1, 2, 3, 4]
    sample = rb.sample()
    sample["td_error"] = torch.where(sample["obs"].flatten() == 1, 5.0, 0.0)
    rb.update_tensordict_priority(sample)
    assert set(rb.sample()["obs"].flatten().tolist()) == {1.0}


def test_steps_that_are_kept_keep_no_graph_alive():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.5))
    weight = torch.ones(1, requires_grad=True)
    data = episodes([5])
    data["obs"] = data["obs"] * weight
    rb.extend(data)
    assert not any(each.requires_grad for each in rb.storage[:].values(True, True))
    reference = weakref.ref(weight)
    del weight, data
    gc.collect()
    assert reference() is None


@each_storage
def test_stacks_and_returns_of_several_steps_go_together(storage):
    """Stacks are made first, of the frames as they came; what is stored is followed by the stack n steps later."""
    rb = ReplayBuffer(
        storage=storage(20),
        transform=Compose(
            MultiStepTransform(2, 0.5), CatFrames(3, dim=-1, in_keys=["obs", ("next", "obs")], as_inverse=True)
        ),
    )
    rb.extend(episodes([2, 5, 3]))
    rows = stored(rb)
    assert rows["obs"][:4].tolist() == [[0, 0, 0], [0, 0, 1], [100, 100, 100], [100, 100, 101]]
    assert rows["next", "obs"][:4].tolist() == [[0, 1, 2], [0, 1, 2], [100, 101, 102], [101, 102, 103]]
    assert rows["next", "reward"][:4].flatten().tolist() == [1.5, 1, 1.5, 1.5]

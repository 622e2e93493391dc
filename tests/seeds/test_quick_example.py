"""The first example of the documentation: a memory-mapped buffer with prioritized sampling."""

import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer


def test_quick_example():
    # Create a replay buffer with memmap storage and prioritized sampling
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(max_size=1000000),
        sampler=PrioritizedSampler(max_capacity=1000000, alpha=0.7, beta=0.5),
        batch_size=256,
    )

    # Add data
    data = TensorDict(
        {
            "observation": torch.randn(32, 4),
            "action": torch.randn(32, 2),
            "reward": torch.randn(32, 1),
        },
        batch_size=[32],
    )
    index = buffer.extend(data)

    # Sample
    sample = buffer.sample()  # Returns batch_size=256

    assert index.tolist() == list(range(32))
    assert (len(buffer), buffer.write_count) == (32, 32)
    assert isinstance(sample, TensorDict)
    assert sample.batch_size == (256,)
    assert set(sample.keys()) == {"observation", "action", "reward"}
    stored = torch.cat([data["observation"], data["action"], data["reward"]], -1)
    drawn = torch.cat([sample["observation"], sample["action"], sample["reward"]], -1)
    matches = (drawn[:, None] == stored[None]).all(-1)
    assert matches.sum(1).tolist() == [1] * 256
    assert matches.any(0).sum() > 16  # equal priorities: about every row is drawn

    again, info = buffer.sample(return_info=True)
    assert (again["observation"] == data["observation"][info["index"]]).all()
    assert info["priority_weight"].tolist() == [1] * 256

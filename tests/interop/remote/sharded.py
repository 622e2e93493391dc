"""Several shards in one process, drawn from as one buffer; what they hold is known by the number of each item."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, TensorDictReplayBuffer
from interop.remote.epochs import EpochPlan
from interop.remote.joining import Drawn, joined
from interop.remote.shard import Shard
from interop.remote.shares import ShardContents, allot, subkeys


def key_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2**32, size=2, dtype=np.uint32)


class Sharded:
    """Shards of one kind, each of the same capacity."""

    def __init__(self, count: int, make: Callable[[], Any]) -> None:
        self.shards = [Shard(number, count, make) for number in range(count)]
        self.capacity = self.shards[0].capacity
        self.plans = EpochPlan()
        self.seed = 0

    def shares(self, batch_size: int) -> list[ShardContents]:
        return [shard.share(batch_size) for shard in self.shards]

    def parts(self, batch_size: int, shares: Sequence[ShardContents]) -> tuple[list[Drawn | None], np.ndarray]:
        """What each shard draws of a batch, by these shares, and the key of the order."""
        self.seed += 1
        first, last, *keys = subkeys(key_of(self.seed), len(self.shards) + 2)
        units = batch_size // shares[0].unit
        if shares[0].in_epochs:
            plan = self.plans.plan(shares, units, first)
            counts, planned = plan.counts, plan.parts
        else:
            counts, planned = allot(shares, units, first), (None,) * len(shares)
        drawn = [
            shard.draw(int(count), batch_size, key, part) if count else None
            for shard, count, key, part in zip(self.shards, counts, keys, planned, strict=True)
        ]
        return drawn, last

    def sample(self, batch_size: int, shares: Sequence[ShardContents] | None = None) -> tuple[Any, dict[Any, Any]]:
        shares = self.shares(batch_size) if shares is None else shares
        return joined(shares, *self.parts(batch_size, shares))


def buffers_of(make_sampler: Callable[[], Any], capacity: int = 40) -> Callable[[], TensorDictReplayBuffer]:
    """What makes a shard's buffer; its batch size is another than any that is drawn."""
    return lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=make_sampler(), batch_size=7, priority_key="priority"
    )


def rows(numbers: Sequence[int], lengths: Sequence[int] = (), **more: torch.Tensor) -> TensorDict:
    """Items with these numbers, in trajectories of these lengths, the last of which goes on."""
    x = torch.as_tensor(numbers)
    done = torch.zeros(len(x), 1, dtype=torch.bool)
    done[torch.as_tensor(lengths, dtype=torch.int64).cumsum(0) - 1] = True
    return TensorDict(x=x, next=TensorDict(done=done, batch_size=len(x)), **more, batch_size=len(x))

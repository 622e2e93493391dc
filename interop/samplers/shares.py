"""The part of one buffer in batches that are drawn from several buffers."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardContents:
    """The contents of one shard at one moment, in plain numbers."""

    size: int  # stored items
    mass: float  # draws are in proportion to it: items, the sum of (priority + eps) ** alpha, trajectories
    smallest: float = math.inf  # the smallest mass of an item that can be drawn; inf for none, or without weights
    beta: float | None = None  # exponent of the importance weights; None: the sampler gives none
    unit: int = 1  # items that one unit has in a batch: 1, or the length of a slice
    in_epochs: bool = False  # without replacement: `mass` counts units, each drawn once an epoch
    drop_last: bool = False
    shuffle: bool = True
    version: int = 0  # another one where an epoch must begin although `mass` is the same
    highest: float | None = None  # the highest priority ever given; None where new items do not get it

"""Allotment of a batch to shards, with the draw probabilities of a single buffer."""

from collections.abc import Sequence

import numpy as np

from interop.data import randomness
from interop.data.arguments import EMPTY
from interop.samplers.shares import ShardContents


def subkeys(key: np.ndarray, count: int) -> np.ndarray:
    """Derive independent keys, [count, 2] uint32, from a key, [2] uint32."""
    return randomness.generator_of(key).integers(2**32, size=(count, 2), dtype=np.uint32)


def masses_of(shares: Sequence[ShardContents]) -> np.ndarray:
    """The sampling mass of each shard, float64 [shards]. RuntimeError if all are zero."""
    masses = np.array([share.mass for share in shares], np.float64)
    if masses.any():
        return masses
    if not any(share.size for share in shares):
        raise RuntimeError(EMPTY)
    if (unit := shares[0].unit) > 1:
        raise RuntimeError(f"no shard has a slice of {unit} items: write longer trajectories, or draw shorter slices")
    raise RuntimeError("non-positive p_sum: every stored priority is zero. Give a positive priority, or use eps > 0")


def allot(shares: Sequence[ShardContents], units: int, key: np.ndarray) -> np.ndarray:
    """Draw the number of units of each shard: multinomial over their masses, int64 [shards]. O(shards).

    A unit is an item or a slice; `key` is random bits, [2] uint32. With current shares, each unit has its probability in a
    single buffer. For older shares, `rescale` corrects the weights. RuntimeError if no shard has anything to draw.
    """
    masses = masses_of(shares)
    drawable = masses.nonzero()[0]  # NumPy assigns the rounding error to the last entry, which must have mass
    counts = np.zeros(len(shares), np.int64)
    counts[drawable] = randomness.generator_of(key).multinomial(units, masses[drawable] / masses.sum())
    return counts


def rescale(allotted: Sequence[ShardContents], drawn: Sequence[ShardContents | None]) -> np.ndarray:
    """The factors from each shard's "priority_weight" to that of a single buffer, float64 [shards].

    Item j of shard i is drawn with probability q = p_i * v_j / T_i: p_i is the shard's fraction of the masses used by
    `allot`, T_i its mass at the draw. The weight is (q / smallest q of all stored items) ** -beta, exact for any p. The
    shard itself divides by its own smallest v. Factors are 1 for samplers without weights.

    Args:
        allotted: the shares used by `allot`.
        drawn: the shares at the draw; None for a shard that drew nothing.
    """
    now = [then if share is None else share for then, share in zip(allotted, drawn, strict=True)]
    masses = masses_of(allotted)
    least = [
        p * (share.smallest / share.mass) if p else np.inf for p, share in zip(masses / masses.sum(), now, strict=True)
    ]
    beta = np.array([share.beta or 0.0 for share in now])
    return np.array((np.array(least) / min(least)) ** -beta) if beta.any() else np.ones(len(now))

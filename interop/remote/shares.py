"""The law by which one batch is drawn over several shards: that of one buffer that holds everything."""

from collections.abc import Sequence

import numpy as np

from interop import randomness
from interop.samplers.shares import Share


def subkeys(key: np.ndarray, count: int) -> np.ndarray:
    """Independent keys, [count, 2] uint32, that follow from one, [2] uint32."""
    return randomness.generator_of(key).integers(2**32, size=(count, 2), dtype=np.uint32)


def allot(shares: Sequence[Share], units: int, key: np.ndarray) -> np.ndarray:
    """How many of the units of a batch each shard draws: multinomial over their masses, int64 [shards]. O(shards).

    A shard without mass gets none. With probability p_i a unit falls to shard i, and there to each of its own by their
    law: so its probability is that in one buffer, if the shares are of the moment of the draw. For shares that are older
    `rescale` corrects the weights.

    Args:
        shares: of all shards.
        units: of the batch: items, or slices.
        key: random bits, [2] uint32.

    RuntimeError where no shard has anything that can be drawn.
    """
    chances = _chances(shares)
    drawable = chances.nonzero()[0]  # the multinomial of NumPy gives what rounding leaves to the last one
    counts = np.zeros(len(shares), np.int64)
    counts[drawable] = randomness.generator_of(key).multinomial(units, chances[drawable])
    return counts


def rescale(allotted: Sequence[Share], drawn: Sequence[Share | None]) -> np.ndarray | None:
    """What the "priority_weight" of each shard's part is multiplied by for the weights of one buffer, float64 [shards].

    Item j of shard i was drawn with probability q = p_i * v_j / T_i, where p_i is its part of the masses that `allot` used
    and T_i its mass at the draw. Weights are (q / smallest q of all stored items) ** -beta: exact, however old the masses
    are that `allot` used. A shard weighs by the smallest v of its own.

    Args:
        allotted: the shares that `allot` used.
        drawn: the shares at the draw; None for shards that drew nothing.

    None where the sampler gives no weights.
    """
    now = [share if then is None else then for share, then in zip(allotted, drawn, strict=True)]
    if any(share.beta is None for share in now):
        return None
    smallest = [
        chance * (share.smallest / share.mass) if chance > 0 else np.inf
        for chance, share in zip(_chances(allotted), now, strict=True)
    ]
    factors: np.ndarray = (np.array(smallest) / min(smallest)) ** -np.array([share.beta for share in now], np.float64)
    return factors


def _chances(shares: Sequence[Share]) -> np.ndarray:
    """The part of all mass that each shard has, float64. RuntimeError for no mass."""
    masses = np.array([share.mass for share in shares], np.float64)
    total = masses.sum()
    if total > 0:
        return masses / total
    if not any(share.size for share in shares):
        raise RuntimeError("Cannot sample from an empty storage. Call extend() or add() first.")
    if (unit := shares[0].unit) > 1:
        raise RuntimeError(
            f"no shard has a slice of {unit} items to draw: write longer trajectories, or draw shorter slices"
        )
    raise RuntimeError("non-positive p_sum: every stored priority is zero. Give a positive priority, or use eps > 0")

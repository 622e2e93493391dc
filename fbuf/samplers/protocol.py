"""What every sampler does, and what a draw says."""

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """Drawn slots, and with which chance they were drawn."""

    slots: Int[Array, " batch"]
    probability: Float[Array, " batch"]  # of this slot in one draw
    valid: Bool[Array, " batch"]  # False: nothing could be drawn; the row and its probability mean nothing
    smallest: Float[Array, ""]  # probability of the least likely item that can be drawn
    size: Int[Array, ""]  # items stored


@runtime_checkable
class Sampler(Protocol):
    """A rule that names slots. It never touches items, so one sampler serves every storage.

    A rule is frozen, hashable and holds plain numbers; all arrays are in the state, which goes in first and comes out first.
    The slots in use are always 0 to size - 1.
    """

    def init(self, capacity: int) -> Any:
        """State over `capacity` empty slots."""

    def written(self, state: Any, slots: Int[Array, " batch"]) -> Any:
        """State after new items came into slots, none of them twice."""

    def sample(self, state: Any, key: Array, batch_size: int, size: Int[Array, ""]) -> tuple[Any, Draw]:
        """Draw slots. The key, typed or raw, is used once."""

    def update(self, state: Any, slots: Int[Array, " batch"], priorities: Float[Array, " batch"]) -> Any:
        """State after items were given new priorities."""

    def clear(self, state: Any) -> Any:
        """State over the same slots, all empty again."""


def importance_weights(
    draw: Draw, beta: Float[Array, ""] | float, normalize: Literal["buffer", "batch", "none"] = "buffer"
) -> Float[Array, " batch"]:
    """Weights (1 / (size * probability)) ** beta that correct for drawing some items more often (arXiv:1511.05952, 3.4).

    normalize: "buffer" divides by the largest weight any stored item could have, "batch" by the largest in this draw, so
    that weights are at most 1; "none" leaves them. Rows that are not valid weigh 0. `beta`, from 0 to 1 as a rule, is an
    array that may be annealed without a new trace. O(batch).
    """
    probability = jnp.where(draw.valid, draw.probability, 1)
    if normalize == "buffer":
        weights = jnp.minimum((probability / draw.smallest) ** -beta, 1)  # the division may round upwards
    elif normalize == "batch":
        least = jnp.min(jnp.where(draw.valid, draw.probability, jnp.inf))
        weights = jnp.minimum((probability / least) ** -beta, 1)
    elif normalize == "none":
        weights = (probability * draw.size) ** -beta
    else:
        raise ValueError(f"normalize must be 'buffer', 'batch' or 'none', got {normalize!r}")
    return jnp.where(draw.valid, weights, 0)

"""The contract of samplers, and the draw."""

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, PyTree

from fbuf import checks
from fbuf.keywords import checked
from fbuf.samplers.chances import Chances


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """Drawn slots and their probabilities.

    Of `Slices`, which draws several items a row, slots and mask are [batch, time], the other fields belong to the starts.

    Attributes:
        slots: int32 [batch], or [slices, time] of `Slices`: the drawn slots.
        probability: float [batch]: that one draw is this slot, or a slice from this start.
        valid: bool [batch]. False: nothing could be drawn; the row and its probability mean nothing.
        smallest: [] float: the probability of the least likely item, or start, that can be drawn.
        size: [] int32: how many items, or starts, can be drawn.
        mask: bool [slices, time]; None for single items. False: padding, the nearest slot of the trajectory again.
        starts: int32 [slices]; None for single items: the first slot of each slice, behind burn-in.

    Attributes:
        slots: int32 [batch], or [slices, time] of `Slices`: the drawn slots.
        probability: float [batch]: that one draw is this slot, or a slice from this start.
        valid: bool [batch]. False: nothing could be drawn; the row and its probability mean nothing.
        smallest: [] float: the probability of the least likely item, or start, that can be drawn.
        size: [] int32: how many items, or starts, can be drawn.
        mask: bool [slices, time]; None for single items. False: padding, the nearest slot of the trajectory again.
        starts: int32 [slices]; None for single items: the first slot of each slice, behind burn-in.
    """

    slots: Int[Array, " batch"] | Int[Array, "batch time"]
    probability: Float[Array, " batch"]
    valid: Bool[Array, " batch"]
    smallest: Float[Array, ""]
    size: Int[Array, ""]
    mask: Bool[Array, "batch time"] | None = None
    starts: Int[Array, " batch"] | None = None


def equal_chances(slots: Int[Array, " batch"], valid: Bool[Array, " batch"], size: Int[Array, ""]) -> Draw:
    """The draw of slots with probability 1 / size each."""
    chance = 1 / jnp.maximum(size, 1).astype(jnp.float32)
    return Draw(slots, jnp.broadcast_to(chance, slots.shape), valid, smallest=chance, size=size)


@checked
@runtime_checkable
class Sampler(Protocol):
    """A rule that names slots. It never touches items, so one sampler serves every storage.

    A rule is frozen, hashable and holds plain numbers; all arrays are in the state, which methods take and return first.
    The slots in use are always 0 to size - 1. A rule of your own inherits from `Sampler` and sets the three attributes
    below in its class.
    """

    keeps_priorities: ClassVar[bool]  # `update` changes how often items are drawn
    needs_order: ClassVar[bool]  # `written` must get every slot of a ring, in order
    without_replacement: ClassVar[bool]  # a drawn item is not drawn again in this epoch, so no draw may be discarded

    @abstractmethod
    def init(self, capacity: int) -> Any:
        """State over `capacity` empty slots."""

    @abstractmethod
    def written(self, state: Any, slots: Int[Array, " batch"]) -> Any:
        """State after new items came into slots.

        Slots repeat only if the rule needs the order, or with a writer that does not store all items.
        """

    @abstractmethod
    def sample(self, state: Any, key: Array, batch_size: int, size: Int[Array, ""]) -> tuple[Any, Draw]:
        """Draw slots. The key, typed or raw, is used once."""

    def update(self, state: Any, slots: Int[Array, " batch"], priorities: Float[Array, " batch"]) -> Any:
        """State after priorities of items changed. TypeError from a rule without priorities."""
        raise TypeError(
            f"{type(self).__name__} keeps no priorities: build the buffer with sampler=fbuf.Prioritized(...)"
        )

    @abstractmethod
    def clear(self, state: Any) -> Any:
        """State over the same slots, all empty again."""

    def chances(self, state: PyTree, size: int) -> Chances:
        """The law of the next draw of one item, over slots 0 to size - 1. Not known by default.

        On the host, in NumPy and float64: not inside jit. It waits for the state. A subclass with another `sample` needs
        another `chances`: otherwise it counts as not known.
        """
        return Chances.unknown(size)

    def priorities(self, state: PyTree, size: int) -> np.ndarray | None:
        """The priorities of slots 0 to size - 1 as the user passed them, on the host; None by default, for none."""
        return None

    def resized(self, state: PyTree, size: int, slots: np.ndarray, capacity: int) -> PyTree:
        """State over `capacity` slots, of which the first have the items that `slots` had, in this order.

        `slots`, int64 [n], are some of the slots in use, 0 to size - 1: those of the newest items, the oldest first. On the
        host: not inside jit. TypeError by default, but for a state without arrays.
        """
        if jax.tree.leaves(state):
            raise TypeError(
                f"{type(self).__name__} does not say how its state changes with the capacity: define "
                "resized(state, size, slots, capacity), see fbuf.Sampler.resized"
            )
        return self.init(capacity)


@runtime_checkable
class Excluding(Sampler, Protocol):
    """A sampler that can exclude slots from being drawn."""

    @abstractmethod
    def init_excluding(self, capacity: int) -> Any:
        """State over `capacity` empty slots, some of which will be excluded."""

    @abstractmethod
    def written_excluding(
        self, state: Any, slots: Int[Array, " batch"], changed: Int[Array, " n"], allowed: Bool[Array, " n"]
    ) -> Any:
        """State after new items came into slots.

        `changed` includes all new slots; `allowed` says which of `changed` may be drawn.
        Equal slots in `changed` have equal values of `allowed`; slots out of range are ignored.
        """


@runtime_checkable
class InEpochs(Sampler, Protocol):
    """A sampler that draws all slots before it draws one again."""

    @abstractmethod
    def restart(self, state: Any) -> Any:
        """State at the beginning of an epoch: slots may now hold other items than before."""


@checked
def importance_weights(
    draw: Draw, beta: Float[Array, ""] | float, normalize: Literal["buffer", "batch", "none"] = "buffer"
) -> Float[Array, " batch"]:
    """Weights (1 / (size * probability)) ** beta that correct for drawing some items more often (arXiv:1511.05952, 3.4).

    normalize: "buffer" divides by the largest weight of any stored item, "batch" by the largest in this draw, so weights
    are at most 1; "none" does not divide. Rows that are not valid weigh 0. `beta`, usually from 0 to 1, is an array that
    may be annealed without a new trace. O(batch).
    """
    checks.number("beta", beta)
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

"""Items by how old the policy is that made them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from fbuf.samplers import Chances
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, a_key, key_of
from interop.samplers.drawing import DrawingSampler
from interop.samplers.parameter import Parameter
from interop.samplers.staleness_draws import FARTHEST, StalenessDraws, Weighed
from interop.storages import Storage


class StalenessAwareSampler(DrawingSampler):
    """Draws fresh items more often, and no items above a maximal staleness.

    The staleness of an item is `consumer_version` minus the version that is stored with it. The training loop sets
    `consumer_version`, usually after each update of the policy. Items are drawn one after the other by weight, without
    repetition; with repetition where a batch has more items than have a weight above zero. An item from a newer policy
    weighs as much as one of staleness 0. The info has "staleness", float32.

    The first draw after a write, an edit or another `consumer_version` takes O(items); others take O(batch log items).

    Args:
        max_staleness: items above it are not drawn; -1 for no bound. Can be set.
        staleness_weight_fn: from an int64 tensor of stalenesses, at least 0, to a tensor of weights, finite and at least 0;
            1 / (staleness + 1) by default. ValueError at the draw for other weights.
        version_key: the entry that holds one version an item; KeyError at the draw where there is none.
    """

    max_staleness = Parameter[int]("_library_draws", "The staleness above which items are not drawn; -1 for no bound.")
    consumer_version = Parameter[int]("_library_draws", "The version of the policy that learns.")
    staleness_weight_fn = Parameter[Callable[[Tensor], Tensor] | None](
        "_library_draws", "Makes weights of stalenesses."
    )
    version_key = Parameter[Any]("_library_draws", "The entry that holds one version an item.")
    _library_draws: StalenessDraws

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[Tensor], Tensor] | None = None,
        version_key: Any = "policy_version",
    ) -> None:
        self._library_draws = StalenessDraws(max_staleness, staleness_weight_fn, version_key)

    def increment_consumer_version(self) -> None:
        """The policy was updated."""
        self.consumer_version += 1

    def staleness_of(self, storage: Storage, slots: np.ndarray | None = None) -> np.ndarray:
        """The staleness of all items, or of those at flat slots, in their shape."""
        return self._library_draws.staleness_of(storage, slots)

    def weighed(self, staleness: np.ndarray, noun: str = "items") -> Weighed:
        """The weights of items or groups of this staleness, [n > 0]. RuntimeError where none can be drawn."""
        return self._library_draws.weighed(staleness, noun)

    def law_of(self, staleness: np.ndarray) -> Chances:
        """The law of the first one that is drawn of items or groups of this staleness, [n]."""
        return self._library_draws.law_of(staleness)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Compute the weights anew at the next draw."""
        self._library_draws.clear()

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "consumer_version": self.consumer_version,
            "max_staleness": self.max_staleness,
            "version_key": key_of(self.version_key),
        }

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            version = entries.whole("consumer_version", -FARTHEST, FARTHEST)
            most = entries.parameter("max_staleness", entries.whole("max_staleness", -1), self.max_staleness)
            key = entries.parameter("version_key", a_key(entries, "version_key"), self.version_key)

            def put() -> None:
                self.consumer_version = version
                self.max_staleness = most
                self.version_key = key
                self._library_draws.clear()

            return put

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "consumer_version", self.consumer_version
        yield "max_staleness", self.max_staleness
        yield "version_key", repr(self.version_key)

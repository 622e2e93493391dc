"""Draws of items by how old the policy is that made them."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

from fbuf.memory_plan import Share
from fbuf.samplers import Chances, Reason
from interop.data import randomness
from interop.data.arguments import whole
from interop.engine.followers import counts_of
from interop.samplers.draws import host_share
from interop.samplers.slot_draws import SlotDraws, stored
from interop.storages import Storage, columns

FARTHEST = 2**62  # of versions, so that differences are exact


class StalenessDraws(SlotDraws):
    """Draws items by the weight of their staleness; keeps the weights until an item, a version or a parameter changes.

    Args:
        max_staleness, staleness_weight_fn, version_key: as for `StalenessAwareSampler`. They may be set between draws, as
            `consumer_version`.
    """

    def __init__(
        self, max_staleness: int, staleness_weight_fn: Callable[[Tensor], Tensor] | None, version_key: Any
    ) -> None:
        if staleness_weight_fn is not None and not callable(staleness_weight_fn):
            raise TypeError(f"staleness_weight_fn must be callable, got {type(staleness_weight_fn).__name__}")
        self.max_staleness = max_staleness
        self.consumer_version = 0
        self.staleness_weight_fn = staleness_weight_fn
        self.version_key = version_key
        self._cached: _Cached | None = None

    @property
    def max_staleness(self) -> int:
        """The staleness above which items are not drawn; -1 for no bound."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        self._max_staleness = whole("max_staleness", value, least=-1)

    @property
    def consumer_version(self) -> int:
        """The version of the policy that learns."""
        return self._consumer_version

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        number = whole("consumer_version", value, least=-FARTHEST)
        if number > FARTHEST:
            raise ValueError(f"consumer_version must be at most 2**62, got {value}")
        self._consumer_version = number

    @property
    def settings(self) -> tuple[Any, ...]:
        return self._consumer_version, self._max_staleness, self.staleness_weight_fn, self.version_key

    @property
    def versions(self) -> dict[NestedKey, int]:
        return {self.version_key: self._consumer_version}

    def clear(self) -> None:
        """Compute the weights anew at the next draw."""
        self._cached = None

    # ------------------------------------------------------------------ draws

    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Tensor, dict[Any, Any]]:
        cached = self._current(storage)
        slots = cached.weighed.draw(batch_size, randomness.generator_of(key))
        staleness = torch.from_numpy(cached.staleness[slots].astype(np.float32))
        return torch.from_numpy(slots), {"staleness": staleness}

    def _current(self, storage: Storage) -> "_Cached":
        """The weights of all items; computed anew after a change, also by other processes."""
        stored(storage)
        settings = (self._consumer_version, self._max_staleness, self.staleness_weight_fn, self.changes)
        computed_at = (counts_of(storage), *settings)
        cached = self._cached
        if cached is None or cached.storage() is not storage or cached.computed_at != computed_at:
            staleness = self.staleness_of(storage)
            self._cached = cached = _Cached(weakref.ref(storage), computed_at, staleness, self.weighed(staleness))
        return cached

    def weighed(self, staleness: np.ndarray, noun: str = "items") -> "Weighed":
        """The weights of items or groups of this staleness, [n > 0]. RuntimeError where none can be drawn."""
        weights, fresh = self._weights_and_fresh(staleness)
        if not fresh.any():
            raise RuntimeError(
                f"all {staleness.size} {noun} are staler than max_staleness={self._max_staleness} at "
                f"consumer_version={self._consumer_version}: increase max_staleness, or collect with newer policies"
            )
        with np.errstate(over="ignore"):
            sums = np.cumsum(weights)
        if not np.isfinite(sums[-1]):
            raise ValueError(f"the weights of all {noun} add up to more than a float can hold: scale them down")
        heavy = np.flatnonzero(weights)
        if not heavy.size:
            raise RuntimeError(f"staleness_weight_fn gives each of {staleness.size} {noun} the weight zero")
        return Weighed(weights, sums, heavy)

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        if not len(storage):
            return Chances.of(np.zeros(0), Reason.NONE)
        return self.law_of(self.staleness_of(storage))

    def law_of(self, staleness: np.ndarray) -> Chances:
        """The law of the first one that is drawn of items or groups of this staleness, [n]."""
        weights, fresh = self._weights_and_fresh(staleness)
        return Chances.of(weights, np.where(fresh, np.uint8(Reason.ZERO_WEIGHT), np.uint8(Reason.STALE)))

    def _weights_and_fresh(self, staleness: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The weight of each, 0 where it is too stale; and whether it is not, bool [n]."""
        fresh = np.ones(staleness.size, np.bool_) if self._max_staleness < 0 else staleness <= self._max_staleness
        weights = np.zeros(staleness.size)
        if fresh.any():
            weights[fresh] = self._weights(np.maximum(staleness[fresh], 0))
        return weights, fresh

    def staleness_of(self, storage: Storage, slots: np.ndarray | None = None) -> np.ndarray:
        """The staleness of all items, or of those at flat slots, in their shape."""
        shape = (len(storage),) if slots is None else slots.shape
        try:
            if slots is None:
                column = columns.whole(storage, self.version_key)
            else:
                column = columns.read(storage, self.version_key, slots)
        except KeyError as error:
            raise KeyError(
                f"there is no {self.version_key!r} in the stored items: have the collector write the version of its policy"
            ) from error
        if column.dtype == torch.bool or column.is_complex():
            raise TypeError(f"versions must be numbers, {self.version_key!r} holds {column.dtype}")
        if column.numel() != np.prod(shape):
            item_shape = list(column.shape[len(shape) :])
            raise ValueError(f"{self.version_key!r} must have one value an item, it has the shape {item_shape}")
        versions = (column.double() if column.is_floating_point() else column.long()).reshape(shape).cpu().numpy()
        if not np.isfinite(versions).all():
            raise ValueError(f"versions must be finite, {self.version_key!r} holds others")
        staleness: np.ndarray = self._consumer_version - versions
        return staleness

    def _weights(self, staleness: np.ndarray) -> np.ndarray:
        """Finite weights of at least 0."""
        if self.staleness_weight_fn is None:
            return 1 / (staleness + 1.0)
        result = self.staleness_weight_fn(torch.from_numpy(staleness))
        if not isinstance(result, Tensor) or result.is_complex() or result.shape != staleness.shape:
            came = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"staleness_weight_fn must give a tensor of {staleness.size} weights, got {came}")
        weights = result.detach().double().cpu().numpy()
        if not (weights.min() >= 0 and weights.max() < np.inf):  # a NaN is neither
            at = int((~((weights >= 0) & (weights < np.inf))).argmax())
            raise ValueError(f"weights must be finite and at least 0, staleness {staleness[at]} has {weights[at]}")
        return weights

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return [host_share("rows, staleness, weights and sums", 5 * 8 * capacity)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}


class Weighed(NamedTuple):
    """Weights of items or groups; those of weight 0 are not drawn."""

    weights: np.ndarray
    sums: np.ndarray  # cumulated weights
    heavy: np.ndarray  # places of the weights above zero

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Places, one after the other in proportion to the weights that are left."""
        if count > self.heavy.size:
            return self._find(count, rng)
        chosen = np.zeros(0, np.int64)
        # Draws with replacement, without the repeated ones, are draws without replacement.
        for _ in range(4 if count <= self.heavy.size // 4 else 0):
            chosen = first_of_equal(np.concatenate((chosen, self._find(count, rng))))[:count]
            if chosen.size == count:
                return chosen
        # The order of exponential times whose rates are the weights has the same law (arXiv:1012.0256).
        is_left = np.ones(self.weights.size, bool)
        is_left[chosen] = False
        left = self.heavy[is_left[self.heavy]]
        times = rng.exponential(size=left.size) / self.weights[left]
        missing = count - chosen.size
        first = np.argpartition(times, missing - 1)[:missing]
        return np.concatenate((chosen, left[first[np.argsort(times[first])]]))

    def _find(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Places drawn independently in proportion to the weights."""
        slots = np.searchsorted(self.sums, rng.random(count) * self.sums[-1], side="right")
        return np.minimum(slots, self.heavy[-1])  # a product may round up to the sum of all


class _Cached(NamedTuple):
    """The weights of the items of a storage at one moment."""

    storage: Callable[[], Storage | None]
    computed_at: Any
    staleness: np.ndarray
    weighed: Weighed


def first_of_equal(places: np.ndarray) -> np.ndarray:
    """The places without repetitions, in the order of their first occurrence."""
    return places[np.sort(np.unique(places, return_index=True)[1])]

"""A draw and the read of its items in one program, for components whose methods are the library's own."""

from typing import Any

import numpy as np

from interop import bridge, compiled, randomness
from interop.processes import may_use_jax
from interop.samplers import PrioritizedSampler, RandomSampler, Sampler
from interop.samplers.uniform import stored, unravel
from interop.storages import Storage, TensorStorage


class Fused:
    """Sampling where storage and sampler are on one device."""

    def __init__(self, storage: TensorStorage, sampler: RandomSampler | PrioritizedSampler) -> None:
        self._storage = storage
        self._sampler = sampler

    @classmethod
    def of(cls, storage: Storage, sampler: Sampler) -> "Fused | None":
        """None where a user's own method would be passed by."""
        own_read = isinstance(storage, TensorStorage) and type(storage).get is TensorStorage.get
        own_draw = any(
            isinstance(sampler, kind) and type(sampler).sample is kind.sample
            for kind in (RandomSampler, PrioritizedSampler)
        )
        return cls(storage, sampler) if own_read and own_draw else None  # type: ignore[arg-type]  # as just found

    def ready(self) -> bool:
        """Whether the program can run here and now."""
        storage, sampler = self._storage, self._sampler
        if not (may_use_jax() and storage._rows is not None and storage._rows.jax_arrays() is not None):
            return False
        if isinstance(sampler, PrioritizedSampler):
            sampler._make(storage)
            return sampler.device.type == storage._rows.device.type
        return True

    def sample(self, batch_size: int, key: np.ndarray | None) -> tuple[Any, dict[Any, Any]]:
        """A batch and what to tell about it. RuntimeError where there is nothing to draw."""
        storage, sampler = self._storage, self._sampler
        assert storage._rows is not None
        arrays, lanes = storage._rows.jax_arrays(), storage._lanes
        size = np.int64(stored(storage))
        key = randomness.key(sampler._rng) if key is None else key
        info: dict[Any, Any] = {}
        if isinstance(sampler, PrioritizedSampler):
            with sampler._lock, bridge.exact():
                state = sampler.ready(storage)
                beta = np.asarray(sampler.beta, sampler.rule.dtype)
                slots, weighed, leaves = compiled.draw(sampler.rule, state, key, batch_size, size, beta, arrays, lanes)
            info["priority_weight"] = sampler.weights_of(weighed)
        else:
            with bridge.exact():
                slots, _, leaves = compiled.draw(sampler.rule, (), key, batch_size, size, None, arrays, lanes)
        info["index"] = unravel(bridge.hand_over(slots), storage)
        return storage.build([bridge.hand_over(leaf) for leaf in leaves], (batch_size,)), info

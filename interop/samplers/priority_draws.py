"""Draws by priority, and their importance weights."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from interop import bridge, compiled, randomness
from interop.samplers.drawing import stored
from interop.samplers.given import Waiting
from interop.storages import Storage


def draw(
    sampler: Any, storage: Storage, batch_size: int, key: Any, items: Sequence[jax.Array]
) -> tuple[Tensor, dict[Any, Any], list[jax.Array]]:
    """`DrawingSampler._draw` of a prioritized sampler."""
    size = stored(storage)
    with sampler._lock:
        if size > sampler._filled:
            sampler.take_over(storage)  # rows that came by another way than through a buffer
        elif size < sampler._filled:
            raise RuntimeError(
                f"there are priorities of {sampler._filled} items, and {size} items are stored: load a checkpoint of the "
                "whole buffer, or empty() it"
            )
        sampler._refusals.tell()
        sampler._make(storage)
        key = randomness.key(sampler._rng) if key is None else key
        items = list(items) if items and items[0].devices() == sampler._state.priorities.devices() else []
        lanes = tuple(storage.shape[1:]) if items and storage.shape is not None else ()
        drawing = key, batch_size, np.int32(size), sampler._beta_array, items, lanes
        narrow = not items and sampler.dtype == torch.float32
        with bridge.on(sampler.device) if narrow else bridge.exact():
            slots, weighed, leaves = _drawn(sampler, drawing)
    weights = _weights(weighed, sampler.rule.eps == 0)
    return bridge.hand_over(slots, torch.int64), {"priority_weight": weights}, leaves


def _drawn(sampler: Any, drawing: tuple[Any, ...]) -> Any:
    """What `compiled.draw` gives, after the waiting priorities came into the tree."""
    # A program that fails takes the state with it that it was given: one of a batch for which there is no memory.
    if sampler._waits and 0 < sampler._waiting.count <= Waiting.FEW and drawing[1] <= Waiting.FEW:
        for part in sampler._waiting.parts():
            (drawn,) = sampler._lend(compiled.assign_and_draw, *part, *drawing, sampler._highest)
        sampler._waiting.clear()
        return drawn
    sampler._apply()
    return compiled.draw(sampler.rule, sampler._state, *drawing)


def _weights(weighed: Any, may_be_none: bool) -> Tensor:
    """The importance weights of a draw; RuntimeError where there was nothing to draw.

    On an accelerator nothing is waited for unless all items may weigh nothing.
    """
    weights, valid = bridge.hand_over(weighed[0]), weighed[1]
    # Without anything to draw all weights are zero, which on the CPU is sooner seen.
    in_doubt = weights.numpy()[0] == 0 if weights.device.type == "cpu" else may_be_none
    if in_doubt and not valid:
        raise RuntimeError(
            "non-positive p_sum: every stored priority is zero, nothing can be drawn. Call update_priority() with "
            "a positive priority, or use eps > 0"
        )
    return weights

"""Draws by priority, and their importance weights."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from interop.data import bridge
from interop.host import compiled
from interop.samplers.drawing import stored
from interop.samplers.given import Waiting
from interop.storages import Storage


def draw(
    sampler: Any, storage: Storage, batch_size: int, key: np.ndarray, items: Sequence[jax.Array]
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
        if sampler._runs_ahead:
            sampler._refusals.tell()
        sampler._make(storage)
        if not sampler._runs_ahead:
            if sampler.dtype == torch.float32:
                words = np.asarray(_drawn(sampler, batch_size, key, size))
            else:
                with bridge.exact():
                    words = np.asarray(_drawn(sampler, batch_size, key, size))
            slots, weights, valid = compiled.read_words(words, batch_size, sampler.rule.dtype)
            if not valid:
                raise _nothing_to_draw()
            return torch.from_numpy(slots), {"priority_weight": torch.from_numpy(weights)}, []
        items = list(items) if items and items[0].devices() == sampler._state.priorities.devices() else []
        lanes = tuple(storage.shape[1:]) if items and storage.shape is not None else ()
        narrow = not items and sampler.dtype == torch.float32
        with bridge.on(sampler.device) if narrow else bridge.exact():
            sampler._apply()
            beta = np.asarray(sampler.beta, sampler.rule.dtype)
            found = compiled.draw(sampler.rule, sampler._state, key, batch_size, np.int32(size), beta, items, lanes)
    slots, weighed, leaves = found
    # To look whether there was anything to draw would be to wait for it.
    if sampler.rule.eps == 0 and not weighed[1]:
        raise _nothing_to_draw()
    return bridge.hand_over(slots, torch.int64), {"priority_weight": bridge.hand_over(weighed[0])}, leaves


def _drawn(sampler: Any, batch_size: int, key: np.ndarray, size: int) -> Any:
    """The words of a draw on the CPU, after the waiting priorities came into the tree."""
    waiting, beta, highest = sampler._waiting, sampler._beta, sampler._highest
    batch_size = compiled.shared_size(batch_size)
    if sampler._waits and 0 < waiting.count <= Waiting.FEW and batch_size <= Waiting.FEW:
        # A program that fails takes the state with it that it was given: one of a batch for which there is no memory.
        words = waiting.words().closed(beta, highest, key, size)
        drawn = sampler._lent.part_to(compiled.assign_and_draw, sampler.rule, batch_size, words)
        waiting.clear()
        return drawn
    sampler._apply()
    words = compiled.Words(0, sampler.rule.dtype).closed(beta, highest, key, size)
    return sampler._lent.shown_to(compiled.draw_weighed, sampler.rule, batch_size, words)


def _nothing_to_draw() -> RuntimeError:
    return RuntimeError(
        "non-positive p_sum: every stored priority is zero, nothing can be drawn. Call update_priority() with "
        "a positive priority, or use eps > 0"
    )

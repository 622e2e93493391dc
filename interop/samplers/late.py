"""Priorities that are on an accelerator: taken without waiting for it, so that what is wrong with them is told later."""

from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from interop.data import bridge
from interop.host import compiled

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Refusals:
    """Whether updates were refused, in order, as far as the device has come."""

    def __init__(self) -> None:
        self._fine: list[Any] = []  # arrays of JAX, whose stubs know no `is_ready`

    def note(self, fine: jax.Array) -> None:
        """An update is under way."""
        self._fine.append(fine)

    def tell(self) -> None:
        """ValueError for an update that was refused, as soon as that is known; nothing is waited for."""
        while self._fine and self._fine[0].is_ready():
            if not self._fine.pop(0):
                raise ValueError(
                    "an update_priority() before this call was refused as a whole: its priorities must be finite and at "
                    "least 0, and its indices of stored items, or -1. On an accelerator nobody waits for it, so this is "
                    "told later"
                )

    def forget(self) -> None:
        """Other priorities have taken the place of those that were updated."""
        self._fine.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_fine": []}


def fits(index: Any, priority: Any, device: torch.device) -> bool:
    """Whether both are on the device, of shapes and dtypes that need no look at their values."""
    return (
        isinstance(index, Tensor)
        and isinstance(priority, Tensor)
        and index.ndim == 1
        and index.dtype in _INTEGERS
        and priority.dtype.is_floating_point
        and index.numel() == priority.numel() > 0
        and all(bridge.jax_device(each.device) == bridge.jax_device(device) for each in (index, priority))
    )


def took(sampler: Any, index: Any, priority: Any, storage: Any) -> bool:
    """Give stored items priorities, of equal indices the last; all of them, or none where one cannot be taken.

    False, and nothing is done, where values have to be looked at first.
    """
    if sampler._kept is not None or not fits(index, priority, sampler.device):
        return False
    with sampler._lock:
        sampler._refusals.tell()
        sampler.ready(storage)
        given = bridge.to_jax(index), bridge.to_jax(priority.reshape(-1))
        with bridge.exact():
            (fine,) = sampler._lend(compiled.update_whole, *given, np.int64(sampler._filled))
        sampler._refusals.note(fine)
    return True

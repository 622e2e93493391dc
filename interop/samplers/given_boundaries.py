"""Where trajectories end, as the user says it of data that is not written any more."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def given_boundaries(
    ends: Tensor | None, trajectories: Tensor | None, cached: bool, *keys: Any
) -> tuple[np.ndarray, int] | None:
    """Flags of ends, and the row where the first trajectory begins, from what the user gives. RuntimeError for misuse."""
    if ends is None and trajectories is None:
        return None
    if ends is not None and trajectories is not None:
        raise RuntimeError("ends and trajectories exclude each other")
    if not cached:
        raise RuntimeError("ends and trajectories are for static data: they need cache_values=True")
    if any(key is not None for key in keys):
        raise RuntimeError("ends and trajectories say where trajectories end: give neither end_key nor traj_key")
    given = torch.as_tensor(ends if ends is not None else trajectories, device="cpu").detach()
    if given.ndim != 1 or given.numel() == 0:
        raise RuntimeError(f"ends and trajectories must be [items], got shape {list(given.shape)}")
    if given.is_floating_point() or given.is_complex() or (ends is not None and given.dtype != torch.bool):
        raise TypeError(f"ends must be bool and trajectories integers, got {given.dtype}")
    values = given.numpy()
    if ends is None:
        values = values != np.roll(values, -1)  # the last row goes on in the first where their ids are equal
    last = np.flatnonzero(values)
    return values.copy(), int(last[-1] + 1) % len(values) if last.size else 0

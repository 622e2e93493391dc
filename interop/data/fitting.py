"""New values for stored tensors: of the same shape, dtype and layout."""

from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor


def fitting(place: Tensor, value: object, path: tuple[Any, ...]) -> Tensor:
    """The value as a tensor that fits the place, on its device. A number is spread over the place.

    TypeError for other values than numbers and tensors, RuntimeError for another shape, dtype or layout.
    """
    if is_tensor_collection(value):
        raise TypeError(f"{shown_path(path)}: a tensor is stored, got {type(value).__name__}; nothing was written")
    if not isinstance(value, Tensor | np.ndarray):
        try:
            value = torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise TypeError(f"{shown_path(path)}: a tensor is stored, got {kind}; nothing was written") from error
        if not torch.can_cast(value.dtype, place.dtype):
            raise RuntimeError(f"{shown_path(path)}: stored are {place.dtype}, got {value.dtype}; nothing was written")
        value = value.to(place.dtype).expand(place.shape) if value.ndim == 0 else value.to(place.dtype)
    value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    if value.shape != place.shape or value.dtype != place.dtype or value.layout != place.layout or value.is_meta:
        raise RuntimeError(
            f"{shown_path(path)}: stored are {list(place.shape)} of {place.dtype}, got {list(value.shape)} of {value.dtype} "
            f"({value.layout}, on {value.device}); nothing was written"
        )
    return value.to(place.device)


def shown_path(path: tuple[Any, ...]) -> str:
    """The path as users write it, for a message."""
    return repr(path[0]) if len(path) == 1 else repr(path) if path else "the data"

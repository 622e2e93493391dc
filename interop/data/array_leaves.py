"""Arrays of NumPy and JAX, and numbers, where items hold a tensor."""

import jax
import numpy as np
import torch
from torch import Tensor

from interop.data import bridge

_BFLOAT16 = bridge.DTYPES[torch.bfloat16]


def as_leaf(value: object, name: str) -> Tensor | None:
    """A tensor with the values of an array or number; None for anything else.

    Of an array on the CPU it shares the memory where it can, for a value that is copied into a storage next. Numbers get the
    dtypes of `torch.tensor`. `name` is of the entry, for messages.

    TypeError for an array of a dtype that torch does not have, such as text, objects or another byte order.
    """
    if isinstance(value, jax.Array):
        return bridge.to_torch(value, copy=False)
    if isinstance(value, np.ndarray | np.generic):
        return _of_numpy(np.asarray(value), name)
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value, device="cpu")
    return None


def _of_numpy(array: np.ndarray, name: str) -> Tensor:
    if array.dtype not in bridge.FROM_NUMPY:
        raise TypeError(
            f"{name}: tensors have no dtype like that of this array, {array.dtype}: cast it first, store text as a list of "
            "texts, or use a ListStorage for other objects; nothing was written"
        )
    array = np.require(array, requirements=["C"])  # torch has no negative strides
    if not array.flags.writeable:
        array = array.copy()  # torch warns of memory that must not be written
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)

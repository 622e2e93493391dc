"""Dtypes and shapes of key entries."""

from collections.abc import Sequence

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from interop.data.keys import known_keys

Kinds = list[tuple[str, list[int]]]


def kinds_of(names: Sequence[NestedKey], data: TensorDictBase, stored: Kinds | None = None) -> Kinds:
    """The dtype and row shape of each key entry.

    KeyError for a missing entry, TypeError for a non-tensor, ValueError if dtype or shape differ from `stored`.
    """
    found: Kinds = []
    for place, name in enumerate(names):
        value = data.get(name, None)
        if value is None:
            raise KeyError(f"the key {name!r} is missing; there are {known_keys(data)}")
        if not isinstance(value, Tensor):
            raise TypeError(f"the key {name!r} must be a tensor, got {type(value).__name__}")
        found.append((str(value.dtype), list(value.shape[data.ndim :])))
        if stored and stored[place] != found[place]:
            (dtype, shape), (kept, other) = found[place], stored[place]
            raise ValueError(
                f"the key {name!r} is {dtype} of shape {shape} in each row, the stored ones are {kept} of {other}"
            )
    return found

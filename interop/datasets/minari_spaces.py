"""The spaces in the metadata of Minari datasets: JSON, as `minari.serialization` writes it."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from interop.bridge import FROM_NUMPY
from interop.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded

Space = Mapping[str, Any] | None  # None for one that is not known


def subspaces(space: Space) -> dict[str, Space] | None:
    """The spaces of the entries of a Dict, of a Tuple under the keys "0", "1", .... None for other spaces."""
    if not space or space.get("type") not in ("Dict", "Tuple"):
        return None
    inner = space["subspaces"]
    return dict(inner) if isinstance(inner, Mapping) else {str(place): each for place, each in enumerate(inner)}


def at(space: Space, path: tuple[str, ...]) -> Space:
    """The space of a nested entry."""
    for key in path:
        space = (subspaces(space) or {}).get(key)
    return space


def shape_of(space: Space) -> tuple[int, ...] | None:
    """The shape of the members of a space. None if they are not arrays of one shape."""
    kind = space and space.get("type")
    if not space or kind not in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        return None
    if kind == "MultiBinary":
        return tuple(np.atleast_1d(space["n"]).tolist())
    return tuple(space["shape"]) if kind == "Box" else np.shape(space.get("nvec", 0))


def row_bytes(space: Space) -> int:
    """The size of a member; 8 if that is not known."""
    inner, shape = subspaces(space), shape_of(space)
    if inner is not None:
        return sum(map(row_bytes, inner.values()))
    return 8 if not space or shape is None else math.prod(shape) * np.dtype(space.get("dtype", "int64")).itemsize


def spec_of(space: Space) -> TensorSpec | None:
    """The spec of the members of a space. None for text, for dtypes that specs have not, and for unknown spaces.

    | space | spec |
    |---|---|
    | Box | Unbounded where all bounds are infinite, otherwise Bounded |
    | Discrete, MultiDiscrete | Categorical, MultiCategorical; Bounded where they do not start at 0 |
    | MultiBinary | Binary |
    | Dict, Tuple | Composite, of a Tuple with the keys "0", "1", ... |
    """
    inner, shape = subspaces(space), shape_of(space)
    if inner is not None:
        return Composite({key: spec_of(each) for key, each in inner.items()})
    if not space or shape is None:
        return None
    held = np.dtype(space.get("dtype", "int8"))
    dtype = FROM_NUMPY.get(held)
    if dtype in (None, torch.uint16):  # torch cannot compare numbers of these with bounds
        return None
    if space["type"] == "MultiBinary":
        return Binary(shape=shape, dtype=dtype)
    if space["type"] == "Box":
        low, high = (np.broadcast_to(np.asarray(space[end], held), shape) for end in ("low", "high"))
        if (low == -np.inf).all() and (high == np.inf).all():
            return Unbounded(shape, dtype=dtype)
        return Bounded(torch.tensor(low), torch.tensor(high), shape, dtype=dtype)
    start, sizes = (
        torch.tensor(space.get(key, 0)) for key in ("start", "n" if space["type"] == "Discrete" else "nvec")
    )
    if start.any():
        return Bounded(start, start + sizes - 1, shape, dtype=dtype)
    return (
        MultiCategorical(sizes, dtype=dtype, remove_singleton=False) if shape else Categorical(int(sizes), dtype=dtype)
    )

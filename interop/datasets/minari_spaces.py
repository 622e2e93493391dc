"""The spaces in the metadata of Minari datasets: JSON, as `minari.serialization` writes it."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from interop.data.arguments import required
from interop.specs import Composite, TensorSpec, from_gymnasium

Space = Mapping[str, Any] | None  # None for one that is not known


def arrays_of(space: Space, *above: str) -> Iterator[tuple[tuple[str, ...], np.dtype]]:
    """The arrays of a member by their place below `above`, as dtypes with a shape. Text and unknown spaces have none."""
    kind = space and space.get("type")
    if not space or kind in ("Dict", "Tuple"):
        for key, each in _subspaces(space).items():
            yield from arrays_of(each, *above, key)
    elif kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        shape = space["n"] if kind == "MultiBinary" else space.get("shape", np.shape(space.get("nvec", 0)))
        yield above, np.dtype((space.get("dtype", "int8"), tuple(shape) if isinstance(shape, list) else shape))


def _subspaces(space: Space) -> dict[str, Space]:
    inner = space["subspaces"] if space else {}
    return dict(inner) if isinstance(inner, Mapping) else {str(place): each for place, each in enumerate(inner)}


def spec_of(space: Space) -> TensorSpec | None:
    """The spec of the members of a space, as by `from_gymnasium`. None for text, for dtypes that specs have not, and for
    unknown spaces, also for those in a Dict or Tuple.
    """
    if space and space["type"] in ("Dict", "Tuple"):
        return Composite({key: spec_of(each) for key, each in _subspaces(space).items()})
    try:
        return from_gymnasium(required("minari.serialization", "datasets").deserialize_space(space))
    except TypeError:  # also minari's for an unknown type
        return None

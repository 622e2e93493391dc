"""Spaces in Minari's metadata: JSON of `minari.serialization`."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from interop.data.arguments import required
from interop.specs import Composite, TensorSpec, from_gymnasium

Space = Mapping[str, Any] | None  # None for an unknown space


def arrays_of(space: Space, *above: str) -> Iterator[tuple[tuple[str, ...], np.dtype]]:
    """Yield the path below `above` and the dtype, with shape, of each array of a member. Skips text and unknown spaces."""
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
    """The spec of a space, as by `from_gymnasium`. None for text, dtypes that specs lack, and unknown spaces, also
    inside of a Dict or Tuple.
    """
    if space and space["type"] in ("Dict", "Tuple"):
        return Composite({key: spec_of(each) for key, each in _subspaces(space).items()})
    try:
        return from_gymnasium(required("minari.serialization", "datasets").deserialize_space(space))
    except TypeError:  # minari raises it for an unknown type
        return None

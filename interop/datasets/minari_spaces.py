"""Spaces in Minari's metadata: JSON of `minari.serialization`."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from interop.data.arguments import required
from interop.datasets.described import Described
from interop.datasets.errors import CorruptDatasetError
from interop.specs import Composite, TensorSpec, from_gymnasium

Space = Mapping[str, Any] | None  # None for an unknown space

_MOST_DIMS = 64
_MOST_BYTES = 1 << 31  # of an array of a step
_DTYPES = ("bool", *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)), "float128")


def arrays_of(space: Any, where: str, *above: str) -> Iterator[tuple[tuple[str, ...], np.dtype]]:
    """Yield the path below `above` and the dtype, with shape, of each array of a member. Skips text and unknown spaces.

    CorruptDatasetError, prefixed by `where`, for JSON that describes no space, and spaces of more than 2 GiB a member.
    """
    if space is None:
        return
    fields = Described(space, where)
    kind = fields.text("type")
    if kind in ("Dict", "Tuple"):
        for key, subspace in _subspaces(fields).items():
            yield from arrays_of(subspace, f"{where}, {key}", *above, key)
    elif kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        name = fields.text("dtype") if "dtype" in fields else "int8"
        shape = _shape(fields, kind)
        if name not in _DTYPES:
            raise fields.wrong("dtype", "a dtype of numbers", name)
        if len(shape) > _MOST_DIMS or math.prod(shape) * np.dtype(name).itemsize >= _MOST_BYTES:
            raise fields.wrong("shape", f"the shape of an array of less than {_MOST_BYTES} bytes", list(shape))
        yield above, np.dtype((name, shape))


def _shape(fields: Described, kind: str) -> tuple[int, ...]:
    """The shape of a member. A Box has as many bounds as values, so that they take no more memory than their text."""
    if kind == "MultiBinary":
        return fields.wholes("n") if isinstance(fields.any("n"), list) else (fields.whole("n"),)
    if kind == "MultiDiscrete":
        return _dims(fields, "nvec")
    if kind == "Discrete":
        return ()
    shape = fields.wholes("shape")
    for name in ("low", "high"):
        if name in fields and (dims := _dims(fields, name)) != shape:
            raise fields.wrong(name, f"numbers of shape {list(shape)}", f"shape {list(dims)}")
    return shape


def _dims(fields: Described, name: str) -> tuple[int, ...]:
    """The shape of nested lists."""
    try:
        numbers = np.array(fields.any(name))
    except ValueError:  # lists of different lengths
        numbers = np.empty(0, object)
    if numbers.dtype.kind not in "biuf":
        raise fields.wrong(name, "numbers in lists of equal length", fields.any(name))
    return numbers.shape


def _subspaces(fields: Described) -> dict[str, Any]:
    inner = fields.any("subspaces")
    if isinstance(inner, Mapping):
        return dict(inner)
    return {str(place): subspace for place, subspace in enumerate(fields.items("subspaces"))}


def spec_of(space: Space, where: str) -> TensorSpec | None:
    """The spec of a space, as by `from_gymnasium`. None for text, dtypes that specs lack, and unknown spaces, also
    inside of a Dict or Tuple. CorruptDatasetError, prefixed by `where`, for a space that cannot be.
    """
    if space is None:
        return None
    fields = Described(space, where)
    if fields.text("type") in ("Dict", "Tuple"):
        return Composite({key: spec_of(subspace, f"{where}, {key}") for key, subspace in _subspaces(fields).items()})
    deserialize = required("minari.serialization", "datasets").deserialize_space
    try:
        return from_gymnasium(deserialize(space))
    except TypeError:  # minari raises it for an unknown type
        return None
    except Exception as error:  # gymnasium raises many kinds for bounds that it does not take
        raise CorruptDatasetError(f"{where}: no space of gymnasium ({error})") from error

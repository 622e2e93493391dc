"""Conversion between specs and gymnasium spaces. gymnasium is imported at the first conversion."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from interop.data.bridge import DTYPES, FROM_NUMPY
from interop.specs.bounded import Bounded, Unbounded
from interop.specs.categorical import Binary, Categorical
from interop.specs.composite import Composite
from interop.specs.leaves import converted
from interop.specs.multi_categorical import MultiCategorical
from interop.specs.one_hot import OneHot
from interop.specs.spec import TensorSpec

if TYPE_CHECKING:
    import gymnasium

_KIND = "gymnasium_kind"  # attribute of specs that were made from a space of a class other than the default one


def from_gymnasium(space: "gymnasium.Space[Any]") -> TensorSpec:
    """The spec of a gymnasium space. `to_gymnasium` converts it back to an equal space.

    | space | spec |
    |---|---|
    | Box | Unbounded if all bounds are infinite (never for integers), otherwise Bounded with the same bounds |
    | Discrete, MultiDiscrete | Categorical, MultiCategorical; Bounded if they do not start at 0 |
    | MultiBinary | Binary |
    | Dict | Composite |
    | Tuple | Composite with the keys "0", "1", ...: it encodes `{"0": member[0], ...}` |

    Spaces of vector environments have the same classes. If several spaces give the same spec, an attribute of the spec
    records the class of the space. It is ignored when specs are compared.

    Raises:
        TypeError: the space, or a nested one, has another class, such as Text, Sequence, Graph or OneOf, a key that is no
            string, or a dtype that torch cannot compare, such as uint16.
        ValueError: a key is the name of an attribute of specs.
        ImportError: gymnasium is not installed.
    """
    return _spec_of(space, _spaces(), "the space")


def _spec_of(space: Any, spaces: Any, at: str) -> TensorSpec:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _composite_of(space, spaces, at)
    known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, known):
        raise TypeError(
            f"{at} is a {type(space).__name__}, whose members are not tensors of one shape: leave it out, or have a "
            "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple in its place"
        )
    dtype = FROM_NUMPY.get(space.dtype)
    if dtype is None or dtype == torch.uint16:  # torch cannot compare uint16 with bounds
        raise TypeError(f"{at} is {space.dtype}, which specs do not have: use a larger signed dtype, such as int32")
    shape = space.shape
    if isinstance(space, spaces.MultiBinary):
        is_plain = len(shape) != 1 or isinstance(space.n, int)
        return _marked(Binary(shape=shape, dtype=dtype), None if is_plain else "MultiBinary")
    if isinstance(space, spaces.Box):
        if (space.low == -np.inf).all() and (space.high == np.inf).all():
            return Unbounded(shape, dtype=dtype)
        return Bounded(torch.tensor(space.low), torch.tensor(space.high), shape, dtype=dtype)
    is_single = isinstance(space, spaces.Discrete)
    start, sizes = (np.asarray(each, np.int64) for each in (space.start, space.n if is_single else space.nvec))
    if start.any() or not (is_single or shape):
        low, high = torch.tensor(start), torch.tensor(start + sizes - 1)
        return _marked(Bounded(low, high, shape, dtype=dtype), "Discrete" if is_single else "MultiDiscrete")
    if is_single:
        return Categorical(int(space.n), dtype=dtype)
    return MultiCategorical(torch.tensor(sizes), dtype=dtype, remove_singleton=False)


def _composite_of(space: Any, spaces: Any, at: str) -> TensorSpec:
    is_tuple = isinstance(space, spaces.Tuple)
    entries: dict[str, TensorSpec] = {}
    for key, each in enumerate(space.spaces) if is_tuple else space.spaces.items():
        if not (is_tuple or isinstance(key, str)):
            raise TypeError(f"{at} has the key {key!r}: the keys of specs are strings, rename it")
        entries[str(key)] = _spec_of(each, spaces, f"{at}[{key!r}]")
    try:
        return _marked(Composite(entries), "Tuple" if is_tuple else None)
    except AttributeError as error:
        raise ValueError(f"{at}: {error}; rename the key") from error


def to_gymnasium(spec: TensorSpec) -> "gymnasium.Space[Any]":
    """The gymnasium space of a spec: it contains the results of `spec.to_numpy`, the inputs of `spec.encode`.

    | spec | space |
    |---|---|
    | Bounded, Unbounded | Box |
    | Categorical, OneHot | Discrete, or MultiDiscrete for more than one choice |
    | MultiCategorical, MultiOneHot | MultiDiscrete |
    | Categorical of bools, or with n above the largest number of its dtype | Box |
    | Binary | MultiBinary, which is int8 |
    | Composite | Dict |
    | a result of `from_gymnasium` | the original space |

    Spaces have no masks: they contain masked choices too.

    Raises:
        TypeError: an entry describes no tensors, is a `Stacked` or a `Choice`, or has a dtype that gymnasium lacks.
        ValueError: a dim is dynamic.
        ImportError: gymnasium is not installed.
    """
    spaces = _spaces()

    def node(spec: Composite, entries: dict[str, Any]) -> Any:
        is_tuple = vars(spec).get(_KIND) and list(entries) == [str(place) for place in range(len(entries))]
        return spaces.Tuple(entries.values()) if is_tuple else spaces.Dict(list(entries.items()))

    return converted(spec, lambda leaf, at: _space_of(leaf, spaces, at), node)


def _space_of(spec: TensorSpec, spaces: Any, at: str) -> Any:
    spec = spec.to_categorical_spec() if isinstance(spec, OneHot) else spec
    kind, shape = vars(spec).get(_KIND), tuple(spec.shape)
    dtype = None if spec.dtype is None else DTYPES.get(spec.dtype)
    if isinstance(spec, Binary):
        return spaces.MultiBinary(shape if kind or len(shape) != 1 else shape[0])
    if not isinstance(spec, Categorical | Bounded | Unbounded):
        raise TypeError(f"{at} is a {type(spec).__name__}, for which there is no space: convert its members one by one")
    if dtype is None or dtype.kind not in ("iub" if isinstance(spec, Categorical) else "iubf"):
        raise TypeError(f"{at} is a {type(spec).__name__} of {spec.dtype}, for which there is no space: cast it first")
    if isinstance(spec, Unbounded) and dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if isinstance(spec, Categorical):
        kind = kind or ("MultiDiscrete" if shape else "Discrete")
        sizes = spec.nvec if isinstance(spec, MultiCategorical) else torch.full(shape, spec.n)
        low, high = np.zeros(shape, np.int64), sizes.cpu().numpy() - 1
    else:
        low, high = (each.cpu().numpy() for each in spec.space)
    if kind and dtype.kind in "iu":
        count = high.astype(np.int64) - low + 1
        if ((count > 0) & (count <= np.iinfo(dtype).max)).all():
            if kind == "Discrete" and not shape:
                return spaces.Discrete(int(count), start=int(low), dtype=dtype.type)
            return spaces.MultiDiscrete(count, dtype.type, start=low)
    return spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype.type)


def _marked(spec: TensorSpec, kind: str | None) -> TensorSpec:
    """Record the class of the original space in the spec. Returns the spec."""
    if kind is not None:
        vars(spec)[_KIND] = kind
    return spec


def _spaces() -> Any:
    try:
        from gymnasium import spaces
    except ImportError as error:
        raise ImportError("specs and spaces are converted with gymnasium: pip install 'gymnasium>=1.1'") from error
    return spaces

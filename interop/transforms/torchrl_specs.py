"""The specs of an environment behind a transform: found by running it on entries of the specs before it.

Of torchrl nothing is imported here: the specs come from an environment, and what is made is of the classes of `torchrl.data`
as the program has imported it.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

Spec = Any
Specs = Mapping[NestedKey, Spec]
_BOUNDS = ("low", "high")
_PLACES = ("zero", *["draw"] * 16, *_BOUNDS, *_BOUNDS)


def outputs(
    output_spec: Spec, run: Callable[[TensorDictBase], Any], pairs: Mapping[NestedKey, NestedKey], known: Specs
) -> Spec:
    """What an environment returns behind a transform.

    An entry that comes out as it went in keeps its spec, under another name too. One that does not is bounded by what was
    made of the bounds if that holds for draws and is made of them again at the end, else not at all.

    Args:
        output_spec: what it returns before the transform.
        run: what the transform does to a step.
        pairs: of an entry that it makes, the one of which it makes it, as far as that is known.
        known: specs that are not to be found out.

    ValueError where another batch size comes out.
    """
    found = output_spec.clone()
    entries = Entries(found)
    before: list[Any] = []
    after: list[Any] = []
    for place, data, copies in entries.given():
        names = {id(data.get(key)): key for key in copies}
        size = data.batch_size
        before.append((names, copies))
        result = _tried(place, run, data)
        if result is None and place in _BOUNDS:
            after.append(None)
            continue
        if not is_tensor_collection(result) or result.batch_size != size:
            became = list(result.batch_size) if is_tensor_collection(result) else type(result).__name__
            raise ValueError(f"the batch size of a step, {list(size)}, became {became}: it must stay what it is")
        after.append({key: result.get(key) for key in result.keys(True, True, is_leaf=is_leaf_nontensor)})
    for key in entries.specs.keys() - after[0].keys():
        del found[entries.place(key)]
    for key in after[0]:
        source = _source(key, before, after)
        if key in known:
            spec = known[key]
        elif source is not None:
            spec = entries.specs[source]
        else:
            spec = _spec_of([values and values[key] for values in after])
        part = entries.part_of.get(key) or entries.part_of.get(pairs.get(key, source), "full_observation_spec")
        if source != key or key in known:
            found[(part, *_path(key))] = spec.clone()
    return found


def inputs(
    input_spec: Spec,
    pairs: Sequence[tuple[NestedKey, NestedKey]],
    outward: Callable[[Tensor], Tensor],
    inverse: Callable[[TensorDictBase], Any],
    known: Specs,
) -> Spec:
    """What an environment takes behind a transform.

    For an entry that the inverse writes it is the image of its spec in the other direction, or the same spec; whichever it
    is, the inverse must make of draws what the environment takes.

    Args:
        input_spec: what it takes before the transform.
        pairs: entries that the inverse writes, and those that it makes them of.
        outward: what undoes the inverse, for one tensor.
        inverse: what it does to what is given.
        known: specs that are not to be found out.

    ValueError where it cannot be found out.
    """
    found = input_spec.clone()
    entries = Entries(found)
    inner = [(one, other) for one, other in pairs if one in entries.specs]
    reasons = []
    for guess in (outward, _same):
        try:
            specs = [known[other] if other in known else _image(entries.specs[one], guess) for one, other in inner]
            outside = _replaced(found, entries, inner, specs, known)
            _check(outside, entries, inverse)
        except Exception as error:
            if isinstance(error, KeyError) and not inner:
                return found  # it asks for something else that is given to a step
            reasons.append(f"{type(error).__name__}: {error}")
        else:
            return outside
    raise ValueError(
        f"what is to be given for {[other for _, other in inner] or list(entries.specs)} cannot be found out by running "
        f"the transform ({'; '.join(dict.fromkeys(reasons))}): say it, as_torchrl(transform, specs={{key: spec}})"
    )


def _replaced(
    found: Spec, entries: "Entries", inner: Sequence[tuple[Any, Any]], specs: Sequence[Spec], known: Specs
) -> Spec:
    outside = found.clone()
    for one, _ in inner:
        del outside[entries.place(one)]
    for (one, other), spec in zip(inner, specs, strict=True):
        outside[(entries.part_of[one], *_path(other))] = spec.clone()
    for key in entries.specs.keys() & known.keys():
        outside[entries.place(key)] = known[key].clone()
    return outside


def _check(outside: Spec, entries: "Entries", inverse: Callable[[TensorDictBase], Any]) -> None:
    """ValueError where the inverse makes of draws what the environment does not take."""
    for _, data, _ in Entries(outside).given("draw"):
        result = inverse(data)
        for key, spec in entries.specs.items():
            value = result.get(key, None)
            if value is None:
                raise ValueError(f"the inverse makes no {key!r}")
            if isinstance(value, Tensor) and (value.shape != spec.shape or value.dtype != spec.dtype):
                raise ValueError(
                    f"the inverse makes {key!r} {value.dtype} of shape {list(value.shape)}, "
                    f"the environment takes {spec.dtype} of {list(spec.shape)}"
                )
            if isinstance(value, Tensor) and not _fits(spec, value):
                raise ValueError(f"the inverse makes a {key!r} that is not of {type(spec).__name__} {spec.space}")


def _fits(spec: Spec, value: Tensor) -> bool:
    """Whether a value is of the spec, up to rounding."""
    bounds = _bounds_of(spec)
    if bounds is None or not value.dtype.is_floating_point:
        return bool(spec.is_in(value))
    low, high = bounds
    margin = 1e-5 * torch.maximum(low.abs(), high.abs()).clamp(1e-5, 1e30)
    return bool(((value >= low - margin) & (value <= high + margin)).all())


class Entries:
    """The entries of composite specs, the parts of one; `given` makes tensordicts of them."""

    def __init__(self, spec: Spec) -> None:
        parts = {name: part for name, part in spec.items() if part is not None}
        self.part_of = {key: name for name, part in parts.items() for key in part.keys(True, True)}
        self.specs = {key: parts[name][key] for key, name in self.part_of.items()}
        self._zero = parts.popitem()[1].zero()
        for part in parts.values():
            self._zero.update(part.zero())

    def place(self, key: NestedKey) -> tuple[str, ...]:
        """Where the spec of an entry is."""
        return (self.part_of[key], *_path(key))

    def given(self, only: str | None = None) -> Iterator[tuple[str, TensorDictBase, dict[NestedKey, Any]]]:
        """Tensordicts of zeros, draws and the bounds, or one kind of these: which, and with copies of what is in it."""
        for place in _PLACES:
            if only is not None and place != only:
                continue
            data, copies = self._zero.copy(), {}
            for key, spec in self.specs.items():
                value = _value(spec, place)
                data.set(key, value)
                copies[key] = value.clone()
            yield place, data, copies


@contextlib.contextmanager
def draws_apart(spec: Spec) -> Iterator[None]:
    """Torch's generators are afterwards as before; draws in between are the same in every run."""
    devices = {each.device for each in spec.values(True, True) if each.device is not None}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        torch.manual_seed(0)
        yield


# ---------------------------------------------------------------------- one entry


def _image(spec: Spec, function: Callable[[Tensor], Tensor]) -> Spec:
    """The spec of what a function makes of the values of one."""
    if function is _same:
        return spec
    data = sys.modules["torchrl.data"]
    if isinstance(spec, data.OneHot) and not isinstance(spec, data.MultiOneHot):
        made = function(torch.eye(spec.shape[-1], dtype=spec.dtype, device=spec.device))
        bits = made.to(torch.int64)
        if made.ndim == 2 and bits.ge(0).all() and bits.sum(-1).eq(1).all():
            width = made.shape[-1]
            return data.OneHot(width, shape=(*spec.shape[:-1], width), dtype=made.dtype, device=spec.device)
    values = [_value(spec, place) for place in _PLACES]
    made_of = [_tried(place, function, value.clone()) for place, value in zip(_PLACES, values, strict=True)]
    return spec if all(map(_equal, values, made_of)) else _spec_of(made_of)


def _tried(place: str, function: Callable[[Any], Any], value: Any) -> Any:
    """What a function makes of a value; None of bounds that it refuses: they may be infinite."""
    try:
        return function(value)
    except Exception:
        if place not in _BOUNDS:
            raise
        return None


def _same(value: Tensor) -> Tensor:
    return value


def _spec_of(values: Sequence[Any]) -> Spec:
    """The spec of what was made of zeros, of draws, of the lowest and highest values, and of these again."""
    data = sys.modules["torchrl.data"]
    zero, *draws, one, other, one_again, other_again = values
    if not isinstance(zero, Tensor):
        return data.NonTensor(shape=zero.batch_size)
    about = {"shape": zero.shape, "dtype": zero.dtype, "device": zero.device}
    if zero.dtype == torch.bool:
        return data.Categorical(2, **about)
    if zero.is_complex():
        return data.Unbounded(**about)
    if one is None or other is None or not (_equal(one, one_again) and _equal(other, other_again)):
        return data.Unbounded(**about)  # it learns, or draws
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    holds = all(bool(((low <= each) & (each <= high)).all()) for each in draws)
    most = torch.finfo(zero.dtype).max if zero.dtype.is_floating_point else 2**31 - 1
    if not holds or bool(((low.double() <= -most) & (high.double() >= most)).all()):
        return data.Unbounded(**about)
    return data.Bounded(low=low, high=high, **about)


def _value(spec: Spec, place: str) -> Any:
    """One value of a spec."""
    zero = spec.zero()
    if not isinstance(zero, Tensor) or place == "zero":
        return zero
    bounds = _bounds_of(spec)
    if bounds is None:
        return spec.rand() if place == "draw" or zero.is_complex() else _choice(spec, zero, place)
    low, high = bounds
    if place != "draw":
        return (low if place == "low" else high).clone()
    low, high = low.double(), high.double()
    none = torch.zeros_like(low)  # a thousand numbers of those between the bounds
    least = torch.maximum(low, torch.minimum(high, none) - 1000)
    most = torch.minimum(high, torch.maximum(low, none) + 1000)
    share = torch.rand(zero.shape, dtype=torch.float64, device=zero.device)
    drawn = least * (1 - share) + most * share
    return (drawn if zero.dtype.is_floating_point else drawn.round()).to(zero.dtype)


def _bounds_of(spec: Spec) -> tuple[Tensor, Tensor] | None:
    """The bounds of a spec that has them; infinite where they are the largest finite numbers, which stand for none."""
    low, high = getattr(spec.space, "low", None), getattr(spec.space, "high", None)
    if low is None or high is None or low.dtype == torch.bool or low.is_complex():
        return None
    if not low.dtype.is_floating_point:
        return low, high
    most = torch.finfo(low.dtype).max
    low = torch.where(low <= -most, torch.full_like(low, -torch.inf), low)
    return low, torch.where(high >= most, torch.full_like(high, torch.inf), high)


def _choice(spec: Spec, zero: Tensor, place: str) -> Tensor:
    """The lowest or highest values of a spec of choices: numbers, or bits."""
    if place == "low":
        return zero
    data = sys.modules["torchrl.data"]
    most: Any = 1
    if isinstance(spec, data.MultiCategorical):
        most = [box.n - 1 for box in spec.space.boxes]
    elif isinstance(spec, data.Categorical) and not isinstance(spec, data.Binary):
        most = spec.space.n - 1
    return zero + torch.as_tensor(most, device=zero.device).to(zero.dtype)


def _source(key: NestedKey, before: Sequence[Any], after: Sequence[Any]) -> Any:
    """The entry before the transform that this one always is; None for none of them."""
    names = before[0][0]
    for source in dict.fromkeys([key, names.get(id(after[0][key]))]):
        if source in before[0][1] and all(
            values is None or _equal(values[key], copies[source])
            for values, (_, copies) in zip(after, before, strict=True)
        ):
            return source
    return None


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _path(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)

"""The spec of a choice between specs or objects."""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from tensordict import TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Size, Tensor

from interop.specs.spec import TensorSpec, refused


class Choice(TensorSpec):
    """A value of one of several specs, or one of several non-tensor objects. All choices are equally likely.

    Args:
        choices: a list of specs of one class, or of `NonTensorData` or stacks of it; all of one shape, dtype and device.

    Raises:
        TypeError: `choices` is no list, or has members of different classes.
        ValueError: `choices` is empty, or shapes, dtypes or devices differ.
    """

    def __init__(self, choices: list[Any]) -> None:
        if not isinstance(choices, list):
            raise TypeError(f"choices must be a list, got {type(choices).__name__}")
        if not choices:
            raise ValueError("choices needs at least one member")
        first = choices[0]
        if not all(type(each) is type(first) for each in choices) or not (
            isinstance(first, TensorSpec) or is_non_tensor(first)
        ):
            kinds = sorted({type(each).__name__ for each in choices})
            raise TypeError(f"choices must be specs of one class, or objects as NonTensorData, got {kinds}")
        for name in ("shape", "dtype", "device"):
            found = [getattr(each, name, None) for each in choices]
            if any(each != found[0] for each in found):
                raise ValueError(f"choices must have the same {name}, got {found}")
        self._choices = list(choices)
        self.shape, self.device = first.shape, first.device
        self.dtype = first.dtype if isinstance(first, TensorSpec) else None
        self.structural, self.rigid = getattr(first, "structural", 0), getattr(first, "rigid", False)

    @property
    def num_choices(self) -> int:
        """The number of choices."""
        return len(self._choices)

    def _made(self, how: str, lead: Size) -> Any:
        member = self._choices[int(torch.randint(self.num_choices, ())) if how == "rand" else 0]
        if isinstance(member, TensorSpec):
            return getattr(member, how)(lead)
        return member.expand(*lead, *member.batch_size) if lead else member

    def _has(self, val: Any) -> bool:
        if isinstance(self._choices[0], TensorSpec):
            return any(each.is_in(val) for each in self._choices)
        return is_non_tensor(val) and any(val.tolist() == each.tolist() for each in self._choices)

    def project(self, val: Any) -> Any:
        """The value itself if a member contains it; otherwise the nearest of the members' corrections of it.

        NotImplementedError for a choice of objects, which have no distance.
        """
        if self._has(val):
            return val
        if not isinstance(self._choices[0], TensorSpec):
            raise NotImplementedError(
                f"{val!r:.200} is none of {self._choices}: objects have no distance to correct it by"
            )
        if isinstance(val, Tensor):
            return min((each.project(val) for each in self._choices), key=lambda made: _distance(made, val))
        made = min((each.project(val.clone()) for each in self._choices), key=lambda made: _distance(made, val))
        return val.update(made)

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        if isinstance(self._choices[0], TensorSpec):
            self._choices[0].type_check(value, key)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Encode a value with the first member; objects are returned unchanged."""
        first = self._choices[0]
        return first.encode(val, ignore_device=ignore_device) if isinstance(first, TensorSpec) else val

    def cardinality(self) -> Any:
        """The sum of the members' cardinalities, or the number of objects."""
        first = self._choices[0]
        return sum(each.cardinality() for each in self._choices) if isinstance(first, TensorSpec) else self.num_choices

    def enumerate(self, use_mask: bool = False) -> list[Any]:
        """A list with all values of each member."""
        if not isinstance(self._choices[0], TensorSpec):
            return list(self._choices)
        return [value for each in self._choices for value in each.enumerate(use_mask)]

    def _each(self, change: Callable[[Any], Any]) -> Self:
        return type(self)([change(each) for each in self._choices])

    def _expanded(self, new: Size) -> Self:
        return self._each(lambda each: each.expand(new))

    def _regrouped(self, new: Size) -> Self:
        return self if new == self.shape else self._each(lambda each: each.reshape(new))

    def _selected(self, index: Any) -> Self:
        return self._each(lambda each: each[index])

    make_neg_dim = refused("the shape is that of the members, make their dims dynamic")

    def to(self, dest: Any) -> Self:
        return self if dest is None else self._each(lambda each: each.to(dest))

    def clone(self) -> Self:
        return self._each(lambda each: each.clone())

    def _is_like(self, other: Any) -> bool:
        if self.num_choices != other.num_choices or self.shape != other.shape:
            return False
        return all(one == two if isinstance(one, TensorSpec) else one.tolist() == two.tolist()
                   for one, two in zip(self, other, strict=True))  # fmt: skip

    def __iter__(self) -> Any:
        return iter(self._choices)


def _distance(one: object, other: object) -> float:
    """The sum of the distances of all numbers in two tensors or tensordicts of one structure."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        apart = (one.to(torch.float64) - other.to(torch.float64)).abs().sum().item()
        return float("inf") if math.isnan(apart) else apart
    if not isinstance(one, TensorDictBase) or not isinstance(other, TensorDictBase):
        return 0.0  # objects
    return sum(_distance(value, other.get(key)) for key, value in one.items(True, True))

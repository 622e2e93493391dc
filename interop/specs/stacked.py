"""Specs that differ, stacked lazily; and `torch.stack` of specs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from tensordict import lazy_stack
from torch import Size, Tensor

from interop.specs import shapes
from interop.specs.composite import Composite, Entry
from interop.specs.spec import TensorSpec


def stack(input: Sequence[TensorSpec], dim: int = 0, *, out: Any = None) -> Any:
    """Specs stacked along a new dim: one larger spec where they are equal, a lazy stack otherwise.

    Raises:
        RuntimeError: there is none, or classes, devices, dtypes, numbers of dims, or batch sizes of Composites differ.
        NotImplementedError: `out` is given.
    """
    specs = list(input)
    if out is not None:
        raise NotImplementedError("torch.stack of specs takes no out")
    if not specs:
        raise RuntimeError("stack expects at least one spec")
    first = specs[0]
    if any(not isinstance(each, TensorSpec) for each in specs) or len({type(each) for each in specs}) > 1:
        kinds = sorted({type(each).__name__ for each in specs})
        raise RuntimeError(f"Stacking specs cannot occur: Found more than one type of specs in the list, {kinds}")
    named = [("Devices", "device"), ("Dtypes", "dtype"), ("Ndims", "ndim")]
    for title, name in [*named, ("Shapes", "shape")] if isinstance(first, Composite) else named:
        for each in specs:
            if getattr(each, name) != getattr(first, name):
                raise RuntimeError(f"{title} differ, got {getattr(first, name)} and {getattr(each, name)}")
    at = shapes.dim_of(dim, first.ndim + 1)
    if all(each == first for each in specs[1:]):
        wider = first.unsqueeze(dim)
        return wider.expand([*wider.shape[:at], len(specs), *wider.shape[at + 1 :]])
    return (StackedComposite if isinstance(first, Composite) else Stacked)(*specs, dim=at)


TensorSpec.implements_for_spec(torch.stack)(stack)


class Stacked(TensorSpec):
    """Specs of one class that differ, stacked along a dim. Sizes that differ are -1.

    Args:
        *specs: the members.
        dim: the dim along which they are stacked.
    """

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        if not specs:
            raise ValueError("a stack needs at least one spec")
        self.members = list(specs)
        self.stack_dim = shapes.dim_of(dim, specs[0].ndim + 1)
        self.device, self.dtype = specs[0].device, specs[0].dtype
        self.domain = specs[0].domain
        self.shape = _stacked_shape(specs, self.stack_dim)

    @property
    def dim(self) -> int:
        """The dim along which the specs are stacked."""
        return self.stack_dim

    @property
    def space(self) -> Any:
        """NotImplementedError: members have boxes of their own."""
        raise NotImplementedError("a stack has no space of its own: ask its members, stack.unbind(stack.dim)")

    def __len__(self) -> int:
        if self.shape[0] == -1:
            raise RuntimeError("the first dim is dynamic (-1): its size is not known")
        return self.shape[0]

    def _of_members(self, change: Callable[[TensorSpec], TensorSpec], dim: int | None = None) -> "Stacked":
        return Stacked(*map(change, self.members), dim=self.stack_dim if dim is None else dim)

    # ------------------------------------------------------------------ values

    def _filled(self, how: str, lead: Size) -> Tensor:
        values = [getattr(each, how)(lead) for each in self.members]
        if len({each.shape for each in values}) == 1:
            return torch.stack(values, self.stack_dim + len(lead))
        if lead or self.stack_dim:
            raise RuntimeError(
                "Cannot create a nested tensor with a stack dimension other than 0: values of different shapes are nested "
                f"along the first dim, here the stack has dim {self.stack_dim} behind {len(lead)} leading dims"
            )
        return torch.nested.nested_tensor(values)

    def _draw(self, lead: Size) -> Tensor:
        return self._filled("rand", lead)

    def zero(self, shape: Sequence[int] | None = None) -> Tensor:
        """Zeros: a nested tensor where shapes differ, which takes no leading dims."""
        return self._filled("zero", shapes.leading(shape))

    def one(self, shape: Sequence[int] | None = None) -> Tensor:
        """Ones: a nested tensor where shapes differ, which takes no leading dims."""
        return self._filled("one", shapes.leading(shape))

    def _values(self, val: Any) -> list[Any]:
        """The value for each member."""
        if isinstance(val, list | tuple):
            return list(val)
        return list(val.unbind() if val.is_nested else val.unbind(self.stack_dim - self.ndim))

    def is_in(self, val: Any) -> bool:
        """Whether each part of a value, along the stack dim, is in its spec. Takes a list of parts too."""
        if isinstance(val, Tensor) and not val.is_nested and not shapes.fits(self.shape, val.shape):
            return False
        parts = self._values(val)
        return len(parts) == len(self.members) and all(
            each.is_in(part) for each, part in zip(self.members, parts, strict=True)
        )

    def _corrected(self, val: Any) -> Any:
        parts = [each.project(part) for each, part in zip(self.members, self._values(val), strict=True)]
        nested = len({each.shape for each in parts}) > 1
        return torch.nested.nested_tensor(parts) if nested else torch.stack(parts, self.stack_dim - self.ndim)

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """The value as an array; a list of arrays for a nested tensor."""
        self._assert_safe(val, safe)
        if val.is_nested:
            return [each.to_numpy(part) for each, part in zip(self.members, self._values(val), strict=True)]
        return val.detach().cpu().numpy()

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """NotImplementedError: members encode values of their own."""
        raise NotImplementedError("a stack cannot encode: its members can, stack.unbind(stack.dim)")

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """The values of the members, stacked. RuntimeError where they have different numbers of them."""
        return torch.stack([each.enumerate(use_mask) for each in self.members], self.stack_dim + 1)

    # ------------------------------------------------------------------ shapes

    def _regrouped(self, new: Size) -> Self:
        raise NotImplementedError("a lazy stack cannot be reshaped: squeeze, unsqueeze, expand or unbind it")

    def expand(self, *shape: Any) -> Any:
        """The stack with more leading dims, and with dims of size 1 made larger."""
        new = shapes.expanded(self.shape, shapes.of_arguments(shape))
        at = len(new) - self.ndim + self.stack_dim
        if new[at] != len(self.members):
            raise ValueError(f"the stack dim has {len(self.members)} members, it cannot be expanded to {new[at]}")
        lead = [*new[:at], *new[at + 1 :]]
        return self._of_members(lambda each: each.expand(_with_own(lead, each.shape)), at)

    def unsqueeze(self, dim: int) -> Any:
        """The stack with a new dim of size 1."""
        at = dim % (self.ndim + 1) if shapes.unsqueezed(self.shape, dim) else 0
        return self._of_members(
            lambda each: each.unsqueeze(at - (at > self.stack_dim)), self.stack_dim + (at <= self.stack_dim)
        )

    def squeeze(self, dim: int | None = None) -> Any:
        """The stack without a dim of size 1, or without all of them."""
        if dim is None:
            made: Any = self
            for at in reversed(range(self.ndim)):
                made = made.squeeze(at)
            return made
        at = shapes.dim_of(dim, self.ndim)
        if self.shape[at] != 1:
            return self
        if at == self.stack_dim:
            return self.members[0]
        return self._of_members(
            lambda each: each.squeeze(at - (at > self.stack_dim)), self.stack_dim - (at < self.stack_dim)
        )

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The members, or along another dim stacks of the parts. ValueError for a dynamic dim, or one that is not there."""
        if not -self.ndim <= dim < self.ndim or self.shape[dim] == -1:
            raise ValueError(f"dim {dim} of {list(self.shape)} cannot be unbound")
        at = dim % self.ndim
        if at == self.stack_dim:
            return tuple(self.members)
        parts = [each.unbind(at - (at > self.stack_dim)) for each in self.members]
        return tuple(stack(each, self.stack_dim - (at < self.stack_dim)) for each in zip(*parts, strict=True))

    def _selected(self, index: Any) -> Any:
        return selected_members(self, index)

    def index_select(self, dim: int, index: Tensor) -> Any:
        """NotImplementedError: index the stack dim."""
        raise NotImplementedError("torch.index_select of a lazy stack: index it along its stack dim")

    def make_neg_dim(self, dim: int) -> None:
        """Make a dim of every member dynamic, in place. ValueError for the stack dim."""
        at = dim % self.ndim if -self.ndim <= dim < self.ndim else self.stack_dim
        if at == self.stack_dim:
            raise ValueError(f"dim {dim} is not there, or the stack dim, {self.stack_dim}: it cannot be made dynamic")
        for each in self.members:
            each.make_neg_dim(at - (at > self.stack_dim))
        self.shape = _stacked_shape(self.members, self.stack_dim)

    # ------------------------------------------------------------------ copies, comparison

    def to(self, dest: Any) -> Any:
        """The members on another device, or of another dtype."""
        return self if dest is None else self._of_members(lambda each: each.to(dest))

    def clone(self) -> Any:
        """A stack of clones of the members."""
        return self._of_members(lambda each: each.clone())

    def _is_like(self, other: Any) -> bool:
        return bool(self.stack_dim == other.stack_dim and self.members == other.members)

    def __repr__(self) -> str:
        fields = [f"shape={self.shape}", f"device={self.device}", f"dtype={self.dtype}", f"domain={self.domain}"]
        return f"Stacked{type(self.members[0]).__name__}(\n    " + ",\n    ".join(fields) + ")"


class StackedComposite(Composite):
    """Composites that differ, stacked along a batch dim. Its keys are those that all members have.

    Args:
        *composites: the members, of one batch size.
        dim: the dim along which they are stacked.
    """

    def __init__(self, *composites: Composite, dim: int) -> None:
        if not composites:
            raise ValueError("a stack needs at least one Composite")
        self.members: list[Composite] = list(composites)
        self.stack_dim = shapes.dim_of(dim, composites[0].ndim + 1)
        devices = {each.device for each in composites}
        super().__init__(
            shape=_stacked_shape(composites, self.stack_dim), device=devices.pop() if len(devices) == 1 else None
        )

    @property
    def dim(self) -> int:
        """The dim along which the Composites are stacked."""
        return self.stack_dim

    def _of_members(self, change: Callable[[Composite], Composite], dim: int | None = None) -> "StackedComposite":
        return StackedComposite(*map(change, self.members), dim=self.stack_dim if dim is None else dim)

    # ------------------------------------------------------------------ entries

    def _roots(self) -> Iterator[tuple[str, Entry]]:
        common = set.intersection(*(set(each.keys()) for each in self.members))
        return ((name, self._entry(name)) for name in sorted(common))

    def _entry(self, name: str) -> Entry:
        entries = [each.get(name) for each in self.members]
        if all(each is None for each in entries):
            return None
        found: Entry = stack(entries, self.stack_dim)  # type: ignore[arg-type]
        return found

    def _put(self, name: str, spec: Entry) -> None:
        parts = [None] * len(self.members) if spec is None else spec.unbind(self.stack_dim)
        for each, part in zip(self.members, parts, strict=True):
            each.set(name, part)

    def _drop(self, name: str) -> None:
        holders = [each for each in self.members if name in each]
        if not holders:
            raise KeyError(f"{name!r} must be present in at least one of the stacked Composites")
        for each in holders:
            del each[name]

    def update(self, dict_or_spec: Any) -> Self:
        """Set entries in every member; those that are Composites on both sides are merged."""
        for key, value in dict_or_spec.items():
            self[key] = value
        return self

    def exclusive(self) -> dict[int, dict[str, Entry]]:
        """The entries that not all members have, by the number of the member."""
        common = set(self.keys())
        found = {
            place: {key: entry for key, entry in each.items() if key not in common}
            for place, each in enumerate(self.members)
        }
        return {place: entries for place, entries in found.items() if entries}

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def clear_device_(self) -> Self:
        """Let entries be on several devices, in place."""
        for each in self.members:
            each.clear_device_()
        return super().clear_device_()

    def lock_(self, recurse: bool | None = None) -> Self:
        """Refuse changes of entries, also of the members unless `recurse` is False."""
        for each in self.members if recurse is not False else ():
            each.lock_(recurse)
        return super().lock_(recurse)

    def unlock_(self, recurse: bool | None = None) -> Self:
        """Allow changes again."""
        super().unlock_(recurse)
        for each in self.members if recurse is not False else ():
            each.unlock_(recurse)
        return self

    # ------------------------------------------------------------------ values

    def _filled(self, how: str, lead: Size) -> Any:
        return lazy_stack([getattr(each, how)(lead) for each in self.members], self.stack_dim + len(lead))

    def is_in(self, val: Any) -> bool:
        """Whether each part of a tensordict, along the stack dim, is in its Composite."""
        parts = val.unbind(self.stack_dim + val.ndim - self.ndim)
        return len(parts) == len(self.members) and all(
            each.is_in(part) for each, part in zip(self.members, parts, strict=True)
        )

    def project(self, val: Any) -> Any:
        """Correct what is not in its Composite. Returns the tensordict, a new stack where parts are views."""
        at = self.stack_dim + val.ndim - self.ndim
        return lazy_stack([each.project(part) for each, part in zip(self.members, val.unbind(at), strict=True)], at)

    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        """TypeError where the dtype of an entry is another."""
        for each, part in zip(self.members, value.unbind(self.stack_dim + value.ndim - self.ndim), strict=True):
            each.type_check(part, selected_keys)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """NotImplementedError: members encode values of their own."""
        raise NotImplementedError("a stack cannot encode: its members can, stack.unbind(stack.dim)")

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """A list with the arrays of each member, in nested dicts."""
        parts = val.unbind(self.stack_dim + val.ndim - self.ndim)
        return [each.to_numpy(part, safe) for each, part in zip(self.members, parts, strict=True)]

    def cardinality(self) -> Any:
        """NotImplementedError: ask the members."""
        raise NotImplementedError("a stack has no cardinality: its members have")

    # ------------------------------------------------------------------ shapes

    def _regrouped(self, new: Size, names: Sequence[str | None] | None = None) -> Self:
        raise NotImplementedError("a lazy stack cannot be reshaped: squeeze, unsqueeze, expand or unbind it")

    def expand(self, *shape: Any) -> Any:
        """The stack with more leading dims, and with dims of size 1 made larger."""
        new = shapes.expanded(self.shape, shapes.of_arguments(shape))
        at = len(new) - self.ndim + self.stack_dim
        if new[at] != len(self.members):
            raise ValueError(f"the stack dim has {len(self.members)} members, it cannot be expanded to {new[at]}")
        rest = Size([*new[:at], *new[at + 1 :]])
        return self._of_members(lambda each: each.expand(rest), at)

    unsqueeze = Stacked.unsqueeze
    squeeze = Stacked.squeeze
    unbind = Stacked.unbind

    def _selected(self, index: Any) -> Any:
        return selected_members(self, index)

    def make_neg_dim(self, dim: int) -> None:
        """NotImplementedError: make dims of the members dynamic."""
        raise NotImplementedError("a stack of Composites has the dims of its members: make theirs dynamic")

    # ------------------------------------------------------------------ copies, comparison

    def to(self, dest: Any) -> Any:
        """The members on another device, or of another dtype."""
        return self if dest is None else self._of_members(lambda each: each.to(dest))

    def clone(self) -> Any:
        """A stack of clones of the members, unlocked."""
        return self._of_members(lambda each: each.clone())

    def empty(self) -> Any:
        """The stack without entries."""
        return self._of_members(lambda each: each.empty())

    def _is_like(self, other: Any) -> bool:
        return bool(self.stack_dim == other.stack_dim and self.members == other.members)

    def __repr__(self) -> str:
        fields = ",\n".join(f"{key}: {entry}" for key, entry in self.items())
        own = [
            f"{place} -> {key}: {each}" for place, entries in self.exclusive().items() for key, each in entries.items()
        ]
        text = ",\n".join([
            "fields={\n    " + fields.replace("\n", "\n    ") + "}",
            "exclusive_fields={\n    " + ",\n".join(own).replace("\n", "\n    ") + "}",
            f"device={self.device}", f"shape={self.shape}", f"stack_dim={self.stack_dim}",
        ])  # fmt: skip
        return "StackedComposite(\n    " + text.replace("\n", "\n    ") + ")"


def selected_members(stacked: Stacked | StackedComposite, index: Any) -> Any:
    """What an index selects along the stack dim: a member, or a stack of some. IndexError for one of other dims."""
    parts = list(index) if isinstance(index, tuple) else [index]
    at = stacked.stack_dim
    if any(part is None for part in parts):
        raise IndexError(f"Cannot index a {type(stacked).__name__} with None values: unsqueeze it")
    if any(part is Ellipsis for part in parts[1:]) or (parts and parts[0] is Ellipsis and len(parts) > 2):
        raise IndexError("a lazy stack takes an ellipsis only as the first of two parts of an index")
    if parts and parts[0] is Ellipsis:
        if len(parts) == 2 and at != stacked.ndim - 1:
            raise IndexError(
                f"[..., index] is for a stack along its last dim, here it is {at} of {list(stacked.shape)}"
            )
        parts = [slice(None)] * (stacked.ndim - 1 if len(parts) == 2 else 0) + parts[1:]
    if len(parts) > stacked.ndim:
        raise IndexError(f"too many indices: {len(parts)} for the shape {list(stacked.shape)}")
    if any(part != slice(None) for place, part in enumerate(parts) if place != at):
        raise IndexError(f"a lazy stack is indexed along its stack dim, {at}, got {index!r}")
    if len(parts) <= at:
        return stacked
    (part,) = shapes.normalized(Size([len(stacked.members)]), parts[at])
    if isinstance(part, int):
        shapes.indexed(Size([len(stacked.members)]), (part,))
        return stacked.members[part]
    if isinstance(part, slice):
        chosen = stacked.members[part]
    else:
        chosen = [
            stacked.members[place] for place in torch.arange(len(stacked.members))[torch.as_tensor(part)].reshape(-1)
        ]
    if not chosen:
        raise IndexError(f"the index {index!r} selects no member of the stack")
    return stack(chosen, at)


def _stacked_shape(specs: Sequence[TensorSpec], at: int) -> Size:
    """The common shape with the stack dim in it; -1 for sizes that differ. RuntimeError for different numbers of dims."""
    if len({each.ndim for each in specs}) > 1:
        raise RuntimeError(f"stacked specs have one number of dims, got {[list(each.shape) for each in specs]}")
    sizes = [
        each.pop() if len(each) == 1 else -1 for each in map(set, zip(*(spec.shape for spec in specs), strict=True))
    ]
    return Size([*sizes[:at], len(specs), *sizes[at:]])


def _with_own(new: Sequence[int], shape: Size) -> Size:
    """A shape in which dims that are dynamic in a stack have the size of the member."""
    start = len(new) - len(shape)
    own = [size if size != -1 else shape[place - start] for place, size in enumerate(new)]
    return Size(own)

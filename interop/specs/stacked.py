"""Lazy stacks of unequal specs, and `torch.stack` of specs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection, lazy_stack
from torch import Size, Tensor

from interop.specs import shapes, torchrl_classes
from interop.specs.composite import Composite, Entry, IsLeaf
from interop.specs.masks import places_of, product_of
from interop.specs.spec import TensorSpec, all_or_nothing, block, refused
from interop.specs.views import View


def stack(input: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Stack specs along a new dim. Equal specs give one larger spec, unequal specs a lazy stack.

    Raises:
        RuntimeError: no specs, or they differ in class, device, dtype, number of dims, or batch size (Composites).
        NotImplementedError: `out` is given.
    """
    specs = [torchrl_classes.converted(each) for each in input]
    if out is not None:
        raise NotImplementedError("torch.stack of specs takes no out")
    if not specs:
        raise RuntimeError("stack expects at least one spec")
    first = specs[0]
    if any(not isinstance(each, TensorSpec) for each in specs) or len(set(map(_kind, specs))) > 1:
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


def _kind(spec: object) -> type:
    """The class of a spec; of a lazy stack that of its members, with which it can be stacked."""
    return _kind(spec.members[0]) if isinstance(spec, LazyStack) else type(spec)


class LazyStack(TensorSpec):
    """Base class of lazy stacks: operations are applied to the members.

    Attributes:
        members: the stacked specs.
        stack_dim: the dim along which they are stacked.
    """

    members: list[Any]
    stack_dim: int

    def _set_members(self, specs: Sequence[TensorSpec], dim: int) -> Size:
        if not specs:
            raise ValueError("a stack needs at least one spec")
        if len({each.ndim for each in specs}) > 1:
            raise RuntimeError(f"stacked specs have one number of dims, got {[list(each.shape) for each in specs]}")
        self.members, self.stack_dim = list(specs), shapes.dim_of(dim, specs[0].ndim + 1)
        return self._stacked_shape()

    def _stacked_shape(self) -> Size:
        sizes = [set(each) for each in zip(*(spec.shape for spec in self.members), strict=True)]
        common = [each.pop() if len(each) == 1 else -1 for each in sizes]
        return Size([*common[: self.stack_dim], len(self.members), *common[self.stack_dim :]])

    @property
    def dim(self) -> int:
        """The dim along which the specs are stacked."""
        return self.stack_dim

    @property
    def _specs(self) -> list[Any]:
        """The members, under the name that torchrl reads."""
        return self.members

    def __len__(self) -> int:
        if self.shape[0] == -1:
            raise RuntimeError("the first dim is dynamic (-1): its size is not known")
        return self.shape[0]

    def _of_member(self, at: int) -> int:
        """Convert a dim of the stack to a dim of the members."""
        return at - (at > self.stack_dim)

    def _of(self, specs: Sequence[Any], dim: int) -> "LazyStack":
        kind: Any = type(self)
        return kind(*specs, dim=dim)

    def _of_members(self, change: Callable[[Any], Any], dim: int | None = None) -> Any:
        return self._of([change(each) for each in self.members], self.stack_dim if dim is None else dim)

    def _values(self, val: Any) -> list[Any]:
        """Split a value into one value per member."""
        if isinstance(val, list | tuple):
            return list(val)
        if isinstance(val, Tensor):
            return list(val.unbind() if val.is_nested else val.unbind(self.stack_dim - self.ndim))
        return list(val.unbind(self.stack_dim + val.ndim - self.ndim))

    def _has(self, val: Any) -> bool:
        if isinstance(val, Tensor) and not val.is_nested and not shapes.fits(self.shape, val.shape):
            return False
        if not isinstance(val, Tensor | list | tuple) and not is_tensor_collection(val):
            return False
        parts = self._values(val)
        return len(parts) == len(self.members) and all(
            each.is_in(part) for each, part in zip(self.members, parts, strict=True)
        )

    def _joined(self, values: list[Any], lead: int) -> object:
        """One value of the values of the members, stacked behind `lead` leading dims."""
        raise NotImplementedError

    def encode(self, val: object, *, ignore_device: bool = False) -> object:
        """Encode one raw value for each member, as `to_numpy` returns them, as a value of the stack.

        Args:
            val: a list of a raw value for each member; or an array with the stack dim, or a dict of such; a tensor is
                returned unchanged.
            ignore_device: keep the result on the CPU.

        RuntimeError for another number of values, or one that does not fit its member.
        """
        if isinstance(val, Tensor) or is_tensor_collection(val):
            return val
        parts = self._raw_values(val)
        if len(parts) != len(self.members):
            raise RuntimeError(f"needed are values for {len(self.members)} members, got {len(parts)}")
        made = [each.encode(part, ignore_device=ignore_device) for each, part in zip(self.members, parts, strict=True)]
        return self._joined(made, 0)

    def _raw_values(self, val: object) -> list[Any]:
        """Split a raw value into one for each member."""
        if isinstance(val, Mapping):
            split = {key: self._raw_values(each) for key, each in val.items()}
            return [{key: parts[place] for key, parts in split.items()} for place in range(len(self.members))]
        if isinstance(val, Tensor):
            return list(val.unbind(self.stack_dim))
        if isinstance(val, np.ndarray):
            if val.ndim <= self.stack_dim:
                raise RuntimeError(f"an array of shape {list(val.shape)} has no stack dim, which is {self.stack_dim}")
            return list(np.moveaxis(val, self.stack_dim, 0))
        if not isinstance(val, list | tuple):
            raise TypeError(f"needed is a raw value for each of {len(self.members)} members, got {val!r:.200}")
        return list(val)

    def cardinality(self) -> int | float:
        """The product of the members' cardinalities."""
        return product_of(each.cardinality() for each in self.members)

    index_select = refused("index the stack along its stack dim")
    _regrouped = refused("squeeze, unsqueeze, expand or unbind a lazy stack, it cannot be reshaped")

    def enumerate(self, use_mask: bool = False) -> Any:
        """All combinations of the members' values. The value of the first member varies slowest."""
        every = [each.enumerate(use_mask) for each in self.members]
        places = places_of([len(each) for each in every])
        return self._joined([each[at] for each, at in zip(every, places, strict=True)], 1)

    def expand(self, *shape: Any) -> Any:
        """Add leading dims and enlarge dims of size 1. The stack dim keeps its size."""
        new = shapes.expanded(self.shape, shapes.of_arguments(shape))
        at = len(new) - self.ndim + self.stack_dim
        if new[at] != len(self.members):
            raise ValueError(f"the stack dim has {len(self.members)} members, it cannot be expanded to {new[at]}")
        rest = Size([*new[:at], *new[at + 1 :]])
        return self._of_members(lambda each: each.expand(_with_member_sizes(rest, each.shape)), at)

    def unsqueeze(self, dim: int) -> Any:
        at = dim % len(shapes.unsqueezed(self.shape, dim))
        return self._of_members(
            lambda each: each.unsqueeze(self._of_member(at)), self.stack_dim + (at <= self.stack_dim)
        )

    def squeeze(self, dim: int | None = None) -> Any:
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
        return self._of_members(lambda each: each.squeeze(self._of_member(at)), self.stack_dim - (at < self.stack_dim))

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The members; along another dim, stacks of their parts. ValueError for a dynamic or invalid dim."""
        if not -self.ndim <= dim < self.ndim or self.shape[dim] == -1:
            raise ValueError(f"dim {dim} of {list(self.shape)} cannot be unbound")
        at = dim % self.ndim
        if at == self.stack_dim:
            return tuple(self.members)
        parts = [each.unbind(self._of_member(at)) for each in self.members]
        return tuple(stack(each, self.stack_dim - (at < self.stack_dim)) for each in zip(*parts, strict=True))

    def _selected(self, index: Any) -> Any:
        """A member, or a stack of several, with the rest of the index applied to them.

        The index is as that of a tensor of the shape of the stack; the structural dims of the members take none. IndexError
        for an array along the stack dim beside other arrays, or of several dims; and for an index of no member.
        """
        at, structural = self.stack_dim, self.members[0].structural
        free = self.shape if at >= self.ndim - structural else self.shape[: self.ndim - structural]
        before, part, behind = _split(shapes.normalized(free, index), at)
        inner = (*before, *behind)
        trivial = [type(each) is slice and each == slice(None) for each in inner]
        if len(free) == self.ndim and structural:  # the members take no index there
            if not all(trivial[-structural:]):
                raise IndexError(f"the last dims of the members take no index, got {index!r} for {list(self.shape)}")
            inner = inner[: len(inner) - structural]
        chosen = np.arange(len(self.members))[part]
        if not chosen.size:
            raise IndexError(f"the index {index!r} selects no member of the stack")
        arrays = [each for each in inner if isinstance(each, np.ndarray)]
        if chosen.ndim > 1 or (chosen.ndim and len(arrays) > (0 if isinstance(part, np.ndarray) else 1)):
            raise IndexError(f"a lazy stack takes one array of one dim as an index beside slices, got {index!r}")
        made = [self.members[place] if all(trivial) else self.members[place][inner] for place in chosen.flat]
        if not chosen.ndim:
            return made[0]
        place = sum(map(_dims_after, before))
        is_behind = made[0].rigid and place == made[0].ndim  # where equal ones have no stack but a lazy one
        return self._of(made, place) if is_behind else stack(made, place)

    def make_neg_dim(self, dim: int) -> None:
        """Make a dim of every member dynamic, in place. ValueError for the stack dim."""
        at = dim % self.ndim if -self.ndim <= dim < self.ndim else self.stack_dim
        if at == self.stack_dim:
            raise ValueError(f"dim {dim} is out of range, or the stack dim {self.stack_dim}, which cannot be dynamic")
        with all_or_nothing(self):
            for each in self.members:
                each.make_neg_dim(self._of_member(at))
        self.__dict__["shape" if "shape" in self.__dict__ else "_shape"] = self._stacked_shape()

    def children(self) -> Iterator[TensorSpec]:
        return iter(self.members)

    def unstacked(self) -> list[tuple[tuple[str, ...], TensorSpec]]:
        return [
            ((str(place), *path), each)
            for place, member in enumerate(self.members)
            for path, each in member.unstacked()
        ]

    def to(self, dest: Any) -> Any:
        return self if dest is None else self._of_members(lambda each: each.to(dest))

    def clone(self) -> Any:
        return self._of_members(lambda each: each.clone())

    def _is_like(self, other: Any) -> bool:
        return bool(self.stack_dim == other.stack_dim and self.members == other.members)


class Stacked(LazyStack):
    """Unequal specs of one class, stacked along a dim. Sizes that differ between members are -1.

    Values are nested tensors if the shapes of the members differ; the stack dim must then be 0.

    Args:
        *specs: the members.
        dim: the dim along which they are stacked.
    """

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        self.shape = self._set_members(specs, dim)
        self.device, self.dtype, self.domain = specs[0].device, specs[0].dtype, specs[0].domain

    space = property(refused("the members have boxes, stack.unbind(stack.dim)"))

    def _made(self, how: str, lead: Size) -> Tensor:
        return self._joined([getattr(each, how)(lead) for each in self.members], len(lead))

    def _joined(self, values: list[Any], lead: int) -> Tensor:
        if len({each.shape for each in values}) == 1:
            return torch.stack(values, self.stack_dim + lead)
        if lead or self.stack_dim:
            text = "Cannot create a nested tensor with a stack dimension other than 0"
            raise RuntimeError(f"{text}: here it is {self.stack_dim}, behind {lead} leading dims")
        return torch.nested.nested_tensor(values)

    def project(self, val: Any) -> Any:
        if self._has(val):
            return val
        parts = [each.project(part) for each, part in zip(self.members, self._values(val), strict=True)]
        is_ragged = len({each.shape for each in parts}) > 1
        return torch.nested.nested_tensor(parts) if is_ragged else torch.stack(parts, self.stack_dim - self.ndim)

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """The value as an array; a nested tensor as a list of arrays."""
        self._assert_safe(val, safe)
        parts = [each.to_numpy(part) for each, part in zip(self.members, self._values(val), strict=True)]
        if isinstance(val, Tensor) and not val.is_nested:
            return np.stack(parts, min(val.ndim - self.ndim + self.stack_dim, parts[0].ndim))
        return parts

    def __repr__(self) -> str:
        fields = [f"shape={self.shape}", f"device={self.device}", f"dtype={self.dtype}", f"domain={self.domain}"]
        return block(f"Stacked{type(self.members[0]).__name__}", fields)


class StackedComposite(LazyStack, Composite):  # type: ignore[misc]  # `_specs`: torchrl's name of the members
    """Unequal Composites, stacked along a batch dim. Its keys are the keys common to all members.

    Values are lazily stacked tensordicts.

    Args:
        *composites: the members; their batch sizes are equal.
        dim: the dim along which they are stacked.
    """

    def __init__(self, *composites: Composite, dim: int) -> None:
        shape, devices = self._set_members(composites, dim), {each.device for each in composites}
        self._start(shape, devices.pop() if len(devices) == 1 else None)

    def _roots(self) -> Iterator[tuple[str, Entry]]:
        return ((name, self.entry(name)) for name in sorted(self._common()))

    def _common(self) -> set[str]:
        """The keys common to all members."""
        return set.intersection(*(set(each.keys()) for each in self.members))

    def keys(
        self, include_nested: bool = False, leaves_only: bool = False, *, is_leaf: IsLeaf = None,
        step_mdp_static_only: bool = False,
    ) -> View:  # fmt: skip
        """The keys common to all members, sorted; arguments as for `Composite.keys`."""
        if include_nested or leaves_only or is_leaf is not None or step_mdp_static_only:
            return super().keys(include_nested, leaves_only, is_leaf=is_leaf, step_mdp_static_only=step_mdp_static_only)
        # Without the entries: specs of members that differ in ndim have no stack.
        return View(lambda: (((name,), None) for name in sorted(self._common())), lambda key, entry: key)

    def entry(self, name: str) -> Entry:
        """The stack of the members' entries. KeyError if a member lacks the key."""
        entries = [each.entry(name) for each in self.members]
        found: Entry = None if all(each is None for each in entries) else stack(entries, self.stack_dim)
        return found

    def _put(self, name: str, spec: Entry) -> None:
        parts = [None] * len(self.members) if spec is None else spec.unbind(self.stack_dim)
        with all_or_nothing(self):
            for each, part in zip(self.members, parts, strict=True):
                each.set(name, part)

    def _drop(self, name: str) -> None:
        holders = [each for each in self.members if name in each]
        if not holders:
            raise KeyError(f"{name!r} must be present in at least one of the stacked Composites")
        with all_or_nothing(self):
            for each in holders:
                del each[name]

    def exclusive(self) -> dict[int, dict[str, Entry]]:
        """The entries whose keys are not common to all members, by member number."""
        common = self._common()
        own = [{key: entry for key, entry in each.items() if key not in common} for each in self.members]
        return {place: entries for place, entries in enumerate(own) if entries}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def _listed(self) -> list[tuple[tuple[str, ...], Entry]]:
        return list(self.unstacked())

    _set_shape = refused("the shape of a stack follows from its members, it cannot be set")

    def empty(self) -> Any:
        return self._of_members(lambda each: each.empty())

    def _made(self, how: str, lead: Size) -> Any:
        return self._joined([getattr(each, how)(lead) for each in self.members], len(lead))

    def _joined(self, values: list[Any], lead: int) -> object:
        return lazy_stack(values, self.stack_dim + lead)

    def project(self, val: Any) -> Any:
        """Project the members' values, in place where they are views. Returns a lazy stack."""
        parts = [each.project(part) for each, part in zip(self.members, self._values(val), strict=True)]
        return lazy_stack(parts, self.stack_dim + val.ndim - self.ndim)

    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        for each, part in zip(self.members, self._values(value), strict=True):
            each.type_check(part, selected_keys)

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """A list with one nested dict of arrays per member."""
        return [each.to_numpy(part, safe) for each, part in zip(self.members, self._values(val), strict=True)]

    def __repr__(self) -> str:
        fields = [f"{key}: {entry}" for key, entry in self.items()]
        own = [f"{place} -> {key}: {each}" for place, all_ in self.exclusive().items() for key, each in all_.items()]
        rest = [f"device={self.device}", f"shape={self.shape}", f"stack_dim={self.stack_dim}"]
        return block("StackedComposite", [block("fields=", fields), block("exclusive_fields=", own), *rest])


def _split(parts: tuple[Any, ...], at: int) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """Split a normalized index at a dim: what is before it, the part of the dim, and what is behind."""
    dim = 0
    for place, part in enumerate(parts):
        if dim == at and part is not None:
            if isinstance(part, np.ndarray) and part.ndim != 1:
                raise IndexError(f"an array along the stack dim, {at}, has one dim, got shape {part.shape}")
            return parts[:place], part, parts[place + 1 :]
        dim += shapes.dims_of(part)
        if dim > at:
            raise IndexError(f"a mask of shape {part.shape} cannot include the stack dim, {at}: index it by numbers")
    raise AssertionError("a normalized index has a part for each dim")


def _dims_after(part: object) -> int:
    """The number of dims that a part of an index leaves."""
    if isinstance(part, np.ndarray):
        return 1 if part.dtype == np.bool_ else part.ndim
    return 0 if isinstance(part, int) else 1


def _with_member_sizes(new: Size, shape: Size) -> Size:
    """The shape with dynamic dims replaced by the sizes of the member."""
    start = len(new) - len(shape)
    return Size([shape[place - start] if size == -1 and place >= start else size for place, size in enumerate(new)])

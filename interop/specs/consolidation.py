"""Detection of lazy stacks of specs, and consolidation of their members to the same keys."""

from typing import Any

from tensordict import is_non_tensor
from tensordict.base import is_tensor_collection
from torch import Size

from interop.specs.bounded import Unbounded
from interop.specs.composite import Composite
from interop.specs.non_tensor import NonTensor
from interop.specs.spec import TensorSpec
from interop.specs.stacked import LazyStack, StackedComposite


def contains_lazy_spec(spec: TensorSpec) -> bool:
    """Whether a spec is or contains a lazy stack."""
    return any(isinstance(each, LazyStack) for each in spec.nodes())


def check_no_exclusive_keys(spec: TensorSpec, recurse: bool = True) -> bool:
    """Whether the members of each stacked Composite have the same keys; with `recurse`, nested ones are checked too."""
    if not isinstance(spec, Composite):
        return True
    members = spec.members if isinstance(spec, StackedComposite) else []
    if len({frozenset(each.keys()) for each in members}) > 1:
        return False
    inner = [entry for _, entry in _nested(spec)] if recurse else []
    return not recurse or all(check_no_exclusive_keys(each) for each in (*inner, *members))


def consolidate_spec(
    spec: TensorSpec, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> TensorSpec:
    """A copy of a spec in which the members of every stacked Composite have the same keys.

    A member without a key gets a spec of the class that the other members have for it. Sizes that differ between those
    are 0 in it; if all sizes agree, or if the numbers of dims differ, the dims behind the batch dims are 0. It is on the
    device of the member, if that has one. A missing Composite is added empty.

    Args:
        spec: is not modified.
        recurse_through_entries: consolidate the entries of Composites too.
        recurse_through_stack: consolidate the members of stacks too.

    Raises:
        ValueError: members have specs of different classes for a key.
    """
    made: Any = spec.clone()
    if isinstance(made, StackedComposite):
        owned: dict[str, list[TensorSpec]] = {}
        for entries in made.exclusive().values():
            for key, entry in entries.items():
                if entry is not None:
                    owned.setdefault(key, []).append(entry)
        for key, owners in owned.items():
            for member in made.members:
                if key not in member:
                    member[key] = _empty_like(key, owners, member)
        if recurse_through_stack:
            members = [consolidate_spec(each, recurse_through_entries, recurse_through_stack) for each in made.members]
            made = StackedComposite(*members, dim=made.stack_dim)  # type: ignore[arg-type]
    for key, entry in _nested(made) if isinstance(made, Composite) and recurse_through_entries else ():
        made[key] = consolidate_spec(entry, recurse_through_entries, recurse_through_stack)
    return made


def _nested(spec: Composite) -> list[tuple[str, Composite]]:
    """The entries that are Composites. Others of a stack may have no stack: of different ndim, or on different devices."""
    first: Any = spec.members[0] if isinstance(spec, StackedComposite) else spec
    keys = [key for key in list(spec.keys()) if isinstance(first.entry(key), Composite)]
    return [(key, spec[key]) for key in keys]


def _empty_like(key: str, owners: list[TensorSpec], member: Composite) -> TensorSpec:
    first = owners[0]
    if any(type(each) is not type(first) for each in owners):
        kinds = sorted({type(each).__name__ for each in owners})
        raise ValueError(f"{key!r} has specs of several classes in the members that have it: {kinds}")
    if isinstance(first, Composite):
        return Composite(shape=member.shape, device=member.device or first.device)
    if len({each.ndim for each in owners}) > 1:  # of no common shape: that of the first, without elements
        sizes = [(size,) for size in first.shape]
    else:
        sizes = list(zip(*(each.shape for each in owners), strict=True))
    lead = member.ndim
    agree = all(len(set(each)) == 1 for each in sizes)
    shape = [each[0] if len(set(each)) == 1 and (place < lead or not agree) else 0 for place, each in enumerate(sizes)]
    return first.emptied(Size([*member.shape, *shape[lead:]])).to(member.device)


def make_composite_from_td(data: Any, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False) -> Composite:
    """The Composite of a tensordict: shapes, dtypes and devices of its entries, without bounds.

    Args:
        data: a tensordict or tensorclass.
        unsqueeze_null_shapes: describe scalars as [1].
        dynamic_shape: make the last dim of each tensor dynamic, unless it is a batch dim.
    """
    entries: dict[str, TensorSpec] = {}
    for key, value in data.items():
        if is_non_tensor(value):
            found = value.tolist() if hasattr(value, "tolist") else value
            first = getattr(value, "data", found)
            while isinstance(first, list) and first and value.batch_dims:
                first = first[0]
            entries[key] = NonTensor(shape=value.batch_size, device=value.device, example_data=first)
        elif is_tensor_collection(value):
            entries[key] = make_composite_from_td(
                value, unsqueeze_null_shapes=unsqueeze_null_shapes, dynamic_shape=dynamic_shape
            )
        else:
            shape = Size([1]) if unsqueeze_null_shapes and not value.shape else value.shape
            shape = Size([*shape[:-1], -1]) if dynamic_shape and len(shape) > data.ndim else shape
            entries[key] = Unbounded(shape=shape, dtype=value.dtype, device=value.device)
    return Composite(entries, shape=data.batch_size, data_cls=type(data))

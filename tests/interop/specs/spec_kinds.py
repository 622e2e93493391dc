"""Every kind of spec, with dtypes and masks, for any leading shape; values for them; what can be done with both alike.

`library` is a module with the classes: `interop.specs`, or another one of the same names.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection, lazy_stack
from torch import Tensor

from interop import specs as ours

Kind = Callable[..., Any]  # (library, leading shape) -> spec
ALLOWED = torch.tensor([True, False, True, True])
GROUPS = torch.tensor([True, False, False, True, True])
LEADS = ((), (2,), (2, 1, 3))


def _bounded(low: Any, high: Any, dtype: torch.dtype = torch.float32, item: Any = (2,)) -> Kind:
    return lambda library, lead=(): library.Bounded(low, high, (*lead, *item), dtype=dtype)


def _leaf(name: str, n: Any, item: Any = (), **more: Any) -> Kind:
    return lambda library, lead=(): getattr(library, name)(n, shape=(*lead, *item), **more)


def _unbounded(dtype: torch.dtype, item: Any = (2,)) -> Kind:
    return lambda library, lead=(): library.Unbounded((*lead, *item), dtype=dtype)


def _rows(library: Any, lead: Any = ()) -> Any:
    """Bounds that differ from place to place."""
    low = torch.arange(float(np.prod((*lead, 2)))).reshape(*lead, 2)
    return library.Bounded(low, low + 2)


def _masks(name: str, n: Any, item: Any, **more: Any) -> Kind:
    """A mask that differs from row to row: all or some choices."""

    def make(library: Any, lead: Any = ()) -> Any:
        some = GROUPS if "Multi" in name else ALLOWED
        mask = some.expand(*lead, -1).clone()
        mask.reshape(-1, some.numel())[1::2] = True
        return getattr(library, name)(n, shape=(*lead, *item), mask=mask, **more)

    return make


def _uneven(library: Any, lead: Any = ()) -> Any:
    """Sizes that differ from row to row."""
    nvec = torch.tensor([2, 3]).expand(*lead, -1).clone()
    nvec.reshape(-1, 2)[1::2, 0] = 4
    return library.MultiCategorical(nvec)


def _composite(library: Any, lead: Any = ()) -> Any:
    inner = library.Composite({"c": LEAVES["OneHot, mask"](library, lead), "d": _rows(library, (*lead, 2))}, shape=lead)
    leaves = {"a": LEAVES["Bounded, float32"](library, lead), "b": LEAVES["Categorical, mask"](library, lead)}
    return library.Composite({**leaves, "inner": inner}, shape=lead)


LEAVES: dict[str, Kind] = {
    "Bounded, float32": _bounded(-1, 1),
    "Bounded, float64": _bounded(-0.5, 0.5, torch.float64, ()),
    "Bounded, float16": _bounded(0, 2, torch.float16),
    "Bounded, uint8": _bounded(1, 4, torch.uint8),
    "Bounded, int64": _bounded(-2, 2, torch.int64, (3, 2)),
    "Bounded, rows": _rows,
    "Unbounded, float32": _unbounded(torch.float32),
    "Unbounded, bfloat16": _unbounded(torch.bfloat16, ()),
    "Unbounded, int32": _unbounded(torch.int32),
    "Unbounded, bool": _unbounded(torch.bool),
    "Categorical": _leaf("Categorical", 4),
    "Categorical, bool": _leaf("Categorical", 2, (2,), dtype=torch.bool),
    "Categorical, float32": _leaf("Categorical", 3, dtype=torch.float32),
    "Categorical, mask": _leaf("Categorical", 4, mask=ALLOWED),
    "Categorical, masks": _masks("Categorical", 4, ()),
    "Binary": _leaf("Binary", 3, (3,)),
    "Binary, bool": _leaf("Binary", 2, (2,), dtype=torch.bool),
    "OneHot": _leaf("OneHot", 4, (4,)),
    "OneHot, int64": _leaf("OneHot", 3, (3,), dtype=torch.int64),
    "OneHot, mask": _leaf("OneHot", 4, (4,), mask=ALLOWED),
    "OneHot, masks": _masks("OneHot", 4, (4,)),
    "MultiOneHot": _leaf("MultiOneHot", [2, 3], (5,)),
    "MultiOneHot, mask": _leaf("MultiOneHot", [2, 3], (5,), mask=GROUPS),
    "MultiOneHot, masks": _masks("MultiOneHot", [2, 3], (5,), dtype=torch.int8),
    "MultiCategorical": _leaf("MultiCategorical", [2, 3], (2,)),
    "MultiCategorical, int8": _leaf("MultiCategorical", [3], (1,), dtype=torch.int8, remove_singleton=False),
    "MultiCategorical, mask": _leaf("MultiCategorical", [2, 3], (2,), mask=GROUPS),
    "MultiCategorical, masks": _masks("MultiCategorical", [2, 3], (2,)),
    "MultiCategorical, rows": _uneven,
}

OTHERS: dict[str, Kind] = {
    "NonTensor": lambda library, lead=(): library.NonTensor(lead, example_data="a", batched=True),
    "Choice": lambda library, lead=(): library.Choice(
        [LEAVES["Bounded, int64"](library, lead), library.Bounded(5, 6, (*lead, 3, 2), dtype=torch.int64)]
    ),
    "Composite": _composite,
    "Composite, leaf": lambda library, lead=(): library.Composite(a=_rows(library, lead), none=None, shape=lead),
}

KINDS = LEAVES | OTHERS


def _differing(name: str) -> Kind:
    """Two specs of a kind that differ, stacked along the dim behind the leading ones."""

    def make(library: Any, lead: Any = ()) -> Any:
        one = KINDS[name](library, lead)
        other = one.clone()
        if isinstance(one, library.Composite):
            other["a"] = library.Bounded(-3, 3, (*lead, 2))
            other["own"] = library.Unbounded(lead)
        else:
            other = KINDS[name.partition(",")[0]](library, lead)
        return torch.stack([one, other], len(lead))

    return make


STACKS = {f"stack of {name}": _differing(name) for name in ("OneHot, mask", "Categorical, mask", "Composite")}
ALL = KINDS | STACKS


def make(name: str, lead: Any = (), library: Any = ours) -> Any:
    """The spec of a kind."""
    return ALL[name](library, lead)


# ---------------------------------------------------------------------- values


def noise(spec: Any) -> Any:
    """A value of the dtype and shape of a spec: in half of all cases a member, otherwise one but for some places."""
    if isinstance(spec, ours.Stacked | ours.StackedComposite):
        parts = [noise(each) for each in spec.members]
        stack = torch.stack if isinstance(parts[0], Tensor) else lazy_stack
        return stack(parts, spec.stack_dim)
    if isinstance(spec, ours.Composite):
        return TensorDict({key: noise(each) for key, each in spec.items() if each is not None}, spec.shape)
    value = spec.rand()
    if not isinstance(value, Tensor):
        return value
    free = spec.clone()
    if getattr(spec, "mask", None) is not None:
        free.update_mask(None)
    rows = value.shape[: value.ndim - spec.structural]
    forbidden = (torch.rand(rows) < 0.4 / rows.numel()).reshape((*rows, *[1] * spec.structural))
    wild = torch.rand(value.shape) < 0.2 / value.numel()
    value = torch.where(forbidden, free.rand(), value)
    return torch.where(wild, torch.randint(-3, 6, value.shape).to(value.dtype), value)


def same(one: Any, two: Any) -> bool:
    """Equal values, of the same shape and dtype; tensordicts by entry."""
    if isinstance(one, Tensor):
        return one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)
    if is_tensor_collection(one):
        return one.batch_size == two.batch_size and bool((one == two).all())
    return bool(np.array_equal(one, two))


def for_torch(index: Any, structural: int = 0) -> Any:
    """An index of a spec as torch takes it, for a value with dims that the index does not address."""
    if isinstance(index, tuple):
        rest = (slice(None),) * structural if any(each is ... for each in index) else ()
        return (*(for_torch(each) for each in index), *rest)
    return torch.as_tensor(index) if isinstance(index, list | range | np.ndarray) else index


# ---------------------------------------------------------------------- what can be done with specs and values alike


# For leading dims (2, 1, 3): each can be called with a spec and with its value.
REGROUPED: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda each: each.reshape((3, 2, *each.shape[3:])),
    "reshape, -1": lambda each: each.reshape(1, 6, *each.shape[3:]),
    "flatten": lambda each: each.flatten(0, 2),
    "unflatten": lambda each: each.unflatten(2, (3, 1)),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "squeeze": lambda each: each.squeeze(1),
    "squeeze of another": lambda each: each.squeeze(0),
    "torch.squeeze": lambda each: torch.squeeze(each, 1),
    "unsqueeze": lambda each: each.unsqueeze(0),
    "torch.unsqueeze": lambda each: torch.unsqueeze(each, 2),
    "expand": lambda each: each.expand((4, 2, 5, 3, *each.shape[3:])),
    "torch.stack": lambda each: torch.stack([each, each], 1),
    "clone": lambda each: each.clone(),
}
INDICES: list[Any] = [
    0,
    -1,
    slice(1, None),
    slice(5, None),
    (slice(None), 0, slice(None, None, 2)),
    (0, ..., slice(None)),
    None,
    (0, None),
    (slice(None), None, 0),
    [1, 0, 1],
    [[0, 1], [1, 1]],
    range(1, -1, -1),
    np.array([1, 0]),
    torch.tensor([1, 1, 0]),
    ([0, 1], [0, 0], [2, 1]),
    (0, slice(None), [1, 2]),
    ([0, 1], slice(None), [2, 0]),
    (slice(None), 0, [0, 2]),
    (torch.tensor([True, False]), 0),
    (0, 0, 2),
]

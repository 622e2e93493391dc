"""Values of every kind that is saved, what makes two of them the same, and a saved tree as JSON."""

import collections
import json
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
    tensorclass,
)
from torch import Tensor


@tensorclass
class Step:
    obs: Tensor
    note: str
    more: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


def every_dtype() -> list[torch.dtype]:
    """The dtypes whose tensors can be saved."""
    found = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    return sorted((dtype for dtype in found if not str(dtype).startswith("torch.q")), key=str)


def tensor_of(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits."""
    size = dtype.itemsize * math.prod(shape)
    if dtype == torch.bool:
        return (torch.arange(math.prod(shape)) % 3 == 0).reshape(shape)
    raw = ((torch.arange(size) * 37 + 11) % 251).to(torch.uint8)
    return (raw.view(dtype) if size else torch.empty(0, dtype=torch.uint8).view(dtype)).reshape(shape)


def same(left: Any, right: Any) -> bool:
    """Whether two values are of the same types and have the same bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and _bits(left) == _bits(right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, LazyStackedTensorDict):
        where = (left.stack_dim, left.names) == (right.stack_dim, right.names)
        return where and same(list(left.tensordicts), list(right.tensordicts))
    if is_tensorclass(left):
        attributes = dict(left._non_tensordict), dict(right._non_tensordict)
        return same(left._tensordict, right._tensordict) and same(*attributes)
    if is_tensor_collection(left):
        about = [(each.batch_size, each.device, list(each.names)) for each in (left, right)]
        return about[0] == about[1] and same(dict(left._tensordict), dict(right._tensordict))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return math.isnan(right) if math.isnan(left) else left.hex() == right.hex()
    if isinstance(left, complex):
        return same((left.real, left.imag), (right.real, right.imag))
    return bool(left == right)


def _bits(tensor: Tensor) -> bytes:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def through_json(tree: Any) -> Any:
    """A saved tree as it comes back from a file: JSON, with the arrays beside it."""
    arrays: list[np.ndarray] = []
    text = json.dumps(_without(tree, arrays), allow_nan=False)
    return _with(json.loads(text), arrays)


def _without(tree: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(tree, np.ndarray):
        arrays.append(np.array(tree))
        return {"$": len(arrays) - 1}
    if isinstance(tree, dict):
        assert all(type(key) is str for key in tree)
        return {key: _without(each, arrays) for key, each in tree.items()}
    if type(tree) is list:
        return [_without(each, arrays) for each in tree]
    assert tree is None or type(tree) in (bool, int, float, str), type(tree)
    assert type(tree) is not int or -(2**63) <= tree < 2**63
    return tree


def _with(tree: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(tree, dict):
        return arrays[tree["$"]] if "$" in tree else {key: _with(each, arrays) for key, each in tree.items()}
    return [_with(each, arrays) for each in tree] if isinstance(tree, list) else tree


# ---------------------------------------------------------------------- strategies

_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(sizes=(16, 32, 64), endianness="="),
    hnp.complex_number_dtypes(sizes=(64, 128), endianness=">"),
)
_shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
texts = st.one_of(st.text(max_size=8), st.text(st.characters(codec=None), max_size=4))
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=8),
    st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
)
arrays = hnp.arrays(_dtypes, _shapes).map(lambda array: array.astype(array.dtype.newbyteorder("=")))
numbers = hnp.arrays(hnp.scalar_dtypes().filter(lambda dtype: dtype.itemsize <= 16 and dtype.kind in "biufc"), ())
scalars = numbers.filter(lambda array: array.dtype.char not in "gG").map(lambda array: array[()])
tensors = st.builds(lambda dtype, shape: tensor_of(dtype, *shape), st.sampled_from(every_dtype()), _shapes)
keys = st.one_of(st.text(max_size=8), st.integers(-(2**63), 2**63 - 1))


@st.composite
def tensordicts(draw: Any, inner: Any = None) -> Any:
    """With nested ones, non-tensors, names and stacks."""
    batch = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    names = [f"d{n}" for n in range(len(batch))] if draw(st.booleans()) else None
    entries: dict[str, Any] = {}
    for key in draw(st.sets(st.text(min_size=1, max_size=3), max_size=3)):
        kind = draw(st.integers(0, 3))
        if kind == 0:
            entries[key] = tensor_of(draw(st.sampled_from(every_dtype())), *batch, *draw(_shapes))
        elif kind == 1:
            entries[key] = TensorDict({"below": torch.zeros(*batch, 2)}, batch)
        elif kind == 2:
            entries[key] = NonTensorData(draw(plain if inner is None else inner), batch_size=batch)
        else:
            below = [
                TensorDict({"x": torch.ones(*batch[1:], n + 1)}, batch[1:]) for n in range(batch[0] if batch else 0)
            ]
            entries[key] = lazy_stack(below) if below else torch.zeros(batch)
    return TensorDict._new_unsafe(entries, torch.Size(batch), names=names)


def _containers(inner: Any) -> Any:
    small = st.lists(inner, max_size=3)
    return st.one_of(
        small,
        small.map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
        tensordicts(inner),
        st.builds(lambda note: Step(obs=torch.ones(2, 3), note="a", more=note, batch_size=[2]), st.text()),
    )


values = st.recursive(st.one_of(plain, arrays, scalars, tensors), _containers, max_leaves=8)

STACKS = {
    "lazy stack": lambda: lazy_stack([TensorDict({"a": torch.ones(2, n + 1), "s": "x"}, [2]) for n in range(3)], 1),
    "stack of stacks": lambda: lazy_stack([lazy_stack([TensorDict({"a": torch.ones(n)}, []) for n in (1, 2)])] * 2),
    "stack of classes": lambda: lazy_stack([Step(obs=torch.ones(2), note=each, batch_size=[2]) for each in "ab"]),
    "non-tensors": lambda: TensorDict({"s": NonTensorStack("a", {"b": 2}, None)}, [3]),
    "named stack": lambda: LazyStackedTensorDict(
        *[TensorDict({"a": torch.ones(2)}, [2], names=["t"])] * 2, stack_dim=0, stack_dim_name="n"
    ),
}

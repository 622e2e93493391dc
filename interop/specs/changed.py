"""The specs of data behind a transform, found by one run of the transform on zeros."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.specs import shapes
from interop.specs.bounded import Unbounded
from interop.specs.categorical import Categorical
from interop.specs.composite import Composite
from interop.specs.non_tensor import NonTensor
from interop.specs.spec import TensorSpec


def changed(spec: object, run: Callable[[TensorDictBase], Any], keys: Sequence[NestedKey]) -> TensorSpec:
    """The spec of the result of a function of tensordicts. Entries of an unchanged tensor keep their specs.

    A new or changed entry is unbounded, or a choice of two for bools: bounds of results are not guessed. The random state of
    torch's CPU generator does not change.

    Args:
        spec: a Composite; or the spec of one entry, which is then that of the one key in `keys`. It is not modified.
        run: may change the tensordict in place.
        keys: the keys that the function reads.

    Raises:
        TypeError: the result is no tensordict, or a spec of one entry is given for several keys.
        ValueError: the result has another batch size.
    """
    if not isinstance(spec, Composite):
        if not isinstance(spec, TensorSpec) or len(keys) != 1:
            raise TypeError(
                f"needed is a Composite, or the spec of the one key that is read, {list(keys)}; got {spec!r:.200}"
            )
        whole = changed(Composite({keys[0]: spec}), run, keys)
        assert isinstance(whole, Composite)
        (entry,) = whole.values(True, True)
        return entry
    zeros = spec.zero()
    leaves = {key: zeros.get(key) for key in zeros.keys(True, True, is_leaf=is_leaf_nontensor)}
    sources = {id(value): key for key, value in leaves.items()}
    with torch.random.fork_rng(devices=[]):
        result = run(zeros)
    if not is_tensor_collection(result):
        raise TypeError(f"the transform returns a {type(result).__name__}, which has no spec of entries")
    if result.batch_size != shapes.concrete(spec.shape):
        raise ValueError(
            f"the batch size {list(spec.shape)} became {list(result.batch_size)}: a spec has one for all entries"
        )
    made = spec.clone()
    found = {key: result.get(key) for key in result.keys(True, True, is_leaf=is_leaf_nontensor)}
    for key in leaves.keys() - found.keys():
        del made[key]
    for key, value in found.items():
        source = sources.get(id(value))
        if source is None:
            made[key] = _unbounded(value)
        elif source != key:
            made[key] = spec[source].clone()
    return made


def _unbounded(value: object) -> TensorSpec:
    if not isinstance(value, Tensor):
        return NonTensor(shape=getattr(value, "batch_size", ()))
    if value.dtype == torch.bool:
        return Categorical(2, value.shape, value.device, value.dtype)
    return Unbounded(value.shape, value.device, value.dtype)

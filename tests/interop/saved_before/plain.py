"""Values as plain JSON, which is read without the library: a name, a dtype, a shape and the numbers of each array."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TypeAlias

import jax
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase, is_tensorclass

Entry: TypeAlias = list[object]  # dtype, shape and numbers of an array, or their SHA-256; or a type and its text
Seen: TypeAlias = dict[str, Entry]
MOST = 4096  # numbers that are written one by one


def flat(value: object, name: str = "") -> Seen:
    """Each array and each other value in a value, by the path that leads to it.

    Names of classes that hold values are part of it, and batch sizes.
    """
    below = f"{name}/" if name else ""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, name)
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {name: _array(np.asarray(jax.random.key_data(value)), f"key {jax.random.key_impl(value)}")}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return {name: _array(np.asarray(value))}
    if isinstance(value, NonTensorData | NonTensorStack):
        return flat(value.tolist() if isinstance(value, NonTensorStack) else value.data, name)
    if isinstance(value, LazyStackedTensorDict):
        return {f"{below}()": ["lazy stack", str(value.stack_dim)], **flat(list(value.tensordicts), name)}
    if isinstance(value, TensorDictBase):
        found: Seen = {f"{below}()": ["tensordict", str(list(value.batch_size))]}
        return found | _of_mapping({key: value.get(key) for key in sorted(value.keys(), key=str)}, below)
    if is_tensorclass(value):
        return flat(value.to_tensordict(), name) | {f"{below}()": [type(value).__name__, ""]}  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {f"{below}()": ["dict", str(len(value))], **_of_mapping(value, below)}
    if isinstance(value, tuple | list):
        return {f"{below}()": [type(value).__name__, str(len(value))], **_of_mapping(dict(enumerate(value)), below)}
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {f"{below}()": [type(value).__name__, ""], **_of_mapping(fields, below)}
    if isinstance(value, set | frozenset):
        return {name: [type(value).__name__, repr(sorted(value))]}
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return {name: [type(value).__name__, repr(value)]}
    raise TypeError(f"{name}: no plain value, got {type(value)}")


_SINCE = [
    ["state/sampler/period", "int", "1"]
]  # entries of states that came later, and what they say of an older state


def differences(expected: Mapping[str, Entry], seen: Mapping[str, Entry], rounded: tuple[str, ...] = ()) -> list[str]:
    """What is not the same bit for bit, by name.

    Numbers of arrays under names that contain one of `rounded` may differ in their last digits: powers and roots are not
    the same on every processor.
    """
    found = [f"{name}: is missing" for name in expected if name not in seen]
    found += [f"{name}: was not there" for name in seen if name not in expected and [name, *seen[name]] not in _SINCE]
    for name in expected.keys() & seen.keys():
        one, other = expected[name], seen[name]
        # As text 0.0 and -0.0 differ, and NaN is itself.
        if json.dumps(one) != json.dumps(other) and not (any(each in name for each in rounded) and _close(one, other)):
            found.append(f"{name}: {one} was saved, {other} is there")
    return sorted(found)


def _close(one: Entry, other: Entry) -> bool:
    if one[:2] != other[:2] or len(one) < 3 or isinstance(one[2], str) or not str(one[0]).startswith("float"):
        return False
    return bool(np.allclose(np.array(one[2], float), np.array(other[2], float), rtol=1e-5, atol=1e-6))


def _of_mapping(value: Mapping[str, object] | Mapping[int, object], below: str) -> Seen:
    found: Seen = {}
    for key, each in value.items():
        found |= flat(each, f"{below}{key}")
    return found


def _of_tensor(value: torch.Tensor, name: str) -> Seen:
    if value.is_nested:
        return flat(list(value.unbind()), name)
    plain = value.detach().as_subclass(torch.Tensor).cpu()
    if plain.dtype == torch.bfloat16:
        return {name: _array(plain.view(torch.int16).numpy(), "bits of bfloat16")}
    return {name: _array(plain.numpy())}


def _array(array: np.ndarray, dtype: str | None = None) -> Entry:
    if array.dtype.kind == "c":
        array, dtype = array.view(array.real.dtype), str(array.dtype)
    if array.dtype.kind not in "biuf":  # bfloat16 of JAX
        array, dtype = array.view(f"i{array.dtype.itemsize}"), f"bits of {array.dtype}"
    dtype = dtype or str(array.dtype)
    if array.size > MOST:
        return [dtype, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    return [dtype, list(array.shape), array.reshape(math.prod(array.shape)).tolist()]

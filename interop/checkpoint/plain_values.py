"""Values as tensors and plain values only, which `torch.load(weights_only=True)` reads, and back."""

import collections
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from interop.checkpoint.state import as_arrays, as_tensors
from interop.checkpoint.values import NO_PICKLE, decode, encode
from interop.data.values import MOST_DEEP, not_dense

_ALONE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_KEYS = (str, int, float, bool, type(None))
_SAVED = "__saved"


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a value that is made of tensors and plain values.

    Tensors, plain values, and lists, tuples and dicts of these are what they were. A tensordict of tensors without a
    device is its `state_dict`. Other values are a dict with the entry "__saved". TypeError for what `values` does not save,
    naming where it is.
    """
    if depth > MOST_DEEP:
        raise ValueError(f"{where}: nested more than {MOST_DEEP} deep")
    kind = type(value)
    if kind in _ALONE:
        return value
    if kind is Tensor and not not_dense(value):
        return value.detach().clone()
    if kind in (list, tuple):
        return kind([plain(each, f"{where}, element {n}", depth + 1) for n, each in enumerate(value)])
    if kind is dict and all(type(key) in _KEYS and key != _SAVED for key in value):
        return {key: plain(each, f"{where}, key {key!r}", depth + 1) for key, each in value.items()}
    if kind is TensorDict and _is_simple(value):
        state = value.state_dict()
        for key, each in state.items():
            state[key] = each.clone()
        return state
    return {_SAVED: as_tensors(encode(value, where, remedy=NO_PICKLE))}


def _is_simple(data: TensorDict) -> bool:
    """Whether a `state_dict` says all of a tensordict: not its device, names of dims, and keys with a dot."""
    return (
        data.device is None
        and not any(data.names)
        and all(
            "." not in key and (type(each) is Tensor or (type(each) is TensorDict and _is_simple(each)))
            for key, each in data.items()
        )
    )


def opened(value: Any, where: str, depth: int = 0) -> Any:
    """The value of a copy that `plain` made, or of tensors, plain values and states of tensordicts; a copy again.

    TypeError for anything else, naming where it is.
    """
    if depth > MOST_DEEP:
        raise ValueError(f"{where}: nested more than {MOST_DEEP} deep")
    kind = type(value)
    if kind in _ALONE:
        return value
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor).clone()
    if kind in (list, tuple):
        return kind([opened(each, f"{where}, element {n}", depth + 1) for n, each in enumerate(value)])
    if kind not in (dict, collections.OrderedDict):
        raise TypeError(f"{where}: expected a tensor, a plain value or the state of a tensordict, got {kind.__name__}")
    if value.keys() == {_SAVED}:
        return decode(as_arrays(value[_SAVED], value), where=where)
    if hasattr(value, "_metadata"):
        try:
            others = [key for key, each in value.items() if not isinstance(each, Tensor | dict)]
            others += [name for name, told in vars(value)["_metadata"].items() if "_type" in told]
            if others:
                raise ValueError(f"the entries {others[:5]} are no tensors")
            return _of_state(value, vars(value)["_metadata"])
        except (RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise TypeError(f"{where}: not the state of a tensordict ({error})") from error
    return {key: opened(each, f"{where}, key {key!r}", depth + 1) for key, each in value.items()}


def _of_state(state: dict[str, Any], about: dict[str, Any]) -> Any:
    """The tensordict of a state. Its own method, here for the form that is not flat, takes three times as long."""
    if any(isinstance(each, dict) for each in state.values()):
        return TensorDict({}, []).load_state_dict(state, strict=False).clone()
    entries: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in about}}
    for key, each in state.items():
        above, _, last = key.rpartition(".")
        entries[above][last] = each.detach().as_subclass(Tensor).clone()
    for name in sorted(entries, key=len, reverse=True):  # nested ones before those that hold them
        found = TensorDict(entries[name], about[name]["batch_size"], device=about[name]["device"])
        if name:
            above, _, last = name.rpartition(".")
            entries[above][last] = found
    return found

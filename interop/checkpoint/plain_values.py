"""Values as tensors and plain values only, which `torch.load(weights_only=True)` reads, and back."""

import collections
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from interop.checkpoint.state import as_arrays, as_tensors
from interop.checkpoint.values import decode, encode
from interop.data.values import MOST_DEEP

_ALONE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_KEYS = (str, int, float, bool, type(None))
_SAVED, _BATCH, _DEVICE, _NAMES = "__saved", "__batch_size", "__device", "__names"
_MARKS = {_SAVED, _BATCH, _DEVICE, _NAMES}


def plain(value: Any, where: str) -> Any:
    """A copy of a value that is made of tensors and plain values.

    Tensors, plain values, and lists, tuples and dicts of these are what they were. A tensordict is a dict with its entries,
    "__batch_size" and "__device", which its `load_state_dict` takes. Other values are a dict with the entry "__saved".
    TypeError for what `values` does not save, naming where it is.
    """
    return _plain(value, where, 0)


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > MOST_DEEP:
        raise ValueError(f"{where}: nested more than {MOST_DEEP} deep")
    kind = type(value)
    if kind in _ALONE:
        return value
    if kind is Tensor and not (value.layout is not torch.strided or value.is_meta or value.is_quantized):
        return value.detach().clone()
    if kind in (list, tuple):
        return kind([_plain(each, f"{where}, element {n}", depth + 1) for n, each in enumerate(value)])
    if kind is dict and all(type(key) in _KEYS and key not in _MARKS for key in value):
        return {key: _plain(each, f"{where}, key {key!r}", depth + 1) for key, each in value.items()}
    if kind is TensorDict and _is_tensors(value):
        return _state_of(value)
    return {_SAVED: as_tensors(encode(value, where))}


def _is_tensors(data: TensorDict) -> bool:
    """Whether a tensordict has tensors and such tensordicts only."""
    return not _MARKS.intersection(data.keys()) and all(
        type(each) is Tensor or (type(each) is TensorDict and _is_tensors(each)) for each in data.values()
    )


def _state_of(data: TensorDict) -> dict[str, Any]:
    entries = {
        key: _state_of(each) if isinstance(each, TensorDict) else each.detach().clone() for key, each in data.items()
    }
    names = {_NAMES: list(data.names)} if any(data.names) else {}
    return {**entries, _BATCH: data.batch_size, _DEVICE: data.device, **names}


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
    if _BATCH in value or hasattr(value, "_metadata"):
        try:
            return _tensordict(value, where, depth)
        except (RuntimeError, ValueError, KeyError, AttributeError) as error:
            raise TypeError(f"{where}: not the state of a tensordict ({error})") from error
    return {key: opened(each, f"{where}, key {key!r}", depth + 1) for key, each in value.items()}


def _tensordict(state: dict[str, Any], where: str, depth: int) -> TensorDict:
    if _BATCH in state:
        entries = {
            key: opened(each, f"{where}, key {key!r}", depth + 1) for key, each in state.items() if key not in _MARKS
        }
        wrong = next((key for key, each in entries.items() if not isinstance(each, Tensor | TensorDict)), None)
        if wrong is not None:
            raise TypeError(f"{where}: {wrong!r} is no tensor")
        return TensorDict(entries, state[_BATCH], device=state.get(_DEVICE), names=state.get(_NAMES))
    # As `TensorDict.state_dict` gives it: nested entries have the keys "a.b", and what they are is beside.
    others = [key for key, each in state.items() if not isinstance(each, Tensor | dict)]
    others += [name for name, told in vars(state)["_metadata"].items() if "_type" in told]
    if others:
        raise TypeError(f"{where}: the entries {others[:5]} are no tensors")
    found: TensorDict = TensorDict({}, []).load_state_dict(state, strict=False).clone()
    return found

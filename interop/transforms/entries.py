"""Entries of tensordicts: checked, found at every depth, and set so that a refusal changes nothing."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path, known_keys


def expect_tensordict(name: str, data: Any) -> None:
    """TypeError, in the name of a transform, for other data than a tensordict."""
    if not is_tensor_collection(data):
        raise TypeError(f"{name} transforms the entries of a tensordict, got {type(data).__name__}")


def expect_tensor(name: str, key: NestedKey, value: Any) -> None:
    """TypeError, in the name of a transform, for an entry that is no tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {key!r} must be a tensor, got {type(value).__name__}")


def missing(name: str, key: NestedKey, data: TensorDictBase) -> KeyError:
    """The error for an entry that a transform does not find."""
    return KeyError(
        f"{name}: {key!r} not found in tensordict, which has {known_keys(data)}. "
        "Name entries that there are, or call set_missing_tolerance(True)"
    )


def put(
    name: str, data: TensorDictBase, entries: Iterable[tuple[NestedKey, Any]], gone: Iterable[NestedKey] = ()
) -> None:
    """Delete entries and then set others: all of it, or nothing where one is refused.

    KeyError for an entry within one that is no tensordict, ValueError for a value without the batch dims that it needs,
    RuntimeError for a locked tensordict.
    """
    entries, gone = list(entries), list(gone)
    for key in gone:
        _refuse_locked(name, around(name, data, key), key)
    for key, value in entries:
        holder = around(name, data, key)
        _refuse_locked(name, holder, key)
        shaped = isinstance(value, Tensor) or (is_tensor_collection(value) and not is_non_tensor(value))
        if shaped and value.shape[: holder.batch_dims] != holder.batch_size:
            raise ValueError(
                f"{name}: {key!r} would be of shape {list(value.shape)} in a tensordict of batch size "
                f"{list(holder.batch_size)}: the batch dims have to stay as they are"
            )
    for key in gone:
        if data.get(key, None) is not None:  # not deleted with one above it
            data.del_(key)
    for key, value in entries:
        data.set(key, value)


def around(name: str, data: TensorDictBase, key: NestedKey) -> TensorDictBase:
    """The innermost tensordict that exists around an entry."""
    for step in as_path(key)[:-1]:
        inner = data.get(step, None)
        if inner is None:
            break
        if not is_tensor_collection(inner) or is_non_tensor(inner):
            raise KeyError(f"{name}: {key!r} cannot be set, as {step!r} is no tensordict but a {type(inner).__name__}")
        data = inner
    return data


def tensors(data: TensorDictBase, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, str, NestedKey, Tensor]]:
    """All tensors: the tensordict that holds one, its name there, its key, itself.

    Those of a lazy stack come element by element: they may differ in shape, or be in some elements only.
    """
    if isinstance(data, LazyStackedTensorDict):
        for each in data.tensordicts:
            yield from tensors(each, path)
        return
    for name, value in list(data.items()):
        if isinstance(value, Tensor):
            yield data, name, (*path, name) if path else name, value
        elif is_tensor_collection(value) and not is_non_tensor(value):
            yield from tensors(value, (*path, name))


def as_floating(value: Tensor) -> Tensor:
    """Integers and bools in the default dtype; other values as they are."""
    return value if value.is_floating_point() or value.is_complex() else value.to(torch.get_default_dtype())


def before_key(key: NestedKey) -> NestedKey | None:
    """The key of a step for one under "next"; None for another key."""
    path = as_path(key)
    if path[0] != "next" or len(path) == 1:
        return None
    return path[1] if len(path) == 2 else path[1:]


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a shape broadcasts to another one without changing it."""
    pairs = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(one in (1, other) for one, other in pairs)


def _refuse_locked(name: str, holder: TensorDictBase, key: NestedKey) -> None:
    if holder.is_locked:
        raise RuntimeError(f"{name}: {key!r} cannot be changed: the tensordict that holds it is locked")

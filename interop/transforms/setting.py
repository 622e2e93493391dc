"""Setting entries of a tensordict so that a refusal changes nothing."""

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path


def expect_tensordict(name: str, data: Any) -> None:
    """TypeError, in the name of a transform, for what is no tensordict."""
    if not is_tensor_collection(data):
        raise TypeError(f"{name} transforms the entries of a tensordict, got {type(data).__name__}")


def expect_tensor(name: str, key: NestedKey, value: Any) -> None:
    """TypeError, in the name of a transform, for an entry that is no tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {key!r} must be a tensor, got {type(value).__name__}")


def put(
    name: str, data: TensorDictBase, entries: Iterable[tuple[NestedKey, Any]], gone: Iterable[NestedKey] = ()
) -> None:
    """Take entries out, those that are there, and then set others: all of it, or nothing where one is refused.

    KeyError for an entry within what is no tensordict, ValueError for one without the batch dims of the tensordict that it
    goes into.
    """
    entries, before = list(entries), []
    alone = len(entries) == 1 and not gone and isinstance(entries[0][0], str)  # refused, it has changed nothing
    try:
        for key in gone:
            old = data.get(key, None)
            if old is not None:  # not gone with one above it
                data.del_(key)
                before.append((key, old))
        for key, value in entries:
            held = around(name, data, key)
            fits = not _has_shape(value) or value.shape[: held.batch_dims] == held.batch_size
            if not fits:
                raise ValueError(
                    f"{name}: {key!r} would be of shape {list(value.shape)} in a tensordict of batch size "
                    f"{list(held.batch_size)}: the batch dims have to stay as they are"
                )
            if not alone:
                before.append(_what_it_replaces(data, key))
            data.set(key, value)
    except BaseException:
        for key, old in reversed(before):
            if old is not None:
                data.set(key, old)
            elif data.get(key, None) is not None:
                data.del_(key)
        raise


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) or (is_tensor_collection(value) and not is_non_tensor(value))


def around(name: str, data: TensorDictBase, key: NestedKey) -> TensorDictBase:
    """The tensordict that an entry goes into, or the one in which that will be made."""
    if isinstance(key, tuple):
        for step in key[:-1]:
            inner = data.get(step, None)
            if inner is None:
                break
            if not is_tensor_collection(inner) or is_non_tensor(inner):
                raise KeyError(
                    f"{name}: {key!r} cannot be set, as {step!r} is no tensordict but a {type(inner).__name__}"
                )
            data = inner
    return data


def _what_it_replaces(data: TensorDictBase, key: NestedKey) -> tuple[NestedKey, Any]:
    """The entry that a new one takes the place of; the outermost tensordict that is made for it, with None."""
    path = as_path(key)
    for length in range(1, len(path)):
        if data.get(path[:length], None) is None:
            return path[:length], None
    return key, data.get(key, None)

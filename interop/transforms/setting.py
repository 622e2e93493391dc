"""Setting entries of a tensordict so that a refusal changes nothing."""

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.keys import as_path


def expect_tensordict(name: str, data: Any) -> None:
    """TypeError, in the name of a transform, for what is no tensordict."""
    if not is_tensor_collection(data):
        raise TypeError(f"{name} transforms the entries of a tensordict, got {type(data).__name__}")


def expect_tensor(name: str, key: NestedKey, value: Any) -> None:
    """TypeError, in the name of a transform, for an entry that is no tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {key!r} must be a tensor, got {type(value).__name__}")


def put(name: str, data: TensorDictBase, entries: Iterable[tuple[NestedKey, Any]]) -> None:
    """Set entries, all or none. ValueError for one without the batch dims of the tensordict it goes into."""
    entries = list(entries)
    for key, value in entries:
        if not isinstance(value, Tensor) and not is_tensor_collection(value):
            continue
        batch = data.batch_size if isinstance(key, str) else _batch_size(data, key)
        if value.shape[: len(batch)] != batch:
            raise ValueError(
                f"{name}: {key!r} would be of shape {list(value.shape)} in a tensordict of batch size {list(batch)}: the "
                "batch dims have to stay as they are"
            )
    for key, value in entries:
        data.set(key, value)


def _batch_size(data: TensorDictBase, key: NestedKey) -> Any:
    """The batch size of the tensordict that an entry goes into."""
    for step in as_path(key)[:-1]:
        inner = data.get(step, None)
        if not is_tensor_collection(inner):
            break
        data = inner
    return data.batch_size

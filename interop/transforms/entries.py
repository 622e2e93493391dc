"""Transforms of single entries: all of them, or none if one is refused, which is named."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms.setting import expect_tensor
from interop.transforms.transform import Keys, Transform


class EntriesTransform(Transform):
    """Changes single tensors, in `_apply_transform` and `_inv_apply_transform`; `out_keys` are `in_keys` where not given.

    Nothing is written before all entries are ready. A TypeError or ValueError says which entry it is about.
    """

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__(
            in_keys,
            in_keys if out_keys is None else out_keys,
            in_keys_inv,
            in_keys_inv if out_keys_inv is None else out_keys_inv,
        )

    def _made(self, key: NestedKey, function: Callable[[Tensor], Tensor], value: Any) -> Tensor:
        expect_tensor(type(self).__name__, key, value)
        try:
            return function(value)
        except (TypeError, ValueError, NotImplementedError) as error:
            if type(error) is NotImplementedError:  # of torch, for a dtype
                raise TypeError(f"{type(self).__name__}: {key!r}: {error}") from error
            if type(error) in (TypeError, ValueError):
                raise type(error)(f"{type(self).__name__}: {key!r}: {error}") from error
            raise


def tensors(
    data: TensorDictBase, path: tuple[str, ...] = ()
) -> Iterator[tuple[TensorDictBase, str, NestedKey, Tensor]]:
    """All tensors: the tensordict that holds one, its name there, its key, itself.

    Those of a lazy stack come one element after another: they may differ in shape, or be in some elements only.
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
    """The values themselves, or of the default dtype where they are integers or bools."""
    return value if value.is_floating_point() or value.is_complex() else value.to(torch.get_default_dtype())

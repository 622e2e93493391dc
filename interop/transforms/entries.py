"""Transforms of single entries: all of them, or none if one is refused, which is named."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms.setting import expect_tensor, expect_tensordict, put
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

    # Tensors given by name have no batch dims in common: they may change their shapes.
    @dispatch(source="in_keys", dest="out_keys", auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform each of `in_keys` into the one of `out_keys`, in place. KeyError for a missing one."""
        return self._each(tensordict, self._in_keys, self._out_keys, self._apply_transform)

    @dispatch(source="out_keys_inv", dest="in_keys_inv", auto_batch_size=False)
    def inv(self, tensordict: TensorDictBase) -> Any:
        """What is to be stored of a tensordict, which stays as it is."""
        return self._inv_call(tensordict.copy() if is_tensor_collection(tensordict) else tensordict)

    def _each(self, data: Any, sources: Sequence[NestedKey], destinations: Sequence[NestedKey], function: Any) -> Any:
        ready: dict[NestedKey, Any] = {}

        def made(key: NestedKey) -> Any:
            value = ready[key] if key in ready else self._get(data, key)
            return None if value is None else self._named(key, function, value)

        expect_tensordict(type(self).__name__, data)
        # An entry that was written for one key and is read for the next is the new one.
        for source, destination in zip(sources, destinations, strict=True):
            value = made(source)
            if value is not None:
                ready[destination] = value
        put(type(self).__name__, data, ready.items())
        return data

    def _named(self, key: NestedKey, function: Callable[[Tensor], Tensor], value: Any) -> Tensor:
        """What the function makes of the entry; its errors name the entry."""
        expect_tensor(type(self).__name__, key, value)
        try:
            return function(value)
        except (TypeError, ValueError) as error:
            if type(error) in (TypeError, ValueError):
                raise type(error)(f"{type(self).__name__}: {key!r}: {error}") from error
            raise


def as_floating(value: Tensor) -> Tensor:
    """The values themselves, or of the default dtype where they are integers or bools."""
    return value if value.is_floating_point() or value.is_complex() else value.to(torch.get_default_dtype())

"""Transforms of single entries: all of them, or none if one is refused, which is named."""

from collections.abc import Callable
from typing import Any

import torch
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
        except (TypeError, ValueError) as error:
            if type(error) in (TypeError, ValueError):
                raise type(error)(f"{type(self).__name__}: {key!r}: {error}") from error
            raise


def as_floating(value: Tensor) -> Tensor:
    """The values themselves, or of the default dtype where they are integers or bools."""
    return value if value.is_floating_point() or value.is_complex() else value.to(torch.get_default_dtype())

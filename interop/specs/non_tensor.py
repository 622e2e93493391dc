"""The spec of Python objects."""

from typing import Any, Self

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Size, Tensor

from interop.specs import shapes
from interop.specs.spec import TensorSpec, as_device, refused


class NonTensor(TensorSpec):
    """Python objects, stored in a tensordict as `NonTensorData` or stacks of it.

    Args:
        shape: the batch size of a value, (1,) by default.
        device: None by default.
        dtype: None by default.
        example_data: the object that `rand`, `zero` and `one` return.
        batched: True for one object per position of the shape, False (default) for one object in all.
        feature_dims: the number of last dims that share one object; excludes `batched`.
    """

    def __init__(
        self, shape: Any = (1,), device: Any = None, dtype: torch.dtype | None = None, example_data: Any = None,
        batched: bool | None = None, feature_dims: int | None = None,
    ) -> None:  # fmt: skip
        if batched is not None and feature_dims is not None:
            raise ValueError(f"give one of batched and feature_dims, got {batched} and {feature_dims}")
        self.shape = shapes.as_shape(shape)
        self.device, self.dtype, self.example_data = None if device is None else as_device(device), dtype, example_data
        self.feature_dims = (0 if batched else self.ndim) if feature_dims is None else feature_dims
        if not 0 <= self.feature_dims <= self.ndim:
            raise ValueError(f"feature_dims must be from 0 to {self.ndim}, got {self.feature_dims}")

    @property
    def batched(self) -> bool:
        """Whether each position of the shape has its own object."""
        return self.feature_dims == 0

    def _made(self, how: str, lead: Size) -> Any:
        whole = Size((*lead, *self.shape))
        at = 0 if 0 in whole else len(whole) - self.feature_dims  # an empty stack would lose the dims behind it
        value: Any = NonTensorData(self.example_data, batch_size=whole[at:], device=self.device)
        for size in reversed(whole[:at]):
            value = NonTensorStack(*(value.clone() for _ in range(size)), stack_dim=0)
        return value

    def _has(self, val: Any) -> bool:
        if isinstance(val, Tensor):
            return False
        return not (is_non_tensor(val) or isinstance(val, TensorDictBase)) or shapes.fits(self.shape, val.batch_size)

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Do nothing: objects have no dtype."""

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Wrap the value in `NonTensorData` with the shape of the spec."""
        if is_non_tensor(val):
            return val
        return NonTensorData(val, batch_size=self.shape, device=None if ignore_device else self.device)

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        self._assert_safe(val, safe)
        return val

    def _selected(self, index: Any) -> Self:
        return self._of_shape(shapes.indexed(self.shape, shapes.normalized(self.shape, index)))

    def _of_shape(self, new: Size) -> Self:
        whole = self.feature_dims == self.ndim
        return self._replaced(shape=new, feature_dims=len(new) if whole else min(self.feature_dims, len(new)))

    _regrouped = _expanded = _of_shape

    make_neg_dim = refused("batch sizes are known, no dim is dynamic")

    def to(self, dest: Any) -> Self:
        """Move the spec to a device. A dtype is ignored."""
        if dest is None or isinstance(dest, torch.dtype) or as_device(dest) == self.device:
            return self
        return self._replaced(device=as_device(dest))

    def clear_device_(self) -> Self:
        self.device = None
        return self

    def _is_like(self, other: Any) -> bool:
        same = self.shape == other.shape and self.device == other.device and self.feature_dims == other.feature_dims
        return bool(same and self.example_data == other.example_data)

    def __repr__(self) -> str:
        return super().__repr__().removesuffix(")") + f",\n    example_data={self.example_data})"

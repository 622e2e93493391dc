"""Transforms that cast entries to another dtype, device or kind of memory."""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.transforms.transform import Keys, TensorTransform, Transform, expect_tensordict, tensors


class DTypeCastTransform(TensorTransform):
    """Casts entries of one dtype to another when they are read, and back when they are written.

    Args:
        dtype_in: the dtype in the storage.
        dtype_out: the dtype of the data that is read. Named entries get it whatever dtype they have.
        in_keys: entries to cast when read; None for all of `dtype_in`, wherever they are.
        out_keys: where they go; `in_keys` by default.
        in_keys_inv: entries to cast to `dtype_in` when written: their names in the storage. By default none if there are
            `in_keys`, else all of `dtype_out`.
        out_keys_inv: their names outside; `in_keys_inv` by default.

    TypeError for a wrong dtype; ValueError for `out_keys` without `in_keys`, or of the inverse.
    """

    invertible = True

    def __init__(
        self,
        dtype_in: torch.dtype,
        dtype_out: torch.dtype,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        for name, dtype in (("dtype_in", dtype_in), ("dtype_out", dtype_out)):
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype, got {dtype!r}")
        for name, keys, paired_keys in (("", in_keys, out_keys), ("_inv", in_keys_inv, out_keys_inv)):
            if keys is None and paired_keys is not None:
                raise ValueError(
                    f"out_keys{name} without in_keys{name}: the order of entries found is not known before"
                )
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dtype_in = dtype_in
        self.dtype_out = dtype_out
        self._all_read = in_keys is None
        self._all_written = in_keys is None and in_keys_inv is None

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self._all_read:
            return self._cast_all(next_tensordict, self.dtype_in, self.dtype_out)
        return super()._call(next_tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> Any:
        if self._all_written:
            return self._cast_all(tensordict, self.dtype_out, self.dtype_in)
        return super()._inv_call(tensordict)

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.to(self.dtype_out)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return state.to(self.dtype_in)

    def _cast_all(self, data: TensorDictBase, old: torch.dtype, new: torch.dtype) -> TensorDictBase:
        expect_tensordict(type(self).__name__, data)
        ready = [(holder, name, value.to(new)) for holder, name, _, value in tensors(data) if value.dtype == old]
        for holder, name, value in ready:
            holder.set(name, value)
        return data

    def __repr__(self) -> str:
        keys = (None, None) if self._all_read else (self.in_keys, self.out_keys)
        inverse = (None, None) if self._all_written else (self.in_keys_inv, self.out_keys_inv)
        return (
            f"{type(self).__name__}(in_keys={keys[0]}, out_keys={keys[1]}, in_keys_inv={inverse[0]}, "
            f"out_keys_inv={inverse[1]})"
        )


class DoubleToFloat(DTypeCastTransform):
    """Casts entries of float64 to float32 when read, and back when written. Keys as for `DTypeCastTransform`."""

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__(torch.float64, torch.float32, in_keys, out_keys, in_keys_inv, out_keys_inv)


class DeviceCastTransform(Transform):
    """Moves data to a device when it is read, and to another when it is written.

    Args:
        device: where data is read.
        orig_device: where it is stored; None to leave written data where it is.
    """

    invertible = True

    def __init__(self, device: torch.device | str | int, orig_device: torch.device | str | int | None = None) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.orig_device = None if orig_device is None else torch.device(orig_device)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict(type(self).__name__, next_tensordict)
        return next_tensordict.to(self.device)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict if self.orig_device is None else tensordict.to(self.orig_device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={self.device}, orig_device={self.orig_device})"


class PinMemoryTransform(Transform):
    """Pins the memory of data that is read, which then moves to an accelerator faster. RuntimeError without one."""

    def __init__(self) -> None:
        super().__init__()

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.pin_memory()

"""Transforms that normalize by the mean and variance of what was written so far."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms.moments import Moments
from interop.transforms.running_norm import RunningNorm
from interop.transforms.transform import Keys


class VecNorm(RunningNorm):
    """Subtracts a running mean and divides by a running standard deviation, sqrt(max(variance, eps)).

    In a buffer the statistics are of what is written: each `extend` or `add` updates them and stores the values as they are;
    reading normalizes by the statistics as they are then, and changes nothing. A write that fails changes nothing. What
    transforms before this one do on reading only, as ToTensorImage, is not in the statistics: `freeze()` this one and call
    `update()` with what is read, or have them change what is stored.

    Elsewhere `forward` updates the statistics, while in training mode and not frozen, and normalizes; `inv` updates them.

    Each update multiplies what all values before it count for by `decay`, whatever its size. The statistics are kept in
    float64, merged without subtracting large numbers, and are part of `state_dict()` and of checkpoints. Many threads may
    use one. As it keeps something, it can be part of one buffer only, not inverted, and `buffer[i] = rows` is refused: use
    `to_observation_norm()` where the statistics are to stay.

    Args:
        in_keys: entries to normalize; None for those of "observation" and "reward" that there are.
        out_keys: where they go; None for `in_keys`.
        shared_td: must be None: statistics are not shared with other processes.
        lock: held while statistics are updated; None for one of its own.
        decay: in [0, 1]; 1 to have all values count alike.
        eps: least variance.
        shapes: of the values of each entry, their last dims; None for the dims behind those of the tensordict.
        new_api: make a `VecNormV2`.

    ValueError for arguments out of range, and for values of other shapes than before, infinities and NaNs that are written.
    RuntimeError when there are no statistics to normalize by.
    """

    def __new__(cls, *args: Any, new_api: bool | None = None, **kwargs: Any) -> Any:
        if not new_api:
            return super().__new__(cls)
        return _second(*args, **kwargs)

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        shared_td: TensorDictBase | None = None,
        lock: Any = None,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shapes: Sequence[Sequence[int]] | None = None,
        new_api: bool | None = None,
    ) -> None:
        _refuse_shared("shared_td", shared_td)
        super().__init__(["observation", "reward"] if in_keys is None else in_keys, out_keys, lock, decay, eps)
        if shapes is not None and len(shapes) != len(self.in_keys):
            raise ValueError(f"shapes must be one for each of {self.in_keys}, got {shapes}")
        self.shapes = None if shapes is None else [torch.Size(shape) for shape in shapes]
        if in_keys is None:
            self.set_missing_tolerance(True)

    def _dims(self, key: NestedKey, value: Tensor, batch_dims: int) -> int:
        if self.shapes is None:
            return batch_dims
        shape = self.shapes[self.in_keys.index(key)]
        dims = value.ndim - len(shape)
        if dims < 0 or value.shape[dims:] != shape:
            raise ValueError(f"VecNorm: {key!r} is of shape {list(value.shape)}, which does not end in {list(shape)}")
        return dims

    def _shares(self, count: float) -> tuple[float, float]:
        return self.decay, 1.0

    def _deviation(self, variance: Tensor) -> Tensor:
        return variance.clamp_min(self.eps).sqrt().clamp_min(self.eps)


class VecNormV2(RunningNorm):
    """As `VecNorm`, but `decay` is for each value, not for each update, and the divisor is max(standard deviation, eps).

    Each value multiplies what those before it count for by `decay`; values of one update count alike.

    Args:
        in_keys: entries to normalize.
        out_keys: where they go; None for `in_keys`.
        lock: held while statistics are updated; None for one of its own.
        stateful: must be True: statistics are kept here, not in the data.
        decay: in [0, 1]; 1 to have all values count alike.
        eps: least standard deviation.
        shared_data: must be None: statistics are not shared with other processes.
        reduce_batch_dims: have one mean and variance for all elements of a batch. Otherwise each has its own, and batches
            must all be of one shape.

    ValueError for values out of range.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys = None,
        *,
        lock: Any = None,
        stateful: bool = True,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shared_data: TensorDictBase | None = None,
        reduce_batch_dims: bool = False,
    ) -> None:
        _refuse_shared("shared_data", shared_data)
        if not stateful:
            raise ValueError("stateful=False is for environments that carry the statistics in their data")
        super().__init__(in_keys, out_keys, lock, decay, eps)
        self.stateful, self.reduce_batch_dims = True, reduce_batch_dims

    def _dims(self, key: NestedKey, value: Tensor, batch_dims: int) -> int:
        return batch_dims if self.reduce_batch_dims else 0

    def _check_shape(self, key: NestedKey, kept: Moments | None, shape: Sequence[int]) -> None:
        try:
            super()._check_shape(key, kept, shape)
        except ValueError as error:
            if self.reduce_batch_dims:
                raise
            raise ValueError(f"{error}: batches of other shapes need reduce_batch_dims=True") from None

    def _shares(self, count: float) -> tuple[float, float]:
        if self.decay == 1:
            return 1.0, 1.0
        past = self.decay**count
        return past, (1 - past) / count

    def _deviation(self, variance: Tensor) -> Tensor:
        return variance.sqrt().clamp_min(self.eps)


def _second(
    in_keys: Keys = None,
    out_keys: Keys = None,
    shared_td: TensorDictBase | None = None,
    lock: Any = None,
    decay: float = 0.9999,
    eps: float = 1e-4,
    shapes: Any = None,
) -> VecNormV2:
    """The newer form, of the arguments of the older one."""
    if shapes is not None:
        raise ValueError("shapes are not taken with new_api: statistics are over the batch dims")
    keys = ["observation", "reward"] if in_keys is None else in_keys
    made = VecNormV2(keys, out_keys, lock=lock, decay=decay, eps=eps, shared_data=shared_td)
    if in_keys is None:
        made.set_missing_tolerance(True)
    return made


def _refuse_shared(name: str, given: Any) -> None:
    if given is not None:
        raise ValueError(f"{name} must be None: statistics are saved and loaded by state_dict(), not shared")

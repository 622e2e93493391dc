"""Transforms that normalize entries: by a fixed location and scale, or by running statistics."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms.chain import Compose
from interop.transforms.transform import Keys, TensorTransform, Transform, expect_tensordict, put

_UPDATES = threading.Lock()  # of statistics; one for all transforms, as it is held for microseconds


class Affine(TensorTransform):
    """Multiplies entries by a scale and adds a location, or (value - loc) / scale. Both are buffers of the module.

    Integers become floats.

    Args:
        loc: a number, or a tensor of the last dims of entries.
        scale: the same.
        standard_normal: subtract and divide.

    TypeError for wrong types, ValueError for a scale of zero to divide by and for results of another shape.
    """

    keeps_shape = True
    loc: Tensor
    scale: Tensor
    standard_normal: Tensor

    def _set(self, loc: float | Tensor, scale: float | Tensor, standard_normal: bool) -> None:
        """Register the numbers."""
        for name, value in (("loc", loc), ("scale", scale)):
            if not isinstance(value, int | float | Tensor) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
            tensor = torch.tensor(float(value), device="cpu") if not isinstance(value, Tensor) else value.detach()
            self.register_buffer(name, _as_floating(tensor))
        if standard_normal and bool((self.scale == 0).any()):
            raise ValueError(f"scale must not contain 0 with standard_normal, got {scale}")
        self.register_buffer("standard_normal", torch.as_tensor(standard_normal, device="cpu"))

    def _scaled(self, value: Tensor, standard_normal: bool) -> Tensor:
        value = _as_floating(value)
        loc = _laid_out(self.loc, value)
        scale = _laid_out(self.scale, value)
        result = value - loc if standard_normal else value * scale
        other = scale if standard_normal else loc
        if other.dtype == result.dtype and result.shape == value.shape:  # memory is written once
            return result.div_(other) if standard_normal else result.add_(other)
        return result / other if standard_normal else result + other

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return self._scaled(obs, bool(self.standard_normal))

    def __repr__(self) -> str:
        if self.loc.numel() != 1 or self.scale.numel() != 1:
            return f"{type(self).__name__}(keys={self.in_keys})"
        return f"{type(self).__name__}(loc={self.loc.item():4.4f}, scale={self.scale.item():4.4f}, keys={self.in_keys})"


class RewardScaling(Affine):
    """Multiplies rewards by a scale and adds a location. Arguments as for `Affine`; `in_keys` are ["reward"] by default."""

    default_key = "reward"

    def __init__(
        self,
        loc: float | Tensor,
        scale: float | Tensor,
        in_keys: Keys = None,
        out_keys: Keys = None,
        standard_normal: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self._set(loc, scale, standard_normal)


class ObservationNorm(Affine):
    """Multiplies entries by a scale and adds a location when read; does the opposite when written.

    Arguments as for `Affine`, and `in_keys` must be given. A number `scale` is at least `eps`, a tensor is taken as it is.
    `VecNorm.to_observation_norm()` finds both from data.
    """

    invertible = True

    def __init__(
        self,
        loc: float | Tensor,
        scale: float | Tensor,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        standard_normal: bool = False,
        eps: float = 1e-6,
    ) -> None:
        if in_keys is None:
            raise ValueError("ObservationNorm needs in_keys: the entries to normalize")
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if isinstance(scale, int | float):
            if scale < 0:
                raise ValueError(f"scale must not be negative, got {scale}: give a tensor to turn signs around")
            scale = max(scale, eps)
        self._set(loc, scale, standard_normal)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return self._scaled(state, not self.standard_normal)


@dataclass(frozen=True, eq=False)
class Moments:
    """Weight and mean of values, and the weighted sum of squared distances from the mean, in float64.

    Batches are merged by these (Chan, Golub and LeVeque, 1979). The difference of sums of squares and of values would lose
    all digits of the variance if the mean is large.
    """

    weight: float
    mean: Tensor
    squares: Tensor
    ready: dict[Any, Any] = field(default_factory=dict, repr=False)  # a cache of numbers that reading needs

    @classmethod
    def of(cls, values: Tensor) -> "Moments":
        """Moments over the first dim; each value weighs 1."""
        wide = values.detach().double()
        if len(wide) == 1:
            return cls(1.0, wide[0].clone(), torch.zeros_like(wide[0]))  # values may be the caller's
        mean = wide.mean(0)
        return cls(float(len(wide)), mean, (wide - mean).square_().sum(0))

    @property
    def variance(self) -> Tensor:
        return self.squares / self.weight

    def is_finite(self) -> bool:
        """False if a value was infinite or NaN, or a square overflowed."""
        return bool(self.mean.isfinite().all() & self.squares.isfinite().all())

    def times(self, factor: float) -> "Moments":
        """The same with all weights times a factor."""
        return Moments(self.weight * factor, self.mean, self.squares * factor)

    def merged(self, other: "Moments") -> "Moments":
        """Moments of the values of both, on the device of the other."""
        mean = self.mean.to(other.mean.device)
        own = self.squares.to(other.mean.device)
        weight = self.weight + other.weight
        share = other.weight / weight
        apart = other.mean - mean
        squares = torch.addcmul(own + other.squares, apart, apart, value=self.weight * share)
        return Moments(weight, torch.add(mean, apart, alpha=share), squares)


class RunningNorm(Transform):
    """Subtracts a running mean and divides by a running standard deviation. A subclass says how values count.

    In a buffer the statistics are of the data that is written. Each `extend` or `add` updates them and stores the values as
    they are; a write that fails changes nothing. Reading normalizes by the current statistics. Transforms before this one
    that change data only on reading, such as ToTensorImage, are not in the statistics: `freeze()` this one and call
    `update()` with data that was read.

    Elsewhere `forward` updates the statistics, in training mode and unless frozen, and normalizes; `inv` updates them.

    The statistics are float64 and part of `state_dict()` and of checkpoints. Many threads may use one. It keeps state: it
    can be part of one buffer only, not inverted, and `buffer[i] = rows` is refused. `to_observation_norm()` returns a fixed
    transform.

    Args:
        in_keys: entries to normalize.
        out_keys: where the results go; `in_keys` by default.
        decay: in [0, 1]; 1 to have all values count alike.
        eps: least standard deviation.

    ValueError for arguments out of range, values of other shapes than before, and infinities and NaNs that are written.
    RuntimeError if there are no statistics to normalize by.
    """

    keeps = learns_from_steps = True

    def __init__(self, in_keys: Keys, out_keys: Keys = None, *, decay: float = 0.9999, eps: float = 1e-4) -> None:
        super().__init__(in_keys, in_keys if out_keys is None else out_keys)
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {decay}")
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be at least 0, got {eps}")
        self.decay = decay
        self.eps = eps
        self.frozen = False
        self._statistics: Mapping[NestedKey, Moments] = {}  # replaced as a whole, so that readers need no lock

    def _dims(self, batch_dims: int) -> int:
        """The number of leading dims of an entry that the statistics are over."""
        return batch_dims

    def _weights(self, count: float) -> tuple[float, float]:
        """The factor for the statistics so far when so many values are added, and for each of these values."""
        raise NotImplementedError

    def _deviation(self, variance: Tensor) -> Tensor:
        """The divisor."""
        raise NotImplementedError

    def update(self, tensordict: TensorDictBase) -> None:
        """Add the entries of a tensordict to the statistics, frozen or not.

        KeyError for a missing entry, TypeError for one that is no tensor of real numbers, ValueError for one of another
        shape than before or with infinities or NaNs. Then the statistics have not changed.
        """
        with _UPDATES:
            self._statistics = self._updated(tensordict)

    def _updated(self, data: TensorDictBase) -> Mapping[NestedKey, Moments]:
        updated = dict(self._statistics)
        for key, value in self._values(data, self.in_keys):
            moments = updated.get(key)
            dims = self._dims(data.ndim)
            shape = value.shape[dims:]
            self._check_shape(key, moments, shape)
            if not value.numel():
                continue
            new = Moments.of(value.reshape(-1, *shape))
            if not new.is_finite():
                raise ValueError(f"{type(self).__name__}: {key!r} has infinities or NaNs, or squares that overflow")
            past, weight = self._weights(new.weight)
            new = new.times(weight)
            updated[key] = new if moments is None else moments.times(past).merged(new)
        return updated

    def _values(self, data: TensorDictBase, keys: Iterable[NestedKey]) -> Iterator[tuple[NestedKey, Tensor]]:
        """The entries, each key once, without missing ones that may be missing."""
        expect_tensordict(type(self).__name__, data)
        for key in dict.fromkeys(keys):
            value = self._get(data, key)
            if value is not None:
                yield key, _real(key, value)

    def _check_shape(self, key: NestedKey, moments: Moments | None, shape: Sequence[int]) -> None:
        if moments is not None and tuple(shape) != tuple(moments.mean.shape):
            raise ValueError(
                f"{type(self).__name__}: {key!r} has values of shape {list(shape)}, its statistics are of "
                f"{list(moments.mean.shape)}"
            )

    def _moments(self, key: NestedKey, statistics: Mapping[NestedKey, Moments]) -> Moments:
        moments = statistics.get(key)
        if moments is None:
            raise RuntimeError(
                f"{type(self).__name__} has no statistics of {key!r} yet: write data to the buffer, or call update()"
            )
        return moments

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.training:
            return self.on_step(next_tensordict)
        return self._normalize(next_tensordict, self._statistics)

    def on_step(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Learn from the step, unless frozen, and normalize it. A failure of either changes nothing."""
        if self.frozen:
            return self._normalize(next_tensordict, self._statistics)
        with _UPDATES:
            updated = self._updated(next_tensordict)
            self._normalize(next_tensordict, updated)
            self._statistics = updated
        return next_tensordict

    def _normalize(self, data: TensorDictBase, statistics: Mapping[NestedKey, Moments]) -> TensorDictBase:
        """Normalize all entries by the same statistics: a thread may be updating them."""
        normalized = {}
        for key, value in self._values(data, self.in_keys):
            moments = self._moments(key, statistics)
            self._check_shape(key, moments, value.shape[self._dims(data.ndim) :])
            normalized[key] = self._normalized(moments, _as_floating(value))
        names = zip(self.in_keys, self.out_keys, strict=True)
        put(type(self).__name__, data, [(name, normalized[key]) for key, name in names if key in normalized])
        return data

    def _normalized(self, moments: Moments, value: Tensor) -> Tensor:
        # The mean is two numbers: one alone is off by more than small variances if it is large.
        dtype = torch.promote_types(value.dtype, torch.float32)
        kind = dtype, value.device, self.eps
        if kind not in moments.ready:
            with torch.inference_mode(False):  # gradients may be asked of the next values
                mean = moments.mean.to(value.device)
                deviation = self._deviation(moments.variance).to(value.device, dtype)
                near = mean.to(dtype)
                moments.ready[kind] = near, (mean - near).to(dtype), deviation
        near, rest, deviation = (_laid_out(statistic, value) for statistic in moments.ready[kind])
        return (value.to(dtype) - near).sub_(rest).div_(deviation).to(value.dtype)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self.frozen:
            self.update(tensordict)
        return tensordict

    def snapshot(self) -> Any:
        return self._statistics

    def restore(self, snapshot: Any) -> None:
        with _UPDATES:
            self._statistics = snapshot

    def freeze(self) -> Self:
        """Change the statistics in no other way than by `update`."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Update the statistics again."""
        self.frozen = False
        return self

    def to_observation_norm(self) -> Compose | ObservationNorm:
        """A fixed transform with the current statistics; a chain for several entries.

        RuntimeError where an entry has no statistics yet. Of entries that may be missing one is enough.
        """
        statistics = self._statistics
        dtype = torch.get_default_dtype()
        fixed = []
        for key, name in zip(self.in_keys, self.out_keys, strict=True):
            if key not in statistics and self.missing_tolerance and statistics:
                continue
            moments = self._moments(key, statistics)
            loc = moments.mean.to(dtype)
            scale = self._deviation(moments.variance).to(dtype)
            fixed.append(ObservationNorm(loc, scale, [key], [name], standard_normal=True, eps=self.eps))
        return fixed[0] if len(fixed) == 1 else Compose(*fixed)

    @property
    def loc(self) -> TensorDict:
        """The means, in the default dtype."""
        return TensorDict(
            {key: moments.mean.to(torch.get_default_dtype()) for key, moments in self._statistics.items()}
        )

    @property
    def scale(self) -> TensorDict:
        """The divisors, in the default dtype."""
        deviations = {key: self._deviation(moments.variance) for key, moments in self._statistics.items()}
        return TensorDict({key: deviation.to(torch.get_default_dtype()) for key, deviation in deviations.items()})

    def get_extra_state(self) -> dict[str, Any]:
        """The statistics by entry."""
        items = self._statistics.items()
        return {
            repr(key): {"weight": moments.weight, "mean": moments.mean, "squares": moments.squares}
            for key, moments in items
        }

    def set_extra_state(self, state: Any) -> None:
        """Load statistics. TypeError or ValueError for wrong ones, and for those of other entries."""
        names = {repr(key): key for key in self.in_keys}
        if not isinstance(state, Mapping) or not set(state) <= set(names):
            raise ValueError(f"statistics of {', '.join(names)} are needed, got {state!r}")
        loaded = {}
        for name, fields in state.items():
            moments = Moments(**fields)
            key = names[name]
            alike = (
                moments.mean.dtype == moments.squares.dtype == torch.float64
                and moments.mean.shape == moments.squares.shape
            )
            if not alike or not moments.is_finite() or not moments.weight > 0 or bool((moments.squares < 0).any()):
                raise ValueError(f"statistics of {name} are finite float64 tensors of one shape, got {fields!r}")
            self._check_shape(key, self._statistics.get(key), moments.mean.shape)
            loaded[key] = Moments(moments.weight, moments.mean.clone(), moments.squares.clone())
        with _UPDATES:
            self._statistics = loaded

    def __repr__(self) -> str:
        kind = f"decay={self.decay:4.4f},eps={self.eps:4.4f}"
        return f"{type(self).__name__}({kind}, in_keys={self.in_keys}, out_keys={self.out_keys})"


class VecNorm(RunningNorm):
    """A `RunningNorm` whose `decay` is for each update: each multiplies the weight of all earlier values by it.

    The divisor is sqrt(max(variance, eps)). Arguments as for `RunningNorm`. Without `in_keys` those of "observation" and
    "reward" that there are.
    """

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, *, decay: float = 0.9999, eps: float = 1e-4
    ) -> None:
        super().__init__(["observation", "reward"] if in_keys is None else in_keys, out_keys, decay=decay, eps=eps)
        self.set_missing_tolerance(in_keys is None)

    def _weights(self, count: float) -> tuple[float, float]:
        return self.decay, 1.0

    def _deviation(self, variance: Tensor) -> Tensor:
        return variance.clamp_min(self.eps).sqrt().clamp_min(self.eps)


class VecNormV2(RunningNorm):
    """A `RunningNorm` whose `decay` is for each value: each multiplies the weight of all values of earlier updates by it.

    The divisor is max(standard deviation, eps).

    Args:
        in_keys, out_keys, decay, eps: as for `RunningNorm`.
        reduce_batch_dims: one mean and variance for all elements of a batch. Otherwise each element has its own, and all
            batches must have one shape.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys = None,
        *,
        decay: float = 0.9999,
        eps: float = 1e-4,
        reduce_batch_dims: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, decay=decay, eps=eps)
        self.reduce_batch_dims = reduce_batch_dims

    def _dims(self, batch_dims: int) -> int:
        return batch_dims if self.reduce_batch_dims else 0

    def _weights(self, count: float) -> tuple[float, float]:
        past = self.decay**count
        return past, 1.0 if self.decay == 1 else (1 - past) / count

    def _deviation(self, variance: Tensor) -> Tensor:
        return variance.sqrt().clamp_min(self.eps)


def _laid_out(statistic: Tensor, value: Tensor) -> Tensor:
    """A location or scale on the device and in the memory order of its values: 4 times as fast for channels last."""
    statistic = statistic.to(value.device) if statistic.ndim else statistic  # numbers go with values on any device
    if value.is_contiguous():
        return statistic
    while statistic.ndim and statistic.shape[0] == 1:
        statistic = statistic.squeeze(0)
    if statistic.ndim < 2 or math.prod(value.shape[-statistic.ndim :]) * 4 > value.numel():
        return statistic
    return torch.empty_like(
        value[(0,) * (value.ndim - statistic.ndim)], dtype=statistic.dtype, requires_grad=False
    ).copy_(statistic)


def _as_floating(value: Tensor) -> Tensor:
    """Integers and bools in the default dtype; other values as they are."""
    return value if value.is_floating_point() or value.is_complex() else value.to(torch.get_default_dtype())


def _real(key: NestedKey, value: Any) -> Tensor:
    """The value. TypeError for one that is no tensor of real numbers."""
    if not isinstance(value, Tensor) or value.is_complex():
        raise TypeError(f"{key!r}: a tensor of real numbers is needed, got {type(value).__name__}")
    return value

"""Transforms that normalize by a running mean and standard deviation of entries."""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms import affine
from interop.transforms.chain import Compose
from interop.transforms.entries import as_floating, expect_tensordict, put
from interop.transforms.moments import Moments
from interop.transforms.normalization import ObservationNorm
from interop.transforms.transform import Keys, Transform

_FIELDS = ("weight", "mean", "squares")
_BOTH = ["observation", "reward"]
Statistics = Mapping[NestedKey, Moments]


class RunningNorm(Transform):
    """Statistics of each entry, replaced as a whole so that readers need no lock. A subclass says how values count."""

    keeps = learns_from_steps = True

    def __init__(self, in_keys: Keys, out_keys: Keys, lock: Any, decay: float, eps: float, shared: Any) -> None:
        super().__init__(in_keys, in_keys if out_keys is None else out_keys)
        if shared is not None:
            raise ValueError(
                "shared_td and shared_data must be None: statistics are saved and loaded by state_dict(), not shared"
            )
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {decay}")
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be at least 0, got {eps}")
        self.lock = threading.Lock() if lock is None else lock
        self.decay, self.eps, self.frozen = decay, eps, False
        self._statistics: Statistics = {}  # never changed in place
        self._hint = ""  # at the end of the error for values of other shapes

    def _dims(self, key: NestedKey, value: Tensor, batch_dims: int) -> int:
        """The number of leading dims of an entry that the statistics are over."""
        raise NotImplementedError

    def _weights(self, count: float) -> tuple[float, float]:
        """The factor for the statistics so far when so many values are added, and for each of these values."""
        raise NotImplementedError

    def _deviation(self, variance: Tensor) -> Tensor:
        """The divisor."""
        raise NotImplementedError

    def update(self, tensordict: TensorDictBase) -> None:
        """Add the entries of a tensordict to the statistics, frozen or not.

        KeyError for a missing entry, TypeError for one that is no tensor of real numbers, ValueError for one of another
        shape than before or with infinities or NaNs. The statistics have not changed then.
        """
        with self.lock:
            self._statistics = self._updated(tensordict)

    def _updated(self, data: TensorDictBase) -> Statistics:
        updated = dict(self._statistics)
        for key, value in self._values(data, dict.fromkeys(self.in_keys)):  # a key that is there twice counts once
            kept, dims = updated.get(key), self._dims(key, value, data.ndim)
            shape = value.shape[dims:]
            self._check_shape(key, kept, shape)
            if not value.numel():
                continue
            new = Moments.of(value.detach().reshape(-1, *shape), [0] if dims else [])
            if not new.is_finite():
                raise ValueError(f"{type(self).__name__}: {key!r} has infinities or NaNs, or squares that overflow")
            past, each = self._weights(new.weight)
            new = Moments(new.weight, new.mean.reshape(shape), new.squares.reshape(shape)).times(each)
            updated[key] = new if kept is None else kept.to(value.device).times(past).merged(new)
        return updated

    def _values(self, data: TensorDictBase, keys: Any) -> Iterator[tuple[NestedKey, Tensor]]:
        """The entries, without those that may be missing. TypeError for one that is no tensor of real numbers."""
        expect_tensordict(type(self).__name__, data)
        for key in keys:
            value = self._get(data, key)
            if value is not None and (not isinstance(value, Tensor) or value.is_complex()):
                raise TypeError(f"{type(self).__name__}: {key!r}: a tensor of real numbers is needed")
            if value is not None:
                yield key, value

    def _check_shape(self, key: NestedKey, kept: Moments | None, shape: Sequence[int]) -> None:
        if kept is not None and tuple(shape) != tuple(kept.mean.shape):
            raise ValueError(
                f"{type(self).__name__}: {key!r} has values of shape {list(shape)}, its statistics are of "
                f"{list(kept.mean.shape)}{self._hint}"
            )

    def _found(self, key: NestedKey, statistics: Statistics) -> Moments:
        kept = statistics.get(key)
        if kept is None:
            raise RuntimeError(
                f"{type(self).__name__} has no statistics of {key!r} yet: write data to the buffer, or call update()"
            )
        return kept

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.training and not self.frozen:
            return self._learn(next_tensordict)
        return self._normalize(next_tensordict, self._statistics)

    def on_step(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Learn from the step, unless frozen, and normalize it."""
        return self._call(next_tensordict) if self.frozen else self._learn(next_tensordict)

    def _learn(self, data: TensorDictBase) -> TensorDictBase:
        """Update the statistics and normalize; a failure of either changes nothing."""
        with self.lock:
            updated = self._updated(data)
            self._normalize(data, updated)
            self._statistics = updated
        return data

    def _normalize(self, data: TensorDictBase, statistics: Statistics) -> TensorDictBase:
        """Normalize all entries by the same statistics: a thread may be updating them."""
        made = {}
        for key, value in self._values(data, dict.fromkeys(self.in_keys)):
            kept = self._found(key, statistics)
            self._check_shape(key, kept, value.shape[self._dims(key, value, data.ndim) :])
            made[key] = self._normalized(kept, as_floating(value))
        names = zip(self.in_keys, self.out_keys, strict=True)
        put(type(self).__name__, data, [(name, made[key]) for key, name in names if key in made])
        return data

    def _normalized(self, kept: Moments, value: Tensor) -> Tensor:
        # The mean is two numbers: one alone is off by more than small variances where it is large.
        dtype = torch.promote_types(value.dtype, torch.float32)
        of = dtype, value.device, self.eps
        if of not in kept.ready:
            with torch.inference_mode(False):  # gradients may be asked of the next values
                on = kept.to(value.device)
                near = on.mean.to(dtype)
                kept.ready[of] = near, (on.mean - near).to(dtype), self._deviation(on.variance).to(dtype)
        near, rest, deviation = (affine.in_memory_order(each, value) for each in kept.ready[of])
        return (value.to(dtype) - near).sub_(rest).div_(deviation).to(value.dtype)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self.frozen:
            self.update(tensordict)
        return tensordict

    def _kept(self) -> Any:
        return self._statistics

    def _keep(self, kept: Any) -> None:
        with self.lock:
            self._statistics = kept

    def denorm(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A copy of a tensordict where `in_keys` are what `out_keys` were normalized from. Tensors are shared.

        KeyError for missing entries, RuntimeError where there are no statistics.
        """
        names, statistics = dict(zip(self.out_keys, self.in_keys, strict=True)), self._statistics
        out = tensordict.copy()
        for name, value in self._values(tensordict, names):
            kept, value = self._found(names[name], statistics).to(value.device), as_floating(value)
            wide = value.double() * self._deviation(kept.variance) + kept.mean
            out.set(names[name], wide.to(value.dtype))
        return out

    def freeze(self) -> Self:
        """Keep the statistics as they are, but for `update`."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Update the statistics again."""
        self.frozen = False
        return self

    def frozen_copy(self) -> Self:
        """A frozen copy that is part of nothing. RuntimeError where there are no statistics."""
        if not self._statistics:
            raise RuntimeError(f"{type(self).__name__} has no statistics yet: a frozen copy would never have any")
        return self.clone().freeze()

    def to_observation_norm(self) -> Compose | ObservationNorm:
        """A transform that normalizes by the statistics of now, which no buffer changes; a chain for several entries."""
        loc, scale, names = self.loc, self.scale, zip(self.in_keys, self.out_keys, strict=True)
        fixed = [
            ObservationNorm(loc[key], scale[key], [key], [name], standard_normal=True, eps=self.eps)
            for key, name in names
            if key in loc.keys(True)
        ]
        return fixed[0] if len(fixed) == 1 else Compose(*fixed)

    @property
    def loc(self) -> TensorDict:
        """The means, in the default dtype."""
        return TensorDict({key: kept.mean.to(torch.get_default_dtype()) for key, kept in self._all().items()})

    @property
    def scale(self) -> TensorDict:
        """The divisors, in the default dtype."""
        deviations = {key: self._deviation(kept.variance) for key, kept in self._all().items()}
        return TensorDict({key: each.to(torch.get_default_dtype()) for key, each in deviations.items()})

    @property
    def standard_normal(self) -> bool:
        """True: `loc` is subtracted, and `scale` divides."""
        return True

    def _all(self) -> Statistics:
        """The statistics of each entry, without those that may be missing."""
        statistics = self._statistics
        keys = [key for key in self.in_keys if key in statistics or not self.missing_tolerance]
        return {key: self._found(key, statistics) for key in keys}

    def get_extra_state(self) -> dict[str, Any]:
        """The statistics by entry."""
        kept = self._statistics
        return {repr(key): {name: getattr(each, name) for name in _FIELDS} for key, each in kept.items()}

    def set_extra_state(self, state: Any) -> None:
        """Load statistics. ValueError for wrong ones, or those of other entries."""
        names = {repr(key): key for key in self.in_keys}
        if not isinstance(state, Mapping) or not set(state) <= set(names):
            raise ValueError(f"statistics of {', '.join(names)} are needed, got {state!r}")
        loaded = {names[name]: _moments_of(name, fields) for name, fields in state.items()}
        for key, each in loaded.items():
            self._check_shape(key, self._statistics.get(key), each.mean.shape)
        with self.lock:
            self._statistics = loaded

    def clone(self) -> Self:
        """A copy with statistics of its own, part of nothing."""
        made = super().clone()
        made.lock = threading.Lock()
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        kind = f"decay={self.decay:4.4f},eps={self.eps:4.4f}"
        return f"{type(self).__name__}({kind}, in_keys={self.in_keys}, out_keys={self.out_keys})"


class VecNorm(RunningNorm):
    """Subtracts a running mean and divides by a running standard deviation, sqrt(max(variance, eps)).

    In a buffer the statistics are of the data that is written: each `extend` or `add` updates them and stores the values as
    they are; reading normalizes by the statistics of now, and changes nothing. A write that fails changes nothing. Changes
    that transforms before this one make on reading only, as ToTensorImage, are not in the statistics: `freeze()` this one
    and call `update()` with data that was read, or change the data when it is stored.

    Elsewhere `forward` updates the statistics, while in training mode and not frozen, and normalizes; `inv` updates them.

    Each update multiplies the weight of all values before it by `decay`, whatever its size. The statistics are kept in
    float64, merged without subtracting large numbers, and are part of `state_dict()` and of checkpoints. Many threads may
    use one. As it keeps state, it can be part of one buffer only, not inverted, and `buffer[i] = rows` is refused: use
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
        older = cls(*args, **kwargs)
        if older.shapes is not None:
            raise ValueError("shapes are not taken with new_api: statistics are over the batch dims")
        newer = VecNormV2(older.in_keys, older.out_keys, lock=older.lock, decay=older.decay, eps=older.eps)
        newer.set_missing_tolerance(older.missing_tolerance)
        return newer

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
        super().__init__(_BOTH if in_keys is None else in_keys, out_keys, lock, decay, eps, shared_td)
        if shapes is not None and len(shapes) != len(self.in_keys):
            raise ValueError(f"shapes must be one for each of {self.in_keys}, got {shapes}")
        self.shapes = None if shapes is None else [torch.Size(shape) for shape in shapes]
        self.set_missing_tolerance(in_keys is None)

    def _dims(self, key: NestedKey, value: Tensor, batch_dims: int) -> int:
        if self.shapes is None:
            return batch_dims
        shape = self.shapes[self.in_keys.index(key)]
        dims = value.ndim - len(shape)
        if dims < 0 or value.shape[dims:] != shape:
            raise ValueError(f"VecNorm: {key!r} is of shape {list(value.shape)}, which does not end in {list(shape)}")
        return dims

    def _weights(self, count: float) -> tuple[float, float]:
        return self.decay, 1.0

    def _deviation(self, variance: Tensor) -> Tensor:
        return variance.clamp_min(self.eps).sqrt().clamp_min(self.eps)


class VecNormV2(RunningNorm):
    """As `VecNorm`, but `decay` is for each value, not for each update, and the divisor is max(standard deviation, eps).

    Each value multiplies the weight of those before it by `decay`; values of one update count alike.

    Args:
        in_keys, out_keys, lock, decay, shared_data: as for `VecNorm`; `in_keys` must be given.
        stateful: must be True: statistics are kept here, not in the data.
        eps: least standard deviation.
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
        if not stateful:
            raise ValueError("stateful=False is for environments that carry the statistics in their data")
        super().__init__(in_keys, out_keys, lock, decay, eps, shared_data)
        self.stateful, self.reduce_batch_dims = True, reduce_batch_dims
        self._hint = "" if reduce_batch_dims else ": batches of other shapes need reduce_batch_dims=True"

    def _dims(self, key: NestedKey, value: Tensor, batch_dims: int) -> int:
        return batch_dims if self.reduce_batch_dims else 0

    def _weights(self, count: float) -> tuple[float, float]:
        past = self.decay**count
        return past, 1.0 if self.decay == 1 else (1 - past) / count

    def _deviation(self, variance: Tensor) -> Tensor:
        return variance.sqrt().clamp_min(self.eps)


def _moments_of(name: str, fields: Any) -> Moments:
    """Saved statistics of an entry. ValueError for wrong ones."""
    if not isinstance(fields, Mapping) or set(fields) != set(_FIELDS):
        raise ValueError(f"statistics of {name} are {', '.join(_FIELDS)}, got {fields!r}")
    weight, mean, squares = (fields[field] for field in _FIELDS)
    tensors = all(isinstance(each, Tensor) and each.dtype == torch.float64 for each in (mean, squares))
    if not tensors or mean.shape != squares.shape or not isinstance(weight, float) or not 0 < weight < math.inf:
        raise ValueError(f"statistics of {name} are a weight and float64 tensors of one shape, got {fields!r}")
    found = Moments(weight, mean.detach().clone(), squares.detach().clone())
    if not found.is_finite() or bool((squares < 0).any()):
        raise ValueError(f"statistics of {name} are finite, and squares are not negative: got {fields!r}")
    return found

"""A running mean and standard deviation of entries: what all forms of normalizing by them have in common."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms import affine
from interop.transforms.chain import Compose
from interop.transforms.entries import as_floating
from interop.transforms.moments import Moments
from interop.transforms.normalization import ObservationNorm
from interop.transforms.setting import expect_tensordict, put
from interop.transforms.transform import Keys, Transform

_FIELDS = ("weight", "mean", "squares")
Statistics = Mapping[NestedKey, Moments]


class RunningNorm(Transform):
    """What both forms have in common: statistics of each entry, kept as a whole so that readers need no lock."""

    keeps = True

    def __init__(self, in_keys: Keys, out_keys: Keys, lock: Any, decay: float, eps: float) -> None:
        super().__init__(in_keys, in_keys if out_keys is None else out_keys)
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {decay}")
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be at least 0, got {eps}")
        self.lock = threading.Lock() if lock is None else lock
        self.decay, self.eps, self.frozen = decay, eps, False
        self._statistics: Statistics = {}  # never changed: another one takes its place
        self._ready: dict[NestedKey, Any] = {}

    # ------------------------------------------------------------------ what the forms differ in

    def _dims(self, key: NestedKey, value: Tensor, batch_dims: int) -> int:
        """How many leading dims of an entry the statistics are over."""
        raise NotImplementedError

    def _shares(self, count: float) -> tuple[float, float]:
        """What statistics so far count for when so many values are added, and what each of these counts for."""
        raise NotImplementedError

    def _deviation(self, variance: Tensor) -> Tensor:
        """What to divide by."""
        raise NotImplementedError

    # ------------------------------------------------------------------ statistics

    def update(self, tensordict: TensorDictBase) -> None:
        """Take the entries of a tensordict into the statistics, frozen or not.

        KeyError for a missing entry, TypeError for one that is no tensor of real numbers, ValueError for one of another
        shape than before or with infinities or NaNs. The statistics are what they were then.
        """
        with self.lock:
            self._statistics = self._updated(tensordict)

    def _updated(self, data: TensorDictBase) -> Statistics:
        """The statistics with those of a tensordict."""
        expect_tensordict(type(self).__name__, data)
        updated = dict(self._statistics)
        for key in dict.fromkeys(self._in_keys):  # what is read twice counts once
            value = self._entry(data, key)
            found = None if value is None else self._moments(key, value, data.ndim)
            if found is None:
                continue
            past, each = self._shares(found.weight)
            kept, found = updated.get(key), found.scaled(each)
            updated[key] = found if kept is None else kept.to(found.mean.device).scaled(past).merged(found)
        return updated

    def _moments(self, key: NestedKey, value: Tensor, batch_dims: int) -> Moments | None:
        """Those of an entry; None for an empty one."""
        dims = self._dims(key, value, batch_dims)
        shape = value.shape[dims:]
        self._check_shape(key, self._statistics.get(key), shape)
        if not value.numel():
            return None
        found = Moments.of(value.detach(), range(dims)).shaped(shape)
        if not found.is_finite():
            raise ValueError(f"{type(self).__name__}: {key!r} has infinities or NaNs, or squares that overflow")
        return found

    def _check_shape(self, key: NestedKey, kept: Moments | None, shape: Sequence[int]) -> None:
        if kept is not None and tuple(shape) != tuple(kept.mean.shape):
            raise ValueError(
                f"{type(self).__name__}: {key!r} has values of shape {list(shape)}, its statistics are of "
                f"{list(kept.mean.shape)}"
            )

    def _entry(self, data: TensorDictBase, key: NestedKey) -> Tensor | None:
        """A tensor of real numbers; None for a missing one that may be missing."""
        value = self._get(data, key)
        if value is not None and (not isinstance(value, Tensor) or value.is_complex()):
            raise TypeError(f"{type(self).__name__}: {key!r}: a tensor of real numbers is needed")
        return value

    def _found(self, key: NestedKey, statistics: Statistics) -> Moments:
        kept = statistics.get(key)
        if kept is None:
            raise RuntimeError(
                f"{type(self).__name__} has no statistics of {key!r} yet: write data to the buffer, or call update()"
            )
        return kept

    # ------------------------------------------------------------------ as a transform

    @dispatch(source="in_keys", dest="out_keys")
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Normalize each of `in_keys` into the one of `out_keys`, in place; update the statistics before, in training mode.

        RuntimeError where there are none.
        """
        return self._call(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.training and not self.frozen:
            return self._learn(next_tensordict)
        return self._normalize(next_tensordict, self._statistics)

    def _learn(self, data: TensorDictBase) -> TensorDictBase:
        """Update the statistics and normalize; a failure of either changes nothing."""
        with self.lock:
            updated = self._updated(data)
            self._normalize(data, updated)
            self._statistics = updated
        return data

    def _normalize(self, data: TensorDictBase, statistics: Statistics) -> TensorDictBase:
        """Write all entries by the same statistics: a thread may be updating them."""
        expect_tensordict(type(self).__name__, data)
        ready = []
        for key, name in zip(self._in_keys, self._out_keys, strict=True):
            value = self._entry(data, key)
            if value is not None:
                ready.append((name, self._normalized(key, value, data.ndim, statistics)))
        put(type(self).__name__, data, ready)
        return data

    def _normalized(self, key: NestedKey, value: Tensor, batch_dims: int, statistics: Statistics) -> Tensor:
        kept = self._found(key, statistics)
        self._check_shape(key, kept, value.shape[self._dims(key, value, batch_dims) :])
        value = as_floating(value)
        wide = torch.promote_types(value.dtype, torch.float32)
        near, rest, deviation = self._numbers(key, kept, wide, value.device)
        if not value.is_contiguous():
            near, rest, deviation = (affine.in_order(each, value) for each in (near, rest, deviation))
        return (value.to(wide) - near).sub_(rest).div_(deviation).to(value.dtype)

    def _numbers(
        self, key: NestedKey, kept: Moments, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The mean as two numbers of a dtype, and the deviation; made anew where statistics have changed.

        One number alone is off by more than small variances where the mean is large.
        """
        of, made = (dtype, device, self.eps), self._ready.get(key)
        if made is None or made[0] is not kept or made[1] != of:
            with torch.inference_mode(False):  # gradients may be asked of the next values
                mean = kept.mean.to(device)
                near = mean.to(dtype)
                numbers = near, (mean - near).to(dtype), self._deviation(kept.variance.to(device)).to(dtype)
            made = self._ready[key] = kept, of, numbers
        return made[2]

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
        expect_tensordict(type(self).__name__, tensordict)
        out, statistics = tensordict.copy(), self._statistics
        for key, name in zip(self._in_keys, self._out_keys, strict=True):
            value = self._entry(tensordict, name)
            if value is None:
                continue
            kept, value = self._found(key, statistics).to(value.device), as_floating(value)
            wide = value.double() * self._deviation(kept.variance) + kept.mean
            out.set(key, wide.to(value.dtype))
        return out

    # ------------------------------------------------------------------ fixed forms

    def freeze(self) -> Self:
        """Have the statistics stay as they are, but for `update`."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Have the statistics be updated again."""
        self.frozen = False
        return self

    def frozen_copy(self) -> Self:
        """A copy that is frozen, and part of nothing. RuntimeError where there are no statistics."""
        if not self._statistics:
            raise RuntimeError(f"{type(self).__name__} has no statistics yet: a frozen copy would never have any")
        return self.clone().freeze()

    def to_observation_norm(self) -> Compose | ObservationNorm:
        """What normalizes by the statistics of now, which no buffer changes; a chain for several entries."""
        kept = self._statistics
        locs, scales = self._locs(kept), self._scales(kept)
        fixed = [
            ObservationNorm(locs[key], scales[key], [key], [name], standard_normal=True, eps=self.eps)
            for key, name in zip(self.in_keys, self.out_keys, strict=True)
            if key in locs
        ]
        return fixed[0] if len(fixed) == 1 else Compose(*fixed)

    @property
    def loc(self) -> TensorDict:
        """The means, in the default dtype."""
        return TensorDict(self._locs(self._statistics))

    @property
    def scale(self) -> TensorDict:
        """What values are divided by, in the default dtype."""
        return TensorDict(self._scales(self._statistics))

    @property
    def standard_normal(self) -> bool:
        """True: `loc` is subtracted, and `scale` divides."""
        return True

    def _locs(self, statistics: Statistics) -> dict[NestedKey, Tensor]:
        dtype = torch.get_default_dtype()
        return {key: each.mean.to(dtype) for key, each in self._of_all(statistics).items()}

    def _scales(self, statistics: Statistics) -> dict[NestedKey, Tensor]:
        dtype = torch.get_default_dtype()
        return {key: self._deviation(each.variance).to(dtype) for key, each in self._of_all(statistics).items()}

    def _of_all(self, statistics: Statistics) -> Statistics:
        """Those of all entries; without those that may be missing."""
        keys = [key for key in self._in_keys if key in statistics or not self._missing_tolerance]
        return {key: self._found(key, statistics) for key in keys}

    # ------------------------------------------------------------------ state

    def get_extra_state(self) -> dict[str, Any]:
        """The statistics by entry."""
        kept = self._statistics
        return {repr(key): {name: getattr(each, name) for name in _FIELDS} for key, each in kept.items()}

    def set_extra_state(self, state: Any) -> None:
        """Take those of another. ValueError for what are no statistics of these entries."""
        names = {repr(key): key for key in self.in_keys}
        if not isinstance(state, Mapping) or not set(state) <= set(names):
            raise ValueError(f"statistics of {', '.join(names)} are needed, got {state!r}")
        taken = {}
        for name, fields in state.items():
            if not isinstance(fields, Mapping) or set(fields) != set(_FIELDS):
                raise ValueError(f"statistics of {name} are {', '.join(_FIELDS)}, got {fields!r}")
            weight, mean, squares = fields["weight"], _float64(name, fields["mean"]), _float64(name, fields["squares"])
            if not isinstance(weight, float) or not 0 < weight < math.inf or mean.shape != squares.shape:
                raise ValueError(f"statistics of {name} are a weight and tensors of one shape, got {fields!r}")
            made, key = Moments(weight, mean, squares), names[name]
            if not made.is_finite() or bool((squares < 0).any()):
                raise ValueError(f"statistics of {name} are finite, and squares are not negative: got {fields!r}")
            self._check_shape(key, self._statistics.get(key), made.mean.shape)
            taken[key] = made
        with self.lock:
            self._statistics = taken

    def clone(self) -> Self:
        """A copy with statistics of its own, part of nothing."""
        made = super().clone()
        made.lock, made._ready = threading.Lock(), {}
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "lock": None, "_ready": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        kind = f"decay={self.decay:4.4f},eps={self.eps:4.4f}"
        return f"{type(self).__name__}({kind}, in_keys={self.in_keys}, out_keys={self.out_keys})"


def _float64(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        raise ValueError(f"statistics of {name} are float64 tensors, got {value!r}")
    return value.detach().clone()

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

from interop.transforms.chain import Compose
from interop.transforms.entries import as_floating
from interop.transforms.moments import Moments
from interop.transforms.normalization import ObservationNorm
from interop.transforms.setting import expect_tensordict, put
from interop.transforms.transform import Keys, Transform

_FIELDS = ("weight", "mean", "squares")


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
        self._statistics: dict[NestedKey, Moments] = {}

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
            updated = dict(self._statistics)
            for key, value in self._entries(tensordict, self.in_keys):
                found = self._moments(key, value, tensordict.ndim)
                if found is None:
                    continue
                if (kept := updated.get(key)) is None:
                    updated[key] = found.scaled(self._shares(found.weight)[1])
                    continue
                kept = kept.to(found.mean.device)
                past, each = self._shares(found.weight)
                updated[key] = kept.scaled(past).merged(found.scaled(each))
            self._statistics = updated

    def _moments(self, key: NestedKey, value: Tensor, batch_dims: int) -> Moments | None:
        """Those of an entry; None for an empty one."""
        dims = self._dims(key, value, batch_dims)
        shape = value.shape[dims:]
        self._check_shape(key, shape)
        if not value.numel():
            return None
        found = Moments.of(value.detach(), range(dims)).shaped(shape)
        if not found.is_finite():
            raise ValueError(f"{type(self).__name__}: {key!r} has infinities or NaNs, or squares that overflow")
        return found

    def _check_shape(self, key: NestedKey, shape: Sequence[int]) -> None:
        kept = self._statistics.get(key)
        if kept is not None and tuple(shape) != tuple(kept.mean.shape):
            raise ValueError(
                f"{type(self).__name__}: {key!r} has values of shape {list(shape)}, its statistics are of "
                f"{list(kept.mean.shape)}"
            )

    def _entries(self, data: TensorDictBase, keys: Sequence[NestedKey]) -> list[tuple[NestedKey, Tensor]]:
        """Those of `in_keys` that there are, found under other names."""
        expect_tensordict(type(self).__name__, data)
        found = []
        for key, name in zip(self.in_keys, keys, strict=True):
            value = self._get(data, name)
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.is_complex():
                raise TypeError(f"{type(self).__name__}: {name!r}: a tensor of real numbers is needed")
            found.append((key, value))
        return found

    def _found(self, key: NestedKey) -> Moments:
        kept = self._statistics.get(key)
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
            self.update(next_tensordict)
        names = dict(zip(self.in_keys, self.out_keys, strict=True))
        ready = [
            (names[key], self._normalized(key, value, next_tensordict.ndim))
            for key, value in self._entries(next_tensordict, self.in_keys)
        ]
        put(type(self).__name__, next_tensordict, ready)
        return next_tensordict

    def _normalized(self, key: NestedKey, value: Tensor, batch_dims: int) -> Tensor:
        kept = self._found(key)
        self._check_shape(key, value.shape[self._dims(key, value, batch_dims) :])
        value = as_floating(value)
        wide = torch.promote_types(value.dtype, torch.float32)
        mean, deviation = kept.mean.to(value.device), self._deviation(kept.variance.to(value.device))
        near = mean.to(wide)
        # The mean as two numbers of the dtype: one alone is off by more than small variances where it is large.
        apart = (value.to(wide) - near) - (mean - near).to(wide)
        return (apart / deviation.to(wide)).to(value.dtype)

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
        out = tensordict.copy()
        for key, value in self._entries(tensordict, self.out_keys):
            kept, value = self._found(key).to(value.device), as_floating(value)
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
        fixed = [
            ObservationNorm(self.loc[key], self.scale[key], [key], [name], standard_normal=True, eps=self.eps)
            for key, name in zip(self.in_keys, self.out_keys, strict=True)
            if key in self._statistics or not self.missing_tolerance
        ]
        return fixed[0] if len(fixed) == 1 else Compose(*fixed)

    @property
    def loc(self) -> TensorDict:
        """The means, in the default dtype."""
        dtype = torch.get_default_dtype()
        return TensorDict({key: self._found(key).mean.to(dtype) for key in self._of_all()})

    @property
    def scale(self) -> TensorDict:
        """What values are divided by, in the default dtype."""
        dtype = torch.get_default_dtype()
        return TensorDict({key: self._deviation(self._found(key).variance).to(dtype) for key in self._of_all()})

    @property
    def standard_normal(self) -> bool:
        """True: `loc` is subtracted, and `scale` divides."""
        return True

    def _of_all(self) -> list[NestedKey]:
        return [key for key in self.in_keys if key in self._statistics or not self.missing_tolerance]

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
            made = Moments(weight, mean, squares)
            self._check_shape(names[name], made.mean.shape)
            taken[names[name]] = made
        with self.lock:
            self._statistics = taken

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


def _float64(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        raise ValueError(f"statistics of {name} are float64 tensors, got {value!r}")
    return value.detach().clone()

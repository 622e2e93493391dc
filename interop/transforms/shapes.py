"""Other dims for the same numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.numbers import whole
from interop.transforms.entries import EntriesTransform
from interop.transforms.setting import around, expect_tensor, expect_tensordict
from interop.transforms.transform import Keys, Transform, as_keys


class Reshaping(EntriesTransform):
    """One that gives tensors other dims, each by itself; the dims that count from the end are those of an item.

    ValueError, naming the entry, for one that has not got the dims or whose batch dims would change: nothing changes then.
    """

    _least = _least_inv = 0
    """How many dims of its own an item has to have, read and written, so that no other change places."""

    def _each(self, data: Any, sources: Sequence[NestedKey], destinations: Sequence[NestedKey], function: Any) -> Any:
        expect_tensordict(type(self).__name__, data)
        least = self._least_inv if function == self._inv_apply_transform else self._least
        batch = (
            {source: around(type(self).__name__, data, source).batch_dims for source in sources} if least > 0 else {}
        )

        def reshaped(key: NestedKey, value: Tensor) -> Tensor:
            if value.ndim < batch.get(key, 0) + least:
                dims = max(value.ndim - batch[key], 0)
                raise IndexError(f"items have {dims} dims, behind {batch[key]} batch dims, and {least} are needed")
            return function(value)

        return super()._each(data, sources, destinations, reshaped)

    def _made(self, key: NestedKey, function: Any, value: Any) -> Any:
        expect_tensor(type(self).__name__, key, value)
        try:
            return function(key, value)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"{self} does not fit {key!r} of shape {list(value.shape)}: {error}") from error


class FlattenObservation(Reshaping):
    """Neighbouring dims as one.

    Args:
        first_dim, last_dim: the first and the last of them.
        in_keys: entries, ["pixels"] by default.
        out_keys: where the results go; `in_keys` by default.
        allow_positive_dim: let dims count from the front, batch dims included.
    """

    def __init__(
        self,
        first_dim: int,
        last_dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        allow_positive_dim: bool = False,
    ) -> None:
        super().__init__(["pixels"] if in_keys is None else in_keys, out_keys)
        self.first_dim = _dim("first_dim", first_dim, allow_positive_dim)
        self.last_dim = _dim("last_dim", last_dim, allow_positive_dim)
        if (self.first_dim < 0) == (self.last_dim < 0) and self.first_dim > self.last_dim:
            raise ValueError(f"first_dim must not be behind last_dim, got {first_dim} and {last_dim}")
        self._least = max(-self.first_dim, -self.last_dim)

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.flatten(self.first_dim, self.last_dim)

    def __repr__(self) -> str:
        dims = f"first_dim={self.first_dim}, last_dim={self.last_dim}"
        return f"FlattenObservation({dims}, in_keys={self.in_keys}, out_keys={self.out_keys})"


class _DimOfOne(Reshaping):
    """A dim of size 1 more or less."""

    invertible = True

    def __init__(
        self,
        dim: int,
        *,
        allow_positive_dim: bool = False,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.allow_positive_dim = bool(allow_positive_dim)
        self.dim = _dim("dim", dim, allow_positive_dim, RuntimeError)

    def __repr__(self) -> str:
        keys = f"in_keys={self.in_keys}, out_keys={self.out_keys}"
        inverse = f"in_keys_inv={self.in_keys_inv}, out_keys_inv={self.out_keys_inv}"
        return f"{type(self).__name__}(dim={self.dim}, {keys}, {inverse})"


class UnsqueezeTransform(_DimOfOne):
    """A dim of size 1 more; backward, such a dim less.

    Args:
        dim: where it is in the result.
        allow_positive_dim: let it count from the front, batch dims included; else RuntimeError for a dim that does.
        in_keys, out_keys: entries to give the dim when a buffer is read, and where the results go.
        in_keys_inv, out_keys_inv: where entries without it go when it is written, and which.
    """

    @property
    def _least(self) -> int:  # type: ignore[override]
        return -self.dim - 1

    @property
    def unsqueeze_dim(self) -> int:
        """The same as `dim`."""
        return self.dim

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.unsqueeze(self.dim)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return state.squeeze(self.dim)


class SqueezeTransform(_DimOfOne):
    """A dim of size 1 less, where it is of that size; backward, such a dim more.

    Args:
        dim: which.
        allow_positive_dim: let it count from the front, batch dims included; else RuntimeError for a dim that does.
        in_keys, out_keys: entries to take the dim from when a buffer is read, and where the results go.
        in_keys_inv, out_keys_inv: where entries with it go when it is written, and which.
    """

    @property
    def _least_inv(self) -> int:  # type: ignore[override]
        return -self.dim - 1

    @property
    def squeeze_dim(self) -> int:
        """The same as `dim`."""
        return self.dim

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.squeeze(self.dim)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return state.unsqueeze(self.dim)


class PermuteTransform(Reshaping):
    """The last dims in another order; backward, in the old one.

    Args:
        dims: which dim comes at each of the last places: an order of -n, ..., -1.
        in_keys, out_keys: entries when a buffer is read, and where the results go.
        in_keys_inv, out_keys_inv: where entries in the old order go when it is written, and which.
    """

    invertible = True

    def __init__(
        self,
        dims: Sequence[int],
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dims = tuple(whole("dims", dim, least=-(2**31)) for dim in dims)
        places = list(range(-len(self.dims), 0))
        if sorted(self.dims) != places:
            raise ValueError(
                f"dims must be an order of the last dims, {places or '[-1]'} for so many, got {tuple(dims)}"
            )
        self._least = self._least_inv = len(self.dims)
        self._back = tuple(self.dims.index(place) - len(self.dims) for place in places)

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return _permuted(obs, self.dims)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return _permuted(state, self._back)

    def __repr__(self) -> str:
        return f"PermuteTransform(dims={self.dims}, keys={self.in_keys})"


class ExpandAs(Reshaping):
    """An entry repeated over the further dims of another, as memory shared by all repetitions.

    Args:
        in_key: the entry; its shape is how that of the other begins.
        ref_key: the other.
        out_key: where the result goes; `in_key` by default.
    """

    def __init__(self, in_key: NestedKey, ref_key: NestedKey, out_key: NestedKey | None = None) -> None:
        super().__init__([in_key], None if out_key is None else [out_key])
        self.in_key, self.ref_key, self.out_key = self.in_keys[0], as_keys("ref_key", [ref_key])[0], self.out_keys[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Repeat the entry, in place."""
        expect_tensordict("ExpandAs", tensordict)
        like = self._get(tensordict, self.ref_key)
        if like is None:
            return tensordict

        def expanded(value: Tensor) -> Tensor:
            return value.reshape(*value.shape, *(1 for _ in like.shape[value.ndim :])).expand(like.shape)

        return self._each(tensordict, self._in_keys, self._out_keys, expanded)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(next_tensordict)


class FlattenTensorDict(Transform):
    """All batch dims of a tensordict as one, when a buffer is written: [envs, time] becomes [envs * time] items.

    Args:
        inverse: False does it when the buffer is read instead.
    """

    def __init__(self, inverse: bool = True) -> None:
        super().__init__()
        self.inverse = bool(inverse)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The same; flat with `inverse=False`."""
        return tensordict if self.inverse else self._flat(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(next_tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._flat(tensordict) if self.inverse else tensordict

    def _flat(self, data: TensorDictBase) -> TensorDictBase:
        expect_tensordict("FlattenTensorDict", data)
        return data.reshape(-1)

    def __repr__(self) -> str:
        return f"FlattenTensorDict(inverse={self.inverse})"


def _dim(name: str, dim: Any, positive: bool, error: type[Exception] = ValueError) -> int:
    found = whole(name, dim, least=-(2**31))
    if found >= 0 and not positive:
        raise error(
            f"{name} must be negative, so that data of all batch sizes fits, got {dim}: allow_positive_dim=True takes it"
        )
    return found


def _permuted(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    lead = value.ndim - len(dims)
    return torch.permute(value, (*range(lead), *(value.ndim + dim for dim in dims)))

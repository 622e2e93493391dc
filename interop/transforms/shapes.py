"""Transforms of shapes: other dims for the same numbers. Dims that count from the end are those of an item."""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.arguments import whole
from interop.transforms.transform import Keys, TensorTransform, Transform, as_key, expect_tensordict


class FlattenObservation(TensorTransform):
    """Joins neighbouring dims into one.

    Args:
        first_dim, last_dim: the first and the last of them.
        allow_positive_dim: let dims count from the front, batch dims included.
    """

    default_key = "pixels"

    def __init__(
        self,
        first_dim: int,
        last_dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        allow_positive_dim: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.first_dim = as_dim("first_dim", first_dim, allow_positive_dim)
        self.last_dim = as_dim("last_dim", last_dim, allow_positive_dim)
        if (self.first_dim < 0) == (self.last_dim < 0) and self.first_dim > self.last_dim:
            raise ValueError(f"first_dim must not be behind last_dim, got {first_dim} and {last_dim}")
        self.least_dims = max(-self.first_dim, -self.last_dim)

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.flatten(self.first_dim, self.last_dim)

    def __repr__(self) -> str:
        dims = f"first_dim={self.first_dim}, last_dim={self.last_dim}"
        return f"FlattenObservation({dims}, in_keys={self.in_keys}, out_keys={self.out_keys})"


class DimOfOne(TensorTransform):
    """Adds or removes a dim of size 1, and the reverse when data is written.

    Args:
        dim: the dim.
        allow_positive_dim: let it count from the front, batch dims included; else RuntimeError for such a dim.
    """

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
        self.dim = as_dim("dim", dim, allow_positive_dim, RuntimeError)

    def __repr__(self) -> str:
        keys = f"in_keys={self.in_keys}, out_keys={self.out_keys}"
        inverse = f"in_keys_inv={self.in_keys_inv}, out_keys_inv={self.out_keys_inv}"
        return f"{type(self).__name__}(dim={self.dim}, {keys}, {inverse})"


class UnsqueezeTransform(DimOfOne):
    """Adds a dim of size 1, at `dim` of the result; removes it when data is written. Arguments as for `DimOfOne`."""

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
        super().__init__(
            dim,
            allow_positive_dim=allow_positive_dim,
            in_keys=in_keys,
            out_keys=out_keys,
            in_keys_inv=in_keys_inv,
            out_keys_inv=out_keys_inv,
        )
        self.unsqueeze_dim = self.dim
        self.least_dims = -self.dim - 1

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.unsqueeze(self.dim)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return state.squeeze(self.dim)


class SqueezeTransform(DimOfOne):
    """Removes a dim of size 1; leaves other sizes. Adds it when data is written. Arguments as for `DimOfOne`."""

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
        super().__init__(
            dim,
            allow_positive_dim=allow_positive_dim,
            in_keys=in_keys,
            out_keys=out_keys,
            in_keys_inv=in_keys_inv,
            out_keys_inv=out_keys_inv,
        )
        self.squeeze_dim = self.dim
        self.least_dims_inv = -self.dim - 1

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.squeeze(self.dim)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return state.unsqueeze(self.dim)


class PermuteTransform(TensorTransform):
    """Permutes the last dims; permutes them back when data is written.

    Args:
        dims: which dim comes at each of the last places: a permutation of -n, ..., -1.
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
        self.dims = tuple(as_dim("dims", dim, True) for dim in dims)
        places = list(range(-len(self.dims), 0))
        if sorted(self.dims) != places:
            raise ValueError(f"dims must be a permutation of {places or '[-1]'}, got {tuple(dims)}")
        self.least_dims = self.least_dims_inv = len(self.dims)

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.permute(*range(obs.ndim - self.least_dims), *self.dims)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        back = (self.dims.index(place) - self.least_dims for place in range(-self.least_dims, 0))
        return state.permute(*range(state.ndim - self.least_dims), *back)

    def __repr__(self) -> str:
        return f"PermuteTransform(dims={self.dims}, keys={self.in_keys})"


class ExpandAs(TensorTransform):
    """Repeats an entry over the further dims of another, in memory that all repetitions share.

    Args:
        in_key: the entry; the shape of the other must begin with its shape.
        ref_key: the other.
        out_key: where the result goes; `in_key` by default.
    """

    def __init__(self, in_key: NestedKey, ref_key: NestedKey, out_key: NestedKey | None = None) -> None:
        super().__init__([in_key], None if out_key is None else [out_key])
        self.in_key = self.in_keys[0]
        self.ref_key = as_key("ref_key", ref_key)
        self.out_key = self.out_keys[0]

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("ExpandAs", next_tensordict)
        like = self._get(next_tensordict, self.ref_key)
        if like is None:
            return next_tensordict

        def expanded(value: Tensor) -> Tensor:
            return value.reshape(*value.shape, *(1 for _ in like.shape[value.ndim :])).expand(like.shape)

        return self._for_each_entry(next_tensordict, self.in_keys, self.out_keys, expanded)


class FlattenTensorDict(Transform):
    """Joins all batch dims of a tensordict when a buffer is written: [envs, time] becomes [envs * time] items.

    Args:
        inverse: False to do it when the buffer is read instead.
    """

    def __init__(self, inverse: bool = True) -> None:
        super().__init__()
        self.inverse = bool(inverse)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("FlattenTensorDict", next_tensordict)
        return next_tensordict if self.inverse else next_tensordict.reshape(-1)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("FlattenTensorDict", tensordict)
        return tensordict.reshape(-1) if self.inverse else tensordict

    def __repr__(self) -> str:
        return f"FlattenTensorDict(inverse={self.inverse})"


def as_dim(name: str, dim: Any, positive: bool = False, error: type[Exception] = ValueError) -> int:
    """A dim as an int, negative unless `positive` ones are allowed."""
    integer = whole(name, dim, least=-(2**31))
    if integer >= 0 and not positive:
        raise error(
            f"{name} must be negative, so that data of all batch sizes fits, got {dim}: allow_positive_dim=True takes it"
        )
    return integer

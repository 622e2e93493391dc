"""Transforms that normalize by a fixed location and scale."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms import affine
from interop.transforms.moments import Moments
from interop.transforms.transform import EntriesTransform, Keys, as_keys

_CHUNK = 1024  # rows of a buffer that are read at a time
_STATE = {"standard_normal", "loc", "scale"}


class RewardScaling(EntriesTransform):
    """Rewards times a scale plus a location, or `(reward - loc) / scale`. Both are buffers of the module.

    Integers come out in a floating dtype.

    Args:
        loc: a number, or a tensor of the last dims of rewards.
        scale: the same.
        standard_normal: subtract and divide, rather than multiply and add.

    TypeError for wrong types; ValueError for a scale of zero to divide by, and for shapes that do not fit.
    """

    default_key = "reward"
    loc: Tensor
    scale: Tensor
    standard_normal: Tensor

    def __init__(
        self,
        loc: float | Tensor,
        scale: float | Tensor,
        in_keys: Keys = None,
        out_keys: Keys = None,
        standard_normal: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        standard, found = torch.as_tensor(standard_normal, device="cpu"), affine.parameter("scale", scale)
        self.register_buffer("standard_normal", standard)
        self.register_buffer("loc", affine.parameter("loc", loc))
        self.register_buffer("scale", affine.divisor(found) if standard else found)

    def _apply_transform(self, reward: Tensor) -> Tensor:
        return affine.scaled(reward, self.loc, self.scale, bool(self.standard_normal))

    def __repr__(self) -> str:
        return type(self).__name__ + affine.described(self.loc, self.scale, self.in_keys)


class ObservationNorm(EntriesTransform):
    """Entries times a scale plus a location, or `(value - loc) / scale`; the opposite when written.

    All entries are treated alike. Integers come out in a floating dtype. Without `loc` and `scale`, call `init_stats` or
    load a checkpoint before the first use.

    Args:
        loc: a number, or a tensor of the last dims of entries; None for `init_stats`.
        scale: the same; a number is at least `eps`, a tensor is taken as it is.
        standard_normal: subtract and divide, rather than multiply and add.
        eps: least scale of a number, and of `init_stats`; None for that of the dtype of a tensor `scale`, or 1e-6.

    ValueError for only one of `loc` and `scale`, for no `in_keys`, for a scale of zero to divide by, and for shapes that do
    not fit. RuntimeError when it is used without `loc` and `scale`.
    """

    invertible = True
    loc: Tensor | None
    scale: Tensor | None

    def __init__(
        self,
        loc: float | Tensor | None = None,
        scale: float | Tensor | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        standard_normal: bool = False,
        eps: float | None = None,
    ) -> None:
        if in_keys is None:
            raise ValueError("ObservationNorm needs in_keys: the entries to normalize")
        if (loc is None) != (scale is None):
            raise ValueError(f"give both loc and scale, or none of them: got loc={loc}, scale={scale}")
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.standard_normal = bool(standard_normal)
        if eps is None:
            eps = torch.finfo(scale.dtype).eps if isinstance(scale, Tensor) and scale.is_floating_point() else 1e-6
        self.eps = eps
        # Saved in the extra state, which a module without them can load as well.
        self.register_buffer("loc", None, persistent=False)
        self.register_buffer("scale", None, persistent=False)
        if scale is not None:
            found = affine.parameter("scale", scale)
            self.loc = affine.parameter("loc", loc)
            if not isinstance(scale, Tensor):
                if scale < 0:
                    raise ValueError(f"scale must not be negative, got {scale}: give a tensor to turn signs around")
                found = found.clamp_min(self.eps)
            self.scale = affine.divisor(found) if self.standard_normal else found

    @property
    def initialized(self) -> bool:
        """Whether there are a location and a scale."""
        return self.loc is not None

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if _awaited_by.get() is self:
            raise _Arrived(next_tensordict)
        return super()._call(next_tensordict)

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return self._scaled(obs, self.standard_normal)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return self._scaled(state, not self.standard_normal)

    def _scaled(self, value: Tensor, standard_normal: bool) -> Tensor:
        if self.loc is None or self.scale is None:
            raise RuntimeError(
                "ObservationNorm has no loc and scale: give them to the constructor, or call init_stats() with data"
            )
        return affine.scaled(value, self.loc, self.scale, standard_normal)

    def init_stats(
        self,
        data: Any,
        reduce_dim: int | Sequence[int] = 0,
        cat_dim: int | None = None,
        key: NestedKey | None = None,
        keep_dims: int | Sequence[int] | None = None,
    ) -> None:
        """Find the location and scale that make entries of data have mean zero and standard deviation one.

        They are summed up in float64, batch after batch: data may be larger than the memory.

        Args:
            data: a tensordict, a buffer, or an iterable of tensordicts. A buffer is read in parts; if this is part of its
                transforms, after those before it.
            reduce_dim: dims of the entry to take the mean over; the others are kept.
            cat_dim: the one along which tensordicts follow each other, among these; None for `reduce_dim`.
            key: the entry; None for the only one of `in_keys`.
            keep_dims: those of `reduce_dim` to stay in the location and scale with size one.

        KeyError for a missing entry; TypeError for other data; ValueError for wrong dims, data of different shapes, fewer
        than two values, and infinities or NaNs. RuntimeError where there are a location and scale already. Nothing has
        changed then.
        """
        if self.initialized:
            raise RuntimeError(f"loc and scale are there already: {self.loc}, {self.scale}")
        dims, kept = _as_dims(reduce_dim), () if keep_dims is None else _as_dims(keep_dims)
        if cat_dim is None and len(dims) != 1:
            raise ValueError("reduce_dim names several dims: name the one along which batches follow as cat_dim")
        if cat_dim is not None and cat_dim not in dims:
            raise ValueError(f"cat_dim must be one of reduce_dim, got {cat_dim} and {reduce_dim}")
        if key is None and len(self.in_keys) != 1:
            raise ValueError(f"key must say which of {self.in_keys} the statistics are of")
        (read,) = self.in_keys if key is None else as_keys("key", key)
        found: Moments | None = None
        for batch in self._batches(data):
            value = self._get(batch, read)
            if not isinstance(value, Tensor) or value.is_complex():
                raise TypeError(f"{read!r}: a tensor of real numbers is needed, got {type(value).__name__}")
            new = Moments.of(value, _positive(dims, value.ndim))
            if found is not None and found.mean.shape != new.mean.shape:
                raise ValueError(f"{read!r}: data of different shapes: {found.mean.shape} and {new.mean.shape}")
            if new.weight > 0:
                found = new if found is None else found.merged(new)
                dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        if found is None or found.weight < 2:
            raise ValueError(f"{read!r}: at least two values are needed for a standard deviation")
        if not found.is_finite():
            raise ValueError(f"{read!r}: infinities or NaNs are among the values: remove them before init_stats()")
        loc, scale = found.mean, (found.squares / (found.weight - 1)).sqrt()
        if not self.standard_normal:
            scale = 1 / scale.clamp_min(self.eps)
            loc = -loc * scale
        gone = tuple(set(_positive(dims, loc.ndim)) - set(_positive(kept, loc.ndim)))
        self.loc, self.scale = loc.squeeze(gone).to(dtype), scale.squeeze(gone).clamp_min(self.eps).to(dtype)

    def _batches(self, data: Any) -> Iterator[TensorDictBase]:
        if is_tensor_collection(data):
            yield data
        elif hasattr(data, "storage") and hasattr(data, "sample"):
            for start in range(0, len(data), _CHUNK):
                batch = self._before_this(data, slice(start, start + _CHUNK))
                if not len(batch):
                    return
                yield batch
        elif isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping | Tensor):
            for batch in data:
                if not is_tensor_collection(batch):
                    raise TypeError(f"init_stats() takes tensordicts, got {type(batch).__name__}")
                yield batch
        else:
            raise TypeError(f"init_stats() takes a tensordict, a buffer or tensordicts, got {type(data).__name__}")

    def _before_this(self, buffer: Any, rows: slice) -> Any:
        """Rows of a buffer; if this is part of its transforms, as they arrive here."""
        token = _awaited_by.set(self)
        try:
            return buffer[rows]
        except _Arrived as arrived:
            return arrived.data
        finally:
            _awaited_by.reset(token)

    def get_extra_state(self) -> dict[str, Any]:
        """The direction, location and scale."""
        return {"standard_normal": self.standard_normal, "loc": self.loc, "scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        """Load a state. ValueError where it is none, or has other shapes."""
        if not isinstance(state, Mapping) or set(state) != _STATE or (state["loc"] is None) != (state["scale"] is None):
            raise ValueError(f"the state of an ObservationNorm is standard_normal, loc and scale, got {state!r}")
        loaded: dict[str, Tensor | None] = {}
        for name, here in (("loc", self.loc), ("scale", self.scale)):
            new = None if state[name] is None else affine.parameter(name, state[name]).clone()
            if new is not None and here is not None:
                if new.shape != here.shape:
                    raise ValueError(f"loc and scale are {list(new.shape)}, here {list(here.shape)}")
                new = new.to(here.device)
            loaded[name] = new
        self.loc, self.scale = loaded["loc"], loaded["scale"]
        self.standard_normal = bool(state["standard_normal"])

    def __repr__(self) -> str:
        return type(self).__name__ + affine.described(self.loc, self.scale, self.in_keys)


_awaited_by: ContextVar[ObservationNorm | None] = ContextVar("awaited_by", default=None)


class _Arrived(Exception):  # noqa: N818  # no error: it carries data out of a chain
    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data


def _as_dims(dims: int | Sequence[int]) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _positive(dims: Iterable[int], ndim: int) -> list[int]:
    for dim in dims:
        if not -ndim <= dim < ndim:
            raise ValueError(f"dim {dim} is out of range for values of {ndim} dims")
    return [dim % ndim for dim in dims]

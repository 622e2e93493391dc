"""Several entries in one: side by side in a dim that they have, or stacked in a new one."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path, known_keys
from interop.data.numbers import whole
from interop.transforms.setting import expect_tensor, expect_tensordict, put
from interop.transforms.transform import Keys, Transform, as_keys


class CatTensors(Transform):
    """Several tensors as one, side by side.

    Args:
        in_keys: entries to put together, as many as there are to be.
        out_key: where the result goes; it may be one of them.
        dim: the dim along which they are put together.
        del_keys: take them out of the tensordict. What was around nested ones stays, empty or not.
        unsqueeze_if_oor: give an entry whose items lack that dim one of size 1 there.
        sort: put them together in the order of their names, whatever the order of `in_keys`.

    Different dtypes are promoted as `torch.cat` does. KeyError for a missing entry, ValueError for shapes that do not fit;
    nothing changes then.
    """

    def __init__(
        self,
        in_keys: Keys = None,
        out_key: NestedKey = "observation_vector",
        dim: int = -1,
        *,
        del_keys: bool = True,
        unsqueeze_if_oor: bool = False,
        sort: bool = True,
    ) -> None:
        super().__init__()
        self.in_keys, self.out_keys = _some("in_keys", in_keys), [_one("CatTensors", "out_key", out_key)]
        if sort:
            self.in_keys = sorted(self.in_keys, key=lambda key: "_-".join(as_path(key)))
        self.dim = whole("dim", dim, least=-(2**31))
        self.del_keys, self.unsqueeze_if_oor = bool(del_keys), bool(unsqueeze_if_oor)

    @dispatch(source="in_keys", dest="out_keys", auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Put the entries together, in place."""
        expect_tensordict("CatTensors", tensordict)
        parts = _parts("CatTensors", tensordict, self.in_keys, self.missing_tolerance)
        if parts is None:
            return tensordict
        for key, part in zip(self.in_keys, parts, strict=True):
            expect_tensor("CatTensors", key, part)
        if self.unsqueeze_if_oor:
            parts = [_with_dim(part, self.dim, tensordict.batch_dims) for part in parts]
        try:
            made = torch.cat(parts, self.dim)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"CatTensors: {_shapes(self.in_keys, parts)} do not fit along dim {self.dim}: {error}"
            ) from error
        put("CatTensors", tensordict, [(self.out_keys[0], made)], gone=self.in_keys if self.del_keys else ())
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(next_tensordict)

    def __repr__(self) -> str:
        return f"CatTensors(in_keys={self.in_keys}, out_key={self.out_keys[0]})"


class Stack(Transform):
    """Several tensors, or tensordicts, of one shape as one with a dim more. Backward: one entry apart into several.

    Args:
        in_keys: entries to stack when a buffer is read, in this order.
        out_key: where the result goes.
        in_key_inv: the entry to take apart when it is written.
        out_keys_inv: where its parts go, as many as it has.
        dim: the new dim; for tensordicts among the batch dims.
        allow_positive_dim: let `dim` count from the front, batch dims included.
        del_keys: take out the entries that were stacked, or taken apart.

    KeyError for a missing entry, ValueError for shapes that do not fit; nothing changes then. Nothing is done when writing
    where the entry to take apart is missing.
    """

    invertible = True

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        out_key: NestedKey,
        in_key_inv: NestedKey | None = None,
        out_keys_inv: Sequence[NestedKey] | None = None,
        dim: int = -1,
        allow_positive_dim: bool = False,
        *,
        del_keys: bool = True,
    ) -> None:
        super().__init__()
        if (in_key_inv is None) != (out_keys_inv is None):
            raise ValueError(f"give both of in_key_inv and out_keys_inv, got {in_key_inv!r} and {out_keys_inv!r}")
        self.in_keys, self.out_keys = _some("in_keys", in_keys), [_one("Stack", "out_key", out_key)]
        self.in_keys_inv = [] if in_key_inv is None else [_one("Stack", "in_key_inv", in_key_inv)]
        self.out_keys_inv = [] if out_keys_inv is None else _some("out_keys_inv", out_keys_inv)
        self.dim = whole("dim", dim, least=-(2**31))
        if self.dim >= 0 and not allow_positive_dim:
            raise ValueError(
                f"dim must be negative, so that data of all batch sizes fits, got {dim}: allow_positive_dim=True takes it"
            )
        self.del_keys = bool(del_keys)

    @dispatch(source="in_keys", dest="out_keys", auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stack the entries, in place."""
        expect_tensordict("Stack", tensordict)
        parts = _parts("Stack", tensordict, self.in_keys, self.missing_tolerance)
        if parts is None:
            return tensordict
        try:
            made = torch.stack(parts, self.dim)
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(f"Stack: {_shapes(self.in_keys, parts)} do not fit at dim {self.dim}: {error}") from error
        put("Stack", tensordict, [(self.out_keys[0], made)], gone=self.in_keys if self.del_keys else ())
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(next_tensordict)

    @dispatch(source="in_keys_inv", dest="out_keys_inv", auto_batch_size=False)
    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A tensordict with the entry taken apart."""
        return self._inv_call(tensordict.copy() if is_tensor_collection(tensordict) else tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self.in_keys_inv:
            return tensordict
        expect_tensordict("Stack", tensordict)
        key = self.in_keys_inv[0]
        whole_ = tensordict.get(key, None)
        if whole_ is None:
            return tensordict
        dims = whole_.batch_dims if is_tensor_collection(whole_) else whole_.ndim
        count = whole_.shape[self.dim] if -dims <= self.dim < dims else None
        if count != len(self.out_keys_inv):
            raise ValueError(
                f"Stack: {key!r} of shape {list(whole_.shape)} has no dim {self.dim} of size {len(self.out_keys_inv)} to be "
                f"taken apart into {self.out_keys_inv}"
            )
        parts = zip(self.out_keys_inv, whole_.unbind(self.dim), strict=True)
        put("Stack", tensordict, parts, gone=[key] if self.del_keys else ())
        return tensordict

    def __repr__(self) -> str:
        return f"Stack(in_keys={self.in_keys}, out_key={self.out_keys[0]}, dim={self.dim})"


def _some(name: str, keys: Any) -> list[NestedKey]:
    found = as_keys(name, keys)
    if not found:
        raise ValueError(f"{name} must be a key or a list of keys, at least one, got {keys!r}")
    if len(set(found)) < len(found):
        raise ValueError(f"{name} must be different keys, got {found}")
    return found


def _one(owner: str, name: str, key: Any) -> NestedKey:
    if not isinstance(key, str | tuple):
        raise TypeError(f"{owner} needs one key as {name}, a string or a tuple of them, got {key!r}")
    return as_keys(name, key)[0]


def _parts(name: str, data: TensorDictBase, keys: Sequence[NestedKey], tolerant: bool) -> list[Any] | None:
    """The entries; None where some are missing and may be. KeyError for missing ones."""
    parts = [data.get(key, None) for key in keys]
    missing = [key for key, part in zip(keys, parts, strict=True) if part is None]
    if missing and not tolerant:
        raise KeyError(
            f"{name}: {', '.join(map(repr, missing))} not found in tensordict: it needs {list(keys)}, there are "
            f"{known_keys(data)}"
        )
    return None if missing else parts


def _with_dim(value: Tensor, dim: int, batch_dims: int) -> Tensor:
    """The tensor with a dim of size 1 where its items, behind the batch dims, lack `dim`."""
    held = value.ndim - batch_dims
    if dim < 0:
        return value if -dim <= held else value.unsqueeze(dim)
    return value if dim < value.ndim else value.unsqueeze(dim)


def _shapes(keys: Sequence[NestedKey], parts: Sequence[Any]) -> str:
    return ", ".join(f"{key!r} {list(part.shape)}" for key, part in zip(keys, parts, strict=True))

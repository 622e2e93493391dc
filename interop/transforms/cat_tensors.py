"""Several entries in one: side by side in a dim that they have, or stacked in a new one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path, known_keys
from interop.transforms.entries import expect_tensor, expect_tensordict, put
from interop.transforms.shapes import as_dim
from interop.transforms.transform import Keys, Transform, as_keys


class Joining(Transform):
    """Makes one entry of several.

    Args:
        in_keys: the entries.
        out_key: where the result goes; it may be one of them.
        dim: the dim of the result that tells them apart.
        del_keys: delete the entries. The tensordict around a nested one stays, empty or not.

    KeyError for a missing entry, ValueError for shapes that do not fit; nothing changes then.
    """

    def __init__(self, in_keys: Keys, out_key: NestedKey, dim: int, del_keys: bool) -> None:
        super().__init__()
        self.in_keys, self.out_keys = _some("in_keys", in_keys), [self._one("out_key", out_key)]
        self.dim, self.del_keys = dim, bool(del_keys)

    def _one(self, name: str, key: Any) -> NestedKey:
        if not isinstance(key, str | tuple):
            raise TypeError(f"{type(self).__name__} needs one key as {name}, a string or a tuple of them, got {key!r}")
        return as_keys(name, key)[0]

    def _joined(self, data: TensorDictBase, join: Callable[[list[Any]], Any], where: str) -> TensorDictBase:
        """Put the result in place of the entries."""
        name = type(self).__name__
        expect_tensordict(name, data)
        parts = {key: data.get(key, None) for key in self.in_keys}
        absent = [repr(key) for key, part in parts.items() if part is None]
        if absent and self.missing_tolerance:
            return data
        if absent:
            raise KeyError(
                f"{name}: {', '.join(absent)} not found in tensordict: it needs {list(parts)}, there are {known_keys(data)}"
            )
        try:
            made = join(list(parts.values()))
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{key!r} {list(part.shape)}" for key, part in parts.items())
            raise ValueError(f"{name}: {shapes} do not fit {where} dim {self.dim}: {error}") from error
        put(name, data, [(self.out_keys[0], made)], gone=self.in_keys if self.del_keys else ())
        return data


class CatTensors(Joining):
    """Several tensors as one, side by side. Different dtypes are promoted as by `torch.cat`.

    Args:
        in_keys, out_key, del_keys: as for `Joining`; at least one key.
        dim: the dim along which they are put together.
        unsqueeze_if_oor: give an entry whose items lack that dim one of size 1 there.
        sort: put them together in the order of their names, whatever the order of `in_keys`.
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
        super().__init__(in_keys, out_key, as_dim("dim", dim, True), del_keys)
        if sort:
            self.in_keys = sorted(self.in_keys, key=lambda key: "_-".join(as_path(key)))
        self.unsqueeze_if_oor = bool(unsqueeze_if_oor)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        def shaped(value: Tensor) -> Tensor:
            """With a dim of size 1 where the items, behind the batch dims, lack `dim`."""
            lacks = -self.dim > value.ndim - next_tensordict.batch_dims if self.dim < 0 else self.dim >= value.ndim
            return value.unsqueeze(self.dim) if lacks and self.unsqueeze_if_oor else value

        def join(parts: list[Any]) -> Tensor:
            for key, part in zip(self.in_keys, parts, strict=True):
                expect_tensor("CatTensors", key, part)
            return torch.cat([shaped(part) for part in parts], self.dim)

        return self._joined(next_tensordict, join, "along")

    def __repr__(self) -> str:
        return f"CatTensors(in_keys={self.in_keys}, out_key={self.out_keys[0]})"


class Stack(Joining):
    """Several tensors, or tensordicts, of one shape as one with a dim more. When written, one entry apart into several.

    Args:
        in_keys, out_key, del_keys: as for `Joining`, in this order; `del_keys` also for the entry that is taken apart.
        in_key_inv: the entry to take apart when data is written. Nothing is done where it is missing.
        out_keys_inv: where its parts go, as many as it has.
        dim: the new dim; for tensordicts among the batch dims.
        allow_positive_dim: let `dim` count from the front, batch dims included.
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
        super().__init__(in_keys, out_key, as_dim("dim", dim, allow_positive_dim), del_keys)
        if (in_key_inv is None) != (out_keys_inv is None):
            raise ValueError(f"give both of in_key_inv and out_keys_inv, got {in_key_inv!r} and {out_keys_inv!r}")
        if in_key_inv is not None:
            self.in_keys_inv = [self._one("in_key_inv", in_key_inv)]
            self.out_keys_inv = _some("out_keys_inv", out_keys_inv)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        def join(parts: list[Any]) -> Any:
            if len(set(map(is_tensor_collection, parts))) > 1:
                raise RuntimeError("tensors are stacked with tensors only")
            return torch.stack(parts, self.dim)

        return self._joined(next_tensordict, join, "at")

    @dispatch(source="in_keys_inv", dest="out_keys_inv", auto_batch_size=False)
    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A tensordict with the entry taken apart."""
        return self._inv_call(tensordict.copy() if is_tensor_collection(tensordict) else tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self.in_keys_inv:
            return tensordict
        expect_tensordict("Stack", tensordict)
        key = self.in_keys_inv[0]
        stacked = tensordict.get(key, None)
        if stacked is None:
            return tensordict
        dims = stacked.batch_dims if is_tensor_collection(stacked) else stacked.ndim
        count = stacked.shape[self.dim] if -dims <= self.dim < dims else None
        if count != len(self.out_keys_inv):
            raise ValueError(
                f"Stack: {key!r} of shape {list(stacked.shape)} has no dim {self.dim} of size {len(self.out_keys_inv)} to "
                f"be taken apart into {self.out_keys_inv}"
            )
        parts = zip(self.out_keys_inv, stacked.unbind(self.dim), strict=True)
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

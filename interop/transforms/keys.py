"""Transforms of entries as a whole: renamed, selected, excluded, joined."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path, known_keys
from interop.trajectories import DEFAULT_DONE_KEYS
from interop.transforms.shapes import as_dim
from interop.transforms.transform import Keys, Transform, as_keys, expect_tensor, expect_tensordict, put


class RenameTransform(Transform):
    """Renames entries.

    The tensordict around a nested entry stays, empty or not. An entry that has the new name already is replaced.

    Args:
        in_keys: entries to rename when a buffer is read.
        out_keys: their new names, as many.
        in_keys_inv: the new names, those in the storage, when it is written.
        out_keys_inv: the entries to rename then.
        create_copy: have each entry under both names: the same tensor twice.

    ValueError for lists of different lengths, and for a name twice or in both lists of a direction. KeyError for a missing
    entry; then nothing is renamed.
    """

    invertible = True

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.create_copy = bool(create_copy)
        for here, there in ((self.in_keys, self.out_keys), (self.in_keys_inv, self.out_keys_inv)):
            if len(here) != len(there):
                raise ValueError(f"keys and new names must be as many, got {here} and {there}")
            if len({*here, *there}) < len(here) + len(there):
                raise ValueError(f"each name must be another, got {here} and {there}: swap names with two transforms")

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._renamed(next_tensordict, self.in_keys, self.out_keys)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._renamed(tensordict, self.out_keys_inv, self.in_keys_inv)

    def _renamed(self, data: TensorDictBase, old: Sequence[NestedKey], new: Sequence[NestedKey]) -> TensorDictBase:
        expect_tensordict("RenameTransform", data)
        values = [self._get(data, key) for key in old]
        present = [(key, name, value) for key, name, value in zip(old, new, values, strict=True) if value is not None]
        twice = self.create_copy  # a tensordict would be one under two names
        renamed = [
            (name, value.copy() if twice and is_tensor_collection(value) else value) for _, name, value in present
        ]
        put("RenameTransform", data, renamed, gone=() if twice else [key for key, _, _ in present])
        return data


class SelectTransform(Transform):
    """Keeps some of the entries when a buffer is read; missing ones are ignored.

    In a buffer the "index" stays: it is written after the transforms.

    Args:
        selected_keys: entries to keep, each an argument.
        keep_rewards: keep "reward" too. Entries of "next" are only kept if they are named.
        keep_dones: keep "done" too.
    """

    def __init__(self, *selected_keys: NestedKey, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        self.selected_keys = as_keys("each argument", list(selected_keys))
        self.keep_reward_keys = bool(keep_rewards)
        self.keep_done_keys = bool(keep_dones)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._selected(next_tensordict, "done")

    def on_step(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._selected(next_tensordict, *DEFAULT_DONE_KEYS)  # an environment needs all flags of ends

    def _selected(self, data: TensorDictBase, *dones: str) -> TensorDictBase:
        expect_tensordict("SelectTransform", data)
        selected = [*self.selected_keys, *(["reward"] if self.keep_reward_keys else ())]
        return data.select(*selected, *(dones if self.keep_done_keys else ()), strict=False, inplace=True)

    def __repr__(self) -> str:
        return f"SelectTransform(keys={self.selected_keys})"


class ExcludeTransform(Transform):
    """Removes some of the entries; missing ones are ignored. The tensordict around a nested entry stays, empty or not.

    Args:
        excluded_keys: entries to remove, each an argument.
        inverse: remove them when a buffer is written, so that they are never stored, instead of when it is read.
    """

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False) -> None:
        super().__init__()
        self.excluded_keys = as_keys("each argument", list(excluded_keys))
        self.inverse = bool(inverse)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("ExcludeTransform", next_tensordict)
        return next_tensordict if self.inverse else next_tensordict.exclude(*self.excluded_keys, inplace=True)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("ExcludeTransform", tensordict)
        return tensordict.exclude(*self.excluded_keys, inplace=True) if self.inverse else tensordict

    def __repr__(self) -> str:
        inverse = ", inverse=True" if self.inverse else ""
        return f"ExcludeTransform(keys={self.excluded_keys}{inverse})"


class Joining(Transform):
    """Joins several entries to one.

    Args:
        in_keys: the entries.
        out_key: where the result goes; it may be one of them.
        dim: the dim of the result that they are joined along.
        del_keys: delete the entries. The tensordict around a nested one stays, empty or not.

    KeyError for a missing entry, ValueError for shapes that do not fit; then nothing changes.
    """

    def __init__(self, in_keys: Keys, out_key: NestedKey, dim: int, del_keys: bool) -> None:
        super().__init__()
        self.in_keys = _different("in_keys", in_keys)
        self.out_keys = [_one("out_key", out_key)]
        self.dim = dim
        self.del_keys = bool(del_keys)

    def _joined(self, data: TensorDictBase, join: Callable[[list[Any]], Any]) -> TensorDictBase:
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
            joined = join(list(parts.values()))
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{key!r} {list(part.shape)}" for key, part in parts.items())
            raise ValueError(f"{name}: {shapes} do not fit along dim {self.dim}: {error}") from error
        put(name, data, [(self.out_keys[0], joined)], gone=self.in_keys if self.del_keys else ())
        return data


class CatTensors(Joining):
    """Concatenates tensors. Different dtypes are promoted as by `torch.cat`.

    Args:
        in_keys, out_key, del_keys: as for `Joining`; at least one key.
        dim: the dim along which they are concatenated.
        unsqueeze_if_oor: give an entry whose items lack that dim one of size 1 there.
        sort: concatenate in the order of the names, whatever the order of `in_keys`.
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
            """With a dim of size 1 if the items, behind the batch dims, lack `dim`."""
            lacks = -self.dim > value.ndim - next_tensordict.batch_dims if self.dim < 0 else self.dim >= value.ndim
            return value.unsqueeze(self.dim) if lacks and self.unsqueeze_if_oor else value

        def join(parts: list[Any]) -> Tensor:
            for key, part in zip(self.in_keys, parts, strict=True):
                expect_tensor("CatTensors", key, part)
            return torch.cat([shaped(part) for part in parts], self.dim)

        return self._joined(next_tensordict, join)

    def __repr__(self) -> str:
        return f"CatTensors(in_keys={self.in_keys}, out_key={self.out_keys[0]})"


class Stack(Joining):
    """Stacks tensors, or tensordicts, of one shape in a new dim. When written, takes an entry apart into several.

    Args:
        in_keys, out_key, del_keys: as for `Joining`; `del_keys` also for the entry that is taken apart.
        in_key_inv: the entry to take apart when data is written. Nothing is done if it is missing.
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
            self.in_keys_inv = [_one("in_key_inv", in_key_inv)]
            self.out_keys_inv = _different("out_keys_inv", out_keys_inv)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        def join(parts: list[Any]) -> Any:
            if len(set(map(is_tensor_collection, parts))) > 1:
                raise RuntimeError("tensors are stacked with tensors only")
            return torch.stack(parts, self.dim)

        return self._joined(next_tensordict, join)

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A tensordict with the entry taken apart."""
        expect_tensordict("Stack", tensordict)
        return self._inv_call(tensordict.copy())

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        stacked = tensordict.get(self.in_keys_inv[0], None) if self.in_keys_inv else None
        if stacked is None:
            return tensordict
        key = self.in_keys_inv[0]
        dims = stacked.batch_dims if is_tensor_collection(stacked) else stacked.ndim
        if not -dims <= self.dim < dims or stacked.shape[self.dim] != len(self.out_keys_inv):
            raise ValueError(
                f"Stack: {key!r} of shape {list(stacked.shape)} has no dim {self.dim} of size {len(self.out_keys_inv)} to "
                f"be taken apart into {self.out_keys_inv}"
            )
        parts = zip(self.out_keys_inv, stacked.unbind(self.dim), strict=True)
        put("Stack", tensordict, parts, gone=[key] if self.del_keys else ())
        return tensordict

    def __repr__(self) -> str:
        return f"Stack(in_keys={self.in_keys}, out_key={self.out_keys[0]}, dim={self.dim})"


def _one(name: str, key: Any) -> NestedKey:
    if not isinstance(key, str | tuple):
        raise TypeError(f"{name} must be one key, a string or a tuple of them, got {key!r}")
    return as_keys(name, key)[0]


def _different(name: str, keys: Any) -> list[NestedKey]:
    different = as_keys(name, keys)
    if not different or len(set(different)) < len(different):
        raise ValueError(f"{name} must be different keys, at least one, got {keys!r}")
    return different

"""Transforms of names: entries renamed, selected, excluded."""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey

from interop.data.keys import as_path
from interop.trajectories import DEFAULT_DONE_KEYS
from interop.transforms.entries import expect_tensordict, put
from interop.transforms.transform import Keys, Transform, as_keys


class RenameTransform(Transform):
    """Entries under other names.

    A nested entry leaves the tensordict around it behind, empty or not. An entry that has the new name already is replaced.

    Args:
        in_keys: entries to rename when a buffer is read.
        out_keys: their new names, as many.
        in_keys_inv: the new names, those in the storage, when it is written.
        out_keys_inv: the entries to rename then.
        create_copy: have each entry under both names: the same tensor twice.

    ValueError for lists of different lengths, for a name twice or in both lists of a direction. KeyError for a missing
    entry; nothing is renamed then.
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
        super().__init__()
        self.create_copy = bool(create_copy)
        self.in_keys, self.out_keys = _pairs("in_keys", in_keys, "out_keys", out_keys)
        self.in_keys_inv, self.out_keys_inv = _pairs("in_keys_inv", in_keys_inv, "out_keys_inv", out_keys_inv)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._renamed(next_tensordict, self.in_keys, self.out_keys)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._renamed(tensordict, self.out_keys_inv, self.in_keys_inv)

    def _renamed(self, data: TensorDictBase, old: Sequence[NestedKey], new: Sequence[NestedKey]) -> TensorDictBase:
        expect_tensordict("RenameTransform", data)
        values = [self._get(data, key) for key in old]
        found = [(key, name, value) for key, name, value in zip(old, new, values, strict=True) if value is not None]
        twice = self.create_copy  # a tensordict would be one under two names
        made = [(name, value.copy() if twice and is_tensor_collection(value) else value) for _, name, value in found]
        put("RenameTransform", data, made, gone=() if twice else [key for key, _, _ in found])
        return data


class SelectTransform(Transform):
    """Some of the entries, when a buffer is read; missing ones are ignored.

    In a buffer the "index" stays: it is written behind the transforms.

    Args:
        selected_keys: entries to keep, each an argument.
        keep_rewards: keep "reward" too. Entries of "next" are only kept where they are named.
        keep_dones: keep "done" too.
    """

    def __init__(self, *selected_keys: NestedKey, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        self.selected_keys = _keys_of("SelectTransform", selected_keys)
        self.keep_reward_keys, self.keep_done_keys = bool(keep_rewards), bool(keep_dones)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Delete the entries that are not selected, in place."""
        return self._selected(tensordict, "done")

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._selected(next_tensordict, *DEFAULT_DONE_KEYS)  # an environment needs all flags of ends

    def _selected(self, data: TensorDictBase, *dones: str) -> TensorDictBase:
        expect_tensordict("SelectTransform", data)
        kept = [*self.selected_keys, *(["reward"] if self.keep_reward_keys else ())]
        return data.select(*kept, *(dones if self.keep_done_keys else ()), strict=False, inplace=True)

    def __repr__(self) -> str:
        return f"SelectTransform(keys={self.selected_keys})"


class ExcludeTransform(Transform):
    """All but some of the entries; missing ones are ignored.

    A nested entry leaves the tensordict around it behind, empty or not.

    Args:
        excluded_keys: entries to leave out, each an argument.
        inverse: leave them out when a buffer is written, so that they are never stored, instead of when it is read.
    """

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False) -> None:
        super().__init__()
        self.excluded_keys = _keys_of("ExcludeTransform", excluded_keys)
        self.inverse = bool(inverse)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict if self.inverse else self._others(next_tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._others(tensordict) if self.inverse else tensordict

    def _others(self, data: TensorDictBase) -> TensorDictBase:
        expect_tensordict("ExcludeTransform", data)
        return data.exclude(*self.excluded_keys, inplace=True)

    def __repr__(self) -> str:
        inverse = ", inverse=True" if self.inverse else ""
        return f"ExcludeTransform(keys={self.excluded_keys}{inverse})"


def _pairs(one: str, first: Keys, other: str, second: Keys) -> tuple[list[NestedKey], list[NestedKey]]:
    here, there = as_keys(one, first), as_keys(other, second)
    if len(here) != len(there):
        raise ValueError(f"{one} and {other} must be as many, got {len(here)} and {len(there)}: {here} and {there}")
    if len({*here, *there}) < len(here) + len(there):
        raise ValueError(
            f"each of {one} and {other} must be another name, got {here} and {there}: swap names with two transforms"
        )
    return here, there


def _keys_of(name: str, keys: Sequence[Any]) -> list[NestedKey]:
    for key in keys:
        if not all(isinstance(step, str) for step in as_path(key)) or key == ():
            raise TypeError(f"{name} takes keys as arguments, {name}('a', ('next', 'a')): got {key!r}")
    return as_keys("keys", list(keys))

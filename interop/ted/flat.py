"""The hooks that make TED data flat before it is saved, and TED data again."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor, is_non_tensor, is_tensor_collection
from torch import Tensor

from interop.data.keys import as_path
from interop.ted.entries import REWARD_KEYS, Leaves, Names, Path, leaves_of, shown
from interop.ted.flattening import Flattened, Rebuilt
from interop.ted.gathered import gathered
from interop.ted.refusals import missing_done
from interop.ted.ring import Ring
from interop.ted.row_values import fresh
from interop.ted.threads import side_by_side
from interop.trajectories import DEFAULT_DONE_KEYS

_SHAPE, _CLOSED, _ROOT_ONLY, _NEXT_ONLY = ("_storage_shape",), ("_closed",), ("_root_only",), ("_next_only",)


class TED2Flat:
    """A save hook: TED data flat, each observation once, which halves what is saved.

    Called as `hook(data, path=None)` on a tensordict of [rows, *lanes]; `shift` and `is_full` must be set before. Done flags
    and rewards of "next", and what only the root has, come as [items, ...], lane after lane, the oldest row first.
    Observations come as [items + ends, ...]: the root's values of an episode, then the last one of "next". An episode ends
    where it is done, and with the row that was written last. `shift`, `is_full` and `_storage_shape` come as non-tensor
    entries; so do `_closed`, `_root_only` and `_next_only`, for data that has rows behind that one, a done flag or reward in
    the root alone, or a done flag in "next" alone. With a path the tensors are memory maps in that folder, which
    `TensorDict.load_memmap` reads.

    Data of which something would not come back from `Flat2TED` bit for bit is a ValueError that names the key and the first
    such row; nothing is written then. Each value is copied once, to the CPU.

    Args:
        done_key: what says where episodes end.
        shift_key: where `shift` is put.
        is_full_key: where `is_full` is put.
        done_keys: done flags below "next", and of the root, where they are all False and not saved.
        reward_keys: rewards below "next".
        verify: refuse what would not come back; without, it is lost.
    """

    shift: int | None = None
    """The row behind the one that was written last."""
    is_full: bool | None = None
    """Whether every row was written."""

    def __init__(
        self,
        done_key: Any = ("next", "done"),
        shift_key: Any = "shift",
        is_full_key: Any = "is_full",
        done_keys: Iterable[Any] = DEFAULT_DONE_KEYS,
        reward_keys: Iterable[Any] = REWARD_KEYS,
        *,
        verify: bool = True,
    ) -> None:
        self._done_key = as_path(done_key)
        self._shift_key, self._is_full_key = as_path(shift_key), as_path(is_full_key)
        self._names = Names.of(done_keys, reward_keys)
        self._verify = verify

    def __call__(self, data: TensorDictBase, path: str | os.PathLike[str] | None = None) -> TensorDictBase:
        flat, told = self._flattened(data)
        return gathered(flat, told, path)

    def _flattened(self, data: TensorDictBase) -> tuple[Flattened, dict[Path, Any]]:
        """The data flat, and the non-tensor entries."""
        if self.shift is None or self.is_full is None:
            raise TypeError(
                f"set shift and is_full of the {type(self).__name__} before it is called, as checkpointers do"
            )
        if not is_tensor_collection(data):
            raise TypeError(f"{type(self).__name__} takes a tensordict, got {type(data).__name__}")
        ring = Ring(tuple(data.batch_size), int(self.shift), bool(self.is_full))
        flat = Flattened(leaves_of(data), ring, self._names, self._done_key, self._verify)
        told: dict[Path, Any] = {self._is_full_key: ring.is_full, self._shift_key: ring.shift, _SHAPE: ring.shape}
        if flat.order.closed:
            told[_CLOSED] = True
        for key, paths in ((_ROOT_ONLY, flat.entries.root_only), (_NEXT_ONLY, flat.entries.next_only)):
            if paths:
                told[key] = [list(each) for each in paths]
        taken = [each for each in told if any(path[: len(each)] == each for path in flat.specs())]
        if taken:
            raise ValueError(
                f"{shown(taken[0])} is a key of the data: rename it, or pass another shift_key or is_full_key"
            )
        return flat, told


class Flat2TED:
    """A load hook: TED data from what `TED2Flat` made, bit for bit, except for done flags of the root, which are False.

    Called as `hook(data, out=None)`. With `out`, a tensordict of the rows with the same entries, the values are put there;
    otherwise a tensordict is made on the CPU. ValueError for entries that are not of such data, or not those of `out`;
    nothing is written then. Each value is copied once.

    Args:
        done_key: what says where episodes end.
        shift_key: where `shift` is.
        is_full_key: where `is_full` is.
        done_keys: done flags.
        reward_keys: rewards.
    """

    def __init__(
        self,
        done_key: Any = "done",
        shift_key: Any = "shift",
        is_full_key: Any = "is_full",
        done_keys: Iterable[Any] = DEFAULT_DONE_KEYS,
        reward_keys: Iterable[Any] = REWARD_KEYS,
    ) -> None:
        self._done_key = as_path(done_key)
        self._shift_key, self._is_full_key = as_path(shift_key), as_path(is_full_key)
        self._names = Names.of(done_keys, reward_keys)

    def __call__(self, data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
        tensors, told = parted(data)
        return self._rebuilt(tensors, told, out)

    def _rebuilt(self, leaves: Leaves, told: Mapping[Path, Any], out: TensorDictBase | None) -> TensorDictBase:
        ring = Ring(
            tuple(_wholes(_SHAPE, told.get(_SHAPE))),
            _wholes(self._shift_key, [told.get(self._shift_key)])[0],
            _flag(self._is_full_key, told.get(self._is_full_key)),
        )
        if self._done_key not in leaves:
            raise missing_done(self._done_key, leaves)
        only = [[tuple(map(str, path)) for path in told.get(key, ())] for key in (_ROOT_ONLY, _NEXT_ONLY)]
        flat = {key: (tuple(leaf.shape), leaf.dtype) for key, leaf in leaves.items()}
        rebuilt = Rebuilt(flat, leaves[self._done_key], ring, self._names, bool(told.get(_CLOSED)), *only)
        if out is None:
            out = TensorDict({}, batch_size=ring.shape, device="cpu")
            specs = rebuilt.specs.items()
            places = {key: fresh(shape, dtype) for key, (shape, dtype) in specs}
            for key, place in places.items():
                out.set(key, place)
        else:
            places = leaves_of(out)
            _refuse_others(rebuilt, places)
        works = [work for key, leaf in leaves.items() for work in rebuilt.fillings(key, leaf, places)]
        side_by_side(works, sum(leaf.nbytes for leaf in leaves.values()))
        return out


def _refuse_others(rebuilt: Rebuilt, places: Leaves) -> None:
    """ValueError where memory is not that of the entries."""
    specs, implied = rebuilt.specs, rebuilt.implied()
    strange = [shown(key) for key in places if key not in specs]
    missing = [shown(key) for key in specs if key not in places and key not in implied]
    if strange or missing:
        raise ValueError(
            f"the entries are not those of out; missing there: {', '.join(missing) or 'none'}, there alone: "
            f"{', '.join(strange) or 'none'}; nothing was written"
        )
    for key, place in places.items():
        if (tuple(place.shape), place.dtype) != specs[key]:
            raise ValueError(
                f"{shown(key)} is {specs[key][1]} {list(specs[key][0])}, out has {place.dtype} {list(place.shape)}; "
                "nothing was written"
            )


def parted(data: TensorDictBase) -> tuple[dict[Path, Tensor], dict[Path, Any]]:
    """The tensors of a tensordict by path, and the other entries, as plain values."""
    if not is_tensor_collection(data):
        raise TypeError(f"expected a tensordict, got {type(data).__name__}")
    tensors, others = {}, {}
    for key in data.keys(True, True, is_leaf=is_leaf_nontensor):
        value = data.get(key)
        if isinstance(value, Tensor):
            tensors[as_path(key)] = value.detach().as_subclass(Tensor)
        else:
            others[as_path(key)] = value.data if is_non_tensor(value) else value
    return tensors, others


def _wholes(key: Path, value: Any) -> list[int]:
    if not isinstance(value, Sequence) or not all(type(each) is int for each in value):
        raise ValueError(f"{shown(key)} should tell integers of the storage, found {value!r}")
    return list(value)


def _flag(key: Path, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shown(key)} should be True or False, found {value!r}")
    return value

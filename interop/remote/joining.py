"""Joins the parts drawn by several shards to one batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

from interop.buffers.tensordict_buffer import include
from interop.data import randomness
from interop.data.pytrees import row_of
from interop.remote.shares import rescale
from interop.samplers.shares import ShardContents

Places = Sequence[np.ndarray]  # positions of each part's rows in the joined value
_WEIGHT, _MASK = "priority_weight", ("collector", "mask")


@dataclass(frozen=True)
class Drawn:
    """The part of a batch drawn by one shard, with global indices."""

    data: Any
    info: dict[Any, Any]
    share: ShardContents  # at the time of the draw
    lengths: np.ndarray  # int64 [units]: consecutive rows of each unit
    includes: bool  # whether samples include the info; `data` excludes it


def joined(
    allotted: Sequence[ShardContents], drawn: Sequence[Drawn | None], key: np.ndarray
) -> tuple[Any, dict[Any, Any]]:
    """Join parts to one batch and its info, with the importance weights of a single buffer with all rows.

    Units come in random order; without `shuffle`, in shard order. Each row is copied once, and a batch from a single
    shard not at all. The parts are not modified.

    Args:
        allotted: the shares of all shards from which units were allotted.
        drawn: the part of each shard; None if it drew nothing.
        key: random bits for the order, [2] uint32.

    RuntimeError if parts do not fit together.
    """
    factors = rescale(allotted, [None if part is None else part.share for part in drawn])
    parts = [(part, float(factor)) for part, factor in zip(drawn, factors, strict=True) if part is not None]
    first, masked = parts[0][0], any(_MASK in part.info for part, _ in parts)
    data, info = [part.data for part, _ in parts], [_info(part, factor, masked) for part, factor in parts]
    if len(parts) == 1:
        batch = first.data.copy() if first.includes and is_tensor_collection(first.data) else first.data, info[0]
    else:
        places = _order([part.lengths for part, _ in parts], key if first.share.shuffle else None)
        batch = placed(data, *places), placed(info, *places)
    if first.includes:
        include(*batch)
    return batch


def _info(part: Drawn, factor: float, masked: bool) -> dict[Any, Any]:
    """The info of a part with scaled weights, and a mask if slices of another part were padded."""
    info = dict(part.info)
    if _WEIGHT in info:
        info[_WEIGHT] = info[_WEIGHT] * factor
    if masked and _MASK not in info:
        index = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
        info[_MASK] = torch.ones_like(index, dtype=torch.bool)
    return info


def _order(lengths: Sequence[np.ndarray], key: np.ndarray | None) -> list[Places]:
    """Random positions in a batch for the rows of each part, and for its units; consecutive positions without a key."""
    every = np.concatenate(lengths)
    units = np.arange(every.size) if key is None else randomness.generator_of(key).permutation(every.size)
    rows = np.repeat(units, every).argsort(kind="stable").argsort()
    ends = np.cumsum([[each.sum(), each.size] for each in lengths[:-1]], axis=0)
    return [np.split(rows, ends[:, 0]), np.split(units, ends[:, 1])]


def placed(parts: Sequence[Any], *places: Places) -> Any:
    """Join parts of one kind at given positions: tensors, tensordicts, item lists, and pytrees of these.

    Args:
        parts: parts with one row per position. Tensors are copied once.
        *places: alternative positions. A tensor uses the first alternative that has its number of rows in each part.

        RuntimeError for parts with different entries, shapes or dtypes, or other numbers of rows. TypeError for a value
        without rows.
    """
    first = parts[0]
    if isinstance(first, dict) or all(type(part) is TensorDict for part in parts):
        entries = [dict(part.items()) for part in parts]  # `TensorDict.get` would unwrap non-tensor entries
        keys = [entry.keys() for entry in entries]
        if lacking := set().union(*keys) - set(keys[0]).intersection(*keys):
            raise RuntimeError(f"the shards hold items of different kinds: only some have {sorted(map(str, lacking))}")
        found = {key: placed([entry[key] for entry in entries], *places) for key in keys[0]}
        if isinstance(first, dict):
            return found
        size = sum(map(len, _places(parts, places))), *first.batch_size[1:]
        return TensorDict(found, batch_size=size, device=first.device)
    if isinstance(first, list) and [*map(len, parts)] == [*map(len, places[0])]:
        return _ordered([row for part in parts for row in part], places[0])
    if isinstance(first, tuple | list):
        return row_of(type(first), [placed(column, *places) for column in zip(*parts, strict=True)])
    if isinstance(first, Tensor) and not first.is_nested:
        return _tensor(parts, _places(parts, places))
    if isinstance(first, Tensor):
        rows = _ordered([row for part in parts for row in part.unbind()], _places(parts, places))
        return torch.nested.nested_tensor(rows, layout=first.layout)
    if is_tensor_collection(first):
        return torch.cat([*parts])[np.concatenate(_places(parts, places)).argsort()]
    raise TypeError(f"parts of a batch cannot be joined if they are a {type(first).__name__}: use one shard")


def _ordered(rows: list[Any], places: Places) -> list[Any]:
    return [rows[n] for n in np.concatenate(places).argsort()]


def _tensor(parts: Sequence[Tensor], places: Places) -> Tensor:
    first = parts[0]
    if any(part.shape[1:] != first.shape[1:] or part.dtype != first.dtype for part in parts):
        kinds = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        raise RuntimeError(f"the shards hold items of different kinds: {kinds}")
    made = torch.empty((sum(map(len, parts)), *first.shape[1:]), dtype=first.dtype, device=first.device)
    for part, place in zip(parts, places, strict=True):
        made[torch.from_numpy(place)] = part
    return made


def _places(parts: Sequence[Any], places: Sequence[Places]) -> Places:
    for each in places:
        if [*map(len, parts)] == [*map(len, each)]:
            return each
    raise RuntimeError(
        f"the shards drew {[*map(len, places[0])]} rows and returned {[*map(len, parts)]}: a transform or collate_fn that "
        "changes the number of rows works on what sample() returns, not in a sharded buffer"
    )

"""One batch of the parts that several shards have drawn."""

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
from interop.samplers.shares import Share

Places = Sequence[np.ndarray]  # of the rows of each part, in what they are joined to
_WEIGHT, _MASK = "priority_weight", ("collector", "mask")


@dataclass(frozen=True)
class Drawn:
    """The part of a batch that one shard has drawn, with indices over all shards."""

    data: Any
    info: dict[Any, Any]
    share: Share  # of the moment of the draw
    lengths: np.ndarray  # int64 [units]: rows of each unit, one after the other
    includes: bool  # whether the info is also part of samples; `data` is still without it


def joined(allotted: Sequence[Share], drawn: Sequence[Drawn | None], key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
    """One batch and its info, with the importance weights of one buffer that holds everything.

    Units come in random order; without `shuffle` in the order of the shards. Each row is copied once. A batch that one
    shard has drawn is not copied. The parts stay as they are.

    Args:
        allotted: the shares of all shards that the number of units of each follows from.
        drawn: what each shard has drawn; None for nothing.
        key: random bits, [2] uint32: of the order.

    RuntimeError where parts do not fit together.
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
    """The info of a part with weights times a factor; with a mask where slices of another part were padded."""
    info = dict(part.info)
    if _WEIGHT in info:
        info[_WEIGHT] = info[_WEIGHT] * factor
    if masked and _MASK not in info:
        index = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
        info[_MASK] = torch.ones_like(index, dtype=torch.bool)
    return info


def _order(lengths: Sequence[np.ndarray], key: np.ndarray | None) -> list[Places]:
    """Random places in a batch of the rows of each part, and of its units; those in order without a key."""
    every = np.concatenate(lengths)
    units = np.arange(every.size) if key is None else randomness.generator_of(key).permutation(every.size)
    rows = np.repeat(units, every).argsort(kind="stable").argsort()
    ends = np.cumsum([[each.sum(), each.size] for each in lengths[:-1]], axis=0)
    return [np.split(rows, ends[:, 0]), np.split(units, ends[:, 1])]


def placed(parts: Sequence[Any], *places: Places) -> Any:
    """Parts of one kind joined, each row at its place: tensors, tensordicts, lists of items, and pytrees of these.

    Args:
        parts: with as many rows as there are places. Tensors are copied once.
        *places: ways to place rows; of each tensor the first one that has as many places as it has rows in each part.

    RuntimeError for parts of different entries, shapes or dtypes, and for other numbers of rows; TypeError for what has
    no rows.
    """
    first = parts[0]
    if isinstance(first, dict) or all(type(part) is TensorDict for part in parts):
        entries = [dict(part.items()) for part in parts]  # `TensorDict.get` would unwrap entries that are no tensors
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

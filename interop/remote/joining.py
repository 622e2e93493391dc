"""One batch of the parts that several shards have drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

from interop import randomness
from interop.pytrees import row_of
from interop.remote.shares import rescale
from interop.samplers.shares import Share

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # NumPy lacks some of the dtypes of torch
_WEIGHT, _MASK = "priority_weight", ("collector", "mask")


@dataclass(frozen=True)
class Drawn:
    """The part of a batch that one shard has drawn, with indices over all shards."""

    data: Any
    info: dict[Any, Any]
    share: Share  # of the moment of the draw
    lengths: np.ndarray  # int64 [units]: rows of each unit, one after the other
    marked: bool  # whether the data are tensordicts that have the info in them, too


def joined(allotted: Sequence[Share], drawn: Sequence[Drawn | None], key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
    """One batch and its info, with the importance weights of one buffer that holds everything.

    Units come in random order, which does not tell their shards; without `shuffle` in the order of the shards. Each row
    is copied once. A batch of which one shard has drawn all is passed through without a copy.

    Args:
        allotted: the shares of all shards that the number of units of each was drawn by.
        drawn: what each shard has drawn; None for nothing.
        key: random bits, [2] uint32: of the order.

    RuntimeError where parts do not fit together.
    """
    factors = rescale(allotted, [None if part is None else part.share for part in drawn])
    parts = [(shard, part) for shard, part in enumerate(drawn) if part is not None]
    masked = any(_MASK in part.info for _, part in parts)
    found = [_revised(part, 1.0 if factors is None else float(factors[shard]), masked) for shard, part in parts]
    if len(parts) == 1:
        return found[0]
    orders = _orders([part.lengths for _, part in parts], key if parts[0][1].share.shuffle else None)
    return _placed([data for data, _ in found], orders), _placed([info for _, info in found], orders)


def _revised(part: Drawn, factor: float, masked: bool) -> tuple[Any, dict[Any, Any]]:
    """The data and info of a part with weights times a factor, and with a mask where another part has one.

    The part itself stays as it is.
    """
    data, entries = part.data, dict[Any, Any]()
    if factor != 1.0 and _WEIGHT in part.info:
        entries[_WEIGHT] = part.info[_WEIGHT] * factor
    if masked and _MASK not in part.info:  # none of its slices was padded
        entries[_MASK] = torch.ones(part.lengths.sum(), dtype=torch.bool, device=part.info["index"][0].device)
    if entries and part.marked:
        data = data.copy()
        for key, value in entries.items():
            data.set(key, data.get(key) * factor if key == _WEIGHT else value)
    return data, {**part.info, **entries}


@dataclass(frozen=True)
class _Order:
    """Where the units of a part and their rows come in the batch."""

    units: np.ndarray
    rows: np.ndarray
    total_units: int
    total_rows: int

    def of(self, length: int) -> tuple[np.ndarray, int]:
        """The places of so many entries, and how many there are in the whole batch. RuntimeError for neither."""
        if length == self.rows.size:
            return self.rows, self.total_rows
        if length == self.units.size:
            return self.units, self.total_units
        raise RuntimeError(
            f"a shard drew {self.rows.size} rows and returned {length}: a transform or collate_fn that changes the number "
            "of rows works on what sample() returns, not in a sharded buffer"
        )


def _orders(lengths: Sequence[np.ndarray], key: np.ndarray | None) -> list[_Order]:
    """Random places of the units of each part; those in order without a key."""
    every = np.concatenate(lengths)
    place = np.arange(every.size) if key is None else randomness.generator_of(key).permutation(every.size)
    ordered = np.empty_like(every)
    ordered[place] = every
    begins = (ordered.cumsum() - ordered)[place]
    within = np.arange(every.sum()) - np.repeat(every.cumsum() - every, every)
    rows = np.repeat(begins, every) + within
    cuts = np.cumsum([each.size for each in lengths])[:-1]
    row_cuts = np.cumsum([each.sum() for each in lengths])[:-1]
    return [
        _Order(units, mine, every.size, rows.size)
        for units, mine in zip(np.split(place, cuts), np.split(rows, row_cuts), strict=True)
    ]


def _placed(parts: list[Any], orders: Sequence[_Order]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor) and first.is_nested:
        items = [row for part in parts for row in part.unbind()]
        return torch.nested.nested_tensor([items[place] for place in _gather(parts, orders)], layout=first.layout)
    if isinstance(first, Tensor):
        return _tensor(parts, orders)
    if type(first) is TensorDict and all(type(part) is TensorDict for part in parts):
        return _tensordict(parts, orders)
    if is_tensor_collection(first):
        return torch.cat(parts)[torch.from_numpy(_gather(parts, orders))]
    if isinstance(first, dict):
        return _by_key(parts, orders)
    if isinstance(first, list) and all(len(part) == order.rows.size for part, order in zip(parts, orders, strict=True)):
        items = [each for part in parts for each in part]
        return [items[place] for place in _gather(parts, orders)]
    if isinstance(first, tuple | list):
        return row_of(type(first), [_placed(list(column), orders) for column in zip(*parts, strict=True)])
    raise TypeError(f"parts of a batch cannot be joined if they are a {type(first).__name__}: use one shard")


def _tensor(parts: Sequence[Tensor], orders: Sequence[_Order]) -> Tensor:
    if any(part.shape[1:] != parts[0].shape[1:] or part.dtype != parts[0].dtype for part in parts):
        found = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        raise RuntimeError(f"the shards hold items of different kinds: {found}")
    places = [order.of(part.shape[0]) for part, order in zip(parts, orders, strict=True)]
    made = torch.empty((places[0][1], *parts[0].shape[1:]), dtype=parts[0].dtype, device=parts[0].device)
    for part, (place, _) in zip(parts, places, strict=True):
        if part.is_cpu and (bits := _BITS.get(part.dtype.itemsize)) is not None:
            made.view(bits).numpy()[place] = part.detach().view(bits).numpy()  # a third of the time of `index_copy_`
        else:
            made.index_copy_(0, torch.from_numpy(place).to(part.device), part)
    return made


def _tensordict(parts: list[Any], orders: Sequence[_Order]) -> TensorDict:
    sizes = [order.of(part.batch_size[0]) for part, order in zip(parts, orders, strict=True)]
    size = (sizes[0][1], *parts[0].batch_size[1:])
    return TensorDict(_by_key(parts, orders), batch_size=size, device=parts[0].device)


def _by_key(parts: Sequence[Any], orders: Sequence[_Order]) -> dict[Any, Any]:
    """The entries of dicts and tensordicts. RuntimeError for one that only some have."""
    entries = [
        dict(part.items()) for part in parts
    ]  # of a tensordict without taking what is no tensor out of its stack
    keys = [each.keys() for each in entries]
    if lacking := set().union(*keys).difference(set(keys[0]).intersection(*keys)):
        raise RuntimeError(f"the shards hold items of different kinds: only some have {sorted(map(str, lacking))}")
    return {key: _placed([each[key] for each in entries], orders) for key in keys[0]}


def _gather(parts: Sequence[Any], orders: Sequence[_Order]) -> np.ndarray:
    """Which entry of all parts, one behind the other, comes at each place."""
    places = np.concatenate([order.of(len(part))[0] for part, order in zip(parts, orders, strict=True)])
    return np.argsort(places)

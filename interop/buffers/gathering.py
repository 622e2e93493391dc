"""Parts of a batch, each drawn from one buffer, put together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from interop.data.index import as_tensor
from interop.data.layout import unchecked


def mark(data: TensorDictBase, place: int, info: dict[Any, Any]) -> None:
    """Set in a part what its sampler said, and under "index" which member it is of."""
    slots = slots_of(info["index"])
    ids = torch.full((slots.shape[0],), place, dtype=torch.int64, device="cpu")
    if data.batch_size[:1] != ids.shape:
        raise RuntimeError(
            f"Failed to set the metadata of {ids.shape[0]} items in a sample of batch size {list(data.batch_size)}: the "
            "transforms and the collate_fn of a member must keep its first dim"
        )
    index = _index(slots, ids, data.batch_size, data.device)
    _set(data, {"index": index, **{key: value for key, value in info.items() if key != "index"}}, 1)


def described(parts: Sequence[tuple[int, dict[Any, Any]]], marked: bool) -> TensorDictBase:
    """What the members said, stacked: [parts, each] for samples that are marked with it, [parts] for others."""
    columns = _columns([info for _, info in parts])
    if columns is not None:
        lead = columns["index"].shape[: 1 + marked]
        told = TensorDict(
            {"index": TensorDict({"index": columns.pop("index"), "buffer_ids": _ids(parts, lead)}, lead)}, lead
        )
        return told.update(columns)
    rows: list[TensorDictBase] = []
    for place, info in parts:
        slots = slots_of(info["index"])
        batch = [slots.shape[0]] if marked else []
        ids = torch.full(batch, place, dtype=torch.int64, device="cpu")
        row = TensorDict({"index": TensorDict({"index": slots, "buffer_ids": ids}, batch)}, batch)
        for key, value in info.items():
            if key != "index":
                row.set(key, value)
        rows.append(row)
    stacked: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(rows, 0)
    return stacked.clone()


def _columns(infos: Sequence[dict[Any, Any]]) -> dict[Any, Tensor] | None:
    """What all infos have, stacked; None where they differ in more than values."""
    if any(info.keys() != infos[0].keys() for info in infos):
        return None
    columns = {}
    for key in infos[0]:
        column: list[Any] = [slots_of(info[key]) if key == "index" else info[key] for info in infos]
        first = column[0]
        if not all(
            isinstance(each, Tensor) and (each.shape, each.device) == (first.shape, first.device) for each in column
        ):
            return None
        columns[key] = torch.stack(column)
    return columns


def slots_of(index: Any) -> Tensor:
    """[n] for slots, [n, ndim] for coordinates."""
    if isinstance(index, Tensor):
        return index
    return torch.stack([as_tensor(each) for each in index], -1) if isinstance(index, tuple) else as_tensor(index)


def _ids(parts: Sequence[tuple[int, Any]], lead: Sequence[int]) -> Tensor:
    """The member of each part, or of each of its items."""
    places = np.array([place for place, _ in parts])
    return torch.from_numpy(places if len(lead) == 1 else places.repeat(lead[1]).reshape(lead))


def _index(slots: Tensor, ids: Tensor, shape: torch.Size, device: torch.device | None) -> TensorDictBase:
    """The entry "index" of a sample of batch size `shape`, whose first dims are those of ids."""
    entries = {"index": _expanded(slots, ids.ndim, shape), "buffer_ids": _expanded(ids, ids.ndim, shape)}
    if device is not None and device.type != "cpu":
        entries = {key: value.to(device) for key, value in entries.items()}
    return unchecked(entries, shape, device, None)


def _expanded(value: Tensor, lead: int, shape: torch.Size) -> Tensor:
    """The value repeated over the dims of `shape` after the first `lead`."""
    if len(shape) == lead:
        return value
    rest = value.shape[lead:]
    return value.reshape(*value.shape[:lead], *(1 for _ in shape[lead:]), *rest).expand(*shape, *rest).clone()


def _set(data: TensorDictBase, entries: dict[Any, Any], lead: int) -> None:
    shape = data.batch_size
    for key, value in entries.items():
        if isinstance(value, Tensor):
            value = value if value.ndim > lead else _expanded(value, lead, shape)
            value = value.to(data.device) if data.device is not None else value
        try:
            data.set(key, value)
        except RuntimeError as error:
            raise RuntimeError(f"Failed to set the metadata {key!r} in a sample of batch size {list(shape)}") from error

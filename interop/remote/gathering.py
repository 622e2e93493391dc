"""Batches in parts, one for each shard: rows taken out, and parts put together."""

from typing import Any

import torch
from torch import Tensor

from interop.pytrees import each_leaf, row_of


def gathered(parts: list[Any], places: Tensor | None) -> Any:
    """Rows of several shards as one batch: one part behind the other or, with `places` [rows], each row at its place."""
    first = parts[0]
    if isinstance(first, tuple | dict):
        keys = range(len(first)) if isinstance(first, tuple) else first
        found = {key: gathered([part[key] for part in parts], places) for key in keys}
        return found if isinstance(first, dict) else row_of(type(first), list(found.values()))
    rows = [each for part in parts for each in part] if isinstance(first, list) else torch.cat(parts)
    if places is None:
        return rows
    order = places.argsort()
    return [rows[n] for n in order.tolist()] if isinstance(rows, list) else rows[order]


def rows_at(data: Any, at: Tensor) -> Any:
    """The rows of a batch at positions, of a list its items. What has no dims is the same for all rows."""
    if isinstance(data, list):
        return [data[n] for n in at.tolist()]
    return each_leaf(data, lambda leaf: leaf[at] if getattr(leaf, "ndim", 0) else leaf)

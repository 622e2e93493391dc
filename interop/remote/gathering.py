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


def rows_at(data: Any, at: Tensor, count: int) -> Any:
    """The rows of a batch of `count` at positions, of a list its items. What has no dims is the same for all rows.

    RuntimeError for another number of rows.
    """

    def taken(leaf: Any) -> Any:
        length = len(leaf) if isinstance(leaf, list) else leaf.shape[0] if getattr(leaf, "ndim", 0) else count
        if length != count:
            raise RuntimeError(f"{length} rows were given for {count} indices: give one for each; nothing was written")
        if isinstance(leaf, list):
            return [leaf[n] for n in at.tolist()]
        return leaf[at] if getattr(leaf, "ndim", 0) else leaf

    return taken(data) if isinstance(data, list) else each_leaf(data, taken)

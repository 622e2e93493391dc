"""Batches in parts, one for each shard: rows taken out, and parts put one behind the other."""

from typing import Any

import numpy as np
from torch import Tensor

from interop.data.pytrees import each_leaf, length_of
from interop.remote.joining import placed


def together(parts: list[Any]) -> Any:
    """Parts one behind the other. RuntimeError where they do not fit together."""
    lengths = [length_of(part) for part in parts]
    return placed(parts, np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))


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

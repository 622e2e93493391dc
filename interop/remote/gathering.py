"""Selection of a batch's rows for each shard, and concatenation of parts."""

from typing import Any

import numpy as np
from torch import Tensor

from interop.data.pytrees import each_leaf, length_of
from interop.remote.joining import placed


def together(parts: list[Any]) -> Any:
    """Concatenate parts. RuntimeError if they do not fit together."""
    lengths = [length_of(part) for part in parts]
    return placed(parts, np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))


def rows_at(data: Any, at: Tensor, count: int) -> Any:
    """Select rows (list: items) of a batch of `count` rows. A value without dims is shared by all rows.

    RuntimeError if `data` has another number of rows.
    """

    def taken(leaf: Any) -> Any:
        length = len(leaf) if isinstance(leaf, list) else leaf.shape[0] if getattr(leaf, "ndim", 0) else count
        if length != count:
            raise RuntimeError(f"{length} rows were given for {count} indices: give one for each; nothing was written")
        if isinstance(leaf, list):
            return [leaf[n] for n in at.tolist()]
        return leaf[at] if getattr(leaf, "ndim", 0) else leaf

    return taken(data) if isinstance(data, list) else each_leaf(data, taken)

"""Rows that several shards were asked for, as one batch."""

from typing import Any

import torch
from torch import Tensor

from interop.pytrees import row_of


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

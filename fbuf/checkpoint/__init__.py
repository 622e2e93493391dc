"""Checkpoints that a crash cannot lose and damage cannot pass unseen.

`save_state` and `load_state` are for pytrees, `Writing` and `load` for trees of plain values and arrays.
"""

import importlib
from typing import TYPE_CHECKING

from fbuf.checkpoint.arrays import Columns
from fbuf.checkpoint.fields import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields
from fbuf.checkpoint.reading import Reading, StoredArray, StoredColumns, Verify, load
from fbuf.checkpoint.writing import Writing

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "Columns",
    "Fields",
    "Reading",
    "StoredArray",
    "StoredColumns",
    "Verify",
    "Writing",
    "load",
    "load_state",
    "load_with_extra",
    "save_state",
]

if TYPE_CHECKING:
    from fbuf.checkpoint.pytree import load_state, load_with_extra, save_state
else:

    def __getattr__(name: str) -> object:  # they need JAX, which takes a second to import
        if name not in ("load_state", "load_with_extra", "save_state"):
            raise AttributeError(f"module 'fbuf.checkpoint' has no attribute {name!r}")
        found = getattr(importlib.import_module("fbuf.checkpoint.pytree"), name)
        globals()[name] = found
        return found

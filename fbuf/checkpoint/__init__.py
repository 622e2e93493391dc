"""Checkpoints that a crash cannot lose and damage cannot pass unseen.

`save_state` and `load_state` are for pytrees, `Writing` and `load` for trees of plain values and arrays.
"""

from fbuf.checkpoint.arrays import Columns
from fbuf.checkpoint.fields import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields
from fbuf.checkpoint.pytree import load_state, load_with_extra, save_state
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

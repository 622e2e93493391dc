"""Checkpoints that a crash cannot lose and damage cannot pass unseen.

`save_state` and `load_state` do pytrees; `Writing` and `load` whatever can be said by a tree of plain values and arrays.
"""

from fbuf.checkpoint.arrays import Columns
from fbuf.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from fbuf.checkpoint.fields import Fields
from fbuf.checkpoint.pytree import load_state, load_with_extra, save_state
from fbuf.checkpoint.reading import Source, StoredArray, StoredColumns, Verify, load
from fbuf.checkpoint.writing import Writing

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "Columns",
    "Fields",
    "Source",
    "StoredArray",
    "StoredColumns",
    "Verify",
    "Writing",
    "load",
    "load_state",
    "load_with_extra",
    "save_state",
]

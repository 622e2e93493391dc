"""Checkpoints of dataset buffers."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Verify, json_text
from interop.checkpoint.checkpointer import Content, StorageCheckpointerBase

_NAME = "dataset.json"
_PLACES = {
    "made",
    "files",
    "from_local",
    "local_files",
}  # fields of a record that differ between conversions of one dataset


class DatasetCheckpointer(StorageCheckpointerBase):
    """Saves the identity of the dataset instead of its rows, which are on disk and never change.

    `loads` raises CheckpointMismatch for a checkpoint of another dataset, or another number of rows.
    """

    changes_rows = False

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__()
        self._rows_of = {key: value for key, value in record.items() if key not in _PLACES}

    def dumps(self, storage: Content, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(exist_ok=True)
        (Path(path) / _NAME).write_text(json.dumps(self._rows_of))

    def loads(
        self,
        storage: Content,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        file = Path(path) / _NAME
        saved = json_text.parsed(file.read_bytes(), str(file), CheckpointCorrupt, halves=True)
        if saved != self._rows_of:
            raise CheckpointMismatch(f"the checkpoint is of {saved}, the rows here are of {self._rows_of}")

"""Copies of the folders of `torchrl_dumps` to do harm to."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import interop as rl
from fbuf.checkpoint import CheckpointError
from tests.interop.checkpoint.torchrl_dumps_targets import EXPECTED, FOLDER, TARGETS, content, leaves


def bytes_of(folder: Path) -> dict[str, Any]:
    """Every file of a folder, and what each link is."""
    found: dict[str, Any] = {}
    for each in sorted(folder.rglob("*")):
        name = str(each.relative_to(folder))
        found[name] = os.readlink(each) if each.is_symlink() else each.read_bytes() if each.is_file() else None
    return found


def fingerprint(buffer: Any) -> Any:
    """All that a load could change."""
    of_ensemble = isinstance(buffer, rl.ReplayBufferEnsemble)
    members = [buffer[place] for place in range(len(EXPECTED["ensemble"]["members"]))] if of_ensemble else [buffer]
    return [
        (
            len(each),
            {name: leaf.tolist() for name, leaf in leaves(content(each)).items()},
            str(each._sampler.state_dict()),
            str(each._writer.state_dict()),
            str(each._transform.state_dict()),
            each._batch_size,
        )
        for each in members
    ]


def load(buffer: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the checkpoint counts")
        buffer.loads(folder)


class Victim:
    """A copy of a dump, and a buffer that was loaded from the whole one."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        shutil.copytree(FOLDER / name, self.folder)
        self.fill()

    def fill(self) -> None:
        self.buffer = TARGETS[self.name]()
        load(self.buffer, FOLDER / self.name)
        self.before = fingerprint(self.buffer)

    def restore(self, changed: Path) -> None:
        """Make what was changed whole again."""
        if changed.is_dir() and not changed.is_symlink():
            shutil.rmtree(changed)
        else:
            changed.unlink(missing_ok=True)
        whole = FOLDER / self.name / changed.relative_to(self.folder)
        (shutil.copytree if whole.is_dir() else shutil.copy)(whole, changed)

    def attacked(self, damage: str) -> CheckpointError | None:
        """Load the damaged copy: the error, or None where it came out whole."""
        files, error = bytes_of(self.folder), None
        try:
            load(self.buffer, self.folder)
        except CheckpointError as raised:
            error = raised
        assert bytes_of(self.folder) == files, f"{damage}: the folder was changed"
        assert fingerprint(self.buffer) == self.before, damage
        if error is None:
            self.fill()
        return error


def edit(path: Path, change: Any) -> None:
    found = json.loads(path.read_text())
    path.write_text(json.dumps(change(found)))

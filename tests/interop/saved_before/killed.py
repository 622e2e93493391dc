"""A process that is killed in the middle of a write to a folder: `python -m tests.interop.saved_before.killed NAME FOLDER`.

It replaces a step of the storage by one that does a part of it and kills the process, as SIGKILL at that moment would.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from interop import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from interop.engine.kept_values import KeptValues
from interop.host.rows import TorchRows
from interop.shared import folder
from interop.shared.folder_description import DESCRIPTION
from tests.interop.saved_before.folders import FOLDERS, Folder

write_run = TorchRows.write_run


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_the_first_leaf(self: TorchRows, start: int, leaves: Sequence[torch.Tensor]) -> None:
    """The rows in the folder get their first leaf; the others are still those of the old rows."""
    if not self._mapped:
        write_run(self, start, leaves)
        return
    rows = (start + np.arange(len(leaves[0]))) % len(self.tensors[0])
    for row, leaf in zip(rows.tolist(), leaves[0], strict=True):
        self.tensors[0][row] = leaf
    die()


def before_the_commit(self: KeptValues, rows: object) -> None:
    """The rows are written, and lose their priorities or uses."""
    self.by_row[slice(rows.start, rows.stop) if isinstance(rows, range) else rows] = 0  # type: ignore[call-overload]
    die()


def in_the_update(self: KeptValues, slots: np.ndarray, words: np.ndarray) -> None:
    """Half of the priorities or uses are written."""
    self.save(slots)
    half = slice(len(slots) // 2)
    self.by_row.reshape(-1)[slots[half]] = words[half]
    die()


def without_a_description(source: str, target: str | Path) -> None:
    """All files are there, but for the last one, which makes them a storage."""
    if Path(target).name == DESCRIPTION:
        die()
    os.rename(source, target)


def extends(buffer: ReplayBuffer, case: Folder) -> None:
    buffer.extend(case.rows(case.count, 5))


def updates(buffer: ReplayBuffer, case: Folder) -> None:
    buffer.update_priority(torch.arange(6), torch.full((6,), 7.0))


def draws(buffer: ReplayBuffer, case: Folder) -> None:
    buffer.sample()


def loads(buffer: ReplayBuffer, case: Folder) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(buffer.storage.max_size), batch_size=4)
        other.extend(case.rows(200, 5))
        other.dumps(Path(scratch) / "saved")
        buffer.loads(Path(scratch) / "saved")


# How: the step that is replaced, by what, and the call.
KILLS: dict[str, tuple[object, str, Callable[..., None], Callable[[ReplayBuffer, Folder], None]]] = {
    "in the rows": (TorchRows, "write_run", in_the_first_leaf, extends),
    "before the commit": (KeptValues, "forget", before_the_commit, extends),
    "in an update": (KeptValues, "put", in_the_update, updates),
    "in a draw": (KeptValues, "put", in_the_update, draws),
    "in a load": (TorchRows, "write_run", in_the_first_leaf, loads),
    "in the first write": (folder.os, "replace", without_a_description, extends),
}


def kill(name: str, path: Path) -> None:
    """Have a process open the folder of a case, and be killed."""
    command = [sys.executable, "-W", "ignore", "-m", __name__, name, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def main() -> None:
    name, path = sys.argv[1:]
    case = FOLDERS[name]
    assert case.killed is not None
    owner, step, replacement, call = KILLS[case.killed]
    buffer = case.opened(Path(path)) if (Path(path) / DESCRIPTION).exists() else case.new(Path(path))
    setattr(owner, step, replacement)
    call(buffer, case)


if __name__ == "__main__":
    main()

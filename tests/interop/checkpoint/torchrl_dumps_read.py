"""Buffers into which the converted folders of `torchrl_dumps` are loaded, the expected content, and copies to damage.

`dumps` of torchrl 0.14 wrote them; test_torchrl_folder_against_torchrl.py writes others, where torchrl is installed.
"""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, tensorclass

import interop as rl
from fbuf.checkpoint import CheckpointError
from interop.data.bridge import numpy_view

FOLDER = Path(__file__).parent / "torchrl_dumps"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


def _td(**given: Any) -> rl.ReplayBuffer:
    given.setdefault("storage", rl.LazyTensorStorage(8))
    return rl.TensorDictReplayBuffer(batch_size=3, **given)


def _plain(**given: Any) -> rl.ReplayBuffer:
    given.setdefault("storage", rl.LazyTensorStorage(8))
    return rl.ReplayBuffer(batch_size=3, **given)


def _two_dims() -> rl.ReplayBuffer:
    return _plain(storage=rl.LazyTensorStorage(12, ndim=2), dim_extend=0)


def _written(buffer: rl.ReplayBuffer, item: Any) -> rl.ReplayBuffer:
    buffer.extend(item)
    return buffer


def _tree() -> Any:
    pair = (torch.zeros(1, 2), [torch.tensor([False])])
    return {"a": torch.tensor([0]), "b": pair, "c.d": torch.tensor([0]), "e/f": torch.tensor([0])}


def _step() -> Step:
    return Step(obs=torch.zeros(1, 2), reward=torch.zeros(1), batch_size=[1])


def _read_only() -> rl.ReplayBuffer:
    rows = TensorDict(
        {
            "obs": torch.zeros(8, 2),
            "we/ird .key%": torch.zeros(8, dtype=torch.int16),
            "nothing": torch.zeros(8, 0),
            "next": TensorDict({"reward": torch.zeros(8, 1), "done": torch.zeros(8, 1, dtype=torch.bool)}, [8]),
            "traj": torch.zeros(8, dtype=torch.int64),
        },
        [8],
    )
    return rl.ReplayBuffer(storage=rl.TensorStorage(rows), writer=rl.ImmutableDatasetWriter(), batch_size=3)


def _prioritized(alpha: float, beta: float, eps: float = 1e-8, dtype: torch.dtype = torch.float32) -> rl.ReplayBuffer:
    return _td(sampler=rl.PrioritizedSampler(8, alpha, beta, eps, dtype))


STRUCTURES = ("tensorclass", "tensorclass_below", "pytree")  # which torchrl does not save
TARGETS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: _td(generator=torch.Generator()),
    "plain": _plain,
    "memmap": lambda: _plain(storage=rl.LazyMemmapStorage(8)),
    "dtypes": _plain,
    "two_dims": _two_dims,
    "two_dims_full": _two_dims,
    "tensorclass": lambda: _written(_plain(), _step()),
    "tensorclass_below": lambda: _written(_plain(), TensorDict({"step": _step(), "a": torch.tensor([0])}, [1])),
    "pytree": lambda: _written(_plain(), _tree()),
    "one_tensor": _plain,
    "epoch": _plain,
    "consuming": _plain,
    "read_only": _read_only,
    "priorities": lambda: _prioritized(0.6, 0.4),
    "priorities_double": lambda: _prioritized(1.1, 1.0, 1e-6, torch.float64),
    "priorities_without_alpha": lambda: _prioritized(0.0, 1.0),
}


def leaves(data: Any, path: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Tensors by path."""
    if isinstance(data, torch.Tensor):
        return {"/".join(path): data}
    items: Any = enumerate(data) if isinstance(data, list | tuple) else data.items()
    return {name: leaf for key, each in items for name, leaf in leaves(each, (*path, str(key))).items()}


def same_bits(data: Any, expected: dict[str, Any]) -> None:
    """Assert that data has exactly these tensors."""
    found = leaves(data)
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        assert str(leaf.dtype) == expected[name]["dtype"], name
        assert list(leaf.shape) == expected[name]["shape"], name
        assert np.ascontiguousarray(numpy_view(leaf.contiguous())).tobytes().hex() == expected[name]["bytes"], name


# ---------------------------------------------------------------------- damage


def bytes_of(folder: Path) -> dict[str, Any]:
    """Every file of a folder, and what each link is."""
    found: dict[str, Any] = {}
    for each in sorted(folder.rglob("*")):
        name = str(each.relative_to(folder))
        found[name] = os.readlink(each) if each.is_symlink() else each.read_bytes() if each.is_file() else None
    return found


def fingerprint(buffer: Any) -> Any:
    """All that a load could change."""
    rows = {name: leaf.tolist() for name, leaf in leaves(buffer._storage[:]).items()}
    parts = (buffer._sampler, buffer._writer, buffer._transform)
    return len(buffer), rows, [str(each.state_dict()) for each in parts], buffer._batch_size


def load(buffer: Any, folder: Path, like: Any = None) -> None:
    """Convert a folder of torchrl, and load the checkpoint."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as made:
        warnings.filterwarnings("ignore", ".*the checkpoint counts")
        rl.convert_torchrl(folder, Path(made) / "ours", like)
        buffer.loads(Path(made) / "ours")


class Victim:
    """A copy of a dump, and a buffer that was loaded from the whole one. Each load is of a folder converted for it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        shutil.copytree(FOLDER / name, self.folder)
        self.fill()

    def fill(self) -> None:
        self.buffer = TARGETS[self.name]()
        load(self.buffer, FOLDER / self.name, self.buffer)
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
            load(self.buffer, self.folder, self.buffer)
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

"""What torchrl's storages wrote of TED data that its checkpointers made flat, nested, or an H5 file, before."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop.checkpoint import h5_files
from interop.checkpoint.torchrl_dirs_entries import Held, Plain, Ragged
from interop.checkpoint.torchrl_dirs_files import Tensor
from interop.ted import Flat2TED

SHAPE = "_storage_shape"  # an entry of what hooks have made
_TRAJECTORY = re.compile(r"traj_(\d{1,9})")


def unhooked(data: TensorDictBase, checkpointer: Any, where: str) -> TensorDictBase:
    """The rows that there is room for, [rows, *lanes], of flat data.

    By what the checkpointer of the target knows of the keys, or else the usual ones.
    """
    flattening = getattr(checkpointer, "_flattening", None)
    hook = Flat2TED()
    if flattening is not None:
        hook._names, hook._done_key = flattening._names, flattening._done_key[1:]
    try:
        return hook(data)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{where}: is not TED data that was made flat: {error}") from error


def flat_of(held: Held) -> TensorDictBase:
    """The tensors of a folder, read. Those that are nested are flat in their files."""
    made = TensorDict({}, batch_size=[], device="cpu")
    for key, entry in held.entries.items():
        if isinstance(entry, Held):
            made.set(key, flat_of(entry))
        elif isinstance(entry, Tensor):
            made.set(key, entry.to_torch())
        elif isinstance(entry, Ragged):
            made.set(key, entry.values.to_torch())
        elif isinstance(entry, Plain):
            made.set(key, NonTensorData(entry.value, device="cpu"))
        else:
            raise CheckpointMismatch(f"{entry.where}: stacked tensordicts cannot be read here")
    return made


def flat_of_h5(path: Path) -> tuple[TensorDictBase, dict[str, Any]]:
    """The same of an H5 file, which has a group for each trajectory, and the numbers that it has beside them."""
    parts: dict[tuple[str, ...], dict[int, np.ndarray]] = {}
    told: dict[str, Any] = {}
    with h5_files.reading(path) as opened, h5_files.faults_of(path):
        for (first, *rest), held in h5_files.datasets(opened, path).items():
            number = _TRAJECTORY.fullmatch(first)
            if rest and number:
                parts.setdefault(tuple(rest), {})[int(number[1])] = held.read()
            elif not rest and math.prod(held.shape) <= 64:
                told[first] = held.read().tolist()
        count = max(map(len, parts.values()), default=0)
        if not count or any(sorted(each) != list(range(count)) for each in parts.values()):
            raise ValueError("some trajectories are missing")
        flat = {key: np.concatenate([each[number] for number in range(count)]) for key, each in parts.items()}
    made = TensorDict({}, batch_size=[], device="cpu")
    for key, value in told.items():
        made.set(key, NonTensorData(value, device="cpu"))
    for path_of, array in flat.items():
        made.set(path_of, torch.from_numpy(array))
    return made, told


def lengthened(data: TensorDictBase, filled: int, shape: tuple[int, ...], where: str) -> TensorDictBase:
    """Flat data of an H5 file with the rows that are cut off there: some of those that were never written.

    Of each lane that is not full a row is missing, which is one of the last in the file. CheckpointCorrupt where there are
    not as many that were never written.
    """
    done, items = data.get("done", None), math.prod(shape)
    if not isinstance(done, torch.Tensor) or done.numel() != items or not 0 < filled < shape[0]:
        return data
    ends = (done != 0).reshape(-1, shape[0])  # lane after lane
    ends[:, filled - 1] = True
    spare = shape[0] - filled + int(ends[-1, filled:].sum())
    for key in data.keys(True, True):
        value = data.get(key)
        if not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        missing = items + int(ends.sum()) - len(value)
        if len(value) != items and missing > 0:
            if missing > spare:
                raise CheckpointCorrupt(f"{where}: {missing} rows of {key!r} are missing")
            data.set(key, torch.cat((value, value.new_zeros(missing, *value.shape[1:]))))
    return data

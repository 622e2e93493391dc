"""Things on disk that are looked at: checkpoints, folders of rows, and datasets of other programs."""

from pathlib import Path

import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def steps(count: int) -> TensorDict:
    t = torch.arange(count)
    behind = {"reward": torch.ones(count, 1), "done": (t % 5 == 4)[:, None], "observation": torch.ones(count, 3)}
    own = {
        "observation": torch.zeros(count, 3),
        "action": t[:, None].float(),
        "note": [f"step {n}" for n in range(count)],
    }
    return TensorDict({**own, "next": TensorDict(behind, [count])}, [count])


def a_buffer(count: int = 30) -> TensorDictPrioritizedReplayBuffer:
    storage = LazyTensorStorage(100)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=4)
    buffer.extend(steps(count))
    return buffer


def a_checkpoint(path: Path) -> Path:
    a_buffer().dumps(path)
    return path


def a_folder(path: Path, checksums: bool = True, count: int = 30) -> Path:
    storage = LazyMemmapStorage(20, scratch_dir=path, checksums=checksums)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(steps(count))
    storage.close()
    return path


def a_list(path: Path) -> Path:
    buffer = ReplayBuffer(storage=ListStorage(10))
    buffer.extend([1, "two", torch.ones(3)])
    buffer.dumps(path)
    return path


def an_ensemble(path: Path) -> Path:
    ReplayBufferEnsemble(a_buffer(), a_buffer(7), p=[0.25, 0.75], batch_size=8).dumps(path)
    return path


def sparse(path: Path, size: int) -> Path:
    """A folder of rows of so many bytes, which are holes."""
    row = 1 << 20
    storage = LazyMemmapStorage(2, scratch_dir=path)
    storage.set(range(2), torch.zeros(2, row, dtype=torch.uint8))
    storage.close()
    _enlarge(path, size // row)
    return path


def _enlarge(path: Path, rows: int) -> None:
    """Give a folder more rows, without writing them."""
    import numpy as np

    from interop.shared.folder_description import DESCRIPTION, HEAD, STATE, description, sealed

    fields = description(path)
    files = {name: fields.fields("files").whole(name) for name in fields.fields("files")}
    [name] = [each for each in files if each != STATE]
    files[name] = files[name] // 2 * rows
    with open(path / name, "r+b") as file:
        file.truncate(0)
        file.truncate(files[name])
    told = {each: fields.any(each) for each in fields} | {"files": files, "capacity": rows, "rows": rows}
    (path / DESCRIPTION).write_text(sealed(told))
    state = np.memmap(path / STATE, np.int64, "r+")
    state[HEAD : HEAD + 2] = rows, 0
    state.flush()

"""Buffers into which the folders of `torchrl_dumps` are loaded, and what is expected of each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, tensorclass
from torch import nn

import interop as rl
from interop.data.bridge import numpy_view

FOLDER = Path(__file__).parent / "torchrl_dumps"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


class Scaling(nn.Module):
    """A transform with the state of torchrl's RewardScaling."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("standard_normal", torch.tensor(False))
        self.register_buffer("loc", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, data: Any) -> Any:
        return data

    inv = forward


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


def _sliced() -> rl.ReplayBuffer:
    sampler = rl.SliceSampler(slice_len=2, traj_key="traj", strict_length=False)
    return rl.TensorDictReplayBuffer(batch_size=4, storage=rl.LazyTensorStorage(24), sampler=sampler)


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


def _ensemble() -> Any:
    members = _td(), _td(storage=rl.LazyTensorStorage(6))
    return rl.ReplayBufferEnsemble(*members, p=[0.25, 0.75], batch_size=4)


TARGETS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: _td(generator=torch.Generator()),
    "uniform_full": _td,
    "plain": _plain,
    "memmap": lambda: _plain(storage=rl.LazyMemmapStorage(8)),
    "dtypes": _plain,
    "two_dims": _two_dims,
    "two_dims_full": _two_dims,
    "trajectory_rows": _plain,
    "tensorclass": lambda: _written(_plain(), _step()),
    "tensorclass_below": lambda: _written(_plain(), TensorDict({"step": _step(), "a": torch.tensor([0])}, [1])),
    "pytree": lambda: _written(_plain(), _tree()),
    "one_tensor": _plain,
    "epoch": _plain,
    "slices": _sliced,
    "consuming": _plain,
    "highest": lambda: _td(writer=rl.TensorDictMaxValueWriter(rank_key=("next", "reward"))),
    "highest_partial": lambda: _td(writer=rl.TensorDictMaxValueWriter(rank_key="traj")),
    "generations": lambda: _td(writer=rl.TensorDictRoundRobinWriter(track_generations=True)),
    "read_only": _read_only,
    "compressed": lambda: _plain(storage=rl.CompressedListStorage(8)),
    "compressed_tensordicts": lambda: _plain(storage=rl.CompressedListStorage(8)),
    "transforms": lambda: _td(transform=Scaling()),
    "ensemble": _ensemble,
    "priorities": lambda: _prioritized(0.6, 0.4),
    "priorities_double": lambda: _prioritized(1.1, 1.0, 1e-6, torch.float64),
    "priorities_without_alpha": lambda: _prioritized(0.0, 1.0),
}


def leaves(data: Any, path: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Tensors by path."""
    if isinstance(data, torch.Tensor):
        return {"/".join(path): data}
    if isinstance(data, list | tuple | dict):
        items: Any = data.items() if isinstance(data, dict) else enumerate(data)
    else:
        items = data.items() if hasattr(data, "items") else ()
    return {name: leaf for key, each in items for name, leaf in leaves(each, (*path, str(key))).items()}


def content(buffer: Any) -> Any:
    """What is stored: all rows, or the items of a list."""
    storage = buffer._storage
    return [storage.get(each) for each in range(len(storage))] if isinstance(storage, rl.ListStorage) else storage[:]


def same_bits(data: Any, expected: dict[str, Any]) -> None:
    """Assert that data has exactly these tensors."""
    found = leaves(data)
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        assert str(leaf.dtype) == expected[name]["dtype"], name
        assert list(leaf.shape) == expected[name]["shape"], name
        assert np.ascontiguousarray(numpy_view(leaf.contiguous())).tobytes().hex() == expected[name]["bytes"], name

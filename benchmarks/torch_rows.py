"""The rows that the torch benchmarks store: one transition of six leaves, as tensordict and as NumPy fields."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

OBSERVATION, ACTION = 32, 8


def transitions(count: int) -> TensorDict:
    """`count` random transitions; 299 bytes each."""
    draw = torch.Generator().manual_seed(0)
    return TensorDict(
        {
            "observation": torch.randn(count, OBSERVATION, generator=draw),
            "action": torch.randn(count, ACTION, generator=draw),
            "next": TensorDict(
                {
                    "observation": torch.randn(count, OBSERVATION, generator=draw),
                    "reward": torch.randn(count, 1, generator=draw),
                    "done": torch.rand(count, 1, generator=draw) < 0.01,
                    "terminated": torch.rand(count, 1, generator=draw) < 0.01,
                },
                [count],
            ),
        },
        [count],
    )


def fields(rows: TensorDict) -> dict[str, np.ndarray]:
    """The same six leaves under flat names."""
    return {
        "obs": rows["observation"].numpy(),
        "act": rows["action"].numpy(),
        "next_obs": rows["next", "observation"].numpy(),
        "rew": rows["next", "reward"].numpy(),
        "done": rows["next", "done"].numpy(),
        "terminated": rows["next", "terminated"].numpy(),
    }


def field_specs() -> dict[str, dict[str, Any]]:
    """Those fields as cpprb wants them described."""
    return {
        "obs": {"shape": OBSERVATION},
        "act": {"shape": ACTION},
        "next_obs": {"shape": OBSERVATION},
        "rew": {},
        "done": {"dtype": np.bool_},
        "terminated": {"dtype": np.bool_},
    }


def fill(buffer: Any, rows: TensorDict, capacity: int) -> None:
    """Extend until every slot holds a row."""
    for _ in range(-(-capacity // len(rows))):
        buffer.extend(rows)

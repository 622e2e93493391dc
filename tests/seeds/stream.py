"""Steps of CartPole as they are collected from environments that go on, of each what was there and what came "next"."""

from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict


def cart_pole(
    frames: int, envs: int | None = None, seed: int = 0, most_steps: int | None = None
) -> Iterator[TensorDict]:
    """Batches of `frames` random steps: [frames], or for several environments [envs, frames / envs].

    Each trajectory has an id of its own under ("collector", "traj_ids"), and its steps are counted; it is truncated after
    `most_steps`. An environment is reset in the step that ends its trajectory.
    """
    made = [gymnasium.make("CartPole-v1") for _ in range(envs or 1)]
    random = np.random.default_rng(seed)
    observations = [env.reset(seed=seed + place)[0] for place, env in enumerate(made)]
    ids, counts = list(range(len(made))), [0] * len(made)
    while True:
        rows: list[list[TensorDict]] = [[] for _ in made]
        for _ in range(frames // len(made)):
            for place, env in enumerate(made):
                action = int(random.integers(2))
                following, reward, terminated, truncated, _ = env.step(action)
                truncated = truncated or counts[place] + 1 == most_steps
                done = terminated or truncated
                now = (observations[place], action, ids[place], counts[place])
                rows[place].append(_step(*now, following, float(reward), terminated, truncated))
                observations[place], counts[place] = following, counts[place] + 1
                if done:
                    observations[place], counts[place], ids[place] = env.reset()[0], 0, max(ids) + 1
        batch = torch.stack([torch.stack(each) for each in rows])
        yield batch if envs is not None else batch[0]


def _step(
    observation: np.ndarray,
    action: int,
    id_: int,
    count: int,
    following: np.ndarray,
    reward: float,
    terminated: bool,
    truncated: bool,
) -> TensorDict:
    def flags(terminated: bool, truncated: bool) -> dict[str, torch.Tensor]:
        named = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        return {name: torch.tensor([value]) for name, value in named.items()}

    behind = {
        "observation": torch.tensor(following),
        "reward": torch.tensor([reward]),
        "step_count": torch.tensor([count + 1]),
    }
    return TensorDict(
        {
            "observation": torch.tensor(observation),
            "action": torch.tensor(action),
            "step_count": torch.tensor([count]),
            **flags(False, False),
            "next": TensorDict({**behind, **flags(terminated, truncated)}),
            "collector": TensorDict({"traj_ids": torch.tensor(id_)}),
        }
    )

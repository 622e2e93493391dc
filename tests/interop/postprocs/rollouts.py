"""Rollouts to make n-step transitions of, and these by a loop over steps."""

from typing import Any

import torch
from tensordict import TensorDict


def rollout(*batch: int, seed: int = 0, ends: float = 0.2, agents: tuple[int, ...] = ()) -> TensorDict:
    """Random steps [*batch], the last dim of which is time; values tell where they come from."""
    draw = torch.Generator().manual_seed(seed)
    shape, each = torch.Size(batch), torch.Size([*batch, *agents])
    place = torch.arange(shape.numel(), dtype=torch.float32).reshape(shape)
    terminated = torch.rand(*each, 1, generator=draw) < ends / 2
    truncated = torch.rand(*each, 1, generator=draw) < ends / 2
    wide = (*agents, 2) if agents else (2,)
    ones = [1] * len(wide)
    return TensorDict(
        {
            "observation": place.reshape(*shape, *ones).expand(*shape, *wide).clone(),
            "action": torch.randn(*shape, 3, generator=draw),
            "done": torch.zeros(*each, 1, dtype=torch.bool),
            "next": TensorDict(
                {
                    "observation": place.reshape(*shape, *ones).expand(*shape, *wide).clone() + 0.5,
                    "deep": TensorDict({"count": torch.randint(0, 99, each, generator=draw)}, shape),
                    "reward": torch.randn(*each, 1, generator=draw),
                    "done": terminated | truncated,
                    "terminated": terminated,
                    "truncated": truncated,
                },
                shape,
            ),
        },
        shape,
    )


def lines(leaf: torch.Tensor, dims: int, time: int) -> torch.Tensor:
    """[lines, time, ...] of a tensor of which `dims` dims are lanes, time and agents."""
    moved = leaf.movedim(time, dims - 1)
    return moved.reshape(-1, moved.shape[dims - 1], *leaf.shape[dims:])


def by_loop(data: Any, gamma: float, n: int, agents: int = 0) -> dict[Any, torch.Tensor]:
    """What each step becomes, as [lines, time, ...]."""
    dims, time = data.ndim + agents, data.ndim - 1
    done = lines(data["next", "done"], dims, time)[..., 0]
    reward = lines(data["next", "reward"], dims, time)[..., 0].double()
    steps, returns = torch.ones_like(done, dtype=torch.int64), torch.zeros_like(reward)
    for line in range(done.shape[0]):
        for start in range(done.shape[1]):
            count = 0
            for t in range(start, min(start + n, done.shape[1])):
                returns[line, start] += gamma**count * reward[line, t]
                count += 1
                if done[line, t]:
                    break
            steps[line, start] = count
    last = torch.arange(done.shape[1]) + steps - 1
    found = {"steps_to_next_obs": steps, "gamma": gamma**steps, "nonterminal": steps > 1, ("next", "reward"): returns}
    for key in (("next", "observation"), ("next", "deep", "count")):
        leaf = lines(data[key], dims, time)
        found[key] = torch.stack([leaf[line][last[line]] for line in range(len(leaf))])
    return found


def assert_as_by_loop(found: Any, data: Any, gamma: float, n: int, agents: int = 0) -> None:
    """The transitions `found` are those of the first steps of `data`; what they leave is as it was."""
    count, dims, time = found.shape[-1], data.ndim + agents, data.ndim - 1
    for key, wanted in by_loop(data, gamma, n, agents).items():
        got = lines(found[key], dims, time)
        got = got[..., 0] if got.ndim > wanted.ndim else got
        torch.testing.assert_close(got, wanted[:, :count].to(got.dtype), rtol=1e-5, atol=1e-5)
    for key in ("observation", "action", "done", ("next", "done"), ("next", "terminated"), ("next", "truncated")):
        assert torch.equal(found[key], data[key].narrow(time, 0, count))
    assert torch.equal(found["next", "original_reward"], data["next", "reward"].narrow(time, 0, count))

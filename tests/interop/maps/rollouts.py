"""Rollouts of chosen observations and actions, for tests of forests."""

import torch
from tensordict import TensorDict

SMALL = [([0, 123, 392, 989, 809, 847], [1, 2, 3, 4, 5]), ([0, 123, 392, 235, 38], [1, 2, 6, 7])]
BRANCHES = [
    [(3, 123), (1, 456)],
    [(2, 359), (2, 3094)],
    [(3, 123), (9, 392), (6, 989), (20, 809), (21, 847)],
    [(1, 75)],
    [(3, 123), (0, 948)],
    [(2, 359), (2, 3094), (10, 68)],
    [(2, 359), (2, 3094), (11, 9045)],
]


def rollout(observations, actions, rewards=None):
    """Steps in the TED format, one fewer than observations."""
    steps, observation = len(actions), torch.tensor(observations)
    reward = torch.tensor(rewards or [0.0] * steps)[:, None]
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[-1:] = True
    after = {"observation": observation[1:], "reward": reward, "done": done, "terminated": done.clone()}
    return TensorDict({"observation": observation[:-1], "action": torch.tensor(actions), "next": after}, [steps])


def one_steps(branches=BRANCHES):
    """The same as rollouts of one step each."""
    for branch in branches:
        before = 0
        for action, after in branch:
            yield rollout([before, after], [action])
            before = after


def root(observation=0):
    return TensorDict({"observation": torch.tensor(observation)})

"""Offline RL: a policy as good as the expert, from recorded episodes of which most are much worse.

A controller swings Pendulum-v1 up. In each episode it is more careless than in the one before: for a share of the time,
from 0 to 1, it holds a random torque. `minari.DataCollector` records this, and `MinariExperienceReplay` loads it. Implicit
Q-learning (Kostrikov et al., 2021, arXiv:2110.06169) learns from slices of these episodes alone. The return of a row takes
n rewards from the following rows of its slice, which never crosses the end of an episode. Behaviour cloning is the
same regression with equal weights: from the same batches it learns the mean of good and bad actions.

The mark is 97 % of the way from random torques to the controller. `--dataset ID` learns from another Minari dataset with
continuous actions. It is evaluated if its environment is installed, and has no mark.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import minari
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDictBase
from torch import Tensor, nn

from interop import SliceSampler
from interop.datasets import MinariExperienceReplay
from interop.specs import Bounded

REACHED = 0.97  # of the way from the return of random torques to that of the controller
BATCH, SLICE, STEPS = 256, 8, 3  # rows of a batch and of a slice; rewards in a return
GAMMA, EXPECTILE, BETA, TAU = 0.97, 0.8, 3.0, 0.02  # discount; constants of IQL; how fast the slow networks follow
Policy = Callable[[Any], np.ndarray]  # the action for an observation

# ---------------------------------------------------------------------- the episodes


def controller(state: np.ndarray) -> np.ndarray:
    """The torque for a state of cosine, sine and speed: pumps energy into the swing, then holds the rod up."""
    up, right, speed = state.astype(np.float64)
    hold = -12 * np.arctan2(right, up) - 2.5 * speed
    missing = 5 - (speed**2 / 6 + 5 * up)  # energy
    torque = hold if up > 0.9 and abs(speed) < 3 else missing * (1 if speed >= 0 else -1)
    return np.clip([torque], -2, 2).astype(np.float32)


def careless(share: float, rng: np.random.Generator) -> Policy:
    """The controller, which holds a random torque for a share of the time, five steps each."""
    steps, held = itertools.count(), None

    def policy(state: np.ndarray) -> np.ndarray:
        nonlocal held
        if next(steps) % 5 == 0:
            held = rng.uniform(-2, 2, 1).astype(np.float32) if rng.random() < share else None
        return controller(state) if held is None else held

    return policy


def play(env: gymnasium.Env, policy: Policy, seeds: Iterable[int]) -> float:
    """The mean return of episodes, one for each seed."""
    returns = []
    for seed in seeds:
        (observation, _), over = env.reset(seed=seed), False
        returns.append(0.0)
        while not over:
            observation, reward, terminated, truncated, _ = env.step(policy(observation))
            returns[-1] += float(reward)
            over = terminated or truncated
    return float(np.mean(returns))


def record(episodes: int, tests: range, seed: int) -> str:
    """Record a Minari dataset, with the returns of random torques and of the controller. Returns its id."""
    env, rng = gymnasium.make("Pendulum-v1"), np.random.default_rng(seed)
    lowest, highest = (play(env, careless(share, rng), tests) for share in (1, 0))
    collector = minari.DataCollector(env)
    for episode, share in enumerate(np.linspace(0, 1, episodes)):
        play(collector, careless(share, rng), [1000 * seed + episode])
    about = dict.fromkeys(("algorithm_name", "author", "author_email", "code_permalink", "description"), "an example")
    scores = {"eval_env": "Pendulum-v1", "ref_min_score": lowest, "ref_max_score": highest}
    dataset = collector.create_dataset("pendulum/careless-v0", **about, **scores)
    collector.close()
    return dataset.id


def environment(metadata: dict[str, Any]) -> gymnasium.Env | None:
    """The environment of a dataset. None, with a line that says why, if it is not named or not installed."""
    known = {field.name for field in dataclasses.fields(EnvSpec) if field.init}  # older files have more
    try:
        if not (said := metadata.get("eval_env_spec") or metadata.get("env_spec")):
            raise ValueError("the dataset names none")
        said = {"additional_wrappers": [], **(json.loads(said) if isinstance(said, str) else said)}
        return gymnasium.make(EnvSpec.from_json(json.dumps({key: said[key] for key in said.keys() & known})))
    except (ValueError, ImportError, gymnasium.error.Error) as error:
        print(f"not evaluated, as there is no environment: {error}")
        return None


# ---------------------------------------------------------------------- learning


def network(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs), *last)


def features(observation: Any, dims: int) -> Tensor:
    """[*batch, features] of observations, or mappings of them, with so many batch dims."""
    if isinstance(observation, Mapping | TensorDictBase):
        return torch.cat([features(observation[key], dims) for key in sorted(observation.keys())], -1)
    observation = torch.as_tensor(observation)
    return observation.reshape(*observation.shape[:dims], -1).float()


def returns(reward: Tensor, goes_on: Tensor, value: Tensor, steps: int) -> Tensor:
    """n-step returns of slices [slices, length] with `value` of the next observations; fewer steps at the end of a slice."""
    goal = reward + GAMMA * goes_on * value
    for _ in range(steps - 1):
        goal = reward + GAMMA * goes_on * torch.cat([goal[:, 1:], value[:, -1:]], 1)
    return goal


class Learner:
    """Implicit Q-learning with a deterministic policy, and a clone that learns from the same batches."""

    def __init__(self, rows: TensorDictBase, actions: Any, updates: int) -> None:
        if not isinstance(actions, Bounded) or not actions.dtype.is_floating_point:
            sys.exit(f"actions must be continuous and bounded, those of this dataset are {actions}")
        self.actions, low, high = actions, actions.low.flatten().float(), actions.high.flatten().float()
        self.middle, self.half = (high + low) / 2, (high - low) / 2
        seen = features(rows["observation"], 1)
        self.mean, self.deviation = seen.mean(0), seen.std(0) + 1e-3
        self.unit = rows["next", "reward"].std().float() + 1e-6
        inputs, outputs = seen.shape[1], len(low)
        self.q = nn.ModuleList([network(inputs + outputs, 1) for _ in range(2)])
        self.slow = copy.deepcopy(self.q).requires_grad_(False)
        self.value = network(inputs, 1)
        self.policy, self.clone = (network(inputs, outputs, nn.Tanh()) for _ in range(2))
        learned = nn.ModuleList([self.q, self.value, self.policy, self.clone])
        self.optimizer = torch.optim.Adam(learned.parameters(), lr=3e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, updates)

    def update(self, slices: TensorDictBase) -> None:
        """One step on slices [slices, length]."""
        now, after = (self.scaled(slices[key], 2) for key in ("observation", ("next", "observation")))
        action = (features(slices["action"], 2) - self.middle) / self.half
        both = torch.cat([now, action], -1)
        with torch.no_grad():
            reward = slices["next", "reward"][..., 0].float() / self.unit
            goes_on = ~slices["next", "terminated"][..., 0]  # a truncated episode goes on from its last observation
            goal = returns(reward, goes_on, self.value(after)[..., 0], STEPS)
            q = torch.minimum(*(net(both)[..., 0] for net in self.slow))
        advantage = q - self.value(now)[..., 0]
        loss = (torch.where(advantage > 0, EXPECTILE, 1 - EXPECTILE) * advantage**2).mean()
        loss = loss + sum(nn.functional.mse_loss(net(both)[..., 0], goal) for net in self.q)
        weight = (BETA * advantage.detach()).exp().clamp(max=100)
        loss = loss + (weight[..., None] * (self.policy(now) - action) ** 2).mean()
        loss = loss + nn.functional.mse_loss(self.clone(now), action)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_([*self.slow.parameters()], [*self.q.parameters()], TAU)

    def scaled(self, observation: Any, dims: int) -> Tensor:
        return (features(observation, dims) - self.mean) / self.deviation

    @torch.no_grad()
    def act(self, actor: nn.Module, observation: Any) -> np.ndarray:
        action = self.middle + self.half * actor(self.scaled(observation, 0))
        return action.reshape(self.actions.shape).to(self.actions.dtype).numpy()


# ---------------------------------------------------------------------- the run


def run(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Record or download, learn, play. Returns the results; None for those that are not known."""
    torch.manual_seed(seed)
    begin, tests = time.perf_counter(), range(10**6, 10**6 + options.tests)
    with tempfile.TemporaryDirectory() as folder:
        if options.dataset is None:
            os.environ["MINARI_DATASETS_PATH"] = folder
        rb = MinariExperienceReplay(
            options.dataset or record(options.episodes, tests, seed),
            BATCH,
            root=None if options.dataset else f"{folder}/converted",
            load_from_local_minari=not options.dataset,
            sampler=SliceSampler(slice_len=SLICE, traj_key="episode"),
            generator=torch.Generator().manual_seed(seed),
        )
        rows, metadata = rb[:], rb.metadata
        env = environment(metadata)
        learner = Learner(rows, metadata["action_space"], options.updates)
        tried: list[tuple[int, float]] = []
        for done in range(options.updates + 1):
            if env is not None and done % options.try_every == 0:
                tried.append((done, play(env, functools.partial(learner.act, learner.policy), tests[:10])))
            if done < options.updates:
                learner.update(rb.sample().reshape(-1, SLICE))
    result = {"seed": seed, "random": metadata.get("ref_min_score")}
    result["data"] = float(rows["next", "reward"].sum()) / len(rows["episode"].unique())
    for name, actor in (("clone", learner.clone), ("learned", learner.policy)):
        result[name] = env and play(env, functools.partial(learner.act, actor), tests)
    result["expert"] = metadata.get("ref_max_score")
    known, way = None not in result.values(), lambda name: result[name] - result["random"]
    return result | {
        "reached": way("learned") / way("expert") if known else None,
        "seconds": time.perf_counter() - begin,
        "tried": tried,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Learn with each seed, print a table. Returns the results; "passed" is None without a mark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", metavar="ID", help="another dataset of Minari, which is downloaded")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each")
    parser.add_argument("--episodes", type=int, default=100, help="recorded, of 200 steps each")
    parser.add_argument("--updates", type=int, default=3000, help="steps of the optimizer")
    parser.add_argument("--tests", type=int, default=40, help="episodes that a policy is judged by")
    parser.add_argument("--try-every", type=int, default=250, help="updates from one point of the curve to the next")
    parser.add_argument("--quick", action="store_true", help="one seed and few updates, to see that it runs")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.episodes, options.updates, options.tests = options.seeds[:1], 10, 50, 2
    torch.set_num_threads(1)  # the networks are too small for more
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        runs.append(run(options, seed))
        if len(runs) == 1:
            print("".join(f"{name:<10}" for name in runs[0] if name != "tried"))
        shown = [number for name, number in runs[-1].items() if name != "tried"]
        numbers = ["-" if number is None else f"{number:.4g}" for number in shown]
        print("".join(f"{number:<10}" for number in numbers), flush=True)
    passed = None if options.quick or options.dataset else min(each["reached"] for each in runs) >= REACHED
    if passed is not None:
        print(f"the mark is {REACHED:.0%} of the way from random torques to the expert  {'PASS' if passed else 'FAIL'}")
    curve = {f"seed {each['seed']}": [list(column) for column in zip(*each["tried"], strict=True)] for each in runs}
    return {"passed": passed, "curve": curve, "runs": runs}


if __name__ == "__main__":
    sys.exit(main()["passed"] is False)

"""Goal-conditioned DQN with hindsight (arXiv:1707.01495) on a frozen lake, where the goal is another cell in every episode.

The reward is 1 for reaching the goal and 0 otherwise. Chance reaches near goals only; far goals are learned from
transitions that are relabelled with reached goals. The same learner runs with and without relabelling, from several
seeds; the score is the share of all cells that its greedy policy finds.
"""

import argparse
import copy
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from interop import HERReplayBuffer, LazyTensorStorage

FINDS, GAINS = 0.9, 0.3  # with hindsight at least this share of the cells, and so much more of them than without
ACTIONS = 4


class GoalLake(gymnasium.Wrapper):
    """FrozenLake with a random goal, which is part of the observation. An episode ends at the goal or in a hole."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.cells = env.unwrapped.desc != b"H"
        self.shape = self.cells.shape
        self.goal = np.zeros(2, np.uint8)
        cell = gymnasium.spaces.MultiDiscrete(self.shape, dtype=np.uint8)
        self.observation_space = gymnasium.spaces.Dict({"observation": cell, "desired_goal": cell})

    def goals(self) -> np.ndarray:
        """All cells that may be a goal, [n, 2]: no hole, and not the start in the corner."""
        return np.argwhere(self.cells)[1:].astype(np.uint8)

    def reset(self, **options: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        state, info = self.env.reset(**options)
        self.goal = self.np_random.choice(self.goals())
        return self._observation(state), info

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        state, _, fell, truncated, info = self.env.step(action)
        after = self._observation(state)
        reached = bool((after["observation"] == self.goal).all())
        return after, float(reached), fell or reached, truncated, {**info, "fell": fell}

    def _observation(self, state: int) -> dict[str, np.ndarray]:
        return {"observation": np.array(divmod(state, self.shape[1]), np.uint8), "desired_goal": self.goal}


def lake(options: argparse.Namespace) -> GoalLake:
    """The same map for every seed of the learner, without slipping."""
    rows = [row.replace("G", "F") for row in generate_random_map(options.size, options.frozen, seed=3)]
    return GoalLake(
        gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=False, max_episode_steps=options.episode_steps)
    )


class Collector:
    """Plays episodes, and keeps its own log of all steps."""

    def __init__(self, env: GoalLake, seed: int, steps: int) -> None:
        self.env, self.rng = env, np.random.default_rng(seed)
        self.env.reset(seed=seed)
        self.reached = np.zeros((steps, 2), np.uint8)  # by every step of the run
        self.ends = np.zeros(steps, np.int64)  # the last step of the episode that each is part of
        self.steps = 0

    @torch.no_grad()
    def episode(self, net: "Network", epsilon: float) -> TensorDict:
        """One episode, epsilon-greedy, [steps]."""
        begin, rows, over = self.steps, [], False
        now, _ = self.env.reset()
        while not over and self.steps < len(self.ends):
            if self.rng.random() < epsilon:
                action = int(self.rng.integers(ACTIONS))
            else:
                action = int(net(*(torch.from_numpy(now[key]) for key in ("observation", "desired_goal"))).argmax())
            after, reward, terminated, truncated, info = self.env.step(action)
            rows.append((now["observation"], after["observation"], action, reward, terminated, truncated, info["fell"]))
            self.reached[self.steps] = after["observation"]
            self.steps, now, over = self.steps + 1, after, terminated or truncated
        self.ends[begin : self.steps] = self.steps - 1
        before, after, action, *results = (torch.from_numpy(np.array(column)) for column in zip(*rows, strict=True))
        reward, terminated, truncated, fell = (column[:, None] for column in results)
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        goal = torch.from_numpy(self.env.goal).expand(len(rows), 2)
        time_steps = torch.arange(begin, self.steps)
        return TensorDict(
            {"observation": before, "desired_goal": goal, "action": action, "time": time_steps}
            | {"next": {"observation": after, "reward": reward.float(), "fell": fell, **ends}},
            batch_size=[len(rows)],
        )


def arrival(transitions: TensorDictBase) -> tuple[Tensor, Tensor]:
    """The reward of transitions for their goals, and whether the episode ends."""
    arrived = (transitions["next", "observation"] == transitions["desired_goal"]).all(-1, keepdim=True)
    return arrived.float(), arrived | transitions["next", "fell"]


def replay_buffer(options: argparse.Namespace, seed: int, her_ratio: float) -> HERReplayBuffer:
    return HERReplayBuffer(
        arrival,
        her_ratio=her_ratio,
        strategy="future",
        achieved_goal_key="observation",  # to be on a cell is to have reached it
        storage=LazyTensorStorage(options.capacity),
        batch_size=options.batch_size,
        generator=torch.Generator().manual_seed(seed),
    )


class Network(nn.Module):
    """Q of the four directions [..., 4], of cells and goals [..., 2]."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.Sequential(
            nn.Linear(2 * sum(shape), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, ACTIONS)
        )

    def forward(self, cell: Tensor, goal: Tensor) -> Tensor:
        places = (place[..., axis].long() for place in (cell, goal) for axis in (0, 1))
        hot = [nn.functional.one_hot(place, size) for place, size in zip(places, 2 * self.shape, strict=True)]
        return self.layers(torch.cat(hot, -1).float())


class Learner:
    """The network, its slow copy, and their update."""

    def __init__(self, options: argparse.Namespace, shape: tuple[int, ...]) -> None:
        self.gamma, self.tau = options.gamma, options.tau
        self.net = Network(shape, options.hidden)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=options.learning_rate, fused=True)

    def update(self, batch: TensorDictBase) -> None:
        """One step of double DQN."""
        goal, after = batch["desired_goal"], batch["next", "observation"]
        with torch.no_grad():
            best = self.net(after, goal).argmax(-1, keepdim=True)
            future = self.target(after, goal).gather(-1, best)
            # A truncated episode could have gone on, so only a terminated one has no future.
            worth = batch["next", "reward"] + self.gamma * future * ~batch["next", "terminated"]
        chosen = self.net(batch["observation"], goal).gather(-1, batch["action"][:, None])
        self.optimizer.zero_grad()
        nn.functional.smooth_l1_loss(chosen, worth.clamp(0, 1)).backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, self.tau)


@torch.no_grad()
def found(env: GoalLake, net: Network) -> float:
    """The share of all goals that the greedy policy reaches, by the environment's table of moves."""
    table = env.unwrapped.P
    move = torch.tensor([[table[cell][action][0][1] for action in range(ACTIONS)] for cell in range(len(table))])
    goals = torch.from_numpy(env.goals())
    state, width = torch.zeros(len(goals), dtype=torch.int64), env.shape[1]
    reached = torch.zeros(len(goals), dtype=torch.bool)
    for _ in range(sum(env.shape) * 2):
        action = net(torch.stack((state // width, state % width), -1), goals).argmax(-1)
        state = move[state, action]  # out of a hole leads no way
        reached |= state == goals[:, 0] * width + goals[:, 1].long()
    return int(reached.sum()) / len(goals)


def check(batch: TensorDictBase, told: Collector, her_ratio: float) -> dict[str, int]:
    """Compare a batch with the log of the collector. Returns the numbers of relabelled and truncated rows."""
    time_steps, goal, after = (batch[key] for key in ("time", "desired_goal", ("next", "observation")))
    count = int(len(batch) * her_ratio)
    # Where a step led: of a truncated episode too it is the cell at its end, not the one where the next begins.
    assert torch.equal(after, torch.from_numpy(told.reached)[time_steps])
    # A goal in hindsight is one that the same episode reached, by this step or a later one.
    ends = torch.from_numpy(told.ends)[time_steps[:count]]
    later = time_steps[:count, None] + torch.arange(int((ends - time_steps[:count]).max() + 1) if count else 0)
    cells = torch.from_numpy(told.reached)[later.clamp(max=ends[:, None])]
    assert (cells == goal[:count, None]).all(-1).any(-1).all()
    # Rewards and ends are those of the goals as they are now, and a truncated episode stays done.
    reward, terminated = arrival(batch)
    assert torch.equal(batch["next", "reward"], reward)
    assert torch.equal(batch["next", "terminated"], terminated)
    assert torch.equal(batch["next", "done"], terminated | batch["next", "truncated"])
    return {"checked": len(batch), "relabelled": count, "truncated": int(batch["next", "truncated"].sum())}


def train(options: argparse.Namespace, seed: int, her_ratio: float) -> dict[str, Any]:
    """Play and learn. Returns the share of goals found before and after, and the results of the checks."""
    torch.manual_seed(seed)
    begin, env = time.perf_counter(), lake(options)
    told, learner = Collector(env, seed, options.steps), Learner(options, env.shape)
    rb, seen, updates = replay_buffer(options, seed, her_ratio), dict[str, int](), 0
    before = found(env, learner.net)
    tried = [(0, before)]
    while told.steps < options.steps:
        epsilon = 1 + (options.epsilon - 1) * min(told.steps / options.explore, 1)
        rb.extend(told.episode(learner.net, epsilon))
        while told.steps >= options.warm_up and updates < (told.steps - options.warm_up) // options.every:
            batch = rb.sample()
            if updates % options.check_every == 0:
                for name, number in check(batch, told, her_ratio).items():
                    seen[name] = seen.get(name, 0) + number
            learner.update(batch)
            updates += 1
        if told.steps >= tried[-1][0] + options.try_every:
            tried.append((told.steps, found(env, learner.net)))
    spent = {"updates": updates, "written": rb.write_count, "seconds": time.perf_counter() - begin}
    return {"before": before, "after": found(env, learner.net), "tried": tried, **seen, **spent}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each, with and without hindsight"
    )
    parser.add_argument("--steps", type=int, default=24_000, help="of the environment, in one run")
    parser.add_argument("--size", type=int, default=12, help="rows and columns of the lake")
    parser.add_argument("--frozen", type=float, default=0.9, help="share of cells that are no holes")
    parser.add_argument("--episode-steps", type=int, default=50, help="after which an episode is truncated")
    parser.add_argument("--capacity", type=int, default=12_000, help="items in the buffer; the ring is written twice")
    parser.add_argument("--her-ratio", type=float, default=0.8, help="part of a batch that is relabelled")
    parser.add_argument("--batch-size", type=int, default=256, help="items drawn for one update")
    parser.add_argument("--every", type=int, default=4, help="steps of the environment for one update")
    parser.add_argument("--warm-up", type=int, default=1_000, help="steps before the first update")
    parser.add_argument("--hidden", type=int, default=128, help="width of both hidden layers")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam")
    parser.add_argument("--gamma", type=float, default=0.95, help="discount")
    parser.add_argument("--tau", type=float, default=0.02, help="how far the target network follows in one update")
    parser.add_argument("--epsilon", type=float, default=0.2, help="share of random actions in the end")
    parser.add_argument("--explore", type=int, default=16_000, help="steps until epsilon is reached")
    parser.add_argument("--check-every", type=int, default=20, help="updates from one checked batch to the next")
    parser.add_argument("--try-every", type=int, default=1_000, help="steps from one point of the curve to the next")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the network is too small for more")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, to see that it runs")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.steps, options.capacity, options.size = options.seeds[:1], 1_500, 1_000, 6
        options.explore, options.warm_up, options.batch_size = 1_000, 500, 128
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train with and without hindsight, print a table. Returns the results; "passed" is None for a quick run."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    runs: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    print(f"{'seed':<6}{'hindsight':<11}{'goals found before':<20}{'after':<8}{'updates':<9}{'relabelled':<12}seconds")
    for seed in options.seeds:
        for name, her_ratio in (("with", options.her_ratio), ("without", 0.0)):
            run = train(options, seed, her_ratio)
            runs[name].append(run)
            print(
                f"{seed:<6}{name:<11}{run['before']:<20.2f}{run['after']:<8.2f}{run['updates']:<9,}"
                f"{run['relabelled'] / run['checked']:<12.0%}{run['seconds']:.0f}",
                flush=True,
            )
    worst = min(run["after"] for run in runs["with"])
    gain = worst - max(run["after"] for run in runs["without"])
    passed = None if options.quick else worst >= FINDS and gain >= GAINS
    mean = {name: statistics.fmean(run["after"] for run in each) for name, each in runs.items()}
    curve = {
        f"{name} hindsight, seed {seed}": [list(column) for column in zip(*run["tried"], strict=True)]
        for name, each in runs.items()
        for seed, run in zip(options.seeds, each, strict=True)
    }
    result = {"passed": passed, "worst": worst, "gain": gain, "mean": mean, "curve": curve, "runs": runs}
    print(
        f"hindsight finds {worst:.0%} of the goals or more (mark {FINDS:.0%}), and {gain:+.0%} beside the best without "
        f"(mark {GAINS:+.0%}){'' if passed is None else '  PASS' if passed else '  FAIL'}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    sys.exit(main()["passed"] is False)

"""DQN on CartPole with torch and gymnasium, and a prioritized replay buffer of tensordicts in memory-mapped files.

Double DQN (arXiv:1509.06461) with prioritized replay (arXiv:1511.05952). Several environments are stepped together; each
step is one `extend` and one update. Training stops when the average return over 100 consecutive episodes, in the
order in which they end, reaches the threshold.
"""

import argparse
import copy
import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import Tensor, nn
from tqdm import tqdm

from interop import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer

EPISODES = 100  # consecutive ones that are averaged


@dataclasses.dataclass
class Episodes:
    """The ended episodes, in order."""

    steps: list[int] = dataclasses.field(default_factory=list)  # of all environments together, at the end of each
    returns: list[float] = dataclasses.field(default_factory=list)
    averages: list[float] = dataclasses.field(default_factory=list)  # of each 100 consecutive ones, the last at the end

    def add(self, step: int, episode_return: float) -> None:
        self.steps.append(step)
        self.returns.append(episode_return)
        if len(self.returns) >= EPISODES:
            self.averages.append(statistics.fmean(self.returns[-EPISODES:]))

    def reached(self, threshold: float) -> int | None:
        """The index of the first average of at least `threshold`."""
        return next((place for place, average in enumerate(self.averages) if average >= threshold), None)


class Stopwatch:
    """Microseconds of every call, by name."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {}

    def __call__(self, name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = operation(*arguments)
        self.us.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
        return result

    def median(self, name: str) -> float:
        return statistics.median(self.us.get(name, [math.nan]))


class Collector:
    """Steps the environments. Returns their transitions as rows of a tensordict."""

    def __init__(self, options: argparse.Namespace) -> None:
        # With autoreset off a step always returns where it really ended, and a reset happens only where it is asked for.
        # So no row reaches from one episode into the next.
        self.envs = gymnasium.make_vec(
            "CartPole-v1",
            options.envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
        )
        self.rng = np.random.default_rng(options.seed)
        self.observation, _ = self.envs.reset(seed=options.seed)
        self.returns = np.zeros(options.envs)

    @torch.no_grad()
    def step(self, net: nn.Module, epsilon: float) -> tuple[TensorDict, list[float]]:
        """Rows [envs], and the returns of the ended episodes."""
        count = len(self.returns)
        greedy = net(torch.from_numpy(self.observation)).argmax(-1).numpy()
        action = np.where(self.rng.random(count) < epsilon, self.rng.integers(2, size=count), greedy)
        after, reward, terminated, truncated, _ = self.envs.step(action)
        done = terminated | truncated
        rows = TensorDict(
            {
                "observation": torch.from_numpy(self.observation),
                "action": torch.from_numpy(action),
                "next": {
                    "observation": torch.from_numpy(after),
                    "reward": torch.from_numpy(reward).float()[:, None],
                    "done": torch.from_numpy(done)[:, None],
                    "terminated": torch.from_numpy(terminated)[:, None],
                    "truncated": torch.from_numpy(truncated)[:, None],
                },
            },
            batch_size=[count],
        )
        self.returns += reward
        ended = self.returns[done].tolist()
        if ended:
            self.returns[done] = 0
            after, _ = self.envs.reset(options={"reset_mask": done})
        self.observation = after
        return rows, ended


class Learner:
    """The network, its slow copy, and their update."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.gamma, self.tau = options.gamma, options.tau
        width = options.hidden
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=options.learning_rate, fused=True)

    def update(self, batch: TensorDict) -> Tensor:
        """One step on a batch. Returns the absolute errors [batch], from before the step."""
        after = batch["next", "observation"]
        with torch.no_grad():
            best = self.net(after).argmax(-1, keepdim=True)
            future = self.target(after).gather(-1, best)
            # A truncated episode could have gone on, so only a terminated one has no future.
            goal = batch["next", "reward"] + self.gamma * future * ~batch["next", "terminated"]
        chosen = self.net(batch["observation"]).gather(-1, batch["action"][:, None])
        huber = nn.functional.smooth_l1_loss(chosen, goal, reduction="none")[:, 0]
        self.optimizer.zero_grad()
        (batch["priority_weight"] * huber).mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, self.tau)
            return (goal - chosen)[:, 0].abs()


def replay_buffer(options: argparse.Namespace) -> TensorDictPrioritizedReplayBuffer:
    return TensorDictPrioritizedReplayBuffer(
        alpha=options.alpha,
        beta=options.beta,
        eps=options.eps,
        storage=LazyMemmapStorage(options.capacity),
        priority_key="td_error",
        batch_size=options.batch_size,
        generator=torch.Generator().manual_seed(options.seed),
    )


def train(
    options: argparse.Namespace, rb: TensorDictPrioritizedReplayBuffer, timed: Stopwatch
) -> tuple[Episodes, dict[str, float], TensorDict]:
    """Act, store, draw and learn until the threshold or the number of steps is reached. Returns the last batch too."""
    torch.manual_seed(options.seed)
    collector, learner, episodes = Collector(options), Learner(options), Episodes()
    begin, steps, average = time.perf_counter(), 0, 0.0
    with tqdm(total=options.steps, unit="step", desc="torch", disable=options.quiet, mininterval=0.5) as bar:
        while steps < options.steps and (options.smoke or average < options.threshold):
            epsilon = 1 + (options.epsilon - 1) * min(steps / options.explore, 1)
            rows, ended = collector.step(learner.net, epsilon)
            timed("extend", rb.extend, rows)
            steps += options.envs

            # Beta rises to 1 as the estimates settle and the bias of prioritized draws starts to matter.
            rb.sampler.beta = options.beta + (1 - options.beta) * min(steps / options.steps, 1)
            sample = timed("sample", rb.sample)
            sample["td_error"] = timed("learn", learner.update, sample)
            timed("update_tensordict_priority", rb.update_tensordict_priority, sample)

            for each in ended:
                episodes.add(steps, each)
                average = max([average, *episodes.averages[-1:]])
                bar.set_postfix(average=f"{statistics.fmean(episodes.returns[-EPISODES:]):.1f}", refresh=False)
            bar.update(options.envs)
    return episodes, {"total_steps": steps, "train_seconds": time.perf_counter() - begin}, sample


def plot(path: pathlib.Path, episodes: Episodes, threshold: float) -> None:
    """The learning curve."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(episodes.steps, episodes.returns, ".", markersize=3, color="0.6", label="one episode")
    axes.plot(episodes.steps[EPISODES - 1 :], episodes.averages, label=f"average over {EPISODES} episodes")
    axes.axhline(threshold, linestyle="--", color="black", linewidth=1, label=f"{threshold:g}")
    axes.set(title="CartPole-v1, DQN with torch", xlabel="environment steps", ylabel="return")
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def contents(rb: TensorDictPrioritizedReplayBuffer, sample: TensorDict) -> list[tuple[str, str]]:
    """Lines of the table about the content of the buffer."""
    lines = [("items", f"{len(rb):,} of {rb.storage.max_size:,}, {rb.write_count:,} written")]
    for key, leaf in rb[:].items(include_nested=True, leaves_only=True):
        name = key if isinstance(key, str) else ".".join(key)
        size = leaf.numel() * leaf.element_size()
        lines.append((f"  {name}", f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}, {size:,} bytes"))
    for key in ("td_error", "priority_weight"):
        values = sample[key]
        spread = f"min {values.min():.2g}, mean {values.mean():.2g}, max {values.max():.2g}"
        lines.append((f"{key}, last batch", spread))
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--steps", type=int, default=200_000, help="environment steps at most, all together")
    parser.add_argument("--threshold", type=float, default=195, help="stop at this average over 100 episodes")
    parser.add_argument("--envs", type=int, default=4, help="environments stepped together")
    parser.add_argument("--capacity", type=int, default=50_000, help="items in the buffer")
    parser.add_argument("--alpha", type=float, default=0.6, help="how much priorities count")
    parser.add_argument("--eps", type=float, default=0.01, help="added to every priority: no item is forgotten")
    parser.add_argument("--beta", type=float, default=0.4, help="how much weights correct for it; rises to 1")
    parser.add_argument("--batch-size", type=int, default=128, help="items drawn for one update")
    parser.add_argument("--hidden", type=int, default=64, help="width of both hidden layers")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount")
    parser.add_argument("--tau", type=float, default=0.02, help="how far the target network follows in one update")
    parser.add_argument("--epsilon", type=float, default=0.05, help="share of random actions in the end")
    parser.add_argument("--explore", type=int, default=5_000, help="environment steps until epsilon is reached")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the network is too small for more")
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("out/dqn_torch.png"), help="learning curve")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument(
        "--smoke", action="store_true", help="some hundred steps without a threshold, to see that it runs"
    )
    options = parser.parse_args(argv)
    if options.smoke:
        options.steps = 600
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, plot, print a table. Returns the results."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    rb, timed = replay_buffer(options), Stopwatch()
    episodes, spent, sample = train(options, rb, timed)
    reached = episodes.reached(options.threshold)
    best = reached if reached is not None else int(np.argmax(episodes.averages)) if episodes.averages else None
    result = {
        "solved": reached is not None,
        "smoke": options.smoke,
        "seed": options.seed,
        "average": math.nan if best is None else episodes.averages[best],
        "steps": spent["total_steps"] if best is None else episodes.steps[best + EPISODES - 1],
        "episodes": len(episodes.returns),
        "us": {name: timed.median(name) for name in ("extend", "sample", "update_tensordict_priority", "learn")},
        "curve": {"average over 100 episodes": [episodes.steps[EPISODES - 1 :], episodes.averages]},
        **spent,
    }
    plot(options.plot, episodes, options.threshold)
    us, pace = result["us"], result["total_steps"] / result["train_seconds"]
    average = f"{result['average']:.1f} after {result['steps']:,} steps" if episodes.averages else "not so many ended"
    lines = [
        (f"average of {EPISODES} episodes", average),
        ("environment", f"{pace:,.0f} steps a second with learning, {options.envs} environments"),
        ("extend", f"{us['extend']:.0f} us, {options.envs} items"),
        ("sample", f"{us['sample']:.0f} us, {options.batch_size} items"),
        ("update_tensordict_priority", f"{us['update_tensordict_priority']:.0f} us, {options.batch_size} items"),
        ("update of the network", f"{us['learn']:.0f} us"),
        *contents(rb, sample),
        ("learning curve", str(options.plot)),
    ]
    for name, text in lines:
        print(f"{name:<28}{text}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    outcome = main()
    sys.exit(0 if outcome["solved"] or outcome["smoke"] else 1)

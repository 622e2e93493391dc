"""Ape-X DQN on CartPole: actors in Ray processes, a prioritized replay buffer in shards, one learner.

Distributed prioritized experience replay (Horgan et al., 2018, arXiv:1803.00933). Each actor steps its own environments
with its own epsilon and an older copy of the network. It makes n-step transitions, computes their first priorities and
writes them to one shard. The learner samples over all shards as from one prioritized buffer, with prefetch, and sends new
priorities back by index. Double DQN (arXiv:1509.06461) is the loss. Training stops when the average return over 100
consecutive episodes reaches the threshold.

When an actor returns, it is called again with the latest weights, unless it is too far ahead of the learner.
"""

import argparse
import copy
import functools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from tqdm import tqdm

from interop import LazyTensorStorage, MultiStep, RayReplayBuffer, TensorDictPrioritizedReplayBuffer

EPISODES = 100  # consecutive ones that are averaged


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def errors(net: nn.Module, target: nn.Module, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Q of the taken actions and the n-step targets, [batch, 1] each."""
    after = batch["next", "observation"]
    with torch.no_grad():
        best = net(after).argmax(-1, keepdim=True)
        future = target(after).gather(-1, best)
        # `gamma` is the discount of the steps that the row spans: fewer than n at the end of an episode.
        goal = batch["next", "reward"] + batch["gamma"][..., None] * future * ~batch["next", "terminated"]
    return net(batch["observation"]).gather(-1, batch["action"][..., None]), goal


class Actor:
    """Steps some environments and writes their transitions into the buffer."""

    def __init__(self, options: argparse.Namespace, number: int, buffer: Any) -> None:
        torch.set_num_threads(1)
        self.buffer, self.options = buffer, options
        # Epsilons as in the paper: the first actor explores most.
        share = number / max(options.actors - 1, 1)
        self.epsilon = options.epsilon ** (1 + options.epsilon_range * share)
        self.net, self.target = network(options.hidden), network(options.hidden)
        self.multi_step = MultiStep(options.gamma, options.n_steps, last_flags=True)
        self.envs = gymnasium.make_vec(
            "CartPole-v1",
            options.envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
        )
        self.rng = np.random.default_rng([options.seed, number])
        self.observation, _ = self.envs.reset(seed=options.seed + 1000 * number)
        self.returns = np.zeros(options.envs)

    @torch.no_grad()
    def act(self, weights: dict[str, dict[str, np.ndarray]], steps: int) -> list[float]:
        """Write `steps` rows of each environment; returns the returns of the episodes that ended."""
        for net, name in ((self.net, "net"), (self.target, "target")):
            net.load_state_dict({key: torch.tensor(value) for key, value in weights[name].items()})
        rows, ended = [], list[float]()
        for _ in range(steps):
            row, over = self._step()
            rows.append(row)
            ended += over
        batch = self.multi_step(torch.stack(rows, 1)).reshape(-1)
        chosen, goal = errors(self.net, self.target, batch)
        batch["td_error"] = (goal - chosen)[:, 0].abs()
        self.buffer.extend(batch.select("observation", "action", "gamma", "td_error", "next"))
        return ended

    def _step(self) -> tuple[TensorDict, list[float]]:
        count = len(self.returns)
        greedy = self.net(torch.from_numpy(self.observation)).argmax(-1).numpy()
        action = np.where(self.rng.random(count) < self.epsilon, self.rng.integers(2, size=count), greedy)
        after, reward, terminated, truncated, _ = self.envs.step(action)
        done = terminated | truncated
        following = {
            "observation": torch.from_numpy(after),
            "reward": torch.from_numpy(reward).float()[:, None],
            "done": torch.from_numpy(done)[:, None],
            "terminated": torch.from_numpy(terminated)[:, None],
            "truncated": torch.from_numpy(truncated)[:, None],
        }
        row = {"observation": torch.from_numpy(self.observation), "action": torch.from_numpy(action), "next": following}
        self.returns += reward
        ended = self.returns[done].tolist()
        if ended:
            self.returns[done] = 0
            after, _ = self.envs.reset(options={"reset_mask": done})
        self.observation = after
        return TensorDict(row, batch_size=[count]), ended


class Learner:
    """The network, its slow copy, and their update."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tau = options.tau
        self.net = network(options.hidden)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=options.learning_rate, fused=True)

    def update(self, batch: TensorDictBase) -> Tensor:
        """One step on a batch. Returns the absolute errors [batch], from before the step."""
        chosen, goal = errors(self.net, self.target, batch)
        huber = nn.functional.smooth_l1_loss(chosen, goal, reduction="none")[:, 0]
        self.optimizer.zero_grad()
        (batch["priority_weight"] * huber).mean().backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, self.tau)
            return (goal - chosen)[:, 0].abs()

    def weights(self) -> Any:
        """The weights in Ray's object store."""
        both = {"net": self.net, "target": self.target}
        return ray.put(
            {name: {key: each.numpy() for key, each in net.state_dict().items()} for name, net in both.items()}
        )


def replay_buffer(options: argparse.Namespace) -> RayReplayBuffer:
    return RayReplayBuffer(
        replay_buffer_cls=TensorDictPrioritizedReplayBuffer,
        storage=functools.partial(LazyTensorStorage, options.capacity // options.shards),
        alpha=options.alpha,
        beta=options.beta,
        eps=options.eps,
        priority_key="td_error",
        batch_size=options.batch_size,
        num_shards=options.shards,
        totals="latest",
        prefetch=options.prefetch,
        remote_config={"num_cpus": 1},
    )


def train(options: argparse.Namespace, rb: RayReplayBuffer) -> dict[str, Any]:
    """Act, store, draw and learn until the threshold or the number of updates is reached."""
    torch.manual_seed(options.seed)
    learner = Learner(options)
    weights = learner.weights()
    remote = ray.remote(num_cpus=1)(Actor)
    actors = [remote.remote(options, number, client) for number, client in enumerate(rb.clients(options.actors))]
    running = {each.act.remote(weights, options.chunk): each for each in actors}
    waiting: list[Any] = []
    returns, average, steps, updates = list[float](), 0.0, 0, 0
    begin = time.perf_counter()
    with tqdm(total=options.updates, unit="update", desc="apex", disable=options.quiet, mininterval=0.5) as bar:
        while updates < options.updates and (options.smoke or average < options.threshold):
            learns = steps >= options.warm_up
            done, _ = ray.wait(list(running), num_returns=1, timeout=0 if learns else 60) if running else ([], [])
            for reference in done:
                actor = running.pop(reference)
                for each in ray.get(reference):
                    returns.append(each)
                    if len(returns) >= EPISODES:
                        average = max(average, statistics.fmean(returns[-EPISODES:]))
                steps += options.chunk * options.envs
                waiting.append(actor)
            while waiting and steps <= options.warm_up + updates * options.ratio:
                actor = waiting.pop(0)
                running[actor.act.remote(weights, options.chunk)] = actor
            if not learns:
                continue
            if updates == 0:
                begin = time.perf_counter()  # processes have started
            batch = rb.sample()
            batch["td_error"] = learner.update(batch)
            rb.update_tensordict_priority(batch)
            updates += 1
            if updates % options.publish == 0:
                weights = learner.weights()
            bar.update()
            if returns:
                bar.set_postfix(average=f"{statistics.fmean(returns[-EPISODES:]):.1f}", steps=steps, refresh=False)
    seconds = time.perf_counter() - begin
    return {
        "solved": average >= options.threshold,
        "average": average,
        "episodes": len(returns),
        "steps": steps,
        "updates": updates,
        "seconds": seconds,
        "updates_a_second": updates / seconds if updates else math.nan,
        "rows": len(rb),
        "curve": {f"average over {EPISODES} episodes": [list(range(EPISODES, len(returns) + 1)), averages(returns)]},
    }


def averages(returns: list[float]) -> list[float]:
    """Of each so many consecutive episodes."""
    return [statistics.fmean(returns[at - EPISODES : at]) for at in range(EPISODES, len(returns) + 1)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of networks and environments; processes run freely")
    parser.add_argument("--actors", type=int, default=3, help="processes that act")
    parser.add_argument("--shards", type=int, default=2, help="processes that hold the buffer")
    parser.add_argument("--envs", type=int, default=4, help="environments of an actor")
    parser.add_argument("--chunk", type=int, default=25, help="steps of each environment that an actor writes at once")
    parser.add_argument("--n-steps", type=int, default=3, help="rewards in a return")
    parser.add_argument("--updates", type=int, default=30_000, help="at most")
    parser.add_argument("--ratio", type=float, default=8, help="environment steps an update, at most")
    parser.add_argument("--warm-up", type=int, default=1_000, help="environment steps before the first update")
    parser.add_argument("--publish", type=int, default=20, help="updates between weights that actors get")
    parser.add_argument("--threshold", type=float, default=195, help="stop at this average over 100 episodes")
    parser.add_argument("--capacity", type=int, default=50_000, help="items in the buffer, over all shards")
    parser.add_argument("--prefetch", type=int, default=2, help="batches that are asked for ahead")
    parser.add_argument("--alpha", type=float, default=0.6, help="how much priorities count")
    parser.add_argument("--beta", type=float, default=0.5, help="how much weights correct for it")
    parser.add_argument("--eps", type=float, default=0.01, help="added to every priority")
    parser.add_argument("--batch-size", type=int, default=256, help="items drawn for one update")
    parser.add_argument("--hidden", type=int, default=64, help="width of both hidden layers")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount")
    parser.add_argument("--tau", type=float, default=0.02, help="how far the target network follows in one update")
    parser.add_argument("--epsilon", type=float, default=0.3, help="share of random actions of the first actor")
    parser.add_argument("--epsilon-range", type=float, default=3, help="the last one: epsilon ** (1 + this)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--smoke", action="store_true", help="some updates without a threshold, to see that it runs")
    options = parser.parse_args(argv)
    if options.smoke:
        options.updates, options.warm_up, options.actors = 40, 200, 2
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and print the results. Returns them."""
    options = parse(argv)
    torch.set_num_threads(1)
    started = not ray.is_initialized()
    if started:  # processes share this machine's cores, however few
        ray.init(num_cpus=options.actors + options.shards + 1, include_dashboard=False, log_to_driver=False)
    rb = replay_buffer(options)
    try:
        result = train(options, rb)
    finally:
        rb.shutdown()
        if started:
            ray.shutdown()
    result["smoke"] = options.smoke
    for name, value in result.items():
        print(f"{name:<20}{value:,.1f}" if isinstance(value, float) else f"{name:<20}{value}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    outcome = main()
    sys.exit(0 if outcome["solved"] or outcome["smoke"] else 1)

"""R2D2-style recurrent Q-learning on a Pendulum that shows no velocity: slices, burn-in, stored states, padding.

The velocity is hidden, so the network needs a memory: a GRU (Kapturowski et al., 2019). Each row of the buffer holds the
state of the GRU at that step. `PrioritizedSliceSampler` draws slices of 80 rows by the priority of the
first one. If a slice starts inside an episode, its first 40 rows only update the stored state, which older weights
computed. If it starts with its episode, the state is known to be zero, and the whole slice is learned from. Episodes are
cut after different times. Those shorter than a slice are returned whole, padded and masked. The priority of a slice,
eta * max + (1 - eta) * mean of its errors, is written back to its first row.

The script compares every batch with a log of the episodes: slices continue within one episode, step after
step, and the last observation of a cut episode is its true last one.
"""

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from tqdm import tqdm

from interop import LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer

SHOWN = slice(2)  # of (cosine, sine, angular velocity)
TORQUES = np.array([[-2], [0], [2]], np.float32)  # of each action
SCALE = 0.1  # of rewards, which are from -16 to 0


class Memory(nn.Module):
    """Q of the actions, from all observations so far."""

    def __init__(self, width: int, forgets: bool = False) -> None:
        super().__init__()
        self.width, self.forgets = width, forgets
        self.seen = nn.Sequential(nn.Linear(2, width), nn.ReLU())
        self.gru = nn.GRU(width, width, batch_first=True)
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, len(TORQUES))

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Q [batch, time, actions] of observations [batch, time, 2], and the state [batch, width] after the last of them."""
        seen = self.seen(obs)
        if self.forgets:  # one step at a time, each from nothing
            out, _ = self.gru(seen.reshape(-1, 1, self.width))
            out, last = out.reshape(seen.shape), torch.zeros_like(state)
        else:
            out, last = self.gru(seen, state[None].contiguous())
            last = last[0]
        advantage = self.advantage(out)
        return self.value(out) + advantage - advantage.mean(-1, keepdim=True), last


# ---------------------------------------------------------------------- the environments


def pendulums(count: int) -> gymnasium.vector.VectorEnv:
    """Pendulums without autoreset: a step returns the true last observation, and only `reset` resets."""
    disabled = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    return gymnasium.make_vec("Pendulum-v1", count, vectorization_mode="sync", vector_kwargs=disabled)


class Collector:
    """Steps the environments. Returns transitions as rows [envs]; keeps a log of how each episode ended."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.envs, self.options = pendulums(options.envs), options
        self.rng = np.random.default_rng(seed)
        self.limit = self._limits()
        found, _ = self.envs.reset(seed=seed)
        self.obs = torch.from_numpy(found[:, SHOWN])
        self.state = torch.zeros(options.envs, options.hidden)
        self.episode = torch.arange(options.envs)
        self.step_in_episode = torch.zeros(options.envs, dtype=torch.int64)
        self.ended: dict[int, tuple[int, Tensor, bool]] = {}  # its last step, last observation, whether it is terminal

    def _limits(self) -> np.ndarray:
        """The number of steps after which the episode of each environment is cut."""
        return self.rng.integers(self.options.shortest, self.options.longest + 1, self.options.envs)

    @torch.no_grad()
    def step(self, net: Memory, epsilon: float) -> TensorDict:
        """One step of all, epsilon-greedy."""
        count = len(self.episode)
        q, state = net(self.obs[:, None], self.state)
        at_random = torch.from_numpy(self.rng.random(count) < epsilon)
        action = torch.where(
            at_random, torch.from_numpy(self.rng.integers(len(TORQUES), size=count)), q[:, 0].argmax(-1)
        )
        found, reward, terminated, truncated, _ = self.envs.step(TORQUES[action.numpy()])
        truncated |= self.step_in_episode.numpy() + 1 >= self.limit
        done, after = terminated | truncated, torch.from_numpy(found[:, SHOWN])
        rows = TensorDict(
            {
                "observation": self.obs,
                "state": self.state,
                "action": action,
                "episode": self.episode,
                "step": self.step_in_episode,
                "next": {
                    "observation": after,
                    "reward": torch.from_numpy(SCALE * reward).float()[:, None],
                    "done": torch.from_numpy(done)[:, None],
                    "terminated": torch.from_numpy(terminated)[:, None],
                    "truncated": torch.from_numpy(truncated)[:, None],
                },
            },
            batch_size=[count],
        )
        for env in done.nonzero()[0]:
            last = (int(self.step_in_episode[env]), after[env].clone(), bool(terminated[env]))
            self.ended[int(self.episode[env])] = last
        if done.any():
            found, _ = self.envs.reset(options={"reset_mask": done})
        self.limit, over = np.where(done, self._limits(), self.limit), torch.from_numpy(done)
        self.obs = torch.from_numpy(found[:, SHOWN])
        self.state = state.masked_fill(over[:, None], 0)
        self.episode = torch.where(over, self.episode.max() + over.cumsum(0), self.episode)
        self.step_in_episode = torch.where(over, 0, self.step_in_episode + 1)
        return rows


@torch.no_grad()
def average_return(net: Memory, seed: int, episodes: int = 20) -> float:
    """The average return of whole episodes of the greedy policy."""
    envs = pendulums(episodes)
    found, _ = envs.reset(seed=seed)
    state, total, done = torch.zeros(episodes, net.width), np.zeros(episodes), np.zeros(episodes, bool)
    while not done.all():  # all of them end at once
        q, state = net(torch.from_numpy(found[:, None, SHOWN]), state)
        found, reward, _, done, _ = envs.step(TORQUES[q[:, 0].argmax(-1).numpy()])
        total += reward
    envs.close()
    return float(total.mean())


# ---------------------------------------------------------------------- slices


def padded(sample: TensorDict, least: int) -> tuple[TensorDict, Tensor]:
    """Slices [slices, length] of a flat sample, and a mask that is False at padding, copies of the last row.

    They are as long as the longest one, at least `least`.
    """
    stops = sample["next", "truncated"][:, 0].nonzero()[:, 0] + 1  # the sampler marks the last row of each slice
    lengths = torch.diff(stops, prepend=torch.zeros(1, dtype=stops.dtype))
    steps = torch.arange(max(least, int(lengths.max())))
    rows = (stops - lengths)[:, None] + torch.minimum(steps, lengths[:, None] - 1)
    return sample[rows], steps < lengths[:, None]


def check(slices: TensorDict, mask: Tensor, collector: Collector) -> int:
    """Compare slices with the log. Returns the number of truncated episodes that are there to their end."""
    newest = dict(zip(collector.episode.tolist(), (collector.step_in_episode - 1).tolist(), strict=True))
    episode, step, obs, after = (slices[key] for key in ("episode", "step", "observation", ("next", "observation")))
    following = mask[:, 1:]
    assert mask[:, 0].all()
    assert (episode == episode[:, :1]).all(), "a slice reaches into another episode"
    assert (step[:, 1:] == step[:, :-1] + 1)[following].all(), "a slice leaves out steps"
    assert (obs[:, 1:] == after[:, :-1])[following].all()
    assert (slices["state"][step == 0] == 0).all()
    truncated = 0
    for place, last in enumerate(mask.sum(1) - 1):
        number, at = int(episode[place, last]), int(step[place, last])
        final_step, final, terminal = collector.ended.get(number, (-1, obs, False))
        is_over = at == final_step
        assert bool(slices["next", "terminated"][place, last]) == (is_over and terminal)
        assert not slices["next", "terminated"][place, :last].any()
        assert not is_over or torch.equal(after[place, last], final), "an episode ends with a frame of another"
        whole = last == collector.options.slice - 1 or is_over or at == newest.get(number)
        assert whole, "a slice is short in the midst of an episode"
        truncated += is_over and not terminal
    return truncated


class Learner:
    """The network, its slow copy, and their update."""

    def __init__(self, options: argparse.Namespace, forgets: bool) -> None:
        self.options = options
        self.net = Memory(options.hidden, forgets)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=options.learning_rate, fused=True)

    def unroll(self, net: Memory, slices: TensorDict) -> Tensor:
        """Q [slices, length + 1, actions] of all observations, the one after the last row too, from the stored states."""
        obs, after = slices["observation"], slices["next", "observation"]
        seen = torch.cat([obs[:, :1], after], 1)
        burn_in = self.options.burn_in
        ahead, state = net(seen[:, :burn_in], slices["state"][:, 0])
        begins = slices["step"][:, 0] == 0
        behind, _ = net(seen[:, burn_in:], torch.where(begins[:, None], state, state.detach()))
        return torch.cat([ahead, behind], 1)

    def update(self, slices: TensorDict, mask: Tensor) -> Tensor:
        """One step on slices. Returns their priorities."""
        options = self.options
        begins = slices["step"][:, :1] == 0
        learned = mask & (begins | (torch.arange(mask.shape[1]) >= options.burn_in))
        q = self.unroll(self.net, slices)
        with torch.no_grad():
            future = self.unroll(self.target, slices).gather(-1, q.argmax(-1, keepdim=True))[..., 0]
            reward, over = slices["next", "reward"][..., 0], slices["next", "terminated"][..., 0]
            # A row's goal goes on with that of the next row, the last one's with the value of its next observation, which
            # a truncated episode has too.
            ends = torch.cat([~mask[:, 1:], torch.ones_like(mask[:, :1])], 1)
            goal = future
            for _ in range(options.n):
                onward = torch.where(ends, future[:, 1:], goal[:, 1:])
                goal = torch.cat([reward + options.gamma * onward * ~over, future[:, -1:]], 1)
        chosen = q[:, :-1].gather(-1, slices["action"][..., None])[..., 0]
        error = (chosen - goal[:, :-1]) * learned
        huber = nn.functional.smooth_l1_loss(error, torch.zeros_like(error), reduction="none")
        count = learned.sum(1).clamp(min=1)
        self.optimizer.zero_grad()
        (slices["priority_weight"][:, 0] * huber.sum(1) / count).mean().backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), options.clip)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, options.tau)
            error = error.abs()
            return options.eta * error.amax(1) + (1 - options.eta) * error.sum(1) / count


# ---------------------------------------------------------------------- the run


def replay_buffer(options: argparse.Namespace, seed: int) -> TensorDictReplayBuffer:
    """A buffer for batches [envs, time], whose trajectories go along time."""
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(options.capacity, ndim=2),
        sampler=PrioritizedSliceSampler(
            options.capacity,
            alpha=options.alpha,
            beta=options.beta,
            slice_len=options.slice,
            end_key=("next", "done"),
            strict_length=False,  # episodes shorter than a slice come out whole
        ),
        priority_key="priority",
        batch_size=options.slices * options.slice,
        generator=torch.Generator().manual_seed(seed),
    )


def train(options: argparse.Namespace, seed: int, steps: int, forgets: bool = False) -> dict[str, Any]:
    """Act, store, draw and learn until the greedy policy is good enough or the steps are used up. Returns the results."""
    torch.manual_seed(seed)
    learner, collector, rb = Learner(options, forgets), Collector(options, seed), replay_buffer(options, seed)
    before, begin = average_return(learner.net, seed + 10**6), time.perf_counter()
    run = {"seed": seed, "forgets": forgets, "before": before, "slices": 0, "short": 0, "truncated": 0}
    updates, tried = steps // options.envs, list[tuple[int, float]]()
    for done in tqdm(range(1, updates + 1), unit="update", desc=f"seed {seed}", disable=options.quiet):
        epsilon = 1 + (options.epsilon - 1) * min(done * options.envs / options.explore, 1)
        rb.extend(collector.step(learner.net, epsilon)[:, None])
        if done < options.slice:  # no slice is whole yet
            continue
        rb.sampler.beta = options.beta + (1 - options.beta) * done / updates
        slices, mask = padded(rb.sample(), options.burn_in)
        run["truncated"] += check(slices, mask, collector)
        run["slices"] += len(slices)
        run["short"] += int((mask.sum(1) < options.slice).sum())
        starts = slices[:, 0]
        starts["priority"] = learner.update(slices, mask)
        rb.update_tensordict_priority(starts)
        if not options.quick and done % options.every == 0:
            tried.append((done * options.envs, average_return(learner.target, done)))
            if tried[-1][1] >= options.stop:
                break
    after, seconds = average_return(learner.target, seed + 10**6), time.perf_counter() - begin
    return {**run, "after": after, "steps": done * options.envs, "seconds": seconds, "tried": tried}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="each of which has to learn it")
    parser.add_argument(
        "--steps", type=int, default=24_000, help="environment steps of a run at most, over all environments"
    )
    parser.add_argument("--pass-mark", type=float, default=-600, help="average return that is asked for in the end")
    parser.add_argument("--stop", type=float, default=-350, help="average return at which training stops")
    parser.add_argument("--every", type=int, default=100, help="updates after which the policy is tried")
    parser.add_argument("--shortest", type=int, default=20, help="steps after which an episode is cut, at least")
    parser.add_argument("--longest", type=int, default=200, help="steps after which an episode is cut, at most")
    parser.add_argument("--envs", type=int, default=8, help="environments stepped together, with one update")
    parser.add_argument("--capacity", type=int, default=32_000, help="rows in the buffer, a multiple of envs")
    parser.add_argument("--slice", type=int, default=80, help="rows in a slice")
    parser.add_argument("--burn-in", type=int, default=40, help="of them only for the state of the GRU")
    parser.add_argument("--slices", type=int, default=32, help="drawn for one update")
    parser.add_argument("--n", type=int, default=5, help="steps of the returns")
    parser.add_argument("--hidden", type=int, default=48, help="width of the network")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of Adam")
    parser.add_argument("--clip", type=float, default=10, help="norm of a gradient at most")
    parser.add_argument("--gamma", type=float, default=0.97, help="discount")
    parser.add_argument("--tau", type=float, default=0.03, help="how far the target network follows in one update")
    parser.add_argument("--alpha", type=float, default=0.6, help="how much priorities count")
    parser.add_argument("--beta", type=float, default=0.4, help="how much weights correct for it; rises to 1")
    parser.add_argument("--eta", type=float, default=0.9, help="share of the highest error in a slice's priority")
    parser.add_argument("--epsilon", type=float, default=0.05, help="share of random actions in the end")
    parser.add_argument("--explore", type=int, default=4_000, help="environment steps until epsilon is reached")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the network is too small for more")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--quick", action="store_true", help="some hundred steps without a mark, to see that it runs")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.steps, options.capacity = options.seeds[:1], 1600, 800
        options.slice, options.burn_in, options.slices = 24, 12, 8
        options.shortest, options.longest = 4, 50
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train with each seed, and once, as long, with a network that forgets; print a line each. Returns the results."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    runs: list[dict[str, Any]] = []
    for seed, forgets in [(seed, False) for seed in options.seeds] + [(0, True)] * (not options.quick):
        steps = max(run["steps"] for run in runs) if forgets else options.steps
        run = train(options, seed, steps, forgets)
        runs.append(run)
        print(
            f"seed {seed}{', forgetting' if forgets else ''}: return {run['before']:.0f} before, {run['after']:.0f} after "
            f"{run['steps']:,} steps, {run['seconds']:.0f} s; {run['slices']:,} slices checked, {run['short']:,} padded, "
            f"{run['truncated']:,} up to a truncated end",
            flush=True,
        )
    learned = all((run["after"] >= options.pass_mark) != run["forgets"] for run in runs)
    curve = {
        f"seed {run['seed']}{', forgetting' if run['forgets'] else ''}": [
            list(column) for column in zip(*run["tried"], strict=True)
        ]
        for run in runs
    }
    return {"runs": runs, "curve": curve, "passed": options.quick or learned}


if __name__ == "__main__":
    sys.exit(0 if main()["passed"] else 1)

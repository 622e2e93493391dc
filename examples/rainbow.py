"""Rainbow-style DQN on a CartPole that shows positions only: 3-step returns, priorities, and frames that are stored once.

Velocities are hidden, so an observation is a stack of the last four frames (position, angle). The replay buffer stores
each frame once (`fbuf.Frames`), draws items by priority (`fbuf.Prioritized`), and makes n-step returns from the ring when it
is read (`fbuf.n_step_of_slots`): Rainbow (arXiv:1710.02298) without noisy and distributional Q. The carts are
gymnasium's, on the host; writing, drawing, learning and acting are one jitted program with a donated state, called once
a step.

At intervals the script compares a batch with a NumPy model over a log of all steps: no stack and no return may reach into
another episode, and a truncated episode must end with its own last observation.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

import fbuf

SHOWN = [0, 2]  # of (position, velocity, angle, angular velocity)
SIZE = len(SHOWN)
LIMITS = (2.4, 0.21)  # of them, where an episode ends

# ---------------------------------------------------------------------- dueling Q-network and Adam

Network = dict[str, tuple[Array, Array]]  # weights and bias by layer


def network(rng: np.random.Generator, inputs: int, width: int) -> Network:
    shapes = {"first": (inputs, width), "second": (width, width), "value": (width, 1), "advantage": (width, 2)}
    return {
        name: (jnp.array(rng.normal(0, (2 / shape[0]) ** 0.5, shape), jnp.float32), jnp.zeros(shape[1]))
        for name, shape in shapes.items()
    }


def values(net: Network, obs: Array) -> Array:
    """Q of both actions, [..., 2] (arXiv:1511.06581)."""

    def layer(name: str, x: Array) -> Array:
        weights, bias = net[name]
        return x @ weights + bias

    # The newest frame, and how it came about; what happens within one step is a twentieth of what there is to see.
    frames = obs.reshape(*obs.shape[:-1], -1, SIZE) / jnp.array(LIMITS)
    moved = 20 * jnp.diff(frames, axis=-2)
    seen = jnp.concatenate([frames[..., -1:, :], moved], -2).reshape(obs.shape)
    hidden = jax.nn.relu(layer("second", jax.nn.relu(layer("first", seen))))
    advantage = layer("advantage", hidden)
    return layer("value", hidden) + advantage - advantage.mean(-1, keepdims=True)


def adam(net: Network, slope: Network, moments: tuple[Network, Network], count: Array, rate: float) -> tuple[Any, Any]:
    """One step of Adam (arXiv:1412.6980): the network and the moments."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], slope)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, moments[1], slope)
    rate = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return jax.tree.map(lambda n, m, s: n - rate * m / (jnp.sqrt(s) + 1e-8), net, mean, square), (mean, square)


# ---------------------------------------------------------------------- the agent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Agent:
    """Everything that changes; each step donates it to the next one."""

    buffer: fbuf.BufferState
    net: Network
    target: Network
    moments: tuple[Network, Network]
    steps: Array  # [] of every lane so far
    key: Array


Drawn = tuple[dict[str, Array], fbuf.Draw]  # a batch to learn from, and how it was drawn


class Program:
    """The functions of training runs, pure in `Agent`; compiled once for all seeds."""

    def __init__(self, options: argparse.Namespace, stack: int) -> None:
        self.options, self.stack = options, stack
        self.plain = fbuf.Buffer(  # with stacks as they are, to compare its size
            options.capacity // options.lanes,
            fbuf.Prioritized(alpha=options.alpha, eps=0.01, stratified=True),
            lanes=(options.lanes,),
            trajectories=fbuf.Trajectories(terminated="terminated", truncated="truncated"),
        )
        self.buffer = dataclasses.replace(self.plain, frames=fbuf.Frames("obs", "next_obs", stack=stack))
        self.empty = jax.jit(lambda: self.buffer.init(self.item()))
        self.step = jax.jit(self._step, donate_argnums=0)
        self.greedy = jax.jit(lambda net, obs: jnp.argmax(values(net, obs), -1))

    def item(self) -> dict[str, Any]:
        obs, flag = np.zeros(self.stack * SIZE, np.float32), np.zeros((), bool)
        item = {"obs": obs, "next_obs": obs, "terminated": flag, "truncated": flag}
        return {**item, "action": np.zeros((), np.int32), "reward": np.zeros((), np.float32)}

    def init(self, seed: int) -> Agent:
        net = network(np.random.default_rng(seed), self.stack * SIZE, self.options.hidden)
        return Agent(
            buffer=self.empty(),
            net=net,
            target=jax.tree.map(jnp.copy, net),
            moments=(jax.tree.map(jnp.zeros_like, net), jax.tree.map(jnp.zeros_like, net)),
            steps=jnp.zeros((), jnp.int32),
            key=jax.random.key(seed),
        )

    def _step(self, agent: Agent, row: dict[str, Array], obs: Array) -> tuple[Agent, Array, Drawn]:
        """Write the rows of all lanes, learn from a batch, choose the next actions. Also returns the batch."""
        lanes = self.options.lanes
        key, draw_key, choice_key, action_key = jax.random.split(agent.key, 4)
        buffer, _ = self.buffer.extend(agent.buffer, jax.tree.map(lambda leaf: leaf[None], row))
        agent = dataclasses.replace(agent, buffer=buffer, steps=agent.steps + 1, key=key)
        agent, drawn = self.learn(agent, draw_key)
        progress = jnp.minimum(agent.steps * lanes / self.options.explore, 1)
        at_random = jax.random.uniform(choice_key, lanes) < 1 + (self.options.epsilon - 1) * progress
        greedy = jnp.argmax(values(agent.net, obs), -1)
        return agent, jnp.where(at_random, jax.random.randint(action_key, lanes, 0, 2), greedy), drawn

    def learn(self, agent: Agent, key: Array) -> tuple[Agent, Drawn]:
        """One update of the network, and of the priorities from its errors. Double DQN (arXiv:1509.06461)."""
        options = self.options
        buffer, (batch, draw) = self.draw(agent.buffer, key)
        progress = jnp.minimum(agent.steps * options.lanes / options.steps, 1)
        weights = fbuf.importance_weights(draw, options.beta + (1 - options.beta) * progress)
        best = jnp.argmax(values(agent.net, batch["last_obs"]), -1)
        future = jnp.take_along_axis(values(agent.target, batch["last_obs"]), best[:, None], -1)[:, 0]
        goal = batch["return"] + batch["discount"] * future

        def loss(net: Network) -> tuple[Array, Array]:
            chosen = jnp.take_along_axis(values(net, batch["obs"]), batch["action"][:, None], -1)[:, 0]
            error = jnp.abs(goal - chosen)
            return jnp.mean(weights * jnp.where(error < 1, 0.5 * error**2, error - 0.5)), error

        slope, error = jax.grad(loss, has_aux=True)(agent.net)
        net, moments = adam(agent.net, slope, agent.moments, agent.steps, options.learning_rate)
        agent = dataclasses.replace(
            agent,
            buffer=self.buffer.update(buffer, draw.slots, error),
            net=net,
            target=jax.tree.map(lambda old, new: old + options.tau * (new - old), agent.target, net),
            moments=moments,
        )
        return agent, (batch, draw)

    def draw(self, state: fbuf.BufferState, key: Array) -> tuple[fbuf.BufferState, Drawn]:
        """A batch of observations and actions, their n-step returns, and discounts and observations after the n steps."""
        state, items, draw = self.buffer.sample(state, key, self.options.batch_size)
        rewards, index = state.items["reward"], state.trajectories
        found = fbuf.n_step_of_slots(draw.slots, rewards, index, state.ring, self.options.gamma, self.options.n)
        batch = {
            "obs": items["obs"],
            "action": items["action"],
            "return": found.returns,
            "discount": found.discount,  # 0 where it terminates; a truncated episode could have gone on
            "last_obs": self.buffer.read(state, found.last)["next_obs"],
        }
        # An end that is no longer remembered is nothing to learn from.
        draw = dataclasses.replace(draw, valid=draw.valid & self.buffer.intact(state, found.last))
        return state, (batch, draw)

    def memory(self) -> tuple[int, int]:
        """Bytes of the buffer, and of one that stores whole stacks."""

        def size(buffer: fbuf.Buffer) -> int:
            leaves = jax.tree.leaves(jax.eval_shape(buffer.init, self.item()))
            return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

        return size(self.buffer), size(self.plain)


# ---------------------------------------------------------------------- the environments


class Carts:
    """Several CartPole-v1 without velocities, and the stack of frames of each."""

    def __init__(self, count: int, stack: int, max_steps: int, seed: int) -> None:
        # With autoreset off a step always returns where it really ended, and a reset happens only where it is asked for.
        self.envs = gymnasium.make_vec(
            "CartPole-v1",
            count,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
            max_episode_steps=max_steps,
        )
        self.stack = stack
        carts, _ = self.envs.reset(seed=seed)
        self.obs = np.tile(carts[:, SHOWN], stack)

    def step(self, action: np.ndarray) -> dict[str, np.ndarray]:
        """One step: a row of leaves [lanes, ...]. Ended episodes are reset, which the row does not show."""
        carts, reward, terminated, truncated, _ = self.envs.step(action)
        next_obs, done = np.concatenate([self.obs[:, SIZE:], carts[:, SHOWN]], -1), terminated | truncated
        row = {"obs": self.obs, "action": action, "reward": reward, "next_obs": next_obs}
        row |= {"terminated": terminated, "truncated": truncated}
        self.obs = next_obs
        if done.any():
            carts, _ = self.envs.reset(options={"reset_mask": done})
            self.obs = np.where(done[:, None], np.tile(carts[:, SHOWN], self.stack), next_obs)
        return {name: leaf.astype(np.float32) if leaf.dtype == float else leaf for name, leaf in row.items()}


def average_return(program: Program, net: Network, seed: int, episodes: int = 20) -> float:
    """The average return of episodes of the greedy policy."""
    carts = Carts(episodes, program.stack, program.options.max_steps, seed)
    total, alive = np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        row = carts.step(np.asarray(program.greedy(net, carts.obs)))
        total += row["reward"] * alive
        alive &= ~(row["terminated"] | row["truncated"])
    return float(total.mean())


@dataclasses.dataclass
class Log:
    """All rows ever written, with whole stacks, on the host; and the expected batches, in plain NumPy."""

    program: Program
    rows: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    checked: int = 0  # items
    short: int = 0  # of these with fewer steps than n
    truncated: int = 0  # that go on with the last observation of a truncated episode

    def check(self, batch: dict[str, Array], draw: fbuf.Draw) -> None:
        """Compare a batch with the rows of the log in its slots."""
        assert draw.valid.all(), "there is room for the ends of an eighth of the items"
        options, newest = self.program.options, len(self.rows) - 1
        found = {name: np.asarray(leaf) for name, leaf in batch.items()}
        rows, lanes = np.divmod(np.asarray(draw.slots), options.lanes)
        times = newest - (newest - rows) % self.program.buffer.capacity  # the latest that was written into the row
        for place, (start, lane) in enumerate(zip(times, lanes, strict=True)):
            earned, discount = 0.0, 1.0
            for each in range(start, min(start + options.n, newest + 1)):
                row = {name: leaf[lane] for name, leaf in self.rows[each].items()}
                earned += discount * row["reward"]
                discount *= options.gamma
                if row["terminated"] or row["truncated"]:
                    break
            np.testing.assert_array_equal(found["obs"][place], self.rows[start]["obs"][lane])
            np.testing.assert_array_equal(found["last_obs"][place], row["next_obs"])
            assert found["action"][place] == self.rows[start]["action"][lane]
            np.testing.assert_allclose(found["return"][place], earned, rtol=1e-6)
            np.testing.assert_allclose(found["discount"][place], 0 if row["terminated"] else discount, rtol=1e-6)
            self.checked += 1
            self.short += bool(each + 1 < start + options.n)
            self.truncated += bool(row["truncated"] and not row["terminated"])


# ---------------------------------------------------------------------- the run


def train(program: Program, seed: int) -> tuple[Agent, Log, list[tuple[int, float]]]:
    """Step the carts with the actions of the agent until its greedy policy is good enough."""
    options, log = program.options, Log(program)
    carts = Carts(options.lanes, program.stack, options.max_steps, seed)
    agent, action = program.init(seed), np.zeros(options.lanes, np.int32)
    rows, tried = range(1, options.steps // options.lanes + 1), list[tuple[int, float]]()
    for done in tqdm(rows, unit="row", desc=f"stack {program.stack}, seed {seed}", disable=options.quiet):
        log.rows.append(carts.step(action))
        agent, chosen, drawn = program.step(agent, log.rows[-1], carts.obs)
        action = np.asarray(chosen)
        if done % options.check == 0:
            log.check(*drawn)
        tries = not options.quick and done % options.every == 0
        if tries:
            tried.append((done * options.lanes, average_return(program, agent.target, done)))
            if tried[-1][1] >= options.stop:
                break
    return agent, log, tried


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="each of which has to learn it")
    parser.add_argument("--steps", type=int, default=150_000, help="environment steps of a run, over all lanes")
    parser.add_argument("--pass-mark", type=float, default=300, help="average return that is asked for in the end")
    parser.add_argument("--stop", type=float, default=475, help="average return at which training stops")
    parser.add_argument("--max-steps", type=int, default=500, help="after which an episode is truncated")
    parser.add_argument("--lanes", type=int, default=8, help="environments stepped together")
    parser.add_argument("--capacity", type=int, default=40_000, help="items in the buffer")
    parser.add_argument("--stack", type=int, default=4, help="frames in an observation")
    parser.add_argument("--n", type=int, default=3, help="steps of the returns")
    parser.add_argument("--batch-size", type=int, default=128, help="items drawn for one update, one update a row")
    parser.add_argument("--hidden", type=int, default=64, help="width of both hidden layers")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount")
    parser.add_argument("--tau", type=float, default=0.01, help="how far the target network follows in one update")
    parser.add_argument("--alpha", type=float, default=0.6, help="how much priorities count")
    parser.add_argument("--beta", type=float, default=0.4, help="how much weights correct for it; rises to 1")
    parser.add_argument("--epsilon", type=float, default=0.02, help="share of random actions in the end")
    parser.add_argument("--explore", type=int, default=10_000, help="environment steps until epsilon is reached")
    parser.add_argument("--every", type=int, default=1_000, help="rows after which the policy is tried")
    parser.add_argument("--check", type=int, default=100, help="rows after which a batch is compared with the log")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--quick", action="store_true", help="some hundred steps without a mark, to see that it runs")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.steps, options.capacity = options.seeds[:1], 2400, 1600
        options.max_steps, options.check = 20, 60
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train with each seed, and once with single frames; print a line each. Returns the results."""
    options = parse(argv)
    stacked, single = (Program(options, stack) for stack in (options.stack, 1))
    runs: list[dict[str, Any]] = []
    curve: dict[str, list[list[float]]] = {}
    for program, seed in [(stacked, seed) for seed in options.seeds] + [(single, 0)] * (not options.quick):
        begin, before = time.perf_counter(), program.init(seed).net
        agent, log, tried = train(program, seed)
        curve[f"stack {program.stack}, seed {seed}"] = [list(column) for column in zip(*tried, strict=True)]
        run = {"stack": program.stack, "seed": seed, "seconds": time.perf_counter() - begin}
        run |= {"steps": len(log.rows) * options.lanes, "short": log.short, "truncated": log.truncated}
        run |= {"checked": log.checked, "before": average_return(program, before, seed + 10**6)}
        run |= {"after": average_return(program, agent.target, seed + 10**6)}
        print(
            f"stack {program.stack}, seed {seed}: return {run['before']:.0f} before, {run['after']:.0f} after "
            f"{run['steps']:,} steps, {run['seconds']:.0f} s; {log.checked:,} items are as in the log, {log.short:,} of "
            f"them with less than {options.n} steps, {log.truncated:,} truncated",
            flush=True,
        )
        runs.append(run)
    once, plain = stacked.memory()
    print(f"{options.capacity:,} items: {once:,} bytes with frames stored once, {plain:,} with stacks as they are")
    learned = all((run["after"] >= options.pass_mark) == (run["stack"] > 1) for run in runs)
    return {"runs": runs, "curve": curve, "bytes": once, "plain_bytes": plain, "passed": options.quick or learned}


if __name__ == "__main__":
    sys.exit(0 if main()["passed"] else 1)

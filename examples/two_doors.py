"""One buffer state, two libraries: one steps the environments, the other one learns from the same prioritized buffer.

1. Environments in JAX, stepped and stored within one jitted `lax.scan`; a DQN learner in torch samples from that state.
2. Environments of gymnasium write through torch; a DQN learner in JAX samples, learns and updates priorities in one scan.

`functional()` passes the state between the two; it is donated and comes back without a copy. Each run stops when
the average return over 100 consecutive episodes of CartPole reaches the threshold; otherwise the script fails.
"""

import argparse
import copy
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from tensordict import TensorDict
from torch import nn

import fbuf
import interop

GAMMA, TAU, RATE, BETA, EPISODES = 0.99, 0.02, 2e-3, 0.4, 100
ITEM = {
    "cart": jnp.zeros(4),
    "action": jnp.zeros((), jnp.int32),
    "next": {"cart": jnp.zeros(4), "terminated": jnp.zeros((), bool)},
}
Network = list[tuple[Array, Array]]  # weights and biases of each layer


class Returns:
    """Returns of the ended episodes; of CartPole the number of their steps."""

    def __init__(self) -> None:
        self.all: list[float] = []
        self.best = 0.0  # average over EPISODES consecutive ones
        self.steps: list[float] = []  # of all episodes so far, at each point of the curve
        self.averages: list[float] = []

    def add(self, lengths: Sequence[float]) -> None:
        for length in lengths:
            self.all.append(float(length))
            if len(self.all) >= EPISODES:
                self.steps.append(sum(self.all))
                self.averages.append(statistics.fmean(self.all[-EPISODES:]))
                self.best = max(self.best, self.averages[-1])


# ---------------------------------------------------------------------- CartPole-v1 in JAX


def move(cart: Array, action: Array) -> Array:
    """The cart [..., 4] (position, velocity, angle, angular velocity) 20 ms after a push to the left (0) or right (1)."""
    x, x_dot, theta, theta_dot = jnp.moveaxis(cart, -1, 0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = push - 0.05 * theta_acc * cos / 1.1
    return jnp.stack(
        [x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc], -1
    )


def fallen(cart: Array) -> Array:
    return (jnp.abs(cart[..., 0]) > 2.4) | (jnp.abs(cart[..., 2]) > 12 * 2 * np.pi / 360)


def values(net: Network, carts: Array) -> Array:
    """Q of both actions, [..., 2]."""
    *hidden, (weights, bias) = net
    for inner_weights, inner_bias in hidden:
        carts = jax.nn.relu(carts @ inner_weights + inner_bias)
    return carts @ weights + bias


def fresh(key: Array, lanes: int) -> Array:
    return jax.random.uniform(key, (lanes, 4), minval=-0.05, maxval=0.05)


# ---------------------------------------------------------------------- 1. JAX acts, torch learns


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def collect(buffer: fbuf.Buffer, steps: int, state: Any, world: Any, net: Network, epsilon: Array) -> Any:
    """Write some steps of every lane into the buffer. Returns lengths of ended episodes, 0 elsewhere."""

    def step(carry: Any, _: None) -> Any:
        state, (carts, elapsed, key) = carry
        key, choice, at_random, reset = jax.random.split(key, 4)
        lanes = elapsed.shape
        greedy = jnp.argmax(values(net, carts), -1)
        explores = jax.random.uniform(choice, lanes) < epsilon
        action = jnp.where(explores, jax.random.randint(at_random, lanes, 0, 2), greedy).astype(jnp.int32)
        after, elapsed = move(carts, action), elapsed + 1
        terminated = fallen(after)
        row = {"cart": carts, "action": action, "next": {"cart": after, "terminated": terminated}}
        state, _ = buffer.add(state, row)
        done = terminated | (elapsed >= 500)
        world = jnp.where(done[:, None], fresh(reset, *lanes), after), jnp.where(done, 0, elapsed), key
        return (state, world), jnp.where(done, elapsed, 0)

    (state, world), lengths = jax.lax.scan(step, (state, world), length=steps)
    return state, world, lengths


class TorchLearner:
    """Double DQN."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=RATE, fused=True)

    def update(self, batch: TensorDict) -> torch.Tensor:
        """One step on a batch; the absolute errors [batch]."""
        after = batch["next", "cart"]
        with torch.no_grad():
            future = self.target(after).gather(-1, self.net(after).argmax(-1, keepdim=True))[:, 0]
            goal = 1 + GAMMA * future * ~batch["next", "terminated"]
        chosen = self.net(batch["cart"]).gather(-1, batch["action"][:, None].long())[:, 0]
        huber = nn.functional.smooth_l1_loss(chosen, goal, reduction="none")
        self.optimizer.zero_grad()
        (batch["priority_weight"] * huber).mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, TAU)
            return (goal - chosen).abs()

    def in_jax(self) -> Network:
        """A copy of the network, which the scan reads while torch continues."""
        layers = [each for each in self.net if isinstance(each, nn.Linear)]
        return [(interop.to_jax(each.weight.detach().T), interop.to_jax(each.bias.detach())) for each in layers]


def jax_acts(options: argparse.Namespace) -> Returns:
    buffer = fbuf.Buffer(options.capacity // options.lanes, fbuf.Prioritized(0.6, eps=0.01), lanes=(options.lanes,))
    rb = interop.from_fbuf(buffer, buffer.init(ITEM), batch_size=options.batch_size, beta=BETA)
    learner, returns, key = TorchLearner(), Returns(), jax.random.key(options.seed)
    world: Any = fresh(key, options.lanes), jnp.zeros(options.lanes, jnp.int32), key
    steps = 0
    while steps < options.steps and (options.smoke or returns.best < options.threshold):
        epsilon = jnp.float32(max(0.05, 1 - 0.95 * steps / options.explore))
        with rb.functional(backup=False) as handle:
            handle.state, world, lengths = collect(
                buffer, options.chunk, handle.state, world, learner.in_jax(), epsilon
            )
        steps += options.chunk * options.lanes
        returns.add([each for each in np.asarray(lengths).reshape(-1) if each])
        for _ in range(options.chunk):
            batch = rb.sample()
            rb.update_tensordict_priority(batch.set("td_error", learner.update(batch)))
    return returns


# ---------------------------------------------------------------------- 2. torch writes, JAX learns


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def learn(buffer: fbuf.Buffer, updates: int, batch_size: int, state: Any, learner: Any, key: Array) -> Any:
    """Draws, updates of the network by Adam, and new priorities."""

    def update(carry: Any, key: Array) -> Any:
        state, (net, target, mean, square, count) = carry
        state, batch, draw = buffer.sample(state, key, batch_size)
        after = batch["next"]["cart"]
        future = jnp.take_along_axis(values(target, after), jnp.argmax(values(net, after), -1)[:, None], -1)[:, 0]
        goal = 1 + GAMMA * jnp.where(batch["next"]["terminated"], 0, future)

        def loss(net: Network) -> tuple[Array, Array]:
            chosen = jnp.take_along_axis(values(net, batch["cart"]), batch["action"][:, None], -1)[:, 0]
            error = jnp.abs(goal - chosen)
            huber = jnp.where(error < 1, 0.5 * error**2, error - 0.5)
            return jnp.mean(fbuf.importance_weights(draw, BETA) * huber), error

        slope, error = jax.grad(loss, has_aux=True)(net)
        count = count + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, square, slope)
        rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        net = jax.tree.map(lambda n, m, s: n - rate * m / (jnp.sqrt(s) + 1e-8), net, mean, square)
        target = jax.tree.map(lambda slow, fast: slow + TAU * (fast - slow), target, net)
        return (buffer.update(state, draw.slots, error), (net, target, mean, square, count)), None

    return jax.lax.scan(update, (state, learner), jax.random.split(key, updates))[0]


def torch_writes(options: argparse.Namespace) -> Returns:
    buffer = fbuf.Buffer(options.capacity, fbuf.Prioritized(0.6, eps=0.01))
    rb = interop.from_fbuf(buffer, buffer.init(ITEM))
    net = TorchLearner().in_jax()
    copies = (jax.tree.map(jnp.copy, net), *(jax.tree.map(jnp.zeros_like, net) for _ in range(2)))
    learner: Any = (net, *copies, jnp.zeros(()))
    act, keys, rng = jax.jit(values), jax.random.key(options.seed), np.random.default_rng(options.seed)
    disabled = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    envs = gymnasium.make_vec("CartPole-v1", options.lanes, vectorization_mode="sync", vector_kwargs=disabled)
    carts, _ = envs.reset(seed=options.seed)
    returns, lengths, steps = Returns(), np.zeros(options.lanes), 0
    while steps < options.steps and (options.smoke or returns.best < options.threshold):
        for _ in range(options.chunk):
            greedy = np.asarray(act(learner[0], carts)).argmax(-1)
            explores = rng.random(options.lanes) < max(0.05, 1 - 0.95 * steps / options.explore)
            action = np.where(explores, rng.integers(2, size=options.lanes), greedy).astype(np.int32)
            after, _, terminated, truncated, _ = envs.step(action)
            rb.extend({"cart": carts, "action": action, "next": {"cart": after, "terminated": terminated}})
            steps, lengths, done = steps + options.lanes, lengths + 1, terminated | truncated
            returns.add(lengths[done])
            lengths[done] = 0
            carts = envs.reset(options={"reset_mask": done})[0] if done.any() else after
        keys, key = jax.random.split(keys)
        with rb.functional(backup=False) as handle:
            handle.state, learner = learn(buffer, options.chunk, options.batch_size, handle.state, learner, key)
    return returns


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run both and print a line about each. Returns the curves, and whether both have learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150_000, help="of the environments, at most")
    parser.add_argument("--threshold", type=float, default=195, help="average return over 100 episodes")
    parser.add_argument("--lanes", type=int, default=4, help="environments side by side")
    parser.add_argument(
        "--chunk", type=int, default=32, help="steps of every lane, and updates, before the sides change"
    )
    parser.add_argument("--capacity", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--explore", type=int, default=5_000, help="steps until actions are random in 1 of 20")
    parser.add_argument("--smoke", action="store_true", help="some hundred steps without a threshold")
    options = parser.parse_args(argv)
    options.steps = 400 if options.smoke else options.steps
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    learned, curve = [], {}
    for name, run in (("JAX acts, torch learns", jax_acts), ("torch writes, JAX learns", torch_writes)):
        begin = time.perf_counter()
        returns = run(options)
        seconds, steps = time.perf_counter() - begin, int(sum(returns.all))
        print(
            f"{name:<26}best average {returns.best:6.1f}, {len(returns.all):5} episodes, {steps:7,} steps, {seconds:.0f} s"
        )
        curve[name] = [returns.steps, returns.averages]
        learned.append(returns.best >= options.threshold)
    return {"passed": options.smoke or all(learned), "curve": curve}


if __name__ == "__main__":
    sys.exit(0 if main()["passed"] else 1)

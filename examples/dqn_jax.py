"""DQN on CartPole in one program: environment, prioritized replay and learner inside a single jitted `jax.lax.scan`.

Double DQN (arXiv:1509.06461) with prioritized replay (arXiv:1511.05952). Several carts run side by side, one lane of the
buffer each. Training goes on until the average return over 100 consecutive episodes, in the order in which they end,
reaches the threshold.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import Array
from tqdm import tqdm

import fbuf

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  # after the backend is chosen

EPISODES = 100  # consecutive ones that are averaged

# ---------------------------------------------------------------------- CartPole-v1, as in gymnasium

GRAVITY, MASS_CART, MASS_POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL_MASS, POLE_MOMENT = MASS_CART + MASS_POLE, MASS_POLE * HALF_LENGTH
MAX_POSITION, MAX_ANGLE, MAX_STEPS = 2.4, 12 * 2 * np.pi / 360, 500
REWARD = 1.0  # for every step, the last one too: the return of an episode is its length


def move(cart: Array, action: Array) -> Array:
    """The cart [4] (position, velocity, angle, angular velocity) after pushing it left (0) or right (1)."""
    x, x_dot, theta, theta_dot = cart
    force = jnp.where(action == 1, FORCE, -FORCE)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    push = (force + POLE_MOMENT * theta_dot**2 * sin) / TOTAL_MASS
    theta_acc = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - MASS_POLE * cos**2 / TOTAL_MASS))
    x_acc = push - POLE_MOMENT * theta_acc * cos / TOTAL_MASS
    return jnp.stack(
        [x + SECONDS * x_dot, x_dot + SECONDS * x_acc, theta + SECONDS * theta_dot, theta_dot + SECONDS * theta_acc]
    )


def fallen(cart: Array) -> Array:
    """True where the episode is terminated."""
    return (jnp.abs(cart[..., 0]) > MAX_POSITION) | (jnp.abs(cart[..., 2]) > MAX_ANGLE)


def fresh(key: Array, lanes: int) -> Array:
    """Carts [lanes, 4] at the start of an episode."""
    return jax.random.uniform(key, (lanes, 4), minval=-0.05, maxval=0.05)


# ---------------------------------------------------------------------- Q-network and Adam

Network = list[tuple[Array, Array]]  # weights and biases of each layer


def network(key: Array, sizes: Sequence[int]) -> Network:
    keys = jax.random.split(key, len(sizes) - 1)
    scales = [np.sqrt(2 / inputs) for inputs in sizes[:-1]]
    shapes = zip(sizes[:-1], sizes[1:], strict=True)
    return [
        (scale * jax.random.normal(k, shape), jnp.zeros(shape[1]))
        for k, scale, shape in zip(keys, scales, shapes, strict=True)
    ]


def values(net: Network, carts: Array) -> Array:
    """Q of both actions, [..., 2]."""
    *hidden, (weights, bias) = net
    for inner_weights, inner_bias in hidden:
        carts = jax.nn.relu(carts @ inner_weights + inner_bias)
    return carts @ weights + bias


def adam(net: Network, slope: Network, mean: Network, square: Network, count: Array, rate: float) -> tuple[Any, ...]:
    """One step of Adam (arXiv:1412.6980): the network, and both moments."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, square, slope)
    rate = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return jax.tree.map(lambda n, m, s: n - rate * m / (jnp.sqrt(s) + 1e-8), net, mean, square), mean, square


# ---------------------------------------------------------------------- the program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Training:
    """Everything that changes: what the scan carries, and what is donated to the next chunk."""

    buffer: fbuf.BufferState
    net: Network
    target: Network
    mean: Network
    square: Network
    updates: Array  # [] of the network
    carts: Array  # [lanes, 4]
    elapsed: Array  # [lanes] steps of the running episodes
    rows: Array  # [] steps of every lane so far
    key: Array


class Program:
    """The functions of one training run, pure in `Training`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.buffer = fbuf.Buffer(
            options.capacity // options.lanes,
            fbuf.Prioritized(alpha=options.alpha, stratified=True),
            lanes=(options.lanes,),
        )

    def init(self, key: Array) -> Training:
        key, net_key, cart_key = jax.random.split(key, 3)
        cart = jnp.zeros(4)
        flag = jnp.zeros((), bool)
        item = {"cart": cart, "action": jnp.zeros((), jnp.int32), "next_cart": cart, "terminated": flag}
        net = network(net_key, (4, self.options.hidden, self.options.hidden, 2))
        zeros = jax.tree.map(jnp.zeros_like, net)
        lanes = self.options.lanes
        return Training(
            buffer=self.buffer.init(item),
            net=net,
            target=jax.tree.map(jnp.copy, net),
            mean=zeros,
            square=jax.tree.map(jnp.copy, zeros),
            updates=jnp.zeros((), jnp.int32),
            carts=fresh(cart_key, lanes),
            elapsed=jnp.zeros(lanes, jnp.int32),
            rows=jnp.zeros((), jnp.int32),
            key=key,
        )

    def chunk(self, training: Training, rows: int, learn: bool) -> tuple[Training, tuple[Array, Array]]:
        """`rows` steps of every lane, and which episodes ended at which length, [rows, lanes] each."""

        def step(training: Training, _: None) -> tuple[Training, tuple[Array, Array]]:
            training, ended = self.act(training)
            if learn:
                training, _ = jax.lax.scan(lambda t, _: (self.learn(t), None), training, length=self.options.updates)
            return training, ended

        return jax.lax.scan(step, training, length=rows)

    def act(self, training: Training) -> tuple[Training, tuple[Array, Array]]:
        """One step of every lane, epsilon-greedy, into the buffer."""
        key, choice_key, action_key, reset_key = jax.random.split(training.key, 4)
        lanes = self.options.lanes
        progress = jnp.minimum(training.rows * lanes / self.options.explore, 1)
        epsilon = 1 + (self.options.epsilon - 1) * progress
        greedy = jnp.argmax(values(training.net, training.carts), -1)
        at_random = jax.random.uniform(choice_key, lanes) < epsilon
        action = jnp.where(at_random, jax.random.randint(action_key, lanes, 0, 2), greedy).astype(jnp.int32)

        after = jax.vmap(move)(training.carts, action)
        elapsed = training.elapsed + 1
        terminated = fallen(after)
        done = terminated | (elapsed >= MAX_STEPS)
        # The row holds where the episode really ended, not where the next one starts. A truncated episode could have
        # gone on, so it is not marked: the learner bootstraps from its last cart.
        row = {"cart": training.carts, "action": action, "next_cart": after, "terminated": terminated}
        buffer, _ = self.buffer.extend(training.buffer, jax.tree.map(lambda leaf: leaf[None], row))
        training = dataclasses.replace(
            training,
            buffer=buffer,
            carts=jnp.where(done[:, None], fresh(reset_key, lanes), after),
            elapsed=jnp.where(done, 0, elapsed),
            rows=training.rows + 1,
            key=key,
        )
        return training, (done, elapsed)

    def learn(self, training: Training) -> Training:
        """One update of the network from a prioritized batch, and of the priorities from its errors."""
        key, sample_key = jax.random.split(training.key)
        buffer, batch, draw = self.buffer.sample(training.buffer, sample_key, self.options.batch_size)
        weights = fbuf.importance_weights(draw, self.beta(training.rows))
        best = jnp.argmax(values(training.net, batch["next_cart"]), -1)
        future = jnp.take_along_axis(values(training.target, batch["next_cart"]), best[:, None], -1)[:, 0]
        goal = REWARD + self.options.gamma * jnp.where(batch["terminated"], 0, future)

        def loss(net: Network) -> tuple[Array, Array]:
            chosen = jnp.take_along_axis(values(net, batch["cart"]), batch["action"][:, None], -1)[:, 0]
            error = jnp.abs(goal - chosen)
            huber = jnp.where(error < 1, 0.5 * error**2, error - 0.5)
            return jnp.mean(weights * huber), error

        slope, error = jax.grad(loss, has_aux=True)(training.net)
        count = training.updates + 1
        net, mean, square = adam(
            training.net, slope, training.mean, training.square, count, self.options.learning_rate
        )
        tau = self.options.tau
        return dataclasses.replace(
            training,
            buffer=self.buffer.update(buffer, draw.slots, error),
            net=net,
            target=jax.tree.map(lambda old, new: old + tau * (new - old), training.target, net),
            mean=mean,
            square=square,
            updates=count,
            key=key,
        )

    def beta(self, rows: Array) -> Array:
        """Rises to 1 over the run, as the estimates settle and the bias of prioritized draws starts to matter."""
        progress = jnp.minimum(rows * self.options.lanes / self.options.steps, 1)
        return self.options.beta + (1 - self.options.beta) * progress


# ---------------------------------------------------------------------- the run

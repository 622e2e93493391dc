"""DQN on CartPole in one program: environment, prioritized replay and learner inside a single jitted `jax.lax.scan`.

Double DQN (arXiv:1509.06461) with prioritized replay (arXiv:1511.05952). Several carts run side by side, one lane of the
buffer each. Training stops when the average return over 100 consecutive episodes, in the order in which they end,
reaches the threshold.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure
from tqdm import tqdm

import fbuf

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
    shapes = list(itertools.pairwise(sizes))
    keys = jax.random.split(key, len(shapes))
    draw = jax.nn.initializers.he_normal()
    return [(draw(each, shape), jnp.zeros(shape[1])) for each, shape in zip(keys, shapes, strict=True)]


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
    """Everything that changes. The scan carries it; it is donated to the next chunk."""

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
            fbuf.Prioritized(alpha=options.alpha, eps=options.eps, stratified=True),
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

    def chunk(self, training: Training) -> tuple[Training, tuple[Array, Array]]:
        """Run some rows: a step of every lane and an update each. Returns lengths of ended episodes, [rows, lanes]."""

        def row(training: Training, _: None) -> tuple[Training, tuple[Array, Array]]:
            training, ended = self.act(training)
            return self.learn(training), ended

        return jax.lax.scan(row, training, length=self.options.chunk)

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
        net, mean, square = adam(training.net, slope, training.mean, training.square, count, self.options.learning_rate)
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


@dataclasses.dataclass
class Episodes:
    """The ended episodes, in order."""

    steps: list[int] = dataclasses.field(default_factory=list)  # of the environment, over all lanes, at the end of each
    returns: list[float] = dataclasses.field(default_factory=list)
    averages: list[float] = dataclasses.field(default_factory=list)  # of each 100 consecutive ones, the last at the end

    def add(self, rows_before: int, done: np.ndarray, elapsed: np.ndarray) -> None:
        """Add the episodes of a chunk, [rows, lanes]. Those that end in the same row count in the order of lanes."""
        for row, lane in zip(*np.nonzero(done), strict=True):
            self.steps.append(int(rows_before + row + 1) * done.shape[1])
            self.returns.append(REWARD * float(elapsed[row, lane]))
            if len(self.returns) >= EPISODES:
                self.averages.append(statistics.fmean(self.returns[-EPISODES:]))

    def reached(self, threshold: float) -> int | None:
        """The index of the first average of at least `threshold`."""
        return next((place for place, average in enumerate(self.averages) if average >= threshold), None)


def train(options: argparse.Namespace, program: Program) -> tuple[Training, Episodes, dict[str, float]]:
    """Run chunks until the threshold or the number of steps is reached."""
    begin = time.perf_counter()
    training = jax.jit(program.init)(jax.random.key(options.seed))
    chunk = jax.jit(program.chunk, donate_argnums=0).lower(training).compile()
    compiled, episodes, rows = time.perf_counter(), Episodes(), 0
    with tqdm(total=options.steps, unit="step", desc="jax", disable=options.quiet) as bar:
        while rows * options.lanes < options.steps and (options.smoke or episodes.reached(options.threshold) is None):
            training, ended = chunk(training)
            episodes.add(rows, *map(np.asarray, ended))
            rows += options.chunk
            bar.set_postfix(average=f"{statistics.fmean(episodes.returns[-EPISODES:] or [0]):.1f}")
            bar.update(options.chunk * options.lanes)
    seconds = {"compile_seconds": compiled - begin, "train_seconds": time.perf_counter() - compiled}
    return training, episodes, {"total_steps": rows * options.lanes, **seconds}


def median_us(options: argparse.Namespace, program: Program, state: fbuf.BufferState) -> dict[str, float]:
    """Times of each operation as a jitted call with a donated state. Inside the scan the call itself costs nothing."""
    buffer, calls = program.buffer, 20 if options.smoke else 300
    extend = jax.jit(buffer.extend, donate_argnums=0)
    sample = jax.jit(buffer.sample, static_argnums=2, donate_argnums=0)
    update = jax.jit(buffer.update, donate_argnums=0)
    rows = jax.tree.map(lambda leaf: leaf[:1], state.items)
    taken: dict[str, list[float]] = {"extend": [], "sample": [], "update": []}

    def clock(name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = jax.block_until_ready(operation(*arguments))
        taken[name].append((time.perf_counter() - begin) * 1e6)
        return result

    for key in jax.random.split(jax.random.key(options.seed), calls):
        state, _ = clock("extend", extend, state, rows)
        state, _, draw = clock("sample", sample, state, key, options.batch_size)
        state = clock("update", update, state, draw.slots, draw.probability)
    return {name: statistics.median(times) for name, times in taken.items()}


def check_dynamics(seed: int = 0, random_steps: int = 500) -> dict[str, float]:
    """Compare `move`, `fallen` and `MAX_STEPS` with gymnasium's CartPole-v1; AssertionError if they differ.

    Random pushes for `random_steps`, then one whole episode that is balanced until it is truncated. Each step is
    compared from gymnasium's own state, in float64 and in float32: the cart is unstable, so over an episode any rounding
    error would grow until nothing could be compared. Returns the largest error of each precision.
    """
    env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(seed)
    steps: list[tuple[Any, ...]] = []
    balanced, truncated = False, False
    while not (balanced and truncated):
        balanced = len(steps) >= random_steps
        env.reset(seed=int(rng.integers(2**31)))
        terminated, truncated, elapsed = False, False, 0
        while not (terminated or truncated):
            before = np.array(env.unwrapped.state)
            action = int(before @ [0.1, 0.5, 3.0, 1.0] > 0) if balanced else int(rng.integers(2))
            _, reward, terminated, truncated, _ = env.step(action)
            elapsed += 1
            steps.append((before, action, np.array(env.unwrapped.state), terminated))
            assert reward == REWARD, f"the reward is {reward}"
            assert truncated == (elapsed >= MAX_STEPS), f"truncated is {truncated} after {elapsed} steps"
    cart, action, after, terminated = map(np.stack, zip(*steps, strict=True))
    worst = {}
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        with jax.enable_x64(dtype == "float64"):
            ours = jax.jit(jax.vmap(move))(cart.astype(dtype), action)
            assert ours.dtype == dtype
            worst[dtype] = float(np.abs(np.asarray(ours) - after).max())
            assert worst[dtype] <= tolerance, f"{dtype}: off by {worst[dtype]}, allowed are {tolerance}"
            np.testing.assert_array_equal(np.asarray(fallen(ours)), terminated)
    return {"steps": len(steps), **worst}


def plot(path: pathlib.Path, episodes: Episodes, threshold: float) -> None:
    """The learning curve."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(episodes.steps, episodes.returns, ".", markersize=3, color="0.6", label="one episode")
    axes.plot(episodes.steps[EPISODES - 1 :], episodes.averages, label=f"average over {EPISODES} episodes")
    axes.axhline(threshold, linestyle="--", color="black", linewidth=1, label=f"{threshold:g}")
    axes.set(title="CartPole-v1, DQN in one jitted scan", xlabel="environment steps", ylabel="return")
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def contents(program: Program, state: fbuf.BufferState) -> list[tuple[str, str]]:
    """Lines of the table about the content of the buffer."""
    size, (low, high) = int(program.buffer.size(state)), np.asarray(state.ring.written, np.uint64)
    written = int(low + (high << np.uint64(32))) * program.buffer.items_per_row
    priorities = np.asarray(state.sampler.priorities)[:size]
    lines = [("items", f"{size:,} of {program.options.capacity:,}, {written:,} written")]
    for name, leaf in state.items.items():
        lines.append((f"  {name}", f"{leaf.dtype} {list(leaf.shape)}, {leaf.nbytes:,} bytes"))
    spread = f"min {priorities.min():.2g}, mean {priorities.mean():.2g}, max {priorities.max():.2g}"
    return [*lines, ("priorities", spread)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--steps", type=int, default=200_000, help="environment steps at most, over all lanes")
    parser.add_argument("--threshold", type=float, default=195, help="stop at this average over 100 episodes")
    parser.add_argument("--lanes", type=int, default=4, help="carts side by side")
    parser.add_argument("--chunk", type=int, default=512, help="rows (steps of every lane) in one jitted scan")
    parser.add_argument("--capacity", type=int, default=50_000, help="items in the buffer, a multiple of the lanes")
    parser.add_argument("--alpha", type=float, default=0.6, help="how much priorities count")
    parser.add_argument("--eps", type=float, default=0.01, help="added to every priority: no item is forgotten")
    parser.add_argument("--beta", type=float, default=0.4, help="how much weights correct for it; rises to 1")
    parser.add_argument("--batch-size", type=int, default=128, help="items drawn for one update, one update a row")
    parser.add_argument("--hidden", type=int, default=64, help="width of both hidden layers")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount")
    parser.add_argument("--tau", type=float, default=0.02, help="how far the target network follows in one update")
    parser.add_argument("--epsilon", type=float, default=0.05, help="share of random actions in the end")
    parser.add_argument("--explore", type=int, default=5_000, help="environment steps until epsilon is reached")
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("out/dqn_jax.png"), help="learning curve")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument(
        "--smoke", action="store_true", help="some hundred steps without a threshold, to see that it runs"
    )
    options = parser.parse_args(argv)
    if options.capacity % options.lanes:
        parser.error(f"--capacity must be a multiple of --lanes, got {options.capacity} and {options.lanes}")
    if options.smoke:
        options.steps, options.chunk = 600, 50
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, check the environment, plot, print a table. Returns the results."""
    options = parse(argv)
    program = Program(options)
    training, episodes, spent = train(options, program)
    reached = episodes.reached(options.threshold)
    best = reached if reached is not None else int(np.argmax(episodes.averages)) if episodes.averages else None
    result = {
        "solved": reached is not None,
        "smoke": options.smoke,
        "seed": options.seed,
        "average": math.nan if best is None else episodes.averages[best],
        "steps": spent["total_steps"] if best is None else episodes.steps[best + EPISODES - 1],
        "episodes": len(episodes.returns),
        "curve": {"average over 100 episodes": [episodes.steps[EPISODES - 1 :], episodes.averages]},
        **spent,
    }
    plot(options.plot, episodes, options.threshold)
    checked = check_dynamics(options.seed)
    stored = contents(program, training.buffer)
    result["us"] = median_us(options, program, training.buffer)  # last: it writes into the buffer

    pace = result["total_steps"] / result["train_seconds"]
    average = f"{result['average']:.1f} after {result['steps']:,} steps" if episodes.averages else "not so many ended"
    lines = [
        (f"average of {EPISODES} episodes", average),
        ("compiled in", f"{result['compile_seconds']:.1f} s"),
        ("environment", f"{pace:,.0f} steps a second with learning, {options.lanes} lanes"),
        ("extend", f"{result['us']['extend']:.0f} us, {options.lanes} items"),
        ("sample", f"{result['us']['sample']:.0f} us, {options.batch_size} items"),
        ("update", f"{result['us']['update']:.0f} us, {options.batch_size} items"),
        *stored,
        ("dynamics", f"as gymnasium's over {checked['steps']:,} steps, to {checked['float64']:.0e} in float64"),
        ("learning curve", str(options.plot)),
    ]
    for name, text in lines:
        print(f"{name:<24}{text}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    outcome = main()
    sys.exit(0 if outcome["solved"] or outcome["smoke"] else 1)

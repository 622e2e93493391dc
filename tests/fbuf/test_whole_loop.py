"""Environment, buffer and learner in one scan: all that is carried stays where it is, and nothing large is copied."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import Buffer, Frames, PerTrajectory, Prioritized, Slices, Trajectories, importance_weights
from tests.fbuf.compiled import assert_in_place
from tests.fbuf.compiled import program as compiled

pytestmark = pytest.mark.usefixtures("device")

ROWS, LANES, TURNS, WIDE, STACK, BATCH = 10_000, 4, 8, 16, 4, 64
LINE: Any = {"lanes": (LANES,), "trajectories": Trajectories("terminated", "truncated")}
BUFFERS = {
    "uniform": Buffer(ROWS, lanes=(LANES,)),
    "prioritized": Buffer(ROWS, Prioritized(), lanes=(LANES,)),
    "slices": Buffer(ROWS, Slices(8, PerTrajectory(), burn_in=2), **LINE),
    "slices by priority": Buffer(ROWS, Slices(8, Prioritized()), **LINE),
    "frames": Buffer(ROWS, Prioritized(), frames=Frames(stack=STACK, axis=0), **LINE),
}
QUICK = ("frames",)


class Walk(NamedTuple):
    """A walk on a line of `WIDE` places, ended at its last and cut off at its first; the last frames of it are seen."""

    place: jax.Array
    seen: jax.Array  # [STACK, WIDE]


def begun() -> Walk:
    frame = jax.nn.one_hot(WIDE // 2, WIDE)
    return Walk(jnp.int32(WIDE // 2), jnp.broadcast_to(frame, (STACK, WIDE)))


def stepped(walk: Walk, action: jax.Array) -> tuple[Walk, dict[str, jax.Array]]:
    """The walk after a step, a new one where it has ended, and what is stored of the step."""
    place = jnp.clip(walk.place + 2 * action - 1, 0, WIDE - 1)
    after = Walk(place, jnp.concatenate([walk.seen[1:], jax.nn.one_hot(place, WIDE)[None]]))
    terminated, truncated = place == WIDE - 1, place == 0
    step = {"obs": walk.seen, "next_obs": after.seen, "action": action, "reward": terminated.astype(jnp.float32)}
    step |= {"terminated": terminated, "truncated": truncated}
    return jax.tree.map(functools.partial(jnp.where, terminated | truncated), begun(), after), step


def errors(weights: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Temporal-difference errors of values that are linear in what is seen."""
    now, then = (jnp.einsum("...sw,swa->...a", batch[key], weights) for key in ("obs", "next_obs"))
    wanted = batch["reward"] + 0.9 * jnp.where(batch["terminated"], 0, then.max(-1))
    return jax.lax.stop_gradient(wanted) - jnp.take_along_axis(now, batch["action"][..., None], -1)[..., 0]


def turn(buffer: Buffer, carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
    """Act, write, draw, learn, and give what was drawn new priorities."""
    state, walks, weights = carry
    values = jnp.einsum("lsw,swa->la", walks.seen, weights)
    walks, step = jax.vmap(stepped)(walks, jnp.argmax(values + jax.random.gumbel(key, values.shape), -1))
    state, _ = buffer.extend(state, jax.tree.map(lambda leaf: leaf[None], step))
    state, batch, draw = buffer.sample(state, jax.random.fold_in(key, 1), BATCH)
    weighs = importance_weights(draw, 0.4)
    found = jnp.abs(errors(weights, batch))
    weights -= 0.1 * jax.grad(lambda held: jnp.mean(errors(held, batch) ** 2))(weights)
    if isinstance(buffer.sampler, Prioritized):
        state = buffer.update(state, draw.slots, found + 1e-3)
    elif isinstance(getattr(buffer.sampler, "starts", None), Prioritized):
        state = buffer.update(state, draw.starts, found.max(-1) + 1e-3)
    return (state, walks, weights), jnp.mean(found) + 0 * jnp.mean(weighs)


def loop(buffer: Buffer, carry: Any, keys: jax.Array) -> tuple[Any, jax.Array]:
    return jax.lax.scan(functools.partial(turn, buffer), carry, keys)


def start(buffer: Buffer) -> Any:
    item = jax.eval_shape(lambda: stepped(begun(), jnp.int32(0))[1])
    walks = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (LANES, *leaf.shape)) + jnp.zeros((), leaf.dtype), begun())
    return buffer.init(item), walks, jnp.zeros((STACK, WIDE, 2))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in BUFFERS]
)
def test_a_whole_training_loop_works_in_place(kind: str) -> None:
    buffer = BUFFERS[kind]
    keys = jax.random.split(jax.random.key(0), TURNS)
    program = compiled(functools.partial(loop, buffer), start(buffer), keys)
    carry = jax.eval_shape(functools.partial(start, buffer))
    assert_in_place(program, carry, most_copied=ROWS * LANES // 8)  # the lowest level of a tree has a seventh
    (state, _, weights), found = program(start(buffer), keys)
    assert int(state.ring.size) == TURNS
    assert np.isfinite(found).all() and np.isfinite(weights).all()

"""Rules are values: equal, hashable, picklable; and every sampler is called the same way."""

import dataclasses
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import (
    Buffer,
    Draw,
    Fifo,
    Frames,
    HighestRanked,
    Mixture,
    PerTrajectory,
    Prioritized,
    RoundRobin,
    Sampler,
    Shuffled,
    Slices,
    Trajectories,
    Uniform,
    Writer,
)
from tests.fbuf import every_pair

pytestmark = pytest.mark.usefixtures("device")

SAMPLERS = [
    Uniform(),
    Prioritized(),
    Prioritized(alpha=0.9, eps=0, stratified=True),
    Prioritized(new_items="highest_stored"),
    Shuffled(),
    Shuffled(drop_last=True, shuffle=False),
    Fifo(),
]
TRAJECTORIES = [
    Trajectories("end"),
    Frames(("a", "b"), "c", stack=2, finals=3),
    Trajectories(id=("a", 0)),
    Trajectories(discount="a"),
    Trajectories(endless=True),
    PerTrajectory(),
    PerTrajectory(Shuffled()),
    Slices(4),
    Slices(4, least=1, burn_in=2),
    Slices(4, Prioritized()),
    Slices(4, PerTrajectory(Shuffled())),
    Buffer(12, Slices(4, PerTrajectory()), trajectories=Trajectories("end", id=("a", 0))),
]
RULES = [
    *SAMPLERS,
    *TRAJECTORIES,
    RoundRobin(),
    HighestRanked("rank"),
    HighestRanked(("a", 0)),
    Mixture((Buffer(3), Buffer(4, Prioritized())), (1, 2)),
    Mixture((Buffer(3), Buffer(4, Prioritized())), (1, 2), drawn=True),
    Mixture((Buffer(3), Buffer(4, Prioritized())), counts=(1, 2)),
    Buffer(12, Prioritized(), writer=HighestRanked("rank")),
    *(Buffer(12, rule, lanes=lanes) for rule in SAMPLERS for lanes in [(), (2, 2)]),
]


def test_every_public_sampler_and_writer_is_among_them() -> None:
    exported = {each for name in fbuf.__all__ if isinstance(each := getattr(fbuf, name), type)}
    public = {each for each in exported if {Sampler, Writer} & set(each.__mro__[1:])}
    assert {Uniform, RoundRobin} <= public
    assert public <= {type(rule) for rule in RULES}
    joined = [*every_pair.SAMPLERS.values(), *every_pair.WRITERS.values()]
    assert public <= {type(part) for rule in joined for part in (rule, getattr(rule, "starts", None))}


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_is_equal_to_its_copy_in_every_way(rule: Any) -> None:
    for copy in (dataclasses.replace(rule), pickle.loads(pickle.dumps(rule))):
        assert copy is not rule
        assert copy == rule
        assert hash(copy) == hash(rule)
        assert repr(copy) == repr(rule)
    assert RULES.count(rule) == 1


@pytest.mark.parametrize("rule", TRAJECTORIES, ids=repr)
def test_a_rule_of_rules_prints_as_it_is_built(rule: Any) -> None:
    assert eval(repr(rule), vars(fbuf)) == rule


@pytest.mark.parametrize("make", [Uniform, lambda: Prioritized(alpha=0.7, stratified=True)])
def test_five_equal_buffers_are_traced_once(make: Any) -> None:
    traces = []

    def size(buffer: Buffer, state: Any) -> jax.Array:
        traces.append(buffer)
        return buffer.size(state)

    jitted = jax.jit(size, static_argnums=0)
    for _ in range(5):
        buffer = Buffer(6, make(), lanes=(2,))
        jitted(buffer, buffer.init(np.float32(0)))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("protocol", "rule"),
    [
        *((Sampler, rule) for rule in (Uniform, Prioritized, Shuffled, Fifo)),
        (Writer, RoundRobin),
        (Writer, HighestRanked),
    ],
)
@pytest.mark.parametrize("name", ["init", "written", "sample", "update", "claim", "clear"])
def test_rules_have_the_signatures_of_their_protocol(protocol: type, rule: type, name: str) -> None:
    if not hasattr(protocol, name):
        return
    asked = list(inspect.signature(getattr(protocol, name)).parameters.values())
    given = list(inspect.signature(getattr(rule, name)).parameters.values())
    assert [parameter.name for parameter in given[: len(asked)]] == [parameter.name for parameter in asked]
    assert all(more.default is not inspect.Parameter.empty for more in given[len(asked) :])


@pytest.mark.parametrize("rule", SAMPLERS, ids=repr)
def test_a_sampler_gives_back_a_state_like_the_one_it_took(rule: Any) -> None:
    def like(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)

    start = jax.eval_shape(lambda: rule.init(9))
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    assert like(jax.eval_shape(rule.written, start, slots)) == like(start)
    sampled = jax.eval_shape(lambda state, key: rule.sample(state, key, 4, jnp.int32(3)), start, jax.random.key(0))
    after, draw = sampled
    assert like(after) == like(start)
    assert isinstance(draw, Draw)
    parts = {field.name: getattr(draw, field.name) for field in dataclasses.fields(Draw)}
    assert {name: (value.shape, value.dtype) for name, value in parts.items() if value is not None} == {
        "slots": ((4,), jnp.int32),
        "probability": ((4,), jnp.float32),
        "valid": ((4,), jnp.bool_),
        "smallest": ((), jnp.float32),
        "size": ((), jnp.int32),
    }
    if isinstance(rule, Prioritized):
        priorities = jax.ShapeDtypeStruct((4,), jnp.float32)
        assert like(jax.eval_shape(rule.update, start, slots, priorities)) == like(start)
        assert like(jax.eval_shape(rule.reweight, start, 0.5)) == like(start)

"""Rules are values: equal, hashable, picklable; buffers, slices and mixtures go by what a rule declares, not by its type."""

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

KNOWN, RANKED = Trajectories("done"), HighestRanked("x")
ITEM = {"x": np.float32(0), "done": np.bool_(0)}
DECLARED = {
    "keeps_priorities": Prioritized(),
    "needs_order": Fifo(),
    "without_replacement": Shuffled(),
    "keeps_order": RoundRobin(),
    "takes_lanes": RoundRobin(),
}


def own(rule: Any, *bases: type, without: str = "", **others: Any) -> Any:
    """A rule of a type that the library does not know: with all that one of its own has, but for `without`."""
    names = {name for name in dir(rule) if not name.startswith("__") and name not in (without, "_abc_impl")}
    members = {name: inspect.getattr_static(rule, name) for name in names}
    return type("Own", bases, members | others)()


@dataclasses.dataclass(frozen=True)
class Stream(Sampler):
    """Counts the items of each write, and draws the slot of the newest."""

    keeps_priorities = without_replacement = False
    needs_order = True

    def init(self, capacity: int) -> Any:
        return jnp.zeros(2, jnp.int32)

    def written(self, state: Any, slots: jax.Array) -> Any:
        return jnp.stack([state[0] + slots.size, slots[-1]])

    def sample(self, state: Any, key: jax.Array, batch_size: int, size: jax.Array) -> tuple[Any, Draw]:
        _, draw = Uniform().sample((), key, batch_size, size)
        return state, dataclasses.replace(draw, slots=jnp.full(batch_size, state[1]))

    def clear(self, state: Any) -> Any:
        return self.init(0)


def rows(count: int) -> dict[str, np.ndarray]:
    return {"x": np.arange(count, dtype=np.float32), "done": np.zeros(count, bool)}


@pytest.mark.parametrize("name", DECLARED)
def test_a_rule_that_does_not_declare_an_attribute_is_refused(name: str) -> None:
    kind = Writer if isinstance(DECLARED[name], Writer) else Sampler
    word = kind.__name__.lower()
    for bases in ((), (kind,)):
        rule = own(DECLARED[name], *bases, without=name)
        with pytest.raises(TypeError, match=rf"{word} must be a {kind.__name__}, .*: it does not define {name}$"):
            Buffer(4, **{word: rule})


def test_a_rule_that_needs_the_order_goes_with_writers_that_keep_it_only() -> None:
    for sampler in (Stream(), own(Fifo()), own(Uniform(), needs_order=True)):
        with pytest.raises(ValueError, match=f"{type(sampler).__name__} needs the order of writing in a ring"):
            Buffer(4, sampler, writer=RANKED)
        with pytest.raises(TypeError, match="needs the order of writing"):
            Slices(2, sampler)
        with pytest.raises(TypeError, match="needs the order of writing"):
            PerTrajectory(sampler)
        assert Buffer(4, sampler, writer=own(RoundRobin())).capacity == 4
    with pytest.raises(ValueError, match="Fifo needs"):
        Buffer(4, Fifo(), writer=own(RoundRobin(), keeps_order=False))
    with pytest.raises(ValueError, match="trajectories need"):
        Buffer(4, writer=own(RoundRobin(), keeps_order=False), trajectories=KNOWN)
    with pytest.raises(ValueError, match="it takes no lanes"):
        Buffer(4, lanes=(2,), writer=own(RoundRobin(), takes_lanes=False))


def test_a_rule_that_needs_the_order_is_given_every_slot() -> None:
    buffer = Buffer(4, Stream())
    state, _ = jax.jit(buffer.extend)(buffer.init(ITEM), rows(7))
    assert state.sampler.tolist() == [7, 2]
    assert jax.jit(buffer.sample, static_argnums=2)(state, jax.random.key(0), 2)[1]["x"].tolist() == [6, 6]


def test_mixtures_go_by_what_members_declare() -> None:
    once = own(Uniform(), without_replacement=True)
    for buffer in (Buffer(4, once), Buffer(4, Slices(2, PerTrajectory(once)), trajectories=KNOWN)):
        with pytest.raises(ValueError, match="drawn=True would lose most"):
            Mixture((buffer,), drawn=True)
    assert Mixture((Buffer(4, own(Shuffled(), without_replacement=False)),), drawn=True)


def test_what_a_rule_inherits_is_not_taken_for_what_it_does() -> None:
    class Half(Sampler):
        keeps_priorities = needs_order = without_replacement = False

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
    buffer = Buffer(4, Stream())
    with pytest.raises(TypeError, match="Stream keeps no priorities"):
        buffer.update(buffer.init(ITEM), np.zeros(2, np.int32), 1.0)


# ---------------------------------------------------------------------- tests


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


@pytest.mark.parametrize("rule", {type(each): None for each in RULES if {Sampler, Writer} & {*type(each).__mro__}})
@pytest.mark.parametrize("name", ["init", "written", "sample", "update", "claim", "clear"])
def test_rules_have_the_signatures_of_their_protocol(rule: type, name: str) -> None:
    protocol = Sampler if Sampler in rule.__mro__ else Writer
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

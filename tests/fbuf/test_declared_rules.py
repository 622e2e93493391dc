"""Rules of one's own: buffers, slices and mixtures go by what a rule declares, not by its type."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import (
    Buffer,
    Draw,
    Fifo,
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

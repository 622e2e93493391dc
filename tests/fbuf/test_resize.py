"""A buffer with another capacity behaves as one of that capacity that was filled with the same newest rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import (
    Buffer,
    Fifo,
    Frames,
    HighestRanked,
    PerTrajectory,
    Prioritized,
    Shuffled,
    Slices,
    Trajectories,
    Uniform,
)
from tests.fbuf.chance_model import ChanceModel
from tests.fbuf.compiled import extend, jit, place
from tests.fbuf.model import assert_same, assert_tree_is_exact
from tests.fbuf.test_slices import ALL, ENDS, RANKED

READ, INTACT = (jit(method, static_argnums=0) for method in (Buffer.read, Buffer.intact))
QUICK: list[Any] = [Buffer(5, Slices(3, RANKED, least=2, burn_in=2), trajectories=ALL, lanes=(2, 1))]
SLOW: list[Any] = [
    Buffer(7, Shuffled(), trajectories=ENDS),
    Buffer(7, Slices(3, PerTrajectory(Shuffled()), least=2), trajectories=ALL, lanes=(2,)),
    Buffer(7, Uniform(), trajectories=ALL),
    Buffer(7, Fifo(), trajectories=ENDS, lanes=(2,)),
    Buffer(7, RANKED, trajectories=ENDS, lanes=(2,)),
    Buffer(7, Prioritized(alpha=0.5, eps=0), trajectories=ENDS),
    Buffer(7, Slices(3), trajectories=ALL, lanes=(2,)),
    Buffer(7, Slices(3, Shuffled()), trajectories=ENDS, lanes=(2,)),
    Buffer(7, Slices(3, Prioritized(alpha=0.5, eps=0)), trajectories=ENDS),
    Buffer(7, Slices(3, RANKED, least=1), trajectories=ENDS),
    Buffer(7, Slices(3, PerTrajectory()), trajectories=ALL, lanes=(2,)),
    Buffer(7, Slices(4, Shuffled(), least=1), trajectories=ENDS),
]


def rows_of(buffer: Buffer, state: Any) -> list[Any]:
    """Items and places of all stored rows, the oldest first, [rows * lanes, ...]."""
    size, lanes = int(state.ring.size), buffer.items_per_row
    slots = (int(state.ring.cursor) - size + np.arange(size)) % buffer.capacity * lanes
    slots = (slots[:, None] + np.arange(lanes)).reshape(-1).astype(np.int32)
    every = np.zeros(buffer.capacity * lanes, np.int32)  # one program for all sizes
    every[: slots.size] = slots
    at = place(buffer, state, every)
    found = READ(buffer, state, every), (at.lane, at.number, at.step, at.after, at.kind)
    return [np.asarray(leaf)[: slots.size] for leaf in jax.tree.leaves(found)]


def assert_resized(buffer: Buffer, seeds: range, other: int) -> None:
    for seed in seeds:
        model = ChanceModel(buffer, seed)
        for turn in range(4):
            for _ in range(int(model.random.integers(3))):
                model.write_some(int(model.random.choice([1, 3, 11])))
                model.update()
                if model.random.random() < 0.5:
                    model.draw(2)
            before, written = rows_of(model.buffer, model.state), np.asarray(model.state.ring.written)
            model.resize(other if turn % 2 == 0 else buffer.capacity)
            after = rows_of(model.buffer, model.state)
            np.testing.assert_array_equal(model.state.ring.written, written)
            for old, new in zip(before, after, strict=True):
                np.testing.assert_array_equal(new, old[len(old) - len(new) :])
            model.assert_same()
            if model.priorities is not None:
                starts = getattr(model.state.sampler, "starts", model.state.sampler)
                assert float(starts.highest) == float(model.priorities.highest)
                assert int(starts.highest_slot) == model.priorities.holder
                assert_tree_is_exact(starts.tree)


@pytest.mark.parametrize("buffer", QUICK, ids=str)
def test_the_newest_rows_stay_and_all_that_belongs_to_them(buffer: Buffer) -> None:
    assert_resized(buffer, range(4), 9)


@pytest.mark.slow
@pytest.mark.parametrize("other", [5, 9])
@pytest.mark.parametrize("buffer", [*QUICK, *SLOW], ids=str)
def test_the_newest_rows_stay_and_all_that_belongs_to_them_of_many_buffers(buffer: Buffer, other: int) -> None:
    assert_resized(buffer, range(30), other)


# ---------------------------------------------------------------------- frames, ranks, and what cannot be resized

FRAMED = {"obs": np.zeros((2, 3), np.uint8), "next_obs": np.zeros((2, 3), np.uint8), "end": np.bool_(False)}


def episode(length: int, first: int) -> dict[str, np.ndarray]:
    """An episode of observations that are stacks of 3 frames."""
    frames = (first + np.arange(length + 1))[:, None] + np.zeros((1, 2), int)
    stacks = np.stack([np.stack([frames[max(t - k, 0)] for k in (2, 1, 0)], -1) for t in range(length + 1)])
    return {
        "obs": stacks[:-1].astype(np.uint8),
        "next_obs": stacks[1:].astype(np.uint8),
        "end": np.arange(length) == length - 1,
    }


def read_some(buffer: Buffer, state: Any, slots: np.ndarray) -> Any:
    """The items at some slots, and whether they are intact."""
    every = np.zeros(buffer.capacity, np.int32)  # one program for all sizes
    every[: slots.size] = slots
    found = READ(buffer, state, every), INTACT(buffer, state, every)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: slots.size], found)


@pytest.mark.parametrize("finals", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_observations_follow_their_rows(finals: int | None) -> None:
    buffer = Buffer(12, trajectories=Trajectories("end"), frames=Frames(stack=3, finals=finals))
    state, first = extend(buffer, buffer.init(FRAMED), episode(5, 1))[0], 7
    for capacity in (9, 16, 9, 6):
        state, first = extend(buffer, state, episode(5, first))[0], first + 6
        size = int(state.ring.size)
        slots = (int(state.ring.cursor) - size + np.arange(size)) % buffer.capacity
        old, intact = read_some(buffer, state, slots)
        assert intact[-5:].all()
        buffer, state = fbuf.resize(buffer, state, capacity)
        kept = min(size, capacity)
        assert int(state.ring.size) == kept
        new, still = read_some(buffer, state, np.arange(kept))
        np.testing.assert_array_equal(still, intact[-kept:])
        jax.tree.map(lambda a, b, n=kept: np.testing.assert_array_equal(a, b[-n:]), new, old)


def test_items_of_highest_rank_stay_and_later_ones_displace_the_lowest() -> None:
    for capacity, kept in ((300, range(200)), (150, range(50, 200))):
        buffer = Buffer(200, writer=HighestRanked("rank"))
        ranks = np.random.default_rng(0).permutation(200).astype(np.float32)
        state, _ = extend(buffer, buffer.init({"rank": np.float32(0)}), {"rank": ranks})
        after, small = fbuf.resize(buffer, state, capacity)
        assert int(small.ring.size) == len(kept)
        assert np.asarray(small.items["rank"])[: len(kept)].tolist() == [rank for rank in ranks if rank in kept]
        small, slots = extend(after, small, {"rank": np.asarray([55.5, 10.5], np.float32)})
        assert (np.asarray(slots) >= 0).tolist() == [True, capacity == 300]


def test_a_resized_state_shares_no_array_with_the_earlier_one() -> None:
    buffer = Buffer(4, Prioritized())
    state, _ = extend(buffer, buffer.init(np.float32(0)), np.arange(6, dtype=np.float32))
    after, larger = fbuf.resize(buffer, state, 6)
    larger, _ = jax.jit(after.extend, donate_argnums=0)(larger, np.arange(6, 8, dtype=np.float32))
    assert np.asarray(larger.items).tolist() == [2, 3, 4, 5, 6, 7]
    assert np.asarray(state.items).tolist() == [4, 5, 2, 3]


@dataclasses.dataclass(frozen=True)
class Own(Uniform):
    """A rule with a state of its own."""

    def init(self, capacity: int) -> Any:
        return jnp.zeros(capacity)

    resized = fbuf.Sampler.resized


# ---------------------------------------------------------------------- several rings


def of_values(buffer: Buffer, count: int) -> Any:
    """The state after writes of the numbers from 0 on."""
    return extend(buffer, buffer.init(np.float32(0)), np.arange(count, dtype=np.float32))[0]


def test_each_member_of_a_mixture_keeps_its_newest_rows() -> None:
    mixture = fbuf.Mixture((Buffer(4), Buffer(8, Prioritized())), shares=(1, 3))
    states = tuple(of_values(buffer, count) for buffer, count in zip(mixture.buffers, (6, 5), strict=True))
    for capacity, rows in (((2, 9), (2, 9)), (6, (2, 4)), (12.0, (4, 8)), (11, (4, 7)), (np.int64(24), (8, 16))):
        after, small = fbuf.resize(mixture, states, capacity)  # type: ignore[arg-type]
        assert tuple(buffer.capacity for buffer in after.buffers) == rows
        assert (after.shares, after.drawn) == (mixture.shares, mixture.drawn)
        for i in range(2):
            member, alone = fbuf.resize(mixture.buffers[i], states[i], rows[i])
            assert member == after.buffers[i]
            assert_same(small[i], alone)
    assert [np.asarray(each.items).tolist() for each in states] == [[4, 5, 2, 3], [0, 1, 2, 3, 4, 0, 0, 0]]


def test_each_part_of_a_sharded_buffer_keeps_its_newest_rows() -> None:
    """Parts in one array; on devices see tests/fbuf/sharded."""
    sharded = fbuf.Sharded(Buffer(8, Prioritized()))
    parts = [of_values(sharded.part(2), count) for count in (6, 3)]
    state = jax.tree.map(lambda *own: jnp.stack(own), *parts)
    for capacity in (4, 10):
        after, other = fbuf.resize(sharded, state, capacity)
        assert after == dataclasses.replace(sharded, buffer=Buffer(capacity, Prioritized()))
        alone = [fbuf.resize(sharded.part(2), part, capacity // 2)[1] for part in parts]
        assert_same(other, jax.tree.map(lambda *own: jnp.stack(own), *alone))


MIXTURE, PAIR = fbuf.Mixture((Buffer(3),)), fbuf.Mixture((Buffer(3), Buffer(300)))
SHARDED = fbuf.Sharded(Buffer(4))
HALVES = jax.eval_shape(lambda: jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), Buffer(2).init(0.0)))
REFUSED: list[tuple[Any, Any, str]] = [
    (
        lambda: fbuf.resize(MIXTURE, MIXTURE.init(0.0), (4, 4)),
        ValueError,
        "one number of rows for each of 1 buffers, got",
    ),
    (lambda: fbuf.resize(MIXTURE, (), 4), ValueError, "one state for each of 1 buffers is needed, got 0"),
    (lambda: fbuf.resize(MIXTURE, MIXTURE.init(0.0)[0], 4), TypeError, "a tuple with the states of a Mixture, got Buf"),  # type: ignore
    (lambda: fbuf.resize(MIXTURE, MIXTURE.init(0.0), (0,)), ValueError, "capacity must be at least 1, got 0"),
    (lambda: fbuf.resize(PAIR, PAIR.init(0.0), 30), ValueError, "leave none for buffer 0: pass a tuple with the rows"),
    (
        lambda: fbuf.resize(SHARDED, Buffer(8).init(0.0), 4),
        ValueError,
        r"are \[devices, \.\.\.\]: pass the state of all",
    ),
    (lambda: fbuf.resize(SHARDED, HALVES, 5), ValueError, "capacity=5 is not a multiple of the 2 devices"),
    (
        lambda: fbuf.resize(SHARDED.over(jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,))), HALVES, 4),
        TypeError,
        "got OnMesh: pass on_mesh.sharded",
    ),  # type: ignore
    (lambda: fbuf.resize(Buffer(4), Buffer(4).init(0.0), (4,)), TypeError, "only a Mixture has one for each member"),  # type: ignore
    (lambda: fbuf.resize(Buffer(4), MIXTURE.init(0.0), 4), TypeError, "needs the BufferState of the Buffer, got tuple"),  # type: ignore
    (lambda: fbuf.resize(fbuf.HashTable(4), None, 4), TypeError, "got HashTable: .* into a new table"),  # type: ignore
    (lambda: fbuf.resize(Buffer(4, Own()), Buffer(4, Own()).init(0.0), 4), TypeError, "define resized"),
    (lambda: fbuf.resize(Buffer(4), Buffer(3).init(0.0), 4), ValueError, "another buffer made it"),
    (lambda: fbuf.resize(Buffer(4), Buffer(4).init(0.0), 0), ValueError, "capacity must be at least 1, got 0"),
    (lambda: jax.jit(lambda state: fbuf.resize(Buffer(4), state, 5)[1])(Buffer(4).init(0.0)), TypeError, "jax.jit"),
]


@pytest.mark.parametrize(("make", "error", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_what_has_no_meaning_is_refused(make: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()

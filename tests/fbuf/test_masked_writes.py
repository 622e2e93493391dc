"""Writes of the rows where a mask is True: all state is that of a buffer which never saw the other rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import (
    Buffer,
    BufferState,
    Fifo,
    HighestRanked,
    PerTrajectory,
    Prioritized,
    RoundRobin,
    Shuffled,
    Slices,
    Trajectories,
    Uniform,
)
from tests.fbuf.compiled import assert_in_place, jit, program
from tests.fbuf.every_pair import items
from tests.fbuf.test_laws import ENDS, KINDS, rows

pytestmark = pytest.mark.usefixtures("device")

SINGLE = [name for name in KINDS if name != "mixture"]
OFTEN = ("uniform in lanes", "prioritized", "highest ranked", "slices by priority")
ROWS, ITEMS = 12, 40
kinds = pytest.mark.parametrize(
    "kind", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SINGLE]
)


@functools.partial(jit, static_argnums=0)
def masked(buffer: Buffer, state: BufferState, batch: Any, mask: Any) -> tuple[BufferState, jax.Array]:
    return buffer.extend(state, batch, mask=mask)


@functools.partial(jit, static_argnums=0)
def one(buffer: Buffer, state: BufferState, row: Any) -> tuple[BufferState, jax.Array]:
    return buffer.extend(state, row)


def one_by_one(buffer: Buffer, state: BufferState, batch: Any, mask: np.ndarray) -> tuple[BufferState, np.ndarray]:
    """The rows where the mask is True, each by a write of its own; and the slots."""
    slots = np.full((len(mask), *buffer.lanes), -1)
    for row in np.flatnonzero(mask):
        state, (slots[row],) = one(buffer, state, jax.tree.map(lambda leaf, at=row: leaf[at : at + 1], batch))
    return state, slots


def masks(seed: int, count: int = ROWS) -> list[np.ndarray]:
    """Random ones of all densities, and the two extremes."""
    rng = np.random.default_rng(seed)
    random = [rng.random(count) < share for share in rng.random(9)]
    return [*random, np.zeros(count, bool), np.ones(count, bool), *random[:3]]


def queued(state: BufferState) -> np.ndarray:
    """The entries of the queue of `Slices`, the oldest first."""
    queue, head, count = (np.asarray(each) for each in (state.sampler.queue, state.sampler.head, state.sampler.count))
    found: np.ndarray = queue[(head + np.arange(count)) % (queue.size - 1)]
    return found


def assert_same(buffer: Buffer, got: BufferState, wanted: BufferState) -> None:
    """Bit for bit, but for places that nothing reads: of spans, of a queue, and of final frames."""
    if buffer.trajectories is not None:
        spans = []
        for state in (got, wanted):
            assert state.trajectories is not None
            number, lanes = np.asarray(state.trajectories.number), np.arange(buffer.items_per_row)
            spans.append(np.asarray(state.trajectories.spans)[number % buffer.capacity, lanes][number[:, 0] >= 0])
        np.testing.assert_array_equal(*spans)
    if buffer.frames:
        stored = jnp.arange(int(buffer.size(got)))
        np.testing.assert_array_equal(buffer.intact(got, stored), buffer.intact(wanted, stored))
        jax.tree.map(np.testing.assert_array_equal, buffer.read(got, stored), buffer.read(wanted, stored))
    skipped = (".trajectories.spans", ".frames")
    if getattr(got.sampler, "queue", None) is not None:
        np.testing.assert_array_equal(queued(got), queued(wanted))
        skipped += (".sampler.queue", ".sampler.head")
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, leaf), other in pairs:
        name = jax.tree_util.keystr(path)
        if not name.startswith(skipped):
            np.testing.assert_array_equal(leaf, other, err_msg=name)


@kinds
def test_the_state_and_the_slots_are_those_of_the_other_rows_never_seen(kind: str) -> None:
    buffer = KINDS[kind](ITEMS)
    state = wanted = buffer.init(items(0))
    for turn, mask in enumerate(masks(0)):
        batch = rows(buffer, ROWS * turn, ROWS)
        state, slots = masked(buffer, state, batch, mask)
        wanted, places = one_by_one(buffer, wanted, batch, mask)
        if kind == "highest ranked":  # an item that a later one of the same write replaced has no slot
            stored = np.asarray(slots) >= 0
            np.testing.assert_array_equal(np.asarray(slots)[stored], places[stored])
            replaced = np.isin(places, places[stored]) | (places < 0)
            assert replaced[~stored].all()
        else:
            np.testing.assert_array_equal(slots, places)
        assert_same(buffer, state, wanted)
    if kind not in ("highest ranked",):
        got, law = buffer.chances(state), buffer.chances(wanted)
        np.testing.assert_array_equal(got.probability, law.probability)
        np.testing.assert_array_equal(got.reason, law.reason)


@pytest.mark.parametrize("kind", ["prioritized in lanes", "slices", "highest ranked"])
def test_of_more_rows_than_there_are_the_last_stay(kind: str) -> None:
    buffer = KINDS[kind](16)
    state = wanted = buffer.init(items(0))
    for turn, mask in enumerate(masks(1, 40)[-5:]):
        batch = rows(buffer, 40 * turn, 40)
        state, slots = masked(buffer, state, batch, mask)
        wanted, places = one_by_one(buffer, wanted, batch, mask)
        if kind != "highest ranked":
            np.testing.assert_array_equal(slots, places)
        assert_same(buffer, state, wanted)


@pytest.mark.parametrize("kind", ["prioritized", "slices by priority"])
def test_in_vmap_each_buffer_takes_its_own_rows(kind: str) -> None:
    buffer = KINDS[kind](ITEMS)
    some = np.stack(masks(2)[:3])
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(rows(buffer, 20 * i, ROWS) for i in range(3)))
    empty = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), buffer.init(items(0)))
    states, slots = jit(jax.vmap(lambda state, rows, mask: buffer.extend(state, rows, mask=mask)))(empty, batch, some)
    for i in range(3):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], batch)
        state, places = masked(buffer, buffer.init(items(0)), own, some[i])
        np.testing.assert_array_equal(slots[i], places)
        assert_same(buffer, jax.tree.map(lambda leaf, i=i: leaf[i], states), state)


@pytest.mark.parametrize("kind", ["prioritized", "slices"])
def test_a_donated_masked_write_works_in_place_also_in_scan(kind: str) -> None:
    buffer = KINDS[kind](100_000)
    state = jax.eval_shape(lambda: buffer.init(items(0)))
    batch = jax.eval_shape(lambda: rows(buffer, 0, ROWS))
    mask = jax.ShapeDtypeStruct((ROWS,), np.bool_)

    def write(state: BufferState, batch: Any, mask: Any) -> tuple[BufferState, jax.Array]:
        return buffer.extend(state, batch, mask=mask)

    assert_in_place(program(write, state, batch, mask), state)

    def loop(state: BufferState, batch: Any, mask: Any) -> tuple[BufferState, jax.Array]:
        return jax.lax.scan(lambda state, x: write(state, *x), state, (batch, mask))

    several = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((5, *leaf.shape), leaf.dtype), (batch, mask))
    assert_in_place(program(loop, state, *several), state)


def test_without_a_mask_the_program_is_the_same() -> None:
    buffer = KINDS["slices by priority"](ITEMS)
    state, batch = jax.eval_shape(lambda: buffer.init(items(0))), rows(buffer, 0, ROWS)
    plain = jax.jit(lambda state, batch: buffer.extend(state, batch)).lower(state, batch).as_text()
    named = jax.jit(lambda state, batch: buffer.extend(state, batch, mask=None)).lower(state, batch).as_text()
    assert plain == named


# ------------------------------------------------------------------ runs: padded rollouts


RUNS: dict[str, Buffer] = {
    "uniform": Buffer(30),
    "by priority": Buffer(30, Prioritized()),
    "slices": Buffer(30, Slices(2), **ENDS),
    "slices per trajectory": Buffer(30, Slices(2, PerTrajectory()), **ENDS),
    "once an epoch": Buffer(30, Shuffled()),
    "first in, first out": Buffer(30, Fifo()),
}


@pytest.mark.parametrize("kind", RUNS)
def test_runs_are_written_one_behind_the_other(kind: str) -> None:
    buffer, rng = RUNS[kind], np.random.default_rng(3)
    state = wanted = buffer.init(items(0))
    for turn in range(5):
        lengths = rng.integers(0, 5, 4)
        mask = np.arange(4) < lengths[:, None]
        ids = 16 * turn + np.arange(16).reshape(4, 4)
        state, slots = masked(buffer, state, items(ids), mask)
        flat = mask.reshape(-1)
        wanted, places = one_by_one(buffer, wanted, items(ids.reshape(-1)), flat)
        np.testing.assert_array_equal(slots, places.reshape(4, 4))
        np.testing.assert_array_equal(buffer.read(state, slots[mask])["x"], items(ids)["x"][mask])
        assert buffer.size(state) == buffer.size(wanted)


def test_a_trajectory_does_not_go_on_from_one_run_to_the_next() -> None:
    buffer = Buffer(100, Slices(2, least=1), trajectories=Trajectories("done"))
    state = buffer.init({"x": jnp.zeros((), jnp.int32), "done": jnp.zeros((), bool)})
    x, none = jnp.arange(15).reshape(3, 5), jnp.zeros((3, 5), bool)
    mask = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], bool)
    state, slots = masked(buffer, state, {"x": x, "done": none}, mask)
    state, more = masked(buffer, state, {"x": x + 100, "done": none}, mask)
    place = buffer.place(state, jnp.arange(12))
    assert place.step.tolist() == [0, 1, 2] * 4
    assert place.after.tolist() == [2, 1, 0] * 4
    assert slots.tolist() == [[0, 1, 2, -1, -1], [-1, 3, -1, 4, 5], [-1] * 5]
    assert more[mask].tolist() == [6, 7, 8, 9, 10, 11]


def test_rows_of_a_mask_of_one_dim_go_on() -> None:
    buffer = Buffer(100, Slices(2), trajectories=Trajectories("done"))
    state = buffer.init({"x": jnp.zeros((), jnp.int32), "done": jnp.zeros((), bool)})
    for turn in range(3):
        batch = {"x": 4 * turn + jnp.arange(4), "done": jnp.zeros(4, bool)}
        state, _ = masked(buffer, state, batch, np.array([1, 0, 1, 1], bool))
    assert buffer.place(state, jnp.arange(9)).step.tolist() == [*range(9)]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("lanes", "mask", "error", "words"),
    [
        ((), np.ones(3), TypeError, "mask must be bool"),
        ((), True, ValueError, r"mask needs shape \[n\]"),
        ((), np.ones(4, bool), ValueError, r"mask needs shape \[3\].*got \[4\]"),
        ((), np.ones((3, 2), bool), ValueError, r"with a mask \[3, 2\] the batch needs leaves \[3, 2, \.\.\.\]"),
        ((2,), np.ones((3, 2), bool), ValueError, "lanes that end at different times"),
        ((2,), np.ones((3, 2, 2), bool), ValueError, "lanes that end at different times"),
    ],
)
def test_other_masks_are_refused(lanes: tuple[int, ...], mask: Any, error: type, words: str) -> None:
    buffer = Buffer(10, lanes=lanes)
    state = buffer.init(jnp.zeros(()))
    with pytest.raises(error, match=words):
        buffer.extend(state, jnp.zeros((3, *lanes)), mask=mask)


class Newest(RoundRobin):
    """A writer that does not know masks."""

    def claim_masked(self, *given: Any) -> Any:
        return super(RoundRobin, self).claim_masked(*given)


def test_a_writer_that_knows_no_masks_says_so() -> None:
    buffer = Buffer(10, writer=Newest())
    with pytest.raises(TypeError, match=r"Newest does not say which rows a masked write takes: define claim_masked"):
        buffer.extend(buffer.init(jnp.zeros(())), jnp.zeros(3), mask=np.ones(3, bool))


def test_each_writer_is_here() -> None:
    assert {type(KINDS[kind](ITEMS).writer) for kind in SINGLE} == {RoundRobin, HighestRanked}
    assert any(KINDS[kind](ITEMS).sampler == Uniform() for kind in SINGLE)

"""Frames stored once are read as the stacks that were written, or reported as lost; against brute force."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf import Buffer, BufferState, Draw, Frames, PerTrajectory, Prioritized, Slices, Trajectories
from fbuf.frames import without
from fbuf.trajectories import OPEN, TERMINATED, TRUNCATED
from tests.fbuf.compiled import bytes_of, init, jit

pytestmark = pytest.mark.usefixtures("device")


def whole(buffer: Buffer, state: BufferState) -> Any:
    """What is read at all slots, and where that is intact."""
    slots = jnp.arange(buffer.capacity * buffer.items_per_row, dtype=jnp.int32)
    return buffer.read(state, slots), buffer.intact(state, slots)


@functools.partial(jit, static_argnums=0)
def extended(buffer: Buffer, state: BufferState, batch: Any) -> tuple[BufferState, Any]:
    """The buffer after one more batch, and the whole of it."""
    state, _ = buffer.extend(state, batch)
    return state, whole(buffer, state)


@functools.partial(jit, static_argnums=(0, 3))
def played(buffer: Buffer, state: BufferState, batch: Any, draws: int = 0) -> tuple[BufferState, Any, Any]:
    """The buffer after the rows of a batch, one by one; the whole of it; and a sample."""

    def step(state: BufferState, row: Any) -> tuple[BufferState, None]:
        return buffer.extend(state, jax.tree.map(lambda leaf: leaf[None], row))[0], None

    state, _ = jax.lax.scan(step, state, batch)
    return state, whole(buffer, state), buffer.sample(state, jax.random.key(1), draws)[1:] if draws else None


CUT, UNRELATED = 3, 4  # beside the kinds of ends: the id changes; the next observation is another one
ENDS = Trajectories(terminated="terminated", truncated="truncated", id="id")
EPISODES = Trajectories(terminated="terminated", truncated="truncated")
Item = dict[str, Any]


def made(rule: Frames, frames: list[np.ndarray]) -> np.ndarray:
    """An observation: frames side by side if along the first axis, of which they have one of their own otherwise."""
    if rule.stack == 1:
        return frames[-1]
    return np.concatenate(frames) if rule.axis == 0 else np.stack(frames, rule.axis)


class Environment:
    """One lane's stream of items. Each frame is a number that no other frame has."""

    def __init__(self, rule: Frames, first: int, frame: tuple[int, ...] = (2,)) -> None:
        self.rule, self.shape, self.numbers, self.id = rule, frame, itertools.count(first), 0
        self.reset()

    def frame(self) -> np.ndarray:
        return np.full(self.shape, next(self.numbers), np.int16)

    def reset(self) -> None:
        first = self.frame()
        padding = first if self.rule.padding == "first" else np.zeros_like(first)
        self.frames = [padding] * (self.rule.stack - 1) + [first]

    def obs(self) -> np.ndarray:
        return made(self.rule, self.frames)

    def step(self, kind: int) -> Item:
        item = {"obs": self.obs(), "id": np.int32(self.id), "reward": np.float32(next(self.numbers))}
        self.frames = [*self.frames[1:], self.frame()]
        item["next_obs"] = self.obs()
        item["terminated"], item["truncated"] = np.bool_(kind == TERMINATED), np.bool_(kind == TRUNCATED)
        if kind != OPEN:
            self.id += kind in (CUT, TRUNCATED)
            self.reset()
        return item


class Model:
    """All that was written, and what the frames of it make, by brute force."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.lanes = buffer, buffer.items_per_row
        assert isinstance(buffer.frames, tuple)
        self.rule = buffer.frames[0]
        self.rows: list[list[Item]] = []
        self.final: dict[tuple[int, int], int] = {}  # (row, lane): number of the end
        self.begun, self.open = [0] * self.lanes, [False] * self.lanes
        self.start: list[list[int]] = []
        self.origin = self.ends = self.unlike = 0

    def newest(self, obs: np.ndarray) -> np.ndarray:
        if self.rule.stack == 1:
            return obs
        return obs[-len(obs) // self.rule.stack :] if self.rule.axis == 0 else np.take(obs, -1, self.rule.axis)

    def extend(self, batch: list[list[Item]]) -> None:
        """Write rows one by one; ends are noticed with the row that shows them, those of rows that do not stay never."""
        first, capacity = len(self.rows), self.buffer.capacity
        for time, row in enumerate(batch, first):
            cut = [
                self.open[lane]
                and self._is_cut(self.rows[-1][lane], item)
                and time - 1 >= first + len(batch) - capacity
                for lane, item in enumerate(row)
            ]
            for lane in np.flatnonzero(cut):
                self._ended(time - 1, int(lane))
            starts = []
            for lane, item in enumerate(row):
                if not self.open[lane] or item["id"] != self.rows[-1][lane]["id"]:
                    self.begun[lane] = time
                starts.append(self.begun[lane])
                self.open[lane] = not (item["terminated"] or item["truncated"])
            self.rows.append(row)
            self.start.append(starts)
            for lane in range(self.lanes):
                if not self.open[lane] and time >= first + len(batch) - capacity:
                    self._ended(time, lane)
        for time in range(max(first, len(self.rows) - capacity), len(self.rows)):
            self.unlike += sum(not self.is_like(time, lane) for lane in range(self.lanes))

    def _is_cut(self, before: Item, item: Item) -> bool:
        follows = np.array_equal(self.newest(before["next_obs"]), self.newest(item["obs"]))
        return bool(before["id"] != item["id"]) or not follows

    def _ended(self, time: int, lane: int) -> None:
        self.final[time, lane] = self.ends
        self.ends += 1

    def clear(self) -> None:
        self.origin, self.open, self.unlike = len(self.rows), [False] * self.lanes, 0

    def is_like(self, time: int, lane: int) -> bool:
        """Whether an item's stacks are made of the frames of its trajectory."""
        start = self.start[time][lane]
        frames = [
            self.newest(self.rows[max(start, at)][lane]["obs"]) * (at >= start or self.rule.padding == "first")
            for at in range(time - self.rule.stack + 1, time + 1)
        ]
        frames.append(self.newest(self.rows[time][lane]["next_obs"]))
        if self.rule.stack == 1:
            return True
        parts = {"obs": made(self.rule, frames[:-1]), "next_obs": made(self.rule, frames[1:])}
        return all(np.array_equal(part, self.rows[time][lane][key]) for key, part in parts.items())

    def is_intact(self, time: int, lane: int) -> bool:
        room = self.rule.entries(self.buffer.capacity * self.lanes)
        return self.is_like(time, lane) and self.final.get((time, lane), self.ends) >= self.ends - room

    def stored(self) -> list[tuple[int, int, int]]:
        """Slot, time and lane of each item."""
        capacity, times = self.buffer.capacity, range(self.origin, len(self.rows))
        return [
            ((time - self.origin) % capacity * self.lanes + lane, time, lane)
            for time in times[-capacity:]
            for lane in range(self.lanes)
        ]


def batch_of(rows: list[list[Item]], lanes: tuple[int, ...]) -> Any:
    """Rows of items as arrays [n, *lanes, ...]."""
    return {
        key: np.stack([np.stack([item[key] for item in row]) for row in rows]).reshape(
            len(rows), *lanes, *np.shape(rows[0][0][key])
        )
        for key in rows[0][0]
    }


def environments(buffer: Buffer, **others: Any) -> list[Environment]:
    assert isinstance(buffer.frames, tuple)
    return [Environment(buffer.frames[0], 1 + 8000 * lane, **others) for lane in range(buffer.items_per_row)]


def check(buffer: Buffer, state: BufferState, found: Any, model: Model) -> None:
    """Every stored item is read as it was written, or is not intact because it must be."""
    assert state.frames[0].unlike == model.unlike
    items, is_intact = jax.tree.map(np.asarray, found)
    for slot, time, lane in model.stored():
        assert is_intact[slot] == model.is_intact(time, lane)
        for key, value in model.rows[time][lane].items():
            expected = value if is_intact[slot] or key not in ("obs", "next_obs") else np.zeros_like(value)
            np.testing.assert_array_equal(items[key][slot], expected)
            assert items[key].dtype == value.dtype


def rows_of(buffer: Buffer, kinds: Any) -> tuple[list[list[Item]], BufferState]:
    """Rows that end so, [n, lanes], and an empty buffer."""
    streams = environments(buffer)
    rows = [[stream.step(int(kind)) for stream, kind in zip(streams, row, strict=True)] for row in kinds]
    return rows, init(buffer, rows[0][0])


def random_kinds(rows: int, lanes: int, chance: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.where(rng.random((rows, lanes)) < chance, rng.integers(1, 3, (rows, lanes)), OPEN)


# ---------------------------------------------------------------------- tests


BUFFERS = [
    (Buffer(4, trajectories=EPISODES, frames=Frames(stack=1, finals=4)), [1, 3]),
    (Buffer(9, trajectories=ENDS, frames=Frames(stack=3, padding="zero", finals=2)), [4, 30]),
    (Buffer(5, trajectories=ENDS, frames=Frames(stack=4, axis=0), lanes=(1, 2)), [1, 5]),  # of two entries each
]


@pytest.mark.parametrize(("buffer", "counts"), BUFFERS, ids=lambda what: str(what)[:40])
@given(data=st.data())
@settings(max_examples=15)
def test_every_item_that_can_be_drawn_is_read_as_it_was_written(
    buffer: Buffer, counts: list[int], data: st.DataObject
) -> None:
    state, model, streams = (
        init(buffer, Environment(buffer.frames[0], 0).step(OPEN)),
        Model(buffer),
        environments(buffer),
    )
    often = data.draw(st.sampled_from([0, 1, 3, 12]), label="steps between ends")
    kinds = [OPEN] * (2 * often) + [TERMINATED, TRUNCATED, *([CUT] if buffer.trajectories == ENDS else [])]
    if data.draw(st.booleans(), label="unrelated"):
        kinds.append(UNRELATED)
    for what in data.draw(st.lists(st.sampled_from(["extend"] * 4 + ["clear"]), min_size=1, max_size=10)):
        if what == "clear":
            state = buffer.clear(state)
            model.clear()
            continue
        count = data.draw(st.sampled_from(counts))
        chosen = data.draw(
            st.lists(st.sampled_from(kinds), min_size=count * len(streams), max_size=count * len(streams))
        )
        ends = iter(chosen)
        rows = [[stream.step(next(ends)) for stream in streams] for _ in range(count)]
        state, found = extended(buffer, state, batch_of(rows, buffer.lanes))
        model.extend(rows)
        check(buffer, state, found, model)


SAMPLERS = [
    Prioritized(),
    Slices(4, least=1, burn_in=2),
    pytest.param(Slices(3, starts=PerTrajectory()), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda rule: type(rule).__name__)
def test_what_a_sampler_draws_is_what_was_written_and_what_is_lost_is_said_to_be(sampler: Any) -> None:
    buffer = Buffer(20, sampler, lanes=(2,), trajectories=EPISODES, frames=Frames(stack=3, finals=3))
    rows, state = rows_of(buffer, random_kinds(50, 2, 0.2))
    model = Model(buffer)
    model.extend(rows)
    state, found, (items, draw) = played(buffer, state, batch_of(rows, buffer.lanes), 36)
    check(buffer, state, found, model)
    times = {slot: (time, lane) for slot, time, lane in model.stored()}
    is_intact = np.asarray(found[1])
    assert not is_intact.all()
    slots, drawn = np.asarray(draw.slots), np.asarray(draw.valid if draw.mask is None else draw.mask)
    assert drawn.any()
    assert not drawn.all()
    if draw.mask is None:
        np.testing.assert_array_equal(drawn, is_intact[slots])
    for at in np.ndindex(slots.shape):
        item = model.rows[times[slots[at]][0]][times[slots[at]][1]]
        for key, value in item.items():
            lost = key in ("obs", "next_obs") and not is_intact[slots[at]]
            np.testing.assert_array_equal(items[key][at], np.zeros_like(value) if lost else value)
        assert is_intact[slots[at]] or not drawn[at]


def test_a_slice_ends_before_the_first_item_that_is_lost() -> None:
    mask = np.bool_([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    lost = np.bool_([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    flat = jnp.ones(4, jnp.bool_)
    draw = Draw(jnp.zeros((4, 5), jnp.int32), flat, flat, flat[0], flat[0], jnp.asarray(mask), flat)
    cut = jax.jit(without, static_argnums=2)(draw, jnp.asarray(lost), 2)
    expected = [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
    np.testing.assert_array_equal(cut.mask, np.bool_(expected))
    np.testing.assert_array_equal(cut.valid, [True, True, False, True])


def test_a_recording_that_begins_in_the_midst_of_an_episode_gives_no_stack_that_it_does_not_have() -> None:
    buffer, stream = Buffer(8, trajectories=EPISODES, frames=Frames(stack=4)), Environment(Frames(stack=4), 1)
    steps = [[stream.step(OPEN)] for _ in range(12)]
    state, _ = extended(buffer, init(buffer, steps[0][0]), batch_of(steps[:6], ()))
    state, (_, is_intact) = extended(buffer, buffer.clear(state), batch_of(steps[6:], ()))
    assert state.frames[0].unlike == 3
    np.testing.assert_array_equal(is_intact[:6], [False] * 3 + [True] * 3)
    assert buffer.clear(state).frames[0].unlike == 0


def test_the_count_of_rows_may_pass_what_32_bits_hold() -> None:
    buffer = BUFFERS[0][0]
    rows, state = rows_of(buffer, random_kinds(13, 1, 0.3))
    model = Model(buffer)
    model.extend(rows)
    late = dataclasses.replace(
        state, ring=dataclasses.replace(state.ring, counters=state.ring.counters.at[2].set(2**32 - 11))
    )
    state, found, _ = played(buffer, late, batch_of(rows, ()))
    assert state.ring.written[1] == 1
    check(buffer, state, found, model)


def test_frames_of_each_type_that_is_not_complex_are_kept_bit_for_bit() -> None:
    numbers = np.stack([np.float32([-0.0, 0.0, np.nan, -np.inf, 5e-40]), np.arange(5, dtype=np.float32)], 1)
    numbers[:3, 1] = np.uint32([0x7FC00001, 0x80000000, 0x7F800001]).view(np.float32)
    dtypes = {"a": np.float32, "b": np.bool_, "c": np.int8, "d": np.uint32, "e": jnp.bfloat16}
    frames = {key: numbers if key == "a" else np.arange(5).astype(dtype) for key, dtype in dtypes.items()}
    batch = {"now": {key: leaf[:-1] for key, leaf in frames.items()}, "end": np.arange(4) == 1}
    batch["then"] = {key: leaf[1:] for key, leaf in frames.items()}
    rules = tuple(Frames(("now", key), ("then", key), stack=1) for key in dtypes)
    buffer = Buffer(4, trajectories=Trajectories(terminated="end"), frames=rules)
    _, (items, is_intact) = extended(buffer, init(buffer, jax.tree.map(lambda leaf: leaf[0], batch)), batch)
    assert is_intact.all()
    for found, values in zip(jax.tree.leaves(items), jax.tree.leaves(batch), strict=True):
        assert found.dtype == values.dtype
        assert np.asarray(found).tobytes() == values.tobytes()


# ---------------------------------------------------------------------- programs


def test_the_frames_of_a_game_take_less_than_a_seventh_of_the_memory() -> None:
    obs = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8)
    item = {"obs": obs, "next_obs": obs, "end": jax.ShapeDtypeStruct((), jnp.bool_)}
    plain, once = (
        jax.eval_shape(Buffer(10_000, trajectories=Trajectories(terminated="end"), frames=frames).init, item)
        for frames in ((), Frames())
    )
    assert bytes_of(once.frames) * 7 < bytes_of([plain.items["obs"], plain.items["next_obs"]])
    assert bytes_of(once) - bytes_of(once.frames) == bytes_of(plain) - 2 * 10_000 * 84 * 84 * 4


# ---------------------------------------------------------------------- items


class Step(NamedTuple):
    pixels: Any
    state: tuple[Any, Any]
    rest: Any


def test_items_may_have_several_observations_anywhere_in_any_structure() -> None:
    rules = (
        Frames(("pixels", "now"), ("pixels", "then"), stack=2, axis=0),
        Frames(("state", 0), ("state", 1), stack=1),
    )
    buffer = Buffer(6, trajectories=Trajectories(terminated=("rest", "end")), frames=rules)
    numbers = np.arange(10, dtype=np.float32)
    stacks = np.stack([np.maximum(numbers - 1, 0), numbers], 1)
    ends = {"end": np.arange(9) == 8, "none": None}
    batch = Step({"now": stacks[:-1], "then": stacks[1:]}, (numbers[:-1], numbers[1:]), ends)
    state = init(buffer, jax.tree.map(lambda leaf: leaf[0], batch))
    state, (items, is_intact) = extended(buffer, state, batch)
    assert len(jax.tree.leaves(state.items)) == 1
    assert is_intact.all()
    jax.tree.map(lambda kept, given: np.testing.assert_array_equal(kept, np.roll(given[-6:], 3, 0)), items, batch)

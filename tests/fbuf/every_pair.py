"""Every sampler and writer joined in buffers of each kind, and mixtures of them, run through one short history."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf import (
    Buffer,
    BufferState,
    Fifo,
    Frames,
    HighestRanked,
    Mixture,
    PerTrajectory,
    Prioritized,
    RoundRobin,
    Shuffled,
    Slices,
    Trajectories,
    Uniform,
)
from tests.fbuf.compiled import jit

ROWS, LANES, CHUNK, LENGTH, DRAWS = 12, 2, 6, 2, 6
BATCH = 2 * LENGTH

SAMPLERS: dict[str, Any] = {
    "Uniform": Uniform(),
    "Prioritized": Prioritized(),
    "Shuffled": Shuffled(),
    "Fifo": Fifo(),
    "Slices(starts=Uniform)": Slices(LENGTH),
    "Slices(starts=Shuffled)": Slices(LENGTH, Shuffled()),
    "Slices(starts=Prioritized)": Slices(LENGTH, Prioritized()),
    "Slices(starts=PerTrajectory)": Slices(LENGTH, PerTrajectory()),
    "Slices(starts=PerTrajectory(Shuffled))": Slices(LENGTH, PerTrajectory(Shuffled())),
    "Slices(least=1), n-step windows": Slices(LENGTH, least=1),
}
WRITERS: dict[str, Any] = {"RoundRobin": RoundRobin(), "HighestRanked": HighestRanked("rank")}
KNOWN: dict[str, dict[str, Any]] = {
    "": {},
    "trajectories": {"trajectories": Trajectories(terminated="done")},
    "frames": {"frames": Frames(stack=2)},
    "trajectories and frames": {"trajectories": Trajectories(terminated="done"), "frames": Frames(stack=2)},
}


class Cell(NamedTuple):
    """What is joined."""

    sampler: str
    writer: str
    lanes: tuple[int, ...]
    known: str


CELLS = [Cell(*each) for each in itertools.product(SAMPLERS, WRITERS, [(), (LANES,)], KNOWN)]


def build(cell: Cell) -> Buffer:
    """The buffer of a cell."""
    return Buffer(ROWS, SAMPLERS[cell.sampler], lanes=cell.lanes, writer=WRITERS[cell.writer], **KNOWN[cell.known])


# ------------------------------------------------------------------ items, each of which is known by its id


def items(ids: Any) -> dict[str, np.ndarray]:
    """The items with these ids, 1000 * lane + time: episodes of 4 steps in lane 0, of 6 in lane 1."""
    ids = np.asarray(ids, np.int32)
    time, length = ids % 1000, np.where(ids < 1000, 4, 6)
    step = time % length
    frames = ids[..., None] - step[..., None] + np.maximum(step[..., None] + np.arange(-1, 2), 0)
    return {
        "x": ids,
        "done": step == length - 1,
        "rank": rank(ids),
        "obs": frames[..., :2].astype(np.int32),
        "next_obs": frames[..., 1:].astype(np.int32),
    }


def rank(ids: Any) -> np.ndarray:
    """No two are equal."""
    return (7 * np.asarray(ids) % 13 + np.asarray(ids) / 1024).astype(np.float32)


def _episode(ids: np.ndarray) -> np.ndarray:
    return 10000 * (ids // 1000) + ids % 1000 // np.where(ids < 1000, 4, 6)


def check_items(got: Any, ids: np.ndarray) -> None:
    """Those with these ids, bit for bit."""
    wanted = items(ids)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype
        np.testing.assert_array_equal(got[key], value)


# ------------------------------------------------------------------ what is run


@functools.partial(jit, static_argnums=0)
def _init(buffer: Buffer) -> BufferState:
    return buffer.init(items(0))


@functools.partial(jit, static_argnums=0)
def _write(buffer: Buffer, state: BufferState, batch: Any) -> tuple[BufferState, jax.Array]:
    return buffer.extend(state, batch)


@functools.partial(jit, static_argnums=0)
def _turn(buffer: Buffer, state: BufferState, batch: Any, priorities: Any, keys: jax.Array) -> Any:
    """A write, priorities for all slots where the sampler has some, and several draws."""
    state, slots = buffer.extend(state, batch)
    if priorities is not None:
        state = buffer.update(state, jnp.arange(priorities.size, dtype=jnp.int32), priorities)

    def draw(state: BufferState, key: jax.Array) -> tuple[BufferState, Any]:
        state, got, draw = buffer.sample(state, key, BATCH)
        return state, (got, draw)

    state, drawn = jax.lax.scan(draw, state, keys)
    return state, slots, drawn


class History:
    """A buffer, and what must be in it."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.state = buffer, _init(buffer)
        self.lanes = buffer.items_per_row
        self.held: np.ndarray = np.full((ROWS, self.lanes), -1)
        self.rows = self.turns = 0

    def _written(self, ids: np.ndarray) -> np.ndarray:
        """Write to the model; the slots."""
        if isinstance(self.buffer.writer, RoundRobin):
            rows = (self.rows + np.arange(len(ids))) % ROWS
            self.held[rows], self.rows = ids, self.rows + len(ids)
            return rows[:, None] * self.lanes + np.arange(self.lanes)
        for each in ids:
            filled = int((self.held[:, 0] >= 0).sum())
            row = filled if filled < ROWS else int(rank(self.held[:, 0]).argmin())
            if filled < ROWS or rank(each)[0] > rank(self.held[row])[0]:
                self.held[row] = each
        return np.array([next(iter(np.flatnonzero(self.held[:, 0] == each[0])), -1) for each in ids])[:, None]

    def turn(self, time: int) -> None:
        """Write rows, and check what is drawn then."""
        ids = np.arange(time, time + CHUNK)[:, None] + 1000 * np.arange(self.lanes)
        wanted, held = self._written(ids), self.held.reshape(-1)
        self.turns += 1
        priorities = target = None
        if _keeps_priorities(self.buffer.sampler):
            starts = {int(each) for each in held if each >= 0}
            if isinstance(self.buffer.sampler, Slices):
                starts = {each for each in starts if each + 1 in starts and _episode(each) == _episode(each + 1)}
            target = (min, max)[self.turns % 2](starts)
            priorities = (held == target).astype(np.float32)
        batch = jax.tree.map(lambda leaf: leaf.reshape(CHUNK, *self.buffer.lanes, *leaf.shape[2:]), items(ids))
        keys = jax.random.split(jax.random.key(self.turns), DRAWS)
        self.state, slots, (got, draw) = jax.tree.map(
            _as_numpy, _turn(self.buffer, self.state, batch, priorities, keys)
        )
        np.testing.assert_array_equal(slots.reshape(wanted.shape), wanted)
        assert self.buffer.size(self.state) == (held >= 0).sum()
        assert (held[draw.slots[draw.valid]] >= 0).all()
        check_items(jax.tree.map(lambda leaf: leaf[draw.valid], got), held[draw.slots][draw.valid])
        if isinstance(self.buffer.sampler, Slices):
            self._check_slices(held[draw.slots], draw, target)
        else:
            self._check_single(held[draw.slots], draw, ids, target)

    def _check_single(self, drawn: np.ndarray, draw: Any, new: np.ndarray, target: int | None) -> None:
        valid = [each[ok] for each, ok in zip(drawn, draw.valid, strict=True)]
        if isinstance(self.buffer.sampler, Shuffled):
            stored, epoch = sorted(self.held[self.held >= 0]), []
            for each in valid:
                epoch += each.tolist()
                assert len(set(epoch)) == len(epoch)
                epoch = [] if sorted(epoch) == stored else epoch
            assert not epoch
        elif isinstance(self.buffer.sampler, Fifo):
            assert np.concatenate(valid).tolist() == new.reshape(-1).tolist()
        else:
            assert draw.valid.all()
            assert target is None or (drawn == target).all()

    def _check_slices(self, drawn: np.ndarray, draw: Any, target: int | None) -> None:
        rule = self.buffer.sampler
        assert isinstance(rule, Slices)
        first, second = drawn[..., 0], drawn[..., 1]
        assert draw.slots.shape == (DRAWS, BATCH // LENGTH, LENGTH)
        assert draw.mask[draw.valid][:, 0].all()
        whole = draw.mask[..., 1]
        assert (second == first + whole)[draw.valid].all()
        assert (_episode(first) == _episode(second))[draw.valid].all()
        if rule.least == 1:
            held = set(self.held.reshape(-1).tolist())
            goes_on = np.vectorize(lambda each: each + 1 in held)(first) & (_episode(first) == _episode(first + 1))
            np.testing.assert_array_equal(whole, goes_on)
        else:
            assert whole[draw.valid].all()
        if rule.starts == Shuffled():
            epoch = drawn[draw.valid][:, 0].tolist()[: self._starts()]
            assert len(set(epoch)) == len(epoch)
        elif rule.starts == PerTrajectory(Shuffled()):
            epoch = _episode(drawn[draw.valid][:, 0]).tolist()[: len(set(_episode(self.held[self.held >= 0])))]
            assert len(set(epoch)) == len(epoch)
        else:
            assert draw.valid.all()
        assert target is None or (first == target).all()

    def _starts(self) -> int:
        held = set(self.held[self.held >= 0].tolist())
        return sum(each + 1 in held and _episode(np.array(each)) == _episode(np.array(each + 1)) for each in held)

    def run(self) -> None:
        """Fill the ring, go around it, empty it, and begin anew."""
        for turn in range(4):
            self.turn(CHUNK * turn)
        self.state = self.buffer.clear(self.state)
        self.held[:], self.rows = -1, 0
        assert self.buffer.size(self.state) == 0
        self.turn(24)


def _as_numpy(leaf: Any) -> Any:
    return np.asarray(leaf)


def _keeps_priorities(sampler: Any) -> bool:
    return isinstance(sampler.starts if isinstance(sampler, Slices) else sampler, Prioritized)


def joined(cell: Cell) -> tuple[str, str]:
    """ "works" and nothing; or the type and the words of the error with which joining is refused."""
    try:
        build(cell)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "works", ""


@functools.cache
def outcome(cell: Cell) -> tuple[str, str]:
    """The same, after the history where there is one."""
    found = joined(cell)
    if not found[1]:
        History(build(cell)).run()
    return found


# ------------------------------------------------------------------ mixtures


def members(names: Iterable[str]) -> tuple[Buffer, ...]:
    """Buffers with these samplers: the first alone, the others with lanes or frames by turns."""
    known = KNOWN["trajectories"]
    others = [{"lanes": (LANES,), **known}, KNOWN["trajectories and frames"], known]
    return tuple(
        Buffer(ROWS, SAMPLERS[name], **(others[i % 3] if i or name.startswith("Slices") else {}))
        for i, name in enumerate(names)
    )


def mixed(name: str, drawn: bool) -> tuple[str, str]:
    """ "works" and nothing where the sampler goes into a mixture; or the type and the words of the error."""
    try:
        Mixture(members([name, name]), drawn=drawn)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "works", ""


def mixtures() -> list[tuple[tuple[str, ...], bool]]:
    """Samplers that go into one, and whether each row's member is drawn: all of those that draw items, or slices."""
    found = []
    for drawn, of_slices in itertools.product((False, True), repeat=2):
        names = [name for name in SAMPLERS if name.startswith("Slices") == of_slices]
        found.append((tuple(name for name in names if not mixed(name, drawn)[1]), drawn))
    return found


def run_mixture(names: tuple[str, ...], drawn: bool) -> None:
    """Draw from members with these samplers, and give what was drawn priorities."""
    buffers = members(names)
    if not names[0].startswith("Slices"):
        buffers = (*buffers, Buffer(ROWS, writer=WRITERS["HighestRanked"]))
    mixture = Mixture(buffers, drawn=drawn)
    histories = [History(buffer) for buffer in buffers]
    for i, history in enumerate(histories):
        ids = np.arange(48 * i, 48 * i + 8)[:, None] + 1000 * np.arange(history.lanes)
        history._written(ids)
        batch = jax.tree.map(lambda leaf, h=history: leaf.reshape(8, *h.buffer.lanes, *leaf.shape[2:]), items(ids))
        history.state, _ = _write(history.buffer, history.state, batch)
    states = tuple(history.state for history in histories)
    size = BATCH * len(buffers)
    for seed in range(3):
        states, got, draw = jax.tree.map(_as_numpy, _of_mixture(mixture, states, jax.random.key(seed), size))
        ids = np.array([histories[m].held.reshape(-1)[slots] for m, slots in zip(draw.member, draw.slots, strict=True)])
        check_items(jax.tree.map(lambda leaf, ok=draw.valid: leaf[ok], got), ids[draw.valid])
        counts = np.bincount(draw.member, minlength=len(buffers))
        assert drawn or (counts == len(draw.valid) // len(buffers)).all()
        assert draw.size == sum(int(h.buffer.size(h.state)) for h in histories) or names[0].startswith("Slices")


@functools.partial(jit, static_argnums=(0, 3))
def _of_mixture(mixture: Mixture, states: Any, key: jax.Array, size: int) -> Any:
    states, got, draw = mixture.sample(states, key, size)
    return mixture.update(states, draw, jnp.ones(draw.valid.shape)), got, draw


# ------------------------------------------------------------------ the tables


def table(run: bool = True) -> str:
    """The pairs in Markdown; without `run` those that can be joined count as working."""
    notes: dict[str, int] = {}
    found = outcome if run else joined
    kinds = [(writer, lanes) for writer in WRITERS for lanes in ((), (LANES,))]
    lines = ["| | " + " | ".join(f"{writer}, lanes={lanes}" for writer, lanes in kinds) + " |", "|---" * 5 + "|"]
    for sampler, known in itertools.product(SAMPLERS, KNOWN):
        entries = [_entry(found(Cell(sampler, writer, lanes, known)), notes) for writer, lanes in kinds]
        lines.append(f"| {sampler}{known and f'; {known}'} | {' | '.join(entries)} |")
    if run:
        for names, drawn in mixtures():
            run_mixture(names, drawn)
    lines += ["", "| `Mixture` of | fixed shares | drawn=True |", "|---|---|---|"]
    for sampler in SAMPLERS:
        lines.append(f"| {sampler} | {' | '.join(_entry(mixed(sampler, drawn), notes) for drawn in (False, True))} |")
    lines += ["", *(f"{number}. `{note}`" for note, number in notes.items())]
    return "\n".join(lines)


def _entry(found: tuple[str, str], notes: dict[str, int]) -> str:
    what, words = found
    if not words:
        return what
    note = f"{what}: {words.split(': ')[0]}"
    return f"no ({notes.setdefault(note, len(notes) + 1)})"

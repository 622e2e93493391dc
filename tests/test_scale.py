"""Any scale: rows of 4 bytes to 1 MB, 1 to 64 leaves, batches to 262,144, 10^8 items, leaves of more than 2^31 elements."""

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict

import fbuf
from fbuf import free_memory
from interop import (
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.faults.children import forked

_ROOM = 1 << 30  # bytes that are left to others


def need(count: int) -> None:
    """Skip the test where so many bytes are not free."""
    free = free_memory.of_machine()
    if free is not None and free < count + _ROOM:
        pytest.skip(f"needs {count >> 20} MiB of memory, {free >> 20} MiB are free")


def uniform_frequencies(counts: np.ndarray, chances: np.ndarray) -> None:
    """Fail where counts of independent draws are further from their chances than once in 10^9 runs."""
    expected = chances * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-9


class Kind:
    """Rows of `size` bytes in all, in `leaves` leaves of uint8, 8 bytes at least each; or one of 4 bytes."""

    def __init__(self, size: int, leaves: int = 1) -> None:
        self.size, self.leaves = size, leaves
        self.width = size // leaves
        assert self.width in (4,) or self.width >= 8

    def rows(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of these ids."""
        return {f"leaf {leaf}": self._leaf(ids, leaf) for leaf in range(self.leaves)}

    def _leaf(self, ids: np.ndarray, leaf: int) -> np.ndarray:
        made = np.zeros((len(ids), self.width), np.uint8)
        marks = _marks(ids, leaf)
        made[:, :4] = marks
        made[:, -4:] = marks
        if self.width > 8:
            made[:, self.width // 2] = leaf + 1
        return made

    def check(self, rows: Any, ids: np.ndarray) -> None:
        """Fail unless these are the rows of the ids."""
        assert len(rows) == self.leaves
        for leaf in range(self.leaves):
            found = _on_host(rows[f"leaf {leaf}"])
            assert found.shape == (len(ids), self.width) and found.dtype == np.uint8
            marks = _marks(ids, leaf)
            np.testing.assert_array_equal(found[:, :4], marks)
            np.testing.assert_array_equal(found[:, -4:], marks)
            if self.width > 8:
                assert (found[:, self.width // 2] == leaf + 1).all()

    def ids(self, rows: Any) -> np.ndarray:
        """The ids that rows tell."""
        first = np.ascontiguousarray(_on_host(rows["leaf 0"])[:, :4])
        return first.view("<u4")[:, 0].astype(np.int64)


def _on_host(leaf: Any) -> np.ndarray:
    return np.asarray(leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)


def _marks(ids: np.ndarray, leaf: int) -> np.ndarray:
    mixed = (np.asarray(ids, np.int64) + leaf * 7919).astype("<u4")
    return mixed.view(np.uint8).reshape(-1, 4)


class Ring:
    """Which id is at each slot of a ring: the model."""

    def __init__(self, capacity: int) -> None:
        self.held = np.full(capacity, -1, np.int64)
        self.written = 0

    def extend(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the next rows, and the slots they take."""
        ids = np.arange(self.written, self.written + count)
        slots = ids % len(self.held)
        self.held[slots[-len(self.held) :]] = ids[-len(self.held) :]
        self.written += count
        return ids, slots

    @property
    def size(self) -> int:
        return min(self.written, len(self.held))


# ---------------------------------------------------------------------- a grid of sizes


ALPHA, BETA, EPS = 0.7, 0.5, 1e-3
SIZES, LEAVES, BATCHES = (4, 64, 4096, 1 << 20), (1, 7, 64), (1, 256, 4096, 262_144)
LARGE, MOST = 10**8, 3 << 30  # items; bytes of a buffer


QUICK = {(64, 7, 256), (1 << 20, 1, 1)}  # the others are slow tests
CELLS = [
    pytest.param(size, leaves, batch, marks=[] if (size, leaves, batch) in QUICK else pytest.mark.slow)
    for size, leaves, batch in itertools.product(SIZES, LEAVES, BATCHES)
    if (size >= 8 * leaves or leaves == 1) and 2 * size * batch <= MOST
]


class InJit:
    """A buffer of `fbuf`, in programs that take its state over."""

    def __init__(self, kind: Kind, capacity: int) -> None:
        self.buffer = fbuf.Buffer(capacity, fbuf.Prioritized(ALPHA, EPS))
        item = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in kind.rows(np.zeros(1)).items()}
        self.state = jax.jit(self.buffer.init)(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), item))
        self.run = {
            name: functools.partial(jax.jit, static_argnums=static, donate_argnums=0)(getattr(self.buffer, name))
            for name, static in (("extend", ()), ("update", ()), ("sample", 2))
        }
        self.keys = iter(jax.random.split(jax.random.key(0), 64))

    def extend(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        self.state, slots = self.run["extend"](self.state, rows)
        return np.asarray(slots)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.state = self.run["update"](self.state, slots.astype(np.int32), priorities)

    def sample(self, batch: int) -> tuple[np.ndarray, Any, np.ndarray]:
        self.state, rows, draw = self.run["sample"](self.state, next(self.keys), batch)
        assert bool(draw.valid.all())
        return np.asarray(draw.slots), rows, np.asarray(fbuf.importance_weights(draw, BETA))

    def read(self, slots: np.ndarray) -> Any:
        return self.buffer.read(self.state, slots)


class ThroughTorch:
    """A buffer of `interop`."""

    def __init__(self, kind: Kind, capacity: int, storage: Any = LazyTensorStorage) -> None:
        self.buffer = TensorDictReplayBuffer(
            storage=storage(capacity), sampler=PrioritizedSampler(capacity, ALPHA, BETA, EPS), priority_key="p"
        )

    def extend(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        leaves = {name: torch.from_numpy(leaf) for name, leaf in rows.items()}
        return self.buffer.extend(TensorDict(leaves, [len(next(iter(rows.values())))])).numpy()

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.buffer.update_priority(torch.from_numpy(slots), torch.from_numpy(priorities))

    def sample(self, batch: int) -> tuple[np.ndarray, Any, np.ndarray]:
        found = self.buffer.sample(batch)
        slots, weights = found.pop("index"), found.pop("priority_weight")
        return slots.numpy(), dict(found.items()), weights.numpy()

    def read(self, slots: np.ndarray) -> Any:
        found = self.buffer[torch.from_numpy(slots)]
        return {name: leaf for name, leaf in found.items() if name != "index"}


DOORS = [
    pytest.param(InJit, id="jit"),
    pytest.param(ThroughTorch, id="torch"),
    pytest.param(functools.partial(ThroughTorch, storage=LazyMemmapStorage), id="memmap"),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("size", "leaves", "batch"), CELLS)
def test_what_was_written_is_read_and_drawn_by_its_priority(door, size, leaves, batch) -> None:
    kind, rng = Kind(size, leaves), np.random.default_rng(batch)
    capacity = 2 * batch - batch // 3  # the second batch goes around the end
    need(8 * size * batch)
    buffer, ring = door(kind, capacity), Ring(capacity)
    priorities, highest = np.zeros(capacity, np.float32), 1.0
    for _ in range(3):
        ids, slots = ring.extend(batch)
        np.testing.assert_array_equal(buffer.extend(kind.rows(ids)), slots)
        priorities[slots] = highest
        given = rng.integers(ring.size, size=batch)
        values = rng.choice(np.float32([0.25, 0.5, 1, 2]), size=batch)
        buffer.update(given, values)
        priorities[given] = values  # of equal ones the last
        highest = max(highest, float(values.max()))
        slots, rows, weights = buffer.sample(batch)
        assert slots.min() >= 0 and slots.max() < ring.size
        kind.check(rows, ring.held[slots])
        mass = (priorities[: ring.size] + np.float32(EPS)) ** ALPHA
        np.testing.assert_allclose(weights, (mass[slots] / mass.min()) ** -BETA, rtol=2e-4)
    some = np.unique(np.concatenate([[0, ring.size - 1], rng.integers(ring.size, size=min(batch, 64))]))
    kind.check(buffer.read(some), ring.held[some])


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS[:2])
def test_a_hundred_million_items(door) -> None:
    need(6 * 10**9)
    kind, ring, rng = Kind(4), Ring(LARGE), np.random.default_rng(1)
    buffer = door(kind, LARGE)
    for count in (*(10**7,) * 10, 262_144):
        ids, slots = ring.extend(count)
        np.testing.assert_array_equal(buffer.extend(kind.rows(ids)), slots)
    slots, rows, weights = buffer.sample(262_144)  # all alike
    kind.check(rows, ring.held[slots])
    np.testing.assert_allclose(weights, 1, rtol=1e-5)
    uniform_frequencies(np.bincount(slots // (LARGE // 64), minlength=64), np.full(64, 1 / 64))

    # A thousand of them, at both ends and in between, have almost all of the mass.
    chosen = np.unique(np.concatenate([[0, LARGE - 1], rng.integers(LARGE, size=1000)]))
    values = rng.choice(np.float32([1e6, 2e6, 4e6]), size=chosen.size)
    for start in range(0, LARGE, 1 << 23):
        part = np.arange(start, min(start + (1 << 23), LARGE))
        buffer.update(part, np.zeros(part.size, np.float32))
    again = np.concatenate([rng.permutation(np.repeat(chosen, 2)), chosen])  # equal ones: the last counts
    buffer.update(again, np.concatenate([np.ones(2 * chosen.size, np.float32), values]))
    slots, rows, _ = buffer.sample(262_144)
    kind.check(rows, ring.held[slots])
    mass = values.astype(np.float64) ** ALPHA
    rest = (LARGE - chosen.size) * EPS**ALPHA
    place = np.minimum(np.searchsorted(chosen, slots), chosen.size - 1)
    hit = chosen[place] == slots
    chances = np.append(mass, rest) / (mass.sum() + rest)
    counts = np.append(np.bincount(place[hit], minlength=chosen.size), (~hit).sum())
    uniform_frequencies(counts, chances)


# ---------------------------------------------------------------------- leaves of more than 2^31 elements


WIDTH, ROWS, CHUNK = 1 << 16, 40_000, 2_000  # 2.6 * 10^9 elements
KIND = Kind(WIDTH)
BYTES = WIDTH * ROWS
SOME = np.asarray([0, 1, 32_766, 32_767, 32_768, 32_769, ROWS - 2, ROWS - 1])  # 2^31 elements are 32,768 rows
ITEM = {"leaf 0": jax.ShapeDtypeStruct((WIDTH,), jnp.uint8)}


def told(rows: dict[str, np.ndarray]) -> TensorDict:
    leaves = {name: torch.from_numpy(leaf) for name, leaf in rows.items()}
    return TensorDict(leaves, [len(next(iter(rows.values())))])


# ------------------------------------------------------------------ inside jit


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [(), (8,)], ids=str)
def test_a_leaf_in_jit(lanes, device) -> None:
    need(2 * BYTES)
    each = int(np.prod(lanes, dtype=int))
    buffer, ring = fbuf.Buffer(ROWS // each, fbuf.Prioritized(eps=0.0), lanes=lanes), Ring(ROWS)
    state = jax.jit(lambda: buffer.init(ITEM))()
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for count in (*(CHUNK,) * (ROWS // CHUNK), 16):  # the last goes around the end
        ids, slots = ring.extend(count)
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *lanes, WIDTH), KIND.rows(ids))
        state, taken = extend(state, rows)
        np.testing.assert_array_equal(np.asarray(taken).reshape(-1), slots)
    read = jax.jit(buffer.read)
    for some in (SOME, np.arange(ROWS - 1, ROWS)):
        KIND.check(read(state, jnp.asarray(some)), ring.held[some])
    # Rows far out have all the mass: a program draws them and reads in one go.
    priorities = np.where(np.arange(ROWS) >= ROWS - 50, 1.0, 0.0).astype(np.float32)
    state = jax.jit(buffer.update, donate_argnums=0)(state, jnp.arange(ROWS), priorities)
    state, rows, draw = jax.jit(buffer.sample, static_argnums=2, donate_argnums=0)(state, jax.random.key(0), 512)
    slots = np.asarray(draw.slots)
    assert slots.min() >= ROWS - 50 and len(np.unique(slots)) > 30
    KIND.check(rows, ring.held[slots])


@pytest.mark.slow
def test_a_batch_in_jit(device) -> None:
    batch, kind = 262_144, Kind(8_200)
    need(3 * batch * 8_200)
    buffer, ring = fbuf.Buffer(100), Ring(100)
    ids, _ = ring.extend(100)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], kind.rows(ids)))
    state, _ = jax.jit(buffer.extend)(state, kind.rows(ids))
    _, rows, draw = jax.jit(buffer.sample, static_argnums=2)(state, jax.random.key(0), batch)
    tail = np.s_[-2_000:]
    kind.check(jax.tree.map(lambda leaf: leaf[tail], rows), ring.held[np.asarray(draw.slots)[tail]])
    np.testing.assert_array_equal(kind.ids(rows), ring.held[np.asarray(draw.slots)])


# ------------------------------------------------------------------ through torch


def memory(_: Path) -> Any:
    return LazyTensorStorage(ROWS)


def anonymous(_: Path) -> Any:
    return LazyMemmapStorage(ROWS)


def files(folder: Path) -> Any:
    return LazyMemmapStorage(ROWS, scratch_dir=folder / "rows")


@pytest.mark.slow
@pytest.mark.parametrize("make", [memory, anonymous, files], ids=lambda make: make.__name__)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_a_leaf_through_torch(make, shared, tmp_path) -> None:
    need(3 * BYTES)
    sampler: Any = RandomSampler() if shared else PrioritizedSampler(ROWS, 1.0, 0.5, 0.0)
    buffer, ring = TensorDictReplayBuffer(storage=make(tmp_path), sampler=sampler), Ring(ROWS)
    for count in (CHUNK,) * (ROWS // CHUNK):
        ids, slots = ring.extend(count)
        np.testing.assert_array_equal(buffer.extend(told(KIND.rows(ids))).numpy(), slots)
        if shared and count == ring.written:
            buffer.share()
    ids, slots = ring.extend(16)  # around the end; of another process where they share

    def more() -> None:
        np.testing.assert_array_equal(buffer.extend(told(KIND.rows(ids))).numpy(), slots)

    if shared:
        how, what = forked(more)
        assert how == "done", what.decode()
    else:
        more()
    check_reads(buffer, ring)
    far = torch.arange(ROWS - 50, ROWS)
    buffer.storage.set(far, told({**KIND.rows(far.numpy() + 10**6), "index": far.numpy()}))
    ring.held[far] = far.numpy() + 10**6
    if not shared:
        buffer.update_priority(torch.arange(ROWS), torch.zeros(ROWS))
        buffer.update_priority(far, torch.ones(50))
        found = buffer.sample(512)
        assert int(found["index"].min()) >= ROWS - 50
        KIND.check({"leaf 0": found["leaf 0"]}, ring.held[found["index"].cpu().numpy()])
    check_reads(buffer, ring)


def check_reads(buffer: ReplayBuffer, ring: Ring) -> None:
    """Every way to name rows reads those near the far end."""
    KIND.check({"leaf 0": buffer[torch.from_numpy(SOME)]["leaf 0"]}, ring.held[SOME])
    KIND.check({"leaf 0": buffer[ROWS - 40 :]["leaf 0"]}, ring.held[ROWS - 40 :])
    KIND.check({"leaf 0": buffer[ROWS - 1]["leaf 0"][None]}, ring.held[ROWS - 1 :])
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[SOME] = True
    KIND.check({"leaf 0": buffer[mask]["leaf 0"]}, ring.held[SOME])
    found = buffer.sample(1_000)  # some of them are beyond 2^31 elements
    KIND.check({"leaf 0": found["leaf 0"]}, ring.held[found["index"].cpu().numpy()])


@pytest.mark.slow
def test_items_beyond_the_integers_of_32_bits() -> None:
    count = 2**31 + 1_000
    need(2 * count)
    buffer = ReplayBuffer(storage=LazyTensorStorage(count))
    for start in range(0, count, 1 << 28):
        stop = min(start + (1 << 28), count)
        buffer.extend(torch.full((stop - start,), (start >> 28) + 1, dtype=torch.uint8))
    for slot in (0, 2**31 - 1, 2**31, count - 1):
        assert int(buffer[slot]) == (slot >> 28) + 1 == int(buffer[torch.tensor([slot])][0])
    assert buffer.extend(torch.tensor([77, 78], dtype=torch.uint8)).tolist() == [0, 1]
    buffer.storage[torch.tensor([2**31 + 5])] = torch.tensor([99], dtype=torch.uint8)
    assert int(buffer[2**31 + 5]) == 99
    index = buffer.sample(100_000, return_info=True)[1]["index"]
    found = buffer[index]
    assert bool(((found == (index >> 28) + 1) | (index < 2) | (index == 2**31 + 5)).all())
    assert int(index.max()) > 2**31 - 10**6


# ------------------------------------------------------------------ what is too large is refused at once


def test_more_items_than_a_sampler_can_name_are_refused_when_it_is_built() -> None:
    most = fbuf.priority_tree.LARGEST
    PrioritizedSampler(most, 0.6, 0.4)
    with pytest.raises(ValueError, match=f"at most {most}, got {most + 1}"):
        PrioritizedSampler(most + 1, 0.6, 0.4)
    with pytest.raises(ValueError, match=f"at most {most} items"):
        fbuf.Buffer(most + 1)
    with pytest.raises(ValueError, match=f"at most {most} items"):
        fbuf.Buffer(2**20, lanes=(2**11,))
    with pytest.raises(ValueError, match="the sampler holds"):
        ReplayBuffer(storage=LazyTensorStorage(most + 1), sampler=PrioritizedSampler(most, 0.6, 0.4))
    with pytest.raises(ValueError, match="finals must be at most"):
        LazyFrameStorage(2**32, finals=2**31)


def test_frames_beyond_what_can_be_named_are_refused_before_they_are_made() -> None:
    buffer = fbuf.Buffer(
        fbuf.priority_tree.LARGEST, trajectories=fbuf.Trajectories(terminated="end"), frames=fbuf.Frames(stack=1)
    )
    item = {name: jax.ShapeDtypeStruct((1,), np.uint8) for name in ("obs", "next_obs")}
    with pytest.raises(ValueError, match="frames, got"):
        buffer.init({**item, "end": jax.ShapeDtypeStruct((), np.bool_)})
    with pytest.raises(ValueError, match="frames, got"):
        jax.eval_shape(functools.partial(buffer.init, {**item, "end": jax.ShapeDtypeStruct((), np.bool_)}))

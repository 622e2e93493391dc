"""Leaves of more than 2^31 elements, and more than 2^31 items: what stands near their far end is written and read right."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
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
from tests.scale_rows import Kind, Ring, need

WIDTH, ROWS, CHUNK = 1 << 16, 40_000, 2_000  # 2.6 * 10^9 elements
KIND = Kind(WIDTH)
BYTES = WIDTH * ROWS
SOME = np.asarray([0, 1, 32_766, 32_767, 32_768, 32_769, ROWS - 2, ROWS - 1])  # 2^31 elements are 32,768 rows
ITEM = {"leaf 0": jax.ShapeDtypeStruct((WIDTH,), jnp.uint8)}

slow = pytest.mark.slow


def told(rows: dict[str, np.ndarray]) -> TensorDict:
    leaves = {name: torch.from_numpy(leaf) for name, leaf in rows.items()}
    return TensorDict(leaves, [len(next(iter(rows.values())))])


# ------------------------------------------------------------------ inside jit


@slow
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


@slow
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


@slow
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


@slow
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

"""Cases that replay buffers are known to get wrong, through the functions and through the buffers, with their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fbuf
from fbuf import priority_tree
from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, PrioritizedReplayBuffer, ReplayBuffer
from tests.fbuf import compiled
from tests.fbuf.model import assert_tree_is_exact
from tests.interop.bits import on_each_device

STORAGES = {"memory": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
in_each_storage = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
jitted_or_not = pytest.mark.parametrize("functions", [fbuf.Buffer, compiled], ids=["plain", "jitted"])
for_both_new_items = pytest.mark.parametrize("new_items", ["highest_ever", "highest_stored"])


def filled(rule: fbuf.Prioritized, capacity: int, count: int) -> tuple[fbuf.Buffer, fbuf.BufferState]:
    buffer = fbuf.Buffer(capacity, rule)
    return buffer, compiled.extend(buffer, compiled.init(buffer, jnp.zeros(())), np.arange(count, dtype=np.float32))[0]


def prioritized(capacity: int, count: int, device: str = "cpu", **options: float) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(storage=LazyTensorStorage(capacity, device=device), **options)
    if count:
        buffer.extend(torch.arange(float(count), device=device))
    return buffer


def leaves(state: fbuf.PrioritizedState, count: int) -> list[float]:
    return np.asarray(state.tree.leaves[:count]).tolist()


# ------------------------------------------------------------------ an extend longer than the buffer, equal slots


@jitted_or_not
@pytest.mark.parametrize("sampler", [fbuf.Uniform(), fbuf.Prioritized()], ids=["uniform", "prioritized"])
def test_functions_keep_the_last_rows_of_an_extend_longer_than_the_buffer(device, functions, sampler):
    buffer = fbuf.Buffer(4, sampler)
    rows = jnp.arange(10, dtype=jnp.int32)
    empty = functions.init(buffer, rows[0])
    at_once, slots = functions.extend(buffer, empty, rows)
    assert slots.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert at_once.items.tolist() == [8, 9, 6, 7]
    assert (int(at_once.ring.cursor), int(at_once.ring.size)) == (2, 4)
    assert at_once.ring.written.tolist() == [10, 0]
    in_time_order = (at_once.ring.cursor + jnp.arange(4)) % 4
    assert buffer.read(at_once, in_time_order).tolist() == [6, 7, 8, 9]
    one_by_one = empty
    for row in rows:
        one_by_one = compiled.extend(buffer, one_by_one, row[None])[0]
    assert jax.tree.structure(at_once) == jax.tree.structure(one_by_one)
    for left, right in zip(jax.tree.leaves(at_once), jax.tree.leaves(one_by_one), strict=True):
        np.testing.assert_array_equal(left, right)


@in_each_storage
@pytest.mark.parametrize("first", [0, 3], ids=["empty", "used"])
def test_buffers_keep_the_last_rows_of_an_extend_longer_than_the_buffer(make, first):
    at_once, one_by_one = ReplayBuffer(storage=make(4)), ReplayBuffer(storage=make(4))
    for buffer in (at_once, one_by_one):
        for row in range(-first, 0):
            buffer.add(torch.tensor(row))
    slots = at_once.extend(torch.arange(10))
    added = [one_by_one.add(torch.tensor(row)) for row in range(10)]
    assert slots.tolist() == added == [(first + row) % 4 for row in range(10)]
    assert at_once[:].tolist() == one_by_one[:].tolist()
    assert len(at_once) == len(one_by_one) == 4
    assert at_once.write_count == one_by_one.write_count == first + 10
    cursor = (first + 10) % 4
    assert at_once.add(torch.tensor(10)) == one_by_one.add(torch.tensor(10)) == cursor
    assert at_once[(torch.arange(4) + cursor + 1) % 4].tolist() == [7, 8, 9, 10]


@on_each_device
def test_a_buffer_on_a_device_keeps_the_last_rows(device):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4, device=device))
    assert buffer.extend(torch.arange(10, device=device)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert buffer[:].tolist() == [8, 9, 6, 7]
    assert (len(buffer), buffer.write_count) == (4, 10)


@jitted_or_not
def test_functions_take_the_last_of_equal_slots(device, functions):
    buffer, start = filled(fbuf.Prioritized(alpha=1, eps=0), 6, 6)
    assert leaves(start.sampler, 6) == [1] * 6
    for _ in range(100 if functions is compiled else 1):
        state = functions.update(buffer, start, np.array([3, 3, 5]), np.array([1, 9, 2], np.float32))
        assert leaves(state.sampler, 6) == [1, 1, 1, 9, 1, 2]
        assert float(priority_tree.total(state.sampler.tree)) == 15
        assert float(state.sampler.highest) == 9


@on_each_device
def test_buffers_take_the_last_of_equal_indices(device):
    for _ in range(100):
        buffer = prioritized(6, 6, device, alpha=1, beta=1, eps=0)
        buffer.update_priority(torch.tensor([3, 3, 5]), torch.tensor([1.0, 9.0, 2.0]))
        assert buffer.sampler.priorities.tolist() == [1, 1, 1, 9, 1, 2]
        assert float(priority_tree.total(buffer.sampler.state.tree)) == 15
        assert buffer.sampler.default_priority == 9


# ------------------------------------------------------------------ edges of the search for a mass


def test_functions_find_the_slot_of_a_mass_at_an_edge(device):
    equal = compiled.fill_tree(priority_tree.init(3), np.ones(3, np.float32))
    assert compiled.find(equal, np.array([0.5, 1.5, 2.5], np.float32)).tolist() == [0, 1, 2]
    gaps = compiled.fill_tree(priority_tree.init(5), np.array([0, 2, 0, 1, 0], np.float32))
    below = np.nextafter(np.float32(3), np.float32(0))
    masses = np.array([0, 1.999, 2, below, 3, 3.5], np.float32)
    assert compiled.find(gaps, masses).tolist() == [1, 1, 3, 3, 3, 3]


@on_each_device
def test_buffers_never_draw_an_item_of_priority_zero(device):
    buffer = prioritized(5, 5, device, alpha=1, beta=1, eps=0)
    buffer.update_priority(torch.arange(5), torch.tensor([0.0, 2, 0, 1, 0]))
    _, info = buffer.sample(30_000, return_info=True)
    counts = torch.bincount(info["index"].cpu(), minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert abs(int(counts[1]) - 20_000) < 500  # six standard deviations
    weights = info["priority_weight"].cpu()
    assert weights[info["index"].cpu() == 3].unique().tolist() == [1]
    assert weights[info["index"].cpu() == 1].unique().tolist() == [0.5]


def hundred() -> np.ndarray:
    """Priorities of a hundred items, a third of them zero."""
    values = np.random.default_rng(0).uniform(1e-3, 1e3, 100).astype(np.float32)
    values[::3] = 0
    return values


def test_functions_draw_only_what_is_stored(device):
    buffer, state = filled(fbuf.Prioritized(alpha=1, eps=0), 500, 100)
    state = compiled.update(buffer, state, np.arange(100), hundred())
    _, items, draw = compiled.sample(buffer, state, jax.random.key(1), 1_000_000)
    slots = np.asarray(draw.slots)
    assert slots.max() == 98 and slots.min() == 1  # 99 and 0 are of priority zero
    assert hundred()[slots].all()
    np.testing.assert_array_equal(np.asarray(items), slots)
    np.testing.assert_allclose(draw.probability, hundred()[slots] / hundred().sum(), rtol=1e-5)


@on_each_device
def test_buffers_draw_only_what_is_stored(device):
    buffer = prioritized(500, 100, device, alpha=1, beta=1, eps=0)
    buffer.update_priority(torch.arange(100), torch.from_numpy(hundred()))
    items, info = buffer.sample(1_000_000, return_info=True)
    slots = info["index"].cpu().numpy()
    assert slots.max() == 98 and slots.min() == 1
    assert hundred()[slots].all()
    np.testing.assert_array_equal(items.cpu().numpy(), slots)
    smallest = hundred()[hundred() > 0].min()
    np.testing.assert_allclose(info["priority_weight"].cpu(), smallest / hundred()[slots], rtol=1e-5)


def test_where_every_priority_is_zero_nothing_is_drawn(device):
    buffer, state = filled(fbuf.Prioritized(alpha=1, eps=0), 4, 4)
    state = compiled.update(buffer, state, np.arange(4), np.zeros(4, np.float32))
    assert not np.asarray(compiled.sample(buffer, state, jax.random.key(0), 8)[2].valid).any()
    shell = prioritized(4, 4, alpha=1, beta=1, eps=0)
    shell.update_priority(torch.arange(4), torch.zeros(4))
    with pytest.raises(RuntimeError, match=r"non-positive p_sum.*zero"):
        shell.sample(8)
    shell.update_priority(2, 1.0)
    assert shell.sample(8).tolist() == [2] * 8


# ------------------------------------------------------------------ sums that do not drift


def rounds() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 8192, (1000, 32)).astype(np.int32), random.uniform(0.1, 5, (1000, 32)).astype(np.float32)


def test_functions_do_not_drift(device):
    start = compiled.fill_tree(priority_tree.init(8192), np.ones(8192, np.float32))
    tree = jax.jit(
        lambda tree, batches: jax.lax.scan(
            lambda held, batch: (priority_tree.update(held, *batch), None), tree, batches
        )
    )(start, rounds())[0]
    assert_tree_is_exact(tree)
    assert (np.asarray(tree.sums) >= 0).all()
    wanted = np.ones(8192, np.float32)
    for slots, values in zip(*rounds(), strict=True):
        wanted[slots] = values
    np.testing.assert_array_equal(np.asarray(tree.leaves[:8192]), wanted)


@on_each_device
def test_buffers_do_not_drift(device):
    buffer = prioritized(8192, 8192, device, alpha=1, beta=1, eps=0)
    for slots, values in zip(*rounds(), strict=True):
        buffer.update_priority(torch.from_numpy(slots), torch.from_numpy(values))
    tree = buffer.sampler.state.tree
    assert_tree_is_exact(tree)
    total = np.asarray(tree.leaves, np.float64).sum()
    assert float(priority_tree.total(tree)) == pytest.approx(total, rel=1e-6)


# ------------------------------------------------------------------ the priority of a new item, alpha, weights


@for_both_new_items
def test_functions_apply_alpha_once(device, new_items):
    rule = fbuf.Prioritized(alpha=0.5, eps=0, new_items=new_items)
    buffer, state = filled(rule, 4, 1)
    state = compiled.update(buffer, state, np.array([0]), np.array([4], np.float32))
    assert leaves(state.sampler, 1) == [2]
    state = compiled.extend(buffer, state, np.array([1], np.float32))[0]
    assert leaves(state.sampler, 2) == [2, 2]
    state = compiled.update(buffer, state, np.array([1]), np.array([1], np.float32))
    assert leaves(state.sampler, 2) == [2, 1]
    draw = compiled.sample(buffer, state, jax.random.key(0), 64)[2]
    slots = np.asarray(draw.slots)
    assert set(slots) == {0, 1}
    np.testing.assert_allclose(draw.probability, np.array([2 / 3, 1 / 3])[slots], rtol=1e-6)
    for normalize, weights in (("none", [0.75, 1.5]), ("buffer", [0.5, 1]), ("batch", [0.5, 1])):
        got = fbuf.importance_weights(draw, 1.0, normalize)
        np.testing.assert_allclose(got, np.array(weights)[slots], rtol=1e-6)
    assert leaves(rule.reweight(state.sampler, 1.0), 2) == [4, 1]


@on_each_device
def test_buffers_apply_alpha_once(device):
    buffer = prioritized(4, 1, device, alpha=0.5, beta=1, eps=0)
    buffer.update_priority(0, 4.0)
    assert leaves(buffer.sampler.state, 1) == [2]
    buffer.add(torch.tensor(1.0))
    assert leaves(buffer.sampler.state, 2) == [2, 2]
    buffer.update_priority(torch.tensor([1]), torch.tensor([1.0]))
    assert leaves(buffer.sampler.state, 2) == [2, 1]
    _, info = buffer.sample(64, return_info=True)
    index = info["index"].cpu()
    assert set(index.tolist()) == {0, 1}
    torch.testing.assert_close(info["priority_weight"].cpu(), torch.tensor([0.5, 1])[index])
    buffer.sampler.alpha = 1
    assert leaves(buffer.sampler.state, 2) == [4, 1]
    assert buffer.sampler.priorities.tolist() == [4, 1]


@for_both_new_items
def test_the_highest_priority_is_not_rounded(device, new_items):
    buffer, state = filled(fbuf.Prioritized(alpha=1, eps=0, new_items=new_items), 4, 1)
    state = compiled.update(buffer, state, np.array([0]), np.array([2.5], np.float32))
    assert leaves(compiled.extend(buffer, state, np.array([1], np.float32))[0].sampler, 2) == [2.5, 2.5]
    shell = prioritized(4, 1, alpha=1, beta=1, eps=0)
    shell.update_priority(0, 2.5)
    assert shell.sampler.default_priority == 2.5
    shell.add(torch.tensor(1.0))
    assert shell.sampler.priorities.tolist() == [2.5, 2.5]

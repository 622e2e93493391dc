"""Buffers of torch that go on as functional ones: what is stored, where writes go, and the law of the draws."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
from interop import (
    ImmutableDatasetWriter,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
    from_fbuf,
)
from tests.interop.slice_model import SliceModel, check_law, shares, starts

CAPACITY, LENGTH, ALPHA = 12, 3, 0.7
HISTORIES = {"part filled": [7], "full": [5, 7], "overwritten": [9, 8, 12]}
SAMPLERS = {
    "uniform": lambda items: RandomSampler(),
    "without replacement": lambda items: SamplerWithoutReplacement(),
    "prioritized": lambda items: PrioritizedSampler(items, ALPHA, 0.9),
    "highest stored": lambda items: PrioritizedSampler(items + 5, ALPHA, 0.9, max_priority_within_buffer=True),
    "slices": lambda items: SliceSampler(slice_len=LENGTH),
    "slices by id": lambda items: SliceSampler(slice_len=LENGTH, traj_key="id"),
    "short slices too": lambda items: SliceSampler(num_slices=2, strict_length=False),
    "slices without replacement": lambda items: SliceSamplerWithoutReplacement(slice_len=LENGTH),
    "slices by priority": lambda items: PrioritizedSliceSampler(items, ALPHA, 0.9, slice_len=LENGTH),
}
SLICING = [name for name in SAMPLERS if "slices" in name]
extend = jax.jit(fbuf.Buffer.extend, static_argnums=0)
sample = jax.jit(fbuf.Buffer.sample, static_argnums=(0, 3))


def storage_of(kind, lanes, folder):
    items = CAPACITY * int(np.prod(lanes))
    if kind == "memmap":
        return LazyMemmapStorage(items, scratch_dir=folder, ndim=1 + len(lanes))
    if kind == "given":
        return TensorStorage(SliceModel(CAPACITY).write_some(CAPACITY, 0.0))
    return LazyTensorStorage(items, ndim=1 + len(lanes))


def after(sampler, history="overwritten", kind="lazy", lanes=(), folder=None, **choices):
    """A buffer and a model after some writes, with draws and updates of priorities between them."""
    torch.manual_seed(0)
    model, items = SliceModel(CAPACITY, lanes), CAPACITY * int(np.prod(lanes))
    storage = storage_of(kind, lanes, folder)
    choices.setdefault("batch_size", 2 * LENGTH)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](items), **choices)
    for count in HISTORIES[history]:
        buffer.extend(model.write_some(count, 0.2))
        if buffer.sampler.hooks.takes_priorities:
            slots = torch.randperm(len(buffer))[:4]
            index = slots if not lanes else torch.stack(torch.unravel_index(slots, storage.shape), -1)
            buffer.update_priority(index, torch.rand(4) * 5)
        buffer.sample()
    return buffer, model


def rows(model, data):
    """Data of the model as a functional buffer takes it."""
    dims = len(model.shape)
    return {
        "x": data["x"].transpose(0, dims).numpy().astype(np.int32),
        "id": data["id"].transpose(0, dims).numpy().astype(np.int32),
        "next": {"done": data["next", "done"].transpose(0, dims).numpy()},
    }


def check_same(buffer, state):
    """The state holds the items of the buffer by slot, and stands where that does."""
    (filled, *_), held = buffer.storage.shape, buffer.storage[:]
    assert (int(state.ring.size), int(state.ring.cursor)) == (filled, buffer.writer.cursor)
    assert int(state.ring.written[0]) == buffer.write_count
    for key, leaf in (
        ("x", state.items["x"]),
        ("id", state.items["id"]),
        (("next", "done"), state.items["next"]["done"]),
    ):
        np.testing.assert_array_equal(leaf[:filled], held[key].numpy())
    if buffer.sampler.hooks.takes_priorities:
        of_items = state.sampler.starts if isinstance(state.sampler, fbuf.SlicesState) else state.sampler
        known = buffer.sampler.priorities.numpy()
        np.testing.assert_array_equal(of_items.priorities[: known.size], known)
        assert (of_items.priorities[known.size :] == -1).all()
        assert float(of_items.highest) == buffer.sampler.default_priority
        torch_side = buffer.sampler.functional_state
        np.testing.assert_array_equal(of_items.tree.leaves[: known.size] > 0, torch_side.tree.leaves[: known.size] > 0)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


RARER = ("highest stored", "slices by id", "short slices too")
CASES = [(sampler, "overwritten", "lazy", ()) for sampler in SAMPLERS if sampler not in RARER]
CASES += [(sampler, "part filled", "lazy", ()) for sampler in ("uniform", "slices by priority")]
CASES += [("slices by priority", "full", "memmap", ())]
CASES += [("slices", "overwritten", "given", ())]
CASES += [slow(sampler, "overwritten", "lazy", ()) for sampler in RARER]
CASES += [slow(sampler, "overwritten", "lazy", (2,)) for sampler in SAMPLERS]


@pytest.mark.parametrize(("sampler", "history", "kind", "lanes"), CASES)
def test_slots_cursor_and_priorities_are_the_same_and_go_on_alike(sampler, history, kind, lanes, tmp_path):
    torch_side, model = after(sampler, history, kind, lanes, tmp_path / "rows")
    buffer, state = torch_side.to_fbuf(narrow=True)
    assert jax.eval_shape(
        lambda: buffer.init(jax.tree.map(lambda leaf: leaf[(0,) * (1 + len(lanes))], state.items))
    ) == (jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))
    if "by priority" in sampler:
        torch_side.sample()  # after a write the excluded items are found by a draw
    check_same(torch_side, state)
    kept, new = torch_side.storage[:].clone(), model.write_some(5, 0.2)
    state, slots = extend(buffer, state, rows(model, new))
    assert (torch_side.storage[:] == kept).all()  # they go on apart
    index = torch_side.extend(new)
    if lanes:
        index = (index.reshape(-1, 2) * torch.tensor([lanes[0], 1])).sum(-1)
        slots = np.sort(slots.reshape(-1)), index.sort().values
    else:
        slots = slots, index
    np.testing.assert_array_equal(*slots)
    if "by priority" in sampler:
        torch_side.sample()
    check_same(torch_side, state)


def test_a_stateful_buffer_over_the_state_is_the_buffer_again():
    torch_side, model = after("prioritized")
    again = from_fbuf(*torch_side.to_fbuf(narrow=True), batch_size=6, beta=0.9)
    assert len(again) == CAPACITY
    new = model.write_some(5, 0.2)
    narrow = TensorDict({**new, "x": new["x"].int(), "id": new["id"].int()}, new.batch_size)
    index = again.extend(narrow)
    assert torch.equal(index, torch_side.extend(new))
    for each in (torch_side, again):
        each.update_priority(index, torch.arange(1.0, 6.0))
    check_same(torch_side, again.state)
    batch, info = again.sample(return_info=True)
    assert torch.equal(torch_side.storage[info["index"]]["x"].int(), batch["x"])
    given = torch_side.sampler.priorities
    torch.testing.assert_close(info["priority_weight"], (given[info["index"]] / given.min()) ** (-0.9 * ALPHA))


# ------------------------------------------------------------------ the law of slices


def drawn(buffer, state, count):
    """Slices as the numbers of their items."""
    _, items, draw = sample(buffer, state, jax.random.key(7), count * buffer.sampler.length)
    assert draw.valid.all()
    return [
        tuple(each[mask].tolist()) for each, mask in zip(np.asarray(items["x"]), np.asarray(draw.mask), strict=True)
    ]


def wanted(sampler, model, state):
    trajectories = model.trajectories()
    if "by priority" not in sampler:
        return shares(trajectories, LENGTH, strict="short" not in sampler)
    slot_of = {number: slot for slot, number in enumerate(model.numbers())}
    priorities = state.sampler.starts.priorities
    return {each: float(priorities[slot_of[item]]) ** ALPHA for item, each in starts(trajectories, LENGTH).items()}


LAWS = [(sampler, "overwritten", ()) for sampler in SLICING if "without" not in sampler]
LAWS += [("slices", "part filled", ()), ("slices by priority", "full", ())]
LAWS += [slow("slices", "full", ()), slow("slices by priority", "part filled", ())]
LAWS += [slow(sampler, "overwritten", (2,)) for sampler in SLICING if "without" not in sampler]


@pytest.mark.parametrize(("sampler", "history", "lanes"), LAWS)
def test_slices_come_as_often_as_those_of_the_torch_side(sampler, history, lanes):
    torch_side, model = after(sampler, history, lanes=lanes)
    if torch_side.sampler.hooks.takes_priorities:
        count = len(torch_side)
        index = torch.arange(count)
        index = index if not lanes else torch.stack(torch.unravel_index(index, torch_side.storage.shape), -1)
        torch_side.update_priority(index, 0.5 + torch.rand(count))
    buffer, state = torch_side.to_fbuf(narrow=True)
    check_law(drawn(buffer, state, 4000), wanted(sampler, model, state))
    state, _ = extend(buffer, state, rows(model, model.write_some(5, 0.2)))
    check_law(drawn(buffer, state, 4000), wanted(sampler, model, state))


def one_trajectory():
    """A full buffer of slices in which no trajectory has ended, and what was written to it."""
    data = SliceModel(CAPACITY).write_some(CAPACITY, 0.0)
    torch_side = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SliceSampler(slice_len=LENGTH))
    torch_side.extend(data)
    return torch_side, data


def test_a_write_elsewhere_ends_a_trajectory_for_the_state_too():
    torch_side, data = one_trajectory()
    torch_side.storage.set(torch.arange(8, 11), data[8:11])  # these do not follow row 7, nor does row 11 follow them
    buffer, state = torch_side.to_fbuf(narrow=True)
    within = [tuple(range(CAPACITY))[first : first + 3] for first in range(CAPACITY - 2)]
    wanted_now = {each: 1 / 6 if each[2] < 8 else 1.0 for each in within if each[2] < 8 or each == (8, 9, 10)}
    check_law(drawn(buffer, state, 4000), wanted_now)
    torch_side.storage.set(torch.tensor([11]), data[11:])  # this one does
    buffer, state = torch_side.to_fbuf(narrow=True)
    check_law(
        drawn(buffer, state, 4000),
        {each: 1 / 6 if each[2] < 8 else 1 / 2 for each in within if each[2] < 8 or each[0] > 7},
    )


def test_a_cursor_among_the_rows_of_a_ring_that_is_not_full_is_refused():
    torch_side = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SliceSampler(slice_len=LENGTH))
    torch_side.extend(SliceModel(CAPACITY).write_some(3, 0.0))
    torch_side.writer.cursor = 0
    with pytest.raises(ValueError, match=r"newest one before row \d+, and the next write is at 0"):
        torch_side.to_fbuf(narrow=True)


# ------------------------------------------------------------------ epochs


@pytest.mark.parametrize(("shuffle", "prefetch"), [(True, None), (True, 2), (False, 2)])
def test_an_epoch_goes_on_with_the_items_that_are_left(shuffle, prefetch):
    sampler = SamplerWithoutReplacement(shuffle=shuffle)
    torch_side = ReplayBuffer(storage=LazyTensorStorage(23), sampler=sampler, batch_size=4, prefetch=prefetch)
    torch_side.extend(torch.arange(23.0))
    seen = [
        number for _ in range(8) for number in torch_side.sample().tolist()
    ]  # an epoch of six batches, and two more
    buffer, state = torch_side.to_fbuf()
    rest = []
    for step in range(4):
        state, items, draw = sample(buffer, state, jax.random.key(step), 4)
        rest += items[draw.valid].tolist()
    assert sorted(seen[23:] + rest) == list(range(23))
    assert sample(buffer, state, jax.random.key(9), 4)[2].valid.all()  # of another epoch
    assert sorted(seen[23:] + [n for _ in range(4) for n in torch_side.sample().tolist()]) == list(range(23))


@pytest.mark.parametrize("lanes", [(), (2,)])
def test_an_epoch_of_slices_goes_on_with_the_trajectories_that_are_left(lanes):
    torch_side, model = after("slices without replacement", lanes=lanes, batch_size=LENGTH)
    of = {item: each for each in model.trajectories() for item in each}
    every = {each for each in of.values() if len(each) >= LENGTH}
    torch_side.sampler.ran_out = False
    while not torch_side.sampler.ran_out:
        torch_side.sample()
    seen = [of[torch_side.sample()["x"][0].item()] for _ in range(len(every) // 2)]
    buffer, state = torch_side.to_fbuf(narrow=True)
    for step in range(len(every) - len(seen)):
        state, items, draw = sample(buffer, state, jax.random.key(step), LENGTH)
        assert draw.valid.all()
        seen.append(of[int(items["x"][0, 0])])
    assert Counter(seen) == Counter(every)


# ------------------------------------------------------------------ memory and dtypes


def test_a_donated_state_is_written_in_place_and_nothing_else_holds_it():
    torch_side, model = after("slices by priority")
    buffer, state = torch_side.to_fbuf(narrow=True)
    before = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), state.items)
    state, _ = jax.jit(buffer.extend, donate_argnums=0)(state, rows(model, model.write_some(5, 0.2)))
    assert jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), state.items) == before
    torch_side.sample()


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]


def test_dtypes_are_exact_where_jax_has_64_bits_and_named_where_it_has_not():
    data = {str(dtype).split(".")[1]: torch.arange(5).to(dtype) for dtype in DTYPES}
    torch_side = ReplayBuffer(
        storage=LazyTensorStorage(6), sampler=PrioritizedSampler(6, 0.5, 0.5, dtype=torch.float64)
    )
    torch_side.extend(data)
    with jax.enable_x64(True):
        buffer, state = torch_side.to_fbuf()
        assert {name: leaf.dtype.name for name, leaf in state.items.items()} == {name: name for name in data}
        assert (buffer.sampler.dtype, state.sampler.priorities.dtype) == ("float64", np.float64)
        for name, leaf in state.items.items():
            np.testing.assert_array_equal(np.asarray(leaf[:5], float), data[name].double().numpy())
    with pytest.raises(TypeError, match=r"'int64', 'float64': 64-bit columns.*narrow=True"):
        torch_side.to_fbuf()
    buffer, state = torch_side.to_fbuf(narrow=True)
    assert (state.items["int64"].dtype, state.items["float64"].dtype) == (np.int32, np.float32)
    assert buffer.sampler.dtype == "float32"
    torch_side[0] = {**{name: leaf[0] for name, leaf in data.items()}, "int64": torch.tensor(2**31)}
    with pytest.raises(ValueError, match=r"'int64': values do not fit in 32 bits"):
        torch_side.to_fbuf(narrow=True)


def test_a_read_only_dataset_becomes_a_ring_that_goes_on_at_its_oldest_row():
    held = TensorStorage(torch.arange(4.0))
    buffer, state = ReplayBuffer(storage=held, writer=ImmutableDatasetWriter()).to_fbuf()
    state, slots = buffer.extend(state, jnp.array([9.0]))
    assert slots.tolist() == [0] and state.items.tolist() == [9, 1, 2, 3]


# ------------------------------------------------------------------ refusals

TABLE = {
    "list": (TypeError, "ListStorage", {"storage": lambda: ListStorage(4)}),
    "frames": (TypeError, "LazyFrameStorage", {"storage": lambda: LazyFrameStorage(4)}),
    "span": (TypeError, "SliceSampler.*span", {"sampler": lambda: SliceSampler(slice_len=2, span=True)}),
    "priority, short": (
        TypeError,
        "strict_length=True",
        {"sampler": lambda: PrioritizedSliceSampler(4, 1, 1, slice_len=2, strict_length=False)},
    ),
    "no length": (ValueError, "batch_size=", {"sampler": lambda: SliceSampler(num_slices=2)}),
    "transform": (
        TypeError,
        "cannot hold Noise\\(\\), collate_fn",
        {"transform": lambda: Noise(), "collate_fn": lambda: list},
    ),
    "unit": (TypeError, "sample_unit", {"sample_unit": lambda: Sequence(2)}),
    "generations": (TypeError, "generations", {"writer": lambda: RoundRobinWriter(track_generations=True)}),
}


class Noise(torch.nn.Module):
    def forward(self, data):
        return data


@pytest.mark.parametrize(("error", "words", "choices"), TABLE.values(), ids=TABLE)
def test_what_a_functional_buffer_has_not_is_named(error, words, choices):
    made = {name: make() for name, make in choices.items()}
    buffer = ReplayBuffer(**{"storage": LazyTensorStorage(4), **made})
    x, done = torch.arange(3.0), torch.zeros(3, 1, dtype=torch.bool)
    if "frames" not in words.lower():
        buffer.extend(TensorDict({"x": x, "next": TensorDict({"done": done}, [3])}, [3]))
    with pytest.raises(error, match=words):
        buffer.to_fbuf()


def test_transforms_are_dropped_when_asked_and_unwritten_storages_are_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=Noise())
    with pytest.raises(RuntimeError, match="nothing was written yet"):
        buffer.to_fbuf(transforms="drop")
    buffer.extend(torch.arange(3.0))
    with pytest.raises(ValueError, match="transforms must be"):
        buffer.to_fbuf(transforms="keep")
    assert buffer.to_fbuf(transforms="drop")[1].items.tolist() == [0, 1, 2, 0]


def test_interleaved_trajectories_are_refused():
    data = TensorDict({"id": torch.tensor([0, 1, 0, 1, 0, 1]).int()}, [6])
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=2, traj_key="id"))
    buffer.extend(data)
    with pytest.raises(ValueError, match="interleaved"):
        buffer.to_fbuf()


def test_all_markers_go_along():
    """Rows before and after the move are cut by each kind of marker, as on the torch side."""
    flags = {name: torch.zeros(24, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    for name, at in (("done", [3, 15]), ("terminated", [5]), ("truncated", [9, 18])):
        flags[name][at] = True
    ids = torch.arange(24).int()
    rows = TensorDict({"x": ids.clone(), "episode": ids // 13, ("collector", "traj_ids"): ids // 22}, [24])
    rows["next"] = TensorDict(flags, [24])
    rows["is_init"] = torch.isin(ids, torch.tensor([7, 20]))
    rows["collector", "mask"] = ids != 11
    ends = {3, 5, 6, 9, 10, 11, 12, 15, 18, 19, 21}

    def buffer(count):
        made = ReplayBuffer(storage=LazyTensorStorage(24), sampler=SliceSampler(slice_len=2))
        made.extend(rows[:count])
        return made

    wanted = {(time, time + 1) for time in range(23) if time not in ends}
    assert set(map(tuple, buffer(24).sample(1000)["x"].reshape(-1, 2).tolist())) == wanted
    functional, state = buffer(14).to_fbuf(batch_size=64)
    for start in range(14, 24, 5):
        piece = jax.tree.map(lambda leaf: jnp.asarray(leaf.numpy()), rows[start : start + 5].to_dict())
        state, _ = functional.extend(state, piece)
    found = set()
    for seed in range(20):
        state, items, draw = functional.sample(state, jax.random.key(seed), 64)
        assert draw.valid.all()
        found |= set(map(tuple, np.asarray(items["x"]).tolist()))
    assert found == wanted

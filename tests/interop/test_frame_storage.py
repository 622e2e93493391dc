"""LazyFrameStorage: each frame stored once, and every item read as it was written."""

import copy
import multiprocessing
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import fbuf
from interop import (
    LazyFrameStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.samplers import SliceSampler
from tests.interop.frame_streams import OPEN, TERMINATED, TRUNCATED, Both, Environment, assert_same, random_kinds

PLACES = [
    {"stack": 1},
    {"stack": 2},
    {"stack": 4, "padding": "zero"},
    {"stack": 3, "stack_dim": -1, "traj_key": "traj"},
    {"stack": 3, "stack_dim": 0, "traj_key": "traj", "end_keys": []},
]


def environments(options: dict[str, Any], count: int) -> list[Environment]:
    dim, zeros = options.get("stack_dim", -3), options.get("padding") == "zero"
    return [Environment(options["stack"], zeros, dim, 1 + 1000 * place, entries=1 + dim % 2) for place in range(count)]


@pytest.mark.parametrize("options", PLACES, ids=str)
@given(data=st.data())
@settings(max_examples=40)
def test_a_history_leaves_what_it_leaves_where_all_is_stored(options, data):
    lanes = data.draw(st.sampled_from([0, 1, 3]), label="lanes")
    capacity = data.draw(st.integers(1, 9), label="capacity")
    both = Both(capacity * max(lanes, 1), ndim=1 + (lanes > 0), **options)
    streams = environments(options, max(lanes, 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    chance = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]), label="chance of an end")
    for what in data.draw(st.lists(st.sampled_from(["extend", "extend", "add", "empty"]), min_size=1, max_size=9)):
        if what == "empty":
            both.empty()
            for stream in streams:
                stream.reset()
                stream.id += 1
            continue
        count = 1 if what == "add" else data.draw(st.integers(1, 2 * capacity + 1))
        kinds = 3 if options.get("traj_key") and options.get("end_keys") is None else 2
        rows = torch.stack([each.steps(random_kinds(rng, count, chance, kinds)) for each in streams])
        if what == "add":
            both.add(rows[:, 0] if lanes else rows[0, 0])
        else:
            both.extend(rows if lanes else rows[0])
        both.check()


def test_what_the_functional_buffer_reads_is_read_here_too():
    rule = fbuf.Frames(("pixels",), ("next", "pixels"), stack=3, axis=-1, finals=40)
    ends = fbuf.Trajectories(terminated=("next", "done"))
    core = fbuf.Buffer(20, lanes=(2,), trajectories=ends, frames=rule)
    buffer = ReplayBuffer(storage=LazyFrameStorage(40, stack=3, stack_dim=-1, ndim=2))
    rng, streams = np.random.default_rng(3), [Environment(3, dim=-1, first=1 + 500 * place) for place in range(2)]
    state: Any = None
    extend, read = jax.jit(core.extend), jax.jit(lambda state: (core.read(state, slots), core.intact(state, slots)))
    slots = jnp.arange(40)
    for count in (7, 7, 7, 24, 7):
        rows = torch.stack([each.steps(random_kinds(rng, count, 0.3)) for each in streams])
        buffer.extend(rows)
        batch = _arrays(rows.transpose(0, 1), ("pixels", "action", "next"))
        if state is None:
            state = core.init(jax.tree.map(lambda leaf: leaf[0, 0], batch))
        state, _ = extend(state, batch)
        length = len(buffer)
        found, intact = read(state)
        assert intact[:length].all()
        held = _arrays(buffer[:].transpose(0, 1).reshape(-1), ("pixels", "action", "next"))
        found = jax.tree.map(lambda leaf, stop=length: leaf[:stop], found)
        jax.tree.map(np.testing.assert_array_equal, found, held)


def _arrays(rows: TensorDict, keys: tuple[str, ...]) -> Any:
    """The entries as nested dicts of arrays, without those that JAX would narrow."""
    return {
        key: _arrays(value, tuple(value.keys())) if isinstance(value, TensorDict) else value.numpy()
        for key, value in rows.select(*keys).items()
        if isinstance(value, TensorDict) or value.dtype != torch.int64
    }


SAMPLERS = {
    "prioritized": lambda: PrioritizedSampler(20, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("ndim", [1, 2])
def test_what_a_sampler_draws_is_what_was_written(sampler, ndim):
    both = Both(20, ndim=ndim)
    buffer = TensorDictReplayBuffer(storage=both.frames.storage, sampler=SAMPLERS[sampler](), batch_size=8)
    rng = np.random.default_rng(0)
    streams = [Environment(first=1 + 900 * place) for place in range(2)]
    for count in (8, 8, 8, 1, 9):
        rows = torch.stack([each.steps(random_kinds(rng, count, 0.3)) for each in streams[:ndim]])
        for each in (buffer, both.whole):
            each.extend(rows[0] if ndim == 1 else rows)
        for _ in range(3):
            batch = buffer.sample()
            held = both.whole.storage[batch["index"].reshape(-1, ndim).unbind(-1)]
            if sampler == "slices":  # the end of a slice is marked in the batch, whatever is stored
                assert batch["next", "truncated"][-1] | held["next", "done"][-1]
            for key in ("pixels", ("next", "pixels"), "action"):
                assert torch.equal(batch[key], held[key])


@pytest.mark.parametrize(
    "index", [3, -2, slice(1, 7, 2), [4, 0, 4], torch.tensor([[1, 2], [0, 5]]), torch.arange(9) % 2 == 0, slice(0, 0)]
)
def test_an_index_names_the_same_items(index):
    both = Both(9)
    both.extend(Environment().steps([0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 1, 0]))
    assert_same(both.frames[index], both.whole[index])


@pytest.mark.parametrize("index", [2, (slice(None), 1), (3, 0), (torch.tensor([0, 4]), torch.tensor([1, 0])), (..., 0)])
def test_an_index_over_lanes_names_the_same_items(index):
    both = Both(10, ndim=2)
    both.extend(torch.stack([Environment(first=first).steps([0, 0, 1, 0, 0, 2, 0]) for first in (1, 500)]))
    storages = both.frames.storage, both.whole.storage
    assert_same(*(storage[index] for storage in storages))
    assert_same(*(storage.flatten()[:] for storage in storages))


# ---------------------------------------------------------------------- memory


def test_frames_that_no_item_has_are_written_over():
    both = Both(50, finals=30)
    stream, rng = Environment(), np.random.default_rng(0)
    for _ in range(30):
        both.extend(stream.steps(random_kinds(rng, 10, 0.2)))
    both.check()
    frames, rows = both.frames.storage.table.rows.used()["frames"][0], both.whole[:]
    kept = {int(each) for key in ("pixels", ("next", "pixels")) for each in rows[key][:, :, 0, 0].reshape(-1)}
    assert len(frames) <= len(kept) + 20  # a write may have had more


def test_frames_of_a_game_take_less_than_a_seventh_of_the_memory():
    step = TensorDict({"pixels": torch.zeros(4, 84, 84, dtype=torch.uint8)})
    step["next"] = TensorDict({"pixels": step["pixels"], "done": torch.zeros(1, dtype=torch.bool)})
    once, plain = LazyFrameStorage(2000, finals=2000 // 8), LazyTensorStorage(2000)
    for storage in (once, plain):
        storage.set(0, step)
    whole = 2 * 2000 * 4 * 84 * 84
    assert sum(tensor.nbytes for tensor in plain.table.rows.tensors) == whole + 2000
    assert 7 * (sum(tensor.nbytes for tensor in once.table.rows.tensors) - 2000) < whole


# ---------------------------------------------------------------------- whole programs


def test_copies_and_pickles_go_their_own_ways():
    stream = Environment()
    buffer = TensorDictReplayBuffer(storage=LazyFrameStorage(6))
    buffer.extend(stream.steps([OPEN, TERMINATED, OPEN, OPEN]))
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        own = copy.deepcopy(stream)
        held = buffer[:].clone()
        rows = own.steps([OPEN, TRUNCATED, OPEN])
        twin.extend(rows)
        assert_same(twin[[4, 5, 0]].exclude("index"), rows)
        assert_same(buffer[:], held)
        assert twin.storage.max_size == 6 and "stack=4" in repr(twin)


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_what_a_worker_writes_is_seen(method):
    stream = Environment()
    both = Both(6)
    both.extend(stream.steps([OPEN, OPEN, TERMINATED, OPEN]))
    rows = stream.steps([OPEN, TRUNCATED, OPEN])
    both.frames.share()
    worker = multiprocessing.get_context(method).Process(
        target=TensorDictReplayBuffer.extend, args=(both.frames, rows.clone())
    )
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0
    both.whole.extend(rows)
    both.check()
    both.extend(stream.steps([OPEN, OPEN]))
    both.check()


def test_it_does_not_depend_on_what_torch_makes_by_default():
    both, stream = Both(5), Environment(stack=4)
    rows = stream.steps([OPEN, TERMINATED, OPEN, OPEN, OPEN, TRUNCATED])
    with torch.device("meta"):
        both.extend(rows[:3])
        both.extend(rows[3:])
        held = both.frames[:]
    assert_same(held, both.whole[:])


def test_several_observations_of_dicts():
    steps = [
        Environment(stack=2, dim=-1).steps([0, 0, 1, 0]),
        Environment(stack=2, dim=-1, first=300).steps([0, 0, 1, 0]),
    ]
    data = {
        "agents": {"a": steps[0]["pixels"], "b": steps[1]["pixels"]},
        "next": {"agents": {"a": steps[0]["next", "pixels"], "b": steps[1]["next", "pixels"]}},
        "last": steps[0]["next", "done"],
    }
    keys = [("agents", "a"), ("agents", "b")]
    buffer = ReplayBuffer(storage=LazyFrameStorage(3, obs_key=keys, stack=2, stack_dim=-1, end_keys=["last"]))
    buffer.extend(data)
    held = buffer.storage.get(torch.tensor([1, 2, 0]))
    jax.tree.map(lambda kept, given: torch.testing.assert_close(kept, given[1:], rtol=0, atol=0), held, data)

"""Slices of trajectories: their law, and the info of a batch."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.interop.slice_model import SliceModel, check_law, drawn, shares

LENGTHS = [5, 2, 1, 7, 3]  # of episodes, the last of which goes on


def filled(lengths=LENGTHS, capacity=14, lanes=()):
    """A model with episodes of some lengths in each lane, and all its rows as data."""
    model = SliceModel(capacity, lanes)
    ends = np.zeros((sum(lengths), model.lanes), bool)
    ends[np.cumsum(lengths)[:-1] - 1] = True
    for lane in range(1, model.lanes):
        ends[:, lane] = np.roll(ends[:, lane], lane)
    ids = ends.cumsum(0) - ends + 100 * np.arange(model.lanes)
    return model, model.write(ends, ids)


def buffer_of(data, sampler, capacity=14, kind=TensorDictReplayBuffer, storage=LazyTensorStorage, **choices):
    buffer = kind(storage=storage(capacity), sampler=sampler, **choices)
    buffer.extend(data)
    return buffer


# ------------------------------------------------------------------ the law

SPANS = {
    "none": (False, 0, 0),
    "left": ((True, False), 3, 0),
    "right": ((False, True), 0, 3),
    "both": (True, 3, 3),
    "two on the right": ((False, 2), 0, 2),
    "one and all": ([1, True], 1, 3),
}


@pytest.mark.parametrize(("span", "left", "right"), SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("keys", [{"traj_key": "id"}, {}], ids=["ids", "ends"])
def test_trajectories_are_drawn_equally_often_and_starts_in_them_too(span, left, right, strict, keys):
    torch.manual_seed(0)
    model, data = filled()
    buffer = buffer_of(data, SliceSampler(slice_len=4, strict_length=strict, span=span, **keys))
    check_law(drawn(buffer, 4 * 6000), shares(model.trajectories(), 4, strict, left, right))


@pytest.mark.parametrize("lanes", [(2,), (2, 2)])
def test_the_law_over_several_lanes(lanes):
    torch.manual_seed(0)
    model, data = filled(lanes=lanes)
    storage = LazyTensorStorage(14 * model.lanes, ndim=1 + len(lanes))
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=3))
    buffer.extend(data)
    check_law(drawn(buffer, 3 * 20_000), shares(model.trajectories(), 3))
    batch = buffer.sample(300)
    assert batch["index"].shape == (300, 1 + len(lanes))
    assert torch.equal(storage[tuple(batch["index"].unbind(-1))]["x"], batch["x"])


# ------------------------------------------------------------------ the batch


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_batch_is_slices_one_after_the_other(kind):
    _, data = filled([6, 6], 12)
    buffer = buffer_of(data, SliceSampler(slice_len=4, traj_key="id"), 12, kind)
    batch, info = buffer.sample(32, return_info=True)
    assert batch.batch_size == (32,)
    slices = batch["x"].reshape(8, 4)
    assert torch.equal(slices, slices[:, :1] + torch.arange(4))
    assert set(slices[:, 0].tolist()) <= {0, 1, 2, 6, 7, 8}
    assert isinstance(info["index"], tuple) and len(info["index"]) == 1
    assert torch.equal(info["index"][0], batch["x"])
    last = (torch.arange(32) % 4 == 3)[:, None]
    assert torch.equal(info["next", "truncated"], last)
    if kind is TensorDictReplayBuffer:
        assert torch.equal(batch["index"], batch["x"][:, None])
        assert torch.equal(batch["next", "truncated"], last)
        assert torch.equal(batch["next", "done"], last | data["next", "done"][batch["x"]])
        assert not batch["next", "terminated"].any()
    else:
        assert ("next", "truncated") not in batch.keys(True)
        assert torch.equal(batch["next", "done"], data["next", "done"][batch["x"]])


# ------------------------------------------------------------------ the info


@pytest.mark.parametrize("form", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_done_and_terminated_are_those_stored(form, dtype):
    _, data = filled()
    data["next", "done"] = data["next", "done"].reshape(18, *form).to(dtype)
    data["next", "terminated"] = (torch.arange(18) % 3 == 0).reshape(18, *form).to(dtype)
    data["next", "truncated"] = torch.ones(18, *form, dtype=dtype)
    buffer = buffer_of(data, SliceSampler(slice_len=2, traj_key="id", only_named_keys=True))
    batch, info = buffer.sample(200, return_info=True)
    ends = data["next", "done"].reshape(-1).bool()[batch["x"]]
    last = torch.arange(200) % 2 == 1
    for told in (batch, info):
        for name, wanted in (("truncated", last), ("done", ends | last), ("terminated", batch["x"] % 3 == 0)):
            assert told["next", name].dtype == torch.bool
            assert told["next", name].shape == (200, 1)
            assert torch.equal(told["next", name].reshape(-1), wanted)
    assert buffer[:]["next", "truncated"].bool().all()


@pytest.mark.parametrize("key", ["trunc", ("next", "agent", "trunc")])
def test_other_names_of_the_ends(key):
    _, data = filled()
    buffer = buffer_of(data, SliceSampler(slice_len=2, truncated_key=key))
    batch, info = buffer.sample(8, return_info=True)
    parent = key[:-1] if isinstance(key, tuple) else ()
    for name, wanted in (("trunc", [0, 1] * 4), ("done", [0, 1] * 4), ("terminated", [0] * 8)):
        told = batch[(*parent, name)]
        assert told.dtype == torch.bool and told.shape == (8, 1)
        assert told.reshape(-1).tolist() == wanted
    assert set(info) == {"index", key, *((*parent, name) if parent else name for name in ("done", "terminated"))}


def test_no_key_for_the_ends():
    _, data = filled()
    buffer = buffer_of(data, SliceSampler(slice_len=2, truncated_key=None))
    batch, info = buffer.sample(8, return_info=True)
    assert set(info) == {"index"}
    assert ("next", "truncated") not in batch.keys(True) and ("next", "terminated") not in batch.keys(True)
    assert torch.equal(batch["next", "done"], data["next", "done"][batch["x"]])


@pytest.mark.parametrize("form", [(), (1,)])
@pytest.mark.parametrize("choices", [{}, {"strict_length": False}, {"strict_length": False, "pad_output": True}])
def test_the_first_item_of_a_slice_is_marked(form, choices):
    _, data = filled([5, 2, 7], 14)
    data["is_init"] = (torch.arange(14) == 8).reshape(14, *form)
    buffer = buffer_of(data, SliceSampler(slice_len=3, **choices))
    for _ in range(20):
        batch, info = buffer.sample(9, return_info=True)
        ends = info["next", "truncated"].reshape(-1)
        if choices.get("pad_output"):
            first = torch.arange(len(batch)) % 3 == 0
        else:
            first = torch.cat([torch.ones(1, dtype=torch.bool), ends[:-1]])
        assert batch["is_init"].shape == (len(batch), *form)
        assert torch.equal(batch["is_init"].reshape(-1), first | (batch["x"] == 8))
    assert buffer[:]["is_init"].sum() == 1


def test_shorter_slices_are_filled_up():
    torch.manual_seed(0)
    model, data = filled()
    buffer = buffer_of(data, SliceSampler(slice_len=4, strict_length=False, pad_output=True), batch_size=40)
    seen = []
    for _ in range(100):
        batch, info = buffer.sample(return_info=True)
        assert batch.batch_size == (40,)
        mask = info["collector", "mask"].reshape(10, 4)
        assert torch.equal(batch["collector", "mask"], info["collector", "mask"])
        for items, real, end in zip(
            batch["x"].reshape(10, 4).tolist(),
            mask.tolist(),
            batch["next", "truncated"].reshape(10, 4).tolist(),
            strict=True,
        ):
            length = sum(real)
            assert real == [True] * length + [False] * (4 - length)
            assert items[length:] == [items[length - 1]] * (4 - length)
            assert end == [place == length - 1 for place in range(4)]
            seen.append(tuple(items[:length]))
    check_law(seen, shares(model.trajectories(), 4, strict=False))


# ------------------------------------------------------------------ given boundaries

GIVEN = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0, 0, 0], dtype=torch.bool)
JOINED = [(3, 4, 5, 6), (7, 8, 9, 0, 1, 2)]


@pytest.mark.parametrize(
    ("choices", "whole"),
    [
        ({"ends": GIVEN}, JOINED),
        ({"ends": GIVEN | (torch.arange(10) == 9)}, [(0, 1, 2), (3, 4, 5, 6), (7, 8, 9)]),
        ({"trajectories": torch.tensor([4, 4, 4, 2, 2, 2, 2, 4, 4, 4])}, JOINED),
        ({"trajectories": torch.zeros(10, dtype=torch.int32)}, [tuple(range(10))]),
    ],
)
@pytest.mark.parametrize("epochs", [False, True])
def test_given_boundaries(choices, whole, epochs):
    torch.manual_seed(0)
    storage = TensorStorage(TensorDict({"x": torch.arange(10)}, [10]))
    if epochs:
        sampler = SliceSamplerWithoutReplacement(slice_len=10, strict_length=False, **choices)
        assert sorted(drawn(ReplayBuffer(storage=storage, sampler=sampler), 100)) == sorted(whole)
        return
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=3, cache_values=True, **choices))
    check_law(drawn(buffer, 3 * 2000), shares(whole, 3))
    for copied in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        for each in (buffer, copied):
            each.set_rng(torch.Generator().manual_seed(3))
        assert [buffer.sample(30)["x"].tolist()] == [copied.sample(30)["x"].tolist()]


def test_given_boundaries_are_for_data_that_is_not_written_any_more():
    _, data = filled([10, 4])
    ends = torch.arange(14) % 7 == 6
    buffer = buffer_of(data, SliceSampler(slice_len=4, ends=ends, cache_values=True))
    drawn(buffer, 40)
    buffer[3] = buffer[4].clone()  # not what was given
    drawn(buffer, 40)
    buffer.extend(data[:2])
    with pytest.raises(RuntimeError, match=r"was written to.*static data"):
        buffer.sample(40)
    buffer.empty()
    buffer.extend(data[:5])
    with pytest.raises(RuntimeError, match="are of 14 items of one dim, 5 of 1 dims are stored"):
        buffer.sample(40)
    buffer.extend(data[5:])
    assert len(drawn(buffer, 40)) == 10

"""Which entries of stored items say to which trajectory they belong, and in which forms."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.interop.slice_model import SliceModel, drawn


class Reading(LazyTensorStorage):
    """A storage of a user who looks at what is read."""

    def get(self, index):
        return super().get(index)


def whole(storage, data, **keys):
    """All trajectories."""
    sampler = SliceSamplerWithoutReplacement(slice_len=64, strict_length=False, **keys)
    buffer = ReplayBuffer(storage=storage, sampler=sampler)
    buffer.extend(data)
    return sorted(drawn(buffer, 64 * 1000))


IDS = torch.tensor([3, 3, 3, 7, 7, 3, 3, 9])
ENDS = torch.tensor([0, 0, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
CUT = [(0, 1, 2), (3, 4), (5, 6), (7,)]


def marked(**entries):
    rows = len(next(iter(entries.values())))
    data = TensorDict({"x": torch.arange(rows)}, [rows])
    for key, value in entries.items():
        data["next", "done" if key == "done" else key] = value if key in ("done", "over", "lost") else torch.zeros(rows)
        if key not in ("done", "over", "lost"):
            data[("collector", "traj_ids") if key == "traj_ids" else key] = value
    return data


MARKS = {
    "ids": ({"traj_key": "id"}, {"id": IDS}),
    "ids of bytes": ({"traj_key": "id"}, {"id": IDS.to(torch.uint8)}),
    "ids of two values": ({"traj_key": "id"}, {"id": torch.tensor([1, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)}),
    "ids below zero": ({"traj_key": "id"}, {"id": -IDS}),
    "ends": ({"end_key": ("next", "done")}, {"done": ENDS}),
    "ends of one value": ({"end_key": ("next", "done")}, {"done": ENDS[:, None]}),
    "ends of several dims": ({"end_key": ("next", "done")}, {"done": ENDS[:, None, None]}),
    "ends of integers": ({"end_key": ("next", "done")}, {"done": ENDS.long() * 5}),
    "several ends": (
        {"end_keys": [("next", "over"), ("next", "lost"), "absent"]},
        {"over": ENDS & (torch.arange(8) < 3), "lost": (ENDS & (torch.arange(8) > 2))[:, None]},
    ),
    "ids before ends": ({"traj_key": "id", "end_key": ("next", "done")}, {"id": IDS, "done": ~ENDS}),
    "ends where ids are not stored": ({"traj_key": "absent", "end_key": ("next", "over")}, {"over": ENDS}),
    "done where ids are not stored": ({"traj_key": "absent"}, {"done": ENDS}),
    "found: of a collector": ({}, {"traj_ids": IDS, "episode": torch.zeros(8, dtype=torch.int64), "done": ~ENDS}),
    "found: of episodes": ({}, {"episode": IDS, "done": ~ENDS}),
    "found: done": ({}, {"done": ENDS}),
}


@pytest.mark.parametrize(("keys", "entries"), MARKS.values(), ids=MARKS)
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyStackStorage, Reading])
def test_what_marks_them(make, keys, entries):
    assert whole(make(10), marked(**entries), **keys) == CUT


@pytest.mark.parametrize("form", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_ends_of_several_lanes(form, dtype):
    model = SliceModel(6, (3,))
    data = model.write_some(9, 0.4)
    data["next", "done"] = data["next", "done"].reshape(3, 9, *form).to(dtype)
    assert whole(LazyTensorStorage(18, ndim=2), data, end_key=("next", "done")) == model.trajectories()


def test_an_item_of_several_agents_has_one_id():
    data = marked(id=IDS)
    data["next", "done"] = torch.stack([ENDS, ENDS & False], 1)[..., None]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=2, traj_key="id"))
    buffer.extend(data)
    batch = buffer.sample(64)
    last = torch.arange(64) % 2 == 1
    stored = data["next", "done"][batch["x"]]
    assert torch.equal(batch["next", "done"], stored | last[:, None, None])

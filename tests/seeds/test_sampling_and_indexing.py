"""Getting data out of a buffer: one element, all elements, a sample, an iteration."""

import itertools

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, ReplayBuffer, TensorDictReplayBuffer


def images(*batch: int) -> TensorDict:
    return TensorDict(
        {"img": torch.randint(255, (*batch, 3, 64, 64), dtype=torch.uint8), "labels": torch.randint(100, batch)},
        batch_size=batch,
    )


@pytest.fixture
def rb_td() -> ReplayBuffer:
    rb_td = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=1)
    rb_td.add(images())
    return rb_td


def test_the_first_element(rb_td):
    first_elt = rb_td[0]
    assert first_elt.batch_size == ()
    assert first_elt["img"].shape == (3, 64, 64)


def test_all_valid_elements(rb_td):
    storage = rb_td[:]  # returns all valid elements from the buffer
    assert storage.batch_size == (1,)
    rb_td.extend(images(3))
    assert rb_td[:].batch_size == (4,)


def test_a_sample(rb_td):
    with pytest.warns(UserWarning, match="batch_size"):  # the buffer was built with batch size 1
        sample = rb_td.sample(128)
    assert sample.batch_size == (128,)
    assert (sample == rb_td[0]).all()


def test_an_iteration(rb_td):
    rb_td.extend(images(3))
    labels = set(rb_td[:]["labels"].tolist())
    seen = []
    # iterate over the buffer using the sampler -- batch-size was set in the constructor to 1
    for data in itertools.islice(rb_td, 200):
        assert data.batch_size == (1,)
        assert data["img"].shape == (1, 3, 64, 64)
        seen.append(int(data["labels"]))
    assert len(seen) == 200
    assert set(seen) == labels


@pytest.mark.parametrize(
    "index",
    [1, -1, np.int64(2), slice(1, 3), slice(None, None, 2), [0, 2], range(2), np.array([3, 0]), torch.tensor([2, 2]),
     torch.tensor([True, False, True, False]), np.array([False, True, True, False]), (1,), ...],
    ids=repr,
)  # fmt: skip
def test_every_kind_of_index(index):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(10))
    data = TensorDict({"a": torch.arange(4.0)}, [4])
    rb.extend(data)
    wanted = data["a"][list(index) if isinstance(index, range) else index]
    got = rb[index]
    assert got.batch_size == wanted.shape
    assert got["a"].tolist() == wanted.tolist()
    assert got["index"].tolist() == wanted.tolist()


@pytest.mark.parametrize("index", [4, -5, [0, 4], torch.tensor([9]), np.array([-5])], ids=repr)
def test_what_is_not_filled_is_out_of_range(index):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10))
    rb.extend(torch.arange(4))
    with pytest.raises(IndexError, match="out of range"):
        rb[index]

"""What data goes through on its way in and out."""

import pytest
import torch
from torch import nn

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import STORAGES, check_same, flat_td, plain_tensor, refused, steps


class Scaled(nn.Module):
    """Stored divided, read multiplied; notes its calls."""

    def __init__(self, factor, log=None):
        super().__init__()
        self.factor, self.log = factor, [] if log is None else log

    def forward(self, data):
        self.log.append(("forward", self.factor))
        return data * self.factor if isinstance(data, torch.Tensor) else data.set("obs", data["obs"] * self.factor)

    def inv(self, data):
        self.log.append(("inv", self.factor))
        return data / self.factor if isinstance(data, torch.Tensor) else data.set("obs", data["obs"] / self.factor)


class Nothing(nn.Module):
    def forward(self, data):
        return data

    def inv(self, data):
        return None


def doubled(data):
    return data * 2


@pytest.fixture(params=STORAGES)
def storage(request):
    return STORAGES[request.param]


def test_forward_runs_on_every_read_and_the_inverse_on_every_write(storage):
    buffer = ReplayBuffer(storage=storage(4), transform=Scaled(4.0))
    buffer.extend(plain_tensor([4, 8]))
    check_same(buffer.storage[:], plain_tensor([1, 2]))
    check_same(buffer[:], plain_tensor([4, 8]))
    check_same(buffer[1], plain_tensor([8])[0])
    check_same(buffer[torch.tensor([1])], plain_tensor([8]))
    assert set(buffer.sample(16)[:, 0].tolist()) == {4.0, 8.0}
    buffer[0] = plain_tensor([16])[0]
    check_same(buffer.storage[0], plain_tensor([4])[0])
    buffer.add(plain_tensor([12])[0])
    check_same(buffer.storage[2], plain_tensor([3])[0])


def test_the_chain_is_in_eval_mode():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=nn.Dropout(0.9).train())
    buffer.append_transform(nn.Dropout(0.9).train())
    buffer.insert_transform(0, nn.Dropout(0.9).train())
    assert not any(module.training for module in buffer.transform.modules())
    buffer.extend(plain_tensor([1]))
    check_same(buffer.sample(4), plain_tensor([1, 1, 1, 1]))


@pytest.mark.parametrize("rows", [plain_tensor, flat_td, steps])
def test_a_transform_that_edits_in_place_never_alters_what_is_stored(storage, rows):
    def edit(data):
        (data if isinstance(data, torch.Tensor) else data.get("obs")).mul_(2)
        return data

    buffer = ReplayBuffer(storage=storage(4), transform=edit)
    buffer.extend(rows([1, 2]))
    for index in (torch.tensor([0, 1]), slice(None), 0):
        buffer[index]
        check_same(buffer.storage[:], rows([1, 2]))


@pytest.mark.parametrize("collate", [lambda items: items, lambda items: items[0]], ids=["all", "one"])
@pytest.mark.parametrize("rows", [plain_tensor, flat_td])
def test_a_transform_never_alters_the_items_of_a_list(collate, rows):
    def edit(data):
        for item in data if isinstance(data, list) else [data]:
            (item if isinstance(item, torch.Tensor) else item.set("new", item["obs"] * 1)["obs"]).mul_(2)
        return data

    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=collate, transform=edit)
    buffer.extend(rows([1, 2]))
    for read in (lambda: buffer.sample(4), lambda: buffer[:], lambda: buffer[0]):
        read()
        check_same(torch.stack(list(buffer.storage)), rows([1, 2]))


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_draw_of_a_view_is_a_copy(make):
    class Views(RandomSampler):
        def sample(self, storage, batch_size):
            return slice(0, 2), {}

    kind = TensorDictReplayBuffer if make is ListStorage else ReplayBuffer
    buffer = kind(storage=make(4), sampler=Views())
    buffer.extend(flat_td([1, 2, 3]))
    before = buffer.storage[1].clone()
    buffer.sample(2)["obs"].zero_()
    check_same(buffer.storage[1], before)
    assert all(row["obs"].all() and "note" not in row for row in buffer.storage)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_an_inverse_that_gives_nothing_writes_nothing(kind):
    buffer = kind(storage=LazyTensorStorage(4), transform=Nothing())
    index = buffer.extend(flat_td([1, 2]))
    assert index.shape == (0, 1) and index.dtype == torch.int64
    added = buffer.add(flat_td([1])[0])
    assert added.shape == (0, 1)
    assert len(buffer) == 0 and buffer.write_count == 0
    wide = kind(storage=LazyTensorStorage(4, ndim=2), transform=Nothing())
    assert wide.extend(flat_td([1, 2])).shape == (0, 2)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(RuntimeError, match="callable"):
        ReplayBuffer(transform=3)
    buffer = ReplayBuffer()
    with refused(buffer, RuntimeError, "callable"):
        buffer.append_transform("text")
    with refused(buffer, RuntimeError, "callable"):
        buffer.insert_transform(0, "text")
    with pytest.raises(ValueError, match="out of range"):
        buffer.insert_transform(3, doubled)
    assert len(buffer.transform) == 0


@pytest.mark.parametrize("where", ["forward", "inv"])
def test_a_transform_that_raises_changes_nothing(where):
    class Broken(Scaled):
        pass

    def broken(self, data):
        raise ArithmeticError("broken")

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=Scaled(2.0), batch_size=2)
    buffer.extend(plain_tensor([1, 2]))
    setattr(Broken, where, broken)
    buffer.append_transform(Broken(1.0))
    if where == "inv":
        for call in (lambda: buffer.extend(plain_tensor([3])), lambda: buffer.add(plain_tensor([3])[0])):
            with refused(buffer, ArithmeticError):
                call()
    else:
        with refused(buffer, ArithmeticError):
            buffer[0]
        with pytest.raises(ArithmeticError):
            buffer.sample()

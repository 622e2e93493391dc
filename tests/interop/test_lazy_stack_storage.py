"""LazyStackStorage: tensordicts that need not be alike, read as one."""

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from interop import (
    LazyStackStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import Step, check_same, flat_td, nested_td, refused, steps, trajectories


def lengthy(ids):
    """Items whose entry "a" has as many values as their id tells."""
    return [TensorDict(a=torch.full((int(each),), float(each)), id=torch.tensor(int(each))) for each in ids]


def buffer_of(items, capacity=9, kind=ReplayBuffer, stack_dim=0, **kwargs):
    buffer = kind(storage=LazyStackStorage(capacity, stack_dim=stack_dim), **kwargs)
    buffer.extend(items)
    return buffer


def test_an_int_names_the_item_itself():
    item = TensorDict(a=torch.zeros(3))
    buffer = ReplayBuffer(storage=LazyStackStorage(3))
    assert buffer.add(item) == 0
    assert buffer[0] is item and buffer.storage[-1] is item and buffer[np.int64(0)] is item


def test_what_cannot_be_stacked_is_had_one_by_one():
    buffer = buffer_of(lengthy([1, 2]))
    for got in (buffer[:], buffer.storage.get([1, 0]), buffer.sample(3)):
        assert isinstance(got, LazyStackedTensorDict)
        assert [len(each) for each in got.get("a", as_list=True)] == got["id"].tolist()
    with pytest.raises(RuntimeError):
        buffer[:].get("a")
    assert [each.tolist() for each in buffer[:].get("a", as_list=True)] == [[1.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("batch", "stack_dim", "wanted", "at"),
    [
        ([], 0, [3], 0),
        ([5], 0, [3, 5], 0),
        ([5], -1, [5, 3], 1),
        ([5], -2, [3, 5], 0),
        ([5, 4], -2, [5, 3, 4], 1),
    ],
)
def test_the_stack_dim_counts_in_what_is_read(batch, stack_dim, wanted, at):
    rows = TensorDict(a=torch.arange(3).reshape(3, *(1 for _ in batch)).expand(3, *batch), batch_size=[3, *batch])
    buffer = buffer_of(rows, stack_dim=stack_dim)
    for index in (slice(None), [0, 1, 2]):
        got = buffer[index]
        assert list(got.batch_size) == wanted and got.stack_dim == at
        check_same(got["a"], rows["a"].movedim(0, at))


@pytest.mark.parametrize(("batch", "stack_dim"), [([], 1), ([], -2), ([5], 2), ([5], -3)])
def test_an_item_without_the_stack_dim_is_refused(batch, stack_dim):
    buffer = ReplayBuffer(storage=LazyStackStorage(3, stack_dim=stack_dim))
    with refused(buffer, ValueError, "stack_dim"):
        buffer.extend(TensorDict(a=torch.zeros(2, *batch), batch_size=[2, *batch]))


def test_items_of_unlike_dims_cannot_be_read_as_one():
    buffer = buffer_of([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2), batch_size=[2])])
    with pytest.raises(RuntimeError, match="same number of batch dims"):
        buffer[:]
    assert buffer[1].batch_size == (2,)


def test_other_objects_are_read_one_by_one():
    buffer = ReplayBuffer(storage=LazyStackStorage(3))
    buffer.extend(["text", 7])
    assert buffer[0] == "text" and buffer[1] == 7
    for read in (lambda: buffer[:], lambda: buffer.sample(2), lambda: buffer[[0]]):
        with pytest.raises(TypeError, match="ListStorage"):
            read()
    buffer[1] = ["a", "list"]
    assert buffer[1] == ["a", "list"]


def test_no_items_are_a_batch_once_items_are_known():
    buffer = ReplayBuffer(storage=LazyStackStorage(3))
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample(2)
    for index in (slice(None), [], torch.zeros(0, dtype=torch.bool)):
        with pytest.raises(RuntimeError, match="no items"):
            buffer[index]
    buffer.extend(lengthy([1]))
    check_same(buffer[1:], lengthy([1])[0].unsqueeze(0)[:0])


# ------------------------------------------------------------------ what belongs to whom


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (ReplayBuffer, flat_td),
        (ReplayBuffer, steps),
        (ReplayBuffer, lambda ids: lengthy([each + 1 for each in ids])),
        (TensorDictReplayBuffer, nested_td),
    ],
)
def test_samples_that_a_buffer_changes_can_be_edited_freely(kind, rows):
    buffer = buffer_of(rows([1, 2, 3]), kind=kind, transform=lambda data: data)
    kept = [item.clone() for item in buffer.storage]
    for got in (buffer.sample(7), buffer[[0, 0, 2]], buffer[torch.tensor([1])]):
        got.zero_()
        if not isinstance(got, Step):
            got["new"] = torch.arange(float(len(got)))
            assert got["new"].tolist() == list(range(len(got)))  # also where an item was drawn twice
    for item, before in zip(buffer.storage, kept, strict=True):
        check_same(item, before)


def test_entries_are_edited_in_place():
    buffer = buffer_of(lengthy([1, 2, 3]))
    item = buffer.storage[1]
    assert buffer.set_("id", torch.tensor([4, 5, 6])) is buffer
    assert item["id"] == 5
    buffer.set_at_("id", torch.tensor([7, 8]), [2, 0])
    assert buffer["id"].tolist() == [8, 5, 7]
    buffer.set_at_("id", torch.tensor(3), 1)
    buffer.set_at_("id", np.array([1]), slice(0, 1))
    assert buffer["id"].tolist() == [1, 3, 7]
    buffer["id"] = torch.tensor([0, 0, 1])
    assert buffer["id"].tolist() == [0, 0, 1]
    buffer.update_({"id": 9, "a": [torch.zeros(1), torch.ones(2), torch.zeros(3)]})
    assert buffer["id"].tolist() == [9, 9, 9]
    assert [each.tolist() for each in buffer[:].get("a", as_list=True)] == [[0.0], [1.0] * 2, [0.0] * 3]


def test_entries_along_another_stack_dim_are_edited_in_place():
    buffer = buffer_of(trajectories([1, 2, 3]), stack_dim=-1)
    value = torch.arange(12.0).reshape(4, 3)
    buffer.set_("reward", value)
    check_same(buffer["reward"], value)
    check_same(buffer[1]["reward"], value[:, 1])


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (lambda buffer: buffer.set_("id", torch.tensor([1, 2])), RuntimeError),
        (lambda buffer: buffer.set_("id", torch.tensor(1)), RuntimeError),
        (lambda buffer: buffer.set_("id", torch.tensor([1.0, 2.0, 3.0])), RuntimeError),
        (lambda buffer: buffer.set_("no", torch.tensor([1, 2, 3])), KeyError),
        (lambda buffer: buffer.set_("a", torch.zeros(3, 2)), RuntimeError),
        (lambda buffer: buffer.set_at_("id", torch.tensor([1]), [3]), IndexError),
        (
            lambda buffer: buffer.update_({"id": torch.tensor([7, 8, 9]), "a": [0.0, "x", 0.0]}),
            (TypeError, RuntimeError),
        ),
    ],
)
def test_edits_that_do_not_fit_change_nothing(edit, error):
    buffer = buffer_of(lengthy([1, 2, 3]))
    kept = [item.clone() for item in buffer.storage]
    with pytest.raises(error):
        edit(buffer)
    for item, before in zip(buffer.storage, kept, strict=True):
        check_same(item, before)

"""Updates of what is still where it was sampled."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    ConditionalUpdateResult,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.interop.rows import check_same, refused
from tests.interop.test_generations import tracked


def patched(kind=TensorDictReplayBuffer, storage=LazyTensorStorage, **choices):
    buffer = tracked(storage, kind=kind, **choices)
    below = TensorDict({"b": torch.zeros(8, 2), "v": torch.arange(8)}, [8])
    buffer.extend(TensorDict({"a": torch.zeros(8), "n": below}, [8]))  # rows 0 and 1 are of generation 1
    return buffer


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_only_what_is_still_there_is_written(storage):
    buffer = patched(storage=storage)
    handle = buffer.sample(40)
    index, generation = handle["index"], handle["index_generation"]
    buffer.extend(buffer[2:4].exclude("index"))  # rows 2 and 3 are new
    result = buffer.update_if_present(
        index=index, generation=generation, patch={"a": index.float() + 1, ("n", "b"): torch.ones(40, 2)}
    )
    assert isinstance(result, ConditionalUpdateResult) and result.version_rejected is None
    gone = (index == 2) | (index == 3)
    check_same(result.updated, ~gone)
    assert (result.updated_count, result.stale_count) == (int((~gone).sum()), int(gone.sum()))
    wanted = torch.tensor([1.0, 2, 0, 0, 5, 6])
    check_same(buffer["a"], wanted)
    check_same(buffer["n", "b"], (wanted > 0).float()[:, None].expand(6, 2).clone())
    # What was written is still what it was.
    again = buffer.update_if_present(index=index, generation=generation, patch={"a": index * 0.0})
    check_same(again.updated, ~gone)


def test_rows_that_cannot_be_are_stale():
    buffer = patched()
    result = buffer.update_if_present(
        index=torch.tensor([77, -1, 6]), generation=torch.tensor([-1, -1, -1]), patch={"a": torch.ones(3)}
    )
    assert (result.updated_count, result.stale_count) == (0, 3)
    none = buffer.update_if_present(index=[], generation=[], patch={"a": torch.zeros(0)})
    assert (none.updated_count, none.stale_count) == (0, 0)
    buffer.empty()
    assert buffer.update_if_present(index=[3], generation=[0], patch={"a": torch.ones(1)}).stale_count == 1
    assert buffer.update_if_present(index=[3], generation=[1], patch={"a": torch.ones(1)}).stale_count == 1


@pytest.mark.parametrize("newer", [False, True])
def test_versions_decide_among_those_that_are_there(newer):
    buffer = patched()  # versions 6, 7, 2, 3, 4, 5
    index = torch.tensor([3, 3, 4, 5, 0, 2, 2])
    version = torch.tensor([7, 6, 4, 1, 99, 8, 8])
    result = buffer.update_if_present(
        index=index,
        generation=torch.zeros(7, dtype=torch.int64),
        patch={"a": torch.arange(1.0, 8.0)},
        version_key=("n", "v"),
        version=version,
        require_newer=newer,
    )
    check_same(result.updated, torch.tensor([True, False, not newer, False, False, False, True]))
    check_same(result.version_rejected, torch.tensor([False, True, newer, True, False, True, False]))
    assert result.stale_count == 1 and result.version_rejected_count == (4 if newer else 3)
    assert buffer["a"].tolist() == [0, 0, 7, 1, 0 if newer else 3, 0]
    assert buffer["n", "v"].tolist() == [6, 7, 8, 7, 4, 5]


def test_coordinates_name_items_in_lanes():
    for as_tuple in (False, True):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(6, ndim=2), writer=TensorDictRoundRobinWriter(track_generations=True)
        )
        index = buffer.extend(TensorDict({"a": torch.zeros(2, 3)}, [2, 3]))
        generation = buffer.writer.generations_of(index)
        index = tuple(index.unbind(-1)) if as_tuple else index
        buffer.update_if_present(index=index, generation=generation, patch={"a": torch.arange(6.0)})
        check_same(buffer.storage[:]["a"], torch.arange(6.0).reshape(3, 2))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"patch": {"zz": torch.zeros(2)}}, KeyError),
        ({"patch": {"a": torch.zeros(3)}}, ValueError),
        ({"patch": {"a": [0.0, 0.0]}}, TypeError),
        ({"generation": torch.zeros(3, dtype=torch.int64)}, ValueError),
        ({"index": torch.zeros(2)}, TypeError),
        ({"index": torch.zeros(2, 2, dtype=torch.int64)}, ValueError),
        ({"version": 3}, ValueError),
        ({"version_key": "a", "version": 1}, ValueError),  # is in the patch
        ({"version_key": ("n", "v"), "version": 1.5}, ValueError),
    ],
)
def test_updates_that_do_not_fit_are_refused(given, error):
    buffer = patched()
    whole = {"index": torch.tensor([2, 3]), "generation": torch.tensor([0, 0]), "patch": {"a": torch.ones(2)}}
    with refused(buffer, error):
        buffer.update_if_present(**{**whole, **given})


def test_buffers_that_cannot_be_updated_so_refuse():
    one = {"index": [0], "generation": [0], "patch": {"a": torch.zeros(1)}}
    listed, untracked, tensors = (
        patched(storage=ListStorage),
        TensorDictReplayBuffer(storage=LazyTensorStorage(4)),
        tracked(),
    )
    untracked.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    tensors.extend(torch.zeros(2))
    for buffer, error in (
        (listed, RuntimeError),
        (untracked, RuntimeError),
        (tensors, KeyError),
        (tracked(), RuntimeError),
    ):
        with pytest.raises(error):
            buffer.update_if_present(**one)

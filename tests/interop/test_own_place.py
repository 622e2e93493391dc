"""A place of the user's, the one of docs/do/extending.md: rows that are compressed in memory."""

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer, TensorStorage
from tests.interop.every_pair import outcome
from tests.interop.page import names_of
from tests.interop.pair_history import BUFFERS, SAMPLERS, STORAGES, WRITERS, Cell
from tests.interop.rows import check_same


@pytest.fixture(scope="module")
def place() -> Any:
    """The class of the page."""
    return names_of("class ZlibRows")["Zlib"]


def rows(count: int, start: int = 0) -> TensorDict:
    x = torch.arange(start, start + count * 3, dtype=torch.float32).reshape(count, 3)
    return TensorDict({"x": x, "end": torch.arange(count) % 4 == 3, "half": x[:, 0].bfloat16()}, [count])


@pytest.mark.parametrize("ndim", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_works_with_each_sampler_and_writer_as_a_storage_of_the_library(
    ndim: int, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    storages = {"LazyTensorStorage": STORAGES["LazyTensorStorage"]}
    storages["of zlib"] = lambda size, dims: TensorStorage.over(place(), size, ndim=dims)
    for name, build in storages.items():
        monkeypatch.setitem(STORAGES, name, build)
    pairs = itertools.product(SAMPLERS, WRITERS)
    for (sampler, writer), buffer in zip(pairs, itertools.cycle(BUFFERS), strict=False):
        expected, ours = (outcome(Cell(name, ndim, sampler, writer, buffer)) for name in storages)
        assert ours[0] == expected[0], (sampler, writer, buffer, ours)


@pytest.mark.parametrize("ndim", [1, 2])
def test_it_is_saved_loaded_and_copied(ndim: int, place: Any, tmp_path: Path) -> None:
    def build(storage: TensorStorage) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, generator=generator)

    def ours() -> Any:
        return build(TensorStorage.over(place(), 20, ndim=ndim))

    buffer = ours()
    for start in (0, 100):  # the second goes around
        data = rows(12, start)
        buffer.extend(data if ndim == 1 else data.reshape(2, 6))
    buffer.update_priority(buffer.sample(4)["index"], torch.rand(4))
    buffer.dumps(tmp_path / "c")
    of_memory, loaded, given = build(LazyTensorStorage(20, ndim=ndim)), ours(), ours()
    of_memory.loads(tmp_path / "c")
    loaded.loads(tmp_path / "c")
    given.load_state_dict(buffer.state_dict())
    others = [of_memory, loaded, given, copy.deepcopy(buffer)]
    for other in others:
        check_same(other[:], buffer[:])
    batches = [other.sample(8) for other in (buffer, *others)]
    for batch in batches[1:]:
        check_same(batch, batches[0])
    others[-1].empty()
    assert len(buffer) and not len(others[-1])


def test_sharing_and_new_keys_are_refused(place: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=TensorStorage.over(place(), 20), batch_size=4)
    buffer.extend(rows(6))
    before = buffer[:]
    with pytest.raises(RuntimeError, match="cannot be shared"):
        buffer.share()
    with pytest.raises(RuntimeError, match="no keys can be added"):
        buffer[:] = buffer[:].set("later", torch.zeros(6))
    check_same(buffer[:], before)


def test_edits_and_equal_places(place: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=TensorStorage.over(place(), 20), batch_size=4)
    buffer.extend(rows(6))
    buffer[torch.tensor([1, 2, 1])] = rows(3, 50)
    expected = rows(6)
    expected[[1, 2]] = rows(3, 50)[[2, 1]]
    check_same(buffer[:].exclude("index"), expected)
    buffer.update_({"x": buffer[:]["x"] + 1})
    assert np.array_equal(buffer[:]["x"], expected["x"] + 1)

"""`extend(data, mask=...)` is `extend` of the rows where the mask is True: nothing shows that there were others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.transforms import Compose, Transform
from tests.interop.every_pair import outcome
from tests.interop.pair_history import BATCH, CELLS, Cell, History, as_given, ids_of
from tests.interop.rows import check_same, refused


class MaskedHistory(History):
    """A history whose writes have rows that are not to be written, before, between and behind the others."""

    def write(self, count: int) -> None:
        ids = ids_of(self.time, count, self.lanes)
        mask = np.zeros(2 * count + 1, bool)
        mask[np.random.default_rng(self.time).permutation(2 * count + 1)[:count]] = True
        given = ids_of(5000, 2 * count + 1, self.lanes)
        given[mask] = ids
        wanted = self._written(ids)
        index = self.buffer.extend(as_given(given, self.cell), mask=torch.from_numpy(mask))
        check_same(index, self._named(wanted))
        self._group(wanted)
        self.time += count
        self.check_all()
        none = self.buffer.extend(as_given(given, self.cell), mask=np.zeros(2 * count + 1, bool))
        assert none.shape == ((0, 2) if self.cell.ndim == 2 else (0,))
        self.check_all()


def is_quick(cell: Cell) -> bool:
    """One cell for each sampler, over storages, writers and buffers in turn."""
    return CELLS.index(cell) % 37 == 5


@pytest.mark.parametrize(
    "cell",
    [
        cell if is_quick(cell) else pytest.param(cell, marks=pytest.mark.slow)
        for cell in CELLS
        if cell.writer != "ImmutableDatasetWriter"
    ],
    ids=str,
)
def test_each_pair_sees_only_the_rows_of_the_mask(cell: Cell) -> None:
    if outcome(cell, False)[0] != "works":
        return  # refused by the constructor, which another test holds
    assert MaskedHistory(cell).run() == "works"


# ------------------------------------------------------------------ kinds of data


DATA: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(12.0).reshape(6, 2),
    "dict": lambda: {"a": torch.arange(6), "b": (torch.arange(12).reshape(6, 2), torch.ones(6))},
    "tensordict": lambda: TensorDict({"a": torch.arange(6), "b": {"c": torch.arange(12).reshape(6, 2)}}, [6]),
    "lazy stack": lambda: LazyStackedTensorDict(*(TensorDict({"a": torch.arange(i + 1)}) for i in range(6))),
    "list": lambda: [torch.full((2,), float(i)) for i in range(6)],
    "iterator": lambda: iter([torch.full((2,), float(i)) for i in range(6)]),
    "texts": lambda: TensorDict({"a": torch.arange(6), "text": [f"t{i}" for i in range(6)]}, [6]),
}
MASK = [True, False, True, True, False, False]


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("mask", [MASK, np.array(MASK), torch.tensor(MASK)], ids=["list", "array", "tensor"])
def test_data_of_any_kind(kind: str, mask: Any) -> None:
    storage = ListStorage(10) if kind in ("lazy stack", "list", "iterator") else LazyTensorStorage(10)
    buffer, data = ReplayBuffer(storage=storage, collate_fn=lambda items: items, batch_size=2), DATA[kind]()
    check_same(buffer.extend(data, mask=mask), torch.arange(3))
    rows = [*DATA[kind]()] if kind in ("list", "iterator", "lazy stack") else DATA[kind]()
    wanted = ReplayBuffer(storage=ListStorage(10) if isinstance(rows, list) else LazyTensorStorage(10))
    chosen = [0, 2, 3]
    for place in chosen:
        wanted.add(
            rows[place]
            if not isinstance(rows, dict)
            else {"a": rows["a"][place], "b": tuple(each[place] for each in rows["b"])}
        )
    assert len(buffer) == len(wanted) == 3
    for place in range(3):
        got, expected = buffer.storage.get(place), wanted.storage.get(place)
        if isinstance(got, TensorDict):
            assert (got == expected).all()
        else:
            check_same(got, expected)


def test_a_mask_of_two_dims_writes_single_items_of_padded_rollouts() -> None:
    data = TensorDict({"x": torch.arange(12).reshape(3, 4)}, [3, 4])
    mask = torch.arange(4) < torch.tensor([[2], [4], [0]])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    check_same(buffer.extend(data, mask=mask), torch.arange(6))
    check_same(buffer[:]["x"], data["x"][mask])


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_with_two_item_dims_the_mask_has_rows(storage: Any) -> None:
    data = TensorDict({"x": torch.arange(12).reshape(2, 6)}, [2, 6])  # two environments, six steps
    for mask in (MASK, torch.tensor(MASK).expand(2, 6)):
        buffer = TensorDictReplayBuffer(storage=storage(20, ndim=2), batch_size=4)
        check_same(buffer.extend(data, mask=mask), torch.cartesian_prod(torch.arange(3), torch.arange(2)))
        check_same(buffer[:]["x"], data["x"][:, MASK])


def test_priorities_of_the_data_are_those_of_the_rows() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(10), batch_size=64
    )
    data = TensorDict({"x": torch.arange(6), "td_error": torch.tensor([0.0, 9, 1, 0, 9, 9])}, [6])
    buffer.extend(data, mask=MASK)
    assert set(buffer.sample()["x"].tolist()) == {2}


class Counting(Transform):
    def __init__(self) -> None:
        super().__init__(in_keys=[], in_keys_inv=["x"])
        self.rows = 0

    def _inv_call(self, data: Any) -> Any:
        self.rows += len(data)
        return data


def test_transforms_see_only_the_rows() -> None:
    seen = Counting()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=Compose(seen), batch_size=BATCH)
    buffer.extend(TensorDict({"x": torch.arange(6)}, [6]), mask=MASK)
    buffer.extend(TensorDict({"x": torch.arange(6)}, [6]), mask=[False] * 6)
    assert seen.rows == 3 == buffer.write_count


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("ndim", "mask", "error", "words"),
    [
        (1, [1, 0], TypeError, "mask must be bool"),
        (1, True, ValueError, r"mask needs shape \[n\]"),
        (1, [True] * 3, ValueError, r"mask has shape \[3\].*shape \[2, 6\]"),
        (1, np.ones((2, 5), bool), ValueError, r"mask has shape \[2, 5\].*shape \[2, 6\]"),
        (2, [True] * 2, ValueError, r"mask has shape \[2\].*dims 1 to 1 .*shape \[2, 6\]"),
        (2, np.arange(12).reshape(2, 6) < 8, ValueError, r"whole rows, and 4 rows have items of both values.*row 2"),
    ],
)
def test_other_masks_are_refused_and_nothing_changes(ndim: int, mask: Any, error: type, words: str) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=ndim), sampler=PrioritizedSampler(20, 1.0, 1.0))
    data = TensorDict({"x": torch.arange(12).reshape(2, 6)}, [2, 6])
    with refused(buffer, error, words):
        buffer.extend(data, mask=mask)


# ------------------------------------------------------------------ rows of any length


ANY_LENGTH: dict[str, Callable[[str], Any]] = {
    "tensors": lambda folder: LazyTensorStorage(8),
    "ragged": lambda folder: LazyTensorStorage(8, ragged=["t", ("n", "u")]),
    "shared": lambda folder: LazyTensorStorage(8, shared_prefixes=["t", ("n", "u")]),
    "anonymous": lambda folder: LazyMemmapStorage(8, ragged=["t", ("n", "u")]),
    "files": lambda folder: LazyMemmapStorage(8, scratch_dir=folder, shared_prefixes=["t", ("n", "u")]),
    "list": lambda folder: ListStorage(8),
    "lazy stack": lambda folder: LazyStackStorage(8),
    "compressed": lambda folder: CompressedListStorage(8),
}


def ragged_rows(lengths: list[int], first: int = 0) -> TensorDict:
    parts = [torch.arange(first, first + length) for length in lengths]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    texts = [f"text {length}" for length in lengths]
    below = {"u": torch.nested.nested_tensor([part * 2.0 for part in parts], layout=torch.jagged)}
    return TensorDict({"t": nested, "text": texts, "n": below, "id": torch.tensor(lengths)}, [len(lengths)])


@pytest.mark.parametrize(
    "mask", [MASK, [True] * 6, [False, False, True, False, False, False]], ids=["some", "all", "one"]
)
@pytest.mark.parametrize("kind", ANY_LENGTH)
def test_rows_of_any_length_and_texts_of_a_mask(kind: str, mask: list[bool], tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=ANY_LENGTH[kind](str(tmp_path / "rows")), batch_size=2)
    lengths = [2, 0, 5, 1, 0, 3]
    for first in (0, 100):
        kept = [length for length, keep in zip(lengths, mask, strict=True) if keep]
        buffer.empty()
        check_same(buffer.extend(ragged_rows(lengths, first), mask=mask), torch.arange(len(kept)))
        assert len(buffer) == len(kept)
        for place, length in enumerate(kept):
            row = buffer[place]
            assert row["id"] == length and row["text"] == f"text {length}"
            check_same(row["t"], torch.arange(first, first + length))
            check_same(row["n", "u"], torch.arange(first, first + length) * 2.0)


def test_a_mask_of_two_dims_does_not_fit_rows_of_any_length() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8, ragged=["t"]), batch_size=2)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    data = TensorDict({"t": jagged, "x": torch.ones(2, 3)}, [2])
    with pytest.raises(ValueError, match=r"one value for each row|mask has shape \[2, 3\]"):
        buffer.extend(data, mask=torch.ones(2, 3, dtype=torch.bool))
    assert not len(buffer)

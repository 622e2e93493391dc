"""TED data through these hooks and through those of TorchRL, where that is: the same arrays, readable by each other."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interop import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from tests.interop.ted.model import Written, differences, paths, write

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl.data.replay_buffers import utils

pytestmark = pytest.mark.filterwarnings("ignore")
OBSERVATIONS = {"obs": ((3,), torch.float32), ("agent", "pixels"): ((2, 1), torch.uint8), "count": ((), torch.int64)}
CASES = [(count, lanes) for count in (3, 4, 6) for lanes in ((), (2,))]
each_case = pytest.mark.parametrize(("count", "lanes"), CASES)
INFORMED = ("shift", "is_full", "_storage_shape")


def they_can_read(count: int, lanes: tuple[int, ...]) -> bool:
    """They fail to put back a full ring with lanes whose last row was written last."""
    return not lanes or count % 4 != 0


def written(count: int, lanes: tuple[int, ...]) -> Any:
    return write(4, lanes, count, {(1, 0), (2, 1), (4, 0), (5, 1)}, seed=count, observations=OBSERVATIONS)


def plain(data: Any, key: Any) -> Tensor:
    return data.get(key).as_subclass(Tensor)


def check_filled(back: Any, made: Written) -> None:
    """The rows that were written are there."""
    for key in paths(made.data):
        one, another = plain(back, key)[: made.filled], plain(made.data, key)[: made.filled]
        torch.testing.assert_close(one, another, rtol=0, atol=0, equal_nan=True)


def check_equal(mine: Any, theirs: Any, informed: tuple[str, ...] = INFORMED) -> None:
    """The same entries; NaN is NaN."""
    assert set(paths(mine)) == set(paths(theirs))
    for key in paths(mine):
        one, another = plain(mine, key), plain(theirs, key)
        if one.is_nested:
            one, another = (torch.cat([row.reshape(-1) for row in each.unbind(0)]) for each in (one, another))
        torch.testing.assert_close(one, another, rtol=0, atol=0, equal_nan=True)
    for key in informed:
        assert mine.get_non_tensor(key) == theirs.get_non_tensor(key)


@each_case
def test_hooks_make_the_same_and_read_each_other(count: int, lanes: tuple[int, ...], tmp_path: Path) -> None:
    made = written(count, lanes)
    mine, theirs = made.told(TED2Flat())(made.data), made.told(utils.TED2Flat())(made.data)
    check_equal(mine, theirs)
    filed = made.told(utils.TED2Flat())(made.data, path=tmp_path / "flat")
    for flat in (theirs, filed):
        assert not differences(Flat2TED()(flat), made.data)
    nested, other_nested = (made.told(hook)(made.data) for hook in (TED2Nested(), utils.TED2Nested()))
    check_equal(nested, other_nested)
    parts, other_parts = made.told(H5Split())(nested), made.told(utils.H5Split())(other_nested)
    check_equal(parts, other_parts)
    if not (made.is_full and made.shift == 4):  # there a full ring has a row too few if the last row is the newest
        assert not differences(Nested2TED()(other_nested), made.data)
        assert not differences(Nested2TED()(H5Combine()(other_parts)), made.data)
        out = torch.zeros_like(made.data)
        check_filled(utils.Flat2TED()(mine, out=out), made)
    if they_can_read(count, lanes):
        check_filled(utils.Flat2TED()(mine), made)
        check_filled(utils.Nested2TED()(utils.H5Combine()(parts)), made)
        check_filled(utils.Nested2TED()(nested), made)

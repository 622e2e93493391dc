"""`add` and `extend(lanes_first=True)` are `extend` with the same rows in another shape: same state, same program."""

from typing import Any

import jax
import numpy as np
import pytest

from fbuf import Buffer, Fifo, HighestRanked, PerTrajectory, Prioritized, Slices, Trajectories
from tests.fbuf.compiled import jit
from tests.fbuf.every_pair import items
from tests.fbuf.model import assert_same

pytestmark = pytest.mark.usefixtures("device")

add = jit(Buffer.add, static_argnums=0)
extend = jit(Buffer.extend, static_argnums=0, static_argnames="lanes_first")
ALL = [
    Buffer(5, Fifo(), lanes=(2,)),
    pytest.param(Buffer(5, Prioritized(), writer=HighestRanked("rank")), marks=pytest.mark.slow),
    pytest.param(
        Buffer(5, Slices(2, PerTrajectory()), lanes=(2, 3), trajectories=Trajectories("done")), marks=pytest.mark.slow
    ),
]


def written(buffer: Buffer, count: int) -> Any:
    """A batch of rows [count, *lanes, ...], and an empty state for it."""
    ids = np.arange(count)[:, None] + 1000 * np.arange(buffer.items_per_row)
    batch = jax.tree.map(lambda leaf: leaf.reshape(count, *buffer.lanes, *leaf.shape[2:]), items(ids))
    return batch, buffer.init(items(0))


@pytest.mark.parametrize("buffer", ALL, ids=repr)
def test_rows_are_the_same_one_by_one_and_in_the_order_of_lanes(buffer: Buffer) -> None:
    batch, state = written(buffer, 7)
    turned = jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, len(buffer.lanes)), batch)
    by_time = extend(buffer, state, batch)
    by_lane = extend(buffer, state, turned, lanes_first=True)
    assert_same(by_lane, (by_time[0], np.moveaxis(by_time[1], 0, len(buffer.lanes))))

    row = jax.tree.map(lambda leaf: leaf[0], batch)
    state, slots = add(buffer, state, row)
    assert slots.shape == buffer.lanes
    one = extend(buffer, written(buffer, 1)[1], jax.tree.map(lambda leaf: leaf[None], row))
    assert_same((state, slots), (one[0], one[1][0]))


def test_one_item_may_be_of_plain_numbers() -> None:
    buffer = Buffer(3)
    item = {"a": 1.5, "b": 2, "c": np.ones(2)}
    state, _ = jax.eval_shape(lambda: buffer.add(buffer.init(item), item))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in state.items.items()} == {
        "a": ((3,), np.float32),
        "b": ((3,), np.int32),
        "c": ((3, 2), np.float32),
    }

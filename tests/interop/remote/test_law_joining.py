"""Parts of a batch put together, and the indices of its items."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass

from interop import SliceSampler
from interop.remote.joining import Drawn, joined
from interop.remote.places import to_global, to_local
from interop.samplers.shares import ShardContents
from tests.interop.remote.sharded import Sharded, buffers_of, key_of, rows

SHARE = ShardContents(9, 9.0, 1.0)


def part(data: Any, index: Any, lengths: Any = None, share: ShardContents = SHARE, **info: Any) -> Drawn:
    index = torch.as_tensor(index)
    return Drawn(data, {"index": index, **info}, share, np.ones(len(index), int) if lengths is None else lengths, False)


@tensorclass
class Pair:
    a: torch.Tensor


KINDS: dict[str, Any] = {
    "tensor": lambda at: at * 2.5,
    "other dtypes": lambda at: (
        *((at[:, None] / 2 * torch.ones(2)).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.complex128)),
        at.float().to(torch.float8_e5m2),
    ),
    "tuple": lambda at: (at, {"two": at.double()}),
    "a list of items": lambda at: [{"number": int(each)} for each in at],
    "a list of columns": lambda at: [at, at + 0.5, at],
    "tensordict": lambda at: TensorDict(a=at, deep=TensorDict(b=at.bool(), batch_size=len(at)), batch_size=len(at)),
    "tensorclass": lambda at: Pair(a=at, batch_size=len(at)),
    "one text": lambda at: TensorDict(a=at, b=NonTensorData("x", batch_size=len(at)), batch_size=len(at)),
    "texts": lambda at: TensorDict(a=NonTensorStack(*[str(int(each)) for each in at]), batch_size=len(at)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_items_and_their_info_stay_together(kind: str) -> None:
    make = KINDS[kind]
    index = [torch.tensor([3, 1, 4, 1]), torch.tensor([50, 59]), torch.tensor([92])]
    data, info = joined([SHARE] * 4, [None, *(part(make(each), each) for each in index)], key_of(0))
    assert sorted(info["index"].tolist()) == [1, 1, 3, 4, 50, 59, 92]
    assert info["index"].tolist() != torch.cat(index).tolist()
    expected = make(info["index"])
    assert type(data) is type(expected)
    if kind == "texts":
        data, expected = list(data["a"]), list(expected["a"])
    leaves = [torch.utils._pytree.tree_leaves(each) for each in (data, expected)]
    for one, other in zip(*leaves, strict=True):
        if isinstance(one, torch.Tensor):
            one, other = one.to(torch.complex128), other.to(torch.complex128)  # float8 has no comparison
        assert torch.as_tensor(one == other).all()


def test_nested_tensors_are_joined_row_by_row() -> None:
    index = [torch.tensor([3, 1, 4]), torch.tensor([7, 2])]
    made = [
        torch.nested.nested_tensor([torch.ones(k) * k for k in each.tolist()], layout=torch.jagged) for each in index
    ]
    data, info = joined([SHARE] * 2, [part(*each) for each in zip(made, index, strict=True)], key_of(1))
    assert [row.tolist() for row in data.unbind()] == [[float(k)] * k for k in info["index"].tolist()]


def test_a_batch_of_one_shard_is_not_copied() -> None:
    data = torch.arange(3.0)
    assert joined([SHARE] * 2, [None, part(data, [4, 5, 6])], key_of(0))[0] is data


def test_parts_are_left_as_they_are() -> None:
    array = np.arange(6.0)
    data = torch.from_numpy(array)
    found, _ = joined([SHARE] * 2, [part(data, range(6)), part(data, range(6))], key_of(0))
    found += 1
    assert array.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        (torch.zeros(2), torch.zeros(2, 1), "different kinds"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), "different kinds"),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, "only some have .*'a'"),
        (torch.zeros(3), torch.zeros(2), r"drew \[2, 2\] rows and returned \[3, 2\]"),
    ],
)
def test_parts_that_do_not_fit(one: Any, other: Any, match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        joined([SHARE] * 2, [part(one, [0, 1]), part(other, [0, 1])], key_of(0))
    with pytest.raises(TypeError, match="cannot be joined if they are a object"):
        joined([SHARE] * 2, [part(object(), [0, 1]), part(object(), [0, 1])], key_of(0))


@pytest.mark.parametrize("padded", [False, True])
def test_slices_stay_whole_where_some_are_short(padded: bool) -> None:
    sharded = Sharded(3, buffers_of(lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=padded)))
    for shard, length in zip(sharded.shards, (2, 6, 3), strict=True):
        shard.call("extend", (rows(np.arange(18) + 1000 * shard.number, [length] * (18 // length)),))
    for _ in range(8):
        data, info = sharded.sample(40)
        ends = data["next", "truncated"].squeeze(1)
        assert torch.equal(ends, info["next", "truncated"].squeeze(1))
        x, lengths = data["x"].tolist(), np.diff(np.flatnonzero(ends.numpy()), prepend=-1)
        mask = data.get(("collector", "mask"), None)
        if padded:
            assert mask is not None
            assert mask.shape == ends.shape == (40,)
            x, lengths = data["x"][mask].tolist(), mask.reshape(10, 4).sum(1).numpy()
            assert torch.equal(mask, info["collector", "mask"])
        assert len(lengths) == 10
        assert set(lengths) <= {2, 3, 4}
        for each in np.split(np.array(x), lengths.cumsum()[:-1]):
            assert (np.diff(each) == 1).all()
            assert len(each) == {0: 2, 1: 4, 2: 3}[each[0] // 1000]


def test_rows_that_are_trajectories_have_one_index_for_all_their_steps() -> None:
    sharded = Sharded(2, buffers_of(lambda: None))
    for shard in sharded.shards:
        x = torch.arange(5)[:, None].expand(5, 4) + 1000 * shard.number
        shard.call("extend", (TensorDict(x=x, batch_size=(5, 4)),))
    data, info = sharded.sample(16)
    assert torch.equal(data["index"], info["index"][:, None].expand(16, 4))
    assert torch.equal(data["x"] % 1000 + 40 * (data["x"] // 1000), data["index"])


INDEX = st.integers(0, 9)


@given(st.lists(st.tuples(st.integers(0, 3), INDEX, INDEX), max_size=12))
def test_an_index_comes_home(items: list[tuple[int, int, int]]) -> None:
    shard, slot, lane = (torch.tensor([item[k] for item in items], dtype=torch.int64) for k in range(3))
    for form in (lambda s, t: s, lambda s, t: torch.stack([s, t], -1), lambda s, t: (s, t), lambda s, t: (s,)):
        every = form(slot + 10 * shard, lane)
        for number, (at, local) in enumerate(to_local(every, 4, 10)):
            assert torch.equal(at, (shard == number).nonzero().squeeze(1))
            expected = form(slot[at], lane[at])
            back = to_global(local, number, 10)
            for found, wanted in ((local, expected), (back, form((slot + 10 * shard)[at], lane[at]))):
                pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
                assert all(torch.equal(*pair) for pair in pairs)


def test_items_that_were_not_kept_and_indices_of_no_shard() -> None:
    assert to_global(torch.tensor([-1, 3]), 2, 10).tolist() == [-1, 23]
    assert (to_global(-1, 2, 10), to_global(3, 2, 10), to_global(None, 2, 10)) == (-1, 23, None)
    assert [at.tolist() for at, _ in to_local(torch.tensor([-1, 13, 3]), 2, 10)] == [[2], [1]]
    for wrong in (20, -2):
        with pytest.raises(IndexError, match=f"{wrong} is out of range: 2 shards have 20 slots"):
            to_local(torch.tensor([wrong, wrong]), 2, 10)

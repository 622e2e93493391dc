"""Hash modules and queries: what they return, which rows they tell apart, what a state dict restores."""

import copy
import io
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from interop import BinaryToDecimal, HashToInt, QueryModule, RandomProjectionHash, SipHash
from interop.maps.hashes import DEFAULT_COMPONENTS

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Constant(nn.Module):
    def forward(self, x):
        return x.new_zeros(len(x), dtype=torch.int64)


def keys(*batch, **entries):
    return TensorDict({name: torch.as_tensor(value) for name, value in entries.items()}, list(batch))


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_bits_are_read_in_groups_that_are_summed():
    rows = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 0]])
    told = BinaryToDecimal(4, "cpu", torch.int32)(rows)
    assert told.tolist() == [3, 2] and told.dtype == torch.int64
    assert BinaryToDecimal(8)(rows.bool()).tolist() == [33, 2]
    signs = BinaryToDecimal(2, "cpu", torch.float32, convert_to_binary=True)(torch.tensor([[[0.5, -1], [0, 0.1]]] * 3))
    assert signs.tolist() == [2.0, 1.0] * 3 and signs.dtype == torch.float32
    assert BinaryToDecimal(4)(rows[0]).shape == (1,)
    with pytest.raises(ValueError, match="multiple of num_bits=4"):
        BinaryToDecimal(4)(torch.zeros(3, 6))
    with pytest.raises(ValueError, match="num_bits must be"):
        BinaryToDecimal(9, "cpu", torch.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_rows_and_only_they_have_equal_hashes(dtype):
    bits = (torch.arange(24) % 2).reshape(4, 3, 2)
    bits[2] = 1 - bits[2]
    rows = bits.to(dtype)
    found = SipHash()(rows.requires_grad_(dtype.is_floating_point))
    assert found.dtype == torch.int64 and found.shape == (4,)
    assert found[0] == found[1] == found[3] != found[2]
    assert SipHash(as_tensor=False)(rows) == [
        bytes(row.detach().contiguous().view(torch.uint8).flatten()) for row in rows
    ]
    assert SipHash()(rows.mT)[0] != found[0] and SipHash()(rows[:0]).shape == (0,)


def test_hashes_are_of_bits():
    assert len(SipHash()(torch.tensor([0.0, -0.0, 1.0])).unique()) == 3
    large = torch.tensor([1e38, 2e38], dtype=torch.bfloat16)  # both infinite as float16
    assert len(SipHash()(large).unique()) == 2
    for module in (SipHash(), RandomProjectionHash()):
        with pytest.raises(TypeError, match="no rows"):
            module(torch.tensor(1.0))


def test_a_projection_is_drawn_once_and_restored():
    x = torch.randn(300, 20)
    module = RandomProjectionHash(n_components=5, dtype_cast=torch.float32, init_method=nn.init.uniform_)
    other = RandomProjectionHash(n_components=5, dtype_cast=torch.float32)
    assert RandomProjectionHash().n_components == DEFAULT_COMPONENTS == 16
    found = module(x)
    assert module.transform.shape == (20, 5) and module.transform.min() >= 0
    assert torch.equal(torch.cat([module(row) for row in x.split(7)]), found)
    other.load_state_dict(through_a_file(module.state_dict()))
    assert torch.equal(other(x), found)
    other.load_state_dict(RandomProjectionHash(n_components=5).state_dict())  # one that was not fitted
    assert other.transform is None
    near = RandomProjectionHash()
    assert torch.equal(near(x), near(x * (1 + 1e-7)))
    assert [len(row) for row in RandomProjectionHash(n_components=3, as_tensor=False)(torch.randn(4))] == [6] * 4
    with pytest.raises(ValueError, match="takes 20 features"):
        module(x[:, 1:])


def test_hash_values_are_numbered_in_the_order_of_appearance():
    numbers = HashToInt()
    assert numbers(torch.tensor([5, 6])).tolist() == [0, 0] and bool(numbers)
    assert numbers(torch.tensor([[5, -6], [5, 2**62]]), extend=True).tolist() == [[0, 1], [0, 2]]
    assert numbers(torch.tensor([9, -6, 8], dtype=torch.int32)).tolist() == [3, 1, 3]
    assert numbers(torch.tensor(5.0, dtype=torch.float16)).tolist() == 0
    for copied in (copy.deepcopy(numbers), pickle.loads(pickle.dumps(numbers)), HashToInt()):
        copied.load_state_dict(through_a_file(numbers.state_dict()))
        assert copied(torch.tensor([2**62, 5, 1]), extend=True).tolist() == [2, 0, 3] and len(copied) == 4
    assert len(numbers) == 3
    with pytest.raises(ValueError, match="whole numbers"):
        numbers(torch.tensor([0.5]))
    numbers.clear()
    assert numbers(torch.tensor([8]), extend=True).tolist() == [0]


@pytest.mark.parametrize(
    "module", [None, Constant(), RandomProjectionHash(n_components=1), lambda x: x.new_ones(len(x))]
)
def test_no_hash_module_merges_rows(module):
    query = QueryModule(["a", ("b", "c")], hash_module=module)
    x = torch.arange(12.0).reshape(6, 2) * 1e-3
    td = keys(6, a=x).update({"b": keys(6, c=torch.arange(6) // 2)})
    assert query(td) is td
    assert td["_index"].tolist() == list(range(6)) and td["_index"].dtype == torch.int64
    assert td["_hash"].shape == (6,)
    again = td.exclude("_index", "_hash")[[3, 1, 3]].reshape(3, 1)
    assert (
        query(again, extend=False, write_hash=False)["_index"].tolist() == [[3], [1], [3]]
        and again.get("_hash", None) is None
    )
    unknown = keys(a=x[0] + 1).update({"b": keys(c=0)})
    assert query(unknown, extend=False)["_index"] == 6 == query.size
    assert query(unknown)["_index"].shape == () and query.size == 7
    assert query(td[:0])["_index"].shape == (0,)


def test_a_query_writes_where_it_is_told():
    query = QueryModule(["a"], "row", ("nested", "hash"), clone=True, aggregator=SipHash())
    td = keys(2, 3, a=torch.zeros(2, 3, 4))
    out = query(td)
    assert out is not td and list(td.keys()) == ["a"]
    assert out["row"].tolist() == [[0] * 3] * 2 and out["nested", "hash"].shape == (2, 3)
    assert query.in_keys == ["a"] and query.out_keys == ["row", ("nested", "hash")]
    with pytest.raises(RuntimeError, match="locked"):
        query(td.lock_(), clone=False)


def test_a_hash_to_int_of_the_users_decides_which_rows_are_equal():
    query = QueryModule(["a"], hash_module=[lambda x: x[:, 0] // 10], hash_to_int=HashToInt())
    assert query(keys(4, a=[[12], [3], [19], [4]]))["_index"].tolist() == [0, 1, 0, 1]
    assert query(keys(1, a=[[99]]), extend=False)["_index"].tolist() == [2] and not query.size
    query.truncate(0)
    assert len(query.hash_to_int) == 0
    with pytest.raises(TypeError, match=r"nn\.Module"):
        QueryModule(["a"], hash_to_int=dict)


def test_a_state_dict_restores_a_query_bit_for_bit():
    query = QueryModule(["a", "b"], hash_module=[RandomProjectionHash(), SipHash()])
    td = keys(9, a=torch.randn(9, 3, dtype=torch.float16), b=torch.arange(9) % 2)
    query(td)
    other = QueryModule(["a", "b"], hash_module=[RandomProjectionHash(), SipHash()])
    other.load_state_dict(through_a_file(query.state_dict()))
    for each in (other, copy.deepcopy(query), pickle.loads(pickle.dumps(query))):
        again = each(td.select("a", "b").flip(0), extend=False)
        assert torch.equal(again["_index"], td["_index"].flip(0)) and torch.equal(again["_hash"], td["_hash"].flip(0))
        with pytest.raises(ValueError, match="'a' is torch"):
            each(keys(1, a=torch.zeros(1, 3), b=[0]))
    query.truncate(4)
    assert query.indices(td).tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4] and other.size == 9
    twice = query.state_dict()
    query.truncate(0)
    assert query(keys(1, a=torch.zeros(1, 3), b=[[0.5]]))["_index"].tolist() == [0]  # of other shapes and dtypes
    twice["_extra_state"]["keys"] = twice["_extra_state"]["keys"][[0, 0]]
    with pytest.raises(ValueError, match="1 are different"):
        other.load_state_dict(twice)


@pytest.mark.parametrize(
    ("td", "error", "message"),
    [
        (keys(2, b=[0, 1]), KeyError, "'a' is missing; there are 'b'"),
        (TensorDict({"a": {"x": torch.zeros(2)}}, [2]), TypeError, "must be a tensor"),
        (
            keys(2, a=torch.zeros(2, 3)),
            ValueError,
            r"shape \[3\] in each row, the stored ones are torch.float32 of \[2\]",
        ),
        (keys(2, a=torch.zeros(2, 2, dtype=torch.int32)), ValueError, "torch.int32"),
    ],
)
def test_keys_that_do_not_fit_are_refused(td, error, message):
    query = QueryModule(["a"])
    query(keys(2, a=torch.zeros(2, 2)))
    for extend in (True, False):
        with pytest.raises(error, match=message):
            query(td, extend=extend)
    assert query.size == 1 and td.get("_index", None) is None


def test_modules_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="in_keys"):
        QueryModule([])
    td = keys(3, a=[1, 2, 3])
    with pytest.raises(TypeError, match="list"):
        QueryModule(["a"], hash_module=SipHash(as_tensor=False))(td)
    query = QueryModule(["a"], hash_module=lambda x: x[:2])
    with pytest.raises(ValueError, match="each of 3 rows"):
        query(td)
    assert not query.size

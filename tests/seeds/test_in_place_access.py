"""Rows read and written in place, in the order of their slots, through every method that the documentation names."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage], ids=["memory", "memmap"])
def storage(request):
    return request.param


def rows(start: int, stop: int) -> TensorDict:
    ids = torch.arange(float(start), float(stop))
    return TensorDict({"a": ids, "next": {"b": ids[:, None].expand(-1, 2).clone()}}, [stop - start])


@pytest.fixture(params=[5, 8], ids=["filled", "partly filled"])
def rb(storage, request):
    rb = TensorDictReplayBuffer(storage=storage(request.param), batch_size=3)
    rb.extend(rows(0, 5))
    return rb


def a_of(rb):
    """What samples see, slot by slot."""
    sample = rb.sample()
    assert torch.equal(sample["a"], rb["a"][sample["index"]])
    return rb["a"].tolist()


# ------------------------------------------------------------------ read_all_in_order, write_all


def test_read_all_in_order(rb):
    assert rb.read_all_in_order()["a"].tolist() == [0, 1, 2, 3, 4]
    assert rb.read_all_in_order(end=2)["a"].tolist() == [0, 1]
    assert (rb.read_all_in_order() == rb[:]).all()


def test_read_all_in_order_is_by_slot_and_not_by_time(storage):
    rb = TensorDictReplayBuffer(storage=storage(4))
    rb.extend(rows(0, 6))
    assert rb.read_all_in_order()["a"].tolist() == [4, 5, 2, 3]


def test_write_all(rb):
    rb.write_all(rows(10, 15))
    assert a_of(rb) == [10, 11, 12, 13, 14]
    rb.write_all(rows(20, 22), end=2)
    assert a_of(rb) == [20, 21, 12, 13, 14]
    assert rb["next", "b"][:, 1].tolist() == [20, 21, 12, 13, 14]
    assert rb["index"].tolist() == [0, 1, 2, 3, 4]
    assert (len(rb), rb.write_count) == (5, 5)


def test_write_all_of_another_size_is_refused(storage):
    rb = TensorDictReplayBuffer(storage=storage(5))
    rb.extend(rows(0, 5))
    for data, end in ((rows(0, 4), None), (rows(10, 13), 2)):
        with pytest.raises(RuntimeError):
            rb.write_all(data, end=end)
        assert rb["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("end", [None, 2])
def test_write_all_to_a_list(end):
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=lambda items: items)
    rb.extend(["a", "b", "c"])
    rb.write_all([1, 2], end=end)
    assert rb.read_all_in_order() == [1, 2, "c"]


# ------------------------------------------------------------------ set_, set_at_, update_


def test_set_(rb):
    assert rb.set_("a", torch.full((5,), 7.0)) is rb
    assert a_of(rb) == [7] * 5
    rb.set_(("next", "b"), torch.ones(5, 2))
    assert rb["next", "b"].tolist() == [[1, 1]] * 5
    assert (len(rb), rb.write_count) == (5, 5)


@pytest.mark.parametrize("index", [1, -4, slice(1, 2), [1], torch.tensor([1]), torch.arange(5) == 1], ids=repr)
def test_set_at_(rb, index):
    value = torch.tensor(7.0) if isinstance(index, int) else torch.tensor([7.0])
    assert rb.set_at_("a", value, index) is rb
    assert a_of(rb) == [0, 7, 2, 3, 4]
    rb.set_at_(("next", "b"), value[..., None].expand(*value.shape, 2), index)
    assert rb["next", "b"][:, 0].tolist() == [0, 7, 2, 3, 4]


@pytest.mark.parametrize("make", [dict, TensorDict], ids=["dict", "tensordict"])
def test_update_(rb, make):
    values = {"a": torch.full((5,), 7.0), ("next", "b"): torch.ones(5, 2)}
    given = values if make is dict else TensorDict({"a": values["a"], "next": {"b": values["next", "b"]}}, [5])
    assert rb.update_(given) is rb
    assert a_of(rb) == [7] * 5
    assert rb["next", "b"].tolist() == [[1, 1]] * 5


def test_update_of_some_keys(rb):
    given = TensorDict({"a": torch.full((5,), 7.0), "next": {"b": torch.ones(5, 2)}}, [5])
    rb.update_(given, keys_to_update=[("next", "b")])
    assert a_of(rb) == [0, 1, 2, 3, 4]
    assert rb["next", "b"].tolist() == [[1, 1]] * 5
    rb.update_(given, keys_to_update=["a"], clone=True)
    assert a_of(rb) == [7] * 5


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (lambda rb: rb.set_("c", torch.zeros(5)), KeyError),
        (lambda rb: rb.set_("a", torch.zeros(4)), RuntimeError),
        (lambda rb: rb.set_at_("c", torch.zeros(1), [0]), KeyError),
        (lambda rb: rb.set_at_("a", torch.zeros(3), [0, 1]), RuntimeError),
        (lambda rb: rb.set_at_("a", torch.zeros(1), [5]), IndexError),
        (lambda rb: rb.update_({"a": torch.zeros(5), "c": torch.zeros(4)}), RuntimeError),
        (lambda rb: rb.update_({"a": torch.zeros(5), ("next", "b"): torch.zeros(5, 3)}), RuntimeError),
    ],
)
def test_what_does_not_fit_changes_nothing(rb, edit, error):
    with pytest.raises(error):
        edit(rb)
    assert a_of(rb) == [0, 1, 2, 3, 4]
    assert rb["next", "b"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_in_place_methods_pass_transforms_by(storage):
    rb = TensorDictReplayBuffer(storage=storage(5), transform=lambda td: td.set("a", td["a"] + 100))
    rb.extend(rows(0, 5))
    rb.set_("a", torch.zeros(5))
    assert rb["a"].tolist() == [100] * 5
    assert rb.storage[:]["a"].tolist() == [0] * 5


# ------------------------------------------------------------------ next, initialized, write_count


def test_next(rb):
    seen = set()
    for _ in range(50):
        data = rb.next()
        assert data.batch_size == (3,)
        assert data.device is None
        seen |= set(data["a"].tolist())
    assert seen == {0, 1, 2, 3, 4}


def test_next_without_a_batch_size_is_refused(storage):
    rb = TensorDictReplayBuffer(storage=storage(5))
    rb.extend(rows(0, 5))
    with pytest.raises(RuntimeError, match="batch_size"):
        rb.next()


def test_initialized(storage):
    assert TensorDictReplayBuffer(storage=storage(5)).initialized
    late = TensorDictReplayBuffer(storage=lambda: storage(5), delayed_init=True)
    assert not late.initialized
    assert len(late) == 0
    assert late.initialized
    by_factory = TensorDictReplayBuffer(storage=storage(5), transform_factory=lambda: lambda td: td)
    assert not by_factory.initialized
    by_factory.extend(rows(0, 3))
    assert by_factory.initialized and len(by_factory) == 3


def test_write_count(storage):
    rb = TensorDictReplayBuffer(storage=storage(4))
    assert rb.write_count == 0
    rb.extend(rows(0, 3))
    rb.add(rows(3, 4)[0])
    rb.extend(rows(4, 13))
    assert (rb.write_count, len(rb)) == (13, 4)
    rb[0] = rows(0, 1)[0]
    assert rb.write_count == 13
    rb.empty(empty_write_count=False)
    assert (rb.write_count, len(rb)) == (13, 0)
    rb.empty()
    assert rb.write_count == 0

"""Lists come back as they were; items that are alike are described once."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from interop.checkpoint.lists import load_items, save_items
from interop.checkpoint.rule import Rule
from tests.interop.checkpoint import saved_values as every
from tests.interop.checkpoint.saved_values import Settings, Step, same, through_json


def kept(items):
    return load_items(through_json(save_items(items)))


def item(n):
    """One of five structures, with shapes of their own."""
    return [
        TensorDict({"a": torch.full((n % 3, 2), float(n)), "s": f"s{n}", "td": TensorDict({"b": torch.tensor(n)}, [])}, []),
        {"text": "t" * n, "n": n * 2**60, "x": np.arange(n, dtype=np.int16), "f": n / 7 if n % 2 else float("nan")},
        f"text {n}",
        Step(obs=torch.full((2,), n), note=str(n), batch_size=[2]),
        (n, None, b"b" * (n % 5), Settings(float(n)), True, np.float32(n), np.array(["é" * (n % 4)])),
    ][n % 5]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 2, 5, 45, 300])
def test_lists_of_several_structures(count):
    items = [item(n) for n in range(count)]
    assert same(kept(items), items)


@given(st.lists(every.values, max_size=12), st.lists(st.integers(0, 11), max_size=40))
def test_lists_of_anything(values, order):
    items = values + [values[place % len(values)] for place in order if values]
    assert same(kept(items), items)


def test_items_that_are_alike_are_described_once():
    items = [TensorDict({"a": torch.randn(3), "b": torch.tensor(n), "s": str(n)}, []) for n in range(1000)]
    tree = save_items(items)
    assert len(tree["groups"]) == 1 and tree["group"].dtype == np.uint8
    stacked = [column["stack"].shape for column in tree["groups"][0]["columns"] if "stack" in column]
    assert stacked == [(1000, 3), (1000,), (1000,)]  # the last says that an entry is no tensor
    assert same(load_items(tree), items)


def test_odd_items_share_columns():
    items = [{f"k{n}": torch.full((n,), n), "t": "x" * 5000} for n in range(200)]
    tree = save_items(items)
    assert len(tree["pools"]) == 2 and not any("columns" in group for group in tree["groups"])
    assert same(kept(items), items)


def test_items_do_not_share_memory():
    one = torch.zeros(3)
    tree = save_items([one] * 20)
    back = load_items(tree)
    back[0][:] = 1
    one[:] = 7
    assert not torch.stack(back[1:]).any()
    wide = load_items(save_items([torch.zeros(10_000)] * 50))
    assert max(each.untyped_storage().nbytes() for each in wide) < 2**19
    ragged = load_items(save_items([torch.zeros(10_000 + n) for n in range(50)]))
    assert max(each.untyped_storage().nbytes() for each in ragged) < 2**19
    assert [each.numel() for each in ragged] == list(range(10_000, 10_050))


def test_many_items_take_no_time():
    def seconds(count: int) -> float:
        data = {"obs": torch.randn(count, 4), "action": torch.arange(count)}
        items = list(
            TensorDict({**data, "next": TensorDict({"reward": torch.randn(count, 1)}, [count])}, [count]).unbind(0)
        )
        best = 1e9
        for _ in range(3):
            start = time.thread_time()
            back = load_items(save_items(items))
            best = min(best, time.thread_time() - start)
        assert len(back) == count
        assert all(same(back[place], items[place].clone()) for place in range(0, count, 97))
        return best

    assert seconds(10_000) < 40 * seconds(1000)  # what grows with the square would take 100 times as long


def test_an_item_that_cannot_be_saved_is_named():
    items = [{"a": 1}] * 7 + [{"a": 1, "env": [object()]}]
    with pytest.raises(TypeError, match=r"item 7, key 'env', element 0: an object of type object cannot be saved"):
        save_items(items)
    with pytest.raises(ValueError, match=r"item 1, element 0: .*contains itself"):
        looped = []
        looped.append(looped)
        save_items([1, looped])


def test_pickles_are_refused_before_anything_is_read():
    items = [{"a": n, "b": Settings(0.0) if n < 20 else {n}} for n in range(23)]
    tree = through_json(save_items(items, allow_pickle=True))
    with pytest.raises(CheckpointMismatch, match="allow_pickle=True"):
        load_items(tree)
    assert load_items(tree, Rule(allow_pickle=True))[20:] == items[20:]
    tree["pools"] = [pool for pool in tree["pools"] if pool["leaf"]["kind"] != "pickled"]
    with pytest.raises(CheckpointError):
        load_items(tree)


def test_there_may_not_be_more_than_fit():
    tree = save_items(["a"] * 5)
    assert load_items(tree, most=5) == ["a"] * 5
    with pytest.raises(CheckpointCorrupt, match="5 items where there is room for 4"):
        load_items(tree, most=4)


def _with(tree, *path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = _with(copy[path[0]], *path[1:], value=value)
    return copy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("group",), np.zeros(3, np.uint8)),
        (("group",), np.full(46, 9, np.uint8)),
        (("group",), np.zeros(46, np.int64)),
        (("group",), np.zeros((46, 1), np.uint8)),
        (("group",), [0] * 46),
        (("groups",), []),
        (("pools",), []),
        (("pools", 0, "count"), 0),
        (("pools", 0, "count"), 2**62),
        (("pools", 0, "leaf"), {"kind": "none"}),
        (("pools", 0, "leaf", "kind"), "pickled"),
        (("groups", 0, "form"), {"kind": "none"}),
        (("groups", 0, "columns"), []),
        (("groups", 0, "columns", 0), None),
        (("groups", 0, "form", "keys"), ["a", "a", "td"]),
        (("groups", 0, "form", "batch"), [5]),
        (("groups", 0, "form", "batch"), [2**62]),
    ],
    ids=str,
)
def test_trees_that_do_not_agree_are_refused(path, value):
    tree = save_items([item(0 if n < 40 else n) for n in range(46)])
    assert {"pools", "groups"} <= tree.keys() and tree["pools"]
    with pytest.raises(CheckpointError):
        load_items(_with(tree, *path, value=value))


def test_a_stack_in_a_list_keeps_its_dim():
    items = [lazy_stack([TensorDict({"a": torch.ones(2, n + 1)}, [2]) for n in range(3)], 1) for _ in range(12)]
    assert same(kept(items), items)


def test_tensors_go_where_they_are_wanted():
    items = [{"x": torch.ones(2), "td": TensorDict({"y": torch.ones(1)}, [], device="cpu")} for _ in range(12)]
    back = load_items(save_items(items), device=torch.device("meta"))
    assert all(each["x"].is_meta and each["td"]["y"].is_meta and each["td"].device.type == "meta" for each in back)

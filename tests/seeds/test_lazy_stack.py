"""Tensordicts of unlike shapes in one buffer."""

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from interop import LazyStackStorage, ReplayBuffer


def test_items_of_unlike_shapes_are_sampled_as_one():
    rb = ReplayBuffer(storage=LazyStackStorage(max_size=1000, stack_dim=-1))
    data0 = TensorDict(a=torch.randn((10,)), b=torch.rand(4), c="a string!")
    data1 = TensorDict(a=torch.randn((11,)), b=torch.rand(4), c="another string!")
    assert rb.add(data0) == 0
    assert rb.add(data1) == 1
    sample, info = rb.sample(10, return_info=True)
    assert isinstance(sample, LazyStackedTensorDict)
    assert sample.batch_size == (10,) and sample.stack_dim == 0 and sample.device is None
    assert "a: Tensor(shape=torch.Size([10, -1])" in repr(sample)
    kept = [data0, data1]
    assert sample["b"].shape == (10, 4)
    assert torch.equal(sample["b"], torch.stack([kept[slot]["b"] for slot in info["index"]]))
    assert isinstance(sample.get("c"), NonTensorStack)
    assert sample["c"] == [kept[slot]["c"] for slot in info["index"]]
    for drawn, slot in zip(sample.get("a", as_list=True), info["index"], strict=True):
        assert torch.equal(drawn, kept[slot]["a"])


def test_nested_tensors_are_made_of_unlike_shapes():
    rb = ReplayBuffer(storage=LazyStackStorage(max_size=1000))
    rb.extend([TensorDict(a=torch.full((length,), float(length))) for length in (2, 3, 5)])
    dense = rb[:].densify(layout=torch.jagged)
    assert dense["a"].is_nested
    assert [row.tolist() for row in dense["a"].unbind()] == [[2.0] * 2, [3.0] * 3, [5.0] * 5]

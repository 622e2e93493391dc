"""What can be stored where: any objects in a list, images in a tensor, tensordicts and pytrees in files."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage


def test_a_list_holds_anything():
    rb = ReplayBuffer(storage=ListStorage(10))
    assert rb.add("a string!") == 0  # first element will be a string
    assert rb.extend([30, None]).tolist() == [1, 2]  # element [1] is an int, [2] is None
    assert len(rb) == 3
    assert rb[0] == "a string!"
    assert rb[1] == 30
    assert rb[2] is None


def test_a_tensor_holds_images():
    container = torch.empty(10, 3, 64, 64, dtype=torch.uint8)
    rb = ReplayBuffer(storage=TensorStorage(container))
    img = torch.randint(255, (3, 64, 64), dtype=torch.uint8)
    assert rb.add(img) == 0
    assert torch.equal(rb[0], img)
    assert torch.equal(container[0], img)
    assert rb[0].dtype == torch.uint8
    assert len(rb) == 10  # memory that is given counts as full


def test_files_hold_tensordicts():
    rb_td = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=1)  # max 10 elements stored
    item = TensorDict(
        {"img": torch.randint(255, (3, 64, 64), dtype=torch.uint8), "labels": torch.randint(100, ())}, batch_size=[]
    )
    assert rb_td.add(item) == 0
    assert len(rb_td) == 1
    assert rb_td[0].batch_size == ()
    assert (rb_td[0] == item).all()
    assert rb_td[0]["img"].dtype == torch.uint8
    assert rb_td[0]["labels"].shape == ()


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_files_and_memory_hold_pytrees(storage):
    rb_pytree = ReplayBuffer(storage=storage(10))  # max 10 elements stored
    # extend with a PyTree where all tensors have the same leading dim (3)
    tree = {"a": {"b": torch.randn(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}}
    rb_pytree.extend(tree)
    assert len(rb_pytree) == 3  # the replay buffer has 3 elements!
    stored = rb_pytree[:]
    assert stored.keys() == {"a"} and stored["a"].keys() == {"b", "c"}
    assert isinstance(stored["a"]["c"], list) and isinstance(stored["a"]["c"][1], tuple)
    assert torch.equal(stored["a"]["b"], tree["a"]["b"])
    assert stored["a"]["c"][0].shape == (3, 2) and not stored["a"]["c"][0].any()
    assert stored["a"]["c"][1][0].shape == (3, 10) and stored["a"]["c"][1][0].all()
    item = rb_pytree[1]
    assert item["a"]["b"] == tree["a"]["b"][1]
    assert item["a"]["c"][1][0].tolist() == [1] * 10
    sample, info = rb_pytree.sample(5, return_info=True)
    assert torch.equal(sample["a"]["b"], tree["a"]["b"][info["index"]])


def test_leaves_whose_leading_dims_differ_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(RuntimeError, match=r"leading dims"):
        rb.extend({"a": torch.zeros(3), "b": torch.zeros(4)})
    assert len(rb) == 0


def test_add_takes_a_pytree_as_one_instance():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    assert rb.add((torch.zeros(3), {"x": torch.ones(2)})) == 0
    assert len(rb) == 1
    left, right = rb[0]
    assert left.shape == (3,) and right["x"].tolist() == [1, 1]


def test_a_tuple_is_a_pytree_and_a_list_is_a_stack_of_items():
    as_tree = ReplayBuffer(storage=LazyTensorStorage(10))
    as_tree.extend((torch.zeros(3), torch.ones(3)))
    assert len(as_tree) == 3
    assert isinstance(as_tree[:], tuple)
    as_stack = ReplayBuffer(storage=LazyTensorStorage(10))
    as_stack.extend([torch.zeros(3), torch.ones(3)])
    assert len(as_stack) == 2
    assert as_stack[:].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_setting_an_item_moves_neither_length_nor_cursor():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(4))
    sample, info = rb.sample(2, return_info=True)
    rb[info["index"]] = sample + 100
    assert rb[info["index"]].tolist() == (sample + 100).tolist()
    assert (len(rb), rb.write_count) == (4, 4)
    assert rb.add(torch.tensor(4)) == 4

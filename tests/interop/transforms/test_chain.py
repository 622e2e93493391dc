"""`Compose`: a list of transforms that is one transform."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from interop import LazyMemmapStorage, LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from interop.transforms import Compose, Transform


class Add(Transform):
    def __init__(self, number):
        super().__init__(in_keys=["a"], out_keys=["a"], in_keys_inv=["a"], out_keys_inv=["a"])
        self.number = number

    def _apply_transform(self, obs):
        return obs * 10 + self.number

    def _inv_apply_transform(self, state):
        return state * 10 + self.number

    def __repr__(self):
        return f"Add({self.number})"


def run(transform, inverse=False):
    data = TensorDict({"a": torch.zeros(1, dtype=torch.int64)}, [1])
    return int((transform.inv(data) if inverse else transform(data))["a"])


def numbers(chain):
    return [each.number for each in chain]


def test_forward_in_order_and_backward_in_the_other():
    chain = Compose(Add(1), Add(2), Add(3))
    assert run(chain) == 123 and run(chain, inverse=True) == 321


def test_all_ways_to_build_one():
    for chain in (Compose(Add(1), Add(2)), Compose([Add(1), Add(2)]), Compose(transforms=[Add(1), Add(2)])):
        assert numbers(chain) == [1, 2] and len(chain) == 2
    assert run(Compose()) == 0 and len(Compose([])) == 0
    with pytest.raises(ValueError, match="not both"):
        Compose(Add(1), transforms=[Add(2)])
    for wrong in (3, "a"):
        with pytest.raises(ValueError, match="Transform instance or a callable, got"):
            Compose(wrong)


def test_it_is_a_list():
    chain = Compose(Add(1), Add(2))
    chain.append(Add(3))
    chain.insert(0, Add(0))
    chain.insert(-1, Add(9))
    assert numbers(chain) == [0, 1, 2, 9, 3]
    assert chain.pop().number == 3 and chain.pop(3).number == 9
    chain[0] = Add(7)
    del chain[1]
    assert numbers(chain) == [7, 2] and run(chain) == 72
    chain[0:1] = [Add(4), Add(5)]
    assert numbers(chain) == [4, 5, 2] and len(chain) == 3
    part = chain[1:]
    assert isinstance(part, Compose) and numbers(part) == [5, 2] and part[0] is not chain[1]
    assert chain[1].container is chain
    for index in (4, -4):
        with pytest.raises(ValueError, match="out of range for 3"):
            chain.insert(index, Add(1))
    with pytest.raises(IndexError):
        Compose().pop()


def test_a_chain_that_is_appended_becomes_part_of_the_list():
    chain = Compose(Add(1))
    chain.append(Compose(Add(2), Add(3)))
    assert numbers(chain) == [1, 2, 3]
    chain.append(Compose(Add(4), Add(5)), invert=True)
    assert len(chain) == 4 and run(chain) == 12354


def test_a_clone_has_a_list_of_its_own():
    chain = Compose(Add(1), lambda data: data, nn.Identity())
    twin = chain.clone()
    twin.append(Add(2))
    assert len(chain) == 3 and len(twin) == 4
    assert twin[0] is not chain[0] and twin[0].container is twin and chain[0].container is chain


def test_missing_entries_may_be_passed_over_by_all():
    chain = Compose(Add(1), Compose(Add(2)))
    chain.append(Add(3), invert=True)
    chain.set_missing_tolerance(True)
    data = TensorDict({"b": torch.zeros(1)}, [1])
    assert set(chain(data).keys()) == {"b"} and set(chain.inv(data).keys()) == {"b"}


def test_one_argument_is_taken():
    with pytest.raises(TypeError, match="one argument"):
        Compose(Add(1))(a=torch.zeros(1))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_transforms_see_where_slices_end(storage):
    seen = []
    rb = TensorDictReplayBuffer(
        storage=storage(40), sampler=SliceSampler(slice_len=4, end_key=("next", "done")), batch_size=12
    )
    rb.append_transform(lambda data: seen.append(data["next", "truncated"].squeeze(-1).tolist()) or data)
    flags = torch.zeros(40, 1, dtype=torch.bool)
    flags[9::10] = True
    steps = {"done": flags, "truncated": torch.zeros_like(flags), "terminated": flags}
    rb.extend(TensorDict({"a": torch.arange(40), "next": TensorDict(steps, [40])}, [40]))
    batch = rb.sample()
    ends = [False, False, False, True] * 3
    assert batch["next", "truncated"].squeeze(-1).tolist() == ends
    assert seen == [ends]
    assert not rb.storage[:]["next", "truncated"].any()

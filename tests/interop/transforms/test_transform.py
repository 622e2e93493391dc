"""What holds for all transforms: keys, directions, copies, and what they are part of."""

import sys

import pytest
import torch
from tensordict import TensorDict

from interop.transforms import Compose, Transform, as_torchrl


class Shift(Transform):
    """Adds `by` when read, takes it away when written."""

    invertible = True

    def __init__(self, by, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("by", torch.tensor(by))

    def _apply_transform(self, obs):
        return obs + self.by

    def _inv_apply_transform(self, state):
        return state - self.by


def rows(count=3, **extra):
    return TensorDict(
        {"a": torch.arange(float(count)), ("next", "a"): torch.arange(float(count)) + 1, **extra}, [count]
    )


def test_a_tuple_is_one_nested_key_and_a_string_is_one_key():
    t = Transform(in_keys=("next", "a"), out_keys="b", in_keys_inv=["c", ("d", ("e", "f"))], out_keys_inv=[("g",), "h"])
    assert t.in_keys == [("next", "a")] and t.out_keys == ["b"]
    assert t.in_keys_inv == ["c", ("d", "e", "f")] and t.out_keys_inv == ["g", "h"]
    assert Transform().in_keys == [] and Transform(in_keys=["a"]).out_keys == []


@pytest.mark.parametrize("keys", [3, [3], [("a", 3)], [None]])
def test_what_is_no_key_is_refused(keys):
    with pytest.raises(TypeError, match="in_keys must be a key or a list of keys"):
        Transform(in_keys=keys)


def test_unlike_lists_are_refused():
    with pytest.raises(ValueError, match="in_keys_inv and out_keys_inv must be as many"):
        Transform(in_keys_inv=["a"], out_keys_inv=["a", "b"])
    t = Shift(1.0, in_keys=["a"])
    with pytest.raises(ValueError, match="as many keys are needed"):
        t(rows())


def test_forward_reads_in_keys_and_writes_out_keys_in_place():
    t, data = Shift(2.0, in_keys=["a", ("next", "a")], out_keys=["b", ("next", "b")]), rows()
    assert t(data) is data
    assert data["b"].tolist() == [2, 3, 4] and data["next", "b"].tolist() == [3, 4, 5]
    assert data["a"].tolist() == [0, 1, 2]


def test_the_inverse_reads_out_keys_and_writes_in_keys_of_a_tensordict_of_its_own():
    t, data = Shift(2.0, in_keys_inv=["stored"], out_keys_inv=["a"]), rows()
    out = t.inv(data)
    assert out["stored"].tolist() == [-2, -1, 0] and out["a"] is data["a"]
    assert "stored" not in data
    assert set(Transform().inv(data).keys()) == {"a", "next"}


def test_tensors_by_name_come_back_without_a_tensordict():
    t = Shift(2.0, in_keys=["a"], out_keys=["b"], in_keys_inv=["stored"], out_keys_inv=["outside"])
    assert t(a=torch.zeros(3)).tolist() == [2, 2, 2]
    assert t(torch.zeros(3)).tolist() == [2, 2, 2]
    assert t.inv(outside=torch.zeros(3)).tolist() == [-2, -2, -2]
    assert torch.nn.Sequential(t, t)(rows())["b"].tolist() == [2, 3, 4]


def test_a_missing_key_is_named_beside_those_there_are():
    t, data = Shift(1.0, in_keys=[("next", "reward")], out_keys=["r"]), rows()
    with pytest.raises(KeyError, match=r"Shift: \('next', 'reward'\) not found in tensordict, which has .*'a'"):
        t(data)
    t.set_missing_tolerance(True)
    assert t.missing_tolerance and set(t(data).keys()) == {"a", "next"}
    inverse = Shift(1.0, in_keys_inv=["b"], out_keys_inv=["b"])
    with pytest.raises(KeyError, match="'b' not found"):
        inverse.inv(data)


def test_what_is_not_written_says_so():
    with pytest.raises(NotImplementedError, match=r"write _apply_transform\(\) or forward\(\)"):
        Transform(in_keys=["a"], out_keys=["a"])(rows())

    class Half(Transform):
        invertible = True

    with pytest.raises(NotImplementedError, match=r"write _inv_apply_transform\(\)"):
        Half(in_keys_inv=["a"], out_keys_inv=["a"]).inv(rows())
    assert Transform(in_keys_inv=["b"], out_keys_inv=["a"]).inv(rows())["b"].tolist() == [0, 1, 2]


def test_a_clone_is_part_of_nothing_and_shares_tensors():
    t = Shift(1.0, in_keys=["a"], out_keys=["a"])
    chain = Compose(t)
    twin = t.clone()
    assert t.container is chain and twin.container is None and twin.parent is None
    assert twin.by is t.by
    twin.register_buffer("other", torch.zeros(1))
    assert not hasattr(t, "other")
    t.reset_parent()
    assert t.container is None


@pytest.mark.parametrize("transform", [Transform(), Compose(), lambda data: data])
def test_a_program_without_torchrl_is_told(monkeypatch, transform):
    monkeypatch.delitem(sys.modules, "torchrl.envs", raising=False)
    with pytest.raises(ImportError, match=r"torchrl\.envs.*import it in your program"):
        as_torchrl(transform)

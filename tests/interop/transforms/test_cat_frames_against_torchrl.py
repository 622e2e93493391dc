"""Stacks of frames, windows and burnt-in states beside those of TorchRL, where that is."""

import itertools
import warnings

import pytest
import torch
from tensordict import TensorDict

from interop import transforms as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl", exc_type=ImportError)
    from torchrl.envs import transforms as theirs
    from torchrl.modules import GRUModule

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT, BOTH, NEXT = ["f"], ["f", ("next", "f")], [("next", "f")]


def data(shape, frame, dtype, seed):
    random = torch.Generator().manual_seed(seed)

    def frames():
        return (torch.rand(*shape, *frame, generator=random) * 200).to(dtype)

    done = torch.rand(*shape, 1, generator=random) < 0.25
    given = TensorDict({"f": frames(), "next": {"f": frames(), "done": done}}, shape)
    given.names = [None] * (len(shape) - 1) + ["time"]
    return given


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("keys", [ROOT, BOTH, NEXT], ids=str)
@pytest.mark.parametrize(("frame", "dim"), [((4,), -1), ((2, 3, 3), -3), ((2, 3, 3), -2), ((2, 3, 3), -1)])
def test_stacks_are_the_same(frame, dim, keys, padding):
    if keys is BOTH and dim != -len(frame):
        return  # they fail for the frames under "next" then
    shapes, dtypes = [(6,), (3, 9), (2, 3, 5)], [torch.uint8, torch.float32]
    for seed, (shape, dtype, count) in enumerate(itertools.product(shapes, dtypes, (2, 4))):
        kwargs = {"N": count, "dim": dim, "padding": padding, "padding_value": 7, "in_keys": keys, "mask_key": "m"}
        if seed % 2:
            kwargs["out_keys"] = [("next", "s") if isinstance(key, tuple) else "s" for key in keys]
        for future in (False, True) if len(keys) == 1 else (False,):
            given = data(shape, frame, dtype, seed)
            expected = theirs.CatFrames(**kwargs, future=future)(given.clone())
            found = ours.CatFrames(**kwargs, future=future)(given.clone())
            assert set(found.keys(True)) == set(expected.keys(True)) and found.names == expected.names
            assert all(torch.equal(found[key], expected[key]) for key in expected.keys(True, True))


def test_stacks_are_the_same_where_time_comes_first_and_on_writing():
    given = data((3, 7), (1, 2, 2), torch.uint8, 0)
    for each in (given, given.transpose(0, 1)):
        kwargs = {"N": 3, "dim": -3, "in_keys": BOTH}
        assert torch.equal(ours.CatFrames(**kwargs)(each.clone())["f"], theirs.CatFrames(**kwargs)(each.clone())["f"])
        inverse = [module.CatFrames(**kwargs, as_inverse=True) for module in (ours, theirs)]
        found, expected = (transform.inv(each.clone()) for transform in inverse)
        assert all(torch.equal(found[key], expected[key]) for key in expected.keys(True, True))
        assert (inverse[0](each.clone()) == each).all()


@pytest.mark.parametrize(
    ("kwargs", "shape"),
    [
        ({"dim": 1}, (4,)),
        ({"padding": "other"}, (4,)),
        ({"padding": "zeros"}, (4,)),
        ({"done_key": "over"}, (4,)),
        ({}, ()),
    ],
)
def test_both_refuse(kwargs, shape):
    for module in (ours, theirs):
        with pytest.raises((ValueError, RuntimeError, KeyError)):
            module.CatFrames(**{"N": 2, "dim": -1, "in_keys": ROOT, **kwargs})(
                data(shape or (4,), (2,), torch.float32, 0) if shape else TensorDict({"f": torch.ones(2)}, [])
            )


def test_windows_are_alike():
    given = data((5, 8), (2,), torch.float32, 0)
    given["mask"] = torch.arange(8).expand(5, 8) < torch.tensor([5, 6, 7, 8, 8])[:, None]
    for kwargs in ({}, {"mask_key": "mask"}, {"sample_dim": -2}):
        found, expected = (module.RandomCropTensorDict(4, **kwargs)(given.clone()) for module in (ours, theirs))
        assert found.batch_size == expected.batch_size and found.names == expected.names
        assert set(found.keys(True)) == set(expected.keys(True))
    for length, kwargs, each in ((9, {}, given), (6, {"mask_key": "mask"}, given), (1, {}, given[0, 0])):
        for module in (ours, theirs):
            with pytest.raises(RuntimeError):
                module.RandomCropTensorDict(length, **kwargs)(each.clone())


def test_burnt_in_states_are_the_same():
    torch.manual_seed(0)
    module = GRUModule(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", "hidden"],
        out_keys=["out", ("next", "hidden")],
        default_recurrent_mode=True,
    )
    shape = (2, 9)
    begins = torch.rand(*shape, 1) < 0.2
    given = TensorDict(
        {"observation": torch.randn(*shape, 3), "hidden": torch.randn(*shape, 1, 4), "is_init": begins}, shape
    )
    mine, other = (each.BurnInTransform([module], burn_in=4) for each in (ours, theirs))
    assert mine.out_keys == other.out_keys and set(mine.in_keys) == set(other.in_keys)
    found, expected = mine(given.clone()), other(given.clone())
    assert found.batch_size == expected.batch_size and set(found.keys(True)) == set(expected.keys(True))
    assert all(torch.equal(found[key], expected[key]) for key in expected.keys(True, True))

"""Frames of several steps in one entry, against a model that goes through the steps one by one."""

import itertools

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from interop.transforms import CatFrames

BOTH = ["pixels", ("next", "pixels")]


def data(*shape, frame=(1, 2, 2), dtype=torch.float32, seed=0, ends=0.3):
    """Random steps, [..., T]; frames are one in time but for the ends."""
    random = torch.Generator().manual_seed(seed)
    done = torch.rand(*shape, 1, generator=random) < ends

    def frames():
        return torch.randint(0, 200, (*shape, *frame), generator=random).to(dtype)

    return TensorDict({"pixels": frames(), "next": {"pixels": frames(), "done": done}}, shape)


def stacked(given, count, dim, key, value=None, pair=False, begins=None):
    """The stacks of one line in time: of `key`, and after the first frame of a trajectory under "pixels" with `pair`."""
    frames, out, history = given[key], [], []
    done = given["next", "done"].reshape(-1)
    for step in range(len(done)):
        if step == 0 or done[step - 1] or (begins is not None and begins[step]):
            history = [given["pixels"][step]] if pair else []
        history.append(frames[step])
        padding = history[0] if value is None else torch.full_like(history[0], value)
        out.append(torch.cat(([padding] * count + history)[-count:], dim))
    return torch.stack(out)


def lines(given):
    return given.reshape(-1, given.shape[-1]).unbind(0) if len(given) else ()


@pytest.mark.parametrize("value", [None, 7])
@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("shape", [(9,), (2, 2, 5), (4, 1), (0, 5)])
def test_stacks_are_those_of_the_model(shape, count, value):
    for seed, dim in itertools.product(range(2), (-3, -1)):
        given = data(*shape, seed=seed, dtype=torch.uint8)
        padding = {} if value is None else {"padding": "constant", "padding_value": value}
        found = CatFrames(count, dim, BOTH, ["s", ("next", "s")], **padding)(given.copy())
        for line, made in zip(lines(given), lines(found), strict=True):
            assert torch.equal(made["s"], stacked(line, count, dim, "pixels", value))
            assert torch.equal(made["next", "s"], stacked(line, count, dim, ("next", "pixels"), value, pair=True))
        alone = CatFrames(count, dim, [("next", "pixels")], **padding)(given.copy())
        for line, made in zip(lines(given), lines(alone), strict=True):
            assert torch.equal(made["next", "pixels"], stacked(line, count, dim, ("next", "pixels"), value))


def test_the_stack_after_a_step_is_the_one_of_the_next_step():
    frames = torch.arange(11.0).reshape(11, 1)
    done = torch.zeros(10, 1, dtype=torch.bool)
    done[6] = True
    given = TensorDict({"pixels": frames[:-1], "next": {"pixels": frames[1:].clone(), "done": done}}, [10])
    given["next", "pixels"][6] = 6.5  # the last frame of the first episode
    found = CatFrames(3, -1, BOTH)(given)
    assert found["pixels"].tolist()[:3] == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
    assert found["next", "pixels"][6].tolist() == [5, 6, 6.5] and found["pixels"][7].tolist() == [7, 7, 7]
    inside = [step for step in range(9) if step != 6]
    assert torch.equal(found["next", "pixels"][inside], found["pixels"][[step + 1 for step in inside]])


def test_the_time_dim_is_the_one_that_is_named_so():
    given = data(3, 6)
    turned = given.transpose(0, 1)
    turned.names = ["time", None]
    expected = CatFrames(3, -3, BOTH)(given.copy())
    found = CatFrames(3, -3, BOTH)(turned.copy())
    assert found.batch_size == (6, 3) and found.names == ["time", None]
    for key in expected.keys(True, True):
        assert torch.equal(found[key].transpose(0, 1), expected[key])


@pytest.mark.parametrize("ids", [("collector", "traj_ids"), "episode", "sequence_id"])
def test_trajectories_end_where_ids_change_too(ids):
    given = data(8, ends=0.0)
    given[ids] = torch.tensor([5, 5, 5, 2, 2, 5, 5, 5])
    begins = [False, False, False, True, False, True, False, False]
    found = CatFrames(3, -3, BOTH, ["s", ("next", "s")])(given.copy())
    assert torch.equal(found["s"], stacked(given, 3, -3, "pixels", begins=begins))
    assert torch.equal(found["next", "s"], stacked(given, 3, -3, ("next", "pixels"), pair=True, begins=begins))
    del given["next", "done"]
    assert torch.equal(CatFrames(3, -3)(given.copy())["pixels"], found["s"])


def test_truncations_are_ends_and_padding_of_slices_is_no_history():
    given = data(9, ends=0.0)
    given["next", "truncated"] = (torch.arange(9) == 2)[:, None]
    begins = [step == 3 for step in range(9)]
    assert torch.equal(CatFrames(3, -3)(given.copy())["pixels"], stacked(given, 3, -3, "pixels", begins=begins))
    given["collector", "mask"] = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    begins[5] = True
    assert torch.equal(CatFrames(3, -3)(given.copy())["pixels"], stacked(given, 3, -3, "pixels", begins=begins))
    with pytest.raises(KeyError, match=r"\('next', 'done'\) not found"):  # neither tells of all ends
        CatFrames(3, -3)(given.exclude(("next", "done")))


def test_padded_slices_of_a_buffer_are_not_mixed():
    steps = torch.arange(40)
    given = TensorDict({"o": steps.float()[:, None], "next": {"over": (steps % 7 == 6)[:, None]}}, [40])
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SliceSampler(slice_len=9, end_key=("next", "over"), strict_length=False, pad_output=True),
        transform=CatFrames(3, -1, ["o"], ["s"], done_key="over"),
        batch_size=90,
    )
    rb.extend(given)
    found = rb.sample()
    valid, first = found["collector", "mask"], found["o"].reshape(10, 9)[:, :1].repeat_interleave(9, 0)
    assert torch.equal(found["s"][valid], torch.maximum(found["o"] + torch.arange(-2, 1), first)[valid])
    assert not valid.all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.uint16, torch.complex64, torch.float8_e4m3fn])
def test_dtypes(dtype):
    exact = data(2, 10, dtype=torch.bool)
    given = exact.clone()
    for key in BOTH:
        given[key] = exact[key].to(dtype)
    for value, padding in ((None, "same"), (1, "constant")):
        found = CatFrames(4, -3, BOTH, padding=padding, padding_value=value or 0)(given.copy())
        for key in BOTH:
            expected = stacked(exact[1], 4, -3, key, value, pair=key != "pixels")
            assert found[key].dtype == dtype
            assert torch.equal(found[1][key].to(torch.complex64).real.bool(), expected)


@pytest.mark.parametrize(
    ("kwargs", "given", "error", "text"),
    [
        ({}, data(4)[0], ValueError, "without batch dims"),
        ({"dim": -4}, data(4), ValueError, r"'pixels' has frames of shape \[1, 2, 2\], which has no dim -4"),
        ({"in_keys": ["gone"]}, data(4), KeyError, "'gone' not found"),
        ({}, data(4).exclude(("next", "done")), KeyError, r"\('next', 'done'\) not found"),
        ({"done_key": "over"}, data(4), KeyError, r"\('next', 'over'\) not found"),
        ({"in_keys": ["next"]}, data(4), TypeError, "'next' must be a tensor"),
        (
            {"in_keys": BOTH},
            data(4).set(("next", "pixels"), torch.zeros(4, 2, 2, 2)),
            ValueError,
            "one dtype and shape",
        ),
        ({"padding": "constant", "padding_value": 0.5}, data(4, dtype=torch.int64), ValueError, "is no torch.int64"),
        ({"padding": "constant", "padding_value": -1}, data(4, dtype=torch.uint8), (ValueError, RuntimeError), "uint8"),
        ({"out_keys": [("pixels", "x")]}, data(4), KeyError, "'pixels' is no tensordict but a Tensor"),
        (
            {"in_keys": BOTH, "out_keys": ["s", ("pixels", "x")]},
            data(4),
            KeyError,
            "'pixels' is no tensordict but a Tensor",
        ),
    ],
)
def test_data_that_cannot_be_stacked_is_refused_and_stays(kwargs, given, error, text):
    before = given.clone()
    with pytest.raises(error, match=text):
        CatFrames(**{"N": 3, "dim": -3, **kwargs})(given)
    assert set(given.keys(True, True)) == set(before.keys(True, True)) and (given == before).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_buffer_of_single_frames_gives_items_with_stacks(interleaved, whole):
    """Two environments of which one runs in episodes of 7 steps; every frame is stored once."""
    step = torch.arange(60)
    length = torch.where(step % 2 == 0, 7, 1000) if interleaved else torch.tensor(7)
    time = step // 2 if interleaved else step
    obs = (time + 500 * (step % 2) * interleaved).float()[:, None]
    rows = TensorDict(
        {"o": obs, "next": {"o": obs + 1, "done": (time % length == length - 1)[:, None], "reward": obs}}, [60]
    )
    if interleaved:
        rows["collector", "traj_ids"] = step % 2
    options = {"strict_length": False, "pad_output": True, "span": (True, False)} if whole else {}
    transform, sampler = CatFrames(3, -1, ["o"], ["s"]).make_rb_transform_and_sampler(batch_size=16, **options)
    rb = ReplayBuffer(storage=LazyTensorStorage(60), sampler=sampler, transform=transform, batch_size=16)
    rb.extend(rows.clone().set("s", torch.zeros(60, 3)).set(("next", "s"), torch.zeros(60, 3)))
    assert ("next", "s") not in rb.storage[:].keys(True) and "s" not in rb.storage[:].keys()  # noqa: SIM118
    seen = set()
    for _ in range(40):
        found = rb.sample()
        assert found.batch_size == (16,)
        newest = found["o"]
        first = torch.where(newest < 500, newest // 7 * 7, torch.tensor(500.0))
        assert found["s"].tolist() == torch.maximum(newest + torch.arange(-2, 1), first).tolist()
        assert torch.equal(found["next", "s"], torch.maximum(newest + torch.arange(-1, 2), first))
        at = [obs.flatten().tolist().index(each) for each in newest.flatten().tolist()]
        assert torch.equal(found["next", "done"], rows["next", "done"][at])
        seen |= {float(each) for each in newest}
    assert (0.0 in seen) == whole and {2.0, 3.0} <= seen


def test_a_buffer_of_single_frames_is_refused_without_entries_of_its_own():
    with pytest.raises(ValueError, match=r"'pixels'.*out_keys of their own"):
        CatFrames(3, -1).make_rb_transform_and_sampler(16)
    with pytest.raises(TypeError, match="slice_len"):
        CatFrames(3, -1, ["o"], ["s"]).make_rb_transform_and_sampler(16, slice_len=3)
    transform, sampler = CatFrames(3, -1, ["o"], ["s"]).make_rb_transform_and_sampler(16, strict_length=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(60), sampler=sampler, transform=transform, batch_size=16)
    done = torch.ones(5, 1, dtype=torch.bool)
    rb.extend(TensorDict({"o": torch.zeros(5, 1), "next": {"o": torch.zeros(5, 1), "done": done}}, [5]))
    with pytest.raises(ValueError, match="pad_output=True"):
        rb.sample()

"""Buffers of single frames that give stacks of independent steps."""

import copy
import pickle

import pytest
import torch
from scipy import stats
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, RandomSampler, ReplayBuffer, TensorDictReplayBuffer
from interop.transforms import CatFrames

ENDS = (4, 12, 14, 19)
BEGINS = (0, 5, 13, 15)


def data(ends=ENDS, count=20):
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[list(ends)] = True
    step = torch.arange(count)
    return TensorDict(
        {"o": step.float()[:, None], "step": step, "next": {"o": step.float()[:, None] + 0.5, "done": done}}, [count]
    )


def expected(step):
    first = max(begin for begin in BEGINS if begin <= step)
    root = [max(step - 2 + n, first) for n in range(3)]
    return root, ([first] * 3 + [each + 0.5 for each in range(first, step + 1)])[-3:]


def made(rb_class=ReplayBuffer, storage=LazyTensorStorage, given=None, batch=64, frames=None, buffer=None, **kwargs):
    frames = frames or CatFrames(3, -1, ["o"], ["s"])
    transform, sampler = frames.make_rb_transform_and_sampler(batch, **kwargs)
    rb = rb_class(storage=storage(40), transform=transform, batch_size=batch, **{"sampler": sampler, **(buffer or {})})
    rb.extend(data() if given is None else given)
    return rb


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("rb_class", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_samples_are_stacks_of_their_steps(rb_class, storage, strict):
    rb = made(rb_class, storage, strict_length=strict, batch=300)
    found, info = rb.sample(return_info=True)
    assert found.batch_size == (300,) and info["index"][0].shape == (300, 3)
    assert torch.equal(info["index"][0][:, -1], found["step"])
    for item in found.unbind(0):
        step = int(item["step"])
        root, after = expected(step)
        assert item["s"].tolist() == root
        assert item["next", "s"].tolist() == (after if strict else [*root[1:], after[-1]])
        assert item["o"].tolist() == [step] and item["next", "done"].item() == (step in ENDS)
    drawn = set(found["step"].tolist())
    assert drawn == (set(range(20)) if not strict else {2, 3, 4, *range(7, 13), *range(17, 20)})


def test_each_step_of_a_trajectory_comes_equally_often_without_strict_length():
    rb = made(given=data((19,)), batch=5000, strict_length=False)
    assert stats.chisquare(torch.bincount(rb.sample()["step"], minlength=20)).pvalue > 1e-3


def test_stacks_made_before_are_not_stored():
    given = data()
    given["s"], given["next", "s"] = torch.zeros(20, 3), torch.zeros(20, 3)
    rb = made(given=given)
    assert set(rb.storage[:].keys(True, True)) == {"o", "step", ("next", "o"), ("next", "done")}
    assert rb.sample()["s"].shape == (64, 3)


def test_images_and_lanes():
    transform, sampler = CatFrames(2, -3, ["p"], padding="constant").make_rb_transform_and_sampler(8)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, ndim=2), sampler=sampler, transform=transform, batch_size=8
    )
    p = torch.arange(2 * 10, dtype=torch.uint8).reshape(2, 10, 1, 1, 1).expand(2, 10, 1, 4, 4)
    rb.extend(TensorDict({"p": p, "next": {"done": torch.zeros(2, 10, 1, dtype=torch.bool)}}, [2, 10]))
    found = rb.sample()
    assert found["p"].shape == (8, 2, 4, 4) and (found["p"][:, 1] - found["p"][:, 0] == 1).all()


def test_batches_of_another_sampler_are_refused():
    rb = made(buffer={"sampler": RandomSampler()})
    with pytest.raises(ValueError, match="needs the sampler that was made with the transform"):
        rb.sample()
    with pytest.raises(ValueError, match=r"rb.storage\[:\] has the single frames"):
        made()[:]


@pytest.mark.parametrize(
    ("frames", "kwargs", "error", "text"),
    [
        (CatFrames(3, -1, future=True), {}, ValueError, "without future"),
        (CatFrames(3, -1, as_inverse=True), {}, ValueError, "without as_inverse"),
        (CatFrames(3, -1, mask_key="m"), {}, ValueError, "without mask_key"),
        (CatFrames(3, -1), {"slice_len": 3}, TypeError, "slice_len follows from N=3"),
        (CatFrames(3, -1), {"pad_output": True}, TypeError, "pad_output follows"),
        (CatFrames(3, -1, padding="constant"), {"strict_length": False}, ValueError, "needs padding='same'"),
        (CatFrames(3, -1), {"batch_size": 0}, ValueError, "batch_size must be at least 1"),
    ],
)
def test_what_has_no_meaning_is_refused(frames, kwargs, error, text):
    with pytest.raises(error, match=text):
        frames.make_rb_transform_and_sampler(**{"batch_size": 4, **kwargs})


def test_it_is_prefetched_saved_and_copied_and_ends_at_its_done_key(tmp_path):
    frames, given = CatFrames(3, -1, ["o"], ["s"], done_key="over"), data()
    given["next", "over"] = given["next"].pop("done")
    rb = made(frames=frames, given=given)
    assert set(rb.sample()["step"].tolist()) == {2, 3, 4, *range(7, 13), *range(17, 20)}
    twin = made(frames=frames, given=given[:5], buffer={"prefetch": 2})
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    stacks = []
    for each in (rb, twin, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        torch.manual_seed(3)
        stacks.append(each.sample()["s"])
    assert all(torch.equal(each, stacks[0]) for each in stacks)

"""Random windows in time."""

import copy
import pickle

import pytest
import torch
from scipy import stats
from tensordict import TensorClass, TensorDict

from interop.transforms import RandomCropTensorDict
from tests.interop import streams


def data(*shape, time=-1, **more):
    """Each entry tells where its item was."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    step = (
        torch.arange(shape[time])
        .reshape([-1 if n == time % len(shape) else 1 for n in range(len(shape))])
        .expand(shape)
    )
    deep = numbers[..., None, None].expand(*shape, 2, 3)
    dtypes = torch.int64, torch.uint16, torch.bfloat16
    inner = TensorDict({str(dtype): deep.to(dtype) for dtype in dtypes}, [*shape, 2])
    return TensorDict({"number": numbers, "step": step, "inner": inner, "name": "text", **more}, shape)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5,), -1), ((7, 3), 0), ((2, 6, 3), -2), ((2, 3, 6), -1), ((0, 6), -1)],
)
def test_windows_are_consecutive_steps_of_one_sequence_each(shape, dim):
    given = data(*shape, time=dim)
    found = RandomCropTensorDict(4, sample_dim=dim)(given)
    assert list(found.batch_size) == [4 if n == dim % len(shape) else size for n, size in enumerate(shape)]
    steps = found["step"].movedim(dim, -1)
    assert (steps.diff(dim=-1) == 1).all()
    expected = given["number"].movedim(dim, -1).gather(-1, steps).movedim(-1, dim)
    assert torch.equal(found["number"], expected)
    assert found["inner"].batch_size == (*found.batch_size, 2)
    for each in found["inner"].values():
        assert torch.equal(each.to(torch.int64), expected[..., None, None].expand(*expected.shape, 2, 3))
    assert found["name"] == "text"


def test_words_and_classes_are_cropped_too():
    class Words(TensorClass):
        words: list[str]
        number: torch.Tensor

    words = ["a", "b", "c", "d", "e"]
    found = RandomCropTensorDict(3)(Words(words=words, number=torch.arange(5), batch_size=[5]))
    assert isinstance(found, Words) and found.batch_size == (3,)
    assert list(found.words) == [words[place] for place in found.number.tolist()]
    given = TensorDict({"words": words, "number": torch.arange(5)}, [5])
    found = RandomCropTensorDict(3)(given)
    assert list(found["words"]) == [words[place] for place in found["number"].tolist()]


def test_each_start_comes_equally_often_the_last_one_too():
    steps = RandomCropTensorDict(3, generator=torch.Generator().manual_seed(0))(data(4000, 8))["step"][:, 0]
    assert stats.chisquare(torch.bincount(steps, minlength=6)).pvalue > 1e-3
    assert len(torch.bincount(steps)) == 6


def test_windows_stay_where_the_mask_is_true():
    valid = torch.tensor([3, 5, 8]).repeat(1500)
    mask = torch.arange(8) < valid[:, None]
    steps = RandomCropTensorDict(3, mask_key=("m", "mask"))(data(4500, 8, m=TensorDict({"mask": mask}, [4500, 8])))[
        "step"
    ]
    assert (steps[:, -1] < valid).all()
    assert (steps[valid == 3, 0] == 0).all()
    for length in (5, 8):
        starts = torch.bincount(steps[valid == length, 0])
        assert len(starts) == length - 2 and stats.chisquare(starts).pvalue > 1e-3


def test_a_generator_governs_the_draws():
    def drawn(seed):
        return RandomCropTensorDict(2, generator=torch.Generator().manual_seed(seed))(data(64, 9))["number"]

    assert torch.equal(drawn(0), drawn(0)) and not torch.equal(drawn(0), drawn(1))
    before = torch.random.get_rng_state()
    drawn(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    transform = RandomCropTensorDict(2, generator=torch.Generator().manual_seed(0))
    twins = copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))
    assert all(torch.equal(twin(data(64, 9))["number"], drawn(0)) for twin in twins)


@pytest.mark.parametrize(
    ("transform", "shape", "error", "text"),
    [
        (RandomCropTensorDict(1), (), RuntimeError, "no sample_dim=-1 in a batch size of"),
        (RandomCropTensorDict(4), (2, 3), RuntimeError, "sub_seq_len=4 is more than the 3 steps of a sequence"),
        (RandomCropTensorDict(3, mask_key="short"), (2, 3), RuntimeError, "more than the 2 steps"),
        (RandomCropTensorDict(1, mask_key="wide"), (2, 3), ValueError, r"'wide' must be bool of shape \[2, 3\]"),
        (RandomCropTensorDict(1, mask_key="gap"), (2, 3), ValueError, "'gap' must be True for the first steps"),
        (RandomCropTensorDict(1, mask_key="gone"), (2, 3), KeyError, "'gone' not found"),
    ],
)
def test_what_cannot_be_cropped_is_refused(transform, shape, error, text):
    given = data(*shape) if shape else TensorDict({}, [])
    if shape:
        given["gap"] = torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()
        given["short"], given["wide"] = (
            torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
            torch.ones(2, 3, 1, dtype=torch.bool),
        )
    with pytest.raises(error, match=text):
        transform(given)


@pytest.mark.parametrize(("layout", "marks"), [("lanes", name) for name in streams.MARKS] + [("steps", "ids")])
def test_no_window_crosses_the_end_of_a_trajectory(layout, marks):
    stream = streams.make(layout, streams.MARKS[marks], seed=3, envs=3, steps=30)
    obs, padding = stream.data["obs"].reshape(-1, stream.episode.shape[-1]), stream.padding.reshape(-1)
    starts, crop = set(), RandomCropTensorDict(3, generator=torch.Generator().manual_seed(0))
    for _ in range(400):
        found = crop(stream.data)["obs"].reshape(-1, 3)
        assert (found.diff(dim=-1) == 1).all()
        starts |= set(found[:, 0].int().tolist())
    flat = obs.reshape(-1).int().tolist()
    places = {each: place for place, each in enumerate(flat)}
    whole = {each for each in flat if each + 2 in places and not padding[places[each]]}
    assert starts == whole
    with pytest.raises(RuntimeError, match="do not cross the ends"):
        RandomCropTensorDict(12)(stream.data)

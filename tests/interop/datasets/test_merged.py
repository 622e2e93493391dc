import pickle

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)
from interop.datasets import merged
from interop.transforms import DoubleToFloat
from tests.interop.datasets.recorded import texts

ALL = {"observation", "action", "next", "text"}


def buffer(value: int, storage: type = LazyTensorStorage, **entries: torch.Tensor) -> TensorDictReplayBuffer:
    """Eight rows of this value."""
    rows = {"observation": torch.full((8, 3), float(value)), "action": torch.full((8,), value)}
    rows |= {"next": {"done": torch.zeros(8, 1, dtype=torch.bool)}, "text": texts(*[f"of {value}"] * 8)}
    rb = TensorDictReplayBuffer(storage=storage(8), batch_size=4)
    rb.extend(TensorDict({**rows, **entries}, [8]))
    return rb


def check(rb: ReplayBufferEnsemble, keys: set[str] = ALL) -> TensorDict:
    """A batch, which has these entries, and of each the values of the member that it names."""
    batch = rb.sample()
    assert type(batch) is TensorDict and {*batch.keys()} == {*keys, "index"}
    assert (batch["action"] == batch["index", "buffer_ids"]).all()
    return batch


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, LazyStackStorage])
def test_what_all_have_is_kept(storage):
    more = buffer(1, extra=torch.zeros(8), next=TensorDict({"done": torch.ones(8, 1).bool(), "x": torch.ones(8)}, [8]))
    rb = merged(buffer(0), more, buffer(2, storage), batch_size=12, sample_from_all=True)
    batch = check(rb)
    assert {*batch["next"].keys()} == {"done"}
    assert [*batch["text"]] == [[f"of {place}"] * 4 for place in range(3)]
    assert {*more.sample().keys()} == {*ALL, "extra", "index"}


def test_entries_that_are_asked_for():
    other = buffer(1, observation=torch.ones(8, 4))
    batch = check(merged(buffer(0), other, batch_size=4, keys=["action", "next"]), {"action", "next"})
    assert {*batch["next"].keys()} == {"done"}
    with pytest.raises(ValueError, match=r"observation +float32 \[3\] +float32 \[4\]"):
        merged(buffer(0), other, keys=["observation", "action"])


@pytest.mark.parametrize("cast", [True, {"observation": torch.float64}])
def test_casts_as_it_reads(cast):
    double = buffer(1, observation=torch.ones(8, 3).double())
    rb = merged(buffer(0), double, batch_size=8, cast=cast, p=[1, 3])
    for each in (rb, pickle.loads(pickle.dumps(rb))):
        assert check(each)["observation"].dtype == torch.float64
    torch.testing.assert_close(rb.sampler.p, torch.tensor([0.25, 0.75]))
    assert double[:]["observation"].dtype == torch.float64


@pytest.mark.parametrize(("dtypes", "cast", "wanted"), [
    ([torch.float16, torch.float64], True, torch.float64),
    ([torch.int32, torch.int64], True, torch.int64),
    ([torch.int64, torch.float32], {"x": torch.float32}, torch.float32),
    ([torch.int64, torch.float32], True, None),
    ([torch.complex64, torch.float32], True, None),
    ([torch.float32, torch.float64], False, None),
    ([torch.float32, None], True, None),
])  # fmt: skip
def test_dtypes(dtypes, cast, wanted):
    columns = [texts(*"abcdefgh") if each is None else torch.ones(8).to(each) for each in dtypes]
    members = [buffer(place, x=column) for place, column in enumerate(columns)]
    if wanted is None:
        first, second = ("text" if each is None else f"{str(each)[6:]} \\[\\]" for each in dtypes)
        with pytest.raises(ValueError, match=f"do not fit together:\n.*\nx +{first} +{second}\nLeave"):
            merged(*members, cast=cast)
    else:
        assert check(merged(*members, batch_size=8, cast=cast), {*ALL, "x"})["x"].dtype == wanted


def test_the_table_of_differences():
    members = buffer(0, x=torch.zeros(8, 2)), buffer(1, observation=torch.zeros(8, 4).double())
    with pytest.raises(ValueError) as caught:
        merged(*members, keys=["observation", ("next", "x"), "x", "action"], cast=True)
    assert str(caught.value).splitlines()[1:-1] == [
        "             0: TensorDictReplayBuffer  1: TensorDictReplayBuffer",
        "next.x       missing                    missing",
        "observation  float32 [3]                float64 [4]",
        "x            float32 [2]                missing",
    ]
    with pytest.raises(ValueError, match=r"y +missing +missing"):
        merged(*members, keys=["action"], cast={"y": torch.float32})
    a, b = (TensorDictReplayBuffer(storage=LazyTensorStorage(3)) for _ in range(2))
    a.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    b.extend(TensorDict({"b": torch.zeros(3)}, [3]))
    with pytest.raises(ValueError, match="do not fit together"):
        merged(a, b)


def test_members_keep_their_transforms_and_samplers():
    double = buffer(1, observation=torch.ones(8, 3).double())
    double.append_transform(DoubleToFloat())
    members = buffer(0), double
    for each in members:
        each.set_sampler(SliceSampler(slice_len=2, end_key=("next", "done")))
    batch = check(merged(*members, batch_size=8, keys=["action", "observation", "next"]), ALL - {"text"})
    assert batch.shape == (2, 4) and batch["observation"].dtype == torch.float32
    assert (batch["index", "index"].reshape(2, 2, 2).diff() == 1).all()


@pytest.mark.parametrize(("batch_size", "parts"), [(256, 4), (9, 3), (7, 7), (2, 2)])
def test_a_batch_is_divided_into_parts(batch_size, parts):
    members = [buffer(place) for place in range(3)]
    assert check(merged(*members, batch_size=batch_size)).shape == (parts, batch_size // parts)
    assert merged(*members, batch_size=12, num_buffer_sampled=6).sample().shape == (6, 2)


def test_what_cannot_be_merged():
    numbers = ReplayBuffer(storage=ListStorage(3))
    numbers.extend([torch.ones(2), torch.ones(2)])
    empty = TensorDictReplayBuffer(storage=LazyTensorStorage(3))
    for members, error, match in (
        ((), ValueError, "there is nothing to merge"),
        ((buffer(0), empty), RuntimeError, "buffer 1 is empty"),
        ((buffer(0), 3), TypeError, "buffer 1 must be a ReplayBuffer, got int"),
        ((numbers,), TypeError, "the items of buffer 0 must be tensordicts"),
    ):
        with pytest.raises(error, match=match):
            merged(*members)

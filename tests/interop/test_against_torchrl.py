"""The same histories through this library and through TorchRL, where that is: same slots, keys, shapes and laws."""

import functools
import itertools
import operator
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict

import interop
from tests.interop.slice_model import SliceModel, cut, shares

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl.data import replay_buffers as other

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = (interop, other)


def buffers(make):
    """The same buffer of both libraries."""
    return [make(library) for library in BOTH]


def check_alike(left, right):
    """Same keys, dtypes and shapes, apart from the number of rows."""
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        assert left[key].dtype == right[key].dtype, key
        assert left[key].shape[1:] == right[key].shape[1:], key


def check_info_alike(left, right):
    assert set(left) == set(right)
    for key, mine in left.items():
        theirs = right[key]
        assert type(mine) is type(theirs), key
        for one, another in zip(
            *((each if isinstance(each, tuple) else (each,)) for each in (mine, theirs)), strict=True
        ):
            assert (one.dtype, one.shape[1:]) == (another.dtype, another.shape[1:]), key


def check_same_law(left, right):
    """Two samples of the same things, by a chi-square test of both."""
    mine, theirs = Counter(left), Counter(right)
    assert set(mine) == set(theirs)
    keys = list(mine)
    if len(keys) > 1:
        table = np.array([[mine[key] for key in keys], [theirs[key] for key in keys]])
        assert stats.chi2_contingency(table).pvalue > 1e-4


def check_same_state(left, right):
    assert len(left) == len(right)
    assert left.write_count == right.write_count
    assert left.writer._cursor == right.writer._cursor
    mine, theirs = left[:], right[:]
    check_alike(mine, theirs)
    assert mine.batch_size == theirs.batch_size
    for key in mine.keys(True, True):
        assert torch.equal(mine[key], theirs[key])


def histories(seed, lanes=(), most=30, chance=0.25):
    model = SliceModel(20, lanes)
    model.random = np.random.default_rng(seed)
    for _ in range(6):
        yield model, model.write_some(int(model.random.integers(2, most)), chance)


def made(library, sampler, lanes=(), kind="TensorDictReplayBuffer", storage="LazyTensorStorage", **choices):
    items = 20 * int(np.prod(lanes or 1))
    store = getattr(library, storage)(items, ndim=1 + len(lanes))
    return getattr(library, kind)(storage=store, sampler=sampler(library), **choices)


@pytest.mark.parametrize("lanes", [(), (2,)])
@pytest.mark.parametrize("kind", ["ReplayBuffer", "TensorDictReplayBuffer"])
@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
def test_writes_and_uniform_draws(lanes, kind, storage):
    pair = buffers(lambda library: made(library, lambda one: one.RandomSampler(), lanes, kind, storage))
    for _, data in histories(0, lanes):
        index = [buffer.extend(data.clone()) for buffer in pair]
        assert torch.equal(*index) and index[0].dtype == index[1].dtype
        check_same_state(*pair)
        samples = [buffer.sample(50, return_info=True) for buffer in pair]
        check_alike(samples[0][0], samples[1][0])
        check_info_alike(samples[0][1], samples[1][1])
        assert samples[0][0].batch_size == samples[1][0].batch_size
    check_same_law(*(buffer.sample(4000)["x"].reshape(-1).tolist() for buffer in pair))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("lanes", [(), (2,)])
def test_draws_without_replacement(drop_last, lanes):
    def sampler(library):
        return library.SamplerWithoutReplacement(drop_last=drop_last)

    pair = buffers(lambda library: made(library, sampler, lanes, batch_size=6))
    for _, data in histories(1, lanes):
        for buffer in pair:
            buffer.extend(data.clone())
        if drop_last and len(pair[0]) < 6:
            continue
        for _ in range(2):
            epochs = [[batch["x"].tolist() for batch in buffer] for buffer in pair]
            assert next([len(batch) for batch in epoch] for epoch in epochs) == [len(batch) for batch in epochs[1]]
            if not drop_last:
                assert sorted(functools.reduce(operator.iadd, epochs[0], [])) == sorted(
                    functools.reduce(operator.iadd, epochs[1], [])
                )
    fixed = buffers(lambda library: made(library, lambda one: one.SamplerWithoutReplacement(shuffle=False)))
    for buffer in fixed:
        buffer.extend(data.reshape(-1)[:10].clone())
    assert [fixed[0].sample(4)["x"].tolist() for _ in range(4)] == [fixed[1].sample(4)["x"].tolist() for _ in range(4)]


SLICES = {
    "strict": {"slice_len": 3},
    "not strict": {"slice_len": 3, "strict_length": False},
    "by count": {"num_slices": 200},
    "of ids": {"slice_len": 2, "traj_key": "id"},
    "of ends": {"slice_len": 2, "end_key": ("next", "done")},
    "nothing told": {"slice_len": 2, "traj_key": "id"},
    "span on the left": {"slice_len": 3, "span": (True, False)},
    "span of one on the left": {"slice_len": 3, "span": (1, False)},
    "span on the right": {"slice_len": 3, "span": (False, True)},
    "filled up": {"slice_len": 3, "strict_length": False, "pad_output": True},
    "another key": {"slice_len": 2, "truncated_key": ("next", "cut")},
    "cached": {"slice_len": 2, "cache_values": True},
}


def slices_of(batch, choices):
    key = choices.get("truncated_key", ("next", "truncated"))
    ends = batch[key].reshape(-1).tolist()
    if ("collector", "mask") not in batch.keys(True):
        return cut(batch["x"].tolist(), ends)
    real = batch["collector", "mask"].reshape(-1)
    return cut(batch["x"][real].tolist(), batch[key].reshape(-1)[real].tolist())


@pytest.mark.parametrize("choices", SLICES.values(), ids=SLICES)
@pytest.mark.parametrize("lanes", [(), (2,)])
@pytest.mark.parametrize("seed", [0, 1])
def test_slices(choices, lanes, seed):
    torch.manual_seed(seed)
    pair = buffers(lambda library: made(library, lambda one: one.SliceSampler(**choices), lanes))
    compared = 0
    for model, data in histories(seed, lanes, chance=0.25):
        for buffer in pair:
            buffer.extend(data.clone())
        least = 1 if choices.get("strict_length") is False else choices.get("slice_len", 3)
        if max(map(len, model.trajectories())) < least:
            continue
        many = [[buffer.sample(600, return_info=True) for _ in range(4)] for buffer in pair]
        samples = [each[0] for each in many]
        check_alike(samples[0][0], samples[1][0])
        check_info_alike(samples[0][1], samples[1][1])
        check_same_law(*([one for batch, _ in each for one in slices_of(batch, choices)] for each in many))
        compared += 1
    assert compared > 2


def test_no_ends_are_told():
    pair = buffers(lambda library: made(library, lambda one: one.SliceSampler(slice_len=2, truncated_key=None)))
    for _, data in histories(3):
        for buffer in pair:
            buffer.extend(data.clone())
    samples = [buffer.sample(20, return_info=True) for buffer in pair]
    check_alike(samples[0][0], samples[1][0])
    check_info_alike(samples[0][1], samples[1][1])


@pytest.mark.parametrize("name", ["is_init", "stored ends"])
def test_what_is_told_where_more_is_stored(name):
    """torchrl looks at the named key alone; this library at all markers, unless `only_named_keys`."""

    def sampler(library):
        alone = {"only_named_keys": True} if library is interop else {}
        return library.SliceSampler(slice_len=3, traj_key="id", **alone)

    pair = buffers(lambda library: made(library, sampler))
    for _, data in histories(4):
        if name == "is_init":
            data["is_init"] = data["x"].unsqueeze(-1) % 5 == 0
        else:
            data["next", "terminated"] = data["x"].unsqueeze(-1) % 3 == 0
            data["next", "truncated"] = data["x"].unsqueeze(-1) % 7 == 0
        for buffer in pair:
            buffer.extend(data.clone())
    samples = [buffer.sample(900, return_info=True) for buffer in pair]
    check_alike(samples[0][0], samples[1][0])
    check_info_alike(samples[0][1], samples[1][1])
    keys = ["x", ("next", "done"), ("next", "truncated"), ("next", "terminated")] + ["is_init"] * (name == "is_init")
    check_same_law(
        *(list(zip(*(batch[key].reshape(-1).tolist() for key in keys), strict=True)) for batch, _ in samples)
    )


@pytest.mark.parametrize("choices", [{"ends": True}, {"trajectories": True}])
def test_given_boundaries(choices):
    ends = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0, 0, 0], dtype=torch.bool)
    ids = torch.tensor([4, 4, 4, 2, 2, 2, 2, 4, 4, 4])
    given = {"ends": ends} if "ends" in choices else {"trajectories": ids}

    def make(library):
        storage = library.TensorStorage(TensorDict({"x": torch.arange(10)}, [10]))
        return library.ReplayBuffer(
            storage=storage, sampler=library.SliceSampler(slice_len=3, cache_values=True, **given)
        )

    samples = [buffer.sample(3 * 600, return_info=True) for buffer in buffers(make)]
    check_info_alike(samples[0][1], samples[1][1])
    check_same_law(*([tuple(each) for each in batch["x"].reshape(-1, 3).tolist()] for batch, _ in samples))


@pytest.mark.parametrize("lanes", [(), (2,)])
@pytest.mark.parametrize("strict", [False, True])
def test_slices_without_replacement(lanes, strict):
    pair = buffers(lambda library: made(library, lambda one: one.RandomSampler(), lanes))
    for model, data in itertools.islice(histories(5, lanes), 4):
        for buffer in pair:
            buffer.extend(data.clone())
        if strict and min(map(len, model.trajectories())) < 2:
            continue
        found = []
        for library, buffer in zip(BOTH, pair, strict=True):
            buffer.set_sampler(library.SliceSamplerWithoutReplacement(num_slices=4, strict_length=strict))
            found.append([slices_of(buffer.sample(8), {}) for _ in range(250)])
        assert [len(batch) for batch in found[0]] == [len(batch) for batch in found[1]]
        legal = shares(model.trajectories(), 2, strict)
        for batches in found:
            assert {each for batch in batches for each in batch} <= set(legal)


def test_the_items_of_greatest_value():
    def make(library):
        writer = library.TensorDictMaxValueWriter(rank_key="key")
        return library.TensorDictReplayBuffer(storage=library.LazyTensorStorage(5), writer=writer, batch_size=4)

    pair = buffers(make)
    random = np.random.default_rng(0)
    for _ in range(8):
        data = TensorDict({"key": torch.from_numpy(random.permutation(50)[:7]).float(), "x": torch.arange(7)}, [7])
        index = [buffer.extend(data.clone()) for buffer in pair]
        assert torch.equal(*index)
        assert sorted(pair[0][:]["key"].tolist()) == sorted(pair[1][:]["key"].tolist())
        assert torch.equal(pair[0][:]["key"], pair[1][:]["key"])
        check_alike(*(buffer.sample() for buffer in pair))
    one = TensorDict({"key": torch.tensor(100.0), "x": torch.tensor(1)})
    assert pair[0].add(one.clone()) == pair[1].add(one.clone())
    assert pair[0].add(one.clone().set("key", torch.tensor(-1.0))) is pair[1].add(one.set("key", torch.tensor(-1.0)))


@pytest.mark.parametrize("choices", [{}, {"sample_from_all": True}, {"p": [0.2, 0.8]}, {"num_buffer_sampled": 3}])
def test_ensembles(choices):
    def make(library):
        members = [made(library, lambda one: one.RandomSampler()) for _ in range(2)]
        for place, member in enumerate(members):
            member.extend(TensorDict({"x": torch.arange(6) + 100 * place}, [6]))
        return library.ReplayBufferEnsemble(*members, **choices)

    pair = buffers(make)
    samples = [buffer.sample(12, return_info=True) for buffer in pair]
    check_alike(samples[0][0], samples[1][0])
    assert samples[0][0].batch_size == samples[1][0].batch_size
    assert set(samples[0][1].keys(True, True)) == set(samples[1][1].keys(True, True))
    assert len(pair[0]) == len(pair[1])
    check_same_law(
        *([each for _ in range(100) for each in buffer.sample(12)["x"].reshape(-1).tolist()] for buffer in pair)
    )

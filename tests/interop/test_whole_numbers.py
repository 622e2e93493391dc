"""Sizes are whole numbers of any kind: ints of every library, floats such as 1e5, and arrays and tensors without dims."""

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
import interop
from fbuf import priority_tree
from interop import transforms
from tests.interop.rows import check_same, flat_td

SAME = [4.0, np.int8(4), np.uint64(4), np.float32(4), np.float64(4), np.array(4), np.array(4.0), torch.tensor(4)]
SAME += [torch.tensor(4.0), torch.tensor(4, dtype=torch.uint8), torch.tensor(4.0, dtype=torch.bfloat16), jnp.float32(4)]
WRONG = [
    4.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    True,
    np.True_,
    torch.tensor(True),
    np.array(True),
    "4",
    b"4",
    [4],
]
WRONG += [
    np.array([4, 4]),
    torch.zeros(2),
    torch.tensor(4.5),
    np.float32(4.5),
    4 + 0j,
    decimal.Decimal("4.5"),
    object(),
]
WRONG += [torch.empty((), device="meta")]


PRIORITIZED = interop.PrioritizedSampler(8, 0.5, 0.5)


def step():
    return {"obs": torch.zeros(8, 3), "done": torch.zeros(8, 1, dtype=torch.bool)}


def sampled(sampler, size=4):
    storage = interop.LazyTensorStorage(8)
    storage.set(slice(0, 8), TensorDict({"episode": torch.zeros(8), **step()}, [8]))
    return sampler.sample(storage, size)[0]


def filled(**kwargs):
    buffer = interop.TensorDictReplayBuffer(storage=interop.LazyTensorStorage(8), **kwargs)
    buffer.extend(flat_td(range(8)))
    return buffer


def member_of(n):
    buffers = [filled(), filled(), filled(), filled()]
    return interop.ReplayBufferEnsemble(*buffers, num_buffer_sampled=n).sampler.num_buffer_sampled


def draws_of_a_functional_buffer(n):
    buffer = fbuf.Buffer(8)
    state, _ = buffer.extend(buffer.init(jnp.zeros(())), jnp.arange(8.0))
    return buffer.sample(state, jax.random.key(0), n)[2].slots.shape


# What a size makes: an object whose settings are compared, or a number.
SIZES = {
    "fbuf.Buffer": lambda n: fbuf.Buffer(n),
    "fbuf.Buffer lanes": lambda n: fbuf.Buffer(8, lanes=(n,)),
    "fbuf.Buffer.sample": draws_of_a_functional_buffer,
    "fbuf.Slices": lambda n: fbuf.Slices(n),
    "fbuf.Slices least": lambda n: fbuf.Slices(8, least=n),
    "fbuf.Slices burn_in": lambda n: fbuf.Slices(8, burn_in=n),
    "fbuf.Frames": lambda n: fbuf.Frames(("obs",), stack=n),
    "fbuf.Frames finals": lambda n: fbuf.Frames(("obs",), finals=n),
    "fbuf.HashTable": lambda n: fbuf.HashTable(n),
    "priority tree": lambda n: priority_tree.init(n).capacity,
    "ListStorage": lambda n: interop.ListStorage(n).max_size,
    "LazyStackStorage": lambda n: interop.LazyStackStorage(n).max_size,
    "CompressedListStorage": lambda n: interop.CompressedListStorage(n).max_size,
    "CompressedListStorage level": lambda n: interop.CompressedListStorage(8, compression_level=n).compression_level,
    "LazyTensorStorage": lambda n: interop.LazyTensorStorage(n).max_size,
    "LazyTensorStorage ndim": lambda n: interop.LazyTensorStorage(8, ndim=n).ndim,
    "LazyMemmapStorage": lambda n: interop.LazyMemmapStorage(n).max_size,
    "LazyFrameStorage": lambda n: interop.LazyFrameStorage(n).max_size,
    "LazyFrameStorage stack": lambda n: interop.LazyFrameStorage(8, stack=n),
    "Storage.random_index": lambda n: filled().storage.random_index(n).shape,
    "batch_size": lambda n: filled(batch_size=n).batch_size,
    "prefetch": lambda n: len(filled(batch_size=2, prefetch=n).sample()),
    "sample": lambda n: filled().sample(n).batch_size,
    "dim_extend": lambda n: interop.ReplayBuffer(storage=interop.LazyTensorStorage(8), dim_extend=n).dim_extend,
    "consume_after_n_samples": lambda n: interop.ReplayBuffer(consume_after_n_samples=n).sampler.max_sample_count,
    "to_fbuf": lambda n: filled().to_fbuf(n)[0].capacity,
    "num_buffer_sampled": member_of,
    "RandomSampler.sample": lambda n: sampled(interop.RandomSampler(), n).shape,
    "PrioritizedSampler": lambda n: interop.PrioritizedSampler(n, 0.5, 0.5).max_size,
    "SliceSampler slice_len": lambda n: interop.SliceSampler(slice_len=n).slice_len,
    "SliceSampler num_slices": lambda n: interop.SliceSampler(num_slices=n).num_slices,
    "SliceSampler.sample": lambda n: sampled(interop.SliceSampler(slice_len=2, traj_key="episode"), n)[0].shape,
    "SliceSamplerWithoutReplacement": lambda n: interop.SliceSamplerWithoutReplacement(slice_len=n).slice_len,
    "PrioritizedSliceSampler": lambda n: interop.PrioritizedSliceSampler(8, 0.5, 0.5, slice_len=n).slice_len,
    "ConsumingSampler": lambda n: interop.ConsumingSampler(n).max_sample_count,
    "PromptGroupSampler": lambda n: interop.PromptGroupSampler(n).group_size,
    "PromptGroupSampler max_uses": lambda n: interop.PromptGroupSampler(2, max_uses=n).max_uses,
    "StalenessAwareSampler": lambda n: interop.StalenessAwareSampler(n).max_staleness,
    "Sequence": lambda n: interop.Sequence(n),
    "Sequence burn_in": lambda n: interop.Sequence(2, burn_in=n),
    "Sequence dilation": lambda n: interop.Sequence(2, dilation=n),
    "LinearScheduler": lambda n: interop.LinearScheduler(PRIORITIZED, "beta", 1.0, n).num_steps,
    "StepScheduler": lambda n: interop.StepScheduler(PRIORITIZED, "beta", n_steps=n).n_steps,
    "MultiStep": lambda n: interop.MultiStep(0.5, n).n_steps,
    "MultiStepTransform": lambda n: transforms.MultiStepTransform(n, 0.5).n_steps,
    "CatFrames": lambda n: transforms.CatFrames(n, -1).N,
    "BurnInTransform": lambda n: transforms.BurnInTransform([], burn_in=n).burn_in,
    "RandomCropTensorDict": lambda n: transforms.RandomCropTensorDict(n).sub_seq_len,
    "Resize": lambda n: transforms.Resize(n),
    "CenterCrop": lambda n: transforms.CenterCrop(n),
    "Crop": lambda n: transforms.Crop(8, top=n),
    "Categorical": lambda n: interop.Categorical(n),
    "OneHot": lambda n: interop.OneHot(n),
    "Binary": lambda n: interop.Binary(n),
    "MultiCategorical": lambda n: interop.MultiCategorical([n, 2]),
    "MultiOneHot": lambda n: interop.MultiOneHot([n, 2]),
    "MCTSForest": lambda n: interop.MCTSForest(max_size=n).max_size,
    "RandomProjectionHash": lambda n: interop.RandomProjectionHash(n_components=n).n_components,
    "BinaryToDecimal": lambda n: interop.BinaryToDecimal(n, "cpu", torch.int64).num_bits,
}


def traits(made):
    """What two objects of equal settings have in common."""
    return made if isinstance(made, int | tuple | torch.Size) or type(made).__eq__ is not object.__eq__ else repr(made)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_may_be_any_whole_number(size):
    make = SIZES[size]
    wanted = traits(make(4))
    for given in SAME:
        found = traits(make(given))
        assert found == wanted and type(found) is type(wanted), given
        if isinstance(found, int):
            assert type(found) is int


@pytest.mark.parametrize("size", SIZES)
def test_no_size_is_anything_else(size):
    for given in WRONG:
        with pytest.raises((TypeError, ValueError) if type(given) is list else TypeError):  # some sizes may be several
            SIZES[size](given)


def test_large_sizes_as_they_are_often_written():
    assert interop.LazyTensorStorage(1e5).max_size == fbuf.Buffer(1e5).capacity == 100_000
    assert hash(fbuf.Buffer(1e5)) == hash(fbuf.Buffer(100_000)) and fbuf.Buffer(1e5) == fbuf.Buffer(100_000)
    buffer = interop.TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=interop.LazyMemmapStorage(1e3), batch_size=32.0, prefetch=2.0
    )
    buffer.extend(flat_td(range(64)))
    assert len(buffer) == 64 and buffer.sample().batch_size == (32,)
    with pytest.raises(TypeError, match=r"capacity must be an int or a whole number such as 1e5.*got 0.5"):
        fbuf.Buffer(0.5)
    with pytest.raises(ValueError, match=r"max_size must be at least 1, got 0\.0"):
        interop.LazyTensorStorage(0.0)


def test_indices_stay_integers():
    buffer = filled()
    for index in (1.0, torch.tensor([1.0]), [1.0]):
        with pytest.raises((TypeError, IndexError)):
            buffer[index]


# ------------------------------------------------------------------ ids

IDS = [3, 3, 3, 7, 7, 3, 3, 3]
FLOATS = {
    "whole": torch.tensor(IDS).double(),
    "single": torch.tensor(IDS).float(),
    "half": torch.tensor(IDS).bfloat16(),
    "between": 1 + torch.tensor(IDS).double() * 2.0**-50,  # differ in the last bits
    "zeros": torch.tensor([0.0, -0.0, 0.0, 1.0, 1.0, 0.0, -0.0, 0.0]),
}


@pytest.mark.parametrize("storage", [interop.LazyTensorStorage, interop.LazyMemmapStorage, interop.LazyStackStorage])
@pytest.mark.parametrize("kind", FLOATS)
def test_ids_of_trajectories_may_be_floats(kind, storage):
    drawn = []
    for ids in (torch.tensor(IDS), FLOATS[kind]):
        sampler = interop.SliceSampler(slice_len=2, traj_key="episode")
        buffer = interop.TensorDictReplayBuffer(
            storage=storage(8), sampler=sampler, batch_size=64, generator=torch.Generator().manual_seed(0)
        )
        buffer.extend(TensorDict({"x": torch.arange(8), "episode": ids}, [8]))
        drawn.append(buffer.sample()["x"])
    check_same(*drawn)
    pairs = {tuple(pair) for pair in drawn[0].reshape(-1, 2).tolist()}
    assert (2, 3) not in pairs and (4, 5) not in pairs and (3, 4) in pairs


@pytest.mark.parametrize("kind", FLOATS)
def test_given_ids_may_be_floats(kind):
    drawn = []
    for ids in (torch.tensor(IDS), FLOATS[kind]):
        sampler = interop.SliceSampler(slice_len=2, trajectories=ids, cache_values=True)
        drawn.append(filled(sampler=sampler, generator=torch.Generator().manual_seed(0)).sample(64)["obs"])
    check_same(*drawn)


@pytest.mark.parametrize("kind", ["single", "zeros"])
def test_ids_inside_jit_may_be_floats(kind):
    slots = []
    for ids in (np.array(IDS, np.int32), FLOATS[kind].float().numpy()):
        buffer = fbuf.Buffer(8, fbuf.Slices(2), trajectories=fbuf.Trajectories(id="id"))
        state = buffer.init({"id": jnp.zeros((), ids.dtype)})
        state, _ = buffer.extend(state, {"id": jnp.asarray(ids)})
        slots.append(buffer.sample(state, jax.random.key(0), 64)[2].slots)
    check_same(*map(torch.from_numpy, map(np.array, slots)))


def test_ids_of_prompts_may_be_whole_floats():
    buffer = interop.TensorDictReplayBuffer(
        storage=interop.LazyTensorStorage(8), sampler=interop.PromptGroupSampler(2), batch_size=4
    )
    buffer.extend(TensorDict({"prompt_id": torch.tensor([5.0, 2.0, 2.0, 5.0, 9.0, 9.0])}, [6]))
    assert buffer.sample()["prompt_id"].reshape(2, 2).diff().abs().sum() == 0
    buffer.extend(TensorDict({"prompt_id": torch.tensor([0.5, float("inf")])}, [2]))
    with pytest.raises(TypeError, match="must be integers or texts"):
        buffer.sample()

"""Several buffers sampled together, their entries renamed and their images resized so that they can be stacked."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    StorageEnsemble,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from interop.transforms import Compose, RenameTransform, Resize, ToTensorImage

# How the transforms are printed: those of the members among the storages, that of the ensemble at its end.
OF_MEMBERS = """\
        transforms=[Compose(
                ToTensorImage(keys=['pixels', ('next', 'pixels')]),
                Resize(w=32, h=32, interpolation=InterpolationMode.BILINEAR, keys=['pixels', ('next', 'pixels')]),
                RenameTransform(keys=[('some', 'key')])), Compose(
                ToTensorImage(keys=['pixels', ('next', 'pixels')]),
                Resize(w=32, h=32, interpolation=InterpolationMode.BILINEAR, keys=['pixels', ('next', 'pixels')]),
                RenameTransform(keys=['another_key']))]),
    samplers=SamplerEnsemble(
"""
OF_THE_ENSEMBLE = """\
batch_size=None,
transform=Compose(
        Resize(w=33, h=33, interpolation=InterpolationMode.BILINEAR, keys=['pixels'])),
collate_fn=<"""


def ensemble(storage):
    rb0 = TensorDictReplayBuffer(
        storage=storage(10),
        transform=Compose(
            ToTensorImage(in_keys=["pixels", ("next", "pixels")]),
            Resize(32, in_keys=["pixels", ("next", "pixels")]),
            RenameTransform([("some", "key")], ["renamed"]),
        ),
    )
    rb1 = TensorDictReplayBuffer(
        storage=storage(10),
        transform=Compose(
            ToTensorImage(in_keys=["pixels", ("next", "pixels")]),
            Resize(32, in_keys=["pixels", ("next", "pixels")]),
            RenameTransform(["another_key"], ["renamed"]),
        ),
    )
    return ReplayBufferEnsemble(
        rb0,
        rb1,
        p=[0.5, 0.5],
        transform=Resize(33, in_keys=["pixels"], out_keys=["pixels33"]),
    )


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_two_datasets_of_unlike_names_and_sizes(storage):
    rb = ensemble(storage)
    data0 = TensorDict(
        {
            "pixels": torch.randint(255, (10, 244, 244, 3)),
            ("next", "pixels"): torch.randint(255, (10, 244, 244, 3)),
            ("some", "key"): torch.randn(10),
        },
        batch_size=[10],
    )
    data1 = TensorDict(
        {
            "pixels": torch.randint(255, (10, 64, 64, 3)),
            ("next", "pixels"): torch.randint(255, (10, 64, 64, 3)),
            "another_key": torch.randn(10),
        },
        batch_size=[10],
    )
    rb[0].extend(data0)
    rb[1].extend(data1)
    for _ in range(2):
        sample = rb.sample(10)
        assert sample["next", "pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels33"].shape == torch.Size([2, 5, 3, 33, 33])
        assert sample["renamed"].shape == torch.Size([2, 5])
        assert sample["pixels"].dtype == torch.float32 and 0 <= sample["pixels"].min() <= sample["pixels"].max() <= 1
        given = torch.stack([data0["some", "key"], data1["another_key"]])
        places = sample["index", "buffer_ids"], sample["index", "index"]
        assert torch.equal(sample["renamed"], given[places])
        assert all(value.shape[:2] == (2, 5) for value in sample.values(True))


def test_how_it_is_printed():
    printed = str(ensemble(LazyMemmapStorage))
    assert printed.startswith(
        "ReplayBufferEnsemble(\n    storages=StorageEnsemble(\n        storages=(LazyMemmapStorage("
    )
    assert OF_MEMBERS in printed
    assert "\n    samplers=SamplerEnsemble(\n        samplers=(RandomSampler(" in printed
    assert "\n    writers=WriterEnsemble(\n        writers=(TensorDictRoundRobinWriter(" in printed
    assert f"\n{OF_THE_ENSEMBLE}" in printed


def test_the_whole_of_it_and_all_of_one_member():
    rb = ensemble(LazyTensorStorage)
    images = torch.randint(255, (10, 8, 8, 3))
    rb[0].extend(TensorDict({"pixels": images, ("next", "pixels"): images, ("some", "key"): torch.arange(10)}, [10]))
    assert rb[:] is rb
    rows = rb[0, :]
    assert rows["renamed"].tolist() == list(range(10))
    assert rows["pixels"].shape == torch.Size([10, 3, 32, 32])
    assert ("some", "key") not in rows.keys(True) and "pixels33" not in set(rows.keys())
    assert rb[0, 3]["renamed"] == 3 and rb[0, 2:4]["renamed"].tolist() == [2, 3]


def test_built_of_components():
    buffers = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    rb = ReplayBufferEnsemble(
        storages=StorageEnsemble(*(each.storage for each in buffers)),
        samplers=SamplerEnsemble(*(each.sampler for each in buffers), p=[1, 3]),
        writers=WriterEnsemble(*(each.writer for each in buffers)),
        batch_size=4,
    )
    rb[0].extend(TensorDict({"a": torch.zeros(10)}, [10]))
    rb[1].extend(TensorDict({"a": torch.ones(10)}, [10]))
    assert rb.sampler.p.tolist() == [0.25, 0.75]
    sample = rb.sample()
    assert sample.batch_size == (2, 2) and torch.equal(sample["a"], sample["index", "buffer_ids"].float())

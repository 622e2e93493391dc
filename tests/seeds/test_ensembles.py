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

PIXELS = ["pixels", ("next", "pixels")]


def to_image(data):
    """[..., height, width, channels] of 0 to 255 to [..., channels, height, width] of 0 to 1."""
    for key in PIXELS:
        data[key] = data[key].movedim(-1, -3) / 255
    return data


class Resize(torch.nn.Module):
    """Images of another size, under keys of their own or in place."""

    def __init__(self, size, in_keys, out_keys=None):
        super().__init__()
        self.size, self.in_keys, self.out_keys = size, in_keys, out_keys or in_keys

    def forward(self, data):
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            images = data[source]
            resized = torch.nn.functional.interpolate(
                images.flatten(0, -4), size=(self.size, self.size), mode="bilinear"
            )
            data[target] = resized.unflatten(0, images.shape[:-3])
        return data


def rename(old, new):
    return lambda data: data.rename_key_(old, new)


def chain(*transforms):
    return torch.nn.Sequential(*map(Applied, transforms))


class Applied(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, data):
        return self.function(data)


def images(size, key):
    return TensorDict(
        {
            "pixels": torch.randint(255, (10, size, size, 3)),
            ("next", "pixels"): torch.randint(255, (10, size, size, 3)),
            key: torch.randn(10),
        },
        batch_size=[10],
    )


@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_two_datasets_of_unlike_names_and_sizes(storage):
    rb0 = TensorDictReplayBuffer(
        storage=storage(10), transform=chain(to_image, Resize(32, in_keys=PIXELS), rename(("some", "key"), "renamed"))
    )
    rb1 = TensorDictReplayBuffer(
        storage=storage(10), transform=chain(to_image, Resize(32, in_keys=PIXELS), rename("another_key", "renamed"))
    )
    rb = ReplayBufferEnsemble(rb0, rb1, p=[0.5, 0.5], transform=Resize(33, in_keys=["pixels"], out_keys=["pixels33"]))
    lines = [line.strip() for line in repr(rb).splitlines()]
    assert lines[:3] == ["ReplayBufferEnsemble(", "storages=StorageEnsemble(", f"storages=({storage.__name__}("]
    for part in ("samplers=SamplerEnsemble(", "writers=WriterEnsemble(", "batch_size=None,", "transform=Compose("):
        assert part in lines
    rb[0].extend(images(64, ("some", "key")))
    rb[1].extend(images(48, "another_key"))
    for _ in range(2):
        sample = rb.sample(10)
        assert sample["next", "pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels33"].shape == torch.Size([2, 5, 3, 33, 33])
        assert sample["renamed"].shape == torch.Size([2, 5])
        assert all(value.shape[:2] == (2, 5) for value in sample.values(True))


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

"""Images beside an installed torchrl. Its Resize and crops need torchvision: `test_images.py` has a model of them."""

import pytest
import torch
from tensordict import TensorDict

theirs = pytest.importorskip("torchrl.envs.transforms", reason="torchrl is not installed")

from interop import transforms as ours  # noqa: E402

DTYPES = [torch.uint8, torch.int64, torch.float32, torch.float64, torch.float16, torch.bool]
OPTIONS = [
    {},
    {"from_int": True},
    {"from_int": False},
    {"shape_tolerant": True},
    {"unsqueeze": True},
    {"dtype": torch.float16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 4, 5), (2, 4, 5, 3), (2, 3, 4, 5, 1)], ids=str)
def test_images_as_tensors(options, dtype, shape):
    data = TensorDict({"pixels": torch.randint(0, 256, shape).to(dtype)})
    found = ours.ToTensorImage(**options)(data.clone())["pixels"]
    expected = theirs.ToTensorImage(**options)(data.clone())["pixels"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64], ids=str)
def test_gray(dtype):
    data = TensorDict({"pixels": torch.randint(0, 256, (2, 5, 3, 6, 7)).to(dtype)}, [2, 5])
    found, expected = ours.GrayScale()(data.clone()), theirs.GrayScale()(data.clone())
    torch.testing.assert_close(found["pixels"], expected["pixels"], rtol=0, atol=0)


def test_the_same_names():
    for name in ("ToTensorImage", "GrayScale"):
        assert repr(getattr(ours, name)()) == repr(getattr(theirs, name)())
        assert getattr(ours, name)().in_keys == getattr(theirs, name)().in_keys

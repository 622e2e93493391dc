"""Images as tensors, resized, cropped and gray, against NumPy."""

import enum

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop.transforms import CenterCrop, Crop, GrayScale, Resize, ToTensorImage

INTEGERS = [torch.uint8, torch.int16, torch.int32, torch.int64]


def td(pixels, batch_dims=1):
    return TensorDict({"pixels": pixels}, pixels.shape[:batch_dims])


def drawn(*shape, dtype=torch.uint8):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def bilinear(images, w, h):
    """An antialiased bilinear mean."""
    weights = []
    for size, wanted in ((images.shape[-2], w), (images.shape[-1], h)):
        scale = size / wanted
        centers = (np.arange(wanted)[:, None] + 0.5) * scale
        each = np.clip(1 - np.abs(np.arange(size) + 0.5 - centers) / max(scale, 1), 0, None)
        weights.append(each / each.sum(1, keepdims=True))
    return weights[0] @ images @ weights[1].T


@pytest.mark.parametrize(("batch", "dtype"), list(zip([(), (2,), (2, 3), (2,)], INTEGERS, strict=True)))
def test_integers_become_channels_first_of_0_to_1(dtype, batch):
    pixels = drawn(*batch, 4, 5, 3, dtype=dtype)
    pixels.view(-1)[0] = 255
    out = ToTensorImage()(td(pixels.clone(), len(batch)))["pixels"]
    assert out.dtype == torch.float32 and out.max() == 1.0
    np.testing.assert_array_equal(out.numpy(), np.moveaxis(pixels.numpy(), -1, -3).astype(np.float32) / np.float32(255))


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, torch.float64, 51.0),
        ({"from_int": False}, torch.uint8, 51.0),
        ({"dtype": torch.bfloat16}, torch.uint8, 0.2),
        ({"dtype": torch.uint8, "from_int": False}, torch.int64, 51),
    ],
)
def test_scale_and_dtype(options, dtype, expected):
    out = ToTensorImage(**options)(td(torch.full((2, 2, 2, 3), 51, dtype=dtype)))["pixels"]
    torch.testing.assert_close(out, torch.full_like(out, expected), rtol=0, atol=0)
    assert out.dtype == options.get("dtype", torch.float32)


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        ({"shape_tolerant": True}, (2, 3, 4, 5), (2, 3, 4, 5)),
        ({"shape_tolerant": True}, (2, 4, 5, 3), (2, 3, 4, 5)),
        ({"unsqueeze": True}, (4, 5, 3), (1, 3, 4, 5)),
        ({"unsqueeze": True}, (2, 4, 5, 3), (2, 3, 4, 5)),
    ],
)
def test_shapes(options, shape, expected):
    assert ToTensorImage(**options)(td(drawn(*shape), len(shape) - 3))["pixels"].shape == expected


@pytest.mark.parametrize(("w", "h"), [(4, 3), (3, 20)])
@pytest.mark.parametrize(
    ("dtype", "off"),
    [
        (torch.float64, 1e-9),
        (torch.float16, 0.5),
        (torch.uint8, 1.0),
        (torch.int64, 0.501),
    ],
)
def test_resizing_is_an_antialiased_bilinear_mean(dtype, off, w, h):
    pixels = drawn(2, 3, 8, 10, dtype=dtype)
    out = Resize(w, h)(td(pixels))["pixels"]
    assert out.dtype == dtype
    np.testing.assert_allclose(out.double().numpy(), bilinear(pixels.double().numpy(), w, h), rtol=0, atol=off)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_integers_do_not_wrap_around(mode, dtype):
    held = torch.iinfo(dtype)
    pixels = torch.full((1, 1, 6, 6), held.min, dtype=dtype)
    pixels[..., 2:4, 2:4] = held.max
    out = Resize(12, interpolation=mode)(td(pixels))["pixels"]
    assert out[0, 0, 5, 5].double() > held.max * 0.7
    assert out[0, 0, 0, 0].double() <= held.min + (held.max - held.min) * 0.3


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool, torch.float32, torch.bfloat16])
def test_nearest_takes_pixels_as_they_are(dtype):
    pixels = drawn(2, 3, 8, 10, dtype=dtype)
    out = Resize((3, 15), interpolation="nearest")(td(pixels))["pixels"]
    rows, columns = np.arange(3) * 8 // 3, np.arange(15) * 10 // 15
    assert torch.equal(out, pixels[..., rows, :][..., columns])
    assert Resize(3, interpolation="nearest-exact")(td(pixels))["pixels"][0, 0, 0, 0] == pixels[0, 0, 1, 1]


def test_batch_dims_come_back_and_the_right_size_is_left_alone():
    pixels = drawn(2, 3, 4, 3, 8, 10, dtype=torch.float32)
    for part, dims in ((pixels, 3), (pixels[0, 0, 0], 0), (pixels[:0], 3)):
        assert Resize(5)(td(part, dims))["pixels"].shape == (*part.shape[:-2], 5, 5)
    assert Resize(8, 10)(td(pixels, 3))["pixels"] is pixels
    strided = ToTensorImage()(td(drawn(2, 3, 9, 8, 3), 2))
    dense = Resize(4)(td(strided["pixels"].contiguous(), 2))["pixels"]
    torch.testing.assert_close(Resize(4)(strided)["pixels"], dense)


class Mode(enum.Enum):
    NEAREST_EXACT = "nearest-exact"


def test_reprs():
    shown = "Resize(w=32, h=32, interpolation=InterpolationMode.BILINEAR, keys=['pixels', ('next', 'pixels')])"
    assert repr(Resize(32, in_keys=["pixels", ("next", "pixels")])) == shown
    shown = "Resize(w=3, h=4, interpolation=InterpolationMode.NEAREST_EXACT, keys=['pixels'])"
    assert repr(Resize((3, 4), interpolation=Mode.NEAREST_EXACT)) == shown
    assert repr(Crop(2, 3, 1, 4)) == "Crop(w=2, h=3, top=1, left=4, keys=['pixels'])"
    assert repr(CenterCrop(2)) == "CenterCrop(w=2, h=2, keys=['pixels'])"


def test_bools_cannot_be_averaged():
    with pytest.raises(TypeError, match=r"'pixels' .*bools.*nearest"):
        Resize(3)(td(drawn(2, 3, 4, 4, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("crop", "top", "left"),
    [
        *((Crop(4, 3, top, left), top, left) for top in (0, -3, 15) for left in (5, -2, -12)),
        (Crop(11, 13, -1, -2), -1, -2),
        (CenterCrop(4, 4), 2, 3),
        (CenterCrop(5, 7), 2, 2),
        (CenterCrop(7, 9), 0, 0),
        (CenterCrop(11, 13), -1, -1),
        (CenterCrop(12, 4), -2, 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_a_crop_is_a_part_of_the_images_between_zeros(crop, top, left, dtype):
    pixels = (drawn(2, 3, 8, 10) // 2 + 1).to(torch.int32)
    padded = torch.nn.functional.pad(pixels, (20, 20, 20, 20))
    out = crop(td(pixels.to(dtype)))["pixels"]
    expected = padded[..., 20 + top : 20 + top + crop.w, 20 + left : 20 + left + crop.h]
    assert out.dtype == dtype and torch.equal(out.to(torch.int32), expected)


def test_crops_inside_are_views():
    pixels = drawn(2, 3, 8, 10)
    assert Crop(2)(td(pixels))["pixels"].data_ptr() == pixels.data_ptr()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
def test_gray_is_a_weighted_sum_of_channels(dtype):
    pixels = drawn(2, 4, 3, 8, 10, dtype=dtype)
    out = GrayScale()(td(pixels, 2))["pixels"]
    expected = np.tensordot(pixels.numpy().astype(float), [0.2989, 0.587, 0.114], (2, 0))[:, :, None]
    assert out.dtype == dtype
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=0, atol=1e-3 if dtype.is_floating_point else 1.0)

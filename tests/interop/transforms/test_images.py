"""Images as tensors, resized, cropped and gray, against NumPy."""

import enum

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop.transforms import CenterCrop, Crop, GrayScale, Resize, ToTensorImage

INTEGERS = [torch.uint8, torch.int16, torch.int32, torch.int64]


def td(pixels, batch_dims=1):
    return TensorDict({"pixels": pixels, "other": torch.zeros(pixels.shape[:batch_dims])}, pixels.shape[:batch_dims])


def drawn(*shape, dtype=torch.uint8):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def triangles(size, wanted):
    """Weights [wanted, size] of pixels in an antialiased bilinear mean."""
    scale = size / wanted
    centers = (np.arange(wanted)[:, None] + 0.5) * scale
    weights = np.clip(1 - np.abs(np.arange(size) + 0.5 - centers) / max(scale, 1), 0, None)
    return weights / weights.sum(1, keepdims=True)


def bilinear(images, w, h):
    return triangles(images.shape[-2], w) @ images @ triangles(images.shape[-1], h).T


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_become_channels_first_of_0_to_1(dtype, batch):
    pixels = drawn(*batch, 4, 5, 3, dtype=dtype)
    pixels.view(-1)[0] = 255
    out = ToTensorImage()(td(pixels.clone(), len(batch)))["pixels"]
    assert out.dtype == torch.float32
    assert out.max() == 1.0
    np.testing.assert_array_equal(out.numpy(), np.moveaxis(pixels.numpy(), -1, -3).astype(np.float32) / np.float32(255))


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, torch.float64, 51.0),
        ({"from_int": True}, torch.float32, 0.2),
        ({"from_int": True}, torch.float64, 0.2),
        ({"from_int": False}, torch.uint8, 51.0),
        ({"dtype": torch.float64}, torch.uint8, 51 / 255),
        ({"dtype": torch.bfloat16}, torch.uint8, 0.2),
        ({"dtype": torch.uint8, "from_int": False}, torch.int64, 51),
    ],
)
def test_what_is_scaled_and_cast(options, dtype, expected):
    pixels = torch.full((2, 2, 2, 3), 51, dtype=dtype)
    data = td(pixels)
    out = ToTensorImage(**options)(data)["pixels"]
    wanted = options.get("dtype", torch.float32)
    torch.testing.assert_close(out, torch.full_like(out, expected), rtol=0, atol=0)
    assert out.dtype == wanted
    assert (pixels == 51).all()


def test_images_that_are_channels_first_may_stay_and_single_ones_get_a_dim():
    first = drawn(2, 3, 4, 5)
    assert ToTensorImage(shape_tolerant=True)(td(first))["pixels"].shape == (2, 3, 4, 5)
    assert ToTensorImage(shape_tolerant=True)(td(drawn(2, 4, 5, 3)))["pixels"].shape == (2, 3, 4, 5)
    assert ToTensorImage(unsqueeze=True)(td(drawn(4, 5, 3), 0))["pixels"].shape == (1, 3, 4, 5)
    assert ToTensorImage(unsqueeze=True)(td(drawn(2, 4, 5, 3)))["pixels"].shape == (2, 3, 4, 5)


def test_wrong_images_are_refused_by_name_and_nothing_changes():
    transform = ToTensorImage(in_keys=["pixels", ("next", "pixels")])
    data = TensorDict({"pixels": drawn(2, 4, 5, 3), "next": {"pixels": drawn(2, 4)}}, [2])
    before = data.clone()
    with pytest.raises(ValueError, match=r"\('next', 'pixels'\).*\[\.\.\., height, width, channels\], got \[2, 4\]"):
        transform(data)
    assert (data == before).all()
    with pytest.raises(TypeError, match=r"'pixels' must be a tensor"):
        ToTensorImage()(TensorDict({"pixels": "image"}))
    with pytest.raises(ValueError, match="from_int=False"):
        ToTensorImage(dtype=torch.uint8)
    with pytest.raises(TypeError, match="dtype"):
        ToTensorImage(dtype="float32")


@pytest.mark.parametrize(("w", "h"), [(4, 3), (13, 17), (3, 20), (8, 2)])
def test_floats_are_antialiased_bilinear_means(w, h):
    pixels = drawn(2, 3, 8, 10, dtype=torch.float64) / 255
    out = Resize(w, h)(td(pixels))["pixels"]
    np.testing.assert_allclose(out.numpy(), bilinear(pixels.numpy(), w, h), atol=1e-12)
    single = Resize(w, h)(td(pixels.float()))["pixels"]
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), bilinear(pixels.numpy(), w, h), atol=1e-5)
    half = Resize(w, h)(td(pixels.half()))["pixels"]
    assert half.dtype == torch.float16
    np.testing.assert_allclose(half.numpy(), bilinear(pixels.numpy(), w, h), atol=2e-3)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_rounded_means(dtype):
    pixels = drawn(2, 3, 8, 10, dtype=dtype)
    out = Resize(4, 3)(td(pixels))["pixels"]
    assert out.dtype == dtype
    off = np.abs(out.double().numpy() - bilinear(pixels.numpy().astype(float), 4, 3))
    assert off.max() <= (1.0 if dtype == torch.uint8 else 0.5 + 1e-4)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
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
    assert Resize(5)(td(pixels, 3))["pixels"].shape == (2, 3, 4, 3, 5, 5)
    assert Resize(5)(td(pixels[0, 0, 0], 0))["pixels"].shape == (3, 5, 5)
    assert Resize(5)(td(pixels[:0], 3))["pixels"].shape == (0, 3, 4, 3, 5, 5)
    data = td(pixels, 3)
    assert Resize(8, 10)(data)["pixels"] is pixels
    strided = ToTensorImage()(td(drawn(2, 3, 9, 8, 3), 2))
    whole = Resize(4)(td(strided["pixels"].contiguous(), 2))["pixels"]
    torch.testing.assert_close(Resize(4)(strided)["pixels"], whole)


class Mode(enum.Enum):
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    LANCZOS = "lanczos"


def test_how_a_resize_is_given_and_shown():
    shown = "Resize(w=32, h=32, interpolation=InterpolationMode.BILINEAR, keys=['pixels', ('next', 'pixels')])"
    assert repr(Resize(32, in_keys=["pixels", ("next", "pixels")])) == shown
    assert repr(Resize(32, interpolation=Mode.BILINEAR, in_keys=["pixels", ("next", "pixels")])) == shown
    assert "w=3, h=4, interpolation=InterpolationMode.NEAREST_EXACT" in repr(
        Resize((3, 4), interpolation=Mode.NEAREST_EXACT)
    )
    for wrong in ("lanczos", Mode.LANCZOS, None, 2):
        with pytest.raises(ValueError, match="interpolation must be one of"):
            Resize(3, interpolation=wrong)
    for w, h, error in ((0, None, ValueError), (3, -1, ValueError), ("3", None, TypeError), (3.0, 2, TypeError)):
        with pytest.raises(error):
            Resize(w, h)
        with pytest.raises(error):
            CenterCrop(w, h)
        with pytest.raises(error):
            Crop(w, h)
    with pytest.raises(ValueError, match="two sizes"):
        Resize((3, 4), 5)


def test_what_cannot_be_resized_is_named():
    with pytest.raises(
        ValueError, match=r"Resize: 'pixels': images are \[\.\.\., channels, height, width\], got \[2, 4\]"
    ):
        Resize(3)(td(drawn(2, 4)))
    with pytest.raises(TypeError, match=r"'pixels': bools.*nearest"):
        Resize(3)(td(drawn(2, 3, 4, 4, dtype=torch.bool)))
    with pytest.raises(TypeError, match="'pixels': complex"):
        Resize(3)(td(drawn(2, 3, 4, 4).to(torch.complex64)))
    with pytest.raises(ValueError, match="'pixels': images have no pixels"):
        Resize(3)(td(drawn(2, 3, 0, 4)))


def padded(pixels, by=20):
    return torch.nn.functional.pad(pixels, (by, by, by, by))


@pytest.mark.parametrize(("w", "h"), [(4, 3), (8, 10), (1, 10), (3, 12), (11, 13), (9, 4)])
@pytest.mark.parametrize(("top", "left"), [(0, 0), (2, 5), (-3, 4), (7, -2), (15, 0), (-12, -12), (0, 14)])
def test_a_crop_is_a_part_of_the_images_between_zeros(w, h, top, left):
    pixels = drawn(2, 3, 8, 10) // 2 + 1
    out = Crop(w, h, top=top, left=left)(td(pixels))["pixels"]
    assert torch.equal(out, padded(pixels)[..., 20 + top : 20 + top + w, 20 + left : 20 + left + h])


@pytest.mark.parametrize(
    ("w", "h", "top", "left"),
    [(4, 4, 2, 3), (8, 10, 0, 0), (3, 5, 2, 2), (5, 7, 2, 2), (7, 9, 0, 0), (11, 13, -1, -1), (12, 4, -2, 3)],
)
def test_a_center_crop_is_in_the_middle(w, h, top, left):
    pixels = drawn(2, 3, 8, 10) // 2 + 1
    out = CenterCrop(w, h)(td(pixels))["pixels"]
    assert torch.equal(out, padded(pixels)[..., 20 + top : 20 + top + w, 20 + left : 20 + left + h])


def test_crops_inside_are_views_and_shown():
    pixels = drawn(2, 3, 8, 10)
    assert Crop(2)(td(pixels))["pixels"].data_ptr() == pixels.data_ptr()
    assert repr(Crop(2, 3, 1, 4)) == "Crop(w=2, h=3, top=1, left=4, keys=['pixels'])"
    assert repr(CenterCrop(2)) == "CenterCrop(w=2, h=2, keys=['pixels'])"
    for transform in (Crop(2), CenterCrop(2), GrayScale()):
        with pytest.raises(ValueError, match=r"'pixels': images are"):
            transform(td(pixels[0, 0]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
def test_gray_is_a_weighted_sum_of_channels(dtype):
    pixels = drawn(2, 4, 3, 8, 10, dtype=dtype)
    out = GrayScale()(td(pixels, 2))["pixels"]
    expected = np.tensordot(pixels.numpy().astype(float), [0.2989, 0.587, 0.114], (2, 0))[:, :, None]
    assert out.dtype == dtype
    tolerance = 1e-3 if dtype.is_floating_point else 1.0
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=0, atol=tolerance)
    with pytest.raises(ValueError, match=r"'pixels': images need 3 channels.*got \[2, 4, 1, 8, 10\]"):
        GrayScale()(td(pixels[:, :, :1], 2))

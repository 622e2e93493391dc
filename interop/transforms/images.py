"""Transforms of images: to tensors of channels first, to another size, to a part of them, to gray."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from interop.data.arguments import whole
from interop.ted.row_values import fresh
from interop.transforms.transform import Keys, TensorTransform

_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")


class ImageTransform(TensorTransform):
    """Changes images, of at least three dims: `in_keys`, ["pixels"] by default, into `out_keys`."""

    default_key = "pixels"

    def _check(self, images: Tensor) -> Tensor:
        if images.ndim < 3:
            raise ValueError("images have three dims, [..., channels, height, width]")
        return images


class ToTensorImage(ImageTransform):
    """Images [..., height, width, channels] of 0 to 255 as images [..., channels, height, width] of 0 to 1.

    Only strides are permuted: the result has the memory order of the images.

    Args:
        from_int: divide by 255; by default if the images are not of a floating dtype.
        unsqueeze: give single images, of three dims, a leading dim.
        dtype: of the result; torch's default dtype by default.
        shape_tolerant: leave the order of dims if the last is not 3: the images are [channels, ...] already.

    ValueError for an integer dtype unless `from_int` is False. TypeError for complex numbers.
    """

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Keys = None,
        out_keys: Keys = None,
        shape_tolerant: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.from_int = from_int
        self.unsqueeze = unsqueeze
        self.shape_tolerant = shape_tolerant
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        if not self.dtype.is_floating_point and from_int is not False:
            raise ValueError(f"images of 0 to 1 would be 0 as {dtype}: give a floating dtype, or from_int=False")

    def _apply_transform(self, observation: Tensor) -> Tensor:
        images = self._check(observation)
        if images.is_complex():
            raise TypeError("complex numbers are no images")
        scaled = not images.is_floating_point() if self.from_int is None else self.from_int
        if scaled:
            wide = self.dtype if self.dtype.itemsize >= 4 else torch.float32
            images = images / 255 if images.is_floating_point() else _as_floats(images, wide).div_(255)
        images = images.to(self.dtype)
        if not self.shape_tolerant or images.shape[-1] == 3:
            images = images.movedim(-1, -3)
        return images.unsqueeze(0) if self.unsqueeze and images.ndim == 3 else images


class Resize(ImageTransform):
    """Resizes images [..., channels, w, h]. Images of this size are not changed.

    Pixel centers are at half-integers. Bilinear and bicubic are antialiased. Floating dtypes are kept; values of integer
    dtypes are rounded and clamped to what the dtype holds. Bytes on the CPU are rounded after one dim and again after the
    other, as in torchvision.

    Args:
        w: size of the last dim but one, or both sizes.
        h: size of the last dim; `w` by default.
        interpolation: "nearest", "nearest-exact", "bilinear", "bicubic" or "area", or an object with such a `value`, as the
            `InterpolationMode` of torchvision.
    """

    def __init__(
        self,
        w: int | Sequence[int],
        h: int | None = None,
        interpolation: Any = "bilinear",
        in_keys: Keys = None,
        out_keys: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.w, self.h = _sizes(w, h)
        mode = getattr(interpolation, "value", interpolation)
        if mode not in _MODES:
            raise ValueError(f"interpolation must be one of {', '.join(_MODES)}, got {interpolation!r}")
        self.interpolation = mode

    def _apply_transform(self, observation: Tensor) -> Tensor:
        size = (self.w, self.h)
        if self._check(observation).shape[-2:] == size:
            return observation
        if 0 in observation.shape[:-3]:
            return observation.new_empty((*observation.shape[:-2], *size))
        resized = _resized(observation.reshape(-1, *observation.shape[-3:]), size, self.interpolation)
        return resized.reshape(*observation.shape[:-2], *size)

    def __repr__(self) -> str:
        mode = self.interpolation.upper().replace("-", "_")
        return f"Resize(w={self.w}, h={self.h}, interpolation=InterpolationMode.{mode}, keys={self.in_keys})"


class Crop(ImageTransform):
    """The part [..., top : top + w, left : left + h] of images; zeros outside of them. A view of the images if it is inside.

    Args:
        w: size of the last dim but one.
        h: size of the last dim; `w` by default.
        top, left: where it begins in the last dim but one, and in the last.
    """

    shown = ("w", "h", "top", "left")

    def __init__(
        self, w: int, h: int | None = None, top: int = 0, left: int = 0, in_keys: Keys = None, out_keys: Keys = None
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.w, self.h = _sizes(w, h)
        self.top = whole("top", top, least=-(2**31))
        self.left = whole("left", left, least=-(2**31))

    def _apply_transform(self, observation: Tensor) -> Tensor:
        return _window(self._check(observation), self.top, self.left, self.w, self.h)


class CenterCrop(ImageTransform):
    """The middle [..., w, h] of images; zeros around smaller ones. A view of images that are not smaller.

    Args:
        w: size of the last dim but one.
        h: size of the last dim; `w` by default.
    """

    shown = ("w", "h")

    def __init__(self, w: int, h: int | None = None, in_keys: Keys = None, out_keys: Keys = None) -> None:
        super().__init__(in_keys, out_keys)
        self.w, self.h = _sizes(w, h)

    def _apply_transform(self, observation: Tensor) -> Tensor:
        # Half a pixel too many goes to the even place, and half a pixel too few to the front.
        top, left = (
            round((size - target) / 2) if size >= target else -((target - size) // 2)
            for size, target in zip(self._check(observation).shape[-2:], (self.w, self.h), strict=True)
        )
        return _window(observation, top, left, self.w, self.h)


class GrayScale(ImageTransform):
    """Images [..., 3, height, width] as [..., 1, height, width]: 0.2989 red + 0.587 green + 0.114 blue.

    The dtype is kept; integers are rounded down. ValueError for another number of channels.
    """

    def __init__(self, in_keys: Keys = None, out_keys: Keys = None) -> None:
        super().__init__(in_keys, out_keys)

    def _apply_transform(self, observation: Tensor) -> Tensor:
        if self._check(observation).shape[-3] != 3:
            raise ValueError("images need 3 channels, [..., 3, height, width]")
        red, green, blue = observation.unbind(-3)
        gray = 0.2989 * red + 0.587 * green + 0.114 * blue
        return gray.to(observation.dtype).unsqueeze(-3)


def _as_floats(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers as floats in new memory."""
    return fresh(values.shape, dtype).copy_(values) if values.is_cpu and values.is_contiguous() else values.to(dtype)


def _sizes(w: Any, h: Any) -> tuple[int, int]:
    """Both sizes. TypeError for other types than integers, ValueError for sizes below 1."""
    if isinstance(w, list | tuple):
        if h is not None or len(w) != 2:
            raise ValueError(f"w and h are two sizes: got w={w}, h={h}")
        w, h = w
    return whole("w", w), whole("h", w if h is None else h)


def _resized(images: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Images [images, channels, height, width] of another size."""
    antialias = mode in ("bilinear", "bicubic")
    if images.dtype == torch.bool and not mode.startswith("nearest"):
        raise TypeError(f"bools cannot be averaged: interpolation='nearest' is needed, not {mode!r}")
    of_bytes = images.dtype == torch.uint8 and mode != "area" and images.is_cpu  # torch has none for other devices
    if images.is_complex() or images.dtype in (torch.float32, torch.float64) or of_bytes:
        return functional.interpolate(images, size=size, mode=mode, antialias=antialias)
    wide = torch.float64 if not images.is_floating_point() and images.dtype.itemsize > 2 else torch.float32
    resized = functional.interpolate(images.to(wide), size=size, mode=mode, antialias=antialias)
    if not images.is_floating_point() and images.dtype != torch.bool:
        integers = torch.iinfo(images.dtype)
        resized = resized.round_().clamp_(integers.min, integers.max)
    return resized.to(images.dtype)


def _window(images: Tensor, top: int, left: int, rows: int, columns: int) -> Tensor:
    """Rows and columns of images, zeros outside of them."""
    height, width = images.shape[-2:]
    if 0 <= top <= height - rows and 0 <= left <= width - columns:
        return images[..., top : top + rows, left : left + columns]
    if not (-rows < top < height and -columns < left < width):
        return images.new_zeros((*images.shape[:-2], rows, columns))
    return functional.pad(images, (-left, left + columns - width, -top, top + rows - height))

"""Entries that are images: which of their dims are height, width and channels, and their pixels in one order."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict.utils import NestedKey

from interop.data.arguments import required
from interop.data.keys import as_path
from interop.data.trajectory_keys import KeyPath
from interop.datasets.images import encoded
from interop.datasets.stored_episodes import Kind, shown_kind

if TYPE_CHECKING:
    import pyarrow as pa

_CHANNELS = ((1, 3), (4,))  # the usual numbers first


@dataclass(frozen=True)
class ImageEntry:
    """An entry of images, of this size. `channels_at` is the dim of the channels in one image; None for [H, W]."""

    path: KeyPath
    height: int
    width: int
    channels: int
    channels_at: int | None

    @staticmethod
    def of(path: KeyPath, kind: Kind) -> "ImageEntry":
        """TypeError unless the entry has images: uint8 [C, H, W], [H, W, C] or [H, W], with 1, 3 or 4 channels.

        Where both the first and the last dim may be the channels, it is the first one, as in rows of the loaders.
        """
        dtype, shape = kind
        if dtype is torch.uint8 and len(shape) == 2 and 0 not in shape:
            return ImageEntry(path, *shape, 1, None)
        if dtype is torch.uint8 and len(shape) == 3 and 0 not in shape:
            for channels, channels_at in product(_CHANNELS, (0, 2)):
                if shape[channels_at] in channels:
                    height, width = (size for dim, size in enumerate(shape) if dim != channels_at)
                    return ImageEntry(path, height, width, shape[channels_at], channels_at)
        raise TypeError(
            f"image_keys: {path} is {shown_kind(kind)}, images are uint8 [C, H, W], [H, W, C] or [H, W] with 1, 3 or 4 "
            "channels: convert it, or leave it out of image_keys"
        )

    def pixels(self, values: np.ndarray) -> np.ndarray:
        """Rows of the entry as [n, H, W, C]."""
        if self.channels_at is None:
            return values[..., None]
        return np.moveaxis(values, 1, -1) if self.channels_at == 0 else values


def image_paths(image_keys: Collection[NestedKey], stored: Collection[KeyPath]) -> list[KeyPath]:
    """The paths of these keys. TypeError for one key alone; KeyError for one that is not stored."""
    if isinstance(image_keys, str):
        raise TypeError(f"image_keys must be a list of keys, got {image_keys!r}: pass [{image_keys!r}]")
    paths = [as_path(key) for key in image_keys]
    for key, path in zip(image_keys, paths, strict=True):
        if path not in stored:
            there = ", ".join(map(repr, stored))
            raise KeyError(f"{key!r} of image_keys is no stored entry of tensors; there are {there}")
    return paths


def image_column(images: np.ndarray) -> "pa.Array":
    """Images [n, H, W, C] as the library `datasets` stores them: the bytes of PNG files, and no path."""
    pa = required("pyarrow", "datasets")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.array([{"bytes": encoded(image), "path": None} for image in images], kind)

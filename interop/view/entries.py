"""The entries of stored items as a page shows them: curves, images, texts."""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from interop.data.keys import as_key, entries_below
from interop.storages import Storage, columns

Kind = Literal["curves", "flag", "images", "text", "numbers", "other"]
CURVES = 8  # of one entry at most
_LEAST = 8  # pixels of the shorter side of an image


class Entry(NamedTuple):
    """An entry of the items.

    Attributes:
        name: for readers, such as `next.reward`.
        kind: "curves" for up to 8 numbers an item of more that there may be, "flag" for one bool, "images" for one image,
            "text" for one text; "numbers" has a distribution only, "other" nothing.
        shape: of one item.
    """

    name: str
    path: tuple[Any, ...]
    kind: Kind
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether it has a distribution."""
        return self.kind in ("curves", "flag", "images", "numbers")


def entries_of(storage: Storage) -> list[Entry]:
    """The entries of the items, as the first stored one has them. Its lock is held."""
    if not len(storage):
        return []
    first = storage.get(0 if storage.ndim == 1 else (0,) * storage.ndim)
    if isinstance(first, Tensor):
        return []
    entries = entries_below(first) if hasattr(first, "items") else ()
    return [_entry(path, value) for path, value in entries if path != ("index",)]


def _entry(path: tuple[Any, ...], value: object) -> Entry:
    name = ".".join(map(str, path))
    if isinstance(value, Tensor) and not value.is_nested:
        shape = tuple(value.shape)
        return Entry(name, path, _kind(value), str(value.dtype).removeprefix("torch."), shape)
    inner = getattr(value, "data", value)
    is_text = isinstance(inner, str)
    return Entry(name, path, "text" if is_text else "other", "text" if is_text else type(inner).__name__, ())


def _kind(value: Tensor) -> Kind:
    shape = value.shape
    if value.is_complex():
        return "other"
    if value.numel() == 1:
        return "flag" if value.dtype == torch.bool else "curves"
    if len(shape) in (2, 3) and (value.dtype == torch.uint8 or value.is_floating_point()):
        sides = shape if len(shape) == 2 else shape[1:] if shape[0] in (1, 3, 4) else shape[:2]
        channels = 1 if len(shape) == 2 else shape[0] if shape[0] in (1, 3, 4) else shape[2]
        if min(sides) >= _LEAST and channels in (1, 3, 4):
            return "images"
    return "curves" if value.numel() <= 64 else "numbers"


def read_numbers(storage: Storage, entry: Entry, slots: np.ndarray) -> np.ndarray:
    """The values of items at flat slots, [n, *shape]. The lock is held."""
    value = columns.read(storage, as_key(entry.path), slots)
    numbers: np.ndarray = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    return numbers


def read_texts(storage: Storage, entry: Entry, slots: np.ndarray) -> list[str]:
    """The texts of items at flat slots. The lock is held."""
    return columns.texts(storage, as_key(entry.path), slots) or []

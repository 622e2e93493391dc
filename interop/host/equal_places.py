"""Writes with repeated slots: the last value stays."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data import staging
from interop.data.index import slots_of_places


def last_of_equal(index: Any, lanes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """The different slots of a resolved index, the place of the last occurrence of each, and the lanes of these slots.

    The slots of an index of rows alone are rows, without lanes.
    """
    lanes = lanes if isinstance(index, tuple) else ()
    named = slots_of_places(index, lanes).reshape(-1)
    slots, from_the_end = np.unique(named[::-1], return_index=True)
    return slots, named.size - 1 - from_the_end, lanes


def coordinates(slots: np.ndarray, rows: int, lanes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Flat slots as coordinates in `rows` rows of lanes."""
    return np.unravel_index(slots, (rows, *lanes))


def chosen_items(leaf: Tensor, places: np.ndarray, item: Sequence[int]) -> Tensor:
    """The items of a leaf at flat places over all dims before those of an item; a view where these are all in order."""
    count = math.prod(leaf.shape[: leaf.ndim - len(item)])
    items = leaf.reshape(count, *item)
    if places.size == count and (places[1:] > places[:-1]).all():
        return items
    return items.index_select(0, staging.to_device(torch.from_numpy(places), leaf.device))

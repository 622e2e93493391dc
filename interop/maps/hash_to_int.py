"""Mapping of hash values to consecutive ints."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from interop.maps.table import KeyTable


class HashToInt(nn.Module):
    """Numbers hash values from 0, in order of first appearance. O(batch).

    Equal values get equal numbers. The `state_dict` holds the values in the order of their numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table = KeyTable()

    def __len__(self) -> int:
        return len(self._table)

    def __bool__(self) -> bool:
        return True  # an empty module is truthy

    def forward(self, key: Tensor, extend: bool = False) -> Tensor:
        """The numbers, int64, of hash values of any shape. With `extend`, new values get the next numbers.

        Otherwise each unknown value gets `len(self)`. ValueError for values that are not integers.
        """
        whole = key.detach().to(torch.int64)
        if key.dtype.is_floating_point and not bool((whole == key).all()):
            raise ValueError(f"hash values must be whole numbers, got {key.dtype} with fractions, nan or inf")
        rows = whole.cpu().contiguous().numpy().reshape(-1, 1).view(np.uint8)
        numbers = self._table.insert(rows) if extend else self._table.find(rows)
        return torch.from_numpy(numbers).reshape(key.shape).to(key.device)

    def clear(self) -> None:
        """Remove all values."""
        self._table.truncate(0)

    def get_extra_state(self) -> dict[str, Any]:
        return {"keys": torch.tensor(self._table.keys)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self._table = KeyTable.of(state["keys"].numpy(force=True))

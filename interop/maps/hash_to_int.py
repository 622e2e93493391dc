"""Hash values as consecutive ints."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from interop.maps.table import KeyTable


class HashToInt(nn.Module):
    """Numbers hash values from 0, in the order of their first appearance. O(batch).

    Equal values have one number, whatever was hashed. The `state_dict` has the values in the order of their numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table = KeyTable()

    def __len__(self) -> int:
        return len(self._table)

    def __bool__(self) -> bool:
        return True  # a module without values is one

    def forward(self, key: Tensor, extend: bool = False) -> Tensor:
        """The numbers of integers of any shape: int64 of that shape. With `extend` unknown values get the next numbers.

        Without it every unknown value gets `len(self)`. ValueError for numbers that are not whole.
        """
        whole = key.detach().to(torch.int64)
        if key.dtype.is_floating_point and not bool((whole == key).all()):
            raise ValueError(f"hash values must be whole numbers, got {key.dtype} with fractions, nan or inf")
        rows = whole.cpu().contiguous().numpy().reshape(-1, 1).view(np.uint8)
        numbers = self._table.insert(rows) if extend else self._table.find(rows)
        return torch.from_numpy(numbers).reshape(key.shape).to(key.device)

    def clear(self) -> None:
        """Forget all values."""
        self._table.truncate(0)

    def get_extra_state(self) -> dict[str, Any]:
        return {"keys": torch.tensor(self._table.keys)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self._table = KeyTable.of(state["keys"].numpy(force=True))

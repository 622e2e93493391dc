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
        self.table = KeyTable()

    def __len__(self) -> int:
        return len(self.table)

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
        numbers = self.table.insert(rows) if extend else self.table.find(rows)
        return numbered(numbers, self.table).reshape(key.shape).to(key.device)

    def clear(self) -> None:
        """Forget all values."""
        self.table.truncate(0)

    def get_extra_state(self) -> dict[str, Any]:
        return {"keys": stored_keys(self.table)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.table = table_of(state["keys"])


def numbered(numbers: np.ndarray, table: KeyTable) -> Tensor:
    """Numbers as a tensor; those of unknown keys, -1, become the length of the table."""
    return torch.from_numpy(np.where(numbers < 0, len(table), numbers))


def stored_keys(table: KeyTable) -> Tensor:
    """A copy of the rows of a table: uint8 [len, width]."""
    return torch.from_numpy(table.keys.copy())


def table_of(keys: Tensor) -> KeyTable:
    """A table with these rows. ValueError where they repeat each other."""
    table = KeyTable()
    table.insert(keys.cpu().contiguous().numpy())
    if len(table) != len(keys):
        raise ValueError(f"{len(keys)} keys were saved, of which {len(table)} are different")
    return table

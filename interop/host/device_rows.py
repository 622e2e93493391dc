"""Leaf tensors of shape [rows, *lanes, ...] in the memory of JAX. See `rows`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from interop.data import bridge
from interop.host import compiled
from interop.host.equal_places import chosen_items, coordinates, last_of_equal
from interop.host.stored_rows import Rows
from interop.host.threads import uninterrupted


def rows_in_jax(device: torch.device) -> bool:
    """Whether rows that the library allocates on a device belong to JAX."""
    return device.type == "cuda" and bridge.jax_device(device) is not None


class JaxRows(Rows):
    """Rows in arrays of JAX on a device that both libraries see. No other process sees them."""

    def __init__(self, arrays: list[jax.Array], lanes: tuple[int, ...], device: torch.device) -> None:
        self.arrays = arrays
        self.lanes = lanes
        self.device = device

    def share(self) -> None:
        """Nothing: a child cannot use the memory of an accelerator, and is refused."""

    @property
    def gives_views(self) -> bool:
        return True

    @classmethod
    def zeros(
        cls,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        lanes: tuple[int, ...],
        device: torch.device,
    ) -> "JaxRows":
        """Fresh rows of zeros."""
        with bridge.exact(), jax.default_device(bridge.jax_device(device)):
            arrays = compiled.allocate(tuple(shapes), tuple(bridge.DTYPES[dtype] for dtype in dtypes))
            return cls(jax.device_put(arrays, bridge.jax_device(device)), lanes, device)

    @classmethod
    def holding(cls, tensors: Sequence[Tensor], lanes: tuple[int, ...]) -> "JaxRows":
        """Rows with a copy of the tensors' content."""
        return cls([bridge.to_jax(tensor) for tensor in tensors], lanes, tensors[0].device)

    def beside(self, other: Rows, order: Sequence[int]) -> "JaxRows":
        """These leaves and those of other rows, in this order."""
        assert isinstance(other, JaxRows)
        every = [*self.arrays, *other.arrays]
        return JaxRows([every[place] for place in order], self.lanes, self.device)

    def column(self, place: int) -> Tensor | None:
        """A view of a leaf. Not to be kept: the next write copies or moves it."""
        return bridge.hand_over(self.arrays[place])

    @property
    def tensors(self) -> list[Tensor]:
        """Views of the rows. Until the next write edits of them reach the rows; that write then copies, once."""
        return [bridge.hand_over(array) for array in self.arrays]

    def copies(self, filled: int) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors]

    def at(self, filled: int, index: Any) -> list[Tensor]:
        return [tensor[:filled][index] for tensor in self.tensors]

    def write_run(self, start: int, leaves: Sequence[Tensor]) -> None:
        capacity, count = self.arrays[0].shape[0], leaves[0].shape[0]
        kept = min(count, capacity)
        rows = (start + count - kept + np.arange(kept)) % capacity
        self._write(rows, [leaf[count - kept :] for leaf in leaves])

    def write_at(self, index: Any, leaves: Sequence[Tensor]) -> None:
        slots, last, lanes = last_of_equal(index, self.lanes)
        shapes = [array.shape[1 + len(lanes) :] for array in self.arrays]
        chosen = [chosen_items(leaf, last, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
        self._write(slots, chosen, lanes)

    def _write(self, slots: np.ndarray, leaves: Sequence[Tensor], lanes: tuple[int, ...] = ()) -> None:
        if not slots.size:
            return
        padded = compiled.padded(slots)
        extra = padded.shape[0] - slots.shape[0]
        batch = []
        for leaf in leaves:
            leaf = bridge.placed(leaf.detach(), self.device)
            if extra:
                leaf = torch.cat([leaf, leaf[-1:].expand(extra, *leaf.shape[1:])])
            batch.append(leaf)
        at: Any = coordinates(padded, self.arrays[0].shape[0], lanes) if lanes else padded
        given = bridge.lent(batch)
        with uninterrupted(), bridge.exact():  # the program takes the memory over: without its result the rows are gone
            self.arrays, written = compiled.write(self.arrays, at, given)
            bridge.followed(written)  # the caller may write to its tensors again

    def settle(self) -> None:
        """Have torch's edits of views done before JAX reads."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        [at] = bridge.lent([bridge.placed(slots, self.device)])
        with bridge.exact():
            found = compiled.read(self.arrays, at, self.lanes)
        return [bridge.hand_over(array) for array in found]  # torch waits for the program, and so do writes to `slots`

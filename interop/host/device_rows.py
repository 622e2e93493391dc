"""Leaf tensors of shape [rows, *lanes, ...] in the memory of JAX. See `rows`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from interop.data import bridge, staging
from interop.host import compiled
from interop.host.device_writes import DeviceWrites
from interop.host.equal_places import chosen_items, coordinates, last_of_equal
from interop.host.stored_rows import Rows

_SHORT = 2**31  # rows below which their numbers are int32


def rows_in_jax(device: torch.device) -> bool:
    """Whether rows that the library allocates on a device belong to JAX."""
    return device.type == "cuda" and bridge.jax_device(device) is not None


class JaxRows(Rows):
    """Rows in arrays of JAX on a device that both libraries see. No other process sees them.

    Attributes:
        crossing: the way between torch and JAX.
        count: how many rows there are.
    """

    def __init__(
        self,
        arrays: list[jax.Array],
        lanes: tuple[int, ...],
        device: torch.device,
        writes: DeviceWrites | None = None,
    ) -> None:
        self._arrays = arrays
        self.lanes = lanes
        self.device = device
        self._writes = DeviceWrites() if writes is None else writes
        self.crossing = bridge.crossing(device)
        self.count = arrays[0].shape[0]

    @property
    def writes(self) -> DeviceWrites:
        """The writes of these rows, and of priorities that follow them."""
        return self._writes

    @property
    def arrays(self) -> list[jax.Array]:
        """The leaves. The next write takes their memory over."""
        self.writes.settle()
        return self._arrays

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
        return JaxRows([every[place] for place in order], self.lanes, self.device, self.writes)

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

    def write_run(self, start: int, leaves: Sequence[Tensor], index: Tensor | None = None) -> None:
        """Write leaves [n, *lanes, ...] from row `start` on, around the ring. Of more than all rows the last stay.

        A leaf that is `index`, the numbers of the rows, is made on the device.
        """
        capacity, count = self.count, leaves[0].shape[0]
        numbered = [place for place, leaf in enumerate(leaves) if leaf is index]
        if count > capacity:
            start, leaves = start + count - capacity, [leaf[count - capacity :] for leaf in leaves]
        slots = np.arange(start, start + leaves[0].shape[0]) % capacity
        self._write(slots, leaves, (), numbered)

    def write_at(self, index: Any, leaves: Sequence[Tensor]) -> None:
        slots, last, lanes = last_of_equal(index, self.lanes)
        shapes = [array.shape[1 + len(lanes) :] for array in self._arrays]
        chosen = [chosen_items(leaf, last, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
        self._write(slots, chosen, lanes, ())

    def _write(
        self, slots: np.ndarray, leaves: Sequence[Tensor], lanes: tuple[int, ...], numbered: Sequence[int]
    ) -> None:
        if slots.size:
            self.writes.add(RowsChange(self, slots, leaves, lanes, numbered))

    def settle(self) -> None:
        """Have torch's edits of views done before JAX reads."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        arrays = self.arrays
        [at] = self.crossing.lend([staging.to_device(slots, self.device)])
        with bridge.exact():
            found = compiled.read(arrays, at, self.lanes)
        return self.crossing.take(found)  # torch waits for the program, and so do writes to `slots`

    def replace(self, arrays: list[jax.Array]) -> None:
        """Use the arrays that a program has made of these."""
        self._arrays = arrays


class RowsChange:
    """A batch that is written at rows, or with lanes at flat slots; different ones. See `Change`.

    `numbered` are the leaves that store the numbers of the rows.
    """

    def __init__(
        self,
        owner: JaxRows,
        slots: np.ndarray,
        leaves: Sequence[Tensor],
        lanes: tuple[int, ...],
        numbered: Sequence[int],
    ) -> None:
        self.owner = owner
        device, count = owner.device, slots.shape[0]
        padded = slots if count & (count - 1) == 0 else compiled.padded(slots)
        if extra := padded.shape[0] - count:
            leaves = [torch.cat([leaf, leaf[-1:].expand(extra, *leaf.shape[1:])]) for leaf in leaves]
        self.tensors = [
            leaf if leaf.device == device else staging.to_device(leaf.detach(), device)
            for place, leaf in enumerate(leaves)
            if place not in numbered
        ]
        places = coordinates(padded, owner.count, lanes) if lanes else (padded,)
        dtype = np.int32 if owner.count < _SHORT else np.int64
        self.words = [each.astype(dtype) for each in places]
        self.form = compiled.RowsForm(padded.shape[0], len(places), tuple(numbered))

    def arrays(self) -> list[jax.Array]:
        return self.owner.arrays

    def take(self, arrays: list[jax.Array], flag: jax.Array) -> None:
        self.owner.replace(arrays)

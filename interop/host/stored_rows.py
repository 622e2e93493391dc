"""What a table asks of rows: leaves of shape [rows, *lanes, ...], in any memory."""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from interop.data.layout import LeafSpec
from interop.host.device_writes import DeviceWrites
from interop.host.equal_places import chosen_items, last_of_equal


class Rows:
    """Stored leaves, [rows, *lanes, ...] each. A subclass defines `put` and `read`.

    All other methods have a meaning that is right for rows which are copied at reads, in memory of this process alone.
    Indices were checked, and are of numbers that are not negative.

    Args:
        leaves: of an item.
        lead: [rows, *lanes].

    Attributes:
        capacity: how many rows there are.
        lanes: the dims of a row.
        specs: the leaves of an item.
        device: of the tensors that reads return.
    """

    device: torch.device = torch.device("cpu")

    def __init__(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> None:
        self.specs = tuple(leaves)
        self.capacity, self.lanes = lead[0], lead[1:]

    def put(self, slots: np.ndarray, leaves: Sequence[Tensor]) -> None:
        """Write items [n, ...] at different flat slots, [n]."""
        raise NotImplementedError(f"{type(self).__name__} does not define put()")

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        """Copies of the items at flat slots, [n], written before or not. Leaves that are `known` need not be read."""
        raise NotImplementedError(f"{type(self).__name__} does not define read()")

    # ------------------------------------------------------------------ what they are

    @property
    def shared(self) -> bool:
        """Whether other processes see writes."""
        return False

    @property
    def in_place(self) -> bool:
        """Whether writes to `tensors` change the stored rows."""
        return False

    @property
    def gives_views(self) -> bool:
        """Whether `at` gives views of the stored rows for ints and slices."""
        return False

    @property
    def writes(self) -> DeviceWrites | None:
        """The writes of rows on a device that programs write; None for other rows."""
        return None

    @property
    def on_host(self) -> bool:
        """Whether NumPy sees the rows."""
        return False

    @property
    def host_arrays(self) -> list[np.ndarray] | None:
        """NumPy views of the leaves; None if there are none."""
        return None

    @property
    def fixed(self) -> Collection[int]:
        """The leaves that cannot be edited in place."""
        return ()

    # ------------------------------------------------------------------ writes

    def write_run(self, start: int, leaves: Sequence[Tensor], index: Tensor | None = None) -> None:
        """Write leaves [n, *lanes, ...] from row `start` on, around the ring. Of more than all rows the last stay.

        `index` has the numbers of the rows, where the caller has them.
        """
        count = leaves[0].shape[0]
        kept = min(count, self.capacity)
        rows = (start + torch.arange(count - kept, count, device="cpu")) % self.capacity
        self.write_at(rows, [leaf[count - kept :] for leaf in leaves])

    def write_at(self, index: object, leaves: Sequence[Tensor]) -> None:
        """Write leaves at an int, slice or int64 tensor of rows, or a tuple of these over rows and lanes.

        Of equal places the last wins.
        """
        slots, last, lanes = last_of_equal(index, self.lanes)
        items = [spec.shape if lanes or not self.lanes else (*self.lanes, *spec.shape) for spec in self.specs]
        chosen = [chosen_items(leaf.detach(), last, item) for leaf, item in zip(leaves, items, strict=True)]
        if self.lanes and not lanes:  # whole rows
            per_row = math.prod(self.lanes)
            slots = (slots[:, None] * per_row + np.arange(per_row)).reshape(-1)
            chosen = [leaf.reshape(-1, *spec.shape) for leaf, spec in zip(chosen, self.specs, strict=True)]
        self.put(slots, chosen)

    def refuse(self, places: object, leaves: Sequence[Tensor], in_order: bool) -> None:
        """Raise for a write that cannot be done, at resolved places or a range of rows around the ring."""

    def reserve(self, rows: int) -> None:
        """Take memory for the first `rows` rows. OSError if there is none."""

    def clear(self) -> None:
        """No row is stored any more."""

    def apart(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The leaves; those in the memory of these rows are copied, since a write would change them."""
        return leaves

    def beside(self, other: "Rows", order: Sequence[int]) -> "Rows":
        """The leaves of both, in this order."""
        raise RuntimeError(
            f"no keys can be added to {type(self).__name__}: put all keys into the first batch; nothing was written"
        )

    # ------------------------------------------------------------------ reads

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All rows of each leaf."""
        return self.at(self.capacity, slice(None))

    def at(self, filled: int, index: object) -> list[Tensor]:
        """The leaves at an index over their filled rows: views if there are any, else copies."""
        lead = (filled, *self.lanes)
        numbers: Tensor = torch.arange(torch.Size(lead).numel(), device="cpu").reshape(lead)[index]  # type: ignore[index]
        leaves = self.read(numbers.reshape(-1))
        return [leaf.reshape((*numbers.shape, *leaf.shape[1:])) for leaf in leaves]

    def array(self, place: int) -> np.ndarray | None:
        """NumPy's view of a leaf, with bfloat16 as unsigned integers; None if there is none."""
        return None

    def column(self, place: int) -> Tensor | None:
        """The memory of a leaf as a plain tensor; None if it is not one tensor. Do not keep it: the memory may move."""
        return None

    # ------------------------------------------------------------------ copies and other processes

    def copies(self, filled: int) -> list[Tensor]:
        """Copies of all rows of the leaves, of which `filled` are stored."""
        copies = [
            torch.zeros((self.capacity, *self.lanes, *spec.shape), dtype=spec.dtype, device=self.device)
            for spec in self.specs
        ]
        for copy, leaf in zip(copies, self.at(filled, slice(None)), strict=True):
            copy[:filled] = leaf
        return copies

    def share(self) -> None:
        """Move the rows to memory that processes share."""
        raise RuntimeError(
            f"{type(self).__name__} are in memory of this process and cannot be shared: use a LazyMemmapStorage, or a "
            "LazyTensorStorage on the CPU"
        )

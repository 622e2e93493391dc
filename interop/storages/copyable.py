"""What checkpoints, copies and other processes have of a tensor storage."""

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import MemoryMappedTensor
from torch import Tensor

from interop.checkpoint import tensor_states
from interop.checkpoint.state import EXACT, LoadOptions
from interop.data.layout import Layout
from interop.host import maps
from interop.host.device_rows import JaxRows, rows_in_jax
from interop.host.rows import Rows, TorchRows
from interop.shared.interrupts import uninterrupted
from interop.shared.processes import starting_a_worker
from interop.storages.storage import Storage


class Copyable(Storage):
    """Rows that are saved, loaded, copied, pickled and shared. See `TensorStorage`."""

    rows: Rows | None
    layout: Layout | None
    lanes: tuple[int, ...]
    per_row: int
    _MAPPED = False  # whether rows are in files: tensordicts that are views of them come locked

    # ------------------------------------------------------------------ checkpoints

    def saved(self) -> dict[str, Any]:
        return tensor_states.saved_rows(self)  # type: ignore[arg-type]

    def restoring(self, saved: Any, options: LoadOptions = EXACT) -> Callable[[], None]:
        return tensor_states.restoring_rows(self, saved, options)  # type: ignore[arg-type]

    def guard(self) -> None:
        """Have the journal guard the rows."""

    def release_memory(self) -> None:
        """Give back what `_allocate` took, which was not used."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of the filled rows and of how they fill the ring: "_storage", "initialized", "_len" and more.

        It holds plain values and tensors only: `torch.load(weights_only=True)` reads it.
        """
        with self.lock.turn():
            return tensor_states.state_of(self)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy what `state_dict` gave in. After an error nothing has changed."""
        with self.lock.turn():
            put = self.restoring_dict(state_dict)
            with uninterrupted(), self.transaction():
                put()

    def restoring_dict(self, given: Any) -> Callable[[], None]:
        return tensor_states.restoring_state(self, given)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ copies and other processes

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        rows = state.pop("rows")
        if rows is None:
            return {**state, "_tensors": None}
        in_jax, layout = isinstance(rows, JaxRows), self.layout
        if not starting_a_worker() and layout is not None and layout.values is not None:
            state["layout"] = layout.keeping(layout.values.copied())
        if not starting_a_worker():  # a pickle or copy is a buffer of its own
            tensors = rows.copies(self.ring.size)
            return {**state, "_tensors": tensors, "_in_jax": in_jax}
        with self.lock.turn():
            rows.share()
        return {**state, "_tensors": rows.tensors, "_in_jax": in_jax}

    def is_shared(self) -> bool:
        return self.rows is not None and self.rows.shared

    def _refuse_to_share(self) -> None:
        super()._refuse_to_share()
        if self.rows is None and not self.is_shared():
            raise RuntimeError(
                f"Cowardly refusing to share a {type(self).__name__} that was not written to: the workers would each "
                "allocate their own. Call extend() or add() first, or build it with shared_init=True where it has that"
            )
        if isinstance(self.rows, JaxRows):
            raise RuntimeError(
                f"Cannot share a {type(self).__name__} on {self.rows.device} between processes, they would not see each "
                "other's writes: use a LazyMemmapStorage, or a LazyTensorStorage on the CPU"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors, in_jax = state.pop("_tensors"), state.pop("_in_jax", False)
        super().__setstate__(state)
        self.rows = None
        if tensors is not None:
            in_jax = in_jax and rows_in_jax(tensors[0].device)
            self.rows = (JaxRows.holding if in_jax else TorchRows)(self._in_own_memory(tensors), self.lanes)
        if self.journal.memory is not None:
            self.journal.attach(self.ring)
            self.guard()

    def _in_own_memory(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Unpickled rows in the kind of memory of this storage."""
        if not self._MAPPED or any(isinstance(tensor, MemoryMappedTensor) for tensor in tensors):
            return tensors
        return maps.copied(tensors)

"""Tensors, tensordicts and pytrees in preallocated memory."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import MemoryMappedTensor, TensorDictBase, is_tensor_collection
from torch import Tensor

from fbuf.memory_plan import Share
from interop.checkpoint.state import EXACT, Apply, LoadOptions
from interop.data.arguments import whole
from interop.data.index import is_basic
from interop.data.layout import KeyPath, Layout
from interop.engine import plans, saved_rows
from interop.engine.places.heap import Given
from interop.engine.places.place import Place
from interop.engine.table import Table, some
from interop.host.device_rows import JaxRows
from interop.host.rows import TorchRows
from interop.shared.processes import starting_a_worker
from interop.storages import planning
from interop.storages.checkpointers import TensorStorageCheckpointer
from interop.storages.contents import TableContents
from interop.storages.storage import Storage

if TYPE_CHECKING:
    from interop.specs.spec import TensorSpec  # a program without specs does not load them


class TensorStorage(Storage):
    """Items in memory of the user: a tensor, tensordict, tensorclass or pytree of tensors, which counts as full.

    Args:
        storage: the memory; its leaves share their first `ndim` dims. A tensordict without entries reserves room for as
            many items as its batch size says; the first write fixes the keys and allocates.
        max_size: must agree with the size of `storage`.
        device: where the memory is; "auto" leaves it where it is.
        ndim: how many leading dims count as items: 1 for rows, 2 for [time, environments].
        compilable: keep the length local to this process.

    Attributes:
        table: the items.
    """

    AS_STORED: Collection[KeyPath] = ()  # entries that the `get` of a subclass returns as they are in the rows
    default_checkpointer = TensorStorageCheckpointer
    table: Table

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        if storage is None and max_size is None:
            raise ValueError("TensorStorage needs the memory to use (storage=...), or a max_size")
        ndim = whole("ndim", ndim)
        if storage is None:
            self._begin(Given(device), max_size, ndim, compilable)
            return
        layout = Layout.of(storage, ndim)
        if layout.is_tensordict and not layout.leaves:
            self._begin(Given(device, reserves=True), math.prod(storage.batch_size[:ndim]), ndim, compilable)
            return
        tensors = some(layout.flatten(storage, ndim))
        shape = tensors[0].shape[:ndim]
        if max_size is not None and max_size != shape[0]:
            raise ValueError(f"max_size={max_size} does not agree with the size of the storage, {shape[0]}")
        if any(0 in [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in tensors):
            raise ValueError("a tensor of the storage was expanded: its rows share memory. Pass storage.clone()")
        place = Given(tensors[0].device if device == "auto" else device)
        self._begin(place, math.prod(shape), ndim, compilable)
        rows = TorchRows([_given(tensor).to(place.known_device()) for tensor in tensors], tuple(shape[1:]))
        self.table.adopt(layout, rows)
        self.ring.size = tensors[0].shape[0]

    @classmethod
    def over(cls, place: Place, max_size: int, *, ndim: int = 1) -> Self:
        """A storage of items whose rows are in memory of another kind, which the first write allocates.

        Args:
            place: where the bytes of rows are; of one storage alone.
            max_size: capacity in items. With `ndim` > 1 it is rounded up to whole rows at the first write.
            ndim: how many leading dims count as items.
        """
        storage = cls.__new__(cls)
        cls._begin(storage, place, max_size, whole("ndim", ndim), False)
        return storage

    def _begin(
        self,
        place: Place,
        max_size: object,
        ndim: int,
        compilable: bool,
        fill: Mapping[KeyPath, Tensor] | None = None,
        ragged: Collection[KeyPath] = (),
        shared_prefixes: Collection[KeyPath] = (),
    ) -> None:
        """Hold a table over a place."""
        super().__init__(max_size, compilable=compilable)  # type: ignore[arg-type]  # checked there
        self.ndim = ndim
        self.table = Table(
            place,
            self._max_size,
            ndim,
            self.ring,
            self.guard,
            self.followers,
            type(self).__name__,
            is_local=compilable,
            fill=fill,
            ragged=ragged,
            shared_prefixes=shared_prefixes,
        )
        self.contents = self._table_contents()

    def _table_contents(self) -> TableContents:
        kind = type(self)
        tracks_writes = kind.set is TensorStorage.set
        return TableContents(self, tracks_writes, self.table, None if kind.get is TensorStorage.get else self.AS_STORED)

    @property
    def device(self) -> torch.device | str:
        """Where the items are; "auto" before the first write, if that decides."""
        return self.table.place.device

    @property
    def initialized(self) -> bool:
        """Whether the storage has memory."""
        if self.table.place.meets_others:
            self.table.look()
        return self.table.rows is not None

    @property
    def max_size(self) -> int:
        return self.table.max_size

    @property
    def shape(self) -> torch.Size | None:
        """The filled part: [rows, *lanes]; None before the first write."""
        return torch.Size([self.ring.size, *self.table.lanes]) if self.table.rows is not None else None

    def row_capacity(self, data: Any) -> int:
        return self.table.row_capacity(data)

    def __len__(self) -> int:
        return self.ring.size * self.table.per_row

    @property
    def _storage(self) -> Any:
        """The whole memory as the user's type."""
        if self.table.rows is None:
            return None
        return self.build(self.table.rows.tensors, self.table.lead)

    # ------------------------------------------------------------------ memory

    def allocate(self, spec: "TensorSpec") -> None:
        """Allocate the memory for all items before the first write, for items of a spec.

        Keys, shapes and dtypes are fixed from then on, also after `empty`; not in processes that were started before, and
        not after the folder is opened again. Values are not checked against the spec. Disk space is reserved; other
        memory on the CPU is taken as rows are written.

        Args:
            spec: of an item; with `ndim` > 1 of a row, whose shape begins with the other dims of items, such as
                [environments]. The "index" that a writer adds to tensordicts is stored only if it is in the spec.

        Raises:
            RuntimeError: the layout is fixed already.
            TypeError: an entry is not a tensor.
            ValueError: a dim is dynamic (-1).
            NotEnoughMemoryError, OSError: there is not enough memory or disk space; nothing was allocated.
        """
        table = self.table
        with self.lock.held(), self.guard.transaction():
            self.guard.refuse_forked_child()
            if table.fixed_layout is not None:
                raise RuntimeError(
                    "the layout of items is fixed already: call allocate() before the first write, and once"
                )
            row = planning.row_of(spec, self.ndim)
            table.give_up()
            plans.plan(self.memory_shares(row)).check()
            table.admit(row, self.ndim, True)
            table.own_rows().reserve(table.row_count)
            table.keeps_layout = True

    def memory_shares(self, data: Any) -> list[Share]:
        if self.table.rows is None:
            if data is None:
                raise RuntimeError("nothing was written yet: give plan() the data that will be, as extend() takes it")
            data = self.table.stacked(data[:1]) if isinstance(data, list) else planning.example(data, self.ndim)
        return self.table.plan(data)

    # ------------------------------------------------------------------ writes

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write data at an int, slice, mask, array or tensor of rows, or a tuple of these over rows and lanes. O(batch).

        Of equal places the last wins. IndexError for rows out of range, RuntimeError if the length would grow over rows
        that were never written, and KeyError, TypeError or RuntimeError for data that does not fit. Nothing is written then.
        """
        self.table.write(cursor, data, set_cursor)

    def add_columns(self, data: TensorDictBase) -> None:
        self.table.add_columns(data)

    def _empty(self) -> None:
        with self.guard.transaction():
            self.table.emptied()

    # ------------------------------------------------------------------ reads

    def get(self, index: Any) -> Any:
        """The items at an index over the filled part: a view for ints and slices, a copy for arrays and masks.

        RuntimeError before the first write, IndexError out of range.
        """
        leaves, shape = self.table.read(index)
        items = self.build(leaves, shape)
        if self.table.place.mapped and is_basic(index) and is_tensor_collection(items):
            items.lock_()
        return items

    def build(self, leaves: Sequence[Tensor], batch_size: Sequence[int]) -> Any:
        """Items of these leaves."""
        return self.table.build(leaves, batch_size)

    def is_live(self, index: Any) -> bool:
        return is_basic(index) and (self.table.rows is None or self.table.rows.gives_views)

    def flatten(self) -> Storage:
        """A storage over a copy of the content with one item dim; self if it has one."""
        rows = self.table.own_rows()
        if self.ndim == 1:
            return self
        copies = [leaf.flatten(0, self.ndim - 1).clone() for leaf in rows.at(self.ring.size, slice(None))]
        return TensorStorage(self.build(copies, (len(self),)), device=self.device)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return saved_rows.state(self.table)

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        return saved_rows.with_state(self.table, tree, options)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the filled rows and of the counters of the ring: "_storage", "initialized", "_len" and more.

        Plain values and tensors only: `torch.load(weights_only=True)` reads it.
        """
        with self._unchanging():
            return saved_rows.state_dict(self.table, self.state())

    # ------------------------------------------------------------------ copies and other processes

    def _refuse_to_share(self) -> None:
        self.table.meet(self)
        super()._refuse_to_share()
        if self.table.rows is None and not self.is_shared():
            raise RuntimeError(
                f"Cowardly refusing to share a {type(self).__name__} that was not written to: the workers would each "
                "allocate their own. Call extend() or add() first, or build it with shared_init=True where it has that"
            )
        if isinstance(self.table.rows, JaxRows):
            raise RuntimeError(
                f"Cannot share a {type(self).__name__} on {self.table.rows.device} between processes, they would not see "
                "each other's writes: use a LazyMemmapStorage, or a LazyTensorStorage on the CPU"
            )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if starting_a_worker():
            return {**state, "table": self.table.state_for_worker()}
        return {**state, "table": self.table.state_for_copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        table = state.pop("table")
        super().__setstate__(state)
        self.table = Table.of_state(table, self.ring, self.guard, self.followers, self)
        self.contents = self._table_contents()

    def __repr__(self) -> str:
        data = "<empty>" if self.table.rows is None else self[:]
        body = f"data={data},\nshape={self.shape},\nlen={len(self)},\nmax_size={self.max_size}"
        return f"{type(self).__name__}(\n" + "\n".join("    " + line for line in body.splitlines()) + ")"


def _given(tensor: Tensor) -> Tensor:
    """The user's memory without its graph. Memory maps stay as they are, so that workers open the same files."""
    mapped = isinstance(tensor, MemoryMappedTensor) and getattr(tensor, "index", None) is None
    return tensor if mapped else tensor.detach()

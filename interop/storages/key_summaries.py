"""What each key of the stored items holds, in numbers: one pass over blocks of rows, in bounded memory.

The caller holds the lock of the storage. Nothing is written.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, is_non_tensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.looking import BLOCK, ColumnSummary, Total, evenly
from interop.data.array_leaves import as_leaf
from interop.data.bridge import DTYPES
from interop.data.layout import KeyPath, Layout, LeafSpec
from interop.data.varied import Varied
from interop.storages.storage import Storage

_AT_ONCE = 4096  # items that are read together at most, where their size is not known


def summaries(storage: Storage, rows: int | None = None) -> list[ColumnSummary]:
    """The summary of each entry of the stored items, over all rows or over `rows` evenly spaced ones.

    O(bytes of the rows that are looked at), with 16 MiB of them in memory, or one row. Of items that may differ, such as
    those of a list, an entry is one that any of them has. Bytes are those of the memory for all rows; of a list those of
    the stored items, if all were looked at.
    """
    layout = storage.contents.layout
    numbers = evenly(storage.contents.filled_rows, rows)
    if layout is None:
        return _of_items(storage, numbers) if len(storage) else []
    return _of_layout(storage, layout, numbers)


# ------------------------------------------------------------------ items of one layout


def _of_layout(storage: Storage, layout: Layout, numbers: np.ndarray) -> list[ColumnSummary]:
    lanes = storage.contents.items_per_row
    return [_of_entry(storage, spec, layout.varied.get(spec.path), numbers, lanes) for spec in layout.leaves]


def _of_entry(
    storage: Storage, spec: LeafSpec, varied: Varied | None, numbers: np.ndarray, lanes: int
) -> ColumnSummary:
    column = None if varied is not None or not numbers.size else storage.contents.column(_key(spec.path))
    read = _reader(storage, spec, varied, column)
    row_bytes = max(torch.Size(spec.shape).numel() * lanes * spec.dtype.itemsize, 1)
    total, kinds = Total(), dict[str, None]()
    step = max(BLOCK // row_bytes, 1) if varied is None else 1
    first = 0
    while first < numbers.size:
        block = numbers[first : first + step]
        first += block.size
        size = _add(read(block), total, kinds)
        if varied is not None:  # how large the next ones are is only known from these
            step = max(min(step * 4, int(BLOCK * block.size / max(size, 1)), _AT_ONCE), 1)
    name = ".".join(map(str, spec.path)) or "item"
    is_text = varied is not None and varied.dtype is None
    dtype = (" or ".join(kinds) or "text") if is_text else str(spec.dtype if varied is None else varied.dtype)
    shape = spec.shape if varied is None else spec.shape[:-1] if is_text else (-1, *varied.shape)
    bytes_ = _bytes_of(storage, spec, varied, column)
    place = str(column.device if column is not None else getattr(storage, "device", "cpu"))
    return total.summary(
        *(name, dtype.removeprefix("torch."), tuple(shape), bytes_, place, int(numbers.size)),
        storage.contents.filled_rows,
        "values" if varied is None else _measured(kinds),
    )


def _reader(
    storage: Storage, spec: LeafSpec, varied: Varied | None, column: Tensor | None
) -> Callable[[np.ndarray], Any]:
    """A function that reads an entry of rows of ascending numbers: a view where they follow each other."""
    key = _key(spec.path)

    def of_column(block: np.ndarray) -> Tensor:
        assert column is not None
        first, last = int(block[0]), int(block[-1]) + 1
        return column[first:last] if last - first == block.size else column[torch.from_numpy(block).to(column.device)]

    def by_index(block: np.ndarray) -> object:
        first, last = int(block[0]), int(block[-1]) + 1
        index: Any = slice(first, last) if last - first == block.size else torch.from_numpy(block)
        found = storage.get(index)
        for step in spec.path:
            found = found[step]
        return found

    def by_slots(block: np.ndarray) -> object:
        found = storage.contents.read(key, block)
        return by_index(block) if found is None else found

    if column is not None:
        return of_column
    return by_slots if varied is None and storage.ndim == 1 else by_index


def _bytes_of(storage: Storage, spec: LeafSpec, varied: Varied | None, column: Tensor | None) -> int | None:
    """The bytes that are allocated for an entry; None if they are not known, or shared with other entries."""
    if column is not None:
        return column.numel() * column.element_size()
    layout = storage.contents.layout
    shares = [share for share in storage.memory_shares(None) if share.key in (spec.name, f"{spec.name}, last ones")]
    alone = varied is None or (layout is not None and len(layout.varied) == 1)
    if varied is not None and alone:
        shares += [share for share in storage.memory_shares(None) if share.part == "values"]
    known = [share.bytes for share in shares if share.bytes is not None]
    return sum(known) if known and alone else None


def _key(path: KeyPath) -> NestedKey:
    key: Any = path[0] if len(path) == 1 else path  # of a pytree a number, too
    found: NestedKey = key
    return found


# ------------------------------------------------------------------ items that may differ


class _Entry:
    """What is known of an entry of items so far."""

    def __init__(self) -> None:
        self.total, self.kinds = Total(), dict[str, None]()
        self.shape: tuple[int, ...] | None = None
        self.items = self.bytes = 0
        self.devices = dict[str, None]()

    def add(self, value: object) -> None:
        """Count the value of one item."""
        self.bytes += _add(value, self.total, self.kinds)
        leaf = _as_tensor(value)
        shape = () if leaf is None else tuple(_size(size) for size in leaf.shape)
        if not self.items:
            self.shape = shape
        elif self.shape is not None and self.shape != shape:
            alike = len(shape) == len(self.shape)
            self.shape = tuple(a if a == b else -1 for a, b in zip(self.shape, shape, strict=True)) if alike else None
        self.items += 1
        self.devices[str(getattr(value, "device", "cpu"))] = None


def _of_items(storage: Storage, numbers: np.ndarray) -> list[ColumnSummary]:
    entries: dict[KeyPath, _Entry] = {}
    lanes = storage.contents.items_per_row
    slots = (numbers[:, None] * lanes + np.arange(lanes)).reshape(-1)
    for slot in slots.tolist():
        index: Any = slot
        if storage.ndim > 1:
            index = tuple(map(int, np.unravel_index(slot, tuple(storage.shape or ()))))
        for path, value in leaves_of(storage.get(index)):
            entries.setdefault(path, _Entry()).add(value)
    is_stored = storage.is_live(0) and slots.size == len(storage)
    return [
        each.total.summary(
            *(".".join(map(str, path)) or "item", " or ".join(each.kinds), each.shape),
            *(each.bytes if is_stored else None, ", ".join(each.devices), int(numbers.size)),
            storage.contents.filled_rows,
            _measured(each.kinds),
            slots.size - each.items,
        )
        for path, each in entries.items()
    ]


def leaves_of(found: object, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The leaves of any item by path: of tensordicts, dicts, and of tuples and lists that hold tensors."""
    item: Any = found
    if is_non_tensor(item):
        yield above, item.tolist() if isinstance(item, NonTensorStack) else item.data
    elif isinstance(item, LazyStackedTensorDict):  # whose entries may differ
        for each in item.tensordicts:
            yield from leaves_of(each, above)
    elif is_tensor_collection(item) or isinstance(item, Mapping):
        for key, value in item.items():
            yield from leaves_of(value, (*above, key))
    elif isinstance(item, tuple | list) and any(isinstance(each, Tensor | Mapping | tuple) for each in item):
        for place, value in enumerate(item):
            yield from leaves_of(value, (*above, place))
    else:
        yield above, item


# ------------------------------------------------------------------ values


def _add(found: object, total: Total, kinds: dict[str, None]) -> int:
    """Count the values of one item or of a block of them, and note their dtype. Returns their bytes."""
    value: Any = found
    if is_non_tensor(value):
        value = value.tolist() if isinstance(value, NonTensorStack) or value.batch_size else value.data
    if isinstance(value, str | bytes):
        kinds["text" if isinstance(value, str) else "bytes"] = None
        total.add(np.array([len(value)]))
        return len(value)
    if isinstance(value, list | tuple) and value:
        return sum(_add(each, total, kinds) for each in value)
    tensor = _as_tensor(value)
    if tensor is None:
        kinds[type(value).__name__] = None
        return 0
    kinds[str(tensor.dtype).removeprefix("torch.")] = None
    dense = tensor.values() if tensor.is_nested and tensor.layout == torch.jagged else tensor
    if dense.is_nested:
        return sum(_add(each, total, kinds) for each in dense.unbind())
    if dense.layout != torch.strided:
        return 0
    total.add(_as_numbers(dense))
    return dense.numel() * dense.element_size()


def _measured(kinds: Collection[str]) -> str:
    """What the numbers of values of these dtypes are of."""
    if "text" not in kinds:
        return "values"
    return "characters" if len(kinds) == 1 else "characters and values"


def _as_tensor(value: object) -> Tensor | None:
    """A tensor of a tensor, array or number; None for other objects, and for values that torch does not have."""
    if isinstance(value, Tensor):
        return value
    try:
        return as_leaf(value, "item")
    except (TypeError, RuntimeError, OverflowError):
        return None


def _as_numbers(tensor: Tensor) -> np.ndarray:
    """The values in the memory of the host, as a view if they are there; floats that NumPy does not have as float32."""
    held = tensor.detach().resolve_conj().resolve_neg()
    if held.dtype not in DTYPES or held.dtype == torch.bfloat16:
        held = held.to(torch.complex64 if held.is_complex() else torch.float32)
    numbers: np.ndarray = held.cpu().numpy()
    return numbers


def _size(size: object) -> int:
    """A size; -1 for one of a nested tensor that has no number."""
    return size if isinstance(size, int) else -1

"""Tensordicts in a Python list, read as one."""

from typing import Any

import torch
from tensordict import is_tensor_collection, lazy_stack

from interop.data.arguments import whole
from interop.data.index import as_int
from interop.data.pytrees import none_of
from interop.storages.lists import ListStorage


class LazyStackStorage(ListStorage):
    """A list of tensordicts of different shapes and keys; a read of several items is a lazy stack.

    Entries may differ in shape, and from item to item. Reading an entry of a stack needs equal shapes; other entries are
    read with `get(key, as_list=True)`, or item by item. Reads contain the stored items themselves, as in every list; a
    `TensorDictReplayBuffer`, and a buffer with transforms, copies them before it changes anything.

    Args:
        max_size: capacity; None for no bound.
        compilable: accepted for compatibility; a list is never shared.
        stack_dim: the dim of the slots in a stack; a negative one counts from the end of its batch dims.
        device: where items are moved; None leaves them where they are.
    """

    _kind = "lazy stack"

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        stack_dim: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        self.stack_dim = whole("stack_dim", stack_dim, least=-(2**31))

    def get(self, index: Any) -> Any:
        """An item for an int, a lazy stack for a slice, sequence, mask or tensor.

        An index of no items gives a tensordict with a dim of 0 and the entries of the first item, since a lazy stack of
        none has no entries. RuntimeError while nothing is stored, or for items with different numbers of batch dims;
        TypeError for items that are no tensordicts.
        """
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        found = super().get(index)
        if as_int(index) is not None:
            return found
        if not found and not len(self):
            raise RuntimeError("cannot make a batch of no items")
        for item in found or self._taken([0]):
            if not is_tensor_collection(item):
                raise TypeError(
                    f"a batch is read as a stack of tensordicts, and a {type(item).__name__} is stored: use ListStorage "
                    "with a collate_fn for other objects"
                )
        if not found:
            [item] = self._taken([0])
            return none_of(item, self.stack_dim % (item.ndim + 1))
        dims = found[0].ndim
        if any(item.ndim != dims for item in found):
            raise RuntimeError(
                f"items of batch sizes {sorted({tuple(item.batch_size) for item in found})} cannot be read as one: they "
                "need the same number of batch dims, or a ListStorage with collate_fn=lambda items: items"
            )
        return lazy_stack(found, self.stack_dim % (dims + 1))

    def _setting(self) -> dict[str, Any]:
        return {"stack_dim": self.stack_dim}

    def _to_keep(self, item: Any) -> Any:
        if is_tensor_collection(item) and not -item.ndim - 1 <= self.stack_dim <= item.ndim:
            raise ValueError(
                f"an item of batch size {list(item.batch_size)} cannot be stacked along stack_dim={self.stack_dim}; "
                "nothing was written"
            )
        return super()._to_keep(item)

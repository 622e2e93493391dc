"""Batches of one size, as a program returns them and as torch gets them."""

from typing import Any

import torch
from torch import Tensor

from interop import bridge
from interop.doors.items import Items
from interop.doors.programs import WORDS, Leaves, Path, Programs


class Drawing:
    """The program that draws batches of one size, and how its results are put together. `moving`: see `Programs.draws`."""

    def __init__(self, programs: Programs, items: Items, batch_size: int, leaves: Leaves) -> None:
        self._moves, info, self._draws = programs.described(batch_size, leaves)
        self.moving = any(self._moves)
        self._items, self._layout = items, items.with_entries(info) if items.is_dict else None
        order = (*items.paths, *info) if self._layout is None else tuple(leaf.path for leaf in self._layout.leaves)
        self._info = {path: order.index(path) for path in info}
        self._words = [place for path, place in self._info.items() if path in WORDS]
        self._program = programs.draws(batch_size, self._moves, order)

    def run(self, leaves: Leaves, key: Any, beta: Any) -> tuple[Any, ...]:
        """The state after a draw, and the results that `tensors` takes. Leaves that the draw changes are donated."""
        if not self.moving:
            return leaves, *self._program((), leaves, key, beta)[1:]
        parts: tuple[Any, ...] = tuple(
            tuple(leaf for leaf, moves in zip(leaves, self._moves, strict=True) if moves is wanted)
            for wanted in (True, False)
        )
        changed, *drawn = self._program(*parts, key, beta)
        new = iter(changed)
        return tuple(next(new) if moves else leaf for leaf, moves in zip(leaves, self._moves, strict=True)), *drawn

    def tensors(self, drawn: Any) -> tuple[list[Tensor], bool]:
        """The entries of a batch in memory of their own, none where nothing was drawn, and whether an epoch has ended."""
        arrays, facts, valid = drawn
        found = [bridge.hand_over(array) for array in arrays]
        for place in self._words:
            found[place] = found[place].view(torch.int64)
        count, ended = bridge.hand_over(facts).tolist()
        if count < self._draws:
            kept = bridge.hand_over(valid)
            found = [each[kept] for each in found] if count else []
        return found, bool(ended)

    def data(self, tensors: list[Tensor]) -> Any:
        """The batch: a TensorDict with the info, or the items alone."""
        if self._layout is None:
            return self._items.build(tensors[: len(self._items.paths)], tensors[0].shape[:1])
        return self._layout.build(tensors, tensors[0].shape[:1], self._items.device)

    def info(self, tensors: list[Tensor]) -> dict[Any, Any]:
        """The info by key. An index of several columns is a tuple of them."""
        told: dict[Any, Any] = {_key(path): tensors[place] for path, place in self._info.items()}
        if (index := told.get("index")) is not None and index.ndim > 1:
            told["index"] = index.unbind(-1)
        return told


def _key(path: Path) -> Any:
    return path[0] if len(path) == 1 else path

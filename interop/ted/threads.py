"""Work on large entries, side by side in as many threads as torch has: most of it is the first touch of memory."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fbuf.checkpoint.threads import at_once

_LEAST = 1 << 22  # bytes: for less a thread costs more than it gives

T = TypeVar("T")


def side_by_side(works: Sequence[Callable[[], T]], size: int) -> list[T]:
    """What functions return that do not change the same memory, in their order; the first error among them, at the end.

    `size` is the bytes that they go through together.
    """
    count = min(torch.get_num_threads(), len(works))
    if count < 2 or size < _LEAST:
        return [work() for work in works]
    return at_once(works, count)

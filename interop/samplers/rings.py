"""Arrays that hold something of each row of a ring, [rows, lanes]."""

import numpy as np


def put(held: np.ndarray, start: int, values: np.ndarray) -> None:
    """Write values into rows from `start` on, around the end."""
    head = len(held) - start
    if len(values) <= head:
        held[start : start + len(values)] = values
    else:
        held[start:], held[: len(values) - head] = values[:head], values[head:]


def grown(held: np.ndarray, room: int) -> np.ndarray:
    """The same with `room` rows, the new ones zero."""
    found = np.zeros((room, held.shape[1]), held.dtype)
    found[: len(held)] = held
    return found

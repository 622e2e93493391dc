"""Where trajectories start and stop in the rows of a ring."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

DEFAULT_DONE_KEYS = ("done", "truncated", "terminated")


def find_start_stop_traj(
    *,
    trajectory: Tensor | None = None,
    end: Tensor | None = None,
    at_capacity: bool,
    cursor: int | Tensor | range | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first and the last row of each trajectory, [n, 1 + batch dims], and its length, [n], on the device of the input.

    A row is its time and the coordinates of its batch column. Columns come one after the other, the trajectories of a
    column in the order of their last rows. A trajectory that continues from the last row to the first has start > stop. A
    column of a full storage without any end is one trajectory, from the first row to the last. O(rows).

    Args:
        trajectory: ids [time, *batch] in the order of the storage; a trajectory ends where the next row has another id.
        end: instead of it, whether a trajectory ends with a row, [time, *batch].
        at_capacity: whether the storage is full: the first row follows the last one. Otherwise the last row ends a
            trajectory.
        cursor: the row that was written last, or several, of which the last counts. In a full storage it ends a
            trajectory, since the rows after it were overwritten.
        device: where to compute.

    Raises: TypeError unless one of `trajectory` and `end` is given, and for an `end` that is not bool or integer;
    RuntimeError for one without rows; IndexError for a cursor out of range.
    """
    if (trajectory is None) == (end is None):
        raise TypeError("give one of trajectory and end")
    markers: Any = end if trajectory is None else trajectory
    if markers.ndim == 0 or markers.numel() == 0:
        raise RuntimeError(f"there are no rows to find trajectories in: got shape {list(markers.shape)}")
    moved = markers if device is None else markers.to(device)
    rows = moved.shape[0]
    batch = moved.shape[1:]
    if end is not None:
        if moved.is_floating_point() or moved.is_complex():
            raise TypeError(f"end must be bool, got {moved.dtype}")
        ends = moved != 0
    else:
        ends = torch.cat((moved[1:] != moved[:-1], (moved[-1:] != moved[:1])))
    if not at_capacity:
        ends[-1] = True
    elif cursor is not None:
        ends[_last(cursor, rows)] = True
    ends[-1] |= ~ends.any(0)  # of columns that have no end
    column, stop = ends.reshape(rows, -1).T.nonzero(as_tuple=True)
    before = stop.roll(1)
    first = column != column.roll(1)
    first[0] = True
    last = first.roll(-1)
    before[first] = stop[last]  # the first trajectory of a column follows its last one
    start = (before + 1) % rows
    lengths = (stop - start) % rows + 1
    places = torch.unravel_index(column, batch) if len(batch) else ()
    result = (torch.stack((start, *places), -1), torch.stack((stop, *places), -1), lengths)
    return tuple(tensor.to(markers.device) for tensor in result)  # type: ignore[return-value]  # three of them


def _last(cursor: Any, rows: int) -> int:
    """The row that was written last."""
    if isinstance(cursor, range | list):
        cursor = cursor[-1]
    row = int(cursor.reshape(-1)[-1] if isinstance(cursor, Tensor | np.ndarray) else cursor)
    if not -rows <= row < rows:
        raise IndexError(f"the cursor is at row {row} of {rows}")
    return row

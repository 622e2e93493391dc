"""What is kept of items whose observations are frames of trajectories, and what a write of them means."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data import bridge
from interop.data.layout import LeafSpec
from interop.storages import planning
from interop.storages.lazy import _zeros

OPEN, ID, STEP = range(3)  # what is known of the latest row of each lane
MOST_FINALS = 2**31 - 2  # the number of one, counted from 1, is an int32
_AT_ONCE = 1 << 23  # bytes that are compared


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What is kept of items; leaves are named by their place in the layout."""

    leaves: tuple[LeafSpec, ...]
    pairs: tuple[tuple[int, int], ...]  # observations and next observations
    ends: tuple[int, ...]  # a trajectory ends with an item for which one of these is true
    ids: int | None  # another value than in the row before begins one
    stack: int
    dim: int  # of an observation: the frames of a stack lie side by side along it
    zeros: bool  # stand before the first frame of a trajectory; otherwise that frame does
    check: bool
    capacity: int
    lanes: tuple[int, ...]
    finals: int  # how many next frames of items with which trajectories end can be kept

    @functools.cached_property
    def per_row(self) -> int:
        return math.prod(self.lanes)

    @functools.cached_property
    def frame_rows(self) -> int:
        """Rows of the ring of frames: what stands before the oldest item, and the next frame of the newest one."""
        return self.capacity + self.stack

    @functools.cached_property
    def pictures(self) -> frozenset[int]:
        """The leaves that are put together."""
        return frozenset(place for pair in self.pairs for place in pair)

    @functools.cached_property
    def rest(self) -> tuple[int, ...]:
        """The leaves that are kept as they are."""
        return tuple(place for place in range(len(self.leaves)) if place not in self.pictures)

    @functools.cached_property
    def fixed(self) -> tuple[int, ...]:
        """The leaves that say which frames items have: once written they stay."""
        return (*sorted(self.pictures), *self.ends, *(() if self.ids is None else (self.ids,)))

    def frame(self, place: int) -> tuple[int, ...]:
        """The shape of a frame of an observation."""
        shape = list(self.leaves[place].shape)
        if self.stack > 1:
            shape[self.dim] //= self.stack
        return tuple(shape)

    def axis(self, place: int) -> int:
        """The dim of the stack, counted from the end."""
        return self.dim if self.dim < 0 else self.dim - len(self.leaves[place].shape)

    def newest(self, leaf: Tensor, place: int) -> Tensor:
        """The newest frames of observations."""
        if self.stack == 1:
            return leaf
        axis = self.axis(place)
        size = leaf.shape[axis] // self.stack
        return leaf.narrow(axis, leaf.shape[axis] - size, size)

    def memory(self) -> list[Tensor]:
        """Tensors of zeros for all that is kept. They take memory as they are written."""
        return [_zeros(shape, dtype) for _, shape, dtype in self.arrays()]

    def arrays(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """What is kept: names, shapes and dtypes."""
        items = self.capacity * self.per_row
        rest = [self.leaves[place] for place in self.rest]
        # Frames: the ring, row by row; then the finals; then one of zeros.
        frames = self.frame_rows * self.per_row + self.finals + 1
        return [
            *((spec.name, (self.capacity, *self.lanes, *spec.shape), spec.dtype) for spec in rest),
            *((self.leaves[obs].name, (frames, *self.frame(obs)), self.leaves[obs].dtype) for obs, _ in self.pairs),
            ("steps", (items,), torch.int32),  # items before in the trajectory, counted up to `stack`
            (
                "finals",
                (items,),
                torch.int32,
            ),  # 1 + the final that is the next frame; 0 where that is in the row behind
            ("free finals", (self.finals,), torch.int32),  # finals that were used and are free
            ("latest", (3, self.per_row), torch.int64),  # of the latest row
            ("counts", (5,), torch.int64),
        ]

    def planned(self) -> list[Share]:
        """What they take: the frames with which trajectories end as they are stored."""
        pictures = {self.leaves[obs].name for obs, _ in self.pairs}
        shares: list[Share] = []
        for name, (rows, *shape), dtype in self.arrays():
            if name not in pictures:
                part = "items" if len(shares) < len(self.rest) else "frames"
                shares.append(planning.array(part, name, (rows, *shape), dtype, "cpu"))
                continue
            kept = rows - self.finals
            shares.append(planning.array("frames", name, (kept, *shape), dtype, "cpu"))
            last = planning.array("frames", f"{name}, last ones", (self.finals, *shape), dtype, "cpu", counts="at most")
            shares.append(last)
        return shares


@dataclasses.dataclass
class Plan:
    """A write of consecutive rows."""

    leaves: list[Tensor]  # [n, *lanes, ...]
    starts: np.ndarray  # [n, lanes] bool: a trajectory begins
    step: np.ndarray  # [n, lanes]: items before in the trajectory, up to `stack`
    ends: np.ndarray  # [n, lanes] bool: the trajectory goes no further
    cut: np.ndarray  # [lanes] bool: that of the row before these goes no further
    latest: np.ndarray  # [3, lanes]: what is known of the last row


def planned(scheme: Scheme, leaves: list[Tensor], latest: np.ndarray) -> Plan:
    """What the write of leaves [n, *lanes, ...] on the host means, after a row of which `latest` is known."""
    count, lanes = leaves[0].shape[0], scheme.per_row
    ended = np.zeros((count, lanes), np.bool_)
    for place in scheme.ends:
        ended |= _column(leaves[place], count, lanes) != 0
    starts = np.empty((count, lanes), np.bool_)
    starts[0], starts[1:] = latest[OPEN] == 0, ended[:-1]
    after = np.empty_like(latest)
    if scheme.ids is not None:
        ids = _column(leaves[scheme.ids], count, lanes)
        starts[0] |= ids[0] != latest[ID]
        starts[1:] |= ids[1:] != ids[:-1]
        after[ID] = ids[-1]
    row = np.arange(count)[:, None]
    begun = np.maximum.accumulate(np.where(starts, row, -1), 0)
    step = np.minimum(np.where(begun < 0, latest[STEP] + 1 + row, row - begun), scheme.stack)
    ends = np.concatenate([starts[1:], ended[-1:]])
    after[OPEN], after[STEP] = ~ended[-1], step[-1]
    return Plan(leaves, starts, step, ends, (latest[OPEN] != 0) & starts[0], after)


def refuse_strangers(scheme: Scheme, plan: Plan, expected: Sequence[np.ndarray]) -> None:
    """ValueError for observations that are not made of the frames of their trajectory: others would be read.

    `expected` are, for each pair, the bits of the next observations [lanes, ...] of the row before.
    """
    for (place, next_place), before in zip(scheme.pairs, expected, strict=True):
        spec = scheme.leaves[place]
        lead = plan.starts.shape
        obs = bits(plan.leaves[place]).reshape(*lead, *spec.shape)
        following = bits(plan.leaves[next_place]).reshape(*lead, *spec.shape)
        unlike = np.concatenate([_differ(obs[:1], before[None]), _differ(obs[1:], following[:-1])])
        _refuse(
            unlike & ~plan.starts,
            f"{spec.name} is not the next observation of the item before it in its trajectory. Mark where trajectories "
            "end (end_keys, or traj_key), and store environments that take turns side by side (ndim=2)",
        )
        if scheme.stack == 1:
            continue
        axis = scheme.axis(place)
        obs, following = (_frames(leaf, scheme.stack, axis) for leaf in (obs, following))  # [stack, n, lanes, ...]
        begin = obs[:, plan.starts]
        padding = np.zeros_like(begin[:1]) if scheme.zeros else begin[-1:]
        unlike = np.zeros(lead, np.bool_)
        unlike[plan.starts] = _differ(begin[:-1].swapaxes(0, 1), padding.swapaxes(0, 1), 1)
        _refuse(
            unlike,
            f"{spec.name} begins a trajectory, and its older frames are not {'zeros' if scheme.zeros else 'its newest one'}"
            ": they would not be known. Record episodes from their first step on (see `padding`)",
        )
        _refuse(
            _differ(np.moveaxis(following[:-1], 0, 2), np.moveaxis(obs[1:], 0, 2)),
            f"{scheme.leaves[next_place].name} does not begin with the last {scheme.stack - 1} frames of {spec.name}",
        )


def _refuse(wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        row, lane = (int(each[0]) for each in wrong.nonzero())
        at = f"row {row}" + (f", lane {lane}" if wrong.shape[1] > 1 else "")
        raise ValueError(f"in {at} of the data {what}; nothing was written. check=False takes it as it is")


def _differ(left: np.ndarray, right: np.ndarray, dims: int = 2) -> np.ndarray:
    """Which of the arrays behind some leading dims are not the same. Takes little memory beside them."""
    step = max(1, _AT_ONCE * len(left) // max(1, left.nbytes))
    if len(left) > step:
        parts = [slice(start, start + step) for start in range(0, len(left), step)]
        return np.concatenate([_differ(left[part], right[part], dims) for part in parts])
    return np.asarray((left != right).any(tuple(range(dims, left.ndim))))


def _frames(obs: np.ndarray, stack: int, axis: int) -> np.ndarray:
    """Observations [n, lanes, ...] as [stack, n, lanes, ...]."""
    axis += obs.ndim
    return np.moveaxis(obs.reshape(*obs.shape[:axis], stack, -1, *obs.shape[axis + 1 :]), axis, 0)


def bits(leaf: Tensor) -> np.ndarray:
    """The values of a tensor on the host as they compare bit for bit."""
    values = bridge.numpy_view(leaf)
    if values.dtype.kind not in "fc":
        return values
    size = values.dtype.itemsize
    return np.ascontiguousarray(values).view(f"u{size}" if size <= 8 else f"V{size}")


def _column(leaf: Tensor, count: int, lanes: int) -> np.ndarray:
    return bridge.numpy_view(leaf).reshape(count, lanes)

"""Rows that store each frame of an observation once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.layout import KeyPath, Layout, LeafSpec
from interop.data.trajectory_keys import TrajectoryKeys
from interop.engine import plans
from interop.engine.places.frame_rows import FrameRows, Scheme
from interop.engine.places.place import Place
from interop.host.stored_rows import Rows

MOST_FRAMES = 2**31  # their numbers are int32


@dataclass(frozen=True)
class FrameKeys:
    """Which entries of items are frames. See `LazyFrameStorage`."""

    observations: tuple[KeyPath, ...]
    stack: int
    stack_dim: int
    pads_with_zeros: bool
    end_keys: tuple[KeyPath, ...] | None
    traj_key: KeyPath | None
    only_named_keys: bool
    finals: int | None
    check: bool


class Frames(Place):
    """Memory of this process for single frames, and for the entries that are none."""

    in_order = True

    def __init__(self, keys: FrameKeys) -> None:
        super().__init__()
        self.keys = keys

    def allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        plans.refuse(self.plan(layout, lead, self.known_device()))
        return FrameRows(self.scheme(layout, lead))

    def holding(self, layout: Layout, tensors: Sequence[Tensor], lead: tuple[int, ...]) -> Rows:
        return FrameRows(self.scheme(layout, lead), tensors)

    def plan(
        self, layout: Layout, lead: tuple[int, ...], device: torch.device, is_allocated: bool = False
    ) -> list[Share]:
        scheme = self.scheme(layout, lead)
        shares: list[Share] = []
        for part, name, shape, dtype in scheme.arrays():
            if part == "frames":  # the last frames of trajectories take memory as they are stored
                last = (scheme.finals, *shape[1:])
                shares.append(plans.array(part, f"{name}, last ones", last, dtype, "cpu", counts="at most"))
                shape = (scheme.first_final, *shape[1:])
            shares.append(plans.array(part, name, shape, dtype, "cpu"))
        return shares

    def scheme(self, layout: Layout, lead: tuple[int, ...]) -> Scheme:
        """Which leaves are frames. KeyError, TypeError, ValueError or RuntimeError for items that cannot be stored so."""
        keys = self.keys
        if layout.varied:
            raise TypeError(
                f"a LazyFrameStorage holds tensors of equal shapes, {list(layout.varied)} are text or ragged rows: use a "
                "LazyTensorStorage"
            )
        end_keys = None if keys.end_keys is None else list(keys.end_keys)
        named = TrajectoryKeys.chosen(keys.traj_key, end_keys, keys.only_named_keys)
        marks = [
            [place for path in group if (place := _marker(layout, path, path in named.named)) is not None]
            for group in named.groups()
        ]
        if not any(marks[:3]):
            raise KeyError(
                f"none of {[*named.ends, *named.ids, *named.firsts]} is in the data to mark ends of trajectories: give "
                "end_keys or traj_key"
            )
        ids, ends, firsts, masks = map(tuple, marks)
        items = torch.Size(lead).numel()
        scheme = Scheme(
            leaves=layout.leaves,
            pairs=tuple(self._pair(layout, key) for key in keys.observations),
            ends=ends,
            ids=ids,
            firsts=firsts,
            masks=masks,
            stack=keys.stack,
            dim=keys.stack_dim,
            zeros=keys.pads_with_zeros,
            check=keys.check,
            capacity=lead[0],
            lanes=tuple(lead[1:]),
            finals=min(items, keys.finals or items),
        )
        if scheme.frames >= MOST_FRAMES:
            raise ValueError(f"a LazyFrameStorage has less than {MOST_FRAMES} frames, {scheme.frames} are needed")
        return scheme

    def _pair(self, layout: Layout, key: KeyPath) -> tuple[int, int]:
        """The leaves of an observation and of the next one."""
        stack = self.keys.stack
        dim = self.keys.stack_dim
        obs = _leaf(layout, key)
        following = _leaf(layout, ("next", *key))
        one = layout.leaves[obs]
        other = layout.leaves[following]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise RuntimeError(
                f"{one.name} is {one.dtype} of shape {list(one.shape)}, {other.name} {other.dtype} of {list(other.shape)}: "
                "an observation and the next one must be alike; nothing was written"
            )
        dims = len(one.shape)
        if stack > 1 and (not -dims <= dim < dims or one.shape[dim] % stack or not one.shape[dim]):
            raise RuntimeError(
                f"{one.name} has shape {list(one.shape)}: stack_dim={dim} of it must hold the {stack} frames of "
                "a stack; nothing was written"
            )
        return obs, following


def _leaf(layout: Layout, path: KeyPath) -> int:
    place = layout.places.get(path)
    if place is None:
        stored = ", ".join(leaf.name for leaf in layout.leaves)
        raise KeyError(f"{path[0] if len(path) == 1 else path!r} is not a tensor of the data, which has {stored}")
    return place


def _marker(layout: Layout, path: KeyPath, is_named: bool) -> int | None:
    """The leaf of an entry that marks trajectories; None for one that cannot, unless it is named."""
    if not is_named:
        place = layout.places.get(path)
        leaf: LeafSpec | None = None if place is None else layout.leaves[place]
        return place if leaf and not leaf.dtype.is_complex and torch.Size(leaf.shape).numel() == 1 else None
    named = _leaf(layout, path)
    marker = layout.leaves[named]
    if marker.dtype.is_floating_point or marker.dtype.is_complex:
        raise TypeError(f"{marker.name} must be bool or integers, got {marker.dtype}; nothing was written")
    if torch.Size(marker.shape).numel() != 1:
        raise RuntimeError(
            f"{marker.name} must be one value an item, got shape {list(marker.shape)}; nothing was written"
        )
    return named

"""Frames of several steps in one entry, never across the end of a trajectory."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.arguments import whole
from interop.data.keys import as_path, known_keys
from interop.postprocs.gather import picked, put_rows
from interop.transforms.order import current, follows_in_buffer
from interop.transforms.shapes import as_dim
from interop.transforms.transform import (
    Keys,
    Transform,
    as_key,
    before_key,
    expect_tensor,
    expect_tensordict,
    put,
)

_IDS = (("collector", "traj_ids"), "episode", "sequence_id")
_MASK = ("collector", "mask")  # the next slice follows the padding
_TRUNCATED = ("next", "truncated")


class CatFrames(Transform):
    """Stacks the frames of the last `N` steps: a frame [..., C, H, W] becomes [..., N * C, H, W].

    For data in time, [..., T]: the dim named "time", else the last batch dim. Frames of another trajectory are never used.
    A trajectory ends where ("next", done_key) or ("next", "truncated") is true, where one of ("collector", "traj_ids"),
    ("collector", "mask"), "episode" and "sequence_id" changes, and with the data. Missing frames before its first step are
    padding.

    If `in_keys` has both `key` and ("next", key), stacks of ("next", key) begin with the first frame of `key`: they equal
    the stacks of `key` one step later.

    In a buffer, a stack has only steps that were stored one right after the other, also in a flat batch of slices.
    Elsewhere reshape such a batch first, or it is one line in time. A `LazyFrameStorage` stores every frame once and stacks
    when it reads, which costs less and works with any sampler.

    Args:
        N: frames of a stack, the oldest first.
        dim: the dim of a frame along which they are concatenated, negative. The first one is the fastest.
        in_keys: frames, ["pixels"] by default.
        out_keys: where the stacks go, `in_keys` by default.
        padding: "same" for the first frame of the trajectory, "constant" for a number.
        padding_value: that number.
        as_inverse: stack when a buffer is written, instead of when it is read.
        done_key: the flag under "next" that ends a trajectory, "done" by default.

    KeyError for missing frames, and if no entry marks ends. ValueError for data without time, frames without `dim`, and a
    batch of a buffer in which no step follows another.
    """

    def __init__(
        self,
        N: int,  # noqa: N803
        dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        padding: str = "same",
        padding_value: float = 0,
        as_inverse: bool = False,
        *,
        done_key: NestedKey = "done",
    ) -> None:
        in_keys = ["pixels"] if in_keys is None else in_keys
        super().__init__(in_keys, in_keys if out_keys is None else out_keys)
        self.N, self.dim = whole("N", N), as_dim("dim", dim)
        if padding not in ("same", "constant"):
            raise ValueError(f"padding must be 'same' or 'constant', got {padding!r}")
        self.padding, self.padding_value, self.as_inverse = padding, padding_value, bool(as_inverse)
        done_key = as_key("done_key", done_key)
        self.done_key = before_key(done_key) or done_key

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict if self.as_inverse else self._stacked(next_tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._stacked(tensordict) if self.as_inverse else tensordict

    def _stacked(self, data: TensorDictBase) -> TensorDictBase:
        expect_tensordict("CatFrames", data)
        if not data.batch_dims:
            raise ValueError("CatFrames: a tensordict without batch dims has no steps in time, [..., T] is needed")
        frames = {key: value for key in self.in_keys if (value := self._get(data, key)) is not None}
        for key, value in frames.items():
            expect_tensor("CatFrames", key, value)
            if -self.dim > value.ndim - data.batch_dims:
                shape = list(value.shape[data.batch_dims :])
                raise ValueError(
                    f"CatFrames: {key!r} has frames of shape {shape}, which has no dim {self.dim}: unsqueeze them"
                )
        windows = _windows(data, self.N, self.done_key)
        made: list[tuple[NestedKey, Tensor]] = []
        for key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if key in frames:
                made.append((out_key, self._stack(key, frames[key], frames.get(before_key(key)), *windows)))
        put("CatFrames", data, made)
        return data

    def _stack(
        self, key: NestedKey, frames: Tensor, first: Tensor | None, places: Tensor, outside: Tensor, earlier: Tensor
    ) -> Tensor:
        """Stacks of frames. `first` has the frames right before the first step of each trajectory."""
        shape, item = outside.shape, frames.shape[outside.ndim - 1 :]
        rows, places, outside = frames.reshape(-1, *item), places.to(frames.device), outside.to(frames.device)
        out = picked(rows, places)
        padded = outside.reshape(-1).nonzero().squeeze(-1)
        if first is not None:
            if (first.dtype, first.shape) != (frames.dtype, frames.shape):
                raise ValueError(f"CatFrames: {key!r} and {before_key(key)!r} must have one dtype and shape")
            put_rows(out, padded, picked(first.reshape(rows.shape), places[padded]))
            padded = earlier.reshape(-1).to(frames.device).nonzero().squeeze(-1)
        if self.padding == "constant":
            value = torch.full((), self.padding_value, dtype=out.dtype, device=out.device)
            if not out.is_floating_point() and value.item() != self.padding_value:
                raise ValueError(f"CatFrames: padding_value={self.padding_value} is no {out.dtype}, which {key!r} is")
            put_rows(out, padded, value.expand(len(padded), *item))
        place = len(shape) - 1 + len(item) + self.dim
        return out.view(*shape, *item).movedim(len(shape) - 1, place).flatten(place, place + 1)

    def __repr__(self) -> str:
        return f"CatFrames(N={self.N}, dim={self.dim}, keys={self.in_keys})"


def _windows(data: TensorDictBase, count: int, done_key: NestedKey) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` steps up to each step of data in time, cut where its trajectory begins.

    Returns their places in the flat batch, int64 [steps * count]: the first step of the trajectory for missing ones.
    Then whether a step is missing, bool [*batch_size, count], and whether more than one is missing behind it.
    """
    shape = data.batch_size
    time = data.names.index("time") if "time" in data.names else len(shape) - 1
    begins = _begins(data, time, done_key)
    begins[..., :1] = True
    follows = follows_in_buffer(shape, time)
    if follows is not None:
        alone = not bool(follows.any()) and not bool(begins[..., 1:].all())
        if alone and count > 1 and follows.numel():
            raise ValueError(
                "CatFrames: none of these steps comes right after the one before it, there is nothing to stack: draw "
                "with a SliceSampler, or store frames in a LazyFrameStorage"
            )
        begins[..., 1:] |= ~follows.to(begins.device)
    steps = torch.arange(shape[time], device=begins.device)
    wanted = steps.unsqueeze(-1) + torch.arange(1 - count, 1, device=steps.device)
    bound = steps.where(begins, 0).cummax(-1).values.unsqueeze(-1)
    rows = torch.arange(shape.numel(), device=steps.device).reshape(shape).movedim(time, -1)[..., :1]
    places = torch.maximum(wanted, bound) * shape[time + 1 :].numel() + rows.unsqueeze(-1)
    outside, earlier = (wanted < each for each in (bound, bound - 1))
    return places.movedim(-2, time).reshape(-1), outside.movedim(-2, time), earlier.movedim(-2, time)


def _begins(data: TensorDictBase, time: int, done_key: NestedKey) -> Tensor:
    """bool [..., T], time last: whether a trajectory ends before a step."""
    shape, done_key = data.batch_size, ("next", *as_path(done_key))
    order = current()
    drawn_by = () if order is None or order.traj_key is None else (order.traj_key,)
    marked, changes = False, []
    for key in dict.fromkeys((done_key, _TRUNCATED)):
        if (ends := data.get(key, None)) is not None:
            expect_tensor("CatFrames", key, ends)
            changes.append(_of_items(ends, shape, key).movedim(time, 0)[:-1] != 0)
            marked |= key == done_key
    for key in (*_IDS, *drawn_by, _MASK):
        if isinstance(value := data.get(key, None), Tensor) and not value.is_floating_point():
            moved = _of_items(value, shape, key).movedim(time, 0)
            changes.append(moved[1:] != moved[:-1])
            marked |= key != _MASK
    if not marked:
        raise KeyError(
            f"CatFrames: {done_key!r} not found in tensordict, which has {known_keys(data)}: without it nothing marks where "
            "trajectories end"
        )
    device = next((value.device for value in (*changes, *data.values(True, True))), None)
    begins = torch.zeros(shape, dtype=torch.bool, device=device).movedim(time, 0)
    for change in changes:
        begins[1:] |= change.unsqueeze(-1).flatten(len(shape)).any(-1).to(device)
    return begins.movedim(0, -1)


def _of_items(value: Tensor, shape: Sequence[int], key: Any) -> Tensor:
    if list(value.shape[: len(shape)]) != list(shape):
        raise ValueError(f"CatFrames: {key!r} of shape {list(value.shape)} does not fit a batch size of {list(shape)}")
    return value

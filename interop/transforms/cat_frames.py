"""Frames of several steps in one entry, never across the end of a trajectory."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path, known_keys
from interop.data.numbers import whole
from interop.postprocs.gather import picked, put_rows
from interop.transforms.entries import before_key, expect_tensor, expect_tensordict, put
from interop.transforms.order import current, follows_in_buffer
from interop.transforms.shapes import as_dim
from interop.transforms.transform import Keys, Transform, as_key

_IDS = (("collector", "traj_ids"), "episode", "sequence_id")
_MASK = ("collector", "mask")  # the next slice follows the padding
_TRUNCATED = ("next", "truncated")


class CatFrames(Transform):
    """The frames of the last `N` steps as one: a frame [..., C, H, W] becomes [..., N * C, H, W].

    For data in time, [..., T]: the dim named "time", else the last batch dim. Frames of another trajectory are never taken.
    One ends where ("next", done_key) or ("next", "truncated") is true, at the end of the data, and where one of
    ("collector", "traj_ids"), ("collector", "mask"), "episode" and "sequence_id" changes. Frames before its first step in
    the data are padding.

    Of ("next", key), with `key` among `in_keys` too, the stacks begin with the first frame under `key`, and equal the stack
    of `key` one step later.

    In a buffer, stacks are of steps that were stored one right after the other, also in a flat batch of slices. Elsewhere,
    such a batch is one line in time: reshape it. For stacks of independent steps there is `make_rb_transform_and_sampler`.
    A `LazyFrameStorage` stores every frame once and stacks when it reads, which costs less.

    Args:
        N: frames of a stack, the oldest first.
        dim: the dim of a frame along which they are put side by side, negative. One gather for its first dim; for another
            one the stacks are copied once more.
        in_keys: frames, ["pixels"] by default.
        out_keys: where the stacks go, `in_keys` by default.
        padding: "same" for the first frame of the trajectory, "constant" for a number.
        padding_value: that number; ValueError where the dtype of frames has no such value.
        as_inverse: stack when a buffer is written, instead of when it is read.
        reset_key: accepted; data in time has no resets.
        done_key: the flag under "next" that ends a trajectory, "done" by default.
        future: stack the next `N` steps instead, this one first; without any end, they end with the data.
        mask_key: also write where frames are padding: bool [..., T, N].

    KeyError for missing frames and where no entry marks ends, ValueError for data without time, for frames without `dim`,
    and for a batch of a buffer with no step right after another.
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
        reset_key: NestedKey | None = None,
        done_key: NestedKey | None = None,
        future: bool = False,
        mask_key: NestedKey | None = None,
    ) -> None:
        in_keys = ["pixels"] if in_keys is None else in_keys
        super().__init__(in_keys, in_keys if out_keys is None else out_keys)
        self.N, self.dim = whole("N", N), as_dim("dim", dim)
        if padding not in ("same", "constant"):
            raise ValueError(f"padding must be 'same' or 'constant', got {padding!r}")
        if not isinstance(padding_value, int | float):
            raise TypeError(f"padding_value must be a number, got {padding_value!r}")
        self.padding, self.padding_value = padding, padding_value
        self.as_inverse, self.future = bool(as_inverse), bool(future)
        self.reset_key = reset_key
        done_key = as_key("done_key", "done" if done_key is None else done_key)
        self.done_key = before_key(done_key) or done_key
        self.mask_key = None if mask_key is None else as_key("mask_key", mask_key)
        written = [*self.out_keys, *([] if self.mask_key is None else [self.mask_key])]
        if len(set(written)) < len(written):
            raise ValueError(f"out_keys and mask_key must be different keys, got {written}")

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
            self.check(key, value, data.batch_dims)
        windows = Windows(data, self.N, self.done_key, self.future)
        made: list[tuple[NestedKey, Tensor]] = []
        for key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if key in frames:
                first = None if self.future else frames.get(before_key(key))
                if first is not None:
                    _alike(key, frames[key], first)
                made.append((out_key, self._stack(frames[key], first, windows)))
        if self.mask_key is not None:
            made.append((self.mask_key, windows.outside))
        put("CatFrames", data, made)
        return data

    def check(self, key: NestedKey, value: Any, batch_dims: int) -> None:
        """Errors for an entry that cannot be stacked."""
        expect_tensor("CatFrames", key, value)
        shape = list(value.shape[batch_dims:])
        if -self.dim > len(shape):
            raise ValueError(
                f"CatFrames: {key!r} has frames of shape {shape}, which has no dim {self.dim}: unsqueeze them"
            )
        if self.padding == "constant":
            _check_value(key, self.padding_value, value.dtype)

    def _stack(self, frames: Tensor, first: Tensor | None, windows: "Windows") -> Tensor:
        """Stacks of frames; where `first` is given, with its frames in the place of those before the first step."""
        shape, item = windows.outside.shape, frames.shape[windows.outside.ndim - 1 :]
        rows, places = frames.reshape(shape[:-1].numel(), *item), windows.places.to(frames.device)
        out = picked(rows, places)
        padded = _true(windows.outside, frames.device)
        if first is not None:
            put_rows(out, padded, picked(first.reshape(rows.shape), places.index_select(0, padded)))
            padded = _true(windows.before_first, frames.device)
        if self.padding == "constant":
            value = torch.full((1, *item), self.padding_value, dtype=out.dtype, device=out.device)
            put_rows(out, padded, value.expand(len(padded), *item))
        return side_by_side(out.view(*shape, *item), len(shape) - 1, self.dim)

    def make_rb_transform_and_sampler(self, batch_size: int, **sampler_kwargs: Any) -> tuple[Any, Any]:
        """A chain of transforms and a sampler, with which a buffer of single frames gives stacks of independent steps.

        The sampler draws steps with their N - 1 predecessors, each trajectory equally often, of which the chain makes the
        stacks: of `in_keys`, and of ("next", key) where that is stored. Stacks that are in the data already, under other
        names than `in_keys`, are not stored. The "index" of a sample is [batch_size, N].

        Steps with fewer predecessors are never drawn, unless with `strict_length=False`: padded then, with "same" only.
        Flags are those that were stored: the last step of a slice is not marked.

        Args:
            batch_size: the number of stacks; the batch size of the buffer counts.
            sampler_kwargs: for the `SliceSampler`, such as `traj_key` or `end_key`; the latter is that of this transform by
                default.

        ValueError with `future`, `mask_key` or `as_inverse`, which have no meaning there.
        """
        from interop.transforms.frame_slices import stacks_of_slices

        return stacks_of_slices(self, batch_size, sampler_kwargs)

    def __repr__(self) -> str:
        return f"CatFrames(N={self.N}, dim={self.dim}, keys={self.in_keys})"


class Windows:
    """The `count` steps up to each step of data in time, or from it on, cut where its trajectory begins or ends.

    Attributes:
        places: int64 [steps * count], which of the flat batch; the nearest of the trajectory for one out of it.
        outside: bool [*batch_size, count], whether it is out of it.
        before_first: the same, but for the one right before the trajectory.
    """

    def __init__(self, data: TensorDictBase, count: int, done_key: NestedKey, future: bool) -> None:
        shape = data.batch_size
        time = data.names.index("time") if "time" in data.names else len(shape) - 1
        begins = _begins(data, time, done_key, future)
        begins[..., :1] = True
        follows = follows_in_buffer(shape, time)
        if follows is not None:
            alone = not bool(follows.any()) and not bool(begins[..., 1:].all())
            if alone and count > 1 and follows.numel():
                raise ValueError(
                    "CatFrames: none of these steps comes right after the one before it, there is nothing to stack: draw "
                    "with a SliceSampler, or make transform and sampler with make_rb_transform_and_sampler()"
                )
            begins[..., 1:] |= ~follows.to(begins.device)
        # With `future` time runs backwards, and a trajectory begins with its last step.
        if future:
            begins = begins.roll(-1, -1).flip(-1)
        steps = torch.arange(shape[time], device=begins.device)
        wanted = steps.unsqueeze(-1) + torch.arange(1 - count, 1, device=steps.device)
        bound = steps.where(begins, 0).cummax(-1).values.unsqueeze(-1)
        inside, outside, before_first = torch.maximum(wanted, bound), wanted < bound, wanted < bound - 1
        if future:
            inside, outside, before_first = (
                each.flip(-2, -1) for each in (shape[time] - 1 - inside, outside, before_first)
            )
        rows = torch.arange(shape.numel(), device=steps.device).reshape(shape).movedim(time, -1)[..., :1]
        inside = inside * shape[time + 1 :].numel() + rows.unsqueeze(-1)
        self.places = inside.movedim(-2, time).reshape(-1)
        self.outside, self.before_first = outside.movedim(-2, time), before_first.movedim(-2, time)


def _true(chosen: Tensor, device: torch.device) -> Tensor:
    """The flat places where a tensor is True, int64 [n]."""
    return chosen.reshape(-1).nonzero().squeeze(-1).to(device)


def side_by_side(stacks: Tensor, batch_dims: int, dim: int) -> Tensor:
    """Frames [*batch, N, *item] with those of a stack put side by side along a negative dim of the item."""
    place = stacks.ndim + dim - 1
    return stacks.movedim(batch_dims, place).flatten(place, place + 1)


def _begins(data: TensorDictBase, time: int, done_key: NestedKey, may_miss: bool) -> Tensor:
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
    if not marked and not may_miss:
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


def _alike(key: NestedKey, value: Tensor, first: Tensor) -> None:
    if (first.dtype, first.shape) != (value.dtype, value.shape):
        raise ValueError(
            f"CatFrames: {key!r} is {value.dtype} of shape {list(value.shape)}, {before_key(key)!r} is {first.dtype} of "
            f"shape {list(first.shape)}: they have to be alike"
        )


def _check_value(key: NestedKey, value: float, dtype: torch.dtype) -> None:
    """ValueError for a number that a dtype does not have, but for rounding."""
    try:
        held = torch.full((2,), value, dtype=dtype, device="cpu")[0]
    except (RuntimeError, OverflowError):
        held = None
    if held is None or (not dtype.is_floating_point and not dtype.is_complex and held.item() != value):
        raise ValueError(f"CatFrames: padding_value={value} is no {dtype}, which {key!r} is")

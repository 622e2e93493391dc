"""Frames of several steps in one entry, never across the end of a trajectory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.arguments import whole
from interop.data.keys import as_path, checked_key, known_keys
from interop.data.trajectory_keys import MASKS, KeyPath
from interop.postprocs import returns
from interop.postprocs.batch_trajectories import SideBySide, StepMarks, keys_of, trajectories_of
from interop.postprocs.gather import picked, put_rows
from interop.transforms.order import breaks_in_buffer, current
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

if TYPE_CHECKING:
    from interop.samplers import StackSampler
    from interop.transforms.chain import Compose

_IDS = (("sequence_id",),)  # of windows, besides the default ones
_DONE = ("next", "done")


class CatFrames(Transform):
    """Stacks the frames of the last `N` steps: a frame [..., C, H, W] becomes [..., N * C, H, W].

    For data in time, [..., T]: the dim named "time", else the last batch dim. Frames of another trajectory are never used.
    A trajectory ends with the data, and where any entry says so: where ("next", done_key), ("next", "done"),
    ("next", "terminated") or ("next", "truncated") is true, before a true "is_init", and where one of
    ("collector", "traj_ids"), "traj_ids", "episode", "sequence_id" and ("collector", "mask") changes. Interleaved ids are
    separate trajectories. Missing frames before its first step are padding.

    If `in_keys` has both `key` and ("next", key), stacks of ("next", key) begin with the first frame of `key`: they equal
    the stacks of `key` one step later.

    In a buffer, a stack has only steps that follow each other in one slice or window, or that were stored one right after
    the other, also in a flat batch of slices. Elsewhere reshape such a batch first, or it is one line in time. A
    `LazyFrameStorage` stores every frame once and stacks when it reads, which costs less and works with any sampler.

    Args:
        N: frames of a stack, the oldest first.
        dim: the dim of a frame along which they are concatenated, negative. The first one is the fastest.
        in_keys: frames, ["pixels"] by default.
        out_keys: where the stacks go, `in_keys` by default.
        padding: "same" for the first frame of the trajectory, "constant" for a number.
        padding_value: that number.
        as_inverse: stack when a buffer is written, instead of when it is read.
        done_key: the flag under "next" that ends a trajectory, "done" by default.
        traj_key: an entry of ids, one value a step, besides the default ones.
        only_named_keys: only `done_key` and `traj_key` mark trajectories, and ("collector", "mask").

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
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
    ) -> None:
        in_keys = ["pixels"] if in_keys is None else in_keys
        super().__init__(in_keys, in_keys if out_keys is None else out_keys)
        self.N = whole("N", N)
        self.dim = as_dim("dim", dim)
        if padding not in ("same", "constant"):
            raise ValueError(f"padding must be 'same' or 'constant', got {padding!r}")
        self.padding = padding
        self.padding_value = padding_value
        self.as_inverse = bool(as_inverse)
        done_key = as_key("done_key", done_key)
        self.done_key = before_key(done_key) or done_key
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)

    def make_rb_transform_and_sampler(
        self,
        batch_size: int | None = None,
        *,
        end_key: NestedKey | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = None,
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: bool | int | Sequence[bool | int] = False,
        use_gpu: bool | torch.device | str | None = False,
        only_named_keys: bool = False,
    ) -> "tuple[Compose, StackSampler]":
        """A transform and a sampler for a buffer that stores single frames and gives items with stacks.

        The sampler draws slices of N steps, as many as the batch has items: a batch of size 32 reads 32 * N steps. The
        transform stacks the frames of each slice, also those under "next", and keeps its newest step. `out_keys` are not
        stored. Put transforms that make the frames, such as `ToTensorImage`, before it in a `Compose`. For a `ReplayBuffer`:
        a `TensorDictReplayBuffer` refuses transforms that take rows away.

        The newest step has N - 1 steps before it in its trajectory. To draw the first steps of trajectories too, with padded
        stacks, pass strict_length=False, pad_output=True, span=(True, False).

        Args:
            batch_size: accepted; the batch size of the buffer, or of `sample`, counts.
            truncated_key: as for `SliceSampler`. By default flags stay as they are stored, and not every item is an end.

        The other arguments are those of `SliceSampler`.

        Returns a `Compose` and a `StackSampler`. ValueError where an entry of `in_keys` is one of `out_keys`, since then no
        single frame would be stored.
        """
        from interop.samplers import StackSampler
        from interop.transforms.chain import Compose
        from interop.transforms.keys import ExcludeTransform

        if batch_size is not None:
            whole("batch_size", batch_size)
        if both := [key for key in self.in_keys if key in self.out_keys]:
            raise ValueError(
                f"CatFrames: {both} are in_keys and out_keys: single frames are to be stored, and their stacks are not. "
                "Give out_keys of their own"
            )
        in_keys, out_keys = (
            [*keys, *(("next", *as_path(key)) for key in keys)] for keys in (self.in_keys, self.out_keys)
        )
        frames = type(self)(
            self.N,
            self.dim,
            in_keys,
            out_keys,
            self.padding,
            self.padding_value,
            done_key=self.done_key,
            traj_key=self.traj_key,
            only_named_keys=self.only_named_keys,
        )
        slices = _SlicesAsRows(self.N)
        chain = Compose(slices, frames, _NewestStep(), ExcludeTransform(*out_keys, inverse=True))
        sampler = StackSampler(
            self.N,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=cache_values,
            truncated_key=truncated_key,
            strict_length=strict_length,
            pad_output=pad_output,
            compile=compile,
            span=span,
            use_gpu=use_gpu,
            only_named_keys=only_named_keys,
        )
        return chain, sampler

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
        windows = self._windows(data)
        stacks: list[tuple[NestedKey, Tensor]] = []
        for key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if key in frames:
                stacks.append((out_key, self._stack(key, frames[key], frames.get(before_key(key)), *windows)))
        put("CatFrames", data, stacks)
        return data

    def _stack(
        self, key: NestedKey, frames: Tensor, first: Tensor | None, places: Tensor, outside: Tensor, earlier: Tensor
    ) -> Tensor:
        """Stacks of frames. `first` has the frames right before the first step of each trajectory."""
        shape = outside.shape
        item = frames.shape[outside.ndim - 1 :]
        rows = frames.reshape(-1, *item)
        places = places.to(frames.device)
        outside = outside.to(frames.device)
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

    def _windows(self, data: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """The N steps up to each step of data in time, cut where its trajectory begins.

        Returns their places in the flat batch, int64 [steps * N]: the first step of the trajectory for missing ones. Then
        whether a step is missing, bool [*batch_size, N], and whether more than one is missing behind it.
        """
        shape = data.batch_size
        count = self.N
        time = data.names.index("time") if "time" in data.names else len(shape) - 1
        marks, ends = self._marks(data, time)
        breaks = breaks_in_buffer(marks)
        tensors = (value for value in (*marks.entries.values(), *data.values(True, True)) if isinstance(value, Tensor))
        device = next((value.device for value in tensors), torch.device("cpu"))
        none_follows = breaks is not None and count > 1 and breaks[:, 1:].size > 0 and bool(breaks[:, 1:].all())
        if none_follows and not trajectories_of(marks.rows(ends), marks.keys).starts.all():
            raise ValueError(
                "CatFrames: none of these steps comes right after the one before it, there is nothing to stack: draw with a "
                "SliceSampler, or store frames in a LazyFrameStorage"
            )
        steps = SideBySide.of(marks, device, ends=ends, breaks=breaks)
        begins = steps.stops.movedim(time, -1).roll(1, -1)
        begins[..., :1] = True
        place = torch.arange(shape[time], device=device)
        bound = place.where(begins, 0).cummax(-1).values.unsqueeze(-1)
        positions = place.unsqueeze(-1) + torch.arange(1 - count, 1, device=device)
        outside, earlier = ((positions < least).movedim(-2, time) for least in (bound, bound - 1))
        places = torch.maximum(positions, bound)  # in the order of `steps`, time last but one
        if steps.order is not None:
            order = steps.order.movedim(time, -1).unsqueeze(-1)
            places = order.expand(*order.shape[:-1], count).take_along_dim(places, -2)
            outside = steps.restored(outside)
            earlier = steps.restored(earlier)
        rows = torch.arange(shape.numel(), device=device).reshape(shape).movedim(time, -1)[..., :1]
        places = (places * shape[time + 1 :].numel() + rows.unsqueeze(-1)).movedim(-2, time)
        return steps.restored(places).reshape(-1), outside, earlier

    def _marks(self, data: TensorDictBase, time: int) -> tuple[StepMarks, Tensor | None]:
        """The entries that mark trajectories, and the flags of several agents combined, bool of the batch size.

        KeyError if none marks trajectories, ValueError for flags that do not fit the steps.
        """
        shape = data.batch_size
        path = ("next", *as_path(self.done_key))
        order = current()
        ids: list[KeyPath] = list(_IDS)
        if order is not None and order.traj_key is not None:
            ids.append(as_path(order.traj_key))
        keys = keys_of(self.traj_key, [path], self.only_named_keys, MASKS, () if self.only_named_keys else ids)
        marks = StepMarks.of(data, time, keys)
        done = data.get(path, None)
        ends = None
        if done is not None:
            expect_tensor("CatFrames", path, done)
            if done.shape[: len(shape)] != shape:
                fit = f"does not fit a batch size of {list(shape)}"
                raise ValueError(f"CatFrames: {path!r} of shape {list(done.shape)} {fit}")
            if done.numel() != shape.numel():
                ends = returns.flags(done).flatten(len(shape)).any(-1)
        both = all(("next", name) in marks.keys.ends for name in ("terminated", "truncated"))
        if done is not None or marks.keys.ids or marks.keys.firsts or (path == _DONE and both):
            return marks, ends
        raise KeyError(
            f"CatFrames: {path!r} not found in tensordict, which has {known_keys(data)}: without it nothing marks where "
            "trajectories end"
        )

    def __repr__(self) -> str:
        return f"CatFrames(N={self.N}, dim={self.dim}, keys={self.in_keys})"


class _SlicesAsRows(Transform):
    """Slices of a flat batch as rows, [slices, length]."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        count = next_tensordict.batch_size.numel()
        if count % self.length:
            raise ValueError(
                f"{count} steps are no slices of {self.length}: sample with the StackSampler that was made with this "
                "transform, and with strict_length=False give pad_output=True"
            )
        return next_tensordict.reshape(-1, self.length)


class _NewestStep(Transform):
    """The last step of each row [rows, length] that is no padding of a slice."""

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        order = current()
        rows, length = next_tensordict.batch_size
        mask = None if order is None else order.mask
        if mask is None or mask.numel() != rows * length:
            return next_tensordict[:, -1]
        last = mask.reshape(rows, length).long().sum(1).clamp(1) - 1
        return next_tensordict[torch.arange(rows, device=last.device), last]

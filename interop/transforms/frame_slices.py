"""Slices of single frames as the stacks of their last steps."""

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path
from interop.data.numbers import whole
from interop.samplers import SliceSampler
from interop.storages import ListStorage, Storage
from interop.transforms.cat_frames import CatFrames, side_by_side
from interop.transforms.chain import Compose
from interop.transforms.entries import before_key, expect_tensordict, put
from interop.transforms.keys import ExcludeTransform
from interop.transforms.transform import Transform


def stacks_of_slices(frames: CatFrames, batch_size: int, kwargs: dict[str, Any]) -> tuple[Compose, "StackSampler"]:
    """See `CatFrames.make_rb_transform_and_sampler`."""
    whole("batch_size", batch_size)
    for name in ("future", "as_inverse", "mask_key"):
        if getattr(frames, name):
            raise ValueError(f"stacks of slices are made when reading, of steps before, without {name}")
    for name in ("slice_len", "num_slices", "pad_output", "span"):
        if name in kwargs:
            raise TypeError(f"{name} follows from N={frames.N} and cannot be given")
    if frames.padding == "constant" and not kwargs.get("strict_length", True):
        raise ValueError(
            "strict_length=False needs padding='same': the frames before a trajectory are its first one. A LazyFrameStorage "
            "pads with a constant"
        )
    if not {"end_key", "end_keys", "traj_key", "ends", "trajectories"} & kwargs.keys() and frames.done_key != "done":
        kwargs["end_key"] = ("next", *as_path(frames.done_key))
    sampler = StackSampler(frames.N, **kwargs)
    transform = LastOfSlices(frames, padded=not sampler.strict_length)
    made_before = [key for key in transform.out_keys if key not in transform.in_keys]
    return Compose(transform, *([ExcludeTransform(*made_before, inverse=True)] if made_before else [])), sampler


class StackSampler(SliceSampler):
    """Draws steps with those before them: an index [batch_size, frames], the step itself last.

    Args:
        frames: of a stack.
        strict_length: False draws steps with fewer predecessors too; the first one is repeated for missing ones.
        truncated_key: as for `SliceSampler`, but none by default.
        kwargs: as for `SliceSampler`.
    """

    def __init__(self, frames: int, *, strict_length: bool = True, truncated_key: Any = None, **kwargs: Any) -> None:
        super().__init__(
            slice_len=frames,
            strict_length=strict_length,
            pad_output=not strict_length,
            span=False if strict_length else (frames - 1, False),
            truncated_key=truncated_key,
            **kwargs,
        )

    def check_fit(self, storage: Storage, writer: Any, prefetches: bool, expands: bool) -> None:
        """TypeError, too, for a list, which is read flat, and a sample unit."""
        super().check_fit(storage, writer, prefetches, expands)
        if isinstance(storage, ListStorage) or expands:
            found = "a sample unit" if expands else type(storage).__name__
            raise TypeError(f"stacks of slices are read as [batch, frames] from a tensor storage, not with {found}")

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        assert self.slice_len is not None
        count = self.slice_len
        index, info = super().sample(storage, batch_size * count)
        mask = info.pop(("collector", "mask"), None)
        info.pop("is_init", None)  # as stored: a stack does not begin a sequence
        places = None
        if mask is not None:
            steps = torch.arange(count, device="cpu")
            places = (steps + mask.reshape(batch_size, -1).sum(-1, keepdim=True) - count).clamp_(0)

        def shaped(value: Tensor) -> Tensor:
            slices = value.reshape(batch_size, count, *value.shape[1:])
            return slices if places is None else slices.gather(1, places)

        last = {key: value[count - 1 :: count] for key, value in info.items() if key != "index"}
        return tuple(map(shaped, index)) if isinstance(index, tuple) else shaped(index), last


class LastOfSlices(Transform):
    """The last steps of slices [batch, N], with the frames of the others before their own."""

    def __init__(self, frames: CatFrames, padded: bool) -> None:
        pairs = dict(zip(frames.in_keys, frames.out_keys, strict=True))
        for key, out in list(pairs.items()):
            if as_path(key)[0] != "next":
                pairs.setdefault(_next(key), _next(out))
        super().__init__(list(pairs), list(pairs.values()))
        self._frames, self._padded = frames, padded

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("CatFrames", next_tensordict)
        shape, count = next_tensordict.batch_size, self._frames.N
        if len(shape) != 2 or shape[1] != count:
            raise ValueError(
                f"CatFrames: stacks are made of slices [batch, {count}], got a batch size of {list(shape)}: a buffer needs "
                "the sampler that was made with the transform, and rb.storage[:] has the single frames"
            )
        made: list[tuple[NestedKey, Tensor]] = []
        for key, out in zip(self.in_keys, self.out_keys, strict=True):
            needed = key in self._frames.in_keys
            value = self._get(next_tensordict, key) if needed else next_tensordict.get(key, None)
            if value is None:
                continue
            self._frames.check(key, value, 2)
            before = before_key(key) if self._padded else None
            if before in self.in_keys:  # repeated first steps are of before the step
                value = torch.cat([next_tensordict.get(before)[:, 1:], value[:, -1:]], 1)
            made.append((out, side_by_side(value, 1, self._frames.dim)))
        last = next_tensordict[:, -1].copy()
        put("CatFrames", last, made)
        return last

    def __repr__(self) -> str:
        return f"LastOfSlices({self._frames})"


def _next(key: NestedKey) -> NestedKey:
    return ("next", *as_path(key))

"""Transforms of sequences in time: random windows, and hidden states computed on the first steps."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.arguments import whole
from interop.data.keys import as_path, checked_key
from interop.data.trajectory_keys import TrajectoryKeys
from interop.postprocs import returns
from interop.postprocs.batch_trajectories import SideBySide, StepMarks, keys_of
from interop.postprocs.gather import picked_items
from interop.transforms.order import refuse_several
from interop.transforms.transform import (
    Transform,
    as_key,
    as_keys,
    before_key,
    expect_tensor,
    expect_tensordict,
    missing,
    tensors,
)


class RandomCropTensorDict(Transform):
    """Takes a random window of each sequence: batch size [..., T] becomes [..., sub_seq_len].

    Each sequence has a window of its own, within one trajectory: where an entry says that a sequence has several, as for
    `CatFrames`, no window crosses an end, and interleaved trajectories are separate. All starts of such windows, for one
    trajectory 0, ..., T - sub_seq_len, are equally likely. The result is a copy. Reshape a flat batch of slices to
    [slices, T] before.

    Args:
        sub_seq_len: steps of a window.
        sample_dim: the batch dim that is time. One that counts from the front fits data of one batch size only.
        mask_key: bool entry of the shape of the batch, False for padding behind a sequence, which no window reaches.
        generator: of random numbers; torch's global generator of the device of the data by default. Copies by `clone` share
            it; it is not part of a checkpoint.
        traj_key: an entry of ids, one value a step, besides the default ones.
        only_named_keys: only `traj_key` and `mask_key` mark trajectories; without `traj_key` a sequence is one.

    RuntimeError for a tensordict without batch dims and for sequences of which no trajectory is as long as a window,
    ValueError for a mask of another shape or with gaps, KeyError for a missing mask.
    """

    def __init__(
        self,
        sub_seq_len: int,
        sample_dim: int = -1,
        mask_key: NestedKey | None = None,
        generator: torch.Generator | None = None,
        *,
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
    ) -> None:
        super().__init__()
        self.sub_seq_len = whole("sub_seq_len", sub_seq_len)
        self.sample_dim = whole("sample_dim", sample_dim, least=-(2**31))
        self.mask_key = None if mask_key is None else as_key("mask_key", mask_key)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        self.generator = generator
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("RandomCropTensorDict", next_tensordict)
        shape = next_tensordict.batch_size
        dim = self.sample_dim
        length = self.sub_seq_len
        if not -len(shape) <= dim < len(shape):
            raise RuntimeError(f"RandomCropTensorDict: there is no sample_dim={dim} in a batch size of {list(shape)}")
        dim %= len(shape)
        valid = torch.full((*shape[:dim], *shape[dim + 1 :]), shape[dim], device="cpu")
        if self.mask_key is not None:
            valid = self._valid_steps(next_tensordict, dim)
        shortest = int(valid.min()) if valid.numel() else shape[dim]
        if shortest < length:
            raise RuntimeError(
                f"RandomCropTensorDict: sub_seq_len={length} is more than the {shortest} steps of a sequence along dim "
                f"{dim} of a batch size of {list(shape)}"
            )
        refuse_several("RandomCropTensorDict", shape, dim)
        device = next_tensordict.device or next((value.device for *_, value in tensors(next_tensordict)), None)
        device = valid.device if device is None else device
        steps = SideBySide.of(self._marks(next_tensordict, dim), device)
        starts = self._starts(steps, valid.to(device))
        times = starts.unsqueeze(-1) + torch.arange(length, device=device)
        if steps.order is not None:
            times = steps.order.movedim(dim, -1).take_along_dim(times, -1)
        rows = torch.arange(shape.numel(), device=device).reshape(shape).movedim(dim, -1)
        places = rows[..., :1] + times * shape[dim + 1 :].numel()
        return picked_items(next_tensordict, places.movedim(-1, dim))

    def _starts(self, steps: SideBySide, valid: Tensor) -> Tensor:
        """A random place of `steps` for each sequence, where a window of one trajectory begins. RuntimeError for none."""
        length = self.sub_seq_len
        time = steps.marks.time
        shape = steps.marks.batch
        source = valid.device if self.generator is None else self.generator.device
        shares = torch.rand(valid.shape, generator=self.generator, device=source, dtype=torch.float64).to(valid.device)
        inner = steps.stops.movedim(time, -1)[..., :-1]
        masks = [returns.flags(steps.marks.entries[path]).reshape(shape) for path in steps.marks.keys.masks]
        if not bool(inner.any()) and all(bool(mask.all()) for mask in masks):
            return (shares * (valid - (length - 1))).long()
        place = torch.arange(shape[time], device=valid.device)
        last = valid.unsqueeze(-1) - length
        if steps.order is not None:  # `valid` counts steps in the order of the batch
            masks.append((place < valid.unsqueeze(-1)).movedim(-1, time))
            last = torch.full_like(last, shape[time] - length)
        allowed = place <= last
        stop = steps.stops.movedim(time, -1)
        for step in range(length - 1):  # no window goes on behind the end of a trajectory
            allowed[..., : shape[time] - step] &= ~stop[..., step:]
        for mask in masks:
            is_chosen = steps.arranged(mask.to(valid.device)).movedim(time, -1)
            for step in range(length):
                allowed[..., : shape[time] - step] &= is_chosen[..., step:]
        count = allowed.sum(-1)
        if not bool((count > 0).all()):
            raise RuntimeError(
                f"RandomCropTensorDict: sub_seq_len={length} is more than the steps of each trajectory of a sequence along "
                f"dim {time} of a batch size of {list(shape)}: windows do not cross the ends of trajectories"
            )
        number = (shares * count).long().unsqueeze(-1)
        return (allowed.cumsum(-1) > number).long().argmax(-1)

    def _marks(self, data: TensorDictBase, time: int) -> StepMarks:
        """The entries that mark trajectories."""
        if self.only_named_keys and self.traj_key is None:
            return StepMarks.of(data, time, TrajectoryKeys((), (), (), ()))
        return StepMarks.of(data, time, keys_of(self.traj_key, (), self.only_named_keys))

    def _valid_steps(self, data: TensorDictBase, dim: int) -> Tensor:
        """The number of steps of each sequence by the mask, of the shape of the other batch dims."""
        key = self.mask_key
        shape = data.batch_size
        mask = data.get(key, None)
        if mask is None:
            raise missing("RandomCropTensorDict", key, data)
        if not isinstance(mask, Tensor) or mask.shape != shape or mask.dtype != torch.bool:
            came = f"{mask.dtype} of {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"RandomCropTensorDict: the mask {key!r} must be bool of shape {list(shape)}, got {came}")
        moved = mask.movedim(dim, -1)
        if bool((moved[..., 1:] & ~moved[..., :-1]).any()):
            raise ValueError(
                f"RandomCropTensorDict: {key!r} must be True for the first steps of a sequence, and not again behind them"
            )
        return mask.sum(dim)

    def __repr__(self) -> str:
        options = f"sub_seq_len={self.sub_seq_len}, sample_dim={self.sample_dim}, mask_key={self.mask_key!r}"
        return f"RandomCropTensorDict({options})"


class BurnInTransform(Transform):
    """Runs modules on the first steps of sequences and drops these: batch size [..., T] becomes [..., T - burn_in].

    The states that they write under "next" in the last of these steps go to the first step that is left: ("next", "hidden")
    to "hidden". The other steps keep theirs, or have zeros if there was none; so does that first one where it begins another
    trajectory, as an entry says (see `CatFrames`). Within the first steps the modules have to begin anew at such a step, as
    those do that read "is_init". No gradients are taken, and the tensordict is not changed. Time is the last batch dim:
    reshape a flat batch of slices to [slices, T] before.

    The modules are no submodules: they keep their mode, and their parameters are not saved with a buffer.

    Args:
        modules: `TensorDictModule`s, run in this order on tensordicts of batch size [..., burn_in].
        burn_in: steps to run.
        out_keys: the entries to set, each of which a module writes under "next"; all of them by default.

    TypeError for other modules and for a stored state that cannot hold the new one. ValueError for an entry that none writes
    under "next", for sequences of not more than `burn_in` steps, for interleaved trajectories, and for another dim named
    "time".
    """

    _run: tuple[TensorDictModuleBase, ...]  # not as submodules

    def __init__(
        self, modules: Sequence[TensorDictModuleBase], burn_in: int, out_keys: Sequence[NestedKey] | None = None
    ) -> None:
        super().__init__()
        module_list = [modules] if isinstance(modules, TensorDictModuleBase) else list(modules)
        for module in module_list:
            if not isinstance(module, TensorDictModuleBase):
                raise TypeError(f"modules must be TensorDictModules, got a {type(module).__name__}")
        self.__dict__["_run"] = tuple(module_list)
        self.burn_in = whole("burn_in", burn_in, least=0)
        read = dict[NestedKey, None]()
        written = dict[NestedKey, None]()
        for module in module_list:
            read |= {key: None for key in module.in_keys if key not in written}
            written |= dict.fromkeys(module.out_keys)
        carried = [now for now in map(before_key, written) if now is not None]
        self.in_keys = list(read)
        self.out_keys = carried if out_keys is None else as_keys("out_keys", out_keys)
        if unknown := [key for key in self.out_keys if key not in carried]:
            raise ValueError(
                f"out_keys={unknown} are not among the keys that the modules write under 'next': {carried}"
            )

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        data = next_tensordict
        expect_tensordict("BurnInTransform", data)
        if self.burn_in == 0:
            return data
        if not data.batch_dims or data.batch_size[-1] <= self.burn_in:
            raise ValueError(
                f"BurnInTransform: burn_in={self.burn_in} leaves nothing of a batch size of {list(data.batch_size)}, "
                "the last dim of which is time"
            )
        if "time" in data.names[:-1]:
            raise ValueError(
                f"BurnInTransform: time is the last batch dim, the dims are {data.names}: transpose before"
            )
        refuse_several("BurnInTransform", data.batch_size, data.batch_dims - 1)
        steps = SideBySide.of(StepMarks.of(data, data.batch_dims - 1, TrajectoryKeys()), torch.device("cpu"))
        if steps.order is not None:
            raise ValueError(
                "BurnInTransform: the steps of several trajectories are interleaved along time: give each a row of its own, "
                "as split_trajectories does"
            )
        goes_on = ~steps.stops[..., self.burn_in - 1]
        first = data[..., : self.burn_in].copy()
        rest = data[..., self.burn_in :].copy()
        with torch.no_grad():
            for module in self._run:
                first = module(first)
        time = rest.batch_dims - 1
        for key in self.out_keys:
            state = first.get(("next", *as_path(key)))
            expect_tensor("BurnInTransform", key, state)
            state = state.select(time, -1)
            state_after = rest.get(key, None)
            shape = (*rest.batch_size, *state.shape[time:])
            if state_after is None:
                state_after = state.new_zeros(shape)
            elif state_after.shape != shape or not torch.can_cast(state.dtype, state_after.dtype):
                raise TypeError(
                    f"BurnInTransform: {key!r} is {state_after.dtype} of {list(state_after.shape)}, the modules write "
                    f"{state.dtype} of {list(shape)}"
                )
            else:
                state_after = state_after.detach().clone()
            into = state_after.select(time, 0)
            is_kept = goes_on.to(into.device).reshape(*goes_on.shape, *(1 for _ in into.shape[time:]))
            into.copy_(torch.where(is_kept, state.to(into), into))
            rest.set(key, state_after)
        return rest

    def __repr__(self) -> str:
        return f"BurnInTransform(burn_in={self.burn_in}, in_keys={self.in_keys}, out_keys={self.out_keys})"

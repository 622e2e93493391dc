"""Random windows in time."""

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import known_keys
from interop.data.numbers import whole
from interop.transforms.entries import expect_tensordict
from interop.transforms.gather import device_of, picked_items
from interop.transforms.order import refuse_several
from interop.transforms.transform import Transform, as_key


class RandomCropTensorDict(Transform):
    """A random window of each sequence: batch size [..., T] becomes [..., sub_seq_len].

    Each sequence has a window of its own, which begins at each of 0, ..., T - sub_seq_len equally often. The result is a
    copy. Reshape a flat batch of slices to [slices, T] before.

    Args:
        sub_seq_len: steps of a window.
        sample_dim: the batch dim that is time. One that counts from the front fits data of one batch size only.
        mask_key: bool entry of the shape of the batch, False for padding behind a sequence, which no window reaches.
        generator: of random numbers; torch's global generator of the device of the data by default. It is shared with
            copies that `clone` makes, and no part of a checkpoint.

    RuntimeError for a tensordict without batch dims and for sequences shorter than a window, ValueError for a mask of
    another shape or with gaps and for stacked tensordicts that are not alike, KeyError for a missing mask.
    """

    def __init__(
        self,
        sub_seq_len: int,
        sample_dim: int = -1,
        mask_key: NestedKey | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.sub_seq_len = whole("sub_seq_len", sub_seq_len)
        self.sample_dim = whole("sample_dim", sample_dim, least=-(2**31))
        self.mask_key = None if mask_key is None else as_key("mask_key", mask_key)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        self.generator = generator

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("RandomCropTensorDict", next_tensordict)
        shape, dim, length = next_tensordict.batch_size, self.sample_dim, self.sub_seq_len
        if not shape:
            raise RuntimeError("RandomCropTensorDict: a tensordict without batch dims has no sequences to crop")
        if not -len(shape) <= dim < len(shape):
            raise RuntimeError(f"RandomCropTensorDict: there is no sample_dim={dim} in a batch size of {list(shape)}")
        dim %= len(shape)
        if shape[dim] < length:
            raise RuntimeError(
                f"RandomCropTensorDict: sub_seq_len={length} is more than the {shape[dim]} steps of dim {dim} in a batch "
                f"size of {list(shape)}"
            )
        refuse_several("RandomCropTensorDict", shape, dim)
        starts = self._starts(next_tensordict, dim)
        times = starts.unsqueeze(-1) + torch.arange(length, device=starts.device)
        rows = torch.arange(shape.numel(), device=starts.device).reshape(shape).movedim(dim, -1)
        places = rows[..., :1] + times * shape[dim + 1 :].numel()
        return picked_items(next_tensordict, places.movedim(-1, dim))

    def _starts(self, data: TensorDictBase, dim: int) -> Tensor:
        """Where the window of each sequence begins, int64 of the shape of the other batch dims."""
        shape, length = data.batch_size, self.sub_seq_len
        others = [size for place, size in enumerate(shape) if place != dim]
        room: int | Tensor = shape[dim] - length + 1
        if self.mask_key is not None:
            mask = self._valid(data).movedim(dim, -1)
            if bool((mask[..., 1:] & ~mask[..., :-1]).any()):
                raise ValueError(
                    f"RandomCropTensorDict: {self.mask_key!r} must be True for the first steps of a sequence, and not again "
                    "behind them"
                )
            valid = mask.sum(-1)
            if valid.numel() and int(shortest := valid.min()) < length:
                raise RuntimeError(
                    f"RandomCropTensorDict: sub_seq_len={length} is more than the {int(shortest)} steps that "
                    f"{self.mask_key!r} leaves of a sequence"
                )
            room, device = valid - (length - 1), valid.device
        else:
            device = device_of(data)
        source = device if self.generator is None else self.generator.device
        if isinstance(room, int):
            return torch.randint(room, others, generator=self.generator, device=source).to(device)
        shares = torch.rand(others, generator=self.generator, device=source, dtype=torch.float64)
        return (shares.to(device) * room).long()

    def _valid(self, data: TensorDictBase) -> Tensor:
        assert self.mask_key is not None
        mask = data.get(self.mask_key, None)
        if mask is None:
            known = known_keys(data)
            raise KeyError(f"RandomCropTensorDict: no mask {self.mask_key!r} in tensordict, which has {known}")
        if not isinstance(mask, Tensor) or mask.shape != data.batch_size:
            raise ValueError(
                f"RandomCropTensorDict: the mask {self.mask_key!r} must be of shape {list(data.batch_size)}, as the batch, "
                f"got {list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
            )
        if mask.dtype != torch.bool:
            raise TypeError(f"RandomCropTensorDict: the mask {self.mask_key!r} must be bool, got {mask.dtype}")
        return mask

    def __repr__(self) -> str:
        options = f"sub_seq_len={self.sub_seq_len}, sample_dim={self.sample_dim}, mask_key={self.mask_key!r}"
        return f"RandomCropTensorDict({options})"

"""Random windows in time."""

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import known_keys
from interop.data.numbers import whole
from interop.postprocs.gather import picked_items
from interop.transforms.entries import expect_tensordict, tensors
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
        device = next_tensordict.device or next((value.device for *_, value in tensors(next_tensordict)), None)
        starts = self._starts(self._room(next_tensordict, dim).to(device))
        times = starts.unsqueeze(-1) + torch.arange(length, device=starts.device)
        rows = torch.arange(shape.numel(), device=starts.device).reshape(shape).movedim(dim, -1)
        places = rows[..., :1] + times * shape[dim + 1 :].numel()
        return picked_items(next_tensordict, places.movedim(-1, dim))

    def _starts(self, room: Tensor) -> Tensor:
        """A start for each sequence, each of its `room` starts equally often."""
        source = room.device if self.generator is None else self.generator.device
        shares = torch.rand(room.shape, generator=self.generator, device=source, dtype=torch.float64)
        return (shares.to(room.device) * room).long()

    def _room(self, data: TensorDictBase, dim: int) -> Tensor:
        """How many starts each sequence has, int64 of the shape of the other batch dims."""
        shape, length, key = data.batch_size, self.sub_seq_len, self.mask_key
        if key is None:
            return torch.full((*shape[:dim], *shape[dim + 1 :]), shape[dim] - length + 1, device="cpu")
        mask = data.get(key, None)
        if mask is None:
            raise KeyError(f"RandomCropTensorDict: no mask {key!r} in tensordict, which has {known_keys(data)}")
        if not isinstance(mask, Tensor) or mask.shape != shape:
            raise ValueError(
                f"RandomCropTensorDict: the mask {key!r} must be of shape {list(shape)}, as the batch, got "
                f"{list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
            )
        if mask.dtype != torch.bool:
            raise TypeError(f"RandomCropTensorDict: the mask {key!r} must be bool, got {mask.dtype}")
        valid = mask.sum(dim)
        mask = mask.movedim(dim, -1)
        if bool((mask[..., 1:] & ~mask[..., :-1]).any()):
            raise ValueError(
                f"RandomCropTensorDict: {key!r} must be True for the first steps of a sequence, and not again behind them"
            )
        if valid.numel() and int(shortest := valid.min()) < length:
            raise RuntimeError(
                f"RandomCropTensorDict: sub_seq_len={length} is more than the {int(shortest)} steps that {key!r} leaves of "
                "a sequence"
            )
        return valid - (length - 1)

    def __repr__(self) -> str:
        options = f"sub_seq_len={self.sub_seq_len}, sample_dim={self.sample_dim}, mask_key={self.mask_key!r}"
        return f"RandomCropTensorDict({options})"

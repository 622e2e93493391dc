"""Conversion of binary features to decimal numbers."""

import torch
from torch import Tensor, nn

from interop.data.arguments import whole


class BinaryToDecimal(nn.Module):
    """Decodes groups of bits, most significant bit first, and sums the numbers of each row.

    The result is 1-d, one number per row over all leading dims. Integer sums are int64. Different rows may have equal
    sums.

    Args:
        num_bits: bits per group. The last dim of the features must be a multiple of it.
        device: the device of the bit weights.
        dtype: the dtype of the bit weights. ValueError if an integer dtype overflows.
        convert_to_binary: convert features above 0 to 1 and others to 0. By default features must be 0 or 1.
    """

    bases: Tensor

    def __init__(
        self,
        num_bits: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.int64,
        convert_to_binary: bool = False,
    ) -> None:
        super().__init__()
        largest = 2**63 if dtype.is_floating_point else torch.iinfo(dtype).max
        num_bits = whole("num_bits", num_bits)
        if 2 ** (num_bits - 1) > largest:
            raise ValueError(f"num_bits must be at least 1, and 2**(num_bits - 1) fit in {dtype}, got {num_bits}")
        self.num_bits = num_bits
        self.convert_to_binary = convert_to_binary
        bases = torch.tensor([2**bit for bit in reversed(range(num_bits))], device=device, dtype=dtype)
        self.register_buffer("bases", bases, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """The numbers, [rows], of features [..., F]. ValueError if F is no multiple of `num_bits`."""
        size = features.shape[-1] if features.ndim else 0
        if not size or size % self.num_bits:
            raise ValueError(f"the last dim must be a multiple of num_bits={self.num_bits}, got {list(features.shape)}")
        bits = features > 0 if self.convert_to_binary else features
        groups = bits.reshape(-1, size // self.num_bits, self.num_bits)
        return (groups.to(self.bases.dtype) * self.bases).sum(-1).sum(-1)

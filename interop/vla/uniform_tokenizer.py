"""Actions as the numbers of equal bins."""

from typing import Self

import torch
from torch import Tensor

from interop.data.arguments import whole
from interop.vla.action_tokenizer import ActionTokenizerBase, checked_actions, checked_tokens
from interop.vla.metadata import RobotDatasetMetadata


class UniformActionTokenizer(ActionTokenizerBase):
    """Each action dim is cut into bins of equal width between its bounds, as in RT-2; a token is the number of a bin.

    `decode` returns the center of the bin: of an action between the bounds it is at most half a bin away,
    `(high - low) / (2 * num_bins)`. Actions beyond the bounds count as the bounds.

        >>> tokenizer = UniformActionTokenizer(256, low=-1.0, high=1.0)
        >>> tokenizer.encode(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([  0, 128, 255])

    Args:
        num_bins: bins of each dim.
        low, high: the bounds: one number, or one for each action dim.
        action_dim: the number of action dims, for bounds that are one number. By default any number.

    ValueError for bounds of different shapes, that are not finite, or of which one is not below the other.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, num_bins: int, *, low: float | Tensor, high: float | Tensor, action_dim: int | None = None
    ) -> None:
        super().__init__()
        self.num_bins = whole("num_bins", num_bins)
        bounds = [torch.as_tensor(bound, dtype=torch.float32).clone() for bound in (low, high)]
        if bounds[0].shape != bounds[1].shape or bounds[0].ndim > 1:
            shapes = " and ".join(str(list(bound.shape)) for bound in bounds)
            raise ValueError(f"low and high must both be a number, or both [action_dim]; got shapes {shapes}")
        if not all(bound.isfinite().all() for bound in bounds) or not (bounds[0] < bounds[1]).all():
            raise ValueError(
                f"low must be below high in every dim, and both finite; got {bounds[0].tolist()} and {bounds[1].tolist()}"
            )
        if action_dim is not None:
            dims = whole("action_dim", action_dim)
            if bounds[0].ndim and len(bounds[0]) != dims:
                raise ValueError(f"action_dim is {dims}, but the bounds are of {len(bounds[0])} dims")
            bounds = [bound.expand(dims).clone() for bound in bounds]
        self.register_buffer("low", bounds[0])
        self.register_buffer("high", bounds[1])

    @classmethod
    def from_metadata(cls, metadata: RobotDatasetMetadata, num_bins: int) -> Self:
        """A tokenizer with the bounds of a dataset. ValueError for metadata without them."""
        if metadata.action_low is None or metadata.action_high is None:
            raise ValueError(
                f"the metadata of {metadata.dataset_id!r} has no bounds of actions: set action_low and action_high"
            )
        return cls(num_bins, low=metadata.action_low, high=metadata.action_high)

    @property
    def vocab_size(self) -> int:
        return self.num_bins

    @property
    def action_dim(self) -> int | None:
        """The number of action dims; None for bounds that are one number."""
        return len(self.low) if self.low.ndim else None

    def encode(self, actions: Tensor) -> Tensor:
        """The bins of actions, int64 [..., action_dim]. ValueError for NaN: the check waits for an accelerator."""
        actions = checked_actions(type(self).__name__, actions, self.action_dim)
        low, high = self.low.to(actions.device), self.high.to(actions.device)
        inside = actions.to(torch.promote_types(actions.dtype, low.dtype)).clamp(low, high)
        part = (inside - low) / (high - low)
        return (part * self.num_bins).long().clamp(0, self.num_bins - 1)

    def decode(self, tokens: Tensor) -> Tensor:
        """The centers of bins, float32 [..., action_dim]. ValueError for a token that is not a bin."""
        tokens = checked_tokens(type(self).__name__, tokens, self.action_dim)
        if ((tokens < 0) | (tokens >= self.num_bins)).any():
            raise ValueError(
                f"tokens must be from 0 to {self.num_bins - 1}, got {int(tokens.min())} to {int(tokens.max())}"
            )
        low, high = self.low.to(tokens.device), self.high.to(tokens.device)
        return low + (tokens.to(low.dtype) + 0.5) / self.num_bins * (high - low)

    def extra_repr(self) -> str:
        return f"{self.num_bins}, low={self.low.tolist()}, high={self.high.tolist()}"

"""Actions as the last tokens of the vocabulary of a language model."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from interop.data.arguments import whole
from interop.vla.action_tokenizer import ActionTokenizerBase, checked_actions, checked_tokens

_EPSILON = 1e-8  # of OpenVLA: it keeps a dim without any spread from a division by zero


class VocabTailActionTokenizer(ActionTokenizerBase):
    """The tokens of OpenVLA (arXiv:2406.09246): the last `num_bins` ids of a vocabulary stand for actions, in reverse.

    `num_bins` edges at equal distances from -1 to 1 make `num_bins - 1` bins. The token of an action is the end of the
    vocabulary minus the number of edges that are not above it; `decode` returns the center of the bin. Tokens outside of
    the tail count as its nearest one, as in OpenVLA. Of an action from -1 to 1 the decoded one is at most
    `1 / (num_bins - 1)` away.

        >>> tokenizer = VocabTailActionTokenizer(256)
        >>> tokenizer.encode(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([255, 128,   0])

    Args:
        num_bins: edges of each action dim, at least 2.
        full_vocab_size: the size of the vocabulary, such as 32000: then tokens are ids of the language model. By default
            they are numbers in the tail, from 0.
        norm_low, norm_high: float [action_dim], the 1 % and 99 % quantiles of the actions of a dataset: they are mapped to
            -1 and 1 before `encode`, and back after `decode`. By default actions are from -1 to 1.
        norm_mask: bool [action_dim], the dims that are mapped; by default all. The others are those of grippers.
        gripper_binarize: let `decode` return -1 or 1 for the dims that are not mapped.
        gripper_binarize_threshold: values above it are 1.
        gripper_invert: let `decode` change the sign of the dims that are not mapped.

    ValueError for quantiles that are not a pair of one length, a mask of another length, a vocabulary that is smaller than
    its tail, and options of grippers where the mask leaves no dim to them.
    """

    bins: Tensor  # [num_bins], the edges
    bin_centers: Tensor  # [num_bins - 1]
    norm_low: Tensor | None
    norm_high: Tensor | None
    norm_mask: Tensor | None

    def __init__(
        self,
        num_bins: int = 256,
        *,
        full_vocab_size: int | None = None,
        norm_low: Tensor | None = None,
        norm_high: Tensor | None = None,
        norm_mask: Tensor | None = None,
        gripper_binarize: bool = False,
        gripper_binarize_threshold: float = 0.0,
        gripper_invert: bool = False,
    ) -> None:
        super().__init__()
        self.num_bins = whole("num_bins", num_bins, least=2)
        self.full_vocab_size = None if full_vocab_size is None else whole("full_vocab_size", full_vocab_size)
        if self.full_vocab_size is not None and self.full_vocab_size < self.num_bins:
            raise ValueError(f"full_vocab_size={full_vocab_size} has no room for num_bins={num_bins} tokens of actions")
        self.register_buffer("bins", torch.from_numpy(self._edges()).float())
        self.register_buffer("bin_centers", torch.from_numpy(self._centers()).float())
        self.gripper_binarize = bool(gripper_binarize)
        self.gripper_binarize_threshold = float(gripper_binarize_threshold)
        self.gripper_invert = bool(gripper_invert)
        if (norm_low is None) != (norm_high is None):
            raise ValueError("norm_low and norm_high are a pair: give both or none")
        self._set_statistics(norm_low, norm_high, norm_mask)

    def _set_statistics(self, low: Tensor | None, high: Tensor | None, mask: Tensor | None) -> None:
        of_grippers = self.gripper_binarize or self.gripper_invert
        if low is None or high is None:
            if mask is not None or of_grippers:
                raise ValueError(
                    "norm_mask and the options of grippers need statistics: without norm_low and norm_high no dim is known "
                    "to be a gripper"
                )
            self.norm_low = self.norm_high = self.norm_mask = None
            return
        low, high = (torch.as_tensor(each, dtype=torch.float64).clone() for each in (low, high))
        mask = torch.ones(low.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask, dtype=torch.bool)
        if low.ndim != 1 or not low.shape == high.shape == mask.shape:
            shapes = ", ".join(str(list(each.shape)) for each in (low, high, mask))
            raise ValueError(f"norm_low, norm_high and norm_mask must all be [action_dim], got shapes {shapes}")
        if not (low.isfinite() & high.isfinite() & (low <= high)).all():
            raise ValueError(f"norm_low must be at most norm_high, got {low.tolist()} and {high.tolist()}")
        if of_grippers and mask.all():
            raise ValueError("the options of grippers change nothing: norm_mask leaves no dim to them")
        self.register_buffer("norm_low", low)
        self.register_buffer("norm_high", high)
        self.register_buffer("norm_mask", mask.clone())

    @classmethod
    def from_norm_stats(
        cls,
        norm_stats: Mapping[str, Any],
        unnorm_key: str,
        *,
        num_bins: int = 256,
        full_vocab_size: int | None = None,
        gripper_binarize: bool = False,
        gripper_binarize_threshold: float = 0.0,
        gripper_invert: bool = False,
    ) -> Self:
        """A tokenizer with the statistics of a checkpoint of OpenVLA, `model.norm_stats`.

        Args:
            norm_stats: by name of a dataset: {"action": {"q01": [...], "q99": [...], "mask": [...]}}; without a mask all
                dims are mapped.
            unnorm_key: the name of the dataset. KeyError with the names that are there.
        """
        if unnorm_key not in norm_stats:
            raise KeyError(
                f"norm_stats has no dataset {unnorm_key!r}; it has {', '.join(map(repr, norm_stats)) or 'none'}"
            )
        actions = norm_stats[unnorm_key].get("action", {})
        if "q01" not in actions or "q99" not in actions:
            raise KeyError(f"norm_stats[{unnorm_key!r}]['action'] needs 'q01' and 'q99', it has {sorted(actions)}")
        return cls(
            num_bins,
            full_vocab_size=full_vocab_size,
            norm_low=actions["q01"],
            norm_high=actions["q99"],
            norm_mask=actions.get("mask"),
            gripper_binarize=gripper_binarize,
            gripper_binarize_threshold=gripper_binarize_threshold,
            gripper_invert=gripper_invert,
        )

    @property
    def vocab_size(self) -> int:
        return self._end

    @property
    def _end(self) -> int:
        """One more than the largest token."""
        return self.num_bins if self.full_vocab_size is None else self.full_vocab_size

    def _edges(self) -> np.ndarray:
        """The edges in float64, as OpenVLA has them: float32 ones would give other tokens beside an edge."""
        return np.linspace(-1.0, 1.0, self.num_bins)

    def _centers(self) -> np.ndarray:
        edges = self._edges()
        return (edges[:-1] + edges[1:]) / 2

    @property
    def action_dim(self) -> int | None:
        """The number of action dims; None without statistics."""
        return None if self.norm_low is None else len(self.norm_low)

    def encode(self, actions: Tensor) -> Tensor:
        """The tokens of actions, int64 [..., action_dim]. ValueError for NaN: the check waits for an accelerator."""
        actions = checked_actions(type(self).__name__, actions, self.action_dim)
        scaled = actions.to(torch.promote_types(actions.dtype, self.bins.dtype))
        if self.norm_low is not None and self.norm_high is not None and self.norm_mask is not None:
            low, high = (each.to(scaled.device, scaled.dtype) for each in (self.norm_low, self.norm_high))
            mapped = 2.0 * (scaled - low) / (high - low + _EPSILON) - 1.0
            scaled = torch.where(self.norm_mask.to(scaled.device), mapped, scaled)
        edges = torch.from_numpy(self._edges()).to(scaled.device)
        return self._end - torch.bucketize(scaled.double().clamp(-1.0, 1.0).contiguous(), edges, right=True)

    def decode(self, tokens: Tensor) -> Tensor:
        """The actions of tokens, float32 [..., action_dim].

        With statistics they are computed in NumPy, in float64 as OpenVLA does: tokens on an accelerator are copied to the
        host and back.
        """
        tokens = checked_tokens(type(self).__name__, tokens, self.action_dim)
        places = (self._end - tokens.long() - 1).clamp(0, self.num_bins - 2)
        if self.norm_low is None or self.norm_high is None or self.norm_mask is None:
            return self.bin_centers.to(tokens.device)[places]
        actions = self._centers()[places.cpu().numpy()]
        low, high, mask = (each.cpu().numpy() for each in (self.norm_low, self.norm_high, self.norm_mask))
        others = actions
        if self.gripper_binarize:
            others = np.where(others > self.gripper_binarize_threshold, 1.0, -1.0)
        if self.gripper_invert:
            others = -others
        mapped = 0.5 * (actions + 1) * (high - low + _EPSILON) + low
        return torch.from_numpy(np.where(mask, mapped, others)).to(tokens.device, self.bins.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_bins}, full_vocab_size={self.full_vocab_size}, action_dim={self.action_dim}"

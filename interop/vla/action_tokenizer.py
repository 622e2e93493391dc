"""The base of action tokenizers: continuous actions as token ids, and back."""

import torch
from torch import Tensor, nn


class ActionTokenizerBase(nn.Module):
    """Maps continuous actions to token ids and back, element by element: shapes stay, `[..., action_dim]`.

    A policy that is a language model then emits actions through its head, and is trained by the cross-entropy of tokens.
    Chunks of actions `[*batch, time, chunk, action_dim]` need nothing else. A subclass defines `encode`, `decode` and
    `vocab_size`.
    """

    def encode(self, actions: Tensor) -> Tensor:
        """The tokens of actions, int64 [..., action_dim]."""
        raise NotImplementedError(f"{type(self).__name__} does not define encode()")

    def decode(self, tokens: Tensor) -> Tensor:
        """The actions of tokens, float32 [..., action_dim]."""
        raise NotImplementedError(f"{type(self).__name__} does not define decode()")

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        raise NotImplementedError(f"{type(self).__name__} does not define vocab_size")


def checked_actions(owner: str, actions: Tensor, dims: int | None) -> Tensor:
    """The actions as a floating tensor. ValueError for NaN, and for another size of the last dim than `dims`."""
    actions = torch.as_tensor(actions)
    if not actions.is_floating_point():
        actions = actions.float()
    _check_last_dim(owner, "actions", actions, dims)
    if actions.isnan().any():
        raise ValueError(f"{owner}.encode: an action is NaN, which no token stands for. Remove it from the data")
    return actions


def checked_tokens(owner: str, tokens: Tensor, dims: int | None) -> Tensor:
    """The tokens. TypeError for floating ones, ValueError for another size of the last dim than `dims`."""
    tokens = torch.as_tensor(tokens)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"{owner}.decode: tokens must be integers, got {tokens.dtype}")
    _check_last_dim(owner, "tokens", tokens, dims)
    return tokens


def _check_last_dim(owner: str, what: str, values: Tensor, dims: int | None) -> None:
    if dims is not None and (values.ndim == 0 or values.shape[-1] != dims):
        raise ValueError(f"{owner} is for actions of {dims} dims, [..., {dims}]; got {what} {list(values.shape)}")

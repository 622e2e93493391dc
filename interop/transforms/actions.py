"""Transforms of actions."""

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn import functional

from interop.transforms.entries import EntriesTransform


class DiscreteActionProjection(EntriesTransform):
    """One-hot actions of a small set, read as those of a larger one; written, those outside of the small set are redrawn.

    Reading gives them `max_actions` places; writing `num_actions_effective`, where an action beyond these becomes one of
    them at random, each as likely, of torch's generator. The result is int64.

    Args:
        num_actions_effective: how many actions are stored.
        max_actions: how many are read and written.
        action_key: the actions.
        include_forward: whether reading changes them.

    TypeError for what is no int; ValueError for more effective actions than actions, and for actions of another number of
    places.
    """

    def __init__(
        self,
        num_actions_effective: int,
        max_actions: int,
        action_key: NestedKey = "action",
        include_forward: bool = True,
    ) -> None:
        super().__init__([action_key] if include_forward else [], None, [action_key], None)
        for name, number in (("num_actions_effective", num_actions_effective), ("max_actions", max_actions)):
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name} must be an int, got {number!r}")
        if not 1 <= num_actions_effective <= max_actions:
            raise ValueError(
                f"num_actions_effective must be in [1, max_actions], got {num_actions_effective} of {max_actions}"
            )
        self.num_actions_effective, self.max_actions = num_actions_effective, max_actions

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict  # what an environment was given stays what it was

    def _apply_transform(self, action: Tensor) -> Tensor:
        if not action.ndim or not 1 <= action.shape[-1] <= self.max_actions:
            raise ValueError(f"one-hot actions of at most {self.max_actions} places, got {list(action.shape)}")
        return functional.one_hot(_chosen(action), self.max_actions)

    def _inv_apply_transform(self, action: Tensor) -> Tensor:
        if action.shape[-1:] != (self.max_actions,):
            raise ValueError(f"one-hot actions of {self.max_actions} places, got {list(action.shape)}")
        chosen = _chosen(action)
        drawn = torch.randint(self.num_actions_effective, chosen.shape, device=chosen.device)
        chosen = torch.where(chosen < self.num_actions_effective, chosen, drawn)
        return functional.one_hot(chosen, self.num_actions_effective)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_actions_effective={self.num_actions_effective}, max_actions={self.max_actions}, "
            f"in_keys_inv={self.in_keys_inv})"
        )


def _chosen(action: Tensor) -> Tensor:
    return (action.to(torch.uint8) if action.dtype == torch.bool else action).argmax(-1)

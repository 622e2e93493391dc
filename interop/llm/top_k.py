"""Of several answers to one prompt, stores the best."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor

from interop.checkpoint.plain_values import opened, plain
from interop.data.arguments import class_of, whole
from interop.data.keys import checked_key, entry_at, missing
from interop.transforms.transform import Transform, expect_tensordict

_log = logging.getLogger(__name__)
_Dialog = tuple[TensorDictBase, ...]  # its items, the last of which is done
_Prompt = str | bytes


class TopKRewardSelector(Transform):
    """Stores, of every `total_dialog_turns` dialogs that answer the same prompt, the `topk_size` with the highest rewards.

    A dialog is one item whose done entry is true, or several that follow each other, of which the last one is done. Its
    prompt is that of its first item, its reward the mean of all rewards in its items. Dialogs wait until there are
    `total_dialog_turns` of their prompt; then the best are stored, the best first, and of equal rewards the one that came
    first. The others are dropped, and the next dialogs of the prompt are a new group. Dialogs that wait are part of
    `state_dict()`, of checkpoints and of the transactions of the buffer. Reading changes nothing.

        >>> rb = ReplayBuffer(storage=LazyStackStorage(50), batch_size=5)
        >>> rb.append_transform(TopKRewardSelector(total_dialog_turns=5, topk_size=3, prompt_key="text"))
        >>> rb.extend(answers)  # of 5 answers to each prompt 3 are stored

    Args:
        total_dialog_turns: how many dialogs of a prompt are compared.
        topk_size: how many are stored, at most as many.
        prompt_key: a text, or a tensor such as tokens: prompts are the same if these are equal.
        rewards_key: numbers, of any shape.
        done_key: bools, of any shape; true where one is.
        verbose: log each choice, to the logger of this module.

    Errors of a write, which stores nothing: KeyError for a missing entry, ValueError for a reward that is NaN, TypeError for
    a prompt of another kind.
    """

    keeps = True

    def __init__(
        self,
        total_dialog_turns: int,
        topk_size: int,
        prompt_key: NestedKey = ("text", "prompt"),
        rewards_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = ("next", "done"),
        verbose: bool = True,
    ) -> None:
        super().__init__(in_keys=[], out_keys=[], in_keys_inv=[], out_keys_inv=[])
        self.total_dialog_turns = whole("total_dialog_turns", total_dialog_turns)
        self.topk_size = whole("topk_size", topk_size)
        if self.topk_size > self.total_dialog_turns:
            raise ValueError(
                "topk_size must be smaller than or equal to total_dialog_turns, got "
                f"topk_size={topk_size} and total_dialog_turns={total_dialog_turns}"
            )
        self.prompt_key = checked_key("prompt_key", prompt_key)
        self.rewards_key = checked_key("rewards_key", rewards_key)
        self.done_key = checked_key("done_key", done_key)
        self.verbose = bool(verbose)
        # Dialogs that wait, by prompt, and the items of the dialog that is not done yet. Replaced, never changed in place.
        self._groups: dict[_Prompt, tuple[_Dialog, ...]] = {}
        self._unfinished: _Dialog = ()

    def forward(self, tensordict: object) -> object:
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        expect_tensordict(type(self).__name__, tensordict)
        groups, unfinished = dict(self._groups), self._unfinished
        chosen: list[TensorDictBase] = []
        for item in tensordict.unbind(0):
            unfinished = (*unfinished, item)
            if not self._entry(item, self.done_key).any():
                continue
            prompt = self._prompt_of(unfinished[0])
            group = (*groups.pop(prompt, ()), unfinished)
            unfinished = ()
            if len(group) < self.total_dialog_turns:
                self._reward_of(group[-1])  # an error comes with the dialog that is its cause
                groups[prompt] = group
            else:
                chosen += [item for dialog in self._best(group) for item in dialog]
        # What waits must not change with the memory of the caller.
        known = {id(item) for group in self._groups.values() for dialog in group for item in dialog}
        known |= {id(item) for item in self._unfinished}
        self._groups = {prompt: tuple(_copied(each, known) for each in group) for prompt, group in groups.items()}
        self._unfinished = _copied(unfinished, known)
        if not chosen:
            return None
        stack = lazy_stack if isinstance(tensordict, LazyStackedTensorDict) else LazyStackedTensorDict.maybe_dense_stack
        return stack(chosen)

    def _best(self, group: Sequence[_Dialog]) -> list[_Dialog]:
        rewards = [self._reward_of(dialog) for dialog in group]
        order = sorted(range(len(group)), key=lambda place: -rewards[place])[: self.topk_size]
        if self.verbose:
            _log.info("of the rewards %s the dialogs %s are stored", rewards, order)
        return [group[place] for place in order]

    def dialog_reward(self, rewards: Tensor) -> float:
        """The reward by which a dialog is compared, of all rewards in its items, [n]: their mean. A subclass may differ."""
        return rewards.double().mean().item()

    def _reward_of(self, dialog: _Dialog) -> float:
        rewards = torch.cat([self._entry(item, self.rewards_key).reshape(-1) for item in dialog])
        reward = float(self.dialog_reward(rewards))
        if math.isnan(reward):
            raise ValueError(
                f"{type(self).__name__}: a dialog of {len(rewards)} rewards has the reward NaN: it has no rank"
            )
        return reward

    def _entry(self, item: TensorDictBase, key: NestedKey) -> Tensor:
        value = item.get(key, None)
        if value is None:
            raise missing(type(self).__name__, key, item)
        return torch.as_tensor(value)

    def _prompt_of(self, item: TensorDictBase) -> _Prompt:
        entry: Any = entry_at(item, self.prompt_key)
        if entry is None:
            raise missing(type(self).__name__, self.prompt_key, item)
        prompt = entry.data if is_non_tensor(entry) else entry
        if isinstance(prompt, Tensor):
            dense = prompt.detach().cpu().contiguous().reshape(-1)
            return repr((tuple(prompt.shape), prompt.dtype)).encode() + dense.view(torch.uint8).numpy().tobytes()
        if not isinstance(prompt, str | bytes):
            raise TypeError(f"{type(self).__name__}: a prompt is a text or a tensor, got {class_of(prompt)}")
        return prompt

    # ------------------------------------------------------------------ state

    def snapshot(self) -> tuple[dict[_Prompt, tuple[_Dialog, ...]], _Dialog]:
        return self._groups, self._unfinished

    def restore(self, snapshot: tuple[dict[_Prompt, tuple[_Dialog, ...]], _Dialog]) -> None:
        self._groups, self._unfinished = snapshot

    def forget(self) -> None:
        self._groups, self._unfinished = {}, ()

    def get_extra_state(self) -> dict[str, Any]:
        """The dialogs that wait, and the items of the unfinished one, as plain values and tensors."""
        dialogs = [[plain(item, "an item") for item in dialog] for group in self._groups.values() for dialog in group]
        return {"dialogs": dialogs, "unfinished": [plain(item, "an item") for item in self._unfinished]}

    def set_extra_state(self, state: object) -> None:
        """Continue from a saved state. TypeError or ValueError for a wrong one."""
        if not isinstance(state, Mapping) or {*state} != {"dialogs", "unfinished"}:
            raise TypeError(
                f"the state of a {type(self).__name__} has 'dialogs' and 'unfinished', got {class_of(state)}"
            )
        groups: dict[_Prompt, tuple[_Dialog, ...]] = {}
        for saved in state["dialogs"]:
            dialog = tuple(opened(item, "an item that waits") for item in saved)
            self._reward_of(dialog)
            prompt = self._prompt_of(dialog[0])
            groups[prompt] = (*groups.get(prompt, ()), dialog)
        if any(len(group) >= self.total_dialog_turns for group in groups.values()):
            raise ValueError(f"more dialogs of a prompt wait than total_dialog_turns={self.total_dialog_turns} lets")
        unfinished = tuple(opened(item, "an item that waits") for item in state["unfinished"])
        self._groups, self._unfinished = groups, unfinished

    def __repr__(self) -> str:
        return f"{type(self).__name__}(total_dialog_turns={self.total_dialog_turns}, topk_size={self.topk_size})"


def _copied(dialog: _Dialog, known: set[int]) -> _Dialog:
    """The dialog with copies of its items; those that are known are copies already."""
    return tuple(item if id(item) in known else item.detach().clone() for item in dialog)

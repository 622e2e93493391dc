"""Rollouts of a causal language model, one step per generated token."""

import collections
import copy
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional

from interop.data.arguments import required, whole
from interop.llm.kl import AdaptiveKLController as AdaptiveKLController
from interop.llm.kl import ConstantKLController as ConstantKLController
from interop.llm.kl import KLControllerBase
from interop.llm.prompt import END_OF_TEXT, PromptData


class Generation(NamedTuple):
    """The result of `RolloutFromModel.generate`. B prompts of up to T tokens, N new tokens."""

    generated: Tensor  # int64 [B, T + N]: prompt, new tokens, padding
    log_probs: Tensor  # float [B, N, 1]: of the new tokens, 0 after the end of text
    log_ratio: Tensor  # float [B, N]: log-probability minus that of the reference model, 0 after the end of text


class RolloutFromModel:
    """Samples and scores completions of prompts, as steps of an environment whose actions are tokens.

    The final reward is the score of the completion minus the score of the label, clipped. Each token has a penalty of
    `kl_coef * log_ratio`. No gradients are computed. Models run in their current mode: call `eval()` first.

    Args:
        model: a causal language model of `transformers`, or any model with `generate` and a call that returns `.logits`.
        ref_model: the reference model, on any device.
        reward_model: called with `input_ids=` and `attention_mask=`; returns per-token rewards, which are ignored, and
            scores of whole texts, B in all.
        max_new_tokens: N.
        score_clip: the bound of the score difference.
        kl_scheduler: computes the `kl_coef` set by `step_scheduler`.
        num_steps: the number of mean penalties kept for the scheduler; by default all since its last step.
        eos_token_id: the end-of-text and padding token, by default the class attribute `EOS_TOKEN_ID` (GPT-2).

    ValueError for numbers out of range. Calls raise it for an empty prompt, missing labels, or a model that does not know
    the end-of-text token.
    """

    EOS_TOKEN_ID = END_OF_TEXT

    def __init__(
        self,
        model: Any,
        ref_model: Any,
        reward_model: Any,
        kl_coef: float = 0.1,
        max_new_tokens: int = 50,
        score_clip: float = 10.0,
        kl_scheduler: KLControllerBase | None = None,
        num_steps: int | None = None,
        *,
        eos_token_id: int | None = None,
    ) -> None:
        if not score_clip > 0:
            raise ValueError(f"score_clip must be above 0, got {score_clip}")
        self.model = model
        self.ref_model = ref_model
        self.reward_model = reward_model
        self.max_new_tokens = whole("max_new_tokens", max_new_tokens)
        self.score_clip = score_clip
        self.kl_coef = kl_coef
        self.kl_scheduler = kl_scheduler
        length = None if num_steps is None else whole("num_steps", num_steps)
        self._kl_queue = collections.deque[Tensor](maxlen=length)
        if eos_token_id is not None:
            self.EOS_TOKEN_ID = eos_token_id

    def rollout_from_data(self, batch: PromptData) -> TensorDict:
        """Generate completions and build their steps with `create_rollout_td`."""
        _labels(batch)
        return self.create_rollout_td(batch, *self.generate(batch))

    @torch.no_grad()
    def generate(self, batch: PromptData, generation_config: Any = None) -> Generation:
        """Generate completions of the prompts, after `PromptData.mask_label`.

        Args:
            batch: input_ids [B, T] and prompt_rindex [B].
            generation_config: a `transformers.GenerationConfig`; None settings are those of the model. By default, samples
                from the full distribution. Log-probabilities are those of the sampled distribution, after temperature and
                top-k. N and the end-of-text token are set in a copy.
        """
        rindex = batch.prompt_rindex
        B, T = batch.input_ids.shape
        N = self.max_new_tokens
        eos = self.EOS_TOKEN_ID
        if B == 0 or int(rindex.min()) < 1 or int(rindex.max()) > T:
            raise ValueError(f"prompts need 1 to {T} tokens before prompt_rindex, got {rindex.tolist()}")
        prompts = batch.mask_label(pad_token_id=eos)
        output = self.model.generate(  # with left-padded prompts
            input_ids=_rolled(prompts.input_ids, T - rindex, 1),
            attention_mask=_rolled(prompts.attention_mask, T - rindex, 1),
            generation_config=self._config(generation_config),
        )
        n = len(output.scores)
        if output.sequences.shape != (B, T + n) or output.scores[0].shape[0] != B:
            raise ValueError(
                f"generate() must return one sequence a prompt, got {list(output.sequences.shape)} for {B} prompts: set "
                "num_beams and num_return_sequences to 1"
            )
        generated = _rolled(functional.pad(output.sequences, (0, N - n), value=eos), rindex - T, 1)
        action = _action(generated, rindex, N)
        ends = (action == eos).int()
        after = ends.cumsum(1) > ends
        if n < N and not ends[:, :n].any(1).all():
            raise ValueError(
                f"generate() stopped after {n} of {N} tokens, before all texts had ended: remove other limits"
            )
        chosen = [
            self.logprobs_of_labels(score, token) for score, token in zip(output.scores, action[:, :n].T, strict=True)
        ]
        log_probs = functional.pad(torch.stack(chosen, 1), (0, N - n)).masked_fill(after, 0)
        return Generation(generated, log_probs.unsqueeze(-1), self._log_ratio(generated, rindex, action, after))

    @torch.no_grad()
    def create_rollout_td(
        self, batch: PromptData, generated: Tensor, log_probs: Tensor, log_ratio: Tensor
    ) -> TensorDict:
        """Build the steps of completions: a TensorDict [B, N], names (None, "time"). O(B * N * (T + N)) memory.

        - "action": int64 [B, N], the new tokens. "sample_log_prob": float [B, N, 1].
        - "input_ids": int64, and "attention_mask": bool, [B, N, T + N]: the prompt and the tokens generated before the
          step, then padding. Padding and the end-of-text token are masked. Under "next": with the token of the step.
        - "next", "done" and "terminated": bool [B, N, 1]. A text is terminated at its end-of-text token, except at the last
          step. The last step is always done (truncated), so a text that ends early is done twice.
        - "next", "reward", "reward_raw" and "reward_kl": float [B, N, 1]. Raw is the score of the completion minus that of
          the label, clipped to `score_clip`, at done steps, and 0 elsewhere. kl is `-kl_coef * log_ratio`. The reward is
          their sum. The mean kl is kept for `step_scheduler`.
        """
        labels = _labels(batch)
        rindex = batch.prompt_rindex
        N = self.max_new_tokens
        device = generated.device
        ends = rindex.unsqueeze(-1) + torch.arange(N + 1, device=device)
        written = torch.arange(generated.shape[1], device=device) < ends.unsqueeze(-1)
        texts = torch.where(written, generated.unsqueeze(1), self.EOS_TOKEN_ID)  # [B, N + 1, T + N]
        masks = texts != self.EOS_TOKEN_ID
        action = _action(generated, rindex, N).unsqueeze(-1)
        stops = action == self.EOS_TOKEN_ID
        first = stops & (stops.cumsum(1) == 1)
        last = (torch.arange(N, device=device) == N - 1).unsqueeze(-1)
        reward_kl = -self.kl_coef * log_ratio.unsqueeze(-1)
        score = self._score(texts[:, -1], masks[:, -1]) - self._score(labels, batch.attention_mask)
        clipped = score.clamp(-self.score_clip, self.score_clip).to(reward_kl).reshape(-1, 1, 1)
        reward_raw = torch.where(first | last, clipped, 0)
        self._kl_queue.append(reward_kl.mean())
        rewards = {"reward": reward_raw + reward_kl, "reward_raw": reward_raw, "reward_kl": reward_kl}
        ending = {"done": first | last, "terminated": first & ~last}
        now, after = ({"input_ids": texts[:, i : N + i], "attention_mask": masks[:, i : N + i]} for i in (0, 1))
        step = {"action": action.squeeze(-1), "sample_log_prob": log_probs, **now, "next": after | ending | rewards}
        return TensorDict(step, [*log_ratio.shape], device=device, names=[None, "time"])

    def step_scheduler(self) -> None:
        """Update `kl_coef` by the scheduler from the mean penalties since the last step, and clear these."""
        if self.kl_scheduler is not None:
            self.kl_coef = self.kl_scheduler.update(list(self._kl_queue))
        self._kl_queue.clear()

    @classmethod
    def _padded_right_to_left(cls, tensor: Tensor, *, eos_token_id: int | None = None, dim: int = 1) -> Tensor:
        """Move trailing end-of-text tokens of each row to its front."""
        eos = cls.EOS_TOKEN_ID if eos_token_id is None else eos_token_id
        return _rolled(tensor, _leading(tensor.flip(dim), eos, dim), dim)

    @classmethod
    def _padded_left_to_right(
        cls, tensor: Tensor, *, sequence_length: int | None = None, eos_token_id: int | None = None, dim: int = 1
    ) -> Tensor:
        """Move leading end-of-text tokens of each row to its end, and pad to `sequence_length`."""
        eos = cls.EOS_TOKEN_ID if eos_token_id is None else eos_token_id
        size = tensor.shape[dim]
        if sequence_length is not None and sequence_length < size:
            raise ValueError(f"sequence_length must be at least {size}, the length of the rows, got {sequence_length}")
        moved = _rolled(tensor, -_leading(tensor, eos, dim), dim).transpose(dim, -1)
        return functional.pad(moved, (0, (sequence_length or size) - size), value=eos).transpose(dim, -1)

    @staticmethod
    def logprobs_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
        """Log-probabilities [..., L] of labels [..., L] under logits [..., L, vocabulary], in float32 or wider."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def _config(self, generation_config: Any) -> Any:
        """A copy of the generation config with the settings needed here."""
        vocabulary = getattr(getattr(self.model, "config", None), "vocab_size", None)
        if vocabulary is not None and vocabulary <= self.EOS_TOKEN_ID:
            raise ValueError(
                f"the model has {vocabulary} tokens, not {self.EOS_TOKEN_ID}, the end of text: pass eos_token_id"
            )
        if generation_config is None:
            generation_config = required("transformers", "llm").GenerationConfig(**_UNWARPED)
        config = copy.deepcopy(generation_config)
        config.max_new_tokens = self.max_new_tokens
        config.pad_token_id = config.eos_token_id = self.EOS_TOKEN_ID
        config.return_dict_in_generate = config.output_scores = True
        return config

    def _log_ratio(self, generated: Tensor, rindex: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """The log-ratio, [B, N], of actions under the model and the reference model; 0 where `after` is True."""
        B, N = action.shape
        texts = torch.arange(generated.shape[1], device=generated.device) < (rindex + N - after.sum(1)).unsqueeze(-1)
        places = (rindex - 1).unsqueeze(-1) + torch.arange(N, device=generated.device)
        rows = torch.arange(B, device=generated.device).unsqueeze(-1)

        def log_probs(model: Any) -> Tensor:
            device = getattr(model, "device", generated.device)
            logits = model(input_ids=generated.to(device), attention_mask=texts.to(device, torch.int64)).logits
            needed = logits[rows.to(device), places.to(device)]  # select before the softmax over the vocabulary
            return self.logprobs_of_labels(needed, action.to(device)).to(generated.device)

        return (log_probs(self.model) - log_probs(self.ref_model)).masked_fill(after, 0)

    def _score(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        _, scores = self.reward_model(input_ids=input_ids, attention_mask=attention_mask)
        if scores.numel() != len(input_ids):
            raise ValueError(f"the reward model must return {len(input_ids)} scores, got {list(scores.shape)}")
        return scores.reshape(-1)


# Settings not listed here come from the generation config saved with the model.
_UNWARPED = {
    "do_sample": True, "num_beams": 1, "num_return_sequences": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
}  # fmt: skip


def _labels(batch: PromptData) -> Tensor:
    if batch.labels is None:
        raise ValueError("the batch has no labels, whose score is the baseline of the reward: set batch.labels")
    return batch.labels


def _action(generated: Tensor, rindex: Tensor, n: int) -> Tensor:
    """[B, n]: the tokens from `rindex` on."""
    return generated.gather(1, rindex.unsqueeze(-1) + torch.arange(n, device=generated.device))


def _leading(tensor: Tensor, value: int, dim: int) -> Tensor:
    """The number of leading elements equal to `value` in each row along `dim`."""
    return (tensor == value).int().cumprod(dim).sum(dim)


def _rolled(tensor: Tensor, by: Tensor, dim: int) -> Tensor:
    """Roll each row along `dim` by its own amount."""
    shape = [tensor.shape[dim] if place == dim % tensor.ndim else 1 for place in range(tensor.ndim)]
    places = torch.arange(tensor.shape[dim], device=tensor.device).reshape(shape)
    return tensor.gather(dim, ((places - by.unsqueeze(dim)) % tensor.shape[dim]).expand_as(tensor))

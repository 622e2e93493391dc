"""Prompts and responses of a language model, as tokens and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, NonTensorStack, tensorclass
from torch import Size, Tensor
from torch.nn.utils.rnn import pad_sequence

Class = TypeVar("Class")


def _with_lists(cls: Class) -> Class:
    """Class decorator: with a batch size, a list holds one value per row; without, it is one value."""
    plain: Any = cls.set  # type: ignore[attr-defined]

    def set(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:  # what `set` of tensordict takes
        """Set an entry, as `TensorDict.set` does. A list of tensors or texts becomes a row for each item."""
        if isinstance(value, list | tuple) and not isinstance(value, NonTensorStack) and key in _LISTS:
            value = _rows(key, value, self.batch_size)
        return plain(self, key, value, *args, **kwargs)

    cls.set = set  # type: ignore[attr-defined]
    return cls


_LISTS = ("token_list", "tokens_response_list", "text", "text_response")


def _rows(key: str, values: Any, size: Size) -> Any:
    if not size:
        return NonTensorData(values)
    if isinstance(values, str) or len(values) != size[0]:
        count = 1 if isinstance(values, str) else len(values)
        raise ValueError(f"{key} has {count} values for a batch of size {list(size)}: give one a row, in nested lists")
    if not values:  # tensordict cannot stack an empty list
        return NonTensorData([], batch_size=size)
    if len(size) == 1:
        return NonTensorStack(*map(NonTensorData, values))
    return NonTensorStack(*(_rows(key, value, size[1:]) for value in values))


@_with_lists
@tensorclass(nocast=True)
class LLMInput:
    """The input of a language model.

    - tokens: int64 [*B, T], the prompts. attention_mask: [*B, T].
    - token_list: a list of tokens per prompt, of any lengths. text: a str, or a list of str.
    """

    tokens: Tensor
    attention_mask: Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    text: str | list[str] | None = None


@_with_lists
@tensorclass(nocast=True)
class LLMOutput:
    """The output of a language model.

    - tokens: int64 [*B, T_in], the prompts. tokens_response: int64 [*B, T_out], the generated tokens.
    - token_list, tokens_response_list: the same as lists of lists, without padding.
    - logits: float [*B, T_out, vocabulary]. log_probs: float [*B, T_out], of the generated tokens.
    - text: the generated text, a str or a list of str.
    """

    tokens: Tensor
    tokens_response: Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    tokens_response_list: list[int] | list[list[int]] | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    text: str | list[str] | None = None

    @classmethod
    def from_vllm_output(cls: Any, vllm_output: Any, *, pad_token_id: int = 0) -> LLMOutput:
        """Convert one or several `RequestOutput`s of vLLM, with batch size [R]: one row per completion.

        Tokens are padded on the right with `pad_token_id`. Log-probabilities are padded with 0, and kept only if all
        completions have them. The lists have no padding. ValueError if there is no completion, or a request has neither
        tokens nor text.
        """
        requests = vllm_output if isinstance(vllm_output, Iterable) else [vllm_output]
        rows = [(request, completion) for request in requests for completion in request.outputs]
        if not rows or any(request.prompt_token_ids is None for request, _ in rows):
            raise ValueError("from_vllm_output needs completions of prompts whose prompt_token_ids are known")
        prompts = [[*request.prompt_token_ids] for request, _ in rows]
        responses = [[*completion.token_ids] for _, completion in rows]
        log_probs = None
        if all(completion.logprobs is not None for _, completion in rows):
            of_rows = (zip(completion.token_ids, completion.logprobs, strict=True) for _, completion in rows)
            log_prob_rows = [[_log_prob(among[token]) for token, among in row] for row in of_rows]
            log_probs = _padded(log_prob_rows, 0.0, torch.float32)
        return cls(
            tokens=_padded(prompts, pad_token_id, torch.int64),
            tokens_response=_padded(responses, pad_token_id, torch.int64),
            token_list=prompts,
            tokens_response_list=responses,
            log_probs=log_probs,
            text=[completion.text for _, completion in rows],
            batch_size=[len(rows)],
        )


@_with_lists
@tensorclass(nocast=True)
class LLMData:
    """A prompt and its response: the fields of `LLMInput` and `LLMOutput`; `text` is the prompt."""

    tokens: Tensor | None = None
    tokens_response: Tensor | None = None
    attention_mask: Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    tokens_response_list: list[int] | list[list[int]] | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    text: str | list[str] | None = None
    text_response: str | list[str] | None = None


def _log_prob(entry: Any) -> float:
    return float(getattr(entry, "logprob", entry))  # a float in earlier releases of vLLM


def _padded(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    """Pad rows to a tensor [rows, longest]."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=value)

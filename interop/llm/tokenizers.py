"""Tokenizers from text to tensors of token ids."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from interop.data.arguments import whole

_UNPADDED = (False, None, "do_not_pad")


class TensorDictTokenizer:
    """Tokenizes the text of a sample.

    A call returns int64 tensors of shape [max_length] for a str, [N, max_length] for a list of N; batch size [] or [N].

    Args:
        tokenizer: a tokenizer of `transformers`, or a callable `tokenizer(text, max_length=, padding=, truncation=)` that
            returns a mapping with "input_ids" and "attention_mask" to lists of integers.
        max_length: the maximum sequence length; with `padding="max_length"`, the length of each sequence.
        key: the entry of a sample with the text, a str or a list of N str.
        padding: "max_length", "longest" (also True) or False, as in `transformers`.
        truncation: truncate sequences to `max_length`.
        return_tensordict: return a TensorDict instead of the tokenizer's own result.
        device: the device of the TensorDict.

    Raises:
        ValueError: at construction, `max_length` is below 1, or padding is enabled and the tokenizer has no pad token. In a
            call, a sequence exceeds `max_length` without truncation, or lengths differ without padding and a TensorDict is
            requested.
        KeyError: the sample has no entry `key`.
        TypeError: the entry is neither a str nor a list of str.
    """

    def __init__(
        self,
        tokenizer: Callable[..., Any],
        max_length: int,
        key: str = "text",
        padding: str | bool = "max_length",
        truncation: bool = True,
        return_tensordict: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        max_length = whole("max_length", max_length)
        if padding not in _UNPADDED and getattr(tokenizer, "pad_token_id", 0) is None:
            raise ValueError(
                f"{type(tokenizer).__name__} has no pad token, which padding={padding!r} needs: set tokenizer.pad_token, "
                "for instance to tokenizer.eos_token"
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.key = key
        self.padding = padding
        self.truncation = truncation
        self.return_tensordict = return_tensordict
        self.device = device

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        texts = _texts(sample, self.key)
        tokens = self._encoded(texts, self.padding)
        size = [] if isinstance(texts, str) else [len(texts)]
        return self._as_tensordict(tokens, size) if self.return_tensordict else tokens

    def _encoded(self, texts: str | list[str], padding: str | bool) -> Any:
        """Tokenize texts, at most `max_length` tokens each."""
        if not texts and not isinstance(texts, str):  # tokenizers disagree on empty lists
            return {
                name: torch.empty(0, self.max_length, dtype=torch.int64) for name in ("input_ids", "attention_mask")
            }
        tokens = self.tokenizer(texts, max_length=self.max_length, padding=padding, truncation=self.truncation)
        rows = [tokens["input_ids"]] if isinstance(texts, str) else tokens["input_ids"]
        longest = max(map(len, rows))
        if longest > self.max_length:
            raise ValueError(
                f"a text has {longest} tokens, more than max_length={self.max_length}: pass truncation=True or a larger "
                "max_length"
            )
        return tokens

    def _as_tensordict(self, tokens: Mapping[str, Any], size: list[int]) -> TensorDict:
        lengths = {len(row) for row in tokens["input_ids"]} if size else set()
        if len(lengths) > 1:
            raise ValueError(
                f"the texts have {min(lengths)} to {max(lengths)} tokens, a tensor needs one length: pass "
                "padding='max_length', or return_tensordict=False"
            )
        dtypes = {name: torch.bool if name == "valid_sample" else torch.int64 for name in tokens}
        tensors = {name: torch.as_tensor(rows, dtype=dtypes[name]) for name, rows in tokens.items()}
        return TensorDict(tensors, size, device=self.device)


class PromptTensorDictTokenizer(TensorDictTokenizer):
    """Tokenizes prompts together with their labels, and records where each prompt ends.

    A sample has two lists of N str: prompts under `key`, and "label". They are joined without a separator. A call returns,
    with batch size [N]:

    - "input_ids", "attention_mask": int64 [N, max_length], of prompt and label.
    - "prompt_rindex": int64 [N], the position of the last prompt token, with the prompt tokenized alone.
    - "valid_sample": bool [N], whether the last of the `max_length` tokens is the end-of-text token. If this is also the
      pad token, it means that the text is shorter than `max_length`.

    Arguments and errors are those of `TensorDictTokenizer`. ValueError also for a tokenizer without an end-of-text token,
    or one that pads or truncates on the left.
    """

    def __init__(
        self,
        tokenizer: Callable[..., Any],
        max_length: int,
        key: str = "prompt",
        padding: str | bool = "max_length",
        truncation: bool = True,
        return_tensordict: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tokenizer, max_length, key, padding, truncation, return_tensordict, device)
        self._eos = getattr(tokenizer, "eos_token_id", None)
        if self._eos is None:
            name = type(tokenizer).__name__
            raise ValueError(f"{name} has no end-of-text token, which valid samples end with: set tokenizer.eos_token")
        for side in ("padding_side", "truncation_side"):
            if getattr(tokenizer, side, "right") != "right":
                raise ValueError(
                    f"prompt_rindex counts from the first token of a prompt: set tokenizer.{side} to 'right'"
                )

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        prompts = _texts(sample, self.key)
        labels = _texts(sample, "label")
        if isinstance(prompts, str) or isinstance(labels, str) or len(prompts) != len(labels):
            raise TypeError(
                f"{self.key!r} and 'label' must be lists of str, of one length: pass [text] for a single text"
            )
        tokens = self._encoded([prompt + label for prompt, label in zip(prompts, labels, strict=True)], self.padding)
        tokens["prompt_rindex"] = [len(row) - 1 for row in self._encoded(prompts, False)["input_ids"]]
        tokens["valid_sample"] = [len(row) > 0 and bool(row[-1] == self._eos) for row in tokens["input_ids"]]
        return self._as_tensordict(tokens, [len(prompts)]) if self.return_tensordict else tokens


def _texts(sample: Mapping[str, Any], key: str) -> str | list[str]:
    if key not in sample:
        raise KeyError(f"the sample has no entry {key!r}, it has {[*sample.keys()]}")
    texts = sample[key]
    if isinstance(texts, str):
        return texts
    rows = list(texts) if isinstance(texts, Iterable) else [texts]
    if wrong := {type(row).__name__ for row in rows if not isinstance(row, str)}:
        raise TypeError(f"{key!r} must be a str or a list of str, it has {wrong}")
    return rows

"""Tokenized prompts with labels."""

from __future__ import annotations

import torch
from tensordict import TensorClass
from torch import Tensor

from interop.llm.dataset import StrPath, TokenizedDatasetLoader
from interop.llm.tokenizers import PromptTensorDictTokenizer

__all__ = ["PromptData", "PromptTensorDictTokenizer"]

END_OF_TEXT = 50256  # GPT-2


class PromptData(TensorClass):
    """A batch of tokenized prompts, each followed by its label.

    - input_ids, attention_mask: int64 [B, T].
    - prompt_rindex: int64 [B], the position of the last token of the prompt.
    - labels: int64 [B, T]. logits: float [B, T, vocabulary]. loss: float [].
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_rindex: Tensor
    labels: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None

    def mask_label(self, pad_token_id: int = END_OF_TEXT) -> PromptData:
        """Mask the labels: tokens from position `prompt_rindex` on become `pad_token_id`, with attention mask 0.

        As in torchrl, this includes the last prompt token, at `prompt_rindex`. Labels and logits are dropped; the batch
        size is [].
        """
        positions = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        is_prompt = positions < self.prompt_rindex.unsqueeze(-1)
        return PromptData(
            input_ids=self.input_ids.masked_fill(~is_prompt, pad_token_id),
            attention_mask=is_prompt.to(torch.int64),
            prompt_rindex=self.prompt_rindex,
            loss=self.loss,
            batch_size=[],
        )

    @classmethod
    def from_dataset(
        cls,
        split: str,
        dataset_name: str | None = None,
        max_length: int = 550,
        root_dir: StrPath | None = None,
        from_disk: bool = False,
        num_workers: int | None = None,
        *,
        tokenizer_class: type | None = None,
        tokenizer_model_name: str | None = None,
    ) -> PromptData:
        """Load a memory-mapped dataset with columns "prompt" and "label". `labels` are the input ids.

        Arguments are those of `TokenizedDatasetLoader`; the default dataset is "CarperAI/openai_summarize_tldr".
        """
        data = TokenizedDatasetLoader(
            split,
            max_length,
            dataset_name or "CarperAI/openai_summarize_tldr",
            PromptTensorDictTokenizer,
            None,
            root_dir,
            from_disk,
            num_workers=num_workers,
            tokenizer_class=tokenizer_class,
            tokenizer_model_name=tokenizer_model_name,
        ).load()
        fields = {name: data[name] for name in ("input_ids", "attention_mask", "prompt_rindex")}
        return cls(**fields, labels=data["input_ids"], batch_size=data.batch_size)

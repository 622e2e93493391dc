"""Completions with rewards, and pairs of a preferred completion and a rejected one."""

from __future__ import annotations

from typing import Any

from tensordict import TensorClass
from torch import Tensor

from interop.data.optional import required
from interop.llm.dataset import StrPath, TokenizedDatasetLoader
from interop.llm.tokenizers import TensorDictTokenizer

_ROWS = 1000  # of a dataset that are read at once


class RewardData(TensorClass):
    """A batch of tokenized texts: input_ids, attention_mask int64 [B, T]; rewards float [B, T, 1]; end_scores [B, 1]."""

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor | None = None
    end_scores: Tensor | None = None


class PairwiseDataset(TensorClass):
    """Pairs of texts, row by row: the one preferred and the one rejected."""

    chosen_data: RewardData
    rejected_data: RewardData

    @classmethod
    def from_dataset(
        cls, split: str, dataset_name: str | None = None, max_length: int = 550, root_dir: StrPath | None = None,
        from_disk: bool = False, num_workers: int | None = None, *, tokenizer_class: type | None = None,
        tokenizer_model_name: str | None = None,
    ) -> PairwiseDataset:  # fmt: skip
        """The pairs of a dataset with columns "prompt", "chosen" and "rejected", memory-mapped, with batch size [pairs].

        Arguments are those of `TokenizedDatasetLoader`; the dataset is "CarperAI/openai_summarize_comparisons" by
        default. `pre_tokenization_hook` drops pairs and joins the texts. Nothing is copied.
        """
        data = TokenizedDatasetLoader(
            split, max_length, dataset_name or "CarperAI/openai_summarize_comparisons", TensorDictTokenizer,
            pre_tokenization_hook, root_dir, from_disk, num_workers=num_workers, tokenizer_class=tokenizer_class,
            tokenizer_model_name=tokenizer_model_name,
        ).load()  # fmt: skip
        pairs = len(data) // 2
        halves = [
            RewardData(half["input_ids"], half["attention_mask"], batch_size=[pairs])
            for half in (data[:pairs], data[pairs:])
        ]
        return cls(*halves, batch_size=[pairs])


def pre_tokenization_hook(dataset: Any, min_length: int = 5) -> Any:
    """A `datasets.Dataset` of one column, "text": the chosen answers of all pairs, then the rejected ones, as many.

    Each is `prompt + "\\n" + answer`. Pairs are dropped whose answers are equal, or of which one has fewer than
    `min_length` words. Where none is left, the dataset has no columns.
    """
    chosen, rejected = [], []
    for rows in dataset.iter(batch_size=_ROWS):
        for prompt, yes, no in zip(rows["prompt"], rows["chosen"], rows["rejected"], strict=True):
            if None in (prompt, yes, no):
                raise TypeError("a pair has None for a text: filter such rows out, or replace it by ''")
            if yes != no and min(len(yes.split()), len(no.split())) >= min_length:
                chosen.append(f"{prompt}\n{yes}")
                rejected.append(f"{prompt}\n{no}")
    return required("datasets", "llm").Dataset.from_dict({"text": chosen + rejected} if chosen else {})

"""Texts with rewards, and pairs of a chosen and a rejected text."""

from __future__ import annotations

from typing import Any

from tensordict import TensorClass
from torch import Tensor

from interop.data.arguments import required
from interop.llm.dataset import StrPath, TokenizedDatasetLoader
from interop.llm.tokenizers import TensorDictTokenizer

_ROWS = 1000  # rows of a dataset per read


class RewardData(TensorClass):
    """A batch of tokenized texts: input_ids, attention_mask int64 [B, T]; rewards float [B, T, 1]; end_scores [B, 1]."""

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor | None = None
    end_scores: Tensor | None = None


class PairwiseDataset(TensorClass):
    """Pairs of texts: the chosen and the rejected one of each row."""

    chosen_data: RewardData
    rejected_data: RewardData

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
    ) -> PairwiseDataset:
        """Load a memory-mapped dataset with columns "prompt", "chosen" and "rejected", batch size [pairs].

        Arguments are those of `TokenizedDatasetLoader`; the default dataset is "CarperAI/openai_summarize_comparisons".
        `pre_tokenization_hook` filters pairs and joins the texts. Nothing is copied.
        """
        data = TokenizedDatasetLoader(
            split,
            max_length,
            dataset_name or "CarperAI/openai_summarize_comparisons",
            TensorDictTokenizer,
            pre_tokenization_hook,
            root_dir,
            from_disk,
            num_workers=num_workers,
            tokenizer_class=tokenizer_class,
            tokenizer_model_name=tokenizer_model_name,
        ).load()
        pairs = len(data) // 2
        halves = [
            RewardData(half["input_ids"], half["attention_mask"], batch_size=[pairs])
            for half in (data[:pairs], data[pairs:])
        ]
        return cls(*halves, batch_size=[pairs])


def pre_tokenization_hook(dataset: Any, min_length: int = 5) -> Any:
    """A `datasets.Dataset` with one column, "text": the chosen texts of all pairs, then as many rejected texts.

    A text is `prompt + "\\n" + answer`. Pairs with equal answers, or an answer of fewer than `min_length` words, are
    dropped. If no pair is left, the dataset has no columns.
    """
    chosen = []
    rejected = []
    for rows in dataset.iter(batch_size=_ROWS):
        for prompt, yes, no in zip(rows["prompt"], rows["chosen"], rows["rejected"], strict=True):
            if None in (prompt, yes, no):
                raise TypeError("a pair has None for a text: filter such rows out, or replace it by ''")
            if yes != no and min(len(yes.split()), len(no.split())) >= min_length:
                chosen.append(f"{prompt}\n{yes}")
                rejected.append(f"{prompt}\n{no}")
    return required("datasets", "llm").Dataset.from_dict({"text": chosen + rejected} if chosen else {})

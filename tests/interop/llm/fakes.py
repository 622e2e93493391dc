"""A tokenizer, models and datasets that need no library."""

from types import SimpleNamespace
from typing import Any

import torch

EOS = 50256


class WordTokenizer:
    """One token a word: its length plus one. Token 0 ends a text and pads."""

    eos_token = pad_token = "<e>"
    eos_token_id = pad_token_id = 0

    @classmethod
    def from_pretrained(cls, name: str) -> "WordTokenizer":
        return cls()

    def __call__(
        self, text: Any, max_length: int = 0, padding: Any = False, truncation: bool = False
    ) -> dict[str, Any]:
        if isinstance(text, str):
            return {name: rows[0] for name, rows in self([text], max_length, padding, truncation).items()}
        ids = [[1 + len(word) for word in each.split()] for each in text]
        ids = [row[:max_length] for row in ids] if truncation else ids
        width = max_length if padding == "max_length" else max(map(len, ids)) if padding in (True, "longest") else 0
        return {
            "input_ids": [row + [0] * (width - len(row)) for row in ids],
            "attention_mask": [[1] * len(row) + [0] * (width - len(row)) for row in ids],
        }


class TableModel:
    """A language model whose next logits depend on the last token alone; `generate` returns the tokens it is given."""

    device = torch.device("cpu")

    def __init__(self, seed: int, new: torch.Tensor | None = None, vocabulary: int = EOS + 1) -> None:
        self.table = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(seed))
        self.new = new

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids % 7])

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any
    ) -> SimpleNamespace:
        assert self.new is not None
        self.given = input_ids, attention_mask, generation_config
        sequences = torch.cat([input_ids, self.new], 1)
        scores = tuple(self.table[sequences[:, i - 1] % 7] for i in range(input_ids.shape[1], sequences.shape[1]))
        return SimpleNamespace(sequences=sequences, scores=scores)


def weighted_sum(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[None, torch.Tensor]:
    """A reward model: the tokens that are not masked, by place."""
    places = torch.arange(1, input_ids.shape[1] + 1)
    return None, (input_ids % 5 * attention_mask * places).sum(-1) / 20


def prompts(tensorclass: Any, eos: int = EOS) -> Any:
    """Four prompts of one to six tokens, of labels that fill some rows."""
    ids = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 0, 0], [31, 32, 33, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
    ids = torch.where(ids == 0, eos, ids)
    return tensorclass(
        input_ids=ids, attention_mask=(ids != eos).long(), prompt_rindex=torch.tensor([3, 2, 1, 6]), labels=ids,
        batch_size=[4],
    )  # fmt: skip

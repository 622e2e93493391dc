"""Batches of tokenized text: what does the next one of `get_dataloader` cost, beside torchrl's?

    python benchmarks/language.py [--quick] [--json FILE]

2,000 rows of int64 in memory, without prefetching: prompts have four tensors a row, pairs four in two nested ones.
"""

import functools
import sys
import warnings
from types import ModuleType
from typing import Any

import measure
import torch

import interop

ROWS, VOCABULARY = 2000, 50257


def batches(library: Any, kind: str, length: int, batch_size: int) -> functools.partial[Any]:
    """The call that takes the next batch."""
    ids = torch.randint(VOCABULARY, (ROWS, length))
    masks = torch.ones_like(ids)

    class Rows:
        @classmethod
        def from_dataset(cls, **_: Any) -> Any:
            if kind == "prompts":
                last = torch.full((ROWS,), length // 2)
                return library.PromptData(ids, masks, last, labels=ids, batch_size=[ROWS])
            half = library.RewardData(ids, masks, batch_size=[ROWS])
            return library.PairwiseDataset(half, half, batch_size=[ROWS])

    return functools.partial(next, library.get_dataloader(batch_size, length, Rows, "cpu"))


def timings(quick: bool) -> list[measure.Timing]:
    """A row for each kind, length and size of batch."""
    libraries: dict[str, ModuleType] = {measure.OURS: interop}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torchrl := measure.rival("torchrl.data"):
            libraries["torchrl"] = torchrl
    return [
        measure.compare(
            f"{kind}, {batch_size} of {length} tokens",
            {side: batches(library, kind, length, batch_size) for side, library in libraries.items()},
            quick=quick,
        )
        for kind in ("prompts", "pairs")
        for length, batch_size in ((128, 8), (128, 32), (550, 8), (550, 32))
    ]


def main() -> int:
    options = measure.arguments("Batches of get_dataloader, beside torchrl's").parse_args()
    measure.report("the next batch of get_dataloader", timings(options.quick), {}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

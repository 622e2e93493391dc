"""Rollouts that grow where they are stored: what does an append cost, beside writing the whole item again?

    python benchmarks/growing.py [--quick] [--json FILE]

64 rollouts of 8,192 tokens each get 64 more tokens at a call, in memory, in a memory map and in a list; "whole item" reads
the items, joins them and writes them by `rb[index] = data`. Before each measurement the rollouts begin anew.
"""

import sys
from collections.abc import Callable
from typing import Any

import measure
import torch
from tensordict import TensorDict, lazy_stack

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer

ROLLOUTS, LONG, MORE, MOST = 64, 8192, 64, 256


class Grower:
    """Calls of one kind on one buffer; the rollouts are short again after `MOST` calls."""

    def __init__(self, storage: Any, whole_item: bool = False) -> None:
        self.buffer = ReplayBuffer(storage=storage, collate_fn=lambda items: items)
        self.is_list = isinstance(storage, ListStorage)
        self.grow: Callable[[], None] = self.rewrite if whole_item else self.append
        self.more = torch.arange(MORE).repeat(ROLLOUTS, 1)
        self.calls = 0
        self.begin()

    def begin(self) -> None:
        items = [TensorDict({"tokens": torch.arange(LONG)}) for _ in range(ROLLOUTS)]
        self.buffer.empty()
        self.buffer.extend(items if self.is_list else lazy_stack(items))

    def append(self) -> None:
        self.buffer.append_to(slice(None), {"tokens": self.more})

    def rewrite(self) -> None:
        rows = self.buffer.storage[:]["tokens"].unbind()
        grown = [torch.cat(pair) for pair in zip(rows, self.more, strict=True)]
        self.buffer[:] = TensorDict({"tokens": torch.nested.nested_tensor(grown, layout=torch.jagged)}, [ROLLOUTS])

    def __call__(self) -> None:
        self.calls += 1
        if self.calls % MOST == 0:
            self.begin()
        self.grow()


def main() -> int:
    options = measure.arguments("Rollouts that grow").parse_args()
    calls = {
        measure.OURS: Grower(LazyTensorStorage(ROLLOUTS, ragged=["tokens"])),
        "whole item": Grower(LazyTensorStorage(ROLLOUTS, ragged=["tokens"]), whole_item=True),
        "memory map": Grower(LazyMemmapStorage(ROLLOUTS, ragged=["tokens"])),
        "list": Grower(ListStorage(ROLLOUTS)),
    }
    timing = measure.compare(
        f"append {MORE} tokens to {ROLLOUTS} rollouts of {LONG} and more", calls, quick=options.quick
    )
    buffer = calls[measure.OURS].buffer
    stored = sum(share.bytes or 0 for share in buffer.storage.plan().shares)
    tokens = sum(buffer.storage[row]["tokens"].nbytes for row in range(ROLLOUTS))
    measure.report(
        "rollouts that grow", [timing], {"bytes stored / bytes of the tokens": stored / tokens}, options.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Text and ragged rows: what do storing and drawing them cost, beside a list of the same, and beside padding?

    python benchmarks/text.py [--quick] [--json FILE]

10^5 texts of 200 characters, and 2 x 10^4 rows of 8 to 1,024 tokens. "as tensordicts" is a batch with an integer beside each
text; a `ListStorage` keeps a tensordict an item then. "padded" are the same tokens, [rows, 1024], with their lengths.
"""

import functools
import sys
from typing import Any

import measure
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer

TEXTS, CHARACTERS, ROWS, LONGEST, BATCH = 100_000, 200, 20_000, 1024, 256


def filled(kind: type, data: Any, count: int) -> Any:
    """A buffer of one kind of storage that holds the data."""
    plain_list = kind is ListStorage and isinstance(data, list)
    buffer = ReplayBuffer(storage=kind(count), batch_size=BATCH, collate_fn=list if plain_list else None)
    buffer.extend(data)
    return buffer


def main() -> int:
    options = measure.arguments("Text and ragged rows in tensor storages").parse_args()
    texts = [f"{number:08d}" + "x" * (CHARACTERS - 8) for number in range(TEXTS)]
    stack = NonTensorStack(*map(NonTensorData, texts[: TEXTS // 10]))  # a tenth: lists take seconds for them
    batch = TensorDict({"text": stack, "id": torch.arange(len(stack))}, [len(stack)])
    lengths = np.random.default_rng(0).integers(8, LONGEST + 1, ROWS)
    jagged = torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    ragged = TensorDict({"tokens": jagged, "id": torch.arange(ROWS)}, [ROWS])
    padded = TensorDict({"tokens": jagged.to_padded_tensor(0), "length": torch.from_numpy(lengths)}, [ROWS])
    sides = {measure.OURS: LazyTensorStorage, "memory map": LazyMemmapStorage, "list": ListStorage}
    tensors = {measure.OURS: ragged, "padded": padded}
    work: dict[str, dict[str, Any]] = {}
    for name, data in {"texts": texts, "as tensordicts": batch}.items():
        count = len(data)
        held = {side: filled(kind, data, count) for side, kind in sides.items()}
        work[f"extend, {name}"] = {side: functools.partial(filled, kind, data, count) for side, kind in sides.items()}
        work[f"sample {BATCH}, {name}"] = {side: buffer.sample for side, buffer in held.items()}
    rows = {side: filled(LazyTensorStorage, data, ROWS) for side, data in tensors.items()}
    work["extend, tokens"] = {
        side: functools.partial(filled, LazyTensorStorage, data, ROWS) for side, data in tensors.items()
    }
    work[f"sample {BATCH}, tokens"] = {side: buffer.sample for side, buffer in rows.items()}
    timings = [measure.compare(name, calls, quick=options.quick) for name, calls in work.items()]
    packed = sum(share.bytes or 0 for share in rows[measure.OURS].storage.plan().shares)
    plain = sum(share.bytes or 0 for share in rows["padded"].storage.plan().shares)
    stored = sum(share.bytes or 0 for share in filled(LazyTensorStorage, texts, TEXTS).storage.plan().shares)
    values = {
        "bytes stored / bytes of the texts": stored / (TEXTS * CHARACTERS),
        "bytes packed / padded": packed / plain,
    }
    measure.report("text and ragged rows", timings, values, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

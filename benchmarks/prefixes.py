"""Completions of one prompt that share its tokens: bytes, and draws beside rows that are stored whole?

    python benchmarks/prefixes.py [--quick] [--json FILE]

32 prompts of 2,000 tokens with 64 completions of 100 to 400 tokens each, and 32 trees of 64 branches: paths of six turns of
300 tokens, of which each turn has two continuations. Draws of 256 rows.
"""

import functools
import sys
from typing import Any

import measure
import numpy as np
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer

GROUPS, BRANCHES, BATCH = 32, 64, 256


def completions(rng: np.random.Generator) -> list[np.ndarray]:
    found = []
    for _ in range(GROUPS):
        prompt = rng.integers(1 << 40, size=2000)
        found += [np.append(prompt, rng.integers(1 << 40, size=rng.integers(100, 401))) for _ in range(BRANCHES)]
    return found


def trees(rng: np.random.Generator) -> list[np.ndarray]:
    found = []
    for _ in range(GROUPS):
        paths = [np.zeros(0, np.int64)]
        while len(paths) < BRANCHES:
            paths = [np.append(path, rng.integers(1 << 40, size=300)) for path in paths for _ in range(2)]
        found += paths
    return found


def filled(storage: Any, data: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=storage, batch_size=BATCH)
    buffer.extend(data)
    return buffer


def main() -> int:
    options = measure.arguments("Rows that share their beginnings").parse_args()
    rng = np.random.default_rng(0)
    timings, values = [], {}
    for name, rows in {"completions": completions(rng), "branches": trees(rng)}.items():
        tokens = torch.nested.nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)
        data, count = TensorDict({"tokens": tokens}, [len(rows)]), len(rows)
        made = {
            measure.OURS: functools.partial(LazyTensorStorage, count, shared_prefixes=["tokens"]),
            "whole": functools.partial(LazyTensorStorage, count, ragged=["tokens"]),
        }
        held = {side: filled(make(), data) for side, make in made.items()}
        sizes = {side: sum(share.bytes or 0 for share in buffer.plan().shares) for side, buffer in held.items()}
        unique = np.unique(np.concatenate(rows)).size * 8
        values[f"bytes stored / unique bytes, {name}"] = sizes[measure.OURS] / unique
        values[f"bytes whole / bytes stored, {name}"] = sizes["whole"] / sizes[measure.OURS]
        extend = {side: (lambda make=make, data=data: filled(make(), data)) for side, make in made.items()}
        timings.append(measure.compare(f"extend, {count} {name}", extend, quick=options.quick))
        draws = {side: buffer.sample for side, buffer in held.items()}
        timings.append(measure.compare(f"sample {BATCH}, {name}", draws, quick=options.quick))
    measure.report("rows that share their beginnings", timings, values, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

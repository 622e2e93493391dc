"""Through torch, the rest of the family beside torchrl: no replacement, four buffers at once, lists, top ranks."""

from types import ModuleType
from typing import Any

import measure
import torch
import torch_rows
from tensordict import TensorDict

import interop

BATCH = 256


def full(data: ModuleType, capacity: int, **parts: Any) -> Any:
    buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(capacity), batch_size=BATCH, **parts)
    torch_rows.fill(buffer, torch_rows.transitions(min(capacity, 50_000)), capacity)
    return buffer


def without_replacement(data: ModuleType, capacity: int) -> Any:
    return full(data, capacity, sampler=data.SamplerWithoutReplacement()).sample


def without_replacement_after_a_write(data: ModuleType, capacity: int) -> Any:
    """The buffer is never full, so that each write changes its length."""
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(4 * capacity), sampler=data.SamplerWithoutReplacement(), batch_size=BATCH
    )
    torch_rows.fill(buffer, torch_rows.transitions(min(capacity, 50_000)), capacity)
    rows = torch_rows.transitions(64)

    def call() -> None:
        buffer.extend(rows)
        buffer.sample()

    return call


def ensemble(data: ModuleType, capacity: int) -> Any:
    members = [full(data, capacity // 4) for _ in range(4)]
    return data.ReplayBufferEnsemble(*members, batch_size=BATCH).sample


def tensors_in_a_list(data: ModuleType, capacity: int) -> Any:
    buffer = data.ReplayBuffer(storage=data.ListStorage(10_000), batch_size=BATCH)
    buffer.extend(torch.randn(10_000, torch_rows.OBSERVATION))
    return buffer.sample


def tensordicts_in_a_list(data: ModuleType, capacity: int) -> Any:
    buffer = data.ReplayBuffer(storage=data.ListStorage(10_000), batch_size=BATCH)
    buffer.extend(torch_rows.transitions(10_000))
    return buffer.sample


def highest_ranked(data: ModuleType, capacity: int) -> Any:
    """Batches of which a good part is kept."""
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(1_000), writer=data.TensorDictMaxValueWriter(rank_key="key"), batch_size=BATCH
    )
    rising, draw = 0.0, torch.Generator().manual_seed(0)
    rows = torch.randn(BATCH, torch_rows.OBSERVATION, generator=draw)

    def call() -> None:
        nonlocal rising
        rising += 0.1
        keys = torch.randn(BATCH, generator=draw) + rising
        buffer.extend(TensorDict({"key": keys, "observation": rows}, [BATCH]))

    return call


QUESTIONS = {
    "sample without replacement": without_replacement,
    "extend 64 + sample without replacement": without_replacement_after_a_write,
    "sample of an ensemble of four": ensemble,
    "sample of a list of tensors": tensors_in_a_list,
    "sample of a list of tensordicts": tensordicts_in_a_list,
    "extend of the highest-ranked": highest_ranked,
}


def main() -> None:
    options = measure.arguments("Through torch: the rest of the family beside torchrl").parse_args()
    sides = {measure.OURS: interop}
    if torchrl := measure.rival("torchrl.data"):
        sides["torchrl"] = torchrl
    capacity = 20_000 if options.quick else 1_000_000
    timings = [
        measure.compare(name, {side: make(data, capacity) for side, data in sides.items()}, quick=options.quick)
        for name, make in QUESTIONS.items()
    ]
    measure.report(f"Through torch, batch {BATCH}, {capacity} rows of six leaves", timings, {}, options.json)


if __name__ == "__main__":
    main()

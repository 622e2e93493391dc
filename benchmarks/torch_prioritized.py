"""Through torch, drawing by priority: is a cycle of `extend`, `sample` and update faster than cpprb's?

Transitions of six leaves in a full buffer of 10^6. cpprb takes and gives NumPy arrays, ours tensordicts: each its own.
torchrl joins where its priority trees load, and what one would write without a library (`plain.py`) always. Work may be
put off from one operation to the next, so the line to believe is the one of all three together.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import measure
import numpy as np
import plain
import torch
import torch_rows

import interop

ALPHA, BETA = 0.6, 0.4
Calls = dict[str, Callable[[], Any]]  # operation -> call


def torch_calls(data: ModuleType, capacity: int) -> Callable[[int], Calls]:
    """From the classes of torchrl.data, or ours."""
    buffer = data.TensorDictPrioritizedReplayBuffer(
        alpha=ALPHA, beta=BETA, storage=data.LazyTensorStorage(capacity), priority_key="td_error"
    )
    torch_rows.fill(buffer, torch_rows.transitions(min(capacity, 50_000)), capacity)
    buffer.update_priority(torch.arange(capacity), torch.rand(capacity) + 1e-3)

    def calls(batch: int) -> Calls:
        rows, errors = torch_rows.transitions(batch), torch.rand(batch) + 1e-3
        drawn = buffer.sample(batch)
        drawn.set("td_error", errors)

        def cycle() -> None:
            buffer.extend(rows)
            drawn = buffer.sample(batch)
            drawn.set("td_error", errors)
            buffer.update_tensordict_priority(drawn)

        return {
            "extend": lambda: buffer.extend(rows),
            "sample": lambda: buffer.sample(batch),
            "update": lambda: buffer.update_tensordict_priority(drawn),
            "extend + sample + update": cycle,
        }

    return calls


def cpprb_calls(cpprb: ModuleType, capacity: int) -> Callable[[int], Calls]:
    buffer = cpprb.PrioritizedReplayBuffer(capacity, torch_rows.field_specs(), alpha=ALPHA)
    rows = torch_rows.fields(torch_rows.transitions(min(capacity, 50_000)))
    for _ in range(-(-capacity // len(rows["obs"]))):
        buffer.add(**rows)
    buffer.update_priorities(np.arange(capacity), np.random.default_rng(0).random(capacity) + 1e-3)

    def calls(batch: int) -> Calls:
        rows = torch_rows.fields(torch_rows.transitions(batch))
        errors = np.random.default_rng(0).random(batch, np.float32) + np.float32(1e-3)
        indexes = buffer.sample(batch, BETA)["indexes"]

        def cycle() -> None:
            buffer.add(**rows)
            drawn = buffer.sample(batch, BETA)
            buffer.update_priorities(drawn["indexes"], errors)

        return {
            "extend": lambda: buffer.add(**rows),
            "sample": lambda: buffer.sample(batch, BETA),
            "update": lambda: buffer.update_priorities(indexes, errors),
            "extend + sample + update": cycle,
        }

    return calls


def plain_calls(ring: Any, form: Callable[[Any], Any]) -> Callable[[int], Calls]:
    """Of a ring of `plain.py`, and how it takes rows and numbers."""

    def calls(batch: int) -> Calls:
        rows, slots = form(torch_rows.transitions(batch)), ring.sample(batch)["index"]
        errors = torch.rand(batch) + 1e-3
        errors = errors if isinstance(slots, torch.Tensor) else errors.numpy()

        def cycle() -> None:
            ring.extend(rows)
            ring.update(ring.sample(batch)["index"], errors)

        return {
            "extend": lambda: ring.extend(rows),
            "sample": lambda: ring.sample(batch),
            "update": lambda: ring.update(slots, errors),
            "extend + sample + update": cycle,
        }

    return calls


def contenders(capacity: int) -> dict[str, Callable[[int], Calls]]:
    made = {measure.OURS: torch_calls(interop, capacity)}
    if cpprb := measure.rival("cpprb"):
        made["cpprb"] = cpprb_calls(cpprb, capacity)
    if torchrl := measure.rival("torchrl.data"):
        try:
            made["torchrl"] = torch_calls(torchrl, capacity)
        except RuntimeError as error:  # its compiled trees are not there
            print(f"torchrl is left out: {error}")
    rows = torch_rows.transitions(min(capacity, 50_000))
    for name, kind, form in (
        (plain.TORCH, plain.PrioritizedTorch, plain.tensors),
        (plain.NUMPY, plain.PrioritizedNumpy, plain.arrays),
    ):
        made[name] = plain_calls(kind(form(rows), capacity, ALPHA, BETA), form)
    return made


def main() -> None:
    options = measure.arguments("Through torch, by priority: is a cycle of replay faster than cpprb's?").parse_args()
    capacity = 100_000 if options.quick else 1_000_000
    timings = []
    sides = contenders(capacity)
    for batch in (256, 65_536):
        calls = {name: make(batch) for name, make in sides.items()}
        for operation in calls[measure.OURS]:
            one = {name: operations[operation] for name, operations in calls.items()}
            timings.append(measure.compare(f"{operation}, batch {batch}", one, quick=options.quick))
    measure.report(f"Through torch, prioritized, {capacity} rows of six leaves", timings, {}, options.json)


if __name__ == "__main__":
    main()

"""Through torch: how many rows a second, from small batches to large ones?

Transitions of six leaves in a full buffer of 10^6: `extend` then `sample`, and by priority the whole cycle of `extend`,
`sample` and update. The contenders are those of `torch_uniform.py` and `torch_prioritized.py`.
"""

from collections.abc import Callable
from typing import Any

import measure
import plain
import torch_prioritized
import torch_rows
import torch_uniform

import interop

BATCHES = (16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144)


def uniform(capacity: int) -> dict[str, Callable[[int], Callable[[], Any]]]:
    sides = {measure.OURS: interop}
    if torchrl := measure.rival("torchrl.data"):
        sides["torchrl"] = torchrl
    buffers = {
        name: torch_uniform.buffer_of(data, data.LazyTensorStorage(capacity), capacity) for name, data in sides.items()
    }
    buffers |= plain.rings(torch_rows.transitions(min(capacity, 50_000)), capacity)

    def maker(name: str) -> Callable[[int], Callable[[], Any]]:
        def make(batch: int) -> Callable[[], Any]:
            rows = plain.rows_for(name, torch_rows.transitions(batch))

            def call() -> None:
                buffers[name].extend(rows)
                buffers[name].sample(batch)

            return call

        return make

    return {name: maker(name) for name in buffers}


def prioritized(capacity: int) -> dict[str, Callable[[int], Callable[[], Any]]]:
    def cycle(make: Callable[[int], torch_prioritized.Calls]) -> Callable[[int], Callable[[], Any]]:
        return lambda batch: make(batch)["extend + sample + update"]

    return {name: cycle(make) for name, make in torch_prioritized.contenders(capacity).items()}


def main() -> None:
    options = measure.arguments("Through torch: rows a second, from small batches to large ones").parse_args()
    capacity = 20_000 if options.quick else 1_000_000
    timings = []
    for name, sides in (("uniform extend + sample", uniform), ("prioritized cycle", prioritized)):
        makers = sides(capacity)
        for batch in BATCHES:
            if batch <= capacity:
                calls = {contender: make(batch) for contender, make in makers.items()}
                timings.append(measure.compare(f"{name}, batch {batch}", calls, quick=options.quick))
    measure.report(f"Through torch, {capacity} rows of six leaves, by batch size", timings, {}, options.json)


if __name__ == "__main__":
    main()

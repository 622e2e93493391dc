"""What a meter costs a draw and a write, beside the same buffer without one, and what reading it costs."""

from collections.abc import Callable
from typing import Any

import measure
import torch_rows

import interop
from interop.metrics import Meter

BATCH, DRAWS = 256, 100


def uniform(capacity: int, **parts: Any) -> Any:
    buffer = interop.TensorDictReplayBuffer(storage=interop.LazyTensorStorage(capacity), batch_size=BATCH, **parts)
    torch_rows.fill(buffer, torch_rows.transitions(min(capacity, 50_000)), capacity)
    return buffer


def prioritized(capacity: int) -> Any:
    return uniform(capacity, sampler=interop.PrioritizedSampler(capacity, 0.6, 0.4))


def prefetching(capacity: int) -> Any:
    return uniform(capacity, prefetch=2)


def draw(buffer: Any) -> Callable[[], Any]:
    return buffer.sample  # type: ignore[no-any-return]


def write(buffer: Any) -> Callable[[], Any]:
    rows = torch_rows.transitions(BATCH)
    return lambda: buffer.extend(rows)


QUESTIONS = {
    "sample": (uniform, draw),
    "prioritized sample": (prioritized, draw),
    "sample with prefetch": (prefetching, draw),
    "extend": (uniform, write),
}


def _read_after(meter: Meter, buffer: Any) -> float:
    for _ in range(DRAWS):
        buffer.sample()
    return measure.seconds(meter.read)


def main() -> None:
    options = measure.arguments("A draw and a write with a meter and without").parse_args()
    capacity = 20_000 if options.quick else 1_000_000
    rounds = 20 if options.quick else 50
    timings, values = [], {}
    for name, (make, question) in QUESTIONS.items():
        plain, metered = make(capacity), make(capacity)
        meter = Meter(metered)
        sides = {measure.OURS: question(metered), "without a meter": question(plain)}
        timings.append(measure.compare(f"{name} {BATCH}", sides, quick=options.quick))
        meter.read()
        if question is draw:
            once = min(measure.seconds(meter.read) for _ in range(rounds))
            spent = min(_read_after(meter, metered) for _ in range(rounds))
            values[f"{name}: read, us a draw"] = (spent - once) / DRAWS * measure.MICROSECOND
            values[f"{name}: read of nothing, us"] = once * measure.MICROSECOND
        meter.close()
    measure.report(f"With a meter, batch {BATCH}, {capacity} rows of six leaves", timings, values, options.json)


if __name__ == "__main__":
    main()

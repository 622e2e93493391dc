"""What a rate limiter costs a draw and a write, beside the same buffer without one; and how fast two threads hand over."""

import threading
import time
from collections.abc import Callable
from typing import Any

import measure
import torch_rows

import interop

BATCH = 256
QUESTIONS = {
    "sample 256": (lambda buffer, _: buffer.sample),
    "extend 256": (lambda buffer, rows: lambda: buffer.extend(rows)),
}


def made(capacity: int, limiter: interop.RateLimiter | None) -> Any:
    buffer = interop.TensorDictReplayBuffer(
        storage=interop.LazyTensorStorage(capacity), batch_size=BATCH, limiter=limiter
    )
    torch_rows.fill(buffer, torch_rows.transitions(min(capacity, 50_000)), capacity)
    return buffer


def never_waits() -> interop.RateLimiter:
    return interop.RateLimiter(1, 1, (-1e15, 1e15))


def handed_over(capacity: int, turns: int) -> tuple[float, float]:
    """Microseconds a draw and a write of two threads that wait for each other, and the part of them that is waited."""
    limiter = interop.RateLimiter(1, 1, (0, 2 * BATCH))
    buffer = interop.TensorDictReplayBuffer(
        storage=interop.LazyTensorStorage(capacity), batch_size=BATCH, limiter=limiter
    )
    rows = torch_rows.transitions(BATCH)

    def run(call: Callable[[], Any]) -> None:
        for _ in range(turns):
            call()

    threads = [threading.Thread(target=run, args=(call,)) for call in (buffer.sample, lambda: buffer.extend(rows))]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    numbers = limiter.stats()
    waited = numbers["limiter/extend_wait_seconds"] + numbers["limiter/sample_wait_seconds"]
    return took / turns * measure.MICROSECOND, waited / took / 2


def main() -> None:
    options = measure.arguments("A draw and a write with a rate limiter and without").parse_args()
    capacity = 20_000 if options.quick else 1_000_000
    plain, limited = made(capacity, None), made(capacity, never_waits())
    rows = torch_rows.transitions(BATCH)
    timings = [
        measure.compare(
            name,
            {measure.OURS: question(limited, rows), "without a limiter": question(plain, rows)},
            quick=options.quick,
        )
        for name, question in QUESTIONS.items()
    ]
    turn, waited = handed_over(capacity, 200 if options.quick else 5_000)
    values = {"two threads in turns: us a draw and a write": turn, "two threads in turns: part waited": waited}
    measure.report(f"With a rate limiter, batch {BATCH}, {capacity} rows of six leaves", timings, values, options.json)


if __name__ == "__main__":
    main()

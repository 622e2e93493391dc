"""A buffer whose draws are limited by its writes, with the arguments of torchrl."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from interop.buffers.rate_limiter import RateLimiter, looks
from interop.buffers.replay_buffer import ReplayBuffer
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.arguments import whole
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.storages import Storage
from interop.transforms import Transform
from interop.writers import Writer


class RateLimitedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of which at most `samples_per_insert` items are drawn for each that is ever written.

    Writes never wait. `limiter` is `RateLimiter(samples_per_insert, 1, (0, math.inf), timeout=0)`; give a `RateLimiter` to
    any buffer for other limits, and for writes that wait. The count is saved, and is that of all processes which share the
    buffer.

    Args:
        samples_per_insert: above 0, and finite.

    The other arguments are those of `ReplayBuffer`; `prefetch` excludes the limit.
    """

    limiter: RateLimiter

    def __init__(
        self,
        *,
        samples_per_insert: float,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Transform | Callable[[Any], Any]] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: StorageCheckpointerBase | type[StorageCheckpointerBase] | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        transport: Literal["auto", "direct", "ray"] = "auto",
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            storage=storage,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            transform_factory=transform_factory,
            batch_size=batch_size,
            dim_extend=dim_extend,
            checkpointer=checkpointer,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            consume_after_n_samples=consume_after_n_samples,
            limiter=RateLimiter(samples_per_insert, 1, (0, math.inf), timeout=0),
            service_backend=service_backend,
            service_backend_options=service_backend_options,
            transport=transport,
            transport_options=transport_options,
        )

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether a batch may be drawn now. Does not wait. RuntimeError without a batch size."""
        size = self._batch_size if batch_size is None else whole("batch_size", batch_size)
        if size is None:
            raise RuntimeError(
                "batch_size not specified: give one to can_sample(), or to the constructor of the buffer"
            )
        return self.limiter.can_sample(size)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: threading.Event | None = None,
    ) -> Any:
        """`ReplayBuffer.sample`, if so many items may be drawn.

        Args:
            batch_size, return_info: as of `ReplayBuffer.sample`.
            wait: wait for writes of other threads and processes.
            timeout: seconds that it waits; None for no limit.
            cancel_event: ends the wait when it is set, by RuntimeError.

        Raises: RuntimeError without `wait` where the batch may not be drawn, TimeoutError when the time is over, and the
        errors of `ReplayBuffer.sample`.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be at least 0 seconds, or None, got {timeout}")
        refused: TimeoutError | None = None
        for _ in looks(time.monotonic(), timeout if wait else 0.0):
            if cancel_event is not None and cancel_event.is_set():
                raise RuntimeError("sample() was cancelled while it waited for writes")
            try:
                return super().sample(batch_size, return_info)
            except TimeoutError as error:
                refused = error
        if wait:
            raise TimeoutError(f"within {timeout} s: {refused}") from refused
        raise RuntimeError(f"{refused}. With wait=True it waits") from refused

    def stats(self, detail: bool = False) -> dict[str, int | float | bool]:
        """`ReplayBuffer.stats`, and by the names of torchrl the ratio so far, its target, what may be drawn, and waits."""
        limiter = self.limiter
        ratio = limiter.rule.samples_per_insert
        assert ratio is not None
        units = limiter.rule.units  # exact, as the limiter judges by them
        inserted, sampled = limiter.inserted, limiter.sampled
        return super().stats(detail) | {
            "target_samples_per_insert": ratio,
            "samples_per_insert": sampled / inserted if inserted else 0.0,
            "sample_budget": units.credit(inserted, sampled) // units.denominator,
            "sample_wait_count": limiter.waits["sample"],
        }

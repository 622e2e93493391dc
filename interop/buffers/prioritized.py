"""Replay buffers with a prioritized sampler."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from tensordict import NestedKey

from interop.buffers.components import made_component
from interop.buffers.rate_limiter import RateLimiter
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.arguments import class_of
from interop.sample_units import SampleUnit
from interop.samplers import PrioritizedSampler, Sampler
from interop.shared.storage_lock import locked
from interop.storages import ListStorage, Storage
from interop.transforms import Transform
from interop.writers import Writer


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws by priority (arXiv:1511.05952), for data of any kind.

    New items get the highest priority. `update_priority(info["index"], priority)` changes it, with the info of
    `sample(..., return_info=True)`.

    Args:
        alpha, beta, eps, dtype: as for `PrioritizedSampler`.
        storage: an instance; by default a `ListStorage` for 1000 items, or as many as a prioritized `sampler` has room for.
        sampler: replaces the one made from these arguments.
        sampler_device: device of the priorities; None follows the storage.
        sync: with False, other processes may write into the buffer: see below.

    The other arguments are those of `ReplayBuffer`.

    With `sync=False` the sampler stays in this process. Workers can only write: `sample`, `update_priority`, `dumps` and
    `loads` are RuntimeErrors there. Each call here first gives the rows that workers wrote the highest priority, in
    O(rows * log capacity). ValueError for a storage with several item dims, or with `delayed_init`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: Storage | None = None,
        sampler: Sampler | None = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
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
        limiter: RateLimiter | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        transport: Literal["auto", "direct", "ray"] = "auto",
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._workers_only_write = not sync
        if sampler is not None and sampler_device is not None:
            raise TypeError("sampler and sampler_device exclude each other: give the device to the sampler")
        if not isinstance(storage, Storage | None):
            raise TypeError(f"storage must be a Storage, got {class_of(storage)}")
        if sampler is None:
            storage = ListStorage(1000) if storage is None else storage
            sampler = PrioritizedSampler(_capacity(storage), alpha, beta, eps, dtype, device=sampler_device)
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
            limiter=limiter,
            service_backend=service_backend,
            service_backend_options=service_backend_options,
            transport=transport,
            transport_options=transport_options,
        )

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler, with the priorities of rows that other processes wrote."""
        with locked(self):
            return self.sampler


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that draws by priority (arXiv:1511.05952).

    Samples carry "index" and "priority_weight". The usual loop: sample, set `priority_key` in the sample,
    `update_tensordict_priority(sample)`.

    Args:
        alpha, beta, eps, reduction: as for `PrioritizedSampler`.
        storage: an instance, or a callable that makes it; `ListStorage(1000)` by default.
        sampler_device: device of the priorities; None follows the storage.
        sync: with False workers write and this process draws, as for `PrioritizedReplayBuffer`. `add` and `extend` then
            ignore priorities in the data: new rows get the highest one.
        compilable: passed to the default storage.

    The other arguments are those of `TensorDictReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        reduction: str = "max",
        compilable: bool = False,
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
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        limiter: RateLimiter | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        transport: Literal["auto", "direct", "ray"] = "auto",
        transport_options: Mapping[str, Any] | None = None,
        priority_key: NestedKey | None = "td_error",
    ) -> None:
        self._workers_only_write = not sync
        made_storage: Storage = made_component(
            "storage", storage, Storage, lambda: ListStorage(1000, compilable=compilable)
        )
        sampler = PrioritizedSampler(
            _capacity(made_storage), alpha, beta, eps, reduction=reduction, device=sampler_device
        )
        super().__init__(
            storage=made_storage,
            sampler=sampler,
            compilable=compilable,
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
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            consume_after_n_samples=consume_after_n_samples,
            limiter=limiter,
            service_backend=service_backend,
            service_backend_options=service_backend_options,
            transport=transport,
            transport_options=transport_options,
            priority_key=priority_key,
        )


def _capacity(storage: Storage) -> int:
    """The capacity for a sampler. ValueError if it is too large."""
    if storage.max_size >= 2**31:
        raise ValueError(
            f"priorities are kept for at most 2**31 - 1 items, the storage may take {storage.max_size}: give it a max_size"
        )
    return storage.max_size

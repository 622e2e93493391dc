"""The state of a buffer: its components and settings, as a tree of a checkpoint or as a `state_dict`."""

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch, Fields, Source, Writing
from interop.checkpoint.state import Apply, LoadOptions, Together, described, state_for
from interop.formats.torchrl_folder import TorchrlDump
from interop.storages import TensorStorage

if TYPE_CHECKING:
    from interop.buffers.replay_buffer import ReplayBuffer
    from interop.buffers.sampled import Sampled

KIND = "replay buffer"


def fields_of(tree: Any, where: str) -> Fields:
    """The fields of a saved buffer. CheckpointMismatch for a tree of something else."""
    fields = Fields(tree, where)
    if fields.text("kind") != KIND:
        raise CheckpointMismatch(f"{where}: was saved from a {fields.text('kind')}, not from a replay buffer")
    return fields


def settings(buffer: "Sampled") -> dict[str, Any]:
    """The part of a saved tree that buffers and ensembles have."""
    generator = buffer.generator
    return {
        "kind": KIND,
        "class": type(buffer).__name__,
        "batch_size": buffer.batch_size,
        "transforms": buffer.transform.saved(),
        "generator": None
        if generator is None
        else {"state": generator.get_state().numpy(), "device": str(generator.device)},
    }


def restoring_settings(buffer: "Sampled", fields: Fields, where: str, options: LoadOptions) -> list[Callable[[], None]]:
    """Check the settings in a saved tree; the returned functions load them."""
    size = None if fields.any("batch_size") is None else fields.whole("batch_size", 1, 2**31)
    return [
        buffer.transform.restoring(fields.any("transforms"), options),
        _restoring_generator(buffer.generator, fields.any("generator"), where),
        buffer.restoring_batch_size(size),
    ]


# ------------------------------------------------------------------ trees of checkpoints


def saved(buffer: "ReplayBuffer", out: Writing) -> dict[str, Any]:
    """The tree of a buffer; arrays are written to `out`. The lock is held."""
    return {
        **settings(buffer),
        "storage": buffer.storage.checkpointer.saved(buffer.storage, out),
        "sampler": described(buffer.sampler, buffer.sampler.saved()),
        "writer": described(buffer.writer, buffer.writer.saved()),
    }


def restoring(
    buffer: "ReplayBuffer", tree: Any, source: Source, options: LoadOptions, where: str, beside: Collection["Sampled"]
) -> Callable[[], None]:
    """Check a tree; the returned function loads it. Buffers `beside` load the storage if they have the same one."""
    fields = fields_of(tree, where)
    storage = buffer.storage
    sampler = state_for(buffer.sampler, fields.any("sampler"), f"{where}, sampler")
    writer = state_for(buffer.writer, fields.any("writer"), f"{where}, writer")
    parts: list[Apply] = [
        buffer.sampler.restoring(sampler, options),
        buffer.writer.restoring(writer, options),
        *restoring_settings(buffer, fields, where, options),
    ]
    # The rows are the last to be read, for they are the largest, and the first to be put in.
    if all(storage is not getattr(other, "storage", None) for other in beside):
        parts.insert(0, storage.checkpointer.restoring(storage, fields.any("storage"), source, options))
    return Together([buffer.drop_prefetched, *parts, partial(buffer.reloaded, beside)])


# ------------------------------------------------------------------ state dicts


def state_dict(buffer: "ReplayBuffer") -> dict[str, Any]:
    """A copy of the state as plain values and tensors. The lock is held."""
    generator = buffer.generator
    transforms = buffer.transform.state_dict()
    return {
        "_storage": buffer.storage.state_dict(),
        "_sampler": buffer.sampler.state_dict(),
        "_writer": buffer.writer.state_dict(),
        "_transforms": {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in transforms.items()
        },
        "_batch_size": buffer.batch_size,
        "_consume_after_n_samples": getattr(buffer.sampler, "max_sample_count", None),
        "_rng": None if generator is None else (generator.get_state(), str(generator.device)),
        "_prefetch_state": None,
    }


def restoring_dict(
    buffer: "ReplayBuffer",
    fields: Fields,
    where: str,
    options: LoadOptions,
    rows: Callable[[], Callable[[], None]] | None = None,
) -> Callable[[], None]:
    """Check a `state_dict`; the returned function loads it. `rows` checks and reads those that are not in it."""
    storage = buffer.storage
    for name in ("_sampler", "_writer"):
        if name not in fields:
            raise CheckpointMismatch(f"{where}: it is not the state of a buffer, the entry {name!r} is missing")
    rng = None if fields.any("_rng") is None else fields.items("_rng", 2)
    generator = None if rng is None else {"state": np.asarray(rng[0]), "device": rng[1]}
    size = None if fields.any("_batch_size") is None else fields.whole("_batch_size", 1, 2**31)
    parts: list[Apply] = [
        buffer.sampler.restoring_dict(fields.any("_sampler"), options),
        buffer.writer.restoring_dict(fields.any("_writer"), options),
        buffer.transform.restoring_dict(fields.any("_transforms"), f"{where}, transforms", options),
        _restoring_generator(buffer.generator, generator, where),
        buffer.restoring_batch_size(size),
    ]
    # The rows are the last, for they may take memory, and the first to be put in.
    parts.insert(0, storage.restoring_dict(fields.any("_storage")) if rows is None else rows())
    return Together([buffer.drop_prefetched, *parts, buffer.reloaded])


def restoring_dump(buffer: "ReplayBuffer", dump: TorchrlDump, options: LoadOptions) -> Callable[[], None]:
    """Check a folder that torchrl's `dumps` wrote; the returned function loads it."""
    with dump.named():
        state = dump.state(buffer.storage, buffer.sampler, buffer.writer)
        cursor, written = (state["_writer"].get(name) for name in ("_cursor", "_write_count"))
        storage = cast(TensorStorage, buffer.storage)  # `dump.state` has refused others
        rows = partial(dump.restoring_rows, storage, cursor, written, options)
        return restoring_dict(buffer, Fields(state, dump.where), dump.where, options, rows)


def _restoring_generator(generator: torch.Generator | None, saved: Any, where: str) -> Callable[[], None]:
    if saved is None or generator is None:  # where there is none, torch's global one goes on as it is
        return lambda: None
    state = Fields(saved, f"{where}, generator").array("state", np.uint8, (None,))
    tensor = torch.from_numpy(np.array(state))
    trial = torch.Generator(generator.device)
    try:
        trial.set_state(tensor)
    except RuntimeError as error:
        raise CheckpointMismatch(f"{where}: the state of the generator is none of a {generator.device} one") from error

    def put() -> None:
        generator.set_state(tensor)

    return put

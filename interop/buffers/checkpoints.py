"""The state of a buffer: its components and settings, as a tree of a checkpoint or as a `state_dict`."""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch, Fields, Writing
from interop.buffers.rate_limiter import RateLimiter
from interop.buffers.recipes import with_arguments
from interop.buffers.resizing import fitted
from interop.checkpoint.state import Apply, LoadOptions, Together, checked_state, described, key_of, state_for, state_of
from interop.samplers import Sampler
from interop.storages import Storage
from interop.transforms.chain import Compose
from interop.writers import Writer

KIND = "replay buffer"


class HasSettings(Protocol):
    """What checkpoints need of buffers and ensembles."""

    batch_size: int | None

    @property
    def generator(self) -> torch.Generator | None: ...
    @property
    def transform(self) -> Compose: ...


class HasComponents(HasSettings, Protocol):
    """What checkpoints need of buffers with one storage."""

    @property
    def storage(self) -> Storage: ...
    @property
    def sampler(self) -> Sampler: ...
    @property
    def writer(self) -> Writer: ...
    @property
    def dim_extend(self) -> int: ...
    @property
    def priority_key(self) -> object: ...
    @property
    def limiter(self) -> RateLimiter | None: ...
    def drop_prefetched(self) -> None: ...


def fields_of(tree: Any, where: str) -> Fields:
    """The fields of a saved buffer. CheckpointMismatch for a tree of something else."""
    fields = Fields(tree, where)
    if fields.text("kind") != KIND:
        raise CheckpointMismatch(f"{where}: was saved from a {fields.text('kind')}, not from a replay buffer")
    return fields


def settings(buffer: HasSettings) -> dict[str, Any]:
    """The part of a saved tree that buffers and ensembles have."""
    generator = buffer.generator
    return {
        "kind": KIND,
        "class": type(buffer).__name__,
        "batch_size": buffer.batch_size,
        "transforms": buffer.transform.state(),
        "transform_classes": [type(each).__name__ for each in buffer.transform],
        "generator": None
        if generator is None
        else {"state": generator.get_state().numpy(), "device": str(generator.device)},
    }


def with_settings(buffer: HasSettings, fields: Fields, options: LoadOptions) -> list[Apply]:
    """Check the settings in a saved tree; the returned functions put them in."""
    return [
        buffer.transform.with_state(fields.any("transforms"), options),
        _with_generator(buffer.generator, fields.any("generator"), fields.where),
        _with_batch_size(buffer, _saved_size(fields, "batch_size")),
    ]


def state(buffer: HasComponents, out: Writing | None) -> dict[str, Any]:
    """The tree of a buffer. With `out` the checkpointer writes the content of the storage. The lock is held."""
    storage = buffer.storage
    return {
        **settings(buffer),
        "arguments": _arguments(buffer),
        "storage": state_of(storage)
        if out is None
        else with_arguments(storage, storage.checkpointer.write(storage, out)),
        "sampler": with_arguments(buffer.sampler, described(buffer.sampler, state_of(buffer.sampler))),
        "writer": with_arguments(buffer.writer, described(buffer.writer, state_of(buffer.writer))),
        **({} if buffer.limiter is None else {"limiter": buffer.limiter.state()}),
    }


def _arguments(buffer: HasComponents) -> dict[str, Any]:
    """The plain arguments of a buffer that are no components, where they are not the default."""
    named = {"priority_key": buffer.priority_key} if hasattr(type(buffer), "update_tensordict_priority") else {}
    dims = {"dim_extend": buffer.dim_extend} if buffer.dim_extend != buffer.storage.ndim - 1 else {}
    return {name: key_of(value) for name, value in (named | dims).items()}


def with_state(buffer: HasComponents, tree: object, options: LoadOptions) -> Apply:
    """Check a result of `state`, or of `state_dict`; the returned function puts it in."""
    if is_state_dict(tree, options):
        return _with_state_dict(buffer, Fields(tree, "the state_dict of a buffer"), options)
    where = options.where
    fields = fields_of(tree, where)
    storage = buffer.storage
    if options.resize and isinstance(tree, Mapping):
        fits = fitted(storage, buffer.sampler, buffer.writer, fields, options)
        if fits:
            return with_state(buffer, {**tree, **fits}, replace(options, source=None, resize=False))
    sampler = state_for(buffer.sampler, fields.any("sampler"), f"{where}, sampler")
    writer = state_for(buffer.writer, fields.any("writer"), f"{where}, writer")
    parts: list[Apply] = [
        checked_state(buffer.sampler, sampler, _with_size(options, buffer, _saved_size(fields, "batch_size"))),
        checked_state(buffer.writer, writer, options),
        *with_settings(buffer, fields, options),
        *_with_rates(buffer, fields.any("limiter") if "limiter" in fields else None, where),
    ]
    # The rows are the last to be read, for they are the largest, and the first to be put in.
    if _loads_storage(buffer, options):
        content, source = fields.any("storage"), options.source
        rows: Apply = (
            checked_state(storage, content, options)
            if source is None
            else storage.checkpointer.read(storage, content, source, options)
        )
        parts.insert(0, rows)
    return Together([buffer.drop_prefetched, *parts, _reloaded(buffer, options.beside)])


def _reloaded(buffer: HasComponents, beside: Collection[object]) -> Apply:
    """The rows were replaced: other buffers on the storage, except those `beside`, start over.

    What samplers of users have is put back first, for an interrupted load is made again.
    """
    loaded = (buffer, *beside)
    others = [each for each in buffer.storage.followers.buffers() if all(each is not other for other in loaded)]
    of_users = [each.sampler.item_values for each in others if each.sampler.hooks.is_users]
    before = [(values, values.before_write()) for values in of_users]

    def start_over() -> None:
        storage = buffer.storage
        buffer.sampler.item_values.reloaded(storage)
        for values, held in before:
            values.put_back(held)
        storage.followers.start_over(storage, loaded)

    return start_over


def is_state_dict(tree: object, options: LoadOptions) -> bool:
    """Whether a tree is a result of `state_dict`, and not of `state`."""
    return options.source is None and isinstance(tree, Mapping) and "kind" not in tree


def settings_dict(buffer: HasSettings) -> dict[str, Any]:
    """The part of a `state_dict` that buffers and ensembles have."""
    generator = buffer.generator
    transforms = buffer.transform.state_dict()
    return {
        "_transforms": {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in transforms.items()
        },
        "_batch_size": buffer.batch_size,
        "_rng": None if generator is None else (generator.get_state(), str(generator.device)),
        "_prefetch_state": None,
    }


def with_settings_dict(buffer: HasSettings, fields: Fields, options: LoadOptions) -> list[Apply]:
    """Check the settings in a `state_dict`; the returned functions put them in."""
    rng = None if fields.any("_rng") is None else fields.items("_rng", 2)
    generator = None if rng is None else {"state": np.asarray(rng[0]), "device": rng[1]}
    return [
        buffer.transform.with_state(fields.any("_transforms"), options),
        _with_generator(buffer.generator, generator, fields.where),
        _with_batch_size(buffer, _saved_size(fields, "_batch_size")),
    ]


def state_dict(buffer: HasComponents) -> dict[str, Any]:
    """A copy of the state as plain values and tensors. The lock is held."""
    return {
        "_storage": buffer.storage.state_dict(),
        "_sampler": buffer.sampler.state_dict(),
        "_writer": buffer.writer.state_dict(),
        "_consume_after_n_samples": getattr(buffer.sampler, "max_sample_count", None),
        **settings_dict(buffer),
        **({} if buffer.limiter is None else {"_limiter": buffer.limiter.state()}),
    }


def _with_rates(buffer: HasComponents, saved: object, where: str) -> list[Apply]:
    """Check the counters of a limiter; the returned functions put them in, after those of the writer."""
    return [] if buffer.limiter is None else [buffer.limiter.with_state(saved, where)]


def _with_state_dict(buffer: HasComponents, fields: Fields, options: LoadOptions) -> Apply:
    for name in ("_sampler", "_writer"):
        if name not in fields:
            raise CheckpointMismatch(f"{fields.where}: it is not the state of a buffer, the entry {name!r} is missing")
    parts: list[Apply] = [
        checked_state(
            buffer.sampler,
            fields.any("_sampler"),
            _with_size(options, buffer, _saved_size(fields, "_batch_size")),
        ),
        checked_state(buffer.writer, fields.any("_writer"), options),
        *with_settings_dict(buffer, fields, options),
        *_with_rates(buffer, fields.any("_limiter") if "_limiter" in fields else None, fields.where),
    ]
    # The rows are the last, for they may take memory, and the first to be put in.
    if _loads_storage(buffer, options):
        parts.insert(0, checked_state(buffer.storage, fields.any("_storage"), options))
    return Together([buffer.drop_prefetched, *parts, _reloaded(buffer, options.beside)])


def _loads_storage(buffer: HasComponents, options: LoadOptions) -> bool:
    """Whether no buffer that is loaded before has the same storage."""
    return all(buffer.storage is not getattr(other, "storage", None) for other in options.beside)


def _saved_size(fields: Fields, name: str) -> int | None:
    return None if fields.any(name) is None else fields.whole(name, 1, 2**31)


def _with_size(options: LoadOptions, buffer: HasSettings, saved: int | None) -> LoadOptions:
    return replace(options, batch_size=buffer.batch_size if saved is None else saved)


def _with_batch_size(buffer: HasSettings, saved: int | None) -> Apply:
    """Warn of another batch size in a checkpoint; the returned function sets it."""
    size = buffer.batch_size if saved is None else saved
    if buffer.batch_size not in (None, size):  # before anything changes: a filter may raise the warning
        warnings.warn(
            f"the buffer had batch_size={buffer.batch_size}, the checkpoint has {size}, which counts",
            UserWarning,
            stacklevel=6,
        )
    return partial(setattr, buffer, "batch_size", size)


def _with_generator(generator: torch.Generator | None, saved: Any, where: str) -> Apply:
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

"""Startup of a remote buffer's processes on a Ray cluster."""

import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import cloudpickle

from fbuf import rate_limits
from interop.remote.errors import RemoteTimeoutError
from interop.remote.shards import GROUPS, Shards, answered, ray_library
from interop.samplers import Sampler
from interop.storages import Storage
from interop.writers import Writer


def recipe_of(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], shards: int) -> bytes:
    """Pickle the arguments from which each shard builds its buffer.

    TypeError for an argument that cannot be pickled, or a component instead of a constructor. ValueError for an argument
    that holds rows, or a `scratch_dir` that all shards would use.
    """
    for name in ("storage", "sampler", "writer"):
        given = kwargs.get(name)
        if shards > 1 and isinstance(given, Storage | Sampler | Writer):
            raise TypeError(
                f"{name} is one {type(given).__name__} for {shards} shards: pass a constructor, such as "
                f"functools.partial({type(given).__name__}, ...)"
            )
        if isinstance(given, Storage) and len(given):
            raise ValueError(f"storage holds {len(given)} items: pass a constructor, and write the items by extend()")
        # Only the arguments of a partial are visible here. Other shared folders fail at the lock of the storage.
        if shards > 1 and isinstance(given, partial) and "scratch_dir" in given.keywords:
            raise ValueError(
                f"{name}: {shards} shards would share scratch_dir={given.keywords['scratch_dir']!r}: pass a constructor "
                "with a parameter `shard`, which makes the name of the folder from it"
            )
    named = {"replay_buffer_cls": kind, **{f"argument {n}": each for n, each in enumerate(args)}, **kwargs}
    for name, given in named.items():
        try:
            cloudpickle.dumps(given)
        except Exception as error:
            raise TypeError(
                f"{name}: a {type(given).__name__} that cannot be pickled ({error}): pass a constructor instead, which "
                "makes it in the process of the shard"
            ) from error
    return bytes(cloudpickle.dumps((kind, args, kwargs)))


def started(
    recipe: bytes,
    count: int,
    options: dict[str, Any],
    recovery_dir: str | None,
    timeout: float,
    init: Mapping[str, Any] | None,
    rule: rate_limits.RateLimiter | None = None,
) -> Shards:
    """Start `count` shards and their coordinator, and Ray itself with `init` if it is not running.

    RemoteTimeoutError if the cluster has no room for them within `timeout` seconds, and the error of a constructor. After
    an error no process is left running.
    """
    ray = ray_library()
    from interop.remote.actor import ShardActor
    from interop.remote.coordinator import Coordinator

    if not ray.is_initialized():
        ray.init(**(init or {}))
    until, name = time.monotonic() + timeout, f"replay-buffer-{secrets.token_hex(8)}"
    # Shards look it up by name: a restarting actor must not depend on a handle in the object store.
    coordinator = ray.remote(num_cpus=0, max_restarts=-1, name=name)(Coordinator).remote(count, rule)
    kind = ray.remote(**{"max_restarts": -1, "max_task_retries": 0, "concurrency_groups": GROUPS, **options})(
        ShardActor
    )
    processes = [kind.remote(number, count, recipe, name, recovery_dir) for number in range(count)]
    made = Shards(processes, coordinator, [], on_cpu=not options.get("num_gpus"))
    try:
        for number, asked in enumerate(
            [each.facts.options(concurrency_group="control").remote() for each in processes]
        ):
            made.facts.append(answered(asked, until, f"shard {number}", "facts"))
    except RemoteTimeoutError as error:
        needed = {name: options[name] for name in ("num_cpus", "num_gpus", "memory", "resources") if options.get(name)}
        raise RemoteTimeoutError(
            f"{count} shards with {needed} each did not start within {timeout} s; free in the cluster: "
            f"{ray.available_resources()}: reserve less by remote_config, start fewer shards or, on a slow machine, "
            "raise timeout"
        ) from error
    finally:
        if len(made.facts) < count:
            made.kill()
    if rule is not None:
        made.is_limited = True
        made.begin_rates(None)
    return made

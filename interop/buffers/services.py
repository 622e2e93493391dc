"""Where a constructor puts a buffer: into this process, or into Ray actors behind a `RayReplayBuffer`."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from interop.data.arguments import class_of, refuse_unknown
from interop.data.keys import nearest

# Arguments of `RayReplayBuffer` that the constructor of a buffer takes under the same name.
_SHARED = ("replay_buffer_cls", "transport", "transport_options", "delayed_init", "prefetch", "limiter")


def in_ray(
    kind: type,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    options: Mapping[str, Any] | None,
    transport: str,
    transport_options: Mapping[str, Any] | None,
) -> object:
    """The `RayReplayBuffer` over buffers of a class, for a constructor call with `service_backend="ray"`.

    TypeError for arguments that neither the class nor Ray takes; the errors of `RayReplayBuffer`. All of them before a
    process is started.
    """
    ray_buffer = sys.modules["interop"].RayReplayBuffer  # imports the family: buffers without Ray do not load it
    parameters = inspect.signature(ray_buffer.__init__).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name not in _SHARED]
    if not isinstance(options, Mapping | None):
        raise TypeError(f"service_backend_options must be a dict or None, got {class_of(options)}")
    if unknown := [name for name in options or {} if name not in known]:
        raise TypeError(
            f"service_backend_options has no {unknown[0]!r}{nearest(unknown[:1], known)}. It takes {', '.join(known)}"
        )
    if misplaced := [name for name in kwargs if name in (*known, "replay_buffer_cls")]:
        raise TypeError(
            f"{misplaced[0]} is an argument of RayReplayBuffer: give it in service_backend_options, or construct a "
            f"RayReplayBuffer(replay_buffer_cls={kind.__name__}, ...)"
        )
    refuse_unknown(kind, kwargs)
    return ray_buffer(
        *args,
        replay_buffer_cls=kind,
        transport=transport,
        transport_options=transport_options,
        **(options or {}),
        **kwargs,
    )


def refuse_remote(
    kind: type,
    backend: str | None,
    options: Mapping[str, Any] | None,
    transport: str,
    transport_options: Mapping[str, Any] | None,
) -> None:
    """ValueError for arguments that a buffer in this process does not have."""
    if backend == "ray":  # a call with it does not come here, unless a subclass passes it on
        raise ValueError(
            f"service_backend='ray' must be an argument of {kind.__name__}(...) itself: __init__() of a subclass comes too "
            f"late to make another object. Use RayReplayBuffer(replay_buffer_cls={kind.__name__}, ...)"
        )
    if backend not in (None, "direct"):
        raise ValueError(f"service_backend must be 'direct' or 'ray', got {backend!r}")
    if options:
        raise ValueError(
            f"service_backend_options={dict(options)} are of service_backend='ray': this buffer is in the process itself"
        )
    if transport not in ("auto", "direct"):
        raise ValueError(
            f"transport={transport!r} is of service_backend='ray': a buffer in the process itself takes 'auto' or 'direct'"
        )
    if transport_options:
        raise ValueError(
            f"transport_options={dict(transport_options)} are of service_backend='ray': nothing is sent inside a process"
        )

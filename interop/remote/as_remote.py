"""Ray actor classes of replay buffers."""

from collections.abc import Mapping
from typing import Any

from interop.data.arguments import class_of, required
from interop.remote.cluster import options_of


def as_remote(buffer_class: type, remote_config: Mapping[str, Any] | None) -> Any:
    """Make a Ray actor class of a buffer class. See `ReplayBuffer.as_remote`."""
    if not isinstance(remote_config, Mapping | None):
        raise TypeError(f"remote_config must be a dict of options of ray.remote or None, got {class_of(remote_config)}")
    ray = required("ray", "ray")
    if remote_config is None:
        remote_config = options_of(None)
    made = ray.remote(**remote_config)(buffer_class) if remote_config else ray.remote(buffer_class)
    made.is_remote = True
    kind: Any = type(made)
    kind.__repr__ = object.__repr__  # the inherited one reads components
    return made

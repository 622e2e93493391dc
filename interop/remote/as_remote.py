"""Classes of replay buffers as classes of Ray actors."""

from collections.abc import Mapping
from typing import Any

import torch

from interop.class_names import class_of
from interop.optional import required


def as_remote(buffer_class: type, remote_config: Mapping[str, Any] | None) -> Any:
    """A Ray actor class of a buffer class. See `ReplayBuffer.as_remote`."""
    if not isinstance(remote_config, Mapping | None):
        raise TypeError(f"remote_config must be a dict of options of ray.remote or None, got {class_of(remote_config)}")
    ray = required("ray", "ray")
    if remote_config is None:
        gpus = 0.2 if torch.cuda.is_available() else None
        remote_config = {"num_cpus": 1, "num_gpus": gpus, "memory": 2 * 1024**3}
    made = ray.remote(**remote_config)(buffer_class) if remote_config else ray.remote(buffer_class)
    made.is_remote = True
    kind: Any = type(made)
    kind.__repr__ = object.__repr__  # it inherits that of buffers, which reads their components
    return made

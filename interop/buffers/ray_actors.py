"""Ray actor classes of replay buffers, and their options."""

from collections.abc import Mapping
from typing import Any

import torch

from interop.data.arguments import class_of, required


def actor_class(buffer_class: type, remote_config: Mapping[str, Any] | None) -> Any:
    """Make a Ray actor class of a buffer class. See `ReplayBuffer.as_remote`."""
    if not isinstance(remote_config, Mapping | None):
        raise TypeError(f"remote_config must be a dict of options of ray.remote or None, got {class_of(remote_config)}")
    ray = required("ray", "ray")
    if remote_config is None:
        remote_config = actor_options(None)
    made = ray.remote(**remote_config)(buffer_class) if remote_config else ray.remote(buffer_class)
    made.is_remote = True
    kind: Any = type(made)
    kind.__repr__ = object.__repr__  # the inherited one reads components
    return made


def actor_options(remote_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Actor options: by default one CPU, 2 GiB and, with CUDA, a fifth of a GPU."""
    gpu = {"num_gpus": 0.2} if torch.cuda.is_available() else {}
    return {"num_cpus": 1, "memory": 2 << 30, **gpu, **(remote_config or {})}

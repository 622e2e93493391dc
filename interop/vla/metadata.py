"""What is known of a dataset of robots: its robot, its actions, and the entries of its tensordicts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from tensordict import TensorClass
from tensordict.utils import NestedKey

from interop.specs import Bounded, Unbounded
from interop.specs.spec import TensorSpec

ActionSpace = Literal["joint_delta", "joint_position", "eef_delta", "eef_pose", "velocity", "mixed", "unknown"]
GripperMode = Literal["continuous", "binary", "none", "unknown"]
_STATISTICS = ("action_mean", "action_std", "action_low", "action_high")


class RobotDatasetMetadata(TensorClass["nocast"]):  # type: ignore[name-defined]
    """The metadata of a dataset of robots, as one object that tokenizers and specs are built of.

    - dataset_id, embodiment_id, license, source_url: names.
    - action_dim: the number of action dims. action_names: a name for each.
    - action_space: what an action is; gripper_mode: what the dim of the gripper is.
    - control_frequency_hz: steps in a second.
    - camera_keys, state_key, instruction_key, action_key: entries of the tensordicts.
    - action_mean, action_std, action_low, action_high: float [action_dim].

        >>> metadata = RobotDatasetMetadata(dataset_id="arm", action_low=torch.zeros(7), action_high=torch.ones(7))
        >>> metadata.make_action_spec(shape_prefix=(4,)).shape
        torch.Size([4, 7])

    ValueError for an unknown action space or gripper mode, and for statistics and names that are not of `action_dim`. It
    follows from the statistics where it is not given.
    """

    dataset_id: str
    embodiment_id: str | None = None
    action_dim: int | None = None
    action_names: tuple[str, ...] | None = None
    action_space: ActionSpace = "unknown"
    gripper_mode: GripperMode = "unknown"
    control_frequency_hz: float | None = None
    camera_keys: tuple[NestedKey, ...] = ()
    state_key: NestedKey | None = ("observation", "state")
    instruction_key: NestedKey | None = "language_instruction"
    action_key: NestedKey = "action"
    action_mean: torch.Tensor | None = None
    action_std: torch.Tensor | None = None
    action_low: torch.Tensor | None = None
    action_high: torch.Tensor | None = None
    license: str | None = None
    source_url: str | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("action_space", ActionSpace), ("gripper_mode", GripperMode)):
            value = getattr(self, name)
            if value not in get_args(kinds):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}; got {value!r}")
        sizes = {name: len(self.action_names) for name in ("action_names",) if self.action_names is not None}
        for name in _STATISTICS:
            value = getattr(self, name)
            if value is not None:
                if value.ndim != 1:
                    raise ValueError(f"{name} must be [action_dim], got shape {list(value.shape)}")
                sizes[name] = len(value)
        known = self.action_dim
        if known is None and sizes:
            known = self.action_dim = next(iter(sizes.values()))
        for name, size in sizes.items():
            if size != known:
                raise ValueError(f"{name} has {size} values, but actions have {known} dims")

    def make_action_spec(
        self, *, shape_prefix: Sequence[int] = (), device: torch.device | str | None = None
    ) -> TensorSpec:
        """The spec of actions, [*shape_prefix, action_dim]: bounded where both bounds are known. ValueError without dims."""
        if self.action_dim is None:
            raise ValueError(f"the metadata of {self.dataset_id!r} has no action_dim, which a spec of actions needs")
        shape = torch.Size([*shape_prefix, self.action_dim])
        if self.action_low is None or self.action_high is None:
            return Unbounded(shape=shape, dtype=torch.float32, device=device)
        low, high = (each.to(device).expand(shape) for each in (self.action_low, self.action_high))
        return Bounded(low=low, high=high, shape=shape, dtype=low.dtype, device=device)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The metadata as JSON, which `from_json` reads. With a path it is written there too."""
        values = {name: _plain(getattr(self, name)) for name in type(self).__annotations__}
        text = json.dumps(values, indent=2)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> RobotDatasetMetadata:
        """Metadata from JSON, or from the file at a path. Unknown names are ignored: a later version may write more.

        ValueError for other than a JSON object with a "dataset_id".
        """
        text = (
            source if isinstance(source, str) and source.lstrip()[:1] in ("{", "[") else Path(source).read_text("utf-8")
        )
        values = json.loads(text)
        if not isinstance(values, dict) or not isinstance(values.get("dataset_id"), str):
            raise ValueError(f"the JSON of metadata is an object with a text 'dataset_id', got {text[:80]!r}")
        known = {name: values[name] for name in cls.__annotations__ if values.get(name) is not None}
        for name in _STATISTICS:
            if name in known:
                known[name] = torch.tensor(known[name], dtype=torch.float32)
        for name in ("state_key", "instruction_key", "action_key"):
            if name in known:
                known[name] = _key(known[name])
            elif name in values:
                known[name] = None
        if "camera_keys" in known:
            known["camera_keys"] = tuple(map(_key, known["camera_keys"]))
        if "action_names" in known:
            known["action_names"] = tuple(known["action_names"])
        return cls(**known, batch_size=[])


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _key(saved: str | list[str]) -> NestedKey:
    return saved if isinstance(saved, str) else tuple(saved)

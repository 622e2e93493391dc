"""Columns of LeRobot, by their dotted names, as a tensordict of a robot."""

from collections.abc import Mapping

import torch
from tensordict import NonTensorStack, TensorDict
from tensordict.utils import NestedKey

from interop.data.arguments import class_of

_IMAGES = "observation.images."
_ENTRIES: dict[str, NestedKey] = {
    "action": "action",
    "episode_index": "episode",
    "frame_index": "frame",
    "task": "language_instruction",
}


def lerobot_columns_to_tensordict(
    columns: Mapping[str, object], *, key_map: Mapping[str, NestedKey] | None = None
) -> TensorDict:
    """Columns of LeRobot as a tensordict [frames], whose entries `validate_vla_tensordict` looks for.

    "observation.images.top" becomes ("observation", "image", "top"), "episode_index" "episode", "frame_index" "frame",
    "task" "language_instruction"; the dots of other names divide nested keys. Tensors are not copied.

    Args:
        columns: each a tensor [frames, ...], a list of texts, or a `VideoClipRef` of frames.
        key_map: other entries for some columns.

    Example:
        >>> columns = {"observation.state": torch.zeros(2, 7), "episode_index": torch.zeros(2), "task": ["pick", "pick"]}
        >>> sorted(lerobot_columns_to_tensordict(columns).keys())
        ['episode', 'language_instruction', 'observation']

    ValueError for no column, or columns of other lengths; TypeError for another value.
    """
    lengths = {name: _length(name, value) for name, value in columns.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"columns must have one length, got {lengths}"
            if lengths
            else "columns is empty: it says no number of frames"
        )
    rows = TensorDict({}, [next(iter(lengths.values()))])
    for name, value in columns.items():
        key = (key_map or {}).get(name, _entry(name))
        rows[key] = NonTensorStack(*value) if isinstance(value, list | tuple) else value
    return rows


def _entry(name: str) -> NestedKey:
    if name in _ENTRIES:
        return _ENTRIES[name]
    if name.startswith(_IMAGES):
        return ("observation", "image", *name.removeprefix(_IMAGES).split("."))
    parts = tuple(name.split("."))
    return parts[0] if len(parts) == 1 else parts


def _length(name: str, value: object) -> int:
    if (isinstance(value, torch.Tensor) and value.ndim) or isinstance(value, list | tuple):
        return len(value)
    shape: tuple[int, ...] = tuple(getattr(value, "batch_size", ()))
    if not shape:
        raise TypeError(
            f"column {name!r} must be a tensor [frames, ...], a list of texts or a VideoClipRef, got {class_of(value)}"
        )
    return shape[0]

"""The features of a LeRobot dataset that is written: the entries of a buffer under upstream's names, kinds and columns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict.utils import NestedKey

from interop.data.arguments import required
from interop.data.keys import as_path
from interop.data.trajectory_keys import KeyPath
from interop.datasets.export_formats import FileFormat, refuse_names
from interop.datasets.image_entries import ImageEntry, image_column, image_paths
from interop.datasets.stored_episodes import Kind, StoredEpisodes

if TYPE_CHECKING:
    import pyarrow as pa

LEROBOT = FileFormat("LeRobot")
NUMBERING = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""The features that every dataset has, by name: the time of a row in seconds, and numbers that start from 0."""
TASK: KeyPath = ("task",)
_FLAGS = ("done", "terminated", "truncated")
_RESULTS = ("reward", *_FLAGS)
_MOST_DIMS = 5  # of the arrays of upstream


@dataclass(frozen=True)
class WrittenFeature:
    """A feature, and the entry that it is made of. `kind` is upstream's `dtype`; `image` is that of images and videos."""

    name: str
    path: KeyPath
    kind: str
    shape: tuple[int, ...]
    image: ImageEntry | None = None

    @property
    def is_video(self) -> bool:
        return self.kind == "video"

    def described(self) -> dict[str, Any]:
        """The feature as `meta/info.json` has it."""
        names = None if self.image is None else ["height", "width", "channels"]
        return {"dtype": self.kind, "shape": [*self.shape], "names": names}

    def library_feature(self) -> dict[str, Any]:
        """The feature as the library `datasets` describes a column."""
        if self.image is not None:
            return {"_type": "Image"}
        value = {"dtype": self.kind, "_type": "Value"}
        if self.shape == (1,):
            return value
        if len(self.shape) == 1:
            return {"feature": value, "length": self.shape[0], "_type": "Sequence"}
        return {"shape": [*self.shape], "dtype": self.kind, "_type": f"Array{len(self.shape)}D"}

    def column(self, values: "np.ndarray | list[str]") -> "pa.Array":
        """Values of rows as a column: numbers, text, lists of lists, or PNG images."""
        pa = required("pyarrow", "datasets")
        if isinstance(values, list):
            return pa.array(values, pa.string())
        if self.image is not None:
            return image_column(self.image.pixels(values))
        flat = pa.array(values.reshape(-1))
        if self.shape == (1,):
            return flat
        if len(self.shape) == 1:
            return pa.FixedSizeListArray.from_arrays(flat, self.shape[0])
        for size in self.shape[::-1]:
            flat = pa.ListArray.from_arrays(pa.array(np.arange(0, len(flat) + 1, size, dtype=np.int32)), flat)
        return flat


def described_features(features: Sequence[WrittenFeature]) -> dict[str, dict[str, Any]]:
    """All features as `meta/info.json` has them, with those that number the rows."""
    numbering = {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in NUMBERING.items()}
    return {feature.name: feature.described() for feature in features} | numbering


def features_to_write(
    stored: StoredEpisodes,
    image_keys: Collection[NestedKey],
    names: Mapping[NestedKey, str],
    *,
    use_videos: bool,
    next_observations: bool,
) -> tuple[list[WrittenFeature], bool]:
    """The features of a buffer, and whether its rows have their own task. The errors are those of `to_lerobot`."""
    kinds = LEROBOT.kinds(stored)
    images = image_paths(image_keys, kinds)
    renamed = {as_path(key): name for key, name in names.items()}
    for path in renamed:
        if path not in kinds:
            raise KeyError(f"{path} of names is not stored; there are {', '.join(map(repr, kinds))}")
    has_tasks = TASK in kinds and kinds[TASK][0] == "text"
    chosen = {
        path: kind
        for path, kind in kinds.items()
        if path in images
        or path in renamed
        or not _is_derived(path, kinds, stored, next_observations=next_observations)
    }
    features = [
        _feature(path, kind, renamed.get(path), use_videos=use_videos, is_image=path in images)
        for path, kind in chosen.items()
        if not (path == TASK and has_tasks)
    ]
    _check_names(features)
    return features, has_tasks


def _is_derived(
    path: KeyPath, kinds: Mapping[KeyPath, Kind], stored: StoredEpisodes, *, next_observations: bool
) -> bool:
    """Whether a reader derives the entry, or the files have it as the number of an episode or a row."""
    if len(path) == 1:
        if path[0] in NUMBERING or (path[0] == "episode" and path in stored.marked_by):
            return True
        return path[0] in _FLAGS and isinstance(kinds[path][0], torch.dtype) and not stored.is_ever_set(path)
    return path[0] == "next" and path[1] not in _RESULTS and path[1:] in kinds and not next_observations


def _feature(path: KeyPath, kind: Kind, name: str | None, *, use_videos: bool, is_image: bool) -> WrittenFeature:
    if name is None:
        if any("." in step for step in path):
            raise ValueError(f"{path} has a dot in a name, which would be read as a nested entry: rename it by names=")
        name = ".".join(path)
    if is_image:
        image = ImageEntry.of(path, kind)
        if use_videos and image.channels != 3:
            raise TypeError(
                f"{path} has images of {image.channels} channels, a video has 3: pass use_videos=False, or convert it"
            )
        if not use_videos and image.channels not in (1, 3):
            raise TypeError(f"{path} has images of {image.channels} channels, LeRobot has 1 or 3: convert it")
        shape = (image.height, image.width, image.channels)
        return WrittenFeature(name, path, "video" if use_videos else "image", shape, image)
    if kind[0] == "text":
        return WrittenFeature(name, path, "string", (1,))
    if len(kind[1]) > _MOST_DIMS:
        raise TypeError(f"{path} has rows of {len(kind[1])} dims, LeRobot has at most {_MOST_DIMS}: flatten it")
    return WrittenFeature(name, path, str(kind[0]).removeprefix("torch."), kind[1] or (1,))


def _check_names(features: Sequence[WrittenFeature]) -> None:
    """ValueError for names that upstream or the loader here does not take."""
    by_name: dict[str, KeyPath] = {}
    for feature in features:
        if not isinstance(feature.name, str) or not feature.name or "/" in feature.name:
            raise ValueError(f"{feature.path}: the name of a feature is text without a slash, got {feature.name!r}")
        if feature.name in NUMBERING or feature.name == "task":
            raise ValueError(
                f"{feature.path} cannot be named {feature.name!r}, which numbers the rows: rename it by names="
            )
        if feature.name in by_name:
            raise ValueError(f"{by_name[feature.name]} and {feature.path} are both named {feature.name!r}: rename one")
        by_name[feature.name] = feature.path
    refuse_names({tuple(feature.name.split(".")): feature.path for feature in features}, "feature")

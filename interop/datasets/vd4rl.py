"""V-D4RL: image observations of control tasks, in `.npz` episodes or HDF5 shards on the Hugging Face hub."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from interop.datasets import npz
from interop.datasets.errors import CorruptDatasetError, DownloadError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.grouping import grouped, ranges
from interop.datasets.hdf5 import arrays, datasets, opened
from interop.datasets.hub import hub_download, hub_files, local_files
from interop.datasets.rows import following, nested, zeroed
from interop.datasets.source import Part, Source
from interop.transforms import Resize, ToTensorImage, Transform

_REPO, _TOP = "conglu/vd4rl", "vd4rl/"
_SUFFIXES = (".npz", ".hdf5")
_LAST = 2  # `step_type` of an episode's last step
_KEYS: dict[str, Any] = {  # upstream name -> key; other names become ("state", name)
    "image": "pixels", "observation": "pixels", "action": "action", "discount": "discount", "is_first": "is_init",
    "is_last": ("next", "done"), "is_terminal": ("next", "terminated"), "reward": ("next", "reward"),
}  # fmt: skip
_KNOWN = [  # the 64 x 64 pixel datasets on the hub, if it is unreachable
    *(f"distracting/walker_walk_random/64px/{level}" for level in ("easy", "hard", "medium")),
    *(f"main/{task}/{quality}/64px" for task in ("cheetah_run", "humanoid_walk", "walker_walk")
      for quality in ("expert", "medium", "medium_expert", "medium_replay", "random")),
    *(f"multitask/{task}_random/64px" for task in ("cheetah_run", "walker_walk")),
]  # fmt: skip


class _Available:
    """The ids on the hub; those of 64 x 64 pixels if it is unreachable."""

    def __get__(self, instance: object, owner: type | None = None) -> list[str]:
        try:
            paths = [Path(file.path.removeprefix(_TOP)) for file in hub_files(_REPO, _TOP)]
        except DownloadError:
            return _KNOWN
        return sorted({path.parent.as_posix() for path in paths if path.suffix in _SUFFIXES})


@dataclass(frozen=True)
class VD4RLSource(Source):
    """The files of a V-D4RL folder: each is an episode, or a shard of many episodes."""

    family: ClassVar[str] = "vd4rl"

    def download(self, folder: Path) -> Mapping[str, str]:
        files = [file for file in hub_files(_REPO, f"{_TOP}{self.dataset_id}/") if Path(file.path).suffix in _SUFFIXES]
        if not files:
            raise ValueError(unknown_id("V-D4RL", self.dataset_id, VD4RLExperienceReplay.available_datasets))
        return hub_download(_REPO, files, folder)

    def parts(self, folder: Path) -> Sequence[Part]:
        files = local_files(folder, f"{_TOP}{self.dataset_id}/", *_SUFFIXES)
        return grouped(folder, (piece for path in files for piece in _pieces(path)))

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        for path, first, last in part.which:
            if path.suffix == ".npz":
                found: Mapping[str, Any] = npz.arrays_of(path)
            else:
                with opened(path) as file:
                    found = arrays(file, slice(first, last + 1))
            yield _rows(found, last - first, f"{path}, from row {first}")


def _pieces(path: Path) -> Iterator[tuple[tuple[Path, int, int], int, int]]:
    """Yield ((path, first, last), rows, bytes) for ranges of rows of a file. An episode is one range."""
    if path.suffix == ".npz":
        rows = np.size(npz.arrays_of(path, ["reward"])["reward"])
        yield (path, 0, rows), rows, path.stat().st_size
        return
    with opened(path) as file:
        held = datasets(file)
        if "reward" not in held:
            raise CorruptDatasetError(f"{path} has no reward for each step: no file of V-D4RL")
        rows, size = held["reward"].size, sum(each.nbytes for each in held.values())
    for first, last in ranges(rows, size):
        yield (path, first, last), last - first, size * (last - first) // rows


def _rows(found: Mapping[str, Any], count: int, where: str) -> TensorDict:
    """The first `count` rows. An extra row, if present, is the next row of the last one."""
    if {"reward", "action"} - found.keys() or not {"image", "observation"} & found.keys():
        raise CorruptDatasetError(f"{where}: there are no images, actions or rewards, only {', '.join(found)}")
    rows = nested(found, np.size(found["reward"]), where)
    every = TensorDict({_KEYS.get(name, ("state", name)): each for name, each in rows.items()}, rows.batch_size)
    after = following(every.select("pixels", "state", strict=False))[:count]
    out = every[:count]
    given = out.pop("next")
    if "step_type" in found:
        after = zeroed(after, out["state", "step_type"] == _LAST)
    after["reward"] = given["reward"].reshape(-1, 1)
    if "done" in given and "terminated" in given:
        done, terminated = (given[key].bool().reshape(-1, 1) for key in ("done", "terminated"))
        after.update({"done": done, "terminated": terminated, "truncated": done & ~terminated})
        out.update(dict.fromkeys(("done", "terminated", "truncated"), torch.zeros_like(done)))
    out["next"] = after
    return out


class VD4RLExperienceReplay(BaseDatasetExperienceReplay):
    """V-D4RL: control from pixels (arXiv:2206.04779), from the Hugging Face hub.

    The licence is that of https://huggingface.co/datasets/conglu/vd4rl. Rows are in file order.

    | key | content |
    |---|---|
    | "pixels" | uint8 [64, 64, 3]; [3, 84, 84] for 84px. Samples are float32 [3, height, width] with `totensor` |
    | "action", "discount" | float32, as upstream |
    | "state" | other entries of upstream, nested |
    | ("next", "pixels"), ("next", "state") | those of the next row; zeros in the last row of an episode |
    | ("next", "reward") | float32 [1] |
    | "is_init" | bool []: first step of an episode |
    | ("next", "done"), ("next", "terminated"), ("next", "truncated") | bool [1]: last; terminal; last but not terminal |
    | "done", "terminated", "truncated" | bool [1], False |

    Datasets of 84px have no flags and no `split_trajs`. Their episodes end at ("state", "step_type") 2.

    Args:
        dataset_id: one of `available_datasets`, which queries the hub, such as "main/walker_walk/random/64px". Any name with
            `from_local`.
        totensor: append a `ToTensorImage` of the pixels, unless there is one.
        image_size: append a `Resize` of the pixels to a square, or to a height and width.
        transform: applied before these.
        from_local: a folder with files `*.npz` or `*.hdf5`, or a copy of the repository.
        **more: as for `BaseDatasetExperienceReplay`, also for errors. ValueError for an unknown id.
    """

    available_datasets = _Available()

    def __init__(
        self, dataset_id: str, batch_size: int | None = None, *, totensor: bool = True,
        image_size: int | Sequence[int] | None = None, transform: Transform | Callable[[Any], Any] | None = None,
        split_trajs: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        if split_trajs and "84px" in Path(dataset_id).parts:
            raise ValueError(
                'split_trajs needs ("next", "done"), which the datasets of 84px do not have: load the rows, whose episodes '
                'end where ("state", "step_type") is 2'
            )
        if image_size is not None and not totensor and transform is None and "84px" not in Path(dataset_id).parts:
            raise ValueError(
                "image_size needs totensor=True, or a transform that moves the channels: stored are [height, width, 3]"
            )
        source = VD4RLSource(dataset_id)
        super().__init__(source, batch_size, transform=transform, split_trajs=split_trajs, **more)
        pixels: Any = ["pixels", ("next", "pixels")]
        if totensor and not any(isinstance(each, ToTensorImage) for each in self.transform):
            self.append_transform(ToTensorImage(in_keys=pixels, shape_tolerant=True))
        if image_size is not None:
            self.append_transform(Resize(image_size, in_keys=pixels))

"""V-D4RL: image observations of control tasks, in `.npz` episodes or HDF5 shards on the Hugging Face hub."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey

from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.datasets import npz
from interop.datasets.errors import CorruptDatasetError, DownloadError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.grouping import grouped, ranges
from interop.datasets.hdf5 import arrays, datasets, opened, values
from interop.datasets.hub import hub_download, hub_files, local_files
from interop.datasets.hub_ids import AskedIds
from interop.datasets.rows import nested
from interop.datasets.source import Part, Source
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.transforms import Resize, ToTensorImage, Transform
from interop.writers import Writer

_REPO = "conglu/vd4rl"
_TOP = "vd4rl/"
_SUFFIXES = (".npz", ".hdf5")
# Values of `step_type`.
_FIRST = 0
_LAST = 2
_FLAGS = ("is_first", "is_last", "is_terminal")
_SINGLE = ("action", "reward", "discount")  # entries of a step, which upstream's readers convert to float32
_KNOWN = [  # the 64 x 64 pixel datasets on the hub, if it is unreachable
    *(f"distracting/walker_walk_random/64px/{level}" for level in ("easy", "hard", "medium")),
    *(f"main/{task}/{quality}/64px" for task in ("cheetah_run", "humanoid_walk", "walker_walk")
      for quality in ("expert", "medium", "medium_expert", "medium_replay", "random")),
    *(f"multitask/{task}_random/64px" for task in ("cheetah_run", "walker_walk")),
]  # fmt: skip


def _remote_ids() -> list[str]:
    """The ids on the hub; those of 64 x 64 pixels if it is unreachable."""
    try:
        paths = [Path(file.path.removeprefix(_TOP)) for file in hub_files(_REPO, _TOP)]
    except DownloadError:
        return _KNOWN
    return sorted({path.parent.as_posix() for path in paths if path.suffix in _SUFFIXES})


@dataclass(frozen=True)
class VD4RLSource(Source):
    """The files of a V-D4RL folder: each is an episode, or a shard of many episodes."""

    family: ClassVar[str] = "vd4rl"
    rows_version: ClassVar[int] = 2

    def download(self, folder: Path) -> Mapping[str, str]:
        files = [file for file in hub_files(_REPO, f"{_TOP}{self.dataset_id}/") if Path(file.path).suffix in _SUFFIXES]
        if not files:
            raise ValueError(unknown_id("V-D4RL", self.dataset_id, _remote_ids()))
        return hub_download(_REPO, files, folder)

    def parts(self, folder: Path) -> Sequence[Part]:
        files = local_files(folder, f"{_TOP}{self.dataset_id}/", *_SUFFIXES)
        return grouped(folder, (piece for path in files for piece in _pieces(path)))

    def inputs(self, folder: Path) -> list[Path]:
        return local_files(folder, f"{_TOP}{self.dataset_id}/", *_SUFFIXES)

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        for path, first, last in part.which:
            start = max(first - 1, 0)  # the image before these rows
            stop = last + 1  # the flags behind them
            if path.suffix == ".npz":
                columns = _cut(npz.arrays_of(path), slice(start, stop), path)
            else:
                with opened(path) as file:
                    columns = arrays(file, slice(start, stop))
            yield _transitions(columns, first - start, last - start, f"{path}, from row {first}")


def _pieces(path: Path) -> Iterator[tuple[tuple[Path, int, int], int, int]]:
    """Yield ((path, first, last), steps, bytes) for ranges of rows of a file. An episode is one range."""
    if path.suffix == ".npz":
        begins, _, _ = _marks(_cut(npz.arrays_of(path, "action", "discount", *_FLAGS), slice(None), path), str(path))
        yield (path, 0, len(begins)), int((~begins).sum()), path.stat().st_size
        return
    with opened(path) as file:
        stored = datasets(file)
        if missing := [
            name for name in ("action", "reward", "step_type") if name not in stored or not stored[name].ndim
        ]:
            raise CorruptDatasetError(f"{path} has no {missing[0]} for each step: no shard of V-D4RL")
        marked: dict[str, Any] = {
            name: values(stored[name]) for name in ("action", "discount", "step_type") if name in stored
        }
        rows = len(marked["action"])
        size = sum(column.nbytes for column in stored.values())
        begins, _, _ = _marks(marked, str(path))
    for first, last in ranges(rows, size):
        yield (path, first, last), int((~begins[first:last]).sum()), size * (last - first) // rows


def _cut(columns: Mapping[str, np.ndarray], rows: slice, path: Path) -> dict[str, np.ndarray]:
    """Rows of an episode. Some upstream files were cut, but not their flags: flags behind the last action do not count."""
    if np.ndim(columns.get("action", 0)) == 0:
        raise CorruptDatasetError(f"{path} has no action for each step: no episode of V-D4RL")
    steps = len(columns["action"])
    out = {}
    for name, column in columns.items():
        if np.ndim(column) == 0 or len(column) < steps or (name not in _FLAGS and len(column) > steps):
            raise CorruptDatasetError(f"{path}: {name} has {np.size(column)} rows, there are {steps} actions")
        out[name] = column[:steps][rows]
    return out


def _marks(columns: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether rows follow no other row, are flagged as last, and are terminal: bool [rows].

    Files of old versions lack flags. Their first row begins an episode, and terminal rows have a discount of zero.
    """
    count = len(columns["action"])
    if count > np.size(columns["action"]):
        raise CorruptDatasetError(f"{where}: has {count} actions of no values")
    none = np.zeros(count, np.bool_)
    try:
        if "step_type" in columns:
            kinds = np.reshape(columns["step_type"], count)
            first = kinds == _FIRST
            last = kinds == _LAST
            terminal = last & (np.reshape(columns["discount"], count) == 0) if "discount" in columns else none
        else:
            first, last = (np.reshape(columns[name], count) != 0 if name in columns else none for name in _FLAGS[:2])
            name = "is_terminal" if "is_terminal" in columns else "discount"
            flags = np.reshape(columns.get(name, none), count)
            terminal = flags != 0 if name == "is_terminal" else (flags == 0) & (name in columns)
    except ValueError as error:
        raise CorruptDatasetError(f"{where}: flags must have one value a row: {error}") from error
    begins = first.copy()
    begins[:1] = True
    begins[1:] |= last[:-1]
    return begins, last, terminal


def _transitions(columns: Mapping[str, Any], first: int, last: int, where: str) -> TensorDict:
    """The steps that lead to the rows from `first` to `last`. Upstream stores an action beside the image it led to."""
    if {"reward", "action"} - columns.keys() or not {"image", "observation"} & columns.keys():
        raise CorruptDatasetError(f"{where}: there are no images, actions or rewards, only {', '.join(columns)}")
    begins, flagged, terminal = _marks(columns, where)
    pixels = "image" if "image" in columns else "observation"
    rows = nested({name: column for name, column in columns.items() if name not in _FLAGS}, len(begins), where)
    seen = TensorDict({"pixels": rows[pixels]}, rows.batch_size)
    for name, column in rows.items():
        if name not in (pixels, *_SINGLE):
            seen["state", name] = column
    after = torch.from_numpy(first + np.flatnonzero(~begins[first:last]))
    step = {name: column for name, column in rows[after].items() if name in _SINGLE}
    step |= {name: column.float() for name, column in step.items() if column.is_floating_point()}
    out = seen[after - 1]
    out["next"] = seen[after]
    is_first = columns["step_type"] == _FIRST if "step_type" in columns else columns.get("is_first", begins)
    out["is_init"] = torch.from_numpy(np.reshape(is_first, len(begins)) != 0)[after - 1]
    # A row without the flag also ends an episode if the next row does not follow it.
    ends = torch.from_numpy(flagged | np.append(begins[1:], True))[after].unsqueeze(1)
    terminated = torch.from_numpy(terminal)[after].unsqueeze(1)
    flags = {"done": ends | terminated, "terminated": terminated, "truncated": ends & ~terminated}
    out["next"].update({"reward": step.pop("reward").reshape(-1, 1), **flags})
    return out.update(step).update(dict.fromkeys(flags, torch.zeros_like(ends)))


class VD4RLExperienceReplay(BaseDatasetExperienceReplay):
    """V-D4RL: control from pixels (arXiv:2206.04779), from the Hugging Face hub.

    The licence is that of https://huggingface.co/datasets/conglu/vd4rl. Rows are in file order.

    Upstream stores each action, reward and discount beside the image that they led to. A row here is a transition: the image
    before the action, the action, its reward, and the image after it. A file of T images of an episode gives T - 1 rows; its
    first action, reward and discount are placeholders of upstream.

    | key | content |
    |---|---|
    | "pixels", ("next", "pixels") | uint8 [64, 64, 3]; [3, 84, 84] for 84px. Samples with `totensor`: float32 [3, H, W] |
    | "action", "discount" | float32: the action, and the discount after it |
    | "state", ("next", "state") | other entries of upstream, nested |
    | ("next", "reward") | float32 [1] |
    | "is_init" | bool []: first step of an episode |
    | ("next", "done"), ("next", "terminated"), ("next", "truncated") | bool [1]: last; terminal; last but not terminal |
    | "done", "terminated", "truncated" | bool [1], False |

    The last ("next", "pixels") of an episode are the true ones. The last row of an episode without a flag at its end is
    truncated: upstream has files that were cut. In datasets of 84px the flags are made of ("state", "step_type"), which is 0
    for the first image of an episode and 2 for the last one.

    Args:
        dataset_id: one of `available_datasets`, such as "main/walker_walk/random/64px". Any name with
            `from_local`.
        totensor: append a `ToTensorImage` of the pixels, unless there is one.
        image_size: append a `Resize` of the pixels to a square, or to a height and width.
        transform: applied before these.
        from_local: a folder with files `*.npz` or `*.hdf5`, or a copy of the repository.

    The other arguments are those of `BaseDatasetExperienceReplay`, and so are errors. ValueError for an unknown id.
    """

    available_datasets = AskedIds(_remote_ids, "V-D4RL on the hub")

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        totensor: bool = True,
        image_size: int | Sequence[int] | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] = True,
        from_local: str | os.PathLike[str] | None = None,
        split_trajs: bool = False,
        num_workers: int = 0,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform_factory: Callable[[], Transform | Callable[[Any], Any]] | None = None,
        dim_extend: int | None = None,
        checkpointer: StorageCheckpointerBase | type[StorageCheckpointerBase] | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        priority_key: NestedKey | None = "td_error",
    ) -> None:
        if image_size is not None and not totensor and transform is None and "84px" not in Path(dataset_id).parts:
            raise ValueError(
                "image_size needs totensor=True, or a transform that moves the channels: stored are [height, width, 3]"
            )
        source = VD4RLSource(dataset_id)
        super().__init__(
            source,
            batch_size,
            transform=transform,
            root=root,
            download=download,
            from_local=from_local,
            split_trajs=split_trajs,
            num_workers=num_workers,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform_factory=transform_factory,
            dim_extend=dim_extend,
            checkpointer=checkpointer,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            consume_after_n_samples=consume_after_n_samples,
            priority_key=priority_key,
        )
        pixels: Any = ["pixels", ("next", "pixels")]
        if totensor and not any(isinstance(step, ToTensorImage) for step in self.transform):
            self.append_transform(ToTensorImage(in_keys=pixels, shape_tolerant=True))
        if image_size is not None:
            self.append_transform(Resize(image_size, in_keys=pixels))

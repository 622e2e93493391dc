"""RoboSet (simulated part): HDF5 files of demonstrations on the Hugging Face hub."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey

from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.datasets.errors import CorruptDatasetError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.grouping import grouped
from interop.datasets.hdf5 import arrays, datasets, opened, values
from interop.datasets.hub import hub_download, hub_files, local_files
from interop.datasets.rows import following, nested
from interop.datasets.source import Part, Source
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.transforms import Transform
from interop.writers import Writer

_REPO = "jdvakil/RoboSet_Sim"
_NEEDED = ("observations", "actions", "rewards", "done")

_HANDS = [f"{task}_v2d-v1" for task in ("door", "relocate", "hammer", "pen")]
_KITCHEN = ("MicroOpenRandom", "Knob2OffRandom", "LdoorOpenRandom", "SdoorOpenRandom", "Knob1OnRandom")
_KITCHEN_TASKS = [f"FK1_{task}_v2d-v4" for task in _KITCHEN]
IDS = [
    *(f"DAPG({who})/{task}" for who in ("expert", "human") for task in _HANDS),
    *(f"FK1-v4(expert)/{task}" for task in _KITCHEN_TASKS),
    "FK1-v4(human)/human_demos_by_playdata",
    *(f"FK1-v4(human)/human_demos_by_task/{task}" for task in ("human_demo_singleTask_Fixed-v4", *_KITCHEN_TASKS)),
]


@dataclass(frozen=True)
class RobosetSource(Source):
    """RoboSet files whose paths start with the id. Their groups `Trial<number>` are demonstrations."""

    family: ClassVar[str] = "roboset"
    rows_version: ClassVar[int] = 2
    trajectory_ids: ClassVar[Sequence[tuple[str, ...]]] = (("seed",),)  # the file: trials of several have one number

    def download(self, folder: Path) -> Mapping[str, str]:
        if self.dataset_id not in IDS:
            raise ValueError(unknown_id("RoboSet", self.dataset_id, IDS))
        files = hub_files(_REPO, self.dataset_id)
        return hub_download(_REPO, [file for file in files if file.path.endswith(".h5")], folder)

    def parts(self, folder: Path) -> Sequence[Part]:
        trials = []
        for seed, path in enumerate(local_files(folder, self.dataset_id, ".h5")):
            with opened(path) as file:
                for name in file:
                    if match := re.fullmatch(r"Trial([0-9]{1,18})", name):
                        trial = datasets(file[name])
                        if missing := [key for key in _NEEDED if key not in trial]:
                            raise CorruptDatasetError(f"{path}: {name} has no {missing[0]!r}")
                        size = sum(dataset.nbytes for dataset in trial.values())
                        rows = len(trial["actions"])
                        steps = rows - _has_last_state(values(trial["actions"], slice(max(rows - 1, 0), None)))
                        trials.append(((int(match[1]), seed, path, name), steps, size))
        return grouped(folder, sorted(trials))

    def inputs(self, folder: Path) -> list[Path]:
        return local_files(folder, self.dataset_id, ".h5")

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        for number, seed, path, name in part.which:
            with opened(path) as file:
                columns = arrays(file[name])
            yield _rows(columns, f"{path}, {name}", number, seed)


def _has_last_state(actions: Any) -> bool:
    """Whether the last row is the state behind the last step, for which RoboHive records an action of NaN."""
    last = np.asarray(actions)[-1:]
    return last.size > 0 and last.dtype.kind == "f" and bool(np.isnan(last).all())


def _rows(columns: dict[str, Any], where: str, number: int, seed: int) -> TensorDict:
    """Convert a trial to rows: T, or T - 1 transitions if its last row is the state behind them.

    RoboHive's logger writes a row for each time: the state, the reward and the flag of this state, and the action taken in
    it. The reward of an action is then that of the next row. Trials without the last state have rewards beside their action.
    """
    count = len(columns["actions"])
    states = _has_last_state(columns["actions"])
    rows = nested(columns, count, where)
    done = rows["done"] = rows["done"].bool().reshape(-1, 1)
    reward = rows.pop("rewards").reshape(-1, 1)
    for name, key in ("observations", "observation"), ("env_infos", "info"), ("actions", "action"):
        if name in columns:
            rows[key] = rows.pop(name)
    seen = rows.select("observation", "info", strict=False)
    after = seen[1:] if states else following(seen)
    out = rows[:-1] if states else rows
    after["reward"], after["terminated"] = (column[1:] if states else column for column in (reward, done))
    after["truncated"] = torch.zeros_like(after["terminated"])
    after["truncated"][-1:] = ~after["terminated"][-1:]  # the end of a trial, whether it is flagged or not
    after["done"] = after["terminated"] | after["truncated"]
    out["terminated"] = out["truncated"] = torch.zeros_like(after["done"])
    out["episode"], out["seed"] = (torch.full([len(out)], value) for value in (number, seed))
    out["next"] = after
    return out


class RobosetExperienceReplay(BaseDatasetExperienceReplay):
    """Simulated robot demonstrations of RoboSet (arXiv:2309.01918), from the Hugging Face hub.

    The licence is that of https://huggingface.co/datasets/jdvakil/RoboSet_Sim. Rows are ordered by trial number, then by
    file.

    | key | content |
    |---|---|
    | "observation", "action", "time", and other entries | as upstream |
    | "info" | `env_infos`, nested |
    | ("next", "observation"), ("next", "info") | those after the action |
    | ("next", "reward"), ("next", "terminated") | [1]: the reward, and `done` as bool, after the action |
    | ("next", "truncated") | bool [1]: the last step of a trial that is not done |
    | ("next", "done") | bool [1]: terminated or truncated |
    | "done" | bool [1]: `done` as upstream |
    | "terminated", "truncated" | bool [1]: False |
    | "episode", "seed" | int64 []: the trial number in its file, and the file number. A change starts a new trial |

    RoboHive writes a trial of T steps as T + 1 rows: the last one is the last state, with an action of NaN, and a reward is
    that of the state beside it. Such a trial gives T rows with the true next observations, and the reward and `done` of the
    next state. A trial without a last row of NaN has T rows, whose reward and `done` belong to the action beside them. There
    the next observation and info of the last step are unknown: zeros.

    Args:
        dataset_id: one of `available_datasets`. With `from_local`, any.
        from_local: a folder with files `*.h5`, or a copy of the repository.

    The other arguments are those of `BaseDatasetExperienceReplay`, and so are errors. ValueError for an unknown id.
    """

    available_datasets = IDS

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
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
        transform: Transform | Callable[[Any], Any] | None = None,
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
        super().__init__(
            RobosetSource(dataset_id),
            batch_size,
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
            transform=transform,
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

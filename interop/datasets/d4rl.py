"""D4RL datasets: flat HDF5 files with all episodes concatenated."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from interop.data.arguments import required
from interop.datasets.d4rl_urls import D4RL_URLS
from interop.datasets.errors import CorruptDatasetError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.fetching import RemoteFile, fetch
from interop.datasets.grouping import ranges
from interop.datasets.hdf5 import arrays, datasets, opened, values
from interop.datasets.rows import nested, zeroed
from interop.datasets.source import Part, Source
from interop.samplers import Sampler
from interop.transforms import Transform
from interop.writers import Writer

_NEEDED = ("observations", "actions", "rewards", "terminals")
_OF_ROWS = (*_NEEDED, "timeouts", "next_observations", "infos")
_KEPT = 1000  # maximum number of values of a metadata entry


@dataclass(frozen=True)
class D4RLSource(Source):
    """A D4RL file, downloaded or written by the d4rl library."""

    family: ClassVar[str] = "d4rl"
    rows_version: ClassVar[int] = 2
    ends_parts: ClassVar[bool] = True

    use_truncated_as_done: bool = True
    library: str = ""  # the d4rl function to call: "get_dataset", "qlearning_dataset"; "" for none
    terminate_on_end: bool = False
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def download(self, folder: Path) -> Mapping[str, str]:
        if self.library:
            return self._write_by_library(folder / "data.hdf5")
        if self.dataset_id not in D4RL_URLS:
            raise KeyError(f"Env {self.dataset_id} not found. {unknown_id('D4RL', self.dataset_id, D4RL_URLS)}")
        url = D4RL_URLS[self.dataset_id]
        return fetch([RemoteFile(url, Path(url).name, plain_http=True)], folder)

    def _write_by_library(self, path: Path) -> Mapping[str, str]:
        try:
            d4rl = import_module("d4rl")
            gym = import_module("gym")
        except ImportError as error:
            raise ImportError(f"direct_download=False and from_env=True need the d4rl library: {error}") from error
        env = gym.make(self.dataset_id, **self.env_kwargs)
        options = {"terminate_on_end": self.terminate_on_end}
        if self.library == "get_dataset":
            columns = env.get_dataset()
        else:
            columns = dict(d4rl.qlearning_dataset(env, **options))
            if (cuts := self._cuts(env.get_dataset(), len(columns["rewards"]))) is not None:
                columns["timeouts"] = cuts
        with required("h5py", "interop").File(path, "w") as file:
            for name, column in columns.items():
                file[name] = column
        return {}

    def _cuts(self, recorded: Mapping[str, Any], count: int) -> np.ndarray | None:
        """Which rows of `d4rl.qlearning_dataset` are the last ones of timed-out episodes, which it does not tell.

        It has all rows but the last one, without the timed-out steps unless `terminate_on_end`. None for other rows.
        """
        if "timeouts" not in recorded:
            return None
        timed_out = np.reshape(recorded["timeouts"], -1) != 0
        is_kept = np.ones(len(timed_out) - 1, np.bool_) if self.terminate_on_end else ~timed_out[:-1]
        ends = timed_out[:-1] if self.terminate_on_end else timed_out[1:]  # of a step before one that is left out
        return ends[is_kept] if np.count_nonzero(is_kept) == count else None

    def parts(self, folder: Path) -> Sequence[Part]:
        path = self._file(folder)
        with opened(path) as file:
            if missing := [name for name in _NEEDED if name not in file]:
                raise CorruptDatasetError(f"{path} has no {missing[0]!r}: no file of D4RL")
            columns = {name: column for name, column in datasets(file).items() if name.partition("/")[0] in _OF_ROWS}
            rows = len(columns["rewards"])
            if wrong := [name for name, column in columns.items() if len(column) != rows]:
                raise CorruptDatasetError(f"{path}: {wrong[0]} has {len(columns[wrong[0]])} rows, rewards has {rows}")
            for name, column in columns.items():
                single = name in (*_NEEDED[2:], "timeouts")
                if column.dtype.kind not in "biufc" or (single and column.size != rows):
                    kind = "one number a row" if single else "numbers"
                    raise CorruptDatasetError(f"{path}: {name} must be {kind}, it is {column.dtype} {[*column.shape]}")
            steps = rows - (not self._has_last(columns))
            bounds = ranges(steps, sum(column.nbytes for column in columns.values())) if steps > 0 else []
        return [Part(last - first, path, (first, last)) for first, last in bounds]

    @staticmethod
    def _has_last(columns: Mapping[str, Any]) -> bool:
        """Whether the last row of a file is a step: one that ends an episode, or whose next observation is stored."""
        flags = (columns[name] for name in ("terminals", "timeouts") if name in columns and len(columns[name]))
        return "next_observations" in columns or any(bool(np.any(values(flag, slice(-1, None)))) for flag in flags)

    def read(self, part: Part) -> Iterator[TensorDictBase]:
        first, last = part.which
        start = max(first - 1, 0)
        with opened(part.path) as file:
            names = [name for name in _OF_ROWS if name in file and len(file[name])]  # skips an empty group of infos
            columns = {name: values(file[name], slice(start, last + 1)) for name in names}
        rows = nested(columns, len(columns["rewards"]), f"{part.path}, rows {start} to {last}")
        if len(rows) == last - start:  # the last row of the file: there is no next one
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
        here = rows[first - start : -1]
        after = rows[first - start + 1 :]
        signals = self._signals(rows)
        before = [] if first else [torch.zeros_like(signals[:1])]
        out: Any = torch.cat([*before, signals[:-2]])
        out["observation"] = here["observations"]
        out["action"] = here["actions"]
        out["next"] = following = signals[first - start : -1]
        unknown = following["done"]
        if "next_observations" not in columns:
            unknown = unknown | following.get("truncated", unknown)
        following["observation"] = zeroed(here.get("next_observations", after["observations"]), unknown)
        if "infos" in columns:
            out["info"] = here["infos"]
            following["info"] = after["infos"]
        yield out

    def _signals(self, rows: TensorDict) -> TensorDict:
        """Reward and flags, [n, 1], of the steps that begin at rows."""
        out = TensorDict({"reward": rows["rewards"].float().reshape(-1, 1)}, rows.batch_size)
        out["terminated"] = out["done"] = rows["terminals"].bool().reshape(-1, 1)
        if "timeouts" in rows:
            out["truncated"] = rows["timeouts"].bool().reshape(-1, 1)
            out["done"] = out["terminated"] | (out["truncated"] & self.use_truncated_as_done)
        return out

    def metadata(self, folder: Path) -> dict[str, Any]:
        with opened(self._file(folder)) as file:
            return _described(arrays(file["metadata"])) if "metadata" in file else {}

    def _file(self, folder: Path) -> Path:
        named = folder / Path(D4RL_URLS.get(self.dataset_id, "")).name
        files = [named] if named.is_file() else sorted(folder.glob("*.hdf5"))
        if len(files) != 1:
            raise CorruptDatasetError(f"{folder} must have one HDF5 file, it has {[file.name for file in files]}")
        return files[0]


def _described(value: Any) -> Any:
    """Convert text, numbers and small arrays to JSON. Larger arrays become shape and dtype."""
    if isinstance(value, Mapping):
        return {name: _described(child) for name, child in value.items()}
    if np.size(value) > _KEPT:
        return {"shape": np.shape(value), "dtype": str(np.asarray(value).dtype)}
    return np.asarray(value).tolist()


class D4RLExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of D4RL (arXiv:2004.07219), licensed CC BY 4.0 unless upstream says otherwise.

    A file of N rows gives N rows if its last one ends an episode, or if it has next observations; otherwise N - 1, as the
    observation after the last action is unknown. Episodes end at ("next", "done"), or at ("next", "truncated") without
    `use_truncated_as_done`. Files of some early datasets have no `timeouts`: there, time limits are not marked. With
    `split_trajs` the last step of each trajectory, and of its padding, has ("next", "done").

    | key | content |
    |---|---|
    | "observation", "action" | as upstream |
    | "info" | the infos upstream, nested, if any |
    | ("next", "observation") | `next_observations` if upstream has them, else the next row's observation; zeros if done |
    | ("next", "info") | the info of the next row, which at the end of an episode belongs to another one |
    | ("next", "reward") | float32 [1] |
    | ("next", "terminated") | bool [1]: `terminals` |
    | ("next", "truncated") | bool [1]: `timeouts`; missing if upstream has none |
    | ("next", "done") | bool [1]: terminated or truncated; without `use_truncated_as_done`, terminated only |
    | "reward", "terminated", "truncated", "done" | ("next", ...) of the previous row; zeros in the first row |

    `metadata` has the metadata of the file. Arrays of more than 1,000 values are reduced to shape and dtype.

    Args:
        dataset_id: one of `available_datasets`. With `from_local`, any.
        from_env: read the rows with `get_dataset` of the environment, which needs the d4rl library.
        use_truncated_as_done: whether time-outs set "done". ("next", "observation") of a time-out is zeros in both cases,
            unless upstream has next observations, as the next row belongs to another episode.
        direct_download: True downloads the file; False uses `d4rl.qlearning_dataset`, or `from_env`; None downloads unless
            `from_env`.
        terminate_on_end: passed to `d4rl.qlearning_dataset`: keep the last step of timed-out episodes.
        from_local: a folder with the HDF5 file.
        **env_kwargs: passed to `gym.make` of the d4rl library.

    Other arguments and errors as for `BaseDatasetExperienceReplay`. KeyError for an unknown id.
    """

    available_datasets = list(D4RL_URLS)

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        split_trajs: bool = False,
        from_env: bool = False,
        use_truncated_as_done: bool = True,
        direct_download: bool | None = None,
        terminate_on_end: bool | None = None,
        download: bool | Literal["force"] = True,
        root: str | os.PathLike[str] | None = None,
        *,
        from_local: str | os.PathLike[str] | None = None,
        num_workers: int = 0,
        generator: torch.Generator | None = None,
        **env_kwargs: Any,  # of an environment that only `gym.make` knows
    ) -> None:
        direct = not from_env if direct_download is None else direct_download
        if direct and (from_env or terminate_on_end is False):
            raise ValueError(
                "from_env=True and terminate_on_end=False need the d4rl library: pass direct_download=False"
            )
        if direct and env_kwargs:
            raise RuntimeError(
                f"a direct download makes no environment, got arguments for one: {', '.join(env_kwargs)}"
            )
        library = "" if direct else "get_dataset" if from_env else "qlearning_dataset"
        super().__init__(
            D4RLSource(dataset_id, use_truncated_as_done, library, bool(terminate_on_end), env_kwargs),
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
            generator=generator,
        )

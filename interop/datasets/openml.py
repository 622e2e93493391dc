"""OpenML: labelled tables for bandits, downloaded by scikit-learn."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey

from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.arguments import required
from interop.datasets import allowance
from interop.datasets.errors import CorruptDatasetError, DownloadError, unknown_id
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.source import Part, Source
from interop.sample_units import SampleUnit
from interop.samplers import Sampler, SamplerWithoutReplacement
from interop.transforms import Transform
from interop.writers import Writer

_UPSTREAM = {  # id -> name and version on OpenML
    "adult_num": ("adult", 1),
    "adult_onehot": ("adult", 1),
    "mushroom_num": ("mushroom", 1),
    "mushroom_onehot": ("mushroom", 1),
    "covertype": ("covertype", 3),
    "shuttle": ("shuttle", 1),
    "magic": ("MagicTelescope", 1),
}
_TARGET = "__target__"  # the column of the target in the downloaded file
_ATTRIBUTE = re.compile(r"""@attribute\s+('[^']*'|"[^"]*"|\S+)\s+(numeric|real|integer)?""", re.IGNORECASE)


@dataclass(frozen=True)
class OpenMLSource(Source):
    """A table downloaded by scikit-learn, or OpenML's `.arff` file of it."""

    family = "openml"

    def __post_init__(self) -> None:
        if self.dataset_id not in _UPSTREAM:
            raise RuntimeError(f"Dataset does not exist. {unknown_id('OpenML', self.dataset_id, _UPSTREAM)}")

    def download(self, folder: Path) -> Mapping[str, str]:
        """Download the table to a Parquet file. Returns no checksums, as scikit-learn verifies OpenML's."""
        required("pandas", "datasets")
        name, version = _UPSTREAM[self.dataset_id]
        fetch = required("sklearn.datasets", "datasets").fetch_openml
        try:
            features, target = fetch(name, version=version, return_X_y=True, data_home=str(folder), parser="auto")
        except ImportError:
            raise
        except Exception as error:  # no network, or an answer that is anything: scikit-learn checks few of its entries
            raise DownloadError(
                f"OpenML did not send {name!r}, version {version}: {error}. Pass a folder with its .arff file as from_local"
            ) from error
        features.assign(**{_TARGET: target}).to_parquet(folder / f"{name}.parquet")
        return {}

    def parts(self, folder: Path) -> list[Part]:
        return [Part(len(self.table(folder)[0]), folder)]

    def read(self, part: Part) -> Iterator[TensorDict]:
        yield self.table(part.path)[0]

    def metadata(self, folder: Path) -> dict[str, Any]:
        return self.table(folder)[1]

    def table(self, folder: Path) -> tuple[TensorDict, dict[str, list[str]]]:
        """All rows, the names of the "columns" of X, and the "classes" numbered by y."""
        sklearn = required("sklearn.preprocessing", "datasets")
        features = _frame(folder, _UPSTREAM[self.dataset_id][0])
        target = features.pop(_TARGET)
        if self.dataset_id.startswith("adult"):
            features = features.dropna()
            if "occupation" not in features:
                raise CorruptDatasetError(f"{folder}: the table has no column occupation, it has {', '.join(features)}")
            target = features.pop("occupation")
        is_text = self.dataset_id.startswith("mushroom")  # all its columns are text
        text = features.columns if is_text else features.select_dtypes(exclude="number").columns
        numbers = features.columns.difference(text, sort=False)
        if features.empty or target.isna().any() or features[numbers].isna().any(axis=None):
            raise CorruptDatasetError(
                f"{folder}: the table is empty, or has gaps in its target or in columns of numbers"
            )
        labels = sklearn.LabelEncoder()
        encoder = sklearn.StandardScaler()
        y = torch.from_numpy(labels.fit_transform(target).astype(np.int64))
        if self.dataset_id.endswith("_onehot"):
            columns = len(numbers) + sum(features[name].nunique(dropna=False) for name in text)
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            allowance.check(8 * columns * len(features), allowance.held(size), f"{folder}: {columns} one-hot columns")
            joined = required("sklearn.compose", "datasets").make_column_transformer
            onehot = sklearn.OneHotEncoder(sparse_output=False)
            encoder = joined((encoder, numbers), (onehot, text), verbose_feature_names_out=False)
        else:
            features = features.assign(**features[text].apply(sklearn.LabelEncoder().fit_transform))
        x = torch.from_numpy(np.asarray(encoder.fit_transform(features), np.float64))
        names = {"columns": encoder.get_feature_names_out(), "classes": labels.classes_}
        return TensorDict({"X": x, "y": y}, [len(y)]), {key: [*map(str, labels_of)] for key, labels_of in names.items()}


def _frame(folder: Path, name: str) -> Any:
    """The table with its target, from the downloaded file or the only `.arff` file in the folder."""
    pandas = required("pandas", "datasets")
    files = [*folder.glob(f"{name}.parquet")] or [*folder.glob("*.arff")]
    if len(files) != 1:
        raise CorruptDatasetError(
            f"{folder} must have the .arff file of {name} from OpenML, it has {len(files)} of them"
        )
    try:
        return pandas.read_parquet(files[0]) if files[0].suffix == ".parquet" else _arff(files[0])
    except (ValueError, OSError) as error:
        raise CorruptDatasetError(f"{files[0]} cannot be read: {error}") from error


def _arff(path: Path) -> Any:
    """Read an ARFF file of numbers and categories. The last attribute is the target."""
    with path.open() as file:
        header = [line.strip() for line in takewhile(lambda line: line.strip().lower() != "@data", file)]
        attributes = [match for line in header if (match := _ATTRIBUTE.match(line))]
        frame = required("pandas", "datasets").read_csv(
            file,
            header=None,
            dtype={place: float if match[2] else str for place, match in enumerate(attributes)},
            na_values=["?", ""],
            keep_default_na=False,
            comment="%",
            skipinitialspace=True,
            quotechar="'" if any("'" in line.partition("{")[2] for line in header) else '"',
        )
    frame.columns = [
        *(match[1].strip("'\"") for match in attributes[:-1]),
        _TARGET,
    ]  # ValueError: a row has more values
    return frame


class OpenMLExperienceReplay(BaseDatasetExperienceReplay):
    """Labelled tables of OpenML (https://www.openml.org), for bandits.

    A row is an example, not a step: "X" float64 [F], and "y" int64 [], the class number. The licence of each table is on
    its OpenML page.

    - "adult_num", "adult_onehot": 45,222 rows, without rows with gaps. The class is the occupation.
    - "mushroom_num", "mushroom_onehot": 8,124 rows.
    - "covertype" 581,012, "shuttle" 58,000, "magic" 19,020 rows.

    Categories are numbered in the order of their names; with "_onehot" they are columns of 0 and 1 behind the numeric
    columns. All other columns are normalized to mean 0 and deviation 1. `metadata` has the "columns" of X and "classes".

    Args:
        name: one of the names above.
        batch_size: rows per batch.
        root: the folder of the family, by default `~/.cache/fbuf/openml`.
        sampler: a `SamplerWithoutReplacement` by default.
        from_local: a folder with OpenML's `.arff` file, whose last attribute is the target.

    The other arguments are those of `BaseDatasetExperienceReplay`.

    Raises:
        RuntimeError: an unknown name. ImportError: scikit-learn, pandas or pyarrow is not installed.
    """

    available_datasets = [*_UPSTREAM]

    def __init__(
        self,
        name: str,
        batch_size: int | None = None,
        root: str | os.PathLike[str] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        *,
        download: bool | Literal["force"] = True,
        from_local: str | os.PathLike[str] | None = None,
        split_trajs: bool = False,
        num_workers: int = 0,
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
        sampler = SamplerWithoutReplacement() if sampler is None else sampler
        super().__init__(
            OpenMLSource(name),
            batch_size,
            root=root,
            sampler=sampler,
            download=download,
            from_local=from_local,
            split_trajs=split_trajs,
            num_workers=num_workers,
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

    @property
    def max_outcome_val(self) -> int:
        """The largest class number."""
        return len(self.metadata["classes"]) - 1

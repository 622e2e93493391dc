"""OpenML: labelled tables, encoded and standardised."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from interop.datasets.errors import CorruptDatasetError, DownloadError
from interop.datasets.openml import OpenMLExperienceReplay
from tests.interop.datasets import sources_openml as upstream

NUMBERS = ["first", "second"]


@pytest.fixture
def replay(tmp_path: Path) -> Any:
    """The class, of the ARFF file in the folder "files"."""
    return partial(OpenMLExperienceReplay, root=tmp_path / "root", from_local=tmp_path / "files")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The names and versions that scikit-learn, which does not reach the network here, was asked for."""
    asked: list[tuple[str, int]] = []

    def fetch(name: str, version: int, return_X_y: bool, **more: Any) -> Any:  # noqa: N803
        asked.append((name, version))
        frame = upstream.table(name, np.random.default_rng(0))
        return frame.iloc[:, :-1], frame.iloc[:, -1]

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    return asked


def standardised(columns: Any) -> np.ndarray:
    values = np.asarray(columns, np.float64)
    deviation = values.std(0)
    return (values - values.mean(0)) / np.where(deviation, deviation, 1)


def codes(column: pd.Series) -> list[int]:
    """The places of the values among all, a gap last."""
    every = sorted(set(column.dropna()))
    return [len(every) if pd.isna(value) else every.index(value) for value in column]


def onehot(column: pd.Series) -> np.ndarray:
    numbers = codes(column)
    return np.eye(max(numbers) + 1)[numbers]


def expected(name: str, frame: pd.DataFrame) -> tuple[np.ndarray, pd.Series]:
    if name.startswith("mushroom"):
        columns = [frame["odor"], frame["veil"]]
        if name == "mushroom_num":
            return standardised(np.stack([codes(each) for each in columns], 1)), frame["class"]
        return np.concatenate([onehot(each) for each in columns], 1), frame["class"]
    if not name.startswith("adult"):
        return standardised(frame[NUMBERS]), frame["class"]
    frame = frame.dropna(subset=["work", "occupation"])
    if name == "adult_num":
        rows = frame.assign(age=codes(frame["age"]), work=codes(frame["work"]))
        return standardised(rows[["age", *NUMBERS, "work"]]), frame["occupation"]
    return np.concatenate([standardised(frame[NUMBERS]), onehot(frame["age"]), onehot(frame["work"])], 1), frame[
        "occupation"
    ]


@pytest.mark.parametrize("name", upstream.NAMES)
def test_rows(replay: Any, tmp_path: Path, name: str) -> None:
    frame = upstream.make(tmp_path / "files", np.random.default_rng(0), name)
    dataset = replay(name, 8)
    values, target = expected(name, frame)
    rows = dataset[:]
    assert rows["X"].dtype == torch.float64 and rows["y"].dtype == torch.int64
    np.testing.assert_allclose(rows["X"].numpy(), values, atol=1e-12)
    assert rows["y"].tolist() == codes(target)
    assert name in type(dataset).available_datasets
    assert dataset.max_outcome_val == rows["y"].max().item()
    assert dataset.metadata["classes"] == sorted(set(target)) and len(dataset.metadata["columns"]) == values.shape[1]
    assert dataset.data_path == tmp_path / "root" / name


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("magic", ("MagicTelescope", 1)), ("covertype", ("covertype", 3)), ("adult_onehot", ("adult", 1))],
)
def test_download(
    asked: list[tuple[str, int]], replay: Any, tmp_path: Path, name: str, wanted: tuple[str, int]
) -> None:
    downloaded = OpenMLExperienceReplay(name, 4, tmp_path / "downloaded")[:]
    assert asked == [wanted]
    upstream.make(tmp_path / "files", np.random.default_rng(0), name)
    assert (downloaded == replay(name)[:]).all()


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError("md5 checksum of local file")])
def test_failed_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fetch(*_: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    with pytest.raises(DownloadError, match=f"'covertype', version 3: {error}.*from_local"):
        OpenMLExperienceReplay("covertype", 4, tmp_path)


def test_unknown_names() -> None:
    with pytest.raises(RuntimeError, match=r"Dataset does not exist.*'mushroom_num'"):
        OpenMLExperienceReplay("mushrooms", 4)


HEADER = "@relation x\n@attribute a real\n@attribute class {e,p}\n@data\n"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "must have the .arff file of shuttle"),
        ("@relation x\n@attribute a string\n@data\nx\n", "the table is empty"),
        (HEADER + "what,e\n", "what"),
        (HEADER + "1,e,3,4\n", "cannot be read"),
        (HEADER + "1,e\n2\n", "gaps in its target"),
        (HEADER + "?,e\n2,p\n", "gaps in its target or in columns of numbers"),
        (HEADER, "cannot be read"),
        ("nothing", "cannot be read"),
    ],
)
def test_files_that_are_no_tables(replay: Any, tmp_path: Path, content: str | None, text: str) -> None:
    (tmp_path / "files").mkdir()
    if content is not None:
        (tmp_path / "files/a.arff").write_text(content)
    with pytest.raises(CorruptDatasetError, match=text):
        replay("shuttle")


def test_a_table_without_occupations(replay: Any, tmp_path: Path) -> None:
    upstream.make(tmp_path / "files", np.random.default_rng(0), "magic")
    with pytest.raises(CorruptDatasetError, match="no column occupation, it has first, second"):
        replay("adult_num")


def test_quoted_categories(replay: Any, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    rows = '% a table\n1, "a, b", p\n\n?, c, e\n3, "a, b", e\n'
    text = '@RELATION t\n@ATTRIBUTE "a number" NUMERIC\n@ATTRIBUTE kind {"a, b",c}\n@ATTRIBUTE class {e, p}\n@DATA\n'
    (tmp_path / "files/any.arff").write_text(text + rows)
    dataset = replay("mushroom_onehot")
    assert dataset[:]["X"][:, -2:].tolist() == [[1, 0], [0, 1], [1, 0]] and dataset[:]["y"].tolist() == [1, 0, 0]

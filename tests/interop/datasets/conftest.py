"""A server of files on the loopback address, and the Hugging Face hub at it. A dataset of a few rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDict

from tests.interop.datasets import sources_toy
from tests.interop.datasets.server import Server, as_hub, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Serves the folder `tmp_path / "served"`."""
    with serving(tmp_path / "served") as it:
        yield it


@pytest.fixture
def hub(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, which is the Hugging Face hub of this process and of processes that it starts.

    Repositories are folders `server.folder / "datasets" / author / name`. The cache of the hub is in `tmp_path`.
    """
    as_hub(server, tmp_path / "hub", monkeypatch)
    return server


@pytest.fixture
def rows(tmp_path: Path) -> TensorDict:
    """The rows of the dataset whose files are in `tmp_path / "up"`."""
    return sources_toy.make(tmp_path / "up", np.random.default_rng(0))


@pytest.fixture
def toy(tmp_path: Path, rows: TensorDict) -> Callable[..., sources_toy.ToyExperienceReplay]:
    """Constructs this dataset in `tmp_path / "root"`."""

    def construct(dataset_id: str = "toy", *args: Any, **more: Any) -> sources_toy.ToyExperienceReplay:
        sources_toy.calls.clear()
        given = {"root": tmp_path / "root", "upstream": tmp_path / "up", **more}
        return sources_toy.ToyExperienceReplay(dataset_id, *args, **given)

    return construct

"""Files that come otherwise than upstream has them: a typed error, a folder as it was, then an attempt that completes."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from interop.datasets.errors import CorruptDatasetError, DatasetError, DownloadError
from tests.interop.datasets.loaders import LOADERS, Loader, equal, given
from tests.interop.datasets.server import Answer
from tests.interop.datasets.sources_toy import content

HTML = b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>"
FAULTS: dict[str, Callable[[bytes], Answer]] = {
    "404": lambda data: Answer(status=404),
    "a page": lambda data: Answer(body=HTML, headers={"Content-Type": "text/html"}),
    "truncated": lambda data: Answer(body=data[: len(data) * 2 // 3], methods=("GET",)),
    "noise": lambda data: Answer(body=np.random.default_rng(1).bytes(len(data)), methods=("GET",)),
}


@pytest.mark.filterwarnings("ignore:(A network error|Invalid cache)")  # scikit-learn's
@pytest.mark.parametrize(
    ("loader", "there"),
    [
        pytest.param(loader, there, marks=pytest.mark.slow if number % 4 and (there or number % 2) else ())
        for number, loader in enumerate(LOADERS)
        for there in (False, True)
    ],
    ids=lambda given: given.name if isinstance(given, Loader) else "force" if given else "first",
)
def test_files_that_do_not_come_well(loader: Loader, tmp_path: Path, there: bool) -> None:
    with given(loader, tmp_path) as (dataset, _):
        expected = dataset.construct()[:]
        served = [path for path in dataset.server.folder.rglob("*") if path.is_file()]
        largest = max(served, key=lambda path: path.stat().st_size)
        name, data = str(largest.relative_to(dataset.server.folder)), largest.read_bytes()
        for fault, answer in [*FAULTS.items()][-1 if there else 0 :]:
            root = tmp_path / ("root" if there else fault)
            before = content(root)
            dataset.server.answer(name, answer(data))
            with pytest.raises(DatasetError) as raised:
                dataset.construct(root=root, download="force" if there else True)
            assert largest.name.split(".")[0] in unquote(str(raised.value)), "the message names the file"
            assert fault not in ("404", "a page") or isinstance(raised.value, DownloadError)
            assert {path: held for path, held in content(root).items() if ".making" not in path} == before
            dataset.server.heal(name)
            again = "force" if there or isinstance(raised.value, CorruptDatasetError) else True
            assert equal(dataset.construct(root=root, download=again)[:], expected)

"""Files of the Hugging Face hub arrive whole, and its errors say how to go on by hand."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interop.datasets.errors import DownloadError
from interop.datasets.hub import HubFile, hub_download, hub_files
from tests.interop.datasets.server import Answer, Server
from tests.interop.datasets.test_answers import answer, raw

DATA = bytes(range(256)) * 100
SHA256 = hashlib.sha256(DATA).hexdigest()
LARGE = HubFile("data/a b.bin", len(DATA), SHA256)
PATH = f"datasets/me/things/{LARGE.path}"


@pytest.fixture
def upstream(hub: Server) -> Server:
    """The repository `me/things`, of a small file and a large one."""
    folder = hub.folder / "datasets" / "me" / "things"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("what it is")
    (folder / LARGE.path).write_bytes(DATA)
    return hub


def fails(files: list[HubFile], to: Path, match: str) -> None:
    with pytest.raises(DownloadError, match=match) as caught:
        hub_download("me/things", files, to)
    assert all(text in str(caught.value) for text in ("datasets/me/things", files[0].path, "from_local="))
    assert not (to / files[0].path).exists()


def test_files_are_listed_and_downloaded(upstream: Server, tmp_path: Path) -> None:
    assert hub_files("me/things") == [HubFile("README.md", 10), LARGE]
    assert hub_files("me/things", "data/") == [LARGE]
    readme = hashlib.sha256(b"what it is").hexdigest()
    assert hub_download("me/things", hub_files("me/things"), tmp_path) == {"README.md": readme, LARGE.path: SHA256}
    assert (tmp_path / LARGE.path).read_bytes() == DATA


def test_files_that_are_there_are_not_asked_for(upstream: Server, tmp_path: Path) -> None:
    hub_download("me/things", [LARGE], tmp_path)
    asked = len(upstream.requests)
    assert hub_download("me/things", [LARGE], tmp_path) == {LARGE.path: SHA256}
    assert len(upstream.requests) == asked
    (tmp_path / LARGE.path).write_bytes(b"x" + DATA[1:])
    assert hub_download("me/things", [LARGE], tmp_path) == {LARGE.path: SHA256}
    assert (tmp_path / LARGE.path).read_bytes() == DATA


def test_a_cut_connection_is_tried_again(upstream: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    upstream.answer(PATH, Answer(cut=10_000, methods=("GET",)), times=1)
    assert hub_download("me/things", [LARGE], tmp_path) == {LARGE.path: SHA256}


def test_what_came_is_checked(upstream: Server, tmp_path: Path) -> None:
    upstream.answer(PATH, Answer(body=DATA[::-1], methods=("GET",)), times=1)
    fails([LARGE], tmp_path, f"not {SHA256}")
    fails([HubFile(LARGE.path, 7)], tmp_path, "bytes, not 7")


def test_errors_of_the_hub(upstream: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fails([HubFile("other.bin")], tmp_path, "404")
    upstream.answer(PATH, Answer(status=403))
    fails([LARGE], tmp_path, "403")
    with pytest.raises(DownloadError, match=f"{upstream.url}/datasets/me/other.*NotFound"):
        hub_files("me/other")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"127.0.0.1:9/datasets/me/things: ConnectError[\s\S]*from_local="):
        hub_files("me/things")


LATE = """
import importlib.abc, sys, warnings
warnings.simplefilter("ignore")
from interop.datasets import hub
from interop.datasets.errors import DownloadError

class Interrupts(importlib.abc.MetaPathFinder):
    left = 0
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "huggingface_hub":
            Interrupts.left -= 1
            if not Interrupts.left:
                raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
for number in (1, 4, 7):
    for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    Interrupts.left = number
    found = []
    for _ in range(2):
        try:
            hub.hub_files("me/things")
        except BaseException as error:
            found.append(type(error))
    assert found in ([KeyboardInterrupt, DownloadError], [DownloadError] * 2), (number, found)
    assert number > 7 or found[0] is KeyboardInterrupt
"""


def test_an_interrupt_while_the_library_of_the_hub_is_imported() -> None:
    """It stays what it is, and the next call works."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LATE]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_list_that_is_no_list(upstream: Server) -> None:
    place = "api/datasets/me/things"
    for body in (b"<html>Sign in</html>", b"[]", b'{"siblings": 3}', b'{"siblings": [{"rfilename": "../a"}]}', b"[" * 10**5,
                 b'{"siblings": [{"rfilename": "a", "size": "3"}]}', b'{"siblings": [{"rfilename": null}]}'):  # fmt: skip
        upstream.answer(place, Answer(body=body), times=1)
        with pytest.raises(DownloadError, match="from_local="):
            hub_files("me/things")


def test_the_token_stays_with_the_hub(upstream: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be at another host, which does not get it."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with raw(answer(body=DATA)) as other:
        upstream.answer(PATH, Answer(redirect=other.url))
        assert hub_download("me/things", [LARGE], tmp_path) == {LARGE.path: SHA256}
        assert "hf_secret" not in "".join(other.requests)
    upstream.heal(PATH)
    with raw(lambda request: answer(body=DATA) if "Bearer hf_secret" in request else answer(401)) as other:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", other.url.rpartition("/")[0])
        assert hub_download("me/things", [LARGE], tmp_path / "again") == {LARGE.path: SHA256}

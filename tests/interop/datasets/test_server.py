"""The server of these tests answers as the clients of the hub need it."""

from pathlib import Path

import gymnasium
import minari
import numpy as np
import pytest
from huggingface_hub import HfApi, dataset_info, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from minari import namespace

from tests.interop.datasets.server import Server, publish_minari


@pytest.fixture
def repo(hub: Server) -> Path:
    """The repository `me/things`, of a small file and a large one."""
    folder = hub.folder / "datasets" / "me" / "things"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("what it is")
    (folder / "data" / "a b.bin").write_bytes(bytes(range(256)) * 100)
    return folder


def test_the_hub_lists_and_describes_a_repository(repo: Path) -> None:
    assert [each.id for each in HfApi().list_datasets(author="me")] == ["me/things"]
    assert not list(HfApi().list_datasets(author="you")) + list(HfApi().list_datasets(dataset_name="other"))
    readme, large = HfApi().dataset_info("me/things", files_metadata=True).siblings
    assert (readme.rfilename, readme.size, readme.lfs) == ("README.md", 10, None)
    assert (large.rfilename, large.lfs.size) == ("data/a b.bin", 25600)
    assert dataset_info("me/things").id == "me/things"


def test_the_hub_gives_files(repo: Path, tmp_path: Path) -> None:
    assert Path(hf_hub_download("me/things", "README.md", repo_type="dataset")).read_text() == "what it is"
    here = hf_hub_download("me/things", "data/a b.bin", repo_type="dataset", local_dir=tmp_path / "to")
    assert Path(here) == tmp_path / "to" / "data" / "a b.bin"
    assert Path(here).read_bytes() == (repo / "data" / "a b.bin").read_bytes()
    snapshot_download("me/things", repo_type="dataset", local_dir=tmp_path / "all", allow_patterns="data/*")
    assert (tmp_path / "all" / "data" / "a b.bin").is_file()
    assert not (tmp_path / "all" / "README.md").exists()


def test_the_hub_says_what_it_does_not_have(repo: Path) -> None:
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("me/things", "other", repo_type="dataset")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download("me/things", "README.md", repo_type="dataset", revision="other")
    with pytest.raises(RepositoryNotFoundError):
        HfApi().dataset_info("me/other")


@pytest.mark.filterwarnings("ignore:.*is set to None:UserWarning", "ignore:Implicitly cleaning up:ResourceWarning")
def test_minari_downloads(hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari 0.5 finds only datasets in a namespace."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "written"))
    namespace.create_namespace("cart")
    with minari.DataCollector(gymnasium.make("CartPole-v1")) as env:
        env.reset(seed=0)
        while not any(env.step(env.action_space.sample())[2:4]):
            pass
        env.create_dataset("cart/pole-v0")
    written = minari.load_dataset("cart/pole-v0")[0]
    publish_minari(hub, tmp_path / "written" / "cart")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "local"))
    minari.download_dataset("cart/pole-v0")
    np.testing.assert_array_equal(minari.load_dataset("cart/pole-v0")[0].observations, written.observations)

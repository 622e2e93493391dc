"""What `inspect` says, without torch and JAX, and without reading rows."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fbuf
import interop
from fbuf import Buffer, Uniform
from interop import UnknownPathError, inspect
from tests.interop.looking.places import a_checkpoint, a_folder, a_list, an_ensemble, sparse

ROOT = Path(__file__).parents[3]


def test_a_checkpoint_names_its_components_and_keys(tmp_path: Path) -> None:
    facts = inspect(a_checkpoint(tmp_path / "saved"))
    assert facts.kind == "checkpoint"
    about = facts.about
    assert (about["size"], about["capacity"], about["written"], about["cursor"]) == (30, 100, 30, 30)
    assert about["class"] == "TensorDictPrioritizedReplayBuffer"
    assert about["sampler"].startswith("PrioritizedSampler(max_capacity=100, alpha=0.6, beta=0.4")
    assert about["storage"].startswith("LazyTensorStorage(max_size=100")
    keys = {each["key"]: each for each in facts.keys}
    assert keys["next.observation"] == {
        "key": "next.observation", "dtype": "float32", "shape": [3], "bytes": 360,
    }  # fmt: skip
    assert keys["note"]["dtype"] == "text"
    assert "PrioritizedSampler" in str(facts) and "next.observation" in str(facts)
    assert json.loads(json.dumps(facts.to_dict()))["about"]["size"] == 30


def test_lists_ensembles_states_and_folders_of_them(tmp_path: Path) -> None:
    an_ensemble(tmp_path / "ensemble")
    a_list(tmp_path / "list")
    buffer = Buffer(sampler=Uniform(), capacity=8)
    fbuf.save_state(tmp_path / "state", buffer.init({"x": torch.zeros(3).numpy()}))
    a_folder(tmp_path / "below" / "rows")
    facts = inspect(tmp_path)
    assert facts.kind == "folder"
    members = {Path(each.path).name: each for each in facts.members}
    assert set(members) == {"ensemble", "list", "state", "rows"}
    assert [each.about["size"] for each in members["ensemble"].members] == [30, 7]
    assert (members["list"].about["size"], members["list"].about["capacity"]) == (3, 10)
    assert members["rows"].about["checksums"] == "of all blocks"
    assert any(".items" in each["key"] or "x" in each["key"] for each in members["state"].keys)
    assert "SamplerEnsemble" in members["ensemble"].about["sampler"]


def test_a_folder_of_rows_says_who_writes_and_what_was_cut_off(tmp_path: Path) -> None:
    storage = interop.LazyMemmapStorage(20, scratch_dir=tmp_path / "rows")
    storage.set(range(4), torch.arange(8.0).reshape(4, 2))
    facts = inspect(tmp_path / "rows")
    assert facts.about["size"] == 4
    if Path("/proc/locks").exists():
        assert facts.about["open for writing by process"].startswith(f"{os.getpid()} (")  # and how it was started
    storage.close()
    assert "open for writing by process" not in inspect(tmp_path / "rows").about


def test_what_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing at"):
        inspect(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownPathError, match="an empty folder"):
        inspect(tmp_path / "empty")
    (tmp_path / "empty" / "note.txt").write_text("hello")
    with pytest.raises(UnknownPathError, match="nothing that can be read"):
        inspect(tmp_path / "empty")


@pytest.mark.parametrize("size", [pytest.param(1 << 31, id="2 GiB"), pytest.param(100 << 30, id="100 GiB")])
def test_large_rows_are_not_read(size: int, tmp_path: Path) -> None:
    sparse(tmp_path / "rows", size)
    code = (
        "import sys, resource, json, re, interop\n"
        f"facts = interop.inspect({str(tmp_path / 'rows')!r})\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "most = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "print(json.dumps([facts.bytes, most, used.ru_utime + used.ru_stime, sorted(sys.modules)]))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    held, memory, seconds, modules = json.loads(output)
    assert held >= size
    assert memory < 200 << 10  # KiB
    assert seconds < 2
    assert not {"torch", "jax", "tensordict"} & set(modules)
    before = time.process_time()
    buffer = interop.open(tmp_path / "rows")
    assert buffer[-1].sum() == 0 and time.process_time() - before < 2

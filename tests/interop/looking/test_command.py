"""The command: exit statuses, JSON, what it loads, and each conversion."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import interop
from fbuf.checkpoint import CheckpointMismatch
from interop.command.app import main
from interop.doctor import doctor, environment, wheels_that_do_not_fit
from tests.interop.looking.places import a_buffer, a_checkpoint, a_folder, an_ensemble

ROOT = Path(__file__).parents[3]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(each) for each in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_statuses_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, rows = a_checkpoint(tmp_path / "saved"), a_folder(tmp_path / "rows")
    status, out, _ = run(capsys, "inspect", saved, rows, "--json")
    assert status == 0 and [each["kind"] for each in json.loads(out)] == ["checkpoint", "rows"]
    assert run(capsys, "verify", saved, rows)[0] == 0
    status, out, err = run(capsys, "inspect", tmp_path / "nothing", "--json")
    assert status == 2 and "nothing at" in json.loads(out)["error"] and "nothing at" in err
    assert run(capsys, "inspect")[0] == 2 and run(capsys, "fly", saved)[0] == 2 and run(capsys, "--help")[0] == 0
    with open(rows / "action.memmap", "r+b") as file:
        file.write(b"damage")
    status, out, _ = run(capsys, "verify", "--json", rows)
    assert status == 1 and json.loads(out)["damaged"][0]["file"] == "action.memmap"
    (saved / "MANIFEST.json").chmod(0o644)
    (saved / "MANIFEST.json").write_text("{}")
    assert run(capsys, "inspect", saved)[0] == 1
    assert run(capsys, "seal", rows)[0] == 0 and run(capsys, "verify", rows)[0] == 0


def test_no_path_is_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths that are nothing, or nothing that is known, and files with content that is no JSON or of another structure."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    (tmp_path / "broken.h5").write_bytes(b"no H5")
    name = os.fsdecode(os.fsencode(tmp_path) + b"/no text \xff")
    os.mkdir(name)
    given = [tmp_path / each for each in ("empty", "loop", "pipe", "socket", "broken.h5", "nothing", "x" * 300)]
    for path in [*given, name, "", "\0", "/dev/null"]:
        for command in ("inspect", "verify", "seal", "view"):
            status, out, err = run(capsys, command, path, "--json")
            assert status == 2 or (status == 1 and path == tmp_path / "broken.h5"), (command, path, err)
            assert isinstance(json.loads(out), dict)
    a_checkpoint(tmp_path / "ünï 日本")
    assert run(capsys, "inspect", tmp_path / "ünï 日本")[0] == 0
    lerobot, minari = tmp_path / "lerobot" / "meta" / "info.json", tmp_path / "minari" / "data" / "metadata.json"
    for text in ("", "[", "[1]", "{}", '{"features": {"a": null}}', '{"features": 3, "a": NaN}', "[" * 10_000):
        for file in (lerobot, minari):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            for command in ("inspect", "verify", "view"):
                status, out, _ = run(capsys, command, file.parents[1], "--json")
                assert status in (0, 1, 2) and isinstance(json.loads(out), dict)


def test_interrupts_and_closed_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = a_checkpoint(tmp_path / "saved")
    command = [sys.executable, "-m", "interop", "inspect", *[str(saved)] * 200]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (2, b"")
    monkeypatch.setattr("interop.command.app.inspect", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(["inspect", str(tmp_path)]) == 130


def test_the_page_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = a_checkpoint(tmp_path / "saved")
    with mock.patch.object(interop.view, "serve") as serve:
        assert run(capsys, "view", saved, "--serve", "--port", 0)[0] == 0
    assert len(serve.call_args.args[0]) == 30 and serve.call_args.args[1] == 0


def test_the_command_is_there_as_a_module_and_loads_little(tmp_path: Path) -> None:
    saved = a_checkpoint(tmp_path / "saved")
    command = [sys.executable, "-X", "importtime", "-m", "interop", "inspect", str(saved)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0 and "PrioritizedSampler" in process.stdout
    names = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "numpy" in names and not {"torch", "jax", "tensordict", "rich", "pyarrow", "h5py"} & names


def test_rows_are_converted_and_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, rows = a_checkpoint(tmp_path / "saved"), a_folder(tmp_path / "rows")
    assert run(capsys, "convert", saved, tmp_path / "copied", "--to", "rows")[0] == 0
    copied = interop.open(tmp_path / "copied")
    assert (copied[:].exclude("index") == a_buffer()[:].exclude("index")).all()
    assert interop.verify(tmp_path / "copied").notes == []
    status, out, _ = run(capsys, "merge", saved, rows, tmp_path / "merged", "--json")
    assert status == 0 and json.loads(out)["about"]["size"] == 50
    merged = interop.open(tmp_path / "merged")
    assert merged[30:]["action"].flatten().tolist() == list(range(10, 30))  # the oldest row of the ring first
    assert run(capsys, "merge", saved, rows, tmp_path / "merged")[0] == 2  # it is there
    assert run(capsys, "merge", saved, tmp_path / "nothing", tmp_path / "never")[0] == 2
    assert not (tmp_path / "never").exists()


def test_files_of_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    saved = a_checkpoint(tmp_path / "saved")
    status, out, _ = run(capsys, "convert", saved, tmp_path / "hub", "--to", "hub", "--json")
    assert status == 0 and json.loads(out)["about"]["size"] == 30
    assert run(capsys, "verify", tmp_path / "hub")[0] == 0
    [part, *_] = (tmp_path / "hub" / "data").glob("*.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 0xFF
    part.write_bytes(content[:-9])
    assert run(capsys, "verify", tmp_path / "hub")[0] == 1


def test_resize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, rows = a_checkpoint(tmp_path / "saved"), a_folder(tmp_path / "rows")
    for source in (saved, rows, an_ensemble(tmp_path / "ensemble")):
        target = tmp_path / f"small {source.name}"
        assert run(capsys, "resize", source, target, 5)[0] == 0
        opened = interop.open(target)
        members = opened.members if source.name == "ensemble" else [opened]
        assert members[0][:]["action"].flatten().tolist() == [25, 26, 27, 28, 29]
    assert run(capsys, "resize", saved, rows, 5)[0] == 2
    assert run(capsys, "resize", saved, tmp_path / "x", 0)[0] == 2 and not (tmp_path / "x").exists()


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SECRET_TOKEN", "hunter2")
    found = doctor(tmp_path)
    assert found.sections["devices"]["DLPack on cpu"] == "works"
    assert {found.sections["file system"][name] for name in ("flock", "fsync", "rename", "shared maps")} == {"works"}
    assert environment()["JAX_SECRET_TOKEN"] == "(hidden)" and "hunter2" not in str(found)
    assert list(tmp_path.iterdir()) == []
    assert (
        json.loads(json.dumps(found.to_dict()))["versions"]["torch"].partition("+")[0]
        == torch.__version__.partition("+")[0]
    )
    status, out, _ = run(capsys, "doctor", tmp_path)
    assert status == (0 if found.ok else 2) and "problems" in out
    assert isinstance(wheels_that_do_not_fit(), list)
    interop.show_versions()
    assert "fbuf and interop: " in capsys.readouterr().out
    assert run(capsys, "doctor", tmp_path / "nothing")[0] == 2


def test_a_checkpoint_is_viewed_and_converted_without_its_transform(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = a_buffer()
    buffer.append_transform(lambda data: data.set("two", data["next", "reward"] * 2))
    buffer.dumps(tmp_path / "saved")
    with pytest.raises(CheckpointMismatch, match="transform"):
        interop.open(tmp_path / "saved")
    status, _, error = run(capsys, "view", tmp_path / "saved", "--out", tmp_path / "page.html")
    assert (status, error) == (0, "") and (tmp_path / "page.html").stat().st_size > 10_000
    assert interop.view.write(tmp_path / "saved", tmp_path / "again.html").is_file()
    assert run(capsys, "convert", tmp_path / "saved", tmp_path / "rows")[0] == 0

"""Damage to any file of a queue is an error or has no effect: rows that are read are rows that were put."""

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fbuf.checkpoint import CheckpointCorrupt
from interop.transfer_queue import QueueFiles
from interop.transfer_queue.segments import write_segment
from tests.faults.file_operations import watched

FIELDS = ("dense", "ragged", "text", "objects")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begin(path: Path) -> QueueFiles:
    generation, _ = QueueFiles.begin(path, lambda rows: [row.index for row in rows])
    return QueueFiles(path, generation)


def prepared(path: Path) -> QueueFiles:
    """A run of one put, with a field of each layout."""
    files = begin(path)
    fields: dict[str, Any] = {
        "dense": torch.arange(6).view(2, 3),
        "ragged": [torch.ones(2), torch.full((3,), 2.0)],
        "text": ["hello", "wörld"],
        "objects": [{"a": 1}, (1, b"x")],
    }
    files.put("p", [0, 1], fields, ["ka", "kb"], [{"t": 1}, {"t": (2, "x")}])
    return files


def found(path: Path) -> dict[int, Any]:
    """All that an object says which knows nothing."""
    files, rows = QueueFiles(path, 1), {}
    try:
        for row in files.stored():
            values = files.get([row.index], row.fields)
            plain = {
                name: [each.tolist() for each in value.unbind()] if kind == "tensor" else value
                for name, (kind, value) in values.items()
            }
            rows[row.index] = (row.partition, row.key, row.tags, plain)
        return rows
    finally:
        files.close()


def damages(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Each byte changed in one bit, each end cut off, some bytes lost, bytes too many."""
    for at in range(len(raw)):
        yield f"bit {at % 8} of byte {at}", raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :]
    for size in range(len(raw)):
        yield f"cut to {size} bytes", raw[:size]
    for at in range(0, len(raw) - 8, 9):
        yield f"zeros at {at}", raw[:at] + bytes(8) + raw[at + 8 :]
        yield f"8 bytes lost at {at}", raw[:at] + raw[at + 8 :]
    yield "zeros after the end", raw + bytes(64)


@pytest.mark.parametrize("name", ["segment", "log"])
def test_damage_is_an_error_or_has_no_effect(tmp_path: Path, name: str) -> None:
    files = prepared(tmp_path)
    [segment] = (tmp_path / "segments").iterdir()
    path = tmp_path / "log" if name == "log" else segment
    raw, whole, refused = path.read_bytes(), found(tmp_path), 0
    assert len(whole) == 2
    for what, damaged in damages(raw):
        path.write_bytes(damaged)
        try:
            rows = found(tmp_path)
        except CheckpointCorrupt as error:
            assert str(tmp_path) in str(error)
            refused += 1
        else:
            # a log that is cut within its last entry is that of a put that a kill has stopped
            assert rows == whole or (what.startswith("cut") and name == "log" and rows == {}), what
    assert refused > len(raw)
    path.write_bytes(raw)
    assert found(tmp_path) == whole
    files.close()


def test_a_run_that_begins_removes_nothing_of_a_damaged_folder(tmp_path: Path) -> None:
    prepared(tmp_path / "whole").close()
    log = (tmp_path / "whole" / "log").read_bytes()
    first = log.index(b"\n")

    def lost_segment(path: Path) -> None:
        next((path / "segments").iterdir()).rename(path / "elsewhere")

    kinds: dict[str, Callable[[Path], Any]] = {
        "no log": lambda path: (path / "log").unlink(),
        "no log, but one that was not committed": lambda path: (path / "log").rename(path / "log.staged"),
        "empty log": lambda path: (path / "log").write_bytes(b""),
        "a part of the first entry": lambda path: (path / "log").write_bytes(log[:first]),
        "zeros": lambda path: (path / "log").write_bytes(bytes(len(log))),
        "no segment": lost_segment,
    }
    for kind, damage in kinds.items():
        path = tmp_path / kind
        shutil.copytree(tmp_path / "whole", path)
        damage(path)
        before = {each.name: each.read_bytes() for each in path.rglob("*") if each.is_file() and each.name != "lock"}
        with pytest.raises(CheckpointCorrupt):
            begin(path)
        with pytest.raises(CheckpointCorrupt):
            QueueFiles(path, 1).stored()
        after = {each.name: each.read_bytes() for each in path.rglob("*") if each.is_file() and each.name != "lock"}
        assert {**after, **before} == after, kind


@pytest.mark.parametrize("damage", [Path.unlink, lambda log: log.write_bytes(b"")])
def test_a_log_that_is_lost_while_a_run_writes_is_an_error(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    files = prepared(tmp_path)
    damage(tmp_path / "log")
    calls = {"put": lambda: files.put("p", [2], {"x": [1]}), "get": lambda: files.get([0], ["text"])}
    for call in (*calls.values(), files.stored, lambda: files.clear([0])):
        with pytest.raises(CheckpointCorrupt, match="Which rows are stored cannot be told"):
            call()
    assert len(list((tmp_path / "segments").iterdir())) == 1


def test_a_folder_without_rows_may_have_no_log(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()  # what a first run leaves that is killed
    assert QueueFiles(tmp_path, 1).stored() == []
    assert prepared(tmp_path).stored()


@pytest.mark.parametrize(
    ("fields", "rows", "match"),
    [
        ({"dense": torch.ones(3), "ragged": [torch.ones(1)] * 2, "text": ["", ""], "objects": [1, 2]}, 2, "3 rows"),
        ({"dense": torch.ones(2), "ragged": [torch.ones(1)] * 2, "text": [""], "objects": [1, 2]}, 2, "1 rows"),
        ({"dense": torch.ones(1), "ragged": [torch.ones(1)], "text": [""], "objects": [1]}, 1, "the file has 1 rows"),
        ({"dense": torch.ones(2), "text": ["", ""], "objects": [1, 2]}, 2, "'ragged'.* missing"),
    ],
)
def test_counts_that_disagree_are_an_error(tmp_path: Path, fields: dict, rows: int, match: str) -> None:
    prepared(tmp_path)
    [segment] = (tmp_path / "segments").iterdir()
    segment.unlink()
    write_segment(segment, fields, [None] * rows, [{}] * rows)
    with pytest.raises(CheckpointCorrupt, match=match) as caught:
        QueueFiles(tmp_path, 1).get([0, 1], FIELDS)
    assert str(segment) in str(caught.value)


ONE = {"f": [1, 2]}


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda files: files.put("p", [0, 1], ONE, keys=["a"]), ValueError, "keys: 1 rows, 2 indexes"),
        (lambda files: files.put("p", [0, 1], ONE, keys=[]), ValueError, "keys: 0 rows, 2 indexes"),
        (lambda files: files.put("p", [0, 1], ONE, tags=[{}] * 3), ValueError, "tags: 3 rows, 2 indexes"),
        (lambda files: files.put("p", [0, 1], ONE, keys=[("a",), "b"]), TypeError, "a key must be a str"),
        (lambda files: files.put("p", [0, 1], ONE, tags=[{}, "b"]), TypeError, "tags of a row must be a dict"),
        (lambda files: files.put("p", [0, 1], {3: [1, 2]}), TypeError, "name of a field must be a str"),
        (lambda files: files.put(7, [0, 1], ONE), TypeError, "partition must be a str"),
        (lambda files: files.put("p", [0.5, 1], ONE), TypeError, "integer"),
    ],
)
def test_a_put_that_could_not_be_read_is_refused(
    tmp_path: Path, call: Callable[[QueueFiles], None], error: type[Exception], match: str
) -> None:
    files = prepared(tmp_path)
    before = found(tmp_path)
    with pytest.raises(error, match=match):
        call(files)
    assert len(list((tmp_path / "segments").iterdir())) == 1
    assert found(tmp_path) == before and begin(tmp_path).stored() == QueueFiles(tmp_path, 1).stored()


def test_integers_of_numpy_and_torch_are_indexes(tmp_path: Path) -> None:
    prepared(tmp_path)
    for indexes in (lambda rows: torch.arange(4, 4 + len(rows)), lambda rows: torch.arange(len(rows)).numpy()):
        generation, stored = QueueFiles.begin(tmp_path, indexes)
    files = QueueFiles(tmp_path, generation)
    assert [row.index for row in stored] == [row.index for row in files.stored()] == [0, 1]
    assert files.get(torch.tensor([1]), ["text"])["text"] == ("values", ["wörld"])
    assert files.get([], ["text", "dense"]) == {"text": ("values", []), "dense": ("values", [])}
    for wrong in (lambda rows: [0.0, 1.0], lambda rows: ["0", "1"]):
        with pytest.raises(TypeError):
            QueueFiles.begin(tmp_path, wrong)
    files.clear(torch.tensor([0, 1]))
    assert files.stored() == []


@pytest.mark.parametrize("failing", ["open", "write", "rename", "unlink"])
def test_a_full_disk_fails_no_call_that_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Every place of puts and clears, of which each writes the log anew: an error is a call that is not committed."""
    monkeypatch.setattr("interop.transfer_queue.log._COMPACT_FROM", 1)
    stored = {0: ("ka", 0)}

    def rows(path: Path) -> dict[int, Any]:
        files = QueueFiles(path, 1)
        found = {row.index: (row.key, files.get([row.index], ["f"])["f"][1].item()) for row in files.stored()}
        files.close()
        return found

    calls = {
        "put": (lambda files: files.put("p", [0], {"f": torch.tensor([5])}, ["kb"]), {0: ("kb", 5)}),
        "clear": (lambda files: files.clear([0]), {}),
    }
    for name, (call, after) in calls.items():
        for at in itertools.count():
            path = tmp_path / f"{name}{at}"
            files = begin(path)
            files.put("p", [0], {"f": torch.tensor([0])}, ["ka"])
            files._log._compact_at = 1  # else the log is written anew from four times its length on
            reached: list[int] = []

            def hook(number: int, operation: str, when: str, *_: Any, at: int = at, seen: list[int] = reached) -> Any:
                if (when, operation) == ("before", failing):
                    seen.append(number)
                return full if (when, operation) == ("before", failing) and len(seen) > at else None  # and all after it

            try:
                with watched(hook):
                    call(files)
                assert rows(path) == after, (name, at)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                assert rows(path) == stored, (name, at)
                assert failing == "unlink" or len(list((path / "segments").iterdir())) == 1, (
                    "its file is removed at once"
                )
            call(files)
            assert rows(path) == after
            assert len(list((path / "segments").iterdir())) == len(after)
            if len(reached) <= at:
                break
        assert at >= (failing != "open"), "no operation was reached"


def full(*args: Any, **kwargs: Any) -> Any:
    raise FULL


def test_rows_are_listed_while_others_write(tmp_path: Path) -> None:
    writer, errors, done = begin(tmp_path), [], threading.Event()
    reads = [0, 0]

    def read(number: int) -> None:
        try:
            files = QueueFiles(tmp_path, 1)
            while not done.is_set():
                assert {row.index for row in files.stored()} <= set(range(8))
                reads[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    step = 0
    while not errors and (step < 100 or min(reads) < 20) and step < 2000:
        writer.put("p", range(8), {"x": list(range(8))})
        writer.put("p", [0], {"x": [1]})
        writer.clear(range(8))
        step += 1
    done.set()
    for thread in threads:
        thread.join()
    assert errors == [] and min(reads) >= 20


def test_a_put_of_no_rows_leaves_no_file(tmp_path: Path) -> None:
    files = prepared(tmp_path)
    files.put("p", [], {"f": []})
    assert len(files.stored()) == 2 and len(list((tmp_path / "segments").iterdir())) == 1

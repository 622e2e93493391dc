"""What all datasets share: fetch, convert, commit, once; a dataset is there as a whole or not at all."""

import errno
import gc
import json
import os
import pickle
import resource
import shutil
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf import NotEnoughDiskError, free_memory
from interop import RoundRobinWriter
from interop.datasets import committed, conversion, errors, splitting
from interop.datasets.source import Part
from tests.interop.datasets import sources_toy
from tests.interop.datasets.sources_toy import LENGTHS, ROWS, ToySource, content, edit, same

EPISODES = [length for lengths in LENGTHS for length in lengths]


# ------------------------------------------------------------------ conversion


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])  # or as below, in forks
def test_rows_come_in_order(toy, rows, workers):
    dataset = toy(num_workers=workers)
    assert same(dataset[:], rows) and len(dataset) == ROWS
    assert sources_toy.calls == ["download", "parts", *["read"] * 3 * (not workers)]
    assert dataset.metadata == {"files": ["0.json", "1.json", "2.json"]}


def test_counts_that_were_announced_wrongly(toy, tmp_path):
    for announced, found in ((6, "3 rows, 6"), (2, "3 rows or more, 2")):
        edit(tmp_path / "up/1.json", lambda held, announced=announced: held.update(rows=announced))
        with pytest.raises(errors.CorruptDatasetError, match=rf"1\.json has {found} were announced"):
            toy(download="force")
    assert not (tmp_path / "root/toy").exists()
    edit(tmp_path / "up/1.json", lambda held: held.update(rows=6))
    assert len(toy(download="force", at_most=True)) == ROWS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.update(extra=[0] * 3), "1.json: extra is torch.int64 .*, in the first rows it is missing"),
        (lambda held: held.pop("text"), "1.json: text is missing, in the first rows it is text"),
        (lambda held: held.update(observation=[[0.5]] * 3), r"1.json: observation is torch.float64 \[1\], .* \[2\]"),
        (lambda held: held.update(text=["a"]), "1.json, episode 2: text has 1 rows, there are 3 steps"),
    ],
)
def test_files_that_do_not_agree(toy, tmp_path, change, message):
    edit(tmp_path / "up/1.json", lambda held: change(held["episodes"][0]))
    with pytest.raises(errors.CorruptDatasetError, match=message):
        toy()
    assert not (tmp_path / "root/toy").exists()


def work(how: int, task: int) -> tuple[int, int, int]:
    time.sleep(0.05 * (task % 3 == 0))
    if task == how:
        os._exit(1) if how == 7 else int("x")
    return task, os.getpid(), torch.get_num_threads()


FORKED = """
import os
from functools import partial
from interop.datasets.in_order import by_processes
from tests.interop.datasets.test_pipeline import work

done = []
try:
    for each in by_processes(partial(work, how), range(10), 2, method="fork", threads=3, max_tasks_per_child=per):
        done.append(each)
except Exception as error:
    print(type(error).__name__, error)
print([task for task, _, _ in done], {each[2] for each in done}, len({each[1] for each in done} - {os.getpid()}) > 2)
print(*by_processes(len, ["ab"], 0))
"""


def test_results_of_processes_come_in_order(in_a_fork):
    assert in_a_fork(FORKED, how=-1, per=None).splitlines() == [f"{[*range(10)]} {{3}} False", "2"]
    assert in_a_fork(FORKED, how=-1, per=2).splitlines() == [f"{[*range(10)]} {{3}} True", "2"]
    for how, message in ((5, "ValueError invalid literal"), (7, "DatasetError a worker process died. Of a lack of")):
        said = in_a_fork(FORKED, how=how, per=None)
        assert said.startswith(message) and f"\n{[*range(10)]}"[: 3 * 4] in said


def test_rows_that_are_written_are_freed_without_a_garbage_collection(tmp_path):
    read = []

    class Watched(ToySource):
        def parts(self, folder):
            return [Part(256, folder, (part,)) for part in range(3)]

        def read(self, part):
            for _ in range(2):
                rows = TensorDict({"x": torch.rand(128, 4), "next": {"y": torch.rand(128)}}, [128])
                read.append(weakref.ref(rows["x"]))
                yield rows
                del rows

    (tmp_path / "up").mkdir()
    gc.collect()
    gc.disable()
    try:
        conversion.convert(Watched("watched"), tmp_path / "up", tmp_path / "rows")
        assert len(read) == 6 and [rows() for rows in read] == [None] * 6
    finally:
        gc.enable()


def test_memory_is_bounded(in_a_fork, tmp_path):
    """128 MB of rows, in episodes of 0.5 MB."""
    (tmp_path / "up").mkdir()
    told = in_a_fork(
        """
        import torch
        from dataclasses import dataclass
        from pathlib import Path
        from tensordict import TensorDict
        from interop.datasets.conversion import convert
        from interop.datasets.source import Part
        from tests.interop.datasets.sources_toy import ToySource

        def anonymous():
            return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) // 1024

        class Large(ToySource):
            def parts(self, folder):
                return [Part(1 << 10, folder, (part,)) for part in range(32)]

            def read(self, part):
                for _ in range(8):
                    most.append(anonymous())
                    yield TensorDict({"x": torch.rand(128, 1024)}, [128])

        most = [anonymous()]
        convert(Large("large"), Path(folder), Path(folder, "rows"))
        print(max(most) - most[0])
        """,
        folder=str(tmp_path / "up"),
    )
    assert int(told) < 96, "MB: 60 to 78 were seen, by how threads and their arenas fall out"


# ------------------------------------------------------------------ what is there already


def test_a_second_construction_touches_nothing(toy, rows, tmp_path):
    toy()
    shutil.rmtree(tmp_path / "up")
    before = content(tmp_path / "root")
    for download in (True, False):
        assert same(toy(download=download)[:], rows) and not sources_toy.calls
    assert content(tmp_path / "root") == before
    assert sorted(os.listdir(tmp_path / "root")) == [".toy.sha256.json", "toy"]


def test_nothing_is_there(toy, tmp_path):
    with pytest.raises(errors.MissingDatasetError, match=r"root/toy.*download=True.*from_local=") as raised:
        toy(download=False)
    assert isinstance(raised.value, FileNotFoundError) and not (tmp_path / "root").exists()
    with pytest.raises(FileNotFoundError, match=r"none at .*nowhere"):
        toy(from_local=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="download must be True, False or 'force', got 'yes'"):
        toy(download="yes")


@pytest.mark.parametrize("dataset_id", ["", "a/../../b", "/a"])
def test_ids_that_are_no_folder_below_the_root(toy, dataset_id, tmp_path):
    with pytest.raises(ValueError, match="names a folder below the root"):
        toy(dataset_id)
    assert not (tmp_path / "root").exists()


def test_force_downloads_and_converts_anew(toy, rows, tmp_path):
    old = toy()
    changed = sources_toy.make(tmp_path / "up", np.random.default_rng(1))
    assert same(toy()[:], rows)
    new = toy(download="force")
    assert same(new[:], changed) and same(toy()[:], changed)
    assert same(old[:], rows), "maps outlive their files"


def test_files_that_the_user_has(toy, rows, tmp_path):
    local = shutil.copytree(tmp_path / "up", tmp_path / "local")
    assert same(toy(from_local=local, upstream="nowhere")[:], rows) and "download" not in sources_toy.calls
    before = content(tmp_path / "root")
    shutil.copytree(local, tmp_path / "other")
    with pytest.raises(ValueError, match=r"made from \{'from_local': .*/local'\}, not .*/other'"):
        toy(from_local=tmp_path / "other", upstream="nowhere")
    assert same(toy(download=False, upstream="nowhere")[:], rows)
    assert content(tmp_path / "root") == before
    changed = sources_toy.make(local, np.random.default_rng(1))
    assert same(toy(from_local=local, upstream="nowhere", download="force")[:], changed)


def test_files_that_changed_in_some_way(toy, rows, tmp_path):
    """Sizes, times, names: each counts. A conversion below the folder of the files does not."""
    local, folder = shutil.copytree(tmp_path / "up", tmp_path / "local"), tmp_path / "local/root"

    def conversions() -> int:
        sources_toy.calls.clear()
        found = toy(from_local=local, upstream="nowhere", root=folder)
        assert len(found) == ROWS
        return sources_toy.calls.count("parts")

    assert [conversions(), conversions()] == [1, 0]
    text, state = (local / "2.json").read_text(), (local / "2.json").stat()
    (local / "2.json").write_text(text + " ")
    os.utime(local / "2.json", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert [conversions(), conversions()] == [1, 0], "the size"
    os.utime(local / "2.json", ns=(state.st_atime_ns, state.st_mtime_ns + 1000))
    assert [conversions(), conversions()] == [1, 0], "the time"
    (local / "2.json").rename(local / "3.json")
    assert [conversions(), conversions()] == [1, 0], "the name"
    (local / "notes.txt").write_text("x")
    assert [conversions(), conversions()] == [1, 0], "another file"
    toy(upstream=str(tmp_path / "up"), dataset_id="second", root=folder)
    assert conversions() == 0, "another dataset below the folder"


def test_files_that_changed_after_their_rows_were_preprocessed(toy, rows, tmp_path):
    local = shutil.copytree(tmp_path / "up", tmp_path / "local")
    construct = partial(toy, from_local=local, upstream="nowhere")
    construct().preprocess(_without_text, num_workers=0)
    changed = sources_toy.make(local, np.random.default_rng(1))
    with pytest.raises(ValueError, match=r"files in .*/local have changed .*preprocessed. Pass download='force'"):
        construct()
    assert "text" not in toy(upstream="nowhere")[:].keys()  # noqa: SIM118
    assert same(construct(download="force")[:], changed) and same(construct()[:], changed)


def _without_text(rows):
    return rows.exclude("text", ("next", "text"))


def test_files_that_change_meanwhile(toy, rows, tmp_path, monkeypatch):
    local = shutil.copytree(tmp_path / "up", tmp_path / "local")
    convert = committed.convert

    def slow(*args: Any, **more: Any) -> int:
        found = convert(*args, **more)
        (local / "3.json").write_text("{}")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(committed, "convert", slow)
        with pytest.raises(errors.DatasetError, match=r"/local changed while they were converted"):
            toy(from_local=local, upstream="nowhere")
    assert not os.listdir(tmp_path / "root")


@pytest.mark.parametrize("wrong", [{"prefech": 2}, {"num_workers": -1}])
def test_wrong_arguments_are_refused_before_the_download(toy, tmp_path, wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        toy(**wrong)
    assert not sources_toy.calls and not (tmp_path / "root").exists()


def test_other_arguments_and_newer_schemas(toy, tmp_path):
    toy()
    with pytest.raises(ValueError, match=r"made from \{'at_most': False\}, not \{'at_most': True\}: pass another root"):
        toy(at_most=True)
    edit(tmp_path / "root/toy/made_from.json", lambda held: held.update(schema=99))
    with pytest.raises(ValueError, match=r"newer version of this library .schema 99.: upgrade"):
        toy(download=False)


def test_a_damaged_record(toy, rows, tmp_path):
    toy()
    (tmp_path / "root/toy/made_from.json").write_text("{")
    with pytest.raises(errors.CorruptDatasetError, match=r"made_from.json is damaged.*pass download='force'"):
        toy()
    assert same(toy(download="force")[:], rows)


@pytest.mark.parametrize("name", ["storage.json", "observation.memmap", "next/done.memmap", "storage.values"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_dataset(toy, rows, tmp_path, name, damage):
    toy()
    path = tmp_path / "root/toy" / name
    if path.is_dir():
        shutil.rmtree(path) if damage == "gone" else os.truncate(next(path.iterdir()), 1)
    else:
        path.unlink() if damage == "gone" else os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(errors.CorruptDatasetError, match=r"root/toy.*pass download='force'"):
        toy()
    assert same(toy(download="force")[:], rows)


@pytest.mark.parametrize("kind", ["folder", "file", "other dataset", "link"])
def test_something_else_is_in_the_way(toy, rows, tmp_path, kind):
    place = tmp_path / "root/toy"
    place.mkdir(parents=True)
    if kind == "file":
        place.rmdir()
        place.write_text("mine")
    elif kind == "folder":
        (place / "mine").write_text("mine")
    elif kind == "link":
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/a").write_text("mine")
        place.rmdir()
        place.symlink_to(tmp_path / "mine")
    else:
        (place / "made_from.json").write_text(json.dumps({"kind": "a dataset of another family", "schema": 1}))
    before = content(tmp_path / "root")
    for download in (True, "force"):
        with pytest.raises(FileExistsError, match=r"is in the way: it .*Move it, or pass another root"):
            toy(download=download)
    assert content(tmp_path / "root") == before and os.path.lexists(place)
    assert not list(tmp_path.glob("**/.*"))


def test_folders_that_are_empty_links_or_below_others(toy, rows, tmp_path):
    (tmp_path / "root/toy").mkdir(parents=True)
    assert same(toy()[:], rows)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    assert same(toy("a b/c(d)/e.f-v1.0", root=tmp_path / "linked")[:], rows)
    assert same(toy("a b/c(d)/e.f-v1.0", root=tmp_path / "elsewhere", download=False)[:], rows)
    (tmp_path / "big").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path / "big/link")
    for download in (True, "force"):
        dataset = toy("link", download=download)
        assert same(dataset[:], rows) and (tmp_path / "root/link").is_symlink()
    dataset.delete()
    assert os.listdir(tmp_path / "big") == [".link.sha256.json"]
    assert same(toy("link")[:], rows)


def test_delete(toy, rows, tmp_path):
    dataset = toy("a/b")
    dataset.delete()
    assert same(dataset[:], rows), "maps outlive their files"
    assert os.listdir(tmp_path / "root/a") == [".b.sha256.json"]
    dataset.delete()
    with pytest.raises(errors.MissingDatasetError):
        toy("a/b", download=False)
    assert same(toy("a/b")[:], rows)


# ------------------------------------------------------------------ what a failure leaves


def test_a_download_that_fails_goes_on(toy, rows, tmp_path):
    kept = tmp_path / "root/.toy.making/downloads"
    shutil.move(tmp_path / "up", tmp_path / "away")
    with pytest.raises(errors.DownloadError):
        toy()
    assert not list((tmp_path / "root").iterdir())
    kept.mkdir(parents=True)
    shutil.copy(tmp_path / "away/0.json", kept)
    edit(tmp_path / "away/0.json", lambda held: held.update(rows=99))
    shutil.move(tmp_path / "away", tmp_path / "up")
    assert same(toy()[:], rows) and not kept.parent.exists()


def test_a_file_that_is_another_one_than_the_first_time(toy, rows, tmp_path):
    toy().delete()
    changed = sources_toy.make(tmp_path / "up", np.random.default_rng(1))
    with pytest.raises(
        errors.DownloadError, match=r"0.json is not the file .* SHA-256 is \w+, it was \w+. Try again, or pass .*force"
    ):
        toy()
    assert not (tmp_path / "root/toy").exists()
    sources_toy.make(tmp_path / "up", np.random.default_rng(0))
    assert same(toy()[:], rows), "the good file again"
    sources_toy.make(tmp_path / "up", np.random.default_rng(1))
    assert same(toy(download="force")[:], changed)
    toy().delete()
    assert same(toy()[:], changed)


def test_a_garbled_file_is_not_the_one_of_the_first_time(toy, rows, tmp_path):
    good = (tmp_path / "up/1.json").read_bytes()
    (tmp_path / "up/1.json").write_bytes(good[:-20])
    with pytest.raises(errors.CorruptDatasetError, match=r"downloads/1.json is damaged"):
        toy()
    assert os.listdir(tmp_path / "root") == [".toy.making"]
    (tmp_path / "up/1.json").write_bytes(good)
    assert same(toy(download="force")[:], rows)


def test_a_failed_force_leaves_the_old_dataset(toy, rows, tmp_path):
    toy()
    before = content(tmp_path / "root/toy")
    (tmp_path / "up/1.json").write_text("{")
    with pytest.raises(errors.CorruptDatasetError):
        toy(download="force")
    assert content(tmp_path / "root/toy") == before and os.listdir(tmp_path / "root/.toy.making") == ["downloads"]
    assert same(toy(download=False)[:], rows), "and removes what is left"
    assert sorted(os.listdir(tmp_path / "root")) == [".toy.sha256.json", "toy"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("when", ["convert", "rename", "second rename", "last flush"])
def test_ctrl_c(toy, rows, tmp_path, monkeypatch, force, when):
    if force:
        toy()
    renames = []

    def interrupt(*args: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    def rename(self: Path, target: Path) -> Any:
        if "toy" in (self.name, Path(target).name):
            renames.append(target)
            if len(renames) == (2 if force and when == "second rename" else 1) or when == "last flush":
                raise KeyboardInterrupt
        return os.rename(self, target)

    with monkeypatch.context() as patched:
        if when == "convert":
            patched.setattr(sources_toy, "_rows", interrupt)
        elif when == "last flush":
            patched.setattr("interop.shared.published_folder.flush", lambda path: path.name == "root" and interrupt())
        else:
            patched.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            toy(download="force" if force else True)
    left = sorted(os.listdir(tmp_path / "root"))
    assert ("toy" in left) == (force or when == "last flush")
    assert os.listdir(tmp_path / "root/.toy.making") == ["downloads"]
    assert same(toy(download=not force)[:], rows)
    assert sorted(os.listdir(tmp_path / "root")) == [".toy.sha256.json", "toy"]


def test_a_kill_between_the_renames_of_a_replacement(toy, rows, tmp_path):
    toy()
    scratch = tmp_path / "root/.toy.making"
    for new in ("data", "downloads"):
        (scratch / new).mkdir(parents=True)
    (tmp_path / "root/toy").rename(scratch / "replaced")
    assert same(toy(download=False)[:], rows) and not sources_toy.calls
    assert not scratch.exists()


def test_a_disk_that_is_full_before_the_first_row(toy, rows, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(free_memory, "at", lambda place: 100)
        with pytest.raises(NotEnoughDiskError) as raised:
            toy()
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "root/.toy.making") == ["downloads"]
    assert same(toy()[:], rows)


def test_a_disk_that_becomes_full(toy, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "_BYTES", 1)
    edit(tmp_path / "up/2.json", lambda held: held["episodes"][1].update(text=["x" * (1 << 21)]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError) as raised:
            toy(from_local=tmp_path / "up")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG and sources_toy.calls.count("read") == 3
    assert not os.listdir(tmp_path / "root")
    assert len(toy()) == ROWS


# ------------------------------------------------------------------ several at once


AT_ONCE = """
import logging, os, time
from pathlib import Path
from tests.interop.datasets import sources_toy

def work(place):
    logging.basicConfig(filename=f"{folder}/log-{place}", level=logging.WARNING)
    read = sources_toy._rows
    sources_toy._rows = lambda *given: (time.sleep(0.05), read(*given))[1]
    dataset = sources_toy.ToyExperienceReplay("toy", upstream=f"{folder}/up", root=f"{folder}/root", download=download)
    assert len(dataset) == 15
    Path(folder, f"calls-{place}").write_text(" ".join(sources_toy.calls))

children = []
for place in range(3):
    child = os.fork()
    if not child:
        status = 1
        try:
            work(place)
            status = 0
        finally:
            os._exit(status)
    children.append(child)
assert not any([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.parametrize("download", [True, "force"])
def test_processes_that_construct_it_at_once(in_a_fork, rows, tmp_path, download):
    in_a_fork(AT_ONCE, folder=str(tmp_path), download=download)
    calls = [(tmp_path / f"calls-{place}").read_text() for place in range(3)]
    assert sorted(map(bool, calls)) == ([True] * 3 if download == "force" else [False, False, True])
    waited = [(tmp_path / f"log-{place}").read_text() for place in range(3)]
    assert sum("interop:another process is making" in each and "root/toy: waiting" in each for each in waited) == 2
    assert sorted(os.listdir(tmp_path / "root")) == [".toy.sha256.json", "toy"]


EVERYTHING = """
import os, random, torch
from interop.datasets.errors import MissingDatasetError
from tests.interop.datasets.sources_toy import ToyExperienceReplay, make, same

torch.set_num_threads(1)
rows = None

def construct(**more):
    return ToyExperienceReplay("toy", upstream=f"{folder}/up", root=f"{folder}/root", **more)

def check(dataset):
    held = dataset[:]
    held = held[held["mask"]].exclude("mask", "traj_ids") if "mask" in list(held.keys()) else held
    assert same(held.exclude("mark"), rows), held

CALLS = [
    lambda: check(construct()),
    lambda: check(construct(download=False)),
    lambda: check(construct(download="force")),
    lambda: check(construct(split_trajs=True)),
    lambda: construct().preprocess(lambda td: td.set("mark", torch.ones(len(td))), num_workers=0),
    lambda: construct().delete(),
]
rows = construct()[:].clone()
children = []
for place in range(3):
    child = os.fork()
    if not child:
        status = 1
        try:
            random.seed(place)
            for _ in range(calls):
                try:
                    random.choice(CALLS)()
                except MissingDatasetError:
                    pass
            status = 0
        finally:
            if status:
                import traceback
                traceback.print_exc()
            os._exit(status)
    children.append(child)
assert not any([os.waitpid(child, 0)[1] for child in children])
check(construct())
"""


@pytest.mark.parametrize("calls", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_processes_that_do_everything_at_once(in_a_fork, rows, tmp_path, calls):
    in_a_fork(EVERYTHING, folder=str(tmp_path), calls=calls)
    assert {*os.listdir(tmp_path / "root")} <= {".toy.sha256.json", "toy", "toy_split"}


# ------------------------------------------------------------------ trajectories


def test_split_trajs(toy, rows, tmp_path):
    for _ in range(2):
        dataset = toy(split_trajs=True, batch_size=2)
        assert dataset.data_path == tmp_path / "root/toy_split" and dataset.data_path_root == tmp_path / "root/toy"
        held = dataset[:]
        assert held.shape == (len(EPISODES), max(EPISODES)) and held["mask"].sum() == ROWS
        assert (held["observation"][held["mask"]] == rows["observation"]).all()
        assert [text for text in np.array(held["text"]).reshape(-1) if text] == [*rows["text"]]
        assert held["traj_ids"][:, 0].tolist() == [*range(len(EPISODES))]
        assert not held["observation"][~held["mask"]].any()
        assert dataset.sample().shape == (2, max(EPISODES))
        assert dataset.metadata["files"]
    assert not sources_toy.calls
    dataset.delete()
    assert len(toy(download=False)) == ROWS and len(toy(download=False, split_trajs=True)) == len(EPISODES)


def test_a_change_of_the_episode_ends_a_trajectory(toy, tmp_path, monkeypatch):
    for path in (tmp_path / "up").iterdir():  # one file an episode
        edit(path, lambda held, path=path: [each.update(episode=int(path.stem)) for each in held["episodes"]])
    plain = sources_toy._rows

    def not_done(*given: Any) -> TensorDict:
        made = plain(*given)
        made["next", "done"].zero_()
        return made

    monkeypatch.setattr(sources_toy, "_rows", not_done)
    for read in (1, 1 << 20):
        monkeypatch.setattr(splitting, "_WRITTEN", read)
        held = toy(split_trajs=True, download="force")[:]
        assert held["mask"].sum(1).tolist() == [*map(sum, LENGTHS)]


def test_a_stale_split_is_made_again(toy, tmp_path):
    toy(split_trajs=True)
    sources_toy.make(tmp_path / "up", np.random.default_rng(1))
    made = toy(split_trajs=True, download="force")[:]
    assert (made["observation"][made["mask"]] == toy()[:]["observation"]).all()
    before = (tmp_path / "root/toy_split").stat().st_ino
    toy(split_trajs=True)
    assert (tmp_path / "root/toy_split").stat().st_ino == before


# ------------------------------------------------------------------ as a replay buffer


def test_it_is_a_replay_buffer_that_refuses_writes(toy, rows, tmp_path):
    dataset = toy(batch_size=4, prefetch=2, transform=lambda rows: rows.set("twice", rows["observation"] * 2))
    for _ in range(5):
        batch = dataset.sample()
        assert batch.shape == (4,) and batch["index"].dtype == torch.int64
        assert (batch["observation"] == rows["observation"][batch["index"]]).all()
        assert batch["text"] == [rows["text"][place] for place in batch["index"]]
        assert (batch["twice"] == 2 * batch["observation"]).all()
    assert "twice" in dataset[3].keys()  # noqa: SIM118
    for write in (lambda: dataset.extend(rows), lambda: dataset.add(rows[0]), dataset.empty):
        with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
            write()
    assert dataset.root == tmp_path / "root" and dataset.metadata_path == tmp_path / "root/toy/metadata.json"


def test_a_writer_that_writes_has_rows_of_its_own(toy, rows, tmp_path):
    before = content(tmp_path / "root/toy") if toy() else {}
    dataset = toy(writer=RoundRobinWriter)
    assert same(dataset[:], rows)
    dataset.extend(rows[3:5])
    dataset[0]["observation"].fill_(7)
    assert [*dataset[:]["text"]] == [*rows["text"][3:5], *rows["text"][2:]] and (dataset[0]["observation"] == 7).all()
    assert same(toy()[:], rows) and content(tmp_path / "root/toy") == before


def test_a_pickle_has_the_rows(toy, rows, tmp_path):
    copied = pickle.loads(pickle.dumps(toy()))
    shutil.rmtree(tmp_path / "root/toy")
    assert same(copied[:], rows)

"""`preprocess` of a dataset: into another folder and in its place, interrupted and gone on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from interop import ReplayBuffer, Storage
from interop.datasets import conversion
from interop.storages.tensors import TensorStorage
from tests.interop.datasets.sources_toy import ROWS, ToyExperienceReplay, ToySource, content, same


def doubled(td: TensorDictBase) -> TensorDictBase:
    return td.set("twice", td["observation"] * 2)


def has(found: Any, key: str) -> bool:
    return found.get(key, None) is not None


def test_dest(toy, rows, tmp_path):
    dataset, factor = toy(), 3
    before = content(tmp_path / "root")
    storage = dataset.preprocess(
        lambda td: td.set("more", td["observation"] * factor), num_workers=0, dest=tmp_path / "d"
    )
    assert isinstance(storage, TensorStorage) and len(storage) == ROWS
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    assert buffer.sample()["more"].shape == (4, 2)
    assert (storage[:]["more"] == rows["observation"] * 3).all() and same(storage[:].exclude("more"), rows)
    assert content(tmp_path / "root") == before and same(dataset[:], rows) and same(toy()[:], rows)
    buffer.extend(storage[:][:2])
    storage.close()
    again = dataset.preprocess(doubled, num_workers=0, dest=str(tmp_path / "d"))
    assert has(again[:], "twice") and not has(again[:], "more")
    assert sorted(os.listdir(tmp_path)) == ["d", "root", "up"]


def test_what_is_in_the_way_of_dest(toy, rows, tmp_path):
    toy("other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a").write_text("mine")
    before = content(tmp_path)
    dataset = toy("other")
    for dest in (tmp_path / "mine", tmp_path / "root/other"):
        with pytest.raises(FileExistsError, match=r"is in the way"):
            dataset.preprocess(doubled, num_workers=0, dest=dest)
    assert content(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert len(dataset.preprocess(doubled, num_workers=0, dest=tmp_path / "empty")) == ROWS


@pytest.mark.parametrize("split", [False, True])
def test_in_place(toy, rows, tmp_path, split):
    def collate_fn(batch: Any) -> Any:
        return batch.set("collated", torch.ones(batch.shape))

    dataset = toy(batch_size=4, collate_fn=collate_fn, split_trajs=split)
    untouched = toy(split_trajs=split)[:]
    storage = dataset.preprocess(doubled, num_workers=0)
    assert dataset.storage is storage
    batch = dataset.sample()
    assert (batch["twice"] == 2 * batch["observation"]).all() and has(batch, "collated")
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        dataset.extend(rows)
    for download in (True, False):
        found = toy(download=download, split_trajs=split)
        assert (found[:]["twice"] == 2 * untouched["observation"]).all() and found.metadata["files"]
    assert not has(toy(download="force", split_trajs=split)[:], "twice")


def test_in_place_makes_a_split_stale(toy):
    toy(split_trajs=True)
    toy().preprocess(doubled, num_workers=0)
    held = toy(split_trajs=True)[:]
    assert (held["twice"] == 2 * held["observation"]).all() and held["mask"].sum() == ROWS


@pytest.mark.parametrize(
    "options",
    [{}, {"chunksize": 4}, {"chunksize": 100}, {"num_chunks": 4}, {"num_chunks": 100}, {"chunksize": 0}, {"dim": -1},
     {"max_tasks_per_child": 2, "worker_threads": 2, "index_with_generator": True, "pbar": True}],
    ids=str,
)  # fmt: skip
def test_chunks(toy, rows, tmp_path, options, capfd):
    sizes = []

    def fn(td: TensorDictBase) -> TensorDictBase:
        sizes.append([*td.batch_size])
        norm = td["observation"].norm(dim=-1)
        return TensorDict({"norm": norm, "text": td.get("text")}, td.batch_size)

    found = toy().preprocess(fn, num_workers=0, dest=tmp_path / "d", **options)[:]
    assert set(found.keys()) == {"norm", "text"} and (found["norm"] == rows["observation"].norm(dim=-1)).all()
    assert [*found["text"]] == [*rows["text"]]
    chunk = {"chunksize": options.get("chunksize", 0), "num_chunks": -(-ROWS // options.get("num_chunks", 1))}
    expected = next((chunk[key] for key in options if key in chunk), 1)
    assert sizes == (
        [[]] * ROWS
        if options.get("chunksize") == 0
        else [[min(expected, ROWS - start)] for start in range(0, ROWS, expected)]
    )
    assert ("Preprocessing" in capfd.readouterr().err) == ("pbar" in options)


def test_num_frames(toy, rows, tmp_path):
    dataset = toy()
    assert same(
        dataset.preprocess(lambda td: td, num_workers=0, num_frames=7, chunksize=2, dest=tmp_path / "d")[:], rows[:7]
    )
    assert len(dataset.preprocess(doubled, num_workers=0, num_frames=99, dest=tmp_path / "d")) == ROWS
    dataset.preprocess(doubled, num_workers=0, num_frames=5)
    assert len(dataset) == len(toy()) == 5


@pytest.mark.parametrize("chunksize", [None, 0, 2])
def test_a_dim_of_trajectories(toy, tmp_path, chunksize):
    dataset = toy(split_trajs=True)

    def fn(td: TensorDictBase) -> TensorDictBase:
        shapes.append(td.batch_size)
        return TensorDict({"twice": td["observation"] * 2}, td.batch_size)

    shapes: list[Any] = []
    found = dataset.preprocess(fn, 1, 0, chunksize=chunksize, dest=tmp_path / "d")[:]
    assert (found["twice"] == dataset[:]["observation"] * 2).all() and found.shape == (5, 5)
    assert shapes == {None: [(5, 1)] * 5, 0: [(5,)] * 5, 2: [(5, 2), (5, 2), (5, 1)]}[chunksize]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"chunksize": 1, "num_chunks": 1}, ValueError, "either chunksize or num_chunks"),
        ({"chunksize": -1}, ValueError, "chunksize must be at least 0, got -1"),
        ({"dim": 1}, ValueError, "dim must be one of the 1 dims of the rows, got 1"),
        ({"num_workers": 1, "mp_start_method": "nonsense"}, ValueError, "nonsense"),
    ],
)
def test_arguments_that_are_refused(toy, tmp_path, options, kind, message):
    with pytest.raises(kind, match=message):
        toy().preprocess(doubled, dest=tmp_path / "d", **{"num_workers": 0, **options})
    assert not (tmp_path / "d").exists()


def first(td: TensorDictBase) -> bool:
    return bool((td["episode"].reshape(-1) == 0).any())


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda td: None, r"fn must return a tensordict with the rows \[3\] that it was given, got NoneType"),
        (lambda td: td[:1], r"rows \[3\] that it was given, got batch size \[1\]"),
        (lambda td: td.select("text") if first(td) else td, r"observation is torch.float64 \[2\], .* missing"),
        (lambda td: td if first(td) else td.set("observation", td["observation"].float()), "observation is torch.float32"),
        (lambda td: td["nothing"], 'nothing'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [None, "d"])
def test_functions_that_are_refused(toy, rows, tmp_path, fn, message, place):
    dataset = toy()
    before = content(tmp_path / "root/toy")
    with pytest.raises((ValueError, KeyError), match=message):
        dataset.preprocess(fn, num_workers=0, chunksize=3, dest=place and tmp_path / place)
    assert content(tmp_path / "root/toy") == before and not (tmp_path / "d").exists()
    assert same(dataset[:], rows) and same(toy(download=False)[:], rows)


def test_functions_that_write_to_their_rows(toy, rows, tmp_path):
    def fn(td: TensorDictBase) -> TensorDictBase:
        td["observation"].zero_()
        return td

    for chunksize in (0, 4):
        dataset = toy()
        assert not dataset.preprocess(fn, num_workers=0, chunksize=chunksize, dest=tmp_path / "d")[:][
            "observation"
        ].any()
        assert same(dataset[:], rows)


def test_tensors_that_numpy_does_not_know(toy, rows, tmp_path):
    weight = torch.ones(2, requires_grad=True)

    def fn(td: TensorDictBase) -> TensorDict:
        obs = td["observation"]
        return TensorDict({"half": obs.bfloat16(), "grown": obs * weight, "same": "a"}, [len(td)])

    found = toy().preprocess(fn, num_workers=0, dest=tmp_path / "d")[:]
    assert (found["half"] == rows["observation"].bfloat16()).all() and not found["grown"].requires_grad
    assert [*found["same"]] == ["a"] * ROWS


@pytest.mark.parametrize("place", [None, "d"])
def test_an_interrupted_call_goes_on(toy, rows, tmp_path, place, monkeypatch):
    monkeypatch.setattr(conversion, "_ROWS", 4)
    dataset, seen, broken = toy(), [], True

    def fn(td: TensorDictBase) -> TensorDictBase:
        seen.append(td["observation"].tolist())
        if broken and len(seen) == 4:
            raise KeyboardInterrupt
        return td.set("noise", torch.rand(len(td)))

    def run(**more: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        given = {"num_workers": 0, "chunksize": 3, "generator": generator, "dest": place and tmp_path / place}
        return dataset.preprocess(fn, **given, **more)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert same(toy()[:], rows) and not (tmp_path / "d").exists()
    broken = False
    noise = run(resume=True)[:]["noise"]
    assert len(seen) == 6 and seen[3] == seen[4], "the chunk that was interrupted, and the one behind it"
    assert noise.shape == (ROWS,)
    dataset, seen[:] = toy(download="force"), []
    assert (run(resume=True)[:]["noise"] == noise).all() and len(seen) == 5, "nothing was left to go on with"
    assert not [*tmp_path.rglob(".*.making")]


def test_what_an_interrupted_call_left_is_not_used_without_being_asked_for(toy, rows, tmp_path):
    dataset = toy()

    def fails(td: TensorDictBase) -> TensorDictBase:
        if not first(td):
            raise RuntimeError("broken")
        return td

    for options in ({}, {"resume": True, "num_frames": 9}):
        with pytest.raises(RuntimeError, match="broken"):
            dataset.preprocess(fails, num_workers=0, chunksize=4)
        assert same(dataset.preprocess(lambda td: td, num_workers=0, **options)[:], rows[: options.get("num_frames")])
        dataset = toy(download="force")
    with pytest.raises(RuntimeError, match="broken"):
        dataset.preprocess(fails, num_workers=0, chunksize=4)
    dataset.delete()
    assert os.listdir(tmp_path / "root") == [".toy.sha256.json"]


class Shifted(Storage):
    """Presents other rows than those that are stored, and is no `TensorStorage`."""

    def __init__(self, stored: TensorStorage) -> None:
        super().__init__(len(stored))
        self._stored = stored

    def get(self, index: Any) -> Any:
        return self._stored.get(index).clone().apply(lambda each: each + 1 if each.is_floating_point() else each)

    def __len__(self) -> int:
        return len(self._stored)


class ShiftedSource(ToySource):
    def presented(self, storage: TensorStorage, folder: Path) -> Storage:
        return Shifted(storage)


class ShiftedToy(ToyExperienceReplay):
    SOURCE = ShiftedSource


def test_presented_rows(rows, tmp_path):
    def construct(**more: Any) -> ShiftedToy:
        return ShiftedToy(
            "toy", 4, collate_fn=lambda batch: batch, root=tmp_path / "root", upstream=tmp_path / "up", **more
        )

    expected = rows["observation"] + 1
    assert (construct()[:]["observation"] == expected).all()
    held = construct(split_trajs=True)[:]
    assert (held["observation"][held["mask"]] == expected).all()
    dataset = construct()
    dataset.preprocess(doubled, num_workers=0)
    for each in (dataset, construct(), construct(download=False, split_trajs=True)):
        held = each[:] if not has(each[:], "mask") else each[:][each[:]["mask"]]
        assert (held["observation"] == expected).all() and (held["twice"] == 2 * expected).all()


FORKED = """
import multiprocessing, torch
from pathlib import Path
from tests.interop.datasets.sources_toy import ToyExperienceReplay

def construct():
    return ToyExperienceReplay("toy", upstream=f"{folder}/up", root=f"{folder}/root")

def fn(td):
    return td.set("noise", torch.rand(td.batch_size)).set("threads", torch.full(td.batch_size, torch.get_num_threads()))

def run(workers, **more):
    generator = torch.Generator().manual_seed(5)
    return dataset.preprocess(fn, num_workers=workers, generator=generator, dest=f"{folder}/d", **more)[:].clone()

dataset, threads = construct(), torch.get_num_threads()
for chunks in ({"chunksize": 0}, {"num_chunks": 3}):
    here = run(0, **chunks)
    for more in ({}, {"max_tasks_per_child": 1}, {"worker_threads": 3}):
        there = run(2, mp_start_method="fork", **more, **chunks)
        assert (there.exclude("threads") == here.exclude("threads")).all()
        assert list(there["text"]) == list(here["text"])
        assert (there["threads"] == more.get("worker_threads", 1)).all() and torch.get_num_threads() == threads
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert (run(None, pool=pool, **chunks).exclude("threads") == here.exclude("threads")).all()
assert (here["noise"] != dataset.preprocess(fn, num_workers=0, dest=f"{folder}/d")[:]["noise"]).any()
try:
    dataset.preprocess(lambda td: td["nothing"], num_workers=2, mp_start_method="fork")
except KeyError as error:
    print(error)
dataset.preprocess(fn, num_workers=2, mp_start_method="fork", chunksize=5)
assert construct()[:].get("noise", None) is not None
"""


def test_processes(in_a_fork, rows, tmp_path):
    assert "nothing" in in_a_fork(FORKED, folder=str(tmp_path))


KILLED = """
import os, signal, time
from tests.interop.datasets.sources_toy import ToyExperienceReplay

def construct():
    return ToyExperienceReplay("toy", upstream=f"{folder}/up", root=f"{folder}/root")

def fn(td):
    os.write(writing, b"%d " % os.getpid())
    time.sleep(60)

construct()
reading, writing = os.pipe()
child = os.fork()
if not child:
    construct().preprocess(fn, num_workers=2, mp_start_method="fork", chunksize=1)
workers = {int(os.read(reading, 100).split()[0])}
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
begun = time.monotonic()
construct().preprocess(lambda td: td, num_workers=0)
assert time.monotonic() - begun < 20
for worker in workers:
    while os.path.exists(f"/proc/{worker}") and "(zombie)" not in open(f"/proc/{worker}/status").read():
        assert time.monotonic() - begun < 20
        time.sleep(0.01)
"""


def test_workers_end_with_their_parent(in_a_fork, rows, tmp_path):
    in_a_fork(KILLED, folder=str(tmp_path))

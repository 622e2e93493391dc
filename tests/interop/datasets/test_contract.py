"""Laws that hold for each dataset, whoever wrote its files."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from interop import ImmutableDatasetWriter, SamplerWithoutReplacement, SliceSampler
from interop.datasets import errors
from interop.datasets.rows import entries
from tests.interop.datasets.loaders import LOADERS, Given, equal, given
from tests.interop.datasets.sources_toy import content

FLAGS = ("done", "terminated", "truncated")


@pytest.fixture(scope="module", params=LOADERS, ids=lambda loader: loader.name)
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Given]:
    """Constructed once."""
    with given(request.param, tmp_path_factory.mktemp(request.param.name)) as (found, _):
        found.construct()
        yield found


@pytest.fixture
def rows(dataset: Given) -> Any:
    return dataset.construct()[:]


@pytest.fixture
def done(dataset: Given, rows: Any) -> torch.Tensor:
    """Which rows end an episode."""
    if dataset.loader.observation is None:
        pytest.skip("rows are no steps")
    return rows["next", "done"].reshape(-1) != 0


def test_there_is_a_row_for_each_step(dataset, rows):
    assert len(dataset.construct()) == len(rows) == sum(dataset.loader.lengths)


def test_the_next_observation_is_that_of_the_next_row(dataset, rows, done):
    key = dataset.loader.observation
    following, own = rows["next"].select(key), rows.select(key)
    differ = [place for place in range(len(rows) - 1) if not equal(following[place], own[place + 1])]
    assert differ == done[:-1].nonzero().reshape(-1).tolist()


def test_the_next_observation_of_the_last_step(dataset, rows, done):
    leaves = rows["next"].select(dataset.loader.observation)[done].values(True, True)
    behind = torch.cat([leaf.reshape(int(done.sum()), -1).double() for leaf in leaves], 1)
    assert ((behind == 0).all(1) == (dataset.loader.behind == "zero")).all()


def test_flags(dataset, rows, done):
    loader, then = dataset.loader, rows["next"]
    assert torch.equal(then["done"] != 0, (then["terminated"] != 0) | (then["truncated"] != 0))
    ends = np.cumsum(loader.lengths) - 1
    assert set(done.nonzero().reshape(-1).tolist()) | {len(rows) - 1} == {*ends.tolist()}
    for key in FLAGS:
        root, zeros = rows.get(key, None), torch.zeros_like(then[key])
        assert (root is None) == (loader.root_flags == "none")
        if loader.root_flags == "shifted":
            assert torch.equal(root, torch.cat([zeros[:1], then[key][:-1]]))
        elif root is not None:
            assert torch.equal(root, then[key] if key == loader.root_flags else zeros)


def test_keys_and_shapes(dataset, rows, done):
    loader = dataset.loader
    for key in ("reward", *FLAGS):
        assert rows["next", key].shape == ((len(rows), 1) if loader.trailing else (len(rows),))
    if loader.episode is not None:
        ids = rows[loader.episode]
        assert ids.shape == (len(rows),) and not ids.is_floating_point()
        assert (ids.diff() != 0).nonzero().reshape(-1).tolist() == (np.cumsum(loader.lengths)[:-1] - 1).tolist()


def test_samples(dataset, rows):
    data = dataset.construct(6, transform=lambda batch: batch.set("own", torch.arange(6)))
    seen = set()
    for _ in range(20):
        batch = data.sample()
        index = batch["index"]
        assert batch.shape == (6,) and index.dtype == torch.int64 and batch["own"].tolist() == [*range(6)]
        assert equal(batch.exclude("index", "own"), rows[index])
        seen |= {*index.tolist()}
    assert seen <= {*range(len(rows))} and len(seen) > 6
    epoch = dataset.construct(4, sampler=SamplerWithoutReplacement(drop_last=False))
    assert sorted(place for batch in epoch for place in batch["index"].tolist()) == [*range(len(rows))]
    assert equal(dataset.construct()[2:5], rows[2:5])


def test_writing_is_refused(dataset, rows):
    before = content(dataset.folder / "root")
    more = {"writer": ImmutableDatasetWriter()} if dataset.loader.writes else {}
    data = dataset.construct(**more)
    for write in (lambda: data.extend(rows), lambda: data.add(rows[0]), data.empty):
        with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
            write()
    if dataset.loader.writes:
        data = dataset.construct()
        data.extend(rows[:2])
        assert equal(data[:2], rows[:2])
    assert equal(dataset.construct()[:], rows) and content(dataset.folder / "root") == before


def test_slices(dataset, rows, done):
    loader = dataset.loader
    chosen = {"traj_key": loader.episode} if loader.episode else {"end_key": ("next", "done")}
    data = dataset.construct(8, sampler=SliceSampler(slice_len=2, strict_length=True, **chosen))
    for _ in range(5):
        first, second = data.sample()["index"].reshape(-1, 2).T
        assert torch.equal(second, first + 1) and not done[first].any()


def test_trajectories(dataset, rows):
    loader = dataset.loader
    if not loader.splits:
        pytest.skip("there is no split_trajs")
    held = dataset.construct(split_trajs=True)[:]
    assert held["mask"].sum() == len(rows) and held["mask"].sum(1).tolist() == [*loader.lengths]
    assert held.shape == (len(loader.lengths), max(loader.lengths))
    if loader.ends_parts:
        assert held["next", "done"][:, -1].all()
        rows["next", "done"][np.cumsum(loader.lengths) - 1] = True
    assert equal(held[held["mask"]].exclude("mask", "traj_ids"), rows)
    assert equal(dataset.construct(split_trajs=True, download=False)[:], held)


def test_files_that_the_user_has(dataset, rows, tmp_path):
    asked = len(dataset.server.requests)
    local = dataset.construct(root=tmp_path, from_local=dataset.files)
    assert equal(local[:], rows) and json.loads(local.metadata_path.read_text()).keys() == local.metadata.keys()
    assert equal(dataset.construct(root=tmp_path)[:], rows) and len(dataset.server.requests) == asked
    assert local.data_path == local.data_path_root and local.data_path.is_relative_to(tmp_path)
    local.delete()
    with pytest.raises(errors.MissingDatasetError):
        dataset.construct(root=tmp_path, download=False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_upstream_is_asked_once(dataset, rows, tmp_path):
    shutil.copytree(dataset.folder / "root", tmp_path / "root")
    asked = len(dataset.server.requests)
    for download in (True, False):
        assert equal(dataset.construct(root=tmp_path / "root", download=download)[:], rows)
    assert len(dataset.server.requests) == asked


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.name)
def test_force_downloads_and_converts_anew(loader, tmp_path):
    with given(loader, tmp_path) as (dataset, patch):
        old = dataset.construct()[:]
        dataset.upload(1, patch)
        assert equal(dataset.construct()[:], old)
        new = dataset.construct(download="force")[:]
        assert not equal(new, old) and equal(dataset.construct(download=False)[:], new)
        assert equal(dataset.construct(root=tmp_path / "other")[:], new)


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.name)
def test_files_that_were_recorded_anew_are_converted_anew(loader, tmp_path):
    with given(loader, tmp_path) as (dataset, patch):

        def construct(**more):
            return dataset.construct(from_local=dataset.files, **more)

        def record(data):
            return json.loads((data.data_path_root / "made_from.json").read_text())["made"]

        first = construct()
        old, made = first[:], record(first)
        assert record(construct()) == made == record(construct(download=False))
        dataset.upload(1, patch)
        again = construct(download=False)
        assert not equal(again[:], old) and record(again) != made
        assert equal(again[:], construct(root=tmp_path / "other")[:])
        (dataset.files / ".cache").mkdir()
        (dataset.files / ".cache/notes").write_text("of another program")
        assert record(construct()) == record(again), "hidden files do not count"
        shutil.rmtree(dataset.files)
        assert record(construct()) == record(again), "the files may be removed"
        dataset.files.mkdir()
        assert record(construct()) == record(again)


def test_a_checkpoint_has_the_draws_and_names_the_rows(dataset, tmp_path):
    first, other = (dataset.construct(generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    first.sample(2)
    first.dumps(tmp_path / "checkpoint")
    other.loads(tmp_path / "checkpoint")
    assert torch.equal(first.sample(2)["index"], other.sample(2)["index"])
    assert set(first.specs.keys(True, True)) == {key for key, _ in entries(first[0]) if key != "index"}

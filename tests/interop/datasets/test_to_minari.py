from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import NonTensorData, TensorDict

from interop.datasets import to_minari
from tests.interop.datasets.recorded import (
    KINDS,
    STORAGES,
    Failing,
    broken_off,
    buffer,
    killed,
    trajectories,
    trajectory,
    with_entries,
    wrapped,
)

minari = pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def assert_same(found: np.ndarray, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.numpy().dtype
    np.testing.assert_array_equal(found, wanted)


def check(dataset, held: list[TensorDict]) -> None:
    """Whether a dataset has these trajectories, bit for bit."""
    assert (len(dataset), dataset.total_steps) == (len(held), sum(map(len, held)))
    for found, rows in zip(minari.load_dataset(dataset.id), held, strict=True):
        nexts = rows["next"]
        assert_same(found.observations, torch.cat([rows["observation"], nexts["observation"][-1:]]))
        assert_same(found.actions, rows["action"])
        assert_same(found.rewards, nexts["reward"][:, 0])
        assert_same(found.terminations, nexts["terminated"][:, 0])
        assert_same(found.infos["speed"], torch.cat([rows["info", "speed"], nexts["info", "speed"][-1:]]))
        truncated = nexts["truncated"][:, 0].clone()
        truncated[-1] = not nexts["terminated"][-1]
        assert_same(found.truncations, truncated)


@pytest.mark.parametrize("kind", [*KINDS, "broken_off"])
def test_trajectories_of_all_kinds(kind, rng):
    rb, held = {**KINDS, "broken_off": broken_off}[kind](rng)
    check(to_minari(rb, "space/kind-v0"), held)


@pytest.mark.parametrize("storage", STORAGES)
def test_all_storages(storage, rng):
    rb, held = wrapped(rng, storage)
    check(to_minari(rb, "storage-v0"), held)


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_other_formats(data_format, rng):
    rb, held = wrapped(rng)
    check(to_minari(rb, "format-v0", data_format=data_format), held)


def test_nested_observations_images_and_text(rng):
    held = with_entries(rng, 3, 2)
    dataset = to_minari(
        buffer(*held), "dict-v0", observation_key="seen", action_key={"one": "action", "two": "log_prob"}
    )
    image, words, bits = (dataset.observation_space[name] for name in ("image", "words", "bits"))
    assert (image.dtype, image.shape, bits.dtype) == (np.uint8, (32, 40, 3), bool)
    assert (words.max_length, set(words.characters)) == (3, set("ab "))
    for found, rows in zip(dataset, held, strict=True):
        for name in ("image", "bits"):
            assert_same(found.observations[name], torch.cat([rows["seen", name], rows["next", "seen", name][-1:]]))
        assert found.observations["words"] == [*rows["seen", "words"], rows["next", "seen", "words"][-1]]
        assert dataset.observation_space.contains({name: each[0] for name, each in found.observations.items()})
        assert_same(found.actions["two"], rows["log_prob"])
        assert_same(found.infos["observation"], torch.cat([rows["observation"], rows["next", "observation"][-1:]]))
        assert found.infos["why"].tolist() == [*map(str.encode, rows["why"]), b""]
        assert found.infos.keys() == {"speed", "observation", "why"}


def test_several_entries_as_observation(rng):
    space = spaces.Tuple([spaces.Box(-9, 9, (3,)), spaces.MultiBinary(2)])
    held = with_entries(rng, 3, 2)
    for rows in held:
        for each in (rows, rows["next"]):
            each["bits"] = each["seen", "bits"].to(torch.int8)
    keys = {"a": "observation", "b": "bits"}
    dataset = to_minari(buffer(*held), "tuple-v0", observation_key=keys, observation_space=space)
    assert_same(dataset[0].observations[1], torch.cat([held[0]["bits"], held[0]["next", "bits"][-1:]]))


def test_images_as_jpeg(rng):
    held = with_entries(rng, 3, 2)
    found = to_minari(buffer(*held), "jpeg-v0", observation_key=("seen", "image"), jpeg_encoding=True)[0].observations
    wanted = held[0]["seen", "image"]
    assert found.shape == (4, 32, 40, 3) and not np.array_equal(found[:-1], wanted)


def test_the_spaces_and_the_spec_of_an_environment(rng):
    held = trajectories(rng, 3, 2)
    for rows in held:
        rows["observation"], rows["next", "observation"] = torch.ones(len(rows), 4), torch.ones(len(rows), 4)
        rows["action"] %= 2
    metadata = {"author": {"a", "b"}, "author_email": "a@b.c", "algorithm_name": "x", "ref_min_score": 1.0}
    for version, env in enumerate(("CartPole-v1", gymnasium.make("CartPole-v1"), gymnasium.spec("CartPole-v1"))):
        dataset = to_minari(buffer(*held), f"cart/pole-v{version}", env, **metadata)
        assert dataset.recover_environment().observation_space == dataset.observation_space
        assert dataset.action_space == spaces.Discrete(2)
    assert dataset.storage.metadata.items() >= {**metadata, "author_email": {"a@b.c"}}.items()
    assert minari.namespace.list_local_namespaces() == ["cart"]


@pytest.mark.parametrize(
    ("stored", "terminated", "truncated"),
    [
        (("done",), [0, 1, 0], [0, 0, 1]),
        (("done", "truncated"), [0, 0, 0], [0, 1, 1]),
        (("done", "terminated"), [0, 1, 0], [0, 0, 1]),
        (("terminated",), [0, 1, 0], [0, 0, 1]),
    ],
)
def test_flags_that_are_missing_follow_from_others(stored, terminated, truncated, rng):
    rows = trajectory(rng, 3, "")
    for name in ("done", "terminated", "truncated"):
        rows["next", name] = torch.tensor([0, 1, 0], dtype=torch.uint8)
    rows = rows.exclude(*(("next", name) for name in {"done", "terminated", "truncated"} - {*stored}))
    rows["id"] = torch.zeros(3, dtype=torch.int64)
    found = to_minari(buffer(rows), "flags-v0", traj_key="id", only_named_keys=True)[0]
    assert (found.terminations.tolist(), found.truncations.tolist()) == (
        [*map(bool, terminated)],
        [*map(bool, truncated)],
    )
    ends = to_minari(buffer(rows), "ends-v0", end_keys=[("next", name) for name in stored])
    assert [len(each) for each in ends] == [2, 1]


def refused(rng: np.random.Generator, error: type, match: str, *rows: TensorDict, **arguments) -> None:
    with pytest.raises(error, match=match):
        to_minari(buffer(*(rows or trajectories(rng, 3, 2))), **{"dataset_id": "refused-v0", **arguments})


@pytest.mark.parametrize(("error", "match", "arguments"), [
    (ValueError, "has no version: write x-v0", {"dataset_id": "x"}),
    (ValueError, "Malformed", {"dataset_id": "../x-v0"}),
    (ValueError, r"episode 0, observations: the space is Box.*the rows are float32 \[3\]",
     {"observation_space": spaces.Box(0, 1, (3,), np.float64)}),
    (ValueError, r"the rows are int64 \[\]", {"action_space": spaces.Text(3)}),
    (ValueError, "the space is Dict.*, the rows are float32", {"observation_space": spaces.Dict()}),
    (ValueError, r"the space has the entries \['x'\], the rows have \['a'\]",
     {"action_key": {"a": "action"}, "action_space": spaces.Dict(x=spaces.Discrete(9))}),
    (ValueError, "No storage implemented for csv", {"data_format": "csv"}),
    (TypeError, "unexpected keyword argument 'licence'", {"licence": "mit"}),
    (KeyError, "'pixels' is not stored; there are .*'observation'", {"observation_key": "pixels"}),
    (RuntimeError, "where trajectories end", {"traj_key": "nothing", "end_keys": ["ends"], "only_named_keys": True}),
])  # fmt: skip
def test_arguments_that_do_not_fit(error, match, arguments, rng, root):
    refused(rng, error, match, **arguments)
    assert not root.exists() or not [*root.iterdir()]


@pytest.mark.parametrize(("error", "match", "key", "value"), [
    (KeyError, "'reward'.* is not stored", ("next", "reward"), None),
    (RuntimeError, "where trajectories end", "next", None),
    (TypeError, "'action'.*bfloat16.*cast it", "action", torch.zeros(3).bfloat16()),
    (ValueError, "float32.*below 'next' it is .*float64", ("next", "observation"), torch.zeros(3, 3).double()),
    (ValueError, "one reward a step", ("next", "reward"), torch.zeros(3, 2)),
    (ValueError, "has the name of one beside it", "speed", torch.zeros(3)),
    (TypeError, "neither tensors nor text", "odd", NonTensorData(3, batch_size=[3])),
])  # fmt: skip
def test_rows_that_do_not_fit(error, match, key, value, rng, root):
    rows = trajectory(rng, 3)
    refused(rng, error, match, rows.exclude(key) if value is None else rows.set(key, value))
    assert not root.exists() or not [*root.iterdir()]


def test_a_dataset_that_exists_stays(rng, root):
    check(to_minari(buffer(*(held := trajectories(rng, 3, 2))), "here-v0"), held)
    refused(rng, ValueError, "there is a dataset here-v0 in .*use another", dataset_id="here-v0")
    check(minari.load_dataset("here-v0"), held)
    (root / "mine-v0").mkdir()
    refused(rng, ValueError, "there is a dataset", dataset_id="mine-v0")


def test_an_error_leaves_nothing_and_a_kill_nothing_that_is_seen(rng, root):
    held = trajectories(rng, 3, 2, 4)
    rb = buffer(*held, storage=Failing)
    with pytest.raises(OSError, match="the disk is gone"):
        to_minari(rb, "failing-v0")
    assert not [*root.iterdir()]
    killed(lambda: to_minari(rb, "space/failing-v0"), rb)
    assert not minari.list_local_datasets() and not (root / "space" / "failing-v0").exists()
    check(to_minari(buffer(*held), "space/failing-v0"), held)
    assert {path.name for path in (root / "space").iterdir()} == {"failing-v0", "namespace_metadata.json"}
    assert [path.name for path in (root / "space" / "failing-v0").iterdir()] == ["data"]


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_the_way_there_and_back(data_format, rng, tmp_path):
    loader = pytest.importorskip("interop.datasets.minari_data").MinariExperienceReplay
    rb, held = wrapped(rng)
    to_minari(rb, "there-v0", data_format=data_format)
    there = loader("there-v0", 4, root=tmp_path / "root", load_from_local_minari=True)
    for key, value in torch.cat(held).exclude(("next", "done"), ("next", "truncated")).items(True, True):
        assert_same(there[:][key].numpy(), value)
    to_minari(there, "again-v0", data_format=data_format)
    again = loader("again-v0", 4, root=tmp_path / "root", load_from_local_minari=True)[:]
    for key, value in there[:].items(True, True):
        assert_same(again[key].numpy(), value)

"""Open X-Embodiment: downloaded, and as a stream."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointError
from interop.datasets.errors import CorruptDatasetError, DownloadError, MissingDatasetError
from interop.datasets.openx import REPO, OpenXExperienceReplay
from interop.datasets.openx_stream import SHUFFLED
from tests.interop.datasets import sources_openx as upstream
from tests.interop.datasets.server import Answer, Server

ROWS = sum(map(sum, upstream.LENGTHS))
Episodes = list[list[dict[str, Any]]]


@pytest.fixture
def episodes(tmp_path: Path) -> Episodes:
    return upstream.make(tmp_path / "files", np.random.default_rng(0))


@pytest.fixture
def downloaded(tmp_path: Path, episodes: Episodes) -> Any:
    return partial(
        OpenXExperienceReplay, upstream.DATASET, root=tmp_path / "root", from_local=tmp_path / "files", download=True
    )


@pytest.fixture
def stream(tmp_path: Path, episodes: Episodes) -> Any:
    return partial(OpenXExperienceReplay, upstream.DATASET, from_local=tmp_path / "files")


def write(folder: Path, *episodes: Any) -> None:
    members = [(f"{place:03d}", steps) for place, steps in enumerate(episodes)]
    upstream.archive(folder / f"{upstream.DATASET}_00000.tar", members)


def check_episode(rows: TensorDict, steps: list[dict[str, Any]], number: int) -> None:
    count = len(steps)
    images = np.stack([step["observation"]["image"] for step in steps]).transpose(0, 3, 1, 2)
    assert rows.shape == (count,)
    assert rows["episode"].tolist() == [number] * count and rows["episode"].dtype == torch.int32
    observation, following = rows["observation"], rows["next", "observation"]
    assert observation["image"].dtype == torch.uint8 and (observation["image"].numpy() == images).all()
    assert (observation["state"].numpy() == [step["observation"]["state"] for step in steps]).all()
    for key in ("image", "state"):
        assert (following[key][:-1] == observation[key][1:]).all() and not following[key][-1].any()
    text = [step["language_instruction"] for step in steps]
    assert list(rows["language_instruction"]) == list(observation["natural_language_instruction"]) == text
    assert list(following["natural_language_instruction"]) == [*text[1:], ""]
    assert (rows["action", "motion"].numpy() == [step["action"]["motion"] for step in steps]).all()
    assert rows["action", "gripper"].shape == (count,) and rows["discount"].dtype == torch.float32
    assert rows["is_init"].tolist() == [True] + [False] * (count - 1)
    assert rows["next", "reward"].flatten().tolist() == [step["reward"] for step in steps]
    assert rows["next", "done"].flatten().tolist() == [step["is_last"] for step in steps]
    assert rows["next", "terminated"].flatten().tolist() == [step["is_terminal"] for step in steps]
    truncated = [step["is_last"] and not step["is_terminal"] for step in steps]
    assert rows["next", "truncated"].flatten().tolist() == truncated
    for flag in ("done", "terminated", "truncated"):
        assert rows[flag].shape == rows["next", flag].shape == (count, 1) and not rows[flag].any()


# ------------------------------------------------------------------ downloaded


def test_rows_of_a_downloaded_dataset(downloaded: Any, episodes: Episodes, tmp_path: Path) -> None:
    dataset = downloaded()
    assert len(dataset) == ROWS
    assert (dataset.root, dataset.data_path) == (tmp_path / "root", tmp_path / "root" / upstream.DATASET)
    start = 0
    for number, steps in enumerate(episodes):
        check_episode(dataset[start : start + len(steps)], steps, number)
        start += len(steps)


def test_an_episode_that_does_not_terminate_is_truncated(tmp_path: Path) -> None:
    steps = upstream.episode(3, np.random.default_rng(0), terminal=False)
    write(tmp_path, upstream.encoded(steps))
    (rows,) = OpenXExperienceReplay(upstream.DATASET, from_local=tmp_path)
    check_episode(rows, steps, 0)


def test_parts_of_long_archives(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    episodes = [upstream.episode(length, rng) for length in (200, 100, 20)]
    write(tmp_path, *map(upstream.encoded, episodes))
    dataset = OpenXExperienceReplay(upstream.DATASET, root=tmp_path / "root", from_local=tmp_path, download=True)
    assert dataset[:]["episode"].tolist() == np.repeat([0, 1, 2], [200, 100, 20]).tolist()
    check_episode(dataset[300:], episodes[2], 2)


@pytest.mark.parametrize(
    ("arguments", "lengths"),
    [({}, {3, 5, 6}), ({"slice_len": 4}, {3, 4}), ({"num_slices": 3}, {ROWS})],
)
def test_trajectories_of_a_downloaded_dataset(downloaded: Any, arguments: Any, lengths: set[int]) -> None:
    found = list(downloaded(**arguments, transform=lambda rows: rows.set("seen", rows["episode"])))
    assert {len(rows) for rows in found} == lengths
    assert sorted(each for rows in found for each in rows["seen"].unique().tolist()) == [0, 1, 2]


def test_trajectories_in_order(downloaded: Any, stream: Any, episodes: Episodes) -> None:
    for make in (downloaded, stream):
        found = list(make(shuffle=False))
        assert len(found) == len(episodes)
        for number, (rows, steps) in enumerate(zip(found, episodes, strict=True)):
            check_episode(rows, steps, number)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_slices": 2, "slice_len": 2}, ValueError, "not both"),
        ({"split_trajs": True}, NotImplementedError, "split_trajs"),
        ({"streaming": True, "replacement": True}, RuntimeError, "replacement"),
        ({"streaming": True, "download": True}, ValueError, "exclude"),
        ({"streaming": True, "sampler": object()}, ValueError, "sampler"),
        ({"streaming": True, "num_slices": 3, "batch_size": 8}, ValueError, "must be divisible by num_slices 3"),
        ({"streaming": True, "slice_len": 3, "batch_size": 8}, ValueError, "slice_len 3"),
        ({"download": True, "pad": 0}, RuntimeError, "pad"),
        ({"download": True, "slice_len": 2, "sampler": object()}, ValueError, "sampler"),
        ({"streaming": False, "slice_len": 2, "shuffle": False}, RuntimeError, "replacement=False"),
    ],
)
def test_arguments_that_exclude_each_other(stream: Any, arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        stream(**arguments)


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(MissingDatasetError, match="download=True"):
        OpenXExperienceReplay(upstream.DATASET, root=tmp_path, download=False, streaming=False)
    with pytest.raises(CorruptDatasetError, match="has no files cmu_stretch/"):
        OpenXExperienceReplay(upstream.DATASET, from_local=tmp_path)


# ------------------------------------------------------------------ streams


def test_batches_of_a_stream(stream: Any, episodes: Episodes) -> None:
    dataset = stream(6, num_slices=2, shuffle=False)
    assert (dataset.root, dataset.data_path, dataset.data_path_root) == (None, None, None)
    first, second = dataset.sample(), dataset.sample()
    assert first["episode"].tolist() == [0, 0, 0, 1, 1, 1]
    assert second["episode"].tolist() == [2, 2, 2, 3, 3, 3]  # the first trajectory again
    for batch in (first, second):
        for flag in ("done", "truncated"):
            assert batch["next", flag].flatten().tolist() == [False, False, True] * 2
    states = [step["observation"]["state"] for step in episodes[1]]
    assert (first["observation", "state"][3:].numpy() == states).all()


def test_windows_reach_every_step_of_a_trajectory(stream: Any) -> None:
    dataset = stream(slice_len=2, generator=torch.Generator().manual_seed(0))
    starts: dict[int, set[int]] = {}
    for _ in range(80):
        rows = dataset.sample(2)
        starts.setdefault(int(rows["episode"][0]) % 3, set()).add(int(rows["is_init"][0]))
    assert all(each == {0, 1} for each in starts.values())


def test_a_batch_without_slices_is_one_window(stream: Any) -> None:
    rows = stream(shuffle=False).sample(3)
    assert rows.shape == (3,) and rows["episode"].unique().tolist() == [0]


@pytest.mark.parametrize(("pad", "value"), [(True, 0), (7, 7)])
def test_padding(stream: Any, pad: Any, value: int) -> None:
    batch = stream(10, num_slices=2, pad=pad, shuffle=False).sample().reshape(2, 5)
    short = batch[1]
    assert (short["observation", "state"][3:] == value).all() and (short["observation", "image"][3:] == value).all()
    assert short["next", "done"].flatten().tolist()[:3] == [False, False, True]
    assert list(short["language_instruction"])[3:] == [None, None]
    assert (batch[0]["observation", "state"] != value).any()


@pytest.mark.parametrize("pad", [None, False])
def test_short_trajectories_without_padding(stream: Any, pad: Any) -> None:
    dataset = stream(num_slices=2, pad=pad, shuffle=False)
    with pytest.raises(RuntimeError, match=r"length \(3\) is shorter than the slice length \(5\)"):
        dataset.sample(10)
    assert dataset.sample(2)["episode"].tolist() == [2, 3]  # it goes on


def test_a_shuffled_stream_has_each_trajectory_once_a_pass(tmp_path: Path) -> None:
    rng, count = np.random.default_rng(0), 3 * SHUFFLED
    for number in range(3):
        steps = [upstream.encoded(upstream.episode(1, rng)) for _ in range(SHUFFLED)]
        for place, each in enumerate(steps):
            each[0]["discount"] = float(number * SHUFFLED + place)
        upstream.archive(tmp_path / f"{number}.tar", [(str(place), each) for place, each in enumerate(steps)])

    def drawn(seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        return list(
            OpenXExperienceReplay("mine", 2 * count, slice_len=1, from_local=tmp_path, generator=generator).sample()[
                "discount"
            ]
        )

    first = drawn(0)
    assert sorted(first[:count]) == sorted(first[count:]) == [*range(count)]
    assert first[:count] != first[count:] != sorted(first[count:])
    assert drawn(0) == first != drawn(1)


def test_a_stream_has_no_length_and_no_index(stream: Any, tmp_path: Path) -> None:
    dataset = stream(2, slice_len=1)
    with pytest.raises(RuntimeError, match="length"):
        len(dataset)
    for index in (0, slice(None), torch.arange(2)):
        with pytest.raises(RuntimeError, match="indexing"):
            dataset[index]
    with pytest.raises(CheckpointError, match="no checkpointer"):
        dataset.dumps(tmp_path / "saved")
    with pytest.raises(NotImplementedError, match="TrajectoryStream does not define state_dict"):
        dataset.state_dict()
    for refused in (
        lambda: dataset.preprocess(lambda rows: rows),
        dataset.delete,
        lambda: dataset.extend(dataset.sample()),
    ):
        with pytest.raises(RuntimeError):
            refused()
    assert dataset.metadata is None and dataset.metadata_path is None


def test_transforms_and_prefetch_of_a_stream(stream: Any) -> None:
    dataset = stream(
        4, slice_len=2, shuffle=False, prefetch=2, transform=lambda rows: rows.set("twice", 2 * rows["episode"])
    )
    numbers = [number for _, batch in zip(range(6), dataset, strict=False) for number in batch["twice"].tolist()]
    assert sorted(numbers) == [2 * number for number in range(12) for _ in range(2)]


# ------------------------------------------------------------------ bad files


def changed(**more: Any) -> list[dict[str, Any]]:
    steps = upstream.encoded(upstream.episode(3, np.random.default_rng(0)))
    steps[1] = {**steps[1], **more}
    return steps


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (changed(more=1), "step 1: has other keys than the first step: more"),
        (changed(action={"motion": np.zeros(7)}), "action, step 1: has other keys than the first step: gripper"),
        (changed(action={"motion": np.zeros(3), "gripper": 0.0}), "action, motion: .*numbers of one shape"),
        (changed(discount=None), "discount: .*neither numbers"),
        (
            changed(observation={**changed()[1]["observation"], "image": {"bytes": b"no"}}),
            "image, image 1: .*no JPEG or PNG",
        ),
        (changed(language_instruction=b"\xff"), "language_instruction: .*nor text"),
        ([], "list of dicts"),
        ({"steps": []}, "list of dicts"),
        ([{key: value for key, value in step.items() if key != "is_last"} for step in changed()], "have no is_last"),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_episodes_that_are_none(tmp_path: Path, steps: Any, text: str, streaming: bool) -> None:
    write(tmp_path, steps)
    with pytest.raises(CorruptDatasetError, match=f"{upstream.DATASET}_00000.tar, 000.data.pickle.*{text}"):
        OpenXExperienceReplay(upstream.DATASET, root=tmp_path, from_local=tmp_path, streaming=streaming).sample(1)


@pytest.mark.parametrize("more", [{"more": 1}, {"discount": 1}])
def test_trajectories_that_differ(tmp_path: Path, more: Any) -> None:
    other = upstream.encoded(upstream.episode(3, np.random.default_rng(0)))
    write(tmp_path, changed(), [{**step, **more} for step in other])
    with pytest.raises(CorruptDatasetError, match=next(iter(more))):
        OpenXExperienceReplay(upstream.DATASET, 4, num_slices=2, from_local=tmp_path).sample()


def test_archives_without_episodes(tmp_path: Path) -> None:
    write(tmp_path)
    for streaming in (True, False):
        with pytest.raises(CorruptDatasetError, match=r"no (trajectories|rows)"):
            OpenXExperienceReplay(upstream.DATASET, root=tmp_path, from_local=tmp_path, streaming=streaming).sample(1)


# ------------------------------------------------------------------ the hub


@pytest.fixture
def published(hub: Server) -> Episodes:
    return upstream.make(hub.folder / "datasets" / REPO, np.random.default_rng(0))


SHARD = f"datasets/{REPO}/{upstream.DATASET}/{upstream.DATASET}_00000.tar"


def test_stream_over_the_network(
    published: Episodes, hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.answer(SHARD, Answer(cut=5000, methods=("GET",)), times=1)
    before = {*tmp_path.rglob("*")}
    found = list(OpenXExperienceReplay(upstream.DATASET, shuffle=False))
    assert {*tmp_path.rglob("*")} == before
    for number, (rows, steps) in enumerate(zip(found, published, strict=True)):
        check_episode(rows, steps, number)


def test_a_stream_that_breaks_off_begins_anew(published: Episodes, hub: Server) -> None:
    dataset = OpenXExperienceReplay(upstream.DATASET, 1, shuffle=False)
    hub.answer(SHARD, Answer(status=404, methods=("GET",)), times=1)
    with pytest.raises(DownloadError, match=f"{upstream.DATASET}_00000.tar"):
        dataset.sample()
    assert dataset.sample()["episode"].tolist() == [0]


@pytest.mark.parametrize("download", [True, False])
def test_an_id_that_the_hub_does_not_have(published: Episodes, tmp_path: Path, download: bool) -> None:
    with pytest.raises(ValueError, match=r"no dataset 'cmu_stretched'.*'cmu_stretch'"):
        OpenXExperienceReplay("cmu_stretched", root=tmp_path, download=download)

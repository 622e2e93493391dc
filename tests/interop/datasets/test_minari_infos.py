"""What Minari lets differ from episode to episode: infos, seeds, options, and flags at the end."""

import gc
import json
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from minari.data_collector import EpisodeBuffer

from interop import SliceSampler
from interop.data.keys import entries_below
from interop.datasets.minari_data import MinariExperienceReplay
from tests.interop.datasets import sources_minari as made

FORMATS = ["hdf5", "arrow", "parquet"]
ID = "toy/infos-v0"
BOX = Box(-np.inf, np.inf, (1,), np.float64)


def episode(number: int, steps: int, infos: dict[str, Any] | None, **more: Any) -> EpisodeBuffer:
    return EpisodeBuffer(
        number,
        observations=np.arange(steps + 1.0)[:, None] + 100 * number,
        actions=np.ones(steps, np.int64),
        rewards=np.ones(steps),
        terminations=np.zeros(steps, np.bool_),
        truncations=np.arange(steps) == steps - 1,
        infos=infos,
        **more,
    )


def loaded(
    folder: Path, episodes: list[EpisodeBuffer], data_format: str = "hdf5", **more: Any
) -> MinariExperienceReplay:
    """The dataset of these episodes, as minari writes them."""
    data = made.write(folder / "minari", ID, episodes, BOX, Discrete(3), data_format=data_format)
    return MinariExperienceReplay(ID, root=folder / "root", from_local=data, **more)


# ------------------------------------------------------------------ an oracle over random infos


def random_infos(rng: np.random.Generator, steps: int, constants: bool) -> dict[str, Any]:
    """Infos of an episode: some of five names, each with the reset or without it, or one value, or None."""
    out: dict[str, Any] = {}
    for name, dtypes in {"a": ["f8"], "b": ["i4", "f4"], "c": ["?", "i8"], "d": ["f8"]}.items():
        kind = rng.choice(["steps", "all", "one", "none", "missing"] if constants else ["all", "missing"])
        shape = {"a": (), "b": tuple(rng.integers(1, 4, 1)), "c": (), "d": tuple(rng.integers(1, 3, 2))}[name]
        shape = () if name == "d" and rng.random() < 0.2 else shape
        count = {"steps": (steps,), "all": (steps + 1,)}.get(kind, ())
        values = rng.integers(1, 9, (*count, *shape)).astype(rng.choice(dtypes))
        if kind == "one":
            out[name] = values.reshape(-1)[0].item()
        elif kind != "missing":
            out[name] = None if kind == "none" else values
    inner = {name: out.pop(name) for name in ("a", "d") if name in out}
    return {**out, "inner": inner, "note": [f"{steps} {at}" for at in range(steps + 1)]}


def expected(episodes: list[dict[str, Any]], path: tuple[str, ...], lengths: list[int]) -> list[np.ndarray]:
    """The values of T + 1 times of each episode, by what a reader of Minari's documentation would do with `EpisodeData`."""
    found = [dict(entries_below(infos)).get(path) for infos in episodes]
    arrays = [None if each is None else np.asarray(each) for each in found]
    rows = [each.shape[1:] if each.ndim else () for each in arrays if each is not None]
    dims = max(map(len, rows))
    shape = tuple(max(((1,) * (dims - len(row)) + row)[dim] for row in rows) for dim in range(dims))
    dtype = np.result_type(*(each.dtype for each in arrays if each is not None))
    out = []
    for steps, each in zip(lengths, arrays, strict=True):
        values = np.zeros((steps + 1, *shape), dtype)
        for at in range(steps + 1):
            if each is not None and (not each.ndim or at - (steps + 1 - len(each)) >= 0):
                value = each if not each.ndim else each[at - (steps + 1 - len(each))]
                value = value.reshape((1,) * (dims - value.ndim) + value.shape)
                for place in np.ndindex(value.shape):
                    values[(at, *place)] = value[place]
        out.append(values)
    return out


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_infos_that_differ_from_episode_to_episode(tmp_path: Path, data_format: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 5).tolist()
    infos = [random_infos(rng, steps, data_format == "hdf5") for steps in lengths]
    if data_format != "hdf5":
        for steps, each in zip(lengths, infos, strict=True):
            each["inner"] = each["inner"] or {"a": np.ones(steps + 1)}
    infos[0] = {**infos[0], "inner": {"a": 1.5 + np.arange(lengths[0] + 1), **infos[0]["inner"]}}
    episodes = [episode(number, *each) for number, each in enumerate(zip(lengths, infos, strict=True))]
    data = loaded(tmp_path, episodes, data_format)
    with made.root(tmp_path / "minari"):
        upstream = [each.infos for each in minari.load_dataset(ID)] if data_format == "hdf5" else infos
    rows = data[:]
    paths = {path for each in infos for path, value in entries_below(each) if value is not None and path != ("note",)}
    for path in paths:
        values = expected(upstream, path, lengths)
        np.testing.assert_array_equal(rows["info", *path].numpy(), np.concatenate([each[:-1] for each in values]))
        np.testing.assert_array_equal(
            rows["next", "info", *path].numpy(), np.concatenate([each[1:] for each in values])
        )
        assert rows["info", *path].numpy().dtype == values[0].dtype
    notes = [note for each in infos for note in each["note"][:-1]]
    assert rows["info"].get("note").tolist() == notes
    assert {path for path, _ in entries_below(rows["info"])} == {*paths, ("note",)}


def test_constants_of_several_numbers_and_of_text(tmp_path: Path) -> None:
    """An array whose rows are not those of the steps, and the same in all episodes, is of the whole episode."""
    goals = [[1.0, 2, 3, 4, 5, 6, 7], [7.0, 6, 5, 4, 3, 2, 1], [0.0] * 7]

    episodes = [episode(place, steps, {"goal": np.array(goals[place])}) for place, steps in enumerate((2, 3, 6))]
    data = made.write(tmp_path / "minari", ID, episodes, BOX, Discrete(3))
    with h5py.File(data / "main_data.hdf5", "a") as file:
        file["episode_1/infos/task"] = "open the door"
    rows = MinariExperienceReplay(ID, root=tmp_path / "root", from_local=data)[:]
    assert rows["info", "goal"].tolist() == [goals[0]] * 2 + [goals[1]] * 3 + [goals[2]] * 6
    assert torch.equal(rows["next", "info", "goal"], rows["info", "goal"])
    assert rows["info"].get("task").tolist() == [""] * 2 + ["open the door"] * 3 + [""] * 6


@pytest.mark.parametrize("data_format", FORMATS[1:])
def test_single_values_that_are_none(tmp_path: Path, data_format: str) -> None:
    infos = {
        "speed": [None, 1.5, 2.5],
        "count": [3, None, 4],
        "note": [None, "a", "b"],
        "pair": [None, [1.0, 2.0], [3.0, 4.0]],
        "nothing": [None, None, None],
        "inner": {"nothing": [None, None, None], "x": [1, 2, 3]},
    }
    rows = loaded(tmp_path, [episode(0, 2, infos), episode(1, 1, None)], data_format)[:]
    assert rows["info", "speed"].tolist() == [0, 1.5, 0] and rows["next", "info", "speed"].tolist() == [1.5, 2.5, 0]
    assert rows["info", "count"].tolist() == [3, 0, 0] and rows["info"].get("note").tolist() == ["", "a", ""]
    assert rows["next", "info", "pair"].tolist() == [[1, 2], [3, 4], [0, 0]]
    assert {path for path, _ in entries_below(rows["info"])} == {
        ("speed",), ("count",), ("note",), ("pair",), ("inner", "x"),
    }  # fmt: skip


# ------------------------------------------------------------------ seeds, options, ends


class _Walk(gymnasium.Env):
    """s' = s + a, r = s'."""

    observation_space, action_space = BOX, Discrete(3)
    ends = 16

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        infos = {"n": self._at, "pair": (self._at, 2.0 * self._at), "inner": {"x": np.array([self._at, 0.5])}}
        infos["t"] = str(self._at)
        return np.array([float(self._at)]), infos

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at = 10
        return self._seen()

    def step(self, action: int) -> Any:
        self._at += int(action)
        seen, infos = self._seen()
        return seen, float(self._at), self._at >= self.ends, False, infos


def _collect(seeds: tuple[int, int], options: dict[str, Any], data_format: str) -> None:
    with minari.DataCollector(_Walk(), record_infos=True, data_format=data_format) as env:
        for seed, actions in zip(seeds, ([1, 2, 1, 2], [2, 0, 1]), strict=True):
            env.reset(seed=seed, options=options)
            for action in actions:
                env.step(action)
        env.create_dataset(ID)


@pytest.mark.parametrize("data_format", FORMATS)
def test_episodes_of_the_collector(tmp_path: Path, data_format: str) -> None:
    options = {"door": {"open": 3}, "size": 1.5}
    seeds = 7, 2**32 - 1
    with made.root(tmp_path / "minari"):
        _collect(seeds, options, data_format)
        gc.collect()  # minari's temporary folder, of which Python warns
        upstream = [*minari.load_dataset(ID)]
    data = MinariExperienceReplay(ID, root=tmp_path / "root", from_local=tmp_path / "minari")
    rows, said = data[:], data.metadata["episodes"]
    assert rows["next", "reward"].flatten().tolist() == (rows["observation"][:, 0] + rows["action"]).tolist()
    assert torch.equal(rows["next", "observation"], rows["next", "reward"])
    assert rows["next", "reward"].flatten().tolist() == [reward for each in upstream for reward in each.rewards]
    for side in (rows, rows["next"]):
        states = side["observation"][:, 0]
        assert torch.equal(side["info", "n"].double(), states) and torch.equal(side["info", "pair", "1"], 2 * states)
        assert torch.equal(side["info", "inner", "x"][:, 0], states)
        assert side["info"].get("t").tolist() == [f"{state:.0f}" for state in states.tolist()]
    assert rows["next", "terminated"].flatten().tolist() == [False] * 3 + [True] + [False] * 3
    assert rows["next", "truncated"].flatten().tolist() == [False] * 6 + [True]
    assert [(each["id"], each["total_steps"], each["seed"]) for each in said] == [
        (0, 4, 7),
        (1, 3, seeds[1]),
    ]
    assert all(each["options"] == options for each in said)


def test_seeds_of_64_bits_and_episodes_without_any(tmp_path: Path) -> None:
    episodes = [
        episode(0, 1, None, seed=2**64 - 1),
        episode(1, 2, None, options={"a": {"b": [1, 2]}}),
        episode(2, 1, None),
    ]
    data = loaded(tmp_path, episodes)
    said = json.loads(data.metadata_path.read_text())["episodes"]
    assert [each.get("seed") for each in said] == [2**64 - 1, None, None]
    assert said[1]["options"] == {"a": {"b": [1, 2]}} and "options" not in said[2]
    assert MinariExperienceReplay(ID, root=tmp_path / "root", download=False).metadata["episodes"] == said


KEYS = [{}, {"end_key": ("next", "done")}, {"end_key": ("next", "truncated")}, {"traj_key": "episode"}]


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_an_end_without_a_flag_is_no_passage(tmp_path: Path, data_format: str, keys: Any) -> None:
    episodes = [episode(number, 3, None) for number in range(4)]
    for each in episodes:
        each.truncations[:] = False
    data = loaded(tmp_path, episodes, data_format, batch_size=24, sampler=SliceSampler(slice_len=2, **keys))
    for _ in range(5):
        at = data[data.sample()["index"].reshape(-1)]["observation"].reshape(-1, 2)
        assert (at[:, 1] == at[:, 0] + 1).all()
    rows = data[:]
    assert rows["next", "done"].flatten().tolist() == [False, False, True] * 4
    assert torch.equal(rows["next", "truncated"], rows["next", "done"]) and not rows["next", "terminated"].any()

"""Export of a replay buffer to a Minari dataset."""

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict.utils import NestedKey

from interop.buffers import ReplayBuffer
from interop.data.arguments import required
from interop.datasets.episode_buffers import EpisodeBuffers, Keys
from interop.datasets.export_formats import MINARI
from interop.datasets.progress import progress
from interop.datasets.stored_episodes import stored_episodes
from interop.datasets.value_spaces import fitted, space_of
from interop.shared.published_folder import publish

if TYPE_CHECKING:
    from gymnasium import Env, Space
    from gymnasium.envs.registration import EnvSpec
    from minari import EpisodeBuffer, MinariDataset

_TEXTS = {"algorithm_name", "code_permalink"}


def to_minari(
    rb: ReplayBuffer,
    dataset_id: str,
    env: "str | EnvSpec | Env[Any, Any] | None" = None,
    *,
    observation_space: "Space[Any] | None" = None,
    action_space: "Space[Any] | None" = None,
    observation_key: Keys = "observation",
    action_key: Keys = "action",
    traj_key: NestedKey | None = None,
    end_keys: Sequence[NestedKey] | None = None,
    only_named_keys: bool = False,
    exclude: Collection[NestedKey] = (),
    data_format: str = "hdf5",
    jpeg_encoding: bool = False,
    author: str | Collection[str] = (),
    author_email: str | Collection[str] = (),
    algorithm_name: str | None = None,
    code_permalink: str | None = None,
    description: str | None = None,
    requirements: Sequence[str] | None = None,
    ref_min_score: float | None = None,
    ref_max_score: float | None = None,
    num_episodes_average_score: int | None = None,
) -> "MinariDataset":
    """Write the trajectories of a buffer to a local Minari dataset for `minari.load_dataset(dataset_id)`.

    Writes the stored rows without transforms, one episode at a time; `MinariExperienceReplay` reads back equal bits. The
    buffer is locked meanwhile. The dataset appears atomically. Entries are checked before the first byte is written: by
    one row in a storage of tensors, by all rows in lists, and where there is text.

    | stored | written |
    |---|---|
    | observation and ("next", observation), [T] each | observations, [T + 1] |
    | action | actions |
    | ("next", "reward"), "terminated", "truncated" | rewards, terminations, truncations; by default from "done" |
    | "info", and any other entry | infos, [T + 1]; entries missing in "next" end with zeros or empty text |
    | "reward", "done", "terminated", "truncated" of the root | infos, unless they are zero in all rows |

    Rewards that are integers are read back as float64.

    An episode is a trajectory of `SliceSampler`. A trajectory is split if an entry of "next" differs from the next row. The
    last step of an episode is truncated unless it is terminated. Trajectory ids are not written, as Minari numbers
    episodes.

    Args:
        rb: the buffer.
        dataset_id: `[namespace/]name-v0`.
        env: the environment whose spaces and spec are written.
        observation_space, action_space: override those of `env`. Without either, unbounded spaces of the rows are used.
        observation_key, action_key: the key of the entry, or a dict of several for a Dict space.
        traj_key, end_keys, only_named_keys: the entries that mark trajectory ends, as for `SliceSampler`.
        exclude: the keys of entries that are left out.
        data_format: "hdf5", "arrow" or "parquet". Complex numbers and rows without values need "hdf5".
        jpeg_encoding: store images of at least 32 x 32 as JPEG, which is lossy.
        author, author_email: one string, or several.
        algorithm_name, code_permalink, description, requirements, ref_min_score, ref_max_score, num_episodes_average_score:
            metadata, as for `minari.create_dataset_from_buffers`; None is left out.

    Raises:
        ValueError: the id is malformed, the dataset exists (it is not modified), or rows do not fit the spaces.
        KeyError, TypeError, ValueError: an entry cannot be written and read back; see `EpisodeBuffers.of`. The message names
            it. TypeError also for metadata that cannot be written.
        RuntimeError: the buffer is empty, or has no entry that marks trajectory ends.
    """
    minari = required("minari", "datasets")
    described: dict[str, object] = {
        "algorithm_name": algorithm_name,
        "code_permalink": code_permalink,
        "description": description,
        "requirements": requirements,
        "ref_min_score": ref_min_score,
        "ref_max_score": ref_max_score,
        "num_episodes_average_score": num_episodes_average_score,
    }
    metadata = {name: value for name, value in described.items() if value is not None}
    _check_metadata(metadata)
    if data_format not in MINARI:
        raise ValueError(f"No storage implemented for {data_format}: data_format is one of {[*MINARI]}")
    folder, namespace = _place(dataset_id)
    spec, observations, actions = (None, None, None) if env is None else _spec_and_spaces(env)
    given_spaces = {
        "observations": observations if observation_space is None else observation_space,
        "actions": actions if action_space is None else action_space,
    }
    metadata |= {"dataset_id": dataset_id, "minari_version": minari.__version__}
    for name, value in (("author", author), ("author_email", author_email)):
        metadata |= {name: {value} if isinstance(value, str) else {*value}} if value else {}
    with stored_episodes(rb, traj_key, end_keys, only_named_keys, exclude) as stored:
        episodes = EpisodeBuffers.of(stored, MINARI[data_format], observation_key, action_key)
        _check_spaces(episodes, given_spaces, jpeg_encoding)

        def every(name: str) -> Iterator[Any]:
            return (episode[name] for episode in episodes)

        spaces = {
            name: space_of(partial(every, name)) if space is None else space for name, space in given_spaces.items()
        }

        def in_spaces(place: int, episode: dict[str, Any]) -> dict[str, Any]:
            parts = {name: fitted(space, episode[name], f"episode {place}, {name}") for name, space in spaces.items()}
            return episode | parts

        in_spaces(0, next(iter(episodes)))  # the others have the same kinds

        def buffers() -> Iterator["EpisodeBuffer"]:
            with progress(f"Writing {dataset_id}", stored.rows, "row") as advance:
                for place, episode in enumerate(episodes):
                    yield minari.data_collector.EpisodeBuffer(**in_spaces(place, episode))
                    advance(len(episode["rewards"]))

        def make(scratch: Path) -> None:
            (scratch / "data").mkdir()
            path = scratch / "data" / "data"
            storage = required("minari.dataset.minari_storage", "datasets").MinariStorage.new(
                path, spaces["observations"], spaces["actions"], spec, data_format, jpeg_encoding=jpeg_encoding
            )
            storage.update_metadata(metadata)
            storage.update_episodes(buffers())

        required("minari.storage", "datasets").get_dataset_path()  # makes the folder of all datasets
        publish(folder, None, make)
    namespaces = required("minari.namespace", "datasets")
    if namespace is not None and namespace not in namespaces.list_local_namespaces():
        namespaces.create_namespace(namespace)
    return minari.load_dataset(dataset_id)


def _check_metadata(metadata: Mapping[str, object]) -> None:
    """TypeError for metadata that Minari cannot write."""
    for name, value in metadata.items():
        if name in _TEXTS and not isinstance(value, str):
            raise TypeError(f"the metadata {name!r} is a text, got {value!r:.100}")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the metadata {name!r} is written as JSON: {error}") from error


def _check_spaces(episodes: EpisodeBuffers, given_spaces: Mapping[str, Any], jpeg_encoding: bool) -> None:
    """TypeError for entries that have no space; ValueError for images that are no JPEG. Both name the entry."""
    for place, (dtype, shape) in episodes.kinds.items():
        if place[0] not in given_spaces:
            continue
        path = episodes.places[place]
        kind = f"{str(dtype).removeprefix('torch.')} {[*shape]}"
        if given_spaces[place[0]] is None and getattr(dtype, "is_complex", False):
            raise TypeError(
                f"{path} is {kind}, for which there is no space: store real numbers, or leave it out of {place[0]}"
            )
        is_image = len(shape) == 3 and min(shape[:2]) >= 32 and str(dtype) == "torch.uint8"
        if jpeg_encoding and is_image and shape[2] != 3:
            raise ValueError(f"{path} is {kind}, JPEG images have 3 colors or are [H, W]: pass jpeg_encoding=False")


def _place(dataset_id: str) -> tuple[Path, str | None]:
    """The folder of a new dataset, and its namespace."""
    dataset = required("minari.dataset.minari_dataset", "datasets")
    try:
        namespace: str | None = dataset.parse_dataset_id(dataset_id)[0]
    except TypeError as error:  # int(None)
        raise ValueError(f"the id {dataset_id!r} has no version: write {dataset_id}-v0") from error
    folder: Path = required("minari.storage", "datasets").get_dataset_path(dataset_id)
    if os.path.lexists(folder):
        raise ValueError(f"there is a dataset {dataset_id} in {folder}: use another name or version, or remove it")
    return folder, namespace


def _spec_and_spaces(env: Any) -> tuple[Any, Any, Any]:
    """The spec and spaces of an environment, created first if a name is given."""
    gymnasium = required("gymnasium", "datasets")
    if isinstance(env, gymnasium.Env):
        return env.spec, env.observation_space, env.action_space
    with contextlib.closing(gymnasium.make(env)) as made_env:
        return made_env.spec, made_env.observation_space, made_env.action_space

"""Datasets by name: `load_dataset("minari:mujoco/hopper/expert-v0")`."""

import importlib
from collections.abc import Callable, Mapping

from interop.data.arguments import class_of
from interop.data.keys import nearest
from interop.datasets.atari_dqn import AtariDQNExperienceReplay
from interop.datasets.d4rl import D4RLExperienceReplay
from interop.datasets.gen_dgrl import GenDGRLExperienceReplay
from interop.datasets.hub_folder import HubFolderExperienceReplay
from interop.datasets.lerobot import LeRobotExperienceReplay
from interop.datasets.minari_data import MinariExperienceReplay
from interop.datasets.openml import OpenMLExperienceReplay
from interop.datasets.openx import OpenXExperienceReplay
from interop.datasets.roboset import RobosetExperienceReplay
from interop.datasets.vd4rl import VD4RLExperienceReplay

Factory = Callable[..., object]
_DATASETS: dict[str, Factory | str] = {
    "atari": AtariDQNExperienceReplay,
    "atari_dqn": AtariDQNExperienceReplay,
    "d4rl": D4RLExperienceReplay,
    "gen_dgrl": GenDGRLExperienceReplay,
    "hub_folder": HubFolderExperienceReplay,
    "lerobot": LeRobotExperienceReplay,
    "minari": MinariExperienceReplay,
    "openml": OpenMLExperienceReplay,
    "openx": OpenXExperienceReplay,
    "roboset": RobosetExperienceReplay,
    "vd4rl": VD4RLExperienceReplay,
}


def load_dataset(dataset_id: str, **kwargs: object) -> object:
    """The dataset of a prefix and an id, such as "d4rl:halfcheetah-medium-v2".

    Args:
        dataset_id: "prefix:id". The prefixes of this library are atari, atari_dqn, d4rl, gen_dgrl, hub_folder, lerobot,
            minari, openml, openx, roboset and vd4rl; `register_dataset` adds others. The id may contain colons.
        **kwargs: arguments of the class, such as `batch_size`.

    Raises: ValueError for an id without a prefix, or with an unknown one; TypeError for no text; what the class raises.
    """
    if not isinstance(dataset_id, str):
        raise TypeError(f"dataset_id must be a text such as 'd4rl:halfcheetah-medium-v2', got {class_of(dataset_id)}")
    prefix, colon, rest = dataset_id.partition(":")
    if not colon or not rest or prefix not in _DATASETS:
        raise ValueError(
            f"dataset_id must be 'prefix:id' with one of the prefixes {', '.join(sorted(_DATASETS))}, got {dataset_id!r}"
            f"{nearest([prefix], _DATASETS)}"
        )
    return _made(_DATASETS[prefix], rest, kwargs)


def register_dataset(prefix: str, dataset: Factory | str, *, replace: bool = False) -> None:
    """Let `load_dataset("prefix:id", ...)` return `dataset(id, ...)`, in this process.

    ```python
    register_dataset("toy", ToyDataset)
    load_dataset("toy:small", batch_size=32)  # ToyDataset("small", batch_size=32)
    ```

    Args:
        prefix: a text without a colon.
        dataset: a class or function; or the text "module:name" of one, which is imported when it is used.
        replace: replace an earlier one with this prefix.

    Raises: KeyError for a prefix that is there; ValueError for one with a colon, or a text that is not "module:name";
    TypeError for other arguments.
    """
    if not isinstance(prefix, str) or not (callable(dataset) or isinstance(dataset, str)):
        raise TypeError(
            f"prefix must be a text and dataset a class, function or 'module:name', got {prefix!r} and {dataset!r}"
        )
    if not prefix or ":" in prefix:
        raise ValueError(f"a prefix has one character or more and no colon, got {prefix!r}")
    if isinstance(dataset, str) and not all(part.strip() for part in (*dataset.split(":"), "", "")[:2]):
        raise ValueError(f"dataset must name a module and what is in it, as 'module:name', got {dataset!r}")
    if prefix in _DATASETS and not replace:
        raise KeyError(f"there is a dataset with the prefix {prefix!r}: pass replace=True to replace it")
    _DATASETS[prefix] = dataset


def _made(dataset: Factory | str, dataset_id: str, arguments: Mapping[str, object]) -> object:
    if isinstance(dataset, str):
        module, _, name = dataset.partition(":")
        made: Factory = getattr(importlib.import_module(module), name)
    else:
        made = dataset
    return made(dataset_id, **arguments)

"""Public datasets as replay buffers: downloaded, verified and converted once, then memory-mapped."""

from interop.datasets.atari_dqn import AtariDQNExperienceReplay
from interop.datasets.d4rl import D4RLExperienceReplay
from interop.datasets.errors import CorruptDatasetError, DatasetError, DownloadError, MissingDatasetError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.fetching import RemoteFile, fetch
from interop.datasets.gen_dgrl import GenDGRLExperienceReplay
from interop.datasets.hub_folder import HubFolderExperienceReplay
from interop.datasets.lerobot import LeRobotExperienceReplay
from interop.datasets.merged import merged
from interop.datasets.minari_data import MinariExperienceReplay
from interop.datasets.openml import OpenMLExperienceReplay
from interop.datasets.openx import OpenXExperienceReplay
from interop.datasets.roboset import RobosetExperienceReplay
from interop.datasets.rows import following, nested
from interop.datasets.source import Part, Source
from interop.datasets.to_hub_folder import to_hub_folder
from interop.datasets.to_lerobot import to_lerobot
from interop.datasets.to_minari import to_minari
from interop.datasets.vd4rl import VD4RLExperienceReplay

__all__ = [
    "AtariDQNExperienceReplay",
    "BaseDatasetExperienceReplay",
    "CorruptDatasetError",
    "D4RLExperienceReplay",
    "DatasetError",
    "DownloadError",
    "GenDGRLExperienceReplay",
    "HubFolderExperienceReplay",
    "LeRobotExperienceReplay",
    "MinariExperienceReplay",
    "MissingDatasetError",
    "OpenMLExperienceReplay",
    "OpenXExperienceReplay",
    "Part",
    "RemoteFile",
    "RobosetExperienceReplay",
    "Source",
    "VD4RLExperienceReplay",
    "fetch",
    "following",
    "merged",
    "nested",
    "to_hub_folder",
    "to_lerobot",
    "to_minari",
]

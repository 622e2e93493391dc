"""Public datasets as replay buffers: downloaded, verified and converted once, then memory-mapped."""

from interop.datasets.atari_dqn import AtariDQNExperienceReplay
from interop.datasets.d4rl import D4RLExperienceReplay
from interop.datasets.errors import CorruptDatasetError, DatasetError, DownloadError, MissingDatasetError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.fetching import RemoteFile, fetch
from interop.datasets.gen_dgrl import GenDGRLExperienceReplay
from interop.datasets.hub_folder import HubFolderExperienceReplay
from interop.datasets.lerobot import LeRobotExperienceReplay
from interop.datasets.lerobot_entries import lerobot_columns_to_tensordict
from interop.datasets.merged import merged
from interop.datasets.minari_data import MinariExperienceReplay
from interop.datasets.offline_to_online import OfflineToOnlineReplayBuffer, prefill_replay_buffer
from interop.datasets.openml import OpenMLExperienceReplay
from interop.datasets.openx import OpenXExperienceReplay
from interop.datasets.registry import load_dataset, register_dataset
from interop.datasets.roboset import RobosetExperienceReplay
from interop.datasets.rows import following, nested
from interop.datasets.source import Part, Source
from interop.datasets.to_hub_folder import to_hub_folder
from interop.datasets.to_lerobot import to_lerobot
from interop.datasets.to_minari import to_minari
from interop.datasets.vd4rl import VD4RLExperienceReplay
from interop.datasets.video_clips import VideoClipRef
from interop.datasets.video_decoders import clear_video_decoder_cache, set_video_decoder_cache_size

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
    "OfflineToOnlineReplayBuffer",
    "OpenMLExperienceReplay",
    "OpenXExperienceReplay",
    "Part",
    "RemoteFile",
    "RobosetExperienceReplay",
    "Source",
    "VD4RLExperienceReplay",
    "VideoClipRef",
    "clear_video_decoder_cache",
    "fetch",
    "following",
    "lerobot_columns_to_tensordict",
    "load_dataset",
    "merged",
    "nested",
    "prefill_replay_buffer",
    "register_dataset",
    "set_video_decoder_cache_size",
    "to_hub_folder",
    "to_lerobot",
    "to_minari",
]

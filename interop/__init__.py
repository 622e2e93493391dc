"""Replay buffers with the torch and tensordict API of torchrl: on a CPU run by a host engine, on accelerators by `fbuf`.

The host engine is NumPy and torch; accelerators and programs inside `jax.jit` run `fbuf`, and arrays cross over DLPack.

Names are imported at their first use: `python -m interop inspect` waits for neither torch nor JAX.
"""

import importlib
from typing import TYPE_CHECKING

from fbuf._version import __version__
from interop.data.import_order import JAX_CAME_FIRST

if JAX_CAME_FIRST:
    from interop.data import settings  # noqa: F401  # as early as it can be: JAX may start at any time

# Families of names: each is imported at the first use of one of them. Those of the core, which are not listed, come
# from `interop.names` together.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "specs": (
        "BinaryDiscreteTensorSpec", "BoundedTensorSpec", "CompositeSpec", "DiscreteTensorSpec",
        "LazyStackedCompositeSpec", "LazyStackedTensorSpec", "MultiDiscreteTensorSpec",
        "MultiOneHotDiscreteTensorSpec", "NonTensorSpec", "OneHotDiscreteTensorSpec",
        "UnboundedContinuousTensorSpec", "UnboundedDiscreteTensorSpec", "DEVICE_TYPING", "Binary", "BinaryBox",
        "Bounded", "BoundedContinuous", "BoundedDiscrete", "BoxList", "Categorical", "CategoricalBox", "Choice",
        "Composite", "ContinuousBox", "DiscreteBox", "MultiCategorical", "MultiOneHot", "NonTensor", "OneHot",
        "Stacked", "StackedComposite", "TensorSpec", "Unbounded", "UnboundedContinuous", "UnboundedDiscrete",
        "check_no_exclusive_keys", "consolidate_spec", "contains_lazy_spec", "from_gymnasium", "from_torchrl",
        "make_composite_from_td", "to_torchrl", "to_gymnasium",
    ),
    "llm": (
        "AdaptiveKLController", "ConstantKLController", "ContentBase", "History", "LLMData", "LLMInput", "LLMOutput",
        "PairwiseDataset", "PromptData", "PromptTensorDictTokenizer", "RewardData", "RolloutFromModel",
        "TensorDictTokenizer", "TokenizedDatasetLoader", "TopKRewardSelector", "add_chat_template",
        "create_infinite_iterator", "get_dataloader",
    ),
    "maps": (
        "BinaryToDecimal", "HashToInt", "MCTSForest", "QueryModule", "RandomProjectionHash", "SipHash",
        "TensorDictMap", "TensorMap", "Tree",
    ),
    "remote": (
        "RayReplayBuffer", "RemoteError", "RemoteTensorDictReplayBuffer", "RemoteTimeoutError", "ShardLostError",
    ),
    "doors": ("FunctionalReplayBuffer", "from_fbuf"),
    "formats": ("FlatStorageCheckpointer", "H5StorageCheckpointer", "NestedStorageCheckpointer", "convert_torchrl"),
    "looking": ("Damage", "Inspection", "Report", "UnknownPathError", "inspect", "seal", "verify"),
    "opening": ("open",),
    "doctor": ("show_versions",),
    "datasets": (  # its other names are used as `interop.datasets.X`
        "OfflineToOnlineReplayBuffer", "VideoClipRef", "clear_video_decoder_cache", "prefill_replay_buffer",
        "set_video_decoder_cache_size",
    ),
    "vla": (  # its other names are used as `interop.vla.X`
        "ActionTokenizerBase", "RobotDatasetMetadata", "UniformActionTokenizer", "VocabTailActionTokenizer",
        "validate_vla_tensordict",
    ),
    "view": (),
    "transfer_queue": (),
    "metrics": (),
}  # fmt: skip
_WITHOUT_TORCH = ("looking", "doctor")  # families that work where torch is not installed
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names}

__all__ = [
    "DEFAULT_DONE_KEYS",
    "ActionTokenizerBase",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "Compose",
    "CompressedListStorage",
    "CompressedListStorageCheckpointer",
    "ConditionalUpdateResult",
    "ConsumingSampler",
    "Damage",
    "DensifyReward",
    "Flat2TED",
    "FlatStorageCheckpointer",
    "FunctionalReplayBuffer",
    "H5Combine",
    "H5Split",
    "H5StorageCheckpointer",
    "HERReplayBuffer",
    "HindsightStrategy",
    "ImmutableDatasetWriter",
    "Inspection",
    "LambdaScheduler",
    "LazyFrameStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "LinearScheduler",
    "ListStorage",
    "ListStorageCheckpointer",
    "MultiStep",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "OfflineToOnlineReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PromptGroupSampler",
    "RandomSampler",
    "RateLimitedReplayBuffer",
    "RateLimiter",
    "RayReplayBuffer",
    "RemoteError",
    "RemoteTensorDictReplayBuffer",
    "RemoteTimeoutError",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "Report",
    "RewardSpread",
    "RobotDatasetMetadata",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "Sequence",
    "ShardLostError",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StepScheduler",
    "Storage",
    "StorageCheckpointerBase",
    "StorageEnsemble",
    "StorageEnsembleCheckpointer",
    "StoreStorage",
    "StreamingSliceSampler",
    "TED2Flat",
    "TED2Nested",
    "TEDError",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "Trajectory",
    "TrajectoryPredicate",
    "Transition",
    "UniformActionTokenizer",
    "UnknownPathError",
    "VideoClipRef",
    "VocabTailActionTokenizer",
    "Writer",
    "WriterEnsemble",
    "__version__",
    "check_ted",
    "clear_video_decoder_cache",
    "convert_torchrl",
    "filter_trajectories",
    "find_start_stop_traj",
    "from_fbuf",
    "inspect",
    "iter_trajectories",
    "open",
    "prefill_replay_buffer",
    "seal",
    "set_video_decoder_cache_size",
    "show_versions",
    "split_trajectories",
    "to_jax",
    "to_torch",
    "traj",
    "validate_vla_tensordict",
    "verify",
]

if TYPE_CHECKING:
    from interop import (  # noqa: F401
        datasets,
        doctor,
        doors,
        formats,
        llm,
        looking,
        maps,
        metrics,
        opening,
        remote,
        specs,
        transfer_queue,
        vla,
    )
    from interop.datasets import (
        OfflineToOnlineReplayBuffer,
        VideoClipRef,
        clear_video_decoder_cache,
        prefill_replay_buffer,
        set_video_decoder_cache_size,
    )
    from interop.doctor import show_versions
    from interop.doors import FunctionalReplayBuffer, from_fbuf
    from interop.formats import (
        FlatStorageCheckpointer,
        H5StorageCheckpointer,
        NestedStorageCheckpointer,
        convert_torchrl,
    )
    from interop.llm import *  # noqa: F403
    from interop.looking import Damage, Inspection, Report, UnknownPathError, inspect, seal, verify
    from interop.maps import *  # noqa: F403
    from interop.names import *  # noqa: F403
    from interop.opening import open
    from interop.remote import (
        RayReplayBuffer,
        RemoteError,
        RemoteTensorDictReplayBuffer,
        RemoteTimeoutError,
        ShardLostError,
    )
    from interop.specs import *  # noqa: F403
    from interop.vla import (
        ActionTokenizerBase,
        RobotDatasetMetadata,
        UniformActionTokenizer,
        VocabTailActionTokenizer,
        validate_vla_tensordict,
    )

    __all__ += specs.__all__
    __all__ += llm.__all__  # type: ignore[has-type]
    __all__ += maps.__all__
else:
    __all__ += (*_FAMILIES["specs"], *_FAMILIES["llm"], *_FAMILIES["maps"])

    def __getattr__(name: str) -> object:
        if _FAMILY_OF.get(name, name) not in _WITHOUT_TORCH and (name in __all__ or name in _FAMILIES):
            importlib.import_module("interop.data.settings")  # first: it says what to install
        if name in _FAMILIES:
            return importlib.import_module(f"interop.{name}")
        if name in _FAMILY_OF:
            found: object = getattr(importlib.import_module(f"interop.{_FAMILY_OF[name]}"), name)
            globals()[name] = found  # the next use does not come here
            return found
        if name in __all__:
            core = importlib.import_module("interop.names")
            globals().update({each: getattr(core, each) for each in core.__all__})
            return globals()[name]
        try:
            return importlib.import_module(f"interop.{name}")  # `interop.storages` without an import of its own
        except ModuleNotFoundError as error:
            if error.name != f"interop.{name}":
                raise
        raise AttributeError(f"module 'interop' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_FAMILIES, *_FAMILY_OF})

"""Replay buffers with the torch and tensordict API of torchrl: on a CPU run by a host engine, on accelerators by `fbuf`.

The host engine is NumPy and torch; accelerators and programs inside `jax.jit` run `fbuf`, and arrays cross over DLPack.
"""

import importlib
from typing import TYPE_CHECKING

from interop.data import settings  # noqa: F401  # first: it must see whether JAX was imported before

# isort: split
from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from interop.buffers import (
    ConditionalUpdateResult,
    HERReplayBuffer,
    HindsightStrategy,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.checkpoint.layouts import may_import
from interop.data.bridge import to_jax, to_torch
from interop.data.untraced import untraced
from interop.postprocs import DensifyReward, MultiStep, split_trajectories
from interop.sample_units import SampleUnit, Sequence, Transition
from interop.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
)
from interop.schedulers import LambdaScheduler, LinearScheduler, SchedulerList, StepScheduler
from interop.storages import (
    CompressedListStorage,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from interop.storages.checkpointers import (
    CompressedListStorageCheckpointer,
    ListStorageCheckpointer,
    StorageEnsembleCheckpointer,
    TensorStorageCheckpointer,
)
from interop.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested, TEDError, check_ted
from interop.trajectories import DEFAULT_DONE_KEYS, find_start_stop_traj
from interop.transforms import Compose
from interop.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
    WriterEnsemble,
)

# Families of names that no buffer needs: each is imported at the first use of one of them.
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
        "AdaptiveKLController", "ConstantKLController", "LLMData", "LLMInput", "LLMOutput", "PairwiseDataset",
        "PromptData", "PromptTensorDictTokenizer", "RewardData", "RolloutFromModel", "TensorDictTokenizer",
        "TokenizedDatasetLoader", "create_infinite_iterator", "get_dataloader",
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
    "datasets": (),  # its names are used as `interop.datasets.X`
    "view": (),
}  # fmt: skip
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names}

__all__ = [
    "DEFAULT_DONE_KEYS",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "Compose",
    "CompressedListStorage",
    "CompressedListStorageCheckpointer",
    "ConditionalUpdateResult",
    "ConsumingSampler",
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
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PromptGroupSampler",
    "RandomSampler",
    "RayReplayBuffer",
    "RemoteError",
    "RemoteTensorDictReplayBuffer",
    "RemoteTimeoutError",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
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
    "TED2Flat",
    "TED2Nested",
    "TEDError",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "Transition",
    "Writer",
    "WriterEnsemble",
    "check_ted",
    "convert_torchrl",
    "find_start_stop_traj",
    "from_fbuf",
    "split_trajectories",
    "to_jax",
    "to_torch",
]

if TYPE_CHECKING:
    from interop import datasets, doors, formats, llm, maps, remote, specs  # noqa: F401
    from interop.doors import FunctionalReplayBuffer, from_fbuf
    from interop.formats import (
        FlatStorageCheckpointer,
        H5StorageCheckpointer,
        NestedStorageCheckpointer,
        convert_torchrl,
    )
    from interop.llm import *  # noqa: F403
    from interop.maps import *  # noqa: F403
    from interop.remote import (
        RayReplayBuffer,
        RemoteError,
        RemoteTensorDictReplayBuffer,
        RemoteTimeoutError,
        ShardLostError,
    )
    from interop.specs import *  # noqa: F403

    __all__ += specs.__all__
    __all__ += llm.__all__  # type: ignore[has-type]
    __all__ += maps.__all__
else:
    __all__ += (*_FAMILIES["specs"], *_FAMILIES["llm"], *_FAMILIES["maps"])

    def __getattr__(name: str) -> object:
        if name in _FAMILIES:
            return importlib.import_module(f"interop.{name}")
        if name not in _FAMILY_OF:
            raise AttributeError(f"module 'interop' has no attribute {name!r}")
        found: object = getattr(importlib.import_module(f"interop.{_FAMILY_OF[name]}"), name)
        globals()[name] = found  # the next use does not come here
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_FAMILIES, *_FAMILY_OF})


may_import("interop.llm", "interop.maps")  # whose classes items of a checkpoint may be of
_COMPONENTS = (ReplayBuffer, Storage, Sampler, Writer)
untraced(*(each for each in [*globals().values()] if isinstance(each, type) and issubclass(each, _COMPONENTS)))

"""Every public name of `torchrl.data` is here: those of 0.14.1, and those of the torchrl that is installed."""

import importlib
import importlib.util

import pytest

import interop
from interop import datasets

HAS_TORCHRL = importlib.util.find_spec("torchrl") is not None

# `torchrl.data.__all__` of 0.14.1.
DATA = """
ActionTokenizerBase AdaptiveKLController Binary BinaryToDecimal Bounded BoundedContinuous Categorical Choice Composite
CompressedListStorage CompressedListStorageCheckpointer ConditionalUpdateResult ConstantKLController ConsumingSampler
ContentBase DEFAULT_DONE_KEYS DEVICE_TYPING DensifyReward Flat2TED FlatStorageCheckpointer H5Combine H5Split
H5StorageCheckpointer HERReplayBuffer HashToInt HindsightStrategy History ImmutableDatasetWriter LazyMemmapStorage
LazyStackStorage LazyTensorStorage ListStorage ListStorageCheckpointer MCTSForest MultiCategorical MultiOneHot MultiStep
Nested2TED NestedStorageCheckpointer NonTensor OfflineToOnlineReplayBuffer OneHot PairwiseDataset
PrioritizedReplayBuffer PrioritizedSampler PrioritizedSliceSampler PromptData PromptGroupSampler
PromptTensorDictTokenizer QueryModule RandomProjectionHash RandomSampler RayReplayBuffer RemoteTensorDictReplayBuffer
ReplayBuffer ReplayBufferEnsemble RewardData RobotDatasetMetadata RolloutFromModel RoundRobinWriter SampleUnit
SamplerEnsemble SamplerWithoutReplacement Sequence SipHash SliceSampler SliceSamplerWithoutReplacement Stacked
StackedComposite StalenessAwareSampler Storage StorageCheckpointerBase StorageEnsemble StorageEnsembleCheckpointer
StoreStorage StreamingSliceSampler TED2Flat TED2Nested TensorDictMap TensorDictMaxValueWriter
TensorDictPrioritizedReplayBuffer TensorDictReplayBuffer TensorDictRoundRobinWriter TensorDictTokenizer TensorMap
TensorSpec TensorStorage TensorStorageCheckpointer TokenizedDatasetLoader TopKRewardSelector Trajectory
TrajectoryPredicate Transition Tree Unbounded UnboundedContinuous UnboundedDiscrete UniformActionTokenizer VideoClipRef
VocabTailActionTokenizer Writer WriterEnsemble check_no_exclusive_keys clear_video_decoder_cache consolidate_spec
contains_lazy_spec create_infinite_iterator filter_trajectories find_start_stop_traj get_dataloader iter_trajectories
prefill_replay_buffer set_video_decoder_cache_size traj validate_vla_tensordict
""".split()  # noqa: SIM905
# `torchrl.data.datasets.__all__` of 0.14.1.
DATASETS = """
AtariDQNExperienceReplay BaseDatasetExperienceReplay D4RLExperienceReplay GenDGRLExperienceReplay LeRobotExperienceReplay
MinariExperienceReplay OpenMLExperienceReplay OpenXExperienceReplay RobosetExperienceReplay VD4RLExperienceReplay
load_dataset register_dataset lerobot_columns_to_tensordict
""".split()  # noqa: SIM905
# Names that are not here, and why.
LEFT_OUT = {
    **dict.fromkeys(
        [
            f"{device}{kind}SegmentTreeFp{bits}"
            for device in ("", "Cuda")
            for kind in ("Sum", "Min")
            for bits in (32, 64)
        ],
        "parts of its samplers; ours keep priorities in trees of their own",
    ),
}
MODULES = {
    "torchrl.data": interop,
    "torchrl.data.datasets": datasets,
    "torchrl.data.llm": interop,
    "torchrl.data.map": interop,
    "torchrl.data.postprocs": interop,
    "torchrl.data.replay_buffers": interop,
    "torchrl.data.replay_buffers.samplers": interop,
    "torchrl.data.replay_buffers.storages": interop,
    "torchrl.data.replay_buffers.writers": interop,
}


def missing(names, ours):
    return [name for name in names if not hasattr(ours, name) and name not in LEFT_OUT]


def test_the_names_of_torchrl_0_14_1():
    assert len(DATA) == 115
    assert not missing(DATA, interop)
    assert not missing(DATASETS, datasets)


@pytest.mark.skipif(not HAS_TORCHRL, reason="torchrl is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", MODULES)
def test_the_names_of_the_installed_torchrl(module):
    theirs = importlib.import_module(module)
    assert not missing(theirs.__all__, MODULES[module]), "build them, or say in LEFT_OUT why they are not here"


def test_hindsight_strategies_are_texts():
    assert interop.HindsightStrategy.FUTURE == "future"
    assert interop.HindsightStrategy("final") is interop.HindsightStrategy.FINAL

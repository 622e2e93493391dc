"""Every public name of `torchrl.data` is here: those of 0.14.1, and those of the torchrl that is installed."""

import importlib
import importlib.util

import pytest
import torch

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
    "torchrl.data.llm": interop.llm,
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


def test_columns_of_lerobot():
    columns = {
        "observation.state": torch.zeros(4, 7),
        "observation.images.top": torch.ones(4, 3, 8, 8),
        "episode_index": torch.tensor([0, 0, 1, 1]),
        "task": ["pick", "pick", "place", "place"],
        "next.reward": torch.ones(4),
        "own": torch.ones(4),
    }
    rows = datasets.lerobot_columns_to_tensordict(columns, key_map={"own": ("mine", "too")})
    assert rows["observation", "image", "top"].shape == (4, 3, 8, 8) and rows["next", "reward"].shape == (4,)
    assert rows["mine", "too"].shape == (4,) and rows["episode"].tolist() == [0, 0, 1, 1]
    assert rows.get("language_instruction").tolist() == columns["task"]
    for wrong in ({}, {"a": torch.zeros(2), "b": torch.zeros(3)}):
        with pytest.raises(ValueError, match="columns"):
            datasets.lerobot_columns_to_tensordict(wrong)
    with pytest.raises(TypeError, match="a tensor"):
        datasets.lerobot_columns_to_tensordict({"a": 3})


def test_a_chat_template_of_ones_own():
    interop.llm.add_chat_template(
        "bare",
        "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}",
        inverse_parser=lambda text: interop.History.from_chats(
            [dict(zip(("role", "content"), part.split(": "), strict=True)) for part in text.split(";") if part]
        ),
    )
    read = interop.History.from_text("user: hello;assistant: yes;", chat_template_name="bare")
    assert list(read.content) == ["hello", "yes"] and list(read.role) == ["user", "assistant"]
    interop.llm.add_chat_template("written", "{{ messages[0].content }}", model_family_keywords=["Written"])
    with pytest.raises(ValueError, match="inverse_parser"):
        interop.History.from_text("x", chat_template_name="written")

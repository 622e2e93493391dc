"""Which items a batch is drawn from."""

from interop.samplers.consuming import ConsumingSampler
from interop.samplers.drawing import DrawingSampler
from interop.samplers.ensemble import SamplerEnsemble
from interop.samplers.key_groups import KeyGroupSampler
from interop.samplers.prioritized import PrioritizedSampler
from interop.samplers.prioritized_slices import PrioritizedSliceSampler
from interop.samplers.prompt_groups import PromptGroupSampler
from interop.samplers.reward_spread import RewardSpread
from interop.samplers.sampler import Sampler
from interop.samplers.slice_epochs import SliceSamplerWithoutReplacement
from interop.samplers.slices import SliceSampler
from interop.samplers.stack_slices import StackSampler
from interop.samplers.staleness import StalenessAwareSampler
from interop.samplers.streaming_slices import StreamingSliceSampler
from interop.samplers.uniform import RandomSampler
from interop.samplers.without_replacement import SamplerWithoutReplacement

__all__ = [
    "ConsumingSampler",
    "DrawingSampler",
    "KeyGroupSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PromptGroupSampler",
    "RandomSampler",
    "RewardSpread",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StackSampler",
    "StalenessAwareSampler",
    "StreamingSliceSampler",
]

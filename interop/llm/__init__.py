"""Language data: tokenized datasets, rollouts of language models, and the KL penalty. Needs the extra `llm`."""

import sys

from interop.llm import rollout as utils
from interop.llm.chat_templates import add_chat_template
from interop.llm.dataset import TokenizedDatasetLoader, create_infinite_iterator, get_dataloader
from interop.llm.history import ContentBase, History
from interop.llm.kl import AdaptiveKLController, ConstantKLController
from interop.llm.prompt import PromptData
from interop.llm.reward import PairwiseDataset, RewardData
from interop.llm.rollout import RolloutFromModel
from interop.llm.sequences import LLMData, LLMInput, LLMOutput
from interop.llm.tokenizers import PromptTensorDictTokenizer, TensorDictTokenizer
from interop.llm.top_k import TopKRewardSelector

sys.modules[f"{__name__}.utils"] = utils  # torchrl's name of the rollout module

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "ContentBase",
    "History",
    "LLMData",
    "LLMInput",
    "LLMOutput",
    "PairwiseDataset",
    "PromptData",
    "PromptTensorDictTokenizer",
    "RewardData",
    "RolloutFromModel",
    "TensorDictTokenizer",
    "TokenizedDatasetLoader",
    "TopKRewardSelector",
    "add_chat_template",
    "create_infinite_iterator",
    "get_dataloader",
]

"""Data of robots that follow instructions: action tokens, metadata of datasets, and the schema of their tensordicts."""

from interop.vla.action_tokenizer import ActionTokenizerBase
from interop.vla.metadata import ActionSpace, GripperMode, RobotDatasetMetadata
from interop.vla.schema import (
    ACTION_CHUNK_KEY,
    ACTION_IS_PAD_KEY,
    ACTION_KEY,
    ACTION_TOKENS_KEY,
    IMAGE_KEY,
    INSTRUCTION_KEY,
    OBSERVATION_KEY,
    STATE_KEY,
    VLA_ACTION_KEY,
    validate_vla_tensordict,
)
from interop.vla.uniform_tokenizer import UniformActionTokenizer
from interop.vla.vocab_tail_tokenizer import VocabTailActionTokenizer

__all__ = [
    "ACTION_CHUNK_KEY",
    "ACTION_IS_PAD_KEY",
    "ACTION_KEY",
    "ACTION_TOKENS_KEY",
    "IMAGE_KEY",
    "INSTRUCTION_KEY",
    "OBSERVATION_KEY",
    "STATE_KEY",
    "VLA_ACTION_KEY",
    "ActionSpace",
    "ActionTokenizerBase",
    "GripperMode",
    "RobotDatasetMetadata",
    "UniformActionTokenizer",
    "VocabTailActionTokenizer",
    "validate_vla_tensordict",
]

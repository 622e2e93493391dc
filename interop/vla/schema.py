"""The entries that a tensordict of a robot has, and their check."""

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey

from interop.data.arguments import class_of
from interop.data.keys import entry_at, known_keys

OBSERVATION_KEY = "observation"
IMAGE_KEY: NestedKey = ("observation", "image")
STATE_KEY: NestedKey = ("observation", "state")
INSTRUCTION_KEY = "language_instruction"
ACTION_KEY = "action"
VLA_ACTION_KEY = "vla_action"
ACTION_CHUNK_KEY: NestedKey = ("vla_action", "chunk")
ACTION_IS_PAD_KEY = "action_is_pad"
ACTION_TOKENS_KEY: NestedKey = ("vla_action", "tokens")


def validate_vla_tensordict(
    tensordict: TensorDictBase,
    *,
    instruction_key: NestedKey = INSTRUCTION_KEY,
    action_key: NestedKey = ACTION_KEY,
    image_key: NestedKey = IMAGE_KEY,
    state_key: NestedKey = STATE_KEY,
    require_instruction: bool = True,
    require_action: bool = True,
    require_perception: bool = True,
    check_finite: bool = True,
    raise_on_error: bool = True,
) -> list[str]:
    """What a tensordict lacks of the entries that a policy of vision, language and action needs; an empty list if nothing.

        >>> data = TensorDict({"observation": {"state": torch.zeros(2, 5)}, "action": torch.zeros(2, 7)}, batch_size=[2])
        >>> validate_vla_tensordict(data, raise_on_error=False)
        ["missing language instruction at key 'language_instruction'"]

    Args:
        tensordict: the data, of any batch size.
        instruction_key, action_key, image_key, state_key: the entries.
        require_instruction, require_action: whether the entry must be there.
        require_perception: whether an image or a state must be there.
        check_finite: whether an action with NaN or an infinite value counts. Reads all actions.
        raise_on_error: raise a ValueError with all that was found, instead of returning it.

    TypeError for other than a tensordict.
    """
    if not is_tensor_collection(tensordict):
        raise TypeError(f"validate_vla_tensordict takes a tensordict, got {class_of(tensordict)}")
    found = []
    if require_instruction and entry_at(tensordict, instruction_key) is None:
        found.append(f"missing language instruction at key {instruction_key!r}")
    if require_perception and all(entry_at(tensordict, key) is None for key in (image_key, state_key)):
        found.append(f"no perception found: expected an image at {image_key!r} or state at {state_key!r}")
    action = entry_at(tensordict, action_key)
    if action is None:
        if require_action:
            found.append(f"missing action at key {action_key!r}")
    elif not isinstance(action, torch.Tensor) and (
        isinstance(action, NonTensorData | NonTensorStack) or not is_tensor_collection(action)
    ):
        found.append(f"action at key {action_key!r} is no tensor")
    elif check_finite and isinstance(action, torch.Tensor) and not action.isfinite().all():
        found.append(f"non-finite values in action at key {action_key!r}")
    if found and raise_on_error:
        issues = "".join(f"\n  - {issue}" for issue in found)
        raise ValueError(
            f"Tensordict does not follow the canonical VLA schema:{issues}\nIts entries are {known_keys(tensordict)}."
        )
    return found

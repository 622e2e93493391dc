"""What torchrl's storages wrote of TED data that its checkpointers made flat, or nested, before."""

from typing import Any

from tensordict import NonTensorData, TensorDict, TensorDictBase

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop.checkpoint.torchrl_dirs_entries import Held, Plain, Ragged
from interop.checkpoint.torchrl_dirs_files import Tensor
from interop.ted import Flat2TED


def unhooked(held: Held, checkpointer: Any) -> TensorDictBase:
    """The rows that there is room for, [rows, *lanes].

    By what the checkpointer of the target knows of the keys, or else the usual ones. What is nested is flat in its file.
    """
    flattening = getattr(checkpointer, "_flattening", None)
    hook = Flat2TED()
    if flattening is not None:
        hook._names, hook._done_key = flattening._names, flattening._done_key[1:]
    try:
        return hook(_data(held))
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{held.where}: is not TED data that was made flat: {error}") from error


def _data(held: Held) -> TensorDictBase:
    """The tensordict, read."""
    made = TensorDict({}, batch_size=[], device="cpu")
    for key, entry in held.entries.items():
        if isinstance(entry, Held):
            made.set(key, _data(entry))
        elif isinstance(entry, Tensor):
            made.set(key, entry.to_torch())
        elif isinstance(entry, Ragged):
            made.set(key, entry.values.to_torch())
        elif isinstance(entry, Plain):
            made.set(key, NonTensorData(entry.value, device="cpu"))
        else:
            raise CheckpointMismatch(f"{entry.where}: stacked tensordicts cannot be read here")
    return made

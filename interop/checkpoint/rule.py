"""How a checkpoint may be put into something that is not quite like what was saved."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """What `loads` allows.

    Args:
        strict: keys that only one side has are a CheckpointMismatch; without, those of the checkpoint are left out and
            those of the target are zero.
        cast: dtypes may differ; values are cast.
        allow_pickle: objects that were saved by pickle are read, which runs whatever code they name.
    """

    strict: bool = True
    cast: bool = False
    allow_pickle: bool = False


EXACT = Rule()

"""Dtypes and devices of torch by name. A name in a file is looked up or parsed here, and never evaluated."""

import re
from typing import Any

import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,3})?")


def dtype_named(name: Any, where: str) -> torch.dtype:
    """The dtype of a name such as "float32". CheckpointCorrupt for one that is not known."""
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointCorrupt(f"{where}: {str(name)[:40]!r} is no dtype")
    return DTYPES[name]


def device_named(name: str, where: str) -> torch.device:
    """The device of a name such as "cuda:0", whether it is here or not. CheckpointCorrupt where it names none."""
    try:
        if _DEVICE.fullmatch(name):
            return torch.device(name)
    except RuntimeError:
        pass
    raise CheckpointCorrupt(f"{where}: {name[:40]!r} is no device")


def refuse_absent(device: torch.device, where: str) -> None:
    """CheckpointMismatch for a device that this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointMismatch(
            f"{where}: tensors were saved from the device {device}, which is not here: load into a storage with "
            "device='cpu'"
        ) from error


def optional_device(name: Any, where: str) -> torch.device | None:
    """The device of a name; None for None."""
    if name is None:
        return None
    return device_named(name if isinstance(name, str) else repr(name), where)

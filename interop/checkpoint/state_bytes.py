"""A `state_dict` as JSON and the bytes of its arrays, for files of a format of your own."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt
from fbuf.checkpoint.arrays import BY_NAME, as_bytes, as_native, name_of, row_bytes
from fbuf.checkpoint.json_text import LARGEST
from fbuf.checkpoint.manifest import dump_json, lift, lower, parse_json
from interop.checkpoint.values import NO_PICKLE, decode, encode


def pack(state_dict: object) -> tuple[bytes, list[np.ndarray]]:
    """A result of `state_dict` as JSON, and its arrays as bytes, [bytes] uint8 each. O(bytes).

    The arrays may be views of the tensors. Items that are alike share arrays: there are few, also for a list of many items.

    Raises:
        TypeError: it holds an object that is no plain value, array, tensor or tensordict. Nothing is pickled.
        ValueError: the JSON has more than 64 MiB: many items are unlike each other.
    """
    pieces: list[np.ndarray] = []

    def place(value: object) -> dict[str, Any]:
        array = as_native(np.asarray(value))
        pieces.append(as_bytes(array))
        return {"$array": [name_of(array.dtype), list(array.shape)]}

    text = dump_json(lower(encode(state_dict, "a state_dict", remedy=NO_PICKLE), place))
    if len(text) > LARGEST:
        raise ValueError(
            f"the description of the state takes {len(text)} bytes, {LARGEST} at most are read again: it has too many "
            "separate values. Save items that are alike, or tensors of many values"
        )
    return text, pieces


def unpack(
    text: bytes, pieces: Sequence[bytes | bytearray | memoryview | np.ndarray], where: str = "a state_dict"
) -> Any:
    """The `state_dict` that `pack` was given. It runs no code.

    Tensors may be views of pieces whose memory can be written, such as bytearrays. Other pieces are copied.

    Args:
        text, pieces: the results of `pack`, read again. Compare their checksums first: this finds wrong sizes and JSON that
            `pack` does not write, not a flipped bit of a number.
        where: the file, for messages.

    Raises:
        CheckpointCorrupt: they are no results of `pack`, or pieces are missing, left over, or of another size.
    """
    unused = list(reversed(pieces))

    def found(mark: str, described: object) -> np.ndarray:
        if mark != "$array" or not unused:
            raise CheckpointCorrupt(f"{where}: {len(pieces)} arrays do not belong to this description")
        dtype, shape = _described(described, where)
        raw = np.frombuffer(unused.pop(), np.uint8)
        if raw.size != row_bytes(dtype, shape):
            raise CheckpointCorrupt(f"{where}: an array of {dtype} {shape} cannot have {raw.size} bytes")
        try:
            return (raw if raw.flags.writeable else raw.copy()).view(dtype).reshape(shape)
        except (ValueError, OverflowError) as error:  # such as a dim of 2**70 beside one of 0
            raise CheckpointCorrupt(f"{where}: no array has the shape {shape}") from error

    tree = lift(parse_json(text, where), found)
    if unused:
        raise CheckpointCorrupt(f"{where}: {len(unused)} of {len(pieces)} arrays are left over")
    return decode(tree, where=where)


def _described(described: object, where: str) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and the shape of an array in the JSON."""
    if isinstance(described, list) and len(described) == 2:
        name, shape = described
        sizes = isinstance(shape, list) and len(shape) <= 64 and all(type(size) is int and size >= 0 for size in shape)
        if isinstance(name, str) and name in BY_NAME and sizes:
            return BY_NAME[name], tuple(shape)
    raise CheckpointCorrupt(f"{where}: an array is not described as it should be")

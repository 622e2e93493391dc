"""The gate for JSON that others wrote: its size, depth, keys and text are checked, in memory of up to 32 times its bytes."""

import json
import re
from typing import Any

LARGEST = 1 << 26  # bytes
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)', re.DOTALL)  # an unclosed text ends at the end: linear in time
_BUT_BRACKETS = {number: None for number in range(128) if chr(number) not in "[]{}"}
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character, perhaps without the other one


def parsed(
    text: bytes, where: str, error: type[Exception], *,
    deepest: int = 64, largest: int = LARGEST, constants: bool = True, halves: bool = False,
) -> Any:  # fmt: skip
    """The value of a JSON text in UTF-8.

    Args:
        text: at most `largest` bytes.
        where: prefix of the message.
        error: the class of the error for text that is too large, too deep, no JSON, has a key twice in one object, or text
            that is no Unicode.
        deepest: how deep lists and objects may be nested.
        largest: for text that this library wrote, it may be more than `LARGEST`.
        constants: whether NaN and Infinity, which Python and NumPy programs write, are taken.
        halves: whether text with half of a character is taken, which Python has and UTF-8 has not.
    """
    try:
        if len(text) > largest:
            raise ValueError(f"it has {len(text)} bytes, {largest} at most are read")
        decoded = text.decode("utf-8-sig")
        if _depth(decoded) > deepest:
            raise ValueError(f"it is nested more than {deepest} deep")
        found = json.loads(decoded, object_pairs_hook=_once, parse_constant=None if constants else _refused)
        if not halves and _HALF.search(decoded):
            json.dumps(found, ensure_ascii=False).encode()  # UnicodeEncodeError for half of a character
        return found
    except (ValueError, RecursionError) as fault:
        raise error(f"{where}: no JSON that can be read ({fault})") from fault


def _depth(text: str) -> int:
    deepest = depth = 0
    for bracket in _TEXT.sub("", text).translate(_BUT_BRACKETS):
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")

"""The gate before a pickle is run: what its instructions say of sizes is compared with its bytes.

An unpickler believes them: an instruction of five bytes makes it reserve memory for two thousand million remembered objects,
and a byte each an empty list. Here the instructions are read, and none is run.
"""

from interop.datasets import allowance

# Bytes that an object takes, with its copy.
_NOTHING = 16
_SMALL = 40
_TEXT = 64
_LIST = 200
_DICT = 400
_CALL = 300

# Instructions by what follows them: bytes, a number of bytes with that length before them, or lines of text.
_FIXED: dict[bytes, tuple[int, int]] = {
    **dict.fromkeys((b"N", b"\x88", b"\x89", b"(", b"0", b"1", b"2", b")"), (0, _NOTHING)),
    **dict.fromkeys((b"\x94", b"a", b"e", b"s", b"u"), (0, _NOTHING)),  # remember, append, set
    **dict.fromkeys((b"]", b"l", b"t", b"\x85", b"\x86", b"\x87"), (0, _LIST)),
    **dict.fromkeys((b"}", b"d"), (0, _DICT)),
    **dict.fromkeys((b"R", b"b", b"\x93"), (0, _CALL)),
    **dict.fromkeys((b"K", b"h"), (1, _SMALL)),
    b"M": (2, _SMALL),
    **dict.fromkeys((b"J", b"j"), (4, _SMALL)),
    b"G": (8, _SMALL),
    b"\x80": (1, _NOTHING),
    **{
        code: (size, _CALL) for code, size in ((b"\x82", 1), (b"\x83", 2), (b"\x84", 4))
    },  # names by number, refused later
}
_COUNTED = {
    **dict.fromkeys((b"U", b"C", b"\x8c", b"\x8a"), 1),
    **dict.fromkeys((b"T", b"X", b"B", b"\x8b"), 4),
    **dict.fromkeys((b"\x8d", b"\x8e", b"\x96"), 8),
}
_LINES = {b"I": 1, b"L": 1, b"F": 1, b"S": 1, b"V": 1, b"g": 1, b"c": 2}
_PUTS = {b"q": 1, b"r": 4}
_FRAME = b"\x95"
_PUT_LINE = b"p"
_STOP = b"."


def check(data: bytes, start: int = 0) -> None:
    """ValueError for a pickle, from `start`, that names more bytes than follow, remembers objects under numbers that are
    not consecutive, makes more objects than `allowance.held` allows, or has instructions that plain values do not need.
    """
    place = start
    end = len(data)
    cost = 0
    remembered = 0
    most = allowance.held(end - start)
    while place < end:
        code = data[place : place + 1]
        place += 1
        if code in _FIXED:
            size, price = _FIXED[code]
            place += size
            cost += price
        elif code in _COUNTED:
            width = _COUNTED[code]
            size = int.from_bytes(data[place : place + width], "little")
            place += width + size
            cost += _TEXT + 2 * size
        elif code in _PUTS or code == _PUT_LINE:
            width = _PUTS.get(code) or data.find(b"\n", place) + 1 - place
            text = data[place : place + width]
            number = int.from_bytes(text, "little") if code in _PUTS else int(text) if text.strip().isdigit() else -1
            if not 0 <= number <= remembered:
                raise ValueError(f"it remembers object {number} after {remembered} others")
            place += width
            cost += _NOTHING
            remembered += 1
        elif code in _LINES:
            for _ in range(_LINES[code]):
                size = data.find(b"\n", place) + 1 - place
                if size <= 0:
                    raise ValueError("it is truncated")
                place += size
                cost += _SMALL + 2 * size
        elif code == _FRAME:
            size = int.from_bytes(data[place : place + 8], "little")
            if size > end - place - 8:
                raise ValueError(f"it announces a frame of {size} bytes, {end - place - 8} follow")
            place += 8
        elif code == _STOP:
            return
        else:
            raise ValueError(f"it has the instruction {code!r}, which plain values do not need")
        if code == b"\x94":
            remembered += 1
        if place > end:
            raise ValueError(f"it announces more bytes than the {end - start} that it has")
        if cost > most:
            raise ValueError(f"its objects would take more than {most} bytes, it has {end - start}")
    raise ValueError("it is truncated")

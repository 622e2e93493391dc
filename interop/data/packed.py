"""Values of different lengths, such as texts, kept one behind the other as bytes in append-only segments."""

import contextlib
import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

_OFFSET = 40  # bits of an address that count bytes in a segment; those above are the number of the segment
_KIND = 2  # bits of a length that tell the kind of value
_LEAST, _MOST = 1 << 20, 1 << 30  # bytes of a segment, unless one value is larger; each map takes a descriptor
_TEXT, _BYTES, _INTEGERS, _JSON = range(4)
_PLAIN = {str, int, float, bool, type(None)}


class PackedValues:
    """Byte strings by span. A span is two int64: the address, and the length shifted by two bits with the kind of value.

    Bytes are appended, never changed. A process appends to segments of its own, so that writers need no common position.
    `reclaim` frees segments that no span refers to, each as a whole. Callers hold the lock of the storage while they append
    or reclaim.

    Args:
        folder: where segments are files that several processes map, also after it was renamed; None for memory of this
            process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._handle = -1  # of the folder
        self._segments: dict[int, np.ndarray] = {}
        self._current = -1  # the segment that this process appends to
        self._pid = os.getpid()
        self._used = 0  # bytes of it
        self._appended = 0  # bytes since the last scan
        self._live = 0  # bytes that the last scan found
        self._dead: set[int] = set()  # segments in which it found none
        self._room: dict[
            int, int
        ] = {}  # bytes that are kept free behind a value that has grown, by the address of its end
        if folder is not None:
            with contextlib.suppress(FileNotFoundError):
                self._directory()

    # ------------------------------------------------------------------ writing

    def append(
        self, data: bytes, lengths: np.ndarray, kinds: int | Sequence[int] | np.ndarray = 0, expected: int = 0
    ) -> np.ndarray:
        """Append byte strings that lie one behind the other in data; returns their spans, int64 [n, 2]. O(bytes).

        OSError where the disk has no room. A new segment is made for `expected` bytes, where more are to come.
        """
        spans = np.empty((len(lengths), 2), np.int64)
        spans[:, 0] = self.append_whole(np.frombuffer(data, np.uint8), expected) + np.cumsum(lengths) - lengths
        spans[:, 1] = lengths << _KIND | np.asarray(kinds, np.int64)
        return spans

    def extended(self, spans: np.ndarray, added: Sequence[bytes | memoryview]) -> np.ndarray:
        """The spans of values with more bytes behind them, int64 [n, 2]; those of the values alone stay valid.

        O(bytes added), amortized: a value is copied once to a place with room for half as many bytes again, and then grows
        there until the room is used. OSError where the disk has no room.
        """
        found = np.array(spans, np.int64)
        for at, more in enumerate(added):
            if len(more):
                size = int(spans[at, 1] >> _KIND)
                found[at, 0] = self._extended(int(spans[at, 0]), size, spans[at : at + 1], more)
                found[at, 1] += len(more) << _KIND
        return found

    def has_room(self, span: np.ndarray, size: int) -> bool:
        """Whether `extended` puts so many bytes behind the value of a span, int64 [2], without a copy of it."""
        self._follow_fork()
        return self._room.get(int(span[0] + (span[1] >> _KIND)), 0) >= size

    def append_with_room(self, data: np.ndarray, room: int) -> int:
        """`append_whole`, where `extended` then has room for so many bytes."""
        address = self.append_whole(data, room=room)
        self._room[address + data.size] = room
        return address

    def byte_at(self, address: int) -> int:
        """One stored byte. RuntimeError for one that is gone."""
        return self._view(address >> _OFFSET)[address & ((1 << _OFFSET) - 1)]

    def are_there(self, spans: np.ndarray) -> bool:
        """Whether the segments of spans, int64 [n, 2], exist, also for other processes."""
        numbers = set((spans[:, 0] >> _OFFSET).tolist())
        if self.folder is None:
            return numbers <= self._segments.keys()
        return all(os.access(_name(number), os.F_OK, dir_fd=self._directory()) for number in numbers)

    def _extended(self, address: int, size: int, span: np.ndarray, more: bytes | memoryview) -> int:
        """The address of the value of a span, with more bytes behind it."""
        self._follow_fork()
        number, start = address >> _OFFSET, address & ((1 << _OFFSET) - 1)
        # Taken first: two rows may have this span, and an interrupt comes at any line. Who comes next copies the value.
        room = self._room.pop(address + size, 0)
        if room < len(more):
            [value] = self.read(span)
            whole = np.frombuffer(b"".join((value, more)), np.uint8)
            return self.append_with_room(whole, whole.size // 2)
        begin, end = start + size, start + size + len(more)
        self._reserve(number, begin, len(more))
        self._segments[number][begin:end] = np.frombuffer(more, np.uint8)
        self._room[address + size + len(more)] = room - len(more)
        return address

    def _follow_fork(self) -> None:
        """In a forked child: the segments of the parent, and the room in them, belong to the parent."""
        if self._pid != os.getpid():
            self._pid, self._current, self._room = os.getpid(), -1, {}

    def _reserve(self, number: int, start: int, size: int) -> None:
        """Take disk space for bytes of a segment: to write where the disk has none would kill the process."""
        if self.folder is not None and size and hasattr(os, "posix_fallocate"):
            handle = self._open(number, os.O_RDWR)
            try:
                os.posix_fallocate(handle, start, size)
            finally:
                os.close(handle)

    def append_whole(self, data: np.ndarray, expected: int = 0, room: int = 0) -> int:
        """Append bytes, uint8 [n], that stay together in one segment; returns their address. `room` bytes stay free."""
        self._follow_fork()
        held, size = self._segments.get(self._current), data.size
        gone = self.folder is not None and not os.access(_name(self._current), os.F_OK, dir_fd=self._handle)
        if (
            held is None or gone or held.size - self._used < size + room
        ):  # another process may have found nothing used in it
            least = max(_LEAST, size + room, min(_MOST, max(self._live // 8, expected)))
            self._current, held = self._new_segment(least)
            self._used = 0
        start = self._used
        self._reserve(self._current, start, size)
        held[start : start + size] = data
        self._used += size + room
        self._appended += size
        return self._current << _OFFSET | start

    def _new_segment(self, size: int) -> tuple[int, np.ndarray]:
        number = max(self._numbers(), default=-1) + 1
        if self.folder is None:
            self._segments[number] = np.empty(size, np.uint8)
            return number, self._segments[number]
        try:
            if self._handle < 0:
                self.folder.mkdir(exist_ok=True)
            handle = self._open(number, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"{self.folder} was removed, which has the text and ragged rows; nothing was written. Build the storage anew"
            ) from error
        try:
            os.ftruncate(handle, size)
            self._segments[number] = np.frombuffer(mmap.mmap(handle, size), np.uint8)
        finally:
            os.close(handle)
        return number, self._segments[number]

    def _open(self, number: int, flags: int) -> int:
        """A descriptor of the file of a segment."""
        return os.open(_name(number), flags | os.O_CLOEXEC, 0o644, dir_fd=self._directory())

    def _directory(self) -> int:
        """A descriptor of the folder, whatever its name is by now."""
        if self._handle < 0:
            assert self.folder is not None
            self._handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._handle)
        return self._handle

    def _numbers(self) -> list[int]:
        """The segments that exist."""
        if self.folder is None:
            return list(self._segments)
        try:
            # A handle of its own: that of the folder has one position for all forked processes.
            handle = os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory())
        except FileNotFoundError:
            return []
        try:
            return [int(name[:-6]) for name in os.listdir(handle) if name[-6:] == ".bytes" and name[:-6].isdecimal()]
        finally:
            os.close(handle)

    def _forget(self, there: Iterable[int]) -> None:
        """Unmap segments that another process has removed."""
        for number in self._segments.keys() - set(there):
            self._segments.pop(number, None)

    # ------------------------------------------------------------------ reading

    def read(self, spans: np.ndarray) -> list[memoryview]:
        """The byte strings of spans, int64 [n, 2], as views that nobody writes to. RuntimeError for one that is gone."""
        numbers, starts = (spans[:, 0] >> _OFFSET).tolist(), (spans[:, 0] & ((1 << _OFFSET) - 1)).tolist()
        sizes = (spans[:, 1] >> _KIND).tolist()
        used = {number for number, size in zip(numbers, sizes, strict=True) if size}
        held = {number: self._view(number) for number in used}
        nothing = memoryview(b"")
        found = [
            held[number][start : start + size] if size else nothing
            for number, start, size in zip(numbers, starts, sizes, strict=True)
        ]
        if sum(map(len, found)) != sum(sizes):
            raise self._ended()
        return found

    def reader(self, spans: np.ndarray) -> Callable[[], list[Any]]:
        """A function that returns the Python values of spans, int64 [n, 2], also after the rows were written over.

        O(n) in NumPy here; the values are made by the call. Do not change the spans. RuntimeError for one that is gone.
        """
        numbers, starts, sizes = spans[:, 0] >> _OFFSET, spans[:, 0] & ((1 << _OFFSET) - 1), spans[:, 1] >> _KIND
        held: dict[int, memoryview] = {}
        for number in np.unique(numbers[sizes > 0]).tolist():
            held[number] = self._view(number)
            if (starts + sizes)[(numbers == number) & (sizes > 0)].max() > len(held[number]):
                raise self._ended()
        return partial(_values, numbers, starts, sizes, spans[:, 1] & ((1 << _KIND) - 1), held)

    def _ended(self) -> RuntimeError:
        return RuntimeError(
            f"{self.folder}: a row ends after its segment: the files are damaged, or it was half-written"
        )

    def _view(self, number: int) -> memoryview:
        found = self._segments.get(number)
        if found is None:
            found = self._opened(number)
            self._forget(self._numbers())
            self._segments[number] = found
        return found.data

    def _opened(self, number: int) -> np.ndarray:
        try:
            handle = self._open(number, os.O_RDONLY) if self.folder is not None else -1
        except FileNotFoundError:
            handle = -1
        if handle < 0:
            raise RuntimeError(
                f"segment {number} of the packed values is not there: the rows were written over while they were read, or "
                f"files of {self.folder or 'the storage'} were removed. Read again"
            )
        try:
            return np.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(handle)

    def map(self) -> None:
        """Map all segments, which can then be read though their files are removed."""
        with contextlib.suppress(RuntimeError):  # one goes at this moment: no row is in it
            for number in self._numbers():
                self._view(number)

    def packed(self, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of spans, int64 [n, 2], without gaps, and their spans in these. Equal spans share their bytes."""
        different, back = np.unique(spans, axis=0, return_inverse=True)
        lengths = different[:, 1] >> _KIND
        data = np.frombuffer(b"".join(self.read(different)), np.uint8)
        different[:, 0] = np.cumsum(lengths) - lengths
        return data, different[back.reshape(-1)]

    # ------------------------------------------------------------------ space

    @property
    def bytes(self) -> int:
        """The bytes of all segments."""
        return sum(map(self._size, self._numbers()))

    @property
    def due(self) -> bool:
        """Whether to scan: a quarter of the bytes in use at the last scan were appended since. That is O(1) a row."""
        return self._appended > max(_LEAST, self._live // 4)

    def reclaim(self, spans: Iterable[np.ndarray]) -> np.ndarray:
        """Remove segments that no span names, now and at the call before; returns those that should be emptied.

        A segment waits for a second call since a write that is rolled back may bring its spans back. The last segment
        stays, so that no number comes twice.

        Args:
            spans: all that are in use, int64 [n, 2] each.
        """
        used: dict[int, int] = {}
        ends: set[int] = set()
        for each in spans:
            if self._room:
                ends.update((each[:, 0] + (each[:, 1] >> _KIND)).tolist())
            numbers, back = np.unique(each[:, 0] >> _OFFSET, return_inverse=True)
            sizes = np.bincount(back.reshape(-1), weights=each[:, 1] >> _KIND, minlength=numbers.size)
            for number, size in zip(numbers.tolist(), sizes.tolist(), strict=True):
                used[number] = used.get(number, 0) + int(size)
        there = sorted(self._numbers())
        dead = {number for number in there[:-1] if not used.get(number) and number != self._current}
        for number in dead & self._dead:
            self._remove(number)
        self._forget(there)
        self._dead, self._appended, self._live = dead, 0, sum(used.values())
        self._room = {end: room for end, room in self._room.items() if end in ends}
        whole = {n: self._size(n) for n in there[:-1] if used.get(n) and n != self._current}
        wasted = sum(whole.values()) - sum(used[number] for number in whole)
        sparse = [number for number, size in whole.items() if used[number] < size // 2]
        return np.array(sparse if wasted > max(_LEAST, self._live // 2) else [], np.int64)

    def _size(self, number: int) -> int:
        return self._view(number).nbytes

    def _remove(self, number: int) -> None:
        self._segments.pop(number, None)
        if self.folder is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_name(number), dir_fd=self._directory())

    @staticmethod
    def within(spans: np.ndarray, segments: np.ndarray) -> np.ndarray:
        """Whether spans [..., 2] are in one of these segments: bool [...]."""
        return np.isin(spans[..., 0] >> _OFFSET, segments) & (spans[..., 1] >> _KIND > 0)

    def again(self, spans: np.ndarray) -> np.ndarray:
        """Append the bytes of spans, int64 [n, 2], once more; returns their new spans."""
        return self.append(b"".join(self.read(spans)), spans[:, 1] >> _KIND, spans[:, 1] & ((1 << _KIND) - 1))

    def move_to(self, folder: Path) -> None:
        """Have the segments be files of an empty folder, under the same addresses."""
        if self.folder == folder:
            return
        folder.mkdir(exist_ok=True)
        for number, held in self._segments.items():
            (folder / _name(number)).write_bytes(held.data)
        self.folder, self._segments, self._current, self._room = folder, {}, -1, {}

    def copied(self) -> "PackedValues":
        """A copy in memory of this process, under the same addresses."""
        copy = PackedValues()
        copy._segments = {number: np.array(self._view(number)) for number in sorted(self._numbers())}
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """Of files where they are, of memory the bytes."""
        segments = {} if self.folder else self._segments
        return {**self.__dict__, "_segments": segments, "_current": -1, "_handle": -1, "_room": {}}


def _name(number: int) -> str:
    return f"{number:08d}.bytes"


class PackedParts(PackedValues):
    """Byte strings that lie in the parts of one array, uint8, such as the mapped files of a checkpoint; read-only.

    A read takes the pages of the values that are asked for. A value on the border of two parts is copied.

    Args:
        parts: of equal lengths, but for the last one.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        super().__init__()
        self._segments = dict(enumerate(parts))
        self._step = max(parts[0].size, 1) if parts else 1
        self._total = sum(part.size for part in parts)

    def append_whole(self, data: np.ndarray, expected: int = 0, room: int = 0) -> int:
        """RuntimeError: nothing is written here."""
        raise RuntimeError("rows of a checkpoint that was opened with mode='r' cannot be written; nothing was written")

    def read(self, spans: np.ndarray) -> list[memoryview]:
        starts, sizes = spans[:, 0], spans[:, 1] >> _KIND
        if spans.size and (int(starts.min()) < 0 or int((starts + sizes).max()) > self._total):
            raise self._ended()
        return [self._bytes_at(start, size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]

    def reader(self, spans: np.ndarray) -> Callable[[], list[Any]]:
        return partial(_decoded, self.read(spans), spans[:, 1] & ((1 << _KIND) - 1))

    def _bytes_at(self, start: int, size: int) -> memoryview:
        place, at = divmod(start, self._step)
        if not size or at + size <= self._step:
            return self._segments[place].data[at : at + size] if size else memoryview(b"")
        pieces = []
        while size:
            pieces.append(self._segments[place].data[at : at + size])
            size, place, at = size - len(pieces[-1]), place + 1, 0
        return memoryview(b"".join(pieces))

    def copied(self) -> PackedValues:
        copy = PackedValues()
        copy.append_whole(np.concatenate([*self._segments.values(), np.empty(0, np.uint8)]))
        return copy


# ---------------------------------------------------------------------- Python values


def longer(spans: np.ndarray, values: PackedValues, added: Sequence[Any], name: str) -> np.ndarray:
    """The spans of texts, bytes and lists, int64 [n, 2], with further values of the same kind behind each. O(added).

    A list of other things than int64 is written anew, O(its length). TypeError for what cannot be added to a value.
    """
    found = np.empty_like(spans)
    for at, more in enumerate(added):
        span = spans[at : at + 1]
        data, _, [kind] = _encoded_one(more)
        if kind == span[0, 1] & ((1 << _KIND) - 1) != _JSON:
            found[at] = values.extended(span, [data])[0]
            continue
        [value] = values.reader(span)()
        if type(value) is not type(more) or type(more) not in (str, bytes, list):
            raise TypeError(
                f"{name}: a {type(value).__name__} is stored, to which a {type(more).__name__} cannot be added: text, bytes "
                "and lists grow by more of the same; nothing was written"
            )
        found[at] = values.append(*_encoded_one(value + more))[0]
    return found


def _encoded_one(value: Any) -> tuple[bytes, np.ndarray, list[int]]:
    data, lengths, kinds = encoded([value])
    return data, lengths, [kinds] if isinstance(kinds, int) else kinds


def encoded(values: Sequence[Any]) -> tuple[bytes, np.ndarray, int | list[int]]:
    """Values as bytes one behind the other, the length of each, and the kinds. TypeError for other values.

    str, bytes, lists of int64, and None, bool, int, float, list and dict with text keys of all these but bytes.
    """
    if set(map(type, values)) == {str}:
        text = "".join(values)
        if text.isascii():
            return text.encode(), _lengths(values), _TEXT
    data, kinds = [], []
    for value in values:
        if type(value) is str:
            kind, found = _TEXT, value.encode("utf-8", "surrogatepass")
        elif type(value) is bytes:
            kind, found = _BYTES, value
        elif type(value) is list and value and all(type(each) is int and -(2**63) <= each < 2**63 for each in value):
            kind, found = _INTEGERS, np.array(value, np.int64).tobytes()
        else:
            _refuse_other(value, 0)
            kind, found = _JSON, json.dumps(value, separators=(",", ":")).encode()
        kinds.append(kind)
        data.append(found)
    return b"".join(data), _lengths(data), kinds


def joined(rows: Sequence[memoryview]) -> tuple[bytes, np.ndarray, int]:
    """The same for bytes, which have no kind."""
    return b"".join(rows), _lengths(rows), 0


def _lengths(values: Sequence[Any]) -> np.ndarray:
    return np.fromiter(map(len, values), np.int64, len(values))


def _values(
    numbers: np.ndarray, starts: np.ndarray, sizes: np.ndarray, kinds: np.ndarray, held: dict[int, memoryview]
) -> list[Any]:
    """The values of spans in segments."""
    stops = starts + sizes
    if len(held) == 1 and not kinds.any():
        [segment] = held.values()
        if (starts[1:] == stops[:-1]).all():
            text = str(segment[starts[0] : stops[-1]], "utf-8", "surrogatepass")
            if text.isascii():  # a byte is a character: half the time of decoding each
                places = (starts - starts[0]).tolist(), (stops - starts[0]).tolist()
                return [text[start:stop] for start, stop in zip(*places, strict=True)]
        pairs = zip(starts.tolist(), stops.tolist(), strict=True)
        return [str(segment[start:stop], "utf-8", "surrogatepass") for start, stop in pairs]
    nothing, found = memoryview(b""), []
    spans = zip(numbers.tolist(), starts.tolist(), stops.tolist(), kinds.tolist(), strict=True)
    for number, start, stop, kind in spans:
        found.append(_DECODERS[kind](held[number][start:stop] if stop > start else nothing))
    return found


def _decoded(data: Sequence[memoryview], kinds: np.ndarray) -> list[Any]:
    """The values of these bytes and kinds."""
    return [_DECODERS[kind](each) for each, kind in zip(data, kinds.tolist(), strict=True)]


_DECODERS: list[Callable[[memoryview], Any]] = [
    lambda data: str(data, "utf-8", "surrogatepass"),
    bytes,
    lambda data: np.frombuffer(data, np.int64).tolist(),
    lambda data: json.loads(bytes(data)),
]


def _refuse_other(value: Any, depth: int) -> None:
    kind = type(value)
    if kind is list and depth < 64:
        for each in value:
            _refuse_other(each, depth + 1)
    elif kind is dict and depth < 64 and all(type(key) is str for key in value):
        for each in value.values():
            _refuse_other(each, depth + 1)
    elif kind not in _PLAIN:
        what = f"a value of type {kind.__name__}"
        if kind in (list, dict):
            what = "lists and dicts nested more than 64 deep" if depth >= 64 else "a dict with keys that are no texts"
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            raise TypeError(
                f"a tensordict keeps an array of type {kind.__name__} as an object, not as a tensor: convert it, by "
                "interop.to_torch(array) for one of JAX, or write a dict of arrays to a ReplayBuffer"
            )
        raise TypeError(
            f"a tensor storage keeps text, bytes, None, numbers, and lists and dicts of these, got {what}; use ListStorage"
        )

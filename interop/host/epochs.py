"""Draws without replacement on the host: each position once an epoch, then all of them again."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from interop.data import randomness
from interop.host.threads import Lock, finished, renew_in_children

_T = TypeVar("_T")


class EpochState(NamedTuple):
    """A copy of what decides the next takes of an epoch."""

    length: int = 0  # positions in this epoch; 0 before the first
    position: int = 0  # entries of the order that were taken
    over: bool = False  # the next take begins another epoch
    ran_out: bool = False  # the last committed take ended the epoch
    order: np.ndarray | None = None  # a permutation of [0, length); None for 0, 1, 2, ...

    def left(self) -> np.ndarray:
        """The positions that this epoch still has to return, int64. O(length)."""
        if self.over:
            return np.zeros(0, np.int64)
        order = np.arange(self.length) if self.order is None else self.order
        return order[self.position :].astype(np.int64)


class _Cursor(NamedTuple):
    number: int = 0  # of the epoch
    version: int = 0  # of the order; an undone take restores it
    position: int = 0
    over: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _Take:
    """The positions of one take, and how to undo it."""

    positions: np.ndarray  # int64
    before: _Cursor
    after: _Cursor
    ran_out: bool  # before it
    moved: tuple[np.ndarray, np.ndarray] | None  # changed places of the order, and their entries before
    order: np.ndarray | None = None  # before it, where it began an epoch
    key: np.ndarray | None = None  # of the request that reserved it
    undone: tuple[np.ndarray | None, tuple[Any, np.ndarray] | None, _Cursor] | None = None  # once it is being undone


class _Fields(NamedTuple):
    """The fields of an epoch but for the entries of its order, which are undone by what moved."""

    order: np.ndarray | None
    length: int
    number: int
    at: _Cursor
    last: _Take | None
    ran_out: bool
    reserved: list[_Take]


class Epoch:
    """Takes positions of [0, length), each once an epoch, in uniformly random order; in ascending order without `shuffle`.

    The last take of an epoch is shorter where fewer positions are left; with `drop_last` these are left out. A take for
    another length begins an epoch, too. A take for a request is
    reserved: it counts when it is committed; if it is released, its positions remain to be taken. The key, this very array,
    names the request. States, copies and forked children do not contain the reserved takes. Thread-safe.

    A take costs O(count) at any length, and once O(1) for each new position. Four bytes a position.
    """

    def __init__(self, shuffle: bool = True, drop_last: bool = False) -> None:
        for name, value in (("drop_last", drop_last), ("shuffle", shuffle)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        self.shuffle, self.drop_last = shuffle, drop_last
        self.lock = Lock()
        self._reserved: list[_Take] = []
        self._last: _Take | None = None
        # Of an open `whole`: an order, changed places of it, and their entries before.
        self._moves: list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
        self._since: list[tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None  # the same, since `before_draw`
        self._number = 0  # epochs begun
        self._order: np.ndarray | None = None
        self._length, self._at = 0, _Cursor()
        self.ran_out = False  # whether the last committed take ended an epoch
        renew_in_children(self.renew)

    @property
    def length(self) -> int:
        """Positions in this epoch; 0 before the first."""
        return self._length

    @property
    def left(self) -> int:
        """How many positions this epoch still has to return; 0 where it is over."""
        at = self._at
        return 0 if at.over else self._length - at.position

    @property
    def over(self) -> bool:
        """Whether the next take begins another epoch."""
        return self._at.over

    # ------------------------------------------------------------------ takes

    def take(self, count: int, length: int, key: np.ndarray | None = None) -> np.ndarray:
        """At most `count` positions of [0, length), int64; `key`, [2] uint32, is needed to shuffle.

        ValueError for more than the length with `drop_last`; then nothing has changed.
        """
        with self.lock:
            if self.drop_last and count > length:
                raise ValueError(
                    f"with drop_last=True a batch of {count} cannot be drawn from {length}: use a smaller batch_size, or "
                    "drop_last=False"
                )
            return self.whole(lambda: self._take(count, length, key))

    def whole(self, take: Callable[[], _T]) -> _T:
        """Call this with the lock held. If it raises, what it took was not taken. Reentrant."""
        with self.lock:
            moves = self._moves
            if moves is None:
                self._moves = moves = []
            known = len(moves)
            before = self._fields()
            try:
                found = take()
                if not known:
                    self._moves = None
                return found
            except BaseException:
                for order, places, entries in moves[: known - len(moves) - 1 : -1]:
                    order[places] = entries
                self._put_fields(before)
                if not known:
                    self._moves = None
                raise

    def _take(self, count: int, length: int, key: np.ndarray | None) -> np.ndarray:
        if length != self._length:
            self._resize(length)
        before, order = self._at, self._order
        if before.over or (self.drop_last and length - before.position < count):
            self._begin()
        at, stop = self._at, min(self._at.position + count, length)
        moved = None
        if self.shuffle and at.position < stop:
            assert key is not None
            positions, moved = self._shuffled(at.position, stop, key)
        elif self._order is None:
            positions = np.arange(at.position, stop)
        else:
            positions = self._order[at.position : stop].astype(np.int64)
        over = length - stop < (count if self.drop_last and count else 1)
        self._at = _Cursor(at.number, at.version + 1, stop, over)
        self._last = _Take(positions, before, self._at, self.ran_out, moved, order)
        self.ran_out = over and not self._reserved
        return positions

    def _shuffled(self, start: int, stop: int, key: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Exchange the entries of the order at [start, stop) with random ones from `start` on; these, and the undo."""
        order = self._order
        assert order is not None
        chosen = randomness.generator_of(key).choice(self._length - start, stop - start, replace=False)
        chosen += start
        block, drawn, holes = order[start:stop], order[chosen], chosen
        if chosen.min() < stop:
            holes = chosen[chosen >= stop]
            stays = np.ones(block.size, bool)
            stays[chosen[chosen < stop] - start] = False
            block = block[stays]
        places = np.concatenate((holes, np.arange(start, stop)))
        before, entries = order[places], np.concatenate((block, drawn))
        for moves in (self._moves, self._since):
            if moves is not None:
                moves.append((order, places, before))
        order[places] = entries
        return drawn.astype(np.int64), (places, before)

    def _resize(self, length: int) -> None:
        self._begin()
        if self.shuffle:
            order = np.empty(0, np.int32) if self._order is None else self._order
            known = min(self._length, order.size)
            if length > order.size:
                grown = np.empty(max(length, 2 * order.size), _dtype_for(2 * length))
                grown[:known] = order[:known]
                order = grown
            elif length < known:
                order, known = np.arange(order.size, dtype=order.dtype), length
            order[known:length] = np.arange(known, length, dtype=order.dtype)
            self._order = order
        self._length = length

    def _begin(self) -> None:
        if not self.shuffle:
            self._order = None
        self._number += 1
        self._at = _Cursor(self._number, self._at.version + 1)

    def _fields(self) -> "_Fields":
        """What a take, and the beginning of an epoch, replace."""
        return _Fields(self._order, self._length, self._number, self._at, self._last, self.ran_out, self._reserved)

    def _put_fields(self, fields: "_Fields") -> None:
        self._order, self._length, self._number, self._at, self._last, self.ran_out, self._reserved = fields

    def before_draw(self) -> "_Fields":
        """What `put_back` needs after takes without a request. O(1); they are recorded until the next call."""
        with self.lock:
            self._since = []
            return self._fields()

    def put_back(self, before: "_Fields") -> None:
        """Be as at the last `before_draw`. It may be called again after an interrupt."""
        with self.lock:
            for order, places, entries in reversed(self._since or ()):
                order[places] = entries
            self._put_fields(before)

    def restart(self) -> None:
        """Begin an epoch and drop all reserved takes. O(1)."""
        with self.lock:
            finished(self._restart)

    def _restart(self) -> None:
        self._reserved = []
        self._begin()
        self.ran_out = False

    def begin_anew(self) -> None:
        """Begin an epoch in the course of a draw, and drop all reserved takes. O(1)."""
        with self.lock:
            finished(self._drop_and_begin)

    def _drop_and_begin(self) -> None:
        self._reserved = []
        self._begin()

    # ------------------------------------------------------------------ requests

    def reserve(self, key: np.ndarray) -> None:
        """Reserve the last take for the request with this key; the lock was held since."""
        taken = self._last
        assert taken is not None
        taken.key = key
        self._last, self.ran_out = None, taken.ran_out
        self._reserved = [*self._reserved, taken]

    def _of(self, key: np.ndarray) -> _Take | None:
        return next((taken for taken in self._reserved if taken.key is key), None)

    def is_reserved(self, key: np.ndarray) -> bool:
        """Whether the take of a request can still be committed: not after `restart` or `with_state`."""
        return self._of(key) is not None

    def commit(self, key: np.ndarray) -> None:
        """Count the take of a request, if it is reserved. It may be called again after an interrupt."""
        with self.lock:
            if (taken := self._of(key)) is not None:
                left = [each for each in self._reserved if each is not taken]
                self.ran_out = self.over and not left
                self._reserved = left

    def release(self, key: np.ndarray) -> None:
        """Undo the take of a request, if it is reserved. It may be called again after an interrupt.

        The order is as before where nothing was taken since; otherwise it may differ, O(length).
        """
        with self.lock:
            if (taken := self._of(key)) is not None:
                if taken.undone is None:
                    taken.undone = self._undone(self._order, self._at, taken)
                order, moved, at = taken.undone
                if moved is not None and order is not None:
                    order[moved[0]] = moved[1]
                self._order, self._at = order, at
                self._reserved = [each for each in self._reserved if each is not taken]

    def renew(self) -> None:
        """In a forked child: undo the reserved takes, which the parent commits. No other thread is here, nor the lock."""
        self._order, self._at = self._unreserved(self._order)
        self._reserved = []

    def _unreserved(self, order: np.ndarray | None) -> tuple[np.ndarray | None, _Cursor]:
        """The order, changed in place, and the cursor without all reserved takes."""
        at = self._at
        for taken in self._reserved[::-1]:
            order, moved, at = self._undone(order, at, taken)
            if moved is not None and order is not None:
                order[moved[0]] = moved[1]
        return order, at

    def _undone(
        self, order: np.ndarray | None, at: _Cursor, taken: _Take
    ) -> tuple[np.ndarray | None, tuple[Any, np.ndarray] | None, _Cursor]:
        """The order, the entries to put into it at some places, and the cursor without a take. Nothing changes."""
        if taken.after.number != at.number:  # of an earlier epoch
            return order, None, at
        if taken.after.version == at.version:
            began = not self.shuffle and taken.before.number != taken.after.number  # which has dropped the order
            kept = None if taken.order is None else taken.order.copy()
            return kept if began else order, taken.moved, taken.before
        order = np.arange(self._length, dtype=_dtype_for(self._length)) if order is None else order
        used = order[: at.position]
        returned, position = np.isin(used, taken.positions), at.position - taken.positions.size
        entries = np.concatenate((used[~returned], used[returned], order[at.position : self._length]))
        if not self.shuffle:
            entries[position:].sort()
        return (
            order,
            (slice(0, self._length), entries),
            at._replace(version=at.version + 1, position=position, over=False),
        )

    # ------------------------------------------------------------------ state

    def state(self) -> EpochState:
        """A copy of the state without the reserved takes. O(length)."""
        with self.lock:
            order, at = self._unreserved(None if self._order is None else self._order[: self._length].copy())
            return EpochState(self._length, at.position, at.over, self.ran_out, order)

    def with_state(self, state: EpochState) -> None:
        """Continue from a state; its order is not copied."""
        with self.lock:
            self._reserved = []
            self._last = None
            self._number += 1
            order = np.arange(state.length) if state.order is None and self.shuffle else state.order
            self._order = None if order is None else order.astype(_dtype_for(state.length), copy=False)
            self._length, self.ran_out = state.length, state.ran_out
            self._at = _Cursor(self._number, 0, state.position, state.over)

    def __getstate__(self) -> Any:
        return self.shuffle, self.drop_last, self.state()

    def __setstate__(self, state: Any) -> None:
        shuffle, drop_last, held = state
        self.__init__(shuffle, drop_last)  # type: ignore[misc]  # with locks of its own
        self.with_state(held)


def _dtype_for(length: int) -> Any:
    return np.int32 if length <= 2**31 else np.int64

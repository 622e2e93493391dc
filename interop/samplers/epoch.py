"""Draws without replacement: each position once, then all of them again."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from fbuf.checkpoint import Fields
from interop.checkpoint.stateful import Entries, permutation
from interop.data import randomness
from interop.samplers.epoch_states import NONE, check_undone, standing_of, standing_saved, taken_of, taken_saved
from interop.samplers.epoch_states import Standing as _Standing  # the name that pickles may have
from interop.samplers.epoch_states import Taken as _Taken
from interop.shared.thread_lock import Lock, renew_in_children

_NOT_KEPT = ("_last", "life", "_unclaimed")


class Epoch:
    """Positions of [0, length), each once an epoch, in uniformly random order; without `shuffle` one after the other.

    Where fewer are left than asked for, these come and the epoch is over; with `drop_last` they are left out. A take for
    another length begins an epoch, too. What is taken counts as given out, unless `hold` is called: then it does after
    `given`, or remains to be taken after `take_back`. Safe from several threads.

    A take costs O(count) at any length, and once O(1) for each position that is new. Four bytes a position.
    """

    def __init__(self, shuffle: bool = True, drop_last: bool = False) -> None:
        for name, value in (("drop_last", drop_last), ("shuffle", shuffle)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.ran_out = False  # whether what was given out last was the end of an epoch
        self.lock = Lock()
        self._length = 0
        self._count = 1  # of the last take
        self._standing = _Standing()
        # Of its first `length` entries, which are a permutation, the first `position` were taken.
        self._order: np.ndarray = np.empty(0, np.int32)
        self._moving = False  # whether entries of the order are being exchanged
        self._held: dict[int, _Taken] = {}
        self._number = 0  # of the next that is held
        self._begin()

    def _begin(self) -> None:
        """What no copy takes over."""
        self.life = object()  # another one after a state was put in: what is held of before is no longer known
        self._last: _Taken | None = None
        # In a copy, what was held of the original, and by nobody yet who is copied along: the next take takes it back.
        self._unclaimed = set(self._held)
        renew_in_children(self)

    # ------------------------------------------------------------------ what it stands at

    @property
    def length(self) -> int:
        """Positions in this epoch; 0 before the first."""
        return self._length

    @property
    def left(self) -> int:
        """Positions that this epoch still has to name; 0 where it is over."""
        standing = self._standing
        return 0 if standing.over else self._length - standing.position + standing.again.size

    @property
    def over(self) -> bool:
        """Whether this epoch has come to its end, and the next take begins another."""
        return self._standing.over

    def unnamed(self) -> np.ndarray:
        """The positions that this epoch still has to name, int64, without those that are held. O(length)."""
        with self.lock:
            now = self._standing
            if now.over or self._moving:  # a call was interrupted: the next take begins an epoch
                return NONE
            order = self._order if self.shuffle else np.arange(self._length)
            return np.concatenate([now.again, order[now.position : self._length]]).astype(np.int64)

    def check(self, count: int, length: int) -> None:
        """The ValueError of a take that would be refused."""
        if self.drop_last and count > length:
            raise ValueError(
                f"with drop_last=True a batch of {count} cannot be drawn from {length}: use a smaller batch_size, or "
                "drop_last=False"
            )

    # ------------------------------------------------------------------ taking

    def take(self, count: int, length: int, key: np.ndarray | None = None) -> np.ndarray:
        """At most `count` positions of [0, length), int64; `key`, [2] uint32, is needed to shuffle.

        ValueError for more than the length with `drop_last`; then nothing has changed.
        """
        with self.lock:
            self.check(count, length)
            if self._unclaimed:
                self.keep(self._held.keys() - self._unclaimed)
            if length != self._length or self._moving:
                self._resize(length)
            before = self._standing
            if before.over or (self.drop_last and self.left < count):
                self._next_epoch()
            epoch, changes, start, _, again = self._standing
            again, kept = again[:count], again[count:]
            stop = min(start + count - again.size, length)
            named, moved = self._draw(start, stop, key)
            if again.size:
                named = np.concatenate((again, named))
            over = length - stop + kept.size < (count if self.drop_last and count else 1)
            self._standing = _Standing(epoch, changes + 1, stop, over, kept)
            self._count = count
            self._last = _Taken(before, self._standing, self.ran_out, named, moved)
            self.ran_out = over and not self._held
            return named.astype(np.int64)

    def _draw(self, start: int, stop: int, key: np.ndarray | None) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Random entries of the order from `start` on, which are at [start, stop) now; and what was moved."""
        if not self.shuffle:
            return np.arange(start, stop), ()
        if start == stop:
            return NONE, ()
        assert key is not None
        chosen = randomness.generator_of(key).choice(self._length - start, stop - start, replace=False)
        chosen += start
        named, block = self._order[chosen], self._order[start:stop].copy()
        holes, left, displaced = chosen, named, block
        if chosen.min() < stop:
            beyond = chosen >= stop
            holes, left = chosen[beyond], named[beyond]
            stays = np.ones(block.size, bool)
            stays[chosen[~beyond] - start] = False
            displaced = block[stays]
        self._moving = True
        self._order[holes] = displaced
        self._order[start:stop] = named
        self._moving = False
        return named, (slice(start, stop), block, holes, left)

    def _resize(self, length: int) -> None:
        if self.shuffle:
            known = self._length if length > self._length and not self._moving else 0
            if length > self._order.size:
                size = max(length, 2 * self._order.size)
                grown: np.ndarray = np.empty(size, np.dtype(np.int32 if size <= 2**31 else np.int64))
                grown[:known] = self._order[:known]
                self._order = grown
            self._order[known:length] = np.arange(known, length, dtype=self._order.dtype)
        self._moving = False  # or a call was interrupted, or the process forked meanwhile
        self._length = length
        self._next_epoch()

    def _next_epoch(self) -> None:
        epoch, changes, *_ = self._standing
        self._standing = _Standing(epoch + 1, changes + 1)

    def restart(self) -> None:
        """Begin an epoch: what was taken, or is held, does not count any more. O(1)."""
        with self.lock:
            self._next_epoch()
            self.ran_out = False

    # ------------------------------------------------------------------ what was taken and is not given out yet

    def hold(self) -> int:
        """Have the last take wait; its number, for `given` or `take_back`. Under the lock that was held for the take."""
        assert self._last is not None
        number, taken, self._last = self._number, self._last, None
        self._number, self._held[number] = number + 1, taken
        self.ran_out = taken.ran_out
        return number

    def given(self, number: int) -> None:
        """What was held was given out."""
        with self.lock:
            if self._held.pop(number, None) is not None:
                self.ran_out = self.over and not self._held

    def take_back(self, number: int) -> None:
        """Have what was held remain to be taken. Where nothing was taken since, all is as if it had not been."""
        with self.lock:
            taken, standing = self._held.pop(number, None), self._standing
            if taken is None or taken.after.epoch != standing.epoch:
                return
            if taken.after.changes == standing.changes:
                if taken.moved:
                    block, were, holes, left = taken.moved
                    moving, self._moving = self._moving, True
                    self._order[block], self._order[holes] = were, left
                    self._moving = moving
                self._standing = taken.before
                return
            again = np.concatenate((standing.again, taken.named))
            self._standing = standing._replace(changes=standing.changes + 1, over=False, again=again)

    def claim(self, number: int) -> None:
        """Somebody was copied along who will tell what becomes of it."""
        with self.lock:
            self._unclaimed.discard(number)

    def keep(self, numbers: Collection[Any]) -> None:
        """Take back all that is held but these."""
        with self.lock:
            self._unclaimed = set()
            for number in reversed(list(self._held)):
                if number not in numbers:
                    self.take_back(number)

    def _renew(self) -> None:  # in a forked child
        self.lock._renew()  # locks may have theirs later
        self.keep(())  # it is given out in the parent

    # ------------------------------------------------------------------ checkpoints

    def saved(self) -> dict[str, Any]:
        """A saved tree of all that decides the next takes. O(length)."""
        with self.lock:
            length = 0 if self._moving else self._length  # a call was interrupted: the next take makes the order anew
            now = self._standing
            return {
                "shuffle": self.shuffle,
                "drop_last": self.drop_last,
                "length": length,
                "count": self._count,
                "ran_out": self.ran_out,
                "standing": standing_saved(now if length else _Standing(now.epoch, now.changes)),
                "order": self._order[:length].copy() if self.shuffle else None,
                "number": self._number,
                "held": [taken_saved(number, taken, now) for number, taken in self._held.items() if length],
            }

    def loading(self, entries: Entries) -> Callable[[], None]:
        """Check the entries of `saved`; what is returned puts them in."""
        shuffle = entries.parameter("shuffle", entries.flag("shuffle"), self.shuffle)
        drop_last = entries.parameter("drop_last", entries.flag("drop_last"), self.drop_last)
        length, count, ran_out = entries.whole("length", most=2**48), entries.whole("count"), entries.flag("ran_out")
        order = np.empty(0, np.int32)
        if shuffle:
            order = permutation(entries, "order", length)
            order = order.astype(np.int32 if length <= 2**31 else np.int64)
        elif entries.any("order") is not None:
            raise entries.wrong("order", "None where nothing is shuffled", entries.any("order"))
        standing = standing_of(entries.fields("standing"), length)
        number, held = entries.whole("number"), dict[int, _Taken]()
        for each in entries.items("held"):
            known, taken = taken_of(Fields(each, "what is held of an epoch"), length, standing)
            if known in held or known >= number:
                raise entries.wrong("held", "draws with a number of their own", known)
            held[known] = taken
        check_undone(entries, order.copy() if held else order, held, standing)

        def put() -> None:
            with self.lock:
                self.shuffle, self.drop_last, self.ran_out = shuffle, drop_last, ran_out
                self._length, self._count, self._order, self._standing = length, count, order, standing
                self._held, self._number, self._last, self._moving = held, number, None, False
                self.life = object()

        return put

    def state_of(self, length: int, left: np.ndarray, drop_last: bool, ran_out: bool) -> dict[str, Any]:
        """A saved tree of an epoch that still has these positions to name, in this order; for `loading`."""
        standing = _Standing(0, 0, length, not left.size, left)
        order = np.arange(length) if self.shuffle else None
        told = {"shuffle": self.shuffle, "drop_last": drop_last, "length": length, "count": 1, "ran_out": ran_out}
        return {**told, "standing": standing_saved(standing), "order": order, "number": 0, "held": []}

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            state = {key: value for key, value in self.__dict__.items() if key not in _NOT_KEPT}
            order = self._order[: self._length].copy() if self.shuffle else self._order
            return {**state, "_order": order, "_held": dict(self._held)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


class Drawn:
    """What was drawn and is not given out yet: slots of an epoch, which holds them under a number, and the info.

    With the number `OWN` it is the index that a user's sampler has drawn, which is not told what becomes of it.
    """

    OWN = -1

    __slots__ = ("_epoch", "_info", "_life", "number", "slots")

    def __init__(self, epoch: Epoch | None, number: int, slots: Any = None, info: Any = None) -> None:
        self._epoch, self.number, self.slots, self._info = epoch, number, slots, info
        self._life = None if epoch is None else epoch.life

    @property
    def of(self) -> Epoch | None:
        """The epoch that is told what becomes of them."""
        return self._epoch

    @property
    def is_own(self) -> bool:
        """Whether it is of a user's sampler."""
        return self.number == Drawn.OWN

    @property
    def is_held(self) -> bool:
        """Whether they are what the epoch still holds: not after another state was put into it."""
        epoch = self._epoch
        held = epoch is not None and epoch.life is self._life and self.number in epoch._held
        return held or self.is_own

    @property
    def info(self) -> Any:
        """What the sampler says about them, in a dict or tensordict of the caller's own."""
        return self._info.copy()

    def given(self) -> None:
        """They were given out."""
        if self._epoch is not None:
            with self._epoch.lock:
                if self._epoch.life is self._life:
                    self._epoch.given(self.number)

    def take_back(self) -> None:
        """They remain to be drawn."""
        if self._epoch is not None:
            with self._epoch.lock:
                if self._epoch.life is self._life:
                    self._epoch.take_back(self.number)

    def bound(self, epoch: Epoch) -> "Drawn":
        """The same of a copy of the epoch."""
        if self.is_own:
            return self
        epoch.claim(self.number)
        return Drawn(epoch, self.number, self.slots, self._info)

    def __getstate__(self) -> Any:
        return self.number, self.slots, self._info

    def __setstate__(self, state: Any) -> None:
        self._epoch = self._life = None
        self.number, self.slots, self._info = state

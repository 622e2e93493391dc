"""When each stored item was written, and how often it was drawn since: two arrays by slot, exact after any history."""

import dataclasses

import numpy as np
import torch

_EMPTY = -(2**62)  # the birth of no item
_UNKNOWN = -(2**61)  # the birth of an item that was stored before, in no known order; known births are above


@dataclasses.dataclass
class DrawnAges:
    """What is known of drawn items.

    Attributes:
        late: items that were overwritten after they were read and before their batch was returned.
        counted: the other ones whose age is known.
        age_sum: rows that were written after each of `counted`, added up.
        age_max: the most rows.
        overwritten: items that were overwritten, of those whose whole life was seen.
        never_drawn: how many of these were in no batch that was returned before.
        draws_of_overwritten: how often these were drawn.
    """

    late: int = 0
    counted: int = 0
    age_sum: int = 0
    age_max: int = 0
    overwritten: int = 0
    never_drawn: int = 0
    draws_of_overwritten: int = 0

    def add(self, other: "DrawnAges") -> None:
        """Add the numbers of a later time."""
        self.late += other.late
        self.counted += other.counted
        self.age_sum += other.age_sum
        self.age_max = max(self.age_max, other.age_max)
        self.overwritten += other.overwritten
        self.never_drawn += other.never_drawn
        self.draws_of_overwritten += other.draws_of_overwritten


class RowLives:
    """The births and draws of the items in the slots of one storage. Takes 12 bytes a slot that was written.

    A birth is the number of rows that were written before, since the first one that was seen. Births of items from
    earlier times are negative.
    """

    def __init__(self) -> None:
        self._births = np.zeros(0, np.int64)
        self._draws = np.zeros(0, np.int32)
        self._seen_since = 0

    def begin(self, births: np.ndarray | None, size: int, rows: int) -> None:
        """Forget all, and begin with `size` items of these births, int64 [size]; None if they are not known.

        `rows` were written before.
        """
        self._births = np.full(size, _UNKNOWN, np.int64) if births is None else births
        self._draws = np.zeros(size, np.int32)
        self._seen_since = rows

    def advance(
        self, slots: np.ndarray, births: np.ndarray, drawn: np.ndarray, read: np.ndarray, returned: np.ndarray
    ) -> DrawnAges:
        """Items were written to slots, and others drawn meanwhile. O(items).

        Args:
            slots, births: of the written items, int64 [written], in the order of writing. Slots may repeat.
            drawn: int64 [drawn], the slots of drawn items.
            read, returned: int64 [drawn], how many rows were written when the item was read, and when its batch was
                returned.
        """
        self._reserve(max(slots.max(initial=-1), drawn.max(initial=-1)) + 1)
        before = self._births[slots]
        self._births[slots] = births
        if len(slots) > 1 and not np.array_equal(self._births[slots], births):  # a slot was written twice
            self._births[slots] = before
            middle = len(slots) // 2
            first = returned <= births[middle]
            found = self.advance(slots[:middle], births[:middle], drawn[first], read[first], returned[first])
            found.add(self.advance(slots[middle:], births[middle:], drawn[~first], read[~first], returned[~first]))
            return found
        draws = self._draws[slots]
        self._draws[slots] = 0
        found = self._count(slots, before, draws, drawn, read, returned)
        seen = draws[before >= self._seen_since]
        found.overwritten = seen.size
        found.never_drawn = seen.size - int(np.count_nonzero(seen))
        found.draws_of_overwritten = int(seen.sum(dtype=np.int64))
        return found

    def _count(
        self,
        slots: np.ndarray,
        before: np.ndarray,
        draws: np.ndarray,
        drawn: np.ndarray,
        read: np.ndarray,
        returned: np.ndarray,
    ) -> DrawnAges:
        """Count draws of the items that are stored now, and in `draws` those of the items `before` in `slots`."""
        found = DrawnAges()
        if not drawn.size:
            return found
        # torch gathers and adds in a tenth of the time of NumPy.
        places = torch.from_numpy(drawn)
        births = torch.from_numpy(self._births).index_select(0, places).numpy()
        stored = births < read
        if stored.all():
            torch.from_numpy(self._draws).scatter_add_(0, places, torch.ones(len(drawn), dtype=torch.int32))
            self._ages(found, births, returned)
            return found
        rest = ~stored
        ours = torch.from_numpy(drawn[stored])
        torch.from_numpy(self._draws).scatter_add_(0, ours, torch.ones(len(ours), dtype=torch.int32))
        self._ages(found, births[stored], returned[stored])
        later = births[rest] >= returned[rest]  # overwritten after the batch was returned
        found.late = int(np.count_nonzero(~later))
        if later.any():
            order = slots.argsort()
            at = order[slots[order].searchsorted(drawn[rest][later])]
            births = before[at]
            stored = births < read[rest][later]
            found.late += int(np.count_nonzero(~stored))
            np.add.at(draws, at[stored], 1)
            self._ages(found, births[stored], returned[rest][later][stored])
        return found

    def _ages(self, found: DrawnAges, births: np.ndarray, returned: np.ndarray) -> None:
        known = births > _UNKNOWN
        if not known.all():
            births = births[known]
            returned = returned[known]
        if births.size:
            ages = returned - 1 - births
            found.counted += ages.size
            found.age_sum += int(ages.sum())
            found.age_max = max(found.age_max, int(ages.max()))

    def _reserve(self, size: int) -> None:
        missing = size - self._births.size
        if missing > 0:
            missing = max(missing, self._births.size // 2)
            self._births = np.concatenate([self._births, np.full(missing, _EMPTY, np.int64)])
            self._draws = np.concatenate([self._draws, np.zeros(missing, np.int32)])

    def draws(self, size: int) -> np.ndarray:
        """How often each of the first `size` items was drawn since it was written, or since `begin`, int32 [size]."""
        self._reserve(size)
        return self._draws[:size]

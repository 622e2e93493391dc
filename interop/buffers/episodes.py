"""The stored episodes of a buffer, as a view."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.shown import Shown
from interop.buffers import collate
from interop.buffers.predicates import as_predicate
from interop.buffers.trajectory import Trajectory
from interop.data.arguments import class_of, not_negative, whole
from interop.data.index import as_int
from interop.data.keys import as_key, as_path
from interop.data.trajectory_keys import TrajectoryKeys
from interop.host import markers
from interop.samplers import Sampler
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.stored_trajectories import StoredTrajectories
from interop.shared.storage_lock import HasStorage, locked
from interop.storages import Storage, columns
from interop.storages.selected import SelectedItems
from interop.storages.unmoved import UnmovedRows
from interop.transforms.order import HasTransforms, Order
from interop.writers import ImmutableDatasetWriter, Writer

REWARDS: tuple[NestedKey, ...] = (("next", "reward"), "reward")
"""Where rewards are looked for, if no key is named."""


class HasEpisodes(HasStorage, HasTransforms, Protocol):
    """A buffer."""

    @property
    def storage(self) -> Storage: ...
    @property
    def writer(self) -> Writer: ...
    @property
    def collate_fn(self) -> Callable[[Any], Any]: ...


B = TypeVar("B", bound=HasEpisodes)


class Episodes(Shown, Generic[B]):
    """The stored episodes of a buffer at one moment, in the order of their ends; those still open come last.

    `len(episodes)` is their number, `episodes[i]` has the rows of one in the order of time, also where the ring goes around.
    What divides episodes is what divides them for `SliceSampler`: all stored markers count (ids, ends, first rows, masks of
    padding, and the keys that a `SliceSampler` of the buffer names), rows of interleaved episodes are separate, and each
    lane of a storage with several item dims has its own. The ring ends them, too, where it has overwritten rows.

    Arrays are computed at their first use and kept. Once rows were written, the arrays stay as they are, and reading rows,
    `split` and `select` raise a RuntimeError: take `rb.episodes` again, which is O(rows written since). Values that are
    edited in place are read anew by `episodes[i]`, but not counted anew.

    Attributes:
        lengths: int64 [episodes], the stored rows of each.
    """

    def __init__(
        self,
        buffer: B,
        make: Callable[[Storage, Callable[[], Sampler] | None], B],
        complete: Callable[..., Any],
        keys: TrajectoryKeys,
        known: "Episodes[B] | None" = None,
    ) -> None:
        """Find the episodes. The lock of the buffer is held.

        Args:
            buffer: the buffer.
            make: makes a buffer over another storage, with a sampler.
            complete: `complete(data, collate_fn, order=...)` collates and transforms rows that were read.
            keys: the entries that mark trajectories.
            known: the episodes of the same buffer at an earlier moment.

        Raises: TypeError for a writer that keeps no order; RuntimeError or TypeError where the storage does not say where
        trajectories end.
        """
        if not buffer.writer.keeps_order:
            raise TypeError(
                f"episodes follow the order of writing, which a {class_of(buffer.writer)} does not keep: use a "
                "RoundRobinWriter"
            )
        storage = buffer.storage
        self._buffer = buffer
        self._make = make
        self._complete = complete
        same = known is not None and known.source.keys.keys == keys
        self._source = known.source if known is not None and same else StoredTrajectories(BoundaryKeys(keys))
        self._counts = storage.ring.counts, len(storage)
        self._rows = UnmovedRows(storage)
        self._storage = storage
        if not len(storage):
            self._lane = self._first = self.lengths = np.zeros(0, np.int64)
            return
        self._index = self._source.of(storage)
        stored = self._index.stored()
        self._lane = stored[:, 0].copy()
        self._first = self._index.first_stored(stored)
        self.lengths = self._index.lengths()

    @property
    def source(self) -> StoredTrajectories:
        """The index of trajectories, which later episodes of the buffer go on with."""
        return self._source

    def are_current(self, buffer: HasEpisodes, keys: TrajectoryKeys) -> bool:
        """Whether they are the present ones of the buffer, by these keys. Its lock is held."""
        storage = buffer.storage
        same = storage is self._storage and (storage.ring.counts, len(storage)) == self._counts
        return same and storage.contents.tracks_writes and self._source.keys.keys == keys

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def returns(self) -> np.ndarray:
        """The sum of rewards over the stored rows of each, float64 [episodes]; [episodes, n] for n rewards an item.

        Rewards are under ("next", "reward") or "reward"; `sums` takes another key. KeyError where neither is stored.
        O(rows).
        """
        with locked(self._buffer):
            for key in REWARDS:
                if not len(self) or columns.has(self._storage, key):
                    return self.sums(key)
        raise KeyError(f"no reward is stored under {' or '.join(map(repr, REWARDS))}: name its key, episodes.sums(key)")

    def sums(self, key: NestedKey) -> np.ndarray:
        """The sum of an entry over the stored rows of each, float64 [episodes, ...]; for one number an item [episodes].

        KeyError for an entry that is not stored, TypeError for one that is no real number. O(rows).
        """
        if not len(self):
            return np.zeros(0)
        with locked(self._buffer):
            self._refuse_if_moved()
            values = columns.read(self._storage, key, self._slots(np.arange(len(self))))
        if values.is_complex():
            raise TypeError(f"{key!r} has {values.dtype}: sums are of real numbers")
        rows = values.to(torch.float64).reshape(len(values), -1).cpu().numpy()
        sums: np.ndarray = np.add.reduceat(rows, self._starts(self.lengths), axis=0)
        return sums[:, 0] if sums.shape[1] == 1 else sums.reshape(len(self), *values.shape[1:])

    @cached_property
    def ends(self) -> np.ndarray:
        """How each ends, text [episodes], the first that is true of:

        - "padding": it is no episode, but a run of rows that a mask says are padding.
        - "terminated", "truncated", "done": its last row has this flag; "done" also for other entries that mark ends.
        - "open": the next row that is written may continue it.
        - "cut": it has no flag of an end, and no row will continue it: the next row has another id or is a first one, or
          the ring does not go on behind it. Also the newest row of a buffer that takes no more rows.

        O(episodes); O(rows) where flat rows are interleaved.
        """
        ends = np.full(len(self), "cut", dtype="<U10")
        if not len(self):
            return ends
        with locked(self._buffer):
            self._refuse_if_moved()
            last = self._slots(np.arange(len(self)), last_only=True)
            stored = self._source.keys.stored_keys
            ends[self._may_go_on(last)] = "open"
            flags = [(_kind(path), columns.read(self._storage, as_key(path), last)) for path in stored.ends]
            for kind in ("done", "truncated", "terminated"):  # the last one wins
                for of_kind, values in flags:
                    if of_kind == kind:
                        ends[(values != 0).reshape(-1).cpu().numpy()] = kind
            for path in stored.masks:
                ends[(columns.read(self._storage, as_key(path), last) == 0).reshape(-1).cpu().numpy()] = "padding"
        return ends

    @cached_property
    def order(self) -> np.ndarray:
        """The flat slots of all rows, one episode after the other, each in the order of time, int64 [rows]. O(rows)."""
        with locked(self._buffer):
            self._refuse_if_moved()
            return self._slots(np.arange(len(self)))

    @cached_property
    def numbers(self) -> np.ndarray:
        """The number of the episode of each stored item, int64 by flat slot. O(rows)."""
        found = np.zeros(int(self.lengths.sum()), np.int64)
        found[self.order] = np.repeat(np.arange(len(self)), self.lengths)
        return found

    def slots(self, i: int) -> np.ndarray:
        """The flat slots of the rows of an episode in the order of time, int64 [rows]. IndexError out of range."""
        with locked(self._buffer):
            self._refuse_if_moved()
            return self._slots(np.array([self._number(i)]))

    def __getitem__(self, i: int) -> Any:
        """A copy of the rows of an episode in the order of time, as `rb[...]` returns rows: through the transforms.

        IndexError out of range, RuntimeError if rows were written since.
        """
        buffer = self._buffer
        number = self._number(i)
        with locked(buffer):
            self._refuse_if_moved()
            slots = self._slots(np.array([number]))
            shape = tuple(self._storage.shape or ())
            index: tuple[Tensor, ...] = (torch.from_numpy(slots),)
            if self._storage.ndim > 1:
                index = tuple(map(torch.from_numpy, np.unravel_index(slots, shape)))
            there = index if self._storage.ndim > 1 else index[0]
            data, collate_fn = collate.read(self._storage, there, buffer.collate_fn)
            dims = list(index)
            dims[0], dims[buffer.dim_extend] = dims[buffer.dim_extend], dims[0]  # as `rb[...]` counts them
            order = Order.of(buffer, tuple(dims))
        return self._complete(data, collate_fn, order=order)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of each."""
        for number in range(len(self)):
            yield self[number]

    # ------------------------------------------------------------------ conditions

    def where(self, predicate: Callable[[Trajectory], object]) -> np.ndarray:
        """For which episodes a predicate is true, bool [episodes]: `episodes.select(episodes.where(traj.length > 50))`.

        As for `query`.
        """
        found = np.zeros(len(self), np.bool_)
        condition = as_predicate(predicate)
        with locked(self._buffer):
            self._refuse_if_moved()
            numbers = np.arange(len(self))
            parts = self._parts(numbers, condition.required_keys())
            for number, (part, _) in zip(numbers, parts, strict=True):
                found[number] = condition(part)
        return found

    def query(self, predicate: Callable[[Trajectory], object] | None = None) -> list[Trajectory]:
        """The episodes for which a predicate is true, the oldest first; with several lanes one lane after the other.

        The rows are those of `episodes[i]`, also for the predicate. Writers wait meanwhile. O(rows); of a predicate that
        is made of `traj` only the entries that it names are read, unless there are transforms, and the rows of the
        episodes that it chooses.

        Args:
            predicate: as `traj.reward.sum() > 100`, or a function of a `Trajectory`; None for all episodes.

        Raises: TypeError for a predicate that is none, or items that are no tensordicts; KeyError for an entry that is not
        there; RuntimeError if rows were written since.
        """
        condition = None if predicate is None else as_predicate(predicate)
        found = []
        with locked(self._buffer):
            self._refuse_if_moved()
            numbers = self._by_age()
            parts = self._parts(numbers, None if condition is None else condition.required_keys())
            for number, (part, is_whole) in zip(numbers.tolist(), parts, strict=True):
                if condition is None or condition(part):
                    found.append(part if is_whole else Trajectory(self[number]))
        return found

    def _by_age(self) -> np.ndarray:
        """The numbers of the episodes, lane by lane, those with the oldest first rows first."""
        if not len(self):
            return np.arange(0)
        rows = self._index.slots_at(self._first, self._lane) // self._index.lanes
        return np.lexsort((-self._storage.contents.row_ages()[rows], self._lane))

    def _parts(self, numbers: np.ndarray, keys: frozenset[Any] | None) -> Iterator[tuple[Trajectory, bool]]:
        """For each of the episodes at least the entries `keys`, each also of "next", and whether these are all entries."""
        columns_of = None if keys is None else self._columns_of(numbers, keys)
        if columns_of is None:
            yield from ((Trajectory(self[number]), True) for number in numbers.tolist())
        else:
            for rows in columns_of.split(self.lengths[numbers].tolist()) if len(numbers) else ():
                yield Trajectory(rows), False

    def _columns_of(self, numbers: np.ndarray, keys: frozenset[Any]) -> TensorDict | None:
        """The entries `keys` of the rows of episodes, [rows]; None where entries cannot be read one by one."""
        buffer = self._buffer
        storage = self._storage
        is_plain = buffer.collate_fn in (collate.identity, collate.stack, collate.lazily)
        if len(buffer.transform) or not is_plain or storage.contents.layout is None:
            return None
        slots = self._slots(numbers)
        entries = TensorDict({}, [slots.size])
        for path in {path for key in keys for path in (as_path(key), ("next", *as_path(key)))}:
            if columns.has(storage, as_key(path)):
                try:
                    entries[path] = columns.read(storage, as_key(path), slots)
                except (KeyError, TypeError):  # text or ragged rows
                    return None
        return entries if len(entries.keys()) or not keys else None  # the whole rows say what is missing

    # ------------------------------------------------------------------ buffers of some of them

    def select(self, chosen: object, sampler: Callable[[], Sampler] | None = None) -> B:
        """A buffer of some of the episodes, over the same memory, that can only be read.

        Its items are the rows of the chosen episodes, one episode after the other. Samplers draw from these alone and take
        its `len`, its slots and its `episodes` from them; `rb.storage.slots` has their slots in this buffer. Batch size,
        transforms (copies of them), `collate_fn` and generator are those of this buffer. Once rows were written here, reads
        of that buffer raise a RuntimeError. Takes 8 bytes a row.

        Args:
            chosen: bool [episodes], or their numbers, in any order and each once.
            sampler: makes its sampler, such as `lambda: SliceSampler(slice_len=8)`; by default a `RandomSampler`.

        Raises: ValueError or IndexError for what chooses no episode, or is no choice; RuntimeError if rows were written
        since.
        """
        with locked(self._buffer):
            self._refuse_if_moved()
            return self._selected(self._chosen(chosen), sampler)

    def split(
        self, fraction: float = 0.9, *, seed: int | None = None, sampler: Callable[[], Sampler] | None = None
    ) -> tuple[B, B]:
        """Two buffers over the same memory, of `round(fraction * len(episodes))` random episodes and of the others.

        At least one episode is in each. Both are as `select` makes them, and keep the order of episodes.

        Args:
            fraction: the part of the first, more than 0 and less than 1.
            seed: of the choice; None for another one at each call.
            sampler: called once for each of the two.

        Raises: ValueError for another fraction, or fewer than two episodes; RuntimeError if rows were written since.
        """
        fraction = not_negative("fraction", fraction)
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must be more than 0 and less than 1, got {fraction}")
        seed = None if seed is None else whole("seed", seed, least=0)
        if len(self) < 2:
            raise ValueError(f"two episodes or more can be split, there are {len(self)}")
        count = min(max(round(fraction * len(self)), 1), len(self) - 1)
        order = np.random.default_rng(seed).permutation(len(self))
        with locked(self._buffer):
            self._refuse_if_moved()
            first, second = (self._selected(np.sort(part), sampler) for part in (order[:count], order[count:]))
        return first, second

    def _selected(self, numbers: np.ndarray, sampler: Callable[[], Sampler] | None) -> B:
        storage = SelectedItems(self._storage, self._slots(numbers), self._starts(self.lengths[numbers]))
        return self._make(storage, sampler)

    def _chosen(self, chosen: object) -> np.ndarray:
        """The numbers of chosen episodes."""
        values = chosen.detach().cpu().numpy() if isinstance(chosen, Tensor) else np.asarray(chosen)
        if values.ndim == 1 and not values.size:
            raise ValueError("choose one episode or more, got none")
        if values.ndim != 1 or values.dtype.kind not in "biu":
            raise ValueError(
                f"choose episodes by a mask, bool [{len(self)}], or by their numbers, got {values.dtype} of shape "
                f"{list(values.shape)}"
            )
        if values.dtype.kind == "b":
            if len(values) != len(self):
                raise ValueError(f"the mask is of {len(values)} episodes, there are {len(self)}")
            numbers = values.nonzero()[0]
        else:
            numbers = np.array([self._number(int(value)) for value in values], np.int64)
        if not len(numbers) or len(np.unique(numbers)) != len(numbers):
            raise ValueError("choose one episode or more, each once")
        return numbers

    # ------------------------------------------------------------------ where rows are

    def _refuse_if_moved(self) -> None:
        """RuntimeError if rows were written since the episodes were found. The lock is held."""
        if self._buffer.storage is not self._storage or not self._rows.still_there():
            raise RuntimeError("rows were written since these episodes were found: take rb.episodes again")

    def _number(self, i: int | slice) -> int:
        """The number of an episode. IndexError out of range, TypeError for no integer."""
        number = None if isinstance(i, slice) else as_int(i)
        if number is None:
            raise TypeError(
                f"episodes are read one by one, episodes[i] with an int, got {class_of(i)}: several make a buffer, "
                "episodes.select(numbers)"
            )
        try:
            return range(len(self))[number]
        except IndexError:
            raise IndexError(f"episode {i} is out of range: {len(self)} are stored") from None

    @staticmethod
    def _starts(lengths: np.ndarray) -> np.ndarray:
        """The places of first rows where episodes of these lengths follow each other."""
        starts: np.ndarray = lengths.cumsum() - lengths
        return starts

    def _slots(self, numbers: np.ndarray, last_only: bool = False) -> np.ndarray:
        """The flat slots of all rows of some episodes, or of their last ones."""
        if not len(self):  # of an empty buffer, which has no index of trajectories
            return np.zeros(0, np.int64)
        lengths = self.lengths[numbers]
        if last_only:
            return self._index.slots_at(self._first[numbers] + lengths - 1, self._lane[numbers])
        first = np.repeat(self._first[numbers] - self._starts(lengths), lengths)
        return self._index.slots_at(first + np.arange(first.size), np.repeat(self._lane[numbers], lengths))

    def _may_go_on(self, last: np.ndarray) -> np.ndarray:
        """Whether a row that is written next may continue each episode, whose last rows are at these flat slots."""
        storage = self._storage
        if isinstance(self._buffer.writer, ImmutableDatasetWriter):
            return np.zeros(len(self), np.bool_)
        filled = storage.contents.filled_rows
        ages = storage.contents.row_ages()[last // self._index.lanes]
        if self._index.lanes > 1 or not self._source.keys.stored_keys.ids:
            return ages == 0
        # An episode is closed by the next row of its id, or by the second one of another id: among the newest rows, from
        # the last episode of several rows on, or among all of them where they are interleaved.
        times = filled - 1 - ages  # 0 for the oldest row
        since = 0
        if not self._index.is_interleaved:
            several = (self.lengths > 1).nonzero()[0]
            since = int(times[several[-1]]) if several.size else 0
        rows = storage.contents.rows_in_order()[since:]
        closings = markers.closings(self._source.keys.read(storage, rows, 1))
        oldest = storage.contents.oldest_row
        breaks = (np.array([row for row in storage.ring.discontinuities() if row < filled], np.int64) - oldest) % filled
        places = times - since
        open_ones = places >= 0
        open_ones[open_ones] = closings[places[open_ones]] == len(rows)
        return open_ones & (times >= breaks.max(initial=0))

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield from (("episodes", len(self)), ("rows", int(self.lengths.sum())))

    def __repr__(self) -> str:
        rows = int(self.lengths.sum())
        return f"{type(self).__name__}({len(self)} episodes of {rows} rows)"


def keys_of(sampler: Sampler) -> TrajectoryKeys:
    """The entries that mark trajectories for a sampler; the default ones for a sampler without slices."""
    return sampler.draws.trajectory_keys or TrajectoryKeys.chosen()


def _kind(path: Sequence[Any]) -> str:
    """Which kind of end an entry marks."""
    return path[-1] if path[-1] in ("terminated", "truncated") else "done"

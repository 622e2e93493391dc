"""Whole groups of completions of one prompt."""

import contextlib
import itertools
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, a_key, integers, key_of, states_of, with_states
from interop.data import randomness
from interop.data.arguments import class_of, whole
from interop.engine.kept_uses import KeptUses
from interop.host.threads import uninterrupted
from interop.samplers.drawing import DrawingSampler, stored
from interop.samplers.groups import MOST_USES, Group, Groups, Id
from interop.samplers.staleness import StalenessAwareSampler, first_of_equal
from interop.samplers.validation import flat_slots
from interop.shared.processes import OneProcess
from interop.storages import Storage, columns
from interop.writers import Writer

_NONE = np.zeros(0, np.int64)


class PromptGroupSampler(DrawingSampler):
    """Draws whole groups of completions of one prompt, as GRPO needs them (arXiv:2402.03300).

    `group_size` completions with one id, in the order of writing, are a group; the next completion of this id begins another
    group. Several calls may write a group, and other prompts may come in between. A group can be drawn from when it is
    complete until one of its rows is overwritten; the other rows then join no other group. An edit of an id counts as a
    write of the row, from the next write or draw on.

    A batch is [groups * group_size], group after group, each in the order of writing. Groups are drawn uniformly, without
    replacement. The info has "group_number", int64, the number of groups begun before; with `max_uses` also "group_uses",
    int64, the number of draws of the group, with this one. The length of the buffer is the number of completions in groups
    that can be drawn. RuntimeError where a batch has more groups than can be drawn.

    A write costs O(rows written), a draw O(batch). A draw after all rows were edited costs O(rows), and so does a write by a
    writer that does not go around the ring.

    Args:
        group_size: completions a group. Batch sizes are multiples of it.
        group_key: the entry with the id of the prompt, one whole number or text an item. KeyError or TypeError at the draw
            where an item has none. Give each visit of a prompt an id of its own where its groups may still be incomplete.
        max_uses: a group is consumed after so many draws, at most 2**22 - 1; None for no bound. Iterating over the buffer
            then ends where fewer groups are left than the last batch had. Such a buffer neither prefetches nor goes to
            workers. A memory map in a folder keeps the groups and their uses, for when it is opened again.
        staleness: defines the staleness of rows, by its `consumer_version`, `max_staleness` and `version_key`. A group has
            the staleness of its stalest row. It is drawn by the weight of this staleness, and never above `max_staleness`;
            the info has the "staleness" of rows, float32. A draw then takes O(completions in groups that can be drawn).
    """

    ran_out = False  # whether the last draw left fewer groups than it took
    _size: int
    _most: int | None
    _key: Any
    _staleness: StalenessAwareSampler | None
    _process: OneProcess | None
    _groups: Groups
    _pending: np.ndarray  # slots of written rows whose ids were not read yet
    _edits: int | None  # version of the ring whose edits were read; None to read all rows
    _file: KeptUses | None
    _words: np.ndarray | None  # of an earlier process, before the ids were read

    def __init__(
        self,
        group_size: int,
        *,
        group_key: Any = "prompt_id",
        max_uses: int | None = None,
        staleness: StalenessAwareSampler | None = None,
    ) -> None:
        if staleness is not None and not isinstance(staleness, StalenessAwareSampler):
            raise TypeError(f"staleness must be a StalenessAwareSampler, got {class_of(staleness)}")
        self._size = whole("group_size", group_size)
        self._most = None if max_uses is None else whole("max_uses", max_uses)
        if self._most is not None and self._most > MOST_USES:
            raise ValueError(f"max_uses must be at most {MOST_USES}, got {max_uses}: None is no bound")
        self._key = group_key
        self._staleness = staleness
        self._process = None if self._most is None else OneProcess(_ONE_PROCESS)
        self._empty()

    def _empty(self) -> None:
        self._groups = Groups(self._size, self._most)
        self._pending = _NONE
        self._edits = None
        self._file = None
        self._words = None
        self.ran_out = False

    @property
    def group_size(self) -> int:
        """Completions a group."""
        return self._size

    @property
    def max_uses(self) -> int | None:
        """Draws after which a group is consumed; None for no bound."""
        return self._most

    @property
    def staleness(self) -> StalenessAwareSampler | None:
        """The sampler that defines the staleness of rows."""
        return self._staleness

    @property
    def num_ready(self) -> int:
        """Groups that can be drawn, of any staleness, as of the last write or draw."""
        return len(self._groups.ready)

    @property
    def draw_settings(self) -> tuple[Any, ...]:
        return *super().draw_settings, *(() if self._staleness is None else self._staleness.draw_settings)

    def sampleable(self, storage: Storage) -> int:
        self._try_sync(storage)
        return self.num_ready * self._size

    # ------------------------------------------------------------------ draws

    def _draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        self.check_batch_size(batch_size)
        self.refuse_forked_child()
        size = stored(storage)
        self._sync(storage)
        count = batch_size // self._size
        ready = self._groups.ready
        if count > len(ready):
            raise RuntimeError(
                f"Cannot sample {count} groups: {len(ready)} groups of {self._size} completions are ready, of {size} stored "
                "items. Call extend() first, or use a smaller batch_size."
            )
        rng = randomness.generator_of(key)
        info = dict[Any, Any]()
        if self._staleness is None:
            chosen = [ready[place] for place in rng.choice(len(ready), count, replace=False)]
        else:
            chosen, info["staleness"] = self._fresh(self._staleness, storage, count, rng)
        info["group_number"] = self._per_row([group.number for group in chosen])
        if self._most is not None:
            with uninterrupted():  # memory and file agree after a signal
                self._groups.use(chosen)
                self._keep_changes()
                self.ran_out = self.num_ready < count
            info["group_uses"] = self._per_row([group.uses for group in chosen])
        return torch.from_numpy(self._slots_of(chosen).reshape(-1)), info

    def _fresh(
        self, staleness: StalenessAwareSampler, storage: Storage, count: int, rng: np.random.Generator
    ) -> tuple[list[Group], torch.Tensor]:
        """Groups drawn by the weight of their stalest row, and the staleness of their rows."""
        ready = self._groups.ready
        if not count:
            return [], torch.zeros(0)
        of_rows = staleness.staleness_of(storage, self._slots_of(ready))
        weighed = staleness.weighed(of_rows.max(1), "groups")
        if count > weighed.heavy.size:
            raise RuntimeError(
                f"Cannot sample {count} groups: {weighed.heavy.size} of {len(ready)} have a weight above zero at "
                f"consumer_version={staleness.consumer_version} and max_staleness={staleness.max_staleness}"
            )
        places = weighed.draw(count, rng)
        return [ready[place] for place in places], torch.from_numpy(of_rows[places].reshape(-1).astype(np.float32))

    def _slots_of(self, groups: list[Group]) -> np.ndarray:
        """[groups, group_size]."""
        flat = itertools.chain.from_iterable(group.slots for group in groups)  # a tenth of the time of nested lists
        return np.fromiter(flat, np.int64).reshape(-1, self._size)

    def _per_row(self, values: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.int64), self._size))

    # ------------------------------------------------------------------ what changes

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """The items at index are new, in this order."""
        slots = flat_slots(index, storage)[0]
        slots = slots[slots >= 0].astype(np.int64)
        slots = first_of_equal(slots[::-1])[::-1]  # of equal slots the last
        if self._pending.size:
            slots = np.concatenate((self._pending[~np.isin(self._pending, slots)], slots))
        self._pending = slots
        if storage is not None:
            self._keep(storage)
            self._try_sync(storage)

    def take_over(self, storage: Storage) -> None:
        self._empty()
        self._keep(storage)

    def reloaded(self, storage: Storage) -> None:
        self._keep(storage)
        self._words = None
        self._keep_changes(every=True)

    @property
    def keeps_uses(self) -> bool:  # type: ignore[override]  # a class attribute of other samplers
        return self._most is not None

    def _keep(self, storage: Storage) -> None:
        """Keep the groups in the file of the storage; start from those of an earlier process at the next draw or write."""
        if self._most is None or (self._file is not None and storage.contents.kept is self._file):
            return
        uses = storage.contents.keep(KeptUses)
        if uses is None or uses is self._file:
            return
        self._file = uses
        if uses.bind(self) and self._edits is None and len(storage):
            self._words = uses.read(len(storage))
        else:
            self._keep_changes(every=True)

    def _keep_changes(self, every: bool = False) -> None:
        if self._file is not None:
            (self._file.give_all if every else self._file.give)(self, *self._groups.changes(every))

    def _try_sync(self, storage: Storage) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # the rows are stored already: the draw raises
            self._sync(storage)

    def before_draw(self) -> dict[str, Any]:
        return self.before_write()

    def before_write(self) -> dict[str, Any]:
        self._groups.begin()
        return self.__dict__.copy()

    def put_back(self, before: dict[str, Any]) -> None:
        super().put_back(before)
        self._groups.undo()

    def _sync(self, storage: Storage) -> None:
        """Read the ids of rows that were written or edited; the next call does where this one raises."""
        if self._words is not None:
            self._recall(storage, self._words)
        groups = self._groups
        undoable = self._groups.undoable
        try:
            self._read_ids(storage)
        except BaseException:
            groups.undo(undoable)
            raise

    def _read_ids(self, storage: Storage) -> None:
        edits, places = storage.ring.slots_edited_since(self._edits, storage.contents.filled_rows, len(storage))
        if edits != self._edits:
            self._groups.truncate(len(storage))
        pending = self._pending[self._pending < len(storage)]
        places = places[~np.isin(places, pending)] if places.size else places
        if places.size or pending.size:
            ids = ids_of(storage, self._key, np.concatenate((places, pending)))
            slots = places.tolist()
            changed = ids[: places.size]
            differing = self._groups.differing(slots, changed)
            self._groups.write([slots[at] for at in differing], [changed[at] for at in differing])
            self._groups.write(pending.tolist(), ids[places.size :])
        self._edits, self._pending = edits, _NONE  # one statement: no interrupt forgets rows that were not read
        self._keep_changes()

    def _recall(self, storage: Storage, words: np.ndarray) -> None:
        """Enter the groups of an earlier process, except rows that were written since."""
        slots = np.arange(min(words.size, len(storage)))
        if storage.is_full:  # the oldest row is at the cursor
            slots = np.roll(slots, -storage.ring.cursor * (slots.size // storage.contents.filled_rows))
        slots = slots[(words[slots] > 0) & ~np.isin(slots, self._pending)]
        rows = zip(slots.tolist(), words[slots].tolist(), ids_of(storage, self._key, slots), strict=True)
        self._groups = Groups.of_words(rows, self._size, self._most)
        self._words = None
        self._keep_changes(every=True)

    # ------------------------------------------------------------------ where it can be used

    def check_batch_size(self, batch_size: int | None) -> None:
        if batch_size is not None and batch_size % self._size:
            raise ValueError(f"batch_size must be a multiple of group_size={self._size}, got {batch_size}")

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        if expands:
            raise ValueError("a PromptGroupSampler takes no sample_unit, which would expand completions into windows")
        if prefetches and self._most is not None:
            raise ValueError("prefetch and max_uses exclude each other: dropped batches would consume their groups")

    def refuse_forked_child(self) -> None:
        if self._process is not None:
            self._process.check()

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "group_size": self._size,
            "group_key": key_of(self._key),
            "max_uses": self._most,
            "groups": self._groups.state(),
            "pending": self._pending,
            "ran_out": self.ran_out,
            "members": states_of([] if self._staleness is None else [self._staleness]),
        }

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            size = entries.parameter("group_size", entries.whole("group_size", 1), self._size)
            most = None if entries.any("max_uses") is None else entries.whole("max_uses", 1)
            most = entries.parameter("max_uses", most, self._most)
            key = entries.parameter("group_key", a_key(entries, "group_key"), self._key)
            groups = Groups.of_state(entries.fields("groups"), size, most)
            pending = integers(entries, "pending", None, 0, 2**48)
            ran_out = entries.flag("ran_out")
            members = with_states(entries, [] if self._staleness is None else [self._staleness], options)

            def put() -> None:
                members()
                self._size = size
                self._most = most
                self._key = key
                self._groups = groups
                self._pending = pending
                self.ran_out = ran_out
                self._edits = None

            return put

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_file": None}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(group_size={self._size}, group_key={self._key!r}, max_uses={self._most}, "
            f"num_ready={self.num_ready})"
        )


_ONE_PROCESS = (
    "a PromptGroupSampler with max_uses cannot be used in another process, which would not know what others consume: sample "
    "and write in the process that made it, or use max_uses=None"
)


def ids_of(storage: Storage, key: NestedKey, slots: np.ndarray) -> list[Id]:
    """The ids of items at flat slots. KeyError where they are not stored; TypeError or ValueError for other values."""
    try:
        column = columns.read(storage, key, slots)
    except (KeyError, TypeError):  # it is not stored, or not as a tensor
        with contextlib.suppress(KeyError, TypeError):
            if (texts := columns.texts(storage, key, slots)) is not None:
                return list[Id](texts)
        raise
    if column.is_floating_point():  # whole floats, as columns that have passed through another library
        as_integers = column.double().to(torch.int64)
        column = as_integers if bool((as_integers == column.double()).all()) else column
    if column.dtype == torch.bool or column.is_floating_point() or column.is_complex():
        raise TypeError(f"group ids must be integers or texts, {key!r} holds {column.dtype}")
    if column.numel() != slots.size:
        raise ValueError(f"{key!r} must have one value an item, it has the shape {list(column.shape[1:])}")
    ids: list[Id] = column.reshape(-1).tolist()
    return ids

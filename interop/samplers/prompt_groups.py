"""Whole groups of completions of one prompt."""

from collections.abc import Iterator
from typing import Any

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, states_of, with_states
from interop.data.arguments import class_of, whole
from interop.samplers.drawing import DrawingSampler
from interop.samplers.group_draws import GroupDraws
from interop.samplers.groups import MOST_USES
from interop.samplers.item_groups import ItemGroups
from interop.samplers.prompt_group import PromptGroup
from interop.samplers.staleness import StalenessAwareSampler
from interop.storages import Storage
from interop.writers import Writer


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

    With `num_groups` or `samples_per_group` in the place of `group_size` it makes a `KeyGroupSampler`, as in torchrl: all
    stored items with one prompt are a group.

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

    _library_draws: GroupDraws
    _library_values: ItemGroups
    _staleness: StalenessAwareSampler | None

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
        size = whole("group_size", group_size)
        most = None if max_uses is None else whole("max_uses", max_uses)
        if most is not None and most > MOST_USES:
            raise ValueError(f"max_uses must be at most {MOST_USES}, got {max_uses}: None is no bound")
        self._staleness = staleness
        self._library_values = ItemGroups(size, group_key, most)
        self._library_draws = GroupDraws(self._library_values, staleness)

    @property
    def group_size(self) -> int:
        """Completions a group."""
        return self._library_values.size

    @property
    def max_uses(self) -> int | None:
        """Draws after which a group is consumed; None for no bound."""
        return self._library_values.most

    @property
    def staleness(self) -> StalenessAwareSampler | None:
        """The sampler that defines the staleness of rows."""
        return self._staleness

    @property
    def num_ready(self) -> int:
        """Groups that can be drawn, of any staleness, as of the last write or draw."""
        return len(self._library_values.ready)

    def groups(self) -> list[PromptGroup]:
        """All groups with a stored completion: id, slots, uses, staleness, and why it cannot be drawn.

        In the order in which they were begun; of the storage that the sampler draws from, none before it has one. O(rows).
        The errors of a draw where the stored items have no ids or versions.
        """
        storage = self._library_values.storage
        if storage is None:
            return []
        with storage.lock.held():
            return self._library_draws.records(storage)

    @property
    def ran_out(self) -> bool:
        """Whether the last draw left fewer groups than it took."""
        return self._library_values.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._library_values.ran_out = value

    def sampleable(self, storage: Storage) -> int:
        self._library_values.try_sync(storage)
        return self.num_ready * self.group_size

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """The items at index are new, in this order."""
        self._library_values.written(index, storage=storage)

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        if expands:
            raise ValueError("a PromptGroupSampler takes no sample_unit, which would expand completions into windows")
        if prefetches and self.max_uses is not None:
            raise ValueError("prefetch and max_uses exclude each other: dropped batches would consume their groups")

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return {**self._library_values.state(), "members": states_of(self._members)}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            groups = self._library_values.with_state(entries, options.batch_size)
            members = with_states(entries, self._members, options)

            def put() -> None:
                members()
                groups()

            return put

    @property
    def _members(self) -> list[StalenessAwareSampler]:
        return [] if self._staleness is None else [self._staleness]

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "group_size", self.group_size
        yield "group_key", repr(self._library_values.key)
        yield "max_uses", self.max_uses
        yield "num_ready", self.num_ready

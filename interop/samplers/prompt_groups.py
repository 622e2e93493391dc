"""Whole groups of completions of one prompt."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tensordict.utils import NestedKey

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, states_of, with_states
from interop.data.arguments import class_of, whole
from interop.data.keys import checked_key
from interop.samplers.drawing import DrawingSampler
from interop.samplers.group_draws import GroupDraws
from interop.samplers.groups import MOST_USES
from interop.samplers.item_groups import ItemGroups
from interop.samplers.prompt_group import PromptGroup
from interop.samplers.reward_spread import RewardSpread
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

    Where groups differ in size, `size_key` takes the place of `group_size`: an entry with the number of completions in the
    group, in each of them. A batch of `batch_size` then has so many groups, with all of their completions.

    With `spread`, groups are drawn whose rewards differ: see `RewardSpread`. The length of the buffer and `num_ready` then
    count these alone, in O(groups): write until there are enough of them.

    With `num_groups` or `samples_per_group` in the place of `group_size` it makes a `KeyGroupSampler`, as in torchrl: all
    stored items with one prompt are a group.

    A write costs O(rows written), a draw O(batch). A draw after all rows were edited costs O(rows), and so does a write by a
    writer that does not go around the ring.

    Args:
        group_size: completions a group. Batch sizes are multiples of it. None with `size_key`.
        group_key: the entry with the id of the prompt, one whole number or text an item. KeyError or TypeError at the draw
            where an item has none. Give each visit of a prompt an id of its own where its groups may still be incomplete.
        max_uses: a group is consumed after so many draws, at most 2**22 - 1; None for no bound. Iterating over the buffer
            then ends where fewer groups are left than the last batch had. Such a buffer neither prefetches nor goes to
            workers. A memory map in a folder keeps the groups and their uses, for when it is opened again.
        staleness: defines the staleness of rows, by its `consumer_version`, `max_staleness` and `version_key`. A group has
            the staleness of its stalest row. It is drawn by the weight of this staleness, and never above `max_staleness`;
            the info has the "staleness" of rows, float32. A draw then takes O(completions in groups that can be drawn).
        spread: which groups teach something, and their weights, by their rewards. Weights are multiplied by those of
            `staleness`. A draw takes O(complete groups), the first one after an edit O(their completions).
        size_key: the entry with the size of the group of an item, an integer of at least 1; the same in all items of a
            group, or ValueError at the draw.

    Attributes:
        spread: as given; None without one.
    """

    _library_draws: GroupDraws
    _library_values: ItemGroups
    _staleness: StalenessAwareSampler | None
    spread: RewardSpread | None

    def __init__(
        self,
        group_size: int | None = None,
        *,
        group_key: Any = "prompt_id",
        max_uses: int | None = None,
        staleness: StalenessAwareSampler | None = None,
        spread: RewardSpread | None = None,
        size_key: NestedKey | None = None,
    ) -> None:
        if (group_size is None) == (size_key is None):
            raise TypeError(f"give one of group_size and size_key, got {group_size!r} and {size_key!r}")
        if spread is not None and not isinstance(spread, RewardSpread):
            raise TypeError(f"spread must be a RewardSpread, got {class_of(spread)}")
        if staleness is not None and not isinstance(staleness, StalenessAwareSampler):
            raise TypeError(f"staleness must be a StalenessAwareSampler, got {class_of(staleness)}")
        size = None if group_size is None else whole("group_size", group_size)
        most = None if max_uses is None else whole("max_uses", max_uses)
        if most is not None and most > MOST_USES:
            raise ValueError(f"max_uses must be at most {MOST_USES}, got {max_uses}: None is no bound")
        self._staleness = staleness
        self.spread = spread
        self._library_values = ItemGroups(size, group_key, most, checked_key("size_key", size_key))
        self._library_draws = GroupDraws(self._library_values, staleness, spread)

    @property
    def group_size(self) -> int | None:
        """Completions a group; None where groups differ in size."""
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
        values = self._library_values
        if self.spread is None or values.storage is None:
            return len(values.ready)
        with values.storage.lock.held():
            return len(self._library_draws.drawable(values.storage))

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
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of rewards that cannot be read: the draw raises
            return sum(group.size for group in self._library_draws.drawable(storage))
        return sum(group.size for group in self._library_values.ready)

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
        if self.group_size is None:
            yield "size_key", repr(self._library_values.size_key)
        else:
            yield "group_size", self.group_size
        yield "group_key", repr(self._library_values.key)
        yield "max_uses", self.max_uses
        if self.spread is not None:
            yield "spread", self.spread
        yield "num_ready", len(self._library_values.ready)

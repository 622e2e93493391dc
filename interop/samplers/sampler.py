"""The base class of samplers."""

import copy
import warnings
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from fbuf.samplers import Chances
from interop.checkpoint.state import Stateful, defined_outside, is_ours, refuse_names
from interop.data import randomness
from interop.data.arguments import whole
from interop.samplers.draws import Draws
from interop.samplers.item_values import ItemValues
from interop.samplers.own_draws import OwnDraws, sampled_by_key
from interop.samplers.own_values import OwnValues
from interop.storages import Storage
from interop.writers import Writer

_RESERVED = ("draws", "item_values", "hooks")


@dataclass(frozen=True)
class Hooks:
    """Which methods a class of samplers defines, so that a buffer calls no others.

    Attributes:
        follows_writes: `mark_update`.
        takes_priorities: `update_priority`.
        sees_writes: one of these, `add` or `extend`.
        ends_epochs: `ran_out`.
        draws: `draw` or `sample`, in a class of the user's.
        is_users: whether it is a class of the user's.
        updates_by_users: whether it is one that takes priorities.
    """

    follows_writes: bool = False
    takes_priorities: bool = False
    sees_writes: bool = False
    ends_epochs: bool = False
    draws: bool = False
    is_users: bool = False
    updates_by_users: bool = False


class Sampler(Stateful, randomness.Seeded, ABC):
    """Chooses the items of a batch. A subclass defines `draw`, or `sample` as in torchrl.

    A buffer makes one key for each batch from its generator, and passes it to `draw`. A sampler that takes all its random
    numbers from this key draws the same batches with and without `prefetch`, and after a checkpoint. A sampler that
    defines `sample` takes them from `self._rng` instead: during the call this is a generator seeded with the key.

    A subclass with attributes defines `state_dict`, which returns tensors and plain values in dicts with text keys and
    lists, and `load_state_dict`. Checkpoints save this state. See docs/do/extending.md.

    Attributes:
        hooks: which methods the class defines.
    """

    hooks: ClassVar[Hooks] = Hooks()
    _changes = 0  # calls of `parameters_changed`
    _library_draws: Draws | None = None  # of a class of the library; None where the class draws by its own methods
    _library_values: ItemValues = ItemValues()
    # Classes that a call makes in the place of this one, and for which keyword arguments. Subclasses do not inherit them.
    # Those that do not inherit from this class get the arguments without `replacement`.
    made_instead: ClassVar[tuple[tuple[Callable[[Mapping[str, Any]], bool], type["Sampler"]], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        follows = cls.mark_update is not Sampler.mark_update
        takes = cls.update_priority is not Sampler.update_priority
        if not is_ours(cls):
            refuse_names(cls, _RESERVED)
        cls.hooks = Hooks(
            follows_writes=follows,
            takes_priorities=takes,
            sees_writes=follows or takes or cls.add is not Sampler.add or cls.extend is not Sampler.extend,
            ends_epochs=cls.ran_out is not Sampler.ran_out,
            draws=any(defined_outside(cls, name) for name in ("draw", "sample")),
            is_users=not is_ours(cls),
            updates_by_users=takes and not is_ours(cls),
        )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        for is_asked_for, kind in vars(cls).get("made_instead", ()):
            if not is_asked_for(kwargs):
                continue
            if issubclass(kind, cls):  # whose `__init__` Python calls
                return kind.__new__(kind)
            kwargs.pop("replacement", None)
            made: Any = kind(*args, **kwargs)
            return made
        if cls.sample is Sampler.sample and cls.draw is Sampler.draw:
            raise TypeError(f"{cls.__name__} chooses no items: define draw(storage, batch_size, key) in it")
        if (args or kwargs) and cls.__init__ is object.__init__:  # to which they would be lost
            raise TypeError(f"{cls.__name__}() takes no arguments, got {args or kwargs}")
        return super().__new__(cls, *args, **kwargs)

    @property
    def draws(self) -> Draws:
        """The draws as a buffer asks for them: reserved, undone, or read in one step."""
        draws = self._library_draws
        if draws is not None and not self.hooks.draws:
            return draws
        values = OwnValues(self, self._library_values, ("before_draw", "before_write"))
        return OwnDraws(self, self._draws_by_key, self._changes, draws, values)

    @classmethod
    def _draws_by_key(cls) -> bool:
        """Whether `draw` draws, and not `sample`."""
        return cls.sample is Sampler.sample

    @property
    def item_values(self) -> ItemValues:
        """What the sampler keeps of stored items: priorities, uses, groups."""
        return OwnValues(self, self._library_values) if self.hooks.is_users else self._library_values

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """An index into the storage and the info of a batch, both determined by the key and the state of the sampler.

        Args:
            storage: where the items are; its lock is held.
            batch_size: how many items are wanted.
            key: random bits, [2] uint32: a key of JAX, or a seed for `numpy.random.default_rng`.
        """
        return sampled_by_key(self, storage, batch_size, key)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """`draw` with a key of the sampler's generator."""
        batch_size = whole("batch_size", batch_size, least=0)
        self.item_values.raise_deferred()
        with randomness.Restored(self._rng):
            return self.draw(storage, batch_size, randomness.key(self._rng))

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        """The law of the next draw: the probability of each stored item, and the reason where it cannot be drawn.

        Arrays of `fbuf.Chances` are over the flat slots, 0 to len(storage) - 1; those of a `StorageEnsemble` are over the
        slots of all members, one member after the other. A draw is one item, one slice, or one group: that of a batch
        which is drawn next, without regard to batches that were drawn ahead. Of samplers that repeat no item within a
        batch it is the first one of the batch. O(items), of slices by priority times their length. Nothing is drawn.

        The law of a class of your own that draws is not known, unless it defines this method: see docs/do/extending.md.

        Args:
            storage: where the items are.
            batch_size: of the next batch; needed where it determines the length of slices, and where an epoch leaves out
                its last items. The law of slices of no known length is not known.

        Raises: the errors of a draw but for those that say that nothing can be drawn: KeyError or TypeError where stored
        items lack an entry that the sampler needs, RuntimeError where they do not say where trajectories end.
        """
        with storage.lock.held():
            self.item_values.raise_deferred()
            return self.draws.chances(storage, batch_size)

    def parameters_changed(self) -> None:
        """Draw batches again that were drawn ahead. Call it after a change of an attribute on which draws depend."""
        self._changes += 1
        if self._library_draws is not None:
            if "_library_draws" not in vars(self):  # those of the class, which other samplers have too
                self._library_draws = copy.copy(self._library_draws)
            self._library_draws.changes = self._changes

    def sampleable(self, storage: Storage) -> int:
        """How many items can be drawn: the length of a buffer."""
        return len(storage)

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        """TypeError, ValueError or RuntimeError for other parts of a buffer with which this sampler cannot work."""

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """Its settings by name, for text and tables: see `fbuf.shown`."""
        return iter(())

    # ------------------------------------------------------------------ writes and priorities

    def add(self, index: Any) -> None:
        """An item was added at index."""

    def extend(self, index: Any) -> None:
        """Items were added at index."""

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """New items are at index, written through any buffer on the storage."""

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Set priorities of items. Warns in samplers without priorities."""
        warnings.warn(
            f"update_priority() has no effect: {type(self).__name__} is not a prioritized sampler",
            UserWarning,
            stacklevel=3,
        )

    @property
    def default_priority(self) -> float:
        """The priority of a new item."""
        return 1.0

    @property
    def ran_out(self) -> bool:
        """Whether an epoch has just ended; never for samplers without one."""
        return False

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        pass

    def clear(self) -> None:
        """Start over: the buffer was emptied."""
        self._empty()

    def _empty(self) -> None:
        """Called by `clear`; a subclass may define it."""
        if self._library_draws is not None:
            self._library_draws.clear()
        self._library_values.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rng": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __copy__(self) -> Self:
        """A copy that draws, and follows writes, on its own. Attributes of a user's class are shared."""
        twin = self.__class__.__new__(self.__class__)
        state = self.__getstate__()
        own: dict[str, Any] = {name: state.pop(name) for name in ("_library_draws", "_library_values") if name in state}
        twin.__dict__.update(state)
        twin.__dict__.update(copy.deepcopy(own, {id(self): twin}))
        return twin

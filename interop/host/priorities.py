"""Priorities of stored items in one array; the tree that draws by them is a cache, rebuilt from the array when lost."""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

import fbuf
from fbuf.priority_tree import PriorityTree
from interop.data import bridge
from interop.host import compiled

Arrays = tuple[Any, ...]  # of JAX
_NOTHING = contextlib.nullcontext()
_CPU = torch.device("cpu")
_FEW = 1 << 12  # changes and draws up to which one program for both pays, which is compiled for each pair of sizes
_NO_KEY = np.zeros(2, np.uint32)
_PAYS_UP_TO = 4  # changes of at most capacity / 4: to rebuild the tree takes less than to bring in more


@dataclasses.dataclass(frozen=True)
class PriorityValues:
    """The priorities of all items, and what the next new item gets."""

    given: np.ndarray  # [size], before eps and alpha; -1 where no item is
    highest: float
    highest_slot: int = -1  # the item that has it; -1 when none is known


class Priorities(ABC):
    """Priorities of the items in slots, and draws in proportion to (priority + eps) ** alpha. The words are those of `fbuf`.

    Slots and priorities are checked by the caller. A subclass says where the arrays are.
    """

    def __init__(self, rule: fbuf.Prioritized, capacity: int, alpha: float, excluding: bool = False) -> None:
        self.rule, self.capacity, self.alpha = rule, capacity, alpha
        self.excluding = excluding  # whether `exclude` may be called
        self.size = 0  # slots below this have a priority

    @property
    @abstractmethod
    def values(self) -> PriorityValues:
        """A copy of all that decides later draws: `load` of it makes the same tree, to the bit."""

    @abstractmethod
    def load(self, values: PriorityValues) -> None:
        """Replace all priorities. Every item can be drawn then."""

    def reserve(self, capacity: int) -> None:
        """Have more slots. Every item can be drawn then. O(capacity)."""
        values, self.capacity = self.values, capacity
        self.load(values)

    @abstractmethod
    def highest(self) -> tuple[float, int]:
        """The priority of the next new item, and the slot of the item that has it, or -1."""

    @abstractmethod
    def written(self, slots: np.ndarray) -> None:
        """Give new items in slots the highest priority."""

    @abstractmethod
    def update(self, slots: np.ndarray, priorities: np.ndarray, top: Any) -> None:
        """Set priorities, of equal slots the last; `top` is the highest of all of them. Slots may be empty."""

    def update_async(self, index: Any, priority: Any) -> bool:
        """Start an update that is checked where the tensors are; False where the host has to check them first."""
        return False

    @abstractmethod
    def exclude(self, slots: np.ndarray, allowed: np.ndarray) -> None:
        """Allow items to be drawn, or not."""

    @abstractmethod
    def reweight(self, alpha: float) -> None:
        """Weigh all items by a new alpha. O(capacity)."""

    @abstractmethod
    def sample(
        self,
        key: np.ndarray,
        batch_size: int,
        size: int,
        beta: float,
        items: Sequence[jax.Array],
        lanes: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, list[jax.Array]]:
        """Drawn slots, int64, their importance weights, and copies of the items there if the same program can read them.

        RuntimeError where every priority is zero.
        """

    @abstractmethod
    def masses(self) -> tuple[float, float]:
        """The sum and the smallest of (priority + eps) ** alpha over the items that can be drawn. Waits for the device."""

    @abstractmethod
    def functional(self) -> fbuf.PrioritizedState:
        """The functional state of the same items. The next write or draw takes its memory over."""

    @abstractmethod
    def memory(self) -> Any:
        """The shapes and dtypes of the arrays."""

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("rule", "capacity", "alpha", "excluding")}
        return {"own": own, "values": self.values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["own"])  # type: ignore[misc]
        self.load(state["values"])


class HostPriorities(Priorities):
    """Priorities in memory. Writes and updates are a few NumPy calls; the next draw brings changed slots into the tree.

    The program of a draw takes over the memory of the tree. If it fails or is interrupted, the tree is lost, and the next
    draw rebuilds it in O(capacity); the same happens after another alpha, growth, and very many changes.
    """

    def __init__(self, rule: fbuf.Prioritized, capacity: int, alpha: float, excluding: bool = False) -> None:
        super().__init__(rule, capacity, alpha, excluding)
        self._given = np.empty(0, rule.dtype)  # [capacity] from the first write on
        self._excluded: np.ndarray | None = None  # [capacity]
        self._highest: Any = self._given.dtype.type(1)
        self._highest_slot: int | None = -1  # None: both are to be looked up among the stored items
        self._tree: Arrays | None = None
        self._changed, self._changes = np.empty(64, np.int32), 0  # slots whose leaf is not right, and how many

    @property
    def values(self) -> PriorityValues:
        return PriorityValues(self._given[: self.size].copy(), *self.highest())

    def load(self, values: PriorityValues) -> None:
        self._tree, self._excluded, self.size = None, None, len(values.given)
        self._given = np.empty(0, self.rule.dtype)
        if self.size:
            self._allocate()
            self._given[: self.size] = values.given
        self._highest, self._highest_slot = self._given.dtype.type(values.highest), values.highest_slot

    def _allocate(self) -> None:
        if not self._given.size:
            self._given = np.full(self.capacity, -1, self._given.dtype)

    def highest(self) -> tuple[float, int]:
        if self._highest_slot is None:
            self._highest_slot = int(self._given[: self.size].argmax())
            self._highest = self._given[self._highest_slot]
        return float(self._highest), self._highest_slot

    def written(self, slots: np.ndarray) -> None:
        self._allocate()
        if self.rule.new_items == "highest_stored":
            self.highest()
        self._note(slots)
        self._given[slots] = self._highest
        if self.rule.new_items == "highest_stored":
            if (slots == self._highest_slot).any():
                self._highest, self._highest_slot = self._given.dtype.type(1), -1
            elif self._highest_slot == -1:
                self._highest_slot = int(slots[0])
        self.size = max(self.size, int(np.maximum.reduce(slots)) + 1)  # half the time of `max`

    def update(self, slots: np.ndarray, priorities: np.ndarray, top: Any) -> None:
        self._note(slots)
        self._given[slots] = priorities
        if self.rule.new_items == "highest_ever":
            self._highest = max(self._highest, top)
        elif self._highest_slot is not None and slots.size:
            if (slots == self._highest_slot).any():
                self._highest_slot = None
                return
            settled = self._given[slots]
            first = int(settled.argmax())
            if self._highest_slot < 0 or settled[first] > self._highest:
                self._highest, self._highest_slot = settled[first], int(slots[first])

    def exclude(self, slots: np.ndarray, allowed: np.ndarray) -> None:
        self._allocate()
        if self._excluded is None:
            self._excluded = np.zeros(self.capacity, np.bool_)
        self._note(slots)
        self._excluded[slots] = ~allowed

    def reweight(self, alpha: float) -> None:
        self._tree, self.alpha = None, alpha

    # ------------------------------------------------------------------ the tree

    def _note(self, slots: np.ndarray) -> None:
        """Note slots before their priority changes."""
        if self._tree is None:
            return
        count = self._changes + slots.size
        if count > max(_FEW, self.capacity // _PAYS_UP_TO):
            self._tree = None
            return
        if count > self._changed.size:
            self._changed = np.resize(self._changed, 1 << (count - 1).bit_length())
        self._changed[self._changes : count] = slots
        self._changes = count

    def _drawable(self, slots: np.ndarray | slice) -> np.ndarray:
        """The priorities at slots; -1 for items that are not to be drawn."""
        given = self._given[slots]
        return given if self._excluded is None else np.where(self._excluded[slots], given.dtype.type(-1), given)

    def _current_tree(self) -> Arrays:
        """The arrays of the tree with all changes, which stay the cache."""
        if self._tree is None:
            self._allocate()
            self._changes = 0
            with bridge.exact(_CPU):
                given = jax.device_put(np.array(self._drawable(slice(None))), bridge.jax_device(_CPU))
                self._tree = compiled.tree_of(self.rule, given, np.asarray(self.alpha, self.rule.dtype))
        elif self._changes:
            self._changed_tree(0, 0.0, _NO_KEY, 0)
        assert self._tree is not None
        return self._tree

    def _changed_tree(self, count: int, beta: float, key: np.ndarray, size: int) -> Any:
        """Bring all changes into the tree, and draw from it. The tree is lost unless this ends."""
        tree, self._tree = self._tree, None
        slots, self._changes = self._changed[: self._changes], 0
        words = compiled.words_of(self._drawable(slots), slots, self.alpha, beta, key, size)
        with self._precision():
            self._tree, drawn = compiled.assign_and_draw(self.rule, self.capacity, count, tree, words)
        return drawn

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """For programs of words: in single precision they are right under either setting of JAX's 64-bit types."""
        return _NOTHING if self.rule.dtype == "float32" else bridge.exact()

    def sample(
        self,
        key: np.ndarray,
        batch_size: int,
        size: int,
        beta: float,
        items: Sequence[jax.Array],
        lanes: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, list[jax.Array]]:
        count = compiled.shared_size(batch_size)
        if self._tree is not None and 0 < self._changes <= _FEW and count <= _FEW:
            drawn = self._changed_tree(count, beta, key, size)
        else:
            tree, none = self._current_tree(), self._given[:0]
            words = compiled.words_of(none, none, self.alpha, beta, key, size)
            with self._precision():
                drawn = compiled.draw_words(self.rule, self.capacity, count, tree, words)
        slots, weights, valid = compiled.read_words(np.asarray(drawn), batch_size, self.rule.dtype)
        if not valid:
            raise nothing_to_draw()
        return torch.from_numpy(slots), torch.from_numpy(weights), []

    def _functional_tree(self) -> PriorityTree:
        return compiled.tree_with(self._current_tree(), self.capacity)

    def masses(self) -> tuple[float, float]:
        with bridge.exact(_CPU):
            total, smallest = np.asarray(compiled.masses(self._functional_tree())).tolist()
        return total, smallest

    def functional(self) -> fbuf.PrioritizedState:
        state = state_of(self, self.values, _CPU)
        if self._excluded is not None:
            excluded = np.append(self._excluded, np.zeros(state.priorities.size - self.capacity, np.bool_))
            state = dataclasses.replace(state, excluded=jax.device_put(excluded, bridge.jax_device(_CPU)))
        return dataclasses.replace(state, tree=self._functional_tree())

    def memory(self) -> Any:
        with bridge.exact():
            tree = jax.eval_shape(lambda: self.rule.init(self.capacity).tree)
        return {"tree": tree, "priorities": jax.ShapeDtypeStruct((self.capacity,), self.rule.dtype)}


def state_of(priorities: Priorities, values: PriorityValues, device: torch.device) -> fbuf.PrioritizedState:
    """The functional state of the rule, capacity and alpha of `priorities` with these values, on a device. O(capacity)."""
    rule, held = priorities.rule, bridge.jax_device(device)
    given = np.full(priorities.capacity, -1, rule.dtype)
    given[: len(values.given)] = values.given
    with bridge.exact():
        state = jax.device_put(compiled.init(rule, priorities.capacity, priorities.excluding), held)
        state = compiled.refill(rule, state, given, np.asarray(priorities.alpha, rule.dtype))
        highest = {"highest": np.asarray(values.highest, rule.dtype), "highest_slot": np.int32(values.highest_slot)}
        made: fbuf.PrioritizedState = dataclasses.replace(state, **jax.device_put(highest, held))
    return made


def nothing_to_draw() -> RuntimeError:
    return RuntimeError(
        "non-positive p_sum: every stored priority is zero, nothing can be drawn. Call update_priority() with "
        "a positive priority, or use eps > 0"
    )

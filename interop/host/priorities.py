"""Each stored row has a priority in one array; the tree that draws by them is a cache, rebuilt from the array when lost."""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

import fbuf
from fbuf.priority_tree import PriorityTree
from fbuf.samplers import Chances
from fbuf.samplers.prioritized import law_of_weights
from interop.data import bridge
from interop.host import compiled
from interop.host.device_rows import JaxRows
from interop.host.device_writes import DeviceWrites

Arrays = tuple[Any, ...]  # of JAX
_NOTHING = contextlib.nullcontext()
_CPU = torch.device("cpu")
_FEW = 1 << 12  # up to so many changes and draws one program does both; it is compiled for each pair of sizes
_NO_KEY = np.zeros(2, np.uint32)
_PAYS_UP_TO = 4  # more changes than capacity / 4 take longer than rebuilding the tree


@dataclasses.dataclass(frozen=True)
class PriorityValues:
    """The priorities of all items, and the priority of the next new item."""

    given: np.ndarray  # [size], before eps and alpha; -1 where no item is
    highest: float
    highest_slot: int = -1  # the item that has it; -1 when none is known


class Priorities(ABC):
    """Priorities of items, and draws in proportion to (priority + eps) ** alpha. The twin of `fbuf.Prioritized`.

    The caller checks slots and priorities. Subclasses keep the arrays on the host or on a device.
    """

    def __init__(self, rule: fbuf.Prioritized, capacity: int, alpha: float, excluding: bool = False) -> None:
        self.rule, self.capacity, self.alpha = rule, capacity, alpha
        self.excluding = excluding  # whether `exclude` may be called
        self.size = 0  # slots below this have a priority

    @property
    @abstractmethod
    def values(self) -> PriorityValues:
        """A copy of the state. `load` of it makes the same tree, bit for bit."""

    @abstractmethod
    def load(self, values: PriorityValues) -> None:
        """Replace all priorities. No item is excluded then."""

    def reserve(self, capacity: int) -> None:
        """Grow to `capacity` slots. No item is excluded then. O(capacity)."""
        values, self.capacity = self.values, capacity
        self.load(values)

    @abstractmethod
    def highest(self) -> tuple[float, int]:
        """The priority of the next new item, and the slot of an item that has it, or -1."""

    @abstractmethod
    def written(self, slots: np.ndarray, writes: DeviceWrites | None = None) -> None:
        """Give new items in slots the highest priority. On a device it may be a part of these writes."""

    @abstractmethod
    def update(self, slots: np.ndarray, priorities: np.ndarray, top: Any) -> None:
        """Set priorities; of equal slots the last wins. `top` is the highest of all. Slots may be empty."""

    def checks(self, priority: object) -> bool:
        """Whether `update_async` takes such priorities, one for each slot."""
        return False

    def update_async(self, index: Any, priority: Any, writes: DeviceWrites | None = None) -> bool:
        """Start an update that the device checks, or make it a part of these writes; False if the host must check it."""
        return False

    def raise_deferred(self) -> None:
        """ValueError for an update that the device refused, as soon as it has reported that. Does not wait."""

    @abstractmethod
    def exclude(self, slots: np.ndarray, allowed: np.ndarray) -> None:
        """Allow items to be drawn, or not."""

    @abstractmethod
    def reweight(self, alpha: float) -> None:
        """Weigh all items by a new alpha. O(capacity)."""

    @abstractmethod
    def sample(
        self, key: np.ndarray, batch_size: int, size: int, beta: float, rows: JaxRows | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Drawn slots, int64, their importance weights, and copies of the items there if the same program can read them.

        RuntimeError if every priority is zero.
        """

    def before_write(self) -> dict[str, Any]:
        """What `put_back` needs to make a write or an update again. O(1)."""
        return {}

    def put_back(self, before: dict[str, Any]) -> None:
        """Be as at `before_write`, but for the priorities of the items that were written or updated since."""
        self.__dict__.update(before)

    @abstractmethod
    def masses(self) -> tuple[float, float]:
        """The sum and the smallest positive value of (priority + eps) ** alpha. Waits for the device."""

    @abstractmethod
    def chances(self, size: int) -> Chances:
        """The law of the next draw of one of the first `size` items. Waits for the device. O(capacity)."""

    def let_go(self) -> None:
        """Release the locks that this thread holds: after an interrupt."""

    @abstractmethod
    def functional(self) -> fbuf.PrioritizedState:
        """The functional state. Its memory is donated to the next write or draw."""

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
    """Priorities in memory. Writes and updates are a few NumPy calls; the next draw updates the tree at changed slots.

    The tree is a cache. It is donated to the program of a draw, and lost if that fails or is interrupted; the next draw
    then rebuilds it in O(capacity), as after a new alpha, growth, or very many changes.
    """

    def __init__(self, rule: fbuf.Prioritized, capacity: int, alpha: float, excluding: bool = False) -> None:
        super().__init__(rule, capacity, alpha, excluding)
        self._given = np.empty(0, rule.dtype)  # [capacity] from the first write on
        self._excluded: np.ndarray | None = None  # [capacity]
        self._highest: Any = self._given.dtype.type(1)
        self._highest_slot: int | None = -1  # None: look both up among the stored items
        self._tree: Arrays | None = None
        self._changed, self._changes = (
            np.empty(64, np.int32),
            0,
        )  # slots whose leaf in the tree is stale, and their number

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

    def written(self, slots: np.ndarray, writes: DeviceWrites | None = None) -> None:
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
                self._highest_slot = None  # while there is one without the other
                self._highest = settled[first]
                self._highest_slot = int(slots[first])

    def before_write(self) -> dict[str, Any]:
        return self.__dict__.copy()

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
        """Mark slots as stale in the tree, before their priority changes."""
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
        """The priorities at slots; -1 for excluded items."""
        given = self._given[slots]
        return given if self._excluded is None else np.where(self._excluded[slots], given.dtype.type(-1), given)

    def _current_tree(self) -> Arrays:
        """The arrays of the tree, brought up to date."""
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
        """Update the tree at stale slots, and draw from it. The tree is lost if this fails."""
        tree, self._tree = self._tree, None
        slots, self._changes = self._changed[: self._changes], 0
        words = compiled.words_of(self._drawable(slots), slots, self.alpha, beta, key, size)
        with self._precision():
            self._tree, drawn = compiled.assign_and_draw(self.rule, self.capacity, count, tree, words)
        return drawn

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context for programs of words. In single precision they work under either setting of 64-bit types."""
        return _NOTHING if self.rule.dtype == "float32" else bridge.exact()

    def sample(
        self, key: np.ndarray, batch_size: int, size: int, beta: float, rows: JaxRows | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
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

    def chances(self, size: int) -> Chances:
        excluded = None if self._excluded is None else self._excluded[:size]
        with bridge.exact(_CPU):
            return law_of_weights(np.asarray(self._functional_tree().leaves)[:size], excluded)

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
    """The functional state with these values on a device; rule, capacity and alpha as in `priorities`. O(capacity)."""
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

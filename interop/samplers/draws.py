"""What buffers ask of a sampler in order to draw batches."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from tensordict import NestedKey, is_tensor_collection
from torch import Tensor

from fbuf import free_memory
from fbuf.memory_plan import Share
from fbuf.samplers import Chances
from interop.data.pytrees import each_leaf
from interop.data.trajectory_keys import TrajectoryKeys
from interop.host.epochs import Epoch
from interop.samplers.shares import ShardContents
from interop.storages import Storage
from interop.storages.all_or_nothing import Undoable


class Draws(ABC):
    """The draws of one sampler, with all that decides the next one. The lock of the storage is held in each call.

    A draw is determined by the key, the stored items and the state of this object. A draw for a request,
    whose batch is returned later, is reserved if it changes this state.
    """

    reads_to_reserve = True  # whether `reserve` reads stored items, so that the lock of the storage must be held
    has_state = True  # whether a draw changes the next one, which a request must then be able to undo
    changes = 0  # how often parameters changed that are not in `settings`: see `Sampler.parameters_changed`
    errors_count = False  # whether a draw that raises an error counts, as far as it came: in classes of users

    @abstractmethod
    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """An index into the storage, and the info of the batch. See `Sampler.draw`."""

    def reserve(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, Any] | None:
        """Draw for a request; None if the key and the stored items alone determine the draw.

        The index and the info, which the next draw does not change; flat slots in the place of the index where there is an
        epoch, in which the draw is reserved under the key.
        """
        index, info = self.draw(storage, batch_size, key)
        return each_leaf(index, _copied), each_leaf(info, _copied)

    @property
    def of_requests(self) -> Epoch | None:
        """The epoch in which requests are reserved; None for draws without one."""
        return None

    @property
    def undoable(self) -> Undoable | None:
        """What the next draw changes beside the epoch; None for nothing."""
        return None

    def before_draw(self) -> dict[str, Any]:
        """What `put_back` needs to undo a `draw` that no request has reserved, of a user's class. O(1)."""
        return {}

    def put_back(self, before: dict[str, Any]) -> None:
        """Be again as at `before_draw`."""

    def let_go(self) -> None:
        """Release the locks that this thread holds: after an interrupt."""

    @property
    def settings(self) -> tuple[Any, ...]:
        """The parameters on which draws depend and which a user may set."""
        return ()

    @property
    def all_settings(self) -> tuple[Any, ...]:
        """`changes` and `settings`. Batches drawn ahead with others are drawn again."""
        return self.changes, *self.settings

    @property
    def has_more(self) -> bool | None:
        """Whether another batch may be reserved, which no request past the end of an epoch may.

        None where `ran_out` of the sampler says so.
        """
        return None

    @property
    def versions(self) -> dict[NestedKey, int]:
        """By the entry of the version of an item, the version of what is written now; empty for draws without versions."""
        return {}

    def catch_up(self, storage: Storage) -> None:
        """Begin an epoch if a write ended the last one, whose requests are stale."""

    def slice_lengths(self) -> np.ndarray | None:
        """How many items each slice of the last draw has in the batch, padding included, int64 [slices].

        None for single items.
        """
        return None

    @property
    def trajectory_keys(self) -> TrajectoryKeys | None:
        """The entries that divide trajectories; None for draws of single items, or of trajectories that were given."""
        return None

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        """The law of the next draw. See `Sampler.chances`. Not known by default."""
        return Chances.unknown(len(storage))

    def starts_that_reach(self, storage: Storage, slot: int, batch_size: int | None = None) -> np.ndarray | None:
        """Slots of the starts of which slices have the item at a flat slot, the oldest first; None for no slices.

        Those from where the rule allows a slice, whatever their priority.
        """
        return None

    def slice_rows(self, batch_size: int | None = None) -> tuple[int, int] | None:
        """The rows of a whole slice in a batch of this size, and how many a trajectory must have stored for one.

        None for no slices, and where it depends on a batch size that is not known.
        """
        return None

    def check_batch_size(self, batch_size: int) -> None:
        """ValueError for a batch size that cannot be drawn."""

    def most_items(self, storage: Storage, batch_size: int) -> int:
        """How many items the next batch of this size has at most, by which a limiter decides whether it may be drawn.

        `batch_size` by default. A batch size in other units, as groups, makes more items of it.
        """
        return batch_size

    def share(self, storage: Storage, batch_size: int) -> ShardContents | None:
        """The share of a storage in batches of this size over several buffers; None if these cannot be drawn."""
        return None

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        """The memory that draws from a storage of `capacity` items need, for a plan."""
        return []

    def clear(self) -> None:
        """Start over: the buffer was emptied."""


def host_share(key: str, size: int | None) -> Share:
    """At most `size` bytes of host memory in a plan; None if unknown."""
    return Share("sampler", key, free_memory.HOST, size, counts="always" if size is None else "at most")


def _copied(leaf: object) -> object:
    if isinstance(leaf, Tensor) or is_tensor_collection(leaf):
        return leaf.clone()  # type: ignore[attr-defined]  # also of a tensordict
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

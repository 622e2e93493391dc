"""Every stored item once before any comes again."""

import dataclasses
from typing import Any

import numpy as np
import torch

from fbuf.memory_plan import Share
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, integers, permutation
from interop.host.epochs import Epoch, EpochState
from interop.samplers.drawing import DrawingSampler, names_slots, stored
from interop.samplers.reservation import Reservation
from interop.samplers.sampler import host_share
from interop.samplers.shares import ShardContents
from interop.storages import Storage


class SamplerWithoutReplacement(DrawingSampler):
    """Draws each stored item once an epoch, in uniformly random order. O(batch), whatever is stored.

    The last batch of an epoch is shorter where fewer items are left; with `drop_last` these are left out, and a batch
    larger than the buffer is a ValueError. A change of the number of stored items begins an epoch; overwriting does not.
    Iterating over a buffer is one epoch, with `prefetch`, too: the items of dropped batches remain to be drawn.

    Args:
        drop_last: no batch is shorter than asked for.
        shuffle: False draws items in the order of their slots.
    """

    _epoch: Epoch

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self._epoch = Epoch(shuffle, drop_last)

    @property
    def drop_last(self) -> bool:
        """Whether no batch is shorter than asked for."""
        return self._epoch.drop_last

    @property
    def shuffle(self) -> bool:
        """Whether items come in random order."""
        return self._epoch.shuffle

    def _draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        return torch.from_numpy(self._take(batch_size, stored(storage), key)), {}

    def reserve(self, storage: Storage, batch_size: int, key: np.ndarray) -> Reservation | None:
        if self.planned is not None or not names_slots(self):
            return super().reserve(storage, batch_size, key)
        epoch = self._epoch

        def take() -> Reservation:
            slots, info = self._draw(storage, batch_size, key)
            return Reservation(slots, info, (epoch, epoch.reserve(key)))

        with epoch.lock:
            self.catch_up(storage)  # before: an epoch that it begins stays begun
            return epoch.whole(take)

    def let_go(self) -> None:
        super().let_go()
        self._epoch.lock.let_go()

    def undo_draw(self, key: np.ndarray) -> None:
        self._epoch.release_of(key)

    @property
    def has_more(self) -> bool:
        return not (self._epoch.over if names_slots(self) else self.ran_out)

    def remaining(self, storage: Storage) -> tuple[int, np.ndarray]:
        """How many items the epoch has, and those it still has to draw, prefetched ones too. The storage's lock is held."""
        self.catch_up(storage)
        state = self._epoch.state()
        return state.length, state.left()

    def share(self, storage: Storage, batch_size: int) -> ShardContents:
        return self._in_epochs(ShardContents(len(storage), float(len(storage))))

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return [host_share("order", 2 * 4 * capacity)] if self.shuffle else []  # it may have doubled

    def _in_epochs(self, share: ShardContents, version: int = 0) -> ShardContents:
        own: dict[str, Any] = {"in_epochs": True, "drop_last": self.drop_last, "shuffle": self.shuffle}
        return dataclasses.replace(share, **own, version=version)

    def _take(self, count: int, length: int, key: np.ndarray) -> np.ndarray:
        """Positions of the epoch, or the planned ones."""
        return self._epoch.take(count, length, key) if self.planned is None else self.planned

    @property
    def ran_out(self) -> bool:
        """Whether the last batch was the end of an epoch."""
        return self._epoch.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._epoch.ran_out = value

    def _empty(self) -> None:
        self._epoch.restart()

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        epoch = self._epoch_state()
        return {
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "len_storage": epoch.length,
            "position": epoch.position,
            "over": epoch.over,
            "order": epoch.order,
            "_ran_out": epoch.ran_out,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state, and under "_sample_list" the items that this epoch still has to return."""
        return {**super().state_dict(), "_sample_list": torch.from_numpy(self._epoch_state().left())}

    def _epoch_state(self) -> EpochState:
        return self._epoch.state()

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            epoch = self._epoch
            order = None
            drop_last = entries.parameter("drop_last", entries.flag("drop_last"), epoch.drop_last)
            length = entries.whole("len_storage", most=2**48)
            ran_out = entries.flag("_ran_out")
            left = integers(entries, "_sample_list", None, 0, length) if "_sample_list" in entries else None
            shuffle = epoch.shuffle
            if "position" in entries:
                shuffle = entries.parameter("shuffle", entries.flag("shuffle"), shuffle)
                position = entries.whole("position", most=length)
                over = entries.flag("over")
                if entries.any("order") is not None or (shuffle and length):
                    order = permutation(entries, "order", length)
            elif left is None or np.unique(left).size < left.size:
                raise entries.wrong("_sample_list", "different items", left)
            else:  # the list is enough: the order of the items that were drawn does not matter
                position = length - left.size
                over = not left.size
                order = np.concatenate((np.setdiff1d(np.arange(length), left), left))
            state = EpochState(length, position, over, ran_out, order)

            def put() -> None:
                epoch.shuffle = shuffle
                epoch.drop_last = drop_last
                epoch.with_state(state)

            return put

    def __repr__(self) -> str:
        epoch = self._epoch
        left = epoch.length if epoch.over else epoch.left
        return f"{type(self).__name__}({100 * left / max(epoch.length, 1):.4f}% left)"

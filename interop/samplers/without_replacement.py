"""Every stored item once before any comes again."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, integers, permutation
from interop.host.epochs import Epoch, EpochState
from interop.samplers.drawing import DrawingSampler
from interop.samplers.epoch_draws import EpochDraws
from interop.samplers.uniform import RandomSampler
from interop.samplers.validation import refuse_replacement


class SamplerWithoutReplacement(DrawingSampler):
    """Draws each stored item once an epoch, in uniformly random order. O(batch), whatever is stored.

    The last batch of an epoch is shorter where fewer items are left; with `drop_last` these are left out, and a batch
    larger than the buffer is a ValueError. A change of the number of stored items begins an epoch; overwriting does not.
    Iterating over a buffer is one epoch, with `prefetch`, too: the items of dropped batches remain to be drawn.

    Args:
        drop_last: no batch is shorter than asked for.
        shuffle: False draws items in the order of their slots.
        replacement: only False, so that `RandomSampler(replacement=False)` and this class take the same arguments.
    """

    _library_draws: EpochDraws

    def __init__(self, drop_last: bool = False, shuffle: bool = True, *, replacement: bool = False) -> None:
        refuse_replacement(self, replacement)
        self._library_draws = EpochDraws(Epoch(shuffle, drop_last))

    @property
    def drop_last(self) -> bool:
        """Whether no batch is shorter than asked for."""
        return self._library_draws.epoch.drop_last

    @property
    def shuffle(self) -> bool:
        """Whether items come in random order."""
        return self._library_draws.epoch.shuffle

    @property
    def ran_out(self) -> bool:
        """Whether the last batch was the end of an epoch."""
        return self._library_draws.epoch.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._library_draws.epoch.ran_out = value

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        epoch = self._library_draws.state()
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
        return {**super().state_dict(), "_sample_list": torch.from_numpy(self._library_draws.state().left())}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            epoch = self._library_draws.epoch
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

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        epoch = self._library_draws.epoch
        left = epoch.length if epoch.over else epoch.left
        yield "", f"{100 * left / max(epoch.length, 1):.4f}% left"


RandomSampler.made_instead = ((lambda arguments: arguments.get("replacement") is False, SamplerWithoutReplacement),)

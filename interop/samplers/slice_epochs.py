"""Slices of trajectories, each trajectory once before any comes again."""

from collections.abc import Iterator, Sequence
from typing import Any

from tensordict.utils import NestedKey
from torch import Tensor

from interop.host.epochs import Epoch
from interop.samplers.slice_epoch_draws import SliceEpochDraws
from interop.samplers.slices import SliceSampler
from interop.samplers.validation import refuse_replacement
from interop.samplers.without_replacement import SamplerWithoutReplacement
from interop.storages import Storage


class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws slices like `SliceSampler`, one of each trajectory an epoch, in random order. A write begins an epoch.

    A batch is shorter where fewer trajectories are left than it has slices. With `strict_length` an epoch is over the
    trajectories that are long enough, RuntimeError where there are none. Another slice length begins an epoch where the
    number of these changes.

    Args:
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, truncated_key, init_key, strict_length,
            compile, use_gpu, only_named_keys: as for `SliceSampler`; ends and trajectories need nothing else.
        drop_last: leave out the last trajectories of an epoch where they are fewer than a batch has slices.
        shuffle: False draws trajectories in the order of the storage.
        replacement: only False.
    """

    _library_draws: SliceEpochDraws

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: NestedKey | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: Any = False,
        only_named_keys: bool = False,
        replacement: bool = False,
    ) -> None:
        refuse_replacement(self, replacement)
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=True,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            compile=compile,
            use_gpu=use_gpu,
            only_named_keys=only_named_keys,
        )
        self._library_draws = SliceEpochDraws(
            self._library_draws.source, self._library_draws.shape, Epoch(shuffle, drop_last)
        )

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Begin an epoch."""
        self._library_draws.written()

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield from SliceSampler.__rich_repr__(self)
        yield from SamplerWithoutReplacement.__rich_repr__(self)


SliceSampler.made_instead = ((lambda arguments: arguments.get("replacement") is False, SliceSamplerWithoutReplacement),)

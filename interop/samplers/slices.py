"""Runs of consecutive items of one trajectory."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tensordict.utils import NestedKey
from torch import Tensor

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions
from interop.data.arguments import whole
from interop.data.keys import as_key, checked_key
from interop.data.trajectory_keys import TrajectoryKeys
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.drawing import DrawingSampler
from interop.samplers.fragmented import FragmentedTrajectories
from interop.samplers.parameter import Parameter
from interop.samplers.slice_draws import SliceDraws, SliceShape
from interop.samplers.stored_trajectories import GivenTrajectories, StoredTrajectories
from interop.samplers.trajectory_source import TrajectorySource
from interop.storages import LazyStackStorage, ListStorage, Storage
from interop.writers import Writer


class SliceSampler(DrawingSampler):
    """Draws slices of trajectories: each trajectory that is long enough equally often, and each start in it.

    A batch has the slices one after the other, [num_slices * slice_len]. No slice crosses the end of a trajectory, the
    cursor of a full storage, or an edge of rows that `storage.set` has written elsewhere in this process; a slice may go on
    from the last row to the first. A draw costs O(batch), whatever is stored; the first one after a write also looks at the
    rows that were written. Needs a storage that is read as a tensordict, and a writer that keeps the order of items.

    Args:
        num_slices, slice_len: one of them; the other follows from the batch size, which must be a multiple.
        end_key: bool entry that is True in the last item of a trajectory.
        end_keys: several of them.
        traj_key: entry of numbers that is the same for all items of a trajectory. In a storage of one item dim the items of
            several trajectories may be interleaved, one of each at a time; the first draw after a write then takes
            O(stored items), which `ndim=2` avoids.
        step_key, fragmented: with `fragmented=True` the ids and an entry with the number of each step, a whole number of
            at least 0, say which items follow each other, wherever they are stored: as after merging buffers, or under a
            writer that keeps no order. A missing step, or a marker of an end, divides a trajectory. RuntimeError at the draw
            where a step of a trajectory is stored twice, and for several item dims. The first draw after a write takes
            O(stored items * log). `traj_key` or a default key of ids must be stored.
        init_key: the entry of first steps, true in the first step of each slice where it is stored; None leaves it as it
            is.
        replacement: `SliceSampler(replacement=False, drop_last=..., ...)` makes a `SliceSamplerWithoutReplacement`.
        only_named_keys: only the keys that are named here count.
        ends, trajectories: the same as tensors, for a storage of one item dim that is full and never written again; they
            need `cache_values`.
        cache_values: accepted; the index of trajectories is always kept and up to date.
        truncated_key: the entry of the batch for the ends of slices, with "done" and "terminated" beside it; None for none.
        strict_length: False also draws shorter trajectories, whole; the batch is then smaller.
        pad_output: fill these up by repeating their last item; ("collector", "mask") is False there.
        compile: accepted; there is nothing to compile.
        span: let slices begin before (left) or end behind (right) their trajectory, which cuts them: True, an int for at
            most so many items, or a pair of these.
        use_gpu: accepted; boundaries are kept on the host.

    A trajectory ends where any stored marker says so: where ("collector", "traj_ids"), "traj_ids" or "episode" changes,
    where ("next", "done"), ("next", "terminated") or ("next", "truncated") is true, before a true "is_init", and where
    ("collector", "mask") changes. Keys that are named here count besides these, unless `only_named_keys`. After the first
    draw `traj_key` and `end_key` are the first keys that were found, where none were named. An edit of a stored marker
    counts if it is made by `set_`, `update_` or `rb[...] =`, not through a view.
    """

    _SHAPE: ClassVar[type[SliceShape]] = SliceShape
    num_slices = Parameter[int | None]("_library_draws.shape", "Slices of a batch; None where `slice_len` says so.")
    slice_len = Parameter[int | None]("_library_draws.shape", "Steps of a slice; None where `num_slices` says so.")
    strict_length = Parameter[bool]("_library_draws.shape", "Whether shorter trajectories are not drawn.")
    pad_output = Parameter[bool]("_library_draws.shape", "Whether they are filled up.")
    span = Parameter[tuple[bool | int, bool | int]]("_library_draws.shape", "How far slices pass their trajectory.")
    truncated_key = Parameter[Any]("_library_draws.shape", "The entry of the batch for the ends of slices.")
    init_key = Parameter[Any]("_library_draws.shape", "The entry of the batch for the first steps of slices.")
    end_keys: list[Any] | None
    cache_values: bool
    compile: bool | dict[str, Any]
    use_gpu: Any
    only_named_keys: bool
    fragmented: bool
    step_key: Any
    _library_draws: SliceDraws
    _end_key: Any
    _traj_key: Any

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        step_key: NestedKey | None = "step_count",
        fragmented: bool = False,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: Any = False,
        use_gpu: Any = False,
        only_named_keys: bool = False,
        replacement: bool = True,
    ) -> None:
        if replacement is not True:
            raise TypeError(f"replacement must be True or False, got {replacement!r}")
        if (num_slices is None) == (slice_len is None):
            raise TypeError(f"give one of num_slices and slice_len, got {num_slices} and {slice_len}")
        if end_key is not None and end_keys is not None:
            raise RuntimeError(f"give one of end_key and end_keys, got {end_key!r} and {end_keys!r}")
        if pad_output and strict_length:
            raise ValueError("pad_output=True needs strict_length=False, or there is nothing to pad")
        if not isinstance(compile, bool | dict):
            raise TypeError(f"compile must be a bool or a dict, got {type(compile).__name__}")
        num_slices = None if num_slices is None else whole("num_slices", num_slices)
        slice_len = None if slice_len is None else whole("slice_len", slice_len)
        self._end_key = checked_key("end_key", end_key)
        self._traj_key = checked_key("traj_key", traj_key)
        self.end_keys = None if end_keys is None else [checked_key("end_keys", key) for key in end_keys]
        truncated_key = checked_key("truncated_key", truncated_key)
        self.cache_values = bool(cache_values)
        self.compile = compile
        self.use_gpu = use_gpu
        self.only_named_keys = bool(only_named_keys)
        self.fragmented = bool(fragmented)
        self.step_key = checked_key("step_key", step_key)
        if fragmented and (step_key is None or ends is not None or trajectories is not None):
            raise ValueError("fragmented=True needs a step_key, and stored ids: neither ends nor trajectories")
        source = self._source_of(ends, trajectories)
        flags = bool(strict_length), bool(pad_output)
        shape = self._SHAPE(num_slices, slice_len, *flags, span, truncated_key, checked_key("init_key", init_key))
        self._library_draws = SliceDraws(source, shape)

    def _source_of(self, ends: Tensor | None, trajectories: Tensor | None) -> TrajectorySource:
        """The index of the trajectories that were given, or of those that stored entries mark."""
        if ends is None and trajectories is None:
            named_ends = self.end_keys if self._end_key is None else [self._end_key]
            keys = BoundaryKeys(TrajectoryKeys.chosen(self._traj_key, named_ends, self.only_named_keys))
            return FragmentedTrajectories(keys, self.step_key) if self.fragmented else StoredTrajectories(keys)
        if not self.cache_values:
            raise RuntimeError("ends and trajectories are for static data: they need cache_values=True")
        if any(key is not None for key in (self._end_key, self.end_keys, self._traj_key)):
            raise RuntimeError("ends and trajectories say where trajectories end: give neither end_key nor traj_key")
        return GivenTrajectories(ends, trajectories)

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        """RuntimeError for a list that is not read as a tensordict, TypeError for a writer that keeps no order."""
        if self._library_draws.boundary_keys is None:  # of trajectories that were given
            return
        if isinstance(storage, ListStorage) and not isinstance(storage, LazyStackStorage):
            raise RuntimeError(
                "Could not get a tensordict out of the storage, which is required to know where trajectories end: use a "
                f"LazyStackStorage or LazyTensorStorage, not a {type(storage).__name__}"
            )
        if not writer.keeps_order and not self.fragmented:
            raise TypeError(
                f"slices follow the order of writing, which a {type(writer).__name__} does not keep: write whole "
                "trajectories as items, and draw items"
            )

    @property
    def traj_key(self) -> Any:
        """The entry of trajectory ids: the named one, or the one that the last draw found; None for none."""
        keys = self._library_draws.boundary_keys
        if self._traj_key is not None or keys is None or not keys.stored_keys.ids:
            return self._traj_key
        return as_key(keys.stored_keys.ids[0])

    @property
    def end_key(self) -> Any:
        """The entry that marks ends: the named one, or the one that the last draw found; None for none."""
        keys = self._library_draws.boundary_keys
        if self._end_key is not None or self.end_keys is not None or keys is None or not keys.stored_keys.ends:
            return self._end_key
        return as_key(keys.stored_keys.ends[0])

    # ------------------------------------------------------------------ checkpoints: the index is built anew

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            if "slices" in entries:  # parameters, in checkpoints of earlier versions
                entries.any("slices")
            rest = super().with_state(entries, options)

            def put() -> None:
                self._library_draws.forget()
                rest()

            return put

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        names = ("num_slices", "slice_len", "end_key", "traj_key", "truncated_key", "strict_length")
        yield from ((name, getattr(self, name)) for name in names)

"""Tensordicts whose observations are frames, each stored once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Columns, Fields
from fbuf.memory_plan import Share
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.state import EXACT, LoadOptions, as_arrays, as_tensors
from interop.checkpoint.tensor_states import SavedRing, saved_ring
from interop.data.arguments import whole
from interop.data.keys import as_path, entries_below
from interop.data.layout import Layout, Path
from interop.data.trajectory_keys import TrajectoryKeys
from interop.host.rows import Rows
from interop.storages import planning
from interop.storages.frame_rows import FrameRows, Scheme
from interop.storages.tensors import TensorStorage

_MOST_FRAMES = 2**31  # their numbers are int32


class LazyFrameStorage(TensorStorage):
    """Like `LazyTensorStorage` for items of a step and its "next", but stores only the newest frame of each observation.

    Reads take the older frames of a stack from the previous items of the trajectory, and the next observation from the
    next item; only the last frame of each trajectory is stored besides. For stacks of 4 that is an eighth of the memory,
    and the last frames. Reads are exact, and copies: `rb[int or slice]` gives views of the other entries only.

    Rows must be written one after the other, as a round-robin writer does. `rb[3] = item` is a RuntimeError; `set_` and
    `update_` edit entries other than observations, ends and ids.

    Args:
        max_size: capacity in items. With `ndim` > 1 it is rounded up to whole rows at the first write.
        obs_key: the entry of the observation, or a list of some; ("next", *key) is the next observation.
        stack: frames in an observation.
        stack_dim: the dim of an observation along which its frames lie side by side, the newest last.
        padding: what precedes the first frame of a trajectory: "first" for that frame again, "zero" for zeros.
        end_keys: bool entries, one value an item, that are true in the last item of a trajectory.
        traj_key: an integer entry; a trajectory also begins where it differs from the previous item.
        only_named_keys: only `end_keys` and `traj_key` mark trajectories. By default so do, where they are stored with one
            value an item, the ends ("next", "done"), ("next", "terminated") and ("next", "truncated"), the ids
            ("collector", "traj_ids"), "traj_ids" and "episode", "is_init" and ("collector", "mask"). KeyError where nothing
            does. Rows of interleaved ids are a ValueError for stacks of several frames: use lanes (`ndim`).
        finals: room for last frames of trajectories, beyond which a write is a RuntimeError; by default as many as
            items. They take memory as they are used.
        check: refuse, by a ValueError, observations that do not follow from the previous items and would be read
            otherwise. Without the check such data is stored, and read as if it followed.
        ndim: how many leading dims of the stored layout count as items. Trajectories go along the first one.
        compilable: keep the length local to this process.
    """

    of_frames = True
    _allocates = True

    def __init__(
        self,
        max_size: int,
        *,
        obs_key: Any = "pixels",
        stack: int = 4,
        stack_dim: int = -3,
        padding: Literal["first", "zero"] = "first",
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        finals: int | None = None,
        check: bool = True,
        ndim: int = 1,
        compilable: bool = False,
        only_named_keys: bool = False,
    ) -> None:
        if padding not in ("first", "zero"):
            raise ValueError(f"padding must be 'first' or 'zero', got {padding!r}")
        super().__init__(None, max_size, ndim=ndim, compilable=compilable)
        self._obs_keys = [_path(key) for key in (obs_key if isinstance(obs_key, list) else [obs_key])]
        if not self._obs_keys or len(set(self._obs_keys)) < len(self._obs_keys):
            raise ValueError(f"obs_key must name observations, each once, got {obs_key!r}")
        self._stack, self._stack_dim = whole("stack", stack), whole("stack_dim", stack_dim, least=-(2**31))
        self._zeros, self._checks = padding == "zero", bool(check)
        self._end_keys = None if end_keys is None else [_path(key) for key in end_keys]
        self._traj_key = None if traj_key is None else _path(traj_key)
        self._only_named_keys = bool(only_named_keys)
        self._finals = None if finals is None else whole("finals", finals)
        if self._finals is not None and self._finals >= _MOST_FRAMES - 1:
            raise ValueError(f"finals must be at most {_MOST_FRAMES - 2}, got {finals}")

    # ------------------------------------------------------------------ which leaves are frames

    def _scheme(self, layout: Layout, lead: tuple[int, ...]) -> Scheme:
        if layout.varied:
            raise TypeError(
                f"a LazyFrameStorage holds tensors of equal shapes, {list(layout.varied)} are text or ragged rows: use a "
                "LazyTensorStorage"
            )
        named = TrajectoryKeys.chosen(self._traj_key, self._end_keys, self._only_named_keys)
        marks = [
            [place for path in group if (place := _marker(layout, path, path in named.named)) is not None]
            for group in named.groups()
        ]
        if not any(marks[:3]):
            raise KeyError(
                f"none of {[*named.ends, *named.ids, *named.firsts]} is in the data to mark ends of trajectories: give "
                "end_keys or traj_key"
            )
        ids, ends, firsts, masks = map(tuple, marks)
        items = torch.Size(lead).numel()
        scheme = Scheme(
            leaves=layout.leaves,
            pairs=tuple(self._pair(layout, key) for key in self._obs_keys),
            ends=ends,
            ids=ids,
            firsts=firsts,
            masks=masks,
            stack=self._stack,
            dim=self._stack_dim,
            zeros=self._zeros,
            check=self._checks,
            capacity=lead[0],
            lanes=tuple(lead[1:]),
            finals=min(items, self._finals or items),
        )
        if scheme.frames >= _MOST_FRAMES:
            raise ValueError(f"a LazyFrameStorage has less than {_MOST_FRAMES} frames, {scheme.frames} are needed")
        return scheme

    def _pair(self, layout: Layout, key: Path) -> tuple[int, int]:
        obs, following = _leaf(layout, key), _leaf(layout, ("next", *key))
        one, other = layout.leaves[obs], layout.leaves[following]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise RuntimeError(
                f"{one.name} is {one.dtype} of shape {list(one.shape)}, {other.name} {other.dtype} of {list(other.shape)}: "
                "an observation and the next one must be alike; nothing was written"
            )
        dim, dims = self._stack_dim, len(one.shape)
        if self._stack > 1 and (not -dims <= dim < dims or one.shape[dim] % self._stack or not one.shape[dim]):
            raise RuntimeError(
                f"{one.name} has shape {list(one.shape)}: stack_dim={dim} of it must hold the {self._stack} frames of "
                "a stack; nothing was written"
            )
        return obs, following

    # ------------------------------------------------------------------ memory and edits

    def _planned(self, layout: Layout, lead: tuple[int, ...], found: torch.device | None = None) -> list[Share]:
        scheme = self._scheme(layout, lead)
        shares: list[Share] = []
        for part, name, shape, dtype in scheme.arrays():
            if part == "frames":  # the last frames of trajectories take memory as they are stored
                last = (scheme.finals, *shape[1:])
                shares.append(planning.array(part, f"{name}, last ones", last, dtype, "cpu", counts="at most"))
                shape = (scheme.first_final, *shape[1:])
            shares.append(planning.array(part, name, shape, dtype, "cpu"))
        return shares

    def _allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        planning.refuse(self._planned(layout, lead))
        return FrameRows(self._scheme(layout, lead))

    def _rows_of(self, tensors: Sequence[Tensor], in_jax: bool) -> Rows:
        assert self.layout is not None
        return FrameRows(self._scheme(self.layout, (self.row_count, *self.lanes)), tensors)

    def _frames(self) -> FrameRows:
        rows = self.own_rows()
        assert isinstance(rows, FrameRows)
        return rows

    def refuse_edit(self, paths: Iterable[Path]) -> None:
        if self.rows is None:
            return
        scheme = self._frames().scheme
        fixed = {scheme.leaves[place].path: scheme.leaves[place].name for place in scheme.fixed}
        hit = [fixed[path] for path in paths if path in fixed]
        if hit:
            raise RuntimeError(
                f"{', '.join(hit)} cannot be edited: observations, ends and ids determine the frames of items, and stay "
                "as they were written; nothing was written"
            )

    def editable(self, given: Any) -> Any:
        rows, layout = self._frames(), self.layout
        assert layout is not None and self.shape is not None
        if not layout.is_tensordict:
            return super().editable(given)
        self.refuse_edit(_path(path) for path, _ in entries_below(given))
        views = TensorDict({}, self.shape)
        for place in rows.scheme.rest:
            column = rows.column(place)
            assert column is not None
            views.set(layout.leaves[place].path, column[: self.filled_rows])
        return views

    def before_write(self) -> dict[str, Any]:
        return {} if self.rows is None else {"frames": self._frames().before_write()}

    def put_back(self, before: dict[str, Any]) -> None:
        if before:
            self._frames().put_back(before["frames"])
        elif self.rows is not None:
            self._frames().clear()

    def _empty(self) -> None:
        super()._empty()
        if self.rows is not None:
            self._frames().clear()

    # ------------------------------------------------------------------ checkpoints

    def saved(self) -> dict[str, Any]:
        if self.rows is None or self.layout is None:
            return {"layout": None}
        rows = self._frames()
        capacity = {"rows": rows.scheme.capacity, "frames": rows.scheme.first_final}
        parts = {name: Columns(arrays, capacity.get(name)) for name, arrays in rows.used().items()}
        described = {"layout": saved_layout(self.layout), "ring": saved_ring(self), "scheme": rows.scheme.described()}
        return {**described, **parts}

    def restoring(self, saved: Any, options: LoadOptions = EXACT) -> Callable[[], None]:
        where = f"the checkpoint of a {type(self).__name__}"
        if not isinstance(saved, dict) or not (saved.get("layout", saved) is None or "scheme" in saved):
            raise CheckpointMismatch(f"{where}: it is the state of another storage, it has no 'scheme' of frames")
        fields = Fields(saved, where)
        if fields.any("layout") is None:
            return self.clear
        layout, ring = layout_of(fields.any("layout"), where), SavedRing.parsed(fields.fields("ring"))
        fixed = self.fixed_layout
        if self.ndim != ring.ndim or (fixed is not None and fixed.leaves != layout.leaves):
            raise CheckpointMismatch(f"{where} does not fit: the storage has other items, or items of other dims")
        rows = self._allocate(layout, (ring.capacity, *ring.lanes))
        assert isinstance(rows, FrameRows)
        ours, theirs = rows.scheme.described(), fields.any("scheme")
        other = [name for name in ours if not isinstance(theirs, dict) or theirs.get(name) != ours[name]]
        other += [] if self.rows_for(ring.lanes) == ring.capacity else ["max_size"]
        if other:
            raise CheckpointMismatch(f"{where} does not fit: it was built with another {', '.join(other)}")
        for name in ("counts", *rows.used()):  # the counts say how much the others hold
            _read(fields, name, rows, where)
        if rows.stored != ring.filled:
            raise CheckpointCorrupt(f"{where}: its counts are not those of {ring.filled} rows")

        def put() -> None:
            self.clear()
            if fixed is None:
                self.adopt(layout, rows)
            else:  # other processes may have the memory
                for name, targets in self._frames().used(rows.counts).items():
                    for target, found in zip(targets, rows.used()[name], strict=True):
                        target[...] = found
            self.ring.size = ring.filled
            self.ring.restored(ring.written, ring.end % ring.capacity)

        return put

    def state_dict(self) -> dict[str, Any]:
        with self.lock.held():
            saved = {
                name: value.arrays if isinstance(value, Columns) else value for name, value in self.saved().items()
            }
            return {"_storage": as_tensors(saved), "initialized": self.initialized, "_len": len(self)}

    def restoring_dict(self, given: Any) -> Callable[[], None]:
        fields = Fields(given, f"the state_dict of a {type(self).__name__}")
        return self.restoring(as_arrays(fields.any("_storage"), self))

    def __repr__(self) -> str:
        names = ", ".join(repr(key[0] if len(key) == 1 else key) for key in self._obs_keys)
        return (
            f"{type(self).__name__}(obs_key=[{names}], stack={self._stack}, shape={self.shape}, len={len(self)}, "
            f"max_size={self.max_size})"
        )


def _read(fields: Fields, name: str, rows: FrameRows, where: str) -> None:
    """Read a part of saved frames into its place. CheckpointCorrupt where it does not fit there."""
    found, targets = fields.any(name), rows.used()[name]
    try:
        found = Columns(found) if isinstance(found, list) else found
        kinds = [(dtype, (found.rows, *shape)) for dtype, shape in zip(found.dtypes, found.shapes, strict=True)]
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{where}, {name}: the files do not hold arrays") from error
    if kinds != [(each.dtype, each.shape) for each in targets]:
        raise CheckpointCorrupt(f"{where}, {name}: the files do not hold what they should")
    found.read_into(targets)


def _path(key: Any) -> Path:
    path = as_path(key)
    if not (path and all(type(step) in (str, int) for step in path)):
        raise TypeError(f"a key is a name or a tuple of names, got {key!r}")
    return path


def _leaf(layout: Layout, path: Path) -> int:
    found = layout.places.get(path)
    if found is None:
        stored = ", ".join(leaf.name for leaf in layout.leaves)
        raise KeyError(f"{path[0] if len(path) == 1 else path!r} is not a tensor of the data, which has {stored}")
    return found


def _marker(layout: Layout, path: Path, is_named: bool) -> int | None:
    """The leaf of an entry that marks trajectories; None for one that cannot, unless it is named."""
    if not is_named:
        place = layout.places.get(path)
        leaf = None if place is None else layout.leaves[place]
        return place if leaf and not leaf.dtype.is_complex and torch.Size(leaf.shape).numel() == 1 else None
    place = _leaf(layout, path)
    leaf = layout.leaves[place]
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        raise TypeError(f"{leaf.name} must be bool or integers, got {leaf.dtype}; nothing was written")
    if torch.Size(leaf.shape).numel() != 1:
        raise RuntimeError(f"{leaf.name} must be one value an item, got shape {list(leaf.shape)}; nothing was written")
    return place

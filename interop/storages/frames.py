"""Tensordicts whose observations are frames, each stored once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Columns, Fields, StoredColumns
from fbuf.memory_plan import Share
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.state import EXACT, LoadOptions, as_arrays, as_tensors
from interop.checkpoint.tensor_states import SavedRing, saved_ring
from interop.data.keys import as_path, entries_below
from interop.data.layout import Layout
from interop.data.numbers import whole
from interop.host.rows import Rows
from interop.shared.processes import starting_a_worker
from interop.storages import planning
from interop.storages.frame_rows import FrameRows, Scheme
from interop.storages.storage import Storage
from interop.storages.tensors import TensorStorage

_ENDS = (("next", "done"), ("next", "terminated"), ("next", "truncated"))
_MOST_FRAMES = 2**31  # their numbers are int32
Path = tuple[Any, ...]


class LazyFrameStorage(TensorStorage):
    """Like `LazyTensorStorage` for items of a step and its "next": of each observation only its newest frame is stored.

    The older frames of a stack, and next observations, are those of the items before and behind in the same trajectory;
    beside them the last frame of each trajectory is kept. For stacks of 4 that is an eighth of the memory, and what the
    ends of trajectories take. Reads are exact, and copies: views, of `rb[int or slice]`, are only the other entries.

    Rows are to be written one after the other, as a round-robin writer does. A write elsewhere, like `rb[3] = item`, is
    a RuntimeError unless it leaves observations, ends and ids as they are.

    Args:
        max_size: capacity in items. With `ndim` > 1 it is rounded up to whole rows at the first write.
        obs_key: the entry of the observation, or a list of some; ("next", *key) is the next one.
        stack: frames in an observation.
        stack_dim: the dim of an observation along which its frames lie side by side, the newest last.
        padding: what stands before the first frame of a trajectory: "first" for that frame again, "zero" for zeros.
        end_keys: bool entries, one value an item, that are true in the last item of a trajectory; by default
            ("next", "done"), ("next", "terminated") and ("next", "truncated"), of which one has to be stored.
        traj_key: an integer entry; an item with another value than the one before begins a trajectory too.
        finals: how many last frames there is room for, beyond which a write is a RuntimeError; by default as many as
            items. They take memory as they are used.
        check: refuse data whose observations do not follow from the items before, and would be read otherwise; a
            ValueError. Without it such data is stored, and read as if it did.
        ndim: how many leading dims of the stored layout count as items. Trajectories go along the first one.
        device: "cpu"; anything else is a ValueError.
        compilable: keep the length local to this process.
    """

    of_frames = True

    def __init__(
        self,
        max_size: int,
        *,
        obs_key: Any = "pixels",
        stack: int = 4,
        stack_dim: int = -3,
        padding: Literal["first", "zero"] = "first",
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        finals: int | None = None,
        check: bool = True,
        ndim: int = 1,
        device: torch.device | str = "cpu",
        compilable: bool = False,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(f"frames are stored on the CPU, got device={device}: cast samples to it with a transform")
        if padding not in ("first", "zero"):
            raise ValueError(f"padding must be 'first' or 'zero', got {padding!r}")
        super().__init__(None, max_size, device="cpu", ndim=ndim, compilable=compilable)
        self._obs_keys = [_path(key) for key in (obs_key if isinstance(obs_key, list) else [obs_key])]
        if not self._obs_keys or len(set(self._obs_keys)) < len(self._obs_keys):
            raise ValueError(f"obs_key must name observations, each once, got {obs_key!r}")
        self._stack, self._stack_dim = whole("stack", stack), whole("stack_dim", stack_dim, least=-(2**31))
        self._zeros, self._checks = padding == "zero", bool(check)
        self._end_keys = None if end_keys is None else [_path(key) for key in end_keys]
        self._traj_key = None if traj_key is None else _path(traj_key)
        self._finals = None if finals is None else whole("finals", finals)
        if self._finals is not None and self._finals >= _MOST_FRAMES - 1:
            raise ValueError(f"finals must be at most {_MOST_FRAMES - 2}, got {finals}")

    def _planned(self, layout: Layout, lead: tuple[int, ...], found: torch.device | None = None) -> list[Share]:
        scheme = self._scheme(layout, lead)
        shares: list[Share] = []
        for place, (name, shape, dtype) in enumerate(scheme.arrays()):
            table = 0 <= place - len(scheme.rest) - 1 < len(scheme.pairs)
            part = "items" if place < len(scheme.rest) else "frames"
            kept = (shape[0] - scheme.finals, *shape[1:]) if table else shape
            shares.append(planning.array(part, name, kept, dtype, "cpu"))
            if table:  # the frames with which trajectories end take memory as they are stored
                last = (scheme.finals, *shape[1:])
                shares.append(planning.array(part, f"{name}, last ones", last, dtype, "cpu", counts="at most"))
        return shares

    def may_renew(self) -> bool:
        return self.lock.processes is None

    def _allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        planning.refuse(self._planned(layout, lead))
        return FrameRows(self._scheme(layout, lead))

    def _scheme(self, layout: Layout, lead: tuple[int, ...]) -> Scheme:
        items = torch.Size(lead).numel()
        scheme = Scheme(
            leaves=layout.leaves,
            pairs=tuple(self._pair(layout, key) for key in self._obs_keys),
            ends=self._ends(layout),
            ids=None if self._traj_key is None else _signal(layout, self._traj_key),
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
        if self._stack > 1:
            dim = self._stack_dim
            if not -len(one.shape) <= dim < len(one.shape) or one.shape[dim] % self._stack or not one.shape[dim]:
                raise RuntimeError(
                    f"{one.name} has shape {list(one.shape)}: stack_dim={dim} of it must hold the {self._stack} frames of "
                    "a stack; nothing was written"
                )
        return obs, following

    def _ends(self, layout: Layout) -> tuple[int, ...]:
        paths = [leaf.path for leaf in layout.leaves]
        named = [key for key in _ENDS if key in paths] if self._end_keys is None else self._end_keys
        if not named and self._traj_key is None:
            raise KeyError(
                f"none of {list(_ENDS)} is in the data, which say where trajectories end: give end_keys or traj_key"
            )
        return tuple(_signal(layout, key) for key in named)

    def _layout_of(self, data: Any, dims: int) -> Layout:
        layout = super()._layout_of(data, dims)
        if layout.varied:
            raise TypeError(
                f"a LazyFrameStorage holds tensors alike in shape, {list(layout.varied)} are text or ragged rows: use a "
                "LazyTensorStorage"
            )
        return layout

    def refuse_edit(self, paths: Iterable[Path]) -> None:
        rows = self.rows
        if isinstance(rows, FrameRows):
            fixed = {rows.scheme.leaves[place].path: rows.scheme.leaves[place].name for place in rows.scheme.fixed}
            hit = [fixed[path] for path in paths if path in fixed]
            if hit:
                raise RuntimeError(
                    f"{', '.join(hit)} cannot be edited: observations, ends and ids say which frames items have, and stay "
                    "as they were written; nothing was written"
                )

    def editable(self, given: Any) -> Any:
        rows, layout = self.own_rows(), self.layout
        assert isinstance(rows, FrameRows) and layout is not None and self.shape is not None
        if not layout.is_tensordict:
            return super().editable(given)
        self.refuse_edit(_path(path) for path, _ in entries_below(given))
        views = TensorDict({}, self.shape)
        for place in rows.scheme.rest:
            column = rows.column(place)
            assert column is not None
            views.set(layout.leaves[place].path, column[: self.filled_rows])
        return views

    def _empty(self) -> None:
        super()._empty()
        if isinstance(self.rows, FrameRows):
            self.rows.clear()

    # ------------------------------------------------------------------ checkpoints

    def saved(self) -> dict[str, Any]:
        rows = self.rows
        if not isinstance(rows, FrameRows):
            return {"layout": None}
        parts: dict[str, Any] = rows.used()
        parts.update(
            rows=Columns(parts["rows"], rows.scheme.capacity), frames=Columns(parts["frames"], rows.scheme.frames)
        )
        assert self.layout is not None
        described = {"layout": saved_layout(self.layout), "ring": saved_ring(self), "scheme": rows.scheme.described()}
        return {**described, **parts}

    def restoring(self, saved: Any, options: LoadOptions = EXACT) -> Callable[[], None]:
        where = f"the checkpoint of a {type(self).__name__}"
        fields = Fields(saved, where)
        if fields.any("layout") is None:
            return self.clear
        layout, ring = layout_of(fields.any("layout"), where), SavedRing.parsed(fields.fields("ring"))
        fixed = self.fixed_layout
        if self.ndim != ring.ndim or (fixed is not None and fixed.leaves != layout.leaves):
            raise CheckpointMismatch(
                f"{where} does not fit: its items, or their dims, are others than those of the storage"
            )
        rows = self._allocate(layout, (ring.capacity, *ring.lanes))
        assert isinstance(rows, FrameRows)
        ours, theirs = rows.scheme.described(), fields.any("scheme")
        other = [name for name in ours if not isinstance(theirs, dict) or theirs.get(name) != ours[name]]
        other += [] if -(-self._max_size // max(rows.scheme.per_row, 1)) == ring.capacity else ["max_size"]
        if other:
            raise CheckpointMismatch(f"{where} does not fit: it was built with another {', '.join(other)}")
        (counts,) = (np.asarray(each) for each in fields.items("counts", 1))
        if counts.dtype != np.int64 or counts.shape != (4,) or not rows.fits(counts, ring.filled):
            raise CheckpointCorrupt(f"{where}: its counts are not those of {ring.filled} rows")
        for name, targets in rows.used(counts).items():
            _read(fields, name, targets, where)
        if not rows.is_sound():
            raise CheckpointCorrupt(f"{where}: items name frames that there are not")

        def put() -> None:
            self.clear()
            if fixed is None:
                self.adopt(layout, rows)
            else:  # other processes may have the memory
                assert isinstance(self.rows, FrameRows)
                for name, targets in self.rows.used(counts).items():
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
        return self.restoring(
            as_arrays(Fields(given, f"the state_dict of a {type(self).__name__}").any("_storage"), self)
        )

    # ------------------------------------------------------------------ copies and other processes

    def __getstate__(self) -> dict[str, Any]:
        rows = self.rows
        if not isinstance(rows, FrameRows):
            return super().__getstate__()
        state = Storage.__getstate__(self)
        if starting_a_worker():
            with self.lock.held():
                rows.share()
            memory = rows.memory
        else:  # a pickle or copy is a storage of its own
            memory = [tensor.clone() for tensor in rows.memory]
        return {**state, "rows": None, "_tensors": None, "_scheme": rows.scheme, "_memory": memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        scheme, memory = state.pop("_scheme", None), state.pop("_memory", None)
        super().__setstate__(state)
        if scheme is not None:
            self.rows = FrameRows(scheme, memory)

    def __repr__(self) -> str:
        names = ", ".join(repr(key[0] if len(key) == 1 else key) for key in self._obs_keys)
        return (
            f"{type(self).__name__}(obs_key=[{names}], stack={self._stack}, shape={self.shape}, len={len(self)}, "
            f"max_size={self.max_size})"
        )


def _read(fields: Fields, name: str, targets: list[np.ndarray], where: str) -> None:
    found = fields.any(name)
    stored = isinstance(found, StoredColumns)
    if stored:
        kinds = [(dtype, (found.rows, *shape)) for dtype, shape in zip(found.dtypes, found.shapes, strict=True)]
    else:
        found = list(map(np.asarray, fields.items(name)))
        kinds = [(each.dtype, each.shape) for each in found]
    if kinds != [(each.dtype, each.shape) for each in targets]:
        raise CheckpointCorrupt(f"{where}, {name}: the files do not hold what they should")
    if stored:
        found.read_into(targets)
    else:
        for target, each in zip(targets, found, strict=True):
            target[...] = each


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


def _signal(layout: Layout, path: Path) -> int:
    """The leaf of an end or an id."""
    place = _leaf(layout, path)
    leaf = layout.leaves[place]
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        raise TypeError(f"{leaf.name} must be bool or integers, got {leaf.dtype}; nothing was written")
    if torch.Size(leaf.shape).numel() != 1:
        raise RuntimeError(f"{leaf.name} must be one value an item, got shape {list(leaf.shape)}; nothing was written")
    return place

"""Tensordicts whose observations are frames, each stored once."""

from collections.abc import Sequence
from typing import Any, Literal

from tensordict.utils import NestedKey

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Columns, Fields
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.state import EXACT, Apply, LoadOptions, as_arrays, as_tensors
from interop.data.arguments import whole
from interop.data.keys import as_path
from interop.data.layout import KeyPath
from interop.engine.places.frame_rows import FrameRows
from interop.engine.places.frames import MOST_FRAMES, FrameKeys, Frames
from interop.engine.saved_rows import SavedRing, saved_ring
from interop.storages.tensors import TensorStorage


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
        observations = tuple(_path(key) for key in (obs_key if isinstance(obs_key, list) else [obs_key]))
        if not observations or len(set(observations)) < len(observations):
            raise ValueError(f"obs_key must name observations, each once, got {obs_key!r}")
        finals = None if finals is None else whole("finals", finals)
        if finals is not None and finals >= MOST_FRAMES - 1:
            raise ValueError(f"finals must be at most {MOST_FRAMES - 2}, got {finals}")
        self.frame_keys = FrameKeys(
            observations=observations,
            stack=whole("stack", stack),
            stack_dim=whole("stack_dim", stack_dim, least=-(2**31)),
            pads_with_zeros=padding == "zero",
            end_keys=None if end_keys is None else tuple(_path(key) for key in end_keys),
            traj_key=None if traj_key is None else _path(traj_key),
            only_named_keys=bool(only_named_keys),
            finals=finals,
            check=bool(check),
        )
        self._begin(Frames(self.frame_keys), max_size, whole("ndim", ndim), compilable)

    def _frames(self) -> FrameRows:
        rows = self.table.own_rows()
        assert isinstance(rows, FrameRows)
        return rows

    def before_write(self) -> dict[str, Any]:
        return {} if self.table.rows is None else {"frames": self._frames().before_write()}

    def put_back(self, before: dict[str, Any]) -> None:
        if before:
            self._frames().put_back(before["frames"])
        elif self.table.rows is not None:
            self._frames().clear()

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        layout = self.table.layout
        if self.table.rows is None or layout is None:
            return {"layout": None}
        rows = self._frames()
        capacity = {"rows": rows.scheme.capacity, "frames": rows.scheme.first_final}
        parts = {name: Columns(arrays, capacity.get(name)) for name, arrays in rows.used().items()}
        described = {"layout": saved_layout(layout), "ring": saved_ring(self.table), "scheme": rows.scheme.described()}
        return {**described, **parts}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        where = f"the checkpoint of a {type(self).__name__}"
        saved = tree
        if isinstance(tree, dict) and "_storage" in tree:  # of a `state_dict`
            saved = as_arrays(tree["_storage"], self)
        if not isinstance(saved, dict) or not (saved.get("layout", saved) is None or "scheme" in saved):
            raise CheckpointMismatch(f"{where}: it is the state of another storage, it has no 'scheme' of frames")
        fields = Fields(saved, where)
        if fields.any("layout") is None:
            return self._empty
        layout = layout_of(fields.any("layout"), where)
        ring = SavedRing.parsed(fields.fields("ring"))
        fixed = self.table.fixed_layout
        if self.ndim != ring.ndim or (fixed is not None and fixed.leaves != layout.leaves):
            raise CheckpointMismatch(f"{where} does not fit: the storage has other items, or items of other dims")
        if self.table.rows_for(ring.lanes) != ring.capacity:  # before memory for so many rows is planned
            raise CheckpointMismatch(f"{where} does not fit: it was built with another max_size")
        rows = self.table.place.allocate(layout, (ring.capacity, *ring.lanes))
        assert isinstance(rows, FrameRows)
        ours = rows.scheme.described()
        theirs = fields.any("scheme")
        other = [name for name in ours if not isinstance(theirs, dict) or theirs.get(name) != ours[name]]
        if other:
            raise CheckpointMismatch(f"{where} does not fit: it was built with another {', '.join(other)}")
        for name in ("counts", *rows.used()):  # the counts say how much the others hold
            _read(fields, name, rows, where)
        if rows.stored != ring.filled:
            raise CheckpointCorrupt(f"{where}: its counts are not those of {ring.filled} rows")

        def put() -> None:
            self._empty()
            if fixed is None:
                self.table.adopt(layout, rows)
            else:  # other processes may have the memory
                for name, targets in self._frames().used(rows.counts).items():
                    for target, found in zip(targets, rows.used()[name], strict=True):
                        target[...] = found
            ring.restore(self.ring)

        return put

    def state_dict(self) -> dict[str, Any]:
        with self._unchanging():
            tree = self.state()
            known = {"layout", "ring", "scheme", *(() if self.table.rows is None else self._frames().used())}
            added = {name: value for name, value in tree.items() if name not in known}  # by a class of the user's
            parts = {name: value.arrays if isinstance(value, Columns) else value for name, value in tree.items()}
            state = {"_storage": as_tensors(parts), "initialized": self.initialized, "_len": len(self)}
            return {**state, **as_tensors(added)}

    def __repr__(self) -> str:
        names = ", ".join(repr(key[0] if len(key) == 1 else key) for key in self.frame_keys.observations)
        return (
            f"{type(self).__name__}(obs_key=[{names}], stack={self.frame_keys.stack}, shape={self.shape}, len={len(self)}, "
            f"max_size={self.max_size})"
        )


def _read(fields: Fields, name: str, rows: FrameRows, where: str) -> None:
    """Read a part of saved frames into its place. CheckpointCorrupt where it does not fit there."""
    found = fields.any(name)
    targets = rows.used()[name]
    try:
        found = Columns(found) if isinstance(found, list) else found
        kinds = [(dtype, (found.rows, *shape)) for dtype, shape in zip(found.dtypes, found.shapes, strict=True)]
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{where}, {name}: the files do not hold arrays") from error
    if kinds != [(each.dtype, each.shape) for each in targets]:
        raise CheckpointCorrupt(f"{where}, {name}: the files do not hold what they should")
    found.read_into(targets)


def _path(key: Any) -> KeyPath:
    path = as_path(key)
    if not (path and all(type(step) in (str, int) for step in path)):
        raise TypeError(f"a key is a name or a tuple of names, got {key!r}")
    return path

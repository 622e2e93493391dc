"""Checkpointers that save each observation of TED data once: flat, and by trajectory."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields, Source, Writing
from interop.checkpoint.checkpointers import TensorStorageCheckpointer
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.state import LoadOptions
from interop.checkpoint.tensor_states import SavedRing, as_array, as_tensor, loading, restoring_data, saved_ring
from interop.data.layout import Layout
from interop.storages import LazyFrameStorage, Storage, TensorStorage
from interop.ted import Flat2TED, Nested2TED, TED2Flat, TED2Nested
from interop.ted.entries import Entries, Names, Path, is_below
from interop.ted.flattening import Flattened, Rebuilt
from interop.ted.ring import Ring as Rows


class FlatStorageCheckpointer(TensorStorageCheckpointer):
    """TED data of a tensor storage flat, as `TED2Flat` makes it: up to half the size, and `rb[:]` comes back bit for bit.

    ValueError at saving, naming the key and the first row, for data that would not come back. The keys are saved too: the
    arguments of the checkpointer that loads do not matter. With save hooks of the user's, which get the flat data, their
    result is saved instead.

    Args:
        done_keys: done flags below "next", of which "done" ends episodes, and of the root, where all are False.
        reward_keys: rewards below "next".
        verify: refuse data that would not come back; otherwise the difference is lost.
    """

    _hooks: tuple[type[TED2Flat], type[Flat2TED]] = TED2Flat, Flat2TED

    def __init__(self, done_keys: Any = None, reward_keys: Any = None, *, verify: bool = True) -> None:
        super().__init__()
        self._set_hooks(given(done_keys=done_keys, reward_keys=reward_keys), verify=verify)

    def _set_hooks(self, names: dict[str, Any], **options: Any) -> None:
        """Make the hooks of its own; those of the user come behind."""
        save, load = self._hooks
        self._flattening = save(**names, **options)
        done = names.get("done_key", ("done",))
        self._save_hooks = [self._flattening]
        self._load_hooks = [load(**names | {"done_key": done[1:] if is_below(done) else done})]

    def _save(self, storage: Storage, out: Writing) -> dict[str, Any]:
        kept = self._saveable(storage)
        if len(self._save_hooks) > 1:
            return super()._save(kept, out)
        assert kept.item_layout is not None
        tree = {"layout": saved_layout(kept.item_layout), "ring": saved_ring(kept)}
        if not len(kept):
            return tree
        return {**tree, **self._written(self._flattened(kept), kept, out), "keys": self._keys()}

    def _saveable(self, storage: Storage) -> TensorStorage:
        """The storage. RuntimeError or ValueError for one that cannot be saved."""
        if not isinstance(storage, TensorStorage):
            raise ValueError(f"a {type(self).__name__} saves tensordicts in tensors, got a {type(storage).__name__}")
        if isinstance(storage, LazyFrameStorage):
            raise ValueError("a LazyFrameStorage has each frame once already: save it by a TensorStorageCheckpointer")
        if storage.item_layout is None:
            raise RuntimeError("Cannot save a non-initialized storage.")
        if not storage.item_layout.is_tensordict or storage.packs:
            raise ValueError(
                f"a {type(self).__name__} saves tensordicts, without text and ragged rows; use a "
                "TensorStorageCheckpointer for other items"
            )
        return storage

    def _flattened(self, storage: TensorStorage) -> Flattened:
        self._tell(self._flattening, storage)
        return self._flattening.flattened(storage[:])[0]

    def _keys(self) -> dict[str, Any]:
        done, names = self._flattening.done_key, self._flattening.names
        return {
            "done": [list(path) for path in names.done],
            "reward": [list(path) for path in names.reward],
            "episodes": list(done[1:] if is_below(done) else done),
        }

    def _written(self, flat: Flattened, storage: TensorStorage, out: Writing) -> dict[str, Any]:
        """The saved tree of the arrays."""
        return {"arrays": [[list(path), as_array(flat.array(path))] for path in flat.specs()]}

    def _load(self, storage: Storage, saved: Any, source: Source, options: LoadOptions) -> Callable[[], None]:
        where = f"{source.path}, storage"
        fields, kept = Fields(saved, where), loadable(storage, where)
        if "hooked" in fields:
            return super()._load(kept, saved, source, options)
        layout, ring = layout_of(fields.any("layout"), where), SavedRing.parsed(fields.fields("ring"))
        if not ring.filled:
            return loading(kept, layout, ring, lambda arrays: None, options, where)
        keys = fields.fields("keys")
        with self._arrays(fields, keys, ring, source) as arrays:
            with unfit(where):
                content = Content(layout, ring, keys, arrays)
                self._check(content.rebuilt, fields)
            return self._restoring_content(kept, content, options, where)

    def _restoring_content(
        self, storage: TensorStorage, content: "Content", options: LoadOptions, where: str
    ) -> Callable[[], None]:
        """Read the rows; the returned function stores them."""
        if len(self._load_hooks) == 1:
            return loading(storage, content.layout, content.ring, content.fill, options, where)
        made = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in content.expected().values()]
        content.fill([as_array(each) for each in made])
        data = content.layout.build(made, (content.ring.filled, *content.ring.lanes))
        for hook in self._load_hooks[1:]:
            data = hook(data, out=None)
        return restoring_data(storage, data, vars(content.ring), options)

    def _arrays(
        self, fields: Fields, keys: Fields, ring: SavedRing, source: Source
    ) -> contextlib.AbstractContextManager[Mapping[Path, Any]]:
        """A context with the saved arrays by path: `np.asarray` reads one."""
        return contextlib.nullcontext(dict(pairs(fields, "arrays")))

    def _check(self, rebuilt: Rebuilt, fields: Fields) -> None:
        """ValueError where other entries of the saved tree do not fit."""


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """`FlatStorageCheckpointer`, with the length of each trajectory: flat arrays cut by it are nested tensors.

    Save hooks of the user's get nested tensors, as `TED2Nested` makes them.
    """

    _hooks = TED2Nested, Nested2TED

    def _written(self, flat: Flattened, storage: TensorStorage, out: Writing) -> dict[str, Any]:
        lengths, ended = flat.order.trajectories()
        return {**super()._written(flat, storage, out), "lengths": lengths.numpy(), "ended": ended.numpy()}

    def _check(self, rebuilt: Rebuilt, fields: Fields) -> None:
        for name, expected in zip(("lengths", "ended"), rebuilt.order.trajectories(), strict=True):
            if not np.array_equal(np.asarray(fields.array(name, expected.numpy().dtype)), expected.numpy()):
                raise ValueError(f"{name!r} are not those of the trajectories")


class Content:
    """The rows of a storage in saved flat arrays.

    Args:
        layout: that of the items; None to derive it from the arrays.
        ring: how the rows fill the storage.
        keys: the saved keys.
        arrays: with a shape and a dtype each; `np.asarray` reads one.

    Raises ValueError or CheckpointCorrupt where these do not fit together.
    """

    def __init__(self, layout: Layout | None, ring: SavedRing, keys: Fields, arrays: Mapping[Path, Any]) -> None:
        self.ring, self._arrays, self._shape = ring, arrays, (ring.filled, *ring.lanes)
        leaves = () if layout is None else layout.leaves
        paths: list[Any] = [leaf.path for leaf in leaves]
        dtypes = {path[1:] if is_below(path) else path: leaf.dtype for path, leaf in zip(paths, leaves, strict=True)}
        self._dtypes: dict[Path, torch.dtype] = {}
        for path, array in arrays.items():
            found = getattr(array, "dtype", None)
            if layout is None:
                self._dtypes[path] = torch.from_numpy(np.empty(0, found)).dtype
            elif path in dtypes and found == as_array(torch.empty(0, dtype=dtypes[path], device="cpu")).dtype:
                self._dtypes[path] = dtypes[path]
            else:
                raise ValueError(f"the array {path} is none of the items, or of another dtype")
        done, reward, (episodes,) = (_paths(keys, name) for name in ("done", "reward", "episodes"))
        if episodes not in arrays or int(np.prod(arrays[episodes].shape)) != int(np.prod(self._shape)):
            raise ValueError(f"the array {episodes} should be there, with one value a row")
        entries = Entries.of(paths, Names(done, reward))
        specs = {path: (tuple(array.shape), self._dtypes[path]) for path, array in arrays.items()}
        rows = Rows(self._shape, ring.end, ring.filled == ring.capacity)
        self.rebuilt = Rebuilt(
            specs, self._read(episodes), rows, Names(done, reward), entries.root_only, entries.next_only
        )
        if layout is None:
            empty = TensorDict({}, batch_size=[0], device="cpu")
            for path, (shape, dtype) in sorted(self.rebuilt.specs.items()):
                empty.set(path, torch.empty((0, *shape[len(self._shape) :]), dtype=dtype, device="cpu"))
            layout = Layout.of(empty, 1)
        self.layout = layout
        if self.rebuilt.specs != self.expected():
            raise ValueError("the arrays are not those of the items")

    def expected(self) -> dict[Any, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and the dtype of each leaf of the rows, by path."""
        return {leaf.path: ((*self._shape, *leaf.shape), leaf.dtype) for leaf in self.layout.leaves}

    def fill(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Copy the rows into arrays, one for each leaf; None for one that is not wanted. Reads one flat array at a time."""
        rows: dict[Any, torch.Tensor] = {
            leaf.path: as_tensor(array, leaf.dtype)
            for leaf, array in zip(self.layout.leaves, arrays, strict=True)
            if array is not None
        }
        for path in self._arrays:
            for work in self.rebuilt.fillings(path, self._read(path), rows):
                work()

    def _read(self, path: Path) -> torch.Tensor:
        return as_tensor(np.require(np.asarray(self._arrays[path]), requirements="W"), self._dtypes[path])


def loadable(storage: Storage, where: str) -> TensorStorage:
    """The storage. CheckpointMismatch for one that flat rows cannot be loaded into."""
    if not isinstance(storage, TensorStorage) or isinstance(storage, LazyFrameStorage):
        raise CheckpointMismatch(
            f"{where}: flat rows cannot be loaded into a {type(storage).__name__}, use a LazyTensorStorage"
        )
    return storage


@contextlib.contextmanager
def unfit(where: str) -> Iterator[None]:
    """Turns ValueError, of parts that do not fit together, into CheckpointCorrupt."""
    try:
        yield
    except ValueError as error:
        raise CheckpointCorrupt(f"{where}: not what was saved ({error})") from error


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def pairs(fields: Fields, name: str) -> list[tuple[Path, Any]]:
    """A saved list of pairs of a key and something. CheckpointCorrupt for anything else."""
    found = fields.items(name)
    if not all(isinstance(each, list) and len(each) == 2 and _is_path(each[0]) for each in found):
        raise fields.wrong(name, "a list of pairs", found)
    return [(tuple(path), value) for path, value in found]


def _is_path(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(step, str) for step in value)


def _paths(fields: Fields, name: str) -> tuple[Path, ...]:
    """A saved list of keys, or a single one."""
    found = [fields.any(name)] if name == "episodes" else fields.items(name)
    if not all(map(_is_path, found)):
        raise fields.wrong(name, "a list of keys", found)
    return tuple(map(tuple, found))

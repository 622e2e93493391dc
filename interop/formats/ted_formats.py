"""Checkpointers that save each observation of TED data once: flat, and by trajectory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields, Reading, Writing
from interop.checkpoint.checkpointer import Content
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.state import LoadOptions
from interop.engine.saved_rows import SavedRing, as_array, as_tensor, saved_ring, with_data, with_rows
from interop.storages import TensorStorage
from interop.storages.checkpointers import TensorStorageCheckpointer
from interop.ted import Flat2TED, H5Combine, Nested2TED, TED2Flat, TED2Nested
from interop.ted.flattening import Flattened, KeyPath, Names, Rebuilt, TedRing, is_below


class FlatStorageCheckpointer(TensorStorageCheckpointer):
    """TED data of a tensor storage flat, as `TED2Flat` makes it: up to half the size, and `rb[:]` comes back bit for bit.

    ValueError at saving, naming a key and its first row, for data that would not come back. The keys are saved too: the
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
        self._set_hooks({"done_keys": done_keys, "reward_keys": reward_keys}, verify)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Save the result of `hook(data, path=None)` for the flat data. ValueError for a hook that flattens TED data."""
        self._refuse_second(hook)
        super().register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Store the result of `hook(data, out=None)` for the TED data. ValueError for a hook that restores it."""
        self._refuse_second(hook)
        super().register_load_hook(hook)

    def _refuse_second(self, hook: Any) -> None:
        if isinstance(hook, TED2Flat | Flat2TED | H5Combine):
            raise ValueError(
                f"a {type(self).__name__} has the hooks of TED data already, got a {type(hook).__name__} beside them: set "
                "storage.checkpointer = TensorStorageCheckpointer() to register hooks of TED data, or leave this one out"
            )

    def _set_hooks(self, names: dict[str, Any], verify: bool) -> None:
        """Make the hooks of its own; those of the user come behind."""
        names = {name: value for name, value in names.items() if value is not None}
        self._flattening = self._hooks[0](**names, verify=verify)
        self._save_hooks = [self._flattening]
        self._load_hooks = [self._hooks[1](**{**names, "done_key": self._episodes()})]

    def _episodes(self) -> KeyPath:
        """The flat array that ends episodes."""
        done = self._flattening.done_key
        return done[1:] if is_below(done) else done

    def _save(self, storage: Content, out: Writing) -> dict[str, Any]:
        saveable = self._saveable(storage)
        if len(self._save_hooks) > 1:
            return super()._save(saveable, out)
        flat = self._flattened(saveable)
        arrays = [] if flat is None else [[list(path), as_array(flat.array(path))] for path in flat.specs]
        return {**self._described(saveable), "arrays": arrays}

    def _saveable(self, storage: Content) -> TensorStorage:
        """The storage. RuntimeError or ValueError for one that cannot be saved."""
        if not isinstance(storage, TensorStorage) or storage.table.place.in_order:
            raise ValueError(
                f"a {type(self).__name__} saves tensordicts of a LazyTensorStorage or LazyMemmapStorage, got a "
                f"{type(storage).__name__}: use its default checkpointer"
            )
        if storage.table.layout is None:
            raise RuntimeError("Cannot save a non-initialized storage.")
        if not storage.table.layout.is_tensordict or storage.table.packs:
            raise ValueError(
                f"a {type(self).__name__} saves tensordicts, without text and ragged rows; use a "
                "TensorStorageCheckpointer for other items"
            )
        return storage

    def _flattened(self, storage: TensorStorage) -> Flattened | None:
        """The flat arrays of the stored rows; None where there are none."""
        self._set_ring(self._flattening, storage)
        return self._flattening.flattened(storage[:])[0] if len(storage) else None

    def _described(self, storage: TensorStorage) -> dict[str, Any]:
        """What `_with_arrays` needs beside the flat arrays, as plain values."""
        assert storage.table.layout is not None
        names = self._flattening.names
        keys = {"done": names.done, "reward": names.reward, "episodes": (self._episodes(),)}
        return {
            "layout": saved_layout(storage.table.layout),
            "ring": saved_ring(storage.table),
            "keys": {name: list(map(list, paths)) for name, paths in keys.items()},
        }

    def _load(self, storage: Content, saved: Any, source: Reading, options: LoadOptions) -> Callable[[], None]:
        fields = Fields(saved, f"{source.path}, storage")
        if "hooked" in fields:
            return super()._load(_loadable(storage, fields.where), saved, source, options)
        pairs = [pair if isinstance(pair, list) and len(pair) == 2 else [None, None] for pair in fields.items("arrays")]
        paths = _paths(Fields({"arrays": [path for path, _ in pairs]}, fields.where), "arrays")
        arrays = {
            path: Fields({"array": value}, fields.where).array("array")
            for path, (_, value) in zip(paths, pairs, strict=True)
        }
        return self._with_arrays(storage, fields, arrays, options)

    def _with_arrays(
        self, storage: Content, fields: Fields, arrays: Mapping[KeyPath, Any], options: LoadOptions
    ) -> Callable[[], None]:
        """Check and read flat arrays; the returned function stores the rows.

        Args:
            storage: where they go.
            fields: what `_described` gave.
            arrays: with a shape and a dtype each; `np.asarray` reads one, when it is needed.
            options: the options of the load.
        """
        where = fields.where
        target = _loadable(storage, fields.where)
        layout = layout_of(fields.any("layout"), where)
        ring = SavedRing.parsed(fields.fields("ring"))
        if not ring.filled:
            return with_rows(target.table, layout, ring, lambda arrays: None, options, where)
        keys = fields.fields("keys")
        done, reward, episodes = (_paths(keys, name) for name in ("done", "reward", "episodes"))
        specs: dict[Any, Any] = {
            leaf.path: ((ring.filled, *ring.lanes, *leaf.shape), leaf.dtype) for leaf in layout.leaves
        }
        dtypes = {path[1:] if is_below(path) else path: dtype for path, (_, dtype) in specs.items()}

        def read(path: KeyPath) -> torch.Tensor:
            return as_tensor(np.require(np.asarray(arrays[path]), requirements="W"), dtypes[path])

        try:
            for path, array in arrays.items():
                if (
                    path not in dtypes
                    or array.dtype != as_array(torch.empty(0, dtype=dtypes[path], device="cpu")).dtype
                ):
                    raise ValueError(f"the array {path} is none of the items, or of another dtype")
            if len(episodes) != 1 or episodes[0] not in arrays:
                raise ValueError(f"there is no array {episodes}, which ends episodes")
            rows = TedRing((ring.filled, *ring.lanes), ring.end, ring.filled == ring.capacity)
            flat = {path: (tuple(array.shape), dtypes[path]) for path, array in arrays.items()}
            rebuilt = Rebuilt(flat, read(episodes[0]), rows, Names(done, reward), specs.keys())
            if rebuilt.specs != specs:
                raise ValueError("the shapes of the arrays are not those of the items")
        except ValueError as error:
            raise CheckpointCorrupt(f"{where}: not what was saved ({error})") from error

        def fill(memory: Sequence[np.ndarray | None]) -> None:
            targets: dict[Any, torch.Tensor] = {
                leaf.path: as_tensor(array, leaf.dtype)
                for leaf, array in zip(layout.leaves, memory, strict=True)
                if array is not None
            }
            for path in arrays:
                for work in rebuilt.fillings(path, read(path), targets):
                    work()

        if len(self._load_hooks) == 1:
            return with_rows(target.table, layout, ring, fill, options, where)
        leaves = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in specs.values()]
        fill(list(map(as_array, leaves)))
        data = layout.build(leaves, rows.shape)
        for hook in self._load_hooks[1:]:
            data = hook(data, out=None)
        return with_data(target.table, data, vars(ring), options)


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """`FlatStorageCheckpointer`, whose user's save hooks get nested tensors, as `TED2Nested` makes them."""

    _hooks = TED2Nested, Nested2TED


def _loadable(storage: Content, where: str) -> TensorStorage:
    """The storage. CheckpointMismatch for one that flat rows cannot be loaded into."""
    if not isinstance(storage, TensorStorage) or storage.table.place.in_order:
        raise CheckpointMismatch(
            f"{where}: flat rows cannot be loaded into a {type(storage).__name__}, use a LazyTensorStorage"
        )
    return storage


def _paths(fields: Fields, name: str) -> tuple[KeyPath, ...]:
    """A saved list of keys."""
    keys = fields.items(name)
    for key in keys:
        if not isinstance(key, list) or not key or not all(isinstance(step, str) for step in key):
            raise fields.wrong(name, "a list of keys", keys)
    return tuple(map(tuple, keys))

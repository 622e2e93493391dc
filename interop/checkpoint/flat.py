"""TED data in a checkpoint with each observation once."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields, Source, Writing
from interop.checkpoint.checkpointers import TensorStorageCheckpointer
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.rule import Rule
from interop.checkpoint.tensor_states import Plan, Ring, as_array, as_tensor, restoring_data, saved_ring
from interop.data.layout import Layout
from interop.storages import LazyFrameStorage, TensorStorage
from interop.ted import Flat2TED, TED2Flat
from interop.ted.entries import Entries, Names, Path
from interop.ted.flattening import Flattened, Rebuilt, Specs
from interop.ted.ring import Ring as Rows


class FlatStorageCheckpointer(TensorStorageCheckpointer):
    """TED data of a tensor storage flat, as `TED2Flat` makes it: up to half the size, and `rb[:]` comes back bit for bit.

    Data of which something would not come back is a ValueError at saving, which names the key and the first such row. The
    keys are saved too: how the checkpointer that loads was built does not matter. What hooks of the user's make of the flat
    data is saved in its place.

    Args:
        done_keys: done flags below "next", of which "done" says where episodes end, and of the root, where all are False.
        reward_keys: rewards below "next".
        verify: refuse what would not come back; without, it is lost.
    """

    _save_hook: type[TED2Flat] = TED2Flat
    _load_hook: type[Flat2TED] = Flat2TED

    def __init__(self, done_keys: Any = None, reward_keys: Any = None, *, verify: bool = True) -> None:
        super().__init__()
        names = given(done_keys=done_keys, reward_keys=reward_keys)
        self._set_hooks([self._save_hook(**names, verify=verify)], [self._load_hook(**names)])

    def _set_hooks(self, save_hooks: list[Any], load_hooks: list[Any]) -> None:
        """Set the hooks that are its own; those of users come behind."""
        self._flattening = save_hooks[0]
        self._own = len(save_hooks), len(load_hooks)
        self._save_hooks, self._load_hooks = save_hooks, load_hooks

    def _save(self, storage: Any, out: Writing) -> dict[str, Any]:
        self._refuse(storage)
        if len(self._save_hooks) > self._own[0]:
            return self._save_hooked(storage, out)
        tree = {"layout": saved_layout(storage._layout), "ring": saved_ring(storage)}
        if not len(storage):
            return tree
        self._tell_hooks(storage)
        flat, _ = self._flattening._flattened(storage[:])
        return {**tree, **self._written(flat, storage, out), "keys": self._keys(flat.order.closed)}

    def _refuse(self, storage: Any) -> None:
        """RuntimeError or ValueError for what cannot be saved."""
        if not isinstance(storage, TensorStorage):
            raise ValueError(f"a {type(self).__name__} saves tensordicts in tensors, got a {type(storage).__name__}")
        if isinstance(storage, LazyFrameStorage):
            raise ValueError("a LazyFrameStorage has each frame once already: save it by a TensorStorageCheckpointer")
        if storage._layout is None:
            raise RuntimeError("Cannot save a non-initialized storage.")
        if not storage._layout.is_tensordict or storage.packs:
            raise ValueError(
                f"a {type(self).__name__} saves tensordicts, without text and ragged rows; use a "
                "TensorStorageCheckpointer for other items"
            )

    def _keys(self, closed: bool) -> dict[str, Any]:
        """The keys with a meaning, and whether the last row of each lane ends a trajectory."""
        done, names = self._flattening._done_key, self._flattening._names
        return {
            "done": [list(path) for path in names.done],
            "reward": [list(path) for path in names.reward],
            "episodes": list(done[1:] if done[0] == "next" and len(done) > 1 else done),
            "closed": closed,
        }

    def _save_hooked(self, storage: Any, out: Writing) -> dict[str, Any]:
        """What hooks of the user's make of it."""
        return super()._save(storage, out)

    def _written(self, flat: Flattened, storage: Any, out: Writing) -> dict[str, Any]:
        """What is saved of the arrays."""
        return {"arrays": [[list(path), as_array(flat.array(path))] for path in flat.specs()]}

    def _load(self, storage: Any, saved: Any, source: Source, rule: Rule) -> Callable[[], None]:
        where = f"{source.path}, storage"
        fields = Fields(saved, where)
        if "hooked" in fields:
            return super()._load(storage, saved, source, rule)
        layout, ring = layout_of(fields.any("layout"), where), Ring(fields.fields("ring"))
        if not ring.filled:
            return Plan(storage, layout, ring, rule, where).filled_by(lambda arrays: None)
        with self._opened(fields, source) as arrays:
            try:
                content = Content(layout, ring, fields.fields("keys"), arrays)
                self._check(content, fields)
            except ValueError as error:
                raise CheckpointCorrupt(f"{where}: not what was saved ({error})") from error
            return self._put(storage, content, ring, rule, where)

    def _put(self, storage: Any, content: "Content", ring: Ring, rule: Rule, where: str) -> Callable[[], None]:
        """Have the rows in the storage, and before that in the hands of the user's hooks."""
        if isinstance(storage, LazyFrameStorage):  # it takes rows in the order of time alone
            raise CheckpointMismatch(
                f"{where}: flat rows cannot be loaded into a LazyFrameStorage, use a LazyTensorStorage"
            )
        if len(self._load_hooks) == self._own[1]:
            return Plan(storage, content.layout, ring, rule, where).filled_by(content.fill)
        made = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in content.expected()]
        content.fill([as_array(each) for each in made])
        data = content.layout.build(made, (ring.filled, *ring.lanes))
        for hook in self._load_hooks[self._own[1] :]:
            data = hook(data, out=None)
        return restoring_data(storage, data, vars(ring), rule)

    def _opened(self, fields: Fields, source: Source) -> Any:
        """A context with the flat arrays that were saved."""
        found = dict(pairs(fields, "arrays"))
        return contextlib.nullcontext(Stored(found))

    def _check(self, content: "Content", fields: Fields) -> None:
        """ValueError where anything else that was saved does not fit."""


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


class Stored:
    """Flat arrays of a checkpoint.

    Args:
        arrays: what `np.asarray` reads, by path.
    """

    def __init__(self, arrays: Mapping[Path, Any]) -> None:
        self._arrays = arrays

    def kinds(self) -> dict[Path, tuple[tuple[int, ...], Any]]:
        """The shape and the NumPy dtype of each."""
        return {
            path: (tuple(getattr(each, "shape", ())), getattr(each, "dtype", None))
            for path, each in self._arrays.items()
        }

    def read(self, path: Path) -> np.ndarray:
        """The values of one."""
        return np.asarray(self._arrays[path])


class Content:
    """The rows of a storage in flat arrays of a checkpoint.

    Args:
        layout: what an item is.
        ring: how the rows fill the storage.
        keys: the keys with a meaning, as saved.
        arrays: the flat arrays.

    Raises ValueError or CheckpointCorrupt where these do not fit together.
    """

    def __init__(self, layout: Layout, ring: Ring, keys: Fields, arrays: Any) -> None:
        self.layout, self._arrays = layout, arrays
        self._shape = (ring.filled, *ring.lanes)
        names = Names(_paths(keys, "done"), _paths(keys, "reward"))
        self._dtypes: dict[Any, torch.dtype] = {
            path[1:] if path[0] == "next" and len(path) > 1 else path: leaf.dtype
            for path, leaf in ((leaf.path, leaf) for leaf in layout.leaves)
        }
        specs: Specs = {}
        for path, (shape, dtype) in arrays.kinds().items():
            if (
                path not in self._dtypes
                or dtype != as_array(torch.empty(0, dtype=self._dtypes[path], device="cpu")).dtype
            ):
                raise ValueError(f"the array {path} is none of the items, or of another dtype")
            specs[path] = shape, self._dtypes[path]
        (episodes,) = _paths(Fields({"episodes": [keys.any("episodes")]}, "the keys"), "episodes")
        if episodes not in specs:
            raise ValueError(f"the array {episodes} is missing")
        if int(np.prod(specs[episodes][0])) != int(np.prod(self._shape)):
            raise ValueError(f"the array {episodes} should have one value a row")
        rows = Rows(self._shape, ring.end, ring.filled == ring.capacity)
        keys_alone: Any = dict.fromkeys(leaf.path for leaf in layout.leaves)
        entries = Entries.of(keys_alone, names)
        self.rebuilt = Rebuilt(
            specs, self._read(episodes), rows, names, keys.flag("closed"), entries.root_only, entries.next_only
        )
        expected = dict(zip((leaf.path for leaf in layout.leaves), self.expected(), strict=True))
        if self.rebuilt.specs != expected:
            raise ValueError("the arrays are not those of the items")

    def expected(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and the dtype of each leaf of the rows."""
        return [((*self._shape, *leaf.shape), leaf.dtype) for leaf in self.layout.leaves]

    def fill(self, arrays: Any) -> None:
        """Put the rows into arrays, one for each leaf; None for one that is not wanted. One flat array is read at a time."""
        rows: dict[Any, torch.Tensor] = {
            leaf.path: as_tensor(array, leaf.dtype)
            for leaf, array in zip(self.layout.leaves, arrays, strict=True)
            if array is not None
        }
        for path in self._arrays.kinds():
            self.rebuilt.fill(path, self._read(path), rows)

    def _read(self, path: Path) -> torch.Tensor:
        return as_tensor(np.require(self._arrays.read(path), requirements="W"), self._dtypes[path])


def pairs(fields: Fields, name: str) -> list[tuple[Path, Any]]:
    """A list of pairs of a key and something. CheckpointCorrupt for anything else."""
    found = fields.items(name)
    if not all(isinstance(each, list) and len(each) == 2 and is_path(each[0]) for each in found):
        raise fields.wrong(name, "a list of pairs", found)
    return [(tuple(path), value) for path, value in found]


def is_path(value: Any) -> bool:
    """Whether this is a key as it is saved."""
    return isinstance(value, list) and bool(value) and all(isinstance(step, str) for step in value)


def _paths(fields: Fields, name: str) -> tuple[Path, ...]:
    found = fields.items(name)
    if not all(map(is_path, found)):
        raise fields.wrong(name, "a list of keys", found)
    return tuple(map(tuple, found))

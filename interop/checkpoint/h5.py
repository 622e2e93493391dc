"""TED data in an H5 file, with a group for each trajectory."""

import contextlib
import itertools
import math
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from fbuf.checkpoint import CheckpointCorrupt, Fields, Source, Verify, Writing
from interop.checkpoint import h5_files
from interop.checkpoint.flat import Content, given, pairs
from interop.checkpoint.h5_groups import Groups, refuse_name, write_groups
from interop.checkpoint.layouts import dtype_stored
from interop.checkpoint.nested import NestedStorageCheckpointer
from interop.checkpoint.rule import Rule
from interop.checkpoint.tensor_states import Ring, as_array, as_tensor, restoring_data, saved_ring
from interop.checkpoint.torch_names import NAMES
from interop.data.keys import as_path
from interop.data.layout import Layout
from interop.ted import H5Combine, H5Split, Nested2TED, TED2Nested
from interop.ted.entries import Names, shown
from interop.ted.flat import parted
from interop.ted.flattening import Flattened, Rebuilt
from interop.ted.ring import Ring as Rows

_SHAPE, _LENGTH, _CLOSED = ("_storage_shape",), ("_len",), ("_closed",)


class H5StorageCheckpointer(NestedStorageCheckpointer):
    """TED data of a tensor storage in an H5 file, which can be compressed and which other programs read.

    The file has a group `traj_<i>` for each trajectory, with the arrays of `TED2Nested`, and the numbers `_len`, `shift`,
    `is_full` and `_storage_shape`. Rows that were never written are groups too, without data. In a checkpoint it is a file
    of the folder; `dumps` and `loads` also take a path that ends with `.h5` for a file by itself, which is put in the place
    of another one when it is whole, but has no checksums. Such a file is also read where others wrote it.

    Links, virtual datasets and data in other files are not followed: CheckpointCorrupt. Needs h5py.

    Args:
        checkpoint_file: the name of the file.
        done_keys: as of `FlatStorageCheckpointer`.
        reward_keys: the same.
        h5_kwargs: how datasets are made, such as `{"compression": "gzip"}`; not used for single numbers.
        kwargs: other arguments of `TED2Nested`.
    """

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Any = None,
        reward_keys: Any = None,
        h5_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not checkpoint_file or os.path.basename(checkpoint_file) != checkpoint_file:
            raise ValueError(f"checkpoint_file must be the name of a file, got {checkpoint_file!r}")
        self.checkpoint_file = checkpoint_file
        self._options = dict(h5_kwargs or {})
        names = {**kwargs, **given(done_keys=done_keys, reward_keys=reward_keys)}
        flattening = TED2Nested(**names)
        names.pop("verify", None)
        if "done_key" in names:
            done = as_path(names["done_key"])
            names["done_key"] = done[1:] if done[0] == "next" and len(done) > 1 else done
        self._set_hooks([flattening, H5Split()], [H5Combine(), Nested2TED(**names)])

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> None:
        """Save the content in a folder, or in a file that ends with `.h5`: whole and flushed, or not at all."""
        if File(path).suffix != ".h5":
            super().dumps(storage, path)
            return
        place = File(os.path.realpath(path))  # a link is resolved once
        beside = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
        try:
            with storage._still():
                self._save_alone(storage, beside)
            h5_files.flushed(beside)
            os.replace(beside, place)
            h5_files.flushed(place)
        finally:
            beside.unlink(missing_ok=True)

    def _load_from(self, storage: Any, path: str | os.PathLike[str], verify: Verify, rule: Rule) -> None:
        place = File(path)
        if place.suffix != ".h5":
            super()._load_from(storage, path, verify, rule)
            return
        with h5_files.reading(place) as opened:  # of a file by itself nothing can be verified
            self._put_in(storage, self._load_alone(storage, opened, place, rule))

    # ------------------------------------------------------------------ in a checkpoint

    def _written(self, flat: Flattened, storage: Any, out: Writing) -> dict[str, Any]:
        name = self._free_name(out)
        with h5_files.writing(out.file(name)) as opened:
            self._write(opened, flat, storage)
        return {"file": name}

    def _write(self, opened: Any, flat: Flattened, storage: Any) -> None:
        write_groups(opened, flat, storage._row_count, self._options)
        told = {
            _SHAPE: [storage._row_count, *storage._lanes],
            _LENGTH: len(storage),
            self._flattening._shift_key: self._flattening.shift,
            self._flattening._is_full_key: self._flattening.is_full,
        }
        if flat.order.closed:
            told[_CLOSED] = True
        for path, value in told.items():
            h5_files.write(opened, path, np.asarray(value), {})

    def _free_name(self, out: Writing) -> str:
        """A name that no other file of the checkpoint has: each storage of an ensemble has its own file."""
        names = itertools.chain(
            [self.checkpoint_file], (f"{number}-{self.checkpoint_file}" for number in itertools.count(1))
        )
        return next(name for name in names if name not in out._given)

    @contextlib.contextmanager
    def _opened(self, fields: Fields, source: Source) -> Iterator[Groups]:
        path = source.file(fields.text("file"))
        ring, keys = Ring(fields.fields("ring")), fields.fields("keys")
        with h5_files.reading(path) as opened:
            groups = Groups(opened, path)
            groups.keep_filled(tuple(keys.items("episodes")), ring.filled, ring.capacity, math.prod(ring.lanes))
            yield groups

    def _check(self, content: Content, fields: Fields) -> None:
        """Nothing else was saved."""

    def _save_hooked(self, storage: Any, out: Writing) -> dict[str, Any]:
        self._tell_hooks(storage)
        data = storage[:]
        for hook in self._save_hooks:
            data = hook(data, path=None)
        name = self._free_name(out)
        tensors, told = parted(data)
        dtypes = [[list(path), NAMES[tensor.dtype]] for path, tensor in tensors.items()]
        with h5_files.writing(out.file(name)) as opened:
            for path, tensor in tensors.items():
                refuse_name(path)
                h5_files.write(opened, path, as_array(tensor), self._options)
            for path, value in told.items():
                h5_files.write(opened, path, np.asarray(value), {})
        return {"hooked_file": name, "ring": saved_ring(storage), "dtypes": dtypes}

    def _load(self, storage: Any, saved: Any, source: Source, rule: Rule) -> Callable[[], None]:
        where = f"{source.path}, storage"
        fields = Fields(saved, where)
        if "hooked_file" not in fields:
            return super()._load(storage, saved, source, rule)
        path, data = source.file(fields.text("hooked_file")), TensorDict({}, device="cpu")
        dtypes = {key: dtype_stored(name, where) for key, name in pairs(fields, "dtypes")}
        with h5_files.reading(path) as opened, h5_files.faults_of(path):
            for key, held in h5_files.datasets(opened, path).items():
                array = held.read()
                if key in dtypes:
                    data.set(key, as_tensor(array, dtypes[key]))
                else:
                    data.set(key, NonTensorData(array.tolist(), device="cpu"))
        for hook in self._load_hooks:
            data = hook(data, out=None)
        return restoring_data(storage, data, fields.any("ring"), rule)

    # ------------------------------------------------------------------ a file by itself

    def _save_alone(self, storage: Any, path: File) -> None:
        self._refuse(storage)
        if not len(storage):
            raise RuntimeError(
                "Cannot save an empty storage in a file by itself: give a path that does not end with .h5"
            )
        if len(self._save_hooks) > self._own[0]:
            raise ValueError("what hooks of your own make is saved in a folder: give a path that does not end with .h5")
        self._tell_hooks(storage)
        flat, _ = self._flattening._flattened(storage[:])
        strange = [*flat.entries.root_only, *flat.entries.next_only]
        strange += [path for path, (_, dtype) in flat.specs().items() if dtype == torch.bfloat16]
        if strange:
            raise ValueError(
                f"a file by itself cannot tell what {shown(strange[0])} is: done flags and rewards must be below 'next', "
                "done flags in the root too, and no dtype bfloat16. Give a path that does not end with .h5"
            )
        with h5_files.writing(path) as opened:
            self._write(opened, flat, storage)

    def _load_alone(self, storage: Any, opened: Any, path: File, rule: Rule) -> Callable[[], None]:
        groups = Groups(opened, path)
        shape = groups.number(_SHAPE)
        lanes = list(shape[1:]) if isinstance(shape, list) else []
        length, per_row = groups.number(_LENGTH), max(1, math.prod(lanes))
        described = {
            "ndim": 1 + len(lanes),
            "lanes": lanes,
            "capacity": shape[0] if isinstance(shape, list) and shape else None,
            "filled": length // per_row if type(length) is int else None,
            "written": length // per_row if type(length) is int else None,
            "end": groups.number(self._flattening._shift_key),
        }
        where = str(path)
        ring = Ring(Fields(described, where))
        keys = Fields(self._keys(bool(groups.number(_CLOSED))), where)
        if not ring.filled:
            raise CheckpointCorrupt(f"{where}: has no rows")
        try:
            groups.keep_filled(tuple(keys.items("episodes")), ring.filled, ring.capacity, per_row)
            content = Content(_layout(groups, keys, ring), ring, keys, groups)
        except ValueError as error:
            raise CheckpointCorrupt(f"{where}: not what was saved ({error})") from error
        return self._put(storage, content, ring, rule, where)


def _layout(groups: Groups, keys: Fields, ring: Ring) -> Layout:
    """What an item is, as far as a file by itself tells."""
    kinds = groups.kinds()
    dtypes = {path: torch.from_numpy(np.empty(0, dtype)).dtype for path, (_, dtype) in kinds.items()}
    specs = {path: (shape, dtypes[path]) for path, (shape, _) in kinds.items()}
    names = Names(*(tuple(map(tuple, keys.items(name))) for name in ("done", "reward")))
    episodes = tuple(keys.items("episodes"))
    shape = (ring.filled, *ring.lanes)
    if episodes not in specs:
        raise ValueError(f"there is no {shown(episodes)}")
    rebuilt = Rebuilt(
        specs,
        torch.from_numpy(groups.read(episodes)),
        Rows(shape, ring.end, ring.filled == ring.capacity),
        names,
        keys.flag("closed"),
    )
    data = TensorDict({}, batch_size=[0], device="cpu")
    for path, (whole, dtype) in sorted(rebuilt.specs.items()):
        data.set(path, torch.empty((0, *whole[len(shape) :]), dtype=dtype, device="cpu"))
    return Layout.of(data, 1)

"""Rows in a key-value server that speaks the protocol of Redis."""

import os
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.arguments import required
from interop.data.layout import Layout, LeafSpec
from interop.engine import plans
from interop.engine.places.place import Place
from interop.host.stored_rows import Rows


class Client(Protocol):
    """What a client of the package `redis` has."""

    def delete(self, *names: str) -> object: ...


_CHUNK = 1024  # items of one command, so that none blocks the server for long


class StoreRows(Rows):
    """Items in a server: the value of a key is the bytes of all leaves of an item.

    The keys are deleted with this object, at `clear`, and when the process ends.

    Args:
        client: of the package `redis`.
        name: what all keys begin with.
    """

    def __init__(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...], client: Client, name: str) -> None:
        super().__init__(leaves, lead)
        self._client: Any = client
        self._name = name
        self._written = np.zeros(int(np.prod(lead)), bool)  # the slots that have a key
        sizes = [spec.dtype.itemsize * int(np.prod(spec.shape)) for spec in self.specs]
        self._ends = np.cumsum(sizes).tolist()
        self._starts = [0, *self._ends[:-1]]
        weakref.finalize(self, _delete, os.getpid(), client, name, self._written)

    def put(self, slots: np.ndarray, leaves: Sequence[Tensor]) -> None:
        count = len(slots)
        columns = [leaf.detach().cpu().contiguous().reshape(count, -1).view(torch.uint8).numpy() for leaf in leaves]
        items = (
            np.concatenate([column.reshape(count, -1) for column in columns], axis=1)
            if columns
            else np.zeros((count, 0))
        )
        with self._client.pipeline(transaction=True) as commands:  # all of the rows change, or none
            for part in _chunks(count):
                commands.mset(
                    {self._key(slot): item.tobytes() for slot, item in zip(slots[part], items[part], strict=True)}
                )
            self._written[slots] = True  # before it is sent: a key that may be there is deleted at the end
            commands.execute()

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        places = slots.cpu().numpy()
        zeros = bytes(self._ends[-1]) if self._ends else b""
        values: list[bytes] = []
        for part in _chunks(len(places)):
            for slot, value in zip(
                places[part], self._client.mget([self._key(each) for each in places[part]]), strict=True
            ):
                if value is None and self._written[slot]:
                    raise RuntimeError(
                        f"the server has lost the item of slot {slot}: its memory was flushed, or it evicts keys. Give it "
                        "enough memory and the policy 'noeviction'"
                    )
                values.append(zeros if value is None else value)
        items = np.frombuffer(b"".join(values), np.uint8).reshape(len(places), -1 if values else 0)
        return [
            torch.from_numpy(np.array(items[:, start:end])).view(-1).view(spec.dtype).reshape(len(places), *spec.shape)
            for start, end, spec in zip(self._starts, self._ends, self.specs, strict=True)
        ]

    def clear(self) -> None:
        _delete(os.getpid(), self._client, self._name, self._written)
        self._written[:] = False

    def _key(self, slot: int) -> str:
        return f"{self._name}:{slot}"


class Store(Place):
    """Memory of a key-value server.

    Args:
        backend: the name of the server in messages; all speak the protocol of Redis.
        prefix: what the names of keys begin with; a part follows that is new for each storage.
        client: of the package `redis`; replaces `options`.
        options: the arguments of `redis.Redis`.
    """

    def __init__(self, backend: str, prefix: str, client: object, options: Mapping[str, Any]) -> None:
        super().__init__("cpu")
        self._backend = backend
        self._prefix = prefix
        self._options = dict(options)
        self._client: Any = client
        self._redis = required("redis", "store")

    def zeros(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        if self._client is None:
            self._client = self._redis.Redis(**self._options)
        try:
            self._client.ping()
        except self._redis.exceptions.ConnectionError as error:
            raise ConnectionError(
                f"no server answers at {self.address}: {error}. Start one, or change host and port"
            ) from error
        return StoreRows(leaves, lead, self._client, f"{self._prefix}:{uuid.uuid4().hex}")

    @property
    def address(self) -> str:
        """The server, for messages."""
        where = self._options.get("unix_socket_path") or "{host}:{port}".format(
            **{"host": "?", "port": "?", **self._options}
        )
        return f"{self._backend} at {where}"

    def plan(
        self, layout: Layout, lead: tuple[int, ...], device: torch.device, is_allocated: bool = False
    ) -> list[Share]:
        return plans.arrays("items", layout.leaves, lead, self.address, counts="at most")

    def __getstate__(self) -> dict[str, Any]:
        if not self._options:
            raise TypeError("a StoreStorage that was built with client= cannot be copied: give host and port instead")
        return {**self.__dict__, "_client": None, "_redis": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _redis=required("redis", "store"))


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, _CHUNK):
        yield slice(start, start + _CHUNK)


def _delete(process: int, client: Client, name: str, written: np.ndarray) -> None:
    """Delete the keys, unless this is a forked child of the process that wrote them. A server that is gone has none."""
    slots = np.flatnonzero(written) if process == os.getpid() else written[:0]
    redis = required("redis", "store")
    try:
        for part in _chunks(len(slots)):
            client.delete(*(f"{name}:{slot}" for slot in slots[part]))
    except redis.exceptions.ConnectionError:
        return

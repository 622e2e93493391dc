"""A batch that will be drawn: what was settled about it when it was scheduled."""

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import Fields
from interop.buffers.fused import reserved
from interop.checkpoint.stateful import integers
from interop.checkpoint.values import decode, encode
from interop.data import randomness
from interop.samplers import Sampler
from interop.samplers.drawing import names_slots
from interop.samplers.epoch import Drawn, Epoch
from interop.storages import Storage


@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """What one member of an ensemble gives to a batch: its random key, and what was drawn with it of an epoch."""

    place: int
    key: Any = None
    drawn: Drawn | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Ahead:
    """A batch that a thread makes, and what decides it: its random key and what is drawn of an epoch, or its parts."""

    batch_size: int
    epoch: int  # of the queue
    key: Any = None
    drawn: Drawn | None = None
    parts: list[Part] | None = None
    future: "Future[Any] | None" = None
    failed: bool = False  # a thread could not make it
    was_read: bool = False  # what is stored has been read, so an error came later

    @classmethod
    def of(
        cls, sampler: Sampler, storage: Storage, batch_size: int, epoch: int, generator: torch.Generator | None
    ) -> "Ahead | None":
        """The next batch of the queue; None where it cannot be drawn: the call that asks for this batch raises the error.

        The error of a user's sampler, which may have changed, is raised here.
        """
        try:
            with randomness.Restored(generator):
                key = randomness.key(generator)
                return cls(batch_size, epoch, key, reserved(sampler, storage, batch_size, key))
        except Exception:
            if names_slots(sampler):
                return None
            raise

    def _draws(self) -> Iterator[Drawn]:
        every = [self.drawn, *(part.drawn for part in self.parts or ())]
        return (drawn for drawn in every if drawn is not None)

    def given(self) -> None:
        """It was given out."""
        for drawn in self._draws():
            drawn.given()

    def take_back(self) -> None:
        """What was drawn for it remains to be drawn."""
        for drawn in reversed(list(self._draws())):
            drawn.take_back()

    def cancel(self) -> None:
        """What a thread has made of it does not count."""
        if self.future is not None:
            self.future.cancel()
            self.future = None

    def held(self, epoch: Epoch) -> Iterator[int]:
        """The numbers of what was drawn of this epoch."""
        return (drawn.number for drawn in self._draws() if drawn.of is epoch)

    def twin(self) -> "Ahead":
        """The same for a copy, to be made there."""
        parts = None if self.parts is None else [dataclasses.replace(part) for part in self.parts]
        return Ahead(self.batch_size, 0, self.key, self.drawn, parts)

    def bind(self, epochs: Sequence[Epoch | None]) -> None:
        """Tell what becomes of it to these epochs, one of each member."""
        if self.drawn is not None and epochs[0] is not None:
            self.drawn = self.drawn.bound(epochs[0])
        for part in self.parts or ():
            epoch = epochs[part.place]
            if part.drawn is not None and epoch is not None:
                part.drawn = part.drawn.bound(epoch)

    @property
    def is_held(self) -> bool:
        """Whether the epochs still hold what was drawn for it."""
        return all(drawn.is_held for drawn in self._draws())

    def fits(self, members: Sequence[Any]) -> bool:
        """Whether what was drawn is held, and stored."""
        places = [(0, self.drawn), *((part.place, part.drawn) for part in self.parts or ())]
        return all(
            drawn.is_held and (drawn.is_own or (drawn.slots < len(members[place]._storage)).all())
            for place, drawn in places
            if drawn is not None
        )

    # ------------------------------------------------------------------ saved trees

    def saved(self) -> dict[str, Any]:
        """A saved tree of what decides it."""
        parts = None
        if self.parts is not None:
            parts = [{"place": part.place, **_saved(part.key, part.drawn)} for part in self.parts]
        return {"batch_size": self.batch_size, **_saved(self.key, self.drawn), "parts": parts}


def _saved(key: Any, drawn: Drawn | None) -> dict[str, Any]:
    return {"key": None if key is None else key.astype(np.int64), "drawn": _drawn_saved(drawn)}


def _drawn_saved(drawn: Drawn | None) -> dict[str, Any] | None:
    if drawn is None:
        return None
    if drawn.is_own:
        return {"own": encode([drawn.slots, drawn.info], "a batch drawn ahead by a sampler of your own")}
    told = [
        [list(key) if isinstance(key, tuple) else key, value.cpu().numpy() if isinstance(value, Tensor) else value]
        for key, value in drawn.info.items()
    ]
    return {"number": drawn.number, "slots": drawn.slots.cpu().numpy(), "told": told}


def restored_jobs(saved: Any, members: int) -> list[Ahead]:
    """The batches of a saved tree, to be bound; CheckpointCorrupt where it is none."""
    fields = Fields(saved, "batches drawn ahead")
    return [_job(Fields(each, "a batch drawn ahead"), members) for each in fields.items("waiting")]


def _job(fields: Fields, members: int) -> Ahead:
    parts = None
    if fields.any("parts") is not None:
        parts = []
        for each in fields.items("parts"):
            part = Fields(each, "a part of a batch drawn ahead")
            parts.append(Part(part.whole("place", most=members - 1), *_decided(part)))
    key, drawn = _decided(fields) if fields.any("key") is not None or fields.any("drawn") is not None else (None, None)
    if key is None and drawn is None and not parts:
        raise fields.wrong("key", "what the batch is drawn by", key)
    return Ahead(fields.whole("batch_size", 1, 2**40), 0, key, drawn, parts)


def _decided(fields: Fields) -> tuple[Any, Drawn | None]:
    key, drawn = None, None
    if fields.any("key") is not None:
        found = fields.array("key", shape=(2,))
        if found.dtype not in (np.dtype(np.uint32), np.dtype(np.int64)):
            raise fields.wrong("key", "two words of 32 bits", found)
        words = np.array(found)
        if not ((words >= 0) & (words < 2**32)).all():
            raise fields.wrong("key", "two words of 32 bits", found)
        key = words.astype(np.uint32)
    if fields.any("drawn") is not None:
        held = fields.fields("drawn")
        if "own" in held:
            index, info = decode(held.any("own"), where="a batch drawn ahead")
            return key, Drawn(None, Drawn.OWN, index, info)
        slots = torch.from_numpy(integers(held, "slots", None, 0, 2**62))
        told: dict[Any, Any] = {}
        for each in held.items("told"):
            pair = Fields({"pair": each}, "what is told of a batch").items("pair", 2)
            told[_a_key(held, pair[0])] = _a_tensor(held, pair[1])
        drawn = Drawn(None, held.whole("number"), slots, told)
    if key is None and drawn is None:
        raise fields.wrong("key", "what the batch is drawn by", key)
    return key, drawn


def _a_key(fields: Fields, value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise fields.wrong("told", "entries under texts, or lists of them", value)


def _a_tensor(fields: Fields, value: Any) -> Tensor:
    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "bif" or not hasattr(value, "shape"):
        raise fields.wrong("told", "arrays", value)
    return torch.from_numpy(np.array(value))

"""Which members of an ensemble give the parts of a batch."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop.checkpoint.state import Entries
from interop.data import randomness
from interop.data.numbers import whole


@dataclasses.dataclass
class MemberChoice:
    """The settings of a `SamplerEnsemble`, which an ensemble of buffers shares with the sampler it shows."""

    members: int
    shares: np.ndarray | None = None  # of sum 1; None for equal ones
    from_all: bool = False
    given_parts: int | None = None

    @classmethod
    def of(cls, members: int, p: Any, from_all: bool, parts: int | None) -> Self:
        """The choice with the arguments of a `SamplerEnsemble`."""
        made = cls(members, from_all=bool(from_all))
        made.parts, made.p = parts, p
        return made

    @property
    def parts(self) -> int:
        """Parts of a batch. None sets it back to the number of members."""
        return self.members if self.from_all or self.given_parts is None else self.given_parts

    @parts.setter
    def parts(self, value: int | None) -> None:
        self.given_parts = None if value is None else whole("num_buffer_sampled", value)

    @property
    def p(self) -> Tensor | None:
        """How often each member is chosen, of sum 1; None for equally often."""
        return None if self.shares is None else torch.from_numpy(self.shares.astype(np.float32))

    @p.setter
    def p(self, value: Sequence[float] | Tensor | None) -> None:
        if value is not None and self.from_all:
            raise RuntimeError("p and sample_from_all exclude each other: all members are sampled from")
        self.shares = None if value is None else _shares(value, self.members)

    def over(self, places: Sequence[int]) -> Self:
        """The choice among some of the members. ValueError where all of them have a p of 0."""
        shares = None if self.shares is None else self.shares[places]
        if shares is not None:
            if not shares.any():
                raise ValueError(f"members {places} have a p of 0: an ensemble of them would never sample")
            shares = shares / shares.sum()
        return dataclasses.replace(self, members=len(places), shares=shares)

    def part_of(self, batch_size: int) -> int:
        """How many items of a batch each part has. ValueError where the batch cannot be divided so."""
        each, rest = divmod(batch_size, self.parts)
        if rest:
            raise ValueError(f"the batch size must be divisible by num_buffer_sampled={self.parts}, got {batch_size}")
        return each

    def refuse_empty(self, sizes: Iterable[int]) -> None:
        """RuntimeError where a member that may be chosen has nothing stored."""
        for place, size in enumerate(sizes):
            if size == 0 and (self.shares is None or self.shares[place] > 0):
                raise RuntimeError(
                    f"Cannot sample from an empty storage: member {place} of the ensemble has no items. Call its extend() "
                    "first, or give it a p of 0"
                )

    def choose(self, key: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The member of each part of a batch, and the key of its draw."""
        numbers = randomness.generator_of(key)
        places: Sequence[int] = range(self.members)
        if not self.from_all:
            at = numbers.random(self.parts)
            if self.shares is None:
                places = (at * self.members).astype(np.int64).tolist()
            else:
                ends = self.shares.cumsum()
                places = (ends / ends[-1]).searchsorted(at, side="right").tolist()
        keys = numbers.integers(2**32, size=(len(places), 2), dtype=np.uint32)
        return list(zip(places, keys, strict=True))

    # ------------------------------------------------------------------ checkpoints

    def saved(self) -> dict[str, Any]:
        """A saved tree."""
        shares = None if self.shares is None else self.shares.tolist()
        return {"p": shares, "sample_from_all": self.from_all, "num_buffer_sampled": self.given_parts}

    def restoring(self, fields: Fields, entries: Entries) -> Callable[[], None]:
        """Check a saved tree; what is returned puts it in. Differences are noted in `entries`."""
        p, parts = fields.any("p"), fields.any("num_buffer_sampled")
        try:
            loaded = self.of(self.members, p, fields.flag("sample_from_all"), parts)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointCorrupt(f"the choice of members: {error}") from error
        here = self.saved()
        for name, value in loaded.saved().items():
            entries.parameter(name, value, here[name])
        return lambda: self.__dict__.update(loaded.__dict__)


def _shares(p: Any, count: int) -> np.ndarray:
    """What each member has of a whole of 1."""
    try:
        given = p.detach().cpu().double().numpy() if isinstance(p, Tensor) else np.asarray(p)
    except (TypeError, ValueError) as error:
        raise TypeError(f"p must be a list of numbers, got {p!r}") from error
    if given.dtype.kind not in "fiu":
        raise TypeError(f"p must be a list of numbers, got {p!r}")
    given = given.astype(np.float64)
    if given.shape != (count,):
        raise ValueError(f"p must have one number for each of the {count} members, got shape {list(given.shape)}")
    if not (np.isfinite(given).all() and (given >= 0).all() and given.any()):
        raise ValueError(f"p must be finite, at least 0, and not 0 for every member, got {given.tolist()}")
    if abs((given / count).sum() - 1 / count) < 1e-12:  # as they were saved, to the last bit
        return given
    given = given / given.max()  # a sum of the numbers as they came might be infinite
    return given / given.sum()

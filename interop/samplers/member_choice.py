"""Which members of an ensemble give the parts of a batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop.checkpoint.state import Apply, Entries
from interop.data import randomness
from interop.data.arguments import whole


class MemberChoice:
    """Chooses members for the parts of a batch.

    Args:
        count: how many members there are.
        p, sample_from_all, num_buffer_sampled: as for `SamplerEnsemble`. They may be set between draws.
    """

    def __init__(
        self,
        count: int,
        p: Sequence[float] | Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        self.count = count
        self.sample_from_all = bool(sample_from_all)
        self.num_buffer_sampled = num_buffer_sampled
        self.p = p

    @property
    def num_buffer_sampled(self) -> int:
        """Parts of a batch. Set it to None for the number of members."""
        return self.count if self.sample_from_all or self._parts is None else self._parts

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        self._parts = None if value is None else whole("num_buffer_sampled", value)

    @property
    def p(self) -> Tensor | None:
        """Relative frequencies of the members, of sum 1; None if they are equal. Can be set."""
        return None if self._p is None else torch.from_numpy(self._p.astype(np.float32))

    @p.setter
    def p(self, value: Sequence[float] | np.ndarray | Tensor | None) -> None:
        if value is not None and self.sample_from_all:
            raise RuntimeError("p and sample_from_all exclude each other: all members are sampled from")
        self._p = None if value is None else _normalised(value, self.count)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The parameters on which batches depend."""
        return self._parts, self._p, self.sample_from_all

    def part_of(self, batch_size: int, sizes: Iterable[int]) -> int:
        """Items of each part of a batch, of members of these sizes. The errors of `SamplerEnsemble.draw`."""
        part_size, rest = divmod(batch_size, self.num_buffer_sampled)
        if rest:
            parts = self.num_buffer_sampled
            raise ValueError(f"the batch size must be divisible by num_buffer_sampled={parts}, got {batch_size}")
        for place, size in enumerate(sizes):
            if size == 0 and (self._p is None or self._p[place] > 0):
                raise RuntimeError(
                    f"Cannot sample from an empty storage: member {place} of the ensemble has no items. Call its extend() "
                    "first, or give it a p of 0"
                )
        return part_size

    def choose(self, key: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The member and the key of each part of a batch."""
        numbers = randomness.generator_of(key)
        places: Sequence[int] = range(self.count)
        if not self.sample_from_all:
            at = numbers.random(self.num_buffer_sampled)
            if self._p is None:
                places = (at * self.count).astype(np.int64).tolist()
            else:
                ends = self._p.cumsum()
                places = (ends / ends[-1]).searchsorted(at, side="right").tolist()
        keys = numbers.bit_generator.random_raw(len(places)).view(np.uint32).reshape(-1, 2)
        return list(zip(places, keys, strict=True))

    def shares(self) -> np.ndarray:
        """The probability that a part of a batch, whichever it is, is of each member, float64 [count]."""
        return np.full(self.count, 1 / self.count) if self._p is None else self._p / self._p.sum()

    def of_some(self, places: Sequence[int]) -> "MemberChoice":
        """The choice among some of the members. ValueError where none of them would be chosen."""
        some = MemberChoice(len(places), None, self.sample_from_all, self._parts)
        if self._p is not None:
            if not self._p[places].any():
                raise ValueError(f"members {places} have a p of 0: an ensemble of them would never sample")
            some.p = self._p[places]
        return some

    def state(self) -> dict[str, Any]:
        """The parameters, as a part of a saved tree."""
        p = None if self._p is None else self._p.tolist()
        return {"p": p, "sample_from_all": self.sample_from_all, "num_buffer_sampled": self._parts}

    def with_state(self, fields: Fields, entries: Entries) -> Apply:
        """Check a result of `state`; the returned function sets the parameters. Notes differences in `entries`."""
        p = fields.any("p")
        parts = fields.any("num_buffer_sampled")
        from_all = fields.flag("sample_from_all")
        try:
            loaded = MemberChoice(self.count, p, from_all, parts)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointCorrupt(f"the choice of members: {error}") from error
        for name, value in loaded.state().items():
            entries.parameter(name, value, self.state()[name])

        return lambda: vars(self).update(vars(loaded))


def _normalised(p: Any, count: int) -> np.ndarray:
    """`count` numbers in proportion to p, of sum 1."""
    try:
        shares = p.detach().cpu().double().numpy() if isinstance(p, Tensor) else np.asarray(p)
    except (TypeError, ValueError) as error:
        raise TypeError(f"p must be a list of numbers, got {p!r}") from error
    if shares.dtype.kind not in "fiu":
        raise TypeError(f"p must be a list of numbers, got {p!r}")
    shares = shares.astype(np.float64)
    if shares.shape != (count,):
        raise ValueError(f"p must have one number for each of the {count} members, got shape {list(shares.shape)}")
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
        raise ValueError(f"p must be finite, at least 0, and not 0 for every member, got {shares.tolist()}")
    if abs((shares / count).sum() - 1 / count) < 1e-12:  # a saved p stays the same to the last bit
        return shares
    shares = shares / shares.max()  # the sum of very large numbers would be infinite
    return shares / shares.sum()

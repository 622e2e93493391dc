"""Specs of choices stored as one-hot vectors."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Size, Tensor

from interop.specs import shapes
from interop.specs.boxes import BoxList, CategoricalBox
from interop.specs.categorical import Categorical, sizes_of
from interop.specs.masks import Choices, any_allowed, combined, counted
from interop.specs.multi_categorical import MultiCategorical
from interop.specs.one_hot_classes import encodes
from interop.specs.spec import TensorSpec


@encodes(Categorical)
class OneHot(Choices):
    """One-hot vectors in the last dim: one of n entries is 1, the others are 0.

    `encode` takes choices as ints, lists, arrays or tensors of ints. AssertionError for a choice of n or more.

    Args:
        n: the size of the last dim.
        shape: (n,) by default. ValueError unless the last size is n.
        dtype: bool by default.
        use_register: `encode` accepts any numbers, and numbers them by first appearance.
        mask: a bool tensor, True for allowed entries, that can be expanded to `shape`.
    """

    structural = 1
    rigid = True
    _compared = ("shape", "dtype", "device", "domain", "_sizes", "use_register")

    def __init__(
        self, n: Any, shape: Any = None, device: Any = None, dtype: Any = torch.bool,
        use_register: bool = False, mask: Any = None,
    ) -> None:  # fmt: skip
        self._sizes = sizes_of(self._groups(n))
        total = sum(self._sizes)
        self._set((total,) if shape is None else shape, device, dtype or torch.bool)
        if self.shape[-1:] != (total,):
            raise ValueError(f"the last dim of {type(self).__name__} must be {total}, got shape={list(self.shape)}")
        self.use_register = bool(use_register)
        self._register: dict[Any, int] = {}
        if mask is not None:
            self.update_mask(mask)

    def _groups(self, n: Any) -> Any:
        return [n]

    def _box(self) -> object:
        return CategoricalBox(self.n)

    def _set_space(self, box: object) -> None:
        if box != self.space:
            raise ValueError(
                f"the space of {self.shape[-1:]} entries is {self.space}, got {box!r:.200}: make a new spec"
            )

    @property
    def n(self) -> int:
        """The size of the last dim."""
        return self.shape[-1]

    def update_mask(self, mask: Any) -> None:
        mask = None if mask is None else torch.as_tensor(mask)
        super().update_mask(mask.flatten() if mask is not None and mask.numel() == self.n else mask)

    def _mask_shape(self) -> Size:
        return shapes.concrete(self.shape)

    def _hot(self, choices: Sequence[Tensor]) -> Tensor:
        """One-hot vectors, bool [..., total], of one choice per group, int64 [...]. Invalid choices give zeros."""
        parts = [each.unsqueeze(-1) == torch.arange(size, device=each.device)
                 for each, size in zip(choices, self._sizes, strict=True)]  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _draw(self, lead: Size) -> Tensor:
        size = (*lead, *shapes.concrete(self._free(self.shape)))
        if self._allowed is None:
            chosen = [torch.randint(each, size, device=self.device) for each in self._sizes]
        else:
            chosen = [any_allowed(each) for each in self._allowed.expand(*size, -1).split(self._sizes, -1)]
        return self._hot(chosen).to(self.dtype)

    def _contains(self, val: Tensor) -> bool:
        hot = val if val.dtype == torch.bool else val != 0
        if not (hot is val or bool((val == hot).all())):
            return False
        one_each = all(bool((group.sum(-1) == 1).all()) for group in hot.split(self._sizes, -1))
        return one_each and (self._allowed is None or not bool((hot & ~self._allowed).any()))

    def _corrected(self, val: Tensor) -> Tensor:
        """Pick a random nonzero allowed entry, or else any allowed entry. RuntimeError for all zeros."""
        allowed = torch.ones_like(val, dtype=torch.bool) if self._allowed is None else self._allowed.expand(val.shape)
        chosen = []
        for hot, open_ in zip((val != 0).split(self._sizes, -1), allowed.split(self._sizes, -1), strict=True):
            if not hot.any(-1).all():
                raise RuntimeError(f"a vector of zeros cannot be projected: it names no entry, got {val!r:.200}")
            both = hot & open_
            chosen.append(any_allowed(torch.where(both.any(-1, keepdim=True), both, open_)))
        return self._hot(chosen).to(self.dtype)

    def cardinality(self) -> int | Tensor:
        """The number of values: the product of the sizes, to the power of the number of vectors."""
        return math.prod(self._sizes) ** shapes.concrete(self._free(self.shape)).numel()

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All values, [number, *shape]; with `use_mask` those that the mask allows. ValueError if they are too many."""
        free = shapes.concrete(self._free(self.shape))
        groups = [torch.arange(size, device=self.device) for size in self._sizes]
        if use_mask and self._allowed is not None:
            masks = [row.split(self._sizes) for row in self._allowed.reshape(-1, sum(self._sizes))]
            choices = [group[allowed] for row in masks for group, allowed in zip(groups, row, strict=True)]
        else:
            choices = groups * free.numel()
        chosen = combined(choices, groups[0]).reshape(-1, *free, len(groups))
        return self._hot(chosen.unbind(-1)).to(self.dtype)

    def index(self, index: Tensor, tensor_to_index: Tensor) -> Tensor:
        """Gather from a tensor at the hot positions of its last dim, one entry per group.

        Leading dims are broadcast: a 1-d index is used for every row.
        """
        starts = itertools.accumulate(self._sizes[:-1], initial=0)
        groups = zip(index.split(self._sizes, -1), starts, strict=True)
        found = torch.stack([group.to(torch.int8).argmax(-1) + start for group, start in groups], -1)
        lead = torch.broadcast_shapes(found.shape[:-1], tensor_to_index.shape[:-1])
        return tensor_to_index.expand(*lead, -1).gather(-1, found.expand(*lead, -1))

    def _encoded(self, val: Any, ignore_device: bool) -> Tensor:
        if self.use_register:
            val = self._registered(val)
        chosen = self._choices(val, ignore_device)
        hot = self._hot([chosen])
        if int(hot.count_nonzero()) != chosen.numel():
            raise AssertionError(f"Value must be less than action space: of [0, {self.n}), got {val!r:.200}")
        return hot if self.dtype == torch.bool else hot.to(self.dtype)

    def _choices(self, val: Any, ignore_device: bool) -> Tensor:
        return self._as_tensor(np.asarray(val) if isinstance(val, list | tuple) else val, torch.int64, ignore_device)

    def _registered(self, val: Any) -> Any:
        if isinstance(val, list | tuple | np.ndarray | Tensor) and np.ndim(val):
            return [self._registered(each) for each in val]
        number = val.item() if isinstance(val, np.ndarray | np.generic | Tensor) else val
        if number not in self._register and len(self._register) == self.n:
            raise RuntimeError(f"the register of {self.n} values is full, it has no place for {number!r}")
        return self._register.setdefault(number, len(self._register))

    def to_numpy(self, val: Tensor, safe: bool | None = None) -> Any:
        """The choices as an array without the last dim; with a register, the original values."""
        chosen = self.to_categorical(val, safe).cpu().numpy()
        if not self.use_register:
            return chosen
        known = list(self._register)
        return np.asarray([known[each] for each in np.atleast_1d(chosen).flat]).reshape(chosen.shape)[()]

    def to_categorical(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """The choices of one-hot vectors, int64 without the last dim."""
        self._assert_safe(val, safe)
        return val.to(torch.int8).argmax(-1)

    def to_categorical_spec(self) -> TensorSpec:
        """The spec of the same choices as numbers, without the last dim."""
        return Categorical(self.n, self.shape[:-1], self.device, mask=self.mask)

    to_one_hot, to_one_hot_spec = Choices.unchanged, Choices.itself

    def _replaced(self, **fields: Any) -> Self:
        return super()._replaced(**{"_register": dict(self._register), **fields})

    def _regrouped(self, new: Size) -> Self:
        if new[-1:] == self.shape[-1:] or self._allowed is not None or len(self._sizes) > 1:
            return super()._regrouped(new)
        return self._replaced(shape=new, _sizes=[new[-1]])  # n is the new last size


@encodes(MultiCategorical)
class MultiOneHot(OneHot):
    """Several one-hot vectors, concatenated in the last dim.

    Args:
        nvec: the size of each vector; the last dim has their sum.
        shape, device, dtype, use_register, mask: as for `OneHot`.
    """

    def __init__(
        self, nvec: Any, shape: Any = None, device: Any = None, dtype: Any = torch.bool,
        use_register: bool = False, mask: Any = None,
    ) -> None:  # fmt: skip
        self.nvec = nvec
        super().__init__(nvec, shape, device, dtype, use_register, mask)

    def _groups(self, n: Any) -> Any:
        return n

    def _box(self) -> BoxList:
        return BoxList([CategoricalBox(size) for size in self._sizes])

    def _set_space(self, box: object) -> None:
        sizes = [each.n for each in box] if isinstance(box, BoxList) else None
        if sizes is None or sum(sizes) != self.shape[-1]:
            raise ValueError(f"the space is a BoxList of {self.shape[-1]} entries in all, got {box!r:.200}")
        if self._allowed is not None and sizes != self._sizes:
            raise ValueError(f"the mask is of groups of {self._sizes}, not of {sizes}: call update_mask(None) first")
        self._sizes, self.nvec = sizes_of(sizes), sizes

    def cardinality(self) -> Tensor:
        """The product of the sizes, to the power of the number of rows. OverflowError from 2**63 on."""
        return counted(int(super().cardinality()))

    def _encoded(self, val: Any, ignore_device: bool) -> Tensor:
        chosen = self._choices(val, ignore_device)
        hot = self._hot(chosen.unbind(-1)) if chosen.shape[-1:] == (len(self._sizes),) else None
        if hot is None or int(hot.count_nonzero()) != chosen.numel():
            sizes = self._sizes
            raise RuntimeError(
                f"needed is one integer for each of {len(sizes)} groups, below {sizes}, got {val!r:.200}"
            )
        return self._shaped(hot.to(self.dtype))

    def to_categorical(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """The choices, int64 [..., len(nvec)]."""
        self._assert_safe(val, safe)
        return torch.stack([each.to(torch.int8).argmax(-1) for each in val.split(self._sizes, -1)], -1)

    def to_categorical_spec(self) -> TensorSpec:
        """The spec of the same choices as numbers, one for each group of the last dim."""
        return MultiCategorical(self.nvec, (*self.shape[:-1], len(self._sizes)), self.device, mask=self.mask)

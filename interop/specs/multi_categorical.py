"""The spec of several choices of different sizes, stored as integers."""

import math
from typing import Any, Self

import numpy as np
import torch
from torch import Size, Tensor

from interop.data.arguments import whole
from interop.specs import shapes
from interop.specs.boxes import BoxList, limits
from interop.specs.categorical import Categorical
from interop.specs.masks import as_mask, combined, counted
from interop.specs.one_hot_classes import one_hot_of
from interop.specs.spec import refused


class MultiCategorical(Categorical):
    """Integers with a range for each entry: entry i is from 0 to nvec[i] - 1.

    Args:
        nvec: the sizes: an int, a sequence, or a tensor of any number of dims.
        shape: by default the shape of nvec. ValueError unless it ends with that shape.
        dtype: int64 by default.
        mask: a bool tensor, True for allowed choices, that can be expanded to [*shape[:-1], sum(nvec)]: the choices of all
            entries, concatenated.
        remove_singleton: draw scalars if the shape is [1].
    """

    rigid = True
    _compared = ("shape", "dtype", "device", "domain")
    _parts = ("nvec", "_allowed")  # the mask of each entry, [*shape, largest size]

    def __init__(
        self, nvec: Any, shape: Any = None, device: Any = None, dtype: Any = torch.int64, mask: Any = None,
        remove_singleton: bool = True,
    ) -> None:  # fmt: skip
        sizes = torch.as_tensor(_whole_sizes(nvec), dtype=torch.int64)
        sizes = sizes if sizes.ndim else sizes.unsqueeze(0)
        self._set(sizes.shape if shape is None else shape, device, dtype)
        if self.shape[-1:] != sizes.shape[-1:] or len(self.shape) < sizes.ndim:
            raise ValueError(f"the shape must end as that of nvec, {list(sizes.shape)}, got {list(self.shape)}")
        if sizes.numel() and sizes.min() < 1:
            raise ValueError(f"the sizes in nvec must be at least 1, got {sizes.tolist()}")
        if sizes.numel() and int(sizes.max()) - 1 > limits(dtype)[1]:
            raise ValueError(f"{dtype} holds at most {limits(dtype)[1] + 1} choices, got nvec={sizes.tolist()}")
        self.nvec = sizes.to(self.device).expand(shapes.concrete(self.shape))
        self.remove_singleton = bool(remove_singleton)
        if mask is not None:
            self.update_mask(mask)

    def _box(self) -> BoxList:
        return BoxList.from_nvec(self.nvec)

    def _set_space(self, box: object) -> None:
        if not isinstance(box, BoxList):
            raise TypeError(f"the space of a MultiCategorical is a BoxList, got {box!r:.200}")
        new = type(self)(box.sizes(), self.shape, self.device, self.dtype)
        if self._allowed is not None and not torch.equal(new.nvec, self.nvec):
            raise ValueError("the mask is of other sizes: call update_mask(None) before the space is set")
        self.nvec = new.nvec

    @property
    def n(self) -> int:
        """AttributeError: the size of each entry is in `nvec`."""
        raise AttributeError("MultiCategorical has no n: the sizes are in nvec")

    @property
    def mask(self) -> Tensor | None:
        if self._allowed is None:
            return None
        return torch.cat([self._allowed[..., at, :size] for at, size in enumerate(self._row("mask"))], -1)

    set_provisional_n = refused("the sizes are in nvec, which is known")

    def update_mask(self, mask: Any) -> None:
        if mask is None:
            self._allowed = None
            return
        sizes = self._row("mask")
        lead = shapes.concrete(self.shape[:-1])
        groups = as_mask(mask, Size((*lead, sum(sizes))), self.device).split(sizes, -1)
        most = max(sizes)
        self._allowed = torch.stack([torch.nn.functional.pad(each, (0, most - each.shape[-1])) for each in groups], -2)

    def _row(self, what: str) -> list[int]:
        """The sizes along the last dim. RuntimeError if they differ between rows."""
        if not self._is_even:
            raise RuntimeError(f"a {what} needs the same sizes in every row, nvec is {self.nvec.tolist()}")
        return [int(each) for each in self.nvec.reshape(-1, self.nvec.shape[-1])[0]]

    @property
    def _is_even(self) -> bool:
        """Whether all rows have the same sizes."""
        rows = self.nvec.reshape(-1, self.nvec.shape[-1])
        return bool((rows == rows[:1]).all())

    @property
    def _is_scalar(self) -> bool:
        return self.remove_singleton and self.shape == (1,)

    @property
    def _limit(self) -> Tensor:
        return self.nvec

    def _free_draw(self, size: Size) -> Tensor:
        share = torch.rand(size, dtype=torch.float64, device=self.device)
        return torch.minimum((share * self.nvec).to(torch.int64), self.nvec - 1)

    def _draw(self, lead: Size) -> Tensor:
        drawn = super()._draw(lead)
        return drawn.squeeze(-1) if self._is_scalar else drawn

    def _fits(self, shape: Size) -> bool:
        return self._is_scalar or super()._fits(shape)

    def _entries(self, val: Tensor) -> Tensor:
        """The value with the dims of the spec; scalars become [1]."""
        return val.unsqueeze(-1) if self._is_scalar and val.shape[-1:] != (1,) else val

    def cardinality(self) -> Tensor:
        """The number of values: the product of the sizes of all entries. OverflowError from 2**63 on."""
        return counted(math.prod(self.nvec.flatten().tolist()))

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All values, [number, *shape]; with `use_mask` those that the mask allows. ValueError if they are too many."""
        sizes = self.nvec.flatten().tolist()
        choices = [torch.arange(size, device=self.device).to(self.dtype) for size in sizes]
        if use_mask and self._allowed is not None:
            rows = self._allowed.reshape(len(sizes), -1)  # [entries, largest size]
            choices = [each[row[: len(each)]] for each, row in zip(choices, rows, strict=True)]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return combined(choices, like).reshape(-1, *self.nvec.shape)

    index = refused("a value has several choices, it is no index")

    def to_one_hot(self, val: Tensor, safe: bool | None = None) -> Any:
        """Encode a value as concatenated one-hot vectors, bool [..., sum(nvec)]; nested tensors if rows differ in nvec."""
        self._assert_safe(val, safe)
        val = self._entries(val).to(torch.int64)
        if not self._is_even:
            if val.ndim != self.nvec.ndim:
                raise RuntimeError(f"rows differ in nvec: values of shape {list(val.shape)} have no one-hot form")
            rows = zip(self.unbind(), val, strict=True)
            return torch.nested.nested_tensor([one.to_one_hot(each) for one, each in rows])
        hot = [torch.nn.functional.one_hot(val[..., at], size) for at, size in enumerate(self._row("one-hot form"))]
        return torch.cat(hot, -1).to(torch.bool)

    def to_one_hot_spec(self) -> Any:
        """The spec of `to_one_hot` values: a `MultiOneHot`, or a stack of them if rows differ in nvec."""
        if not self._is_even:
            return torch.stack([each.to_one_hot_spec() for each in self.unbind()], 0)
        sizes = self._row("one-hot form")
        return one_hot_of(MultiCategorical)(sizes, (*self.shape[:-1], sum(sizes)), self.device, mask=self.mask)

    def _selected(self, index: Any) -> Self:
        made = super()._selected(index)
        return made if made.shape else made.unflatten_scalar()

    def unflatten_scalar(self) -> Self:
        """A spec of shape [1] for a scalar spec."""
        one = None if self._allowed is None else self._allowed.unsqueeze(0)
        return self._replaced(shape=Size([1]), nvec=self.nvec.unsqueeze(0), _allowed=one)


def _whole_sizes(nvec: Any) -> int | list[Any]:
    """The sizes as ints, in nested lists. TypeError for what is no whole number."""
    given = nvec.tolist() if isinstance(nvec, Tensor | np.ndarray) and nvec.ndim else nvec
    return [_whole_sizes(each) for each in given] if isinstance(given, list | tuple) else whole("nvec", given, -(2**63))

"""Specs of choices stored as integers (`Categorical`) and of bits (`Binary`)."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Size, Tensor

from interop.data.arguments import whole
from interop.specs import shapes, torchrl_classes
from interop.specs.boxes import CategoricalBox, limits
from interop.specs.masks import Choices, any_allowed, combined
from interop.specs.one_hot_classes import one_hot_of
from interop.specs.spec import TensorSpec, refused


class Categorical(Choices):
    """Integers from 0 to n - 1.

    Args:
        n: the number of choices; -1 if unknown, see `set_provisional_n`.
        shape: () by default.
        dtype: int64 by default; bool is allowed for n <= 2.
        mask: a bool tensor, True for allowed choices, that can be expanded to [*shape, n].
    """

    _compared: ClassVar[tuple[str, ...]] = ("shape", "dtype", "device", "domain", "_size")

    def __init__(
        self, n: int, shape: Any = None, device: Any = None, dtype: torch.dtype = torch.int64, mask: Any = None
    ) -> None:
        self._size = _count(n, dtype)
        self._set(() if shape is None else shape, device, dtype)
        if mask is not None:
            self.update_mask(mask)

    def _box(self) -> object:
        return CategoricalBox(self._size)

    def _set_space(self, box: object) -> None:
        if not isinstance(box, CategoricalBox):
            raise TypeError(f"the space of a {type(self).__name__} is a CategoricalBox, got {box!r:.200}")
        if self._allowed is not None and box.n != self._size:
            raise ValueError(f"the mask is of {self._size} choices, not of {box.n}: call update_mask(None) first")
        self.set_provisional_n(box.n)

    @property
    def n(self) -> int:
        """The number of choices. RuntimeError if it is unknown."""
        if self._size == -1:
            raise RuntimeError(f"Undefined cardinality for {type(self).__name__}: call set_provisional_n(n) first")
        return self._size

    def set_provisional_n(self, n: int) -> None:
        """Set the number of choices, in place."""
        self._size = _count(n, self.dtype)

    def _mask_shape(self) -> Size:
        return Size((*shapes.concrete(self.shape), self.n))

    @property
    def _limit(self) -> Any:
        """The number of choices of each entry; None if unknown."""
        return None if self._size == -1 else self._size

    def _entries(self, val: Tensor) -> Tensor:
        """The value with the dims of the spec."""
        return val

    def _free_draw(self, size: Size) -> Tensor:
        return torch.randint(self.n, size, device=self.device)

    def _draw(self, lead: Size) -> Tensor:
        size = Size((*lead, *shapes.concrete(self.shape)))
        if self._allowed is None:
            return self._free_draw(size).to(self.dtype)
        return any_allowed(self._allowed.expand(*size, -1)).to(self.dtype)

    def _contains(self, val: Tensor) -> bool:
        limit, val = self._limit, self._entries(val)
        if limit is None:
            return True
        inside = (val >= 0) & (val <= limit - 1)  # n itself may overflow the dtype
        if val.is_floating_point():
            inside &= val == val.round()
        return bool(inside.all()) and (self._allowed is None or bool(self._allows(val).all()))

    def _allows(self, val: Tensor) -> Tensor:
        assert self._allowed is not None
        return self._allowed.expand(*val.shape, -1).gather(-1, val.to(torch.int64).unsqueeze(-1)).squeeze(-1)

    def _corrected(self, val: Tensor) -> Tensor:
        """Round and clamp. A masked choice is replaced by a random allowed one."""
        limit = self._limit
        number = self._entries(val.nan_to_num(0).round() if val.is_floating_point() else val.to(torch.int64))
        number = (number if limit is None else number.clamp(min=0).clamp(max=limit - 1)).to(self.dtype)
        if self._allowed is not None:
            other = any_allowed(self._allowed.expand(*number.shape, -1)).to(self.dtype)
            number = torch.where(self._allows(number), number, other)
        return number.reshape(val.shape)

    def cardinality(self) -> int | Tensor:
        """The number of values: n to the power of the number of entries."""
        return self.n ** shapes.concrete(self.shape).numel()

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All values, [number, *shape]; with `use_mask` those that the mask allows. ValueError if they are too many."""
        shape, values = shapes.concrete(self.shape), torch.arange(self.n, device=self.device).to(self.dtype)
        if use_mask and self._allowed is not None:
            choices = [values[allowed] for allowed in self._allowed.reshape(-1, self.n)]
        else:
            choices = [values] * shape.numel()
        return combined(choices, values).reshape(-1, *shape)

    def index(self, index: Tensor, tensor_to_index: Tensor) -> Tensor:
        """Gather from a tensor along its last dim, with the choices as index. A 1-d index is used for every row."""
        index = index.to(torch.int64)
        if not index.ndim and tensor_to_index.ndim == 1:
            return tensor_to_index.gather(-1, index)
        index = index.reshape(index.shape or (1,))
        return tensor_to_index.gather(-1, index.expand(*tensor_to_index.shape[:-1], index.shape[-1]))

    def to_one_hot(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """Encode a value as one-hot vectors, bool [*val.shape, n]."""
        self._assert_safe(val, safe)
        return torch.nn.functional.one_hot(val.to(torch.int64), self.n).to(torch.bool)

    def to_one_hot_spec(self) -> TensorSpec:
        """The spec of the same choices as vectors with a single one, [*shape, n]."""
        return one_hot_of(Categorical)(self.n, (*self.shape, self.n), self.device, mask=self.mask)

    to_categorical, to_categorical_spec = Choices.unchanged, Choices.itself

    def __eq__(self, other: object) -> bool:
        other = torchrl_classes.comparable(other)
        pair = {type(self), type(other)}
        if pair == {Categorical, Binary} and isinstance(other, Categorical):  # a bit is a choice of two
            return self._allowed is None and other.mask is None and self._is_like(other)
        return super().__eq__(other)


class Binary(Categorical):
    """Vectors of bits: each entry is 0 or 1.

    Args:
        n: the size of the last dim.
        shape: (n,) by default.
        dtype: int8 by default.
    """

    structural = 1
    _parts = ()

    def __init__(
        self, n: int | None = None, shape: Any = None, device: Any = None, dtype: torch.dtype = torch.int8
    ) -> None:
        if n is None and shape is None:
            raise TypeError("Binary needs n, the size of the last dim, or a shape")
        n = None if n is None else whole("n", n, least=0)
        sizes = Size([n or 0]) if shape is None else shapes.as_shape(shape)
        if n is not None and (n != sizes[-1] if sizes else n != 0):
            raise ValueError(f"the last dim of a Binary is n: got n={n} and shape={list(sizes)}")
        super().__init__(2, sizes, device, dtype)

    def set_provisional_n(self, n: int) -> None:
        """ValueError unless n is 2: a bit is a choice of two."""
        if n != 2:
            raise ValueError(f"a bit is a choice of 2, got n={n}: use a Categorical")

    _mask_shape = refused("bits take no mask, use a MultiCategorical of twos")

    def _selected(self, index: Any) -> Self:
        if not self.shape:
            raise ValueError("a Binary with an empty shape cannot be indexed")
        return super()._selected(index)


def _count(n: Any, dtype: torch.dtype | None) -> int:
    count = whole("n", n, least=-(2**63))
    if count < 1 and count != -1:
        raise ValueError(f"n must be at least 1, or -1 for not known yet, got {count}")
    if dtype is not None and count - 1 > limits(dtype)[1]:
        raise ValueError(f"{dtype} holds at most {limits(dtype)[1] + 1} choices, got n={count}")
    return count


def sizes_of(nvec: Sequence[int] | Tensor) -> list[int]:
    """The group sizes as ints. ValueError for a size below 1."""
    sizes = [whole("nvec", each, least=-(2**63)) for each in nvec]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"nvec needs at least one size, each at least 1, got {sizes}")
    return sizes

"""The base class of specs: attributes, checks, encoding, shape operations, indexing and torch functions."""

import contextlib
import copy
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Size, Tensor

from fbuf.shown import Shown
from interop.data.item_specs import TORCHRL, ItemSpec
from interop.specs import shapes, torchrl_classes

Function = Callable[..., Any]
_FUNCTIONS: dict[Function, Function] = {}  # torch function -> its implementation for specs
_CHECKS = os.environ.get("CHECK_SPEC_ENCODE", "0").strip().lower() in ("1", "true")


class TensorSpec(Shown, ItemSpec):
    """Describes tensors: their shape, device and dtype, and the values they take.

    Values may have leading dims. Methods return new specs; only `make_neg_dim`, `update_mask` and `set_provisional_n`
    change a spec in place. Torchrl's transforms also assign to `shape`, `dtype` and the bounds of `space`, of clones.

    Torchrl's modules, transforms and environments take the specs where they take their own: after the program has
    imported torchrl, `isinstance` of its classes is True for the specs of the same names. Torchrl is never imported here.

    A leaf class defines `_contains`, `_draw` and `_corrected`. `_parts` names its tensors, such as bounds. Their first dims
    are those of the spec without its last `structural` ones; shape operations apply to them.

    Attributes:
        shape: the shape of a value; -1 for a dynamic dim, whose size differs between values.
        device: the device of values; by default torch's default device.
        dtype: the dtype of values.
        domain: "continuous", "discrete", "composite" or None.
        structural: the number of last dims that form one value; an index does not address them.
        rigid: whether shape operations leave the last dim unchanged.
    """

    shape: Size
    device: torch.device | None
    dtype: torch.dtype | None
    domain: str | None = None
    structural: int = 0
    rigid: bool = False
    _parts: ClassVar[tuple[str, ...]] = ()
    _compared: ClassVar[tuple[str, ...]] = ("shape", "dtype", "device", "domain")
    _memo: dict[Any, Any] | None = None

    @property
    def __class__(self) -> Any:
        """The class. `isinstance` of another library reads it first, which enters the specs in torchrl's classes."""
        if TORCHRL in sys.modules and not torchrl_classes.is_entered():
            torchrl_classes.enter(TensorSpec)
        return type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)

    def _set(self, shape: Any, device: Any, dtype: torch.dtype | None) -> None:
        self.shape = shapes.as_shape(shape)
        self.device = as_device(device)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    @property
    def space(self) -> Any:
        """The box of the values; None for a spec without one. A box that is assigned replaces the range."""
        return self._box()

    @space.setter
    def space(self, box: object) -> None:
        self._set_space(box)

    def _box(self) -> object:
        """The box of the values; None for a spec without one."""
        return None

    def _set_space(self, box: object) -> None:
        """Replace the range of the values, in place. TypeError for a box of another kind."""
        if box is not None:
            raise TypeError(f"a {type(self).__name__} has no space, got {box!r:.200}")

    @property
    def ndim(self) -> int:
        """The number of dims of a value."""
        return len(self.shape)

    def ndimension(self) -> int:
        """The number of dims of a value, as `ndim`."""
        return len(self.shape)

    # ------------------------------------------------------------------ values

    def rand(self, shape: Sequence[int] | None = None) -> Any:
        """A random value, [*shape, *self.shape]; dynamic dims have size 1."""
        return self._made("rand", shapes.leading(shape))

    def zero(self, shape: Sequence[int] | None = None) -> Any:
        """Zeros, [*shape, *self.shape], even if the spec excludes them."""
        return self._made("zero", shapes.leading(shape))

    def one(self, shape: Sequence[int] | None = None) -> Any:
        """Ones, [*shape, *self.shape], even if the spec excludes them."""
        return self._made("one", shapes.leading(shape))

    sample, zeros, ones = rand, zero, one

    def _made(self, how: str, lead: Size) -> Any:
        """Make a value; `how` is "rand", "zero" or "one"."""
        if how == "rand" and 0 not in self.shape:  # an empty value needs no draw
            return self._draw(lead)
        size = (*lead, *shapes.concrete(self.shape))
        return torch.full(size, how == "one", dtype=self.dtype, device=self.device)

    def _draw(self, lead: Size) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no values to draw")

    def is_in(self, val: Any) -> bool:
        """Whether a value has the dtype and shape of the spec, plus any leading dims, and lies in its range."""
        return self._has(val)

    contains = is_in

    def _has(self, val: Any) -> bool:
        is_like = isinstance(val, Tensor) and val.dtype == self.dtype and self._fits(val.shape)
        return is_like and (not val.numel() or self._contains(val))

    def _contains(self, val: Tensor) -> bool:
        """Whether a tensor of the right dtype and shape lies in the range."""
        return True

    def _fits(self, shape: Size) -> bool:
        return shapes.fits(self.shape, shape)

    def project(self, val: Any) -> Any:
        """The value itself if it is in the spec, otherwise a corrected copy; in `torch.compile` always a copy.

        Raises:
            RuntimeError: the value has another shape.
            TypeError: the value is no tensor.
        """
        is_compiled = torch.compiler.is_compiling()  # a branch on values would split the graph
        if not is_compiled and self._has(val):
            return val
        if not isinstance(val, Tensor):
            raise TypeError(f"{type(self).__name__} projects tensors, got {_about(val)}")
        if not self._fits(val.shape):
            raise RuntimeError(f"{_about(val)} cannot be projected: its shape must end as {list(self.shape)}")
        return self._corrected(val)

    def _corrected(self, val: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} cannot correct a value that is not in it: {_about(val)}")

    def assert_is_in(self, value: Any) -> None:
        """Raise AssertionError if a value is not in the spec."""
        if not self.is_in(value):
            raise AssertionError(f"{_about(value)} is not in {self}")

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Raise TypeError if a value has another dtype."""
        if value.dtype != self.dtype:
            where = "" if key is None else f" of {key!r}"
            raise TypeError(f"the value{where} has dtype {value.dtype}, the spec has {self.dtype}")

    # ------------------------------------------------------------------ raw values

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Encode a number, an array or a list as a tensor of the spec. A tensor is returned unchanged.

        Args:
            val: the raw value, reshaped to the shape of the spec.
            ignore_device: keep the result on the CPU.

        Raises:
            RuntimeError: the value and the spec differ in the number of elements.
            AssertionError: the value is not in the spec; checked only if the environment has CHECK_SPEC_ENCODE=1.
        """
        if self._memo is None or isinstance(val, Tensor):
            made = self._encoded(val, ignore_device)
        else:
            key = ignore_device, pickle.dumps(val)
            if key not in self._memo:
                self._memo[key] = self._encoded(val, ignore_device)
            made = self._memo[key].clone()
        if _CHECKS:
            self.assert_is_in(made)
        return made

    def _encoded(self, val: Any, ignore_device: bool) -> Any:
        if isinstance(val, Tensor):
            return val
        return self._shaped(self._as_tensor(val, self.dtype, ignore_device))

    def _as_tensor(self, val: Any, dtype: torch.dtype | None, ignore_device: bool) -> Tensor:
        if isinstance(val, list | tuple):
            val = val[0] if len(val) == 1 else np.asarray(val)
        device = torch.device("cpu") if ignore_device else self.device
        if not isinstance(val, np.ndarray):
            return torch.as_tensor(val, dtype=dtype, device=device)
        if val.ndim and min(val.strides) < 0:
            val = val.copy()
        made = torch.from_numpy(val)  # a third of the time of as_tensor with a device and a dtype
        return made if made.dtype == dtype and device == made.device else made.to(device, dtype)

    def _shaped(self, val: Tensor) -> Tensor:
        shape = self.shape
        if val.shape == shape or (val.ndim == len(shape) and shapes.fits(shape, val.shape)):
            return val
        if val.numel() != shapes.concrete(shape).numel():
            raise RuntimeError(f"Shape mismatch: the value has shape {list(val.shape)}, the spec has {list(shape)}")
        return val.reshape(shapes.concrete(shape))

    def memoize_encode(self, mode: bool = True) -> None:
        """Cache the results of `encode` until `erase_memoize_cache`. The cache has no size limit."""
        self._memo = {} if mode else None

    def erase_memoize_cache(self) -> None:
        """Drop the cached results of `encode`; later ones are cached again."""
        if self._memo is not None:
            self._memo = {}

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """The value as a NumPy array. With `safe`, AssertionError if it is not in the spec."""
        self._assert_safe(val, safe)
        return val.detach().cpu().numpy()

    def _assert_safe(self, val: Any, safe: bool | None) -> None:
        if _CHECKS if safe is None else safe:
            self.assert_is_in(val)

    # ------------------------------------------------------------------ all values

    def cardinality(self) -> Any:
        """The number of values, of all dims of the shape together; masks are not counted."""
        raise NotImplementedError(f"{type(self).__name__} has no cardinality")

    def enumerate(self, use_mask: bool = False) -> Any:
        """All values, [number, *self.shape], the last entry varies fastest; with `use_mask`, those that the mask allows."""
        raise NotImplementedError(f"the values of a {type(self).__name__} cannot be enumerated")

    def index(self, index: Any, tensor_to_index: Tensor) -> Tensor:
        """Gather from a tensor along its last dim, with a value of the spec as index."""
        raise NotImplementedError(f"a value of {type(self).__name__} is no index")

    # ------------------------------------------------------------------ shapes

    def _replaced(self, **fields: Any) -> Self:
        """A copy with some attributes replaced."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        if self._memo is not None:
            fields["_memo"] = {}
        made.__dict__.update(fields)
        return made

    def _changed(self, shape: Size, change: Callable[[Tensor, int], Tensor], **fields: Any) -> Self:
        """A copy of another shape; `change` maps each of its tensors, given the tensor and its number of spec dims.

        The tensors of the copy share no memory with those of the spec: bounds and masks may be changed in place.
        """
        lead = len(self.shape) - self.structural
        parts = {name: getattr(self, name) for name in self._parts}
        changed = {name: _copied(change(part, lead)) for name, part in parts.items() if part is not None}
        return self._replaced(shape=shape, **changed, **fields)

    def _free(self, shape: Size) -> Size:
        """The dims that shape operations may change."""
        return shape[: len(shape) - self.structural]

    def _keep_last(self, is_kept: bool) -> None:
        if not is_kept:
            raise ValueError(f"Final dimension of {type(self).__name__} must remain unchanged, it is {self.shape[-1:]}")

    def expand(self, *shape: Any) -> Self:
        """Add leading dims and enlarge dims of size 1: a new spec. ValueError if another size changes."""
        return self._expanded(shapes.expanded(self.shape, shapes.of_arguments(shape)))

    def _expanded(self, new: Size) -> Self:
        self._keep_last(not self.rigid or new[-1:] == self.shape[-1:])
        free = shapes.concrete(self._free(new))
        return self._changed(new, lambda part, lead: part.expand(*free, *part.shape[lead:]))

    def _regrouped(self, new: Size) -> Self:
        """The spec with its values regrouped to another shape."""
        self._keep_last(not self.rigid or new[-1:] == self.shape[-1:])
        if new == self.shape:
            return self
        free = shapes.concrete(self._free(new))
        return self._changed(new, lambda part, lead: part.reshape((*free, *part.shape[lead:])))

    def reshape(self, *shape: Any) -> Self:
        """The spec in another shape; one -1 is inferred. RuntimeError if the number of elements differs."""
        return self._regrouped(shapes.reshaped(self.shape, shapes.of_arguments(shape)))

    view = reshape

    def flatten(self, start_dim: int, end_dim: int) -> Self:
        """Merge dims `start_dim` to `end_dim` into one."""
        return self._regrouped(shapes.flattened(self.shape, start_dim, end_dim))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Split a dim into several."""
        return self._regrouped(shapes.unflattened(self.shape, dim, sizes))

    def squeeze(self, dim: int | None = None) -> Self:
        """Remove a dim of size 1, or all of them. The last dim of a rigid spec cannot be removed."""
        self._keep_last(not self.rigid or self.shape[-1] != 1 or dim not in (None, -1, self.ndim - 1))
        return self._regrouped(shapes.squeezed(self.shape, dim))

    def unsqueeze(self, dim: int) -> Self:
        """Insert a dim of size 1. A rigid spec accepts none behind its last dim."""
        new = shapes.unsqueezed(self.shape, dim)
        self._keep_last(not self.rigid or dim not in (-1, self.ndim))
        return self._regrouped(new)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """One spec per index of a dim. ValueError for a dynamic dim, or a last dim that is structural or rigid."""
        at = shapes.dim_of(dim, self.ndim)
        self._keep_last(at < self.ndim - 1 or not (self.structural or self.rigid))
        if self.shape[at] == -1:
            raise ValueError(f"dim {dim} of {list(self.shape)} is dynamic (-1): how many specs it has is not known")
        return tuple(self._selected((slice(None),) * at + (place,)) for place in range(self.shape[at]))

    def __getitem__(self, index: Any) -> Any:
        return self._selected(index)

    def _selected(self, index: Any) -> Self:
        """The spec of an indexed value. The index addresses the dims that are not structural."""
        free = self._free(self.shape)
        index = shapes.normalized(free, index)
        new = Size((*shapes.indexed(free, index), *self.shape[len(free) :]))
        if -1 in free:
            index = shapes.first_of_dynamic(free, index)
        return self._changed(new, lambda part, lead: shapes.select(part, index))

    def index_select(self, dim: int, index: Tensor) -> Self:
        """The spec of a value after `torch.index_select`."""
        at = shapes.dim_of(dim, self.ndim)
        self._keep_last(at < self.ndim - self.structural)
        return self._selected((slice(None),) * at + (index,))

    def make_neg_dim(self, dim: int) -> None:
        """Make a dim dynamic, in place. ValueError if the dim is out of range."""
        if not -self.ndim <= dim < self.ndim:
            raise ValueError(f"dim {dim} is not in [{-self.ndim}, {self.ndim - 1}]")
        at = dim % self.ndim
        new = Size([*self.shape[:at], -1, *self.shape[at + 1 :]])
        made = self._changed(new, lambda part, lead: part.narrow(at, 0, 1) if at < lead else part)
        self.__dict__.update(vars(made))

    def emptied(self, shape: Size) -> Self:
        """A spec of the same class for a shape with sizes of 0, which has no values."""
        return self._changed(shape, lambda part, lead: part.new_zeros((*self._free(shape), *part.shape[lead:])))

    # ------------------------------------------------------------------ copies

    def children(self) -> Iterable["TensorSpec"]:
        """The direct sub-specs."""
        return ()

    def nodes(self) -> Iterator["TensorSpec"]:
        """The spec and all nested specs."""
        yield self
        for each in self.children():
            yield from each.nodes()

    def unstacked(self) -> "list[tuple[tuple[str, ...], TensorSpec]]":
        """The spec under an empty path; the members of a lazy stack under their numbers, as text."""
        return [((), self)]

    def to(self, dest: Any) -> Self:
        """Move the spec to a device or cast it to a dtype. Returns the spec itself if nothing changes."""
        if dest is None:
            return self
        if isinstance(dest, torch.dtype):
            return self if dest == self.dtype else self._cast(dest)
        device = as_device(dest)
        if device == self.device:
            return self
        return self._changed(self.shape, lambda part, lead: part.to(device), device=device)

    def _cast(self, dtype: torch.dtype) -> Self:
        return self._replaced(dtype=dtype)

    def cpu(self) -> Self:
        """Move the spec to the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:
        """Move the spec to a CUDA device, by default the current one."""
        given = "cuda" if device is None else device
        return self.to(torch.device("cuda", given) if isinstance(given, int) else given)

    def clone(self) -> Self:
        """An equal spec that no change of the original changes, of its bounds or its mask in place included."""
        return self._changed(self.shape, lambda part, lead: part)

    def clear_device_(self) -> Self:
        """Do nothing: a spec of tensors always has a device."""
        return self

    # ------------------------------------------------------------------ comparison, text

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            other = torchrl_classes.comparable(other)
        return type(self) is type(other) and self._is_like(other)

    def _is_like(self, other: Any) -> bool:
        """Whether a spec of the same class is equal."""
        same = all(getattr(self, name) == getattr(other, name) for name in self._compared)
        return same and all(_same(getattr(self, name), getattr(other, name)) for name in self._parts)

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """Shape, dtype, device, domain and the range of values, for tables: see `fbuf.shown`."""
        yield from (("shape", list(self.shape)), ("dtype", str(self.dtype).removeprefix("torch.")))
        yield from (("device", str(self.device)), ("domain", self.domain or ""), ("values", range_of(self.space)))

    def __repr__(self) -> str:
        fields = [f"shape={self.shape}", f"space={self.space}", f"device={self.device}", f"dtype={self.dtype}"]
        return block(type(self).__name__, [*fields, f"domain={self.domain}"])

    # ------------------------------------------------------------------ torchrl: names that its classes read

    @property
    def _safe_shape(self) -> Size:
        return shapes.concrete(self.shape)

    def _project(self, val: Any) -> Any:
        return self.project(val)

    # ------------------------------------------------------------------ torch

    @classmethod
    def implements_for_spec(cls, torch_function: Function) -> Callable[[Function], Function]:
        """Decorator: register an implementation of a torch function for specs."""

        def register(function: Function) -> Function:
            _FUNCTIONS[torch_function] = function
            return function

        return register

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = _FUNCTIONS.get(func)
        return NotImplemented if function is None else function(*args, **(kwargs or {}))


def refused(text: str) -> Any:
    """A method for an unsupported operation. It raises NotImplementedError with the reason `text`."""

    def method(self: TensorSpec, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}: {text}")

    return method


@contextlib.contextmanager
def all_or_nothing(spec: TensorSpec) -> Iterator[None]:
    """Roll back in-place changes of a spec and its nested specs after an error."""
    before = [(vars(each), {name: copy.copy(value) if isinstance(value, dict | list) else value
                            for name, value in vars(each).items()}) for each in spec.nodes()]  # fmt: skip
    try:
        yield
    except BaseException:
        for fields, kept in before:
            fields.clear()
            fields.update(kept)
        raise


def as_device(device: Any) -> torch.device:
    """The device, with its index if it needs one; torch's default device for None."""
    found = torch.get_default_device() if device is None else torch.device(device)
    needs_number = found.type == "cuda" and found.index is None
    return torch.device("cuda", torch.cuda.current_device()) if needs_number else found


def range_of(space: object) -> str:
    """The range of a box as text; "" for values without one."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if isinstance(low, Tensor) and isinstance(high, Tensor) and low.numel() and not low.is_meta:
        least, most = low.min().item(), high.max().item()
        return f"{least:.4g} to {most:.4g}" if low.is_floating_point() else f"{least} to {most}"
    n = getattr(space, "n", None)
    return "" if n is None else f"n = {n}"


def block(title: str, rows: list[str]) -> str:
    """A multi-line string: the title, and the rows in brackets."""
    return f"{title}(\n    " + ",\n".join(rows).replace("\n", "\n    ") + ")"


def _copied(part: Tensor) -> Tensor:
    """A copy of a tensor; expanded dims stay expanded, and take no memory."""
    expanded = [stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape, strict=True)]
    if not any(expanded):
        return part.clone()
    return part[tuple(slice(1) if is_expanded else slice(None) for is_expanded in expanded)].clone().expand(part.shape)


def _about(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a value of shape {list(value.shape)}, {value.dtype}, on {value.device}, {value!r:.200},"
    return f"{value!r:.200}"


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (one.is_floating_point() and torch.allclose(one, other))


TensorSpec.implements_for_spec(torch.squeeze)(lambda input, dim=None: input.squeeze(dim))
TensorSpec.implements_for_spec(torch.unsqueeze)(lambda input, dim: input.unsqueeze(dim))
TensorSpec.implements_for_spec(torch.index_select)(lambda input, dim, index: input.index_select(dim, index))

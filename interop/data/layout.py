"""A batch becomes a list of leaves, and leaves become a batch again: the layout of an item, fixed at the first write."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Self

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor

from interop.data.array_leaves import as_leaf
from interop.data.bridge import DTYPES
from interop.data.keys import nearest
from interop.data.packed import PackedValues
from interop.data.pytrees import row_of
from interop.data.tensordicts import PLAIN, held, of_entries, unchecked
from interop.data.varied import Leaf, Values, Varied, described

_shape, _dtype, _layout = attrgetter("shape"), attrgetter("dtype"), attrgetter("layout")
_is_nested, _address = attrgetter("is_nested"), Tensor.data_ptr
_is_zeros = attrgetter("_is_zerotensor")
KeyPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Branch:
    """A container: `kind` is the class of a dict, tuple, list, tensordict or tensorclass."""

    kind: Any
    keys: tuple[Any, ...]
    children: tuple["Branch | Leaf", ...]
    batch: tuple[int, ...] = ()  # batch dims of a tensordict below those of the item
    names: tuple[str | None, ...] = ()  # of these dims, if any has one
    device: torch.device | None = None  # of a tensordict in a list; of others the storage says it


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """KeyPath, shape and dtype of one tensor of an item."""

    path: KeyPath
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return repr(self.path[0]) if len(self.path) == 1 else repr(self.path) if self.path else "the tensor"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The structure of an item, and its leaves in order."""

    root: Branch | Leaf
    leaves: tuple[LeafSpec, ...]
    values: PackedValues | None = dataclasses.field(
        default=None, compare=False, repr=False
    )  # of entries that vary in size
    _last_fit: ClassVar[tuple[Any, ...]] = ()  # leading dims of data that fitted; shapes and dtypes of its leaves

    @classmethod
    def of(cls, data: Any, dims: int, ragged: Collection[KeyPath] = ()) -> "Layout":
        """The layout of data whose leaves all begin with the same `dims` leading dims.

        Tensors at `ragged` paths have rows of any length, in the dim after those.
        """
        leaves: list[LeafSpec] = []
        root = _describe(data, dims, (), leaves, ragged)
        return cls(root, tuple(leaves), PackedValues() if _varied(root, ()) else None)

    @functools.cached_property
    def varied(self) -> dict[KeyPath, Varied]:
        """The entries whose values differ in size, by path. `values` keeps them; the rows hold spans."""
        return dict(_varied(self.root, ()))

    def keeping(self, values: PackedValues | None) -> Self:
        """The same layout with `values` kept elsewhere."""
        return self if values is self.values else dataclasses.replace(self, values=values)

    def sharing(self, paths: Collection[KeyPath]) -> Self:
        """The same layout, where ragged rows at these paths share what they begin with, and no others do."""
        if all(entry.shares == (path in paths) for path, entry in self.varied.items()):
            return self
        return dataclasses.replace(self, root=_sharing(self.root, (), paths))

    def of_spans(self) -> "Layout":
        """The layout of items with spans instead of varied entries."""
        return Layout(_of_spans(self.root), self.leaves)

    def spans(self, leaves: Sequence[Any]) -> dict[KeyPath, Any]:
        """The leaves that are spans of varied entries, by path."""
        return {path: leaves[self.places[path]] for path in self.varied}

    def flatten(self, data: Any, dims: int) -> list[Tensor]:
        """The tensors of data in the order of `leaves`. KeyError, TypeError or RuntimeError for data that does not fit."""
        found: list[Any] = []
        _collect(self.root, data, (), found)
        if self.values is None and found and self._fits(found, dims):
            return found
        lead = found[0].shape[:dims] if found else ()
        for spec, leaf in zip(self.leaves, found, strict=True):
            if isinstance(leaf, Tensor):
                _refuse_unusual(leaf, spec.path)
            if leaf.shape[dims:] != spec.shape or leaf.ndim < dims:
                raise RuntimeError(
                    f"{spec.name}: items have shape {list(spec.shape)}, "
                    f"got {list(leaf.shape[dims:])} (whole shape {list(leaf.shape)}); nothing was written"
                )
            if leaf.shape[:dims] != lead:
                raise RuntimeError(
                    f"{spec.name}: leading dims are {list(leaf.shape[:dims])}, those of {self.leaves[0].name} are "
                    f"{list(lead)}: all tensors need the same; nothing was written"
                )
            if leaf.dtype != spec.dtype:
                raise RuntimeError(
                    f"{spec.name}: items are {spec.dtype}, got {leaf.dtype}: cast it first; nothing was written"
                )
        if self.values is None:
            return found
        return [leaf.packed(self.values) if isinstance(leaf, Values) else leaf for leaf in found]

    def _fits(self, found: list[Tensor], dims: int) -> bool:
        """Whether `flatten` accepts these tensors, one for each leaf. It finds the error if not."""
        lead = found[0].shape[:dims]
        if len(lead) < dims:
            return False
        known = self._last_fit
        if not known or known[0] != lead:  # most batches have the size of the previous one
            dtypes = [spec.dtype for spec in self.leaves]
            known = lead, [(*lead, *spec.shape) for spec in self.leaves], dtypes, [torch.strided] * len(dtypes)
            self.__dict__["_last_fit"] = known
        _, shapes, dtypes, strided = known  # compared without a step of Python for each
        if list(map(_shape, found)) != shapes or list(map(_dtype, found)) != dtypes:
            return False
        # None at 0: of the meta device, or zeros of autograd; empty ones `flatten` looks at one by one.
        return list(map(_layout, found)) == strided and not any(map(_is_nested, found)) and all(map(_address, found))

    def build(self, leaves: Sequence[Tensor], batch_size: Sequence[int], device: torch.device | None = None) -> Any:
        """Data of this layout from tensors; tensordicts get `batch_size`."""
        return _build(self.root, iter(leaves), torch.Size(batch_size), device, self.values)

    def wider(self, data: object, dims: int) -> "Layout":
        """The layout of tensordicts with more keys, or this one. The errors of `flatten` for the known keys."""
        found = Layout.of(data, dims, self.varied)
        if (
            not self.is_tensordict
            or not isinstance(data, TensorDictBase)
            or not found.places.keys() > self.places.keys()
        ):
            return self
        self.flatten(data.select(*self.places), dims)
        return found.keeping(self.values or found.values)

    @functools.cached_property
    def places(self) -> dict[KeyPath, int]:
        """The number of the leaf at each path."""
        return {spec.path: place for place, spec in enumerate(self.leaves)}

    @functools.cached_property
    def builders(self) -> dict[tuple[Any, ...], Any]:
        """Builders of batches with more entries, by the keys of these; filled by `storages.batches`."""
        return {}

    def alike(self, other: "Layout") -> bool:
        """Whether both have the same leaves and kinds of containers, in any order of keys."""
        return set(self.leaves) == set(other.leaves) and same_kinds(self.root, other.root)

    def outline(self) -> dict[str, str]:
        """By key the dtype and the shape of an entry of an item."""
        found = {}
        for spec in self.leaves:
            varied = self.varied.get(spec.path)
            dtype, shape = (spec.dtype, list(spec.shape)) if varied is None else (varied.dtype, [-1, *varied.shape])
            text = "text" if dtype is None else f"{str(dtype).removeprefix('torch.')}{shape}"
            found[".".join(map(str, spec.path)) or "item"] = text
        return found

    @property
    def is_tensordict(self) -> bool:
        """Whether an item is a tensordict or a tensorclass."""
        return isinstance(self.root, Branch) and (self.root.kind is TensorDict or is_tensorclass(self.root.kind))


def stack_items(items: Sequence[Any], ragged: Collection[KeyPath] = ()) -> Any:
    """One batch of a list of items, stacked along a new first dim. A list of texts is a batch already."""
    if not items:
        raise RuntimeError("Expected at least one element in extend.")
    if isinstance(items[0], str | bytes):
        return items
    try:
        layout = Layout.of(items[0], 0, ragged)
        columns = zip(*(layout.flatten(item, 0) for item in items), strict=True)
        return layout.build([torch.stack(column) for column in columns], (len(items),))
    except (RuntimeError, TypeError, KeyError) as error:
        raise RuntimeError(
            "stacking the elements of the list failed: a list at the root is a stack of single items, which must all be "
            f"alike. Pass a tuple for leaves that are batched already. The cause: {error}"
        ) from error


def same_kinds(one: Branch | Leaf, other: Branch | Leaf) -> bool:
    """Whether two structures with the same leaves have the same kinds of containers."""
    if isinstance(one, Leaf) or isinstance(other, Leaf):
        return one == other
    children = dict(zip(other.keys, other.children, strict=True))
    return one.kind is other.kind and all(
        key in children and same_kinds(child, children[key]) for key, child in zip(one.keys, one.children, strict=True)
    )


def _of_spans(node: Branch | Leaf) -> Branch | Leaf:
    if not isinstance(node, Branch):
        return Leaf()
    return dataclasses.replace(node, children=tuple(map(_of_spans, node.children)))


def _sharing(node: Branch | Leaf, path: KeyPath, paths: Collection[KeyPath]) -> Branch | Leaf:
    if isinstance(node, Varied):
        return dataclasses.replace(node, shares=path in paths and node.dtype is not None)
    if not isinstance(node, Branch):
        return node
    children = zip(node.keys, node.children, strict=True)
    return dataclasses.replace(node, children=tuple(_sharing(child, (*path, key), paths) for key, child in children))


def _varied(node: Branch | Leaf, path: KeyPath) -> list[tuple[KeyPath, Varied]]:
    if not isinstance(node, Branch):
        return [(path, node)] if isinstance(node, Varied) else []
    return [each for key, child in zip(node.keys, node.children, strict=True) for each in _varied(child, (*path, key))]


def _describe(
    data: Any, dims: int, path: KeyPath, leaves: list[LeafSpec], ragged: Collection[KeyPath] = ()
) -> Branch | Leaf:
    varied = described(data, dims, path in ragged, _where(path))
    if varied is not None:
        leaves.append(LeafSpec(path, varied[1], torch.int64))
        return varied[0]
    if isinstance(data, Tensor):
        _refuse_unusual(data, path)
        leaves.append(LeafSpec(path, tuple(data.shape[dims:]), data.dtype))
        return Leaf()
    if (tensor := as_leaf(data, _where(path))) is not None:
        leaves.append(LeafSpec(path, tuple(tensor.shape[dims:]), tensor.dtype))
        return Leaf()
    kind, items = _open(data, path)
    keys = tuple(items)
    children = tuple(_describe(items[key], dims, (*path, key), leaves, ragged) for key in keys)
    if not is_tensor_collection(data):
        return Branch(_remade(kind) if issubclass(kind, dict) else kind, keys, children)
    names = tuple((held(data) if is_tensorclass(data) else data).names[dims:])
    return Branch(kind, keys, children, tuple(data.batch_size[dims:]), names if any(names) else ())


def _remade(kind: type) -> type:
    """The kind of dict that `build` makes: `dict` if `kind` has no empty constructor."""
    try:
        return kind if kind() == {} else dict
    except TypeError:
        return dict


def _collect(node: Branch | Leaf, data: Any, path: KeyPath, found: list[Any]) -> None:
    """Append the leaves of data in the order of the structure. TypeError or KeyError for another structure."""
    if isinstance(node, Varied):
        found.append(node.take(data, _where(path)))
        return
    if isinstance(node, Leaf):
        leaf = data if isinstance(data, Tensor) else as_leaf(data, _where(path))
        if leaf is None:
            raise TypeError(f"{_where(path)}: items hold a tensor here, got {type(data).__name__}; nothing was written")
        found.append(leaf)
        return
    kind, items = (TensorDict, held(data)) if type(data) is PLAIN else _open(data, path)
    if kind is not node.kind and not (issubclass(kind, dict) and issubclass(node.kind, dict)):
        raise TypeError(
            f"{_where(path)}: items are of type {node.kind.__name__}, got {kind.__name__}; nothing was written"
        )
    if len(items) != len(node.keys) or not all(map(items.__contains__, node.keys)):
        missing, extra = [k for k in node.keys if k not in items], [k for k in items if k not in node.keys]
        raise KeyError(
            f"{_where(path)}: the keys differ from those stored; missing: {missing}, unknown: {extra}"
            f"{nearest(extra, missing)}. The first write fixed them; nothing was written. Have all keys in it; later ones "
            "are added by rb[:] = data, of all rows, and in a storage with fill={key: value for the rows from before}"
        )
    for key, child in zip(node.keys, node.children, strict=True):
        value = items[key]
        if type(value) is Tensor and type(child) is Leaf:
            found.append(value)
        else:
            _collect(child, value, (*path, key), found)


def _open(data: Any, path: KeyPath) -> tuple[type, dict[Any, Any]]:
    """The kind of a container and its entries."""
    if is_non_tensor(data):
        raise TypeError(f"{_where(path)}: items hold no text or other values here; nothing was written")
    if isinstance(data, LazyStackedTensorDict):
        return TensorDict, {key: _column(data, key) for key in data.keys()}  # noqa: SIM118
    if is_tensor_collection(data):
        return (type(data) if is_tensorclass(data) else TensorDict), dict(data.items())
    if isinstance(data, dict):
        return type(data), data
    if isinstance(data, tuple | list):
        return type(data), dict(enumerate(data))
    raise TypeError(
        f"{_where(path)}: a tensor storage holds tensors, arrays and numbers, tensordicts, tensorclasses, and dicts, tuples "
        f"or lists of them, got {type(data).__name__}; use ListStorage for other objects"
    )


def _column(data: LazyStackedTensorDict, key: str) -> Any:
    """An entry of a lazy stack, whose rows may differ in length."""
    try:
        return data.get(key)
    except RuntimeError:
        return data.get(key, as_nested_tensor=True)


def _build(
    node: Branch | Leaf,
    leaves: Iterator[Tensor],
    batch: torch.Size,
    device: torch.device | None,
    packed: PackedValues | None = None,
    plain: bool = True,
) -> Any:
    if isinstance(node, Varied):
        assert packed is not None
        return node.build(next(leaves), packed, device, plain)
    if isinstance(node, Leaf):
        return next(leaves)
    plain = not is_tensor_collection(node.kind)
    values = [
        next(leaves) if type(child) is Leaf else _build(child, leaves, batch, device, packed, plain)
        for child in node.children
    ]
    if node.kind is TensorDict and not node.names:
        shape = torch.Size((*batch, *node.batch)) if node.batch else batch
        return of_entries(zip(node.keys, values, strict=True), shape, device)
    if issubclass(node.kind, dict):
        made = node.kind()
        made.update(zip(node.keys, values, strict=True))
        return made
    if issubclass(node.kind, tuple | list):
        return row_of(node.kind, values)
    names = [*(None for _ in batch), *node.names] if node.names else None
    made = unchecked(dict(zip(node.keys, values, strict=True)), torch.Size((*batch, *node.batch)), device, names)
    return made if node.kind is TensorDict else node.kind.from_tensordict(made)


def _refuse_unusual(data: Tensor, path: KeyPath) -> None:
    if data.dtype not in DTYPES:
        raise TypeError(f"{_where(path)}: cannot store {data.dtype}")
    bare = data.is_meta or _is_zeros(data)()
    if data.layout != torch.strided or data.is_nested or bare:
        what = "a tensor without memory" if bare else f"a tensor of layout {data.layout}"
        raise TypeError(f"{_where(path)}: cannot store {what}, only dense tensors; nothing was written")


def _where(path: KeyPath) -> str:
    return LeafSpec(path, (), torch.float32).name if path else "item"

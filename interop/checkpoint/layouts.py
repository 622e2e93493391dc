"""Layouts and structures of items as saved trees, and back. Names of dtypes, devices and classes are looked up, not run."""

import collections
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, is_tensorclass

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.data.bridge import DTYPES
from interop.data.layout import Branch, Layout, Leaf, LeafSpec
from interop.data.nested_tensors import Components
from interop.data.values import MOST_DEEP, NotKept, fields_of, is_container, is_record, leaves_of
from interop.data.varied import Varied

_KINDS: dict[str, Any] = {"tensordict": TensorDict, "dict": dict, "tuple": tuple, "list": list}
_KINDS |= {"lazy": LazyStackedTensorDict, "nontensors": NonTensorStack, "ordered": collections.OrderedDict}
_KINDS |= {"nested": Components}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAY_IMPORT: set[str] = set()
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,3})?")


# ------------------------------------------------------------------ names


def dtype_named(name: Any, where: str) -> torch.dtype:
    """The dtype of a name such as "float32". CheckpointCorrupt for one that is not known."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointCorrupt(f"{where}: {str(name)[:40]!r} is no dtype")
    return _DTYPES[name]


def dtype_stored(name: Any, where: str) -> torch.dtype:
    """The dtype of a name, one that storages can hold. CheckpointCorrupt for others."""
    dtype = dtype_named(name, where)
    if dtype not in DTYPES:
        raise CheckpointCorrupt(f"{where}: {name!r} is no dtype that a storage holds")
    return dtype


def device_named(name: Any, where: str) -> torch.device | None:
    """The device of a name such as "cuda:0", on this machine or not; None for None. CheckpointCorrupt for others."""
    try:
        if name is None or (isinstance(name, str) and _DEVICE.fullmatch(name)):
            return None if name is None else torch.device(name)
    except RuntimeError:
        pass
    raise CheckpointCorrupt(f"{where}: {str(name)[:40]!r} is no device")


def class_name(kind: type) -> str:
    """Where a class of the user's is defined."""
    return f"{kind.__module__}:{kind.__qualname__}"


def may_import(*packages: str) -> None:
    """Have these packages of the library imported when a checkpoint names one of their classes."""
    _MAY_IMPORT.update(packages)


def class_named(name: str, fits: Callable[[type], bool], where: str) -> type:
    """The class of that name, if it is one that fits, of a module that was imported.

    Nothing is imported here but the packages given to `may_import`. CheckpointMismatch where there is no such class.
    """
    found = _found(name)
    if not isinstance(found, type) or found in _NAMES or not fits(found):
        raise CheckpointMismatch(f"{where}: items are of the class {name[:100]!r}: import its module before loading")
    return found


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    package = ".".join(module.split(".")[:2])
    if found is None and package in _MAY_IMPORT:
        importlib.import_module(package)
        found = sys.modules.get(module)
    for step in path.split("."):
        try:  # past `__getattr__` of modules and classes, which may import
            found = object.__getattribute__(found, "__dict__").get(step)
        except AttributeError:
            return None
    return found


# ------------------------------------------------------------------ layouts


def saved_layout(layout: Layout) -> dict[str, Any]:
    """The saved tree of a layout."""
    leaves = [[list(leaf.path), list(leaf.shape), _DTYPE_NAMES[leaf.dtype]] for leaf in layout.leaves]
    return {"root": saved_node(layout.root, map(_saved_leaf, leaves_of(layout.root))), "leaves": leaves}


def layout_of(saved: Any, where: str) -> Layout:
    """The layout that a saved tree describes. CheckpointCorrupt where it describes none."""
    fields = Fields(saved, where)
    leaves = []
    for described in fields.items("leaves"):
        path, shape, dtype = described if isinstance(described, list) and len(described) == 3 else ((), (), None)
        sizes = Fields({"shape": shape}, where).wholes("shape")
        leaves.append(LeafSpec(path_of(path, where), sizes, dtype_stored(dtype, where)))
    root = node_of(
        fields.any("root"), _leaf, where, lambda kind: is_tensorclass(kind) or issubclass(kind, tuple | list | dict)
    )
    if list(_paths(root, ())) != [leaf.path for leaf in leaves]:
        raise CheckpointCorrupt(f"{where}: the leaves of the items are not those of their structure")
    return Layout(root, tuple(leaves))


def _paths(node: Branch | Leaf, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, Leaf):
        yield path
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _paths(child, (*path, key))


def _saved_leaf(leaf: Leaf) -> Any:
    if isinstance(leaf, Varied) and leaf.dtype is not None and leaf.shares:
        return {
            "pieces": _DTYPE_NAMES[leaf.dtype],
            "shape": list(leaf.shape),
        }  # earlier versions do not know these rows
    if isinstance(leaf, Varied):
        return {"varied": None if leaf.dtype is None else _DTYPE_NAMES[leaf.dtype], "shape": list(leaf.shape)}
    return None


def _leaf(saved: Any, where: str) -> Leaf | None:
    if saved is None:
        return Leaf()
    fields = Fields(saved, where)
    shares = "pieces" in fields
    if not shares and "varied" not in fields:
        return None
    dtype, shape = fields.any("pieces" if shares else "varied"), fields.wholes("shape")
    if 0 in shape:
        raise CheckpointCorrupt(f"{where}: ragged rows without values, whose lengths are lost")
    return Varied(None if dtype is None else dtype_stored(dtype, where), shape, shares)


# ------------------------------------------------------------------ structures


def saved_node(node: Branch | Leaf, leaves: Iterator[Any]) -> Any:
    """The saved tree of a structure, of the saved trees of its leaves in order."""
    if isinstance(node, Leaf):
        return next(leaves)
    saved = {
        "kind": _NAMES.get(node.kind) or class_name(node.kind),
        "keys": list(node.keys),
        "children": [saved_node(child, leaves) for child in node.children],
        "batch": list(node.batch),
        "names": list(node.names),
    }
    return saved if node.device is None else {**saved, "device": str(node.device)}


def node_of(
    saved: Any, leaf: Callable[[Any, str], Leaf | None], where: str, fits: Callable[[type], bool], depth: int = 0
) -> Branch | Leaf:
    """The structure that a saved tree describes. CheckpointCorrupt where it describes none.

    Args:
        saved: the tree.
        leaf: makes a leaf of a tree, or None where that is of a branch.
        where: what it is of, for messages.
        fits: whether a class is one of containers, where it is no common one.
        depth: of containers around it.
    """
    found = leaf(saved, where)
    if found is not None:
        return found
    if depth > MOST_DEEP + 1:
        raise CheckpointCorrupt(f"{where}: nested more than {MOST_DEEP} deep")
    fields = Fields(saved, where)
    name, keys, names = fields.text("kind"), path_of(fields.items("keys"), where), fields.items("names")
    kind = _KINDS.get(name) or class_named(name, fits, where)
    if issubclass(kind, tuple | list) and keys != tuple(range(len(keys))):
        raise CheckpointCorrupt(f"{where}: the items of a {name} are counted from 0")
    if len(set(keys)) < len(keys) or not all(each is None or isinstance(each, str) for each in names):
        raise CheckpointCorrupt(f"{where}: a key comes twice, or the names of dims are none")
    children = tuple(node_of(child, leaf, where, fits, depth + 1) for child in fields.items("children", len(keys)))
    device = device_named(fields.any("device"), where) if "device" in fields else None
    return Branch(kind, keys, children, fields.wholes("batch"), tuple(names), device)


def path_of(steps: Any, where: str) -> tuple[str | int, ...]:
    """A saved path. CheckpointCorrupt where it is none."""
    if not isinstance(steps, list | tuple) or not all(type(step) in (str, int) for step in steps):
        raise CheckpointCorrupt(f"{where}: keys are texts or integers")
    return tuple(steps)


def refuse_hidden(node: Branch | Leaf) -> None:
    """NotKept for a structure of values with a class that is not found by its name."""
    if isinstance(node, Leaf):
        return
    for child in node.children:
        refuse_hidden(child)
    name = class_name(node.kind)
    if node.kind not in _NAMES and not (_found(name) is node.kind and is_container(node.kind)):
        raise NotKept(TypeError, f"an object of type {name} cannot be saved, whose class is not found by its name")


def check_values(node: Branch | Leaf, where: str) -> None:
    """CheckpointMismatch for a structure that no value of its class has now."""
    if isinstance(node, Leaf):
        return
    for child in node.children:
        check_values(child, where)
    kind, fits = node.kind, node.kind in (LazyStackedTensorDict, NonTensorStack) or not node.batch
    if kind is TensorDict:
        fits = len(node.names) in (0, len(node.batch)) and all(type(key) is str for key in node.keys)
    elif is_record(kind):
        fits = node.names == fields_of(kind) and len(node.children) == len(node.names)
    elif is_tensorclass(kind):
        fits = node.keys[:1] == ("",) and {*node.keys[1:], *_entries(node.children[0])} <= {*fields_of(kind)}
    if not fits:
        now = "" if kind is TensorDict else f", whose fields are {list(fields_of(kind))} now"
        raise CheckpointMismatch(f"{where}: what was saved is no {kind.__qualname__}{now}")


def _entries(node: Branch | Leaf) -> tuple[Any, ...]:
    """The keys of a tensordict, or of the first of a stack."""
    if isinstance(node, Leaf) or not node.children:
        return ()
    return _entries(node.children[0]) if node.kind is LazyStackedTensorDict else node.keys

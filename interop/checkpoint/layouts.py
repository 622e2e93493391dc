"""The layout of items as a saved tree."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, is_tensorclass

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from interop.checkpoint.torch_names import NAMES, dtype_named
from interop.data.bridge import DTYPES
from interop.data.layout import Branch, Layout, Leaf, LeafSpec
from interop.data.varied import Varied

_KINDS: dict[str, Any] = {"tensordict": TensorDict, "dict": dict, "tuple": tuple, "list": list}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def dtype_stored(name: Any, where: str) -> torch.dtype:
    """The dtype of a name, one that storages can hold. CheckpointCorrupt for others."""
    dtype = dtype_named(name, where)
    if dtype not in DTYPES:
        raise CheckpointCorrupt(f"{where}: {name!r} is no dtype that a storage holds")
    return dtype


def class_name(kind: type) -> str:
    """Where a class of the user's is defined."""
    return f"{kind.__module__}:{kind.__qualname__}"


def class_named(name: str, fits: Callable[[type], bool], where: str) -> type:
    """The class of that name, if it is one that fits, of a module that was imported. Nothing is imported here.

    CheckpointMismatch where there is none.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        try:  # past `__getattr__` of modules and classes, which may import
            found = object.__getattribute__(found, "__dict__").get(step)
        except AttributeError:
            found = None
    if not isinstance(found, type) or not fits(found):
        raise CheckpointMismatch(f"{where}: items are of the class {name[:100]!r}: import its module before loading")
    return found


def saved_layout(layout: Layout) -> dict[str, Any]:
    """The saved tree of a layout."""
    leaves = [[list(leaf.path), list(leaf.shape), NAMES[leaf.dtype]] for leaf in layout.leaves]
    return {"root": _saved(layout.root), "leaves": leaves}


def layout_of(saved: Any, where: str) -> Layout:
    """The layout that a saved tree describes. CheckpointCorrupt where it describes none."""
    fields = Fields(saved, where)
    leaves = []
    for described in fields.items("leaves"):
        path, shape, dtype = described if isinstance(described, list) and len(described) == 3 else ((), (), None)
        sizes = Fields({"shape": shape}, where).wholes("shape")
        leaves.append(LeafSpec(_path(path, where), sizes, dtype_stored(dtype, where)))
    paths: list[Any] = []
    root = _node(fields.any("root"), (), paths, where, 0)
    if paths != [leaf.path for leaf in leaves]:
        raise CheckpointCorrupt(f"{where}: the leaves of the items are not those of their structure")
    return Layout(root, tuple(leaves))


def _saved(node: Branch | Leaf) -> Any:
    if isinstance(node, Varied):
        return {"varied": None if node.dtype is None else NAMES[node.dtype], "shape": list(node.shape)}
    if isinstance(node, Leaf):
        return None
    return {
        "kind": _NAMES.get(node.kind) or class_name(node.kind),
        "keys": list(node.keys),
        "children": [_saved(child) for child in node.children],
        "batch": list(node.batch),
        "names": list(node.names),
    }


def _node(saved: Any, path: tuple[Any, ...], paths: list[Any], where: str, depth: int) -> Branch | Leaf:
    if saved is None:
        paths.append(path)
        return Leaf()
    if depth > 100:
        raise CheckpointCorrupt(f"{where}: items are nested too deeply")
    fields = Fields(saved, where)
    if "varied" in fields:
        paths.append(path)
        dtype = fields.any("varied")
        return Varied(None if dtype is None else dtype_stored(dtype, where), fields.wholes("shape"))
    name, keys = fields.text("kind"), _path(fields.items("keys"), where)
    kind = _KINDS.get(name) or class_named(name, _is_container, where)
    if issubclass(kind, tuple | list) and keys != tuple(range(len(keys))):
        raise CheckpointCorrupt(f"{where}: the items of a {name} are counted from 0")
    if len(set(keys)) < len(keys):
        raise CheckpointCorrupt(f"{where}: a key comes twice")
    children = tuple(
        _node(child, (*path, key), paths, where, depth + 1)
        for key, child in zip(keys, fields.items("children", len(keys)), strict=True)
    )
    names = fields.items("names")
    if not all(each is None or isinstance(each, str) for each in names):
        raise CheckpointCorrupt(f"{where}: the names of dims are none")
    return Branch(kind, keys, children, fields.wholes("batch"), tuple(names))


def _is_container(kind: type) -> bool:
    return is_tensorclass(kind) or issubclass(kind, tuple | list | dict)


def _path(steps: Any, where: str) -> tuple[str | int, ...]:
    if not isinstance(steps, list | tuple) or not all(type(step) in (str, int) for step in steps):
        raise CheckpointCorrupt(f"{where}: keys are texts or integers")
    return tuple(steps)

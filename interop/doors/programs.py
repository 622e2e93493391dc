"""The compiled programs of a functional buffer for torch, and the conversion of items and batches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import Array
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

import fbuf
from fbuf import Draw, Fifo, Shuffled, Slices
from interop.data import bridge
from interop.data.layout import KeyPath, Layout
from interop.host import compiled

Leaves = tuple[Any, ...]
Entries = dict[KeyPath, Any]


class Programs:
    """Programs over the flat leaves of a state. Programs that take donated leaves return them first. One trace a shape.

    Args:
        buffer: the rules.
        structure, leaves: of an item, with `jax.ShapeDtypeStruct` as leaves. Nested dicts become TensorDicts, other items
            pytrees of tensors of the same structure.
        device: the device of the tensors of batches.
        truncated: path of the flag that ends a slice, with "done" and "terminated" beside it; () for no flags.
    """

    def __init__(
        self, buffer: fbuf.Buffer, structure: Any, leaves: Leaves, device: torch.device, truncated: KeyPath
    ) -> None:
        self.buffer = buffer
        self.device = device
        self._truncated = truncated
        self.item = jax.tree.unflatten(structure, leaves)
        self._structure = structure
        self.is_dict = _is_dict(self.item)
        self.specs: Entries = {  # of dicts by path, of another pytree by one name each
            tuple(entry.key for entry in path) if self.is_dict else (jax.tree_util.keystr(path) or "item",): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.item)
        }
        self._layout = _layout(self.specs)
        self.like = jax.eval_shape(lambda: buffer.init(self.item))
        self.extend = jax.jit(self._extend, donate_argnums=0, compiler_options=compiled.IN_ORDER)
        self.update = jax.jit(self._update, donate_argnums=0)
        self.clear = jax.jit(self._clear, donate_argnums=0)
        self.read = jax.jit(self._read)
        self.draw = functools.cache(functools.partial(DrawProgram, self))

    def state_of(self, leaves: Leaves) -> Any:
        """The state with these leaves."""
        return jax.tree.unflatten(jax.tree.structure(self.like), leaves)

    def _extend(self, leaves: Leaves, rows: list[Any]) -> tuple[Leaves, Array]:
        """The state after a write, and the index of each item in the order of time, then lanes."""
        state, slots = self.buffer.extend(self.state_of(leaves), jax.tree.unflatten(self._structure, rows))
        return tuple(jax.tree.leaves(state)), _coordinates(slots.reshape(-1), self.buffer)

    def _update(self, leaves: Leaves, slots: Array, priorities: Array) -> tuple[Leaves]:
        return (tuple(jax.tree.leaves(self.buffer.update(self.state_of(leaves), slots, priorities))),)

    def _clear(self, leaves: Leaves) -> tuple[Leaves]:
        return (tuple(jax.tree.leaves(self.buffer.clear(self.state_of(leaves)))),)

    def _read(self, leaves: Leaves, slots: Array) -> list[Array]:
        return jax.tree.leaves(self.buffer.read(self.state_of(leaves), slots))

    def arrays(self, data: Any, dims: int) -> list[Any]:
        """Copies of the leaves of a batch in JAX's order: a program may read them after its call has returned.

        KeyError, TypeError or RuntimeError where data does not fit the stored items.
        """
        if not self.is_dict:
            if (came := jax.tree.structure(data)) != self._structure:
                raise TypeError(f"items are {self._structure}, got {came}; nothing was written")
            data = {path[0]: leaf for path, leaf in zip(self.specs, jax.tree.leaves(data), strict=True)}
        if isinstance(data, dict):
            data = TensorDict(data)
        elif is_tensor_collection(data) and not isinstance(data, TensorDict):
            data = data.to_tensordict()
        try:
            leaves = self._layout.flatten(data, dims)
        except KeyError:
            paths = {leaf.path for leaf in Layout.of(data, dims).leaves}
            stored_paths = set(self.specs)
            missing = sorted(stored_paths - paths)
            unknown = sorted(paths - stored_paths)
            raise KeyError(f"the keys differ; missing: {missing}, unknown: {unknown}; nothing was written") from None
        return [self._copy(leaf) for leaf in leaves]

    def _copy(self, tensor: Tensor) -> np.ndarray | jax.Array:
        if self.device.type != "cpu":
            return bridge.to_jax(tensor.to(self.device))
        plain = bridge.plain(tensor).to("cpu", copy=True)
        view = bridge.numpy_view(plain)
        return view.view(ml_dtypes.bfloat16) if plain.dtype == torch.bfloat16 else view

    def build(self, tensors: list[Tensor], lead: tuple[int, ...], layout: Layout | None = None) -> Any:
        """Items of tensors with these batch dims. Of TensorDicts the layout may add the info to the entries."""
        if self.is_dict:
            return (layout or self._layout).build(tensors, lead, self.device)
        return jax.tree.unflatten(self._structure, tensors[: len(self.specs)])

    def drawn(self, leaves: Leaves, key: Array, beta: Array, batch_size: int) -> tuple[Leaves, Entries, Entries, Array]:
        """The leaves after a draw, items and info by path, and a flag for each valid row.

        One more flag is True if the draw ended an epoch.
        """
        before = self.state_of(leaves)
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        state, items, draw = self.buffer.sample(before, typed, batch_size)
        rows = draw.slots.size
        flat = [leaf.reshape(rows, *leaf.shape[draw.slots.ndim :]) for leaf in jax.tree.leaves(items)]
        entries = dict(zip(self.specs, flat, strict=True))
        after = tuple(jax.tree.leaves(state))
        ended = _has_ended(self.buffer.sampler, before.sampler, state.sampler)
        valid = jnp.append(jnp.repeat(draw.valid, rows // draw.valid.size), ended)
        return after, entries, self._info(entries, draw, beta), valid

    def _info(self, items: Entries, draw: Draw, beta: Array) -> Entries:
        """The info of a batch. The only integers in it are slots."""
        slots = draw.slots.reshape(-1)
        mask = draw.mask
        rule = self.buffer.sampler
        time = slots.size // draw.valid.size
        index = _coordinates(slots, self.buffer)
        info: Entries = {("index",): index if mask is None else index.reshape(slots.size, -1)}
        if rule.keeps_priorities:
            info["priority_weight",] = jnp.repeat(fbuf.importance_weights(draw, beta), time)
        if mask is None:
            return info
        if self._truncated:
            info[self._truncated] = ends = (mask & ~jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))).reshape(-1, 1)
            for name, flags in (("done", ends), ("terminated", jnp.zeros_like(ends))):
                stored = items.get(path := (*self._truncated[:-1], name))
                if stored is not None:
                    flags |= jnp.any(stored.reshape(slots.size, -1) != 0, 1, keepdims=True)
                info[path] = flags
        is_padded = isinstance(rule, Slices) and (rule.shortest < rule.length or rule.burn_in)
        if is_padded or self.buffer.frames:
            info["collector", "mask"] = mask.reshape(-1)
        if (begun := items.get(("is_init",))) is not None:
            begins = jnp.arange(slots.size) % time == 0
            info["is_init",] = begun | begins.reshape(-1, *(1 for _ in begun.shape[1:]))
        return info


class DrawProgram:
    """The program that draws batches of one size, and the conversion of its results.

    `run` takes the leaves, a raw key and beta. If draws change the state (`moves`), the leaves are donated and returned
    first. Otherwise no leaves are returned: they would be copies.
    """

    def __init__(self, programs: Programs, batch_size: int) -> None:
        self.moves = False

        def draw(leaves: Leaves, key: Array, beta: Array) -> tuple[Any, ...]:
            after, *drawn = programs.drawn(leaves, key, beta, batch_size)
            self.moves = any(new is not old for new, old in zip(after, leaves, strict=True))
            return after if self.moves else (), *drawn

        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        beta = jax.ShapeDtypeStruct((), jnp.float32)
        info = jax.eval_shape(draw, tuple(jax.tree.leaves(programs.like)), key, beta)[2]
        self.run = jax.jit(draw, donate_argnums=0 if self.moves else (), compiler_options=compiled.IN_ORDER)
        self._programs = programs
        self._layout = _layout(programs.specs | info) if programs.is_dict else None
        self._paths = [leaf.path for leaf in self._layout.leaves] if self._layout else [*programs.specs, *info]
        self._info: dict[Any, int] = {path if path[1:] else path[0]: self._paths.index(path) for path in info}
        self._dtypes = {path: torch.int64 for path, spec in info.items() if spec.dtype.kind == "i"}

    def tensors(self, items: Entries, info: Entries, valid: Array) -> tuple[list[Tensor], bool]:
        """The entries of a batch in their own memory, none if nothing was drawn; and whether the draw ended an epoch."""
        entries = items | info
        values = [bridge.hand_over(entries[path], self._dtypes.get(path)) for path in self._paths]
        flags = np.asarray(valid).tobytes()  # searched faster than an array
        if 0 in flags[:-1]:
            rows = torch.from_numpy(np.asarray(valid)[:-1])
            values = [value[rows] for value in values] if rows.any() else []
        return values, bool(flags[-1])

    def batch(self, tensors: list[Tensor]) -> Any:
        """A TensorDict with the info, or the items alone."""
        return self._programs.build(tensors, tensors[0].shape[:1], self._layout)

    def info(self, tensors: list[Tensor]) -> dict[Any, Any]:
        """The info by key. An index of several columns is a tuple of them."""
        info: dict[Any, Any] = {key: tensors[place] for key, place in self._info.items()}
        if info["index"].ndim > 1:
            info["index"] = info["index"].unbind(-1)
        return info


programs_of = functools.lru_cache(maxsize=64)(Programs)  # the same programs for equal rules and items


def _coordinates(slots: Array, buffer: fbuf.Buffer) -> Array:
    """Slots [n], or with lanes their rows and lanes [n, dims]."""
    return jnp.stack(jnp.unravel_index(slots, (buffer.capacity, *buffer.lanes)), -1) if buffer.lanes else slots


def _is_dict(item: Any, is_root: bool = True) -> bool:
    """Whether all nodes of an item are dicts with text keys."""
    if type(item) is dict:
        return all(isinstance(key, str) and _is_dict(child, False) for key, child in item.items())
    return not is_root and jax.tree_util.all_leaves([item])


def _layout(specs: Entries) -> Layout:
    """The layout of TensorDicts that have these entries. TypeError for a dtype that torch does not have."""
    data = TensorDict()
    for path, leaf in specs.items():
        if leaf.dtype not in bridge.FROM_NUMPY:
            raise TypeError(f"item {path}: torch has no dtype for {leaf.dtype}")
        data.set(path, torch.empty(leaf.shape, dtype=bridge.FROM_NUMPY[leaf.dtype], device="cpu"))
    return Layout.of(data, 0)


def _has_ended(rule: fbuf.Sampler | Slices, old: Any, new: Any) -> Array:
    """Whether a draw ended an epoch, or emptied the queue."""
    starts: Any = rule
    if isinstance(rule, Slices):
        starts = rule.starts
        old = old.starts
        new = new.starts
        starts = starts.trajectories if isinstance(starts, fbuf.PerTrajectory) else starts
    if isinstance(starts, Fifo):
        return (old.unread > 0) & (new.unread == 0)
    if isinstance(starts, Shuffled):
        drawn = new.position - jnp.where(new.epoch == old.epoch, old.position, 0)
        return (drawn > 0) & (new.length - new.position < (drawn if starts.drop_last else 1))
    return jnp.zeros((), jnp.bool_)

"""A stateful replay buffer for torch over any functional buffer and its state."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tensordict import is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

import fbuf
from fbuf.checkpoint import CheckpointMismatch, load_with_extra, save_state
from fbuf.looking import Description, describe
from fbuf.shown import Shown
from interop.data import bridge, randomness
from interop.data.arguments import EMPTY, not_negative, whole
from interop.data.keys import as_path
from interop.data.untraced import untraced
from interop.doors.held_state import Handle, HeldState
from interop.doors.programs import DrawProgram, programs_of
from interop.host import compiled
from interop.samplers.validation import flat_slots, good_priorities, of_coordinates, one_for_each, refuse_below

_LEAST = 64  # entries of an update: fewer cost as much, and each length a program


class FunctionalReplayBuffer(Shown):
    """A stateful replay buffer for torch over an `fbuf.Buffer` with any rules, and its state.

    Batches are those that `jax.jit(buffer.sample)` draws; they reach torch without a copy. Items that are nested dicts
    become TensorDicts, other items pytrees of tensors. Calls are safe from several threads.

    Args:
        buffer: the rules.
        state: from `buffer.init` or a program. The buffer takes it over: the first write donates it.
        batch_size: of `sample()` and of iteration.
        beta: exponent of the "priority_weight". Can be set at any time.
        priority_key: the entry of TensorDicts that `extend` and `update_tensordict_priority` take priorities from.
        truncated_key: for slices the flag of their ends, with "done" and "terminated" beside it; None for no flags.
        generator: governs every draw; by default torch's global one.

    TypeError for traced arrays and dtypes that torch does not have; ValueError for a state of another buffer, on several
    devices, or with an array twice; RuntimeError for deleted arrays, and for a device that torch does not see.
    """

    def __init__(
        self,
        buffer: fbuf.Buffer,
        state: Any,
        *,
        batch_size: int | None = None,
        beta: float = 0.4,
        priority_key: NestedKey | None = "td_error",
        truncated_key: NestedKey | None = ("next", "truncated"),
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(buffer, fbuf.Buffer):
            raise TypeError(f"buffer must be a fbuf.Buffer, got {type(buffer).__name__}")
        self.buffer = buffer
        self.priority_key = priority_key
        self.generator = generator
        self.beta = beta
        self.batch_size = None if batch_size is None else whole("batch_size", batch_size)
        item = _item_of(buffer, state)
        self._holder = HeldState(state, jax.eval_shape(lambda: buffer.init(item)))
        self._lock = self._holder.lock
        self.device = bridge.torch_device(self._holder.device)
        flags = truncated_key is not None and isinstance(buffer.sampler, fbuf.Slices)
        truncated = as_path(truncated_key) if flags else ()
        leaves, structure = jax.tree.flatten(item)
        self._programs = programs_of(buffer, structure, tuple(leaves), self.device, truncated)
        if any(truncated[:n] in self._programs.specs for n in range(1, len(truncated))):
            raise ValueError(f"truncated_key={truncated_key!r} lies below a tensor of the items: give another, or None")
        self._keeps_priorities = buffer.sampler.keeps_priorities
        self._has_ended = False  # the epoch, with the last batch of `next`

    @property
    def beta(self) -> float:
        """The exponent of the "priority_weight". Can be set at any time."""
        return float(self._beta)

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = np.asarray(not_negative("beta", value), np.float32)

    @property
    def is_out(self) -> bool:
        """Whether a block of `functional` has the state."""
        return self._holder.is_out

    @property
    def state(self) -> Any:
        """A copy of the functional state."""
        with self._lock:
            return self._holder.tree(map(jnp.copy, self._holder.leaves))

    def __len__(self) -> int:
        """Items stored, in all lanes."""
        with self._lock:
            return int(self.buffer.size(self._holder.tree(self._holder.leaves)))

    # ------------------------------------------------------------------ writes

    def extend(self, data: Any) -> Tensor:
        """Write a copy of a batch of leaves [n, *lanes, ...]. Returns the index of each item.

        The index is int64 [n], with lanes [n * lanes, dims] in the order of time, then lanes; -1 for an item that was not
        kept. An entry `priority_key` sets the priorities of the new items if the sampler has priorities. Nothing is cast;
        data that does not fit is refused before the write. One trace for each n.
        """
        dims = 1 + len(self.buffer.lanes)
        priority = data.get(self.priority_key, None) if self._keeps_priorities and is_tensor_collection(data) else None
        if priority is not None and as_path(self.priority_key) not in self._programs.specs:
            data = data.exclude(self.priority_key)
        rows = self._programs.arrays(data, dims)
        count = math.prod(rows[0].shape[:dims])
        if priority is not None and priority.numel() != count:
            raise RuntimeError(f"{priority.numel()} priorities for {count} items; nothing was written")
        values = None if priority is None else _priorities(priority.reshape(-1))
        if not count:
            return torch.zeros((0, dims) if dims > 1 else 0, dtype=torch.int64, device=self.device)
        with self._lock:
            (written,) = self._holder.donate(self._programs.extend, rows)
            index = bridge.hand_over(written, torch.int64)
            if values is not None:
                self._update(self._slots_of(index), values)
        return index

    def add(self, item: Any) -> Any:
        """Write one item, or with lanes one row [*lanes, ...]. Returns an int, or None for an item that was not kept; with
        lanes the index of `extend`."""
        rows = item.unsqueeze(0) if is_tensor_collection(item) else jax.tree.map(lambda leaf: leaf[None], item)
        index = self.extend(rows)
        if index.ndim > 1:
            return index
        return None if index < 0 else int(index)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities of items: one for each, or one for all. O(n log capacity).

        The index is an int, integers [n] or coordinates [n, dims]; -1 is ignored, and of equal ones the last counts. A
        refused call changes nothing.
        """
        if not self._keeps_priorities:
            raise TypeError(f"{self.buffer!r} keeps no priorities: build it with sampler=fbuf.Prioritized(...)")
        slots = self._slots_of(index)
        values = one_for_each(slots, _priorities(priority))
        with self._lock:
            self._update(slots, values)

    def update_tensordict_priority(self, data: Any) -> None:
        """`update_priority` by the entry `priority_key` of a sample; of several values of a row the largest counts. Does
        nothing if the sampler has no priorities."""
        if self._keeps_priorities:
            priority = data[self.priority_key]
            self.update_priority(data["index"], priority.reshape(priority.shape[0], -1).amax(1))

    def _update(self, slots: np.ndarray, values: np.ndarray) -> None:
        if slots.size:
            self._holder.donate(self._programs.update, *(compiled.padded(array, _LEAST) for array in (slots, values)))

    def empty(self) -> None:
        """Remove all items. The memory is kept."""
        with self._lock:
            self._holder.refuse_out()
            if self._holder.is_lost:
                with jax.default_device(self._holder.device):
                    self._holder.replace(self.buffer.init(self._programs.item))
            self._holder.donate(self._programs.clear)

    # ------------------------------------------------------------------ reads

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch; with `return_info` also return the info, a dict.

        TensorDicts have the info among their entries: "index"; "priority_weight" if the sampler has priorities; for
        slices, [slices * time], the flags of `truncated_key` and, if slices may be padded, ("collector", "mask"). The batch
        is smaller at the end of an epoch. RuntimeError if nothing can be drawn. One trace for each batch size.
        """
        program, tensors, _ = self._draw(batch_size)
        data = program.batch(tensors)
        return (data, program.info(tensors)) if return_info else data

    def _draw(self, batch_size: int | None) -> tuple[DrawProgram, list[Tensor], bool]:
        """The entries of a batch, and whether it ended an epoch."""
        size = self.batch_size if batch_size is None else whole("batch_size", batch_size)
        if size is None:
            raise RuntimeError("batch_size not specified: give it to sample(), or to from_fbuf()")
        with self._lock:
            leaves = self._holder.leaves
            program = self._programs.draw(size)
            key = randomness.key(self.generator)
            drawn: Any
            if program.moves:
                drawn = self._holder.donate(program.run, key, self._beta)
            else:
                drawn = program.run(leaves, key, self._beta)[1:]
        tensors, ended = program.tensors(*drawn)
        if tensors:
            return program, tensors, ended
        if not len(self):
            raise RuntimeError(EMPTY)
        raise RuntimeError(
            f"nothing can be drawn from the {len(self)} stored items: for slices no trajectory is long enough, all items of "
            "a queue were returned, or an epoch has fewer items than a batch"
        )

    def __iter__(self) -> Iterator[Any]:
        """Batches of `batch_size`: to the end of the epoch, or of the queue, for samplers without replacement."""
        ended = False
        while not ended:
            program, tensors, ended = self._draw(None)
            yield program.batch(tensors)

    def next(self) -> Any:
        """The next batch of a running iteration; None once at its end, after which a new one begins."""
        with self._lock:
            if self._has_ended:
                self._has_ended = False
                return None
            program, tensors, self._has_ended = self._draw(None)
            return program.batch(tensors)

    def __getitem__(self, index: Any) -> Any:
        """A copy of the items at slots: an int, a slice, integers, a mask, or the index of a sample.

        IndexError for empty slots. O(capacity).
        """
        if isinstance(index, tuple) or (isinstance(index, Tensor) and index.ndim == 2):
            index = self._slots_of(index)
        with self._lock:
            leaves = self._holder.leaves
            stored = np.arange(len(self), dtype=np.int32)
            slots = stored[index.cpu().numpy() if isinstance(index, Tensor) else index]
            flat = slots.reshape(-1) if slots.size else np.zeros(1, np.int32)  # an empty batch is part of one row
            arrays = self._programs.read(leaves, compiled.padded(flat))
        tensors = [bridge.hand_over(array)[: slots.size].reshape((*slots.shape, *array.shape[1:])) for array in arrays]
        return self._programs.build(tensors, slots.shape)

    def _slots_of(self, index: Any) -> np.ndarray:
        """Slots, int32 [n]. TypeError and IndexError for an index of anything else."""
        if isinstance(index, tuple):
            index = torch.stack([torch.as_tensor(coordinate) for coordinate in index], -1)
        index = index.cpu() if isinstance(index, Tensor) else index
        if np.ndim(index) == 2 and self.buffer.lanes:
            index = of_coordinates(np.asarray(index), (self.buffer.capacity, *self.buffer.lanes))
        slots, lowest, _ = flat_slots(index, None)
        refuse_below(lowest)
        room = self.buffer.capacity * self.buffer.items_per_row
        if (outside := slots[slots >= room]).size:
            raise IndexError(f"index {outside[0]} is out of range: there is room for {room} items")
        return slots.astype(np.int32)

    def describe(self, rows: int | None = None, *, reward: NestedKey | None = None) -> Description:
        """`fbuf.describe` of the buffer and its state."""
        with self._lock:
            return describe(self.buffer, self._holder.tree(self._holder.leaves), rows, reward=reward)

    # ------------------------------------------------------------------ the state

    def functional(self, *, backup: bool = True) -> contextlib.AbstractContextManager[Handle]:
        """A block that takes the state over, for programs that get it donated. Assign the new state to `handle.state`.

            with rb.functional() as handle:
                handle.state, net = train(handle.state, net)  # jitted, with donate_argnums=0

        Until the block ends, other calls of the buffer raise RuntimeError. Then the buffer has the last state assigned,
        also if the block raised. If that state has no values (it was donated and not replaced, or its program failed), the
        buffer has the copy from the entry: RuntimeError if the block did not raise. With `backup=False` there is no copy,
        and the state is lost: calls raise RuntimeError until `loads()` or `empty()`.
        """
        return self._holder.lend(backup)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the state, beta and the generator's state in a folder that `fbuf.load_state` reads, as `fbuf.save_state`."""
        extra = {"beta": np.asarray(self._beta, np.float64)}
        with self._lock:
            if self.generator is not None:
                extra["generator"] = self.generator.get_state().numpy()
            save_state(path, self._holder.tree(self._holder.leaves), extra=extra)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Load what `dumps` or `fbuf.save_state` saved of a buffer with the same rules and items.

        Beta and the buffer's own generator, if any, are loaded where the folder has them. After an error nothing has
        changed: FileNotFoundError, CheckpointCorrupt, CheckpointMismatch.
        """
        with self._lock:
            self._holder.refuse_out()
            with jax.default_device(self._holder.device):
                state, extra = load_with_extra(path, self._holder.like)
            beta = not_negative("beta", extra.get("beta", self._beta))
            if self.generator is not None and "generator" in extra:
                try:
                    self.generator.set_state(torch.from_numpy(extra["generator"].copy()))
                except (RuntimeError, TypeError) as error:
                    raise CheckpointMismatch(f"{path} has the state of another kind of generator: {error}") from error
            self._holder.replace(state)
            self.beta = beta

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield from (("", self.buffer), ("batch_size", self.batch_size), ("is_out", self.is_out))


def _item_of(buffer: fbuf.Buffer, state: Any) -> Any:
    """The shapes and dtypes of an item of a state. ValueError for any other object."""
    if not isinstance(state, fbuf.BufferState):
        raise ValueError(f"the state must be what {type(buffer).__name__}.init returns, got {type(state).__name__}")
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)), state)
    rows = jax.eval_shape(buffer.read, specs, jax.ShapeDtypeStruct((1,), jnp.int32))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)


def _priorities(priority: Any) -> np.ndarray:
    """Priorities in the widest float that JAX has. TypeError for other dtypes than real numbers, ValueError for bad ones."""
    return good_priorities(priority, str(jax.dtypes.canonicalize_dtype("float64")))[0]


untraced(FunctionalReplayBuffer)
from_fbuf = FunctionalReplayBuffer  # the name that pairs with `to_fbuf`

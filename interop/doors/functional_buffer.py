"""A stateful replay buffer for torch over any functional buffer and its state."""

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

import fbuf
from fbuf.checkpoint import CheckpointMismatch, load_with_extra, save_state
from interop.data import bridge, randomness
from interop.data.keys import as_path
from interop.data.numbers import not_negative, whole
from interop.doors.drawing import Drawing
from interop.doors.held_state import Handle, HeldState
from interop.doors.items import item_of, items_of
from interop.doors.programs import programs
from interop.doors.slots import number_of, priorities_of, slots_of
from interop.host import compiled
from interop.samplers.validation import one_for_each

_LEAST = 64  # entries of an update: fewer cost as much, and each length a program


class FunctionalReplayBuffer:
    """A stateful replay buffer for torch over a functional buffer with any rules, or a `Mixture`, and its state.

    Batches are those that `jax.jit(buffer.sample)` draws, and cross without a copy. Items that are nested dicts come as
    TensorDict, others as the same pytree of tensors. Calls are safe from several threads.

    Args:
        buffer: the rules.
        state: what `buffer.init` or a program returned. It is taken over: the first write donates it.
        batch_size: of `sample()` and of iteration.
        beta: how much "priority_weight" corrects for priorities. May be set later.
        priority_key: the entry of TensorDicts that `extend` and `update_tensordict_priority` take priorities from.
        truncated_key: for slices the flag of their ends, with "done" and "terminated" beside it; None for none of them.
        generator: governs every draw; by default torch's global one.

    TypeError for traced arrays and dtypes that torch does not have; ValueError for a state of another buffer, on several
    devices, or with an array twice; RuntimeError for deleted arrays, and for a device that torch does not see.
    """

    def __init__(
        self,
        buffer: fbuf.Buffer | fbuf.Mixture,
        state: Any,
        *,
        batch_size: int | None = None,
        beta: float = 0.4,
        priority_key: Any = "td_error",
        truncated_key: Any = ("next", "truncated"),
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(buffer, fbuf.Buffer | fbuf.Mixture):
            raise TypeError(f"buffer must be a fbuf.Buffer or fbuf.Mixture, got {type(buffer).__name__}")
        self.buffer, self.priority_key, self.generator, self.beta = buffer, priority_key, generator, beta
        self.batch_size = None if batch_size is None else whole("batch_size", batch_size)
        self._members = buffer.buffers if isinstance(buffer, fbuf.Mixture) else (buffer,)
        item = item_of(self._members[0], state[0] if isinstance(state, tuple) and state else state)
        self._held = HeldState(state, jax.eval_shape(lambda: buffer.init(item)))
        self._lock = self._held.lock
        self.device = bridge.torch_device(self._held.device)
        self._items = items_of(item, self.device)
        flags = truncated_key is not None and isinstance(self._members[0].sampler, fbuf.Slices)
        truncated = as_path(truncated_key) if flags else ()
        if self._items.is_dict and any(truncated[:n] in self._items.paths for n in range(1, len(truncated))):
            raise ValueError(f"truncated_key={truncated_key!r} lies below a tensor of the items: give another, or None")
        self._programs = programs(buffer, self._items, truncated)
        self._drawing = functools.cache(functools.partial(Drawing, self._programs, self._items))
        self._keeps = any(each.sampler.keeps_priorities for each in self._members)
        self._has_ended = False  # the epoch, with the last batch of `next`

    @property
    def beta(self) -> float:
        """How much "priority_weight" corrects for priorities. It may be set at any time."""
        return float(self._beta)

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = np.asarray(not_negative("beta", value), np.float32)

    @property
    def is_out(self) -> bool:
        """Whether a block of `functional` has the state."""
        return self._held.is_out

    @property
    def state(self) -> Any:
        """A copy of the functional state."""
        with self._lock:
            return self._held.tree(map(jnp.copy, self._held.leaves))

    def __len__(self) -> int:
        """Items stored, in all lanes and members."""
        with self._lock:
            return int(self.buffer.size(self._held.tree(self._held.leaves)))

    def extend(self, data: Any, *, member: int | None = None) -> Tensor:
        """Write a batch of leaves [n, *lanes, ...]. Returns the index of each item.

        The index is int64 [n], with lanes [n * lanes, dims] in the order of time, then lanes; -1 for an item that was not
        kept. Data has the structure, shapes and dtypes of the stored items: nothing is cast. The data is copied. An entry
        `priority_key` of TensorDicts gives new items priorities, where the sampler keeps some. A `Mixture` is written to by
        `member`. KeyError, TypeError, ValueError or RuntimeError where data does not fit: nothing is written then. One
        trace for each n.
        """
        number = number_of(member, self.buffer)
        dims = 1 + len(self._members[number].lanes)
        priority = data.get(self.priority_key, None) if self._keeps and is_tensor_collection(data) else None
        if priority is not None and as_path(self.priority_key) not in self._items.paths:
            data = data.exclude(self.priority_key)
        rows = self._items.arrays(data, dims)
        count = math.prod(rows[0].shape[:dims])
        if priority is not None and priority.numel() != count:
            raise RuntimeError(f"{priority.numel()} priorities for {count} items; nothing was written")
        values = None if priority is None else priorities_of(priority.reshape(-1))
        if not count:
            return torch.zeros((0, dims) if dims > 1 else 0, dtype=torch.int64, device=self.device)
        with self._lock:
            (written,) = self._held.donate(self._programs.extend, rows, number)
            index = bridge.hand_over(written, torch.int64)
            if values is not None:
                self._update(*slots_of(index, self._members, number), values)
        return index

    def add(self, item: Any, *, member: int | None = None) -> Any:
        """Write one item, or with lanes one row of leaves [*lanes, ...]. Returns an int, with lanes the index of `extend`.

        None for an item that the writer did not keep. Otherwise as `extend`.
        """
        rows = item.unsqueeze(0) if is_tensor_collection(item) else jax.tree.map(lambda leaf: leaf[None], item)
        index = self.extend(rows, member=member)
        return index if index.ndim > 1 else None if index < 0 else int(index)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give items new priorities, one for each or one for all, as the "index" of samples names them.

        index: an int, integers [n] or coordinates [n, dims]; -1 is ignored, and of equal ones the last counts. Of a
        `Mixture` the nested "index" of a sample. TypeError where the sampler keeps no priorities, IndexError out of range,
        ValueError for priorities that are negative or not finite, RuntimeError for a wrong number of them. Nothing is
        changed then. O(n log capacity).
        """
        if not self._keeps:
            raise TypeError(f"{self.buffer!r} keeps no priorities: build it with sampler=fbuf.Prioritized(...)")
        slots, members = slots_of(index, self._members)
        values = one_for_each(slots, priorities_of(priority))
        with self._lock:
            self._update(slots, members, values)

    def update_tensordict_priority(self, data: Any) -> None:
        """`update_priority` of a sample whose entry `priority_key` has the priorities; of several for a row the largest.

        Does nothing where the sampler keeps no priorities. KeyError where the entry is missing.
        """
        if self._keeps:
            priority = data[self.priority_key]
            self.update_priority(data["index"], priority.reshape(priority.shape[0], -1).amax(1))

    def empty(self) -> None:
        """Remove all items. The memory is kept."""
        with self._lock:
            self._held.refuse_out()
            if self._held.is_lost:
                with jax.default_device(self._held.device):
                    self._held.replace(self.buffer.init(self._items.spec))
            self._held.donate(self._programs.clear)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A batch; with `return_info` also the info, a dict.

        TensorDicts have the info among their entries: "index"; "priority_weight" where the sampler keeps priorities; for
        slices, which come one after the other, [slices * time], the flags of `truncated_key`, and where slices may be
        padded ("collector", "mask"). Of a `Mixture` "index" is nested: "index", a slot, and "buffer_ids". The batch is
        smaller where fewer items can be drawn: at the end of an epoch, or where a member of a `Mixture` is empty.
        RuntimeError where there are none. One trace for each batch size.
        """
        drawing, tensors, _ = self._draw(batch_size)
        data = drawing.data(tensors)
        return (data, drawing.info(tensors)) if return_info else data

    def _draw(self, batch_size: int | None) -> tuple[Drawing, list[Tensor], bool]:
        """The entries of a batch, and whether an epoch has ended with it."""
        size = self.batch_size if batch_size is None else whole("batch_size", batch_size)
        if size is None:
            raise RuntimeError("batch_size not specified: give it to sample(), or to from_fbuf()")
        with self._lock:
            leaves, drawing = self._held.leaves, self._drawing(size)
            given = randomness.key(self.generator), self._beta
            drawn: Any = (
                drawing.program(leaves, *given)[1:] if not drawing.moves else self._held.donate(drawing.program, *given)
            )
        tensors, ended = drawing.tensors(*drawn)
        if tensors:
            return drawing, tensors, ended
        if not len(self):
            raise RuntimeError("Cannot sample from an empty storage. Call extend() or add() first.")
        raise RuntimeError(
            f"nothing can be drawn from the {len(self)} stored items: for slices no trajectory is long enough, all items of "
            "a queue were returned, or an epoch has fewer items than a batch"
        )

    def __iter__(self) -> Iterator[Any]:
        """Batches of `batch_size`: to the end of the epoch, or of the queue, for samplers without replacement."""
        ended = False
        while not ended:
            drawing, tensors, ended = self._draw(None)
            yield drawing.data(tensors)

    def next(self) -> Any:
        """The next batch of a running iteration; None once at its end, after which a new one begins."""
        with self._lock:
            if self._has_ended:
                self._has_ended = False
                return None
            drawing, tensors, self._has_ended = self._draw(None)
            return drawing.data(tensors)

    def __getitem__(self, index: Any) -> Any:
        """A copy of the items at slots: an int, a slice, integers, a mask, or the index of a sample.

        Of a `Mixture`: `rb[member, index]`. IndexError for slots that hold nothing. O(capacity).
        """
        number, index = index if isinstance(self.buffer, fbuf.Mixture) else (None, index)
        number = number_of(number, self.buffer)
        if isinstance(index, tuple) or (isinstance(index, Tensor) and index.ndim == 2):
            index = slots_of(index, self._members, number)[0]
        with self._lock:
            leaves, member = self._held.leaves, self._members[number]
            stored = np.arange(int(member.size(self._programs.states(leaves)[number])), dtype=np.int32)
            slots = stored[index.cpu().numpy() if isinstance(index, Tensor) else index]
            flat = slots.reshape(-1) if slots.size else np.zeros(1, np.int32)  # an empty batch is part of one row
            arrays = self._programs.read(leaves, compiled.padded(flat), number)
        tensors = [bridge.hand_over(each)[: slots.size].reshape((*slots.shape, *each.shape[1:])) for each in arrays]
        return self._items.build(tensors, slots.shape)

    def functional(self, *, backup: bool = True) -> contextlib.AbstractContextManager[Handle]:
        """Take the state over, for programs that have it donated; assign the one to be given back to `handle.state`.

            with rb.functional() as handle:
                handle.state, net = train(handle.state, net)  # jitted, with donate_argnums=0

        Until the block ends, other calls of the buffer raise RuntimeError. At its end, which waits for the programs, the
        buffer has the last state assigned, also where the block raised. If that one has no values (it was donated and
        nothing was given back, or its program failed), the buffer has the copy from the entry: RuntimeError where the block
        did not raise. With `backup=False` there is no copy, and the state is lost then: calls raise RuntimeError until
        `loads()` or `empty()`. Assigning raises the errors of the constructor, and ValueError for a state on another
        device. NotEnoughMemoryError where the copy does not fit. The entry costs that copy, and nothing without it.
        """
        return self._held.lend(self.buffer, backup)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the state, beta and the generator's state in a folder that `fbuf.load_state` reads.

        The folder keeps what it had until the new checkpoint is whole on the disk. OSError where the disk fails.
        """
        extra = {"beta": np.asarray(self._beta, np.float64)}
        with self._lock:
            if self.generator is not None:
                extra["generator"] = self.generator.get_state().numpy()
            save_state(path, self._held.tree(self._held.leaves), extra=extra)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Load what `dumps` or `fbuf.save_state` saved of a buffer with the same rules and items.

        Beta and the buffer's own generator, if any, are loaded where the folder has them. After an error nothing has
        changed: FileNotFoundError, CheckpointCorrupt, CheckpointMismatch with all differences, or for the state of a
        generator of another kind.
        """
        with self._lock:
            self._held.refuse_out()
            with jax.default_device(self._held.device):
                state, extra = load_with_extra(path, self._held.like)
            beta = not_negative("beta", extra.get("beta", self._beta))
            if self.generator is not None and "generator" in extra:
                try:
                    self.generator.set_state(torch.from_numpy(extra["generator"].copy()))
                except (RuntimeError, TypeError) as error:
                    raise CheckpointMismatch(f"{path} has the state of another kind of generator: {error}") from error
            self._held.replace(state)
            self.beta = beta

    def _update(self, slots: np.ndarray, members: np.ndarray, values: np.ndarray) -> None:
        if slots.size:
            padded = (compiled.padded(each, _LEAST) for each in (slots, members, values))
            self._held.donate(self._programs.update, *padded)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.buffer!r}, batch_size={self.batch_size}, is_out={self.is_out})"


from_fbuf = FunctionalReplayBuffer  # the name that pairs with `to_fbuf`

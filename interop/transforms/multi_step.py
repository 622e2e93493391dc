"""A stream as transitions of n steps, when it is stored."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from fbuf import checks
from interop.data.layout import unchecked
from interop.postprocs import returns
from interop.postprocs.transitions import (
    Arrival,
    Entries,
    Frames,
    Keys,
    Path,
    joined,
    leaves,
    refuse_unfit,
    rollout,
    transitions,
)
from interop.transforms.transform import Transform


class MultiStepTransform(Transform):
    """Stores transitions of n steps: as those of `MultiStep`, over a stream that comes in pieces.

    The last `n_steps` frames wait for those that follow, so after k frames max(0, k - n_steps) are stored;
    `inv` returns None where there are none yet. Reading changes nothing. Time is the last dim of the data; each lane of the
    dims before it is a stream. The waiting frames are part of `state_dict()`, of checkpoints of the buffer, and of its
    transactions: a write that fails leaves them as they were.

    Args:
        n_steps: at least 1; it may be set later, and holds from the next write on.
        gamma: discount, from 0 to 1.
        reward_keys, done_key, done_keys: under "next"; as for `MultiStep`.
        mask_key: of the mask, which is False for padding.
        last_flags: as for `MultiStep`.

    Frames that do not fit the waiting ones are refused, and these stay: KeyError for other entries, TypeError for another
    dtype or entries that are no tensors, ValueError for another shape, and in a buffer whose data has time in another dim.
    Waiting frames follow new ones to their device.
    """

    keeps = True

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Any = None,
        done_key: Any = None,
        done_keys: Any = None,
        mask_key: Any = None,
        last_flags: bool = False,
    ) -> None:
        super().__init__()
        self.n_steps, self.gamma = n_steps, gamma
        self.reward_keys: Any = ["reward"] if reward_keys is None else reward_keys
        self.done_key: Any = "done" if done_key is None else done_key
        self.done_keys: Any = ["done", "truncated", "terminated"] if done_keys is None else done_keys
        self.mask_key: Any = "mask" if mask_key is None else mask_key
        self.last_flags = last_flags
        self._frames: Frames | None = None

    @property
    def n_steps(self) -> int:
        """The most steps that are taken together."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        self._n_steps = checks.as_int("n_steps", value)

    @property
    def gamma(self) -> float:
        """The discount."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma = returns.as_discount(value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The same: only what is written changes."""
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise ValueError(
            "MultiStepTransform needs the steps that follow: it works where a buffer is written, in no environment"
        )

    def inv(self, tensordict: TensorDictBase) -> Any:
        """The transitions that are complete now; None for none. The tensordict stays as it is."""
        refuse_other_time(self)
        new, n = _frames(rollout(self, tensordict)), self._n_steps
        held, copied = self._frames, False
        if held is None:
            refuse_unfit(new, Keys.of(self))
        else:
            held = _followed(held, new)
        count = (0 if held is None else held.count) + new.count - n
        if held is not None and held.count and new.count <= n:  # one copy for this write and the next
            new, held, copied = joined([held, new]), None, True
        kept = new[max(new.count - n, 0) :]
        made = self._transitions(held, new, n, count, copied) if count > 0 else None
        self._frames = kept if copied else kept.copied()
        return None if made is None else _tensordict(made, tensordict.device)

    def flush(self) -> TensorDictBase | None:
        """The transitions of the waiting frames as the end of the stream, which then wait no longer; None for none."""
        held, self._frames = self._frames, None
        if held is None or not held.count:
            return None
        return _tensordict(self._transitions(None, held, self._n_steps, held.count), None)

    def _transitions(self, held: Frames | None, new: Frames, n: int, count: int, apart: bool = False) -> Frames:
        """The first transitions of these frames; with `apart` observations hold no memory of the frames."""
        keys, parts = Keys.of(self), [new] if held is None else [held, new]
        read = [*(("next", *key) for key in (*keys.rewards, keys.done)), keys.mask]
        entries, steps = transitions(joined([part.only(read) for part in parts]), keys, self._gamma, n, count)
        arrival = Arrival(steps, new.time, 0 if held is None else held.count, new.count, n)
        others = [path for path in new.entries if path not in entries]
        rest = _first([part.only(path for path in others if not keys.arrive(path)) for part in parts], count)
        entries.update((rest.copied() if apart else rest).entries)
        for path in filter(keys.arrive, others):
            entries[path] = arrival.of(path, None if held is None else held.entries[path], new.entries[path])
        return Frames(entries, torch.Size([*new.batch[:-1], count]), new.nested)

    def _kept(self) -> Any:
        return self._frames

    def _keep(self, kept: Any) -> None:
        self._frames = kept

    def _emptied(self) -> None:
        self._frames = None

    def get_extra_state(self) -> dict[str, Any]:
        """n_steps, gamma, and the waiting frames as plain values."""
        held = self._frames or Frames({}, torch.Size())
        frames = [{"path": list(path), "values": leaf} for path, leaf in held.entries.items()]
        nested = [{"path": list(path), "dims": list(dims)} for path, dims in held.nested.items()]
        batch = None if self._frames is None else list(held.batch)
        return {"n_steps": self._n_steps, "gamma": self._gamma, "batch": batch, "frames": frames, "nested": nested}

    def set_extra_state(self, state: Any) -> None:
        """Go on from a saved state. TypeError or ValueError for a wrong one."""
        if not isinstance(state, Mapping) or set(state) != {"n_steps", "gamma", "batch", "frames", "nested"}:
            raise TypeError(
                f"the state of a MultiStepTransform has n_steps, gamma, batch, frames and nested, got {state!r}"
            )
        n, gamma = checks.as_int("n_steps", state["n_steps"]), returns.as_discount(state["gamma"])
        batch, found = state["batch"], {}
        for each in state["frames"]:
            path, values = tuple(each["path"]), each["values"]
            if not isinstance(values, Tensor) or not batch or values.shape[: len(batch)] != torch.Size(batch):
                raise ValueError(f"{path!r} of the frames is no tensor that begins with {batch}")
            found[path] = values
        nested = {tuple(each["path"]): torch.Size(each["dims"]) for each in state["nested"]}
        frames = Frames(found, torch.Size(batch), nested).copied() if found else None
        self._n_steps, self._gamma, self._frames = n, gamma, frames

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_steps={self._n_steps}, gamma={self._gamma})"


def refuse_other_time(transform: Transform) -> None:
    """ValueError for a transform of a buffer that is written along another dim than the last, which is taken for time."""
    buffer = transform.container
    dim = getattr(buffer, "dim_extend", None)
    if dim is not None and dim < buffer.storage.ndim - 1:
        raise ValueError(
            f"{type(transform).__name__} takes the last dim of what is written for time, and this buffer is extended along "
            f"dim {dim} of {buffer.storage.ndim}: build it with dim_extend={buffer.storage.ndim - 1}, and write [..., time]"
        )


def _frames(data: TensorDictBase) -> Frames:
    """The entries of what is written. TypeError for one that is no tensor."""
    entries: Entries = {}
    for path, leaf in leaves(data):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{path!r} is no tensor, and cannot be kept for the frames that follow: leave it out")
        entries[path] = leaf.detach() if leaf.requires_grad else leaf
    inner = {path[:depth] for path in entries for depth in range(1, len(path))}
    dims = {path: data.get(path).batch_size[data.ndim :] for path in inner}
    return Frames(entries, data.batch_size, {path: each for path, each in dims.items() if each})


def _followed(held: Frames, new: Frames) -> Frames:
    """Frames held, on the devices of new ones. Errors for new ones that cannot follow."""
    if held.batch[:-1] != new.batch[:-1]:
        raise ValueError(
            f"the frames kept are {list(held.batch)}, new ones {list(new.batch)}: all dims but the last, time, must agree"
        )
    if held.entries.keys() != new.entries.keys():
        missing, more = held.entries.keys() - new.entries.keys(), new.entries.keys() - held.entries.keys()
        raise KeyError(
            f"the frames kept have other entries: not found in new ones {sorted(map(repr, missing))}, only in new ones "
            f"{sorted(map(repr, more))}"
        )
    behind = new.time + 1
    for path, leaf in new.entries.items():
        other = held.entries[path]
        if leaf.dtype != other.dtype:
            raise TypeError(f"{path!r} is {leaf.dtype}, in the frames kept {other.dtype}")
        if leaf.shape[behind:] != other.shape[behind:]:
            raise ValueError(
                f"{path!r} is {list(leaf.shape[behind:])} a frame, in the frames kept {list(other.shape[behind:])}"
            )
    if all(held.entries[path].device == leaf.device for path, leaf in new.entries.items()):
        return held
    moved = {path: leaf.to(new.entries[path].device) for path, leaf in held.entries.items()}
    return dataclasses.replace(held, entries=moved)


def _first(parts: list[Frames], count: int) -> Frames:
    """The first frames of the parts."""
    if len(parts) == 1 or parts[0].count >= count:
        return parts[0][:count]
    return joined([parts[0], parts[1][: count - parts[0].count]])


def _tensordict(made: Frames, device: torch.device | None) -> TensorDictBase:
    """The entries as a tensordict."""
    tree: dict[str, Any] = {}
    for path, leaf in made.entries.items():
        level = tree
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = leaf
    return _nested(tree, (), made, device)


def _nested(tree: dict[str, Any], path: Path, made: Frames, device: torch.device | None) -> TensorDictBase:
    batch = torch.Size([*made.batch, *made.nested.get(path, ())])
    found = {
        key: _nested(value, (*path, key), made, device) if isinstance(value, dict) else value
        for key, value in tree.items()
    }
    return unchecked(found, batch, device, None)

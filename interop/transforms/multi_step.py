"""A stream as transitions of n steps, when it is stored."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from fbuf import checks
from interop.data.tensordicts import unchecked
from interop.postprocs import returns
from interop.postprocs.transitions import Keys, leaves, narrowed, rollout, transitions
from interop.transforms.transform import Transform

_STATE = {"n_steps", "gamma", "batch", "frames", "nested"}


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
        self._waiting: TensorDictBase | None = None  # never changed in place

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
        frames, waiting, keys, n = _detached(rollout(self, tensordict)), self._waiting, Keys.of(self), self._n_steps
        time = frames.ndim - 1
        if waiting is not None:
            if waiting.shape[:time] != frames.shape[:time]:
                raise ValueError(
                    f"the frames kept are {list(waiting.shape)}, new ones {list(frames.shape)}: all dims but the last, "
                    "time, must agree"
                )
            frames = _joined(waiting, frames, time)
        total = frames.shape[time]
        count = total - n
        if count <= 0:
            transitions(narrowed(frames, time, 0, 0), keys, self._gamma, n, 0)  # for its errors
            self._waiting = narrowed(frames, time, 0, total, copy=True) if waiting is None else frames
            return None
        made = transitions(frames, keys, self._gamma, n, count)
        self._waiting = narrowed(frames, time, count, n, copy=True)
        # Rows that are few hold no memory of the frames around them.
        return made.clone() if waiting is not None and count < n else made

    def flush(self) -> TensorDictBase | None:
        """The transitions of the waiting frames as the end of the stream, which then wait no longer; None for none."""
        frames, self._waiting = self._waiting, None
        if frames is None or not frames.shape[-1]:
            return None
        return transitions(frames, Keys.of(self), self._gamma, self._n_steps, frames.shape[-1])

    def _kept(self) -> Any:
        return self._waiting

    def _keep(self, kept: Any) -> None:
        self._waiting = kept

    def _emptied(self) -> None:
        self._waiting = None

    def get_extra_state(self) -> dict[str, Any]:
        """n_steps, gamma, and the waiting frames as plain values."""
        state: dict[str, Any] = {
            "n_steps": self._n_steps,
            "gamma": self._gamma,
            "batch": None,
            "frames": [],
            "nested": [],
        }
        frames = self._waiting
        if frames is not None:
            state["batch"] = list(frames.batch_size)
            state["frames"] = [{"path": list(path), "values": leaf} for path, leaf in leaves(frames)]
            inner = {path[:depth] for path, _ in leaves(frames) for depth in range(1, len(path))}
            state["nested"] = [
                {"path": list(path), "dims": list(frames.get(path).batch_size)} for path in sorted(inner)
            ]
        return state

    def set_extra_state(self, state: Any) -> None:
        """Go on from a saved state. TypeError or ValueError for a wrong one."""
        if not isinstance(state, Mapping) or set(state) != _STATE:
            raise TypeError(
                f"the state of a MultiStepTransform has n_steps, gamma, batch, frames and nested, got {state!r}"
            )
        n, gamma = checks.as_int("n_steps", state["n_steps"]), returns.as_discount(state["gamma"])
        batch, frames = state["batch"], None
        if state["frames"]:
            frames = TensorDict({}, batch_size=batch or [])
            for each in state["nested"]:
                frames.set(tuple(each["path"]), TensorDict({}, batch_size=each["dims"]))
            for each in state["frames"]:
                path, values = tuple(each["path"]), each["values"]
                if not isinstance(values, Tensor) or not batch or values.shape[: len(batch)] != torch.Size(batch):
                    raise ValueError(f"{path!r} of the frames is no tensor that begins with {batch}")
                frames.set(path, values.clone())
        self._n_steps, self._gamma, self._waiting = n, gamma, frames

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


def _detached(data: TensorDictBase) -> TensorDictBase:
    """The data without gradients. TypeError for an entry that is no tensor."""
    grads = False
    for path, leaf in leaves(data):
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{path!r} is no tensor, and cannot be kept for the frames that follow: leave it out")
        grads |= leaf.requires_grad
    return data.detach() if grads else data


def _joined(waiting: TensorDictBase, new: TensorDictBase, time: int, where: tuple[str, ...] = ()) -> TensorDictBase:
    """The waiting frames and those that follow, on their device. Errors for new ones that cannot follow."""
    here, there = dict(waiting.items()), dict(new.items())
    if here.keys() != there.keys():
        raise KeyError(
            f"the frames kept have other entries: not found in new ones {sorted(here.keys() - there.keys())}, only in new "
            f"ones {sorted(there.keys() - here.keys())}"
        )
    made: dict[str, Any] = {}
    for key, leaf in there.items():
        other, path = here[key], (*where, key)
        if isinstance(leaf, Tensor) != isinstance(other, Tensor):
            raise TypeError(f"{path!r} is a {type(leaf).__name__}, in the frames kept a {type(other).__name__}")
        if not isinstance(leaf, Tensor):
            made[key] = _joined(other, leaf, time, path)
            continue
        if leaf.dtype != other.dtype:
            raise TypeError(f"{path!r} is {leaf.dtype}, in the frames kept {other.dtype}")
        if leaf.shape[time + 1 :] != other.shape[time + 1 :]:
            item, kept = list(leaf.shape[time + 1 :]), list(other.shape[time + 1 :])
            raise ValueError(f"{path!r} is {item} a frame, in the frames kept {kept}")
        made[key] = torch.cat([other if other.device == leaf.device else other.to(leaf.device), leaf], time)
    count = waiting.shape[time] + new.shape[time]
    batch = torch.Size([*new.batch_size[:time], count, *new.batch_size[time + 1 :]])
    return unchecked(made, batch, new.device, None)

"""Rollouts as transitions of n steps, before they are stored."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor, nn

from fbuf import checks
from interop.data.keys import as_path
from interop.data.tensordicts import unchecked
from interop.postprocs import returns
from interop.postprocs.gather import picked

Path = tuple[Any, ...]


class MultiStep(nn.Module):
    """n-step returns of a rollout [*batch, time] (Sutton 1988): joins each step with those that follow.

    A transition from step t has k = min(n_steps, steps to the end of its trajectory) steps. A trajectory ends where
    ("next", "done") is true, and with the rollout.

    - ("next", "reward") becomes the sum of gamma**i * reward[t + i], i < k. ("next", "original_reward") is the old reward.
    - The other entries under "next" are those of step t + k - 1. "done", "terminated" and "truncated" stay those of step t
      unless `last_flags`. The target reward + gamma**k * (1 - terminated) * value needs those of step t + k - 1.
    - "steps_to_next_obs" is k (int64), "gamma" is gamma**k (float32), "nonterminal" is k > 1; all have the shape of the
      rollout. If each agent has flags, [*batch, time, *agents], they have the shape of these.
    - Frames whose mask is False are padding: never "nonterminal", and no transition reaches them.

    The result is a new tensordict. Integer rewards become floats. Gradients flow. O(steps * n_steps).

    Args:
        gamma: discount, from 0 to 1.
        n_steps: at least 1.
        last_flags: take the flags under "next" from step t + k - 1, too.

    Attributes:
        reward_keys, done_key, done_keys: under "next": rewards, where trajectories end, other flags. With several rewards
            the old ones are stored as "original_<name>" beside each.
        mask_key: of the mask, ("collector", "mask") by default.

    KeyError for a missing entry, RuntimeError for entries that do not fit the flags of agents.
    """

    gammas: Tensor

    def __init__(self, gamma: float, n_steps: int, *, last_flags: bool = False) -> None:
        super().__init__()
        self._gamma, n_steps = returns.as_discount(gamma), checks.as_int("n_steps", n_steps)
        powers = torch.tensor([self._gamma**i for i in range(n_steps + 1)], dtype=torch.float32, device="cpu")
        self.register_buffer("gammas", powers.view(1, 1, -1))
        self.done_key: Any = "done"
        self.done_keys: Any = ("done", "truncated", "terminated")
        self.reward_keys: Any = ("reward",)
        self.mask_key: Any = ("collector", "mask")
        self.last_flags = last_flags

    @property
    def n_steps(self) -> int:
        """The largest number of steps of a transition."""
        return self.gammas.shape[-1] - 1

    @property
    def gamma(self) -> float:
        """The discount."""
        return self._gamma

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        loaded = float(self.gammas[0, 0, 1])
        if loaded != float(np.float32(self._gamma)):  # otherwise it is the same, and more exact
            self._gamma = returns.as_discount(loaded)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The transitions of a rollout."""
        data = rollout(self, tensordict)
        return transitions(data, RolloutKeys.of(self), self._gamma, self.n_steps, data.shape[-1])

    def extra_repr(self) -> str:
        return f"gamma={self._gamma}, n_steps={self.n_steps}" + (", last_flags=True" if self.last_flags else "")


@dataclasses.dataclass(frozen=True)
class RolloutKeys:
    """Paths of rewards, ends and mask; all but the mask are under "next"."""

    rewards: tuple[Path, ...]
    done: Path
    kept: frozenset[Path]  # flags that stay those of the first step
    mask: Path

    @classmethod
    def of(cls, module: Any) -> "RolloutKeys":
        """The keys of a module, each a key or a list of keys. ValueError without a reward."""
        rewards, dones = (
            [as_path(key) for key in ([keys] if isinstance(keys, str) else keys)]
            for keys in (module.reward_keys, module.done_keys)
        )
        if not rewards:
            raise ValueError("at least one key of a reward is needed")
        done = as_path(module.done_key)
        kept = frozenset(() if module.last_flags else (done, *dones))
        return cls(tuple(rewards), done, kept, as_path(module.mask_key))

    def original(self, reward: Path) -> Path:
        """The path of the reward of one step."""
        if len(self.rewards) == 1:
            return ("next", "original_reward")
        return ("next", *reward[:-1], f"original_{reward[-1]}")


def rollout(module: nn.Module, data: Any) -> TensorDictBase:
    """The data. TypeError for other types than tensordicts, ValueError for one without a time dim."""
    if not is_tensor_collection(data):
        raise TypeError(f"{type(module).__name__} takes a tensordict, got {type(data).__name__}")
    if not data.ndim:
        raise ValueError(f"{type(module).__name__} takes a tensordict whose last dim is time, got one without any dim")
    return data


def mapped(data: TensorDictBase, time: int, count: int, function: Callable[[Path, Any], Any], at: Path = ()) -> Any:
    """A tensordict of the same structure with `count` steps in the time dim: of each entry the result of the function."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        leaf = isinstance(value, Tensor) or is_non_tensor(value) or not is_tensor_collection(value)
        path = (*at, key)
        found[key] = function(path, value) if leaf else mapped(value, time, count, function, path)
    batch = torch.Size([*data.batch_size[:time], count, *data.batch_size[time + 1 :]])
    return unchecked(found, batch, data.device, data.names if any(data.names) else None)


def transitions(
    data: TensorDictBase, keys: RolloutKeys, gamma: float, n: int, count: int, copy: bool = False
) -> TensorDictBase:
    """The first `count` transitions of frames [*batch, time], as a new tensordict. The last frame is an end.

    Without `copy`, entries of the frames themselves share their memory. KeyError for a missing entry, RuntimeError for
    entries that do not fit the flags.
    """
    time, batch = data.ndim - 1, data.batch_size
    done = returns.flags(returns.entry(data, ("next", *keys.done)))
    _expect(("next", *keys.done), done, batch)
    agents = done.shape[len(batch) :]
    agents = agents[:-1] if agents[-1:] == (1,) else agents
    each = torch.Size([*batch, *agents])
    stops, mask = done.reshape(each), data.get(keys.mask, None)
    if mask is not None:
        _expect(keys.mask, mask, batch, most=1)
        mask = returns.flags(mask).reshape(*batch, *(1 for _ in agents)).expand(each)
        changes = mask.diff(dim=time)  # padding is a trajectory of its own
        stops = stops.clone()
        stops.narrow(time, 0, changes.shape[time]).logical_or_(changes)
    found: dict[Path, Tensor] = {}
    for key in keys.rewards:
        reward = returns.entry(data, ("next", *key))
        _expect(("next", *key), reward, each)
        found["next", *key], steps, power = returns.n_step(reward, stops, gamma, n, time)
        found[keys.original(key)] = reward
    about = {
        "steps_to_next_obs": steps,
        "gamma": power,
        "nonterminal": steps > 1 if mask is None else (steps > 1) & mask,
    }
    found.update({(name,): leaf.reshape(done.shape if agents else batch) for name, leaf in about.items()})
    places = _last_frames(steps.narrow(time, 0, count), time, batch[time])
    flat = places.reshape(-1)

    def made(path: Path, leaf: Any) -> Any:
        if path in found:
            return found.pop(path).narrow(time, 0, count)
        if path[0] != "next" or path[1:] in keys.kept:
            part = leaf.narrow(time, 0, count) if isinstance(leaf, Tensor) else leaf[..., :count]
            return part.clone(memory_format=torch.contiguous_format) if copy else part
        _expect(path, leaf, each)
        item = leaf.shape[places.ndim :]
        rows = leaf.reshape(leaf.shape[: places.ndim].numel(), *item)
        return picked(rows, flat).reshape(*places.shape, *item)

    result = mapped(data, time, count, made)
    for path, leaf in found.items():
        result.set(path, leaf.narrow(time, 0, count))
    return result


def _expect(path: Path, leaf: Any, shape: torch.Size, most: int | None = None) -> None:
    """RuntimeError for an entry that does not begin with a shape, or has more than `most` values behind it."""
    if leaf.shape[: len(shape)] != shape or (most is not None and leaf.shape[len(shape) :].numel() > most):
        raise RuntimeError(
            f"{path!r} is {list(leaf.shape)}: the tensordict shape must be compatible with the done's shape (trailing "
            f"singleton dimension excluded), it has to begin with {list(shape)}"
        )


def _last_frames(steps: Tensor, time: int, length: int) -> Tensor:
    """The last frames of transitions, as places in entries [*batch, length, *agents] whose leading dims are one."""
    agents, device = steps.shape[time + 1 :], steps.device
    ones = [1] * len(agents)
    rows = steps + torch.arange(-1, steps.shape[time] - 1, device=device).view(-1, *ones)
    lanes = torch.arange(steps.shape[:time].numel(), device=device).view(*steps.shape[:time], 1, *ones)
    places = lanes * length + rows
    return places * agents.numel() + torch.arange(agents.numel(), device=device).view(agents) if agents else places

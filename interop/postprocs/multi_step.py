"""Rollouts as transitions of n steps, before they are stored."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor, nn

from fbuf import checks
from interop.data.keys import as_path, checked_key
from interop.data.tensordicts import entries_of, of_entries, unchecked
from interop.data.trajectory_keys import TrajectoryKeys
from interop.postprocs import returns
from interop.postprocs.batch_trajectories import SideBySide, StepMarks, keys_of
from interop.postprocs.gather import picked

KeyPath = tuple[Any, ...]


class MultiStep(nn.Module):
    """n-step returns of a rollout [*batch, time] (Sutton 1988): joins each step with those that follow.

    A transition from step t has k = min(n_steps, steps to the end of its trajectory) steps. A trajectory ends with the
    rollout, and where any entry says so: where a flag of `done_key` or `done_keys` is true, before a true "is_init", and
    where ("collector", "traj_ids"), "traj_ids", "episode" or the mask changes. Steps of several trajectories may be
    interleaved in time: the ids 0, 1, 0, 1 are two trajectories.

    - ("next", "reward") becomes the sum of gamma**i * reward[t + i], i < k. ("next", "original_reward") is the old reward.
    - The other entries under "next" are those of step t + k - 1. "done", "terminated" and "truncated" stay those of step t
      unless `last_flags`. The target reward + gamma**k * (1 - terminated) * value needs those of step t + k - 1.
    - "steps_to_next_obs" is k (int64), "gamma" is gamma**k (float32), "nonterminal" is k > 1; all have the shape of the
      rollout, [*batch, time], without the last dim of one that rewards and flags have: write gamma.unsqueeze(-1) beside
      these. If each agent has flags, [*batch, time, *agents], they have the shape of these.
    - Where a trajectory ends without a flag, k and gamma**k count the steps to its last one, "terminated" is False, and the
      target has the value of the last next observation. "nonterminal" does not say so: it is False for k = 1.
    - Frames whose mask is False are padding: never "nonterminal", and no transition reaches them.

    The result is a new tensordict. Integer rewards become floats. Gradients flow. O(steps * n_steps).

    Args:
        gamma: discount, from 0 to 1.
        n_steps: at least 1.
        last_flags: take the flags under "next" from step t + k - 1, too.
        traj_key: an entry of ids, one value a step, besides the default ones.
        only_named_keys: only `traj_key`, `done_key`, `done_keys` and `mask_key` mark trajectories.

    Attributes:
        reward_keys, done_key, done_keys: under "next": rewards, where trajectories end, other flags. With several rewards
            the old ones are stored as "original_<name>" beside each.
        mask_key: of the mask, ("collector", "mask") by default.

    KeyError for a missing entry, and for a missing `done_key` where nothing else marks trajectories. RuntimeError for
    entries that do not fit the flags of agents.
    """

    gammas: Tensor

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        last_flags: bool = False,
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
    ) -> None:
        super().__init__()
        self._gamma = returns.as_discount(gamma)
        n_steps = checks.as_int("n_steps", n_steps)
        powers = torch.tensor([self._gamma**i for i in range(n_steps + 1)], dtype=torch.float32, device="cpu")
        self.register_buffer("gammas", powers.view(1, 1, -1))
        self.done_key: Any = "done"
        self.done_keys: Any = ("done", "truncated", "terminated")
        self.reward_keys: Any = ("reward",)
        self.mask_key: Any = ("collector", "mask")
        self.last_flags = last_flags
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)

    @property
    def n_steps(self) -> int:
        """The largest number of steps of a transition."""
        return self.gammas.shape[-1] - 1

    @property
    def gamma(self) -> float:
        """The discount."""
        return self._gamma

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # what torch passes
        super()._load_from_state_dict(*args, **kwargs)
        loaded = float(self.gammas[0, 0, 1])
        if loaded != float(np.float32(self._gamma)):  # otherwise it is the same, and more exact
            self._gamma = returns.as_discount(loaded)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The transitions of a rollout."""
        data = rollout(self, tensordict)
        steps = RolloutSteps.of(data, RolloutKeys.of(self))
        return steps.transitions(steps.side_by_side(), self._gamma, self.n_steps, data.shape[-1])

    def extra_repr(self) -> str:
        return f"gamma={self._gamma}, n_steps={self.n_steps}" + (", last_flags=True" if self.last_flags else "")


@dataclasses.dataclass(frozen=True)
class RolloutKeys:
    """Paths of rewards, ends and masks."""

    rewards: tuple[KeyPath, ...]  # under "next", as `done` and `first_flags`
    done: KeyPath
    first_flags: frozenset[KeyPath]  # flags that stay those of the first step
    mask: KeyPath
    trajectories: TrajectoryKeys

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
        mask = as_path(module.mask_key)
        first_flags = frozenset(() if module.last_flags else (done, *dones))
        ends = [("next", *path) for path in dict.fromkeys((done, *dones))]
        keys = keys_of(module.traj_key, ends, module.only_named_keys, masks=[mask])
        return cls(tuple(rewards), done, first_flags, mask, keys)

    def original(self, reward: KeyPath) -> KeyPath:
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


def mapped(
    data: TensorDictBase, time: int, count: int, function: Callable[[KeyPath, Any], Any], at: KeyPath = ()
) -> Any:
    """A tensordict of the same structure with `count` steps in the time dim: of each entry the result of the function."""
    results: dict[str, Any] = {}
    entries = entries_of(data)  # of a plain tensordict, in a third of the time
    for key, value in (data if entries is None else entries).items():
        leaf = isinstance(value, Tensor) or is_non_tensor(value) or not is_tensor_collection(value)
        path = (*at, key)
        results[key] = function(path, value) if leaf else mapped(value, time, count, function, path)
    batch = torch.Size([*data.batch_size[:time], count, *data.batch_size[time + 1 :]])
    if entries is not None:
        return of_entries(results, batch, data.device)
    return unchecked(results, batch, data.device, data.names if any(data.names) else None)


@dataclasses.dataclass(frozen=True)
class RolloutSteps:
    """Frames [*batch, time] to make transitions of, and what marks their trajectories.

    Attributes:
        data: the frames.
        keys: of rewards, ends and masks.
        marks: the entries that mark trajectories.
        done: the flags of `keys.done`, [*batch, time, *agents] or [*batch, time, *agents, 1]; None where there are none.
        device: of the results.
    """

    data: TensorDictBase
    keys: RolloutKeys
    marks: StepMarks
    done: Tensor | None
    device: torch.device

    @classmethod
    def of(cls, data: TensorDictBase, keys: RolloutKeys) -> "RolloutSteps":
        """KeyError for a missing entry, RuntimeError for flags and a mask that do not fit the frames."""
        rewards = [returns.entry(data, ("next", *key)) for key in keys.rewards]
        marks = StepMarks.of(data, data.ndim - 1, keys.trajectories)
        path = ("next", *keys.done)
        is_optional = keys.done == ("done",) and any(marks.keys.groups()[:3])
        done = data.get(path, None) if is_optional else returns.entry(data, path)
        if done is not None:
            done = returns.flags(done)
            expect(path, done, data.batch_size)
        if (mask := data.get(keys.mask, None)) is not None:
            expect(keys.mask, mask, data.batch_size, most=1)
        return cls(data, keys, marks, done, rewards[0].device if done is None else done.device)

    @property
    def agents(self) -> torch.Size:
        """The dims of flags behind those of the frames, without a last one of size one."""
        agents = torch.Size([]) if self.done is None else self.done.shape[self.data.ndim :]
        return agents[:-1] if agents[-1:] == (1,) else agents

    def team_ends(self) -> Tensor | None:
        """bool [*batch, time]: whether all agents are done, where each has flags; None otherwise."""
        if self.done is None or not self.agents:
            return None
        return self.done.flatten(self.data.ndim).all(-1)

    def side_by_side(self) -> SideBySide:
        """The frames of each trajectory side by side."""
        return SideBySide.of(self.marks, self.device, ends=self.team_ends())

    def mask(self) -> Tensor | None:
        """bool [*batch, time], False for padding; None without any."""
        valid: Tensor | None = None
        for path in self.marks.keys.masks:
            mask = returns.flags(self.marks.entries[path]).reshape(self.data.batch_size).to(self.device)
            valid = mask if valid is None else valid & mask
        return valid

    def transitions(
        self, order: SideBySide, gamma: float, n: int, chosen: int | Tensor, copy: bool = False
    ) -> TensorDictBase:
        """Transitions of the first `chosen` frames of each lane, or of those at places int64 [*lanes, count], as new data.

        Without `copy`, entries of the frames themselves share their memory. RuntimeError for entries that do not fit the
        flags.
        """
        data = self.data
        keys = self.keys
        time = data.ndim - 1
        batch = data.batch_size
        agents = self.agents
        flag_shape = torch.Size([*batch, *agents])
        stops = order.stops
        if agents:
            assert self.done is not None
            stops = order.all_stops(self.done.reshape(flag_shape))
        rewards: dict[KeyPath, Tensor] = {}
        for key in keys.rewards:
            reward = returns.entry(data, ("next", *key))
            expect(("next", *key), reward, flag_shape)
            total, steps, power = returns.n_step(order.arranged(reward), stops, gamma, n, time)
            rewards["next", *key] = order.restored(total)
            rewards[keys.original(key)] = reward
        about = {"gamma": order.restored(power), "nonterminal": order.restored(steps > 1)}
        about["steps_to_next_obs"] = order.restored(steps)
        if (mask := self.mask()) is not None:
            about["nonterminal"] &= mask.reshape(*mask.shape, *(1 for _ in agents))
        shape = batch if self.done is None or not agents else self.done.shape
        rewards.update({(name,): leaf.reshape(shape) for name, leaf in about.items()})
        rows = _Rows(batch, chosen)
        last = torch.arange(batch[time], device=steps.device).reshape(-1, *(1 for _ in agents)) + steps - 1
        if order.order is not None:
            last = order.restored(
                order.order.reshape(*batch, *(1 for _ in agents)).expand(flag_shape).take_along_dim(last, time)
            )
        places = _in_entries(rows.of(last), time, batch[time])
        flat = places.reshape(-1)

        def entry_of(path: KeyPath, leaf: Any) -> Any:
            if path in rewards:
                return rows.of(rewards.pop(path))
            if path[0] != "next" or path[1:] in keys.first_flags:
                return rows.of(leaf, copy)
            expect(path, leaf, flag_shape)
            item = leaf.shape[places.ndim :]
            of_all = leaf.reshape(leaf.shape[: places.ndim].numel(), *item)
            return picked(of_all, flat).reshape(*places.shape, *item)

        result = mapped(data, time, rows.count, entry_of)
        for path, leaf in rewards.items():
            result.set(path, rows.of(leaf))
        return result


class _Rows:
    """Takes rows of entries [*lanes, time, ...]: the first of each lane, or those at places [*lanes, count]."""

    def __init__(self, batch: torch.Size, chosen: int | Tensor) -> None:
        self._time = len(batch) - 1
        self._chosen = chosen
        self._flat = None
        self.count = chosen if isinstance(chosen, int) else chosen.shape[-1]
        if not isinstance(chosen, int):
            lanes = torch.arange(batch[:-1].numel(), device=chosen.device).reshape(*batch[:-1], 1)
            self._flat = (lanes * batch[-1] + chosen).reshape(-1)

    def of(self, leaf: Any, copy: bool = False) -> Any:
        """The rows of an entry; of a tensor a view where these are the first ones, unless `copy`."""
        if self._flat is not None:
            item = leaf.shape[self._time + 1 :]
            rows = leaf.reshape(leaf.shape[: self._time + 1].numel(), *item)
            return picked(rows, self._flat).reshape(*leaf.shape[: self._time], self.count, *item)
        if not isinstance(leaf, Tensor):
            return leaf[(*(slice(None) for _ in range(self._time)), slice(self.count))]
        part = leaf.narrow(self._time, 0, self.count)
        return part.clone(memory_format=torch.contiguous_format) if copy else part


def expect(path: KeyPath, leaf: Any, shape: torch.Size, most: int | None = None) -> None:
    """RuntimeError for an entry that does not begin with a shape, or has more than `most` values behind it."""
    if leaf.shape[: len(shape)] != shape or (most is not None and leaf.shape[len(shape) :].numel() > most):
        raise RuntimeError(
            f"{path!r} is {list(leaf.shape)}: the tensordict shape must be compatible with the done's shape (trailing "
            f"singleton dimension excluded), it has to begin with {list(shape)}"
        )


def _in_entries(rows: Tensor, time: int, length: int) -> Tensor:
    """Frames [*lanes, count, *agents] as places in entries [*lanes, length, *agents] whose leading dims are one."""
    agents = rows.shape[time + 1 :]
    device = rows.device
    lanes = torch.arange(rows.shape[:time].numel(), device=device).view(*rows.shape[:time], 1, *(1 for _ in agents))
    places = lanes * length + rows
    return places * agents.numel() + torch.arange(agents.numel(), device=device).view(agents) if agents else places

"""Frames of a stream as transitions of up to n steps: the returns on the way, and the entries where they arrive."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor, nn

from interop.data.keys import as_path
from interop.data.layout import unchecked
from interop.postprocs import returns
from interop.postprocs.gather import picked

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Keys:
    """Where frames have rewards, ends and a mask; all but the mask under "next"."""

    rewards: tuple[Path, ...]
    done: Path
    untouched: frozenset[Path]  # stay those of the step itself
    mask: Path

    @classmethod
    def of(cls, module: Any) -> "Keys":
        """The keys of a module, each a key or a list of keys. ValueError without any reward."""
        rewards, dones = (
            [as_path(key) for key in ([keys] if isinstance(keys, str) else keys)]
            for keys in (module.reward_keys, module.done_keys)
        )
        if not rewards:
            raise ValueError("at least one key of a reward is needed")
        done = as_path(module.done_key)
        untouched = frozenset(() if module.last_flags else (done, *dones))
        return cls(tuple(rewards), done, untouched, as_path(module.mask_key))

    def original(self, reward: Path) -> Path:
        """Where the reward of one step goes."""
        if len(self.rewards) == 1:
            return ("next", "original_reward")
        return ("next", *reward[:-1], f"original_{reward[-1]}")

    def arrives(self, path: Path) -> bool:
        """Whether an entry is taken from where a transition arrives."""
        return path[0] == "next" and path[1:] not in self.untouched and path[1:] not in self.rewards


@dataclasses.dataclass(frozen=True)
class Ends:
    """Where trajectories end, and what is padding."""

    flags: Tensor  # bool [*batch, time, *agents]
    mask: Tensor | None  # as large: False for padding
    shape: torch.Size  # of the flags in the data: agents have a dim of 1 behind them, or none

    @classmethod
    def of(cls, data: TensorDictBase, keys: Keys) -> "Ends":
        """Those of frames. KeyError without flags, RuntimeError for a mask or flags of another shape."""
        batch, path = data.batch_size, ("next", *keys.done)
        done = returns.flags(returns.entry(data, path))
        if done.shape[: len(batch)] != batch:
            refuse(path, done, batch)
        agents = done.shape[len(batch) :]
        if not agents or agents == (1,):
            shape, agents = batch, torch.Size([])
        else:
            shape, agents = done.shape, agents[:-1] if agents[-1] == 1 else agents
        flags, mask = done.reshape(*batch, *agents), data.get(keys.mask, None)
        if mask is not None:
            if mask.shape not in (batch, torch.Size([*batch, 1])):
                refuse(keys.mask, mask, batch)
            mask = returns.flags(mask).reshape(*batch, *(1 for _ in agents)).expand(flags.shape)
        return cls(flags, mask, shape)


def rollout(module: nn.Module, data: Any) -> TensorDictBase:
    """The data. TypeError for no tensordict, ValueError for one without a dim of time."""
    if not is_tensor_collection(data):
        raise TypeError(f"{type(module).__name__} takes a tensordict, got {type(data).__name__}")
    if not data.ndim:
        raise ValueError(f"{type(module).__name__} takes a tensordict whose last dim is time, got one without any dim")
    return data


def leaves(data: TensorDictBase, where: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The entries of a tensordict at every depth."""
    for key, value in data.items():
        if isinstance(value, Tensor) or is_non_tensor(value) or not is_tensor_collection(value):
            yield (*where, key), value
        else:
            yield from leaves(value, (*where, key))


def narrowed(data: TensorDictBase, dim: int, start: int, length: int, copy: bool = False) -> TensorDictBase:
    """Some of the frames of a tensordict of tensors, as views or copies."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Tensor):
            part = value.narrow(dim, start, length)
            found[key] = part.clone(memory_format=torch.contiguous_format) if copy else part
        else:
            found[key] = narrowed(value, dim, start, length, copy)
    batch = torch.Size([*data.batch_size[:dim], length, *data.batch_size[dim + 1 :]])
    return unchecked(found, batch, data.device, None)


def transitions(data: TensorDictBase, keys: Keys, gamma: float, n: int, count: int) -> TensorDictBase:
    """The first `count` transitions of frames [*batch, time], as a tensordict of its own.

    The last frame is an end. KeyError for a missing entry; RuntimeError for entries whose shape does not fit the flags.
    """
    time, ends = data.ndim - 1, Ends.of(data, keys)
    each, last = ends.flags.shape, ends.flags.ndim - 1
    stops = ends.flags
    if ends.mask is not None and data.shape[time]:
        changes = ends.mask.diff(dim=time)  # padding is a trajectory of its own
        stops = torch.cat([stops.narrow(time, 0, changes.shape[time]) | changes, stops.narrow(time, -1, 1)], time)
    found: dict[Path, Tensor] = {}
    for key in keys.rewards:
        reward = returns.entry(data, ("next", *key))
        if reward.shape[: len(each)] != each:
            refuse(("next", *key), reward, each)
        many = reward.flatten(len(each)) if reward.ndim > len(each) else reward[..., None]
        made, steps, power = returns.n_step(
            many.movedim(time, last).movedim(-1, 0), stops.movedim(time, last), gamma, n
        )
        found["next", *key] = made.movedim(0, -1).movedim(last, time).reshape(reward.shape)
        found[keys.original(key)] = reward
    steps = steps.movedim(last, time)
    goes_on = steps > 1 if ends.mask is None else (steps > 1) & ends.mask
    about = {"steps_to_next_obs": steps, "gamma": power.movedim(last, time), "nonterminal": goes_on}
    found.update({(name,): leaf.reshape(ends.shape) for name, leaf in about.items()})
    result = data.copy() if count == data.shape[time] else narrowed(data, time, 0, count)
    places = _arrivals(steps.narrow(time, 0, count), time, data.shape[time])
    for path, leaf in leaves(data.get("next"), ("next",)):
        if keys.arrives(path):
            result.set(path, _arrived(path, leaf, places, each))
    for path, leaf in found.items():
        result.set(path, leaf.narrow(time, 0, count))
    return result


def refuse(path: Path, leaf: Tensor, shape: torch.Size) -> NoReturn:
    """RuntimeError for an entry that does not begin with a shape."""
    raise RuntimeError(
        f"{path!r} is {list(leaf.shape)}: the tensordict shape must be compatible with the done's shape (trailing singleton "
        f"dimension excluded), it has to begin with {list(shape)}"
    )


def _arrivals(steps: Tensor, time: int, length: int) -> Tensor:
    """The places of the last frames of transitions in entries [*batch, length, *agents] with these dims folded into one."""
    agents, device = steps.shape[time + 1 :], steps.device
    ones = [1] * len(agents)
    rows = steps + torch.arange(-1, steps.shape[time] - 1, device=device).view(-1, *ones)
    lanes = torch.arange(steps.shape[:time].numel(), device=device).view(*steps.shape[:time], 1, *ones)
    places = lanes * length + rows
    return places * agents.numel() + torch.arange(agents.numel(), device=device).view(agents) if agents else places


def _arrived(path: Path, leaf: Any, places: Tensor, each: torch.Size) -> Any:
    """The values of an entry where transitions arrive. RuntimeError where it has none for each agent."""
    if leaf.shape[: len(each)] != each:
        refuse(path, leaf, each)
    item = leaf.shape[len(each) :]
    rows = leaf.reshape(each.numel(), *item)
    taken = picked(rows, places.reshape(-1)) if isinstance(leaf, Tensor) else rows[places.reshape(-1).cpu()]
    return taken.reshape(*places.shape, *item)

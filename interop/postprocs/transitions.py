"""Frames of a stream as transitions of up to n steps: the returns on the way, and the entries where they arrive."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor, nn

from interop.data.keys import as_path
from interop.data.tensordicts import unchecked
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
    time, batch = data.ndim - 1, data.batch_size
    done = returns.flags(returns.entry(data, ("next", *keys.done)))
    _expect(("next", *keys.done), done, batch)
    agents = done.shape[len(batch) :]
    agents = agents[:-1] if agents[-1:] == (1,) else agents
    each, last = torch.Size([*batch, *agents]), time + len(agents)
    stops, mask = done.reshape(each), data.get(keys.mask, None)
    if mask is not None:
        _expect(keys.mask, mask, batch, further=1)
        mask = returns.flags(mask).reshape(*batch, *(1 for _ in agents)).expand(each)
        changes = mask.diff(dim=time)  # padding is a trajectory of its own
        stops = stops.clone()
        stops.narrow(time, 0, changes.shape[time]).logical_or_(changes)
    found: dict[Path, Tensor] = {}
    for key in keys.rewards:
        reward = returns.entry(data, ("next", *key))
        _expect(("next", *key), reward, each)
        many = reward.flatten(len(each)) if reward.ndim > len(each) else reward[..., None]
        many = many.movedim(time, last).movedim(-1, 0)
        made, steps, power = returns.n_step(many, stops.movedim(time, last), gamma, n)
        found["next", *key] = made.movedim(0, -1).movedim(last, time).reshape(reward.shape)
        found[keys.original(key)] = reward
    steps = steps.movedim(last, time)
    goes_on = steps > 1 if mask is None else (steps > 1) & mask
    about = {"steps_to_next_obs": steps, "gamma": power.movedim(last, time), "nonterminal": goes_on}
    found.update({(name,): leaf.reshape(done.shape if agents else batch) for name, leaf in about.items()})
    result = data.copy() if count == batch[time] else narrowed(data, time, 0, count)
    places = _arrivals(steps.narrow(time, 0, count), time, batch[time])
    for path, leaf in leaves(data.get("next"), ("next",)):
        if keys.arrives(path):
            _expect(path, leaf, each)
            result.set(path, _arrived(leaf, places))
    for path, leaf in found.items():
        result.set(path, leaf.narrow(time, 0, count))
    return result


def _expect(path: Path, leaf: Any, shape: torch.Size, further: int | None = None) -> None:
    """RuntimeError for an entry that does not begin with a shape, or has more than so many values behind it."""
    if leaf.shape[: len(shape)] != shape or (further is not None and leaf.shape[len(shape) :].numel() > further):
        raise RuntimeError(
            f"{path!r} is {list(leaf.shape)}: the tensordict shape must be compatible with the done's shape (trailing "
            f"singleton dimension excluded), it has to begin with {list(shape)}"
        )


def _arrivals(steps: Tensor, time: int, length: int) -> Tensor:
    """The places of the last frames of transitions in entries [*batch, length, *agents] with these dims folded into one."""
    agents, device = steps.shape[time + 1 :], steps.device
    ones = [1] * len(agents)
    rows = steps + torch.arange(-1, steps.shape[time] - 1, device=device).view(-1, *ones)
    lanes = torch.arange(steps.shape[:time].numel(), device=device).view(*steps.shape[:time], 1, *ones)
    places = lanes * length + rows
    return places * agents.numel() + torch.arange(agents.numel(), device=device).view(agents) if agents else places


def _arrived(leaf: Any, places: Tensor) -> Any:
    """The values of an entry where transitions arrive."""
    dims = places.ndim
    item = leaf.shape[dims:]
    rows = leaf.reshape(leaf.shape[:dims].numel(), *item)
    taken = picked(rows, places.reshape(-1)) if isinstance(leaf, Tensor) else rows[places.reshape(-1).cpu()]
    return taken.reshape(*places.shape, *item)

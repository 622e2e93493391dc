"""Frames of a stream as transitions of up to n steps: the returns on the way, and the entries where they arrive."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor, nn

from interop.data.keys import as_path
from interop.postprocs import returns

Path = tuple[Any, ...]
Entries = dict[Path, Tensor]


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

    def arrive(self, path: Path) -> bool:
        """Whether an entry is taken from where a transition arrives."""
        return path[0] == "next" and path[1:] not in self.untouched and path[1:] not in self.rewards


@dataclasses.dataclass(frozen=True)
class Frames:
    """Consecutive frames: entries [*batch, time, ...]. They are not changed in place."""

    entries: Entries
    batch: torch.Size
    nested: dict[Path, torch.Size] = dataclasses.field(default_factory=dict)  # further batch dims of inner tensordicts

    @property
    def time(self) -> int:
        """The dim of time."""
        return len(self.batch) - 1

    @property
    def count(self) -> int:
        return self.batch[-1]

    def __getitem__(self, rows: slice) -> "Frames":
        """Views of some of them."""
        start, stop, _ = rows.indices(self.count)
        return self.mapped(lambda leaf: leaf.narrow(self.time, start, stop - start), stop - start)

    def mapped(self, function: Any, count: int | None = None) -> "Frames":
        """The result of a function for each entry, of so many frames."""
        batch = self.batch if count is None else torch.Size([*self.batch[:-1], count])
        return Frames({path: function(leaf) for path, leaf in self.entries.items()}, batch, self.nested)

    def only(self, paths: Any) -> "Frames":
        """Those of some entries that there are."""
        return dataclasses.replace(self, entries={path: self.entries[path] for path in paths if path in self.entries})

    def copied(self) -> "Frames":
        """The same in new memory."""
        return self.mapped(lambda leaf: leaf.clone(memory_format=torch.contiguous_format))


def joined(parts: Sequence[Frames]) -> Frames:
    """Frames of the same entries, one part after the other; of one part, those themselves."""
    parts = [part for part in parts if part.count] or list(parts[-1:])
    if len(parts) == 1:
        return parts[0]
    time = parts[0].time
    entries = {path: torch.cat([part.entries[path] for part in parts], time) for path in parts[0].entries}
    return Frames(entries, torch.Size([*parts[0].batch[:-1], sum(part.count for part in parts)]), parts[-1].nested)


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
        if is_tensor_collection(value) and not is_non_tensor(value):
            yield from leaves(value, (*where, key))
        else:
            yield (*where, key), value


def transitions(frames: Frames, keys: Keys, gamma: float, n: int, count: int) -> tuple[Entries, Tensor]:
    """The entries that the first `count` transitions add to their frames, and the steps of each, [*batch, time, *agents].

    The last frame is an end. KeyError for a missing entry; RuntimeError for rewards or a mask whose shape does not fit the
    flags.
    """
    batch, time = frames.batch, frames.time
    done = returns.flags(_entry(frames, ("next", *keys.done)))
    shape, agents = _of_flags(done, batch, keys)
    each = torch.Size([*batch, *agents])
    ends, mask = done.reshape(each), None
    if keys.mask in frames.entries and batch[-1]:
        mask = _of_mask(frames.entries[keys.mask], batch, keys)
        mask = mask.reshape(*batch, *(1 for _ in agents)).expand(each)
        changes = mask.diff(dim=time)  # padding is a trajectory of its own
        ends = torch.cat([ends.narrow(time, 0, changes.shape[time]) | changes, ends.narrow(time, -1, 1)], time)
    last = len(each) - 1
    ends = ends.movedim(time, last)
    found, steps, power = Entries(), ends, ends
    for key in keys.rewards:
        reward = _entry(frames, ("next", *key))
        if reward.shape[: len(each)] != each:
            _refuse(("next", *key), reward, each)
        many = reward.flatten(len(each)) if reward.ndim > len(each) else reward[..., None]
        made, steps, power = returns.n_step(many.movedim(time, last).movedim(-1, 0), ends, gamma, n)
        found["next", *key] = made.movedim(0, -1).movedim(last, time).reshape(reward.shape)
        found[keys.original(key)] = reward
    steps = steps.movedim(last, time)
    goes_on = steps > 1 if mask is None else (steps > 1) & mask
    about = {"steps_to_next_obs": steps, "gamma": power.movedim(last, time), "nonterminal": goes_on}
    found.update({(name,): leaf.reshape(shape) for name, leaf in about.items()})
    return {path: leaf.narrow(time, 0, count) for path, leaf in found.items()}, steps.narrow(time, 0, count)


def refuse_unfit(frames: Frames, keys: Keys) -> None:
    """The errors of `transitions` and `Arrival`, of frames that are kept before they are used."""
    done = _entry(frames, ("next", *keys.done))
    each = torch.Size([*frames.batch, *_of_flags(done, frames.batch, keys)[1]])
    if keys.mask in frames.entries:
        _of_mask(frames.entries[keys.mask], frames.batch, keys)
    for key in keys.rewards:
        returns.refuse_dtype(_entry(frames, ("next", *key)))
    for path, leaf in frames.entries.items():
        if path[0] == "next" and path[1:] not in keys.untouched and leaf.shape[: len(each)] != each:
            _refuse(path, leaf, each)


class Arrival:
    """Where the first transitions of frames arrive. The frames come in two parts, of which the first is short.

    Args:
        steps: of these transitions, [*batch, count, *agents].
        time: the dim of time.
        first, second: frames of each part.
        n: the most steps.
    """

    def __init__(self, steps: Tensor, time: int, first: int, second: int, n: int) -> None:
        self._time, self._agents, device = time, steps.shape[time + 1 :], steps.device
        ones = [1] * len(self._agents)
        rows = steps + torch.arange(-1, steps.shape[time] - 1, device=device).view(-1, *ones)  # of the last step
        self._lanes = torch.arange(steps.shape[:time].numel(), device=device).view(*steps.shape[:time], 1, *ones)
        self._early = min(first, steps.shape[time])  # transitions that may arrive in the first part
        self._beyond = min(second, max(self._early + n - 1 - first, 0))  # frames of the second that these may reach
        self._of_early = self._places(rows.narrow(time, 0, self._early), first + self._beyond)
        late = self._early < steps.shape[time]
        self._of_all = self._places((rows - first).clamp_(min=0) if first else rows, second) if late else None

    def _places(self, rows: Tensor, length: int) -> Tensor:
        """Rows of each lane and agent as places in entries with all these dims folded into one."""
        places, count = self._lanes * length + rows, self._agents.numel()
        if not self._agents:
            return places
        return places * count + torch.arange(count, device=rows.device).view(self._agents)

    def of(self, path: Path, first: Tensor | None, second: Tensor) -> Tensor:
        """The entry where each transition arrives. RuntimeError where it has no value for each agent."""
        behind = second.shape[self._time + 1 :]
        if behind[: len(self._agents)] != self._agents:
            _refuse(path, second, torch.Size([*second.shape[: self._time + 1], *self._agents]))
        found = None if self._of_all is None else _taken(second, self._of_all)
        if first is None or not self._early:
            assert found is not None
            return found
        early = torch.cat([first, second.narrow(self._time, 0, self._beyond)], self._time)
        taken = _taken(early, self._of_early)
        if found is None:
            return taken
        found.narrow(self._time, 0, self._early).copy_(taken)
        return found

    def index(self) -> tuple[Tensor, ...]:
        """The same as an index, for frames in one part without agents."""
        assert self._of_all is not None
        return torch.unravel_index(self._of_all, self._of_all.shape)


def _taken(leaf: Tensor, places: Tensor) -> Tensor:
    """The values at places of a tensor with its first dims folded into one."""
    bits = _BITS.get(leaf.dtype)
    flat = (leaf if bits is None else leaf.view(bits)).flatten(0, places.ndim - 1)
    found = flat.index_select(0, places.reshape(-1)).unflatten(0, places.shape)
    return found if bits is None else found.view(leaf.dtype)


_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # which torch cannot select


def _entry(frames: Frames, path: Path) -> Tensor:
    leaf = frames.entries.get(path)
    if leaf is None:
        known = ", ".join(sorted(map(repr, frames.entries))) or "none"
        raise KeyError(f"{path!r} not found in the tensordict, of which the entries that are asked for are {known}")
    return leaf


def _of_flags(done: Tensor, batch: torch.Size, keys: Keys) -> tuple[torch.Size, torch.Size]:
    """The shape of the entries about steps, and the dims of agents."""
    if done.shape in (batch, torch.Size([*batch, 1])):
        return batch, torch.Size([])
    if done.shape[: len(batch)] != batch:
        _refuse(("next", *keys.done), done, batch)
    agents = done.shape[len(batch) :]
    return done.shape, agents[:-1] if agents[-1] == 1 else agents


def _of_mask(mask: Tensor, batch: torch.Size, keys: Keys) -> Tensor:
    if mask.shape not in (batch, torch.Size([*batch, 1])):
        _refuse(keys.mask, mask, batch)
    return returns.flags(mask).reshape(batch)


def _refuse(path: Path, leaf: Tensor, shape: torch.Size) -> NoReturn:
    raise RuntimeError(
        f"{path!r} is {list(leaf.shape)}: the tensordict shape must be compatible with the done's shape (trailing singleton "
        f"dimension excluded), it has to begin with {list(shape)}"
    )

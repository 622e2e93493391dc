"""Frames of a stream as transitions of up to n steps: what each earns on the way, and where it arrives."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor

from interop.data.keys import as_path
from interop.postprocs import returns

Path = tuple[Any, ...]
Entries = dict[Path, Tensor]


@dataclasses.dataclass(frozen=True)
class Keys:
    """Where frames have what; all but the mask under "next"."""

    rewards: tuple[Path, ...]
    done: Path
    untouched: frozenset[Path]  # stay those of the step itself
    mask: Path

    @classmethod
    def of(cls, rewards: Any, done: Any, dones: Any, mask: Any, last_flags: bool = False) -> "Keys":
        """From keys as users give them: one, or a list of them. ValueError without any reward."""
        found = tuple(map(as_path, [rewards] if isinstance(rewards, str) else rewards))
        if not found:
            raise ValueError("at least one key of a reward is needed")
        flags = {as_path(done), *map(as_path, [dones] if isinstance(dones, str) else dones)}
        return cls(found, as_path(done), frozenset(() if last_flags else flags), as_path(mask))

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
    """Frames in a row: entries [*batch, time, ...]. They are not changed."""

    entries: Entries
    batch: torch.Size
    nested: dict[Path, torch.Size] = dataclasses.field(default_factory=dict)  # batch dims that inner ones have more

    @property
    def time(self) -> int:
        """Which dim is time."""
        return len(self.batch) - 1

    @property
    def count(self) -> int:
        return self.batch[-1]

    def __getitem__(self, rows: slice) -> "Frames":
        """Views of some of them."""
        start, stop, _ = rows.indices(self.count)
        cut = {path: leaf.narrow(self.time, start, stop - start) for path, leaf in self.entries.items()}
        return Frames(cut, torch.Size([*self.batch[:-1], stop - start]), self.nested)

    def only(self, paths: Any) -> "Frames":
        """Some of the entries; those that are not there are left out."""
        some = {path: self.entries[path] for path in paths if path in self.entries}
        return dataclasses.replace(self, entries=some)

    def copied(self) -> "Frames":
        """In memory of their own."""
        entries = {path: leaf.clone(memory_format=torch.contiguous_format) for path, leaf in self.entries.items()}
        return dataclasses.replace(self, entries=entries)


def joined(parts: Sequence[Frames]) -> Frames:
    """Frames of the same entries, one part after the other; of one part, those themselves."""
    parts = [part for part in parts if part.count] or list(parts[-1:])
    if len(parts) == 1:
        return parts[0]
    time = parts[0].time
    entries = {path: torch.cat([part.entries[path] for part in parts], time) for path in parts[0].entries}
    return Frames(entries, torch.Size([*parts[0].batch[:-1], sum(part.count for part in parts)]), parts[-1].nested)


def leaves(data: TensorDictBase, where: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The entries of a tensordict at every depth; what is neither a tensor nor holds any is one."""
    for key, value in data.items():
        if is_tensor_collection(value) and not is_non_tensor(value):
            yield from leaves(value, (*where, key))
        else:
            yield (*where, key), value


class Transitions(NamedTuple):
    """How many steps frames are taken together with those that follow, and what this earns."""

    steps: Tensor  # [*batch, time, *agents] int64
    gamma: Tensor  # as large, float32: the discount to the power of steps
    goes_on: Tensor  # as large, bool: more than one step, of a frame that is none of padding
    rewards: Entries  # returns, and the rewards of one step
    shape: torch.Size  # of what is written of steps: with the trailing 1 of flags [*batch, time, *agents, 1]
    time: int  # which dim is time

    def entries(self, count: int) -> Entries:
        """What the first of them add to their frames, but for where they arrive."""
        shape = torch.Size([*self.shape[: self.time], count, *self.shape[self.time + 1 :]])
        steps = {"steps_to_next_obs": self.steps, "gamma": self.gamma, "nonterminal": self.goes_on}
        return {
            **{path: leaf.narrow(self.time, 0, count) for path, leaf in self.rewards.items()},
            **{(name,): leaf.narrow(self.time, 0, count).reshape(shape) for name, leaf in steps.items()},
        }


def transitions(frames: Frames, keys: Keys, gamma: float, n: int) -> Transitions:
    """The transitions that begin with these frames; the last of them is an end.

    KeyError for a missing entry; RuntimeError for rewards or a mask whose shape does not fit the flags.
    """
    batch, time = frames.batch, frames.time
    done = returns.flags(_entry(frames, ("next", *keys.done)))
    shape, agents = _of_flags(done, batch, keys)
    each = torch.Size([*batch, *agents])
    ends, there = done.reshape(each), None
    if keys.mask in frames.entries and batch[-1]:
        there = _of_mask(frames.entries[keys.mask], batch, keys)
        there = there.reshape(*batch, *(1 for _ in agents)).expand(each)
        changes = there.diff(dim=time)  # padding is a trajectory of its own
        ends = torch.cat([ends.narrow(time, 0, changes.shape[time]) | changes, ends.narrow(time, -1, 1)], time)
    last = len(each) - 1
    ends = ends.movedim(time, last)
    found, steps, power = {}, ends, ends
    for key in keys.rewards:
        reward = _entry(frames, ("next", *key))
        if reward.shape[: len(each)] != each:
            _refuse(("next", *key), reward, each)
        many = reward.flatten(len(each)) if reward.ndim > len(each) else reward[..., None]
        many = many.movedim(time, last).movedim(-1, 0)
        made, steps, power = returns.n_step(many, ends, gamma, n)
        found["next", *key] = made.movedim(0, -1).movedim(last, time).reshape(reward.shape)
        found[keys.original(key)] = reward
    steps, power = steps.movedim(last, time), power.movedim(last, time)
    goes_on = steps > 1 if there is None else (steps > 1) & there
    return Transitions(steps, power, goes_on, found, shape, time)


def refuse_unfit(frames: Frames, keys: Keys) -> None:
    """The errors of `transitions` and `Arrival`, of frames that are kept before they are used."""
    done = _entry(frames, ("next", *keys.done))
    each = torch.Size([*frames.batch, *_of_flags(done, frames.batch, keys)[1]])
    if keys.mask in frames.entries:
        _of_mask(frames.entries[keys.mask], frames.batch, keys)
    for path in [("next", *key) for key in keys.rewards]:
        returns.refuse_dtype(_entry(frames, path))
    for path, leaf in frames.entries.items():
        if path[0] == "next" and path[1:] not in keys.untouched and leaf.shape[: len(each)] != each:
            _refuse(path, leaf, each)


class Arrival:
    """Where the first transitions of frames arrive; the frames come in two parts, those held and new ones.

    Args:
        steps: of these transitions, [*batch, count, *agents].
        time: the dim of time.
        held, new: frames of each part.
        n: the most steps.
    """

    def __init__(self, steps: Tensor, time: int, held: int, new: int, n: int) -> None:
        self._time = time
        self._agents = steps.shape[time + 1 :]
        ones, device = [1] * len(self._agents), steps.device
        rows = steps + torch.arange(-1, steps.shape[time] - 1, device=device).view(-1, *ones)  # of the last step
        lanes = torch.arange(steps.shape[:time].numel(), device=device).view(*steps.shape[:time], 1, *ones)
        self._early = min(held, steps.shape[time])  # transitions that may arrive at a held frame
        self._beyond = min(new, max(self._early + n - 1 - held, 0))  # new frames at which these may arrive
        self._first = self._places(lanes, rows.narrow(time, 0, self._early), held + self._beyond)
        self._all = None
        if self._early < steps.shape[time]:
            self._all = self._places(lanes, (rows - held).clamp_(min=0) if held else rows, new)

    def _places(self, lanes: Tensor, rows: Tensor, length: int) -> Tensor:
        """Rows of each lane and agent as places in entries with all these dims folded into one."""
        places = lanes * length + rows
        if not self._agents:
            return places
        count = self._agents.numel()
        return places * count + torch.arange(count, device=rows.device).view(self._agents)

    def of(self, path: Path, held: Tensor | None, new: Tensor) -> Tensor:
        """The entry where each transition arrives. RuntimeError where it has no value for each agent."""
        behind = new.shape[self._time + 1 :]
        if behind[: len(self._agents)] != self._agents:
            _refuse(path, new, torch.Size([*new.shape[: self._time + 1], *self._agents]))
        if held is None or not self._early:
            assert self._all is not None
            return _taken(new, self._all)
        first = _taken(torch.cat([held, new.narrow(self._time, 0, self._beyond)], self._time), self._first)
        if self._all is None:
            return first
        found = _taken(new, self._all)
        found.narrow(self._time, 0, self._early).copy_(first)
        return found

    def index(self) -> tuple[Tensor, ...]:
        """The same as an index, for frames in one part without agents."""
        assert self._all is not None
        return torch.unravel_index(self._all, self._all.shape)


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
    """The shape of what is written of steps, and the dims of agents."""
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

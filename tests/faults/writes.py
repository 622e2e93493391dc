"""Random programs of writes to a storage, and what it holds after each."""

from dataclasses import dataclass, field, replace

import torch
from tensordict import NonTensorStack, TensorDict

CAPACITY = 12


def leaves(ids):
    """Everything in a row follows from its id."""
    ids = torch.as_tensor(ids, dtype=torch.int64)
    wide = ids.unsqueeze(-1)
    return {
        "id": ids,
        "floats": (wide * torch.tensor([1.0, 0.5, -3.0])).to(torch.float32),
        "bytes": ((wide * torch.tensor([1, 7, 11, 13, 17])) % 251).to(torch.uint8),
        "next": {"flag": wide % 2 == 1, "half": wide.to(torch.bfloat16)},
    }


def text(number):
    return f"row {number}, " * (number % 4)


def rows(ids):
    ids = torch.as_tensor(ids)
    texts = NonTensorStack.from_list(each_text(ids.tolist()))
    return TensorDict({**leaves(ids), "text": texts}, ids.shape)


def each_text(ids):
    """The texts of nested lists of ids."""
    return [each_text(each) if isinstance(each, list) else text(each) for each in ids]


@dataclass(frozen=True)
class State:
    """What a buffer holds, and what is to be written next."""

    ids: tuple = ()
    priorities: tuple = ()
    cursor: int = 0
    count: int = 0
    highest: float = 1.0
    fresh: int = 1
    lanes: int = 1

    def extended(self, count):
        """The state after `count` more rows."""
        ids, priorities, capacity = list(self.ids), list(self.priorities), CAPACITY // self.lanes
        for row in range(self.cursor, self.cursor + count):
            for lane in range(self.lanes):
                place = row % capacity * self.lanes + lane
                new = self.fresh + (row - self.cursor) * self.lanes + lane
                if place == len(ids):
                    ids.append(new)
                    priorities.append(self.highest)
                else:
                    ids[place], priorities[place] = new, self.highest
        return replace(
            self,
            ids=tuple(ids),
            priorities=tuple(priorities),
            cursor=(self.cursor + count) % capacity,
            count=self.count + count,
            fresh=self.fresh + count * self.lanes,
        )

    def seen(self):
        return self.ids, self.priorities, self.cursor, self.count, self.highest


@dataclass
class Call:
    """One call of a program: what it leads from and to, and in between where it may be done in parts."""

    name: str
    arguments: tuple
    before: State
    after: State
    between: list = field(default_factory=list)


def program(state, length, rng, in_parts):
    """Random calls from a state on."""
    calls = []
    for _ in range(length):
        filled = len(state.ids)
        kinds = ["extend", "extend", "add"] + ["set", "priorities", "priorities"] * (filled > 0)
        name = "empty" if filled and rng.random() < 0.04 else rng.choice(kinds)
        between = []
        if name in ("extend", "add"):
            count = 1 if name == "add" else rng.choice([1, 2, 3, 5, 7, CAPACITY // state.lanes, 15, 30])
            after = state.extended(count)
            arguments = (count, state.fresh)
            between = [state.extended(done) for done in range(1, count)] if in_parts else []
        elif name == "set":
            chosen = sorted(rng.sample(range(filled // state.lanes), rng.randint(1, filled // state.lanes)))
            ids, new = list(state.ids), state.fresh
            for place, row in enumerate(chosen):
                for lane in range(state.lanes):
                    ids[row * state.lanes + lane] = new + place * state.lanes + lane
                between += [replace(state, ids=tuple(ids), fresh=0)] if in_parts else []
            after = replace(state, ids=tuple(ids), fresh=new + len(chosen) * state.lanes)
            arguments = (tuple(chosen), new)
        elif name == "priorities":
            chosen = rng.sample(range(filled), rng.randint(1, filled))
            given = [rng.choice([0.0, 0.25, 1.0, 2.0, 8.0]) for _ in chosen]
            priorities = list(state.priorities)
            for place, value in zip(chosen, given, strict=True):
                priorities[place] = value
            highest = max(state.highest, *given)
            after = replace(state, priorities=tuple(priorities), highest=highest)
            arguments = (tuple(chosen), tuple(given))
        else:
            after = replace(State(lanes=state.lanes), fresh=state.fresh)
            arguments = ()
        calls.append(Call(name, arguments, state, after, between))
        state = after
    return calls


def run(buffer, call, lanes):
    if call.name in ("extend", "add", "set"):
        which, new = call.arguments
        count = len(which) if call.name == "set" else which
        ids = torch.arange(new, new + count * lanes)
        data = rows(ids if lanes == 1 else ids.reshape(count, lanes))
        if call.name == "set":
            buffer.storage[torch.tensor(which)] = data
        elif call.name == "add":
            buffer.add(data[0])
        elif lanes == 1:
            buffer.extend(data)
        else:
            buffer.extend(data.transpose(0, 1))  # a buffer takes [lanes, rows]
    elif call.name == "priorities":
        slots, given = call.arguments
        index = torch.tensor(slots)
        index = index if lanes == 1 else torch.stack([index // lanes, index % lanes], -1)
        buffer.update_priority(index, torch.tensor(given, dtype=torch.float64))
    else:
        buffer.empty()

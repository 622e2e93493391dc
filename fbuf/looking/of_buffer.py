"""Descriptions of buffers of `fbuf`, from their states."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from fbuf import checks
from fbuf.buffer import Buffer, BufferState
from fbuf.hash_table import HashTable, HashTableState
from fbuf.keywords import checked
from fbuf.looking.column_summary import ColumnSummary, evenly, rows_of, summarize
from fbuf.looking.description import Description
from fbuf.looking.episode_summary import EpisodeSummary
from fbuf.looking.quantiles import Quantiles
from fbuf.looking.sampling_summary import SamplingSummary
from fbuf.looking.slot_facts import StoredTrajectory, Why
from fbuf.mixture import Mixture
from fbuf.paths import KeyPath, leaf_at, path_of, required_leaf
from fbuf.samplers import Chances, Reason, Slices
from fbuf.timeline import Timeline, TrajectoryTimeline
from fbuf.trajectories import CUT, OPEN, TERMINATED, TRUNCATED, Trajectories
from fbuf.writers import RingState

_ENDS = {TERMINATED: "terminated", TRUNCATED: "truncated", CUT: "followed", OPEN: "open"}
_REWARDS: tuple[KeyPath, ...] = (("reward",), ("rewards",), ("next", "reward"))


@checked
def describe(
    buffer: Buffer | Mixture | HashTable,
    state: BufferState | tuple[BufferState, ...] | HashTableState,
    rows: int | None = None,
    *,
    reward: str | tuple[str | int, ...] | None = None,
) -> Description:
    """What a buffer holds and what can be drawn from it, in numbers. `print` it for tables.

    On the host, outside of jit: it waits for the state and leaves it as it is. O(bytes of the rows that are looked at), in
    bounded memory; and O(slots) for the sampler, of slices times their length.

    Args:
        buffer: a `Buffer`, a `Mixture` with the tuple of its states, or a `HashTable`.
        state: of this buffer.
        rows: how many rows to look at for the values of keys, evenly spaced; all by default.
        reward: path of the reward, whose sums are the returns of episodes. By default the only one of "reward", "rewards"
            and ("next", "reward") that items have.
    """
    looked_at = None if rows is None else checks.as_int("rows", rows)
    if isinstance(buffer, Mixture) and isinstance(state, tuple):
        return _of_mixture(buffer, state, looked_at, reward)
    if isinstance(buffer, HashTable) and isinstance(state, HashTableState):
        return _of_table(buffer, state, looked_at)
    if not isinstance(buffer, Buffer) or not isinstance(state, BufferState):
        raise TypeError(_other_kind("describe", buffer, state))
    return _of_one(buffer, state, looked_at, reward, buffer.chances(state))


@checked
def why(buffer: Buffer | Mixture, state: BufferState | tuple[BufferState, ...], slot: int | tuple[int, int]) -> Why:
    """What is known about a slot: when it was written, its trajectory, how often it is drawn, or why it is not.

    On the host, outside of jit: it waits for the state and leaves it as it is. O(slots), of slices times their length.
    IndexError for a slot that the buffer does not have.

    Args:
        buffer: a `Buffer`, or a `Mixture` with the tuple of its states.
        state: of this buffer.
        slot: the slot; of a mixture (member, slot). The probability is then that in a random row of a large batch.
    """
    if isinstance(buffer, Mixture) and isinstance(state, tuple):
        return _why_of_mixture(buffer, state, slot)
    if not isinstance(buffer, Buffer) or not isinstance(state, BufferState):
        raise TypeError(_other_kind("why", buffer, state))
    if isinstance(slot, tuple):
        raise TypeError(f"slot must be an int, got {slot!r}: only the slots of a Mixture are pairs")
    law = buffer.chances(state)
    return _why_of_one(buffer, state, _slot_in(buffer, slot), law, 1.0, law.smallest)


def _other_kind(name: str, buffer: object, state: object) -> str:
    """What to do for an object that is no buffer, or for the state of another kind of buffer."""
    kind = type(buffer).__name__
    if kind in ("Sharded", "OnMesh"):
        return (
            f"{name}() looks at one device: for device k pass sharded.part(devices) and jax.tree.map(lambda leaf: leaf[k], "
            "state)"
        )
    given = f"{kind} and {type(state).__name__}"
    return f"{name}() needs an fbuf.Buffer and its BufferState, or a Mixture and a tuple of these, got {given}"


# ---------------------------------------------------------------------- one buffer


def _of_one(
    buffer: Buffer, state: BufferState, rows: int | None, reward: str | KeyPath | None, law: Chances
) -> Description:
    size, lanes = int(state.ring.size), buffer.items_per_row
    facts: dict[str, int | float | str] = {"capacity": buffer.capacity, "rows stored": size}
    if buffer.lanes:
        facts |= {"lanes": str(buffer.lanes), "items stored": size * lanes}
    line = Timeline.of(state.ring, buffer.capacity, lanes) if isinstance(state.ring, RingState) else None
    if line is not None:
        facts["rows ever written"] = line.written
    facts |= {"sampler": repr(buffer.sampler), "writer": repr(buffer.writer)}
    priorities = buffer.sampler.priorities(state.sampler, size * lanes)
    return Description(
        title="Buffer",
        facts=facts,
        columns=(*_columns(state.items, size, rows, buffer.lanes), *_frames(buffer, state, rows)),
        episodes=_episodes(buffer, state, reward),
        ages=None if line is None else Quantiles.of(line.ages),
        priorities=None if priorities is None else Quantiles.of(priorities),
        draws=SamplingSummary.of(law),
    )


def _columns(items: PyTree, size: int, rows: int | None, lanes: tuple[int, ...] = ()) -> list[ColumnSummary]:
    """The summary of each leaf of stored items [capacity, *lanes, ...]."""
    per_row = int(np.prod(lanes, dtype=np.int64))
    return [
        summarize(
            jax.tree_util.keystr(path) or "item",
            _reader(leaf),
            evenly(size, rows),
            dtype=leaf.dtype,
            shape=leaf.shape[1 + len(lanes) :],
            stored=size,
            per_row=per_row,
            bytes=leaf.size * leaf.dtype.itemsize,
            device=_device(leaf),
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(items)
    ]


def _frames(buffer: Buffer, state: BufferState, rows: int | None) -> list[ColumnSummary]:
    """The summary of the newest frame of each item, for each pair of observations."""
    rules = buffer.frames if isinstance(buffer.frames, tuple) else (buffer.frames,)
    found = []
    for rule, held in zip(rules, state.frames, strict=True):
        size, lanes = int(state.ring.size), buffer.items_per_row
        ages, ring = np.sort(evenly(size, rows)), buffer.capacity + rule.stack
        places = ((int(held.cursor) - 1 - ages)[:, None] % ring * lanes + np.arange(lanes)).reshape(-1)
        key = "".join(f"[{step!r}]" for step in rule.obs)
        summary = summarize(
            f"{key}, each frame once",
            _reader(held.table),
            np.sort(places),
            dtype=held.table.dtype,
            shape=held.table.shape[1:],
            stored=size,
            bytes=held.table.size * held.table.dtype.itemsize,
            device=_device(held.table),
        )
        found.append(dataclasses.replace(summary, looked_at=int(ages.size)))
    return found


def _device(leaf: object) -> str:
    """Where an array is."""
    if not isinstance(leaf, jax.Array):
        return "cpu"
    return ", ".join(sorted({f"{each.platform}:{each.id}" for each in leaf.devices()}))


def _reader(leaf: Array) -> Callable[[np.ndarray], np.ndarray]:
    """A function that reads rows: in the memory of the host without a copy, from other memory block by block."""
    if not isinstance(leaf, jax.Array) or all(each.platform == "cpu" for each in leaf.devices()):
        return rows_of(np.asarray(leaf))
    most = 0

    def read(numbers: np.ndarray) -> np.ndarray:
        nonlocal most
        most = max(most, numbers.size)  # blocks are alike but for the last one: one program for all
        padded = np.full(most, numbers[-1], np.int32)
        padded[: numbers.size] = numbers
        return np.asarray(leaf.at[jnp.asarray(padded)].get(mode="promise_in_bounds"))[: numbers.size]

    return read


def _episodes(buffer: Buffer, state: BufferState, reward: str | KeyPath | None) -> EpisodeSummary | None:
    if state.trajectories is None:
        return None
    assert isinstance(state.ring, RingState)
    line = TrajectoryTimeline.of_index(state.ring, state.trajectories)
    last = (line.after == 0).T  # by lane, and in the order of writing
    lengths, kinds = line.stored.T[last], line.kind.T[last]
    path, returns = _reward(buffer, state, reward), None
    if path is not None:
        leaf = leaf_at(state.items, path)
        values = _reader(leaf)(np.arange(line.rows.size)) if line.rows.size else np.zeros((0, line.lanes))
        earned = np.asarray(values, np.float64).reshape(-1, line.lanes)[line.rows].T.reshape(-1)
        begins = np.flatnonzero((line.before == 0).T.reshape(-1))
        returns = np.add.reduceat(earned, begins) if begins.size else earned
    return EpisodeSummary.of(
        lengths,
        {name: int((kinds == kind).sum()) for kind, name in _ENDS.items()},
        begun_before=int((line.step > line.before)[line.before == 0].sum()),
        returns=returns,
        reward=None if path is None else ".".join(map(str, path)),
    )


def _reward(buffer: Buffer, state: BufferState, given: str | KeyPath | None) -> KeyPath | None:
    """The path of the reward; None if no leaf is known to be one."""
    if given is not None:
        path = path_of("reward", given)
        leaf = required_leaf("reward", state.items, path)
        if not _is_reward(buffer, leaf):
            raise ValueError(
                f"reward={given!r} must be one real number an item, got {leaf.dtype}{list(leaf.shape[1:])}"
            )
        return path
    found = []
    for path in _REWARDS:
        try:
            leaf = leaf_at(state.items, path)
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
        if _is_reward(buffer, leaf):
            found.append(path)
    return found[0] if len(found) == 1 else None


def _is_reward(buffer: Buffer, leaf: object) -> bool:
    if not isinstance(leaf, jax.Array | np.ndarray) or leaf.size != buffer.capacity * buffer.items_per_row:
        return False
    return jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)


# ---------------------------------------------------------------------- mixtures and tables


def _of_mixture(
    mixture: Mixture, states: tuple[BufferState, ...], rows: int | None, reward: str | KeyPath | None
) -> Description:
    laws = _laws(mixture, states)
    parts, members = mixture.parts(laws), []
    for buffer, state, law, part in zip(mixture.buffers, states, laws, parts.tolist(), strict=True):
        member = _of_one(buffer, state, rows, reward, law)
        members.append(dataclasses.replace(member, facts={"part of a large batch": part, **member.facts}))
    facts: dict[str, int | float | str] = {
        "members": len(members),
        "items stored": int(mixture.size(states)),
        "drawn": str(mixture.drawn),
    }
    return Description("Mixture", facts, members=tuple(members))


def _laws(mixture: Mixture, states: tuple[BufferState, ...]) -> list[Chances]:
    if len(states) != len(mixture.buffers):
        raise ValueError(f"one state for each of {len(mixture.buffers)} buffers is needed, got {len(states)}")
    return [buffer.chances(state) for buffer, state in zip(mixture.buffers, states, strict=True)]


def _why_of_mixture(mixture: Mixture, states: tuple[BufferState, ...], slot: int | tuple[int, int]) -> Why:
    if not (isinstance(slot, tuple) and len(slot) == 2):
        raise TypeError(f"the slot of a mixture is a pair (member, slot), got {slot!r}")
    member = checks.as_int("member", slot[0], least=0)
    if member >= len(mixture.buffers):
        raise IndexError(f"member {member} does not exist: the mixture has members 0 to {len(mixture.buffers) - 1}")
    laws = _laws(mixture, states)
    parts, buffer = mixture.parts(laws).tolist(), mixture.buffers[member]
    smallest = None
    least = [law.smallest for law in laws]
    if None not in least:
        pairs = zip(least, parts, strict=True)
        smallest = min((each * part for each, part in pairs if each is not None and part > 0), default=None)
    found = _why_of_one(buffer, states[member], _slot_in(buffer, slot[1]), laws[member], parts[member], smallest)
    return dataclasses.replace(found, member=member)


def _of_table(table: HashTable, state: HashTableState, rows: int | None) -> Description:
    checks.on_host("describe", state)
    size = int(state.size)
    keys = [dataclasses.replace(each, key=f"key {each.key}") for each in _columns(state.keys, size, rows)]
    facts: dict[str, int | float | str] = {"capacity": table.capacity, "keys stored": size}
    return Description("HashTable", facts, columns=(*keys, *_columns(state.items, size, rows)))


# ---------------------------------------------------------------------- one slot


def _slot_in(buffer: Buffer, slot: int) -> int:
    """The slot as an int. IndexError if the buffer does not have it."""
    slots = buffer.capacity * buffer.items_per_row
    try:
        number = checks.as_int("slot", slot, least=-(2**63))
    except TypeError as error:
        raise TypeError(f"slot must be an int from 0 to {slots - 1}, got {slot!r}") from error
    if not 0 <= number < slots:
        raise IndexError(f"slot {number} does not exist: the buffer has slots 0 to {slots - 1}")
    return number


def _why_of_one(
    buffer: Buffer, state: BufferState, slot: int, law: Chances, part: float, smallest: float | None
) -> Why:
    """What is known about a slot that exists. The member has this part of a batch, and the least likely item of the whole
    buffer has the probability `smallest`, if that is known.
    """
    code = Reason(int(law.reason[slot]))
    if not part and code == Reason.NONE:
        code = Reason.EXCLUDED
    probability = None if law.probability is None else float(law.probability[slot]) * part
    if code == Reason.NOT_WRITTEN:
        return Why(slot, code, probability=probability)
    lanes = buffer.items_per_row
    priorities = buffer.sampler.priorities(state.sampler, int(state.ring.size) * lanes)
    priority = None if priorities is None else float(priorities[slot])
    found = Why(slot, code, priority=priority, probability=probability, unit=law.unit)
    likely = law.likely
    if likely is not None and smallest is not None and likely[slot] * part > 0:
        found = dataclasses.replace(found, weight=smallest / float(likely[slot] * part))
    if not isinstance(state.ring, RingState):
        return found
    line = Timeline.of(state.ring, buffer.capacity, lanes)
    position = int(line.positions(np.asarray([slot]))[0][0])
    age = line.rows.size - 1 - position
    found = dataclasses.replace(found, written=line.written - 1 - age, age=age)
    if state.trajectories is None:
        return found
    steps = TrajectoryTimeline.of_index(state.ring, state.trajectories)
    assert buffer.trajectories is not None
    held, begins, ends = _trajectory(buffer.trajectories, state.items, steps, position, slot % lanes)
    found = dataclasses.replace(found, trajectory=held, begins=begins, ends=ends)
    if isinstance(buffer.sampler, Slices):
        intact = None
        if state.frames:
            intact = np.asarray(buffer.intact(state, jnp.arange(buffer.capacity * lanes, dtype=jnp.int32)))
        reached = buffer.sampler.starts_that_reach(slot, steps, intact)
        if law.starts is not None and code == Reason.NONE:
            reached = reached[law.starts[reached] > 0]
        rule = buffer.sampler
        found = dataclasses.replace(found, starts=tuple(reached.tolist()), slice_len=rule.length, needs=rule.shortest)
    return found


def _trajectory(
    rule: Trajectories, items: PyTree, line: TrajectoryTimeline, position: int, lane: int
) -> tuple[StoredTrajectory, str, str]:
    """The trajectory of an item, and by what it begins and ends."""
    first = position - int(line.before[position, lane])
    last = position + int(line.after[position, lane])
    slots = line.slots[:, lane]

    def at(path: KeyPath, place: int) -> int | float:
        """The value of a marker."""
        leaf = leaf_at(items, path)
        row = np.asarray(leaf[int(line.rows[place])])  # one row of a leaf of one value an item
        return row.reshape(-1)[lane].item()

    def ids(place: int) -> tuple[int | float, ...]:
        return tuple(at(path, place) for path in rule.paths("id"))

    def change(place: int) -> str:
        """By what a trajectory begins at a place, after the one that goes on in the place before."""
        for path in rule.paths("first"):
            if at(path, place):
                return f"{_name(path)} is true at slot {slots[place]}"
        for path in rule.paths("id"):
            if at(path, place - 1) != at(path, place):
                return f"{_name(path)} changes from {at(path, place - 1)} to {at(path, place)} at slot {slots[place]}"
        return f"another trajectory begins at slot {slots[place]}"

    if line.step[first, lane]:
        begins = f"its first {line.step[first, lane]} rows are overwritten"
    elif first == 0:
        begins = f"slot {slots[0]} is the oldest one that is stored"
    elif line.kind[first - 1, lane] in (TERMINATED, TRUNCATED):
        begins = f"the previous trajectory ended at slot {slots[first - 1]}"
    else:
        begins = change(first)

    kind = int(line.kind[last, lane])
    if kind in (TERMINATED, TRUNCATED):
        ends = f"it is {_ENDS[kind]}"
        names = (("terminated", TERMINATED), ("truncated", TRUNCATED), ("discount", TERMINATED))
        for name, of_kind in names:
            for path in rule.paths(name):
                if of_kind == kind and bool(at(path, last)) is (name != "discount"):
                    value = "zero" if name == "discount" else "true"
                    ends = f"{_name(path)} is {value} at slot {slots[last]}, so it is {_ENDS[kind]}"
    elif last + 1 < slots.size:
        ends = change(last + 1)
    else:
        ends = f"not yet, slot {slots[last]} is the newest one"
    held = ids(position)
    trajectory = StoredTrajectory(
        id=None if not held else held[0] if len(held) == 1 else held,
        lane=lane,
        number=int(line.number[position, lane]),
        step=int(line.step[position, lane]),
        first=int(slots[first]),
        last=int(slots[last]),
        length=last - first + 1,
    )
    return trajectory, begins, ends


def _name(path: KeyPath) -> str:
    return ".".join(map(str, path))

"""TED data row by row: what rings hold after episodes were written into them, and what flat arrays of them are."""

import dataclasses
import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

OBSERVATIONS: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {
    "obs": ((3,), torch.float32),
    ("agent", "pixels"): ((2, 1), torch.uint8),
    ("agent", "deep", "half"): ((), torch.bfloat16),
    "count": ((), torch.uint16),
    "wave": ((1,), torch.complex64),
}
PLAIN: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {
    "action": ((2,), torch.float64),
    ("collector", "traj_ids"): ((), torch.int64),
}


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, which are equal only where every bit is."""
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return whole.view(_WHOLE[whole.element_size()])


@dataclasses.dataclass(frozen=True)
class Written:
    """A ring as a storage holds it.

    Args:
        data: [rows, *lanes], zero where nothing was written.
        shift: the row behind the newest.
        is_full: whether all rows were written.
        filled: how many rows were.
    """

    data: TensorDict
    shift: int
    is_full: bool
    filled: int

    def __repr__(self) -> str:
        over = self.data["next", "done"].reshape(*self.data.shape, -1).any(-1).nonzero().tolist()
        return f"{list(self.data.shape)}, shift {self.shift}, is_full {self.is_full}, episodes end at {over}"

    def told(self, hook: Any) -> Any:
        """The hook, knowing where the ring begins."""
        hook.shift, hook.is_full = self.shift, self.is_full
        return hook


def paths(data: Any) -> list[Any]:
    """The keys of all tensors."""
    return sorted(data.keys(True, True), key=str)


def copied(data: Any) -> TensorDict:
    """The same bits in memory of their own, which `clone` does not promise: it makes 0.0 of -0.0."""
    made = TensorDict({}, data.batch_size)
    for key in paths(data):
        made.set(key, data.get(key).as_subclass(Tensor).clone())
    return made


def as_tuple(key: Any) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def random_bits(shape: Any, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of any bits: infinities, several NaNs, both zeros."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    whole = torch.zeros(shape, dtype=dtype)
    size = whole.element_size() * whole.numel()
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    raw[torch.rand(size, generator=generator) < 0.5] = 0
    return raw.view(dtype).reshape(shape) if size else whole


def write(
    capacity: int,
    lanes: tuple[int, ...],
    count: int,
    ends: Any,
    *,
    tail: tuple[int, ...] = (1,),
    seed: int = 0,
    observations: dict[Any, Any] = OBSERVATIONS,
    done_keys: tuple[Any, ...] = ("done", "terminated", "truncated"),
) -> Written:
    """`count` rows written one after the other; `ends` are pairs of a step and a flat lane. Flags have the shape `tail`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (capacity, *lanes)
    data = TensorDict({}, shape)
    for key, (item, dtype) in (observations | PLAIN).items():
        data[key] = torch.zeros((*shape, *item), dtype=dtype)
        if key in observations:
            data["next", *as_tuple(key)] = torch.zeros((*shape, *item), dtype=dtype)
    for key in done_keys:
        data[key] = torch.zeros((*shape, *tail), dtype=torch.bool)
        data["next", *as_tuple(key)] = torch.zeros((*shape, *tail), dtype=torch.bool)
    data["next", "reward"] = torch.zeros((*shape, *tail))
    now = {key: random_bits((*lanes, *item), dtype, generator) for key, (item, dtype) in observations.items()}
    for step in range(count):
        row = step % capacity
        for key, (item, dtype) in PLAIN.items():
            data[key][row] = random_bits((*lanes, *item), dtype, generator)
        data["next", "reward"][row] = torch.rand((*lanes, *tail), generator=generator)
        over = torch.tensor([(step, lane) in ends for lane in range(max(1, int(torch.tensor(lanes).prod())))])
        over = over.reshape(lanes) if lanes else over[0]
        for place, key in enumerate(done_keys):
            flag = over if place == 0 else over & (torch.rand(lanes, generator=generator) < 0.5)
            data["next", *as_tuple(key)][row] = flag.reshape((*lanes, *(1 for _ in tail))).expand((*lanes, *tail))
        for key, (item, dtype) in observations.items():
            data[key][row] = now[key]
            after = random_bits((*lanes, *item), dtype, generator)
            data["next", *as_tuple(key)][row] = after
            reset = random_bits((*lanes, *item), dtype, generator)
            chosen = over.reshape((*lanes, *(1 for _ in item))).expand((*lanes, *item))
            plain = {torch.uint16: torch.int16}.get(dtype, dtype)
            now[key] = torch.where(chosen, reset.view(plain), after.view(plain)).view(dtype)
    return Written(data, (count - 1) % capacity + 1, count >= capacity, min(count, capacity))


def laid_out(written: Written) -> tuple[dict[Any, Tensor], list[tuple[int, bool]]]:
    """The flat arrays, and of each trajectory how many rows it has and whether it has an end: one row after the other."""
    data, capacity = written.data, written.data.shape[0]
    arrays: dict[Any, list[Tensor]] = {}
    trajectories: list[tuple[int, bool]] = []
    order = [(row + (written.shift if written.is_full else 0)) % capacity for row in range(capacity)]
    for lane in itertools.product(*map(range, data.shape[1:])):
        length = 0
        for row in order:
            place = (row, *lane)
            newest = row == (written.shift - 1) % capacity
            end = newest or bool(data["next", "done"][place].any())
            length += 1
            if end:
                trajectories.append((length, True))
                length = 0
            for key in data["next"].keys(True, True):
                if as_tuple(key)[-1] in ("done", "terminated", "truncated", "reward"):
                    arrays.setdefault(key, []).append(data["next", *as_tuple(key)][place])
                else:
                    arrays.setdefault(key, []).append(data[key][place])
                    if end:
                        arrays[key].append(data["next", *as_tuple(key)][place])
            for key in PLAIN:
                arrays.setdefault(key, []).append(data[key][place])
        if length:
            trajectories.append((length, False))
    return {key: torch.stack([bits(each) for each in rows]) for key, rows in arrays.items()}, trajectories


def differences(one: Any, another: Any) -> list[Any]:
    """The keys where two tensordicts are not the same, bit for bit."""
    if paths(one) != paths(another) or one.batch_size != another.batch_size:
        return [(paths(one), one.batch_size), (paths(another), another.batch_size)]
    return [key for key in paths(one) if not same(one[key], another[key])]


def same(one: Tensor, another: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    alike = one.dtype == another.dtype and one.shape == another.shape
    return alike and torch.equal(bits(one.as_subclass(Tensor)), bits(another.as_subclass(Tensor)))


@st.composite
def rings(draw: Any) -> Written:
    """Rings at any cursor, with episodes that end anywhere."""
    capacity = draw(st.integers(1, 6))
    lanes = draw(st.sampled_from([(), (), (1,), (3,), (2, 2)]))
    count = draw(st.one_of(st.integers(1, 3 * capacity), st.sampled_from([capacity, 2 * capacity])))
    width = max(1, int(torch.tensor(lanes).prod()))
    ends = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, width - 1)), max_size=2 * capacity))
    made = write(
        capacity,
        lanes,
        count,
        ends,
        tail=draw(st.sampled_from([(1,), (), (1, 1)])),
        seed=draw(st.integers(0, 999)),
        done_keys=draw(st.sampled_from([("done", "terminated", "truncated"), ("done",), ("done", "terminated")])),
    )
    return dataclasses.replace(made, shift=made.shift % capacity) if made.is_full and draw(st.booleans()) else made

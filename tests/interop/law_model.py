"""The law of the next draw of each sampler by brute force: every choice written down, in lists of plain values."""

import copy

import numpy as np
import torch
from scipy import stats
from tensordict import TensorDict

from fbuf import Reason
from interop import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from tests.interop import slice_model
from tests.interop.group_model import GroupModel

ROWS = 12
MANY = 3000


def weight_of(staleness):
    """Weights of which some are zero."""
    return torch.where(staleness == 2, 0.0, 1 / (1.0 + staleness))


def staleness_aware():
    return StalenessAwareSampler(4, weight_of, "version")


def priority_slices(**kwargs):
    return PrioritizedSliceSampler(2 * ROWS, 0.7, 0.5, eps=0.0, slice_len=3, traj_key="id", **kwargs)


def slices(**kwargs):
    return SliceSampler(traj_key="id", **({"slice_len": 3} | kwargs))


def slice_epochs(**kwargs):
    return SliceSamplerWithoutReplacement(slice_len=3, traj_key="id", **kwargs)


SAMPLERS = {
    "uniform": RandomSampler,
    "priorities": lambda: PrioritizedSampler(2 * ROWS, 0.7, 0.5, eps=0.0),
    "slices": slices,
    "slices of other lengths": lambda: slices(strict_length=False),
    "slices by their number": lambda: slices(slice_len=None, num_slices=2),
    "slices by named ends": lambda: SliceSampler(slice_len=3, end_key=("next", "done"), only_named_keys=True),
    "padded slices": lambda: slices(strict_length=False, pad_output=True, span=(1, 0)),
    "slices that pass both ends": lambda: slices(span=True),
    "slices that pass some rows": lambda: slices(strict_length=False, span=(1, 2)),
    "priority slices": priority_slices,
    "priority slices of other lengths": lambda: priority_slices(strict_length=False),
    "priority slices that pass the end": lambda: priority_slices(span=(False, True)),
    "priority slices that pass a row": lambda: priority_slices(span=(False, 1), strict_length=False),
    "epochs": SamplerWithoutReplacement,
    "epochs that drop the last": lambda: SamplerWithoutReplacement(drop_last=True),
    "epochs in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "epochs of slices": slice_epochs,
    "epochs of slices in order": lambda: slice_epochs(shuffle=False),
    "epochs of slices of other lengths": lambda: slice_epochs(strict_length=False, drop_last=True),
    "consuming": lambda: ConsumingSampler(2),
    "staleness": staleness_aware,
    "groups": lambda: PromptGroupSampler(2, group_key="id"),
    "groups that are consumed": lambda: PromptGroupSampler(2, group_key="id", max_uses=2),
    "fresh groups": lambda: PromptGroupSampler(2, group_key="id", staleness=staleness_aware()),
}
ONE_DIM = ("consuming",)  # no storage of several item dims


class LawModel:
    """A buffer with a sampler, and the law of its next draw over lists of rows, from the oldest to the newest."""

    def __init__(self, kind, seed, lanes=1):
        self.kind, self.lanes, self.random = kind, lanes, np.random.default_rng(seed)
        self.sampler = SAMPLERS[kind]()
        sliced = isinstance(self.sampler, SliceSampler)
        self.batch = 6 if sliced else 4 if isinstance(self.sampler, PromptGroupSampler) else 3
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(ROWS * lanes, ndim=1 if lanes == 1 else 2),
            sampler=self.sampler,
            batch_size=self.batch,
            generator=torch.Generator().manual_seed(seed),
        )
        self.rows = []  # of one slot each for all lanes: dicts, the oldest first
        self.written = 0
        self.ids = np.zeros(lanes, int)
        self.priorities = {}
        self.default = 1.0
        self.drawn = set()  # of this epoch: slots or trajectories
        self.uses = {}
        self.groups = GroupModel(2, getattr(self.sampler, "max_uses", None))

    @property
    def storage(self):
        return self.buffer.storage

    # ------------------------------------------------------------------ a history

    def step(self):
        {0: self.write, 1: self.write, 2: self.update, 3: self.draw, 4: self.draw}[int(self.random.integers(5))]()

    def write(self):
        count = int(self.random.integers(1, 6))
        if isinstance(self.sampler, ConsumingSampler):
            count = min(count, ROWS)
        done = self.random.random((self.lanes, count)) < 0.25
        ids = np.zeros((self.lanes, count), int)
        for at in range(count):
            ids[:, at] = self.ids
            self.ids = np.where(done[:, at] | (self.random.random(self.lanes) < 0.1), self.ids + 1, self.ids)
        if isinstance(self.sampler, PromptGroupSampler):
            ids = self.random.integers(0, 4, ids.shape)
        versions = self.random.integers(0, 6, ids.shape)
        data = TensorDict(
            {
                "id": torch.from_numpy(ids),
                "version": torch.from_numpy(versions),
                ("next", "done"): torch.from_numpy(done)[..., None],
            },
            [self.lanes, count],
        )
        slots = self.buffer.extend(data[0] if self.lanes == 1 else data)
        taken = slots.tolist() if self.lanes == 1 else sorted({row for row, _ in slots.tolist()}, key=None)
        if self.lanes > 1:
            taken = [(self.written + at) % ROWS for at in range(count)]
        for at, row in enumerate(taken):
            self.rows = [each for each in self.rows if each["row"] != row]
            self.rows.append({"row": row, "id": ids[:, at], "done": done[:, at], "version": versions[:, at]})
            for lane in range(self.lanes):
                slot = row * self.lanes + lane
                self.uses[slot] = 0
                self.priorities[slot] = self.default
                self.groups.write(slot, ids[lane, at])
        self.written += count
        if len(self.slots()) != getattr(self, "length", -1) or isinstance(self.sampler, SliceSampler):
            self.drawn = set()
        self.length = len(self.slots())

    def update(self):
        if isinstance(self.sampler, StalenessAwareSampler):
            self.sampler.consumer_version = int(self.random.integers(0, 8))
        if isinstance(self.sampler, PromptGroupSampler) and self.sampler.staleness is not None:
            self.sampler.staleness.consumer_version = int(self.random.integers(3, 8))
        if isinstance(self.sampler, PrioritizedSampler) and self.rows:
            slots = self.random.choice(self.slots(), 4)
            given = self.random.choice([0.0, 0.0, 0.25, 0.5, 1, 2, 4], 4)
            index = torch.as_tensor(slots)
            if self.lanes > 1:
                index = torch.stack(torch.unravel_index(index, self.storage.shape), -1)
            self.buffer.update_priority(index, torch.as_tensor(given))
            for slot, priority in zip(slots.tolist(), given.tolist(), strict=True):
                self.priorities[slot] = float(priority)
            self.default = max(self.default, float(given.max()))

    def draw(self):
        law = self.law()
        enough = self.batch if isinstance(self.sampler, SamplerWithoutReplacement) and self.sampler.drop_last else 1
        units = self.units()
        drawable = sum(chance > 0 for chance in law.values())
        if not drawable or (isinstance(self.sampler, PromptGroupSampler) and drawable < 2):
            return
        if isinstance(self.sampler, SliceSampler):
            enough = 2 if enough > 1 else 1
        if enough > len(units):
            return
        if isinstance(self.sampler, SamplerWithoutReplacement) and len(self.left(units)) < enough:
            self.drawn = set()
        slots = self.flat(self.buffer.sample(return_info=True)[1]["index"])
        for slot in slots:
            self.uses[slot] += 1
        if isinstance(self.sampler, SliceSampler):
            self.drawn |= {unit for unit in units if set(unit) & set(slots)}
        else:
            self.drawn |= {(slot,) for slot in slots}
        for group in self.groups.ready():
            group["uses"] += group["slots"][0] in slots

    def flat(self, index):
        if isinstance(index, tuple) or index.ndim == 2:
            index = torch.stack(index, -1) if isinstance(index, tuple) else index
            index = index[:, 0] * self.lanes + index[:, 1] if index.shape[1] > 1 else index[:, 0]
        return index.tolist()

    # ------------------------------------------------------------------ the law

    def slots(self):
        return sorted(each["row"] * self.lanes + lane for each in self.rows for lane in range(self.lanes))

    def trajectories(self):
        """The slots of each, lane by lane."""
        found = []
        for lane in range(self.lanes):
            last = None
            for each in self.rows:
                same = last is not None and not last["done"][lane]
                if self.kind != "slices by named ends":
                    same = same and last["id"][lane] == each["id"][lane]
                if not same:
                    found.append([])
                found[-1].append(each["row"] * self.lanes + lane)
                last = each
        return [tuple(each) for each in found]

    def units(self):
        """What one draw chooses from, as tuples of slots."""
        if isinstance(self.sampler, SliceSampler):
            least = 3 if self.sampler.strict_length else 1
            return [each for each in self.trajectories() if len(each) >= least]
        if isinstance(self.sampler, PromptGroupSampler):
            return [tuple(group["slots"]) for group in self.groups.ready()]
        return [(slot,) for slot in self.slots()]

    def left(self, units):
        return [unit for unit in units if unit not in self.drawn]

    def law(self):
        """The probability of each draw, a tuple of slots; the first one is the start of a slice."""
        units, sampler = self.units(), self.sampler
        if isinstance(sampler, PrioritizedSliceSampler):
            return self._by_priority()
        if isinstance(sampler, PrioritizedSampler):
            return _in_proportion({unit: self.priorities[unit[0]] ** 0.7 for unit in units})
        if isinstance(sampler, ConsumingSampler):
            return _in_proportion({unit: float(self.uses[unit[0]] < 2) for unit in units})
        aware = sampler.staleness if isinstance(sampler, PromptGroupSampler) else sampler
        if isinstance(aware, StalenessAwareSampler):
            return _in_proportion({unit: self._fresh(unit, aware) for unit in units})
        if isinstance(sampler, SamplerWithoutReplacement):
            left = self.left(units)
            enough = 1
            if sampler.drop_last:
                enough = self.batch // 3 if isinstance(sampler, SliceSampler) else self.batch
                if len(units) < enough:
                    return {}  # `sample` raises
            if len(left) < enough:
                left = units
            if not sampler.shuffle:
                left = sorted(left, key=lambda unit: (unit[0] % self.lanes, unit[0] // self.lanes))
                if not isinstance(sampler, SliceSampler):
                    left = sorted(left)
                left = left[:1]
            units = left
        if not isinstance(sampler, SliceSampler):
            return _in_proportion(dict.fromkeys(units, 1.0))
        return slice_model.shares(units, 3, False, *(2 if most is True else int(most) for most in sampler.span))

    def _by_priority(self):
        if not self.units():
            return {}
        right = self.sampler.span[1]
        need = 2 if right is True else 3 - int(right)
        found = slice_model.starts(self.trajectories(), 3, self.sampler.strict_length, need)
        return _in_proportion({rows: self.priorities[start] ** 0.7 for start, rows in found.items()})

    def _fresh(self, unit, aware):
        version = {
            each["row"] * self.lanes + lane: each["version"][lane] for each in self.rows for lane in range(self.lanes)
        }
        staleness = max(aware.consumer_version - version[slot] for slot in unit)
        return 0.0 if staleness > 4 else float(weight_of(torch.tensor(max(staleness, 0))))

    # ------------------------------------------------------------------ comparisons

    def check(self):
        """The buffer says the same: probabilities, starts, reasons, and `why` of one slot."""
        law, chances = self.law(), self.sampler.chances(self.storage, self.batch)
        size = len(self.storage)
        mass, starts = np.zeros((2, size))
        for rows, chance in law.items():
            mass[list(rows)] += chance
            starts[rows[0]] += chance
        np.testing.assert_allclose(chances.probability, mass, rtol=2e-5, atol=0)
        assert ((chances.reason == 0) == (mass > 0)).all()
        assert not np.isin(chances.reason, (1, 9)).any()
        if isinstance(self.sampler, SliceSampler):
            np.testing.assert_allclose(chances.starts, starts, rtol=2e-5, atol=0)
            short = {slot for unit in self.trajectories() if len(unit) < 3 for slot in unit}
            if self.sampler.strict_length:
                assert all(chances.reason[slot] == 2 for slot in short)
        if size:
            self.check_why(int(self.random.integers(size)), law, mass)
        return mass, starts

    def check_why(self, slot, law, mass):
        index = slot if self.lanes == 1 else tuple(map(int, np.unravel_index(slot, tuple(self.storage.shape))))
        found = self.buffer.why(index)
        assert found.slot == slot
        np.testing.assert_allclose(found.probability, mass[slot], rtol=2e-5)
        assert (found.reason is None) == (mass[slot] > 0)
        if found.probability and found.starts is not None:
            assert set(found.starts) == {rows[0] for rows, chance in law.items() if slot in rows and chance > 0}
        if isinstance(self.sampler, PrioritizedSampler):
            np.testing.assert_allclose(found.priority, self.priorities[slot], rtol=1e-6)
        places = {each["row"]: len(self.rows) - 1 - at for at, each in enumerate(self.rows)}
        if not isinstance(self.sampler, ConsumingSampler):
            age = places[slot // self.lanes]
            assert (found.age, found.written) == (age, self.written - 1 - age)
        if isinstance(self.sampler, SliceSampler):
            assert found.trajectory is not None
            unit = next(each for each in self.trajectories() if slot in each)
            held = found.trajectory
            assert (held.first, held.last, held.length) == (unit[0], unit[-1], len(unit))
            assert held.step in (None, unit.index(slot))
            assert found.needs in (1, found.slice_len)
            if found.code == Reason.TOO_SHORT:
                assert len(unit) < found.needs and f"needs {found.needs} of them" in str(found)
        assert str(found)

    def check_draws(self, count=MANY):
        """Real draws of one item, slice or group follow the law."""
        mass, starts = self.check()
        if not mass.any():
            return
        found, first = np.zeros((2, len(mass)))
        many = self._many(count)
        for rows in many:
            found[rows] += 1
            first[rows[0]] += 1
        count = len(many)
        spread = 6 * np.sqrt(count * mass * np.maximum(1 - mass, 0)) + 1e-6 * count
        assert (np.abs(found - count * mass) <= spread + 6).all(), (found / count, mass)
        assert not found[mass == 0].any()
        likely = starts if isinstance(self.sampler, SliceSampler) else mass / mass.sum()
        if not isinstance(self.sampler, PromptGroupSampler):
            assert chi_square(first, likely) > 1e-7

    def _many(self, count):
        """The slots of many draws of one unit, each from the present state."""
        draws, unit = self.sampler.draws, self._unit
        if not draws.has_state and not isinstance(self.sampler, StalenessAwareSampler | ConsumingSampler):
            return self._drawn(draws, count * unit)
        found = []
        size = self.batch if isinstance(self.sampler, SamplerWithoutReplacement) and self.sampler.drop_last else unit
        for _ in range(min(count, 400)):
            twin = copy.copy(self.sampler) if draws.has_state else self.sampler
            found += self._drawn(twin.draws, size)[:1]
        return found

    @property
    def _unit(self):
        return 3 if isinstance(self.sampler, SliceSampler) else 2 if isinstance(self.sampler, PromptGroupSampler) else 1

    def _drawn(self, draws, size):
        shape = getattr(draws, "shape", None)
        if shape is not None and shape.slice_len is None:
            shape.num_slices = size // 3
        index, info = draws.draw(self.storage, size, self.random.integers(2**32, size=2, dtype=np.uint32))
        if shape is not None and shape.slice_len is None:
            shape.num_slices = 2
        slots = self.flat(index)
        lengths = draws.slice_lengths()
        if lengths is None:
            return np.reshape(slots, (-1, self._unit)).tolist()
        mask = info.get(("collector", "mask"))
        parts = np.split(np.array(slots), np.cumsum(lengths)[:-1])
        kept = np.ones(len(slots), bool) if mask is None else mask.reshape(-1).numpy()
        masks = np.split(kept, np.cumsum(lengths)[:-1])
        return [part[is_kept].tolist() for part, is_kept in zip(parts, masks, strict=True)]


def _in_proportion(weights):
    total = sum(weights.values())
    return {key: weight / total if total else 0.0 for key, weight in weights.items()}


def chi_square(counts, likely):
    """The p-value of counts of independent draws; entries with few expected ones together."""
    expected = counts.sum() * likely / likely.sum()
    order = np.argsort(expected)
    counts, expected = counts[order][expected[order] > 0], expected[order][expected[order] > 0]
    few = int(np.searchsorted(expected, 5))
    while 0 < few < len(expected) and expected[:few].sum() < 5:
        few += 1
    if few:
        counts = np.append(counts[:few].sum(), counts[few:])
        expected = np.append(expected[:few].sum(), expected[few:])
    return 1.0 if len(counts) < 2 else stats.chisquare(counts, expected).pvalue


def ensemble_of(models, **kwargs):
    """An ensemble of the buffers of some models."""
    return ReplayBufferEnsemble(*(model.buffer for model in models), **kwargs)


def play(kind, seed, lanes=1, steps=12, draws=False):
    """A random history, compared after each step; at its end also by real draws."""
    model = LawModel(kind, seed, lanes)
    model.check()
    for _ in range(steps):
        model.step()
        model.check()
    if draws:
        model.check_draws()
    return model

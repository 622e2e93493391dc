"""Meter: a model of plain dicts over histories of all samplers, storages and writers; threads, lives of meters, writers."""

import contextlib
import copy
import gc
import weakref
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    Sequence,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from interop.metrics import Meter
from tests.faults.children import forked
from tests.interop.pair_history import SAMPLERS
from tests.interop.test_threads import together

CAPACITY = 12


class Model:
    """What a meter must say: every item has a serial number, which batches contain."""

    def __init__(self, lanes=1):
        self.lanes = lanes
        self.stored = {}  # serial by slot
        self.row_of, self.draws = {}, Counter()
        self.rows = 0
        self.reset()

    def reset(self):
        self.now, self.ages, self.stale, self.uses, self.ess = Counter(), [], [], [], []

    def written(self, slots, serials):
        kept = [(slot, serial) for slot, serial in zip(slots, serials, strict=True) if slot != -1]
        for at, (slot, serial) in enumerate(kept):
            if (before := self.stored.get(slot)) is not None and before in self.row_of:
                self.now["overwritten"] += 1
                self.now["never_drawn"] += self.draws[before] == 0
                self.now["draws_of_overwritten"] += self.draws[before]
            self.stored[slot] = serial
            self.row_of[serial] = self.rows + at // self.lanes
        self.rows += len(kept) // self.lanes
        self.now["written"] += len(kept)

    def returned(self, serials, info):
        mask = info.get(("collector", "mask"))
        numbers = {key: info[key].reshape(-1) for key in ("staleness", "group_uses", "priority_weight") if key in info}
        if mask is not None:
            serials = serials[mask]
            numbers = {key: values[mask] for key, values in numbers.items()}
        self.now["batches"] += 1
        self.now["draws"] += len(serials)
        here = set(self.stored.values())
        for serial in serials.tolist():
            if serial not in here:
                self.now["late_draws"] += 1
                continue
            self.draws[serial] += 1
            if serial in self.row_of:
                self.ages.append(self.rows - 1 - self.row_of[serial])
        self.stale += numbers.get("staleness", torch.zeros(0)).tolist()
        self.uses += numbers.get("group_uses", torch.zeros(0)).tolist()
        if "priority_weight" in numbers:
            weights = numbers["priority_weight"].double()
            self.ess.append((float(weights.sum() ** 2 / (weights**2).sum()), len(weights)))

    def emptied(self):
        self.stored, self.draws = {}, Counter()

    def check(self, numbers):
        for name in ("batches", "draws", "written", "overwritten", "never_drawn", "late_draws"):
            assert numbers[name] == self.now[name], name
        assert numbers["unknown_draws"] == 0
        overwritten = self.now["overwritten"]
        expected = {
            "replay_ratio": self.now["draws"] / self.now["written"] if self.now["written"] else None,
            "never_drawn_share": self.now["never_drawn"] / overwritten if overwritten else None,
            "draws_per_overwritten": self.now["draws_of_overwritten"] / overwritten if overwritten else None,
            "age_mean": np.mean(self.ages) if self.ages else None,
            "age_max": max(self.ages) if self.ages else None,
            "staleness_mean": np.mean(self.stale) if self.stale else None,
            "staleness_max": max(self.stale) if self.stale else None,
            "group_uses_mean": np.mean(self.uses) if self.uses else None,
            "ess": np.mean([ess for ess, _ in self.ess]) if self.ess else None,
            "ess_share": np.mean([ess / size for ess, size in self.ess]) if self.ess else None,
        }
        draws = [self.draws[serial] for serial in self.stored.values()]
        expected |= {
            "stored": len(draws),
            "draws_per_stored": np.mean(draws) if draws else None,
            "draws_per_stored_max": max(draws) if draws else None,
            "undrawn_share": draws.count(0) / len(draws) if draws else None,
        }
        for name, number in expected.items():
            assert numbers.get(name) == (None if number is None else pytest.approx(number, rel=1e-6)), name
        assert all(type(number) in (int, float) for number in numbers.values())
        self.reset()


def items(serials):
    serials = torch.as_tensor(serials)
    columns = {
        "serial": serials,
        "episode": serials // 4,
        "prompt_id": serials // 2,
        "policy_version": serials // 10,
        "key": (serials * 7919 % 101).float(),
    }
    return TensorDict(columns, serials.shape)


class History:
    """A buffer, its meter and the model."""

    def __init__(self, storage=LazyTensorStorage, ndim=1, prefetch=None, seed=0, rows=CAPACITY, kind=None, **parts):
        self.lanes = 3 if ndim == 2 else 1
        made = storage(rows * self.lanes, **({"ndim": 2} if ndim == 2 else {}))
        kind = kind or TensorDictReplayBuffer
        generator = torch.Generator().manual_seed(seed)
        self.rb = kind(storage=made, batch_size=4, prefetch=prefetch, generator=generator, **parts)
        self.rng = np.random.default_rng(seed)
        self.serial = 0
        self.begin()

    def begin(self):
        self.meter = Meter(self.rb)
        self.model = Model(self.lanes)

    def write(self, count):
        serials = np.arange(self.serial, self.serial + count * self.lanes).reshape(count, self.lanes)
        self.serial += serials.size
        if self.lanes > 1:
            slots = list(map(tuple, self.rb.extend(items(serials.T)).tolist()))
        elif count == 1:
            slots = [self.rb.add(items(serials[0])[0])]
            slots = [-1 if slots[0] is None else slots[0]]
        else:
            slots = self.rb.extend(items(serials[:, 0])).tolist()
        self.model.written(slots, serials.reshape(-1).tolist())

    def draw(self):
        try:
            data, info = self.rb.sample(return_info=True)
        except RuntimeError:  # too little is stored
            return
        self.model.returned(torch.as_tensor(data["serial"]).reshape(-1), info)
        data["index"] += 1  # of the user: a meter must not see it
        if "priority_weight" in info and self.rng.random() < 0.5:
            self.rb.update_priority(info["index"], torch.rand(len(info["priority_weight"])))

    def run(self, steps, empties=True):
        for _ in range(steps):
            step = self.rng.integers(12)
            if step < 4:
                self.write(int(self.rng.choice([1, 2, 4, 5, CAPACITY + 3])))
            elif step < 9:
                self.draw()
            elif step < 11:
                self.model.check(self.meter.read())
            elif empties and self.rng.random() < 0.3:
                self.rb.empty()
                self.model.emptied()
        self.model.check(self.meter.read())
        return self


PREFETCHING = ("RandomSampler", "PrioritizedSampler", "SliceSampler", "StalenessAwareSampler", "PromptGroupSampler")


def sampler_of(name, size):
    if name == "SliceSampler":
        return SliceSampler(slice_len=2, traj_key="episode", strict_length=False, pad_output=True)
    if name == "PromptGroupSampler":
        return PromptGroupSampler(2, staleness=StalenessAwareSampler())
    return SAMPLERS[name](size)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("ndim", [1, 2])
def test_samplers(name, ndim):
    if ndim == 2 and name == "ConsumingSampler":
        return
    History(ndim=ndim, sampler=sampler_of(name, CAPACITY * (3 if ndim == 2 else 1))).run(60)


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyMemmapStorage])
def test_storages(storage):
    History(storage, sampler=RandomSampler(), seed=1).run(40)


@pytest.mark.parametrize("name", PREFETCHING)
def test_prefetched_batches_count_when_they_are_returned(name):
    History(sampler=sampler_of(name, CAPACITY), prefetch=2, seed=2).run(60)


def test_a_writer_that_drops_items():
    History(writer=TensorDictMaxValueWriter(rank_key="key"), seed=3).run(80)


def test_uses_of_groups():
    history = History(sampler=PromptGroupSampler(2, max_uses=3), seed=4).run(60)
    history.write(2)
    numbers = history.meter.read()
    assert numbers["groups"] == len(history.rb.sampler.groups()) > 0
    reasons = Counter(group.reason for group in history.rb.sampler.groups())
    assert numbers["groups_consumed"] == reasons["consumed"] and numbers["groups_ready"] == reasons[None]


def test_long_histories_are_counted_on_the_way():
    history = History(seed=5, rows=7)
    for _ in range(700):
        history.write(1)
        history.draw()
        history.draw()
    history.model.check(history.meter.read())


# ------------------------------------------------------------------ the life of a meter


def test_in_the_middle_of_the_life_of_a_buffer():
    history = History()
    history.write(CAPACITY + 5)
    history.begin()
    rows = [int(row["serial"]) for row in history.rb.in_order()]
    for _ in range(5):
        serials = history.rb.sample()["serial"].tolist()
        numbers = history.meter.read()
        assert numbers["age_mean"] == np.mean([CAPACITY - 1 - rows.index(serial) for serial in serials])
    history.write(4)
    numbers = history.meter.read()
    assert numbers["overwritten"] == 0 and numbers["written"] == 4  # of the overwritten rows it has seen a part
    history.write(CAPACITY)
    assert history.meter.read()["overwritten"] == 4


def test_loads_resize_and_another_storage(tmp_path):
    history = History()
    history.write(9)
    history.draw()
    history.rb.dumps(tmp_path / "saved")
    history.meter.read()
    history.write(5)
    history.rb.loads(tmp_path / "saved")
    numbers = history.meter.read()
    assert (numbers["stored"], numbers["draws_per_stored"], numbers["written"]) == (9, 0.0, 5)
    assert numbers["overwritten"] == 2
    history.rb.resize(6)
    history.rb.batch_size = 200
    sample = history.rb.sample()
    history.rb.batch_size = 4
    numbers = history.meter.read()
    assert numbers["stored"] == 6 and numbers["draws"] == 200 == pytest.approx(numbers["draws_per_stored"] * 6)
    assert numbers["age_mean"] == pytest.approx(8 - sample["serial"].double().mean().item())
    old = history.rb.set_storage(LazyTensorStorage(5))
    assert not old.followers.observers()
    history.write(3)
    history.draw()
    numbers = history.meter.read()
    assert (numbers["stored"], numbers["written"], numbers["draws"], numbers["overwritten"]) == (3, 3, 4, 0)
    history.rb.set_sampler(PrioritizedSampler(5, 1.0, 1.0))
    history.draw()
    assert history.meter.read()["ess_share"] == pytest.approx(1)
    history.rb.load_state_dict(copy.deepcopy(history.rb).state_dict())
    assert history.meter.read()["draws_per_stored"] == 0


def test_a_meter_keeps_nothing_and_is_not_kept():
    rb = ReplayBuffer(storage=ListStorage(5), batch_size=2, collate_fn=list)
    meter = Meter(rb)
    rb.extend([1, 2, 3])
    rb.sample()
    twin = copy.deepcopy(rb)
    assert not twin.observers.references
    twin.sample()
    gone = weakref.ref(meter)
    del meter
    gc.collect()
    assert gone() is None and not rb.storage.followers.observers()
    rb.sample()
    assert not rb.observers.references
    meter, buffer = Meter(rb), weakref.ref(rb)
    rb.sample()
    del rb
    gc.collect()
    assert buffer() is None
    assert "stored" in meter.read()
    meter.close()


def test_closing():
    rb = ReplayBuffer(storage=ListStorage(5), batch_size=2, collate_fn=list)
    with Meter(rb) as meter, Meter(rb) as other:
        rb.extend([1, 2, 3])
        rb.sample()
        assert repr(meter) == "Meter()"
    assert repr(meter) == "Meter(closed)" and not rb.observers.references and not rb.storage.followers.observers()
    rb.sample()
    rb.extend([4])
    assert meter.read()["draws"] == other.read()["draws"] == 2
    assert meter.read()["written"] == 0 and meter.read()["total_written"] == 3
    meter.close()


def test_other_things_are_refused():
    with pytest.raises(TypeError, match="a Meter is of a ReplayBuffer or a ReplayBufferEnsemble, got"):
        Meter(LazyTensorStorage(3))


# ------------------------------------------------------------------ several buffers, ensembles, units, users


def test_writes_through_other_buffers_on_the_storage():
    first = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=2)
    second = TensorDictReplayBuffer(storage=first.storage, batch_size=2)
    meter = Meter(first)
    second.extend(items(range(6)))
    first.sample()
    second.sample()
    second.writer.write_at([0, 3], items([7, 8]))
    numbers = meter.read()
    assert (numbers["written"], numbers["draws"], numbers["overwritten"]) == (8, 2, 2)
    second.empty()
    assert meter.read()["stored"] == 0


@pytest.mark.parametrize("prefetch", [None, 2])
def test_ensembles(prefetch):
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(8)) for _ in range(3)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=12, sample_from_all=True, prefetch=prefetch)
    with Meter(ensemble) as meter, Meter(members[1]) as of_one:
        for member in members:
            member.extend(items(range(10)))
        for _ in range(5):
            ensemble.sample()
        members[1].sample(7)
        numbers = meter.read()
        assert (numbers["batches"], numbers["draws"], numbers["written"], numbers["stored"]) == (16, 67, 30, 24)
        assert numbers["draws_per_stored"] == 67 / 24 and numbers["never_drawn"] == 6
        assert of_one.read()["draws"] == 27
        assert repr(meter) == "Meter(of 3 buffers)"


def test_a_member_that_is_there_twice_counts_once():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    ensemble = ReplayBufferEnsemble(rb, rb, batch_size=6, sample_from_all=True)
    with Meter(ensemble) as meter:
        rb.extend(items(range(5)))
        ensemble.sample()
        numbers = meter.read()
        assert (numbers["batches"], numbers["draws"], numbers["written"], numbers["stored"]) == (2, 6, 5, 5)
        assert meter.draws_of_stored().sum() == 6


def test_sample_units_count_valid_rows():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sample_unit=Sequence(3), batch_size=4)
    meter = Meter(rb)
    rb.extend(items(range(8)).set(("next", "done"), torch.zeros(8, 1, dtype=torch.bool)))
    batch = rb.sample()
    assert meter.read()["draws"] == int(batch["validity_mask"].sum())


class Backwards(Sampler):
    """Returns one array again and again, which counts from the end."""

    def __init__(self):
        self.index = torch.zeros(4, dtype=torch.int64)

    def draw(self, storage, batch_size, key):
        self.index -= 1
        return self.index, {}

    stateless = True


def test_samplers_of_users():
    rb = ReplayBuffer(storage=ListStorage(4), sampler=Backwards(), batch_size=4, collate_fn=list)
    meter = Meter(rb)
    rb.extend([1, 2, 3, 4])
    rb.sample()
    rb.sample()
    numbers = meter.read()
    assert (numbers["draws"], numbers["unknown_draws"], numbers["age_mean"]) == (8, 0, 0.5)


def test_an_index_that_is_changed_before_it_is_counted():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    meter = Meter(rb)
    rb.extend(torch.arange(4))
    _, info = rb.sample(return_info=True)
    info["index"].fill_(1000)
    rb.sample()
    numbers = meter.read()
    assert (numbers["draws"], numbers["unknown_draws"], numbers["draws_per_stored"]) == (6, 3, 0.75)


def test_a_write_that_fails_is_not_counted():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    meter = Meter(rb)
    rb.extend(items(range(3)))

    class Refuses:
        def mark_update(self, index):
            raise ValueError("no")

    refuses = Refuses()
    rb.storage.attach(refuses)
    with pytest.raises(ValueError, match="no"):
        rb.extend(items(range(3)))
    written, stored = meter.read()["written"], len(rb)
    assert written == rb.write_count and stored == meter.read()["stored"]


@pytest.mark.parametrize("prefetch", [None, 2])
def test_only_batches_that_are_returned_count(prefetch):
    history = History(prefetch=2, sampler=RandomSampler())
    history.write(6)
    history.draw()
    history.rb.drop_prefetched()
    assert history.meter.read()["batches"] == 1

    def fail(data):
        if fails:
            raise ValueError("no")
        return data

    rb = ReplayBuffer(storage=ListStorage(4), transform=fail, batch_size=2, collate_fn=list, prefetch=prefetch)
    member = ReplayBuffer(storage=ListStorage(4), batch_size=2, collate_fn=list)
    ensemble = ReplayBufferEnsemble(member, transform=fail, batch_size=2, prefetch=prefetch, collate_fn=list)
    for each in (rb, member):
        each.extend([1, 2])
    for buffer in (rb, ensemble):
        meter = Meter(buffer)
        fails = True
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                buffer.sample()
        assert meter.read()["batches"] == 0 == meter.draws_of_stored().sum()
        fails = False
        while True:
            with contextlib.suppress(ValueError):  # of a batch that was drawn ahead
                buffer.sample()
                break
        assert meter.read()["batches"] == 1 and meter.draws_of_stored().sum() == 2


def _extend(rb):
    rb.extend(items(range(5)))


def test_writes_of_other_processes():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(8), shared=True, batch_size=2)
    rb.extend(items(range(6)))
    meter = Meter(rb)
    forked(partial(_extend, rb))
    rb.sample()
    numbers = meter.read()
    assert (numbers["written"], numbers["draws"], numbers["stored"]) == (5, 2, 8)


# ------------------------------------------------------------------ threads


@pytest.mark.parametrize("prefetch", [None, 2])
def test_threads(prefetch):
    """Draws of each item, of which batches and writes keep a log each, are the draws of the meter."""
    capacity, writes, draws = 5_000, 120, 120
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=32, prefetch=prefetch)
    meter = Meter(rb)
    rb.extend(items(range(100)))
    drawn, numbers = list[torch.Tensor](), list[dict]()

    def write(start):
        for at in range(writes):
            rb.extend(items(range(start + 10 * at, start + 10 * at + 10)))

    def draw():
        for _ in range(draws):
            drawn.append(rb.sample()["serial"])

    def read():
        for _ in range(20):
            numbers.append(meter.read())

    calls = [partial(write, 1_000), partial(write, 10_000), draw, draw, read]
    assert together(*calls) == []
    numbers.append(meter.read())
    assert sum(each["draws"] for each in numbers) == 2 * draws * 32 == numbers[-1]["total_draws"]
    assert sum(each["written"] for each in numbers) == 100 + 2 * writes * 10
    counts = Counter(torch.cat(drawn).tolist())
    assert numbers[-1]["draws_per_stored_max"] == max(counts.values())
    assert numbers[-1]["undrawn_share"] == pytest.approx(1 - len(counts) / len(rb))
    assert sum(each["late_draws"] + each["overwritten"] for each in numbers) == 0


def test_threads_around_a_ring():
    """No row and no draw is lost: those of overwritten rows, of stored ones and late ones are all."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, prefetch=2)
    meter = Meter(rb)
    rb.extend(items(range(10)))

    def write():
        for _ in range(100):
            rb.extend(items(range(7)))

    def draw():
        for _ in range(100):
            rb.sample()

    assert together(write, draw, draw) == []
    numbers = meter.read()
    assert (numbers["draws"], numbers["written"], numbers["overwritten"]) == (1600, 710, 660)
    of_overwritten = numbers["draws_per_overwritten"] * 660
    assert of_overwritten + numbers["draws_per_stored"] * 50 + numbers["late_draws"] == pytest.approx(1600)


# ------------------------------------------------------------------ programs that draw curves


class Curves:
    """Takes numbers as `torch.utils.tensorboard.SummaryWriter`."""

    def __init__(self):
        self.got = {}

    def add_scalar(
        self, tag, scalar_value, global_step=None, walltime=None, new_style=False, double_precision=False
    ) -> None:
        self.got[tag, global_step] = scalar_value


class Run:
    """Takes numbers as `aim.Run`."""

    def track(self, value, name=None, step=None, epoch=None, *, context=None) -> None:
        self.got = value, name, step


def metered():
    rb = ReplayBuffer(storage=ListStorage(5), batch_size=2, collate_fn=list)
    meter = Meter(rb)
    rb.extend([1, 2, 3])
    rb.sample()
    return rb, meter


def test_log():
    rb, meter = metered()
    curves, run = Curves(), Run()
    meter.log(curves, 7)
    assert curves.got["buffer/draws", 7] == 2 and curves.got["buffer/replay_ratio", 7] == pytest.approx(2 / 3)
    rb.sample()
    meter.log(run.track, 8, prefix="")
    value, name, step = run.got
    assert (value["draws"], value["total_draws"], name, step) == (2, 4, None, 8)

    def wandb_log(data, step=None, commit=None, sync=None):
        calls.append((data["buffer/batches"], step))

    def mlflow_log_metrics(metrics, step=None, synchronous=None, run_id=None, timestamp=None):
        calls.append((metrics["buffer/batches"], step))

    def of_anything(numbers, **rest):
        calls.append((numbers["buffer/batches"], rest))

    calls = []
    meter.log(wandb_log, 9)
    meter.log(mlflow_log_metrics, 10)
    meter.log(of_anything, 11)
    meter.log(of_anything)
    meter.log(lambda numbers: calls.append(numbers["buffer/draws"]), 12)
    meter.log({}.update, 13)
    assert calls == [(0, 9), (0, 10), (0, {"step": 11}), (0, {}), 0]


def test_what_takes_no_numbers_is_refused_before_they_are_read():
    _, meter = metered()
    with pytest.raises(TypeError, match=r"or is a function of a dict; got .*Run: pass its method 'track'"):
        meter.log(Run(), 1)
    with pytest.raises(TypeError, match=r"or is a function of a dict; got int$"):
        meter.log(3)
    with pytest.raises(TypeError, match=r"takes a dict and perhaps a step, got one with \(\)"):
        meter.log(lambda: 1)
    with pytest.raises(TypeError, match=r"got one with \(name, number, step\)"):
        meter.log(lambda name, number, step: 1)
    meter.log(lambda numbers, step: numbers, 3)
    assert meter.read()["draws"] == 0 and meter.read()["total_draws"] == 2


def test_numbers_that_a_writer_did_not_take_are_logged_next():
    rb, meter = metered()

    def unreachable(numbers):
        raise ConnectionError("the host is gone")

    for _ in range(2):
        with pytest.raises(ConnectionError):
            meter.log(unreachable)
    rb.sample()
    got = {}
    meter.log(got.update)
    assert (got["buffer/draws"], got["buffer/written"], got["buffer/total_draws"]) == (4, 3, 4)
    assert meter.read()["draws"] == 0


def test_a_summary_writer_of_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, meter = metered()
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        meter.log(writer, 3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("buffer/draws")] == [(3, 2.0)]


def test_hindsight():
    goals = {key: torch.zeros(6, 1) for key in ("desired_goal", "achieved_goal")}
    flags = {"done": torch.zeros(6, 1, dtype=torch.bool), "terminated": torch.zeros(6, 1, dtype=torch.bool)}
    after = {**goals, **flags, "reward": torch.zeros(6, 1)}
    rb = HERReplayBuffer(lambda batch: batch["next", "reward"], storage=LazyTensorStorage(6), batch_size=4)
    meter = Meter(rb)
    rb.extend(TensorDict({**goals, "next": TensorDict(after, [6])}, [6]))
    rb.sample()
    assert meter.read()["draws"] == 4


def test_draws_of_each_stored_item():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    rb.extend(TensorDict({"x": torch.arange(8)}, [8]))
    with Meter(rb) as meter:
        drawn = torch.cat([rb.sample()["index"] for _ in range(20)])
        assert meter.draws_of_stored().tolist() == drawn.bincount(minlength=8).tolist()
        rb.extend(TensorDict({"x": torch.arange(3)}, [3]))
        assert meter.draws_of_stored()[:3].tolist() == [0, 0, 0]
    assert not meter.draws_of_stored().size

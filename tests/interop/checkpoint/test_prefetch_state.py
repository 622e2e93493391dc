"""Batches drawn ahead in a checkpoint: as what they will be made of. They are made again, here as there."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fbuf.checkpoint import CheckpointError
from interop import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from interop.buffers.prefetch import Prefetch
from tests.interop.checkpoint.resuming import same
from tests.interop.checkpoint.saved_trees import damaged, through_json
from tests.interop.pair_history import items
from tests.interop.rows import plain_tensor
from tests.interop.test_without_replacement import flat, ids


class Own(Sampler):
    """Of the user's: it has to be asked, with nothing but its generator to make a difference."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {"drawn": torch.ones(batch_size)}


class Doubled(RandomSampler):
    """One of the library's, of which the user changed how it draws."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        return super().sample(storage, batch_size)


class OwnChoice(SamplerEnsemble):
    def sample(self, storage: Any, batch_size: int) -> Any:
        return super().sample(storage, batch_size)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "prioritized": lambda: PrioritizedSampler(24, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2, strict_length=False),
    "staleness": StalenessAwareSampler,
    "groups": lambda: PromptGroupSampler(2, group_key="episode"),
    "own": Own,
    "doubled": Doubled,
}


def made(sampler: str, seed: int, depth: int | None = 3, rows: int = 24) -> Any:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(24),
        sampler=SAMPLERS[sampler](),
        batch_size=4,
        prefetch=depth,
        generator=torch.Generator().manual_seed(seed),
    )
    if rows:
        buffer.extend(items(np.arange(rows), False))
    return buffer


def drawn(buffer: Any, count: int) -> list[Any]:
    return [buffer.sample().clone() for _ in range(count)]


def settled(buffer: Any) -> None:
    for job in list(buffer._prefetch._queue):
        if job.future is not None:
            job.future.exception(20)


def loaded(buffer: Any, make: Callable[[int], Any], path: Path) -> Any:
    buffer.dumps(path)
    twin = make(99)
    twin.loads(path)
    return twin


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("depth", [1, 4])
def test_what_waits_is_made_of_what_is_stored_at_the_next_call(sampler: str, depth: int, tmp_path: Path) -> None:
    buffer = made(sampler, 0, depth)
    drawn(buffer, 2)
    settled(buffer)
    buffer.set_at_("x", torch.tensor([500]), torch.tensor([3]))  # after the batches that wait were read
    twin = loaded(buffer, lambda seed: made(sampler, seed, depth), tmp_path / "c")
    for each in (buffer, twin):
        each.extend(items(np.arange(100, 103), False))
    assert len(twin._prefetch) == len(buffer._prefetch) > 0
    assert same(drawn(buffer, 9), drawn(twin, 9))


@pytest.mark.parametrize("sampler", ["uniform", "without replacement", "own"])
def test_a_shorter_or_longer_queue_goes_on_with_the_same_batches(sampler: str, tmp_path: Path) -> None:
    buffer = made(sampler, 0)
    drawn(buffer, 2)
    for depth in (1, 6):
        twin = loaded(buffer, lambda seed, depth=depth: made(sampler, seed, depth), tmp_path / "c")
        assert len(twin._prefetch) == 3
        again = made(sampler, 5)
        again.loads(tmp_path / "c")
        assert same(drawn(again, 3), drawn(twin, 3))


@pytest.mark.parametrize("kind", ["without replacement", "in order", "slices without replacement"])
def test_nothing_of_an_epoch_is_lost_where_nothing_is_drawn_ahead(kind: str, tmp_path: Path) -> None:
    buffer = made(kind, 0)
    first = drawn(buffer, 2)
    twin = loaded(buffer, lambda seed: made(kind, seed, None), tmp_path / "c")
    rest = list(twin)
    assert twin.sampler.ran_out
    seen = torch.cat([batch["x"] for batch in (*first, *rest)]).tolist()
    wanted = range(24) if kind != "slices without replacement" else {each // 4 for each in range(24)}
    seen = seen if kind != "slices without replacement" else [each // 4 for each in seen[::2]]
    assert sorted(seen) == sorted(wanted)


def test_batches_of_before_are_dropped_by_loading(tmp_path: Path) -> None:
    for sampler in SAMPLERS:
        buffer = made(sampler, 0)
        drawn(buffer, 2)
        buffer.dumps(tmp_path / "c")
        buffer.empty()
        buffer.extend(items(np.arange(200, 224), False))
        drawn(buffer, 2)
        buffer.loads(tmp_path / "c")
        twin = made(sampler, 3)
        twin.loads(tmp_path / "c")
        seen = drawn(buffer, 6)
        assert all((batch["x"] < 24).all() for batch in seen)
        assert same(seen, drawn(twin, 6))


def test_a_draw_that_was_held_before_loading_does_not_come_back(tmp_path: Path) -> None:
    buffer = made("without replacement", 0)
    buffer.dumps(tmp_path / "c")
    first = drawn(buffer, 1)
    job = buffer._prefetch._queue[0]
    buffer.loads(tmp_path / "c")
    job.take_back()
    job.given()
    again = list(buffer)
    assert sorted(torch.cat([batch["x"] for batch in again]).tolist()) == list(range(24)) and first


@pytest.mark.parametrize("way", ["file", "dict"])
def test_a_sampler_that_is_loaded_by_itself_has_what_was_ahead_remain(way: str, tmp_path: Path) -> None:
    buffer = made("without replacement", 0)
    first = drawn(buffer, 1)
    for each in (buffer, made("without replacement", 0, None)):
        if way == "file":
            buffer.sampler.dumps(tmp_path / "c")
            each.sampler.loads(tmp_path / "c")
        else:
            each.sampler.load_state_dict(buffer.sampler.state_dict())
        seen = torch.cat([batch["x"] for batch in (*first, *each)]).tolist()
        assert sorted(seen) == list(range(24)) and each.sampler.ran_out
        if each is buffer:
            buffer = made("without replacement", 0)
            first = drawn(buffer, 1)


def test_saving_does_not_wait_for_batches_nor_raise_their_errors(tmp_path: Path) -> None:
    buffer, go = made("without replacement", 0), threading.Event()
    drawn(buffer, 1)
    settled(buffer)
    went_on: list[bool] = []

    def stop(data: Any) -> Any:
        if threading.current_thread().name.startswith("replay-prefetch"):
            went_on.append(go.wait(60))
        return data

    buffer.append_transform(stop)
    buffer._prefetch._start(_one_more(buffer), buffer._make)
    buffer.dumps(tmp_path / "c")
    buffer.state_dict()
    assert not went_on
    go.set()


def _one_more(buffer: Any) -> Any:
    job = buffer._ahead(4, buffer._prefetch.epoch)
    buffer._prefetch._queue.append(job)
    return job


@pytest.mark.parametrize("sampler", ["uniform", "without replacement", "own"])
def test_an_error_is_raised_once_and_the_batch_comes_again(sampler: str, tmp_path: Path) -> None:
    def failing(each: Any, *broken: int) -> Any:
        calls = iter(range(1, 1000))

        def fail(data: Any) -> Any:
            if threading.current_thread().name.startswith("replay-prefetch") and next(calls) in broken:
                raise ArithmeticError
            return data

        each.append_transform(fail)
        return each

    calm, other = failing(made(sampler, 0, 1)), failing(made(sampler, 0, 1), 2)
    expected, seen, errors = drawn(calm, 6), [], 0
    while len(seen) < 6:
        try:
            seen.append(other.sample())
        except ArithmeticError:
            errors += 1
            other.dumps(tmp_path / "c")  # while the batch that failed waits
    assert errors == 1 and same(expected, seen)


def test_a_batch_that_somebody_waits_for_is_saved_too(tmp_path: Path) -> None:
    buffer, go = made("without replacement", 0, 2), threading.Event()
    drawn(buffer, 1)
    settled(buffer)
    buffer._prefetch.redraw()

    def stop(data: Any) -> Any:
        if threading.current_thread().name.startswith("replay-prefetch"):
            assert go.wait(20)
        return data

    buffer._transform.append(stop)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(buffer.sample()))
    waiting.start()
    while not buffer._prefetch._taking:
        time.sleep(0.001)
    twin = loaded(buffer, lambda seed: made("without replacement", seed, 2), tmp_path / "c")
    go.set()
    waiting.join(20)
    assert same(twin.sample()["x"], got[0]["x"])
    assert same([each["x"] for each in drawn(twin, 3)], [each["x"] for each in drawn(buffer, 3)])


def test_damage_is_found() -> None:
    for sampler in ("uniform", "slices without replacement"):
        buffer = made(sampler, 0)
        drawn(buffer, 2)
        saved = through_json(buffer._prefetch._saved())
        for where, changed in damaged(saved):
            try:
                buffer._prefetch._restoring(changed, members=[buffer])
            except CheckpointError:
                continue
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        assert repr(buffer._prefetch._saved()) == repr(saved) or len(buffer._prefetch) == 3


def test_what_cannot_be_drawn_is_not_taken_over() -> None:
    buffer = made("without replacement", 0)
    drawn(buffer, 2)
    saved = through_json(buffer._prefetch._saved())
    saved["waiting"][1]["drawn"]["slots"] = np.array([3, 24])
    buffer.sampler._restoring(through_json(buffer.sampler._saved()))()
    buffer._prefetch._restoring(saved, members=[buffer])()
    assert len(buffer._prefetch) == 2
    assert Prefetch(2)._saved() == {"waiting": []}


# ------------------------------------------------------------------ samplers of the user's and ensembles


@pytest.mark.parametrize("sampler", ["own", "doubled"])
def test_when_a_thread_draws_makes_no_difference(sampler: str) -> None:
    seen = []
    for delay in (0.0, 0.01):
        buffer = made(sampler, 0)
        buffer.append_transform(lambda data, delay=delay: time.sleep(delay * np.random.rand()) or data)
        seen.append(drawn(buffer, 12))
        settled(buffer)
        assert buffer.sampler._rng is buffer._rng
    assert same(*seen)


def ensemble(seed: int, depth: int | None = 3, choice: Any = SamplerEnsemble) -> Any:
    held = SamplerWithoutReplacement() if choice is SamplerEnsemble else RandomSampler()
    kinds = [RandomSampler(), held, PrioritizedSampler(24, 0.7, 0.5), Own()]
    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(24), sampler=kind, batch_size=2, prefetch=place or None)
        for place, kind in enumerate(kinds)
    ]
    whole = ReplayBufferEnsemble(
        *members, batch_size=12, prefetch=depth, num_buffer_sampled=6, generator=torch.Generator().manual_seed(seed)
    )
    if choice is not SamplerEnsemble:
        whole._sampler.__class__ = choice
    for place, member in enumerate(members):
        member.extend(items(np.arange(16 + 2 * place), False).select("x", "obs"))
    return whole


@pytest.mark.parametrize("choice", [SamplerEnsemble, OwnChoice])
def test_an_ensemble_draws_the_same_ahead_whenever_threads_run(choice: Any) -> None:
    seen = []
    for delay in (0.0, 0.01):
        whole = ensemble(0, choice=choice)
        whole.append_transform(lambda data, delay=delay: time.sleep(delay * np.random.rand()) or data)
        seen.append([whole.sample().clone() for _ in range(8)])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one["x"], other["x"]) and torch.equal(one["index", "index"], other["index", "index"])


def test_an_epoch_of_a_member_is_exact_though_ensembles_draw_ahead_of_it() -> None:
    whole = ensemble(0)
    member = whole[1]
    seen = [member.sample()["x"] for _ in range(2)]
    batches = [whole.sample() for _ in range(3)]
    for batch in batches:
        seen += [row["x"] for row in batch.unbind(0) if row["index", "buffer_ids"][0] == 1]
    whole.append_transform(lambda data: data)  # what is ahead is dropped
    while not member.sampler.ran_out:
        seen.append(member.sample()["x"])
    count = torch.bincount(torch.cat(seen), minlength=18)
    assert count.max() - count.min() <= 1


def test_members_that_draw_ahead_keep_their_generators() -> None:
    for _ in range(12):
        whole = ensemble(0, choice=OwnChoice)
        for _ in range(15):
            whole.sample()
            whole[3].sample()
        for buffer in (whole, whole[1], whole[2], whole[3]):
            settled(buffer)
        assert all(whole[place].sampler._rng is whole[place]._rng for place in range(4))


@pytest.mark.parametrize("choice", [SamplerEnsemble, OwnChoice])
def test_an_ensemble_goes_on_with_what_it_had_drawn_ahead(choice: Any, tmp_path: Path) -> None:
    whole = ensemble(0, choice=choice)
    [whole.sample() for _ in range(2)]
    [whole[1].sample(), whole[3].sample()]
    whole.dumps(tmp_path / "c")
    twin = ensemble(7, choice=choice)
    twin.loads(tmp_path / "c")
    for _ in range(6):
        one, other = whole.sample(), twin.sample()
        assert torch.equal(one["x"], other["x"]) and torch.equal(one["index", "index"], other["index", "index"])
    for place in (1, 2, 3):
        assert same(drawn(whole[place], 5), drawn(twin[place], 5))


def test_what_an_ensemble_chooses_by_is_saved(tmp_path: Path) -> None:
    def make(**choice: Any) -> Any:
        members = [ReplayBuffer(storage=ListStorage(4), batch_size=2) for _ in range(3)]
        for member in members:
            member.extend([torch.tensor(each) for each in range(3)])
        return ReplayBufferEnsemble(*members, batch_size=4, generator=torch.Generator().manual_seed(0), **choice)

    one = make(p=[1, 0, 3], num_buffer_sampled=2)
    one.sample()
    one.dumps(tmp_path / "c")
    other = make(num_buffer_sampled=4)
    with pytest.warns(UserWarning, match=r"p=\[0.25, 0.0, 0.75\] instead of None, num_buffer_sampled=2 instead of 4"):
        other.loads(tmp_path / "c")
    assert torch.equal(other.sampler.p, torch.tensor([0.25, 0.0, 0.75]))
    assert [other.sample().tolist() for _ in range(5)] == [one.sample().tolist() for _ in range(5)]


def test_epochs_are_exact_across_many_checkpoints(tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        return ReplayBuffer(
            storage=LazyTensorStorage(23),
            sampler=SamplerWithoutReplacement(),
            batch_size=3,
            prefetch=2,
            generator=torch.Generator().manual_seed(seed),
        )

    buffer = make(0)
    buffer.extend(plain_tensor(list(range(23))))
    for turn in range(3):
        seen: list[Any] = []
        while not (seen and buffer.sampler.ran_out):
            seen.append(ids(buffer.sample()))
            buffer = loaded(buffer, make, tmp_path / f"c{turn}")
        assert sorted(flat(seen)) == list(range(23))

"""Everything that joins the rows of a batch joins those of one episode: against streams whose episodes are known."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyFrameStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from interop.postprocs import DensifyReward, MultiStep, split_trajectories
from interop.sample_units import Sequence
from interop.transforms import CatFrames, MultiStepTransform, Reward2GoTransform, RewardSum
from tests.interop import streams
from tests.interop.streams import COMBINATIONS, MARKS, Layout, Stream

GAMMA = 0.5  # powers of it are exact in float32
STREAMS = [(2, 18)]  # seeds, and the steps of each environment; T1 has many more
LONGER = 30
both = pytest.mark.parametrize(("layout", "marks"), COMBINATIONS, ids=lambda each: str(each).replace(" ", "-"))


def made(layout: Layout, marks: str, **how: Any) -> Iterator[Stream]:
    for seed, steps in STREAMS:
        yield streams.make(layout, MARKS[marks], seed, envs=1 + seed % 4, steps=steps, **{"longest": 7, **how})


def episodes(stream: Stream) -> Iterator[list[int]]:
    """The rows of each episode; the runs of padding are episodes too."""
    found: dict[int, list[int]] = {}
    for place, number in enumerate(stream.episode.reshape(-1).tolist()):
        found.setdefault(number, []).append(place)
    yield from found.values()


def n_step(stream: Stream, n: int) -> dict[int, tuple[float, int, float]]:
    """By "obs" of a step: the return, the number of steps, and the next observation."""
    reward, obs = (stream.data[key].reshape(-1).tolist() for key in (("next", "reward"), "obs"))
    after = stream.data["next", "obs"].reshape(-1).tolist()
    found = {}
    for rows in episodes(stream):
        for first in range(len(rows)):
            window = rows[first : first + n]
            total = sum(GAMMA**i * reward[row] for i, row in enumerate(window))
            found[int(obs[rows[first]])] = (total, len(window), after[window[-1]])
    return found


def transitions(data: TensorDict) -> list[tuple[int, tuple[float, int, float]]]:
    """The same of transitions, in their order."""
    flat = data.reshape(-1)
    assert torch.equal(flat["gamma"].double(), GAMMA ** flat["steps_to_next_obs"].double())
    values = (flat["next", "reward"], flat["steps_to_next_obs"], flat["next", "obs"])
    columns = [value.reshape(-1).tolist() for value in values]
    return list(zip(map(int, flat["obs"].reshape(-1).tolist()), zip(*columns, strict=True), strict=True))


@both
@pytest.mark.parametrize("n", [1, 3])
def test_n_step_returns_of_rollouts(layout: Layout, marks: str, n: int) -> None:
    for stream in made(layout, marks):
        found = MultiStep(GAMMA, n, last_flags=True)(stream.data)
        assert torch.equal(found["obs"], stream.data["obs"])
        assert dict(transitions(found)) == n_step(stream, n)
        padding = torch.from_numpy(stream.padding)
        assert torch.equal(found["nonterminal"], (found["steps_to_next_obs"] > 1) & ~padding)
        flag = next((name for name in ("terminated", "done") if ("next", name) in found.keys(True)), None)
        if flag:  # the flag of the last step taken
            flags = stream.data["next", flag].reshape(-1).tolist()
            by_obs = dict(zip(stream.data["next", "obs"].reshape(-1).tolist(), flags, strict=True))
            wanted = [by_obs[each] for each in found["next", "obs"].reshape(-1).tolist()]
            assert found["next", flag].reshape(-1).tolist() == wanted


@both
@pytest.mark.parametrize("n", [1, 3])
def test_n_step_returns_of_a_stream_in_pieces(layout: Layout, marks: str, n: int) -> None:
    for stream in made(layout, marks):
        wanted, orders = n_step(stream, n), []
        for largest in (1, 7, 10**9):
            transform, parts, count, stored = MultiStepTransform(n, GAMMA), list[TensorDict](), 0, 0
            for piece in stream.pieces(largest, largest):
                count += piece.episode.shape[-1]
                if (part := transform.inv(piece.data)) is not None:
                    parts.append(part)
                    stored += part.shape[-1]
                if MARKS[marks].ids is None:
                    assert stored == max(0, count - n)
                elif layout != "steps":
                    assert stored <= max(0, count - n)
            if (rest := transform.flush()) is not None:
                parts.append(rest)
            assert transform.flush() is None
            orders.append(transitions(torch.cat(parts, -1)))
            assert len(orders[-1]) == len(wanted) and dict(orders[-1]) == wanted
            if stream.data.ndim == 1:
                assert orders[-1] == orders[0]  # in one order, however the stream is cut


@pytest.mark.parametrize(
    ("layout", "marks", "seed"),
    [("steps", "everything", 112), ("episodes", "ids and ends", 121), ("episodes", "everything", 362)],
)
def test_transitions_in_one_order_where_a_later_episode_is_complete_first(
    layout: Layout, marks: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag ends the one step of an episode before it is known that the one before has ended, too."""
    monkeypatch.setattr("tests.interop.test_one_rule.STREAMS", [(seed, LONGER)])
    for n in (1, 2, 4):
        test_n_step_returns_of_a_stream_in_pieces(layout, marks, n)


@pytest.mark.parametrize("marks", [name for layout, name in COMBINATIONS if layout == "steps"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_frame_of_an_interleaved_stream_is_stored_once_it_is_complete(marks: str, n: int) -> None:
    """Known are its n steps, or a flag of the end. From the second step of all environments on they are interleaved."""
    for stream in made("steps", marks, longest=6):
        if stream.data.numel() in (steps for _, steps in STREAMS):  # one environment
            continue
        transform, stored = MultiStepTransform(n, GAMMA), set[int]()
        ends = [stream.data[("next", name)].reshape(-1) for name in MARKS[marks].ends]
        ended = torch.stack(ends).any(0).tolist() if ends else [False] * len(stream.episode)
        later = [-1, *(stream.step > 0).nonzero()[0].tolist(), len(stream.step)]
        without_a_second_step = max(b - a for a, b in itertools.pairwise(later)) - 1
        is_interleaved = False
        for count in range(1, len(stream.episode) + 1):
            part = transform.inv(stream.rows(count - 1, count).data)
            stored |= set() if part is None else {int(each) for each in part["obs"].flatten()}
            rows = [some for each in episodes(stream) if (some := [row for row in each if row < count])]
            is_interleaved |= any(b - a > 1 for each in rows for a, b in itertools.pairwise(each))
            if not is_interleaved:
                continue
            complete = {
                int(stream.data["obs"][row])
                for each in rows
                for place, row in enumerate(each)
                if len(each) - place >= n or ended[each[-1]]
            }
            assert complete <= stored
            # Of 4 environments, and of episodes that have just been cut. Without flags an id that comes again says that.
            assert count - len(stored) <= 8 * n + (0 if ends else without_a_second_step)


@both
def test_trajectories_as_rows(layout: Layout, marks: str) -> None:
    for stream in made(layout, marks):
        wanted = [[int(stream.data["obs"].reshape(-1)[row]) for row in rows] for rows in stream.places().values()]
        found = split_trajectories(stream.data)
        mask = found["collector", "mask"] if MARKS[marks].ids == ("collector", "traj_ids") else found["mask"]
        assert [row["obs"][kept].flatten().int().tolist() for row, kept in zip(found, mask, strict=True)] == wanted
        nested = split_trajectories(stream.data, as_nested=True)
        assert [each.flatten().int().tolist() for each in nested["obs"].unbind(0)] == wanted


@both
def test_returns_to_go_and_sums(layout: Layout, marks: str) -> None:
    for stream in made(layout, marks):
        reward = stream.data["next", "reward"].reshape(-1).tolist()
        to_go, so_far = [0.0] * len(reward), [0.0] * len(reward)
        for rows in episodes(stream):
            for place, row in enumerate(rows):
                to_go[row] = sum(GAMMA**i * reward[each] for i, each in enumerate(rows[place:]))
                so_far[row] = sum(reward[each] for each in rows[: place + 1])
        for found in (Reward2GoTransform(GAMMA).inv(stream.data), _densified(stream)):
            torch.testing.assert_close(found["next", "reward"].reshape(-1), torch.tensor(to_go), rtol=1e-6, atol=1e-6)
        time = stream.data.ndim - 1
        found = RewardSum([("next", "reward")], time_dim=time)(stream.data.copy())
        assert found["next", "episode_reward"].reshape(-1).tolist() == so_far


def _densified(stream: Stream) -> TensorDict:
    data = stream.data.copy()
    if "done" not in MARKS[stream_marks(data)].ends:
        data["next", "done"] = torch.zeros_like(data["next", "reward"], dtype=torch.bool)
    return DensifyReward(discount=GAMMA)(data)


def stream_marks(data: TensorDict) -> str:
    return "ends" if ("next", "done") in data.keys(True) else "ids"


def stacks(stream: Stream, count: int) -> list[list[int]]:
    """The stack of the newest `count` observations of each row."""
    obs = stream.data["obs"].reshape(-1).int().tolist()
    found = [list[int]()] * len(obs)
    for rows in episodes(stream):
        for place, row in enumerate(rows):
            window = [obs[each] for each in rows[: place + 1]]
            found[row] = ([window[0]] * count + window)[-count:]
    return found


@both
def test_stacks_of_frames(layout: Layout, marks: str) -> None:
    for stream in made(layout, marks):
        found = CatFrames(3, -1, ["obs", ("next", "obs")], ["s", ("next", "s")])(stream.data.copy())
        wanted = stacks(stream, 3)
        assert found["s"].reshape(-1, 3).int().tolist() == wanted
        after = [[*stack[1:], stack[-1] + 1] for stack in wanted]  # observations count on
        assert found["next", "s"].reshape(-1, 3).int().tolist() == after
        turned = stream.data.reshape(stream.data.batch_size).copy()
        if turned.ndim == 2:
            turned = turned.transpose(0, 1)
            turned.names = ["time", None]
            again = CatFrames(3, -1, ["obs"], ["s"])(turned)
            assert torch.equal(again["s"].transpose(0, 1), found["s"])


@both
@pytest.mark.parametrize("truncated_key", [("next", "truncated"), None])
def test_stacks_and_sums_of_slices_that_a_buffer_draws(layout: Layout, marks: str, truncated_key: Any) -> None:
    """The steps of a slice follow each other, also where the rows of other environments are stored in between."""
    for stream in made(layout, marks):
        for options in ({}, {"strict_length": False}, {"strict_length": False, "pad_output": True}):
            sampler = SliceSampler(slice_len=4, truncated_key=truncated_key, **options)
            rb = TensorDictReplayBuffer(
                storage=LazyTensorStorage(stream.episode.size, ndim=stream.data.ndim),
                sampler=sampler,
                transform=CatFrames(3, -1, ["obs"], ["s"]),
                batch_size=80,
            )
            rb.append_transform(RewardSum([("next", "reward")], time_dim=0))
            for piece in stream.pieces(1, 9):
                rb.extend(piece.data)
            found = rb.sample()
            mask = found.get(("collector", "mask"), torch.ones(len(found), dtype=torch.bool))
            lengths = sampler.draws.slice_lengths().tolist()
            for drawn, kept in zip(found.split(lengths), mask.split(lengths), strict=True):
                if not kept.any():
                    continue  # padding that was stored
                one = drawn[kept]
                obs = one["obs"].flatten().int().tolist()
                assert obs == list(range(obs[0], obs[0] + len(obs)))
                assert one["s"].int().tolist() == [([obs[0]] * 3 + obs[: place + 1])[-3:] for place in range(len(obs))]
                assert torch.equal(one["next", "episode_reward"], one["next", "reward"].cumsum(0))


def stacked(stream: Stream, count: int) -> TensorDict:
    """The stream with stacks of `count` frames as observations."""
    data, shape = stream.data.clone(), stream.data.batch_size
    before = torch.tensor(stacks(stream, count), dtype=torch.float32).reshape(*shape, count)
    data["obs"] = before
    data["next", "obs"] = torch.cat([before[..., 1:], before[..., -1:] + 1], -1)
    return data


@both
def test_frames_that_are_stored_once(layout: Layout, marks: str) -> None:
    for stream, count in itertools.product(made(layout, marks), (1, 3)):
        data, ndim = stacked(stream, count), stream.data.ndim
        storage = LazyFrameStorage(stream.episode.size // 2, obs_key="obs", stack=count, stack_dim=-1, ndim=ndim)
        half = LazyTensorStorage(stream.episode.size // 2, ndim=ndim)
        rb, whole = ReplayBuffer(storage=storage), ReplayBuffer(storage=half)
        pieces, first = [piece.data.batch_size[-1] for piece in stream.pieces(3, 6)], 0
        apart = any(b - a > 1 for rows in episodes(stream) for a, b in itertools.pairwise(rows))
        is_interleaved = layout == "steps" and apart
        refused = pytest.raises(ValueError, match="with rows of others in between")
        with refused if is_interleaved and count > 1 else nullcontext():
            for length in pieces:
                rb.extend(data[..., first : first + length])
                whole.extend(data[..., first : first + length])
                first += length
            assert (rb[:] == whole[:]).all()


@pytest.mark.parametrize("marks", ["everything", "ids", "lanes and done"])
def test_stacks_of_windows_of_interleaved_rows(marks: str) -> None:
    for stream in made("steps", marks):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(len(stream.episode)),
            sample_unit=Sequence(3),
            transform=CatFrames(3, -1, ["obs"], ["s"]),
            batch_size=30,
        )
        rb.extend(stream.data)
        found = rb.sample()
        first = found["obs"].reshape(-1, 3)[:, :1].repeat_interleave(3, 0)
        wanted = torch.maximum(found["obs"] + torch.arange(-2, 1), first)
        valid = found["validity_mask"]
        assert valid.any() and torch.equal(found["s"][valid], wanted[valid])


FEW = [
    ("steps", "ids and ends"),
    ("steps", "ids"),
    ("episodes", "everything"),
    ("lanes", "everything"),
    ("lanes", "done"),
]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize(("layout", "marks"), FEW, ids=str)
def test_buffers_of_transitions(layout: Layout, marks: str, storage: Any, tmp_path: Any) -> None:
    """Through buffers, saved in the middle, with writes that fail."""
    stream = streams.make(layout, MARKS[marks], seed=4, steps=20)
    ndim, wanted = stream.data.ndim, n_step(stream, 3)
    if ndim > 1 and storage is ListStorage:
        pytest.skip("lists have one dim of items")

    def fresh() -> ReplayBuffer:
        of = {"ndim": ndim} if ndim > 1 else {}
        collate = torch.stack if storage is ListStorage else None
        transform = MultiStepTransform(3, GAMMA)
        return ReplayBuffer(storage=storage(stream.episode.size, **of), transform=transform, collate_fn=collate)

    pieces = list(stream.pieces(5, 6))
    for saved in (len(pieces) // 2, len(pieces) - 1):
        rb = fresh()
        for place, piece in enumerate(pieces):
            rb.extend(piece.data)
            with pytest.raises(KeyError, match="reward"):
                rb.extend(piece.data.exclude(("next", "reward")))
            if place == saved and len(rb):
                rb.dumps(tmp_path / str(saved))
                rb = fresh()
                rb.loads(tmp_path / str(saved))
        rest = rb.transform[0].flush()
        found = [*([transitions(rb[:])] if len(rb) else []), *([] if rest is None else [transitions(rest)])]
        together = list(itertools.chain(*found))
        assert len(together) == len(wanted) and dict(together) == wanted


def check_batches(layout: Layout, marks: str, seed: int) -> None:
    """One stream through everything that joins rows of a batch."""
    before, STREAMS[:] = list(STREAMS), [(seed, LONGER)]
    try:
        for n in (1, 2, 4):
            test_n_step_returns_of_rollouts(layout, marks, n)
            test_n_step_returns_of_a_stream_in_pieces(layout, marks, n)
            if layout == "steps":
                test_a_frame_of_an_interleaved_stream_is_stored_once_it_is_complete(marks, n)
        test_trajectories_as_rows(layout, marks)
        test_returns_to_go_and_sums(layout, marks)
        test_stacks_of_frames(layout, marks)
        test_frames_that_are_stored_once(layout, marks)
        for key in (("next", "truncated"), None):
            test_stacks_and_sums_of_slices_that_a_buffer_draws(layout, marks, key)
    finally:
        STREAMS[:] = before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 8))
@both
def test_more_streams(layout: Layout, marks: str, seed: int) -> None:
    check_batches(layout, marks, seed)

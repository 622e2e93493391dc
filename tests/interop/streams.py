"""Streams of vectorized environments whose episodes are known because they were made so, in every layout of rows.

The episodes are made first, and marked afterwards: by flags of ends, ids that change, or flags of first rows. Nothing here
uses the library's rule of which row continues which, so a consumer can be compared with `Stream.episode`.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

Layout = Literal["steps", "episodes", "lanes"]

LAYOUTS: tuple[Layout, ...] = ("steps", "episodes", "lanes")
"""How rows lie: [time * envs] with one row of each environment in turn; [rows] one episode after the other;
[envs, time]."""

MOST_STEPS = 1000  # of an episode: `obs` is episode * MOST_STEPS + step


@dataclasses.dataclass(frozen=True)
class Marks:
    """The entries of a stream that say where episodes begin and end.

    Attributes:
        ids: the key of ids, one a row; None for none.
        ids_are: "counted" for a number of its own for each episode, from 0 again when the collector starts anew; "lanes" for
            the number of the environment, which stays when an episode ends.
        ends: which flags there are under "next".
        firsts: whether there is "is_init".
        mask: whether there is ("collector", "mask"), with rows of padding behind some episodes. Not in "steps".
    """

    ids: Any = ("collector", "traj_ids")
    ids_are: Literal["counted", "lanes"] = "counted"
    ends: tuple[str, ...] = ("done", "terminated", "truncated")
    firsts: bool = False
    mask: bool = False


MARKS: dict[str, Marks] = {
    "everything": Marks(firsts=True),
    "padding": Marks(firsts=True, mask=True),
    "ids and ends": Marks(),
    "ids": Marks(ends=()),
    "ids and first rows": Marks(ends=(), firsts=True),
    "lanes and done": Marks(ids_are="lanes", ends=("done",)),
    "lanes and first rows": Marks(ids_are="lanes", ends=(), firsts=True),
    "ids at the root": Marks(ids=("traj_ids",), ends=("done", "truncated")),
    "episode numbers": Marks(ids=("episode",), ends=("terminated", "truncated")),
    "done": Marks(ids=None, ends=("done",)),
    "ends": Marks(ids=None),
    "terminated and truncated": Marks(ids=None, ends=("terminated", "truncated")),
    "first rows": Marks(ids=None, ends=(), firsts=True),
}
"""Combinations by name. Rows of several environments in turn ("steps") need ids: see `fits`."""


def fits(layout: Layout, marks: Marks) -> bool:
    """Whether rows in this layout can tell their episodes with these marks."""
    return layout != "steps" or (marks.ids is not None and not marks.mask)


COMBINATIONS = [(layout, name) for layout in LAYOUTS for name, marks in MARKS.items() if fits(layout, marks)]
"""All pairs of a layout and a name of marks that fit."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """Rows, and the truth about them.

    Attributes:
        data: [rows], or [envs, time] named so. The entries, besides the marks: "obs" and ("next", "obs"), float32 [..., 1],
            episode * MOST_STEPS + step, the latter of one step more; ("next", "reward"), float32 [..., 1], small whole
            numbers; "action", int64.
        episode: int64 of the batch size: the episode of each row; every run of padding is one of its own.
        step: int64 of the batch size: which step of the episode it is.
        padding: bool of the batch size.
        ended: the episodes whose last row has a flag of an end.
    """

    data: TensorDict
    episode: np.ndarray
    step: np.ndarray
    padding: np.ndarray
    ended: frozenset[int]

    def rows(self, first: int, stop: int) -> "Stream":
        """The rows from `first` to `stop` - 1 in time, the last dim."""
        part = (..., slice(first, stop))
        return Stream(self.data[part].clone(), self.episode[part], self.step[part], self.padding[part], self.ended)

    def pieces(self, seed: int = 0, largest: int = 7) -> Iterator["Stream"]:
        """The same rows in pieces of 1 to `largest` rows in time, of random sizes."""
        random, count, first = np.random.default_rng(seed), self.episode.shape[-1], 0
        while first < count:
            stop = min(first + int(random.integers(1, largest + 1)), count)
            yield self.rows(first, stop)
            first = stop

    def items(self) -> list[TensorDict]:
        """The rows of a flat stream as a list of items."""
        assert self.episode.ndim == 1
        return list(self.data.unbind(0))

    def places(self) -> dict[int, list[int]]:
        """The rows of each episode in the order of its steps, by their places in the flat batch; without padding."""
        found: dict[int, list[int]] = {}
        for place, (episode, padding) in enumerate(zip(self.episode.flat, self.padding.flat, strict=True)):
            if not padding:
                found.setdefault(int(episode), []).append(place)
        for rows in found.values():
            steps = self.step.flat[rows]
            assert np.array_equal(steps, np.arange(len(rows)) + steps[0])
        return found


def true_episode(obs: Any) -> np.ndarray:
    """The episodes that values of "obs" are of."""
    return np.asarray(obs).astype(np.int64) // MOST_STEPS


def true_step(obs: Any) -> np.ndarray:
    """The steps that values of "obs" are of."""
    return np.asarray(obs).astype(np.int64) % MOST_STEPS


@dataclasses.dataclass
class _Row:
    """A row of one environment."""

    episode: int
    step: int
    id: int
    done: bool = False
    terminated: bool = False
    truncated: bool = False
    first: bool = False
    padding: bool = False

    @property
    def ends(self) -> bool:
        return self.done or self.terminated or self.truncated


def make(
    layout: Layout, marks: Marks, seed: int = 0, envs: int = 3, steps: int = 40, longest: int = 9, runs: int = 3
) -> Stream:
    """A stream of `envs` environments over `steps` steps of time.

    Episodes have random lengths up to `longest`. They end terminated, by a time-out (of which some do not set "done"), or
    without any flag. The collector starts anew `runs` - 1 times: all episodes are cut, most without a flag, and ids begin at
    0 again. Where neither flags nor ids tell that an episode is another one, a flag of those that there are, or else a new
    id, is added.
    """
    random = np.random.default_rng(seed)
    lanes = _episodes(random, marks, envs, steps, longest, runs)
    order = _in_order(layout, lanes)
    for group in order:
        _mark(group, marks)
    shape = (envs, steps) if layout == "lanes" else (sum(map(len, order)),)
    rows = [row for group in order for row in group]
    return _stream(rows, shape, marks, random)


def _episodes(
    random: np.random.Generator, marks: Marks, envs: int, steps: int, longest: int, runs: int
) -> list[list[_Row]]:
    """The rows of each environment."""
    restarts = set(random.choice(np.arange(2, steps - 1), runs - 1, replace=False).tolist())
    numbers = itertools.count()
    lanes: list[list[_Row]] = [[] for _ in range(envs)]
    left = [0] * envs  # rows of the episode still to come
    padding = [0] * envs
    next_id = 0
    for time in range(steps):
        if time in restarts:
            left, padding, next_id = [0] * envs, [0] * envs, 0
        for env, lane in enumerate(lanes):
            if padding[env]:  # the same row again
                before = lane[-1]
                number = before.episode if before.padding else next(numbers)
                lane.append(_Row(number, before.step + 1 if before.padding else 0, before.id, padding=True))
                padding[env] -= 1
                continue
            if not left[env]:
                left[env] = int(random.integers(1, longest + 1))
                lane.append(_Row(next(numbers), 0, env if marks.ids_are == "lanes" else next_id, first=True))
                next_id += 1
            else:
                before = lane[-1]
                lane.append(_Row(before.episode, before.step + 1, before.id))
            left[env] -= 1
            if left[env]:
                continue
            row = lane[-1]
            kind = random.choice(["terminated", "time-out", "time-out without done", "nothing"])
            row.terminated, row.truncated = kind == "terminated", kind.startswith("time-out")
            row.done = kind in ("terminated", "time-out")
            if marks.mask:
                padding[env] = int(random.integers(0, 4))
    for lane in lanes:
        for row in lane:  # without the entries that there are not
            row.done &= "done" in marks.ends
            row.terminated &= "terminated" in marks.ends
            row.truncated &= "truncated" in marks.ends
    return lanes


def _in_order(layout: Layout, lanes: list[list[_Row]]) -> list[list[_Row]]:
    """The rows in groups within which they are in one dim, in the order of writing."""
    if layout == "lanes":
        return lanes
    if layout == "steps":
        return [[row for time in zip(*lanes, strict=True) for row in time]]
    by_episode: dict[int, list[_Row]] = {}
    for lane in lanes:
        for row in lane:
            by_episode.setdefault(row.episode, []).append(row)
    return [[row for number in sorted(by_episode) for row in by_episode[number]]]


def _mark(rows: list[_Row], marks: Marks) -> None:
    """Add flags or new ids where the rows of one dim do not tell their episodes."""
    fresh = itertools.count(1000)
    renamed: dict[int, int] = {}
    for place, row in enumerate(rows):
        row.id = renamed.get(row.episode, row.id)
        if row.step or (row.padding and marks.mask):
            continue
        others = _may_be_continued(rows, place, marks)
        if not others or (marks.firsts and row.first):
            continue
        if marks.ids is not None and marks.ids_are == "counted" and not marks.ends:
            row.id = renamed[row.episode] = next(fresh)
            continue
        assert marks.ends, "a stream needs a mark for each end"
        for other in others:
            rows[other].done, rows[other].truncated = "done" in marks.ends, "truncated" in marks.ends
    for row in rows:
        row.first &= marks.firsts


def _may_be_continued(rows: list[_Row], place: int, marks: Marks) -> list[int]:
    """The earlier rows of other episodes that the row at a place could be taken to continue.

    Without ids that is the row before it. With ids it is the last row with its id, unless that has ended, or another episode
    had two rows since.
    """
    row = rows[place]
    if not place:
        return []
    if marks.ids is None:
        before = place - 1
    else:
        earlier = [at for at in range(place) if rows[at].id == row.id]
        if not earlier:
            return []
        before = earlier[-1]
        between = [other.episode for other in rows[before + 1 : place]]
        if len(set(between)) < len(between):
            return []
    other = rows[before]
    return [] if other.ends or (marks.mask and other.padding != row.padding) else [before]


def _stream(rows: list[_Row], shape: tuple[int, ...], marks: Marks, random: np.random.Generator) -> Stream:
    """The rows as a tensordict."""

    def column(name: str, dtype: torch.dtype, *item: int) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows]).to(dtype).reshape(*shape, *item)

    episode, step = column("episode", torch.int64), column("step", torch.int64)
    assert int(step.max()) < MOST_STEPS - 1
    obs = (episode * MOST_STEPS + step).float().unsqueeze(-1)
    reward = torch.from_numpy(random.integers(1, 50, (*shape, 1))).float()
    data = TensorDict(
        {
            "obs": obs,
            "action": torch.from_numpy(random.integers(0, 9, shape)),
            "next": TensorDict({"obs": obs + 1, "reward": reward}, shape),
        },
        shape,
    )
    for name in marks.ends:
        data["next", name] = column(name, torch.bool, 1)
    if marks.ids is not None:
        data[marks.ids] = column("id", torch.int64)
    if marks.firsts:
        data["is_init"] = column("first", torch.bool, 1)
    if marks.mask:
        data["collector", "mask"] = ~column("padding", torch.bool)
    ended = frozenset(row.episode for row in rows if row.ends)
    padding = column("padding", torch.bool).numpy()
    if len(shape) > 1:
        data.names = [None, "time"]
    return Stream(data, episode.numpy(), step.numpy(), padding, ended)

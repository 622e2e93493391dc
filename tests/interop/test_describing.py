"""Descriptions of buffers against a NumPy model, in tables, HTML and flat numbers."""

import html.parser
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import fbuf
from fbuf.looking import Description, Quantiles
from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
    from_fbuf,
)
from interop.specs import Bounded, Categorical, Composite
from tests.interop.pair_history import LAYOUTS, PRIORITIZED, ROWS, SAMPLERS, Cell, History, _episodes, items
from tests.interop.peaks import LIMITED, bounded


class Balance(html.parser.HTMLParser):
    """Checks that all tags are closed in order, and collects the text and the names of tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(thing: Any) -> str:
    """The text of the page of an object, which has no tags but those of tables."""
    found = Balance(thing._repr_html_())
    assert found.seen <= {"div", "style", "h3", "h4", "table", "tr", "th", "td", "p"}
    return " ".join(found.words)


# ------------------------------------------------------------------ the model


def check(history: History, rows: int | None = None) -> Description:
    """The description of the buffer of a history has the numbers of its model."""
    buffer, lanes, filled = history.buffer, history.lanes, history.filled
    found = buffer.describe(rows)
    held = history.held[:filled]
    assert found.facts["items stored"] == filled * lanes
    looked_at = held if rows is None or rows >= filled else held[np.arange(rows) * filled // rows]
    expected = items(looked_at, history.cell.storage == "LazyFrameStorage")
    columns = {column.key: column for column in found.columns if column.key != "index"}
    if filled:
        assert columns.keys() == {".".join(key) if isinstance(key, tuple) else key for key in expected.keys(True, True)}
    for key, column in columns.items():
        values = expected[tuple(key.split("."))]
        assert (column.dtype, column.shape) == (str(values.dtype)[6:], tuple(values.shape[2:]))
        numbers = values.numpy().astype(np.float64)
        assert (column.smallest, column.largest) == (numbers.min(), numbers.max())
        assert column.mean == pytest.approx(numbers.mean(), rel=1e-6)
        assert (column.nans, column.infinite, column.missing, column.measured) == (0, 0, 0, "values")
        assert (column.looked_at, column.rows) == (len(looked_at), filled)
    check_episodes(history, found)
    check_draws(history, found)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()
    assert str(found).startswith(type(buffer).__name__)
    page_of(found)
    return found


def check_episodes(history: History, found: Description) -> None:
    if history.cell.sampler == "ConsumingSampler":  # its items are in no order
        return
    held, filled = history.held[: history.filled], history.filled
    order = (np.arange(filled) + (history.cursor if filled == ROWS else 0)) % max(filled, 1)
    ages = np.empty(filled)
    ages[order] = np.arange(filled)[::-1]
    assert found.ages == Quantiles.of(ages)
    runs = [part for ids in held[order].T for part in _runs(ids)]
    summary = found.episodes
    assert summary is not None and summary.count == len(runs)
    assert summary.lengths == Quantiles.of(np.array([len(run) for run in runs]))
    done = [bool(items(run[-1:], False)["next", "done"]) for run in runs]
    assert summary.ends["done"] == sum(done)
    assert sum(summary.ends.values()) == len(runs)
    if filled:
        returns = Quantiles.of(np.array([items(run, False)["next", "reward"].double().sum() for run in runs]))
        assert summary.reward == "next.reward" and summary.returns is not None and returns is not None
        assert list(summary.returns.to_dict().values()) == pytest.approx(list(returns.to_dict().values()))


def _runs(ids: np.ndarray) -> list[np.ndarray]:
    """The ids of one lane in the order of time, split where the episode or the time jumps."""
    if not ids.size:
        return []
    episode, step, length = _episodes(ids)
    cuts = np.flatnonzero((np.diff(episode) != 0) | (np.diff(ids) != 1) | (step[:-1] == length[:-1] - 1)) + 1
    return np.split(ids, cuts)


def check_draws(history: History, found: Description) -> None:
    buffer, draws = history.buffer, found.draws
    stored = history.filled * history.lanes
    law = buffer.sampler.chances(buffer.storage, buffer.batch_size)
    assert draws is not None and draws.stored == stored and draws.known
    assert draws.drawable == law.drawable.sum()
    assert draws.drawable + sum(draws.reasons.values()) == stored
    if history.cell.sampler == "RandomSampler" and stored:
        assert draws.drawable == stored and draws.effective == pytest.approx(stored)
    given = found.priorities
    if history.cell.sampler in PRIORITIZED:
        assert given == Quantiles.of(buffer.sampler.priorities.numpy())
        chances = law.probability[law.probability > 0]
        assert draws.effective == (pytest.approx(chances.sum() ** 2 / (chances**2).sum()) if chances.size else None)
    else:
        assert given is None


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("storage", "ndim"), LAYOUTS)
def test_a_description_has_the_numbers_of_the_model(storage: str, ndim: int, sampler: str) -> None:
    try:
        history = History(Cell(storage, ndim, sampler, "RoundRobinWriter", "ReplayBuffer"))
    except (TypeError, ValueError, RuntimeError):
        return  # tests of pairs say which ones are refused
    random = np.random.default_rng(len(sampler) + 100 * LAYOUTS.index((storage, ndim)))
    check(history)
    for count in random.integers(1, 8, 3):
        history.write(int(count))
        if sampler in PRIORITIZED:
            places = history._named(torch.arange(history.filled))
            history.buffer.update_priority(places, torch.from_numpy(random.random(len(places))).float())
        elif sampler == "StalenessAwareSampler":
            history.buffer.sampler.consumer_version = 12
    check(history)
    check(history, rows=3)
    assert page_of(history.buffer)


# ------------------------------------------------------------------ values that are not plain numbers


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, LazyMemmapStorage])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_counted(storage: Any, dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, torch.nan], [torch.inf, -torch.inf], [2.0, -4.0]], dtype=dtype)
    buffer = TensorDictReplayBuffer(storage=storage(5))
    buffer.extend(TensorDict({"x": values, "z": torch.full((3,), 1j)}, [3]))
    x = next(column for column in buffer.describe().columns if column.key == "x")
    assert (x.nans, x.infinite, x.smallest, x.largest) == (1, 2, -4, 2)
    assert x.mean == pytest.approx(-1 / 3)
    assert x.dtype == str(dtype)[6:]


def test_text_and_ragged_rows_are_described() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(5), torch.ones(1)], layout=torch.jagged)
    buffer.extend(TensorDict({"t": NonTensorStack("a", "bcd", "äöüß"), "x": ragged}, [3]))
    found = {column.key: column for column in buffer.describe().columns}
    text, x = found["t"], found["x"]
    assert (text.dtype, text.measured, text.smallest, text.mean, text.largest) == ("text", "characters", 1, 8 / 3, 4)
    assert (x.dtype, x.shape, x.mean, x.looked_at) == ("float32", (-1,), 3 / 8, 3)
    one = next(column for column in buffer.describe(rows=1).columns if column.key == "x")
    assert (one.mean, one.looked_at, one.rows) == (1, 1, 3)


def test_items_of_a_list_may_differ() -> None:
    buffer = ReplayBuffer(storage=ListStorage(10))
    buffer.extend(
        ["hi", {"a": 1.5, "b": np.arange(3)}, {"a": 2, "b": np.zeros((2, 2))}, {"b": np.ones(5, np.int64)}, None]
    )
    found = {column.key: column for column in buffer.describe().columns}
    assert (found["a"].dtype, found["a"].missing, found["a"].mean) == ("float32 or int64", 3, 1.75)
    assert (found["b"].shape, found["b"].missing, found["b"].bytes) == (None, 2, 24 + 32 + 40)
    assert (found["item"].dtype, found["item"].smallest) == ("text or NoneType", 2)
    assert "missing" in str(buffer.describe()) and "varies" in str(buffer.describe())


# ------------------------------------------------------------------ buffers of all kinds


def test_empty_and_delayed_buffers_are_described() -> None:
    for storage in (LazyTensorStorage(5), LazyMemmapStorage(5), ListStorage(5)):
        found = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(5, 1.0, 1.0)).describe()
        assert (found.facts["items stored"], found.columns, found.priorities) == (0, (), None)
        assert found.draws is not None and found.draws.drawable == 0
        assert found.episodes is not None and found.episodes.count == 0
    delayed = ReplayBuffer(storage=lambda: LazyTensorStorage(5), delayed_init=True)
    assert "components are made at the first use" in str(delayed.describe())
    assert delayed.stats(detail=True) == delayed.stats()
    assert "initialized" in page_of(delayed) and not delayed.initialized
    delayed.add(torch.ones(2))
    assert delayed.describe().columns[0].mean == 1


def test_an_ensemble_is_described_with_its_members() -> None:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2)]
    for number, member in enumerate(members):
        member.extend(TensorDict({"x": torch.full((3 + number,), float(number))}, [3 + number]))
    found = ReplayBufferEnsemble(*members, p=[0.25, 0.75]).describe()
    assert found.facts["items stored"] == 7
    assert [each.columns[0].mean for each in found.members] == [0, 1]
    assert [each.facts["part of a large batch"] for each in found.members] == [0.25, 0.75]
    assert found.numbers()["members/1/keys/x/mean"] == 1
    page_of(found)


def test_a_buffer_over_a_functional_one_is_described_by_fbuf() -> None:
    buffer = fbuf.Buffer(4)
    rb = from_fbuf(buffer, buffer.init({"x": jnp.zeros(())}))
    rb.extend(TensorDict({"x": torch.arange(3.0)}, [3]))
    assert rb.describe() == fbuf.describe(buffer, rb.state)
    assert "capacity" in page_of(rb)


def test_what_is_not_known_is_said() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=SliceSampler(slice_len=2), batch_size=4)
    rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
    found = rb.describe()
    assert found.episodes is None and str(found.facts["episodes"]).startswith("not known: Could not get")
    assert found.draws is None and str(found.facts["draws"]).startswith("not known: Could not get")
    steps = TensorDict({"x": torch.zeros(3, 2), "y": torch.ones(3), "done": torch.zeros(3, 1, dtype=torch.bool)}, [3])
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(TensorDict({"next": steps, "r": torch.ones(3)}, [3]))
    found = rb.describe(reward="r")
    assert found.episodes is not None and found.episodes.returns == Quantiles.of(np.array([3.0]))
    assert rb.describe().episodes.returns is None  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="must be one real number an item"):
        rb.describe(reward=("next", "x"))
    with pytest.raises(KeyError):
        rb.describe(reward="missing")
    with pytest.raises(ValueError, match="rows"):
        rb.describe(rows=0)


def test_numbers_for_logs_are_flat_and_plain() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5000), sampler=PrioritizedSampler(5000, 1.0, 1.0))
    rb.extend(TensorDict({"x": torch.arange(4000.0)}, [4000]))
    plain, found = rb.stats(), rb.stats(detail=True)
    assert plain.items() <= found.items()
    assert (found["rows_looked_at"], found["keys/x/largest"], found["priorities/50"]) == (1000, 3996, 1)
    assert found["draws/effective"] == pytest.approx(4000)
    assert all(type(value) in (int, float, bool) and " " not in name for name, value in found.items())


# ------------------------------------------------------------------ pages


def test_pages_escape_and_read_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<script>alert(1)</script>"
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(5), transform=lambda data: data, batch_size=2)
    rb.extend(TensorDict({evil: torch.ones(3, 2), "t": NonTensorStack(evil, "b", "c")}, [3]))
    assert evil in page_of(rb.describe())

    def refuse(*args: object) -> None:
        raise AssertionError("a row was read")

    monkeypatch.setattr(TensorStorage, "get", refuse)
    text = page_of(rb)
    assert evil in text and "float32[2]" in text and "RandomSampler" in text
    for part in (rb.storage, rb.sampler, rb.writer, ReplayBufferEnsemble(rb, rb), rb):
        page_of(part)
    assert "TensorDictReplayBuffer" in page_of(ReplayBufferEnsemble(rb, rb))


def test_specs_and_states_show_as_nested_tables() -> None:
    spec = Composite(
        {"<b>": Bounded(-1, 1, (4,)), "a": Categorical(3), "next": Composite({"obs": Bounded(-1, 1, (4,))})}
    )
    text = page_of(spec)
    assert "<b>" in text and "-1 to 1" in text and "n = 3" in text and text.count("BoundedContinuous") == 2
    assert "float32" in page_of(spec["next", "obs"])
    buffer = fbuf.Buffer(5, sampler=fbuf.Prioritized(alpha=0.5))
    assert "0.5" in page_of(buffer) and "Prioritized" in page_of(buffer)
    assert "float32[5, 2]" in page_of(buffer.init({"x": jnp.zeros(2)}))


def test_a_class_of_the_user_shows_its_facts() -> None:
    class Mine(RandomSampler):
        def __rich_repr__(self) -> Any:
            yield "temperature", 0.5

    assert repr(Mine()).endswith("Mine(temperature=0.5)")
    assert "temperature" in page_of(Mine())


# ------------------------------------------------------------------ memory


@LIMITED
def test_some_rows_of_a_large_map_are_looked_at_in_bounded_memory(tmp_path: Path) -> None:
    rows, width = 1 << 16, 1 << 18  # 16 GiB of pixels, in a sparse file
    files = {"pixels": (rows * width, torch.uint8), "reward": (rows, torch.float32)}
    data = {}
    for name, (size, dtype) in files.items():
        with open(tmp_path / name, "wb") as file:
            file.truncate(size * dtype.itemsize)
        data[name] = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=dtype)
    data["pixels"] = data["pixels"].view(rows, width)
    rb = ReplayBuffer(storage=TensorStorage(TensorDict(data, [rows])))
    rb.describe(rows=10)  # what is made once
    with bounded(100 << 20):
        found = rb.describe(rows=100)
    pixels = next(column for column in found.columns if column.key == "pixels")
    assert (pixels.bytes, pixels.looked_at, pixels.largest) == (16 << 30, 100, 0)

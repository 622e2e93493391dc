"""Descriptions of buffers and of slots, against plain NumPy and brute force."""

import dataclasses
import html.parser
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import Buffer, Frames, HashTable, HighestRanked, Mixture, Prioritized, Sharded, Slices, Trajectories, Uniform
from fbuf.looking import Description, EpisodeSummary, Quantiles, evenly, rows_of, summarize
from fbuf.looking.column_summary import Total
from fbuf.samplers import Chances, Reason
from tests.fbuf.chance_model import ChanceModel
from tests.fbuf.compiled import extend, update
from tests.fbuf.test_slices import ALL, CASES, ENDS

# ---------------------------------------------------------------------- keys


def summary(values: np.ndarray, rows: int | None = None, **others: Any) -> Any:
    numbers = evenly(len(values), rows)
    others = {"dtype": values.dtype, "shape": values.shape[1:], "stored": len(values), **others}
    return summarize("x", rows_of(values), numbers, **others)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "uint64", "bool", "bfloat16"])
def test_a_key_has_the_numbers_of_its_finite_values(kind: str) -> None:
    dtype = np.dtype(jnp.bfloat16 if kind == "bfloat16" else kind)
    values = np.random.default_rng(0).normal(scale=20, size=(50, 3)).astype(np.float32)
    values = (abs(values) if kind == "uint64" else values > 0 if kind == "bool" else values).astype(dtype)
    wide = values.astype(np.float64)
    found = summary(values)
    assert (found.smallest, found.largest) == (wide.min(), wide.max())
    np.testing.assert_allclose(found.mean, wide.mean(), rtol=1e-6)
    assert (found.nans, found.infinite, found.looked_at, found.rows) == (0, 0, 50, 50)
    assert (found.dtype, found.shape) == (kind, (3,))


def test_values_that_are_not_finite_are_counted() -> None:
    values = np.asarray([[np.nan, 1], [np.inf, -np.inf], [3e38, 2]], np.float32)
    found = summary(values)
    assert (found.nans, found.infinite, found.smallest) == (1, 2, 1)
    assert found.largest == float(np.float32(3e38))
    nothing = summary(np.full((2, 1), np.nan, np.float32))
    assert (nothing.smallest, nothing.mean, nothing.largest, nothing.nans) == (None, None, None, 2)
    large = summary(np.full(4, 3e38, np.float32))
    assert large.infinite == 0 and large.mean == large.largest
    turned = summary(np.asarray([1j, np.nan], np.complex64))
    assert (turned.nans, turned.mean) == (1, None)
    none = summary(np.zeros((0, 2)))
    assert (none.looked_at, none.mean) == (0, None)


def test_some_evenly_spaced_rows_are_looked_at_in_blocks() -> None:
    seen = []
    values = np.arange(1000, dtype=np.float32)[:, None] + np.zeros((1, 1 << 20), np.float32)[:, :1]

    def read(numbers: np.ndarray) -> np.ndarray:
        seen.append(numbers)
        return values[numbers]

    numbers = evenly(1000, 10)
    assert numbers.tolist() == list(range(0, 1000, 100))
    found = summarize("x", read, numbers, dtype=values.dtype, shape=(1 << 21,), stored=1000)
    assert [each.size for each in seen] == [2] * 5  # 16 MiB a block
    assert (found.smallest, found.largest, found.looked_at, found.rows) == (0, 900, 10, 1000)
    assert evenly(7, 20).tolist() == list(range(7))


def test_quantiles_are_those_of_finite_numbers() -> None:
    assert Quantiles.of(np.asarray([3, 1, 2, 5, 4, np.nan])) == Quantiles(1, 2, 3, 4, 5)
    assert Quantiles.of(np.zeros(0)) is None
    with pytest.raises(ValueError, match=r"ends are terminated, .* got finished"):
        EpisodeSummary.of(np.ones(1), {"finished": 1})
    episodes = EpisodeSummary.of(np.ones(3), {"done": 3}, returns=np.asarray([np.nan, 5, np.inf]))
    assert episodes.undefined_returns == 2 and episodes.returns == Quantiles(5, 5, 5, 5, 5)
    assert "whose return is NaN or infinite  2" in str(Description("", {}, episodes=episodes))


def test_the_mean_of_numbers_whose_sum_is_no_float() -> None:
    total = Total()
    for each in (1e308, 1.7e308, -1.7e308):
        total.add(np.full(1000, each))
    assert total.mean == pytest.approx(1e308 / 3)


# ---------------------------------------------------------------------- descriptions


def described(model: ChanceModel) -> None:
    """A description of a buffer has the numbers of the model."""
    found, stored = fbuf.describe(model.buffer, model.state, reward="serial"), model.model.stored()
    numbers = model.model.numbers()
    held = np.asarray([numbers[slot] for slot in sorted(numbers)])
    serial = {column.key: column for column in found.columns}["['serial']"]
    if held.size:
        assert (serial.smallest, serial.largest) == (held.min(), held.max())
    assert serial.rows * model.lanes == held.size
    assert found.episodes is not None
    kinds = np.bincount([each.kind for each in stored], minlength=4)
    ends = dict(zip(("open", "terminated", "truncated", "followed"), kinds.tolist(), strict=True))
    returns = np.asarray([sum(numbers[slot] for slot in each.slots) for each in stored])
    expected = EpisodeSummary.of(
        np.asarray([len(each.slots) for each in stored]),
        ends,
        begun_before=sum(each.lost > 0 for each in stored),
        returns=returns,
        reward="serial",
    )
    assert found.episodes == expected
    law = model.chances()
    assert found.draws is not None
    assert (found.draws.stored, found.draws.drawable) == (held.size, int((law > 0).sum()))
    assert found.draws.drawable + sum(found.draws.reasons.values()) == held.size
    if law.any():
        np.testing.assert_allclose(found.draws.effective, law.sum() ** 2 / (law**2).sum(), rtol=1e-4)
        top = np.sort(law)[::-1][: -(-held.size // 100)].sum() / law.sum()
        np.testing.assert_allclose(found.draws.top_share, top, rtol=1e-4)
    if model.priorities is not None:
        assert found.priorities == Quantiles.of(model.priorities.given[model.priorities.given >= 0])
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()
    assert str(found).startswith("Buffer\n") and "draws of one slice" in str(found)


def explained(model: ChanceModel) -> None:
    """What is said of each slot is what the model knows."""
    numbers, law, windows = model.model.numbers(), model.chances(), model.windows()
    starts, lanes = model.chances_of_starts(), model.lanes
    for slot in range(model.buffer.capacity * lanes):
        found = fbuf.why(model.buffer, model.state, slot)
        assert found.slot == slot and str(found)
        if slot not in numbers:
            assert (found.code, found.written, found.trajectory) == (Reason.NOT_WRITTEN, None, None)
            assert found.reason == "it holds no item"
            continue
        assert found.written == numbers[slot] // lanes
        assert found.age == model.model.time - 1 - found.written
        held = next(each for each in model.model.stored() if slot in each.slots)
        trajectory = found.trajectory
        assert trajectory is not None and trajectory.lane == held.lane == slot % lanes
        assert (trajectory.first, trajectory.last) == (held.slots[0], held.slots[-1])
        assert trajectory.length == len(held.slots)
        assert trajectory.step == held.lost + held.slots.index(slot)
        assert found.ends is not None and found.begins is not None
        words = {0: "not yet", 1: "terminated is true", 2: "truncated is true", 3: "id changes"}
        assert found.ends.startswith(words[held.kind])
        assert found.begins.startswith("its first") == (held.lost > 0)
        if model.priorities is not None:
            assert found.priority == model.priorities.given[slot]
        rule = model.buffer.sampler
        if isinstance(rule, fbuf.Slices):
            assert (found.slice_len, found.needs) == (rule.length, rule.shortest)
            if found.code == Reason.TOO_SHORT:
                assert len(held.slots) < rule.shortest and f"needs {rule.shortest} of them" in str(found)
        np.testing.assert_allclose(found.probability, law[slot], rtol=2e-5)
        assert (found.reason is None) == (law[slot] > 0)
        if law[slot] > 0:
            assert set(found.starts or ()) == {start for start in starts if slot in windows[start]}
            np.testing.assert_allclose(sum(starts[start] for start in found.starts or ()), law[slot], rtol=1e-6)
        if starts.get(slot):
            np.testing.assert_allclose(found.weight, min(starts.values()) / starts[slot], rtol=1e-4)
        json.dumps(found.to_dict(), allow_nan=False)


def assert_looked_into(buffer: Buffer, counts: tuple[int, ...], seeds: range) -> None:
    for seed in seeds:
        model = ChanceModel(buffer, seed)
        described(model)
        for _ in range(3):
            model.write_some(int(model.random.choice(counts)))
            model.update()
            described(model)
            explained(model)


IDS_TOO = Buffer(7, Slices(3, Prioritized(alpha=0.5, eps=0)), trajectories=ALL, lanes=(2,))


@pytest.mark.parametrize(("buffer", "counts"), [CASES[3]], ids=["priorities"])
def test_what_is_said_of_a_buffer_and_its_slots_is_true(buffer: Buffer, counts: tuple[int, ...]) -> None:
    assert_looked_into(buffer, counts, range(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("buffer", "counts"), [*CASES[:5], (IDS_TOO, (1, 5))], ids=lambda what: str(getattr(what, "sampler", what))
)
def test_what_is_said_of_many_buffers_and_their_slots_is_true(buffer: Buffer, counts: tuple[int, ...]) -> None:
    assert_looked_into(buffer, counts, range(5, 40))


class Tags(html.parser.HTMLParser):
    """The tags of a page, each of which must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}  # it needs nothing else

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_page(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert not tags.open and tags.seen[0] == "div"
    assert "http" not in page and "#fff" not in page


def test_pages_stand_alone_and_escape_keys() -> None:
    buffer = Buffer(4, Prioritized(), trajectories=Trajectories("end"))
    item = {"<b>": np.zeros(2, np.float32), "reward": np.float32(0), "end": np.bool_(False)}
    batch = {"<b>": np.zeros((3, 2), np.float32), "reward": np.ones(3, np.float32), "end": np.zeros(3, bool)}
    state, _ = extend(buffer, buffer.init(item), batch)
    found = fbuf.describe(buffer, state, rows=2)
    page = found._repr_html_()
    assert_page(page)
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert "over 2 evenly spaced rows of 3" in page and "return, sum of reward" in str(found)
    assert found.episodes is not None and found.episodes.returns == Quantiles(3, 3, 3, 3, 3)
    assert_page(fbuf.why(buffer, state, 1)._repr_html_())


def test_other_buffers_are_described_as_far_as_they_know_themselves() -> None:
    ranked = Buffer(3, writer=HighestRanked("rank"))
    state, _ = extend(ranked, ranked.init({"rank": np.float32(0)}), {"rank": np.asarray([1, 3], np.float32)})
    found = fbuf.describe(ranked, state)
    assert found.ages is None and found.episodes is None and found.priorities is None
    held = fbuf.why(ranked, state, 1)
    assert (held.written, held.probability, held.weight, held.trajectory) == (None, 0.5, 1, None)
    table = HashTable(4)
    filled, _, _ = table.insert(table.init(np.int32(0), np.float32(0)), np.asarray([3, 5], np.int32), jnp.ones(2))
    columns = fbuf.describe(table, filled).columns
    assert [(each.key, each.smallest, each.rows) for each in columns] == [("key item", 3, 2), ("item", 1, 2)]
    framed = Buffer(6, trajectories=Trajectories("end"), frames=Frames(stack=1))
    obs = {"obs": np.arange(5, dtype=np.uint8), "next_obs": np.arange(1, 6, dtype=np.uint8), "end": np.arange(5) == 4}
    state, _ = extend(framed, framed.init(jax.tree.map(lambda leaf: leaf[0], obs)), obs)
    column = fbuf.describe(framed, state).columns[-1]
    assert (column.key, column.smallest, column.largest, column.rows) == ("['obs'], each frame once", 0, 4, 5)


@dataclasses.dataclass(frozen=True)
class Own(Uniform):
    """A rule with another law."""

    def sample(self, state: Any, key: Any, batch_size: int, size: Any) -> Any:
        return super().sample(state, key, batch_size, size)


def test_of_a_rule_of_unknown_law_nothing_is_invented() -> None:
    buffer = Buffer(4, Own())
    state, _ = extend(buffer, buffer.init(np.float32(0)), np.zeros(3, np.float32))
    found = fbuf.describe(buffer, state)
    assert found.draws is not None and not found.draws.known
    assert (found.draws.drawable, found.draws.effective, found.draws.top_share) == (None, None, None)
    assert "not known" in str(found)
    slot = fbuf.why(buffer, state, 1)
    assert (slot.probability, slot.weight, slot.reason) == (None, None, None)
    assert "is not known" in str(slot)


def test_members_of_a_mixture_have_their_part() -> None:
    mixture = Mixture((Buffer(4), Buffer(5, Prioritized(alpha=1, eps=0)), Buffer(2)), (1, 3, 4))
    states = list(mixture.init(np.float32(0)))
    for i in range(2):
        states[i], _ = extend(mixture.buffers[i], states[i], np.arange(3, dtype=np.float32))
    states[1] = update(mixture.buffers[1], states[1], np.arange(3), np.asarray([1, 2, 0], np.float32))
    found = fbuf.describe(mixture, tuple(states))
    assert [member.facts["part of a large batch"] for member in found.members] == [0.25, 0.75, 0]
    law = [fbuf.why(mixture, tuple(states), (1, slot)).probability for slot in range(3)]
    assert law == [0.25, 0.5, 0]
    assert fbuf.why(mixture, tuple(states), (1, 1)).weight == (1 / 12) / 0.5
    assert fbuf.why(mixture, tuple(states), (2, 1)).reason == "it holds no item"
    assert_page(found._repr_html_())


def test_chances_of_every_kind_have_words() -> None:
    for reason in Reason:
        assert reason.words and reason.label
    law = Chances.of(np.asarray([0, 3.0, 1]), Reason.STALE)
    assert law.probability is not None and law.probability.tolist() == [0, 0.75, 0.25]
    assert law.reason.tolist() == [Reason.STALE, 0, 0]


FOUR = Buffer(4)
PAIR = Mixture((FOUR,))
REFUSED: list[tuple[Any, Any, str]] = [
    (lambda: fbuf.why(FOUR, FOUR.init(0.0), 4), IndexError, "slot 4 does not exist: the buffer has slots 0 to 3"),
    (lambda: fbuf.why(FOUR, FOUR.init(0.0), -1), IndexError, "slot -1 does not exist"),
    (lambda: fbuf.why(FOUR, FOUR.init(0.0), 0.5), TypeError, "slot must be an int from 0 to 3, got 0.5"),  # type: ignore
    (lambda: fbuf.why(FOUR, FOUR.init(0.0), (0, 1)), TypeError, "only the slots of a Mixture are pairs"),
    (lambda: fbuf.why(PAIR, PAIR.init(0.0), 1), TypeError, r"a pair \(member, slot\), got 1"),
    (lambda: fbuf.why(PAIR, PAIR.init(0.0), (1, 0)), IndexError, "member 1 does not exist"),
    (lambda: fbuf.describe(PAIR, ()), ValueError, "one state for each of 1 buffers"),
    (lambda: fbuf.describe(Sharded(FOUR), None), TypeError, r"pass sharded.part\(devices\)"),  # type: ignore
    (lambda: fbuf.describe(FOUR, 3), TypeError, "its BufferState, .* got Buffer and int"),  # type: ignore
    (lambda: fbuf.describe(FOUR, Buffer(3).init(0.0)), ValueError, "another buffer made it"),
    (lambda: fbuf.describe(FOUR, FOUR.init(0.0), 0), ValueError, "rows must be at least 1"),
    (lambda: jax.jit(lambda state: fbuf.describe(FOUR, state).facts["capacity"])(FOUR.init(0.0)), TypeError, "jit"),
    (
        lambda: fbuf.describe(SLICED, SLICED.init({"terminated": False, "truncated": False}), reward="r"),
        ValueError,
        "reward=.*an item has no such leaf",
    ),
]
SLICED = Buffer(4, trajectories=ENDS)


@pytest.mark.parametrize(("make", "error", "says"), REFUSED, ids=[says for *_, says in REFUSED])
def test_what_has_no_meaning_is_refused(make: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make()

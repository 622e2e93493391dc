"""Data that would not come back as it was is refused, with the key and the first row; so is what no hook has made."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from interop import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from interop.ted import row_values
from tests.interop.ted.model import Written, as_tuple, copied, differences, paths, rings, write

FOLLOWED = ["obs", ("agent", "pixels"), ("agent", "deep", "half"), "count", "wave"]


def place_of(row, data):
    """A row of the storage, as messages call it."""
    places = tuple(int(each) for each in torch.unravel_index(torch.tensor(row), data.shape))
    return str(places[0] if len(places) == 1 else places)


def flip(data, key, row):
    """Change one bit of a row."""
    rows = data.get(key)
    rows = rows.view(torch.uint8) if rows.dtype != torch.complex64 else torch.view_as_real(rows).view(torch.uint8)
    rows.reshape(data.numel(), -1)[row, -1] ^= 1


def flat_of(written: Written, **options):
    return written.told(TED2Flat(**options))(written.data)


@pytest.fixture
def small_pieces(monkeypatch):
    """Data is compared in pieces of a few rows."""
    monkeypatch.setattr(row_values, "_PIECE", 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_pieces")
@given(rings(), st.data())
def test_the_first_row_that_would_be_lost_is_named(written: Written, draws: st.DataObject) -> None:
    data = written.data
    bad = draws.draw(
        st.sets(st.tuples(st.integers(0, data.numel() - 1), st.sampled_from(range(len(FOLLOWED)))), min_size=1)
    )
    before = copied(data)
    for row, place in bad:
        flip(data, ("next", *as_tuple(FOLLOWED[place])), row)
    lost = copied(data)
    expected = Flat2TED()(flat_of(written, verify=False))
    wrong = [
        (row, key)
        for row in range(data.numel())
        for key in paths(data)
        if differences(
            TensorDict({"x": expected.get(key).flatten(0, data.ndim - 1)[row]}),
            TensorDict({"x": lost.get(key).flatten(0, data.ndim - 1)[row]}),
        )
    ]
    assert not differences(data, lost)
    if not wrong:
        assert not differences(Flat2TED()(flat_of(written)), lost)
        return
    first = min(row for row, _ in wrong)
    for hook in (TED2Flat(), TED2Nested()):
        with pytest.raises(ValueError, match=re.escape(f"row {place_of(first, data)} would")) as caught:
            written.told(hook)(data)
        assert any(repr(as_tuple(key)) in str(caught.value) for row, key in wrong if row == first)
    assert differences(before, lost)


@given(st.integers(0, 10**6))
def test_whatever_is_not_refused_comes_back(seed: int) -> None:
    """Few values, so that some data is TED data by chance."""
    generator = torch.Generator().manual_seed(seed)

    def few(*shape):
        return (torch.rand(shape, generator=generator) < 0.15).float()

    rows, lanes = int(torch.randint(1, 4, (), generator=generator)), ((), (2,))[seed % 2]
    shape = (rows, *lanes)
    data = TensorDict({"obs": few(*shape), "done": few(*shape) > 0}, shape)
    data["next"] = TensorDict({"obs": few(*shape), "done": few(*shape) > 0}, shape)
    shift = int(torch.randint(0, rows + 1, (), generator=generator))
    written = Written(data, shift, seed % 3 == 0, rows)
    try:
        flat = flat_of(written)
    except ValueError:
        assert differences(Flat2TED()(flat_of(written, verify=False)), data)
    else:
        assert not differences(Flat2TED()(flat), data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_pieces")
@given(rings(), st.data())
def test_flags_of_the_root_are_not_lost(written: Written, draws: st.DataObject) -> None:
    data = written.data
    row = draws.draw(st.integers(0, data.numel() - 1))
    key = draws.draw(st.sampled_from([key for key in ("done", "terminated", "truncated") if key in data]))
    data[key].view(data.numel(), -1)[row] = True
    with pytest.raises(
        ValueError, match=re.escape(f"row {place_of(row, data)} would come back otherwise: '{key}' is set")
    ):
        flat_of(written)
    assert key in flat_of(written, verify=False)


def test_a_path_is_not_made_for_data_that_is_refused(tmp_path: Path) -> None:
    written = write(5, (), 8, {(3, 0)})
    written.data["done"][2] = True
    for hook in (TED2Flat(), TED2Nested()):
        with pytest.raises(ValueError, match="row 2"):
            written.told(hook)(written.data, tmp_path / "flat")
    assert not list(tmp_path.iterdir())


def changed(key, value):
    def change(data):
        data.set(key, value(data))

    return change


def without(*keys):
    def change(data):
        for key in keys:
            del data[key]

    return change


REFUSED = {
    "an observation of next alone": (
        without("obs"),
        r"\('next', 'obs'\) is there from row 0 on, the root has no 'obs'",
    ),
    "no done flag": (without(("next", "done")), r"\('next', 'done'\) is missing from row 0 on"),
    "more flags than rows": (
        changed(("next", "done"), lambda data: torch.zeros(5, 3, dtype=torch.bool)),
        r"\('next', 'done'\) has the shape \[5, 3\], the rows have \[5\]",
    ),
    "a reward of the root": (changed("reward", lambda data: torch.zeros(5, 1)), "'reward' is in the root too"),
    "another dtype": (
        changed("obs", lambda data: data["obs"].double()),
        r"\('next', 'obs'\) is torch.float32 \[5, 3\], 'obs' is torch.float64",
    ),
    "another shape": (changed("obs", lambda data: data["obs"][:, :2]), r"'obs' is torch.float32 \[5, 2\]"),
    "flags of other kinds": (
        changed("done", lambda data: torch.zeros(5, dtype=torch.bool)),
        r"'done' and \('next', 'done'\) differ in dtype or shape",
    ),
    "a key that is taken": (changed("shift", lambda data: torch.zeros(5)), "'shift' is a key of the data"),
    "a key below one that is taken": (
        changed(("_storage_shape", "x"), lambda data: torch.zeros(5)),
        "'_storage_shape' is a key of the data",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    change, message = REFUSED[what]
    written = write(5, (), 8, {(3, 0)})
    change(written.data)
    for hook in (TED2Flat(), TED2Nested()):
        with pytest.raises(ValueError, match=message):
            written.told(hook)(written.data)


def test_flags_that_are_more_than_the_lanes() -> None:
    data = TensorDict({"next": {"done": torch.zeros(3, 4, 5, dtype=torch.bool)}}, [3, 4])
    with pytest.raises(ValueError, match=r"has the shape \[3, 4, 5\], the rows have \[3, 4\]"):
        Written(data, 3, True, 3).told(TED2Flat())(data)


def test_where_the_ring_begins_must_be_told() -> None:
    written = write(5, (), 8, ())
    for hook in (TED2Flat(), TED2Nested()):
        with pytest.raises(TypeError, match="set shift and is_full"):
            hook(written.data)
        hook.shift = 3
        with pytest.raises(TypeError, match="set shift and is_full"):
            hook(written.data)
        hook.shift, hook.is_full = 6, True
        with pytest.raises(ValueError, match="shift must be a row of 5, got 6"):
            hook(written.data)


def test_what_is_no_tensordict() -> None:
    hook = write(5, (), 8, ()).told(TED2Flat())
    with pytest.raises(TypeError, match="takes a tensordict, got Tensor"):
        hook(torch.zeros(5))
    data = write(5, (), 8, ()).data
    data["text"] = NonTensorData("hello", batch_size=[5])
    with pytest.raises(TypeError, match="'text': only tensors"):
        hook(data)
    with pytest.raises(ValueError, match="no rows"):
        hook(TensorDict({}, [0]))
    for load in (Flat2TED(), Nested2TED(), H5Combine()):
        with pytest.raises(TypeError, match="tensordict"):
            load(torch.zeros(5))


def test_keys_that_are_one_text() -> None:
    with pytest.raises(TypeError, match=r"done_keys must be a list or tuple of keys, got 'done'"):
        TED2Flat(done_keys="done")
    with pytest.raises(TypeError, match="reward_keys"):
        Nested2TED(reward_keys="reward")
    with pytest.raises(TypeError, match="unexpected keyword"):
        TED2Flat(down_key="done")  # type: ignore[call-arg]


def test_a_done_key_that_is_an_observation() -> None:
    written = write(5, (), 8, ())
    written.data["over"], written.data["next", "over"] = torch.zeros(5), torch.zeros(5)
    with pytest.raises(ValueError, match="must be one of done_keys below 'next'"):
        flat_of(written, done_key=("next", "over"))


# ---------------------------------------------------------------------- loading


def altered(key, value):
    def change(flat):
        flat.set(key, value) if value is not None else flat.pop(key)

    return change


DAMAGED = {
    "a row less": (altered("action", torch.zeros(4, 2)), "'action' has 4 rows: 5 rows with 2 ends have 5, or 7"),
    "no rows": (altered("action", torch.zeros(())), "'action' has 0 rows"),
    "no flags": (altered("done", None), "'done' is missing"),
    "flags of other rows": (altered("done", torch.zeros(7, 1)), r"done flags of shape \[7, 1\] for 5 rows"),
    "no shift": (altered("shift", None), "'shift' should tell integers"),
    "a shift beyond": (altered("shift", NonTensorData(9)), "shift must be a row of 5, got 9"),
    "a text": (altered("is_full", NonTensorData("yes")), "'is_full' should be True or False, found 'yes'"),
    "another shape": (altered("_storage_shape", NonTensorData((6,))), r"done flags of shape \[5, 1\] for 6 rows"),
    "a strange shape": (altered("_storage_shape", NonTensorData("wide")), "'_storage_shape' should tell integers"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_no_hook_has_made(what: str) -> None:
    change, message = DAMAGED[what]
    written = write(5, (), 8, {(4, 0)})
    flat = flat_of(written)
    change(flat)
    out = copied(written.data)
    for place in (None, out):
        with pytest.raises(ValueError, match=message):
            Flat2TED()(flat, out=place)
    assert not differences(out, written.data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("action"), "missing there: 'action', there alone: none"),
        (changed("extra", lambda data: torch.zeros(5)), "missing there: none, there alone: 'extra'"),
        (
            changed("action", lambda data: torch.zeros(5, 2)),
            r"'action' is torch.float64 \[5, 2\], out has torch.float32",
        ),
        (changed("action", lambda data: torch.zeros(5, 3).double()), r"out has torch.float64 \[5, 3\]"),
    ],
)
def test_an_out_that_does_not_fit(change, message) -> None:
    written = write(5, (), 8, {(4, 0)})
    out = copied(written.data)
    change(out)
    for key in paths(out):
        out.get(key).zero_()
    with pytest.raises(ValueError, match=message):
        Flat2TED()(flat_of(written), out=out)
    assert all(not (out.get(key) != 0).any() for key in paths(out) if key != "count" and key != ("next", "count"))


def test_out_may_be_without_flags_that_are_implied() -> None:
    written = write(5, (), 8, {(4, 0)})
    out = copied(written.data)
    del out["done"]
    Flat2TED()(flat_of(written), out=out)
    assert "done" not in out
    del written.data["done"]
    assert not differences(out, written.data)


def test_trajectories_that_do_not_fit_together() -> None:
    written = write(5, (), 8, {(4, 0)})
    nested = written.told(TED2Nested())(written.data)
    split = written.told(H5Split())(nested)
    dense = TensorDict({"done": torch.zeros(5, 1)}, [5])
    with pytest.raises(ValueError, match="expected a nested tensor"):
        Nested2TED()(dense)
    for change, message in (
        (without("traj_0"), "1 trajectories should be"),
        (without(("traj_1", "action")), "traj_1 has other entries than traj_0"),
        (altered(("traj_1", "action"), torch.zeros(4, 9)), "'action' has different shapes"),
        (altered(("traj_1", "action"), torch.zeros(4, 2)), "'action' has different shapes or dtypes"),
        (altered(("traj_1", "action"), torch.zeros(()).double()), "'action' has different shapes"),
    ):
        other = split.copy()
        for key in ("traj_0", "traj_1"):
            other[key] = split[key].copy()
        change(other)
        with pytest.raises(ValueError, match=message):
            H5Combine()(other)
    other = split.copy()
    other["traj_1"] = split["traj_1"].copy()
    other["traj_1", "action"] = torch.zeros(9, 2).double()
    with pytest.raises(ValueError, match="other numbers of rows"):
        Nested2TED()(H5Combine()(other))
    with pytest.raises(ValueError, match="0 trajectories"):
        H5Combine()(TensorDict({}))

"""Data that would not come back is refused, with the key and the first row; so is what no hook has made."""

import re
from pathlib import Path
from types import LambdaType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from interop import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from interop.ted import row_values
from tests.interop.ted.model import Written, as_tuple, bits, copied, differences, paths, rings, write

FOLLOWED = ["obs", ("agent", "pixels"), ("agent", "deep", "half"), "count", "wave"]


def place_of(row: int, data: Any) -> str:
    """A row of the storage, as messages call it."""
    places = tuple(int(each) for each in np.unravel_index(row, data.shape))
    return str(places[0] if len(places) == 1 else places)


def flat_of(written: Written, **options: Any) -> Any:
    return written.told(TED2Flat(**options))(written.data)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data is compared in pieces of a few rows."""
    monkeypatch.setattr(row_values, "_PIECE", 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_pieces")
@given(rings(), st.data())
def test_the_first_row_that_would_be_lost_is_named(written: Written, draws: st.DataObject) -> None:
    data = written.data
    for row, place in draws.draw(st.sets(st.tuples(st.integers(0, data.numel() - 1), st.integers(0, 4)), min_size=1)):
        bits(data.get(("next", *as_tuple(FOLLOWED[place])))).view(torch.uint8).reshape(data.numel(), -1)[row, -1] ^= 1
    lost = copied(data)
    came = Flat2TED()(flat_of(written, verify=False))
    assert not differences(data, lost)
    rows = {key: [bits(each.get(key)).reshape(data.numel(), -1) for each in (came, lost)] for key in paths(data)}
    wrong = [(int(row), key) for key, (one, other) in rows.items() for row in (one != other).any(1).nonzero()]
    if not wrong:
        assert not differences(Flat2TED()(flat_of(written)), lost)
        return
    first = min(row for row, _ in wrong)
    for hook in (TED2Flat(), TED2Nested()):
        with pytest.raises(ValueError, match=re.escape(f"row {place_of(first, data)} would")) as caught:
            written.told(hook)(data)
        assert any(repr(as_tuple(key)) in str(caught.value) for row, key in wrong if row == first)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_pieces")
@given(rings(), st.data())
def test_flags_of_the_root_are_not_lost(written: Written, draws: st.DataObject) -> None:
    data = written.data
    row = draws.draw(st.integers(0, data.numel() - 1))
    key = draws.draw(st.sampled_from([key for key in ("done", "terminated", "truncated") if key in data]))
    data[key].view(data.numel(), -1)[row] = True
    expected = f"row {place_of(row, data)} would come back otherwise: '{key}' is set"
    with pytest.raises(ValueError, match=re.escape(expected)):
        flat_of(written)
    assert key in flat_of(written, verify=False)


def changed(key: Any, value: Any) -> Any:
    """What sets an entry, or deletes it for None."""

    def change(data: Any) -> None:
        if value is None:
            del data[key]
        else:
            data.set(key, value(data) if isinstance(value, LambdaType) else value)

    return change


REFUSED = {
    "an observation of next alone": (
        changed("obs", None),
        r"the root has no 'obs' for \('next', 'obs'\)",
    ),
    "no done flag": (changed(("next", "done"), None), r"\('next', 'done'\) is missing, the flag"),
    "more flags than rows": (
        changed(("next", "done"), torch.zeros(5, 3, dtype=torch.bool)),
        r"\('next', 'done'\) has the shape \[5, 3\], the rows have \[5\]",
    ),
    "another dtype": (
        changed("obs", lambda data: data["obs"].double()),
        r"\('next', 'obs'\) is torch.float32 \[5, 3\], 'obs' is torch.float64",
    ),
    "flags of other kinds": (
        changed("done", torch.zeros(5, dtype=torch.bool)),
        r"'done' and \('next', 'done'\) differ in dtype or shape",
    ),
    "a key that is taken": (changed("shift", torch.zeros(5)), "'shift' is a key of the data"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, tmp_path: Path) -> None:
    change, message = REFUSED[what]
    written = write(5, (), 8, {(3, 0)})
    change(written.data)
    for hook in (TED2Flat(), TED2Nested()):
        with pytest.raises(ValueError, match=message):
            written.told(hook)(written.data, tmp_path / "flat")
    assert not list(tmp_path.iterdir())


def test_arguments() -> None:
    written = write(5, (), 8, ())
    data = written.data
    for hook in (TED2Flat(), TED2Nested()):
        with pytest.raises(TypeError, match="set shift and is_full"):
            hook(data)
        hook.shift, hook.is_full = 6, True
        with pytest.raises(ValueError, match="shift must be a row of 5, got 6"):
            hook(data)
    with pytest.raises(ValueError, match="must be one of done_keys below 'next'"):
        flat_of(written, done_key=("next", "obs"))
    with pytest.raises(TypeError, match=r"done_keys must be a list or tuple of keys, got 'done'"):
        TED2Flat(done_keys="done")
    with pytest.raises(TypeError, match="reward_keys"):
        Nested2TED(reward_keys="reward")
    hook = written.told(TED2Flat())
    with pytest.raises(TypeError, match="expected a tensordict, got Tensor"):
        hook(torch.zeros(5))
    data["text"] = NonTensorData("hello", batch_size=[5])
    with pytest.raises(TypeError, match="'text': only tensors"):
        hook(data)
    with pytest.raises(ValueError, match="no rows"):
        hook(TensorDict({}, [0]))
    for load in (Flat2TED(), Nested2TED(), H5Combine()):
        with pytest.raises(TypeError, match="tensordict"):
            load(torch.zeros(5))


# ---------------------------------------------------------------------- loading


DAMAGED = {
    "a row less": (changed("action", torch.zeros(4, 2)), "'action' has 4 rows: 5 rows with 2 ends have 5, or 7"),
    "no flags": (changed("done", None), "'done' is missing"),
    "flags of other rows": (changed("done", torch.zeros(7, 1)), r"done flags of shape \[7, 1\] for 5 rows"),
    "no shift": (changed("shift", None), "'shift' should be integers"),
    "another shape": (changed("_storage_shape", NonTensorData((6,))), r"done flags of shape \[5, 1\] for 6 rows"),
}
UNFIT = {
    "an entry less": (changed("action", None), r"'action' is torch.float64 \[5, 2\], out has missing"),
    "another dtype": (
        changed("action", torch.zeros(5, 2)),
        r"'action' is torch.float64 \[5, 2\], out has torch.float32",
    ),
}


@pytest.mark.parametrize("what", [*DAMAGED, *UNFIT])
def test_what_does_not_fit_is_not_loaded(what: str) -> None:
    written = write(5, (), 8, {(4, 0)})
    flat, out = flat_of(written), copied(written.data)
    change, message = (DAMAGED | UNFIT)[what]
    change(flat if what in DAMAGED else out)
    before = copied(out)
    for place in (None, out) if what in DAMAGED else (out,):
        with pytest.raises(ValueError, match=message):
            Flat2TED()(flat, out=place)
    assert not differences(out, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("traj_0", None), "1 trajectories should be"),
        (changed(("traj_1", "action"), None), "traj_1 has other entries than traj_0"),
        (changed(("traj_1", "action"), torch.zeros(4, 9)), "'action' has different shapes"),
        (changed(("traj_1", "action"), torch.zeros(9, 2).double()), "other numbers of rows"),
    ],
)
def test_trajectories_that_do_not_fit_together(change: Any, message: str) -> None:
    written = write(5, (), 8, {(4, 0)})
    split = written.told(H5Split())(written.told(TED2Nested())(written.data))
    change(split)
    with pytest.raises(ValueError, match=message):
        Nested2TED()(H5Combine()(split))
    with pytest.raises(ValueError, match="0 trajectories"):
        H5Combine()(TensorDict({}))
    with pytest.raises(ValueError, match="expected a nested tensor"):
        Nested2TED()(TensorDict({"done": torch.zeros(5, 1)}, [5]))

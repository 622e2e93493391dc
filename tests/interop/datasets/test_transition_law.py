"""Rows of each loader are the transitions that were recorded, all of them, and no trajectory has steps of two episodes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from interop import SliceSampler, SliceSamplerWithoutReplacement
from interop.datasets import gen_dgrl, grouping
from tests.interop.datasets.sources_law import FORMATS, Format, Step, play

Made = tuple[Format, dict[str, Any], list[list[Step]]]
LENGTHS = (5, 1, 3, 7, 2, 1, 1, 6, 4)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(len(tensor), -1)[:, 0].numpy().astype(np.int64)


def decoded(rows: Any, form: Format) -> list[Step]:
    """The steps in rows."""
    then = rows["next"]
    flags = {
        key: numbers(then[key]) != 0 if key in then else np.zeros(len(rows), bool)
        for key in ("terminated", "truncated")
    }
    assert not (flags["terminated"] & flags["truncated"]).any()
    ends = np.where(flags["terminated"], "terminated", np.where(flags["truncated"], "truncated", ""))
    states = [form.decode(side[form.observation].numpy()) for side in (rows, then)]
    columns = states[0], numbers(rows["action"]), numbers(then["reward"]), states[1], ends
    return [Step(*map(int, each[:4]), str(each[4])) for each in zip(*columns, strict=True)]


GIVEN = [pytest.param((form, 0), id=form.name) for form in FORMATS]
GIVEN += [pytest.param((form, 1), id=f"{form.name} again", marks=pytest.mark.slow) for form in FORMATS]


@pytest.fixture(scope="module", params=GIVEN)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """A format, the arguments of its loader, and the steps of each episode that upstream's reader gives."""
    form, seed = request.param
    folder, rng = tmp_path_factory.mktemp(form.name), np.random.default_rng(seed)
    lengths = LENGTHS if seed else rng.permutation(LENGTHS).tolist()
    (folder / "files").mkdir()
    expected = form.write(folder / "files", play(rng, lengths, form.ends))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gen_dgrl.CATEGORIES, "level_1_E", ("", 100))
        patch.setattr(grouping, "_BYTES", 100)  # several parts
        yield form, {"root": folder / "root", "from_local": folder / "files"}, expected


def test_rows_are_the_recorded_transitions(made):
    form, arguments, expected = made
    rows = form.construct(**arguments)[:]
    found, flags = decoded(rows, form), rows["next"].select("done", "terminated", "truncated", strict=False)
    assert found == [step for episode in expected for step in episode]
    assert torch.equal(flags.pop("done") != 0, sum(flag != 0 for flag in flags.values()) != 0)
    for step in found:
        assert step.reward == step.state + step.action
        assert step.next_state == step.reward or step.end


KEYS = [{}, {"end_key": ("next", "done")}, {"end_key": "done"}, {"traj_key": "episode"}]


@pytest.mark.parametrize("keys", [{}, {"end_key": ("next", "done")}], ids=str)
def test_slices_have_steps_of_one_episode(made, keys):
    form, arguments, _ = made
    if not keys and not form.ids:
        pytest.skip("ids are not of one episode")
    for kind in (SliceSampler, SliceSamplerWithoutReplacement):
        data = form.construct(**arguments, batch_size=20, sampler=kind(slice_len=2, **keys))
        for _ in range(5):
            rows = decoded(data[data.sample()["index"].reshape(-1)], form)
            for one, other in zip(rows[::2], rows[1::2], strict=True):
                assert other.state == one.reward and not one.end


def test_trajectories_are_the_episodes(made):
    form, arguments, expected = made
    if not form.splits:
        pytest.skip("there is no split_trajs")
    rows = form.construct(**arguments, split_trajs=True)[:]
    assert [decoded(each[each["mask"]], form) for each in rows] == expected

"""Frames that could not be, or that items, batches and states do not fit, are refused while tracing; a rule is a value."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from fbuf import Buffer, Frames, Trajectories

pytestmark = pytest.mark.usefixtures("device")

OBS = np.zeros((3, 4), np.float32)
GOOD = {"obs": OBS, "next_obs": OBS, "end": np.bool_(0)}


@pytest.mark.parametrize(
    ("frames", "item", "error", "says"),
    [
        (Frames(), {**GOOD, "next_obs": OBS.astype(np.float16)}, ValueError, "one shape and dtype"),
        (Frames(), {**GOOD, "next_obs": OBS[:2]}, ValueError, "one shape and dtype"),
        (Frames(stack=3), GOOD, ValueError, "axis=-1 of it must be the 3 frames"),
        (Frames(axis=2), GOOD, ValueError, "axis=2 of it"),
        (Frames(axis=-3), GOOD, ValueError, "axis=-3 of it"),
        (Frames(obs="pixels"), GOOD, ValueError, "no such leaf"),
        (Frames(obs=("obs", "left")), GOOD, ValueError, "no such leaf"),
        (Frames(next_obs="both"), {**GOOD, "both": {"a": OBS, "b": OBS}}, ValueError, "no single array"),
        (Frames(next_obs="obs"), GOOD, ValueError, "a leaf twice"),
        ((Frames(), Frames()), GOOD, ValueError, "a leaf twice"),
        (Frames(), {**GOOD, "obs": OBS + 0j, "next_obs": OBS + 0j}, TypeError, "real numbers"),
        (Frames(finals=2**31 - 10), GOOD, ValueError, "at most 2147483639 frames"),
    ],
)
def test_items_that_the_frames_do_not_fit_are_refused(frames: Any, item: Any, error: type, says: str) -> None:
    buffer = Buffer(8, trajectories=Trajectories(terminated="end"), frames=frames)
    with pytest.raises(error, match=says):
        buffer.init(item)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"stack": 0}, ValueError, "stack must be at least 1"),
        ({"stack": 2.0}, TypeError, "stack must be an int"),
        ({"axis": 0.5}, TypeError, "axis must be an int"),
        ({"axis": True}, TypeError, "axis must be an int"),
        ({"padding": "reset"}, ValueError, "'first' or 'zero'"),
        ({"finals": 0}, ValueError, "finals must be at least 1"),
        ({"obs": ()}, TypeError, "obs must be a key"),
        ({"next_obs": 1.5}, TypeError, "next_obs must be a key"),
    ],
)
def test_frames_that_could_not_be_are_refused(options: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        Frames(**options)


def test_frames_need_trajectories_and_are_instances() -> None:
    with pytest.raises(ValueError, match="where trajectories end"):
        Buffer(8, frames=Frames())
    for frames in (Frames, (Frames(), "obs")):
        with pytest.raises(TypeError, match="frames must be"):
            Buffer(8, trajectories=Trajectories(terminated="end"), frames=frames)  # type: ignore[arg-type]


def test_batches_are_checked_as_items_with_their_observations() -> None:
    buffer = Buffer(8, trajectories=Trajectories(terminated="end"), frames=Frames())
    state, good = buffer.init(GOOD), jax.tree.map(lambda leaf: np.stack([leaf] * 2), GOOD)
    for key, bad, error, says in [
        ("obs", good["obs"][..., :3], ValueError, r"\['obs'\]: the batch needs shape \[n, 3, 4\]"),
        ("next_obs", good["next_obs"].astype(np.float16), TypeError, r"\['next_obs'\]: items are float32"),
        ("end", good["end"][:1], ValueError, "this leaf has|has 1 rows"),
    ]:
        with pytest.raises(error, match=says):
            buffer.extend(state, {**good, key: bad})
    with pytest.raises(ValueError, match="structure"):
        buffer.extend(state, {key: good[key] for key in ("obs", "end")})


def test_a_state_of_a_buffer_with_other_frames_is_refused() -> None:
    ends = Trajectories(terminated="end")
    made = [Buffer(8, trajectories=ends, frames=frames) for frames in ((), Frames(), Frames(finals=3))]
    states = [buffer.init(GOOD) for buffer in made]
    for (i, buffer), (j, state) in itertools.product(enumerate(made), enumerate(states)):
        if i != j:
            with pytest.raises(ValueError, match="other"):
                buffer.read(state, np.arange(2))

"""The page of a buffer, in a real browser."""

import itertools
import json
import threading
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import interop
from interop import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from interop.view.page import PackedFacts
from interop.view.page_facts import facts_of
from interop.view.thinning import evenly, extremes, summary
from tests.interop.view.browser import CHROMIUM, DRIVER, Browser

in_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium and its driver are not installed")


def buffer_of(rows=130, capacity=100, sampler=None, length=20, images=False):
    """Episodes of `length` rows; of every third one the rewards are negative."""
    step = torch.arange(rows) % length
    number = torch.arange(rows) // length
    reward = torch.where(number % 3 == 0, -1.0, 1.0 + number)
    data = {
        "obs": torch.stack([step.float(), number.float() * step], -1),
        "next": {
            "reward": reward[:, None],
            "terminated": ((step == length - 1) & (number % 2 == 0))[:, None],
            "truncated": ((step == length - 1) & (number % 2 == 1))[:, None],
        },
    }
    if images:
        pixels = torch.zeros(rows, 3, 16, 16, dtype=torch.uint8)
        pixels[torch.arange(rows), 0, 5, step % 16] = 255
        data |= {"pixels": pixels, "thought": NonTensorStack(*[f"<b>step</b> {each}" for each in step.tolist()])}
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=8)
    buffer.extend(TensorDict(data, [rows]))
    return buffer


# ---------------------------------------------------------------------- facts


def test_the_facts_are_those_of_the_buffer():
    buffer = buffer_of()
    facts = facts_of(buffer, include=[2])
    episodes = buffer.episodes
    assert facts["buffer"]["written"] == 130 and facts["buffer"]["cursor"] == 30
    listed = facts["episodes"]
    assert listed["length"].tolist() == episodes.lengths.tolist()
    assert listed["return"].tolist() == episodes.returns.tolist()
    assert [listed["kinds_of_ends"][each] for each in listed["end"]] == episodes.ends.tolist()
    assert facts["ring"]["episode"].tolist() == episodes.numbers.tolist()
    assert facts["ring"]["age"].tolist() == [(29 - row) % 100 for row in range(100)]
    assert facts["details"][0]["number"] == 2
    assert facts["details"][0]["curves"]["obs"].T.tolist() == episodes[2]["obs"].tolist()
    rewards = next(key for key in facts["keys"] if key["name"] == "next.reward")
    assert rewards["summary"]["mean"] == pytest.approx(buffer[:]["next", "reward"].mean().item())
    json.dumps(PackedFacts(facts).tree, allow_nan=False)


def test_probabilities_are_those_of_draws():
    torch.manual_seed(0)
    for sampler in (
        RandomSampler(),
        PrioritizedSampler(100, 0.7, 0.5),
        SliceSampler(slice_len=4),
        SliceSampler(slice_len=16, strict_length=False),
    ):
        buffer = buffer_of(sampler=sampler, rows=117, length=13)
        buffer.update_priority(torch.arange(100), torch.rand(100)) if isinstance(sampler, PrioritizedSampler) else None
        facts = facts_of(buffer)
        probability = facts["ring"]["probability"].astype(np.float64)
        assert probability.sum() == pytest.approx(1, rel=1e-5)
        slots = []
        draw = itertools.count()
        for _ in range(300):
            index = sampler.draw(buffer.storage, 64, np.array([next(draw), 7], np.uint32))[0]
            slots.append(np.asarray(index[0] if isinstance(index, tuple) else index))
        drawn = np.bincount(np.concatenate(slots), minlength=100) / sum(map(len, slots))
        assert np.abs(drawn - probability).max() < 0.1 * probability.max() + 0.002
        assert not drawn[probability == 0].any()


def test_what_cannot_be_drawn_is_named():
    facts = facts_of(buffer_of(sampler=SliceSampler(slice_len=15)))["sampler"]
    assert facts["refused"] == [
        {"reason": "too few rows of its trajectory are stored for a slice", "items": 20, "episodes": 2}
    ]
    assert facts["never"] == 20


def test_buffers_without_episodes_or_rows_have_a_page(tmp_path):
    empty = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    tensors = ReplayBuffer(storage=LazyTensorStorage(5))
    tensors.extend(torch.arange(3))
    texts = ReplayBuffer(storage=ListStorage(5))
    texts.extend(["a", "b"])
    for buffer in (empty, tensors, texts):
        assert interop.view(buffer, out=tmp_path / "page.html").stat().st_size > 1e6
    with pytest.raises(TypeError, match="ReplayBuffer or a path"):
        interop.view(torch.zeros(3))
    with pytest.raises(IndexError, match="episode 99"):
        interop.view(buffer_of(), include=[99])


def test_a_million_rows_are_thinned(tmp_path):
    buffer = buffer_of(rows=1_000_000, capacity=1_000_000, length=10)
    start = time.perf_counter()
    facts = facts_of(buffer)
    assert time.perf_counter() - start < 60
    assert len(facts["ring"]["episode"]) <= 24_000 and facts["episodes"]["count"] == 100_000
    assert 20_000 <= len(facts["episodes"]["number"]) < 20_500
    assert interop.view(buffer, out=tmp_path / "page.html").stat().st_size < 10e6


def test_thinning_keeps_peaks_and_counts():
    curve = np.zeros((1, 10_000), np.float32)
    curve[0, 4_321] = 5
    steps, points = extremes(curve, 400)
    assert points.shape == (1, 400) and points.max() == 5
    assert abs(steps[points[0].argmax()] - 4_321) <= 50 and (np.diff(steps) > 0).all()
    assert evenly(10, 3).tolist() == [0, 4, 9] and evenly(2, 3).tolist() == [0, 1]
    found = summary(np.array([1.0, 3.0, np.nan, np.inf]))
    assert (found.low, found.mean, found.high, found.nan, found.infinite, sum(found.counts)) == (1, 2, 3, 1, 1, 2)
    assert summary(np.array([True, False, True])).counts == [1, 2]


def test_the_server_makes_the_page_anew():
    buffer = buffer_of(rows=40)
    running = interop.view.server(buffer)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{running.server_address[1]}/"
        for rows in (40, 60):
            with urllib.request.urlopen(address) as answer:
                assert f"<b>{rows}</b> rows stored" in answer.read().decode()
            buffer.extend(buffer[:20])
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


def test_a_recording_of_rerun(tmp_path):
    with (
        pytest.raises(IndexError, match="episode 99")
        if find_spec("rerun")
        else pytest.raises(ImportError, match="rerun")
    ):
        interop.view.to_rerun(buffer_of(), tmp_path / "none.rrd", include=[99])
    pytest.importorskip("rerun")
    path = interop.view.to_rerun(buffer_of(images=True), tmp_path / "all.rrd")
    assert path.read_bytes()[:4] == b"RRF2" and path.stat().st_size > 10_000


# ---------------------------------------------------------------------- the browser


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("page") / "buffer.html"
    interop.view(buffer_of(images=True, sampler=SliceSampler(slice_len=15)), out=path)
    return path.as_uri()


@in_browser
def test_a_reader_uses_the_page(browser, page):
    browser.prefer("light")
    browser.open(page)
    assert browser.wait("Number(document.body.dataset.drawn)") < 30_000
    browser.wait("document.body.dataset.plots > 0")
    # Nothing comes from a network.
    assert (
        browser.run("return performance.getEntriesByType('resource').filter(e => e.name.startsWith('http')).length")
        == 0
    )

    # The filter filters, and the list is sorted.
    browser.type("#filter", "return > 50, end = terminated")
    assert browser.run("return [...document.querySelectorAll('#rows tr')].map(r => Number(r.dataset.episode))") == [
        1,
        3,
    ]
    assert "2 of 6 episodes" in browser.run("return document.querySelector('#count').textContent")
    browser.type("#filter", "\ue009a\ue000\ue003")
    browser.wait("document.querySelectorAll('#rows tr').length === 6")
    browser.click("#columns th:nth-child(2) button")
    returns = browser.run(
        "return [...document.querySelectorAll('#rows td:nth-child(2)')].map(c => Number(c.textContent))"
    )
    assert returns == sorted(returns, reverse=True)

    # Clicking an episode shows its curves.
    browser.click('#rows tr[data-episode="3"]')
    browser.wait("document.querySelectorAll('[data-curve=obs] .scatterlayer .trace').length === 2")
    assert "Episode 3" in browser.run("return document.querySelector('#detail').textContent")
    assert browser.run("return document.querySelector('[data-curve=obs] .js-plotly-plot').data[0].y") == [*range(20)]

    # Arrows move the image, the text and the steps.
    before = browser.run("return document.querySelector('.now').src")
    browser.press("right", "right", "right", "left")
    assert browser.run("return document.querySelector('.now').alt") == "pixels, step 2"
    assert browser.run("return document.querySelector('.now').src") != before
    assert browser.run("return document.querySelector('.now').naturalWidth") == 16
    assert browser.run("return document.querySelector('[data-text]').textContent") == "<b>step</b> 2"
    browser.press("down")  # in the list: the next episode
    assert "Episode 3" not in browser.run("return document.querySelector('#detail').textContent")

    # A click in the ring chooses the episode there.
    browser.run("document.querySelector('#ring').scrollIntoView()")
    browser.click("#ring")
    chosen = browser.run("return document.querySelector('#rows tr[aria-selected=true]').dataset.episode")
    browser.wait(f"document.querySelector('#detail h3').textContent === 'Episode {chosen}'")
    for name in browser.run("return [...document.querySelectorAll('#colours input')].map(i => i.value)"):
        browser.click(f"#colours input[value={name}]")
    assert browser.messages() == []


@in_browser
def test_light_and_dark(browser, page):
    paper = "getComputedStyle(document.body).backgroundColor"
    found = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(page)
        browser.wait("document.body.dataset.plots > 0")
        found.append(browser.run(f"return {paper}"))
    assert found[0] == "rgb(255, 255, 255)" and found[1] != found[0]
    browser.click("#theme")
    assert browser.run(f"return {paper}") == found[0]
    browser.prefer("light")
    assert browser.messages() == []


@in_browser
def test_screen_readers_find_names(browser, page):
    browser.open(page)
    browser.wait("document.body.dataset.plots > 0")
    names = browser.names()
    silent = {
        role for role, name in names if role in ("button", "radio", "slider", "searchbox", "grid", "image") and not name
    }
    assert not silent
    spoken = {name for _, name in names}
    assert {"Episodes", "Step of the episode", "Sort by return", "The chosen episode"} <= spoken
    assert any(name.startswith("The ring: 100 rows are stored of 100, the cursor is at row 30") for name in spoken)
    assert any(name.startswith("Distribution of next.reward") for name in spoken)


@in_browser
def test_an_empty_buffer_opens_without_a_message(browser, tmp_path):
    browser.open(interop.view(TensorDictReplayBuffer(storage=LazyTensorStorage(5)), out=tmp_path / "a.html").as_uri())
    browser.wait("document.body.dataset.drawn")
    assert "No episodes" in browser.run("return document.querySelector('#detail').textContent")
    assert browser.messages() == []

"""Every storage with every sampler and writer: they work together, or the constructor refuses them."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

import interop
from interop import ReplayBufferEnsemble, Sampler, Storage, TensorDictReplayBuffer, Writer
from tests.interop.every_pair import outcome, page
from tests.interop.pair_history import (
    BUFFERS,
    CELLS,
    LANES,
    LAYOUTS,
    LISTS,
    SAMPLERS,
    SLICES,
    STORAGES,
    WRITERS,
    Cell,
    History,
    as_given,
    ids_of,
    parts,
)
from tests.interop.rows import check_same, refused

PAGE = (Path(__file__).parents[2] / "docs" / "lookup" / "pairs.md").read_text()
ERRORS = {"RuntimeError": RuntimeError, "TypeError": TypeError, "ValueError": ValueError}


def reasons(cell: Cell) -> set[str]:
    """The errors that may refuse these parts; none if they go together."""
    found = set()
    if cell.sampler in SLICES and cell.storage in ("ListStorage", "CompressedListStorage"):
        found.add("RuntimeError")  # episode boundaries of all items cannot be read
    if cell.writer == "TensorDictMaxValueWriter":
        if cell.ndim == 2 or cell.storage == "LazyFrameStorage":
            found.add("ValueError")
        if cell.sampler in SLICES:
            found.add("TypeError")  # it keeps no order
    if cell.sampler == "ConsumingSampler":
        if cell.ndim == 2:
            found.add("ValueError")
        if cell.storage == "LazyFrameStorage" or "RoundRobin" not in cell.writer:
            found.add("TypeError")
    return found


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_pair_works_or_is_refused(half: int) -> None:
    """Each pair in one of the two buffers, alternately; the slow half tests it in the other one."""
    wrong = {}
    every = dict.fromkeys(cell._replace(buffer="") for cell in CELLS)
    for pair, buffer in zip(every, itertools.cycle(BUFFERS), strict=False):
        cell = pair._replace(buffer=buffer if not half else next(other for other in BUFFERS if other != buffer))
        what, words = outcome(cell)
        if what not in (reasons(cell) or {"reads" if cell.writer == "ImmutableDatasetWriter" else "works"}):
            wrong[cell] = what, words
    assert not wrong


def test_the_page_is_up_to_date() -> None:
    assert page(run=False) == PAGE, "run `python -m tests.interop.every_pair > docs/lookup/pairs.md`"


REFUSED = [cell for cell in CELLS if reasons(cell)]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=pytest.mark.slow if n % 3 else ()) for n, cell in enumerate(REFUSED)], ids=str
)
def test_a_refusal_changes_nothing(cell: Cell) -> None:
    what, words = outcome(cell, run=False)
    storage, sampler, writer = parts(cell)
    held = len(storage)
    with pytest.raises(ERRORS[what]) as error:
        BUFFERS[cell.buffer](storage=storage, sampler=sampler, writer=writer)
    assert str(error.value) == words
    assert len(storage) == held and not storage.followers.all() and not hasattr(writer, "_storage")
    buffer = BUFFERS[cell.buffer](storage=storage)
    if cell.writer != "ImmutableDatasetWriter":
        buffer.extend(as_given(ids_of(0, 4, LANES if cell.ndim == 2 else 1), cell))
    buffer.sample(4)
    exchanges = [lambda: buffer.set_sampler(sampler), lambda: buffer.set_writer(writer)]
    for exchange in exchanges:
        try:
            exchange()
        except (RuntimeError, TypeError, ValueError):
            with refused(buffer, tuple(ERRORS.values())):
                exchange()
            break
    else:
        pytest.fail("was not refused")
    buffer.sample(4)


# Classes whose own tests have such a history: one needs a server, one draws each window of a trajectory once.
ELSEWHERE = {"StoreStorage", "StreamingSliceSampler"}


def test_every_exported_class_is_in_the_lists() -> None:
    for kind, known in ((Storage, STORAGES), (Sampler, SAMPLERS), (Writer, WRITERS)):
        exported = {
            name
            for name in interop.__all__
            if isinstance(each := getattr(interop, name), type) and issubclass(each, kind)
        }
        assert exported - set(known) - ELSEWHERE == {kind.__name__, f"{kind.__name__}Ensemble"}
    assert set(LISTS) < set(STORAGES)


def test_memory_without_an_index_takes_batches_that_have_one():
    buffer = TensorDictReplayBuffer(storage=STORAGES["TensorStorage"](12, 1))
    batch = buffer.sample(3)
    assert "index" in batch and "index" not in buffer[:]
    buffer.extend(batch)
    assert "index" not in buffer[:] and "index" in batch
    check_same(buffer[:3]["x"], batch["x"])


@pytest.mark.parametrize("buffer", BUFFERS)
def test_an_ensemble_has_members_of_every_kind(buffer: str) -> None:
    cells = []
    # An epoch of so few slices has no two whole batches.
    short = ("SliceSamplerWithoutReplacement", "ImmutableDatasetWriter")
    kinds = [each for each in itertools.product(SAMPLERS, WRITERS) if each != short]
    used: Counter[str] = Counter()
    for layout in LAYOUTS + LAYOUTS:
        fitting = [cell for each in kinds if not reasons(cell := Cell(*layout, *each, buffer))]
        cells.append(min(fitting, key=lambda cell: (used[cell.sampler], used[cell.writer])))
        used.update((cells[-1].sampler, cells[-1].writer))
    assert {each.sampler for each in cells} == set(SAMPLERS) and {each.writer for each in cells} == set(WRITERS)
    members = [History(cell) for cell in cells]
    for member in members:
        for count in (5, 1, 12) if member.cell.writer != "ImmutableDatasetWriter" else ():
            member.write(count)
    ensemble = ReplayBufferEnsemble(
        *(each.buffer for each in members), sample_from_all=True, batch_size=4 * len(members)
    )
    for _ in range(2):
        batch = ensemble.sample()
        assert batch.shape == (len(members), 4)
        for i, (member, part) in enumerate(zip(members, batch.unbind(0), strict=True)):
            assert (part["index", "buffer_ids"] == i).all()
            at = part["index", "index"].reshape(4, -1).numpy()
            lane = at[:, 1] if member.cell.ndim == 2 else 0
            member.check_items(part, member.held[at[:, 0], lane], skip=(("next", "done"),))

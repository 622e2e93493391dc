"""Rows of a queue on files: values come back, puts are whole, runs follow each other, files go when nobody needs them."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointCorrupt
from interop.transfer_queue import OtherRunError, QueueFiles, Stored


def fresh(path: Path, **options: bool) -> QueueFiles:
    generation, _ = QueueFiles.begin(path, lambda rows: [row.index for row in rows], **options)
    return QueueFiles(path, generation, **options)


def rows_of(result: tuple[str, object]) -> list[object]:
    kind, value = result
    return list(value.unbind()) if kind == "tensor" else list(value)


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, TensorDict):
        return bool((one == other).all())
    return type(one) is type(other) and one == other


def segments(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "segments").iterdir())


VALUES = {
    "dense": torch.arange(12.0).view(3, 4),
    "deep": torch.arange(24, dtype=torch.int16).view(3, 2, 2, 2),
    "scalars": torch.tensor([True, False, True]),
    "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
    "complex": torch.randn(3, 2, dtype=torch.complex64),
    "not contiguous": torch.arange(12.0).view(4, 3).T,
    "empty": torch.empty(3, 0),
    "jagged": torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(0), torch.ones(4)], layout=torch.jagged),
    "jagged matrices": torch.nested.as_nested_tensor(
        [torch.ones(2, 3), torch.zeros(0, 3), torch.full((1, 3), 2.0)], layout=torch.jagged
    ),
    "scalars apart": [torch.tensor(1), torch.tensor(2), torch.tensor(3)],
    "scalars and vectors": [torch.tensor(1.0), torch.ones(2), torch.tensor(3.0)],
    "strided": torch.nested.as_nested_tensor([torch.ones(2, 3), torch.zeros(1, 5), torch.ones(4, 4)]),
    "separate tensors": [torch.ones(2), torch.ones(3), torch.ones(1)],
    "dtypes": [torch.ones(2), torch.ones(2, dtype=torch.int8), torch.ones(2)],
    "text": ["a", "", "ü" * 100],
    "plain": [{"a": [1, 2.5, None]}, {"a": True}, 7],
    "tuples": [(1, 2), "a", b"bytes"],
    "arrays": [np.arange(3), np.zeros((2, 2), np.float16), np.bool_(True)],
    "arrays of text": [np.array(["a", "bc"]), np.array([b"x"]), np.array(["2020-01-01"], "datetime64[D]")],
    "numbers of NumPy": [np.float16(1.5), np.bytes_(b"x"), np.str_("y")],
    "tensordicts": [TensorDict({"x": torch.ones(2)}, []), TensorDict({"x": torch.zeros(2)}, []), TensorDict({}, [])],
    "float texts": [float("inf"), -0.0, 1e-300],
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1]])
def test_values_come_back(tmp_path: Path, name: str, order: list[int]) -> None:
    given_rows = VALUES[name]
    rows = list(given_rows.unbind()) if isinstance(given_rows, torch.Tensor) else given_rows
    fresh(tmp_path).put("p", [5, 9, 7], {"f": given_rows})
    found = rows_of(QueueFiles(tmp_path, 1).get([[5, 9, 7][each] for each in order], ["f"])["f"])
    assert len(found) == len(order)
    assert all(same(rows[each], value) for each, value in zip(order, found, strict=True))


def test_tensors_that_are_read_can_be_written_to(tmp_path: Path) -> None:
    files = fresh(tmp_path)
    files.put("p", [0, 1], {"f": torch.zeros(2, 3)})
    files.get([0, 1], ["f"])["f"][1].values().fill_(1)
    files.get([1], ["f"])["f"][1].values().fill_(1)
    assert not files.get([0, 1], ["f"])["f"][1].values().any()
    assert not QueueFiles(tmp_path, 1).get([0, 1], ["f"])["f"][1].values().any()


def test_a_read_tensor_outlives_its_row(tmp_path: Path) -> None:
    files = fresh(tmp_path)
    files.put("p", [0, 1], {"f": torch.arange(2.0)})
    _, value = files.get([0, 1], ["f"])["f"]
    files.clear([0, 1])
    files.close()
    assert segments(tmp_path) == [] and value.tolist() == [0, 1]


def test_nothing_is_pickled_unless_it_is_allowed(tmp_path: Path) -> None:
    files = fresh(tmp_path)
    with pytest.raises(TypeError, match="allow_pickle: true"):
        files.put("p", [0], {"f": [threading.Thread]})
    assert segments(tmp_path) == [] and files.stored() == []
    allowing = QueueFiles(tmp_path, 1, allow_pickle=True)
    allowing.put("p", [0], {"f": [threading.Thread]})
    assert allowing.get([0], ["f"])["f"] == ("values", [threading.Thread])
    with pytest.raises(TypeError, match="was pickled"):
        QueueFiles(tmp_path, 1).get([0], ["f"])


@pytest.mark.parametrize(
    ("indexes", "fields", "match"),
    [([0, 0], {"f": torch.ones(2)}, "all different"), ([0, 1], {"f": torch.ones(3)}, "3 rows, 2 indexes")],
)
def test_wrong_sizes_are_refused(tmp_path: Path, indexes: list[int], fields: dict, match: str) -> None:
    files = fresh(tmp_path)
    with pytest.raises(ValueError, match=match):
        files.put("p", indexes, fields)
    assert files.stored() == [] and segments(tmp_path) == []


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    files = fresh(tmp_path)
    files.put("p", [3], {"f": torch.ones(1)})
    with pytest.raises(KeyError, match="row 4 is not stored"):
        files.get([3, 4], ["f"])
    with pytest.raises(KeyError, match="no field 'g'"):
        files.get([3], ["g"])
    (tmp_path / "segments" / segments(tmp_path)[0]).unlink()
    with pytest.raises(CheckpointCorrupt, match="is missing"):
        files.get([3], ["f"])


def test_a_run_gets_the_rows_of_the_one_before(tmp_path: Path) -> None:
    old = fresh(tmp_path)
    old.put("p", [4, 6], {"prompt": ["a", "b"]}, ["ka", "kb"], [{"step": 1}, {"step": 2}])
    old.put("p", [6], {"answer": torch.ones(1, 2)}, ["kb"], [{"step": 3}])
    old.put("q", [5], {"prompt": ["c"]})
    old.clear([4])
    seen: list[Stored] = []

    def indexes(rows: list[Stored]) -> list[int]:
        seen.extend(rows)
        return [100 + row.index for row in rows]

    generation, stored = QueueFiles.begin(tmp_path, indexes)
    assert [(row.index, row.partition, row.key, row.fields, row.tags) for row in stored] == [
        (106, "p", "kb", ("answer", "prompt"), {"step": 3}),
        (105, "q", None, ("prompt",), {}),
    ]
    assert [row.index for row in seen] == [6, 5]
    new = QueueFiles(tmp_path, generation)
    assert new.get([106, 105], ["prompt"])["prompt"] == ("values", ["b", "c"])
    for write in (lambda: old.put("p", [7], {"prompt": ["x"]}), lambda: old.clear([105])):
        with pytest.raises(OtherRunError, match="outlived"):
            write()
    assert sorted(row.index for row in old.stored()) == [105, 106]
    new.clear([106, 105])
    assert segments(tmp_path) == []


def test_indexes_of_a_new_run_must_differ(tmp_path: Path) -> None:
    old = fresh(tmp_path)
    old.put("p", [0, 1], {"f": torch.ones(2)})
    with pytest.raises(ValueError, match="as many different indexes"):
        QueueFiles.begin(tmp_path, lambda rows: [0, 0])
    assert old.get([0, 1], ["f"])["f"][1].tolist() == [1, 1]


def test_a_part_of_an_entry_is_rolled_back(tmp_path: Path) -> None:
    files = fresh(tmp_path)
    files.put("p", [0], {"f": torch.zeros(1)})
    log = tmp_path / "log"
    whole = log.read_bytes()
    files.put("p", [1], {"f": torch.ones(1)})
    entry = log.read_bytes()[len(whole) :]
    for size in range(1, len(entry)):  # what a process leaves that is killed within a write
        log.write_bytes(whole + entry[:size])
        later = QueueFiles(tmp_path, 1)
        assert [row.index for row in later.stored()] == [0]
        later.put("p", [2], {"f": torch.ones(1)})
        assert sorted(row.index for row in QueueFiles(tmp_path, 1).stored()) == [0, 2]
        later.close()


def test_a_damaged_entry_is_not_read(tmp_path: Path) -> None:
    files = fresh(tmp_path)
    files.put("p", [3], {"f": torch.zeros(1)})
    files.close()
    log = tmp_path / "log"
    log.write_bytes(log.read_bytes().replace(b"[3]", b"[4]"))
    with pytest.raises(CheckpointCorrupt, match="damaged"):
        QueueFiles(tmp_path, 1).stored()


@pytest.mark.parametrize("keep", [0, 5, -1])
def test_a_file_that_was_cut_is_not_read(tmp_path: Path, keep: int) -> None:
    files = fresh(tmp_path)
    files.put("p", [3], {"f": torch.zeros(1)})
    path = tmp_path / "segments" / segments(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointCorrupt):
        files.get([3], ["f"])


def test_a_long_log_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interop.transfer_queue.log._COMPACT_FROM", 2000)
    files, reader = fresh(tmp_path), QueueFiles(tmp_path, 1)
    for step in range(100):
        files.put("p", [step % 3], {"f": torch.tensor([step])})
        assert reader.get([step % 3], ["f"])["f"][1].tolist() == [step]
    assert (tmp_path / "log").stat().st_size < 10_000
    assert len(segments(tmp_path)) == 3


def test_threads_and_other_objects_see_what_is_committed(tmp_path: Path) -> None:
    fresh(tmp_path)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            mine, other = QueueFiles(tmp_path, 1), QueueFiles(tmp_path, 1)
            for step in range(20):
                indexes = [number * 10, number * 10 + 1]
                mine.put("p", indexes, {"f": torch.full((2, 3), float(step))})
                assert (other.get(indexes, ["f"])["f"][1].values() == step).all()
                if step % 3 == 0:
                    other.clear(indexes)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(segments(tmp_path)) == 4


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sets(st.integers(0, 5), min_size=1), st.sampled_from(["a", "b", "ab"])),
        st.tuples(st.just("clear"), st.sets(st.integers(0, 5), min_size=1), st.none()),
        st.tuples(st.just("run"), st.none(), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_any_history_is_as_in_a_dict(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    path = tmp_path_factory.mktemp("queue")
    files, model = fresh(path), {}
    for number, (kind, indexes, fields) in enumerate(steps, 1):
        if kind == "put":
            order = sorted(indexes, reverse=bool(number % 2))
            files.put("p", order, {f: torch.tensor(order) * 100 + number for f in fields})
            for index in order:
                model.setdefault(index, {}).update(dict.fromkeys(fields, index * 100 + number))
        elif kind == "clear":
            files.clear(indexes)
            for index in indexes:
                model.pop(index, None)
        else:
            moved = {index: 5 - index for index in model}
            generation, _ = QueueFiles.begin(path, lambda rows, moved=moved: [moved[row.index] for row in rows])
            files, model = QueueFiles(path, generation), {5 - index: row for index, row in model.items()}
        assert {row.index: set(row.fields) for row in files.stored()} == {i: set(row) for i, row in model.items()}
        for field in "ab":
            there = [index for index, row in model.items() if field in row]
            if there:
                assert files.get(there, [field])[field][1].tolist() == [model[index][field] for index in there]
    needed = len({(value % 100) for row in model.values() for value in row.values()})
    assert len(segments(path)) == needed

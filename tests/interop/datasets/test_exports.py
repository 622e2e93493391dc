"""Every kind of entry through every export: equal by our loader and by upstream's, or refused by name before a byte."""

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from interop import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from interop.data.keys import entries_below
from interop.datasets import MinariExperienceReplay, to_hub_folder, to_minari
from interop.datasets.hub_folder import HubFolderExperienceReplay
from tests.interop.datasets.recorded import texts

minari = pytest.importorskip("minari")
datasets = pytest.importorskip("datasets")

N = 5
FORMATS = ["hub", "hdf5", "arrow", "parquet"]
each_format = pytest.mark.parametrize("kind", FORMATS)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path


def rows() -> TensorDict:
    """An episode of three steps, and one of two that is open at its end."""
    seen = torch.arange(N + 1.0)[:, None].repeat(1, 3)
    end = torch.arange(N)[:, None] == 2
    outcome = {"reward": torch.rand(N, 1, dtype=torch.float64), "done": end, "terminated": end.clone()}
    below = {"observation": seen[1:], **outcome, "truncated": torch.zeros_like(end)}
    return TensorDict({"observation": seen[:-1], "action": torch.arange(N), "next": below}, [N])


def buffer(data: TensorDict, storage: type = LazyTensorStorage) -> ReplayBuffer:
    made = TensorDictReplayBuffer(storage=storage(16))
    made.extend(data)
    return made


def export(rb: ReplayBuffer, root: Path, kind: str, **more: Any) -> Any:
    if kind == "hub":
        return to_hub_folder(rb, root / "out", **more)
    return to_minari(rb, "x-v0", data_format=kind, **more)


def loaded(root: Path, kind: str) -> TensorDict:
    """The rows by our loader."""
    if kind == "hub":
        return HubFolderExperienceReplay("x", root=root / "root", from_local=root / "out")[:]
    return MinariExperienceReplay("x-v0", root=root / "root", load_from_local_minari=True)[:]


def upstream(root: Path, kind: str) -> dict[Any, Any]:
    """The values by upstream's reader, by path as our loader names them; those of T + 1 steps without the last."""
    if kind == "hub":
        found = datasets.load_dataset(str(root / "out"), split="train", cache_dir=str(root / "cache"))
        return {tuple(name.split(".")): values for name, values in found[:].items()}
    episodes = [*minari.load_dataset("x-v0")]
    assert [len(each) for each in episodes] == [3, 2]
    assert [bool(flag) for each in episodes for flag in each.truncations] == [False] * 4 + [True]
    assert [bool(flag) for each in episodes for flag in each.terminations] == [False, False, True, False, False]
    values: dict[Any, Any] = {}
    for each in episodes:
        parts = {"observation": each.observations, "action": each.actions, "info": each.infos}
        for path, value in entries_below({**parts, "next": {"reward": each.rewards}}):
            held = value[: len(each)]
            for row in held:  # of nested infos of Arrow a dict
                for inner, part in entries_below({path: row}):
                    values.setdefault(inner, []).append(part)
    return values


def as_plain(value: Any) -> Any:
    """Nested lists, for any kind of array, tensor, text or bytes."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return as_plain(value.tolist())
    if isinstance(value, list | tuple | NonTensorStack):
        return [as_plain(each) for each in (value.tolist() if isinstance(value, NonTensorStack) else value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):  # texts of HDF5
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value


def check(root: Path, kind: str, given: TensorDict) -> None:
    """Whether our loader and upstream's give these rows."""
    ours, theirs = dict(entries_below(loaded(root, kind))), upstream(root, kind)
    for path, value in entries_below(given):
        key, is_flag = path, path[-1] in ("done", "truncated") and path[0] == "next"
        if kind != "hub" and path[0] not in ("next", "observation", "action", "info"):
            key = ("info", *path)
        if kind != "hub" and path[0] == "next" and path[1] not in ("observation", "reward", "terminated", "info"):
            key = ("next", "info", *path[1:])
        if is_flag and kind != "hub":
            continue  # Minari has truncations instead, which `upstream` checks
        found = ours[key]
        if isinstance(value, torch.Tensor):
            assert (found.dtype, found.shape) == (value.dtype, value.shape), path
        assert as_plain(found) == as_plain(value), path
        if kind == "hub" or key[0] != "next" or key == ("next", "reward"):
            flat = value.reshape(N) if kind != "hub" and key == ("next", "reward") else value
            seen = theirs[key]
            if kind in ("arrow", "parquet") and isinstance(value, torch.Tensor):  # dicts of upstream have flat lists
                assert np.array(seen).reshape(-1).tolist() == flat.reshape(-1).tolist(), path
            else:
                assert as_plain(seen) == as_plain(flat), path


NUMBERS = ["bool", "uint8", "int8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64"]
GOOD: dict[Any, Any] = {f"x{name}": torch.arange(N).to(getattr(torch, name)) for name in NUMBERS}
GOOD |= {("nested", name): torch.ones(N, 2).to(getattr(torch, name)) for name in NUMBERS}
GOOD |= {
    "one": torch.rand(N, 1), "dims": torch.rand(N, 1, 2, 1, 2), "image": torch.randint(0, 256, (N, 32, 33, 3)).byte(),
    "text": texts("a", "", "ü\n€", "😀", "x"), "empty text": texts(*[""] * N), "long text": texts(*["x" * 70_000] * N),
    "x y": torch.rand(N), " ": torch.rand(N), "ü€😀": torch.rand(N), "a\nb": torch.rand(N), "'\"`|": torch.rand(N),
    "0": torch.rand(N), "shape": torch.rand(N), "seed": torch.arange(N), "id": torch.arange(N), "rewards": torch.rand(N),
    "episode_id": torch.rand(N), "__index_level_0__": torch.rand(N), "x" * 200: torch.rand(N),
    ("deep", "er", "and", "deeper"): torch.rand(N, 2), ("next", "only"): torch.rand(N), ("next", "words"): texts(*"abcde"),
    "reward": torch.rand(N, 1), "done": torch.arange(N)[:, None] == 1, ("info", "speed"): torch.rand(N),
}  # fmt: skip
HDF5 = {
    "none": torch.zeros(N, 0), "none2": torch.zeros(N, 2, 0), "none3": torch.zeros(N, 0, 2),
    "waves": torch.rand(N, 2, dtype=torch.complex64), ("all", "waves"): torch.rand(N, dtype=torch.complex128),
}  # fmt: skip
MORE = {"hub": {"info": torch.rand(N), "bytes": texts(b"\xff\x00", b"", b"a", b"b", b"c")}, "hdf5": HDF5}
MORE["hub"]["nul"] = texts("a\0b", "\0", "", "x", "y")
for name in FORMATS[1:]:
    MORE[name] = {**MORE.get(name, {}), "a.b": torch.rand(N), ".x": torch.rand(N)}


@each_format
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_entries_come_back(kind: str, storage: type, root: Path) -> None:
    given = rows()
    for key, value in {**GOOD, **MORE[kind]}.items():
        given[key] = value
    export(buffer(given, storage), root, kind)
    check(root, kind, given)


@pytest.mark.parametrize("key", ["observation", "action"])
@pytest.mark.parametrize("kind", FORMATS[1:])
def test_observations_and_actions_come_back(kind: str, key: str, root: Path) -> None:
    names = [*NUMBERS, *(["none"] if kind == "hdf5" else [])]
    inner: dict[Any, Any] = {name: torch.ones(N, 2).to(getattr(torch, name)) for name in names if name != "none"}
    inner |= {"none": torch.zeros(N, 0)} if kind == "hdf5" else {}
    inner |= {
        "words": texts("a", "", "b", "c", "d"),
        "silent": texts(*[""] * N),
        "x y.z": torch.ones(N),
        "0": torch.ones(N),
    }
    given = rows()
    given[key] = TensorDict(inner, [N])
    if key == "observation":
        given["next", key] = TensorDict(inner, [N])
    # Steps whose "next" differs from the next row begin an episode: all rows are alike but for the words.
    given[key, "words"] = texts(*"aaaaa")
    if key == "observation":
        given["next", key, "words"] = texts(*"aaaaa")
    export(buffer(given), root, kind)
    check(root, kind, given)


# ------------------------------------------------------------------ refusals


def jagged(*shape: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(size, *shape) for size in (1, 0, 2, 3, 1)], layout=torch.jagged)


Entries = dict[tuple[str, ...], Any]


def changed(**entries: Any) -> Entries:
    """Entries by their paths; "__" separates names."""
    return {tuple(key.split("__")): value for key, value in entries.items()}


def both(value: Any) -> Entries:
    """The observations before and after a step."""
    return changed(observation=value, next__observation=value)


def update(data: TensorDict, entries: Entries) -> TensorDict:
    for path, value in entries.items():
        data[path] = value
    return data


BAD: dict[str, tuple[Entries, str, list[str]]] = {}  # what is set, the entry named, the formats
for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "uint32", "uint64"):
    BAD[name] = changed(odd=torch.ones(N, 2).to(getattr(torch, name))), "'odd'", FORMATS
for name in ("complex64", "complex128"):
    BAD[name] = changed(odd=torch.ones(N, 2).to(getattr(torch, name))), "'odd'", ["hub", "arrow", "parquet"]
for shape in ((0,), (2, 0), (0, 2)):
    BAD[f"width {shape}"] = changed(odd=torch.zeros(N, *shape)), "'odd'", ["hub", "arrow", "parquet"]
    BAD[f"width {shape} below"] = changed(next__odd=torch.zeros(N, *shape)), "'odd'", ["hub", "arrow", "parquet"]
    BAD[f"observations {shape}"] = both(torch.zeros(N, *shape)), "'observation'", ["hub", "arrow", "parquet"]
    BAD[f"actions {shape}"] = changed(action=torch.zeros(N, *shape)), "'action'", ["hub", "arrow", "parquet"]
BAD["ragged"] = changed(odd=jagged()), "'odd'", FORMATS[1:]
BAD["ragged rows"] = changed(deep__odd=jagged(2)), "'deep', 'odd'", FORMATS[1:]
BAD["ragged below"] = changed(next__odd=jagged()), "'next', 'odd'", FORMATS[1:]
BAD["ragged observations"] = both(jagged()), "'observation'", FORMATS[1:]
for name, value in {
    "None": [None] * N, "numbers": [*range(N)], "lists": [[1]] * N, "dicts": [{"a": 1}] * N,
    "mixed": ["a", 1, None, "b", 2.0], "a late None": ["a", "b", "c", "d", None],
}.items():  # fmt: skip
    BAD[name] = changed(odd=texts(*value)), "'odd'", FORMATS
BAD["bytes"] = changed(odd=texts(*[b"\xff"] * N)), "'odd'", FORMATS[1:]
BAD["bytes and text"] = changed(odd=texts(b"a", "a", "b", "c", "d")), "'odd'", FORMATS
BAD["stacked text"] = (
    changed(odd=NonTensorStack(*(NonTensorStack(NonTensorData("a"), NonTensorData("b")) for _ in range(N)))),
    "'odd'",
    FORMATS,
)
BAD["surrogates"] = changed(odd=texts("a", "b", "c", "d", "\ud800")), "'odd'", FORMATS
BAD["NUL"] = changed(odd=texts("a", "b", "c", "d", "\0")), "'odd'", FORMATS[1:]
for name in ("", "/", "x/y", "x\0y", ".", "..", "\ud800", "x" * 201, "ü" * 101):
    key = repr(name)
    BAD[f"key {name[:9]!r}"] = {(name,): torch.ones(N)}, key, FORMATS
    BAD[f"key {name[:9]!r} inside"] = {("a", name): torch.ones(N)}, key, FORMATS
    BAD[f"key {name[:9]!r} of observations"] = both(TensorDict({name: torch.ones(N)}, [N])), key, FORMATS
BAD["a dot"] = {("a.b",): torch.ones(N)}, "'a.b'", ["hub"]
BAD["a part of a Tuple"] = changed(_index_0=torch.ones(N)), "'_index_0'", FORMATS[1:]
BAD["other dtype below"] = changed(odd=torch.ones(N), next__odd=torch.ones(N).double()), "'odd'", FORMATS[1:]
BAD["nested below"] = changed(odd=torch.ones(N), next__odd__x=torch.ones(N)), "'odd'", FORMATS[1:]
BAD["nested above"] = changed(odd__x=torch.ones(N), next__odd=torch.ones(N)), "'odd'", FORMATS[1:]
BAD["two infos"] = changed(odd=torch.ones(N), info__odd=torch.ones(N)), "'odd'", FORMATS[1:]
BAD["infos inside"] = changed(odd=torch.ones(N), info__odd__x=torch.ones(N)), "'odd'", FORMATS[1:]
BAD["nested episode"] = changed(episode__x=torch.ones(N)), "'episode'", ["hub"]
for name in ("reward", "terminated", "truncated"):
    BAD[f"two {name}s"] = changed(**{f"next__{name}": torch.zeros(N, 2).bool()}), repr(name), FORMATS[1:]
    BAD[f"text {name}"] = changed(**{f"next__{name}": texts(*"abcde")}), repr(name), FORMATS[1:]
BAD["a large reward"] = changed(next__reward=torch.full((N, 1), 2**53 + 1)), "'reward'", FORMATS[1:]
BAD["complex observations"] = both(torch.ones(N, dtype=torch.complex64)), "'observation'", ["hdf5"]


@contextlib.contextmanager
def nothing_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which no file may be made."""

    def publish(*_: Any, **__: Any) -> None:
        raise AssertionError("the check comes too late")

    (root / "minari").mkdir(exist_ok=True)  # Minari makes this folder when it is asked for a path
    before = sorted(root.rglob("*"))
    with monkeypatch.context() as patch:
        for name in ("to_minari", "to_hub_folder"):
            patch.setattr(importlib.import_module(f"interop.datasets.{name}"), "publish", publish)
        yield
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("name", BAD)
def test_entries_are_refused_by_name(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, entry, kinds = BAD[name]
    given = update(rows(), entries)
    try:
        rb = buffer(given)
    except (TypeError, RuntimeError, UnicodeError):  # a storage of tensors refuses it already
        rb = buffer(given, ListStorage)
    for kind in kinds:
        with nothing_written(root, monkeypatch), pytest.raises((TypeError, ValueError)) as raised:
            export(rb, root, kind)
        assert entry in str(raised.value)


@each_format
@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.ones(3), r"\('odd',\) is float32 \[3\] in row 4.*float32 \[2\]"),
        (torch.ones(2).double(), r"\('odd',\) is float64 \[2\] in row 4"),
        (NonTensorData("a"), r"\('odd',\) is text in row 4"),
        (None, r"\('odd',\) is missing in row 4"),
    ],
)
def test_rows_of_lists_that_are_unlike(
    kind: str, value: Any, match: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*rows().unbind(0)]
    for each in given:
        each["odd"] = torch.ones(2)
    given[-1] = given[-1].exclude("odd") if value is None else given[-1].set("odd", value)
    rb = TensorDictReplayBuffer(storage=ListStorage(9))
    for each in given:
        rb.add(each)
    with nothing_written(root, monkeypatch), pytest.raises(ValueError, match=match):
        export(rb, root, kind)
    export(rb, root, kind, exclude=["odd"])
    check(root, kind, rows().update({"next": {"reward": torch.stack([each["next", "reward"] for each in given])}}))


@each_format
def test_entries_are_left_out_by_name(kind: str, root: Path) -> None:
    given = rows()
    kept = given.clone()
    given["odd"], given["deep", "odd"], given["next", "odd"] = jagged(), torch.zeros(N, 0), torch.ones(N).bfloat16()
    with pytest.raises(KeyError, match=r"'od' of exclude is not stored; there are .*'odd'"):
        export(buffer(given), root, kind, exclude=["od"])
    with pytest.raises(TypeError, match="exclude must be a list of keys"):
        export(buffer(given), root, kind, exclude="odd")
    export(buffer(given), root, kind, exclude=["odd", "deep", ("next", "odd")])
    check(root, kind, kept)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_the_process_lives(kind: str, root: Path) -> None:
    """pyarrow divides by the width of a row: the exports run in a process of their own."""
    for entries in (both(torch.zeros(N, 0)), changed(odd=torch.zeros(N, 2, 0)), changed(action=torch.zeros(N, 0))):
        rb = buffer(update(rows(), entries))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; the child does not use it
            child = os.fork()
        if not child:
            try:
                export(rb, root, kind)
            except TypeError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(("kind", "more", "match"), [
    ("hdf5", {"algorithm_name": 3}, "'algorithm_name' is a text"),
    ("hdf5", {"requirements": {1, 2}}, "'requirements' is written as JSON"),
    ("hub", {"description": "\ud800"}, "make no text of the card"),
])  # fmt: skip
def test_what_is_said_beside_the_rows(
    kind: str, more: Any, match: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_written(root, monkeypatch), pytest.raises((TypeError, ValueError), match=match):
        export(buffer(rows()), root, kind, **more)


@pytest.mark.parametrize("colors", [1, 2, 4])
def test_images_that_are_no_jpeg(colors: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = update(rows(), both(torch.zeros(N, 32, 32, colors, dtype=torch.uint8)))
    with nothing_written(root, monkeypatch), pytest.raises(ValueError, match=r"\('observation',\) is uint8 \[32, 32, "):
        export(buffer(given), root, "hdf5", jpeg_encoding=True)


@each_format
def test_buffers_without_rows(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = buffer(rows())
    emptied.empty()
    for rb in (
        emptied,
        TensorDictReplayBuffer(storage=LazyTensorStorage(3)),
        TensorDictReplayBuffer(storage=ListStorage(3)),
    ):
        with nothing_written(root, monkeypatch), pytest.raises(RuntimeError, match="the buffer is empty"):
            export(rb, root, kind)


def test_outcomes_of_the_root_that_say_nothing_are_not_written(root: Path) -> None:
    given = rows()
    given["done"] = torch.zeros(N, 1, dtype=torch.bool)
    export(buffer(given), root, "hdf5")
    assert "info" not in loaded(root, "hdf5")

"""Every kind of path with every command: it works, or the error says what to do. Rows come back from every format."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
import interop
from fbuf import Buffer, Uniform
from interop import FlatStorageCheckpointer, H5StorageCheckpointer, LazyTensorStorage, TensorDictReplayBuffer
from interop.command.app import main
from tests.interop.looking.places import a_buffer, a_checkpoint, a_folder, a_list, an_ensemble, steps

pytest.importorskip("pyarrow")
pytest.importorskip("minari")
TORCHRL = Path(__file__).parents[1] / "checkpoint" / "torchrl_dumps"


def ted(count: int = 30) -> TensorDict:
    """Episodes of five steps, whose next observations are the observations that follow."""
    rows = steps(count).exclude("note")
    rows["observation"] = torch.rand(count, 3)
    rows["next", "observation"] = rows["observation"].roll(-1, 0)
    rows["next", "observation"][4::5] = 7
    return rows


def saved(path: Path, checkpointer: object = None) -> Path:
    storage = LazyTensorStorage(40)
    storage.checkpointer = checkpointer  # type: ignore[assignment]
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(ted())
    buffer.dumps(path)
    return path


def h5(path: Path) -> None:
    storage = LazyTensorStorage(40)
    storage.set(range(30), ted())
    H5StorageCheckpointer().dumps(storage, path.with_suffix(".h5"))
    path.with_suffix(".h5").rename(path)  # it is known by its first bytes


def storage_alone(path: Path) -> None:
    storage = LazyTensorStorage(40)
    storage.set(range(30), steps(30))
    storage.dumps(path)


def dataset(path: Path) -> None:
    hub(path.with_name("hub of the dataset"))
    shutil.copytree(interop.open(path.with_name("hub of the dataset")).data_path, path)


def hub(path: Path) -> None:
    interop.datasets.to_hub_folder(a_buffer(), path)


def lerobot(version: str) -> Callable[[Path], object]:
    from tests.interop.datasets import sources_lerobot

    return lambda path: sources_lerobot.make(path, np.random.default_rng(0), version)


def minari(data_format: str) -> Callable[[Path], object]:
    from tests.interop.datasets import sources_minari

    def make(path: Path) -> None:
        data = sources_minari.collect(path.parent / "minari", f"toy/{data_format}-v0", data_format=data_format)
        path.symlink_to(data.parent)

    return make


def h5_of_minari(path: Path) -> None:
    data = next((path.parent / "minari").rglob("main_data.hdf5"))
    shutil.copy(data, path)


def torchrl(name: str) -> Callable[[Path], object]:
    return lambda path: shutil.copytree(TORCHRL / name, path)


def state(path: Path) -> None:
    fbuf.save_state(path, Buffer(sampler=Uniform(), capacity=8).init({"x": np.zeros(3)}))


def folder(path: Path) -> None:
    a_folder(path / "rows")
    a_folder(path / "storage")  # a name that torchrl uses


MADE: dict[str, Callable[[Path], object]] = {
    "checkpoint": a_checkpoint,
    "rows": a_folder,
    "list": a_list,
    "ensemble": an_ensemble,
    "steps": saved,
    "checkpoint of H5": lambda path: saved(path, H5StorageCheckpointer()),
    "flat checkpoint": lambda path: saved(path, FlatStorageCheckpointer()),
    "storage by itself": storage_alone,
    "state": state,
    "hub": hub,
    "dataset": dataset,
    "lerobot v2.1": lerobot("v2.1"),
    "lerobot v3.0": lerobot("v3.0"),
    "minari hdf5": minari("hdf5"),
    "minari arrow": minari("arrow"),
    "minari parquet": minari("parquet"),
    "h5 of minari": h5_of_minari,
    "h5": h5,
    "torchrl": torchrl("plain"),
    "torchrl h5": torchrl("h5"),
    "torchrl pytree": torchrl("pytree"),
    "folder": folder,
}
TEXT = "an H5 file has steps .* --to rows, hub or checkpoint"
# What each command says of a kind, where it refuses it; a kind of which nothing is said is read and converted.
EVERY = ("view", "checkpoint", "rows", "hub", "minari", "h5", "merge", "resize")
WITH_TEXT = ("checkpoint", "storage by itself", "rows", "hub", "dataset", "lerobot v2.1", "lerobot v3.0")
REFUSED: dict[str, dict[str, str]] = {
    **{name: {"h5": TEXT} for name in WITH_TEXT},
    "list": dict.fromkeys(
        ("rows", "hub", "minari", "h5", "merge"), "items of a ListStorage differ .* Only a checkpoint"
    ),
    "ensemble": {"view": "--member 0", "h5": TEXT},
    "state": dict.fromkeys(EVERY, "fbuf.load_state"),
    "h5 of minari": dict.fromkeys(EVERY, "opened by the folder two above"),
    "torchrl h5": dict.fromkeys(EVERY, "save without a checkpointer"),
    "torchrl pytree": dict.fromkeys(EVERY, r"interop.convert_torchrl\(folder, new_folder, like\)"),
    "torchrl": {**dict.fromkeys(("rows", "hub", "minari", "h5", "merge"), "we/ird .key%|exclude=")},
    "folder": dict.fromkeys(EVERY, "open one: rows, storage"),
}
IN_ROWS = (
    "checkpoint",
    "rows",
    "list",
    "ensemble",
    "steps",
    "checkpoint of H5",
    "flat checkpoint",
    "storage by itself",
    "state",
)
for each in MADE.keys() - set(IN_ROWS):
    REFUSED[each] = {**REFUSED.get(each, {}), "resize": "Resize one" if each == "folder" else "Convert it first"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a path of each kind."""
    root = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for name, make in MADE.items():
            make(root / name)
    return root


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict]]:
    """Runs the command with --json; returns the exit status and what was printed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))

    def run(*arguments: object) -> tuple[int, dict]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = main([*map(str, arguments), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", MADE)
def test_every_kind_is_inspected_and_verified(name: str, places: Path, shell: Callable[..., tuple[int, dict]]) -> None:
    for command in ("inspect", "verify"):
        status, shown = shell(command, places / name)
        assert status == 0 and shown["path"] == str(places / name), (command, shown)
        assert shown["kind"] == interop.inspect(places / name).kind
    if not name.startswith("torchrl") and name != "list":
        facts = interop.inspect(places / name)
        assert facts.keys or facts.members


def asked(name: str, command: str, source: Path, tmp_path: Path) -> list[object]:
    """The arguments of a command."""
    if command == "view":
        return ["view", source, "--out", tmp_path / "page.html"]
    if command == "resize":
        return ["resize", source, tmp_path / "small", 5]
    if command == "merge":
        return ["merge", source, source, tmp_path / "both", "--to", "rows"]
    target = {"minari": "toy/made-v0", "h5": tmp_path / "made.h5"}.get(command, tmp_path / "made")
    return ["convert", source, target, "--to", command]


QUICK = {("checkpoint", "rows"), ("ensemble", "merge"), ("list", "rows"), ("torchrl", "rows"), ("torchrl pytree", "view"),
         ("h5 of minari", "rows"), ("steps", "h5"), ("steps", "minari"), ("h5", "checkpoint"), ("checkpoint of H5", "rows"),
         ("flat checkpoint", "rows"), ("state", "checkpoint"), ("minari arrow", "checkpoint"), ("lerobot v3.0", "resize"),
         ("folder", "checkpoint"), ("storage by itself", "rows"), ("ensemble", "view"), ("minari parquet", "rows"),
         ("minari hdf5", "h5"), ("lerobot v2.1", "rows")}  # fmt: skip
TABLE = [
    pytest.param(name, command, marks=() if (name, command) in QUICK else pytest.mark.slow)
    for name in MADE
    for command in EVERY
]


@pytest.mark.parametrize(("name", "command"), TABLE)
def test_every_kind_is_converted_or_refused(
    name: str, command: str, places: Path, tmp_path: Path, shell: Callable[..., tuple[int, dict]]
) -> None:
    status, shown = shell(*asked(name, command, places / name, tmp_path))
    refused = REFUSED.get(name, {}).get(command)
    if refused is not None:
        assert status == 2, shown
        assert re.search(refused, shown["error"]), shown
        assert not (tmp_path / "made").exists() and not (tmp_path / "made.h5").exists()
        return
    assert status == 0, shown
    if command == "view":
        assert Path(shown["page"]).stat().st_size == shown["bytes"]
    else:
        assert Path(shown["path"]).exists() and interop.verify(shown["path"]).ok


KEYS = ["observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")]


@pytest.mark.parametrize("to", ["checkpoint", "rows", "hub", "minari", "h5"])
def test_rows_come_back_from_every_format(to: str, tmp_path: Path, shell: Callable[..., tuple[int, dict]]) -> None:
    """And from there back into a checkpoint."""
    saved(tmp_path / "first")
    before = interop.open(tmp_path / "first")[:].select(*KEYS)
    target = {"minari": "toy/made-v0", "h5": tmp_path / "made.h5"}.get(to, tmp_path / "made")
    status, shown = shell("convert", tmp_path / "first", target, "--to", to)
    assert status == 0, shown
    made = interop.open(shown["path"])[:].select(*KEYS)
    assert (made == before).all()
    assert shell("convert", shown["path"], tmp_path / "last")[0] == 0
    assert (interop.open(tmp_path / "last")[:].select(*KEYS) == before).all()


def test_an_ensemble_is_its_members_one_after_the_other(tmp_path: Path, shell: Callable[..., tuple[int, dict]]) -> None:
    an_ensemble(tmp_path / "ensemble")
    assert shell("convert", tmp_path / "ensemble", tmp_path / "rows", "--to", "rows")[0] == 0
    assert interop.open(tmp_path / "rows")[:]["action"].flatten().tolist() == [*range(30), *range(7)]
    status, shown = shell("view", tmp_path / "ensemble", "--member", 1, "--out", tmp_path / "page.html")
    assert status == 0 and Path(shown["page"]).exists()
    assert "2 members" in shell("view", tmp_path / "ensemble", "--member", 2)[1]["error"]


def test_a_folder_of_torchrl_is_opened_where_it_is(places: Path) -> None:
    opened = interop.open(places / "torchrl")
    interop.convert_torchrl(places / "torchrl", places / "converted torchrl")
    converted = interop.open(places / "converted torchrl")
    assert len(opened) == len(converted) and (opened[:] == converted[:]).all()
    assert opened.batch_size == converted.batch_size and type(opened.sampler) is type(converted.sampler)
    with pytest.raises(RuntimeError, match="mode='r'"):
        opened.empty()


def test_h5_files_keep_their_capacity(places: Path) -> None:
    opened = interop.open(places / "h5", "r+")
    assert opened.storage.max_size == 40 and len(opened) == 30
    opened.extend(ted(15))
    assert len(opened) == 40


def test_entries_that_a_format_lacks_are_left_out(tmp_path: Path, shell: Callable[..., tuple[int, dict]]) -> None:
    a_checkpoint(tmp_path / "saved")
    asked = ["convert", tmp_path / "saved", tmp_path / "made", "--to", "rows"]
    assert shell(*asked, "--exclude", "note", "--exclude", "next.done")[0] == 0
    assert {each["key"] for each in interop.inspect(tmp_path / "made").keys} == {
        "observation", "action", "next.observation", "next.reward", "index"
    }  # fmt: skip
    asked[2] = tmp_path / "other"
    status, shown = shell(*asked, "--exclude", "nte")
    assert status == 2 and "no such entry, but action" in shown["error"] and not (tmp_path / "other").exists()

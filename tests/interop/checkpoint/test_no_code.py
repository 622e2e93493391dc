"""What is loaded is data: nothing in it is run, nothing is imported, and no other file is read or written."""

import hashlib
import json
import os
import pickle
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointError, CheckpointMismatch
from fbuf.checkpoint.manifest import NAME, Manifest, dump_json
from interop import CompressedListStorage, LazyStackStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from interop.checkpoint.layouts import class_named
from interop.checkpoint.plain_values import opened, plain
from interop.checkpoint.values import decode, encode, load_items, save_items
from tests.interop.checkpoint.payloads import CANARY, PICKLES, TOUCH, Runs, attacks
from tests.interop.checkpoint.saved_values import Pair, Step

REFUSALS = (CheckpointError, ValueError, TypeError, OSError)


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path, monkeypatch):
    """No canary, no module, and no memory for terabytes."""
    monkeypatch.chdir(tmp_path)
    modules, memory = set(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert not list(tmp_path.rglob(CANARY)) and not Path("/tmp", CANARY).exists()
    assert not {"antigravity", "this", "turtledemo"} & (set(sys.modules) - modules)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2**20  # KiB


def test_the_payloads_do_run_where_they_may():
    for payload in PICKLES:
        pickle.loads(payload)
        made = Path(CANARY)
        assert made.exists()
        _ = made.rmdir() if made.is_dir() else made.unlink()


def sample():
    data = TensorDict(
        {"x": torch.ones(3, 2), "s": "a", "td": TensorDict({"y": torch.zeros(3, 1)}, [3])}, [3], names=["t"]
    )
    step = Step(obs=torch.ones(2), note="n", batch_size=[2])
    return [
        data,
        step,
        {"a": [1, 2.5, b"b", None, "t"], 3: np.arange(3)},
        Pair(1.0, torch.ones(1, dtype=torch.bfloat16)),
        (b"b", np.float32(1)),
    ]


def refusals(read, trees):
    """How many of the trees are refused; the others are read, and no other error comes of any."""
    refused = 0
    for tree in trees:
        try:
            read(tree)
        except CheckpointError:
            refused += 1
    return refused


def test_values():
    tree = encode(sample(), "value")
    assert refusals(decode, attacks(tree, each=20)) > 1000


def test_lists():
    tree = save_items([*sample(), *({"x": torch.ones(n % 3), "t": "a" * n} for n in range(30))])
    assert refusals(load_items, attacks(tree, each=8)) > 500


def test_state_dicts():
    storages = [ListStorage(9), LazyStackStorage(9), CompressedListStorage(9)]
    for storage in storages:
        for place, item in enumerate(sample()[:4]):
            storage.set(place, item)
        state = storage.state_dict()
        for attack in attacks(state, each=3):
            try:
                type(storage)(9).load_state_dict(attack)
            except REFUSALS:
                continue
    for item in sample():
        for attack in attacks(plain(item, "item")):
            try:
                opened(attack, "item")
            except REFUSALS:
                continue


@pytest.mark.parametrize("payload", PICKLES, ids=range(len(PICKLES)))
def test_pickles_are_not_read_unless_asked_for(payload):
    raw = np.frombuffer(payload, np.uint8)
    column = {"shapes": np.array([[len(payload)]]), "raw": raw, "json": raw, "dtype": "uint8", "dims": 1}
    one = {"format": 3, "order": np.zeros(1, np.uint8), "forms": [0]}
    for tree in ({**one, "columns": [{"kind": "pickled", **column}]}, {"format": 3, "columns": [{"kind": "pickled"}]}):
        with pytest.raises(CheckpointMismatch, match="allow_pickle=True"):
            decode(tree)
    for kind in ("plain", "complex", "scalar"):
        with pytest.raises(CheckpointError):
            decode({**one, "columns": [{"kind": kind, **column}]})
    assert decode({**one, "columns": [{"kind": "bytes", **column}]}) == payload
    with pytest.raises(TypeError):
        ListStorage(3).load_state_dict({"_storage": [Runs(os.system, TOUCH)]})


def test_a_module_that_is_not_loaded_yet_stays_so():
    import importlib.util

    spec = importlib.util.find_spec("this")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["lazy_this"] = module
    try:
        with pytest.raises(CheckpointMismatch):
            class_named("lazy_this:d", lambda kind: True, "value")
        assert type(module) is not type(sys)  # looking into it would have loaded it
    finally:
        del sys.modules["lazy_this"]


# ---------------------------------------------------------------------- files


def filled(kind):
    buffer = TensorDictReplayBuffer(storage=kind(8), batch_size=2, generator=torch.Generator().manual_seed(0))
    buffer.extend(TensorDict({"x": torch.ones(5, 2), "td": TensorDict({"y": torch.zeros(5, 1)}, [5])}, [5]))
    return buffer


def contents(folder):
    """Every file of a folder by its bytes, and every link by where it leads."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def rewritten(folder, tree):
    """Put another tree in the manifest, with digests that fit."""
    found = Manifest.decoded((folder / NAME).read_bytes())
    found.tree = tree
    (folder / NAME).unlink()
    (folder / NAME).write_bytes(found.encoded())


def standing(buffer):
    """What a refused load leaves as it was."""
    storage, writer = buffer.storage, buffer.writer
    items = None if isinstance(storage, LazyTensorStorage) else [*map(id, storage._storage)]
    rows = storage[:]["x"].sum().item() if items is None else 0
    return items, rows, len(storage), storage.ring.written, storage.ring.version, writer.cursor, buffer.batch_size


KINDS = [ListStorage, LazyStackStorage, CompressedListStorage, LazyTensorStorage]


@pytest.mark.filterwarnings("ignore:the buffer had batch_size")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_manifests(kind, tmp_path):
    filled(kind).dumps(tmp_path / "c")
    tree = Manifest.decoded((tmp_path / "c" / NAME).read_bytes()).tree
    target = filled(kind)
    target.sample()
    refused = 0
    for attack in attacks(tree, each=3):
        rewritten(tmp_path / "c", attack)
        before, held = contents(tmp_path / "c"), standing(target)
        try:
            target.loads(tmp_path / "c")
        except CheckpointError:
            refused += 1
            assert standing(target) == held
        assert contents(tmp_path / "c") == before
    assert refused > 25
    rewritten(tmp_path / "c", tree)
    target.loads(tmp_path / "c")
    assert len(target) == 5


def _signed(body):
    head = dump_json({"schema": 1, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()})
    return head + b"\n" + body + b"\n"


def test_text_that_is_no_manifest(tmp_path):
    filled(ListStorage).dumps(tmp_path / "c")
    body = (tmp_path / "c" / NAME).read_bytes().partition(b"\n")[2][:-1]
    described = json.loads(body)
    name = described["files"][0][0]
    bodies = [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        body.replace(b'"kind"', b'"kind":1,"kind"', 1),
        body.replace(b'"capacity":8', b'"capacity":NaN'),
        body.replace(b'"capacity":8', b'"capacity":1e999'),
        body.replace(b'"capacity":8', b'"capacity":' + b"9" * 5000),
        *PICKLES,
        *(
            dump_json({**described, "files": [[other, *described["files"][0][1:]], *described["files"][1:]]})
            for other in (f"../{name}", f"/etc/{name}", "..", ".", "", "a/b", "a\0b", "/etc/passwd", "../MANIFEST.json")
        ),
        *(dump_json({**described, "folder": other}) for other in ("..", "/etc", "data-../..", "", ".", "data-x/../..")),
        *(dump_json({**described, "files": [[name, size, 0]]}) for size in (4 * 2**40, -1, 2**70, "1")),
    ]
    target = filled(ListStorage)
    for each in bodies:
        (tmp_path / "c" / NAME).unlink()
        (tmp_path / "c" / NAME).write_bytes(_signed(each))
        with pytest.raises(CheckpointError):
            target.loads(tmp_path / "c")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_links_are_not_followed(kind, tmp_path):
    filled(kind).dumps(tmp_path / "c")
    files = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert len(files) >= 2
    for path in files:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises((CheckpointError, OSError)):
            filled(kind).loads(tmp_path / "c")
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
    (folder,) = [path for path in (tmp_path / "c").iterdir() if path.is_dir()]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        filled(kind).loads(tmp_path / "c")

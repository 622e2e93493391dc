"""DQN Replay: steps from frames that are stored once, what ends an episode, downloads, and damaged files."""

import gzip
import json
import pickle

import numpy as np
import pytest
import torch

from interop import RandomSampler, SliceSampler, traj
from interop.datasets import atari_dqn
from interop.datasets.atari_dqn import AtariDQNExperienceReplay
from interop.datasets.errors import CorruptDatasetError, DownloadError, MissingDatasetError
from tests.interop.datasets.server import Answer
from tests.interop.datasets.sources_atari_dqn import ROWS, make, path_of, write

ID = "Pong/5"
TOTAL = sum(ROWS)
FLAGS = ("done", "terminated", "truncated")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A root, upstream files, and the arrays of all rows. Not to be changed."""
    folder = tmp_path_factory.mktemp("atari")
    return folder, folder / "upstream", make(folder / "upstream", np.random.default_rng(0))


@pytest.fixture
def rows(converted):
    return converted[2]


@pytest.fixture
def load(converted):
    folder, upstream, _ = converted
    return lambda *args, **more: AtariDQNExperienceReplay(ID, *args, root=folder, from_local=upstream, **more)


@pytest.fixture
def upstream(tmp_path):
    """Upstream files to be changed."""
    make(tmp_path / "upstream", np.random.default_rng(0))
    return tmp_path / "upstream"


@pytest.fixture
def load_own(tmp_path, upstream):
    return lambda **more: AtariDQNExperienceReplay(ID, root=tmp_path / "root", from_local=upstream, **more)


def check(batch, rows, at):
    """Whether a batch is the steps at these rows."""
    at = np.asarray(at)
    done = (rows["terminal"] | rows["truncated"])[at]
    following = rows["observation"][np.minimum(at + 1, TOTAL - 1)] * (1 - done)[..., None, None]
    expected = {
        "observation": rows["observation"][at],
        "action": rows["action"][at],
        ("next", "observation"): following,
        ("next", "reward"): rows["reward"][at],
        ("next", "terminated"): rows["terminal"][at],
        ("next", "truncated"): rows["truncated"][at],
        ("next", "done"): done,
        **dict.fromkeys(FLAGS, np.zeros_like(done)),
    }
    assert tuple(batch.batch_size) == at.shape
    assert set(batch.keys(True, True)) - {"index"} == set(expected)
    for key, value in expected.items():
        assert batch[key].numpy().dtype == value.dtype, key
        np.testing.assert_array_equal(batch[key], value, str(key))


def test_rows_of_all_checkpoints_in_the_order_of_their_numbers(load, rows, converted):
    data = load()
    assert len(data) == TOTAL and data.dataset_path == data.data_path == converted[0] / "Pong" / "5"
    check(data[:], rows, range(TOTAL))


INDEXES = [
    *(0, 1, 4, 8, TOTAL - 1, -1, np.int64(3), torch.tensor(7), slice(2, 6), slice(-9, None, 3)),
    *([3, 3, 14, 0], range(5, 12), np.array([8, 9]), torch.tensor([[0, 14], [8, -1]]), (torch.tensor([4, 5]),), ...),
    *(torch.arange(TOTAL) % 4 == 0, [], slice(0, 0)),
]


@pytest.mark.parametrize("index", INDEXES, ids=repr)
def test_every_kind_of_index(load, rows, index):
    at = index[0] if isinstance(index, tuple) else index
    at = np.asarray(at) if isinstance(at, torch.Tensor | list) else at
    check(load()[index], rows, np.arange(TOTAL)[at.astype(int) if isinstance(at, np.ndarray) and not at.size else at])


@pytest.mark.parametrize("index", [TOTAL, -TOTAL - 1, [0, TOTAL], torch.zeros(3, dtype=torch.bool)])
def test_indexes_out_of_range(load, index):
    with pytest.raises(IndexError):
        load()[index]


def test_what_is_read_is_a_copy(load, rows):
    data = load()
    for index in (0, slice(None), [0, 1]):
        data[index]["observation"].fill_(7)
        data[index]["next", "observation"].fill_(7)
    check(data[:], rows, range(TOTAL))


def test_queries_see_the_steps_of_each_episode(load, rows):
    """`rb.query` has the episodes of the rows, though `rb.episodes` is another thing here."""
    data = load()
    numbers = data.episodes.numpy()
    found = data.query()
    assert [len(part) for part in found] == np.unique(numbers, return_counts=True)[1].tolist()
    for number, part in enumerate(found):
        check(part.data, rows, np.flatnonzero(numbers == number))
    for condition in (
        (traj["next", "observation"] == 0).all(),  # derived at the read
        traj.observation.max() > 200,
        traj.done.any(),
        traj["next", "done"].any() & (traj.length > 2),
        traj.total_reward > 0,
    ):
        chosen = [part.length for part in found if condition(part)]
        assert [part.length for part in data.query(condition)] == chosen


def test_frames_are_stored_once(load):
    data = load()
    size = sum(path.stat().st_size for path in data.data_path.rglob("*.memmap"))
    assert 84 * 84 * TOTAL < size < 84 * 84 * TOTAL + 1000


def test_episodes_end_with_their_terminal_step_and_with_the_ring(load):
    # terminal: 1 and 6, 10 and 12; the ring of the first checkpoint ends behind 4; the checkpoints behind 8 and 14
    assert load().episodes.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


@pytest.mark.parametrize("arguments", [{"num_slices": 4}, {"slice_len": 2}, {"sampler": SliceSampler(slice_len=2)}])
def test_slices_stay_in_an_episode(load, rows, arguments):
    data = load(8, **arguments)
    episodes = data.episodes
    for _ in range(20):
        batch = data.sample()
        batch["index"] = batch["index"].reshape(-1)
        at = batch["index"].reshape(4, 2)
        assert (at[:, 1] == at[:, 0] + 1).all() and (episodes[at[:, 0]] == episodes[at[:, 1]]).all()
        np.testing.assert_array_equal(batch["observation"], rows["observation"][batch["index"]])
        assert batch["next", "truncated"].reshape(4, 2).tolist() == [[False, True]] * 4
        done = batch["next", "done"].reshape(4, 2)
        assert done[:, 1].all() and (done[:, 0].numpy() == rows["terminal"][at[:, 0]]).all()


def test_slices_read_no_more_than_their_rows(load, monkeypatch):
    data, counts = load(4, slice_len=2), []
    kind = type(data.storage)
    read = kind.get

    def get(self, index):
        counts.append(torch.arange(TOTAL)[index].numel())
        return read(self, index)

    monkeypatch.setattr(kind, "get", get)
    data.sample()
    assert counts and max(counts) <= 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampler": RandomSampler(), "slice_len": 2},
        {"sampler": RandomSampler(), "replacement": False},
        {"max_checkpoints": 0},
    ],
)
def test_arguments_that_do_not_go_together(load, arguments):
    with pytest.raises(ValueError, match=r"sampler|at least 1"):
        load(4, **arguments)


@pytest.mark.parametrize("named", ["argument", "class"])
def test_the_first_checkpoints_alone(load_own, rows, monkeypatch, named):
    if named == "class":
        monkeypatch.setattr(AtariDQNExperienceReplay, "_max_runs", 1)
    data = load_own(**({"max_checkpoints": 1} if named == "argument" else {}))
    assert len(data) == ROWS[0]
    np.testing.assert_array_equal(data[:]["observation"], rows["observation"][: ROWS[0]])


def test_without_notes_the_ring_is_taken_to_end_with_the_checkpoint(load_own, upstream):
    for path in (*upstream.glob("add_count*"), *upstream.glob("invalid*")):
        path.unlink()
    assert load_own()[:]["next", "truncated"].nonzero().squeeze(1).tolist() == [8, 14]


def test_add_count_that_was_pickled(load_own, upstream):
    path_of(upstream, "add_count", 2).write_bytes(gzip.compress(pickle.dumps(9 + 5)))
    assert load_own()[:]["next", "truncated"].nonzero().squeeze(1).tolist() == [4, 8, 14]


def test_a_folder_with_replay_logs(tmp_path):
    rows = make(tmp_path / "run" / "replay_logs", np.random.default_rng(0))
    check(
        AtariDQNExperienceReplay(ID, root=tmp_path / "root", from_local=tmp_path / "run", num_procs=2)[:],
        rows,
        range(TOTAL),
    )


def test_preprocess(load, rows, tmp_path):
    data = load()
    made = data.preprocess(
        lambda td: td.select("action", ("next", "observation"), ("next", "done")), num_workers=0, dest=tmp_path / "made"
    )
    np.testing.assert_array_equal(made[3]["next", "observation"], rows["observation"][4])
    assert not made[4]["next", "observation"].any()
    with pytest.raises(RuntimeError, match="dim=1"):
        data.preprocess(lambda td: td, dim=1)


def test_preprocess_in_place(load_own, tmp_path):
    load_own().preprocess(lambda td: td.set("observation", td["next", "observation"] // 2), num_workers=0)
    data = AtariDQNExperienceReplay(ID, root=tmp_path / "root", download=False)
    np.testing.assert_array_equal(data[2]["observation"], data[2]["next", "observation"] // 2)


# ------------------------------------------------------------------ upstream


def test_ids():
    ids = AtariDQNExperienceReplay.available_datasets
    assert len(ids) == 300 and ids[0] == "AirRaid/1" and ids[-1] == "Zaxxon/5"


@pytest.mark.parametrize("dataset_id", ["Pong", "Pong/6", "Pong/0", "pong/1", "../Pong/1", "Pong/1/replay_logs"])
def test_unknown_ids(tmp_path, dataset_id):
    with pytest.raises(ValueError, match=r"nearest of its 300 ids.*<Game>/<run>"):
        AtariDQNExperienceReplay(dataset_id, root=tmp_path)


LISTING = "storage/v1/b/atari-replay-datasets/o"


@pytest.fixture
def bucket(server, monkeypatch):
    """The bucket, with the files of a run; the arrays of all rows."""
    monkeypatch.setattr(atari_dqn, "BASE_URL", server.at("atari-replay-datasets"))
    monkeypatch.setattr(atari_dqn, "LIST_URL", server.at(LISTING))
    place = "dqn/Pong/5/replay_logs"
    folder = server.folder / "atari-replay-datasets" / place
    rows = make(folder, np.random.default_rng(0))
    (folder / "checkpoint").write_bytes(b"else")
    items = [{"name": f"{place}/{path.name}", "size": str(path.stat().st_size)} for path in sorted(folder.iterdir())]
    (server.folder / LISTING).parent.mkdir(parents=True)
    (server.folder / LISTING).write_text(json.dumps({"items": items}))
    return rows


def test_download_of_the_first_checkpoints_alone(tmp_path, server, bucket):
    data = AtariDQNExperienceReplay(ID, root=tmp_path, max_checkpoints=1)
    assert len(data) == ROWS[0]
    assert not any("_ckpt.10." in request.path for request in server.requests)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_bucket_that_is_closed(tmp_path, server, monkeypatch, status):
    monkeypatch.setattr(atari_dqn, "LIST_URL", server.at("listing"))
    server.answer("listing", Answer(status=status))
    with pytest.raises(DownloadError, match=rf"{status}.*no longer open to everybody.*from_local"):
        AtariDQNExperienceReplay(ID, root=tmp_path)
    with pytest.raises(MissingDatasetError):
        AtariDQNExperienceReplay(ID, root=tmp_path, download=False)


@pytest.mark.parametrize("body", [b"{}", b"no json", b'{"items": [{"name": "x"}]}'])
def test_a_listing_that_is_none(tmp_path, server, monkeypatch, body):
    monkeypatch.setattr(atari_dqn, "LIST_URL", server.at("listing"))
    (server.folder / "listing").write_bytes(body)
    with pytest.raises(DownloadError, match="Pong/5"):
        AtariDQNExperienceReplay(ID, root=tmp_path)


# ------------------------------------------------------------------ damaged files


def damage_truncate(folder):
    path = path_of(folder, "observation", 10)
    path.write_bytes(path.read_bytes()[:-1000])


def damage_header(folder):
    path = path_of(folder, "reward", 2)
    path.write_bytes(path.read_bytes()[:40])


def damage_checksum(folder):
    path = path_of(folder, "reward", 10)
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")


def damage_lengths(folder):
    write(folder, "action", 10, np.zeros(5, np.int32))


def damage_missing(folder):
    path_of(folder, "terminal", 2).unlink()


def damage_dtype(folder):
    write(folder, "observation", 2, np.zeros((9, 84, 84), np.float32))


def damage_dims(folder):
    write(folder, "reward", 2, np.zeros((9, 1), np.float32))


def damage_order(folder):
    write(folder, "observation", 2, np.asfortranarray(np.zeros((9, 84, 84), np.uint8)))


def damage_objects(folder):
    path_of(folder, "add_count", 2).write_bytes(gzip.compress(b"cos\nsystem\n(X\x01\x00\x00\x00atR."))


def damage_count(folder):
    write(folder, "add_count", 2, np.arange(2.0))


def damage_frames(folder):
    write(folder, "observation", 10, np.zeros((6, 42, 42), np.uint8))


def damage_rows(folder):
    path = path_of(folder, "observation", 10)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))


def damage_more(folder):
    path = path_of(folder, "action", 2)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"1"))


def damage_html(folder):
    path_of(folder, "action", 2).write_bytes(b"<!DOCTYPE html>")


DAMAGES = {
    damage_truncate: r"observation_ckpt\.10\.gz is truncated",
    damage_header: r"reward_ckpt\.2\.gz is truncated",
    damage_checksum: r"reward_ckpt\.10\.gz is damaged",
    damage_lengths: r"equally many rows, .*observation_ckpt\.10\.gz': 6, .*action_ckpt\.10\.gz': 5",
    damage_missing: r"terminal_ckpt\.2\.gz is missing",
    damage_dtype: r"observation_ckpt\.2\.gz must be uint8 with 3 dims, it is float32",
    damage_dims: r"reward_ckpt\.2\.gz must be float32 with 1 dims",
    damage_order: r"observation_ckpt\.2\.gz .*Fortran",
    damage_objects: r"add_count_ckpt\.2\.gz .*os\.system, which would run code",
    damage_count: r"add_count_ckpt\.2\.gz must hold whole numbers, it holds float64",
    damage_frames: r"observation is .*42, 42",
    damage_rows: r"observation_ckpt\.10\.gz is truncated",
    damage_more: r"action_ckpt\.2\.gz has 1 bytes more",
    damage_html: r"action_ckpt\.2\.gz is no \.npy file",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_damaged_files_are_named(load_own, upstream, damage, tmp_path):
    damage(upstream)
    with pytest.raises(CorruptDatasetError, match=DAMAGES[damage]):
        load_own()
    assert not (tmp_path / "root" / ID).exists()


def test_a_folder_without_checkpoints(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorruptDatasetError, match="has no files"):
        AtariDQNExperienceReplay(ID, root=tmp_path / "root", from_local=tmp_path / "empty")


def test_long_checkpoints_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(atari_dqn, "_ROWS", 4)
    rows = make(tmp_path / "upstream", np.random.default_rng(0))
    data = AtariDQNExperienceReplay(ID, root=tmp_path, from_local=tmp_path / "upstream")
    check(data[:], rows, range(TOTAL))

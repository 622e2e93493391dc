"""An empty storage takes items of any kind: the first write fixes keys, shapes and dtypes, also after `empty()`."""

import gc
import multiprocessing

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from tests.interop.sharing.collecting import hold_together, names, of_kind
from tests.interop.sharing.collecting import write_when_asked as worker

CAPACITY = 12
KINDS = {
    "tensor": lambda place: LazyTensorStorage(CAPACITY),
    "tensor shared_init": lambda place: LazyTensorStorage(CAPACITY, shared_init=True),
    "anonymous": lambda place: LazyMemmapStorage(CAPACITY),
    "anonymous shared_init": lambda place: LazyMemmapStorage(CAPACITY, shared_init=True),
    "files": lambda place: LazyMemmapStorage(CAPACITY, scratch_dir=place, auto_cleanup=True),
    "files shared_init": lambda place: LazyMemmapStorage(
        CAPACITY, scratch_dir=place, auto_cleanup=True, shared_init=True
    ),
}
ALONE = {
    **KINDS,
    "given": lambda place: TensorStorage(TensorDict({}, [CAPACITY])),
    "consolidated": lambda place: LazyTensorStorage(CAPACITY, consolidated=True),
    "compilable": lambda place: LazyTensorStorage(CAPACITY, compilable=True),
}
LANES = TensorDict({"id": torch.arange(8).reshape(2, 4), "obs": torch.ones(2, 4, 3)}, [2, 4])


def buffer_on(kind, place, **parts):
    return TensorDictReplayBuffer(storage=ALONE[kind](place), batch_size=4, **parts)


@pytest.mark.parametrize("kind", ALONE)
def test_the_first_write_after_empty_fixes_the_kind_of_items(kind, tmp_path):
    buffer = buffer_on(kind, tmp_path / "held")
    for number in (0, 1, 2, 3, 0):
        buffer.extend(of_kind(number, 4))
        hold_together(buffer, number, 4)
        with pytest.raises((KeyError, RuntimeError), match="nothing was written"):
            buffer.extend(of_kind((number + 1) % 4, 4))
        hold_together(buffer, number, 4)
        buffer.empty()
        assert len(buffer) == 0 and buffer[:].shape == (0,)


@pytest.mark.parametrize("kind", ALONE)
def test_memory_is_kept_where_it_fits_and_what_cannot_be_stored_changes_nothing(kind, tmp_path):
    buffer = buffer_on(kind, tmp_path / "held")
    buffer.extend(of_kind(0, 4))
    buffer.empty()
    held = buffer.storage.table.rows
    with pytest.raises(TypeError, match="cannot store"):
        buffer.extend(TensorDict({"other": torch.empty(4, device="meta")}, [4]))
    buffer.extend(of_kind(0, 4).select("obs", "id"))  # in another order
    assert buffer.storage.table.rows is held
    hold_together(buffer, 0, 4)


SAMPLERS = {
    "uniform": lambda: RandomSampler(),
    "epochs": lambda: SamplerWithoutReplacement(),
    "priorities": lambda: PrioritizedSampler(16, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2, traj_key="id", strict_length=False),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=2, traj_key="id", strict_length=False),
}


@pytest.mark.parametrize("kind", ["tensor", "files"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_know_nothing_of_the_items_before(kind, sampler, tmp_path):
    writer = TensorDictRoundRobinWriter(track_generations=True)
    buffer = buffer_on(kind, tmp_path / "held", sampler=SAMPLERS[sampler](), writer=writer)
    for number, count in ((0, 12), (1, 4), (2, 8)):
        buffer.extend(of_kind(number, count))
        if sampler == "priorities":
            buffer.update_priority(torch.arange(count), torch.arange(count) + 1.0)
        for _ in range(3):
            batch = buffer.sample()
            assert int(batch["index"].max()) < count and set(names(of_kind(number, 1))) <= set(names(batch))
        buffer.empty()


@pytest.mark.parametrize("kind", ["tensor", "anonymous", "files"])
def test_the_lanes_of_rows_may_change_too(kind, tmp_path):
    more = {"scratch_dir": tmp_path / "held"} if kind == "files" else {}
    storage = LazyTensorStorage(16, ndim=2) if kind == "tensor" else LazyMemmapStorage(16, ndim=2, **more)
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=PrioritizedSampler(30, 0.7, 0.5), batch_size=8, dim_extend=0
    )
    for lanes in (4, 3, 5, 4):
        data = TensorDict({"id": torch.arange(7 * lanes).reshape(7, lanes)}, [7, lanes])
        buffer.extend(data)
        rows = -(-16 // lanes)
        assert buffer.storage.shape == (rows if rows < 7 else 7, lanes)
        assert set(buffer.sample()["id"].tolist()) <= set(buffer[:]["id"].flatten().tolist())
        with pytest.raises(RuntimeError, match="nothing was written"):
            buffer.extend(data[:, :2])
        buffer.empty()


def test_frames_best_items_and_members_of_ensembles():
    frames = TensorDictReplayBuffer(storage=LazyFrameStorage(CAPACITY, obs_key="obs", stack=1), batch_size=2)
    best = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("rank"), batch_size=2)
    for more in ({}, {"extra": torch.ones(4, 2)}):
        ends = torch.tensor([False, False, False, True])
        data = {"obs": torch.arange(4.0), "next": TensorDict({"obs": torch.arange(4.0) + 1, "done": ends}, [4]), **more}
        frames.extend(TensorDict(data, [4]))
        best.extend(TensorDict({"rank": torch.arange(4.0), **more}, [4]))
        for buffer in (frames, best):
            assert ("extra" in names(buffer[:])) == bool(more)
        frames.empty()
        best.empty()
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY)) for _ in range(2)]
    both = ReplayBufferEnsemble(*members, batch_size=4)
    for number in (0, 1):
        for member in members:
            member.empty()
            member.extend(of_kind(number, 4))
        assert set(names(of_kind(number, 1))) <= set(names(both.sample()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_into_an_emptied_storage(kind, tmp_path):
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4)
    source.extend(of_kind(1, 6))
    source.dumps(tmp_path / "saved")
    for how in ("loads", "load_state_dict"):
        buffer = buffer_on(kind, tmp_path / how)
        buffer.extend(of_kind(0, 4))
        buffer.empty()
        getattr(buffer, how)(tmp_path / "saved" if how == "loads" else source.state_dict())
        hold_together(buffer, 1, 6)


# ------------------------------------------------------------------ processes


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_share_a_storage(method, in_a_fork, tmp_path):
    """One made-up item, `empty()`, workers with other keys, as collectors do; and all of it again, whoever writes."""
    if method == "spawn":
        share(tmp_path, method)
    else:
        in_a_fork(
            """
            from pathlib import Path
            from tests.interop.sharing import test_emptied
            test_emptied.share(Path(place), "fork")
            """,
            place=str(tmp_path),
        )


def share(place, method):
    buffers = {kind: buffer_on(kind, place / kind) for kind in KINDS}
    for kind, buffer in buffers.items():
        buffer.share()
        if "shared_init" not in kind:
            buffer.extend(of_kind(0, 1))
            buffer.empty()
    if method == "spawn":  # nor need it be written
        buffers["not written"] = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    context = multiprocessing.get_context(method)
    asked, answers = context.Queue(), context.Queue()
    process = context.Process(target=worker, args=(buffers, asked, answers), daemon=True)
    process.start()

    def ask(*what):
        asked.put(what)
        assert answers.get(timeout=120) is None

    for step, number in enumerate((1, 2, 0, 3)):
        here = step == 2
        for buffer in buffers.values() if here else ():
            buffer.extend(of_kind(number, 4))
        ask("hold" if here else "extend", number, 4)
        for buffer in buffers.values():
            hold_together(buffer, number, 4)
            with pytest.raises((KeyError, RuntimeError), match="nothing was written"):
                buffer.extend(of_kind((number + 1) % 4, 4))
        ask("extend", number, 10)  # around the ring
        for buffer in buffers.values():
            hold_together(buffer, number, CAPACITY)
            if here:
                buffer.empty()
        if not here:
            ask("empty", number, 0)
    asked.put(None)
    process.join(60)
    assert process.exitcode == 0 and all(len(buffer) == 0 for buffer in buffers.values())
    del buffer
    buffers.clear()
    gc.collect()
    assert list(place.rglob("*.*")) == []


def test_a_kill_leaves_the_storage_before_an_empty_one_or_the_new_one(in_a_fork, tmp_path):
    """Of the owner of the folder, or of a worker of it."""
    told = in_a_fork(
        """
        import itertools, os, pathlib
        from interop import LazyMemmapStorage, TensorDictReplayBuffer
        from tests.interop.sharing.collecting import hold_together, of_kind

        def emptied(path):
            buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(12, scratch_dir=path))
            buffer.extend(of_kind(0, 4))
            buffer.empty()
            return buffer

        def ended(path, kept, buffer=None):
            if (child := os.fork()) == 0:
                buffer = emptied(path) if buffer is None else buffer
                calls = []
                for owner, name in (os, "replace"), (os, "posix_fallocate"), (os, "ftruncate"), (pathlib.Path, "unlink"):
                    def counted(*given, real=getattr(owner, name), **named):
                        calls.append(name)
                        return os._exit(9) if len(calls) > kept else real(*given, **named)
                    setattr(owner, name, counted)
                buffer.extend(of_kind(2, 4))
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        found = set()
        for kept in itertools.count():
            done = ended(f"{place}/{kept}", kept) == 0
            buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(f"{place}/{kept}"))
            found.add((len(buffer), buffer.storage.initialized))
            if not len(buffer):
                buffer.extend(of_kind(kept % 4, 4))
                buffer.storage.close()
                assert len(LazyMemmapStorage.open(f"{place}/{kept}", "r")) == 4
            path = f"{place}/worker {kept}"
            buffer = emptied(path)
            ended(path, kept, buffer)
            buffer.empty()
            buffer.extend(of_kind(0, 5))
            hold_together(TensorDictReplayBuffer(storage=LazyMemmapStorage.open(path, "r")), 0, 5)
            if done:
                break
        print(kept > 8, sorted(found))
        """,
        place=str(tmp_path),
    )
    assert told.strip() == "True [(0, False), (0, True), (4, True)]"

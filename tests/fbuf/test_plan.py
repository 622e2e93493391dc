"""A plan says to the byte what a buffer takes, and what does not fit is refused before it is made."""

import errno
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import (
    Buffer,
    Fifo,
    Frames,
    HighestRanked,
    Mixture,
    NotEnoughDiskError,
    NotEnoughMemoryError,
    PerTrajectory,
    Plan,
    Prioritized,
    Share,
    Shuffled,
    Slices,
    Trajectories,
    free_memory,
)

GIB = 1 << 30
ITEM = {
    "obs": jnp.zeros((2, 3), jnp.float32),
    "next_obs": np.zeros((2, 3)),  # 32 bits in JAX
    "id": np.int64(3),
    "end": jnp.zeros((), jnp.bool_),
    "rank": jax.ShapeDtypeStruct((), jnp.float16),
}
KNOWN = {"trajectories": Trajectories(terminated="end", id="id")}
BUFFERS: list[Any] = [
    Buffer(13, lanes=(3, 2)),
    *(Buffer(1_000, rule) for rule in (Prioritized(new_items="highest_stored"), Shuffled(), Fifo())),
    Buffer(77, Prioritized(), writer=HighestRanked("rank")),
    *(Buffer(50, Slices(3, rule), lanes=(2,), **KNOWN) for rule in (Prioritized(), PerTrajectory(Shuffled()))),
    Buffer(50, frames=Frames(stack=3, axis=1), **KNOWN),
    Mixture((Buffer(5), Buffer(8, Prioritized()))),
]


def held(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("buffer", BUFFERS, ids=repr)
def test_a_plan_is_what_the_state_takes(buffer, device) -> None:
    item, state = ITEM, buffer.init(ITEM)
    plan = fbuf.plan(buffer, item)
    assert plan.total == held(state) == sum(plan.by_key.values()) == sum(plan.by_part.values())
    assert plan.needed == {free_memory.place_of(device): plan.total} and not plan.unknown
    if isinstance(buffer, Buffer):
        for part, size in plan.by_part.items():
            assert size == held(getattr(state, part))
        in_order = buffer.writer.keeps_order
        assert plan.by_key["ring .counters" if in_order else "ring .size"] == (16 if in_order else 4)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.items):
            assert plan.by_key[f"items {jax.tree_util.keystr(path)}"] == leaf.nbytes
    assert {share.dtype for share in plan.shares} == {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    assert plan.check() is plan


def test_a_plan_takes_no_memory_itself() -> None:
    plan = fbuf.plan(Buffer(10**9, Prioritized()), {"obs": jax.ShapeDtypeStruct((84, 84), jnp.uint8)})
    assert plan.by_part["items"] == 84 * 84 * 10**9 and plan.total > 84 * 84 * 10**9 + 2 * 4 * 10**9
    large = fbuf.plan(Buffer(2**31 - 9), {"obs": jax.ShapeDtypeStruct((2**40,), jnp.uint8)})
    assert large.total > 2**70


def test_what_counts_only_at_times_is_told_apart() -> None:
    shares = (
        Share("items", "a", "cpu", 100),
        Share("items", "b", "/folder", 30),
        Share("copy", "a", "cpu", 50, counts="in a call"),
        Share("frames", "last", "cpu", 1000, counts="at most"),
        Share("items", "c", "cpu", None),
    )
    plan = Plan(shares, {"cpu": 150, "/folder": None})
    assert plan.total == 130 and plan.needed == {"cpu": 150, "/folder": 30} and plan.unknown == ("items c",)
    assert plan.by_part == {"items": 130} and plan.by_key == {"items a": 100, "items b": 30}
    assert plan.check() is plan
    text = str(plan)
    assert text.split()[:6] == ["part", "key", "shape", "dtype", "at", "bytes"]
    assert "cpu: 150 bytes, 150 B needed, at most 1000 B more as it is used, 150 B free" in text
    assert "what is free there is not known" in text
    assert "at most 1000 B more as it is used" in text and "50 B in a call" in text
    assert text.splitlines()[-1] == "not known before it is written: items c"


def test_what_does_not_fit_is_told_key_by_key() -> None:
    plan = Plan(tuple(Share("items", f"['{n}']", "cpu", n * GIB) for n in range(1, 7)), {"cpu": 10 * GIB})
    with pytest.raises(NotEnoughMemoryError) as raised:
        plan.check()
    assert str(raised.value) == (
        "the buffer needs 21.0 GiB in the memory of cpu, where 10.0 GiB are free: items ['6'] 6.0 GiB, items ['5'] 5.0 GiB, "
        "items ['4'] 4.0 GiB, items ['3'] 3.0 GiB and 2 more; nothing was allocated. About 47.6% of the capacity would fit; "
        "or store smaller items, or elsewhere"
    )
    assert isinstance(raised.value, MemoryError) and not isinstance(raised.value, OSError)
    on_disk = Plan((Share("items", "a", "/some/folder", 5),), {"/some/folder": 4})
    with pytest.raises(NotEnoughDiskError, match="on the disk of /some/folder") as disk:
        on_disk.check()
    assert isinstance(disk.value, OSError) and isinstance(disk.value, MemoryError) and disk.value.errno == errno.ENOSPC
    assert Plan(on_disk.shares, {"/some/folder": 5}).check()


# ------------------------------------------------------------------ init


@pytest.fixture
def little(monkeypatch, device) -> int:
    """A machine on which less is free than a large buffer takes."""
    monkeypatch.setattr(free_memory, "at", lambda place: 100 << 20)
    return 100 << 20


def test_a_buffer_that_does_not_fit_is_refused_before_it_is_made(little) -> None:
    item = jax.ShapeDtypeStruct((1 << 20,), jnp.uint8)
    assert Buffer(90).init(item).items.nbytes == 90 << 20
    with pytest.raises(NotEnoughMemoryError, match=r"needs 110.0 MiB .* 100.0 MiB are free: items 110.0 MiB"):
        Buffer(110).init(item)
    with pytest.raises(NotEnoughMemoryError, match=r"sampler .priorities 80.0 MiB"):
        Buffer(20 << 20, Prioritized()).init(jnp.zeros((), jnp.bool_))


def test_a_program_may_ask_for_the_shape_of_any_buffer(little) -> None:
    buffer, item = Buffer(110), jax.ShapeDtypeStruct((1 << 20,), jnp.uint8)
    assert jax.eval_shape(lambda: buffer.init(item)).items.shape == (110, 1 << 20)
    assert fbuf.plan(buffer, item).total > little
    assert jax.jit(lambda: buffer.init(item)).lower() is not None


# ------------------------------------------------------------------ what is free


def test_limits_of_cgroups_count_with_caches_that_can_be_dropped(tmp_path, monkeypatch) -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("900\n")
    (group / "memory.stat").write_text("anon 500\nactive_file 200\ninactive_file 100\n")
    (tmp_path / "a" / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.current").write_text("5000\n")
    older = tmp_path / "memory" / "x"
    older.mkdir(parents=True)
    (older / "memory.limit_in_bytes").write_text("800")
    (older / "memory.usage_in_bytes").write_text("100")
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("12:cpuset:/x\n0::/a/b\n")
    assert free_memory.of_machine() == 400
    (tmp_path / "own").write_text("4:cpu,memory:/x\n0::/nowhere\n")
    assert free_memory.of_machine() == 700
    (tmp_path / "own").unlink()
    assert free_memory.of_machine() > 1000


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path) -> None:
    here, later = free_memory.of_disk(str(tmp_path)), free_memory.of_disk(str(tmp_path / "a" / "b"))
    assert here > 0 and abs(here - later) < GIB
    assert free_memory.at(str(tmp_path / "c")) is not None

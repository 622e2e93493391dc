"""The hash table against a dict; full tables, equal keys and hashes; what is compiled."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf import HashTable, hash_table
from fbuf.row_words import packed
from tests.fbuf.compiled import jit

pytestmark = pytest.mark.usefixtures("device")

KEY = {"bits": np.zeros(3, np.uint8), "x": np.float32(0), "on": np.bool_(0)}
FLOATS = np.array([0.0, -0.0, np.nan, 1.5], np.float32)
SIZES = (1, 8, 20)  # of a table of 16 entries 8 keys are inserted at once, 20 one by one
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "update", "find"]), st.sampled_from(SIZES), st.integers(0, 99)),
    max_size=6,
)


def keys_of(numbers):
    numbers = np.asarray(numbers)
    bits = np.stack([numbers % 2, numbers // 2 % 2, 0 * numbers], -1).astype(np.uint8)
    return {"bits": bits, "x": FLOATS[numbers // 4 % 4], "on": numbers >= 16}


def one_of_two(words):
    return words[:, 0] % 2 * jnp.uint32(3)  # 0, 1, 3, 6 and 3, 4, 6: they meet


@contextlib.contextmanager
def hashed_by(function=None):
    """insert, update and find, compiled apart for a way of hashing; programs of other modules are kept."""
    methods = [jit(method, static_argnums=0) for method in (HashTable.insert, HashTable.update, HashTable.find)]
    compiled = [*methods, *(each for each in vars(hash_table).values() if hasattr(each, "clear_cache"))]

    def forget():
        for each in compiled:
            each.clear_cache()

    forget()
    with pytest.MonkeyPatch.context() as patched:
        if function is not None:
            patched.setattr(hash_table, "_hashed", function)
        yield methods
    forget()


@pytest.fixture(params=[None, one_of_two], ids=["hashed", "equal hashes"])
def methods(request):
    with hashed_by(request.param) as methods:
        yield methods


@pytest.mark.parametrize("capacity", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 13))])
def test_a_table_is_a_dict_of_at_most_capacity_keys(methods, capacity):
    insert, update, find = methods
    table = HashTable(capacity)

    @settings(max_examples=12)
    @given(steps=STEPS)
    def check(steps):
        state, model = table.init(KEY, np.int32(0)), {}
        for what, count, seed in steps:
            numbers = np.random.default_rng(seed).integers(0, 24, count)
            items = np.arange(count, dtype=np.int32) + 100 * seed
            slots = {key: slot for slot, key in enumerate(model)}
            if what == "insert":
                state, found, valid = insert(table, state, keys_of(numbers), items)
                for number, item in zip(numbers.tolist(), items.tolist(), strict=True):
                    if number in model or len(model) < capacity:
                        slots.setdefault(number, len(model))
                        model[number] = item
            elif what == "update":
                state, found, valid = update(table, state, keys_of(numbers), items)
                model |= {n: item for n, item in zip(numbers.tolist(), items.tolist(), strict=True) if n in model}
            else:
                found, valid = find(table, state, keys_of(numbers))
            expected = [slots.get(number, -1) for number in numbers.tolist()]
            assert found.tolist() == expected and valid.tolist() == [slot >= 0 for slot in expected]
            assert int(state.size) == len(model)
            entries = np.asarray(state.entries)
            assert sorted(entries[entries != np.iinfo(np.int32).max].tolist()) == list(range(len(model)))
            assert table.read(state, np.arange(capacity))[: len(model)].tolist() == list(model.values())
        assert find(table, table.clear(state), keys_of(range(8)))[0].tolist() == [-1] * 8

    check()


def test_keys_of_every_dtype_are_told_apart_by_their_bits():
    table = HashTable(9)
    for dtype in (np.bool_, np.float16, np.int32):
        keys = np.asarray([0, 1, 0])[:, None, None].repeat(5, 1).astype(dtype)
        state = table.init(keys[0], np.zeros(2))
        words = np.asarray(packed(keys)).view(np.uint8)
        assert [row[: keys[0].nbytes].tobytes() for row in words] == [row.tobytes() for row in keys]
        assert table.find(state, keys[:0])[0].shape == table.insert(state, keys[:0], np.zeros((0, 2)))[1].shape == (0,)
    keys = np.asarray([0, 1j, 0], np.complex64)
    _, slots, _ = table.insert(table.init(keys[0], np.zeros(2)), keys, np.zeros((3, 2)))
    assert slots.tolist() == [0, 1, 0]


def test_a_key_behind_one_that_found_no_room_is_found():
    table = HashTable(2)  # of 16 entries: key 16 passes entry 1, which key 1 has taken before
    keys = np.asarray([0, 16, 1], np.int32)
    with hashed_by(lambda words: words[:, 0]) as (insert, _, find):
        state, slots, valid = insert(table, table.init(keys[0], keys[0]), keys, keys)
        assert slots.tolist() == [0, 1, -1] and valid.tolist() == [True, True, False]
        assert find(table, state, keys)[0].tolist() == [0, 1, -1]
        assert np.asarray(state.entries)[:4].tolist() == [0, 1] + [np.iinfo(np.int32).max] * 2


def test_under_vmap_and_scan_it_is_the_same():
    table = HashTable(5)
    keys = np.random.default_rng(0).integers(0, 7, (3, 4, 6)).astype(np.int32)  # tables, steps, batch
    items = np.arange(72, dtype=np.float32).reshape(keys.shape)

    def run(keys, items):
        def step(state, batch):
            state, *found = table.insert(state, *batch)
            return state, found

        return jax.lax.scan(step, table.init(np.int32(0), np.float32(0)), (keys, items))

    together = jit(jax.vmap(run))(keys, items)
    apart = [jit(run)(*each) for each in zip(keys, items, strict=True)]
    jax.tree.map(lambda one, *others: np.testing.assert_array_equal(one, np.stack(others)), together, *apart)


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("name", ["insert", "update"])
def test_a_donated_table_is_written_in_place(name, rows):
    table = HashTable(100_000)
    state = jax.eval_shape(lambda: table.init(np.zeros(8, np.float32), np.zeros(3)))
    batch = [jax.ShapeDtypeStruct((rows, size), np.float32) for size in (8, 3)]
    program = jax.jit(getattr(table, name), donate_argnums=0).lower(state, *batch).compile()
    memory = program.memory_analysis()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes == size and memory.temp_size_in_bytes < 1e-2 * size
    assert not re.search(r"= \w+\[\d{6}[^=]* copy(?:-start)?\(", program.as_text())


def test_what_does_not_fit_is_refused():
    table = HashTable(4)
    state = table.init(KEY, np.float32(0))
    with pytest.raises(ValueError, match="2 keys were given for 3 items"):
        table.insert(state, keys_of([1, 2]), np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="'on'"):
        table.find(state, keys_of([1]) | {"on": np.zeros(1, np.int32)})
    with pytest.raises(ValueError, match="the batch lacks"):
        table.update(state, {"x": np.zeros(1, np.float32)}, np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="capacity 5, the state 4"):
        HashTable(5).find(state, keys_of([1]))

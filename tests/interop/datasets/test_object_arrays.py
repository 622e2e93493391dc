"""Pickles and object arrays: what NumPy writes comes back equal, and nothing else is read, called or crashes."""

import copyreg
import io
import os
import pickle
import pickletools
import struct

import numpy as np
import pytest

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.object_arrays import load_object

PROTOCOLS = (2, 3, 4, 5)


def content(protocol=4):
    rng = np.random.default_rng(0)
    shared = rng.random(3, dtype=np.float32)
    value = {
        "frames": rng.integers(0, 256, (5, 3, 4, 4), dtype=np.uint8),
        "turned": np.asfortranarray(rng.random((3, 4))),
        "big endian": np.arange(4, dtype=">i4"),
        "half": np.ones(2, np.float16),
        "complex": np.array([1 + 2j]),
        "flags": np.array([True, False]),
        "text": np.array(["a", "bcd", "ä"]),
        "raw": np.array([b"a", b"bc"]),
        "empty": np.zeros((0, 3)),
        "one": np.array(3.5),
        "objects": np.array([{"a": 1}, None, [1, 2]], object),
        "scalars": [np.float32(1.5), np.bool_(True), np.int64(-3), np.str_("x")],
        "plain": (1, -1, 1 << 100, 0.5, True, None, "text ä", b"", b"\xff\x00", (), [], {}, ((1,), (2, 3))),
        "many": [{"step": i, 7: [i]} for i in range(2500)],
        "shared": [shared, shared, {"again": shared}],
    }
    return value if protocol < 5 else {**value, "buffer": bytearray(b"abc")}


def same(left, right):
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, list | tuple) or (isinstance(left, np.ndarray) and left.dtype == object and left.shape):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif isinstance(left, np.ndarray | np.generic):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right


def load(data):
    return load_object(io.BytesIO(data), "episode 3")


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_comes_back(protocol):
    value = content(protocol)
    same(load(pickle.dumps(value, protocol)), value)


def test_both_names_of_the_module_of_arrays():
    data = pickle.dumps(np.arange(3), 2)
    assert b"numpy._core.multiarray" in data
    np.testing.assert_array_equal(load(data.replace(b"numpy._core", b"numpy.core")), np.arange(3))


def test_an_npy_file_with_an_object_is_that_object():
    same(load(saved(np.array(content(), object))), content())


@pytest.mark.parametrize("array", [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.zeros((0, 2), "S3")])
def test_an_npy_file_of_numbers_is_its_array(array):
    same(load(saved(array)), array)


# ------------------------------------------------------------------ hostile pickles


class Call:
    def __init__(self, function, *arguments, state=None):
        self.result = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.result


def named(module, name):
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text for text in (module, name)) + b"\x93"


NDARRAY, RECONSTRUCT = b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n"
DTYPE = b"cnumpy\ndtype\n"
EMPTY = RECONSTRUCT + b"(" + NDARRAY + b"K\x00\x85C\x01btR"


def dtype(kind, state=b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"):
    state = state.replace(b"U\x01<", b"X\x01\x00\x00\x00<")
    return DTYPE + b"(X" + struct.pack("<I", len(kind)) + kind + b"K\x00K\x01tR" + state


BYTE = dtype(b"u1")


def array(shape, content, kind=BYTE):
    return EMPTY + b"(K\x01" + shape + kind + b"\x89" + content + b"tb."


class Mine(np.ndarray):
    pass


HOSTILE = {
    "reduce": pickle.dumps(Call(os.system, "touch pwned")),
    "eval": b"cbuiltins\neval\n(X\x0a\x00\x00\x00print('x')tR.",
    "getattr": b"c__builtin__\ngetattr\n.",
    "inst": b"(ios\nsystem\n.",
    "newobj of a class": NDARRAY + b")\x81.",
    "newobj_ex": b"\x80\x04cos\nsystem\n)}\x92.",
    "dotted name": named(b"numpy", b"ndarray.tofile") + b".",
    "split name": named(b"numpy ndarray", b"x") + b".",
    "load of numpy": b"cnumpy\nload\n(X\x01\x00\x00\x00atR.",
    "unhashable name": b"]]\x93.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent id": b"\x80\x02K\x01Q.",
    "next buffer": b"\x80\x05\x97.",
    "state of a dict": b"\x80\x02}}b.",
    "call of a class": NDARRAY + b"K\x05\x85R.",
    "a class as a value": b"]" + NDARRAY + b"a.",
    "set": pickle.dumps({1, 2}, 4),
    "subclass": pickle.dumps(np.zeros(2).view(Mine)),
    "masked": pickle.dumps(np.ma.zeros(2)),
    "fields with objects": pickle.dumps(np.zeros(2, [("a", "O")])),
    "dtype with fields as state": array(
        b"K\x01\x85",
        b"C\x01a",
        dtype(b"u1", b"(K\x03U\x01<NX\x01\x00\x00\x00a\x85}J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"),
    ),
    "dates": pickle.dumps(np.zeros(2, "M8[s]")),
    "objects from bytes": array(b"K\x01\x85", b"C\x08aaaaaaaa", dtype(b"O8")),
    "scalar of an object": b"cnumpy.core.multiarray\nscalar\n(" + dtype(b"O8") + b"C\x08aaaaaaaatR.",
    "bytes from a list": array(b"K\x01\x85", b"]K\x01a"),
    "huge shape": array(b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86", b"C\x01a"),
    "shape of floats": array(b"G@\x00\x00\x00\x00\x00\x00\x00\x85", b"C\x02aa"),
    "huge items": array(b"K\x01\x85", b"C\x01a", dtype(b"S999999999")),
    "huge shape of objects": array(b"J\xff\xff\xff\x7f\x85", b"]", dtype(b"O8")),
    "no dtype": array(b"K\x01\x85", b"C\x01a", b"N"),
    "unbuilt dtype": array(b"K\x01\x85", b"C\x01a", dtype(b"u1", b"")),
    "unbuilt array inside": b"]" + EMPTY + b"a.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"a.",
    "truncated": pickle.dumps([1.5, "text"])[:-3],
    "itself in itself": b"\x80\x04]\x94h\x00a.",
    "nothing": b"\x80\x04.",
    "bytes behind": b"\x80\x04N.N",
    "other encoding": b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.",
    "empty file": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_else_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptDatasetError, match=r"^episode 3 cannot be read: "):
        load(HOSTILE[name])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", HOSTILE)
def test_anything_else_is_refused_within_other_values(name):
    inner = HOSTILE[name].removesuffix(b".")
    with pytest.raises(CorruptDatasetError):
        load(b"\x80\x04]" + inner + b"a.")


@pytest.mark.parametrize("name", [NDARRAY, DTYPE, RECONSTRUCT, b"c_codecs\nencode\n"])
def test_names_are_not_changed(name):
    """A state could replace the code of a function, or the attributes of a class."""
    attribute = b"X\x08\x00\x00\x00__call__"
    for state in (b"}" + attribute + b"Ns", b"N}" + attribute + b"Ns\x86"):
        for change in (state + b"b.", b")\x81" + state + b"b.", attribute + b"Ns.", b"Na."):
            with pytest.raises(CorruptDatasetError):
                load(b"\x80\x04" + name + change)
    same(load(pickle.dumps(content(2), 2)), content(2))


def test_numbers_of_extensions_give_nothing():
    """Also where another unpickler has imported what they stand for."""
    copyreg.add_extension("os", "system", 240)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf0.") is os.system
        with pytest.raises(CorruptDatasetError, match=r"os\.system"):
            load(b"\x80\x02\x82\xf0X\x01\x00\x00\x00a\x85R.")
    finally:
        copyreg.remove_extension("os", "system", 240)


@pytest.mark.parametrize("kind", ["?", "<U1", ">U1"])
def test_values_that_numpy_cannot_have_are_refused(kind):
    good = np.ones(3, kind)
    for data in (saved(good), pickle.dumps(good)):
        with pytest.raises(CorruptDatasetError, match="has not"):
            load(data.replace(good.tobytes(), b"\xff" * good.nbytes))


@pytest.mark.parametrize(
    "data",
    [
        saved(np.array(1, object))[:-5] + pickle.dumps(1),  # no array
        saved(np.arange(4.0)).replace(b"(4,)", b"(5,)"),
        saved(np.arange(4.0)).replace(b"(4,)", b"(3,)"),
        saved(np.zeros(1, [("a", "O")])),
        b"\x93NUMPY\x03\x00" + saved(np.arange(4.0))[8:],
        b"\x93NUMPY",
    ],
)
def test_npy_files_that_are_not_what_their_header_says(data):
    with pytest.raises(CorruptDatasetError):
        load(data)


def test_truncated_files_are_errors():
    small = {key: value for key, value in content().items() if key != "many"}
    for data in (saved(np.array(small, object)), *(pickle.dumps(small["scalars"], p) for p in PROTOCOLS)):
        for end in range(0, len(data), 7):
            with pytest.raises(CorruptDatasetError):
                load(data[:end])


def test_every_instruction_alone_is_an_error_or_a_plain_value():
    for opcode in pickletools.opcodes:
        for argument in (b"", b"\x00" * 8, b"\x01", b"a\nb\n"):
            with pytest.raises(CorruptDatasetError):
                load(opcode.code.encode("latin-1") + argument)

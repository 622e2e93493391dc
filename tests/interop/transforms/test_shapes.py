"""Other dims for the same numbers."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer
from interop.transforms import (
    ExpandAs,
    FlattenObservation,
    FlattenTensorDict,
    PermuteTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)


def data():
    pixels = torch.arange(4 * 2 * 3 * 5).reshape(4, 2, 3, 5)
    return TensorDict({"pixels": pixels, "flag": torch.ones(4, 1), "number": torch.arange(4)}, [4])


@pytest.mark.parametrize(
    ("transform", "key", "expected"),
    [
        (FlattenObservation(-3, -1), "pixels", lambda x: x.reshape(4, 30)),
        (FlattenObservation(-3, -2, ["pixels"], ["flat"]), "flat", lambda x: x.reshape(4, 6, 5)),
        (FlattenObservation(1, 2, allow_positive_dim=True), "pixels", lambda x: x.reshape(4, 6, 5)),
        (FlattenObservation(1, -1, allow_positive_dim=True), "pixels", lambda x: x.reshape(4, 30)),
        (UnsqueezeTransform(-1, in_keys=["pixels"]), "pixels", lambda x: x[..., None]),
        (UnsqueezeTransform(-3, in_keys=["pixels"], out_keys=["one"]), "one", lambda x: x[:, :, None]),
        (UnsqueezeTransform(1, allow_positive_dim=True, in_keys=["pixels"]), "pixels", lambda x: x[:, None]),
        (SqueezeTransform(-2, in_keys=["pixels"]), "pixels", lambda x: x),
        (PermuteTransform((-1, -3, -2), in_keys=["pixels"]), "pixels", lambda x: x.permute(0, 3, 1, 2)),
        (PermuteTransform((-1, -2), in_keys=["pixels"], out_keys=[("a", "b")]), ("a", "b"), lambda x: x.mT),
    ],
    ids=lambda each: None if callable(each) and not isinstance(each, torch.nn.Module) else repr(each),
)
def test_tensors_get_other_dims(transform, key, expected):
    found = transform(data())
    assert torch.equal(found[key], expected(data()["pixels"]))
    by_name = transform(pixels=data()["pixels"])
    assert torch.equal(by_name, expected(data()["pixels"]))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda **keys: UnsqueezeTransform(-1, **keys), "number"),
        (lambda **keys: SqueezeTransform(-1, **keys), "flag"),
        (lambda **keys: PermuteTransform((-2, -1, -3), **keys), "pixels"),
        (lambda **keys: PermuteTransform((-1, -3, -2), **keys), "pixels"),
    ],
)
def test_the_inverse_takes_back_what_forward_does(make, key):
    transform = make(in_keys=[key], in_keys_inv=[key])
    assert transform.invertible
    there = transform(data())
    back = transform.inv(there)
    assert torch.equal(back[key], data()[key]) and back is not there
    rb = ReplayBuffer(
        storage=LazyTensorStorage(4), transform=make(in_keys=[key], in_keys_inv=["stored"], out_keys_inv=[key])
    )
    rb.extend(there)
    assert torch.equal(rb.storage[:]["stored"], data()[key])


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (FlattenObservation(-6, -1), "FlattenObservation.* does not fit 'pixels' of shape .4, 2, 3, 5."),
        (
            FlattenObservation(-4, -1),
            "does not fit 'pixels' .*items have 3 dims, behind 1 batch dims, and 4 are needed",
        ),
        (FlattenObservation(0, 1, allow_positive_dim=True), "'pixels' would be of shape .8, 3, 5. in .* size .4."),
        (FlattenObservation(-2, -1, ["flag"]), "does not fit 'flag' .*items have 1 dims, behind 1"),
        (
            UnsqueezeTransform(-3, in_keys=["flag"]),
            "does not fit 'flag' .*items have 1 dims, behind 1 .*and 2 are needed",
        ),
        (UnsqueezeTransform(-5, in_keys=["flag"]), "does not fit 'flag'"),
        (
            PermuteTransform((-1, -3, -2), in_keys=["number"]),
            "does not fit 'number' of shape .4.: items have 0 dims, behind 1 batch dims, and 3 are",
        ),
        (PermuteTransform((-1, -2), in_keys=["flag"]), "does not fit 'flag'"),
        (PermuteTransform((-1, -2), in_keys=["square"]), "does not fit 'square' .*items have 1 dims"),
        (
            PermuteTransform((-1, -2), in_keys=[("inner", "square")]),
            "does not fit .*'square'.*items have 1 dims, behind 2",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(transform, text):
    found = data().set("fits", torch.ones(4, 1, 1, 1, 1, 1, 1)).set("square", torch.arange(16).reshape(4, 4))
    found["inner"] = TensorDict({"square": torch.arange(16).reshape(4, 2, 2)}, [4, 2])
    transform.in_keys, transform.out_keys = ["fits", *transform.in_keys], ["fits", *transform.out_keys]
    before = found.clone()
    with pytest.raises(ValueError, match=text):
        transform(found)
    assert all(found[key].shape == before[key].shape for key in before.keys(True, True))
    assert (found == before).all()


def test_written_items_do_not_change_places_with_batches():
    with pytest.raises(ValueError, match="items have 1 dims, behind 1 batch dims, and 2 are needed"):
        PermuteTransform((-1, -2), in_keys_inv=["a"]).inv(TensorDict({"a": torch.arange(9).reshape(3, 3)}, [3]))
    with pytest.raises(ValueError, match=r"'a' would be of shape \[\] in a tensordict of batch size \[1\]"):
        UnsqueezeTransform(-1, in_keys_inv=["a"]).inv(TensorDict({"a": torch.ones(1)}, [1]))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: FlattenObservation(0, -1), ValueError, "first_dim must be negative"),
        (lambda: FlattenObservation(-2, 1), ValueError, "last_dim must be negative"),
        (lambda: FlattenObservation(-1, -2), ValueError, "not be behind"),
        (lambda: UnsqueezeTransform(0, in_keys=["a"]), RuntimeError, "dim must be negative"),
        (lambda: SqueezeTransform(1, in_keys=["a"]), RuntimeError, "dim must be negative"),
        (lambda: UnsqueezeTransform(None, in_keys=["a"]), TypeError, "dim must be an int"),
        (lambda: PermuteTransform((0, 1)), ValueError, r"\[-2, -1\] for so many"),
        (lambda: PermuteTransform((-1, -1)), ValueError, "dims must be an order"),
        (lambda: PermuteTransform((-1, -3)), ValueError, "dims must be an order"),
    ],
)
def test_bad_dims_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_an_entry_is_repeated_over_the_dims_of_another():
    found = ExpandAs("number", "pixels", "wide")(data())
    assert found["wide"].shape == (4, 2, 3, 5) and (found["wide"] == torch.arange(4)[:, None, None, None]).all()
    assert ExpandAs("number", "flag")(data())["number"].shape == (4, 1)
    with pytest.raises(ValueError, match="does not fit 'pixels' of shape"):
        ExpandAs("pixels", "flag")(data())
    with pytest.raises(KeyError, match="'gone' not found"):
        ExpandAs("number", "gone")(data())


def test_batch_dims_become_items():
    given = TensorDict(
        {"a": torch.arange(24).reshape(4, 2, 3), "n": TensorDict({"b": torch.ones(4, 2)}, [4, 2])}, [4, 2]
    )
    rb = ReplayBuffer(storage=LazyTensorStorage(8), transform=FlattenTensorDict())
    rb.extend(given)
    assert len(rb) == 8 and torch.equal(rb.storage[:]["a"], torch.arange(24).reshape(8, 3))
    assert FlattenTensorDict()(given) is given and FlattenTensorDict(inverse=False).inv(given).batch_size == (4, 2)
    assert FlattenTensorDict(inverse=False)(given)["n"].batch_size == (8,)
    assert FlattenTensorDict().inv(TensorDict({"a": torch.ones(3)}, [])).batch_size == (1,)

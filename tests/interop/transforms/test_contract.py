"""What every transform does wherever it is used: called, in a chain, in all kinds of buffers, saved and copied."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    transforms,
)
from interop.transforms import Compose, Transform
from tests.interop.transforms.every_transform import CASES, ITEMS, same

each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
ABSTRACT = {"Compose", "Transform"}
ON_ACCELERATORS = {"PinMemoryTransform"}
NO_GRADIENTS = {"BurnInTransform", "BinarizeReward"}


def given(case, transform, data):
    """What `transform` makes of data, read with one seed."""
    torch.manual_seed(7)
    return transform(data)


def stored(case):
    """What a buffer with the transform has in its storage."""
    rb = ReplayBuffer(storage=LazyTensorStorage(2 * ITEMS), transform=case.make())
    rb.extend(case.data())
    if case.waits:
        rb.extend(case.data())
    return rb


def test_every_public_transform_is_here():
    public = {name for name in transforms.__all__ if isinstance(getattr(transforms, name), type)}
    classes = {name for name in public if issubclass(getattr(transforms, name), Transform)}
    assert classes - ABSTRACT - ON_ACCELERATORS == {name.split()[0] for name in CASES}


@each
def test_it_leaves_the_tensors_alone(case):
    data, before = case.data(), case.data()
    tensors = data.copy()
    out = given(case, case.make().eval(), data)
    assert isinstance(out, TensorDict)
    same(tensors, before)


@each
def test_it_is_a_module_among_others(case):
    once = given(case, case.make().eval(), case.data())
    inside = torch.nn.Sequential(case.make(), torch.nn.Identity()).eval()
    same(given(case, inside, case.data()), once)
    same(given(case, Compose(case.make()), case.data()), once)


@each
@pytest.mark.parametrize("buffer, storage", [(TensorDictReplayBuffer, LazyMemmapStorage), (ReplayBuffer, ListStorage)])
def test_buffers_read_through_it(case, buffer, storage):
    rb = buffer(storage=storage(2 * ITEMS), transform=case.make(), batch_size=4)
    index = rb.extend(case.data())
    if case.waits:
        index = rb.extend(case.data())
    assert len(index) == ITEMS
    assert len(rb) == (2 * ITEMS - 2 if case.waits else ITEMS)  # two steps are kept for those that follow
    batch = rb.sample()
    assert len(batch) == 4
    plain = case.make().eval() if not len(rb.transform.state_dict()) else rb.transform
    found = given(case, plain, torch.stack([*rb.storage[:]]) if storage is ListStorage else rb.storage[:].clone())
    torch.manual_seed(7)
    same(rb[:], found)
    if storage is not ListStorage:
        assert rb.storage[0].batch_size == rb.storage[:].batch_size[1:]


@pytest.mark.parametrize("case", [case for case in CASES.values() if not case.waits])
def test_what_is_stored_is_its_inverse(case):
    data = case.data()
    rb = ReplayBuffer(storage=LazyTensorStorage(ITEMS), transform=case.make())
    torch.manual_seed(7)
    rb.extend(data)
    same(data, case.data())
    same(rb.storage[:], given(case, case.make().eval().inv, data))


@each
def test_it_is_appended_inserted_and_inverted(case):
    rb = ReplayBuffer(storage=LazyTensorStorage(ITEMS), batch_size=3)
    if case.keeps:
        with pytest.raises(ValueError, match="cannot be inverted"):
            rb.append_transform(case.make(), invert=True)
        return
    rb.append_transform(lambda data: data)
    rb.insert_transform(0, case.make(), invert=True)
    torch.manual_seed(7)
    rb.extend(case.data())
    same(rb.storage[:], given(case, case.make().eval(), case.data()))
    if not case.other_type:
        assert len(rb.sample()) == 3


@each
def test_members_and_wholes_of_ensembles_read_through_it(case):
    members = [stored(case), stored(case)]
    single = given(case, members[0].transform, members[0].storage[:4].clone())
    inside = ReplayBufferEnsemble(*members, batch_size=8)
    found = inside.sample()
    assert set(single.keys(True, True)) <= set(found[0].keys(True, True))
    assert found[0].batch_size[:1] == (4,)
    if not case.keeps:
        plain = [ReplayBuffer(storage=LazyTensorStorage(ITEMS)) for _ in range(2)]
        for member in plain:
            member.extend(case.data())
        whole = ReplayBufferEnsemble(*plain, batch_size=8, transform=case.make()).sample()
        assert whole.batch_size[0] == 2


@each
def test_a_buffer_is_saved_with_it(case, tmp_path):
    rb, twin = stored(case), ReplayBuffer(storage=LazyTensorStorage(2 * ITEMS), transform=case.make())
    rb.dumps(tmp_path / "saved")
    twin.loads(tmp_path / "saved")
    third = ReplayBuffer(storage=LazyTensorStorage(2 * ITEMS), transform=case.make())
    third.load_state_dict(rb.state_dict())
    for each_ in (rb, twin, third):
        torch.manual_seed(7)
        each_.extend(case.data())
    torch.manual_seed(7)
    expected = rb[:]
    for each_ in (twin, third):
        torch.manual_seed(7)
        same(each_[:], expected)


@each
def test_copies_do_the_same(case):
    transform = case.make().eval()
    expected = given(case, case.make().eval(), case.data())
    for twin in (transform.clone(), copy.copy(transform), copy.deepcopy(transform)):
        same(given(case, twin, case.data()), expected)
    if "fn" not in vars(transform):
        same(given(case, pickle.loads(pickle.dumps(transform)), case.data()), expected)
    assert type(transform).__name__ in repr(transform)


@each
def test_what_is_missing_is_named_and_nothing_changes(case):
    for key, run in ((case.reads, lambda t: t), (case.writes, lambda t: t.inv)):
        if key is None:
            continue
        transform, data = case.make().eval(), case.data()
        data.del_(key)
        before = data.clone()
        with pytest.raises(KeyError, match=str(key).replace("(", r"\(").replace(")", r"\)")):
            run(transform)(data)
        same(data, before)
        rb = ReplayBuffer(storage=LazyTensorStorage(ITEMS), transform=transform)
        if key == case.writes:
            with pytest.raises(KeyError):
                rb.extend(data)
            assert len(rb) == 0


@each
def test_a_default_device_does_not_matter(case):
    expected = given(case, case.make().eval(), case.data())
    data, transform = case.data(), case.make().eval()
    generator = torch.random.get_rng_state()
    torch.set_default_device("meta")
    try:
        torch.random.set_rng_state(generator)
        torch.manual_seed(7)
        found = transform(data)
        inverse = transform.inv(found.copy() if not case.other_type else data.copy()) if not case.waits else None
    finally:
        torch.set_default_device(None)
    same(found, expected)
    if inverse is not None:
        assert all(leaf.device.type == "cpu" for leaf in inverse.values(True, True))


def floats(name):
    """The floats that an example reads; None for others."""
    key = CASES[name].reads or "observation"
    value = CASES[name].data().get(key, None)
    return key if value is not None and value.is_floating_point() else None


@pytest.mark.parametrize("name", [name for name in CASES if floats(name) and name not in NO_GRADIENTS])
def test_gradients_flow(name):
    key, data = floats(name), CASES[name].data()
    data[key].requires_grad_()
    found = CASES[name].make().eval()(data.copy())
    assert any(leaf.requires_grad for leaf in found.exclude(key).values(True, True)) or found[key].requires_grad


@each
def test_other_batch_dims(case):
    data = case.data()
    wide = torch.stack([data, data])
    found, expected = given(case, case.make().eval(), wide), given(case, case.make().eval(), data)
    if not case.random and not len(case.make().state_dict()):
        same(found[1], expected)
    assert found.batch_size[:2] == (2, *expected.batch_size)[:2]

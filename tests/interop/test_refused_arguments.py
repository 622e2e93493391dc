"""Arguments that cannot be meant are refused by the constructor, with what came, what is taken and what to do."""

import subprocess
import sys
import textwrap

import pytest
import torch
from tensordict import TensorDict

import interop
from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sampler,
    SliceSampler,
    Storage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Writer,
)

CLASSES = [
    each
    for name in sorted(interop.__all__)
    if isinstance(each := getattr(interop, name), type)
    and issubclass(each, Storage | Sampler | Writer | ReplayBuffer | ReplayBufferEnsemble)
    and name not in ("Sampler", "StoreStorage")  # the first cannot be made, the other takes options of a server
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_unknown_argument_names_the_class_and_what_it_takes(kind):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) got an unexpected keyword argument 'no_such_thing'"):
        kind(no_such_thing=1)


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: TensorDictReplayBuffer(batch_sise=2), "batch_size"),
        (lambda: LazyMemmapStorage(max_sise=2), "max_size"),
        (lambda: SliceSampler(slice_lenn=2), "slice_len"),
        (lambda: RoundRobinWriter(track_generation=True), "track_generations"),
    ],
)
def test_the_nearest_argument_is_named(make, meant):
    with pytest.raises(TypeError, match=rf"\(did you mean '{meant}'\?\)\. It takes .*{meant}"):
        make()


def test_a_class_of_the_users_takes_what_it_takes():
    class Own(LazyTensorStorage):
        def __init__(self, max_size, colour):
            super().__init__(max_size)
            self.colour = colour

    class Any(LazyTensorStorage):
        def __init__(self, max_size, **more):
            super().__init__(max_size)
            self.more = more

    assert Own(4, colour="red").colour == "red"
    assert Any(4, shade=1).more == {"shade": 1}
    with pytest.raises(TypeError, match=r"Own\(\) got .* 'color' \(did you mean 'colour'\?\)"):
        Own(4, color="red")


@pytest.mark.parametrize("value", ["0.4", None, True, b"1"], ids=repr)
@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
def test_a_number_is_no_text(name, value):
    arguments = {"alpha": 0.6, "beta": 0.4, "eps": 1e-8, name: value}
    for make in (
        lambda: PrioritizedSampler(10, **arguments),
        lambda: TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(10), **arguments),
    ):
        with pytest.raises(TypeError, match=rf"{name} must be a number that is finite and at least 0, got {value!r}"):
            make()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize(
    "kind", [LazyTensorStorage, lambda size, device: interop.TensorStorage(None, size, device=device)]
)
def test_a_device_that_is_not_there_is_refused_at_construction(kind):
    for device in ("cuda", "cuda:3", torch.device("cuda", 1)):
        with pytest.raises(RuntimeError, match=r"device='cuda.*sees 0 CUDA devices here\. Use device='cpu'"):
            kind(10, device=device)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_memory_is_pinned_for_an_accelerator_only():
    with pytest.raises(RuntimeError, match="pin_memory=True pins batches for an accelerator"):
        ReplayBuffer(storage=LazyTensorStorage(10), pin_memory=True)


def test_folders_name_the_call_that_reads_them(tmp_path):
    data = TensorDict({"a": torch.zeros(4)}, [4])
    kept = TensorDictReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "rows"), batch_size=2)
    kept.extend(data)
    kept.dumps(tmp_path / "checkpoint")
    with pytest.raises(FileNotFoundError, match=r"is a checkpoint, not a folder of rows: .*loads\("):
        LazyMemmapStorage.open(tmp_path / "checkpoint")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    for read in (other.loads, other.storage.loads):
        with pytest.raises(
            FileNotFoundError, match=r"holds the rows of a LazyMemmapStorage.*LazyMemmapStorage\.open\("
        ):
            read(tmp_path / "rows")
    other.loads(tmp_path / "checkpoint")
    assert len(other) == 4


def test_without_torch_the_first_name_that_needs_it_says_what_to_install():
    program = """
        import importlib.util, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: None if name == "torch" else find(name, *more)
        import interop
        interop.inspect, interop.show_versions  # they look at files, and say what is missing
        try:
            interop.ReplayBuffer
        except ImportError as error:
            assert "interop needs torch" in str(error) and "pip install '.[interop]'" in str(error), error
        else:
            raise SystemExit("imported")
        import fbuf
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)

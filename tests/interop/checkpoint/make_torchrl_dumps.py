"""Makes the folders in `torchrl_dumps`, each what `dumps` of a torchrl buffer wrote, and expected.json with what is in them.

Run by hand where torchrl 0.14 is installed: `python make_torchrl_dumps.py`. The prioritized ones are written as torchrl
lays them out, from the values themselves: its trees need a build of their own.
"""

import itertools
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, tensorclass
from torchrl.data import replay_buffers as rl
from torchrl.data.replay_buffers import samplers, writers
from torchrl.envs import RewardScaling

HERE = Path(__file__).parent / "torchrl_dumps"
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
DTYPES += ["complex64", "complex128"]


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


def rows(count, start=0):
    at = torch.arange(start, start + count)
    return TensorDict(
        {
            "obs": torch.stack([at * 0.5, -at.float()], -1),
            "we/ird .key%": at.short(),
            "nothing": torch.zeros(count, 0),
            "next": TensorDict({"reward": at[:, None].float(), "done": (at % 4 == 3)[:, None]}, [count]),
            "traj": at // 4,
        },
        [count],
    )


def every_dtype(count):
    at = torch.arange(count)
    return TensorDict(
        {name: (at % 2 if name == "bool" else at * 3).to(getattr(torch, name)) for name in DTYPES}, [count]
    )


def lanes(time, first=0):
    at = torch.arange(first, first + 3 * time).reshape(time, 3)
    return TensorDict({"a": at, "n": {"b": at[..., None].expand(time, 3, 2) * 0.25}}, [time, 3])


def seeded():
    return torch.Generator().manual_seed(7)


def buffers():
    """A name, a buffer that has been used, and one item or batch that it can take next."""

    def td(**given):
        given.setdefault("storage", rl.LazyTensorStorage(8))
        return rl.TensorDictReplayBuffer(batch_size=3, **given)

    def plain(**given):
        given.setdefault("storage", rl.LazyTensorStorage(8))
        return rl.ReplayBuffer(batch_size=3, **given)

    def wrote(buffer, *batches, draws=0):
        for batch in batches:
            buffer.extend(batch)
        for _ in range(draws):
            buffer.sample()
        return buffer

    yield "uniform", wrote(td(generator=seeded()), rows(5), draws=2), rows(1, 50)
    yield "plain", wrote(plain(), rows(5)), rows(1, 50)
    files = plain(storage=rl.LazyMemmapStorage(8))
    yield "memmap", wrote(files, rows(7).exclude("nothing")), rows(1, 50).exclude("nothing")
    yield "dtypes", wrote(plain(), every_dtype(5)), every_dtype(1)
    yield "two_dims", wrote(plain(storage=rl.LazyTensorStorage(12, ndim=2), dim_extend=0), lanes(2)), lanes(1, 90)
    full = plain(storage=rl.LazyTensorStorage(12, ndim=2), dim_extend=0)
    yield "two_dims_full", wrote(full, lanes(3), lanes(2, 9)), lanes(1, 90)
    step = Step(obs=torch.rand(5, 2, generator=seeded()), reward=torch.arange(5.0), batch_size=[5])
    yield "tensorclass", wrote(plain(), step), step[:1]
    below = TensorDict({"step": step, "a": torch.arange(5)}, [5])
    yield "tensorclass_below", wrote(plain(), below), below[:1]
    tree = {
        "a": torch.arange(5),
        "b": (torch.arange(10.0).reshape(5, 2), [torch.tensor([True, False, True, True, False])]),
    }
    tree |= {"c.d": torch.arange(5) + 7, "e/f": torch.arange(5) + 9}
    yield "pytree", wrote(plain(), tree), None
    yield "one_tensor", wrote(plain(), torch.arange(5)), torch.tensor([50])
    names = TensorDict({"name": [*"abcde"], "a": torch.arange(5)}, [5])
    yield "non_tensors", wrote(plain(), names), None

    without = samplers.SamplerWithoutReplacement
    yield "epoch", wrote(plain(sampler=without()), rows(8), draws=1), rows(1, 50)
    yield "consuming", wrote(plain(consume_after_n_samples=2), rows(8), draws=3), None

    ranked = td(writer=writers.TensorDictMaxValueWriter(rank_key=("next", "reward")))
    mixed = rows(12)[torch.tensor([3, 9, 1, 7, 0, 11, 5, 2, 10, 4, 8, 6])]
    yield "highest", wrote(ranked, mixed), rows(1, 50)
    counted = td(writer=writers.TensorDictRoundRobinWriter(track_generations=True))
    yield "generations", wrote(counted, rows(6), rows(5, 6)), rows(1, 50)
    yield "read_only", fixed(rows(8)), None

    compressed = plain(storage=rl.CompressedListStorage(8))
    yield "compressed", wrote(compressed, [torch.arange(5), torch.rand(3, 2, generator=seeded())]), [torch.zeros(2)]
    scaling = RewardScaling(loc=0.5, scale=2.0, in_keys=[("next", "reward")])
    yield "transforms", wrote(td(transform=scaling), rows(5)), rows(1, 50)
    members = [wrote(td(), rows(5)), wrote(td(storage=rl.LazyTensorStorage(6), sampler=without()), rows(6), draws=1)]
    yield "ensemble", rl.ReplayBufferEnsemble(*members, p=[0.25, 0.75], batch_size=4), None

    for name in ("Flat", "H5"):
        episodes = plain()
        episodes.storage.checkpointer = getattr(rl, f"{name}StorageCheckpointer")()
        yield name.lower(), wrote(episodes, steps(3), steps(3, 3)), steps(1, 50)


def steps(count, start=0):
    """Episodes of four steps: what comes after a step is the next one, or, at an end, the last observation."""
    at = torch.arange(start, start + count)
    done = (at % 4 == 3)[:, None]
    no = torch.zeros_like(done)
    after = {"obs": at[:, None] + 1 + done * 1000, "reward": at[:, None].float(), "done": done, "terminated": done}
    return TensorDict(
        {"obs": at[:, None], "action": at % 3, "done": no, "terminated": no, "next": TensorDict(after, [count])},
        [count],
    )


def fixed(data):
    return rl.ReplayBuffer(
        storage=rl.TensorStorage(data),
        writer=rl.ImmutableDatasetWriter(),
        sampler=samplers.RandomSampler(),
        batch_size=3,
    )


# ---------------------------------------------------------------------- what is expected


def raw(tensor):
    tensor = tensor.contiguous()
    values = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "bytes": bytes(values.tolist()).hex()}


def leaves(data, path=()):
    if isinstance(data, torch.Tensor):
        return {"/".join(path): raw(data)}
    if isinstance(data, list | tuple | dict):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        return dict(itertools.chain(*(leaves(each, (*path, str(key))).items() for key, each in items)))
    if not hasattr(data, "items"):
        return {}
    return dict(itertools.chain(*(leaves(each, (*path, key)).items() for key, each in data.items())))


def described(buffer):
    if isinstance(buffer, rl.ReplayBufferEnsemble):
        return {"members": [described(each) for each in buffer._rbs]}
    storage = buffer._storage
    items = [storage.get(each) for each in range(len(storage))] if isinstance(storage, rl.ListStorage) else storage[:]
    found = {"length": len(storage), "leaves": leaves(items)}
    if isinstance(storage, rl.TensorStorage):
        found["ndim"] = storage.ndim
    for name in ("_cursor", "_write_count"):
        value = getattr(buffer._writer, name, None)
        found[name] = None if value is None else int(value)
    generation = getattr(buffer._writer, "_generation", None)
    found["generation"] = None if generation is None else generation.tolist()
    heap = getattr(buffer._writer, "_current_top_values", None)
    found["heap"] = None if heap is None else sorted([float(rank), int(slot)] for rank, slot in heap)
    return found


# ---------------------------------------------------------------------- priorities


def prioritized(name, alpha, beta, eps, given, capacity, dtype):
    """A dump of a buffer with priorities, its trees written as they are laid out. `given` are the priorities of rows."""
    buffer = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(capacity), batch_size=3)
    buffer.extend(rows(len(given)))
    folder = HERE / name
    buffer.dumps(folder)
    (folder / "sampler").mkdir()
    stored = (np.asarray(given, dtype) + dtype(eps)) ** dtype(alpha)
    sums, least = np.zeros(capacity), np.full(capacity, np.finfo(dtype).max, np.float64)
    sums[: len(given)] = least[: len(given)] = stored
    sums.tofile(folder / "sampler/sumtree.memmap")
    least.tofile(folder / "sampler/mintree.memmap")
    metadata = {
        "_alpha": float(alpha),
        "_beta": float(beta),
        "_eps": float(eps),
        "_max_priority": [float(max(given)), float(np.argmax(given))],
        "_max_capacity": float(capacity),
        "_schema_version": 1,
    }
    (folder / "sampler/sampler_metadata.json").write_text(json.dumps(metadata))
    found = described(buffer)
    found["priorities"] = {"given": [float(each) for each in given], "alpha": alpha, "beta": beta, "eps": eps}
    return found


def main():
    torch.use_deterministic_algorithms(True)  # fills memory that was not written
    torch.manual_seed(0)
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    expected = {}
    for name, buffer, after in buffers():
        try:
            buffer.dumps(HERE / name)
        except TypeError as error:
            print(f"{name}: torchrl cannot save it: {error}")
            shutil.rmtree(HERE / name)
            continue
        expected[name] = described(buffer)
        if after is not None:
            slots = torch.as_tensor(buffer.extend(after))
            expected[name]["next"] = slots.tolist()
    given = [0.5, 1.0, 3.0, 0.25, 2.0]
    expected["priorities"] = prioritized("priorities", 0.6, 0.4, 1e-8, given, 8, np.float32)
    expected["priorities_double"] = prioritized("priorities_double", 1.1, 1.0, 1e-6, given, 8, np.float64)
    expected["priorities_without_alpha"] = prioritized("priorities_without_alpha", 0.0, 1.0, 1e-8, given, 8, np.float32)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1))
    size = sum(each.stat().st_size for each in HERE.rglob("*") if each.is_file())
    print(len(expected), "dumps,", size, "bytes")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

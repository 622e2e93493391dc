"""A buffer that another process calls by torch RPC."""

import inspect
import multiprocessing
import os
import sys
import warnings

import pytest
import torch
from tensordict import TensorDict
from torch.distributed import rpc

from interop import PrioritizedSampler, RemoteTensorDictReplayBuffer, TensorDictReplayBuffer
from interop.storages import LazyTensorStorage


def rows(start, count):
    ids = torch.arange(start, start + count)
    return TensorDict({"id": ids, "next": {"obs": ids[:, None] * torch.ones(3)}}, [count])


def make():
    return RemoteTensorDictReplayBuffer(
        storage=LazyTensorStorage(16),
        sampler=PrioritizedSampler(16, alpha=1.0, beta=1.0, eps=0.0),
        priority_key="priority",
        batch_size=8,
    )


def every_call_by_reference():
    buffer, remote = RemoteTensorDictReplayBuffer, rpc.remote("owner", make)
    assert not remote.is_owner()
    assert buffer.extend(remote, rows(0, 12)).tolist() == list(range(12))
    assert buffer.add(remote, rows(12, 1)[0]) == 12
    assert buffer.__len__(remote) == 13
    assert (buffer.__getitem__(remote, slice(3, 5)).exclude("index") == rows(3, 2)).all()

    buffer.update_priority(remote, torch.arange(13), torch.zeros(13))
    sample = rows(5, 2).set("index", torch.tensor([5, 6])).set("priority", torch.tensor([1.0, 3.0]))
    buffer.update_tensordict_priority(remote, sample)
    batch, info = rpc.rpc_sync("owner", buffer.sample, args=(remote, None, None, True))
    assert batch.shape == (8,) and set(batch["id"].tolist()) <= {5, 6}
    assert (batch["index"] == batch["id"]).all() and (info["index"] == batch["id"]).all()
    assert (batch["next", "obs"] == batch["id"][:, None]).all()
    assert "priority_weight" in batch and "priority_weight" not in remote.rpc_sync().sample(8, False)

    generator = torch.get_rng_state()  # the draws are of the owner
    buffer.sample(remote)
    assert (torch.get_rng_state() == generator).all()
    with pytest.raises(ValueError, match="takes a TensorDict, got int"):
        buffer.extend(remote, 3)
    with pytest.raises(TypeError, match="an RRef of one as self, got int"):
        buffer.sample(rpc.remote("owner", int))
    buffer.empty(remote)
    assert buffer.__len__(remote) == 0

    own = make()
    here = rpc.RRef(own)
    buffer.extend(here, rows(0, 4))
    assert here.is_owner() and len(own) == 4 and buffer.sample(here, 8).shape == (8,)
    return remote


def join(rank, meeting):
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", num_worker_threads=2, rpc_timeout=30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own calls
        rpc.init_rpc(("caller", "owner")[rank], rank=rank, world_size=2, rpc_backend_options=options)


def serve(meeting):
    torch.set_num_threads(1)
    assert "ray" not in sys.modules  # which interop imports where it is used
    join(1, meeting)
    rpc.shutdown()


def called_from_another_process(meeting):
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    owner = multiprocessing.get_context("fork").Process(target=serve, args=(meeting,), daemon=True)
    owner.start()
    try:
        join(0, meeting)
        try:
            remote = every_call_by_reference()
        finally:
            rpc.shutdown(graceful=owner.is_alive())
        with pytest.raises(RuntimeError, match=r"call init_rpc\(\) first"):
            RemoteTensorDictReplayBuffer.sample(remote)
        owner.join(30)
        assert owner.exitcode == 0
    finally:
        owner.kill()
        owner.join()


def test_a_buffer_is_called_by_reference_from_another_process(tmp_path, in_a_fork):
    code = "from tests.interop.remote.test_rpc import called_from_another_process as test; test(meeting)"
    in_a_fork(code, meeting=str(tmp_path / "meeting"))  # both processes have the library already: an import takes 5 s


def test_every_public_method_takes_a_reference_under_its_own_name():
    for name, method in inspect.getmembers(TensorDictReplayBuffer, inspect.isfunction):
        if not name.startswith("_") or name in ("__len__", "__getitem__", "__setitem__", "__iter__"):
            taken = getattr(RemoteTensorDictReplayBuffer, name)
            assert taken is not method and taken.__qualname__ == f"RemoteTensorDictReplayBuffer.{name}"
            with pytest.raises(TypeError, match=rf"{name}\(\) needs a RemoteTensorDictReplayBuffer or an RRef"):
                taken(object())
    order = list(inspect.signature(RemoteTensorDictReplayBuffer.sample).parameters)
    assert order == ["self", "batch_size", "include_info", "return_info"]

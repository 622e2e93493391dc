"""Collectors with workers that write into a buffer: `python -m tests.interop.sharing.torchrl_collectors FOLDER CELLS`.

A collector writes one made-up item, which is other than those that its workers write, empties the buffer and hands it over.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
import torchrl.collectors
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, EnvCreator

import interop


class Counting(EnvBase):
    """Observations count the steps of an episode of five."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(obs=Unbounded((3,)))
        self.action_spec = Bounded(-1, 1, (2,))
        self.reward_spec = Unbounded((1,))
        self.count = 0

    def _reset(self, tensordict=None):
        self.count = 0
        return TensorDict({"obs": torch.zeros(3)}, [])

    def _step(self, tensordict):
        self.count += 1
        done = torch.tensor([self.count >= 5])
        obs = torch.full((3,), self.count * 1.0)
        return TensorDict({"obs": obs, "reward": torch.ones(1), "done": done, "terminated": done.clone()}, [])

    def _set_seed(self, seed):
        pass


class Act(torch.nn.Module):
    def forward(self, obs):
        return obs[..., :2] * 0, obs.sum(-1, keepdim=True)


def with_key():
    return TensorDictModule(Act(), in_keys=["obs"], out_keys=["action", "hidden"])


def first_of(obs):
    return obs[..., :2] * 0


def feed(collector, way, storage, shared_init, option, folder):
    more = {"scratch_dir": folder} if storage == "files" else {}
    kind = getattr(interop, "LazyMemmapStorage" if storage == "files" else storage)
    built = kind(200, shared_init=shared_init, **more)
    if prioritized := option == "prioritized":
        buffer = interop.TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=built, batch_size=8, sync=False)
    else:
        buffer = interop.ReplayBuffer(storage=built, batch_size=8)
    if way == "creator":
        given = {"policy": TensorDictModule(first_of, in_keys=["obs"], out_keys=["action"])}
    else:
        given = {"policy_factory": with_key} if way == "factory" else {"policy": with_key()}
    options = {"trajectories": {"trajs_per_batch": 2}, "steps": {"extend_buffer": False}}.get(option, {})
    made = getattr(torchrl.collectors, collector)(
        [EnvCreator(Counting) if way == "creator" else Counting] * 2,
        frames_per_batch=20,
        total_frames=60,
        replay_buffer=buffer,
        **given,
        **options,
    )
    try:
        for _ in made:
            if len(buffer):
                batch = buffer.sample()
                assert (batch["next", "obs"] == batch["obs"] + 1).all()
                if prioritized:
                    buffer.update_tensordict_priority(batch.set("td_error", torch.full((8,), 0.5)))
    finally:
        made.shutdown()
    held = buffer[:]
    assert len(held) == len(buffer) == buffer.write_count and len(buffer) >= 40
    assert ("hidden" in held.keys()) == (way != "creator")  # noqa: SIM118
    assert (held["next", "obs"] == held["obs"] + 1).all() and held["next", "reward"].all()
    if prioritized:
        priorities = buffer.sampler.priorities
        assert priorities.shape == (len(buffer),) and {*priorities.tolist()} == {0.5, 1.0}


def main():
    torch.set_num_threads(1)
    found = []
    for number, cell in enumerate(json.loads(sys.argv[2])):
        try:
            feed(*cell, Path(sys.argv[1]) / str(number))
            found.append("done")
        except Exception:
            found.append(traceback.format_exc()[-2000:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()

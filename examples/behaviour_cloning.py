"""Behaviour cloning from a flat data set: a controller swings a pendulum up, and a network learns it from pictures alone.

The script records episodes, saves each picture once (`FlatStorageCheckpointer`; it saves the plain layout as well, to
compare), loads them into a fresh buffer of another kind and compares them bit for bit. The network learns in epochs; each
epoch has every step once. The baselines are the returns of the controller and of random actions, from the same starts.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from interop import (
    FlatStorageCheckpointer,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)
from interop.postprocs import split_trajectories
from interop.transforms import Compose, DoubleToFloat, SelectTransform, ToTensorImage, VecNorm

REACHED = 0.9  # of the way from the return of random actions to that of the controller
STEPS = 200  # of an episode, which nothing ends before
TORQUE = 2.0  # at most, of Pendulum-v1
SIZE = 24  # pixels of a side

Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]  # torques [n] for states [n, 3] and pictures [n, SIZE, SIZE, 2]

# ---------------------------------------------------------------------- Pendulum-v1, its pictures, and the controller

_AXIS = (np.arange(SIZE) + 0.5) / SIZE * 2.4 - 1.2
_X, _Y = np.meshgrid(_AXIS, -_AXIS)


def picture(states: np.ndarray) -> np.ndarray:
    """The rod for states [n, 3] of cosine, sine and speed, uint8 [n, SIZE, SIZE]; its edges are soft."""
    up, right = states[:, 0, None, None], states[:, 1, None, None]
    along = np.clip(_X * right + _Y * up, 0, 1)
    distance = np.hypot(_X - along * right, _Y - along * up)
    return (255 * np.clip(1.5 - 10 * distance, 0, 1)).astype(np.uint8)


class Pendulums:
    """Pendulums that start and end together, seen in two pictures: now, and one step before, for the speed."""

    def __init__(self, count: int) -> None:
        # With autoreset off, what the last step returns is where the episode really ended.
        mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        self.envs = gymnasium.make_vec("Pendulum-v1", count, vectorization_mode="sync", vector_kwargs=mode)

    def play(self, policy: Policy, seed: int, noise: float = 0.0) -> TensorDict:
        """An episode of each, [n, STEPS]. Actions are those of the policy with noise; "expert" is the action without it."""
        rng, rows, over = np.random.default_rng(seed), [], False
        state, _ = self.envs.reset(seed=seed)
        pixels = np.stack(2 * [picture(state)], -1)
        while not over:
            wanted = policy(state, pixels)
            action = np.clip(wanted + noise * rng.normal(size=len(wanted)), -TORQUE, TORQUE).astype(np.float32)
            after, reward, terminated, truncated, _ = self.envs.step(action[:, None])
            seen = np.stack((pixels[..., 1], picture(after)), -1)
            columns = (pixels, action, wanted, seen, reward, terminated, truncated)
            rows.append([torch.from_numpy(column.copy()) for column in columns])
            state, pixels, over = after, seen, bool(truncated.all())
        pixels, action, wanted, seen, *results = (torch.stack(column, 1) for column in zip(*rows, strict=True))
        reward, terminated, truncated = (column[..., None] for column in results)
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        return TensorDict(
            {"pixels": pixels, "action": action[..., None], "expert": wanted[..., None].double()}
            | {"next": {"pixels": seen, "reward": reward, **ends}},
            batch_size=action.shape,
        )


def controller(states: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Pumps energy into the swing, and holds the rod where it is nearly up."""
    up, right, speed = states.astype(np.float64).T
    hold = -12 * np.arctan2(right, up) - 2.5 * speed
    missing = 5 - (speed**2 / 6 + 5 * up)  # energy
    pump = missing * np.where(speed >= 0, 1, -1)
    return np.clip(np.where((up > 0.9) & (np.abs(speed) < 3), hold, pump), -TORQUE, TORQUE)


def returns(episodes: TensorDictBase) -> Tensor:
    """The return of each episode of rewards [n, STEPS]."""
    return episodes["next", "reward"].sum((1, 2))


# ---------------------------------------------------------------------- the data set


def record(options: argparse.Namespace, seed: int) -> tuple[ReplayBuffer, TensorDict]:
    """Record the controller into a ring that is too small. Also returns all steps, [episodes, STEPS], with "time"."""
    episodes = Pendulums(options.episodes).play(controller, seed, options.noise)
    episodes["time"] = torch.arange(episodes.numel()).reshape(episodes.shape)
    rb = ReplayBuffer(storage=LazyTensorStorage(episodes.numel() - options.lost))
    for episode in episodes:
        rb.extend(episode)
    return rb, episodes


def save(rb: ReplayBuffer, folder: pathlib.Path) -> dict[str, int]:
    """Save the storage in both layouts. Returns the bytes of each on the disk."""
    sizes = {}
    for name, checkpointer in (("plain", TensorStorageCheckpointer()), ("flat", FlatStorageCheckpointer())):
        rb.storage.checkpointer = checkpointer
        rb.storage.dumps(folder / name)
        sizes[name] = sum(file.stat().st_size for file in (folder / name).rglob("*") if file.is_file())
    return sizes


def load(options: argparse.Namespace, folder: pathlib.Path, count: int, seed: int) -> TensorDictReplayBuffer:
    """A read-only buffer that is drawn in epochs."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(count),
        checkpointer=FlatStorageCheckpointer(),
        sampler=SamplerWithoutReplacement(),
        writer=ImmutableDatasetWriter(),
        batch_size=options.batch_size,
        generator=torch.Generator().manual_seed(seed),
    )
    rb.storage.loads(folder / "flat")
    return rb


def check(rb: TensorDictReplayBuffer, recorded: ReplayBuffer, episodes: TensorDict, lost: int) -> int:
    """Compare the loaded steps with the recorded ones. Returns the number of episodes."""
    data = rb[:]
    assert (data == recorded[:]).all()  # row by row: the ring begins in the middle of an episode, and goes on at row 0
    in_time = data[data["time"].argsort()]
    assert (in_time == episodes.reshape(-1)[lost:]).all()
    assert torch.equal(in_time["next", "truncated"], in_time["time"][:, None] % STEPS == STEPS - 1)

    # In an episode the next picture is the one of the next step, and the last one is where it ended.
    split = split_trajectories(in_time)
    inside = split["mask"][:, 1:]
    assert torch.equal(split["next", "pixels"][:, :-1][inside], split["pixels"][:, 1:][inside])
    final = split["next", "pixels"][torch.arange(len(split)), split["mask"].sum(1) - 1]
    assert torch.equal(final, episodes["next", "pixels"][-len(split) :, -1])
    assert torch.equal(returns(split)[1:], returns(episodes)[1 - len(split) :])  # the first lost its beginning
    return len(split)


# ---------------------------------------------------------------------- learning


def transforms(rb: TensorDictReplayBuffer) -> Compose:
    """Transforms from pictures to inputs, by mean and deviation of each pixel over the data. Adds them to the buffer."""
    norm = VecNorm(["pixels"], decay=1.0, eps=0.05**2)
    for each in (SelectTransform("pixels", "expert"), DoubleToFloat(in_keys=["expert"]), ToTensorImage()):
        rb.append_transform(each)
    for start in range(0, len(rb), 1000):
        norm.update(rb[start : start + 1000])
    rb.append_transform(norm.to_observation_norm())
    return rb.transform[2:]


def network(width: int) -> nn.Module:
    """Torques [..., 1] of pictures [..., 2, SIZE, SIZE]."""
    return nn.Sequential(
        nn.Flatten(-3),
        nn.Linear(2 * SIZE**2, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 1),
    )


def fit(options: argparse.Namespace, rb: TensorDictReplayBuffer, net: nn.Module) -> list[float]:
    """Train by regression. Returns the mean squared error of each epoch."""
    optimizer = torch.optim.Adam(net.parameters(), lr=options.learning_rate, fused=True)
    batches = -(-len(rb) // options.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * batches)
    errors = []
    for _ in range(options.epochs):
        named, total = [], 0.0
        for batch in rb:
            error = nn.functional.mse_loss(net(batch["pixels"]), batch["expert"])
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            schedule.step()
            named.append(batch["index"])
            total += error.item() * len(batch)
        assert torch.equal(torch.cat(named).sort().values, torch.arange(len(rb)))  # each step once
        errors.append(total / len(rb))
    return errors


def clone(net: nn.Module, look: Compose) -> Policy:
    """The network as a policy, with the inputs of training."""

    @torch.no_grad()
    def policy(_: np.ndarray, pixels: np.ndarray) -> np.ndarray:
        seen = look(TensorDict({"pixels": torch.from_numpy(pixels)}, batch_size=[len(pixels)]))
        return net(seen["pixels"])[:, 0].numpy()

    return policy


def run(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Record, save, load, learn, play. Returns the results."""
    torch.manual_seed(seed)
    begin, rng = time.perf_counter(), np.random.default_rng(seed)
    recorded, episodes = record(options, seed)
    with tempfile.TemporaryDirectory() as folder:
        sizes = save(recorded, pathlib.Path(folder))
        rb = load(options, pathlib.Path(folder), len(recorded), seed)
    count = check(rb, recorded, episodes, options.lost)
    look, net, starts = transforms(rb), network(options.hidden), Pendulums(options.tests)

    def play(policy: Policy) -> float:
        return returns(starts.play(policy, seed + 1_000_000)).mean().item()

    result = {
        "random": play(lambda states, _: rng.uniform(-TORQUE, TORQUE, len(states))),
        "controller": play(controller),
        "before": play(clone(net, look)),
        "errors": fit(options, rb, net),
        "after": play(clone(net, look)),
    }
    reached = (result["after"] - result["random"]) / (result["controller"] - result["random"])
    told = {"steps": len(rb), "episodes": count, "plain_bytes": sizes["plain"], "flat_bytes": sizes["flat"]}
    return {**result, "reached": reached, **told, "seconds": time.perf_counter() - begin}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run each")
    parser.add_argument("--episodes", type=int, default=64, help="recorded, of 200 steps each")
    parser.add_argument("--lost", type=int, default=500, help="oldest steps that are written over")
    parser.add_argument("--noise", type=float, default=0.5, help="of the recorded actions, so that mistakes are seen")
    parser.add_argument("--epochs", type=int, default=20, help="times that each step is learned from")
    parser.add_argument("--batch-size", type=int, default=256, help="steps drawn for one update")
    parser.add_argument("--hidden", type=int, default=256, help="width of both hidden layers")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam, at first; falls to 0")
    parser.add_argument("--tests", type=int, default=32, help="episodes that a policy is judged by")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the network is too small for more")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--quick", action="store_true", help="one seed and few episodes, to see that it runs")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.episodes, options.epochs, options.tests = options.seeds[:1], 12, 8, 8
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Clone the controller, print a table. Returns the results; "passed" is None for a quick run."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    names = ("seed", "random", "before", "clone", "controller", "reached", "error", "plain", "flat", "seconds")
    print("".join(f"{name:<11}" for name in names))
    runs = []
    for seed in options.seeds:
        each = run(options, seed)
        runs.append(each)
        numbers = [f"{each[name]:.0f}" for name in ("random", "before", "after", "controller")]
        numbers += [f"{each['reached']:.0%}", f"{each['errors'][-1]:.3f}"]
        numbers += [f"{each[name] / 1e6:.1f} MB" for name in ("plain_bytes", "flat_bytes")] + [f"{each['seconds']:.0f}"]
        print(f"{seed:<11}" + "".join(f"{number:<11}" for number in numbers), flush=True)
    worst = min(each["reached"] for each in runs)
    passed = None if options.quick else worst >= REACHED
    print(
        f"clones reach {worst:.0%} or more of the way from random actions to the controller (mark {REACHED:.0%}); flat is "
        f"{runs[0]['flat_bytes'] / runs[0]['plain_bytes']:.0%} of plain"
        f"{'' if passed is None else '  PASS' if passed else '  FAIL'}"
    )
    curve = {
        f"seed {seed}": [list(range(len(each["errors"]))), each["errors"]]
        for seed, each in zip(options.seeds, runs, strict=True)
    }
    result = {"passed": passed, "worst": worst, "curve": curve, "runs": runs}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    sys.exit(main()["passed"] is False)

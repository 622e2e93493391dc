"""Through torch, a stream of [16, 1000] steps as transitions of 3 steps: faster than torchrl's, and how far from a copy?

Nine leaves, observations of 32 floats. Beside the two transforms stands what no transform can do without: a copy of the
data into new memory. One frame at a time is what `add` costs.
"""

import functools
import warnings
from typing import Any

import measure
import torch
from tensordict import TensorDict

import interop.postprocs
import interop.transforms

LANES, STEPS, WIDE, ACTIONS = 16, 1000, 32, 8
N, GAMMA = 3, 0.99


def stream(*shape: int) -> TensorDict:
    """Random steps; one in a hundred ends an episode, and so does the last of several."""
    draw = torch.Generator().manual_seed(0)
    over = torch.rand(*shape, 1, generator=draw) < 0.01
    over[..., -1, :] |= shape[-1] > 1
    flags = {name: torch.zeros_like(over) for name in ("done", "terminated", "truncated")}
    following = {
        "observation": torch.randn(*shape, WIDE, generator=draw),
        "reward": torch.randn(*shape, 1, generator=draw),
        **flags,
        "done": over,
        "terminated": over.clone(),
    }
    return TensorDict(
        {
            "observation": torch.randn(*shape, WIDE, generator=draw),
            "action": torch.randn(*shape, ACTIONS, generator=draw),
            **flags,
            "next": TensorDict(following, shape),
        },
        shape,
    )


def main() -> None:
    options = measure.arguments("A stream as transitions of n steps").parse_args()
    transforms, postprocs = {measure.OURS: interop.transforms.MultiStepTransform}, {}
    postprocs[measure.OURS] = interop.postprocs.MultiStep
    rewards: dict[str, Any] = {measure.OURS: interop.postprocs.DensifyReward}
    to_go: dict[str, Any] = {measure.OURS: interop.transforms.Reward2GoTransform}
    if torchrl := measure.rival("torchrl.envs.transforms"):
        data = measure.rival("torchrl.data.postprocs")
        assert data is not None
        transforms["torchrl"], to_go["torchrl"] = torchrl.MultiStepTransform, torchrl.Reward2GoTransform
        postprocs["torchrl"], rewards["torchrl"] = data.MultiStep, data.DensifyReward
    many, one = stream(LANES, STEPS // 10 if options.quick else STEPS), stream(LANES, 1)
    timings = []

    def compare(name: str, calls: dict[str, Any], **more: Any) -> None:
        timings.append(measure.compare(name, {**calls, **more}, quick=options.quick))

    for n in (N, 10):
        calls = {side: functools.partial(made(n, GAMMA).inv, many) for side, made in transforms.items()}
        compare(f"MultiStepTransform, n = {n}", calls, copy=many.clone)
    compare(
        "MultiStepTransform, a step",
        {side: functools.partial(made(N, GAMMA).inv, one) for side, made in transforms.items()},
    )
    compare("MultiStep", {side: functools.partial(made(GAMMA, N), many) for side, made in postprocs.items()})
    dense = {side: made(discount=GAMMA) for side, made in rewards.items()}
    compare("DensifyReward", {side: lambda made=made: made(many.copy()) for side, made in dense.items()})
    compare("Reward2GoTransform", {side: functools.partial(made(GAMMA).inv, many) for side, made in to_go.items()})
    shape = list(many.batch_size)
    measure.report(f"Transitions of n steps of a stream {shape}, {WIDE} floats", timings, {}, options.json)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

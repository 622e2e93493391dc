"""Stacks of frames made of slices that were read, 8 slices of 64 steps of 1x84x84 bytes: faster than torchrl's CatFrames?"""

import functools
import warnings

import measure
import torch
from tensordict import TensorDict

import interop.transforms

SLICES, STEPS, STACK = 8, 64, 4
FRAME = (1, 84, 84)


def slices(*, both: bool) -> TensorDict:
    """Slices with an episode that ends in the middle of every second one."""
    frames = torch.randint(0, 255, (SLICES, STEPS + 1, *FRAME), dtype=torch.uint8)
    done = torch.zeros(SLICES, STEPS, 1, dtype=torch.bool)
    done[::2, STEPS // 2] = True
    ahead = {"done": done, "pixels": frames[:, 1:].contiguous()} if both else {"done": done}
    data = TensorDict({"pixels": frames[:, :-1].contiguous(), "next": ahead}, [SLICES, STEPS])
    data.names = [None, "time"]
    return data


def main() -> None:
    options = measure.arguments("Stacks of 4 frames of 84x84 bytes").parse_args()
    sides = {measure.OURS: interop.transforms}
    if torchrl := measure.rival("torchrl.envs.transforms"):
        sides["torchrl"] = torchrl
    timings = []
    for name, keys in {"pixels": ["pixels"], "pixels and next pixels": ["pixels", ("next", "pixels")]}.items():
        data = slices(both=len(keys) > 1)
        calls = {}
        for side, module in sides.items():
            transform = module.CatFrames(N=STACK, dim=-3, in_keys=keys)
            calls[side] = functools.partial(lambda transform, data: transform(data.copy()), transform, data)
        out = torch.empty(len(keys), SLICES * STEPS * STACK, *FRAME, dtype=torch.uint8)
        ready = torch.randint_like(out, 255)
        calls["bytes into memory there"] = functools.partial(out.copy_, ready)
        calls["bytes into new memory"] = ready.clone
        timings.append(measure.compare(name, calls, quick=options.quick))
    title = f"CatFrames of {STACK}, {SLICES} slices of {STEPS} steps of 1x84x84 bytes"
    measure.report(title, timings, {}, options.json)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

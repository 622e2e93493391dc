"""Through both doors: what does `from_fbuf` add to the jitted call that it makes?

Transitions of six leaves in a full buffer. "jit" is `jax.jit(buffer.sample)` with the state donated, until its batch is
there; torch's own buffer of the same rule stands beside it.
"""

import functools
from typing import Any

import jax
import measure
import torch_rows

import fbuf
import interop
from interop.data import randomness


def buffers(rule: Any, capacity: int) -> tuple[interop.FunctionalReplayBuffer, Any]:
    """A full functional buffer, and one of torch with the same rows."""
    rows = torch_rows.transitions(min(capacity, 50_000))
    item = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf.numpy()), rows[0].to_dict())
    buffer = fbuf.Buffer(capacity, rule)
    ours = interop.from_fbuf(buffer, buffer.init(item), batch_size=256)
    sampler = interop.PrioritizedSampler(capacity, 0.6, 0.4) if rule.keeps_priorities else interop.RandomSampler()
    theirs = interop.TensorDictReplayBuffer(storage=interop.LazyTensorStorage(capacity), sampler=sampler)
    for each in (ours, theirs):
        torch_rows.fill(each, rows, capacity)
    return ours, theirs


class Jitted:
    """The same draws without torch."""

    def __init__(self, buffer: fbuf.Buffer, state: Any) -> None:
        self._program = jax.jit(buffer.sample, static_argnums=2, donate_argnums=0)
        self._state = state

    def sample(self, batch_size: int) -> None:
        self._state, items, _ = self._program(self._state, randomness.key(None), batch_size)
        jax.block_until_ready(items)


def main() -> None:
    options = measure.arguments("Through both doors: what does from_fbuf add to the jitted call?").parse_args()
    capacity = 20_000 if options.quick else 200_000
    timings, values = [], {}
    for rule in (fbuf.Uniform(), fbuf.Prioritized(0.6)):
        ours, theirs = buffers(rule, capacity)
        jitted, name = Jitted(ours.buffer, ours.state), type(rule).__name__
        contenders: dict[str, Any] = {measure.OURS: ours, "jit": jitted, "torch side": theirs}
        calls = {each: functools.partial(buffer.sample, 256) for each, buffer in contenders.items()}
        timings.append(measure.compare(f"{name}, sample 256", calls, quick=options.quick))
        values[f"{name}: us over the jitted call"] = timings[-1].us[measure.OURS] - timings[-1].us["jit"]
        rows = torch_rows.transitions(256)
        extend = {
            measure.OURS: functools.partial(ours.extend, rows),
            "torch side": functools.partial(theirs.extend, rows),
        }
        timings.append(measure.compare(f"{name}, extend 256", extend, quick=options.quick))
    measure.report(f"Two doors, {capacity} rows of six leaves", timings, values, options.json)


if __name__ == "__main__":
    main()

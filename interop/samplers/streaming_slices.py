"""Slices of what was written last, each once, and then any slices."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.utils import NestedKey

from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, integers
from interop.samplers.slices import SliceSampler
from interop.samplers.streamed import Streamed, StreamedDraws, StreamedWindows
from interop.storages import Storage
from interop.writers import Writer


class StreamingSliceSampler(SliceSampler):
    """Draws each new window of `slice_len` steps once, the oldest first, and fills the batch as `SliceSampler` does.

    The rows of a trajectory are cut into windows that do not overlap, from its first row on; the rows behind its last whole
    window are in no window. A window can be drawn when its last row is written. Windows whose rows were overwritten before
    are not drawn, and neither are those that an edit of a marker has divided. Of a trajectory whose first rows were
    overwritten before any draw, windows begin at the oldest row that is left. Rows that were stored before the sampler
    joined count as new; those of a memory map that is opened again, too. A draw costs O(batch + trajectories written since).

    Each lane of a storage with `ndim=2` has its own windows; trajectories whose rows alternate in one lane are a
    RuntimeError. Checkpoints keep which windows were drawn. No prefetch: batches that are dropped would lose their windows.
    Other processes may write, but not draw.

    ```python
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(16), sampler=StreamingSliceSampler(slice_len=3), batch_size=6)
    rb.extend(TensorDict({"value": torch.arange(6), "next": {"done": torch.zeros(6, 1, dtype=torch.bool)}}, [6]))
    assert rb.sample()["value"].tolist() == [0, 1, 2, 3, 4, 5]  # each window once; then any slices
    ```

    Args:
        slice_len: steps of a slice; batch sizes are multiples of it.
        strict_length, pad_output, span: of the slices that fill a batch, as for `SliceSampler`.
        end_key, end_keys, traj_key, cache_values, truncated_key, init_key, compile, use_gpu, only_named_keys: as for
            `SliceSampler`.
    """

    _library_draws: StreamedDraws
    _library_values: StreamedWindows

    def __init__(
        self,
        *,
        slice_len: int,
        end_key: NestedKey | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        init_key: NestedKey | None = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        use_gpu: torch.device | bool = False,
        only_named_keys: bool = False,
    ) -> None:
        super().__init__(
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            cache_values=cache_values,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            pad_output=pad_output,
            compile=compile,
            span=span,
            use_gpu=use_gpu,
            only_named_keys=only_named_keys,
        )
        self._library_values = StreamedWindows()
        self._library_draws = StreamedDraws(self._library_draws.source, self._library_draws.shape, self._library_values)

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        super().check_fit(storage, writer, prefetches, expands)
        if prefetches:
            raise ValueError(
                "a StreamingSliceSampler does not prefetch: batches that are dropped would lose their windows"
            )

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        state = self._library_values.state
        return {
            **super().state(),
            "streamed": None if state is None else {**state._asdict(), "queue": state.queue.reshape(-1)},
        }

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            streamed = None
            if entries.any("streamed") is not None:
                saved = entries.fields("streamed")
                seen = saved.whole("seen", most=2**62)
                pending = integers(saved, "pending", None, 0, 2**62)
                queue = integers(saved, "queue", None, 0, 2**62).reshape(-1, 2)
                streamed = Streamed(saved.whole("length", 1), seen, pending, queue)
            rest = super().with_state(entries, options)

            def put() -> None:
                rest()
                self._library_values.state = streamed

            return put

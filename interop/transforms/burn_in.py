"""Hidden states of recurrent modules, computed on the first steps of sequences."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from interop.data.keys import as_path
from interop.data.numbers import whole
from interop.transforms.entries import before_key, expect_tensor, expect_tensordict
from interop.transforms.order import refuse_several
from interop.transforms.transform import Transform, as_keys


class BurnInTransform(Transform):
    """Runs modules over the first steps of sequences and drops these: batch size [..., T] becomes [..., T - burn_in].

    The states that they write under "next" in the last step of these go to the first step that is left: ("next", "hidden")
    to "hidden". The other steps keep theirs, or have zeros where there was none. No gradients are taken; the tensordict
    stays as it is, and time is the last batch dim: reshape a flat batch of slices to [slices, T] before.

    The modules are no submodules: they keep their mode, and their parameters are not saved with a buffer.

    Args:
        modules: `TensorDictModule`s, run in this order on tensordicts of batch size [..., burn_in].
        burn_in: steps to run.
        out_keys: the entries to set, each of which a module writes under "next"; all of them by default.

    TypeError for other modules and for a stored state that cannot hold the new one, ValueError for an entry that none writes
    under "next", for sequences of not more than `burn_in` steps and for another dim named "time".
    """

    _run: tuple[TensorDictModuleBase, ...]  # not as submodules

    def __init__(
        self, modules: Sequence[TensorDictModuleBase], burn_in: int, out_keys: Sequence[NestedKey] | None = None
    ) -> None:
        super().__init__()
        given = [modules] if isinstance(modules, TensorDictModuleBase) else list(modules)
        for each in given:
            if not isinstance(each, TensorDictModuleBase):
                raise TypeError(f"modules must be TensorDictModules, got a {type(each).__name__}")
        self.__dict__["_run"] = tuple(given)
        self.burn_in = whole("burn_in", burn_in, least=0)
        read, written = dict[NestedKey, None](), dict[NestedKey, None]()
        for each in given:
            read |= {key: None for key in each.in_keys if key not in written}
            written |= dict.fromkeys(each.out_keys)
        carried = [now for now in map(before_key, written) if now is not None]
        self.in_keys = list(read)
        self.out_keys = carried if out_keys is None else as_keys("out_keys", out_keys)
        unknown = [key for key in self.out_keys if key not in carried]
        if unknown:
            raise ValueError(
                f"out_keys={unknown} are not written under 'next' by the modules, which write {list(written)}: these can be "
                f"carried on: {carried}"
            )

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        data = next_tensordict
        expect_tensordict("BurnInTransform", data)
        if self.burn_in == 0:
            return data
        if not data.batch_dims or data.batch_size[-1] <= self.burn_in:
            raise ValueError(
                f"BurnInTransform: burn_in={self.burn_in} leaves nothing of a batch size of {list(data.batch_size)}, "
                "the last dim of which is time"
            )
        if "time" in data.names[:-1]:
            raise ValueError(
                f"BurnInTransform: time is the last batch dim, the names of dims are {data.names}: transpose before"
            )
        refuse_several("BurnInTransform", data.batch_size, data.batch_dims - 1)
        first, rest = data[..., : self.burn_in].copy(), data[..., self.burn_in :].copy()
        with torch.no_grad():
            for module in self._run:
                first = module(first)
        for key in self.out_keys:
            state = first.get(("next", *as_path(key)))
            expect_tensor("BurnInTransform", key, state)
            state = state.select(first.batch_dims - 1, -1)
            held = rest.get(key, None)
            shape = (*rest.batch_size, *state.shape[rest.batch_dims - 1 :])
            if held is None:
                held = state.new_zeros(shape)
            elif held.shape != shape:
                raise ValueError(
                    f"BurnInTransform: {key!r} is of shape {list(held.shape)}, the modules write {list(shape)} there"
                )
            elif not torch.can_cast(state.dtype, held.dtype):
                raise TypeError(f"BurnInTransform: {key!r} is {held.dtype}, the modules write {state.dtype} there")
            else:
                held = held.detach().clone()
            held.select(rest.batch_dims - 1, 0).copy_(state)
            rest.set(key, held)
        return rest

    def __repr__(self) -> str:
        return f"BurnInTransform(burn_in={self.burn_in}, in_keys={self.in_keys}, out_keys={self.out_keys})"

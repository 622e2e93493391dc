"""Transforms by a function of one entry."""

from collections.abc import Callable
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from tensordict.utils import NestedKey

from interop.transforms.transform import Keys, Transform


class UnaryTransform(Transform):
    """A function of single entries: `torch.Tensor.float` to have them as float32, for example.

    Args:
        in_keys: entries that `fn` is given when they are read.
        out_keys: where what it returns goes.
        in_keys_inv: where what `inv_fn` returns goes when they are written: names in the storage.
        out_keys_inv: entries that it is given: names outside; None for `in_keys_inv`.
        fn: takes an entry, and returns a tensor, a tensordict or another object. A lambda cannot be pickled.
        inv_fn: the same for writing; None for `fn`.
        use_raw_nontensor: give the functions what holds objects that are no tensors, rather than these objects.

    TypeError for what cannot be called.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        *,
        fn: Callable[[Any], Any],
        inv_fn: Callable[[Any], Any] | None = None,
        use_raw_nontensor: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, in_keys_inv if out_keys_inv is None else out_keys_inv)
        for name, each in (("fn", fn), ("inv_fn", inv_fn)):
            if not callable(each) and not (each is None and name == "inv_fn"):
                raise TypeError(f"{name} must be callable, got {each!r}")
        self._fn, self._inv_fn = fn, fn if inv_fn is None else inv_fn
        self._use_raw_nontensor = use_raw_nontensor

    def _get(self, data: TensorDictBase, key: NestedKey) -> Any:
        value = super()._get(data, key)
        if isinstance(value, NonTensorData) and not self._use_raw_nontensor:
            return value.data
        return value.tolist() if isinstance(value, NonTensorStack) and not self._use_raw_nontensor else value

    def _apply_transform(self, obs: Any) -> Any:
        return self._fn(obs)

    def _inv_apply_transform(self, state: Any) -> Any:
        return self._inv_fn(state)

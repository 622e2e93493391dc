"""Controllers of the KL penalty coefficient: constant, or adaptive."""

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class KLControllerBase(abc.ABC):
    """Base class of controllers of the KL coefficient `coef`, which is mirrored to `model.kl_coef` if a model is given.

    AttributeError for a model without `kl_coef`.
    """

    def __init__(self, coef: float | None, model: Any) -> None:
        try:
            model_coef = None if model is None else model.kl_coef
        except AttributeError:
            name = type(self).__name__
            raise AttributeError(f"Model input to {name} doesn't have attribute 'kl_coef'") from None
        if (coef := model_coef if coef is None else coef) is None:
            raise ValueError(f"{type(self).__name__} needs kl_coef, or a model that has one")
        self.model = model
        self._set(coef)

    @abc.abstractmethod
    def update(self, kl_values: Sequence[float | Tensor] | Tensor | None = None) -> float:
        """Update and return the coefficient, given the mean KL reward (-coef * KL) of each rollout."""

    def _set(self, coef: float) -> float:
        self.coef = coef
        if self.model is not None:
            self.model.kl_coef = coef
        return coef


class ConstantKLController(KLControllerBase):
    """A constant coefficient: `kl_coef`, by default that of the model. ValueError if neither is given."""

    def __init__(self, *, kl_coef: float | None = None, model: Any = None) -> None:
        super().__init__(kl_coef, model)

    def update(self, kl_values: Sequence[float | Tensor] | Tensor | None = None) -> float:
        return self._set(self.coef)


class AdaptiveKLController(KLControllerBase):
    """A coefficient that grows while the KL divergence exceeds `target`, and shrinks below it (arXiv:1909.08593, 2.2).

    With n values of mean m, `coef *= 1 + clip(-m / coef / target - 1, -0.2, 0.2) * n / horizon`.

    ValueError unless `init_kl_coef`, `target` and `horizon` are positive. `update` raises ValueError for missing or
    non-finite values, or so many that the coefficient would not stay positive; it is then unchanged.
    """

    def __init__(self, *, init_kl_coef: float, target: float, horizon: int, model: Any = None) -> None:
        for name, value in {"init_kl_coef": init_kl_coef, "target": target, "horizon": horizon}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, got {value}")
        self.target = target
        self.horizon = horizon
        super().__init__(init_kl_coef, model)

    def update(self, kl_values: Sequence[float | Tensor] | Tensor | None = None) -> float:
        values = [float(torch.as_tensor(value).detach()) for value in (() if kl_values is None else kl_values)]
        if not values or not all(map(math.isfinite, values)):
            raise ValueError(f"AdaptiveKLController.update() needs finite KL values since its last call, got {values}")
        n = len(values)
        kl = -math.fsum(values) / len(values) / self.coef
        factor = 1 + min(max(kl / self.target - 1, -0.2), 0.2) * n / self.horizon
        if factor <= 0:
            raise ValueError(
                f"{n} KL values would make the coefficient {self.coef * factor}: update more often, or use a horizon "
                f"above {n / 5}"
            )
        return self._set(self.coef * factor)

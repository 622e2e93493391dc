"""Environments of torchrl whose specs come from either library; their data depend on neither.

`library` is a module with the classes of specs: `interop.specs` or `torchrl.data`. Import this module behind a check that
torchrl is installed.
"""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl import data as theirs
from torchrl.envs import EnvBase

from interop.specs import to_torchrl


class Toy(EnvBase):
    """Observations of several kinds, which count steps; an episode has ten steps.

    Args:
        library: where the classes of specs come from.
        action: the kind of the action: "continuous", "discrete", "one-hot", "multi-discrete", "bits" or "dict".
        batch_size: the number of environments.
        masked: whether an entry "action_mask" tells the allowed choices of a discrete action.
    """

    def __init__(self, library: Any, action: str = "continuous", batch_size: Any = (), masked: bool = False) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        lead = tuple(batch_size)
        observation = {
            "pixels": library.Bounded(0, 255, (*lead, 3, 8, 8), dtype=torch.uint8),
            "other": library.Bounded(0, 255, (*lead, 3, 8, 8), dtype=torch.uint8),
            "success": library.Categorical(2, (*lead, 1), dtype=torch.bool),
            "frame": library.Bounded(0, 255, (*lead, 8, 8, 3), dtype=torch.uint8),
            "vector": library.Bounded(-20.0, 20.0, (*lead, 3), dtype=torch.float64),
            "free": library.Unbounded((*lead, 4)),
            "kind": library.Categorical(30, lead),
            "hidden": library.Unbounded((*lead, 2)),  # a state: read by a step, and told by it
            "nested": library.Composite(deep=library.Unbounded((*lead, 2)), shape=lead),
        }
        if masked:
            observation["action_mask"] = library.Binary(4, (*lead, 4), dtype=torch.bool)
        self.masked = masked
        self.observation_spec = library.Composite(observation, shape=lead)
        self.state_spec = library.Composite(hidden=library.Unbounded((*lead, 2)), shape=lead)
        self.action_spec = action_of(library, action, lead)
        self.reward_spec = library.Unbounded((*lead, 1))
        flag = library.Categorical(2, (*lead, 1), dtype=torch.bool)
        self.full_done_spec = library.Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=lead)
        self.count = torch.zeros(lead, dtype=torch.int64)

    def observed(self) -> dict[str, Any]:
        count, lead = self.count, self.batch_size

        def numbers(*item: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            made = torch.arange(float(torch.Size(item).numel())).reshape(item) + count.reshape(
                *lead, *(1 for _ in item)
            )
            return (made % 20).to(dtype)

        made = {
            "pixels": numbers(3, 8, 8, dtype=torch.uint8),
            "other": numbers(3, 8, 8, dtype=torch.uint8) + 1,
            "success": count.unsqueeze(-1) % 3 == 0,
            "frame": numbers(8, 8, 3, dtype=torch.uint8),
            "vector": numbers(3, dtype=torch.float64),
            "free": numbers(4),
            "kind": count.clone(),
            "nested": TensorDict({"deep": numbers(2)}, batch_size=lead),
            "hidden": numbers(2),
        }
        if self.masked:
            made["action_mask"] = numbers(4) % 2 == 0
        return made

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.count = torch.zeros_like(self.count) if mask is None else self.count * ~mask.reshape(self.batch_size)
        done = {key: torch.zeros(*self.batch_size, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        return TensorDict(self.observed() | done, batch_size=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        ends = (self.count >= 10).unsqueeze(-1)
        done = {"done": ends, "terminated": ends.clone(), "truncated": torch.zeros_like(ends)}
        reward = {"reward": self.count.unsqueeze(-1).float() / 4 - 1}
        return TensorDict(self.observed() | reward | done, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        pass


def action_of(library: Any, action: str, lead: Any = ()) -> Any:
    """The spec of a kind of actions."""
    if action == "continuous":
        return library.Bounded(-2.0, 2.0, (*lead, 2))
    if action == "matrix":
        return library.Bounded(-2.0, 2.0, (*lead, 2, 3))
    if action == "discrete":
        return library.Categorical(4, lead)
    if action == "one-hot":
        return library.OneHot(4, (*lead, 4))
    if action == "multi-discrete":
        return library.MultiCategorical([2, 3], (*lead, 2))
    if action == "multi-one-hot":
        return library.MultiOneHot([2, 3], (*lead, 5))
    if action == "bits":
        return library.Binary(4, (*lead, 4))
    parts = {"move": action_of(library, "continuous", lead), "jump": action_of(library, "discrete", lead)}
    return library.Composite({"action": library.Composite(parts, shape=lead)}, shape=lead)


def as_theirs(spec: Any) -> Any:
    """A spec as torchrl's, also where a Composite of torchrl holds specs of this library."""
    if isinstance(spec, theirs.Composite) and type(spec).__module__.startswith("torchrl."):
        if isinstance(spec, theirs.StackedComposite):
            return torch.stack([as_theirs(each) for each in spec.unbind(spec.stack_dim)], spec.stack_dim)
        about = {name: getattr(spec, name) for name in ("shape", "device", "data_cls", "step_mdp_static")}
        return theirs.Composite({key: as_theirs(each) for key, each in spec.items()}, **about)
    return spec if spec is None else to_torchrl(spec).clone()


def rolled_out(env: EnvBase, steps: int = 12) -> TensorDictBase:
    """A rollout of actions that follow from the number of the step alone."""
    torch.manual_seed(0)
    spec = as_theirs(env.full_action_spec)
    actions = iter([spec.rand() for _ in range(steps)])

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.update(next(actions))

    torch.manual_seed(0)
    return env.rollout(steps, policy, break_when_any_done=False)

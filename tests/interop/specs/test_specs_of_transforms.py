"""The spec methods of transforms: what they tell of a spec is true of the data, for chains and for single transforms."""

import pytest
import torch

from interop import specs, transforms
from interop.specs import Bounded, Categorical, Composite, Unbounded

OBSERVATION = {
    "frame": Bounded(0, 255, (8, 6, 3), dtype=torch.uint8),
    "vector": Bounded(-1, 1, (3,)),
    "choice": Categorical(4),
}
SPEC = Composite(OBSERVATION)
KEPT = {"choice": OBSERVATION["choice"]}
MADE = {
    "image": lambda: transforms.ToTensorImage(in_keys=["frame"]),
    "renamed": lambda: transforms.RenameTransform(["vector"], ["v"]),
    "excluded": lambda: transforms.ExcludeTransform("vector"),
    "doubles": lambda: transforms.DTypeCastTransform(torch.float32, torch.float64, in_keys=["vector"]),
    "reward of another part": lambda: transforms.RewardScaling(0, 2.0),
    "chain": lambda: transforms.Compose(
        transforms.ToTensorImage(in_keys=["frame"]), transforms.RenameTransform(["vector"], ["v"])
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_specs_are_of_the_data_that_is_read(name):
    transform, before = MADE[name](), SPEC.clone()
    state = torch.get_rng_state()
    made = transform.transform_observation_spec(SPEC)
    assert torch.equal(torch.get_rng_state(), state) and before == SPEC
    data = SPEC.rand((2,))
    transform.set_missing_tolerance(True)
    assert made.is_in(transform(data)) and set(made.keys()) == set(data.keys())
    assert {key: made[key] for key in KEPT} == KEPT
    if "v" in made:
        assert made["v"] == OBSERVATION["vector"]
    assert (
        transform.transform_reward_spec(Composite()).is_empty()
        and transform.transform_done_spec(Composite()).is_empty()
    )
    assert transform.transform_env_batch_size(torch.Size([2])) == (2,)
    assert transform.transform_env_device(torch.device("cpu")).type == "cpu"


def test_the_spec_of_one_entry_and_that_of_actions():
    cast = transforms.DTypeCastTransform(torch.float64, torch.float32, in_keys=["x"], in_keys_inv=["action"])
    assert cast.transform_observation_spec(Unbounded(3, dtype=torch.float64)) == Unbounded(3)
    assert transforms.RewardScaling(0, 2.0).transform_reward_spec(Unbounded(1)) == Unbounded(1)
    actions = Composite(action=Bounded(-1, 1, (2,), dtype=torch.float64), other=Categorical(3))
    made = transforms.Compose(cast).transform_action_spec(actions)
    assert made["action"] == Unbounded((2,), dtype=torch.float32) and made["other"] == Categorical(3)
    with pytest.raises(TypeError, match="one key that is read"):
        transforms.ToTensorImage(in_keys=["a", "b"]).transform_observation_spec(Unbounded(3))
    assert specs.contains_lazy_spec(made) is False

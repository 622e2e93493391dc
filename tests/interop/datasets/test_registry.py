"""Datasets by name."""

import pytest

from interop import datasets
from interop.datasets import load_dataset, register_dataset


class Toy:
    def __init__(self, dataset_id, **kwargs):
        self.made = dataset_id, kwargs


def test_a_registered_dataset_gets_the_id_and_the_arguments():
    register_dataset("toy_of_this_test", Toy)
    assert load_dataset("toy_of_this_test:a:b", batch_size=3).made == ("a:b", {"batch_size": 3})
    with pytest.raises(KeyError, match="replace=True"):
        register_dataset("toy_of_this_test", Toy)
    register_dataset("toy_of_this_test", f"{__name__}:Toy", replace=True)
    assert load_dataset("toy_of_this_test:c").made == ("c", {})


@pytest.mark.parametrize("prefix", ["atari", "atari_dqn", "gen_dgrl", "minari", "roboset", "vd4rl", "d4rl"])
def test_the_classes_of_this_library_are_there(prefix):
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError, datasets.DatasetError)) as caught:
        load_dataset(f"{prefix}:no such dataset", batch_size=3, download=False)
    assert "prefix" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: load_dataset("d4r:x"), ValueError),
        (lambda: load_dataset("d4rl"), ValueError),
        (lambda: load_dataset("d4rl:"), ValueError),
        (lambda: load_dataset(3), TypeError),
        (lambda: register_dataset("a:b", Toy), ValueError),
        (lambda: register_dataset("", Toy), ValueError),
        (lambda: register_dataset("a", 3), TypeError),
        (lambda: register_dataset("a", "module"), ValueError),
    ],
)
def test_refusals(call, error):
    with pytest.raises(error):
        call()
    with pytest.raises(ValueError, match="did you mean 'd4rl'"):
        load_dataset("d4r:x")

"""Forests and trees beside TorchRL, where that is."""

import warnings

import pytest

import interop as ours
from tests.interop.maps.rollouts import SMALL, one_steps, rollout, root

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import data as theirs

pytestmark = pytest.mark.filterwarnings("ignore")
HISTORIES = {
    "small": lambda: [rollout(*each) for each in SMALL],
    "branches": lambda: list(one_steps()),
    "chain": lambda: [rollout([0, 1, 2, 3], [1, 1, 2])],
    "wide": lambda: [rollout([0, at + 1, at + 9], [at, 0]) for at in range(5)],
}


def seen(tree):
    """What a tree shows, but for the order of children, which TorchRL leaves open, and hashes."""
    below = [] if tree.subtree is None else [tree.subtree[at] for at in range(len(tree.subtree))]
    return {
        "rollout": None if tree.rollout is None else sorted(map(str, tree.rollout.items(True, True))),
        "node_data": tree.node_data.to_dict(),
        "index": None if tree.index is None else sorted(tree.index.tolist()),
        "counts": [(each.item(), each.dtype, each.shape) for each in (tree.count, tree.wins, tree.visits)],
        "ids": (type(tree.node_id), type(tree.hash)),
        "actions": [tree.branching_action, tree.prev_action, tree.num_children, bool(tree.is_terminal)],
        "below": sorted((seen(each) for each in below), key=str),
    }


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("max_depth", [None, 0, 1, 2])
def test_trees_are_alike(history, compact, max_depth):
    trees, forests = [], []
    for library in (ours, theirs):
        forest = library.MCTSForest()
        for each in HISTORIES[history]():
            forest.extend(each)
        forests.append(forest)
        trees.append(forest.get_tree(root(), compact=compact, max_depth=max_depth))
    one, other = trees
    assert str(seen(one)) == str(seen(other))
    assert len(one.edges()) == len(other.edges())
    assert (one.num_vertices(), one.max_length()) == (other.num_vertices(), other.max_length())
    assert sorted(map(len, one.valid_paths())) == sorted(map(len, other.valid_paths()))
    assert len(one.to_string().splitlines()) == len(other.to_string().splitlines())
    for key in ("id", "path"):
        assert len(one.vertices(key_type=key)) == len(other.vertices(key_type=key))
    mine, their = (each.node_map[root()] for each in forests)
    assert sorted(mine["_index"].tolist()) == sorted(their["_index"].tolist())
    assert (mine["count"].item(), mine["count"].dtype) == (their["count"].item(), their["count"].dtype)
    assert mine["_hash"].shape == their["_hash"].shape


def test_nodes_and_keys_are_alike():
    for data in (rollout([0, 1, 2], [3, 4]), root(3)):
        one, other = (library.Tree.make_node(data) for library in (ours, theirs))
        assert str(one.node_data.to_dict()) == str(other.node_data.to_dict())
        assert (one.num_children, one.batch_size, one.subtree is None) == (
            other.num_children,
            (),
            other.subtree is None,
        )
    one, other = (library.MCTSForest(action_keys=("agent", "action"), reward_keys="r") for library in (ours, theirs))
    for name in ("action_keys", "reward_keys", "observation_keys"):
        assert getattr(one, name) == getattr(other, name)
    assert set(one.done_keys) == set(other.done_keys)
    for library in (ours, theirs):
        forest = library.MCTSForest(action_keys="none")
        with pytest.raises(KeyError):
            forest.extend(rollout([0, 1], [1]))
        with pytest.raises(ValueError, match=r"."):
            library.MCTSForest(action_keys=3)
        forest = library.MCTSForest(max_size=2)
        with pytest.raises(IndexError):
            forest.extend(rollout([0, 1, 2, 3], [1, 2, 3]))

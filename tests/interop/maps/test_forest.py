"""Forests beside one in plain Python, the worked examples, and what they refuse."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import CheckpointCorrupt, CheckpointMismatch, ListStorage, MCTSForest, Tree
from interop.maps.map import TensorDictMap
from interop.maps.query import QueryModule
from tests.interop.maps.forest_model import Model
from tests.interop.maps.rollouts import SMALL, one_steps, rollout, root
from tests.interop.test_threads import together


def forest_of(rollouts, **options):
    forest = MCTSForest(**options)
    for each in rollouts:
        forest.extend(each)
    return forest


def small(**options):
    return forest_of([rollout(*each) for each in SMALL], **options)


# ---------------------------------------------------------------------- beside the model


@st.composite
def histories(draw):
    """Walks through a small random MDP, some of whose results change; whether the forest is looked at after each."""
    size, actions = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    walks = []
    for _ in range(draw(st.integers(1, 6))):
        at, steps = draw(st.integers(0, size - 1)), []
        for _ in range(draw(st.integers(1, 5))):
            action = draw(st.integers(0, actions - 1))
            after = (3 * at + 2 * action + 1) % size if draw(st.integers(0, 4)) else draw(st.integers(0, size - 1))
            steps.append((at, action, after, draw(st.integers(0, 9))))
            at = after
        walks.append((steps, draw(st.integers(0, 2)) == 0))
    return walks


@settings(max_examples=25, deadline=None)
@given(histories(), st.booleans(), st.sampled_from([None, None, 0, 1, 2]))
def test_trees_are_those_of_the_model(walks, compact, max_depth):
    forest, model = MCTSForest(max_size=100), Model()
    for steps, look in walks:
        before, action, after, reward = map(list, zip(*steps, strict=True))
        data = rollout([*before, after[-1]], action, [float(each) for each in reward])
        data["next", "observation"] = torch.tensor(after)
        forest.extend(data)
        model.extend(steps)
        if look:
            assert len(forest) == len(model.results)
    for start in model.counts:
        tree = forest.get_tree(root(start), max_depth=max_depth, compact=compact)
        expected = model.tree(start, max_depth, compact)
        found = tree.vertices(key_type="id")
        assert list(found) == list(range(len(expected)))
        for number, vertex in enumerate(expected):
            compare(forest, model, found[number], vertex)
        assert tree.num_vertices() == len(expected)
    entry = forest.node_map[root(start)]
    assert entry["count"] == model.counts[start]
    assert len(forest.node_map) == len(model.counts)
    pairs = torch.tensor(list(model.results))
    stored = forest.data_map[TensorDict({"observation": pairs[:, 0], "action": pairs[:, 1]}, [len(pairs)])]
    assert stored["next", "observation"].tolist() == [after for after, _ in model.results.values()]


def compare(forest, model, vertex, expected):
    """A vertex with that of the model."""
    assert vertex.node_observation == expected.observation
    pairs = TensorDict(
        {"observation": torch.full((len(expected.outgoing),), expected.observation)}
        | {"action": torch.tensor(expected.outgoing, dtype=torch.int64)},
        [len(expected.outgoing)],
    )
    if expected.outgoing:
        query = forest.data_map.query_module
        assert torch.equal(vertex.index, query.indices(pairs))
        assert torch.equal(forest.node_map[vertex.node_data]["_hash"], query.hashes(pairs))
    else:
        assert vertex.index is None
        assert not forest.node_map.contains(vertex.node_data)
    assert [child.node_id for child in vertex.children()] == expected.children
    if expected.steps:
        steps = vertex.rollout
        assert list(zip(steps["observation"].tolist(), steps["action"].tolist(), strict=True)) == expected.steps
        results = [model.results[each] for each in expected.steps]
        rewards = steps["next", "reward"].flatten().tolist()
        assert list(zip(steps["next", "observation"].tolist(), rewards, strict=True)) == results
    else:
        assert vertex.rollout is None
    if vertex.node_id:
        pair = vertex.rollout.select("observation", "action")[:1]
        assert vertex.hash == forest.data_map.query_module.hashes(pair)
        parent = vertex.parent
        above = [parent.node_id] if len(expected.parents) == 1 else list(parent.node_id)
        assert above == sorted(expected.parents)
        while vertex.parent is not None:
            vertex = vertex.parent.reshape(-1)[-1]
        assert vertex.node_id == 0
    else:
        assert vertex.hash is None
        assert (vertex.wins.item(), vertex.count.item(), vertex.count.dtype) == (0, 0, torch.int32)


# ---------------------------------------------------------------------- worked examples


def test_two_rollouts_that_part():
    tree = small().get_tree(root())
    assert tree.rollout["action"].tolist() == [1, 2]
    assert tree.node_observation == 392
    assert tree.index.tolist() == [2, 5]
    assert [child.rollout["action"].tolist() for child in tree.children()] == [[3, 4, 5], [6, 7]]
    assert list(MCTSForest.valid_paths(tree)) == [(0,), (1,)]
    assert tree.edges() == [(0, 1), (0, 2)]
    assert tree.selected_actions.tolist() == [3, 6]
    assert (tree.branching_action, tree.prev_action) == (1, 2)
    loose = small().get_tree(root(), compact=False)
    assert list(map(len, loose.valid_paths())) == [3, 4]
    path = list(loose.valid_paths())[1]
    assert torch.equal(loose.rollout_from_path(path)["action"], torch.tensor([1, 2, 3, 4, 5]))
    assert tree.rollout_from_path((1,))["next", "observation"].tolist() == [123, 392, 235, 38]


def test_the_forest_of_one_step_rollouts_as_text():
    forest = forest_of(one_steps())
    assert forest.to_string(root(), lambda vertex: vertex.node_observation.item()).splitlines() == [
        "(0,) 123", " (0, 0) 456", " (0, 1) 847", " (0, 2) 948", "(1,) 3094", " (1, 0) 68", " (1, 1) 9045", "(2,) 75",
    ]  # fmt: skip
    assert forest.get_tree(root()).to_string().startswith("(0,) {'observation': tensor(123)}\n")


def test_a_pair_reached_in_two_ways_is_one_vertex():
    tree = forest_of([rollout([0, 1, 5, 6], [0, 0, 0]), rollout([0, 2, 5, 7], [1, 0, 1])]).get_tree(root())
    assert tree.edges() == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 3), (2, 4)]
    assert (tree.num_vertices(), tree.num_vertices(count_repeat=True), tree.max_length()) == (5, 7, 2)
    assert tree.subtree[1].subtree[0].parent.batch_size == (2,)
    found = [tree.rollout_from_path(path)["observation"].tolist() for path in tree.valid_paths()]
    assert found == [[0, 1, 5], [0, 1, 5], [0, 2, 5], [0, 2, 5]]
    assert list(tree.vertices(key_type="path")) == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    tree.subtree[0].subtree[0].wins += 1
    assert tree.subtree[1].subtree[0].wins == 1


def test_a_tree_as_deep_as_a_long_chain(steps=3_000):
    chain = rollout(list(range(steps + 1)), [0] * steps)
    forest = forest_of([chain], max_size=steps)
    tree = forest.get_tree(root(), compact=False)
    assert (tree.num_vertices(), tree.max_length(), len(next(tree.valid_paths()))) == (steps, steps - 1, steps - 1)
    whole = forest.get_tree(chain[0])
    assert torch.equal(whole.rollout["next", "observation"], chain["next", "observation"])
    assert (whole.subtree, whole.hash, whole.index, list(whole.valid_paths())) == (None, None, None, [()])


def test_steps_that_lead_back_end_a_rollout_and_make_no_cycle():
    ring = forest_of([rollout([0, 1, 2, 0, 1], [0, 0, 0, 0])]).get_tree(root())
    assert ring.rollout["observation"].tolist() == [0, 1, 2]
    assert (ring.num_children, ring.index.tolist()) == (0, [0])
    there_and_back = forest_of([rollout([0, 1, 0, 2, 0], [0, 0, 1, 0])]).get_tree(root())
    assert there_and_back.edges() == [(0, 1), (0, 2), (1, 2)]  # 2 leads to 1 as well, which it is below
    assert there_and_back.subtree[1].index.tolist() == [0, 2]


# ---------------------------------------------------------------------- writing


def test_the_maps_are_those_of_the_documentation():
    forest, data = small(), rollout(*SMALL[0])
    index = forest.node_map[data[2]]["_index"]
    assert index.tolist() == [2, 5]
    assert forest.data_map[index]["next", "observation"].tolist() == [989, 235]
    assert forest.node_map[data]["count"].tolist() == [2, 2, 2, 1, 1]
    assert forest.data_map[data]["next"].batch_size == (5,)
    assert torch.equal(forest.get_child(data)["next", "observation"], data["next", "observation"])
    assert (len(forest), len(forest.data_map), len(forest.node_map)) == (7, 7, 6)
    assert data[0] in forest.node_map
    assert root(38) not in forest.node_map
    with pytest.raises(KeyError, match="77"):
        forest.node_map[root(77)]


@pytest.mark.parametrize("looked_at", [False, True])
def test_no_step_is_stored_beyond_max_size_and_an_error_changes_nothing(looked_at):
    forest = small(max_size=8)
    if looked_at:
        assert len(forest.data_map) == 7
    forest.extend(rollout(*SMALL[1]))  # all known
    before = forest.state_dict()
    with pytest.raises(IndexError):
        forest.extend(rollout([50, 51, 52], [0, 0]))
    for wrong in (
        rollout([0, 1], [0]).exclude("action"),
        rollout([0, 1], [0]).exclude("next"),
        rollout([0, 1], [0]).update({"next": {"observation": torch.zeros(1)}}),
        rollout([0, 1], [0]).update({"next": {"reward": torch.zeros(1, 2)}}),
        rollout([0, 1], [0])[0],
    ):
        with pytest.raises((KeyError, ValueError, RuntimeError)):
            forest.extend(wrong)
    after = forest.state_dict()
    for name in ("keys", "pairs", "counts", "rows"):
        assert torch.equal(before["nodes"][name], after["nodes"][name])
    forest.extend(rollout([50, 51], [0]))
    assert (len(forest), forest.get_tree(root(50)).node_observation) == (8, 51)


def test_rollouts_with_text_or_more_dims_are_written_as_they_come():
    forest = MCTSForest(excluded_keys=["text"])
    for _ in range(2):
        forest.extend(rollout([0, 1], [1]).update({"text": "excluded", "next": {"text": "excluded"}}))
    assert len(forest) == 1
    forest = MCTSForest()
    forest.extend(torch.stack([rollout([0, 1, 2], [0, 1]), rollout([5, 6, 7], [2, 3])]))
    wide = rollout([0, 1], [0]).expand(2, 1).permute(1, 0)  # [1, 2]
    with pytest.raises((RuntimeError, ValueError)):
        forest.extend(TensorDict(wide.to_dict(), [1]))
    assert (len(forest), len(forest.get_tree(root(5)).rollout)) == (4, 2)


def test_a_rollout_that_cannot_wait_is_written_after_those_that_do():
    forest = forest_of([rollout([0, 1], [0]), rollout([0, 2], [1])])
    forest.extend(torch.stack([rollout([0, 5], [1]), rollout([0, 3], [2])]))
    children = forest.get_tree(root()).children()
    assert [(each.branching_action, each.node_observation) for each in children] == [(0, 1), (1, 5), (2, 3)]


def test_an_unknown_root_is_named():
    with pytest.raises(KeyError, match="extend"):
        MCTSForest().get_tree(root())
    with pytest.raises(KeyError, match="77"):
        small().get_tree(root(77))
    with pytest.raises(ValueError, match="float32"):
        small().get_tree(root(0.0))
    with pytest.raises(ValueError, match="batch"):
        small().get_tree(rollout(*SMALL[0]))
    with pytest.raises(KeyError, match="observation"):
        small().get_tree(TensorDict({"state": torch.tensor(0)}))


def test_rollouts_are_copied_and_not_modified():
    forest, data = small(), rollout([0, 7], [9])
    forest.extend(data)
    assert set(data.keys()) == {"observation", "action", "next"}
    data["next", "observation"] += 1
    assert [child.node_observation.item() for child in forest.get_tree(root(0)).children()] == [392, 7]
    read = forest.get_tree(root(0))
    read.subtree[1].rollout["next", "observation"] += 5
    read.node_data["observation"] += 5
    assert forest.get_tree(root(0)).subtree[1].node_observation == 7


def test_return_node_gives_the_tree_from_the_first_observation():
    forest = small()
    node = forest.extend(rollout([123, 8, 9], [5, 5]), return_node=True)
    assert [child.branching_action.item() for child in node.children()] == [2, 5]
    assert forest.add(rollout([123, 8], [6])[0], return_node=True).num_children == 3
    assert forest.add(rollout([123, 8], [7])[0]) is None
    assert forest.get_tree(rollout([123, 8], [5])).num_children == 4
    assert forest.extend(torch.stack([rollout([1, 2, 3], [0, 1]), rollout([5, 6, 7], [2, 3])])) is None
    assert forest.get_tree(root(5)).rollout["action"].tolist() == [2, 3]
    forest.extend(rollout([1, 2], [0])[:0])
    with pytest.raises(ValueError, match="without steps"):
        forest.extend(rollout([1, 2], [0])[:0], return_node=True)


def test_maps_of_the_user_are_written():
    data_map = TensorDictMap(query_module=QueryModule(["observation", "action"]), storage=ListStorage(20))
    node_map = TensorDictMap(query_module=QueryModule(["observation"]), storage=ListStorage(20))
    forest = small(data_map=data_map, node_map=node_map)
    assert forest.node_map is node_map
    assert forest.max_size == 20
    assert node_map[rollout(*SMALL[0])[2]]["_index"].tolist() == [2, 5]
    assert (len(data_map), len(node_map)) == (7, 6)
    assert forest.get_tree(root()).edges() == [(0, 1), (0, 2)]
    twin = MCTSForest(data_map=small().data_map, node_map=small().node_map)
    assert twin.get_tree(root()).edges() == [(0, 1), (0, 2)]
    with pytest.raises(ValueError, match="entries"):
        MCTSForest(node_map=node_map)
    with pytest.raises(ValueError, match="Conflicting max_size"):
        MCTSForest(data_map=data_map, max_size=7)


class Env:
    reward_keys, done_keys, action_keys = [("agent", "reward")], ["done"], [("agent", "action")]
    observation_keys = ["pixels", ("agent", "state")]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16])
def test_keys_of_an_environment_and_excluded_ones(dtype):
    forest = MCTSForest(excluded_keys=["noise"], done_keys="terminated")
    forest.get_keys_from_env(Env())
    assert forest.done_keys == ["terminated"]
    assert forest.reward_keys == [("agent", "reward")]
    pixels = torch.eye(4)[:, None].expand(4, 2, 4).to(dtype)
    state = torch.arange(4.0, requires_grad=True)
    noise = torch.rand(3)
    data = TensorDict(
        {"pixels": pixels[:-1], "agent": {"state": state[:-1], "action": torch.eye(3)}, "noise": noise}
        | {"next": {"pixels": pixels[1:], "agent": {"state": state[1:], "reward": torch.rand(3, 1)}, "noise": noise}},
        [3],
    )
    forest.extend(data)
    forest.extend(data)
    tree = forest.get_tree(data[0])
    assert torch.equal(tree.rollout["pixels"], data["pixels"])
    assert torch.equal(tree.rollout["next", "agent", "state"], state[1:])
    assert torch.equal(tree.rollout["agent", "action"], torch.eye(3))
    assert tree.rollout["next"].get("noise", None) is None
    assert len(forest) == 3
    with pytest.raises(ValueError, match="action_keys"):
        MCTSForest(action_keys=3)


# ---------------------------------------------------------------------- copies, checkpoints, threads


def same(one, other):
    """Whether two forests have the same trees, hashes and counts."""
    trees = [each.get_tree(root(), compact=False) for each in (one, other)]
    texts = [str([[v.node_id, v.hash, v.index, v.rollout.to_dict()] for v in t.vertices().values()]) for t in trees]
    entries = [str([entry.to_dict() for entry in each.node_map[rollout(*SMALL[0])].unbind(0)]) for each in (one, other)]
    return texts[0] == texts[1] and entries[0] == entries[1]


def by_folder(forest, tmp_path):
    forest.dumps(tmp_path / "forest")
    forest.dumps(tmp_path / "forest")  # over the one before
    made = MCTSForest()
    made.loads(tmp_path / "forest")
    return made


def by_state(forest, tmp_path):
    torch.save(forest.state_dict(), tmp_path / "state.pt")
    made = small()
    made.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    return made


def in_memory(forest, tmp_path):
    made = small()
    put = made.with_state(forest.state())
    assert not same(forest, made)
    put()
    return made


@pytest.mark.parametrize(
    "way", [by_folder, by_state, in_memory, lambda f, _: copy.deepcopy(f), lambda f, _: pickle.loads(pickle.dumps(f))]
)
def test_what_was_saved_goes_on_identically(way, tmp_path):
    forest = small()
    forest.extend(rollout([847, 0, 123], [4, 1]))
    made = way(forest, tmp_path)
    for each in (forest, made):
        each.extend(rollout([123, 66, 0], [8, 8]))
    assert same(forest, made)
    assert np.array_equal(forest.node_map.state()["pairs"], made.node_map.state()["pairs"])


def test_a_damaged_or_foreign_checkpoint_changes_nothing(tmp_path):
    forest = small()
    state = forest.state_dict()
    state["nodes"]["rows"][0, 0] = 99  # no such node
    target = small()
    with pytest.raises(CheckpointCorrupt, match="not the graph"):
        target.load_state_dict(state)
    forest.data_map.dumps(tmp_path / "map")
    with pytest.raises(CheckpointMismatch, match="from a TensorDictMap"):
        target.loads(tmp_path / "map")
    with pytest.raises(FileNotFoundError):
        target.loads(tmp_path / "none")
    with pytest.raises(KeyError, match="no rollouts"):
        MCTSForest().dumps(tmp_path / "empty")
    assert same(forest, target)


def test_threads_write_and_read_one_forest():
    forest = MCTSForest(max_size=2000)

    def work(number):
        for step in range(50):
            forest.extend(rollout([0, 1 + 50 * number + step, -1], [50 * number + step, 0]))
            if step % 10 == 0:
                forest.get_tree(root())

    assert together(*(partial(work, number) for number in range(4))) == []
    assert len(forest) == 400
    assert isinstance(forest.get_tree(root()), Tree)
    assert sorted(forest.get_tree(root()).selected_actions.tolist()) == list(range(200))

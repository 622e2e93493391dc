"""Trees as tensorclasses, made by hand and by forests: fields, walks, text and pictures."""

import copy
import pickle
import sys

import pytest
import torch
from tensordict import LazyStackedTensorDict, is_tensorclass

from interop import Categorical, Composite, MCTSForest, Tree, Unbounded
from tests.interop.maps.rollouts import one_steps, rollout, root


@pytest.fixture
def tree():
    forest = MCTSForest()
    for each in one_steps():
        forest.extend(each)
    return forest.get_tree(root())


def test_a_node_of_steps_has_one_child():
    data = rollout([0, 1, 2], [3, 4])
    node = Tree.make_node(data)
    assert is_tensorclass(node)
    assert torch.equal(node.rollout["action"], data["action"])
    assert node.subtree[0].node_observation == 2
    assert (node.num_children, node.branching_action, node.prev_action, bool(node.is_terminal)) == (1, 3, 4, True)
    assert Tree.make_node(data[0]).rollout.shape == (1,)
    leaf = Tree.make_node(root(5))
    assert (leaf.rollout, leaf.subtree, leaf.selected_actions, leaf.is_terminal, leaf.index) == (None,) * 3 + (
        False,
        None,
    )
    assert (leaf.count, leaf.wins, leaf.parent, leaf.hash) == (0, 0, None, None)
    assert leaf.rollout_from_path(()) is None
    assert list(leaf.valid_paths()) == [()]


def test_assigning_a_subtree_registers_the_parent():
    node = Tree.make_node(root(1))
    node.subtree = LazyStackedTensorDict.lazy_stack([Tree.make_node(rollout([1, at], [at])) for at in (5, 6)])
    assert node.selected_actions.tolist() == [5, 6]
    assert node.subtree[1].parent.node_observation == 1
    node.subtree[1].visits = node.subtree[1].visits + 3
    assert node.subtree[1].count == 3
    assert node.num_vertices() == 5
    child = node.subtree[0]
    del node
    assert child.parent is None  # the reference is weak


def test_vertices_are_found_and_written_through(tree):
    assert [vertex.node_id for vertex in tree.vertices().values()] == list(range(9))
    assert list(tree.vertices(key_type="id")) == list(range(9))
    assert tree.get_vertex_by_id(5).node_observation == 847
    child = tree.subtree[1].subtree[0]
    assert tree.get_vertex_by_hash(child.hash).node_id == child.node_id == 7
    assert child in tree
    child.wins += 2
    child.subtree = LazyStackedTensorDict.lazy_stack([Tree.make_node(root(1))])
    assert tree.get_vertex_by_id(7).wins == 2
    assert tree.get_vertex_by_id(7).num_children == 1
    assert child.parent.parent.node_id == 0
    for wrong in (lambda: tree.get_vertex_by_id(99), lambda: tree.get_vertex_by_hash(99)):
        with pytest.raises(ValueError, match=r"99 not found\."):
            wrong()
    with pytest.raises(ValueError, match="key_type must be either 'hash', 'id' or 'path'"):
        tree.vertices(key_type="name")
    with pytest.raises(IndexError, match="longer"):
        tree.rollout_from_path((2, 0))


@pytest.mark.parametrize(
    "way",
    [Tree.clone, copy.copy, copy.deepcopy, lambda tree: tree.to("cpu"), lambda tree: pickle.loads(pickle.dumps(tree))],
)
def test_copies_are_equal_trees(tree, way):
    made = way(tree)
    assert isinstance(made, Tree)
    assert made.to_string() == tree.to_string()
    assert made.edges() == tree.edges()
    assert [vertex.hash for vertex in made.vertices().values()] == [vertex.hash for vertex in tree.vertices().values()]
    assert made.subtree[0].rollout_from_path((1,))["action"].tolist() == [3, 9, 6, 20, 21]


def test_a_pickle_has_each_step_once():
    def size(count):
        forest = MCTSForest(max_size=count)
        for at in range(count):
            forest.extend(rollout([0, at + 1], [at]))
        return len(pickle.dumps(forest.get_tree(root())))

    assert size(200) < 2.5 * size(100)


def test_trees_stack_and_index(tree):
    assert tree.subtree.batch_size == (3,)
    assert list(tree.subtree.node_id) == [1, 2, 3]
    assert [each.node_observation.item() for each in tree.subtree] == [123, 3094, 75]
    both = LazyStackedTensorDict.lazy_stack([tree, tree.clone()])
    assert both.batch_size == (2,)
    assert both[1].edges() == tree.edges()
    assert tree.node_observations.keys() == {"observation"}


def test_specs_and_cardinality():
    class Env:
        def cardinality(self, data):
            return 3 if data["observation"] == 0 else 2

    specs = Composite(
        output_spec=Composite(full_observation_spec=Composite(observation=Unbounded(())), full_reward_spec=Composite()),
        input_spec=Composite(full_action_spec=Composite(action=Categorical(3))),
    )
    tree = Tree.make_node(rollout([0, 1], [1]), specs=specs)
    assert tree.full_action_spec["action"].n == 3
    assert tree.full_observation_spec == specs["output_spec", "full_observation_spec"]
    assert not tree.fully_expanded(Env())
    with pytest.raises(RuntimeError, match="full_state_spec"):
        Tree.make_node(root()).full_state_spec
    with pytest.raises(RuntimeError, match="node_data"):
        Tree().node_observation


@pytest.mark.parametrize("figure", ["tree", "box"])
def test_pictures_have_a_mark_for_each_vertex(tree, figure, tmp_path):
    def label(vertex, path):
        return f"observation {vertex.node_observation.item()} at {path}"

    labels = [label(vertex, path) for path, vertex in tree.vertices(key_type="path").items()]
    drawn = tree.plot("matplotlib", figure, make_labels=label, path=str(tmp_path / "tree.png"))
    assert [text.get_text() for text in drawn.axes[0].texts] == labels
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    points = sum(len(line.get_xdata()) for line in drawn.axes[0].lines)  # two for an edge, and a gap
    assert (points, len(drawn.axes[0].patches)) == ((3 * 8, 0) if figure == "tree" else (0, 9))
    page = tree.plot(figure=figure, info=["node_id", "selected_actions"], path=str(tmp_path / "tree.html"))
    marks = page.data[-1]
    texts = marks.hovertext if figure == "tree" else marks.text
    assert texts[0] == "node_id: 0<br>selected_actions: [3, 2, 1]"
    assert len(texts) == 9
    assert "plotly" in (tmp_path / "tree.html").read_text()[:5000]


def test_pictures_that_cannot_be_made(tree, monkeypatch):
    for wrong in ({"backend": "igraph"}, {"figure": "pie"}):
        with pytest.raises(NotImplementedError, match="Unknown plotting backend"):
            tree.plot(**wrong)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r"fbuf\[plot\]"):
        tree.plot()

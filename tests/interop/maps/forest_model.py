"""A forest in plain Python, as slow and as plain as can be: what `get_tree` has to give."""

import dataclasses


@dataclasses.dataclass
class Vertex:
    steps: list  # (observation, action)
    observation: int
    outgoing: list  # actions
    children: list
    parents: list


class Model:
    def __init__(self):
        self.results = {}  # (observation, action) -> (next observation, reward), in the order of first appearance
        self.counts = {}

    def extend(self, steps):
        for before, action, after, reward in steps:
            self.results[before, action] = after, reward
            self.counts[before] = self.counts.get(before, 0) + 1

    def actions(self, observation):
        return [action for before, action in self.results if before == observation]

    def tree(self, root, max_depth, compact):
        vertices, numbers = [self._vertex(root, None, compact)], {}
        level = {0: 0}
        for at, vertex in enumerate(vertices):
            branches = len(vertex.outgoing) > (1 if compact else 0)
            if not branches or (max_depth is not None and level[at] > max_depth):
                continue
            for action in vertex.outgoing:
                pair = vertex.observation, action
                if pair not in numbers:
                    numbers[pair] = len(vertices)
                    level[len(vertices)] = level[at] + 1
                    vertices.append(self._vertex(vertex.observation, action, compact))
                vertex.children.append(numbers[pair])
        self._without_cycles(vertices, 0, [], set())
        order = [0]
        for number in order:
            order += [child for child in dict.fromkeys(vertices[number].children) if child not in order]
        for vertex in vertices:
            vertex.children = [order.index(child) for child in vertex.children]
        vertices = [vertices[number] for number in order]
        for number, vertex in enumerate(vertices):
            for child in vertex.children:
                vertices[child].parents.append(number)
        return vertices

    def _vertex(self, observation, action, compact):
        steps = []
        outgoing = self.actions(observation) if action is None else [action]
        while len(outgoing) == 1 and (observation, outgoing[0]) not in steps:
            steps.append((observation, outgoing[0]))
            observation = self.results[observation, outgoing[0]][0]
            outgoing = self.actions(observation)
            if not compact:
                break
        return Vertex(steps, observation, outgoing, [], [])

    def _without_cycles(self, vertices, at, way, done):
        kept = [child for child in vertices[at].children if child not in [*way, at]]
        vertices[at].children = kept
        for child in kept:
            if child not in done:
                self._without_cycles(vertices, child, [*way, at], done)
        done.add(at)

"""Minimum cuts of small directed networks, by Dinic's algorithm.

Capacities are integers of any size, so that costs can be scaled without rounding. The networks that joint graphs give
have short paths (each op that must not run twice is fed by the source itself), so that few rounds are needed.

References
----------
Y. Dinitz, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from __future__ import annotations

from collections import deque


class Network:
    """A directed network with capacities; nodes are numbers from 0.

    Attributes
    ----------
    source, sink
        Its first two nodes.
    infinite
        More than any cut costs.
    """

    source = 0
    sink = 1

    def __init__(self, infinite: int) -> None:
        self.infinite = infinite
        self._edges: list[list[int]] = [[], []]  # of each node, the numbers of its edges, those back included
        self._to: list[int] = []
        self._left: list[int] = []  # the capacity that is left; an edge and the one back are neighbours

    def node(self) -> int:
        """Add a node."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, start: int, end: int, capacity: int) -> None:
        """Add an edge."""
        for node, other, left in ((start, end, capacity), (end, start, 0)):
            self._edges[node].append(len(self._to))
            self._to.append(other)
            self._left.append(left)

    def late_cut(self) -> set[int]:
        """Return the nodes on the sink's side of the minimum cut that lies nearest to the sink; use the network once.

        Returns
        -------
        set of int
            The nodes from which the sink can still be reached when as much as possible flows.
        """
        while (levels := self._levels())[self.sink] >= 0:
            self._augment(levels)
        reaching = {self.sink}
        todo = [self.sink]
        while todo:
            for edge in self._edges[todo.pop()]:
                node = self._to[edge]
                if node not in reaching and self._left[edge ^ 1]:
                    reaching.add(node)
                    todo.append(node)
        return reaching

    def _levels(self) -> list[int]:
        """Return the nodes' distances to the source; -1 where nothing can flow."""
        levels = [-1] * len(self._edges)
        levels[self.source] = 0
        todo = deque([self.source])
        while todo:
            node = todo.popleft()
            for edge in self._edges[node]:
                if self._left[edge] and levels[self._to[edge]] < 0:
                    levels[self._to[edge]] = levels[node] + 1
                    todo.append(self._to[edge])
        return levels

    def _augment(self, levels: list[int]) -> None:
        """Let flow what can along paths on which the level rises by one at each step."""
        edges, to, left = self._edges, self._to, self._left
        following = [0] * len(edges)
        path: list[int] = []
        node = self.source
        while True:
            if node == self.sink:
                flow = min(left[edge] for edge in path)
                for edge in path:
                    left[edge] -= flow
                    left[edge ^ 1] += flow
                first = next(i for i, edge in enumerate(path) if not left[edge])
                node = to[path[first] ^ 1]
                del path[first:]
                continue
            while following[node] < len(edges[node]):
                edge = edges[node][following[node]]
                if left[edge] and levels[to[edge]] == levels[node] + 1:
                    path.append(edge)
                    node = to[edge]
                    break
                following[node] += 1
            else:
                if not path:
                    return
                edge = path.pop()
                node = to[edge ^ 1]
                following[node] += 1

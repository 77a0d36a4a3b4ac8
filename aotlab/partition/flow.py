"""Minimum cuts of small directed networks, by Dinic's algorithm.

Capacities are integers of any size, so that costs can be scaled without rounding. The networks that joint graphs give
have short paths (each op that must not run twice is fed by the source itself), so that few rounds are needed. One
network serves many cuts: its edges stay, their capacities are set anew.

References
----------
Y. Dinitz, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from __future__ import annotations

from collections.abc import Sequence


class Network:
    """A directed network; nodes are numbers from 0, ``source`` and ``sink`` the first of them, and so are edges."""

    source = 0
    sink = 1

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # of each node, the numbers of its half edges, those back included
        self._to: list[int] = []  # of half edges: 2 * n is the edge n, 2 * n + 1 the way back
        self._left: list[int] = []  # the capacity that is left

    def node(self) -> int:
        """Add a node."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, start: int, end: int) -> int:
        """Add an edge."""
        number = len(self._to)
        self._edges[start].append(number)
        self._edges[end].append(number + 1)
        self._to += (end, start)
        return number // 2

    def late_cut(self, capacities: Sequence[int]) -> list[bool]:
        """Find the minimum cut that lies nearest to the sink, given the capacities of the edges.

        Returned is for each node whether it is on the sink's side: whether the sink can still be reached from it when
        as much as possible flows.
        """
        left = self._left = [0] * len(self._to)
        left[::2] = capacities
        while (levels := self._levels())[self.sink] >= 0:
            self._augment(levels)
        edges, to = self._edges, self._to
        reaching = [False] * len(edges)
        reaching[self.sink] = True
        todo = [self.sink]
        while todo:
            for edge in edges[todo.pop()]:
                node = to[edge]
                if left[edge ^ 1] and not reaching[node]:
                    reaching[node] = True
                    todo.append(node)
        return reaching

    def _levels(self) -> list[int]:
        """Return the nodes' distances to the source, up to the sink's; -1 where nothing can flow or beyond that."""
        edges, to, left, sink = self._edges, self._to, self._left, self.sink
        levels = [-1] * len(edges)
        levels[self.source] = level = 0
        todo = [self.source]
        while todo and levels[sink] < 0:
            level += 1
            following = []
            for node in todo:
                for edge in edges[node]:
                    if left[edge] and levels[to[edge]] < 0:
                        levels[to[edge]] = level
                        following.append(to[edge])
            todo = following
        return levels

    def _augment(self, levels: list[int]) -> None:
        """Let flow what can along paths on which the level rises by one at each step."""
        edges, to, left, sink = self._edges, self._to, self._left, self.sink
        following = [0] * len(edges)
        path: list[int] = []
        node = self.source
        while True:
            if node == sink:
                flow = min(left[edge] for edge in path)
                for edge in path:
                    left[edge] -= flow
                    left[edge ^ 1] += flow
                first = next(i for i, edge in enumerate(path) if not left[edge])
                node = to[path[first] ^ 1]
                del path[first:]
                continue
            deeper, ways = levels[node] + 1, edges[node]
            for n in range(following[node], len(ways)):
                edge = ways[n]
                if levels[to[edge]] == deeper and left[edge]:
                    following[node] = n
                    path.append(edge)
                    node = to[edge]
                    break
            else:
                if not path:
                    return
                following[node] = len(ways)
                node = to[path.pop() ^ 1]
                following[node] += 1

"""Which captured graphs are kept, and when does one that is not go?

As many as there is room for; then the one that was used least recently gives way. It cannot simply be let go: the
device may still run it, and what it writes to is its own. So it is kept aside until the device has come past the point
where it was taken out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Graph = TypeVar("Graph")


class GraphStore(Generic[Graph]):
    """Owner of graphs by key. Used by one thread, the one that launches them.

    max_graphs: most that are kept, at least 1.
    """

    def __init__(self, max_graphs: int) -> None:
        self._max_graphs = max(1, max_graphs)
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._aside: deque[tuple[Graph, Callable[[], bool]]] = deque()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    @property
    def num_aside(self) -> int:
        """Graphs taken out that the device may still run."""
        return len(self._aside)

    def use(self, key: Hashable) -> Graph | None:
        """The graph that is about to be launched, if it is here."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def add(self, key: Hashable, graph: Graph, mark: Callable[[], Callable[[], bool]]) -> bool:
        """Keep another graph. True: one gave way to it. mark: called then, behind everything that was launched; what it
        returns tells whether the device has come so far.
        """
        self._drop_done()
        self._graphs[key] = graph
        if len(self._graphs) <= self._max_graphs:
            return False
        _, oldest = self._graphs.popitem(last=False)
        self._aside.append((oldest, mark()))
        return True

    def clear(self) -> None:
        """Let all go, at once: the device must have finished them."""
        self._graphs.clear()
        self._aside.clear()

    def _drop_done(self) -> None:
        while self._aside and self._aside[0][1]():
            self._aside.popleft()

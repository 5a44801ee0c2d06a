"""Graphs have a bound, the least recently used goes first, and never before the device is past it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

from engine.graph_store import GraphStore


class Graph:
    """Stands in for a captured graph."""


class Device:
    """Counts what was launched and what is done; a mark is passed once all that was launched before it is."""

    def __init__(self) -> None:
        self.launched = self.done = 0

    def mark(self) -> Callable[[], bool]:
        point = self.launched
        return lambda: self.done >= point


def test_the_least_recently_used_gives_way() -> None:
    device = Device()
    graphs: GraphStore[Graph] = GraphStore(2)
    assert not graphs.add("a", Graph(), device.mark)
    assert not graphs.add("b", Graph(), device.mark)
    assert graphs.use("a") is not None
    assert graphs.add("c", Graph(), device.mark)
    assert ["a" in graphs, "b" in graphs, "c" in graphs] == [True, False, True]
    assert graphs.use("b") is None


def test_a_graph_lives_until_the_device_is_past_it() -> None:
    device = Device()
    graphs: GraphStore[Graph] = GraphStore(1)
    first = Graph()
    alive = weakref.ref(first)
    graphs.add("first", first, device.mark)
    del first
    device.launched = 1  # it runs
    graphs.add("second", Graph(), device.mark)
    device.launched = 2
    graphs.add("third", Graph(), device.mark)
    gc.collect()
    assert alive() is not None
    assert graphs.num_aside == 2
    device.done = 1
    graphs.add("fourth", Graph(), device.mark)
    gc.collect()
    assert alive() is None
    assert graphs.num_aside == 2  # the second may still run, the third does not know better
    device.done = 2
    graphs.add("fifth", Graph(), device.mark)
    assert graphs.num_aside == 1


def test_clear_lets_all_go() -> None:
    graphs: GraphStore[Graph] = GraphStore(1)
    graphs.add("a", Graph(), Device().mark)
    graphs.add("b", Graph(), Device().mark)
    graphs.clear()
    assert "b" not in graphs
    assert graphs.num_aside == 0

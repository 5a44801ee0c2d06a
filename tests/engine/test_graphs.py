"""Without CUDA a graph cache calls its functions, every time, and says so."""

from __future__ import annotations

import gc
import weakref

import torch

from engine.graphs import GraphCache


def test_on_a_cpu_the_function_is_called() -> None:
    graphs = GraphCache("cpu", 8)
    value = torch.zeros(1)
    for turn in range(3):
        result = graphs.run("add", lambda: value.add_(1))
        assert result is value
        assert value.item() == turn + 1
    graphs.capture("other", lambda: value.add_(100))
    assert value.item() == 3
    assert "add" not in graphs
    assert (graphs.counts.captures, graphs.counts.replays, graphs.counts.eager_runs) == (0, 0, 3)
    graphs.clear()


def test_graphs_go_with_their_last_reference() -> None:
    """Not when garbage is collected, which may be in the middle of somebody's capture."""
    graphs = GraphCache("cpu", 8)
    graphs.run("add", lambda: None)
    alive = weakref.ref(graphs)
    gc.disable()
    try:
        del graphs
        assert alive() is None
    finally:
        gc.enable()

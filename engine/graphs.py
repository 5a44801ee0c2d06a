"""How is a piece of a step recorded once, and replayed without the host's time?

A CUDA graph per key. What a graph reads and writes stays where it was when it was captured: callers keep their inputs
in persistent buffers, refresh them before each run, and put nothing into a captured function that waits for the device
or depends on a host value that may change under the same key. There is a bound to how many are kept; one that gave way
is captured anew when it comes again. On a CPU, and where graphs are switched off, the function is simply called: one
code path for both.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from engine.cuda.recording import Recorder
from engine.graph_store import GraphStore

Result = TypeVar("Result")


@dataclass(slots=True)
class GraphCounts:
    """captures: graphs made. replays: runs through a graph. eager_runs: runs without one, the warm-ups of `run`
    included. evictions: graphs that gave way to others.
    """

    captures: int = 0
    replays: int = 0
    eager_runs: int = 0
    evictions: int = 0


class GraphCache:
    """Graphs of one stream of work, by key. Used by one thread, always under the same current stream.

    All graphs share one memory pool, so what one of them returned is valid until the next run of *any* key: copy what
    must last, or write it to a buffer that was allocated outside.
    """

    def __init__(self, device: torch.device | str, max_graphs: int, enabled: bool = True) -> None:
        """max_graphs: most that are kept at a time. enabled: False calls every function as it is (`cuda_graphs:
        false`). Any device but CUDA does the same.
        """
        self.device = torch.device(device)
        self.enabled = enabled and self.device.type == "cuda"
        self.counts = GraphCounts()
        self.max_graphs = max(1, max_graphs)
        self._graphs: GraphStore[tuple[torch.cuda.CUDAGraph, Any]] = GraphStore(self.max_graphs)
        self._warm: OrderedDict[Hashable, None] = OrderedDict()  # run once, not captured; oldest first
        self._stream = torch.cuda.Stream(self.device) if self.enabled else None
        self._recorder = Recorder() if self.enabled else None
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def __contains__(self, key: Hashable) -> bool:
        """Whether `key` has been captured."""
        return key in self._graphs

    def run(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Run `function`, exactly once, through the key's graph.

        The first run of a key that `capture` has not prepared is a plain call (it compiles and warms up what it uses),
        the second one captures and replays, and so do all that follow: each of them has the function's effects once.
        Every function under one key must enqueue the same work.
        """
        if not self.enabled:
            self.counts.eager_runs += 1
            return function()
        made = self._graphs.use(key)
        if made is None:
            if key not in self._warm:
                self._note_warm(key)
                self.counts.eager_runs += 1
                return self._on_side_stream(function)
            made = self._record(key, function)
        self.counts.replays += 1
        made[0].replay()
        result: Result = made[1]
        return result

    def capture(self, key: Hashable, function: Callable[[], object], warm_ups: int = 1) -> None:
        """Capture `key` ahead of its first run: at start, when the buffers hold nothing that matters.

        The function runs `warm_ups` times, with all its effects, before it is captured; capturing has none. Nothing
        happens where graphs are off, or the key has one.
        """
        if not self.enabled or key in self._graphs:
            return
        for _ in range(warm_ups):
            self._on_side_stream(function)
        self._record(key, function)

    def clear(self) -> None:
        """Forget all graphs. The device must have finished every replay."""
        self._graphs.clear()
        self._warm.clear()

    def _note_warm(self, key: Hashable) -> None:
        self._warm[key] = None
        if len(self._warm) > self.max_graphs:
            self._warm.popitem(last=False)

    def _mark(self) -> Callable[[], bool]:
        """Tells whether the device has come past everything enqueued so far."""
        assert self._recorder is not None
        with torch.cuda.stream(self._stream):  # which is idle, so that torch's own recording does not wait
            event = self._recorder.make(blocking=False)
        self._recorder.record(event)
        return partial(self._recorder.passed, event)

    def _on_side_stream(self, function: Callable[[], Result]) -> Result:
        """Call `function` in the stream that captures, in order with the current one, so that what libraries keep by
        stream (workspaces) exists when it captures.
        """
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        for tensor in _tensors(result):
            tensor.record_stream(current)
        return result

    def _record(self, key: Hashable, function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture. Not by `torch.cuda.graph`, which waits for the whole device: another stream of this process may be
        waiting for a peer. Other threads may use the device meanwhile.

        No garbage is collected in it: a graph among it, whoever's, would be destroyed in the middle of the capture,
        which spoils that.
        """
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream), _no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        self.counts.captures += 1
        self._warm.pop(key, None)
        made = (graph, result)
        self.counts.evictions += self._graphs.add(key, made, self._mark)
        return made


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tensors(result: object) -> list[torch.Tensor]:
    """The tensors in a function's result: itself, or the fields and items of it, one level or more deep."""
    if isinstance(result, torch.Tensor):
        return [result] if result.is_cuda else []
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors(item)]
    if isinstance(result, dict):
        return [tensor for item in result.values() for tensor in _tensors(item)]
    fields = getattr(result, "__dataclass_fields__", None)
    return [] if fields is None else [tensor for name in fields for tensor in _tensors(getattr(result, name))]

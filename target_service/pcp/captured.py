"""How do the ranks of a target capture a step, and replay it, all of them alike?

Whether a collective is launched from a graph must be the same on all of its ranks, each with the graph of that very
capture: so NCCL's guide has it ("Using NCCL with CUDA Graphs"). Each rank has a GraphCache of its own, and what one
does (warm up, capture, replay, let one go) follows from its bound, from whether it may capture at all, and from the
keys that it has been given, in turn. So these are the same everywhere: `make_graphs` takes nothing that differs between
ranks; an order names the whole key, with what only rank 0 needs of it; and whoever has an order goes to the cache with
it exactly once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch

from engine.graphs import GraphCache
from kernels.sharding import StepShards, count_pairs
from target_service.config import TargetConfig
from target_service.device.buffers import table_width
from target_service.device.padding import captured_rows, most_graphs
from target_service.messages import RankLoad
from target_service.pcp.broadcast import columns_of
from target_service.pcp.group import Backend
from target_service.pcp.laps import NoWatch
from target_service.pcp.launched import LaunchForward, Prepared
from target_service.pcp.order import LaunchOrder, Way

Result = TypeVar("Result")

# Tables of so many columns (2 KiB a row) cost a broadcast next to nothing; wider ones come in steps of four.
_FEW_COLUMNS = 512
_COLUMN_FACTOR = 4


def column_sizes(width: int) -> tuple[int, ...]:
    """How wide the tables of uniform steps are, ascending; the last holds any row. Few, since each is captured."""
    most, sizes, size = columns_of(width), list[int](), _FEW_COLUMNS
    while size < most:
        sizes.append(size)
        size *= _COLUMN_FACTOR
    return (*sizes, most)


def can_capture(config: TargetConfig, device: torch.device, backend: Backend) -> bool:
    """Whether uniform steps are padded and captured. gloo waits for the device in its collectives, which no graph can;
    on a CPU nothing is captured, and steps are run as if they were.
    """
    return config.cuda_graphs and (device.type == "cpu" or backend == "nccl")


def make_graphs(config: TargetConfig, max_model_len: int, device: torch.device, backend: Backend) -> GraphCache:
    """The cache of any rank, rank 0 included. max_model_len: the loaded model's."""
    width = table_width(max_model_len, config.max_verify_len, config.block_size)
    num_graphs = most_graphs(len(captured_rows(config)), config.max_verify_len, len(column_sizes(width)))
    return GraphCache(device, num_graphs, can_capture(config, device, backend))


def run_as_ordered(graphs: GraphCache, way: Way, key: Hashable, function: Callable[[], Result]) -> Result | None:
    """Go to the cache once, as the order says; the step's result, None where it was to be captured."""
    if way is Way.CAPTURE:
        graphs.capture(key, function, warm_ups=1)
        return None
    return graphs.run(key, function)


def uniform_loads(shards: StepShards, context_lens: Sequence[int], query_len: int) -> tuple[RankLoad, ...]:
    """What each rank runs of a uniform step that was dealt by bounds: padding counts as tokens, and as no work.
    context_lens: of the step's first rows, the others are padding; -1 where one is not launched.
    """
    pairs = np.zeros(shards.num_tokens // query_len, dtype=np.int64)
    for row, context_len in enumerate(context_lens):
        if context_len >= 0:
            pairs[row] = count_pairs(context_len, 0, query_len)
    return tuple(RankLoad(shard.num_tokens, int(pairs[shard.rows].sum())) for shard in shards.ranks)


class Follower:
    """Runs orders on a rank that is not rank 0. Used by one thread, always under the same current stream."""

    def __init__(self, forward: LaunchForward, graphs: GraphCache) -> None:
        self._forward = forward
        self._graphs = graphs

    def run(self, order: LaunchOrder) -> None:
        """Enqueue this rank's share."""
        if order.way is Way.EAGER:
            self._forward.run(order, None)
            return
        key = order.key
        prepared = None if key in self._graphs else self._forward.prepare(order)

        def share() -> Prepared:
            assert prepared is not None  # with a graph this is not called
            self._forward.enqueue(prepared, None, NoWatch())
            return prepared  # which the graph then keeps

        run_as_ordered(self._graphs, order.way, key, share)


def let_go(graphs: GraphCache, device: torch.device, timeout_s: float) -> bool:
    """Forget all graphs once the device is at rest, as must be before the group that they have collectives of is left.
    False: it does not come to rest, and nothing was done.
    """
    if device.type == "cuda":
        # A device that waits for a lost peer never comes to rest, and torch's own wait has no deadline.
        waiter = threading.Thread(target=_synchronise, args=(device,), name="device-rest", daemon=True)
        waiter.start()
        waiter.join(timeout_s)
        if waiter.is_alive():
            return False
    graphs.clear()
    return True


def _synchronise(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # a device that has failed runs nothing any more
        torch.cuda.synchronize(device)

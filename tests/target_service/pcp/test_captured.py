"""Uniform steps over ranks: what is captured of them depends on nothing that changes, and all ranks warm up, capture,
replay and let go the same at the same steps.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.decoder import Decoder
from engine.graphs import GraphCache
from kernels.kernel_set import kernels_for
from kernels.layout import make_positions, make_query_start_loc, make_slot_mapping
from kernels.sharding import shard_step
from target_service.config import TargetConfig
from target_service.device.buffers import Sizes, StepBuffers, StepMemory
from target_service.device.forward import HostRows
from target_service.device.frame import StepFrame
from target_service.device.padding import MAX_LAYER_SETS, Padding
from target_service.device.plan_buffer import PlanBuffer
from target_service.model import LoadedModel, load_model
from target_service.pcp import __main__ as rank_process
from target_service.pcp import launched
from target_service.pcp.board import Board, ExportedBoard
from target_service.pcp.broadcast import StepData
from target_service.pcp.captured import Follower, can_capture, column_sizes, let_go, uniform_loads
from target_service.pcp.group import Backend, RankGroup, SoloGroup
from target_service.pcp.laps import LapWatch, NoWatch
from target_service.pcp.launched import LaunchForward
from target_service.pcp.lead import Lead
from target_service.pcp.order import LaunchOrder, Way, most_launch_bytes
from target_service.pcp.step_forward import RankStepForward
from tests.target_service.device.bench import Bench
from tests.target_service.device.test_no_sync import no_reads
from tests.target_service.pcp.ranks import CpuGraphs, ThreadRanks
from tests.target_service.pcp.test_forward import (
    BLOCK_SIZE,
    LAYERS,
    MAX_LEN,
    NUM_BLOCKS,
    Requests,
    backends,
    cached,
    decoder,
    run_all,
)

__all__ = ["decoder"]  # a fixture
CPU = torch.device("cpu")
COLUMNS = 32
NO_ROWS = np.zeros(0, dtype=np.int64)


def make_forward(model: Decoder, group: RankGroup) -> LaunchForward:
    kv = model.make_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    loaded = LoadedModel(model, kv, tuple(backends(model, "reference")), MAX_LEN, 100)
    return LaunchForward(loaded, backends(model, "reference"), group, NoWatch())


def uniform(
    num_rows: int, query_len: int, way: Way = Way.UNIFORM, layers: tuple[int, ...] = LAYERS, greedy: bool = False
) -> LaunchOrder:
    return LaunchOrder.uniform(num_rows, query_len, COLUMNS, layers, BLOCK_SIZE, way, greedy)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("num_rows", "padded", "query_len"), [(3, 4, 1), (1, 1, 4), (5, 8, 4)])
def test_what_is_captured_depends_on_nothing_that_changes(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_rows: int, padded: int, query_len: int
) -> None:
    """One Prepared, enqueued for step after step of rows that stand somewhere else each time, one of which ends on the
    way, gives what each step gives on one rank; nothing is uploaded or read.
    """
    torch.set_num_threads(1)
    source = random.Random(padded)
    requests = Requests()
    prompts = requests.order([(seat, 5 + 7 * seat, True) for seat in range(num_rows)], source, LAYERS)
    alive = [list(range(num_rows))] * 2 + [list(range(1, num_rows)) or [0]] * 2
    orders = [requests.order([(seat, query_len, False) for seat in seats], source, LAYERS) for seats in alive]
    (alone,) = ThreadRanks(1).run(lambda group: run_all(decoder, [prompts, *orders], group))

    def act(group: RankGroup) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        forward = make_forward(decoder, group)
        first = LaunchOrder(
            prompts.context_lens, prompts.query_lens, prompts.num_logits, prompts.splits, COLUMNS, LAYERS
        )
        where = list(range(num_rows))
        forward.run(first, (lambda data: write(data, prompts, where, 0)) if group.rank == 0 else None)
        prepared = forward.prepare(uniform(padded, query_len))
        found = []
        for order, seats in zip(orders, alive, strict=True):

            def fill(data: StepData, order: Any = order, seats: list[int] = seats) -> None:
                write(data, order, seats, query_len)

            output = forward.enqueue(prepared, fill if group.rank == 0 else None, NoWatch())
            if group.rank == 0:
                assert output.logit_hidden is not None
                assert output.captured is not None
                tokens = np.repeat(np.array(seats) * query_len, query_len) + np.tile(np.arange(query_len), len(seats))
                found.append((output.logit_hidden[tokens], output.captured[tokens]))
        return found, cached(forward._kv)

    uploads = list[int]()
    upload = launched._upload

    def counted(*arguments: Any) -> list[torch.Tensor]:
        uploads.append(1)
        return upload(*arguments)

    monkeypatch.setattr(launched, "_upload", counted)
    with no_reads(monkeypatch) as reads:
        shared = ThreadRanks(num_ranks).run(act)
    assert not reads
    assert len(uploads) == 2 * num_ranks  # the prompts' step, and what was prepared
    for one, many in zip(alone[0][1:], shared[0][0], strict=True):
        assert one.logit_hidden is not None
        assert one.captured is not None
        torch.testing.assert_close(many[0], one.logit_hidden, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(many[1], one.captured, rtol=2e-5, atol=2e-5)
    for _, kv in shared:  # padding, and the row that has ended, write nothing
        torch.testing.assert_close(kv, cached(alone[1]), rtol=2e-5, atol=2e-5)


def write(data: StepData, order: Any, rows: list[int], query_len: int) -> None:
    """What rank 0's device makes of a step whose rows stand at these places; query_len 0: they follow each other."""
    positions = make_positions(order.context_lens, order.query_lens)
    starts = make_query_start_loc(order.query_lens)
    slots = make_slot_mapping(order.block_tables, positions, starts, BLOCK_SIZE, MAX_LEN, order.num_tokens)
    tokens = np.arange(order.num_tokens)
    if query_len:
        tokens = np.repeat(np.array(rows) * query_len, query_len) + np.tile(np.arange(query_len), len(rows))
    data.fill_with_nothing()
    for where, values in ((data.input_ids, order.input_ids), (data.positions, positions), (data.slots, slots)):
        where.index_copy_(0, torch.from_numpy(tokens), torch.from_numpy(values))
    data.seq_lens[rows] = torch.from_numpy((order.context_lens + order.query_lens).astype(np.int32))
    data.block_tables[rows, : order.block_tables.shape[1]] = torch.from_numpy(order.block_tables)


# Without rows: it tells the ranks of a test that there are no more.
LAST = LaunchOrder(NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS > 0, 0, ())


def follow_all(group: RankGroup, exported: ExportedBoard, follower: Follower) -> None:
    board = Board.attach(exported.name, group.size, exported.order_bytes, exported.depth)
    for seq in itertools.count(1):
        order = board.take_launch(group.rank, seq, 20.0)
        assert order is not None
        if not order.num_rows:
            return
        follower.run(order)


@pytest.mark.parametrize("max_graphs", [3, 100])
def test_ranks_do_the_same_with_their_graphs(decoder: Decoder, max_graphs: int) -> None:
    """Steps whose rows are all greedy, and others, of changing sizes and lengths, some captured ahead of their time,
    and eager ones between them; few graphs are kept, or all.
    """
    source = random.Random(max_graphs)
    sizes = [(1, 1), (4, 1), (1, 4), (4, 4)]
    steps = [
        (*source.choice(sizes), source.random() < 0.5, source.choice([3, 40]), source.choice("uuuce"))
        for _ in range(80)
    ]
    kernels = kernels_for(CPU)
    buffers, plans = StepBuffers(Sizes(8, 8, 32, 4, 16, 400), CPU), PlanBuffer(8, 1024, 1, CPU)
    tables = SimpleNamespace(table=torch.zeros(8, 16, dtype=torch.int32))
    frame = StepFrame(kernels, StepMemory(buffers, plans, cast(Any, tables)), BLOCK_SIZE, 64, None)
    plans.upload(plans.blank)
    seats = torch.full((8,), -1, dtype=torch.int32)
    board = ExportedBoard(3, most_launch_bytes(8, len(LAYERS)), 100)

    def lead(group: RankGroup, graphs: CpuGraphs) -> None:
        forward = RankStepForward(
            decoder,
            frame,
            Padding((1, 4), buffers.sizes, True),
            graphs,
            Lead(cast(Any, SimpleNamespace(lost=False, board=board.board, loss_behind=lambda _: None)), 20.0),
            make_forward(decoder, group),
            LapWatch(CPU, 0),
        )
        forward._column_sizes = (8, 16)
        for num_rows, query_len, greedy, context_len, what in steps:
            shape = buffers.uniform(num_rows, query_len)
            shape.seats.copy_(seats[:num_rows])
            if what == "u":
                output = forward.uniform(shape, LAYERS, greedy, [context_len] * num_rows)
                assert (output.logits is None) == greedy
            elif what == "c":
                forward.capture(shape, LAYERS, greedy)
            else:
                lens = [query_len] * num_rows
                host = HostRows([context_len] * num_rows, lens, lens, [False] * num_rows)
                forward._run(shape, LAYERS, cast(Any, SimpleNamespace(host=host)))
        board.board.publish(LAST, forward._lead.seq + 1, 20.0, lambda: False)

    def act(group: RankGroup) -> list[Any]:
        torch.set_num_threads(1)
        graphs = CpuGraphs(max_graphs)
        with torch.inference_mode():
            if group.rank == 0:
                lead(group, graphs)
            else:
                follow_all(group, board, Follower(make_forward(decoder, group), graphs))
        return graphs.happened

    try:
        first, *others = ThreadRanks(3).run(act)
    finally:
        board.close()
    assert others == [first] * 2
    happened = Counter(what for what, _ in first)
    assert {key[-1] for _, key in first} == {False, True}
    assert {key[2] for _, key in first} == {8, 16}
    assert min(happened[what] for what in ("warm", "ahead", "capture", "replay")) > 2
    assert (happened["evict"] > 5) == (max_graphs == 3)


def test_ranks_bound_their_graphs_alike(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 pads to no more rows than its seats can use; all that each of its steps may be, counts."""
    rows = [1, 3, 8, 40, 400]
    bench = Bench(tiny_dir, pcp_size=2, threads=1, num_seats=8, graph_rows=rows, max_verify_len=3, block_size=4)
    ranks, runner = bench.engine.ranks, bench.engine.device_runner
    assert ranks is not None
    assert runner is not None
    ranks.close()
    found = list[GraphCache]()

    def follower(forward: LaunchForward, graphs: GraphCache) -> None:
        found.append(graphs)

    monkeypatch.setattr(rank_process, "Follower", follower)
    config = ranks._config
    loaded = load_model(config, tiny_dir, CPU)
    closed = cast(Any, SimpleNamespace(closed=True))
    rank_process._follow_launches(1, closed, loaded, loaded.attention_backends, SoloGroup(), config, "gloo")
    widths = len(column_sizes(runner._tables.table.shape[-1]))
    assert found[0].max_graphs == runner.forward.graphs.max_graphs == 2 * MAX_LAYER_SETS * 3 * 4 * widths


@pytest.mark.parametrize(
    ("cuda_graphs", "device", "backend", "can"),
    [
        (True, "cuda", "nccl", True),
        (True, "cuda", "gloo", False),
        (True, "cpu", "gloo", True),
        (False, "cuda", "nccl", False),
    ],
)
def test_who_can_capture(cuda_graphs: bool, device: str, backend: Backend, can: bool) -> None:
    assert can_capture(TargetConfig(cuda_graphs=cuda_graphs), torch.device(device), backend) == can


def test_the_order_of_a_uniform_step_follows_from_its_key() -> None:
    order = uniform(8, 4, Way.CAPTURE)
    assert order.key == (8, 4, COLUMNS, LAYERS, False)
    assert int((order.context_lens + order.query_lens).max()) == COLUMNS * BLOCK_SIZE
    buffer = memoryview(bytearray(most_launch_bytes(8, len(LAYERS))))
    order.encode_into(buffer)
    again = LaunchOrder.decode(buffer)
    assert (again.key, again.way, again.num_tokens) == (order.key, Way.CAPTURE, 32)
    assert again.num_logits.tolist() == [4] * 8
    assert uniform(8, 4).way is Way.UNIFORM
    uniform(8, 4, greedy=True).encode_into(buffer)
    assert LaunchOrder.decode(buffer).key == (8, 4, COLUMNS, LAYERS, True)


@pytest.mark.parametrize(
    ("width", "sizes"),
    [(1, (16,)), (512, (512,)), (513, (512, 528)), (4097, (512, 2048, 4112)), (8192, (512, 2048, 8192))],
)
def test_tables_come_in_few_widths(width: int, sizes: tuple[int, ...]) -> None:
    assert column_sizes(width) == sizes


def test_loads_are_of_the_rows_that_run() -> None:
    """Five rows of four tokens in eight, one of them not launched; dealt to two ranks in turn."""
    order = uniform(8, 4)
    shards = shard_step(order.context_lens, order.query_lens, order.splits, 2)
    assert [shard.rows.tolist() for shard in shards.ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    loads = uniform_loads(shards, [10, 20, -1, 0, 5], 4)
    assert [load.num_tokens for load in loads] == [16, 16]
    assert [load.attention_work for load in loads] == [4 * 15 + 2 * 10, 4 * 20 + 2 * 10]


def test_letting_go_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: rest.wait(20))
    graphs = CpuGraphs()
    graphs.capture("key", lambda: None)
    assert not let_go(cast(Any, graphs), torch.device("cuda"), 0.05)
    assert "key" in graphs  # the device may still run it
    rest.set()
    assert let_go(cast(Any, graphs), torch.device("cuda"), 5.0)
    assert "key" not in graphs

"""Uniform steps over ranks: what is captured of them depends on nothing that changes, and ranks stay in step whatever
graphs each has.
"""

from __future__ import annotations

import random
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.decoder import Decoder
from engine.graphs import GraphCache
from kernels.layout import make_positions, make_query_start_loc, make_slot_mapping
from kernels.sharding import shard_step
from target_service.pcp import launched
from target_service.pcp.broadcast import StepData
from target_service.pcp.captured import Follower, column_sizes, let_go, run_once, uniform_loads
from target_service.pcp.group import RankGroup
from target_service.pcp.laps import NoWatch
from target_service.pcp.launched import LaunchForward
from target_service.pcp.order import LaunchOrder, Way, most_launch_bytes
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


def make_forward(model: Decoder, group: RankGroup) -> LaunchForward:
    kv = model.make_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    return LaunchForward(model, kv, backends(model, "reference"), backends(model, "reference"), group, 100, NoWatch())


def uniform(num_rows: int, query_len: int, way: Way = Way.UNIFORM, layers: tuple[int, ...] = LAYERS) -> LaunchOrder:
    return LaunchOrder.uniform(num_rows, query_len, COLUMNS, layers, BLOCK_SIZE, way)


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


def test_ranks_stay_in_step_whatever_graphs_they_have(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some keep all, some hardly any, some have none at all."""
    empty = StepData.empty

    def nothing(order: LaunchOrder, device: torch.device) -> StepData:
        data = empty(order, device)
        data.fill_with_nothing()
        return data

    monkeypatch.setattr(StepData, "empty", nothing)  # no rank is rank 0 here, to fill it
    source = random.Random(3)
    keys = [(1, 1), (2, 1), (4, 1), (1, 4), (2, 4)]
    orders = [uniform(*source.choice(keys), source.choice([Way.UNIFORM, Way.CAPTURE])) for _ in range(40)]
    mixed = LaunchOrder(np.array([0, 7]), np.array([19, 3]), np.array([1, 3]), np.array([True, False]), COLUMNS, ())
    orders[10:10] = orders[30:30] = [mixed]
    ranks = ThreadRanks(4)

    def act(group: RankGroup) -> Any:
        graphs = cast(Any, (CpuGraphs(), CpuGraphs(1), CpuGraphs(3), GraphCache(CPU, 4))[group.rank])
        follower = Follower(make_forward(decoder, group), graphs)
        for order in orders:
            follower.run(order)
        return graphs.counts

    counts = ranks.run(act)
    layers = decoder.config.num_layers
    assert ranks.calls == [40 * (layers + 3) + 2 * (layers + 2)] * 4
    assert counts[0].captures == len(keys)
    assert counts[1].captures > counts[2].captures > counts[0].captures
    assert (counts[3].captures, counts[3].eager_runs) == (0, 40)


@pytest.mark.parametrize("way", [Way.UNIFORM, Way.CAPTURE])
def test_a_function_runs_once_whatever_is_known_of_it(way: Way) -> None:
    ran = list[int]()
    for graphs in (CpuGraphs(), GraphCache(CPU, 4)):
        for turn in range(1, 5):
            run_once(cast(Any, graphs), way, "key", lambda turn=turn: ran.append(turn))  # type: ignore[misc]
            assert len(ran) == turn
        ran.clear()


def test_the_order_of_a_uniform_step_follows_from_its_key() -> None:
    order = uniform(8, 4, Way.CAPTURE)
    assert order.key == (8, 4, COLUMNS, LAYERS)
    assert int((order.context_lens + order.query_lens).max()) == COLUMNS * BLOCK_SIZE
    buffer = memoryview(bytearray(most_launch_bytes(8, len(LAYERS))))
    order.encode_into(buffer)
    again = LaunchOrder.decode(buffer)
    assert (again.key, again.way, again.num_tokens) == (order.key, Way.CAPTURE, 32)
    assert again.num_logits.tolist() == [4] * 8
    assert uniform(8, 4).way is Way.UNIFORM


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

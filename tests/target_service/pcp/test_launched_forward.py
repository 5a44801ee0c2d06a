"""Launched steps over ranks against the same steps with all lengths known: hidden states, captured layers, caches; and
what becomes of errors and times.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.decoder import Decoder
from engine.errors import RanksLost
from engine.kv_cache import KVCache
from kernels.layout import PAD_SLOT, make_positions, make_query_start_loc, make_slot_mapping
from target_service.device.buffers import Sizes, StepBuffers, StepMemory
from target_service.device.forward import HostRows
from target_service.device.frame import StepFrame
from target_service.device.padding import Padding
from target_service.model import LoadedModel
from target_service.pcp.broadcast import StepData, columns_of
from target_service.pcp.forward import ShardedOutput
from target_service.pcp.group import RankGroup, SoloGroup
from target_service.pcp.laps import LapWatch, NoWatch
from target_service.pcp.launched import LaunchForward
from target_service.pcp.lead import Lead
from target_service.pcp.order import LaunchOrder, StepOrder
from target_service.pcp.step_forward import RankStepForward, make_launch_order
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
    steps,
)

__all__ = ["decoder"]  # a fixture
CPU = torch.device("cpu")


def launched(order: StepOrder, absent: set[int], slack: int) -> LaunchOrder:
    """The order as the host has it of a launch: decode rows stand at most `slack` tokens further than they do; beside
    the step's rows there are `absent` ones (indices in the result), which the device does not run.
    """
    num_rows = order.num_rows + len(absent)
    real = [row for row in range(num_rows) if row not in absent]
    contexts, lens, logits = np.full(num_rows, 9), np.full(num_rows, 3), np.full(num_rows, 2)
    splits = np.zeros(num_rows, dtype=np.bool_)
    contexts[real] = order.context_lens + np.where(order.splits, 0, slack)
    lens[real], logits[real], splits[real] = order.query_lens, order.num_logits, order.splits
    longest = int((contexts + lens).max())
    columns = columns_of(-(-longest // BLOCK_SIZE))
    return LaunchOrder(contexts, lens, logits, splits, columns, order.hidden_layers)


def fill(order: StepOrder, launch: LaunchOrder, absent: set[int]) -> Callable[[StepData], None]:
    """What rank 0's device would have made of it."""
    real = [row for row in range(launch.num_rows) if row not in absent]
    tokens = np.repeat(np.isin(np.arange(launch.num_rows), real), launch.query_lens)
    positions = make_positions(order.context_lens, order.query_lens)
    starts = make_query_start_loc(order.query_lens)
    slots = make_slot_mapping(order.block_tables, positions, starts, BLOCK_SIZE, MAX_LEN, order.num_tokens)

    def write(data: StepData) -> None:
        data.fill_with_nothing()
        for where, values in ((data.input_ids, order.input_ids), (data.positions, positions), (data.slots[:-1], slots)):
            where[torch.from_numpy(tokens)] = torch.from_numpy(values)
        data.seq_lens[real] = torch.from_numpy((order.context_lens + order.query_lens).astype(np.int32))
        data.block_tables[real, : order.block_tables.shape[1]] = torch.from_numpy(order.block_tables)

    return write


def launch_forward(model: Decoder, kv: KVCache, group: RankGroup) -> LaunchForward:
    loaded = LoadedModel(model, kv, tuple(backends(model, "reference")), MAX_LEN, 100)
    return LaunchForward(loaded, backends(model, "reference"), group, NoWatch())


def run_launched(
    model: Decoder, orders: list[StepOrder], launches: list[LaunchOrder], absent: set[int], group: RankGroup
) -> tuple[list[ShardedOutput], KVCache]:
    kv = model.make_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    forward = launch_forward(model, kv, group)
    found = []
    for order, launch in zip(orders, launches, strict=True):
        writer = fill(order, launch, absent) if group.rank == 0 else None
        found.append(forward.run(launch, writer))
    return found, kv


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("num_rows", "longest", "absent"), [(1, 1, set()), (1, 37, {1}), (3, 9, {0, 3}), (9, 21, {4})])
def test_launched_steps_are_the_steps(
    decoder: Decoder, num_ranks: int, num_rows: int, longest: int, absent: set[int]
) -> None:
    """Bounds above the truth, and rows that the device does not run."""
    torch.set_num_threads(1)
    source = random.Random(num_rows * 100 + longest)
    requests = Requests()
    # Drafts that are rejected leave a row behind the host's bound.
    orders = [requests.order(rows, source, LAYERS) for rows in steps(source, num_rows, longest)]
    launches = [launched(order, absent, 6) for order in orders]
    (alone,) = ThreadRanks(1).run(lambda group: run_all(decoder, orders, group))
    ranks = ThreadRanks(num_ranks)
    shared = ranks.run(lambda group: run_launched(decoder, orders, launches, absent, group))
    for order, launch, one, many in zip(orders, launches, alone[0], shared[0][0], strict=True):
        real = np.isin(np.arange(launch.num_rows), list(absent), invert=True)
        assert one.captured is not None
        assert many.captured is not None
        tokens = torch.from_numpy(np.repeat(real, launch.query_lens))
        torch.testing.assert_close(many.captured[tokens], one.captured, rtol=2e-5, atol=2e-5)
        assert many.captured.shape[0] == launch.num_tokens == order.num_tokens + 3 * len(absent)
        if one.logit_hidden is not None:
            assert many.logit_hidden is not None
            rows = torch.from_numpy(np.repeat(real, launch.num_logits))
            torch.testing.assert_close(many.logit_hidden[rows], one.logit_hidden, rtol=2e-5, atol=2e-5)
    for _, kv in shared:  # every rank's cache holds the step, and nothing of what did not run
        torch.testing.assert_close(cached(kv), cached(alone[1]), rtol=2e-5, atol=2e-5)
    assert len(set(ranks.calls)) == 1
    assert all(output.logit_hidden is None and output.captured is None for output in shared[-1][0]) or num_ranks == 1


def test_a_step_of_which_nothing_runs(decoder: Decoder) -> None:
    """Every collective takes place, nothing is written."""
    order = LaunchOrder(np.array([0, 7]), np.array([19, 3]), np.array([1, 3]), np.array([True, False]), 16, LAYERS)

    def run(group: RankGroup) -> KVCache:
        kv = decoder.make_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
        forward = launch_forward(decoder, kv, group)
        forward.run(order, (lambda data: data.fill_with_nothing()) if group.rank == 0 else None)
        return kv

    ranks = ThreadRanks(2)
    for kv in ranks.run(run):
        assert not cached(kv).count_nonzero()
    assert ranks.calls == [decoder.config.num_layers + 3] * 2


@pytest.mark.parametrize("width", [5, 16, 20])
def test_what_rank_0_sends_is_what_its_device_prepared(width: int) -> None:
    """Tables narrower and wider than what is sent; a number of rows and of tokens that is odd."""
    buffers = StepBuffers(Sizes(8, 8, 32, 4, width, 400), CPU)
    shape = buffers.shape(3, 11, 2, 9)
    shape.input_ids.copy_(torch.arange(100, 111))
    shape.positions.copy_(torch.arange(50, 61))
    shape.metadata.slot_mapping.copy_(torch.arange(11) - 1)
    shape.metadata.seq_lens.copy_(torch.tensor([59, 0, 61]))
    shape.metadata.block_tables.copy_(torch.arange(3 * width).view(3, width))
    lens = np.array([9, 1, 1])
    order = LaunchOrder(np.array([50, 4, 60]), lens, lens, lens > 1, columns_of(4), ())
    data = StepData.empty(order, CPU)
    data.words.fill_(-7)
    data.fill(shape, torch.tensor([PAD_SLOT]))
    received = StepData.empty(order, CPU)
    received.words.copy_(data.words)
    assert received.input_ids.tolist() == list(range(100, 111))
    assert received.positions.tolist() == list(range(50, 61))
    assert received.slots.tolist() == [*range(-1, 10), PAD_SLOT]
    assert received.seq_lens.tolist() == [59, 0, 61]
    assert received.block_tables.shape == (3, 16)
    for row, table in enumerate(received.block_tables.tolist()):
        assert table == [*range(row * width, row * width + min(width, 16)), *[0] * (16 - width)]


def rank_forward(
    decoder: Decoder, run: Callable[..., ShardedOutput], lost: bool = False, captures: bool = False
) -> RankStepForward:
    """Rank 0's, with ranks that take everything and do nothing. `published`: the steps that were."""
    buffers = StepBuffers(Sizes(8, 8, 32, 4, 8, 400), CPU)
    published: list[int] = []
    board = SimpleNamespace(num_ranks=2, publish=lambda order, seq, *rest: published.append(seq), published=published)
    tables = SimpleNamespace(table=torch.zeros(8, 8, dtype=torch.int32))
    memory = StepMemory(buffers, cast(Any, None), cast(Any, tables))
    return RankStepForward(
        decoder,
        StepFrame(cast(Any, None), memory, BLOCK_SIZE, MAX_LEN, None),
        Padding((3, 1), buffers.sizes, captures),
        CpuGraphs(),
        Lead(cast(Any, SimpleNamespace(lost=lost, board=board, loss_behind=lambda _: None)), 5.0),
        cast(Any, SimpleNamespace(run=run)),
        LapWatch(CPU, 0),
    )


def test_an_error_behind_the_order_loses_the_ranks(decoder: Decoder) -> None:
    def fails(*arguments: Any) -> ShardedOutput:
        raise ValueError("no such luck")

    batch = cast(Any, SimpleNamespace(host=HostRows([4], [2], [1], [False])))
    shape = StepBuffers(Sizes(8, 8, 32, 4, 8, 400), CPU).shape(1, 2, 1, 2)
    forward = rank_forward(decoder, fails)
    with pytest.raises(RanksLost, match="step 1 over 2 ranks failed: no such luck"):
        forward._run(shape, (), batch)
    gone = rank_forward(decoder, fails, lost=True)
    with pytest.raises(RanksLost, match="a rank is gone"):
        gone._run(shape, (), batch)
    assert gone._lead._ranks.board.published == []  # type: ignore[attr-defined]
    nothing = replace(shape, num_tokens=0)
    assert forward._run(nothing, (), batch).logits is None
    assert forward._lead._ranks.board.published == [1]  # type: ignore[attr-defined]


def test_all_sizes_are_warmed_and_padded_where_they_can_be_captured(decoder: Decoder) -> None:
    for captures in (False, True):
        forward = rank_forward(decoder, lambda *arguments: cast(Any, None), captures=captures)
        assert forward.padding.warmed == (1, 3)
        assert forward.padding.padded_rows(2, 1) == (3 if captures else None)


def test_an_order_names_bounds() -> None:
    order = make_launch_order(HostRows([4, 0, 300], [2, 0, 5], [1, 0, 0], [False, False, True]), LAYERS, BLOCK_SIZE)
    assert order.context_lens.tolist() == [4, 0, 300]
    assert order.num_tokens == 7
    assert order.splits.tolist() == [False, False, True]
    assert order.num_columns == 80  # 77 blocks
    assert order.hidden_layers == LAYERS


def test_laps_are_of_their_own_steps() -> None:
    watch = LapWatch(CPU, 0)
    with watch.running():
        torch.ones(1000, 1000).sum()
    first = watch.cut()
    second = watch.cut()
    assert first.take_ms() > 0
    assert second.take_ms() == 0


def test_laps_on_a_gpu_use_their_events_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    clock = [0.0]

    class Driver:
        def make(self, blocking: bool) -> Any:
            made.append(SimpleNamespace(at=0.0))
            return made[-1]

        def record(self, event: Any) -> None:
            clock[0] += 3.0
            event.at = clock[0]

        def between(self, first: Any, last: Any) -> float:
            return float(last.at - first.at)

    watch = LapWatch(CPU, 0)
    monkeypatch.setattr(watch, "_recorder", Driver())
    laps = []
    for _ in range(2):  # two steps under way
        for _ in range(2):
            with watch.running():
                pass
        laps.append(watch.cut())
    assert len(made) == 8
    assert [lap.take_ms() for lap in laps] == [6.0, 6.0]
    for _ in range(4):
        with watch.running():
            pass
    assert watch.cut().take_ms() == 12.0
    for _ in range(3):  # steps that nobody asks
        for _ in range(4):
            with watch.running():
                pass
        watch.cut().drop()
    assert len(made) == 8
    assert watch.num_free == 4


def test_a_group_of_one_sends_nothing() -> None:
    words = torch.arange(3)
    SoloGroup().broadcast(words)
    assert words.tolist() == [0, 1, 2]

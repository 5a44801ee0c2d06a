"""The board between two threads: orders in turn, a reader that is slow, one that is out of step, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine.channel.memory import ExportedMemory
from engine.errors import ChannelError, RanksLost
from target_service.pcp.board import Board, ExportedBoard, RankState
from target_service.pcp.order import LaunchOrder, StepOrder, most_bytes, most_launch_bytes

ORDER_BYTES = most_bytes(4, 16, 8, 2)


def order_of(token: int) -> StepOrder:
    lens = np.array([2, 1], dtype=np.int64)
    return StepOrder(
        context_lens=np.zeros(2, dtype=np.int64),
        query_lens=lens,
        num_logits=lens,
        splits=np.array([True, False]),
        input_ids=np.full(3, token, dtype=np.int64),
        block_tables=np.ones((2, 1), dtype=np.int32),
        hidden_layers=(token % 2,),
    )


def launch_of(num_columns: int) -> LaunchOrder:
    return LaunchOrder(
        context_lens=np.array([5, 0, num_columns], dtype=np.int64),
        query_lens=np.array([2, 0, 1], dtype=np.int64),
        num_logits=np.array([1, 0, 1], dtype=np.int64),
        splits=np.array([True, False, False]),
        num_columns=num_columns,
        hidden_layers=(2, 0),
    )


def never() -> bool:
    return False


@pytest.fixture
def exported() -> Iterator[ExportedBoard]:
    board = ExportedBoard(3, ORDER_BYTES)
    yield board
    board.close()


def test_every_rank_takes_every_order(exported: ExportedBoard) -> None:
    def follow(rank: int) -> list[int]:
        board = Board.attach(exported.name, 3, ORDER_BYTES)
        taken = []
        for seq in range(1, 41):
            order = board.take(rank, seq, 10)
            assert order is not None
            assert order.hidden_layers == (seq % 2,)
            taken.append(int(order.input_ids[2]))
            if seq % 7 == rank:
                time.sleep(0.002)  # a rank that is slower now and then: nothing is written over
        return taken

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(follow, rank) for rank in (1, 2)]
        for seq in range(1, 41):
            exported.board.publish(order_of(seq), seq, 10, never)
        assert [future.result(20) for future in found] == [list(range(1, 41))] * 2


def test_a_rank_that_takes_nothing_holds_rank_0_up_no_longer_than_its_deadline(exported: ExportedBoard) -> None:
    for seq in (1, 2):
        exported.board.publish(order_of(seq), seq, 0.2, never)
    with pytest.raises(RanksLost, match="rank 1 did not take step 1"):
        exported.board.publish(order_of(3), 3, 0.2, never)
    began = time.monotonic()
    with pytest.raises(RanksLost):
        exported.board.publish(order_of(3), 3, 60, lambda: True)
    assert time.monotonic() - began < 2


def test_a_deeper_board_holds_as_many_launches() -> None:
    """Rank 0 goes on while the others have taken none of them, as deep as steps may be under way."""
    order_bytes = most_launch_bytes(3, 2)
    exported = ExportedBoard(2, order_bytes, depth=4)
    try:
        board = Board.attach(exported.name, 2, order_bytes, 4)
        orders = [launch_of(columns) for columns in range(16, 96, 16)]
        for seq, order in enumerate(orders[:4], start=1):
            exported.board.publish(order, seq, 0.2, never)
        with pytest.raises(RanksLost, match="rank 1 did not take step 1"):
            exported.board.publish(orders[4], 5, 0.2, never)
        for seq, order in enumerate(orders, start=1):
            taken = board.take_launch(1, seq, 1)
            assert taken is not None
            assert taken.num_columns == order.num_columns
            assert (taken.num_rows, taken.num_tokens, taken.hidden_layers) == (3, 3, (2, 0))
            for name in ("context_lens", "query_lens", "num_logits", "splits"):
                assert getattr(taken, name).tolist() == getattr(order, name).tolist()
                assert getattr(taken, name).dtype == getattr(order, name).dtype
            if seq == 1:
                exported.board.publish(orders[4], 5, 0.2, never)
    finally:
        exported.close()


def test_a_rank_out_of_step_is_told(exported: ExportedBoard) -> None:
    exported.board.publish(order_of(1), 1, 1, never)
    exported.board.publish(order_of(2), 2, 1, never)
    board = Board.attach(exported.name, 3, ORDER_BYTES)
    exported.board._advance(1, 4)  # the counter, without an order
    with pytest.raises(RanksLost, match="at step 4 and finds the order of step 2"):
        board.take(1, 4, 1)


def test_states_and_the_end(exported: ExportedBoard) -> None:
    boards = [Board.attach(exported.name, 3, ORDER_BYTES) for _ in range(2)]
    assert not exported.board.wait_all(RankState.LOADED, 0.01)
    for rank, board in enumerate(boards, start=1):
        board.set_state(rank, RankState.LOADED)
        assert not board.wait_joining(0.01)
    assert exported.board.wait_all(RankState.LOADED, 0)
    assert not exported.board.wait_all(RankState.JOINED, 0.01)
    exported.board.start_joining()
    assert all(board.wait_joining(1) for board in boards)
    assert exported.board.last_beat_s(1) == 0
    boards[0].beat(1)
    assert time.monotonic() - exported.board.last_beat_s(1) < 5
    closing = threading.Timer(0.1, exported.close)
    closing.start()
    began = time.monotonic()
    assert boards[0].take(1, 1, 30) is None
    assert time.monotonic() - began < 10
    assert boards[1].closed
    closing.join()


def test_memory_that_is_no_board_is_refused() -> None:
    memory = ExportedMemory(Board.num_bytes(3, ORDER_BYTES))
    try:
        with pytest.raises(RanksLost, match="is not a board"):
            Board.attach(memory.name, 3, ORDER_BYTES)
        with pytest.raises(ChannelError, match="bytes"):
            Board.attach(memory.name, 3, ORDER_BYTES + 64)
    finally:
        memory.close()

"""Do seats, block table and pool tell the same story, whatever requests do?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import NULL_BLOCK, BlockPool
from engine.errors import IntegrityError
from engine.request_blocks import RequestBlocks


def make(num_blocks: int = 20, block_size: int = 4, shift: int = 0, max_len: int = 32) -> RequestBlocks:
    return RequestBlocks(BlockPool(num_blocks, block_size, shift=shift), num_seats=4, max_len=max_len)


def test_reserve_grows_by_whole_blocks_and_the_table_shows_it() -> None:
    blocks = make()
    assert blocks.reserve(1, 5)
    assert blocks.capacity(1) == 8
    assert blocks.reserve(1, 8)
    assert len(blocks.blocks(1)) == 2
    assert blocks.reserve(1, 9)
    assert tuple(blocks.sync()[1, :3].tolist()) == blocks.blocks(1)
    assert blocks.sync()[1, 3:].eq(NULL_BLOCK).all()
    assert blocks.sync().dtype == torch.int32
    assert blocks.sync()[0].eq(NULL_BLOCK).all()
    blocks.check_integrity()


def test_reserve_takes_nothing_when_pool_or_table_is_too_small() -> None:
    blocks = make(num_blocks=4)
    assert not blocks.reserve(0, 13)
    assert blocks.capacity(0) == 0
    assert not make(num_blocks=40).reserve(0, 33)
    blocks.check_integrity()


def test_prefix_is_adopted_trimmed_and_released() -> None:
    blocks = make()
    prompt = list(range(14))
    assert blocks.adopt(0, prompt) == 0
    assert blocks.reserve(0, len(prompt))
    blocks.register_written(0, prompt, written_len=7)
    assert blocks.adopt(1, prompt) == 4  # only the first block was written whole
    blocks.register_written(0, prompt)
    assert blocks.adopt(2, prompt) == 12
    assert blocks.blocks(2) == blocks.blocks(0)[:3]
    blocks.trim(2, 4)  # the other service had a shorter hit
    assert blocks.blocks(2) == blocks.blocks(0)[:1]
    blocks.check_integrity()
    assert blocks.reserve(2, 14)
    assert set(blocks.blocks(2)[1:]).isdisjoint(blocks.blocks(0))
    blocks.check_integrity()
    for seat in (0, 1, 2):
        blocks.release(seat)
        blocks.release(seat)
    blocks.check_integrity()
    assert blocks.pool.num_free == blocks.pool.num_usable
    assert blocks.adopt(3, prompt) == 12  # cached blocks outlive their request


def test_release_registers_what_was_written() -> None:
    blocks = make()
    assert blocks.reserve(0, 11)
    blocks.release(0, list(range(9)))
    assert blocks.adopt(1, list(range(12))) == 8


def test_release_without_tokens_registers_nothing() -> None:
    blocks = make()
    assert blocks.reserve(0, 11)
    blocks.release(0)
    assert blocks.pool.num_cached == 0


def test_with_shift_a_block_waits_for_the_token_after_it() -> None:
    blocks = make(shift=1)
    tokens = list(range(9))
    assert blocks.reserve(0, 9)
    blocks.register_written(0, tokens[:8])
    assert blocks.pool.num_cached == 1
    blocks.register_written(0, tokens, written_len=8)  # the anchor is committed, its KV not yet written
    assert blocks.pool.num_cached == 2
    assert blocks.adopt(1, [*tokens[:8], 77]) == 4
    assert blocks.adopt(2, tokens) == 8


def test_a_seat_adopts_only_while_it_is_empty() -> None:
    blocks = make()
    assert blocks.reserve(0, 1)
    with pytest.raises(IntegrityError, match="seat 0 already holds blocks"):
        blocks.adopt(0, [1, 2])


def test_integrity_check_sees_a_table_that_disagrees() -> None:
    blocks = make()
    assert blocks.reserve(0, 5)
    blocks.table_np[0, 1] = 9
    with pytest.raises(IntegrityError, match="seat 0"):
        blocks.check_integrity()


def test_a_device_table_is_brought_up_to_date_by_sync_alone() -> None:
    blocks = make()
    blocks.table = torch.zeros(4, blocks.max_blocks, dtype=torch.int32)  # as on another device: a memory of its own
    assert blocks.reserve(2, 6)
    assert blocks.table.eq(0).all()
    assert tuple(blocks.sync()[2, :2].tolist()) == blocks.blocks(2)
    blocks.release(2)
    assert blocks.sync().eq(NULL_BLOCK).all()


actions = st.lists(
    st.tuples(
        st.sampled_from(["admit", "grow", "commit", "trim", "release"]),
        st.integers(0, 3),
        st.integers(0, 30),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(actions, st.integers(0, 1), st.integers(4, 16))
def test_any_order_of_actions_keeps_the_accounts(plan: list[tuple[str, int, int]], shift: int, num_blocks: int) -> None:
    blocks = make(num_blocks=num_blocks, shift=shift)
    prompts: dict[int, list[int]] = {}
    written: dict[int, int] = {}
    for action, seat, amount in plan:
        if action == "admit" and seat not in prompts:
            prompts[seat] = [amount % 2] * 6 + list(range(26))
            written[seat] = blocks.adopt(seat, prompts[seat])
        elif seat not in prompts:
            continue
        elif action == "grow":
            blocks.reserve(seat, amount)
        elif action == "commit":
            written[seat] = max(written[seat], min(amount, blocks.capacity(seat)))
            blocks.register_written(seat, prompts[seat], written[seat])
        elif action == "trim" and amount >= written[seat]:
            blocks.trim(seat, amount)
        elif action == "release":
            blocks.release(seat, prompts[seat][: written[seat]])
            del prompts[seat], written[seat]
        blocks.check_integrity()
    for seat in list(prompts):
        blocks.release(seat)
    blocks.check_integrity()
    assert blocks.pool.num_free == blocks.pool.num_usable

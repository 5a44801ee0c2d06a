"""Does the block pool never lose, double or wrongly share a block?"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from engine.block_pool import NULL_BLOCK, BlockPool, hash_block
from engine.errors import IntegrityError


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Run a request of `tokens` through the pool as a service does: match, allocate, register, and keep the blocks."""
    blocks, hashes = pool.match(tokens)
    more = pool.allocate(-(-len(tokens) // pool.block_size) - len(blocks))
    assert more is not None
    blocks = blocks + more
    parent = hashes[-1] if hashes else None
    for index in range(len(hashes), len(blocks)):
        covered = pool.covered_tokens(index, tokens)
        if covered is None:
            break
        parent = pool.register(blocks[index], parent, covered)
    return blocks


def hit_tokens(pool: BlockPool, tokens: list[int]) -> int:
    blocks, _ = pool.match(tokens)
    pool.free(blocks)
    return len(blocks) * pool.block_size


def test_a_prefix_is_shared_and_one_token_is_always_left() -> None:
    pool = BlockPool(20, 4)
    tokens = list(range(100, 112))
    first = fill(pool, tokens)
    assert hit_tokens(pool, tokens) == 8  # 12 would leave nothing to run
    assert hit_tokens(pool, [*tokens, 1]) == 12
    assert hit_tokens(pool, [*tokens[:8], 1, 2, 3, 4, 5]) == 8
    assert hit_tokens(pool, [1, *tokens]) == 0
    blocks, _ = pool.match([*tokens, 1])
    assert blocks == first
    assert [pool.ref_count(block) for block in blocks] == [2, 2, 2]
    pool.free(blocks)
    pool.free(first)
    assert pool.num_free == pool.num_usable
    pool.check_integrity()


def test_a_block_is_not_hit_before_it_is_registered() -> None:
    pool = BlockPool(20, 4)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert hit_tokens(pool, list(range(12))) == 0


def test_shift_wants_the_token_after_the_block_to_agree() -> None:
    pool = BlockPool(20, 4, shift=1)
    tokens = list(range(100, 109))
    pool.free(fill(pool, tokens))
    assert pool.num_cached == 2  # the block of positions 4..7 depends on tokens 0..8: all nine are there
    assert hit_tokens(pool, tokens) == 8
    assert hit_tokens(pool, tokens[:8]) == 4  # eight tokens cannot tell what follows position 7
    assert hit_tokens(pool, [*tokens[:8], 999]) == 4  # and here it is another token
    assert hit_tokens(pool, [*tokens[:4], 999, *tokens[5:]]) == 0
    assert hit_tokens(pool, [999, *tokens[1:]]) == 0  # the first token counts, though no block starts at it


def test_shift_registers_no_block_whose_next_token_is_unknown() -> None:
    pool = BlockPool(20, 4, shift=1)
    fill(pool, list(range(8)))
    assert pool.num_cached == 1


def test_without_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(20, 4, enable_prefix_cache=False)
    pool.free(fill(pool, list(range(12))))
    assert pool.num_cached == 0
    assert hit_tokens(pool, [*range(12), 1]) == 0


def test_eviction_takes_the_least_recently_used_and_the_tail_of_a_chain_first() -> None:
    pool = BlockPool(7, 2)
    old, new = list(range(10, 16)), list(range(20, 26))
    pool.free(fill(pool, old))
    pool.free(fill(pool, new))
    assert pool.num_free == 6
    assert pool.num_cached == 6
    taken = pool.allocate(2)  # nothing blank is left: the two last blocks of `old` go
    assert taken is not None
    assert hit_tokens(pool, [*old, 0]) == 2
    assert hit_tokens(pool, [*new, 0]) == 6
    pool.free(taken)
    assert hit_tokens(pool, [*old, 0]) == 2  # a hit makes it recent again
    taken = pool.allocate(5)
    assert taken is not None
    assert hit_tokens(pool, [*old, 0]) == 2
    pool.check_integrity()


def test_allocate_takes_nothing_when_there_is_not_enough() -> None:
    pool = BlockPool(4, 2)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []
    blocks = pool.allocate(3)
    assert blocks is not None
    assert NULL_BLOCK not in blocks
    assert pool.allocate(1) is None


@pytest.mark.parametrize("block", [NULL_BLOCK, 3, 99, -1])
def test_double_free_is_refused(block: int) -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.free([3])
    with pytest.raises(IntegrityError, match=f"block {block} is not in use"):
        pool.free([block])


def test_a_free_block_cannot_be_registered() -> None:
    pool = BlockPool(4, 2)
    with pytest.raises(IntegrityError, match="cannot be registered"):
        pool.register(2, None, [1, 2])


def test_an_equal_block_that_is_registered_already_stays() -> None:
    pool = BlockPool(10, 2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    assert pool.register(first[0], None, [1, 2]) == pool.register(second[0], None, [1, 2])
    blocks, _ = pool.match([1, 2, 3])
    assert blocks == first
    assert not pool.is_registered(second[0])


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "shift", "message"),
    [(1, 4, 0, "num_blocks"), (4, 0, 0, "block_size"), (4, 2, -1, "shift")],
)
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int, shift: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockPool(num_blocks, block_size, shift=shift)


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(6, 2)
    pool._blank.pop()
    with pytest.raises(IntegrityError, match="5 blocks expected"):
        pool.check_integrity()


def test_hashes_depend_on_the_whole_chain() -> None:
    assert hash_block(None, [1, 2]) != hash_block(None, [2, 1])
    assert hash_block(hash_block(None, [1, 2]), [3, 4]) != hash_block(hash_block(None, [9, 2]), [3, 4])


class PoolMachine(RuleBasedStateMachine):
    """Requests come and go in any order; the model knows which tokens every block's KV stands for."""

    requests = Bundle("requests")

    @initialize(num_blocks=st.integers(2, 14), block_size=st.integers(1, 3), shift=st.integers(0, 1))
    def make(self, num_blocks: int, block_size: int, shift: int) -> None:
        self.pool = BlockPool(num_blocks, block_size, shift=shift)
        # What a forward would have left in each block: all tokens that its KV depends on.
        self.contents: dict[int, tuple[int, ...]] = {}
        self.live: dict[int, list[int]] = {}
        self.next_id = 0

    @rule(target=requests, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def start(self, tokens: list[int]) -> object:
        pool, size, shift = self.pool, self.pool.block_size, self.pool.shift
        free_before = pool.num_free
        blocks, hashes = pool.match(tokens)
        assert len(blocks) * size < len(tokens)
        for index, block in enumerate(blocks):
            assert self.contents[block] == tuple(tokens[: (index + 1) * size + shift]), "hit a block of other tokens"
        missing = -(-len(tokens) // size) - len(blocks)
        more = pool.allocate(missing)
        if more is None:
            assert pool.num_free < missing
            pool.free(blocks)
            assert pool.num_free == free_before
            return multiple()
        assert not set(more) & {block for held in self.live.values() for block in held}
        blocks = blocks + more
        parent = hashes[-1] if hashes else None
        for index in range(len(hashes), len(blocks)):
            covered = pool.covered_tokens(index, tokens)
            self.contents[blocks[index]] = tuple(tokens[: (index + 1) * size + shift])
            if covered is not None:
                parent = pool.register(blocks[index], parent, covered)
        self.live[self.next_id] = blocks
        self.next_id += 1
        return self.next_id - 1

    @rule(request=consumes(requests))
    def finish(self, request: int) -> None:
        self.pool.free(self.live.pop(request))

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = [block for blocks in self.live.values() for block in blocks]
        assert self.pool.num_free == self.pool.num_usable - len(set(held))
        for block in set(held):
            assert self.pool.ref_count(block) == held.count(block)


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPoolMachine = PoolMachine.TestCase

"""Which blocks of the KV cache are free, used, or kept because a later prompt may start the same way?

Reference-counted blocks with a prefix cache: a full block whose KV is written can be registered under a hash of every
token its KV depends on; a later request whose tokens start alike takes the same block instead of computing it. A
registered block that nobody uses stays until its place is needed (least recently used first).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from engine.errors import IntegrityError

NULL_BLOCK = 0

BlockHash = bytes


def hash_block(parent_hash: BlockHash | None, tokens: Sequence[int]) -> BlockHash:
    """Hash of a block: its own tokens, chained to the hash of the block before it (None for the first).

    128 bits of BLAKE2b, so that two different prefixes meeting in one hash is not a case to plan for.
    """
    digest = hashlib.blake2b(parent_hash or b"", digest_size=16)
    digest.update(np.asarray(tokens, dtype=np.int64).tobytes())
    return digest.digest()


class BlockPool:
    """Owner of the blocks 0 .. num_blocks - 1 of one KV cache. Used by one thread.

    Block 0 is the null block: never handed out, so that a zeroed block table is harmless.

    shift: how many tokens *after* a position its KV depends on. 0 for a target or a plain draft model. 1 for a
    drafter that pairs the hidden state of position p with token p + 1: the KV at a block's last position depends on
    the token that follows the block, so block i covers the tokens `[i * block_size + shift, (i + 1) * block_size +
    shift)` (the first block also the `shift` tokens before those), and is only hit when the token after it agrees
    too.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_cache: bool = True, shift: int = 0) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if shift < 0:
            raise ValueError(f"shift must not be negative, got {shift}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.shift = shift
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        # Two kinds of free blocks: blank ones (used first), and registered ones in the order in which they would be
        # evicted.
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """How many blocks can be in use at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, evictable cached ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Registered blocks, in use or not."""
        return len(self._by_hash)

    def covered_tokens(self, index: int, token_ids: Sequence[int]) -> Sequence[int] | None:
        """The tokens that the hash of a request's block `index` covers, or None while token_ids is too short for it."""
        end = (index + 1) * self.block_size + self.shift
        if end > len(token_ids):
            return None
        return token_ids[index * self.block_size + self.shift if index else 0 : end]

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], list[BlockHash]]:
        """Take a reference on the registered blocks that hold the KV of the longest prefix of token_ids.

        Never covers all of token_ids: at least one token is left to run. Returns the blocks and their hashes, in order.
        """
        blocks: list[int] = []
        hashes: list[BlockHash] = []
        if not self.enable_prefix_cache:
            return blocks, hashes
        parent: BlockHash | None = None
        for index in range((len(token_ids) - 1) // self.block_size):
            tokens = self.covered_tokens(index, token_ids)
            if tokens is None:
                break
            parent = hash_block(parent, tokens)
            block = self._by_hash.get(parent)
            if block is None:
                break
            blocks.append(block)
            hashes.append(parent)
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1
        return blocks, hashes

    def allocate(self, num: int) -> list[int] | None:
        """`num` blocks with one reference each, or None (and nothing taken) when fewer are free. Contents are stale."""
        if num < 0:
            raise ValueError(f"cannot allocate {num} blocks")
        if num > self.num_free:
            return None
        blocks = []
        for _ in range(num):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference on each of a request's blocks, given in request order. IntegrityError on a double free."""
        # The last block of a chain is evicted first: without its parents a block can never be hit.
        for block in reversed(list(blocks)):
            if not NULL_BLOCK < block < self.num_blocks or self._ref_counts[block] == 0:
                raise IntegrityError(f"block {block} is not in use and cannot be freed")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._evictable[block] = None

    def register(self, block: int, parent_hash: BlockHash | None, tokens: Sequence[int]) -> BlockHash:
        """Offer a block to later requests, *after* its KV has been written. tokens: `covered_tokens` of the block.

        Returns its hash, for the next block's `parent_hash`. Where an equal block is registered already, that one
        stays.
        """
        if self._ref_counts[block] == 0:
            raise IntegrityError(f"block {block} is not in use and cannot be registered")
        block_hash = hash_block(parent_hash, tokens)
        if self.enable_prefix_cache and self._hashes[block] is None and block_hash not in self._by_hash:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block
        return block_hash

    def is_registered(self, block: int) -> bool:
        return self._hashes[block] is not None

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def check_integrity(self) -> None:
        """IntegrityError unless every block is exactly one of null, blank, evictable, in use, and the hash maps
        agree.
        """
        blank, evictable = set(self._blank), set(self._evictable)
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        problems = []
        if len(blank) != len(self._blank):
            problems.append("a block is blank twice")
        if NULL_BLOCK in blank | evictable | used:
            problems.append("the null block was handed out")
        if blank & evictable or blank & used or evictable & used:
            problems.append("a block is free and in use, or free in two ways")
        if len(blank) + len(evictable) + len(used) != self.num_usable:
            problems.append(f"{self.num_usable} blocks expected, {len(blank)} + {len(evictable)} + {len(used)} found")
        if any(count < 0 for count in self._ref_counts):
            problems.append("a reference count is negative")
        registered = {block: value for block, value in enumerate(self._hashes) if value is not None}
        if registered != {block: value for value, block in self._by_hash.items()}:
            problems.append("block hashes and the hash index disagree")
        if evictable - registered.keys() or blank & registered.keys():
            problems.append("a cached free block is not registered, or a blank one is")
        if problems:
            raise IntegrityError("; ".join(problems))

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is None:
            raise IntegrityError(f"block {block} is not registered")
        del self._by_hash[block_hash]
        self._hashes[block] = None

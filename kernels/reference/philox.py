"""Where does random noise come from, so that it is the same whatever runs beside a row?

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a counter-based generator: key =
the row's 64-bit seed, counter = (index // 4, position low, position high, stream). Noise is therefore a pure function
of (seed, absolute position, stream, index), with no state to keep or to roll back. 32-bit words live in the low half
of int64 tensors, since torch has no uint32 arithmetic everywhere.
"""

from __future__ import annotations

import torch

# Streams: what a noise value is for. Two purposes never share one, or drafting noise would leak into verification.
DRAFT = 0  # the drafter draws a draft token
ACCEPT = 1  # whether a draft is accepted
RESIDUAL = 2  # the token that replaces a rejected draft
TARGET = 3  # the target draws a token of its own

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
# uniform() never returns 1: this is the largest float32 below it.
_BELOW_ONE = 1.0 - 2.0**-24

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten Philox rounds. Every tensor int64 holding a value in [0, 2^32); shapes broadcast. Returns four such words."""
    shape = torch.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    # In place from here on: fresh buffers each round would cost more than the arithmetic.
    c0, c1, c2, c3 = (word.expand(shape).clone() for word in counter)
    product_0, product_1 = torch.empty_like(c0), torch.empty_like(c0)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product may pass 2^63 and come out negative: its bits are right all the same, and the mask drops the copies
        # of the sign that the shift brings in.
        torch.mul(c0, _MULTIPLIER_0, out=product_0)
        torch.mul(c2, _MULTIPLIER_1, out=product_1)
        torch.bitwise_right_shift(product_1, 32, out=c0)
        c0.bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        torch.bitwise_right_shift(product_0, 32, out=c2)
        c2.bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        torch.bitwise_and(product_1, _MASK, out=c1)
        torch.bitwise_and(product_0, _MASK, out=c3)
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def random_words(seeds: torch.Tensor, positions: torch.Tensor, stream: int, num: int) -> torch.Tensor:
    """`num` random 32-bit words for each (seed, position). seeds, positions: [N] int64. Returns [N, num] int64 in [0,
    2^32).
    """
    index = torch.arange((num + 3) // 4, dtype=torch.int64, device=seeds.device)[None, :]
    seeds, positions = seeds[:, None], positions[:, None]
    counter = (index, positions & _MASK, (positions >> 32) & _MASK, torch.full_like(positions, stream))
    words = philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    return torch.stack(words, dim=-1).flatten(1)[:, :num]


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int, num: int) -> torch.Tensor:
    """Uniform noise in the open interval (0, 1), fine near 0 (steps of 2^-32), at most 1 - 2^-24.

    seeds: [N] int64, the bit pattern of a uint64; positions: [N] int64, absolute token positions; stream: one of this
    module's constants. Returns [N, num] float32; element i depends on (seed, position, stream, i) alone.
    """
    words = random_words(seeds, positions, stream, num).to(torch.float32)
    return words.mul_(2.0**-32).add_(2.0**-33).clamp_(max=_BELOW_ONE)

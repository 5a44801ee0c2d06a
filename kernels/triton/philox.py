"""Where does random noise come from? See `reference.philox`: the same generator, counters and keys, word for word.

Four neighbouring values come from one counter, so noise is made in whole blocks, interleaved in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference.philox import ACCEPT as ACCEPT
from kernels.reference.philox import DRAFT as DRAFT
from kernels.reference.philox import RESIDUAL as RESIDUAL
from kernels.reference.philox import TARGET as TARGET

_BLOCK = 1024


@triton.jit
def words_block(seed, position, stream, first_counter, COUNTERS: tl.constexpr):
    """Random words 4 * first_counter .. 4 * (first_counter + COUNTERS) of (seed, position, stream), as [4 * COUNTERS]
    uint32. seed, position: int64 scalars; stream: int32 scalar.
    """
    counters = first_counter + tl.arange(0, COUNTERS)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros([COUNTERS], dtype=tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counters.to(tl.uint32), zeros + low, zeros + high, zeros + stream.to(tl.uint32))
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def uniform_block(seed, position, stream, first_counter, COUNTERS: tl.constexpr):
    """Uniform noise in (0, 1), float32 [4 * COUNTERS]: `uniform` of the words of `words_block`."""
    words = words_block(seed, position, stream, first_counter, COUNTERS).to(tl.float32)
    # At most 1 - 2^-24, the largest float32 below 1.
    return tl.minimum(words * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.9999999403953552)


@triton.jit
def gumbel_block(seed, position, stream, first_counter, COUNTERS: tl.constexpr):
    """Standard Gumbel noise, always finite, float32 [4 * COUNTERS]."""
    u = uniform_block(seed, position, stream, first_counter, COUNTERS)
    # -log(1 - u) loses its digits where u is small, which is where the largest values come from: there its series.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.03, series, -tl.log(1.0 - u)))


@triton.jit(do_not_specialize=["stream", "num"])
def _noise(seeds_ptr, positions_ptr, out_ptr, stream, num, KIND: tl.constexpr, COUNTERS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    columns = block * (4 * COUNTERS) + tl.arange(0, 4 * COUNTERS)
    stream_word = tl.full([], 0, tl.int32) + stream
    if KIND == "words":
        values = words_block(seed, position, stream_word, block * COUNTERS, COUNTERS).to(tl.int64)
    elif KIND == "uniform":
        values = uniform_block(seed, position, stream_word, block * COUNTERS, COUNTERS)
    else:
        values = gumbel_block(seed, position, stream_word, block * COUNTERS, COUNTERS)
    tl.store(out_ptr + row * num + columns, values, mask=columns < num)


def make_noise(seeds: torch.Tensor, positions: torch.Tensor, stream: int, num: int, kind: str) -> torch.Tensor:
    """[N, num] of `kind`: words (int64), uniform or gumbel (float32)."""
    rows = seeds.shape[0]
    dtype = torch.int64 if kind == "words" else torch.float32
    out = torch.empty((rows, num), dtype=dtype, device=seeds.device)
    if out.numel() == 0:
        return out
    block = max(4, min(_BLOCK, triton.next_power_of_2(num)))
    _noise[(rows, triton.cdiv(num, block))](
        seeds, positions, out, stream, num, KIND=kind, COUNTERS=block // 4, num_warps=4
    )
    return out


def random_words(seeds: torch.Tensor, positions: torch.Tensor, stream: int, num: int) -> torch.Tensor:
    """See `reference.philox.random_words`. seeds, positions: contiguous."""
    return make_noise(seeds, positions, stream, num, "words")


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int, num: int) -> torch.Tensor:
    """See `reference.philox.uniform`. seeds, positions: contiguous."""
    return make_noise(seeds, positions, stream, num, "uniform")

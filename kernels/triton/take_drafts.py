"""Which rows of a step run, and which drafts do they verify? See `reference.take_drafts`. One program per row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.forms import Form
from kernels.triton.prepared import Launch, Launcher, launch, prepare


@triton.jit
def _intact(header_ptr, seq, epoch, num_reply_rows):
    """Whether the reply's header is the one meant. Volatile: the drafter may be writing."""
    same = tl.load(header_ptr, volatile=True) == seq
    same = same & (tl.load(header_ptr + 1, volatile=True) == epoch)
    return same & (tl.load(header_ptr + 2, volatile=True) == num_reply_rows)


@triton.jit(
    do_not_specialize=[
        *("seq", "epoch", "num_reply_rows", "vocab_size", "query_stride", "max_reply_rows", "tokens_stride", "width")
    ]
)
def _take(
    header_ptr,
    tokens_ptr,
    has_probs_ptr,
    seq,
    epoch,
    num_reply_rows,
    vocab_size,
    query_stride,
    places_ptr,
    seats_ptr,
    query_lens_ptr,
    limits_ptr,
    known_lens_ptr,
    context_lens_ptr,
    ring_header_ptr,
    out_seats_ptr,
    out_seq_lens_ptr,
    out_drafts_ptr,
    out_num_drafts_ptr,
    out_start_positions_ptr,
    out_has_probs_ptr,
    out_missed_ptr,
    max_reply_rows,
    tokens_stride,
    width,
    REPLY_WIDTH: tl.constexpr,
    WITH_REPLY: tl.constexpr,
    WITH_PROBS: tl.constexpr,
    WITH_RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if WITH_RING:
        tl.store(ring_header_ptr, tl.full([], 0, tl.int64), mask=row == 0)
    seat = tl.load(seats_ptr + row)
    query_len = tl.load(query_lens_ptr + row)
    limit = tl.load(limits_ptr + row)
    known = tl.load(known_lens_ptr + row)
    runs = (seat >= 0) & (query_len > 0)
    is_prompt = runs & (known >= 0)
    stands = tl.load(context_lens_ptr + seat, mask=runs, other=0)
    context = tl.where(is_prompt, known, stands)
    tl.store(context_lens_ptr + seat, known, mask=is_prompt)
    runs = runs & (is_prompt | (context < limit))
    in_batch = tl.where(query_stride > 0, query_stride, query_len)
    tl.store(out_seats_ptr + row, tl.where(runs, seat, -1))
    tl.store(out_seq_lens_ptr + row, tl.where(runs, context + in_batch, 0))
    start = tl.where(runs, context + tl.where(is_prompt, query_len, 1), 0)
    tl.store(out_start_positions_ptr + row, start.to(tl.int64))

    columns = tl.arange(0, BLOCK)
    drafts = tl.full([BLOCK], -1, tl.int64)
    if WITH_REPLY:
        intact = _intact(header_ptr, seq, epoch, num_reply_rows)
        place = tl.load(places_ptr + row)
        placed = runs & (known < 0) & (place >= 0) & (place < num_reply_rows)
        source = tl.minimum(tl.maximum(place, 0), max_reply_rows - 1).to(tl.int64)
        # Scalars go into bounds, not into masks: the interpreter makes integers of those.
        readable = columns < tl.where(placed, tl.minimum(width, REPLY_WIDTH), 0)
        found = tl.load(tokens_ptr + source * tokens_stride + columns, mask=readable, other=-1, volatile=True)
        legal = readable & (found >= 0) & (found < vocab_size) & (columns + 1 < query_len)
        legal = legal & (context + 1 + columns < limit)
        if WITH_PROBS:
            has_probs = tl.load(has_probs_ptr + source, mask=placed, other=0, volatile=True)
        tl.debug_barrier()  # what follows may not be read before what came before
        intact = intact & _intact(header_ptr, seq, epoch, num_reply_rows)
        # Drafts end at the first that is not legal.
        first_bad = tl.min(tl.where(legal, BLOCK, columns), axis=0)
        drafts = tl.where(columns < tl.where(intact, first_bad, 0), found, -1)
        if WITH_PROBS:
            tl.store(out_has_probs_ptr + row, placed & intact & (has_probs != 0))
        else:
            tl.store(out_has_probs_ptr + row, runs & False)
        if row == 0:
            tl.store(out_missed_ptr, tl.where(intact, 0, 1))
    else:
        tl.store(out_has_probs_ptr + row, runs & False)
        if row == 0:
            tl.store(out_missed_ptr, 0)
    tl.store(out_drafts_ptr + row.to(tl.int64) * width + columns, drafts, mask=columns < width)
    tl.store(out_num_drafts_ptr + row, tl.sum((drafts >= 0).to(tl.int32), axis=0))


def take_drafts(
    reply_header: torch.Tensor | None,
    reply_tokens: torch.Tensor | None,
    reply_has_probs: torch.Tensor | None,
    seq: int,
    epoch: int,
    num_reply_rows: int,
    vocab_size: int,
    query_stride: int,
    places: torch.Tensor,
    seats: torch.Tensor,
    query_lens: torch.Tensor,
    limits: torch.Tensor,
    known_lens: torch.Tensor,
    context_lens: torch.Tensor,
    ring_header: torch.Tensor | None,
    out_seats: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_drafts: torch.Tensor,
    out_num_drafts: torch.Tensor,
    out_start_positions: torch.Tensor,
    out_has_probs: torch.Tensor,
    out_missed: torch.Tensor,
    *,
    launcher: Launcher = launch,
) -> None:
    """See `reference.take_drafts.take_drafts`. Everything contiguous but reply_tokens, whose rows may be strided."""
    num_rows = seats.shape[0]
    if num_rows == 0:
        out_missed.zero_()
        if ring_header is not None:
            ring_header[:1].zero_()
        return
    with_reply = reply_header is not None and reply_tokens is not None
    width = out_drafts.shape[1]
    # Where there is nothing to read, another tensor stands in for the pointer.
    tokens = out_drafts if reply_tokens is None else reply_tokens
    arguments = (
        out_start_positions if reply_header is None else reply_header,
        tokens,
        out_has_probs if reply_has_probs is None else reply_has_probs,
        seq,
        epoch,
        num_reply_rows,
        vocab_size,
        query_stride,
        places,
        seats,
        query_lens,
        limits,
        known_lens,
        context_lens,
        out_start_positions if ring_header is None else ring_header,
        out_seats,
        out_seq_lens,
        out_drafts,
        out_num_drafts,
        out_start_positions,
        out_has_probs,
        out_missed,
        tokens.shape[0],
        tokens.stride(0) if with_reply else 0,
        width,
    )
    options = {
        "REPLY_WIDTH": tokens.shape[1] if with_reply else 0,
        "WITH_REPLY": with_reply,
        "WITH_PROBS": with_reply and reply_has_probs is not None,
        "WITH_RING": ring_header is not None,
        "BLOCK": max(1, triton.next_power_of_2(width)),
        "num_warps": 1,
    }
    launcher(Launch(_take, (num_rows,), arguments, options, ("query_stride", "seq", "num_reply_rows")))


def prepare_take_drafts(*arguments: Any) -> Form | None:
    """`take_drafts`, and its later launches: see `forms.Preparations`."""
    form = prepare(take_drafts, arguments)
    if form is None:
        return None
    return lambda num_rows, query_stride, seq, num_reply_rows: form((num_rows, 1), query_stride, seq, num_reply_rows)

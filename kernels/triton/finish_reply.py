"""How does a step of the drafter end on the device? See `reference.finish_reply`. One launch, one program per row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.forms import Form
from kernels.reference import take_entry as names
from kernels.reference.take_entry import RECORD_FIELDS, TakenRows
from kernels.triton.prepared import Launch, Launcher, launch, prepare

_RAN, _ABSENT = tl.constexpr(names.RAN), tl.constexpr(names.ABSENT)
_FIRST_POSITION = tl.constexpr(names.FIRST_POSITION)
_HEADER_EPOCH, _HEADER_ROWS = tl.constexpr(names.HEADER_EPOCH), tl.constexpr(names.HEADER_ROWS)
_HEADER_TOKENS = tl.constexpr(names.HEADER_TOKENS)


@triton.jit(
    do_not_specialize=[
        *("entry_header_ptr", "reply_header_ptr", "reply_tokens_ptr", "has_probs_ptr"),
        *("seq", "epoch", "num_rows", "num_seats", "draft_stride", "draft_column_stride"),
    ]
)
def _finish(
    entry_header_ptr,
    drafts_ptr,
    seats_ptr,
    num_drafts_ptr,
    anchor_positions_ptr,
    temperatures_ptr,
    records_ptr,
    state_ptr,
    reply_header_ptr,
    reply_tokens_ptr,
    has_probs_ptr,
    seq,
    epoch,
    num_rows,
    num_seats,
    draft_stride,
    draft_column_stride,
    draft_width: tl.constexpr,
    reply_width: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row == num_rows:
        tl.store(reply_header_ptr, tl.zeros([], tl.int64) + seq)
        tl.store(reply_header_ptr + _HEADER_EPOCH, tl.zeros([], tl.int64) + epoch)
        tl.store(reply_header_ptr + _HEADER_ROWS, tl.zeros([], tl.int64) + num_rows)
        tl.store(reply_header_ptr + _HEADER_TOKENS, tl.zeros([], tl.int64))
        return
    intact = (tl.load(entry_header_ptr, volatile=True) == seq) & (
        tl.load(entry_header_ptr + _HEADER_EPOCH, volatile=True) == epoch
    )
    count = tl.where(intact, tl.load(num_drafts_ptr + row), 0)
    columns = tl.arange(0, BLOCK)
    wanted = (columns < draft_width) & (columns < count)
    drafts = tl.load(
        drafts_ptr + row.to(tl.int64) * draft_stride + columns * draft_column_stride, mask=wanted, other=-1
    )
    tl.store(reply_tokens_ptr + row * reply_width + columns, drafts, mask=columns < reply_width)
    if HAS_PROBS:
        drawn = (count > 0) & (tl.load(temperatures_ptr + row) > 0)
        tl.store(has_probs_ptr + row, drawn)
    seat = tl.load(seats_ptr + row)
    counted = intact & (seat >= 0)
    committed = tl.load(anchor_positions_ptr + row)
    start = tl.load(records_ptr + row * RECORD + _FIRST_POSITION)
    tl.store(state_ptr + seat, start.to(tl.int32), mask=counted)
    tl.store(state_ptr + num_seats + seat, committed.to(tl.int32), mask=counted)
    status = tl.load(records_ptr + row * RECORD)
    tl.store(records_ptr + row * RECORD, tl.where((status == _RAN) & (intact == 0), _ABSENT, status))


def finish_reply(
    entry_header: torch.Tensor,
    seq: int,
    epoch: int,
    num_rows: int,
    drafts: torch.Tensor,
    taken: TakenRows,
    seat_state: torch.Tensor,
    reply_header: torch.Tensor,
    reply_tokens: torch.Tensor,
    reply_has_probs: torch.Tensor | None,
    *,
    launcher: Launcher = launch,
) -> None:
    """See `reference.finish_reply.finish_reply`. drafts may be strided; the rest is contiguous."""
    arguments = (
        entry_header,
        drafts,
        taken.seats,
        taken.num_drafts,
        taken.anchor_positions,
        taken.temperatures,
        taken.records,
        seat_state,
        reply_header,
        reply_tokens,
        reply_tokens if reply_has_probs is None else reply_has_probs,
        seq,
        epoch,
        num_rows,
        seat_state.shape[1],
        drafts.stride(0),
        drafts.stride(1),
    )
    options = {
        "draft_width": drafts.shape[1],
        "reply_width": reply_tokens.shape[1],
        "HAS_PROBS": reply_has_probs is not None,
        "RECORD": RECORD_FIELDS,
        "BLOCK": triton.next_power_of_2(max(drafts.shape[1], reply_tokens.shape[1])),
        "num_warps": 1,
    }
    launcher(Launch(_finish, (num_rows + 1,), arguments, options, ("num_rows", "seq")))


def prepare_finish_reply(*arguments: Any) -> Form | None:
    """`finish_reply`, and its later launches: see `forms.Preparations`."""
    form = prepare(finish_reply, arguments)
    if form is None:
        return None
    return lambda num_rows, seq: form((num_rows + 1, 1), num_rows, seq)

"""How does a step of the drafter end on the device: what is proposed, and what does each seat hold now?

The last kernel before the reply is published. Only if the ring entry is still the one that was read does anything
count: then the drafts go out and the seats move on. Otherwise nothing is proposed, and as the seats stay where they
were, the next entry shows that tokens are missing.
"""

from __future__ import annotations

import torch

from kernels.reference.take_entry import (
    ABSENT,
    FIRST_POSITION,
    HEADER_EPOCH,
    HEADER_ROWS,
    HEADER_SEQ,
    HEADER_TOKENS,
    RAN,
    STATUS,
    TakenRows,
)


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
) -> None:
    """Write the reply to step `seq` and its tag, move the seats on, complete the records.

    entry_header, reply_header: [8] int64. num_rows: of the plan. drafts: [>= num_rows, D] int64, of which a row's first
    num_drafts count. seat_state: as in `take_entry`. reply_tokens: [M, K] int64, of which the first num_rows rows are
    written, -1 behind a row's drafts. reply_has_probs: [M] bool or None: whether a row's drafts were drawn.
    """
    intact = (entry_header[HEADER_SEQ] == seq) & (entry_header[HEADER_EPOCH] == epoch)
    width = reply_tokens.shape[1]
    reply_tokens[:num_rows] = -1
    copied = min(width, drafts.shape[1])
    counts = torch.where(intact, taken.num_drafts[:num_rows], 0)
    wanted = torch.arange(copied, device=drafts.device) < counts[:, None]
    reply_tokens[:num_rows, :copied] = torch.where(wanted, drafts[:num_rows, :copied], -1)
    if reply_has_probs is not None:
        reply_has_probs[:num_rows] = (counts > 0) & (taken.temperatures[:num_rows] > 0)
    reply_header[HEADER_SEQ] = seq
    reply_header[HEADER_EPOCH] = epoch
    reply_header[HEADER_ROWS] = num_rows
    reply_header[HEADER_TOKENS] = 0

    seats = taken.seats[:num_rows].to(torch.int64)
    counted = intact & (seats >= 0)
    last = seat_state.shape[1]
    padded = torch.cat((seat_state, torch.zeros_like(seat_state[:, :1])), dim=1)
    where = torch.where(counted, seats, last)
    committed = taken.anchor_positions[:num_rows]
    starts = taken.records[:num_rows, FIRST_POSITION]
    padded[0].scatter_(0, where, starts.to(padded.dtype))
    padded[1].scatter_(0, where, committed.to(padded.dtype))
    seat_state.copy_(padded[:, :last])
    status = taken.records[:num_rows, STATUS]
    taken.records[:num_rows, STATUS] = torch.where((status == RAN) & ~intact, ABSENT, status)

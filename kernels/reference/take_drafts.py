"""Which rows of a step run, how far along are they, and which drafts do they verify, when the host does not know?

The target's first kernel of a step that was launched ahead of the verdicts: the host gave each row upper bounds, the
truth is `context_lens` by seat. The drafts come from the drafter's reply entry, which is outside input: its tag says
whether it is the reply meant, and no number in it is used before it was checked.
"""

from __future__ import annotations

import torch


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
) -> None:
    """Decide each of R rows, and take its drafts.

    A row without a seat or without tokens does not run. A prompt row (known_lens[row] >= 0) runs at that context
    length, which becomes its seat's. A decode row stands at its seat's context length and runs while that is below its
    limit: no query token at or past the limit counts, so a draft there is absent, and an anchor there means that the
    request has all the tokens it may have. A row that does not run comes out with seat -1, seq_len 0, no drafts.

    reply_header [8] int64, reply_tokens [max_rows, D] int64, reply_has_probs [max_rows] bool or None: the entry of step
    `seq`; all None where no drafts are wanted. A header other than (seq, epoch, num_reply_rows), before or after the
    tokens were read, makes every draft absent. A row's drafts end at the first that is outside the vocabulary.
    query_stride: tokens of each row in the batch where all rows have as many, else 0: query_lens.
    places, seats, query_lens, limits, known_lens: [R] int32: row in the reply (-1: none), seat (-1: none), tokens of
    the plan, see above. context_lens: [S] int32 by seat, written for prompt rows.
    ring_header: [8] int64 of the ring entry that this step is going to overwrite, or None: its seq becomes 0, nobody
    may read the entry any more.
    Outputs, every element written: out_seats, out_seq_lens, out_num_drafts [R] int32; out_drafts [R, K] int64, -1
    absent; out_start_positions [R] int64, absolute position of the token that the row's first logits decide;
    out_has_probs [R] bool, whether the row's drafts come with probabilities; out_missed [1] int32, 1 where a reply was
    wanted and was not there.
    """
    device = seats.device
    if ring_header is not None:
        ring_header[0] = 0
    runs = (seats >= 0) & (query_lens > 0)
    is_prompt = runs & (known_lens >= 0)
    index = seats.clamp(min=0).to(torch.int64)
    stands = context_lens[index]
    # Differences are added: a row that changes nothing shares seat 0 with whoever sits there, without harm.
    context_lens.index_add_(0, index, torch.where(is_prompt, known_lens - stands, 0))
    context = torch.where(is_prompt, known_lens, stands)
    runs = runs & (is_prompt | (context < limits))
    tokens_in_batch = torch.full_like(query_lens, query_stride) if query_stride else query_lens
    out_seats.copy_(torch.where(runs, seats, -1))
    out_seq_lens.copy_(torch.where(runs, context + tokens_in_batch, 0))
    out_start_positions.copy_(torch.where(runs, context + torch.where(is_prompt, query_lens, 1), 0))

    out_drafts.fill_(-1)
    out_has_probs.fill_(False)
    out_missed.zero_()
    width = out_drafts.shape[1]
    if reply_header is not None and reply_tokens is not None:
        tag = torch.tensor([seq, epoch, num_reply_rows], dtype=torch.int64, device=device)
        intact = (reply_header[:3] == tag).all()
        placed = runs & ~is_prompt & (places >= 0) & (places < num_reply_rows)
        rows = places.clamp(0, reply_tokens.shape[0] - 1).to(torch.int64)
        columns = torch.arange(min(width, reply_tokens.shape[1]), device=device)
        found = reply_tokens[rows, : columns.shape[0]]
        legal = (found >= 0) & (found < vocab_size) & (columns + 1 < query_lens[:, None])
        legal &= (context[:, None] + 1 + columns < limits[:, None]) & placed[:, None]
        intact = intact & (reply_header[:3] == tag).all()
        kept = legal.to(torch.int32).cumprod(dim=1).to(torch.bool) & intact
        out_drafts[:, : columns.shape[0]] = torch.where(kept, found, -1)
        if reply_has_probs is not None:
            out_has_probs.copy_(reply_has_probs[rows] & placed & intact)
        out_missed.copy_(torch.where(intact, 0, 1))
    out_num_drafts.copy_((out_drafts >= 0).sum(dim=1))

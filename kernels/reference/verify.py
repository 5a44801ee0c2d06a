"""Which drafts does the target accept, and which token of its own does it add?

The exact accept rule (Leviathan et al. 2023; Chen et al. 2023). A row's logits are those of [anchor, d1 .. dn]; logit
row j decides the token at absolute position start_position + j. Three cases:

    greedy      temperature 0: accept while the draft is the argmax; then the argmax.
    match       seeded rows, and drafts chosen without a distribution (one-hot): draw the target's own token x, keyed by
                (seed, position) alone; accept iff the draft is x. That is accepting with probability target(d), and
                on rejection sampling target without d. The output does not depend on the drafts at all.
    rejection   accept with probability min(1, target(d) / draft(d)); on rejection sample the normalised positive
                part of target - draft. Acceptance, replacement and bonus draw from distinct noise streams.

A draft of -1 is never accepted and ends the row's drafts: the token there is the target's own. After n accepted
drafts the last logit row gives one more token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.reference.philox import ACCEPT, RESIDUAL, TARGET, uniform
from kernels.reference.sampling import gumbel_noise, gumbel_sample, scale_logits


@dataclass(frozen=True, slots=True)
class Verdict:
    """tokens: [S, K + 1] int64, accepted drafts then the target's own token, then -1. num_sampled: [S] int32, tokens
    in each row (0 for a row without logits). num_accepted: [S] int32, drafts accepted: num_sampled - 1 where the row
    sampled.
    """

    tokens: torch.Tensor
    num_sampled: torch.Tensor
    num_accepted: torch.Tensor


def verify_greedy(logits: torch.Tensor, cu_logits: torch.Tensor, draft_tokens: torch.Tensor) -> Verdict:
    """`verify` where every row is greedy. logits: [N, V]; cu_logits: [S + 1] int32; draft_tokens: [S, K] int64, -1
    absent.
    """
    num_rows, width = draft_tokens.shape
    best = logits.argmax(dim=1)
    lens = (cu_logits[1:] - cu_logits[:-1]).to(torch.int64)
    columns = torch.arange(width + 1, device=draft_tokens.device)
    if best.shape[0] == 0:
        table = torch.full((num_rows, width + 1), -1, dtype=torch.int64, device=draft_tokens.device)
    else:
        table = best[(cu_logits[:-1, None].to(torch.int64) + columns).clamp(max=best.shape[0] - 1)]
    # Draft j (column j) needs logit row j, and the token after it needs row j + 1.
    agrees = (draft_tokens == table[:, :width]) & (draft_tokens >= 0) & (columns[:width] + 1 < lens[:, None])
    num_accepted = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)
    num_sampled = torch.where(lens > 0, num_accepted + 1, 0)
    tokens = torch.where(columns < num_sampled[:, None], table, -1)
    return Verdict(tokens, num_sampled.to(torch.int32), num_accepted.to(torch.int32))


def verify(
    logits: torch.Tensor,
    cu_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    start_positions: torch.Tensor,
    match_only: torch.Tensor,
    draft_probs: torch.Tensor | None,
    has_probs: torch.Tensor | None,
) -> Verdict:
    """Apply the accept rule to S rows.

    logits: [N, V] float32, processed (penalties, bias, filters) and unscaled; cu_logits: [S + 1] int32, first logit
    row of each row; a row of L logits verifies at most L - 1 drafts, a row of 0 samples nothing. draft_tokens: [S, K]
    int64, -1 absent. temperatures: [S] float32, 0: greedy. seeds: [S] int64. start_positions: [S] int64, absolute
    position of the token that the row's first logits decide (context_len + 1 for a decode row, the prompt's length
    for the last chunk). match_only: [S] bool. draft_probs: [S, K, V] float32, the distribution each draft was drawn
    from, or None; has_probs: [S] bool, whose rows are to be read (None: all, where draft_probs is given).
    """
    num_rows, width = draft_tokens.shape
    device = draft_tokens.device
    first = cu_logits[:-1].to(torch.int64)
    lens = (cu_logits[1:] - cu_logits[:-1]).to(torch.int64)
    tokens = torch.full((num_rows, width + 1), -1, dtype=torch.int64, device=device)
    num_accepted = torch.zeros(num_rows, dtype=torch.int32, device=device)
    by_rejection = torch.zeros(num_rows, dtype=torch.bool, device=device)
    if draft_probs is not None:
        by_rejection = (temperatures > 0) & ~match_only
        if has_probs is not None:
            by_rejection = by_rejection & has_probs

    alive = torch.nonzero(lens > 0).squeeze(1)
    for column in range(width + 1):
        if alive.shape[0] == 0:
            break
        row_logits = logits[first[alive] + column]
        positions = start_positions[alive] + column
        drafts = torch.full_like(alive, -1)
        if column < width:
            drafts = torch.where(column + 1 < lens[alive], draft_tokens[alive, column], -1)
        rejecting = by_rejection[alive] & (drafts >= 0)

        chosen = torch.empty_like(alive)
        accepted = torch.zeros_like(rejecting)
        own = torch.nonzero(~rejecting).squeeze(1)
        if own.shape[0]:
            rows = alive[own]
            drawn = gumbel_sample(row_logits[own], temperatures[rows], seeds[rows], positions[own], TARGET)
            chosen[own] = drawn
            accepted[own] = drawn == drafts[own]
        weighed = torch.nonzero(rejecting).squeeze(1)
        if weighed.shape[0] and draft_probs is not None:
            rows = alive[weighed]
            target = torch.softmax(scale_logits(row_logits[weighed], temperatures[rows]), dim=1)
            chosen[weighed], accepted[weighed] = _weigh(
                target, draft_probs[rows, column], drafts[weighed], seeds[rows], positions[weighed]
            )
        tokens[alive, column] = chosen
        num_accepted[alive] += accepted.to(torch.int32)
        alive = alive[accepted]
    num_sampled = torch.where(lens > 0, num_accepted + 1, 0).to(torch.int32)
    return Verdict(tokens, num_sampled, num_accepted)


def _weigh(
    target: torch.Tensor, draft: torch.Tensor, drafts: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rejection case for M rows. target, draft: [M, V]; drafts: [M]. Returns (token [M] int64, accepted [M]
    bool).
    """
    target_prob = target.gather(1, drafts[:, None])[:, 0]
    draft_prob = draft.gather(1, drafts[:, None])[:, 0]
    noise = uniform(seeds, positions, ACCEPT, 1)[:, 0]
    # noise < target / draft without the division: a draft of probability 0 is accepted only where the target wants it.
    accepted = noise * draft_prob < target_prob
    chosen = drafts.clone()
    refused = torch.nonzero(~accepted).squeeze(1)
    if refused.shape[0]:
        residual = (target[refused] - draft[refused]).clamp_(min=0)
        # Rounding can leave nothing when the two distributions are equal: the target itself is then the right one.
        empty = residual.sum(dim=1, keepdim=True) <= 0
        residual = torch.where(empty, target[refused], residual)
        scores = residual.log_().add_(gumbel_noise(seeds[refused], positions[refused], RESIDUAL, target.shape[1]))
        chosen[refused] = scores.argmax(dim=1)
    return chosen, accepted
